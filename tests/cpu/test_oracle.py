"""The oracle of the tests, against results written down by hand and Python's own sort."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gvr_topk.constants import BLOCK_SIZE
from gvr_topk.evaluation.oracle import (
    drop_masked_positions,
    sorted_blocks,
    sorted_in_blocks,
    sorted_topk,
    translate_positions,
)

SPECIAL = (-math.inf, -1.0, -0.0, 0.0, 1.0, math.inf, math.nan)
scores = st.lists(st.one_of(st.sampled_from(SPECIAL), st.floats(width=16)), min_size=1, max_size=40)


def rank(score: float) -> tuple[bool, float]:
    """Ascending for descending scores, NaN first; both zeros are equal."""
    return not math.isnan(score), 0.0 if math.isnan(score) else -score


def best(values: list[float], positions: list[int], k: int) -> list[int]:
    """The `k` best of some positions, in ascending order of where they stand in the list."""
    order = sorted(range(len(positions)), key=lambda i: (*rank(values[positions[i]]), i))[:k]
    return [positions[i] for i in sorted(order)]


def padded(found: list[int], count: int) -> list[int]:
    return found + [-1] * (count - len(found))


@given(scores, st.integers(-2, 45), st.integers(1, 45), st.sampled_from([torch.float32, torch.float16]))
def test_items_are_those_of_a_sort(row: list[float], length: int, k: int, dtype: torch.dtype) -> None:
    logits = torch.tensor([row, row[::-1]], dtype=dtype)
    got = sorted_topk(logits, torch.tensor([length, len(row)]), k)
    visible = range(min(max(length, 0), len(row)))
    assert got.dtype == torch.int32
    assert got[0].tolist() == padded(best(row, list(visible), k), k)
    assert got[1].tolist() == padded(best(row[::-1], list(range(len(row))), k), k)


def test_zeros_are_equal_and_nan_is_greatest() -> None:
    logits = torch.tensor([[-0.0, 0.0, -1.0, 0.0, -0.0], [math.inf, math.nan, 1.0, -math.nan, math.inf]])
    assert sorted_topk(logits, torch.tensor([5, 5]), 3).tolist() == [[0, 1, 3], [0, 1, 3]]


@given(scores, st.integers(-2, 45), st.integers(1, 7))
def test_blocks_are_the_newest_and_the_best(row: list[float], length: int, block_k: int) -> None:
    visible = row[: max(length, 0)]
    maxima = [
        min(visible[at : at + BLOCK_SIZE], key=rank) if visible else 0.0
        for at in range(0, len(visible), BLOCK_SIZE)
    ]
    wanted = []
    if maxima:
        newest = len(maxima) - 1
        wanted = [*best(maxima, list(range(newest)), block_k - 1), newest]
    given = torch.tensor([row]), torch.tensor([length]), block_k
    assert sorted_blocks(*given).tolist() == [padded(wanted, block_k)]
    kept = [block for block in wanted if block == wanted[-1] or maxima[block] != -math.inf]
    assert sorted_blocks(*given, drop=True).tolist() == [padded(kept, block_k)]


@given(scores, st.integers(-2, 45), st.lists(st.integers(-2, 7), max_size=6), st.integers(1, 20))
def test_items_within_blocks(row: list[float], length: int, blocks: list[int], k: int) -> None:
    visible = range(min(max(length, 0), len(row)))
    there = [block * BLOCK_SIZE + i for block in blocks for i in range(BLOCK_SIZE)]
    wanted = best(row, [position for position in there if position in visible], k)
    numbers = torch.tensor([blocks], dtype=torch.int32).reshape(1, len(blocks))
    got = sorted_in_blocks(torch.tensor([row]), torch.tensor([length]), numbers, k)
    assert got.tolist() == [padded(wanted, k)]


def test_masked_positions_are_left_out() -> None:
    logits = torch.tensor([[1.0, -math.inf, math.inf, math.nan], [-math.inf, 0.0, -1.0, -math.inf]])
    positions = torch.tensor([[0, 1, 2, 3], [0, 2, 3, -1]], dtype=torch.int32)
    got = drop_masked_positions(logits, positions)
    assert got.dtype == torch.int32 and got.tolist() == [[0, 2, 3, -1], [2, -1, -1, -1]]

    logits = torch.arange(200.0).masked_fill(torch.arange(200) % 3 == 0, -math.inf)[None]
    kept = drop_masked_positions(logits, torch.arange(200, dtype=torch.int32)[None])[0].tolist()
    assert kept == padded([position for position in range(200) if position % 3], 200)  # in their order


@pytest.mark.parametrize(
    ("position", "request_", "slot"),
    [
        (0, 0, 30),
        (9, 0, 39),
        (10, 0, 0),  # page 0 is a page
        (29, 0, -1),  # held as a negative number
        (30, 0, -1),  # behind the table
        (-1, 0, -1),
        (0, 1, 2**31 - 8),
        (7, 1, 2**31 - 1),
        (8, 1, -1),  # beyond int32
        (15, 1, 75),
        (10, 7, 70),  # any number of a request is safe
        (-1, -4, -1),
    ],
)
def test_slots_of_positions(position: int, request_: int, slot: int) -> None:
    table = torch.tensor([[3, 0, -1], [(2**31 - 8) // 10, 7, 1]], dtype=torch.int32)
    table_row, positions = torch.tensor([request_]), torch.tensor([[position]], dtype=torch.int32)
    got = translate_positions(positions, table, 10, table_row)
    assert got.dtype == torch.int32 and got.tolist() == [[slot]]
    none = translate_positions(positions, table[:, :0], 10, table_row)
    assert none.tolist() == [[-1]]
