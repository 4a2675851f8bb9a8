"""The model of the shipped kernels: exact on every row and state, and its statistics follow its decisions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

from gvr_topk.constants import (
    STATE_INFINITE,
    STATE_MASKED,
    STATE_MAX_ZSCORE,
    STATE_UNKNOWN,
    STATE_VALUE_ONLY,
    STATE_ZSCORE_ORIGIN,
    GuessSource,
    HintReason,
    StatsColumn,
)
from gvr_topk.contract import DTYPES, KEY_NAN
from gvr_topk.evaluation import shipped_predictor as predictor
from gvr_topk.evaluation import shipped_resolve_miss as resolve
from gvr_topk.evaluation import shipped_select as select
from gvr_topk.evaluation import shipped_types as types
from gvr_topk.evaluation.oracle import sorted_topk
from gvr_topk.evaluation.shipped_reference import StepResult, topk_step
from gvr_topk.evaluation.synthetic import adversarial_hints, adversarial_rows
from gvr_topk.policy import plan

F = np.float32
SMALL = {"small_row": 1, "resident": 2}
"""Families that short buffers have, and the cluster size that makes a plan take them."""

SHAPES = {
    "small_row": (3000, 1, 100),
    "resident": (20_000, 2, 512),
    "resident of 16": (20_000, 16, 2048),
    "streaming": (33_000, 1, 512),
    "streaming of 2": (34_000, 2, 2048),
    "fallback": (33_000, 1, 2500),
}
"""Width, cluster size and k."""

numbers = st.one_of(
    st.floats(width=32, allow_nan=True, allow_infinity=True, allow_subnormal=True),
    st.sampled_from([0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -1.0]),
)
rows = st.one_of(
    hnp.arrays(np.float32, st.integers(1, 90), elements=numbers),
    hnp.arrays(np.float32, st.integers(1, 90), elements=st.sampled_from([-1.0, 0.0, 1.0, 2.0])),
    hnp.arrays(np.float32, st.integers(1, 90), elements=st.sampled_from([-math.inf, 0.5, 0.75])),
)
firsts = st.one_of(
    st.floats(width=32),
    st.floats(47, 81, width=32),
    st.sampled_from([STATE_VALUE_ONLY, STATE_INFINITE, STATE_MASKED, -1.0, 0.5]),
)
states = st.builds(
    lambda first, value, limit, packed_errors: types.StepState(F(first), F(value), F(limit), packed_errors),
    firsts, numbers, numbers, st.integers(0, 2**32 - 1),
)  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Rows are short here: threads would take longer to meet than to work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def oracle(scores: Tensor, k: int, length: int | None = None) -> np.ndarray:
    lengths = torch.tensor([len(scores) if length is None else length])
    return sorted_topk(scores[None], lengths, k)[0].numpy()


def plan_of(shape: str, dtype: torch.dtype = torch.float32) -> tuple[int, int, object]:
    width, ctas, k = SHAPES[shape]
    made = plan(rows=1, width=width, k=k, ctas_per_row=ctas, dtype=dtype)
    assert made.family == shape.split()[0]
    return width, k, made


def row_of(values: Tensor, k: int = 512, ctas: int = 2) -> types.Row:
    made = plan(rows=1, width=len(values), k=k, ctas_per_row=ctas, dtype=values.dtype)
    return types.Row(values.float().numpy(), len(values), k, values.dtype, made)


def normal(width: int, seed: int = 0) -> Tensor:
    return torch.randn(width, generator=torch.Generator().manual_seed(seed))


def assert_consistent(result: StepResult, scores: Tensor, length: int, k: int) -> None:
    """Statistics agree with each other, whatever the row."""
    stats = result.stats
    assert len(stats.columns()) == len(StatsColumn)
    if length <= k:
        assert stats.columns()[1:] == (0, 0, 0, -1, 0, 0, 0)
        assert stats.reason in (HintReason.NO_STATE, HintReason.SHORT_ROW)
        return
    assert stats.passes >= 1 and -1 <= stats.hits <= k
    if result.interval is None:
        assert stats.passes == 1 and stats.guess in (GuessSource.NONE, GuessSource.VALUE)
        assert stats.guess_hit == (stats.guess == GuessSource.VALUE and stats.done == 0)
        return
    assert stats.guess == result.interval.source != GuessSource.NONE
    keys = np.sort(types.keys_of(scores[:length].float().numpy()))[::-1]
    missed = not result.interval.holds_key(int(keys[k - 1]))
    # Where the guess is said to have hit at once, the interval holds the k-th key, and no round was needed.
    if stats.guess_hit and stats.passes == 1:
        assert not missed and stats.done == 0
        assert stats.candidates == np.count_nonzero(
            (keys >= result.interval.lo) & (keys <= result.interval.hi)
        )
    if missed:
        assert not (stats.guess_hit and stats.passes == 1)


@settings(max_examples=300, deadline=None)
@given(
    row=rows,
    k=st.integers(1, 40),
    family=st.sampled_from(["small_row", "resident"]),
    state=st.one_of(st.none(), states),
    missing=st.integers(0, 20),
    dtype=st.sampled_from(DTYPES),
)
def test_equals_the_oracle_whatever_the_row_and_the_state(row, k, family, state, missing, dtype):
    scores = torch.from_numpy(row).to(dtype)
    length = max(len(row) - missing, 0)
    made = plan(rows=1, width=len(row), k=k, ctas_per_row=SMALL[family], dtype=dtype)
    assert made.family == family
    result = topk_step(scores, k, made, length=length, state=state)
    np.testing.assert_array_equal(result.indices, oracle(scores, k, length))
    assert_consistent(result, scores, length, k)
    assert (result.state is None) == (state is None)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [(shape, dtype) for dtype in (torch.float32, torch.float16) for shape in SHAPES]
    # What depends on the dtype depends on its size, but for the keys, which each family reads in one way.
    + [(shape, torch.bfloat16) for shape in ("small_row", "resident", "streaming")],
)
def test_adversarial_rows_from_every_kind_of_state(shape, dtype):
    width, k, made = plan_of(shape, dtype)
    kinds = [-1.0, 64.5, 66.0, STATE_VALUE_ONLY, STATE_INFINITE, STATE_MASKED, 0.9, -0.5]
    usual = predictor._packed(F(0.05), F(0.05), False)
    for i, (name, row) in enumerate(adversarial_rows(width, k, seed=1).items()):
        scores = torch.from_numpy(row).to(dtype)
        wanted = oracle(scores, k)
        for state in (
            None,
            types.StepState(F(kinds[i % 8]), F(1.5), F(0.1), usual),
            types.StepState(F(kinds[(i + 3) % 8]), F(1.5), F(10.0), usual | 1),
        ):
            for step in range(2 if state else 1):  # from what was given, then from what this left
                result = topk_step(scores, k, made, state=state)
                np.testing.assert_array_equal(result.indices, wanted, err_msg=f"{name}, {state}, {step}")
                assert_consistent(result, scores, width, k)
                state = result.state


@pytest.mark.parametrize("shape", ["small_row", "resident", "streaming", "fallback"])
def test_hints_change_one_column_alone(shape):
    width, k, made = plan_of(shape)
    scores = normal(width)
    wanted = oracle(scores, k)
    state = types.StepState(F(STATE_VALUE_ONLY), scores.sort().values[-k].numpy(), F(0.1), 0x3D803D81)
    alone = topk_step(scores, k, made, state=state)
    assert alone.stats.hits == -1
    for hint in [wanted, *(hint[:k] for hint in adversarial_hints(width, k, seed=2).values())]:
        result = topk_step(scores, k, made, state=state, hint=hint, hint_offset=0)
        np.testing.assert_array_equal(result.indices, wanted)
        assert replace(result.stats, hits=-1) == alone.stats and result.state == alone.state
        inside = hint[(hint >= 0) & (hint < width)]
        assert result.stats.hits == np.isin(inside, wanted).sum()
    shifted = topk_step(scores, k, made, state=state, hint=wanted - 1, hint_offset=1).stats.hits
    assert shifted == k - (wanted[0] == 0)


def test_the_gate_names_its_reason():
    """The gate decides, by what was read; a short row goes by windows alone, others by them, too."""
    known = types.StepState(F(STATE_VALUE_ONLY), F(1.5), F(0.1), 0x3D803D81)
    window = types.StepState(F(-0.5))
    for shape, used, other in (
        ("small_row", window, known),
        ("resident", known, window),
        ("streaming", known, window),
        ("fallback", known, window),
    ):
        width, k, made = plan_of(shape)
        scores = normal(width)

        def reason(state, scores=scores, k=k, made=made, **options):
            return topk_step(scores, k, made, state=state, **options).stats.reason

        assert reason(used) is HintReason.USED
        assert reason(other) is (HintReason.FIRST_STEP if other is known else HintReason.USED)
        assert reason(types.UNKNOWN) is HintReason.FIRST_STEP
        assert reason(None) is HintReason.NO_STATE
        assert reason(used, length=k) is HintReason.SHORT_ROW
        unread = plan(rows=1, width=width, k=k, ctas_per_row=made.ctas_per_row, path="no_hint")
        assert topk_step(scores, k, unread, state=used).stats.reason is HintReason.DISABLED
    narrow = plan(rows=1, width=31, k=8)
    assert topk_step(normal(31), 8, narrow, state=window).stats.reason is HintReason.LAYOUT


@pytest.mark.parametrize("shape", ["resident", "streaming", "fallback"])
def test_any_number_from_48_on_predicts(shape):
    width, k, made = plan_of(shape)
    scores = normal(width)
    kth = scores.sort().values[-k].numpy()
    least = STATE_ZSCORE_ORIGIN - STATE_MAX_ZSCORE
    finite = types.KeyInterval(types.KEY_LEAST_FINITE, types.KEY_MOST_FINITE, GuessSource.VALUE)
    infinite = types.KeyInterval(types.KEY_POS_INF, types.KEY_POS_INF, GuessSource.VALUE)
    for first, interval in (
        (least, None), (80.5, None), (STATE_VALUE_ONLY, None),
        (96.5, infinite), (STATE_INFINITE, infinite),
        (112.5, finite), (STATE_MASKED, finite), (math.inf, finite),
    ):  # fmt: skip
        result = topk_step(scores, k, made, state=types.StepState(F(first), kth, F(0.1), 0x3D803D81))
        np.testing.assert_array_equal(result.indices, oracle(scores, k))
        assert result.stats.reason is HintReason.USED
        if interval is not None:
            assert result.interval == interval
        else:
            assert result.interval.source == GuessSource.VALUE and result.stats.guess_hit
    for first in (np.nextafter(F(least), F(0)), 0.5, 0.0, STATE_UNKNOWN, -math.inf, math.nan):
        result = topk_step(scores, k, made, state=types.StepState(F(first), kth, F(0.1), 0x3D803D81))
        assert result.stats.reason is HintReason.FIRST_STEP
        assert result.stats.guess == GuessSource.ROW_SAMPLE


@pytest.mark.parametrize("shape", ["small_row", "resident", "streaming", "fallback"])
def test_a_state_that_is_not_read_is_written_anew(shape):
    width, k, made = plan_of(shape)
    scores = normal(width)
    unread = replace(made, path="no_hint")
    given = types.StepState(F(-0.5) if shape == "small_row" else F(66.0), F(1.5), F(0.1), 0x3D803D81)
    result = topk_step(scores, k, unread, state=given)
    assert result.stats.guess == (GuessSource.NONE if shape == "small_row" else GuessSource.ROW_SAMPLE)
    afresh = topk_step(scores, k, unread, state=types.UNKNOWN).state
    assert result.state == afresh
    if shape == "small_row":
        return
    # No moments were taken, so there is no z-score, and no error but the first.
    assert result.state.first == F(STATE_VALUE_ONLY) and result.state.uses_value
    assert result.state.value == pytest.approx(float(scores.sort().values[-k]), rel=1e-3)
    assert topk_step(scores, k, unread).state is None


@pytest.mark.parametrize("ctas", [1, 4])
def test_radix_rounds_alone(ctas):
    width, k = 20_000, 512
    made = plan(rows=1, width=width, k=k, ctas_per_row=ctas, path="radix_rounds")
    assert made.family == "fallback"
    scores = normal(width)
    result = topk_step(scores, k, made, state=types.StepState(F(STATE_VALUE_ONLY), F(1.5), F(0.1), 1))
    np.testing.assert_array_equal(result.indices, oracle(scores, k))
    stats = result.stats
    assert (stats.reason, stats.guess, stats.guess_hit) == (HintReason.DISABLED, GuessSource.NONE, 0)
    assert result.interval is None
    # The exchange before the first round, the rounds, and the last look.
    assert stats.done >= 1 and stats.passes == 2 + stats.done
    assert result.state.first == F(STATE_VALUE_ONLY)


def test_a_fallback_predicts_by_value():
    """It takes no moments: what it leaves is a value, and a z-score that others have left serves as one."""
    width, k, made = plan_of("fallback")
    steps = chain(width, 0.99, seed=4, steps=6, dtype=torch.float32)
    state = types.UNKNOWN
    for step, scores in enumerate(steps):
        result = topk_step(scores, k, made, state=state)
        np.testing.assert_array_equal(result.indices, oracle(scores, k))
        assert result.state.first == F(STATE_VALUE_ONLY) and result.state.uses_value
        assert result.stats.guess == (GuessSource.VALUE if step else GuessSource.ROW_SAMPLE)
        assert step < 2 or result.stats.guess_hit
        state = result.state
    by_z = types.StepState(F(66.0), state.value, F(1e-9), predictor._packed(F(0.5), state.value_error, False))
    result = topk_step(steps[-1], k, made, state=by_z)
    assert result.stats.guess == GuessSource.ZSCORE and result.stats.guess_hit
    centre = float(result.interval.low) / 2 + float(result.interval.high) / 2
    assert centre == pytest.approx(float(state.value), abs=1e-5)


def chain(width: int, kept: float, seed: int, steps: int, dtype: torch.dtype) -> list[Tensor]:
    """Scores of steps of which so much of the variance stays."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(width, generator=generator)
    made = []
    for _ in range(steps):
        made.append(scores.to(dtype))
        scores = kept**0.5 * scores + (1 - kept) ** 0.5 * torch.randn(width, generator=generator)
    return made


