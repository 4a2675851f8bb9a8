"""The contract's rules: row lengths, the order of values, which items and in what order."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gvr_topk.constants import MAX_WIDTH
from gvr_topk.contract import (
    DTYPES,
    KEY_MASKED,
    KEY_NAN,
    best_blocks,
    drop_masked,
    exact_topk,
    exact_topk_in_blocks,
    order_key,
    row_lengths,
)
from gvr_topk.evaluation.oracle import sorted_topk
from gvr_topk.ops import indexer_topk_decode

DENORMAL = 2.0**-149
"""Exactly the smallest of float32: rows are compared as Python's numbers, too."""
SPECIAL = (-math.inf, -1.0, -DENORMAL, -0.0, 0.0, DENORMAL, 1.0, math.inf, math.nan)
score = st.one_of(st.sampled_from(SPECIAL), st.floats(width=32))


@pytest.mark.parametrize(
    ("seq_len", "next_n", "expected"),
    [
        (10, 1, [10]),
        (10, 2, [9, 10]),
        (10, 4, [7, 8, 9, 10]),
        (2, 4, [-1, 0, 1, 2]),
        (0, 1, [0]),
        (-3, 2, [-4, -3]),
    ],
)
def test_row_lengths(seq_len: int, next_n: int, expected: list[int]) -> None:
    other = 100 + seq_len
    got = row_lengths(torch.tensor([seq_len, other], dtype=torch.int32), 2 * next_n, next_n)
    assert got.dtype == torch.int64
    assert got.tolist() == expected + [100 + length for length in expected]


@pytest.mark.parametrize(
    ("value", "key"),
    [
        (-math.inf, 0x007FFFFF),
        (-1.0, 0x407FFFFF),
        (-DENORMAL, 0x7FFFFFFE),
        (-0.0, 0x80000000),
        (0.0, 0x80000000),
        (DENORMAL, 0x80000001),
        (1.0, 0xBF800000),
        (math.inf, 0xFF800000),
        (math.nan, 0xFFFFFFFF),
    ],
)
def test_keys_are_those_of_the_kernels(value: float, key: int) -> None:
    """Unsigned 32-bit keys: of a number the bits with the sign turned over, or all of them if it is set."""
    assert order_key(torch.tensor(value)).item() == key


@given(score, score)
def test_keys_compare_as_values_do(a: float, b: float) -> None:
    key_a, key_b = order_key(torch.tensor([a, b], dtype=torch.float32)).tolist()
    assert min(key_a, key_b) >= 0 and max(key_a, key_b) <= KEY_NAN
    if math.isnan(a) or math.isnan(b):
        assert (key_a == KEY_NAN) == math.isnan(a) and (key_b == KEY_NAN) == math.isnan(b)
    else:
        assert (key_a < key_b, key_a == key_b) == (a < b, a == b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_keys_of_every_16_bit_value(dtype: torch.dtype) -> None:
    values = torch.arange(1 << 16).to(torch.uint16).view(dtype)
    assert set(order_key(values[values.isnan()]).tolist()) == {KEY_NAN}
    numbers = values[~values.isnan()]
    sorted_numbers = numbers[numbers.to(torch.float64).argsort()].to(torch.float64)
    keys = order_key(sorted_numbers.to(dtype))
    assert torch.equal(keys.diff() > 0, sorted_numbers.diff() > 0)
    assert torch.equal(keys.diff() == 0, sorted_numbers.diff() == 0)
    assert keys.max() < KEY_NAN


def test_every_nan_is_equal_whatever_its_sign_and_payload() -> None:
    bits = torch.tensor([0x7FC00000, 0x7F800001, 0x7FFFFFFF, -1, -0x400000], dtype=torch.int32)
    assert set(order_key(bits.view(torch.float32)).tolist()) == {KEY_NAN}


@given(st.lists(score, max_size=40), st.integers(1, 45), st.integers(0, 3))
def test_items_are_those_of_the_oracle(row: list[float], k: int, unseen: int) -> None:
    # Behind the row lies what would win if it were read.
    logits = torch.tensor([row + [math.nan, math.inf, math.inf][:unseen]], dtype=torch.float32)
    got = exact_topk(logits, torch.tensor([len(row)]), k)
    assert got.dtype == torch.int32
    assert torch.equal(got, sorted_topk(logits, torch.tensor([len(row)]), k))


@pytest.mark.parametrize("width", [1, 2, 3])
def test_masked_scores_are_dropped(width: int) -> None:
    empty = torch.full((2, 3), -1, dtype=torch.int32)
    assert torch.equal(drop_masked(torch.zeros(2, 0), empty), empty)
    logits = torch.zeros(2, width)
    logits[0, 0] = -math.inf
    everything = torch.arange(width, dtype=torch.int32).repeat(2, 1)
    dropped = drop_masked(logits, everything)
    assert dropped.dtype == torch.int32
    assert dropped.tolist() == [[*range(1, width), -1], [*range(width)]]


def test_masked_blocks_stay_unless_they_are_dropped() -> None:
    logits = torch.full((1, 40), -math.inf)
    logits[0, 9], logits[0, 17] = torch.finfo(torch.float32).min, math.nan
    lengths, blocks = torch.tensor([33]), torch.arange(5, dtype=torch.int32)[None]
    assert order_key(logits[0, :1]).item() == KEY_MASKED
    assert best_blocks(logits, lengths, 6).tolist() == [[0, 1, 2, 3, 4, -1]]
    assert best_blocks(logits, lengths, 6, drop=True).tolist() == [[1, 2, 4, -1, -1, -1]]
    assert exact_topk_in_blocks(logits, lengths, blocks, 3).tolist() == [[0, 9, 17]]
    assert exact_topk_in_blocks(logits, lengths, blocks, 3, drop=True).tolist() == [[9, 17, -1]]


def test_the_longest_row_still_orders_by_value_then_index() -> None:
    logits = torch.zeros(1, MAX_WIDTH)
    logits[0, -1] = DENORMAL
    got = exact_topk(logits, torch.tensor([MAX_WIDTH]), 3)
    assert got.tolist() == [[0, 1, MAX_WIDTH - 1]]


@pytest.fixture
def flushing_denormals():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads that are started now would go on flushing
    if not torch.set_flush_denormal(True):
        pytest.skip("the processor cannot flush denormals")
    yield
    torch.set_flush_denormal(False)
    torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", DTYPES)
def test_denormals_count_where_the_process_flushes_them(dtype, flushing_denormals):
    """The key of every 16-bit pattern, and of float32 denormals, is that of a process that does not flush."""
    if dtype == torch.float32:
        positive = torch.tensor([0, 1, 2, 0x7FFFFF, 0x800000], dtype=torch.int32)
        bits = torch.cat([positive, positive - 2**31])
    else:
        bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    values = bits.view(dtype)
    flushed = order_key(values)
    torch.set_flush_denormal(False)
    assert torch.equal(flushed, order_key(values))
    wide = values.to(torch.float64)
    order = torch.argsort(wide, stable=True)
    rising = flushed[order]
    assert (rising.diff() >= 0).all()
    number = ~torch.isnan(wide[order])
    assert torch.equal(rising.diff()[number[1:]] > 0, wide[order].diff()[number[1:]] > 0)


def test_the_op_is_exact_where_denormals_are_flushed(flushing_denormals):
    tiny = torch.tensor([[3, 1, 2, 0]], dtype=torch.int32).view(torch.float32)
    got = indexer_topk_decode(tiny, torch.tensor([4], dtype=torch.int32), 2)
    assert got.tolist() == [[0, 2]]
