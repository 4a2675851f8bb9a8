"""The prefill op on slices of the rows' keys, beside what `test_prefill.py` compares of every call."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from contents import CONTENTS, draw, integers, rows_of_requests
from launches import captured, unobtrusive
from oracle import (
    POISON,
    check_carry,
    check_guards,
    guarded,
    guarded_carry,
    place,
    run_slices,
    sorted_windows,
)
from torch import Tensor

from gvr_topk import PrefillCarry, indexer_topk_prefill
from gvr_topk.contract import DTYPES


def assert_exact(
    logits: Tensor, starts: Tensor, ends: Tensor, k: int, bounds: Sequence[int], **options: Any
) -> None:
    out, counts = run_slices(logits, starts, ends, k, bounds, **options)[:2]
    wanted, wanted_counts = sorted_windows(logits, starts, ends, k)
    wrong = (out != wanted).any(dim=1) | (counts != wanted_counts)
    assert torch.nonzero(wrong).flatten().tolist() == []


# ---------------------------------------------------------------- windows and slices


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [7, 128, 2048])
@pytest.mark.parametrize("step", [1, 5, 127, 2048, 4096, 5000])
def test_narrow_slices(step: int, k: int, dtype: torch.dtype) -> None:
    rows, width = 40, min(40 * step, 20_000)
    logits = rows_of_requests(rows, width, seed=step).to(dtype)
    starts, ends = integers(0, width // 3, rows, seed=1), integers(width // 2, width + 9, rows, seed=2)
    assert_exact(logits, starts, ends, k, [*range(0, width, step), width])


@pytest.mark.parametrize("growth", [30.0, 1e4])
def test_the_kth_score_grows_from_slice_to_slice(growth: float) -> None:
    logits = 1e-6 * rows_of_requests(300, 40_000).abs()
    for slice_ in range(4):
        logits[:, 10_000 * slice_ :] *= growth
    starts, ends = integers(0, 99, 300, seed=1), integers(30_000, 40_000, 300, seed=2)
    for k in (512, 2048, 3000):
        assert_exact(logits, starts, ends, k, range(0, 50_000, 10_000))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("share", [0.05, 1.0])
@pytest.mark.parametrize("width", [2700, 4300])
def test_nan_in_a_slice_that_is_sampled_and_fits_the_list(
    width: int, share: float, dtype: torch.dtype
) -> None:
    """A sample's key is then just below that of NaN; in 16 bits it is NaN's own, and none lies above."""
    logits = rows_of_requests(100, 2 * width).to(dtype)
    logits[torch.rand(logits.shape, device="cuda", generator=draw(3)) < share] = torch.nan
    starts, ends = integers(0, 1, 100, seed=1), integers(width, 2 * width, 100, seed=2)
    for k in (1, 64, 2048):
        assert_exact(logits, starts, ends, k, [0, width, 2 * width])
        assert_exact(logits[:, :width], starts, ends, k, [0, width])


# ---------------------------------------------------------------- execution


def test_a_carry_of_more_rows_serves_fewer_and_is_empty_behind() -> None:
    carry = PrefillCarry(500, 1024, "cuda")
    for rows in (500, 3, 256):
        logits = rows_of_requests(rows, 40_000, seed=rows)
        starts, ends = integers(0, 99, rows, seed=1), integers(30_000, 40_000, rows, seed=2)
        assert_exact(logits, starts, ends, 1024, [0, 15_000, 40_000], carry=carry)


@pytest.mark.parametrize("k", [64, 2048, 3000])
def test_any_content_is_safe(k: int) -> None:
    """Garbage in a carry comes to an end and overwrites no guard word, and the next rows are exact."""
    rows, width = 300, 12_000
    logits = rows_of_requests(rows, width)
    starts, ends = integers(0, 99, rows, seed=1), integers(width // 2, width, rows, seed=2)
    buffer, carry = guarded_carry(rows, k)
    for seed in range(6):
        bits = torch.randint(-(2**63), 2**63 - 1, carry.words.shape, generator=draw(seed), device="cuda")
        carry.words.copy_(bits)
        if seed % 2:
            carry.words[:, 0] = k | (carry.words[:, 0] & ~0xFFFFFFFF)
        run_slices(logits, starts, ends, k, [0, 5000, width], carry=carry)
        check_carry(buffer)
    others = rows_of_requests(rows, 5000, seed=9)  # rows whose last slice never comes
    indexer_topk_prefill(others, torch.zeros_like(ends), ends, k, carry=carry)
    run_slices(logits, starts, ends, k, [0, 5000, width], carry=carry)
    check_carry(buffer)
    assert_exact(logits, starts, ends, k, [0, 5000, width], carry=carry)


@pytest.mark.parametrize("k", [512, 2048])
def test_a_carry_that_is_rewritten_while_launches_run(k: int) -> None:
    rows, width = 400, 30_000
    logits = rows_of_requests(rows, width)
    starts, ends = torch.zeros(rows, dtype=torch.int32, device="cuda"), integers(20_000, width, rows, seed=2)
    buffer, carry = guarded_carry(rows, k)
    other = torch.cuda.Stream()
    out_buffer, out = guarded(rows, k)
    for turn in range(60):
        with torch.cuda.stream(other):
            carry.words.random_()
            carry.words[::2, 0] = k - (2**63 if turn % 2 else 0)
        indexer_topk_prefill(logits[:, :15_000], starts, ends, k, carry=carry)
        indexer_topk_prefill(logits[:, 15_000:], starts, ends, k, carry=carry, column=15_000, out=out)
    torch.cuda.synchronize()
    check_guards("out", out_buffer, out)
    check_carry(buffer)
    carry.reset()
    assert_exact(logits, starts, ends, k, [0, 15_000, width], carry=carry)


@pytest.mark.parametrize("pdl", [False, True])
def test_graph_replay_with_changed_windows(pdl: bool) -> None:
    rows, width, k = 400, 40_000, 2048
    logits = rows_of_requests(rows, width)
    starts, ends = torch.zeros(rows, dtype=torch.int32, device="cuda"), integers(0, width, rows, seed=1)
    carry = PrefillCarry(rows, k, "cuda")
    out = torch.empty(rows, k, dtype=torch.int32, device="cuda")
    bounds = [0, 16_384, 32_768, width]

    def step() -> None:
        for begin, end in itertools.pairwise(bounds):
            given: dict[str, Any] = {"carry": carry, "column": begin, "pdl": pdl}
            last = out if end == width else None
            indexer_topk_prefill(logits[:, begin:end], starts, ends, k, out=last, **given)

    graph = captured(step)
    for turn in range(6):
        starts.copy_(integers(-50, width // 2, rows, seed=turn))
        ends.copy_(integers(width // 3, width + 50, rows, seed=turn + 100))
        logits.copy_(rows_of_requests(rows, width, seed=turn))
        out.fill_(POISON)
        graph.replay()
        assert torch.equal(out, sorted_windows(logits, starts, ends, k)[0]), turn


def test_no_allocation_and_no_synchronization() -> None:
    rows, width, k = 300, 20_000, 512
    logits, ends = rows_of_requests(rows, width), integers(9000, width, rows, seed=1)
    starts, carry = torch.zeros_like(ends), PrefillCarry(rows, k, "cuda")
    out = torch.empty(rows, k, dtype=torch.int32, device="cuda")
    with unobtrusive():
        indexer_topk_prefill(logits[:, :9000], starts, ends, k, carry=carry)
        indexer_topk_prefill(logits[:, 9000:], starts, ends, k, carry=carry, column=9000, out=out)
    assert torch.equal(out, sorted_windows(logits, starts, ends, k)[0])


# ---------------------------------------------------------------- small enough for compute-sanitizer


@pytest.mark.sanitizer
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [64, 2050])
def test_small_chunks(k: int, dtype: torch.dtype) -> None:
    """Rows that fit the list, rows that are sampled, and rows that radix rounds take."""
    rows = 4
    for width, bounds in ((65, [0, 30, 65]), (4099, [0, 7, 1025, 4099]), (12_007, [0, 5003, 12_007])):
        for name in ("normal", "half positive", "descending", "ascending"):
            logits = place(CONTENTS[name](rows, width, k).to(dtype), pad=3, shift=1)
            starts, ends = integers(-3, 9, rows, seed=1), integers(width - 9, width + 3, rows, seed=2)
            assert_exact(logits, starts, ends, k, bounds)


@pytest.mark.sanitizer
def test_several_rows_for_each_cta() -> None:
    """Half of the CTAs start late, and all fetch their next row while they merge."""
    rows, width = 4 * torch.cuda.get_device_properties("cuda").multi_processor_count + 7, 1100
    logits = place(rows_of_requests(rows, width, requests=3), pad=1)
    starts, ends = integers(0, 9, rows, seed=1), integers(width - 90, width, rows, seed=2)
    assert_exact(logits, starts, ends, 64, [0, 500, width])
