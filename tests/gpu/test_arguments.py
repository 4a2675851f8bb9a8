"""Arguments at the ends of their ranges: exact results, or a clear error from the compiled op."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from oracle import full_lengths, run, state, wrong_rows
from torch import Tensor

import gvr_topk
from gvr_topk.contract import DTYPES, MAX_ROWS, MAX_WIDTH
from gvr_topk.gate import plan
from gvr_topk.ops import to_slots

PATHS = ("cluster", "radix", "gvr")
INT_MIN = -(2**31)
# One of each kernel family on a whole H200: single, resident with two widths of registers, stream.
WIDTHS = (5000, 20_001, 131_072, 262_144, 300_001)


def normal(rows: int, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator(device="cuda").manual_seed(width)
    return torch.randn(rows, width, device="cuda", generator=generator).to(dtype)


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


# ---------------------------------------------------------------- k and lengths


@pytest.mark.parametrize("path", ["cluster", "radix"])
@pytest.mark.parametrize("width", [1, 511, 5000, 20_001, 40_000, 300_001])
def test_the_largest_k_at_narrow_widths(width: int, path: str) -> None:
    logits = normal(2, width)
    lengths = int32(width, width // 2)
    prior = torch.full((2, MAX_WIDTH), -1, dtype=torch.int32, device="cuda")
    got = run(logits, lengths, MAX_WIDTH, path=path, prior=prior)
    assert wrong_rows(got, logits, lengths, MAX_WIDTH) == []
    assert torch.equal(prior, got)


@pytest.mark.parametrize("k", [4999, 5000, 5001, 16_000, 40_000])
def test_k_around_the_width(k: int) -> None:
    logits = normal(3, 5000)
    lengths = full_lengths(logits)
    assert wrong_rows(run(logits, lengths, k), logits, lengths, k) == []


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("next_n", [1, 2, 3])
@pytest.mark.parametrize("width", [5000, 20_001, 131_072])
def test_the_smallest_length_selects_nothing(width: int, next_n: int, path: str) -> None:
    logits = normal(2 * next_n, width)
    for lengths in (int32(INT_MIN, INT_MIN + 1), int32(INT_MIN, width), int32(-1, 0)):
        prior = torch.zeros(2, 2048, dtype=torch.int32, device="cuda")
        guess = state(2)
        got = run(logits, lengths, 2048, next_n=next_n, path=path, prior=prior, guess_state=guess)
        assert wrong_rows(got, logits, lengths, 2048, next_n) == []
        assert bool((got[:next_n] == -1).all())


@pytest.mark.parametrize("path", PATHS)
def test_rows_of_scores_may_overlap(path: str) -> None:
    row = normal(1, 20_001)
    for logits in (row.expand(5, -1), row[0].as_strided((5, 19_000), (1, 1))):
        lengths = full_lengths(logits)
        got = run(logits, lengths, 2048, path=path)
        assert wrong_rows(got, logits, lengths, 2048) == []


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
    if path == "gvr" and width > 262_144:
        pytest.skip("the four-phase kernel has no such width")
    make, page_size = TABLES[name]
    table = make(-(-width // page_size)).to(torch.int32).to("cuda")
    logits, k = normal(4, width), 1024
    lengths = int32(width, 700)
    prior = torch.full((2, k), -1, dtype=torch.int32, device="cuda")
    got = run(logits, lengths, k, next_n=2, path=path, page_table=table, page_size=page_size, prior=prior)
    positions = run(logits, lengths, k, next_n=2, path=path)
    assert wrong_rows(positions, logits, lengths, k, 2) == []
    assert torch.equal(got.cpu(), to_slots(positions.cpu(), table.cpu(), page_size, 2))
    assert torch.equal(prior, positions[1::2])  # the hint keeps positions


# ---------------------------------------------------------------- cap of the cluster size


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [*WIDTHS, 1 << 20, MAX_WIDTH])
@pytest.mark.parametrize("cap", [1, 2, 4, 8, 16])
def test_a_cap_changes_no_result(cap: int, width: int, dtype: torch.dtype) -> None:
    rows = 1 if width > 300_001 else 3
    logits = normal(rows, width, dtype)
    lengths = full_lengths(logits)
    prior = torch.full((rows, 2048), -1, dtype=torch.int32, device="cuda")
    guess = state(rows)
    for _ in range(2):  # without a hint and with one
        got = run(logits, lengths, 2048, max_ctas=cap, prior=prior, guess_state=guess)
        assert wrong_rows(got, logits, lengths, 2048) == []
    got = run(logits, lengths, 3000, max_ctas=cap, path="radix")
    assert wrong_rows(got, logits, lengths, 3000) == []


# ---------------------------------------------------------------- errors


def arguments(**changes: Any) -> dict[str, Any]:
    """Arguments of one valid call of the compiled op, some of them replaced."""
    return {
        "logits": torch.zeros(2, 64, device="cuda"),
        "seq_lens": int32(64, 64),
        "indices": torch.zeros(2, 8, dtype=torch.int32, device="cuda"),
        "prior": None,
        "row_slot": None,
        "guess_state": None,
        "stats": None,
        "page_table": None,
        "phase_clocks": None,
        "k": 8,
        **changes,
    }


def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.zeros(*shape, dtype=dtype, device="cuda")


WRONG: list[tuple[Any, str]] = [
    (lambda: {"indices": zeros(1, 8).expand(2, 8)}, "out: want rows that do not overlap.*got 0"),
    (lambda: {"indices": zeros(16).as_strided((2, 8), (7, 1))}, "out: want rows that do not overlap.*got 7"),
    (lambda: {"prior": zeros(1, 8).expand(2, 8)}, "prior: want rows that do not overlap.*got 0"),
    (lambda: {"prior": zeros(16).as_strided((2, 8), (7, 1))}, "prior: want rows that do not overlap.*got 7"),
    (lambda: {"stats": zeros(1, 8).expand(2, 8)}, "stats: want contiguous rows, got stride 0"),
    (
        lambda: {"phase_clocks": zeros(1, 8, dtype=torch.int64).expand(2, 8)},
        "phase_clocks: want contiguous rows, got stride 0",
    ),
    (lambda: {"row_slot": zeros(2)}, "row_slot: want a prior or a guess_state beside it, got None"),
    (lambda: {"guess_state": state(1)}, "guess_state: want at least 2 slots without row_slot, got 1"),
    (lambda: {"guess_state": state(3), "prior": zeros(2, 8)}, "guess_state: want 2 rows"),
    (lambda: {"guess_state": zeros(2, 3, dtype=torch.float32)}, "guess_state: want 4 columns"),
    (lambda: {"guess_state": zeros(2, dtype=torch.float32)}, "guess_state: want"),
    (lambda: {"guess_state": zeros(2, 4)}, "guess_state: want"),
    (
        lambda: {"guess_state": zeros(2, 8, dtype=torch.float32)[:, :4]},
        "guess_state: want contiguous rows, got stride 8",
    ),
    (
        lambda: {"guess_state": zeros(9, dtype=torch.float32)[1:].view(2, 4)},
        "guess_state: want an address that is a multiple of 16",
    ),
    (lambda: {"page_table": zeros(2, 4), "page_size": 0}, "page_size: want at least 1"),
    (lambda: {"page_table": zeros(2, 4), "page_size": 2**31}, "page_size: want at most 2147483647"),
    (lambda: {"max_ctas": 3}, "max_ctas: want 0, 1, 2, 4, 8 or 16, got 3"),
    (lambda: {"max_ctas": -1}, "max_ctas: want 0, 1, 2, 4, 8 or 16, got -1"),
    (lambda: {"max_ctas": 2**32 + 1}, "max_ctas: want 0, 1, 2, 4, 8 or 16"),
    (lambda: {"max_ctas": 4, "ctas_per_row": 8}, "ctas_per_row: want at most max_ctas = 4, got 8"),
    (
        lambda: {"logits": torch.zeros(1, 1, device="cuda").expand(MAX_ROWS + 1, 1)},
        f"logits: want at most {MAX_ROWS} rows",
    ),
]


@pytest.mark.parametrize(("change", "message"), WRONG, ids=[message[:45] for _, message in WRONG])
def test_the_compiled_op_refuses(change: Any, message: str) -> None:
    with pytest.raises(RuntimeError, match=rf"gvr_topk\.indexer_topk_decode: {message}"):
        torch.ops.gvr_topk.indexer_topk_decode(**arguments(**change()))
    torch.cuda.synchronize()  # the context is still good


def test_one_row_has_no_stride() -> None:
    stats, out = zeros(1, 16)[:, :8], zeros(1, 8).as_strided((1, 8), (0, 1))
    logits, lengths = normal(1, 64), int32(64)
    torch.ops.gvr_topk.indexer_topk_decode(
        **arguments(logits=logits, seq_lens=lengths, indices=out, stats=stats)
    )
    assert wrong_rows(out, logits, lengths, 8) == []


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
    outs = torch.full((4, rows, 2048), -7, dtype=torch.int32, device="cuda")
    prior = torch.full((rows, 2048), -1, dtype=torch.int32, device="cuda")
    guess = state(rows)
    with inside(green_context(sms)):
        before = current_context()
        for out, count in zip(outs, (rows, rows, 1, 1), strict=True):
            gvr_topk.indexer_topk_decode(
                logits[:count], lengths[:count], 2048, out=out[:count], prior=prior, guess_state=guess
            )
            assert current_context() == before  # a call leaves its caller where it was
    for out, count in zip(outs, (rows, rows, 1, 1), strict=True):
        assert wrong_rows(out[:count], logits[:count], lengths[:count], 2048) == []
        assert bool((out[count:] == -7).all())


@pytest.mark.parametrize("width", [20_001, 131_072])
def test_captured_on_a_stream_of_a_green_context(width: int) -> None:
    context = green_context(16)
    if not hasattr(context, "Stream"):
        pytest.skip("green contexts of this torch give no stream")
    logits = normal(1, width)
    lengths = full_lengths(logits)
    out = torch.full((1, 2048), -7, dtype=torch.int32, device="cuda")
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
        with pytest.raises(RuntimeError, match=r"ctas_per_row: want a cluster size that the 8 SMs"):
            gvr_topk.indexer_topk_decode(logits, lengths, 2048, out=out, ctas_per_row=16)
        gvr_topk.indexer_topk_decode(logits, lengths, 2048, out=out)
    assert wrong_rows(out, logits, lengths, 2048) == []
