"""The prefill op on slices of the rows' keys: bit for bit what one call on the whole rows gives."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from contents import CONTENTS, draw, int32, integers, rows_of_requests
from launches import captured, unobtrusive
from oracle import POISON, check_guards, guarded, place, poisoned, sorted_windows
from torch import Tensor

from gvr_topk import PrefillCarry, indexer_topk_prefill
from gvr_topk.constants import MAX_WIDTH
from gvr_topk.contract import DTYPES

EVERY_K = (1, 7, 512, 2048, 2049, 5000)
INT_MIN, INT_MAX = -(2**31), 2**31 - 1
GUARD = 0x5A5A5A5A5A5A5A5A


def guarded_carry(rows: int, k: int) -> tuple[Tensor, PrefillCarry]:
    """A carry between guard words, and the buffer that it lies in."""
    size = rows * (k + 1)
    buffer = torch.full((size + 32,), GUARD, dtype=torch.int64, device="cuda")
    carry = PrefillCarry(1, k, "cuda")
    carry.words = buffer[16:-16].view(rows, k + 1)
    carry.reset()
    return buffer, carry


def in_slices(
    logits: Tensor,
    starts: Tensor,
    ends: Tensor,
    k: int,
    bounds: Sequence[int],
    *,
    carry: PrefillCarry | None = None,
    slots: bool = False,
    pdl: bool = False,
    **options: Any,
) -> list[Tensor]:
    """Select slice by slice, with guard words around all that is written: positions, counts, cache slots."""
    rows = len(logits)
    buffer, own = guarded_carry(rows, k)
    carry = carry or own
    outputs = {"out": guarded(rows, k), "counts": guarded(1, rows)}
    if slots:
        outputs["slots"] = guarded(rows, k, gap=1)
    written = {name: inner for name, (_, inner) in outputs.items()}
    written["counts"] = written["counts"][0]
    for begin, end in itertools.pairwise(bounds):
        last = end == bounds[-1]
        given = {**written, **options} if last else {}
        part = logits[:, begin:end]
        indexer_topk_prefill(part, starts, ends, k, carry=carry, column=begin, pdl=pdl, **given)
        if last:
            break
        for _, inner in outputs.values():
            assert bool((inner == POISON).all()), "a call without out wrote a result"
    for name, (whole, inner) in outputs.items():
        check_guards(name, whole, inner)
    assert bool((buffer[:16] == GUARD).all()) and bool((buffer[-16:] == GUARD).all())
    assert bool((carry.words[:rows, 0] == 0).all())
    return list(written.values())


def assert_exact(
    logits: Tensor, starts: Tensor, ends: Tensor, k: int, bounds: Sequence[int], **options: Any
) -> None:
    out, counts = in_slices(logits, starts, ends, k, bounds, **options)[:2]
    wanted, wanted_counts = sorted_windows(logits, starts, ends, k)
    wrong = (out != wanted).any(dim=1) | (counts != wanted_counts)
    assert torch.nonzero(wrong).flatten().tolist() == []


def cuts(width: int, pieces: int, seed: int) -> list[int]:
    """Bounds of slices of any width."""
    return [0, *sorted(integers(0, width + 1, pieces - 1, seed).tolist()), width]


# ---------------------------------------------------------------- windows and slices


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", EVERY_K)
@pytest.mark.parametrize("pieces", [1, 2, 3, 8])
def test_random_windows_in_random_slices(pieces: int, k: int, dtype: torch.dtype) -> None:
    """Empty, inverted and beyond both ends of the row, and more rows than CTAs."""
    rows, width = 600, 30_001
    logits = place(rows_of_requests(rows, width, seed=k).to(dtype), pad=3, shift=1)
    starts = integers(-2000, width + 1000, rows, seed=k)
    ends = integers(-100, width + 4000, rows, seed=k + 1)
    starts[::3], ends[::4] = starts[::3].clamp(max=100), width
    assert_exact(logits, starts, ends, k, cuts(width, pieces, seed=pieces))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [7, 128, 2048])
@pytest.mark.parametrize("step", [1, 5, 127, 2048, 4096, 5000])
def test_narrow_slices(step: int, k: int, dtype: torch.dtype) -> None:
    rows, width = 40, min(40 * step, 20_000)
    logits = rows_of_requests(rows, width, seed=step).to(dtype)
    starts, ends = integers(0, width // 3, rows, seed=1), integers(width // 2, width + 9, rows, seed=2)
    assert_exact(logits, starts, ends, k, [*range(0, width, step), width])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [512, 2048, 5000])
def test_the_longest_rows(k: int, dtype: torch.dtype) -> None:
    width = MAX_WIDTH
    logits = rows_of_requests(5, width, noise=0.01).to(dtype)
    starts = int32(0, 3, width // 2, 77, 5)
    ends = int32(width, 3 + (1 << 20), width, width, 600_005)
    for pieces in (2, 8):
        assert_exact(logits, starts, ends, k, [*range(0, width, width // pieces), width])


def test_windows_at_the_ends_of_int32() -> None:
    every = (INT_MIN, INT_MIN + 1, -1, 0, 1, 4999, 5000, 5001, INT_MAX - 1, INT_MAX)
    starts = int32(*(start for start in every for _ in every))
    ends = int32(*every).repeat(len(every))
    logits = rows_of_requests(len(starts), 5000)
    for k in (7, 2048, 5000):
        assert_exact(logits, starts, ends, k, [0, 1, 2500, 4999, 5000])


@pytest.mark.parametrize("k", [100_000, MAX_WIDTH])
def test_more_items_than_a_window_holds(k: int) -> None:
    logits = rows_of_requests(3, 40_000)
    assert_exact(logits, int32(0, 1, 39_999), int32(40_000, 4999, 40_000), k, [0, 9000, 40_000])


def test_no_rows_and_no_columns() -> None:
    for rows, width in ((0, 100), (0, 0), (3, 0)):
        ends = torch.full((rows,), 7, dtype=torch.int32, device="cuda")
        assert_exact(torch.zeros(rows, width, device="cuda"), torch.zeros_like(ends), ends, 8, [0, width])


# ---------------------------------------------------------------- contents


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [128, 2048])
@pytest.mark.parametrize("name", CONTENTS)
def test_adversarial_contents(name: str, k: int, dtype: torch.dtype) -> None:
    rows, width = 300, 20_011
    scores = CONTENTS[name](rows, width, k)
    if name == "denormals" and dtype != torch.float32:
        scores = scores.double() * {torch.bfloat16: 1e5, torch.float16: 1e38}[dtype]
    logits = place(scores.to(dtype), pad=2, shift=1)
    starts = integers(0, 20, rows, seed=k)
    ends = torch.where(torch.arange(rows, device="cuda") % 9 == 5, starts + k + 1, width).to(torch.int32)
    for bounds in ([0, 7000, 14_000, width], cuts(width, 6, seed=k)):
        assert_exact(logits, starts, ends, k, bounds)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CONTENTS)
def test_adversarial_contents_of_long_rows(name: str, dtype: torch.dtype) -> None:
    rows, width, k = 7, 300_000, 2048
    logits = CONTENTS[name](rows, width, k).to(dtype)
    starts, ends = integers(0, 99, rows, seed=1), width - integers(0, 99, rows, seed=2)
    assert_exact(logits, starts, ends, k, [0, 100_000, 200_000, width])


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_bits(dtype: torch.dtype) -> None:
    """Every NaN, infinity, denormal and exponent."""
    rows, width = 200, 16_000
    integer = torch.int32 if dtype == torch.float32 else torch.int16
    limits = torch.iinfo(integer)
    bits = torch.randint(limits.min, limits.max + 1, (rows, width), generator=draw(1), device="cuda")
    logits = bits.to(integer).view(dtype)
    starts, ends = integers(0, 3000, rows, seed=1), integers(9000, width + 9, rows, seed=2)
    for k in EVERY_K:
        assert_exact(logits, starts, ends, k, [0, 3001, 9000, 11_111, width])


def test_nothing_outside_of_a_window_is_read_as_a_score() -> None:
    rows, width, k = 200, 24_000, 512
    logits = rows_of_requests(rows, width)
    starts, ends = integers(0, width // 2, rows, seed=1), integers(width // 2, width, rows, seed=2)
    position = torch.arange(width, device="cuda")
    outside = (position < starts[:, None]) | (position >= ends[:, None])
    wanted, _ = sorted_windows(logits, starts, ends, k)
    for poison in (float("nan"), float("inf"), -float("inf")):
        filled = logits.masked_fill(outside, poison)
        for bounds in ([0, width], [0, 9000, 15_000, width]):
            assert torch.equal(in_slices(filled, starts, ends, k, bounds)[0], wanted)


# ---------------------------------------------------------------- options of the last call


@pytest.mark.parametrize("k", [7, 1024, 3000])
@pytest.mark.parametrize("page_size", [1, 64, 2**31 - 1])
@pytest.mark.parametrize("by_request", [False, True])
def test_options_give_what_they_give_for_whole_rows(by_request: bool, page_size: int, k: int) -> None:
    rows, width = 40, 9000
    requests = 17 if by_request else rows
    logits = rows_of_requests(rows, width, seed=k)
    starts, ends = integers(-50, 2000, rows, seed=1), integers(0, width + 50, rows, seed=2)
    row_request = integers(-2, requests + 3, rows, seed=3) if by_request else None
    offsets = integers(INT_MIN, INT_MAX, requests, seed=4)
    offsets[1::3] = integers(0, 10**6, requests, seed=5)[1::3]
    largest = max(2, min(INT_MAX // page_size + 2, INT_MAX))
    table = integers(-largest // 4 - 1, largest, requests * 40, seed=6).view(requests, 40)
    none = {"offsets": offsets, "row_request": row_request}
    paging = {"page_table": table, "page_size": page_size, "row_request": row_request}
    for tables, slots in ((none, False), (paging, False), (paging, True), ({**paging, **none}, True)):
        wanted = in_one_call(logits, starts, ends, k, slots=slots, **tables)
        got = in_slices(logits, starts, ends, k, cuts(width, 5, seed=k), slots=slots, **tables)
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def in_one_call(
    logits: Tensor, starts: Tensor, ends: Tensor, k: int, *, slots: bool, **tables: Any
) -> list[Tensor]:
    """What the op without a carry writes."""
    rows = len(logits)
    written = {"out": poisoned(rows, k), "counts": poisoned(rows)}
    if slots:
        written["slots"] = poisoned(rows, k)
    indexer_topk_prefill(logits, starts, ends, k, **written, **tables)
    return list(written.values())


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
        in_slices(logits, starts, ends, k, [0, 5000, width], carry=carry)
        assert bool((buffer[:16] == GUARD).all()) and bool((buffer[-16:] == GUARD).all())
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
    assert bool((buffer[:16] == GUARD).all()) and bool((buffer[-16:] == GUARD).all())


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
