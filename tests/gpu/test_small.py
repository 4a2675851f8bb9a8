"""Small calls that use every argument: quick enough to run under compute-sanitizer too."""

from __future__ import annotations

import pytest
import torch
from oracle import PATHS, full_lengths, new_state, place, run, run_forced, words, wrong_rows

import gvr_topk
from gvr_topk.constants import STATE_UNKNOWN, STATE_VALUE_ONLY, StatsColumn
from gvr_topk.contract import DTYPES
from gvr_topk.policy import plan
from gvr_topk.state import TopkState

pytestmark = pytest.mark.sanitizer


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [5, 513, 4096, 4099])
@pytest.mark.parametrize("shift", [0, 1])
def test_rows_on_and_off_alignment(path: str, dtype: torch.dtype, n: int, shift: int) -> None:
    rows = torch.randint(-40, 40, (3, n), generator=torch.Generator().manual_seed(n)).to(dtype)
    logits = place(rows, pad=3 * shift, shift=shift)
    got = run(logits, full_lengths(logits), 512, path=path)
    assert wrong_rows(got, logits, full_lengths(logits), 512) == []


@pytest.mark.parametrize("hint", ["none", "of its own", "by slots"])
@pytest.mark.parametrize(
    ("family", "width", "k", "ctas"),
    [
        ("small_row", 3001, 512, 1),
        ("resident", 20_000, 512, 2),
        ("resident", 20_001, 512, 8),
        ("streaming", 33_000, 512, 2),
        ("streaming", 33_001, 512, 2),
        ("streaming", 40_000, 3000, 2),
        ("fallback", 40_000, 4100, 2),
        ("fallback", 40_001, 9000, 2),
    ],
)
def test_every_kernel(family: str, width: int, k: int, ctas: int, hint: str) -> None:
    assert plan(rows=2, width=width, k=k, ctas_per_row=ctas).family == family
    logits = torch.randn(2, width, generator=torch.Generator().manual_seed(width)).to("cuda")
    lengths = full_lengths(logits)
    best = run_forced(logits, lengths, k, ctas, path="radix_rounds")
    assert wrong_rows(best, logits, lengths, k) == []
    if hint == "none":
        got = run_forced(logits, lengths, k, ctas, path="no_hint")
        assert wrong_rows(got, logits, lengths, k) == []
        return
    # The k-th value that a step before may have found, then whatever this one leaves.
    kth = logits.gather(1, best.long()).amin(dim=1)
    slots = torch.tensor([1, 0], dtype=torch.int32, device="cuda") if hint == "by slots" else None
    state = TopkState.of(words(2, STATE_VALUE_ONLY, value=kth, limit=0.1), best.contiguous(), k)
    for _ in range(2):
        got = run_forced(logits, lengths, k, ctas, state=state, row_slot=slots)
        assert wrong_rows(got, logits, lengths, k) == []
        assert torch.equal(state.indices, got if slots is None else got.flip(0))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("width", [3001, 6000, 16_000])
def test_windows_of_short_rows(width: int, shared: bool) -> None:
    """One that names the k-th value, one that misses it, and what the kernel leaves."""
    k = 512
    assert plan(rows=2, width=width, k=k).family == "small_row"
    logits = torch.randn(2, width, generator=torch.Generator().manual_seed(width)).to("cuda")
    lengths = full_lengths(logits)
    slots = torch.tensor([1, 0], dtype=torch.int32, device="cuda") if shared else None
    for left in (STATE_UNKNOWN, -(2.0**-7)):
        state = TopkState.of(words(2, left), None, k)
        for _ in range(2):
            got = run(logits, lengths, k, state=state, row_slot=slots)
            assert wrong_rows(got, logits, lengths, k) == []


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("by_row", [False, True])
def test_every_argument_together(path: str, pdl: bool, by_row: bool) -> None:
    """Two steps of three requests, two rows each: everything that is written as on the CPU."""
    rows, width, k = 6, 3000, 512
    row_slot = torch.tensor([4, 4, 0, 0, -1, -1], dtype=torch.int32)
    lengths = torch.tensor([0, 700, width, k, -3, 5000] if by_row else [width, 700, 90], dtype=torch.int32)
    table = torch.arange(150, dtype=torch.int32).flip(0).reshape(3, 50)
    table[1, ::3] = -1
    states = {device: TopkState(5, k, device) for device in ("cpu", "cuda")}
    for step in range(2):
        scores = torch.randn(rows, width, generator=torch.Generator().manual_seed(step)).relu()
        written = {}
        for device, state in states.items():
            counts = torch.full((rows,), -7, dtype=torch.int32, device=device)
            slots = torch.full((rows, k), -7, dtype=torch.int32, device=device)
            out = gvr_topk.indexer_topk_decode(
                scores.to(device),
                lengths.to(device),
                k,
                next_n=2,
                state=state,
                row_slot=row_slot.to(device),
                counts=counts,
                page_table=table.to(device),
                page_size=64,
                slots=slots,
                path=path,
                pdl=pdl,
                hint_offset=1,
                stats=torch.zeros(rows, len(StatsColumn), dtype=torch.int32, device=device),
            )
            written[device] = (out, slots, counts, state.indices)
        for ours, wanted in zip(written["cuda"], written["cpu"], strict=True):
            assert torch.equal(ours.cpu(), wanted)


@pytest.mark.parametrize(
    ("width", "length", "ctas", "dtype"),
    [
        (9004, 9001, 8, torch.float32),
        (9004, 700, 8, torch.float32),
        (9001, 2500, 2, torch.float32),
        (9016, 2500, 8, torch.bfloat16),
        (20_004, 16_400, 8, torch.float32),
        (20_012, 16_390, 4, torch.float16),
        (34_004, 33_001, 2, torch.float32),
        (34_004, 8000, 2, torch.float32),
    ],
)
def test_buffers_longer_than_their_rows(width: int, length: int, ctas: int, dtype: torch.dtype) -> None:
    """What is asked for before the length is known lies in the buffer, and counts only if in the row."""
    k = 512
    logits = torch.randn(3, width, generator=torch.Generator().manual_seed(length)).to("cuda", dtype)
    logits[:, length:] = torch.nan
    lengths = torch.full((3,), length, dtype=torch.int32, device="cuda")
    state = new_state(3, k, keep_indices=True)
    for _ in range(3):
        got = run_forced(logits, lengths, k, ctas, state=state)
        assert wrong_rows(got, logits, lengths, k) == []
