"""Calls that drop masked columns: no score of -inf is selected, by any kernel, and -1 stands at the end."""

from __future__ import annotations

import pytest
import torch
from contents import SHAPES, int32
from contents import draw as generator
from launches import skip_unserved
from oracle import (
    PATHS,
    clone,
    full_lengths,
    new_state,
    new_stats,
    poisoned,
    run,
    run_forced,
    wrong_dropped_rows,
    wrong_rows,
)
from torch import Tensor

from gvr_topk.constants import STATE_MASKED
from gvr_topk.contract import DTYPES

K = 2048
WIDTHS = (900, 4000, 8192, 40_001, 131_072, 300_004)
"""One CTA for a row, clusters that hold it, and rows that stream; some of them off alignment."""

MASKED_SHAPES = {**SHAPES, "longest small row": (32_768, 140, 0)}


def masked(
    rows: int,
    width: int,
    left: int,
    draw: torch.Generator,
    dtype: torch.dtype = torch.float32,
    *,
    odd: bool = False,
) -> Tensor:
    """Rows of which this many columns are not masked, drawn by chance; some of them infinite, NaN or tied."""
    scores = torch.randn(rows, width, device="cuda", generator=draw).to(dtype)
    if odd:
        kind = torch.randint(0, 12, scores.shape, device="cuda", generator=draw)
        for number, value in enumerate((torch.inf, torch.nan, 0.0, -0.0, 1.5, torch.finfo(dtype).min)):
            scores[kind == number] = value
    order = torch.rand(rows, width, device="cuda", generator=draw).argsort(dim=1)
    return scores.masked_fill_(order >= left, -torch.inf)


def check(logits: Tensor, lengths: Tensor, k: int, got: Tensor, counts: Tensor, next_n: int = 1) -> None:
    assert wrong_dropped_rows(got, logits, lengths, k, next_n) == []
    assert torch.equal(counts, (got >= 0).sum(dim=1).to(torch.int32))


@pytest.mark.parametrize("keep_indices", [False, True])
@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", MASKED_SHAPES)
def test_rows_whose_mask_changes_from_step_to_step(
    shape: str, dtype: torch.dtype, odd: bool, keep_indices: bool
) -> None:
    """Predicted right and wrong: masked rows after ordinary ones, after masked ones and before either."""
    width, rows, ctas = MASKED_SHAPES[shape]
    draw, state = generator(width + rows), new_state(rows, K, keep_indices=keep_indices)
    for left in (width, K // 2, K // 3, width // 2, K - 1, 1, 0, width, 0, K, K + 1, K - 1, 3 * K):
        logits = masked(rows, width, min(left, width), draw, dtype, odd=odd)
        lengths = full_lengths(logits)
        counts = poisoned(rows)
        got = run_forced(logits, lengths, K, ctas, state=state, counts=counts, drop=True)
        check(logits, lengths, K, got, counts)
        assert counts.tolist() == [min(left, K)] * rows
        if left < K and dtype == torch.float32 and shape not in ("small row", "longest small row"):
            assert state.words[:, 0].tolist() == [STATE_MASKED] * rows
        assert state.indices is None or torch.equal(state.indices, got)


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("k", [49_000, 60_000, 100_000, 200_000])
@pytest.mark.parametrize("left", [0, 10, 40_000, 90_000])
def test_more_masked_columns_are_selected_than_16_bits_count(left: int, k: int, drop: bool) -> None:
    """A cluster holds the row, and its first CTAs select more masked columns than a packed count holds."""
    logits, state = masked(2, 262_144, left, generator(left)), new_state(2, k)
    lengths = int32(262_144, 262_143)
    for _ in range(2):  # The second step knows that the k-th value is masked, if it is.
        counts = poisoned(2)
        got = run_forced(logits, lengths, k, 16, state=state, counts=counts, drop=drop)
        if drop:
            check(logits, lengths, k, got, counts)
        else:
            assert wrong_rows(got, logits, lengths, k) == []
            assert counts.tolist() == [k, k]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_else_changes(width: int, path: str) -> None:
    """Statistics and words are those of the same call without the option, and so are rows without a mask."""
    skip_unserved(path, width)
    k = 512
    state = new_state(4, k, keep_indices=True)
    for step in range(4):
        logits = masked(4, width, width, generator(step))
        logits[2:, 100 * step :] = -torch.inf
        lengths = int32(width, k - 9, width - 2, k - 9)
        apart, seen, wanted = clone(state), new_stats(4), new_stats(4)
        got = run(logits, lengths, k, path=path, state=state, stats=seen, drop_masked=True)
        plain = run(logits, lengths, k, path=path, state=apart, stats=wanted)
        assert wrong_dropped_rows(got, logits, lengths, k) == wrong_rows(plain, logits, lengths, k) == []
        assert torch.equal(got[:2], plain[:2])
        assert torch.equal(state.words.view(torch.int32), apart.words.view(torch.int32))
        assert torch.equal(seen, wanted)


@pytest.mark.sanitizer
@pytest.mark.parametrize("shape", ["small row", "resident, 32768", "streaming, 262144"])
def test_dropped_rows_under_the_sanitizers(shape: str) -> None:
    width, rows, ctas = MASKED_SHAPES[shape]
    state = new_state(rows, K)
    for left, length in ((K // 2, width), (0, width), (K // 2, K)):
        logits = masked(rows, width, left, generator(left))
        lengths = torch.full((rows,), length, dtype=torch.int32, device="cuda")
        counts = poisoned(rows)
        got = run_forced(logits, lengths, K, ctas, state=state, counts=counts, drop=True)
        check(logits, lengths, K, got, counts)
