"""Arguments at the ends of their ranges, in captures and in green contexts: exact results."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from contents import int32, normal
from launches import skip_unserved
from oracle import (
    ANY_K,
    PATHS,
    POISON,
    call,
    exact,
    full_lengths,
    new_state,
    poisoned,
    run,
    wrong_rows,
)

import gvr_topk
from gvr_topk.constants import MAX_WIDTH
from gvr_topk.cpu import to_slots
from gvr_topk.ops import launch
from gvr_topk.policy import plan

INT_MIN = -(2**31)
# One of each kernel family on a whole H200: small rows, resident with two widths of registers, streaming.
WIDTHS = (5000, 20_001, 131_072, 262_144, 300_001)


# ---------------------------------------------------------------- k and lengths


@pytest.mark.parametrize("path", ANY_K)
@pytest.mark.parametrize("width", [1, 511, 5000, 20_001, 40_000, 300_001])
def test_the_largest_k_at_narrow_widths(width: int, path: str) -> None:
    logits = normal(2, width)
    lengths = int32(width, width // 2)
    state = new_state(2, MAX_WIDTH, keep_indices=True)
    got = exact(logits, lengths, MAX_WIDTH, path=path, state=state)
    assert torch.equal(state.indices, got)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("next_n", [1, 2, 3])
@pytest.mark.parametrize("width", [5000, 20_001, 131_072])
def test_the_smallest_length_selects_nothing(width: int, next_n: int, path: str) -> None:
    logits = normal(2 * next_n, width)
    for lengths in (int32(INT_MIN, INT_MIN + 1), int32(INT_MIN, width), int32(-1, 0)):
        state = new_state(2, 2048, keep_indices=True)
        got = exact(logits, lengths, 2048, next_n=next_n, path=path, state=state)
        assert bool((got[:next_n] == -1).all())


@pytest.mark.parametrize("path", PATHS)
def test_rows_of_scores_may_overlap(path: str) -> None:
    row = normal(1, 20_001)
    for logits in (row.expand(5, -1), row[0].as_strided((5, 19_000), (1, 1))):
        lengths = full_lengths(logits)
        exact(logits, lengths, 2048, path=path)


# ---------------------------------------------------------------- page tables

TABLES = {
    "no columns": (lambda pages: torch.zeros(2, 0), 64),
    "negative pages": (lambda pages: torch.arange(2 * pages).reshape(2, pages) % 3 - 1, 64),
    "smallest page": (lambda pages: torch.full((2, pages), INT_MIN), 64),
    "around the last slot": (lambda pages: 2**25 - 2 + torch.arange(2 * pages).reshape(2, pages) % 4, 64),
    "beyond 32 bits": (lambda pages: torch.full((2, pages), 2**31 - 1), 64),
    "wraps to zero": (lambda pages: torch.full((2, pages), 2**16), 2**16),
    "largest page": (lambda pages: torch.arange(2).reshape(2, 1), 2**31 - 1),
    "too few pages": (lambda pages: torch.arange(6).reshape(2, 3), 64),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("width", [900, 5000, 20_001, 300_001])
@pytest.mark.parametrize("name", TABLES)
def test_page_tables_at_their_limits(name: str, width: int, path: str) -> None:
    skip_unserved(path, width)
    make, page_size = TABLES[name]
    table = make(-(-width // page_size)).to(torch.int32).to("cuda")
    logits, k = normal(4, width), 1024
    lengths = int32(width, 700)
    state = new_state(2, k, keep_indices=True)
    slots = poisoned(4, k + 1)
    asked = {"next_n": 2, "path": path, "page_table": table, "page_size": page_size}
    positions = exact(logits, lengths, k, next_n=2, path=path)
    wanted = to_slots(positions, table, page_size, 2)
    assert torch.equal(run(logits, lengths, k, state=state, **asked), wanted)
    assert torch.equal(state.indices, positions[1::2])  # the state keeps positions
    beside = run(logits, lengths, k, slots=slots, **asked)
    assert torch.equal(beside, positions)
    assert torch.equal(slots[:, :k], wanted) and bool((slots[:, k] == POISON).all())


# ---------------------------------------------------------------- capture and green contexts

FIRST_CALL = """
import torch, gvr_topk
from gvr_topk.contract import exact_topk
logits = torch.randn(1, 131_072, device="cuda")
lengths = torch.full((1,), 131_072, dtype=torch.int32, device="cuda")
out = torch.zeros(1, 2048, dtype=torch.int32, device="cuda")
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    gvr_topk.indexer_topk_decode(logits, lengths, 2048, out=out)
graph.replay()
assert torch.equal(out, exact_topk(logits, lengths, 2048))
"""


def test_the_first_call_of_a_process_can_be_captured() -> None:
    """What a process asks the driver once, it may ask while a stream is captured."""
    result = subprocess.run(
        [sys.executable, "-c", FIRST_CALL], capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr


def current_context() -> int | None:
    context = ctypes.c_void_p()
    assert ctypes.CDLL("libcuda.so.1").cuCtxGetCurrent(ctypes.byref(context)) == 0
    return context.value


def green_context(sms: int) -> Any:
    green = pytest.importorskip("torch.cuda.green_contexts")
    if not green.SUPPORTED:
        pytest.skip("this torch has no green contexts")
    if sms >= torch.cuda.get_device_properties(0).multi_processor_count:
        pytest.skip(f"the GPU has no more than {sms} SMs")
    return green.GreenContext.create(num_sms=sms, device_id=0)


@contextmanager
def inside(context: Any) -> Iterator[None]:
    """Make a green context current, as a serving process does for one of its kinds of work."""
    torch.cuda.synchronize()
    context.set_context()
    try:
        yield
        torch.cuda.synchronize()
    finally:
        context.pop_context()


@pytest.mark.parametrize("width", [*WIDTHS, 1 << 20])
@pytest.mark.parametrize("sms", [8, 16, 32, 66])
def test_exact_in_green_contexts(sms: int, width: int) -> None:
    rows = 3
    logits = normal(rows, width)
    lengths = full_lengths(logits)
    outs = poisoned(4, rows, 2048)
    state = new_state(rows, 2048)
    with inside(green_context(sms)):
        before = current_context()
        for out, count in zip(outs, (rows, rows, 1, 1), strict=True):
            gvr_topk.indexer_topk_decode(logits[:count], lengths[:count], 2048, out=out[:count], state=state)
            assert current_context() == before  # a call leaves its caller where it was
    for out, count in zip(outs, (rows, rows, 1, 1), strict=True):
        assert wrong_rows(out[:count], logits[:count], lengths[:count], 2048) == []
        assert bool((out[count:] == POISON).all())


@pytest.mark.parametrize("width", [20_001, 131_072])
def test_captured_on_a_stream_of_a_green_context(width: int) -> None:
    context = green_context(16)
    if not hasattr(context, "Stream"):
        pytest.skip("green contexts of this torch give no stream")
    logits = normal(1, width)
    lengths = full_lengths(logits)
    out = poisoned(1, 2048)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=context.Stream()):
        gvr_topk.indexer_topk_decode(logits, lengths, 2048, out=out)
    graph.replay()
    torch.cuda.synchronize()
    assert wrong_rows(out, logits, lengths, 2048) == []


def test_a_forced_size_without_room_is_refused() -> None:
    assert plan(rows=1, width=131_072, k=2048, ctas_per_row=16).ctas_per_row == 16
    logits = normal(1, 131_072)
    lengths = full_lengths(logits)
    out = torch.empty(1, 2048, dtype=torch.int32, device="cuda")
    with inside(green_context(8)):
        refused = "ctas_per_row: wanted a cluster size that the 8 SMs of the stream's context can run, got 16"
        with pytest.raises(ValueError, match=refused):
            launch(call(logits, lengths, out, ctas_per_row=16))
        gvr_topk.indexer_topk_decode(logits, lengths, 2048, out=out)
    assert wrong_rows(out, logits, lengths, 2048) == []