@pytest.mark.parametrize("shape", ["small_row", "resident", "resident of 16", "streaming", "streaming of 2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_predictions_hit_over_a_chain_of_steps(shape, dtype):
    width, k, made = plan_of(shape, dtype)
    state, sources, hits = types.UNKNOWN, [], 0
    for step, scores in enumerate(chain(width, 0.97, seed=3, steps=12, dtype=dtype)):
        result = topk_step(scores, k, made, state=state)
        np.testing.assert_array_equal(result.indices, oracle(scores, k))
        stats, state = result.stats, result.state
        if step > 0:
            sources.append(stats.guess)
            hits += stats.guess_hit
        if stats.guess_hit:
            assert stats.passes == 1 and stats.done == 0
            assert 1 <= stats.candidates <= 3500
    assert hits >= 10
    assert set(sources) <= {GuessSource.VALUE, GuessSource.ZSCORE}


def test_the_predictor_that_was_closer_is_gone_by():
    """Rows that are scaled each step are updated by their z-score, rows that only drift by their value."""
    width, k = 70_000, 2048
    made = plan(rows=1, width=width, k=k)
    scaled, still = types.UNKNOWN, types.UNKNOWN
    base = chain(width, 0.999, seed=1, steps=8, dtype=torch.float32)
    for step, scores in enumerate(base):
        grown = topk_step(scores * 1.3**step, k, made, state=scaled)
        same = topk_step(scores, k, made, state=still)
        scaled, still = grown.state, same.state
        if step >= 2:
            assert grown.stats.guess == GuessSource.ZSCORE and grown.stats.guess_hit
    assert same.stats.guess == GuessSource.VALUE and same.stats.guess_hit


@pytest.mark.parametrize("shape", ["resident", "streaming", "fallback"])
@pytest.mark.parametrize("ends", [(5.0, 6.0), (-6.0, -5.0), (-9.0, 9.0), (2.0, 2.1)])
def test_an_interval_that_misses_is_resolved(shape, ends):
    """Above, below, and around too much: moved or radix rounds, and still exact."""
    width, k, made = plan_of(shape)
    scores = normal(width)
    row = types.Row(scores.numpy(), width, k, scores.dtype, made)
    interval = types.KeyInterval(types.key_of(F(ends[0])), types.key_of(F(ends[1])), GuessSource.VALUE)
    found = select.exchange(row, select.count_and_list(row, interval))
    assert not (found.complete and resolve.is_buffered(row, interval)) or shape == "fallback"
    moments = predictor.sample_moments(row)
    if shape == "fallback":
        outcome = resolve.radix_fallback(row, interval, types.UNKNOWN, passes=0)
    else:
        resolver = resolve.resolve_miss_resident if shape == "resident" else resolve.resolve_miss_streaming
        outcome = resolver(row, interval, found, moments, types.UNKNOWN)
        assert outcome.passes > 1
    assert found.complete or not outcome.guess_hit
    np.testing.assert_array_equal(select.emit(row, outcome.threshold), oracle(scores, k))


def test_counts_say_where_the_kth_key_lies():
    row = row_of(normal(20_000))
    keys = np.sort(row.keys)[::-1]
    for lo, hi, contains_k in ((600, 400, True), (511, 511, True), (510, 500, False), (700, 512, False)):
        interval = types.KeyInterval(int(keys[lo]), int(keys[hi]))
        counts = select.count_and_list(row, interval)
        assert len(counts) == row.ctas
        found = select.exchange(row, counts)
        assert (found.above, found.inside) == (hi, lo - hi + 1)
        assert found.contains_k == found.complete == contains_k
        assert not contains_k or keys[found.above + found.rank - 1] == keys[row.k - 1]
        where = resolve.range_of(row, interval, found)
        assert where.holds_key(int(keys[row.k - 1]))


def test_lists_that_overflow_do_not_hold():
    row = row_of(torch.ones(20_000).index_fill(0, torch.arange(9000), 2.0).add(normal(20_000).abs() * 1e-3))
    interval = types.KeyInterval(types.key_of(F(1.9)), types.key_of(F(2.1)))
    found = select.exchange(row, select.count_and_list(row, interval))
    assert row.segment < 9000
    assert found.contains_k and not found.complete and len(found.listed) == row.segment
    assert resolve.move_interval(row, interval, found) is None


@pytest.mark.parametrize(
    ("name", "rounds"),
    [("normal", 4), ("zeros", 4), ("masked", 1), ("infinite", 2), ("nan", 2), ("half nan", 2)],
)
def test_radix_rounds_end_at_an_interval_that_fits(name, rounds):
    values = {
        "normal": normal(20_000),
        "zeros": torch.zeros(20_000),
        "masked": torch.full((20_000,), -torch.inf),
        "infinite": torch.full((20_000,), torch.inf),
        "nan": torch.full((20_000,), torch.nan),
        "half nan": torch.cat([torch.full((10_000,), torch.nan), normal(10_000)]),
    }[name]
    row = row_of(values)
    interval, taken = resolve.radix_select(row, types.EVERYTHING)
    kth = int(np.sort(row.keys)[::-1][row.k - 1])
    assert interval.holds_key(kth)
    assert 1 <= taken <= rounds
    assert select.exchange(row, select.count_and_list(row, interval)).complete
    assert resolve.radix_select(row, types.only(types.KEY_NEG_INF)) == (types.only(types.KEY_NEG_INF), 0)
    assert resolve.radix_select(row, types.only(KEY_NAN)) == (types.only(KEY_NAN), 0)


def test_a_moved_interval_lies_beside_the_one_that_missed():
    row = row_of(normal(20_000))
    keys = np.sort(row.keys)[::-1]
    for lo, hi, is_below in ((500, 300, True), (800, 600, False)):
        interval = types.KeyInterval(int(keys[lo]), int(keys[hi]))
        found = select.exchange(row, select.count_and_list(row, interval))
        moved = resolve.move_interval(row, interval, found)
        assert moved is not None
        assert moved.hi == interval.lo - 1 if is_below else moved.lo == interval.hi + 1
        assert select.exchange(row, select.count_and_list(row, moved)).complete
    empty = types.KeyInterval(int(keys[300]) + 1, int(keys[299]) - 1)
    nothing = select.exchange(row, select.count_and_list(row, empty))
    assert nothing.inside == 0 and resolve.move_interval(row, empty, nothing) is None


@pytest.mark.parametrize("shape", ["resident", "streaming"])
def test_masked_rows_are_known_from_one_count(shape):
    width, k, made = plan_of(shape)
    scores = torch.full((width,), -torch.inf)
    scores[::200] = normal(len(scores[::200]))
    state = types.UNKNOWN
    for step in range(3):
        result = topk_step(scores, k, made, state=state)
        np.testing.assert_array_equal(result.indices, oracle(scores, k))
        state = result.state
        assert state.is_masked
        if step > 0:
            assert (result.stats.passes, result.stats.guess, result.stats.done) == (1, GuessSource.VALUE, 0)
            assert result.stats.candidates == len(scores[::200])
    later = topk_step(normal(width), k, made, state=state)
    np.testing.assert_array_equal(later.indices, oracle(normal(width), k))


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
@pytest.mark.parametrize("shape", ["resident", "streaming"])
def test_infinite_kth_values_are_remembered(shape, value):
    width, k, made = plan_of(shape)
    scores = normal(width)
    scores[5 : 2 * k] = value
    first = topk_step(scores, k, made, state=types.UNKNOWN)
    assert first.state.is_infinite
    second = topk_step(scores, k, made, state=first.state)
    np.testing.assert_array_equal(second.indices, oracle(scores, k))
    assert second.interval == types.KeyInterval(types.KEY_POS_INF, types.KEY_POS_INF, GuessSource.VALUE)
    assert second.stats.guess_hit == (value == torch.inf)


def test_a_window_that_misses_takes_more_rounds():
    width, k, made = plan_of("small_row")
    first = topk_step(normal(width), k, made, state=types.UNKNOWN)
    assert first.stats.guess == GuessSource.NONE and not first.stats.guess_hit
    far = topk_step(normal(width) + 50.0, k, made, state=first.state)
    assert (far.stats.guess, far.stats.guess_hit) == (GuessSource.VALUE, 0)
    assert far.stats.done >= 1 and far.stats.snap == far.stats.done + 1
    again = topk_step(normal(width) + 50.0, k, made, state=far.state)
    assert (again.stats.guess_hit, again.stats.snap, again.stats.done) == (1, 1, 0)


def test_arguments_are_checked():
    made = plan(rows=1, width=64, k=8)
    paper = plan(rows=1, width=64, k=512, path="paper_gvr")
    other = "another kernel than the paper's, see gvr_topk.evaluation.paper_reference"
    for wrong, message in (
        ({"scores": torch.zeros(64).int()}, "scores: wanted dtype float32, bfloat16 or float16, got int32"),
        ({"scores": [1.0]}, "scores: wanted a Tensor, got list"),
        ({"scores": torch.zeros(2, 32)}, r"scores: wanted shape \[width\], got \[2, 32\]"),
        ({"k": 0}, "k: wanted 1 to 2097152, got 0"),
        ({"k": 8.0}, "k: wanted an integer, got 8.0"),
        ({"length": 65}, "length: wanted at most 64, got 65"),
        ({"hint": np.zeros(9, dtype=np.int32)}, r"hint: wanted shape \[8\], got \[9\]"),
        ({"plan": paper}, f"plan: wanted {other}, got paper_gvr"),
    ):
        with pytest.raises(ValueError, match=f"^{message}$"):
            topk_step(**{"scores": torch.zeros(64), "k": 8, "plan": made} | wrong)


def test_a_stream_keeps_what_is_not_dense():
    row = row_of(normal(40_000), ctas=1)
    assert row.plan.family == "streaming"
    low, zero, one, high = (types.key_of(F(x)) for x in (-3.0, 0.0, 1.0, 9.0))
    assert resolve.is_buffered(row, types.KeyInterval(one, high))
    assert not resolve.is_buffered(row, types.KeyInterval(low, low + 1)), "more than there is room for"
    relu = replace(row, values=np.where(row.values > 2, row.values, F(0)))
    assert not resolve.is_buffered(relu, types.KeyInterval(zero, high)), "a tie key may be shared by most"
    masked = replace(row, values=np.where(row.values > 2, row.values, F(-np.inf)))
    assert resolve.is_buffered(masked, types.KeyInterval(types.KEY_LEAST_FINITE, high))
    assert not resolve.is_buffered(masked, types.KeyInterval(low, high))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ["resident", "streaming of 2"])
def test_a_row_much_shorter_than_its_buffer_is_selected_from_by_one_cta(shape, dtype):
    """It does as in a buffer of its own width, but for the state, all of which is stored."""
    width, k, made = plan_of(shape, dtype)
    length = 8000
    own = plan(rows=1, width=length, k=k, dtype=dtype)
    assert own.family == "small_row"
    wide = narrow = types.StepState(F(-0.5), F(1.5), F(0.1), 7)
    for scores in chain(width, 0.97, seed=6, steps=4, dtype=dtype):
        result = topk_step(scores, k, made, length=length, state=wide)
        wanted = topk_step(scores[:length], k, own, state=narrow)
        np.testing.assert_array_equal(result.indices, oracle(scores, k, length))
        np.testing.assert_array_equal(result.indices, wanted.indices)
        assert result.stats == wanted.stats and result.interval is None
        wide, narrow = result.state, wanted.state
        assert wide == types.StepState(narrow.first)


@pytest.mark.parametrize("shape", ["resident", "resident of 16", "streaming", "streaming of 2"])
def test_a_row_that_the_cluster_comes_to_share_is_predicted_from_its_window(shape):
    """Where it grows past what one CTA selects from, it goes by the window around the last k-th value."""
    width, k, made = plan_of(shape)
    state, limit = types.UNKNOWN, 8192 if made.family == "resident" else 16_384
    for step, scores in enumerate(chain(width, 0.99, seed=7, steps=10, dtype=torch.float32)):
        length = limit - 8 + step
        result = topk_step(scores, k, made, length=length, state=state)
        np.testing.assert_array_equal(result.indices, oracle(scores, k, length))
        assert (result.interval is None) == (length <= limit)
        assert result.stats.reason is (HintReason.USED if step else HintReason.FIRST_STEP)
        if length > limit:
            assert result.stats.guess == GuessSource.VALUE and result.stats.guess_hit
            assert result.stats.candidates <= 3500 and result.state.is_known
        state = result.state
    assert length == limit + 1
