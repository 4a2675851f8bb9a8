"""Small calls that use every argument: quick enough to run under compute-sanitizer too."""

from __future__ import annotations

import pytest
import torch
from oracle import full_lengths, place, run, state, wrong_rows

import gvr_topk
from gvr_topk.contract import DTYPES
from gvr_topk.gate import plan

pytestmark = pytest.mark.sanitizer
PATHS = ("cluster", "radix", "gvr")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [5, 513, 4099])
def test_rows_off_alignment(path: str, dtype: torch.dtype, n: int) -> None:
    rows = torch.randint(-40, 40, (3, n), generator=torch.Generator().manual_seed(n)).to(dtype)
    logits = place(rows, pad=3, shift=1)
    got = run(logits, full_lengths(logits), 512, path=path)
    assert wrong_rows(got, logits, full_lengths(logits), 512) == []


@pytest.mark.parametrize("hint", ["none", "of its own", "shared"])
@pytest.mark.parametrize(
    ("family", "width", "k", "ctas"),
    [
        ("single", 3001, 512, 1),
        ("resident", 20_000, 512, 2),
        ("resident", 20_001, 512, 8),
        ("stream", 33_000, 512, 2),
        ("stream", 33_001, 512, 2),
        ("general", 40_000, 3000, 2),
    ],
)
def test_every_kernel(family: str, width: int, k: int, ctas: int, hint: str) -> None:
    assert plan(rows=2, width=width, k=k, ctas_per_row=ctas).family == family
    logits = torch.randn(2, width, generator=torch.Generator().manual_seed(width)).to("cuda")
    lengths = full_lengths(logits)
    best = run(logits, lengths, k, path="radix", ctas_per_row=ctas)
    assert wrong_rows(best, logits, lengths, k) == []
    if hint == "none":
        return
    shares = state(2, torch.tensor([0.8, 0.9], device="cuda"))
    slots = torch.tensor([1, 0], dtype=torch.int32, device="cuda") if hint == "shared" else None
    got = run(
        logits,
        lengths,
        k,
        path="cluster",
        ctas_per_row=ctas,
        prior=best.flip(0).contiguous() if hint == "shared" else best.contiguous(),
        guess_state=shares,
        row_slot=slots,
    )
    assert wrong_rows(got, logits, lengths, k) == []


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("width", [3001, 6000, 16_000])
def test_windows_of_short_rows(width: int, shared: bool) -> None:
    """One that names the k-th value, one that misses it, and what the kernel leaves."""
    k = 512
    assert plan(rows=2, width=width, k=k).family == "single"
    logits = torch.randn(2, width, generator=torch.Generator().manual_seed(width)).to("cuda")
    lengths = full_lengths(logits)
    prior = torch.full((2, k), -1, dtype=torch.int32, device="cuda")
    slots = torch.tensor([1, 0], dtype=torch.int32, device="cuda") if shared else None
    for left in (-1.0, -(2.0**-7)):
        guess = state(2, left)
        for _ in range(2):
            got = run(logits, lengths, k, prior=prior, guess_state=guess, row_slot=slots)
            assert wrong_rows(got, logits, lengths, k) == []


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("pdl", [False, True])
def test_every_argument_together(path: str, pdl: bool) -> None:
    """Two steps of three requests, two rows each: result and hint as on the CPU."""
    rows, width, k, slots = 6, 3000, 512, 5
    row_slot = torch.tensor([4, 4, 0, 0, -1, -1], dtype=torch.int32)
    lengths = torch.tensor([width, 700, 90], dtype=torch.int32)
    table = torch.arange(150, dtype=torch.int32).flip(0).reshape(3, 50)
    hints = {
        device: (
            torch.full((slots, k), -1, dtype=torch.int32, device=device),
            gvr_topk.new_guess_state(slots, device),
        )
        for device in ("cpu", "cuda")
    }
    for step in range(2):
        scores = torch.randn(rows, width, generator=torch.Generator().manual_seed(step)).relu()
        results = {
            device: gvr_topk.indexer_topk_decode(
                scores.to(device),
                lengths.to(device),
                k,
                next_n=2,
                prior=prior,
                guess_state=guess,
                row_slot=row_slot.to(device),
                prior_offset=1,
                stats=torch.zeros(rows, 8, dtype=torch.int32, device=device),
                page_table=table.to(device),
                page_size=64,
                path=path,
                pdl=pdl,
            )
            for device, (prior, guess) in hints.items()
        }
        assert torch.equal(results["cuda"].cpu(), results["cpu"])
        assert torch.equal(hints["cuda"][0].cpu(), hints["cpu"][0])


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
    guess = state(3)
    prior = torch.full((3, k), -1, dtype=torch.int32, device="cuda")
    for _ in range(3):
        got = run(
            logits, lengths, k, path="cluster", ctas_per_row=ctas, prior=prior, guess_state=guess,
        )  # fmt: skip
        assert wrong_rows(got, logits, lengths, k) == []
