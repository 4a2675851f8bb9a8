"""The model of the prefill kernel: exact on every run of rows, and its predictor does what its text says."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

from gvr_topk import indexer_topk_prefill
from gvr_topk.constants import GuessSource, HintReason
from gvr_topk.contract import DTYPES
from gvr_topk.evaluation import prefill_reference as model
from gvr_topk.evaluation.oracle import sorted_row
from gvr_topk.evaluation.shipped_types import KEY_ABSENT, KEY_NEG_INF, KEY_POS_INF, key_of

F = np.float32
CPP = Path(__file__).resolve().parents[2] / "cpp"
ROWS, WIDTH, K = 12, 20_000, 512
INF, NAN = math.inf, math.nan

numbers = st.one_of(
    st.floats(width=32, allow_nan=True, allow_infinity=True, allow_subnormal=True),
    st.sampled_from([0.0, -0.0, INF, -INF, NAN, 1.0, -1.0]),
)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Rows hold anything, and the parts of the model leave it to `select_run` to say so."""
    with np.errstate(all="ignore"):
        yield


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def correlated(rows: int = ROWS, width: int = WIDTH, noise: float = 0.05) -> Tensor:
    """Rows of neighbouring query tokens, which are much alike."""
    return normal(width) + noise * normal(rows, width, seed=1)


def whole(scores: Tensor) -> tuple[Tensor, Tensor]:
    rows, width = scores.shape
    return torch.zeros(rows, dtype=torch.int32), torch.full((rows,), width, dtype=torch.int32)


def run(scores: Tensor, k: int = K, *, predicts: bool = True) -> list[model.RowResult]:
    """Select in whole rows, each of which has to be exact."""
    results = model.select_run(scores, *whole(scores), k, predicts=predicts)
    for result, row in zip(results, scores.float().numpy(), strict=True):
        wanted = sorted_row(row, k)
        assert result.indices.dtype == np.int32
        assert result.indices.tolist() == wanted.tolist() + [-1] * (k - len(wanted))
    return results


# ---------------------------------------------------------------- exact


@given(
    hnp.arrays(np.float32, st.tuples(st.integers(1, 5), st.integers(1, 90)), elements=numbers),
    st.integers(1, 95),
    st.booleans(),
)
def test_any_rows(values: np.ndarray, k: int, predicts: bool) -> None:
    run(torch.from_numpy(values), k, predicts=predicts)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [1, 7, K, 2048, 2049])
def test_correlated_rows(dtype: torch.dtype, k: int) -> None:
    run(correlated().to(dtype), k)


def hard_rows() -> Tensor:
    """Neighbours that are nothing alike: masked, tied, infinite, NaN, rescaled, jumping."""
    rows = correlated()
    rows[1] = 7.0
    rows[2, 100:] = -INF
    rows[3, :700] = INF
    rows[4, ::3] = NAN
    rows[5] *= 1e30
    rows[6] = rows[6].relu()
    rows[7] = (rows[7] > 1).float()
    rows[8] -= 1000.0
    rows[9] = torch.arange(WIDTH)
    rows[10, 5:] = -0.0
    return rows


@pytest.mark.parametrize("dtype", DTYPES)
def test_hard_rows(dtype: torch.dtype) -> None:
    rows = hard_rows().to(dtype)
    for k in (1, K, 2048):
        run(rows, k)
        run(rows.flip(0), k)
        run(rows, k, predicts=False)


@given(
    st.lists(st.tuples(st.integers(-9, 600), st.integers(-9, 600)), min_size=1, max_size=8),
    st.sampled_from([1, 8, 100]),
)
def test_windows_are_those_of_the_op(windows: list[tuple[int, int]], k: int) -> None:
    scores = correlated(len(windows), 590).round(decimals=1)
    scores[:, ::50] = NAN
    starts, ends = (torch.tensor(columns, dtype=torch.int32) for columns in zip(*windows, strict=True))
    got = [result.indices.tolist() for result in model.select_run(scores, starts, ends, k)]
    assert got == indexer_topk_prefill(scores, starts, ends, k).tolist()


# ---------------------------------------------------------------- where the interval comes from


def sources(results: list[model.RowResult]) -> list[GuessSource]:
    return [result.stats.guess for result in results]


@pytest.mark.parametrize("width", [WIDTH, 150_000])
def test_correlated_rows_go_by_the_row_before(width: int) -> None:
    """The first row has none before it, and the second takes values to move as those of random rows do."""
    results = run(correlated(width=width))
    assert sources(results) == [GuessSource.ROW_SAMPLE] + [GuessSource.VALUE] * (ROWS - 1)
    by_value = [result.stats for result in results[1:]]
    assert sum(stats.guess_hit for stats in by_value) >= ROWS - 2
    assert {stats.reason for stats in by_value} == {HintReason.USED}
    # Far narrower than an interval by sample.
    by_sample = results[0].stats.candidates
    assert np.mean([stats.candidates for stats in by_value if stats.passes == 1]) < by_sample


def test_rows_that_jump_go_by_a_sample() -> None:
    jumps = torch.tensor([3.0 if row % 2 else -3.0 for row in range(ROWS)])
    first, second, *others = run(normal(ROWS, WIDTH) + jumps[:, None])
    assert (second.stats.guess, second.stats.passes) == (GuessSource.VALUE, 2)
    results = [first, *others]
    assert sources(results) == [GuessSource.ROW_SAMPLE] * (ROWS - 1)
    assert {result.stats.reason for result in results} == {HintReason.FIRST_STEP}
    assert all(result.stats.guess_hit and result.stats.passes == 1 for result in results)


def test_a_jump_takes_a_second_pass() -> None:
    """The row before has told too much: a sample puts it right, and predictions wait until rows are calm."""
    rows = correlated(30, noise=0.02)
    rows[15:] += 2.0
    results = run(rows)
    jump = results[15].stats
    assert (jump.reason, jump.guess) == (HintReason.USED, GuessSource.VALUE)
    assert (jump.passes, jump.guess_hit, jump.done) == (2, 0, 0)
    assert sources(results)[16] is GuessSource.ROW_SAMPLE
    assert sources(results)[-1] is GuessSource.VALUE


def test_ties_are_tried_first_in_the_next_row() -> None:
    rows = correlated(4)
    rows[1:] = 2.0
    first, second, third, fourth = run(rows)
    assert first.stats.guess_hit
    assert (second.stats.passes, second.stats.done) == (4, 3)
    assert second.predictor == model.RowPredictor(tie_key=key_of(F(2.0)))
    for result in (third, fourth):
        assert (result.stats.passes, result.stats.done, result.stats.guess) == (1, 0, GuessSource.NONE)


@pytest.mark.parametrize(("value", "key"), [(-INF, KEY_NEG_INF), (INF, KEY_POS_INF)])
def test_a_key_that_is_not_finite_is_tried_too(value: float, key: int) -> None:
    rows = correlated(3, 600)
    rows[:2, 10:] = value
    masked, again, other = run(rows, 20)
    assert masked.predictor.tie_key == again.predictor.tie_key == key
    assert (masked.stats.done, again.stats.done) == (3, 0)
    assert other.stats.done == 3
    assert other.predictor == model.RowPredictor()


def test_few_ties_are_forgotten() -> None:
    indices, tie_key, _ = model.radix_select_row(np.zeros(model.MOST_TIES, dtype=F), 3, KEY_ABSENT)
    assert (indices.tolist(), tie_key) == ([0, 1, 2], KEY_ABSENT)
    assert model.radix_select_row(np.zeros(model.MOST_TIES + 1, dtype=F), 3, KEY_ABSENT)[1] == key_of(F(0.0))


@pytest.mark.parametrize(("dtype", "rounds"), [(torch.float32, 3), (torch.bfloat16, 2), (torch.float16, 2)])
def test_without_predictions(dtype: torch.dtype, rounds: int) -> None:
    for result in run(correlated(2, 3000).to(dtype), predicts=False):
        assert result.stats.columns() == (HintReason.DISABLED, 1, 0, 0, -1, GuessSource.NONE, 0, rounds)


def test_a_larger_k_than_candidates_have_room_for() -> None:
    (result,) = run(normal(1, WIDTH), model.MAX_K + 1)
    assert (result.stats.guess, result.stats.passes, result.stats.done) == (GuessSource.NONE, 1, 3)


def test_short_rows_leave_the_prediction_as_it_is() -> None:
    scores = correlated(3)
    starts, ends = whole(scores)
    ends[1] = K
    before, short, after = model.select_run(scores, starts, ends, K)
    assert short.stats.columns() == (HintReason.SHORT_ROW, 0, 0, 0, -1, GuessSource.NONE, 0, 0)
    assert short.indices.tolist() == list(range(K))
    assert short.predictor == before.predictor
    assert after.predictor.error >= 0


# ---------------------------------------------------------------- the parts


def test_the_error_follows_how_far_values_move() -> None:
    def learn(last: model.RowPredictor, kth: float) -> model.RowPredictor:
        return last.learn(F(kth), F(0.01), 2500)

    first = learn(model.RowPredictor(), 1.0)
    assert first.has_value and first.is_close
    assert first.error == pytest.approx(1.1 * 50 * 0.01)
    second = learn(first, 1.5)
    assert second.error == pytest.approx(0.8 * 0.55 + 0.2 * 0.5)
    assert second.interval().hi == pytest.approx(1.5 + 5 * 0.54)
    calm = learn(second, 1.5)
    assert calm.error == pytest.approx(0.8 * 0.54)  # decays slowly
    assert learn(calm, 9.5).error == pytest.approx(0.8 * 0.432 + 0.2 * 8)
    assert not learn(calm, 99.5).is_close
    # However calm rows are, an interval is as wide as so many elements need.
    still = model.RowPredictor(F(0.0), F(0.0), F(0.01), True)
    assert still.interval().hi == pytest.approx(0.64)


def test_bins_keep_the_order_of_values() -> None:
    interval = model.ValueInterval(F(-3e38), F(3e38), F(-1.0), F(2.0))
    values = np.array([-3e38, -1.0, -0.5, 0.0, 1.0, 2.0, 3e38, NAN], dtype=F)
    bins = interval.bins(values)
    assert (np.diff(bins) >= 0).all()
    assert (bins[0], bins[-1]) == (0, model.FINE_BINS - 1)
    assert interval.value_of(int(bins[4])) == pytest.approx(1.0, abs=3 / model.FINE_BINS)
    assert (model.ValueInterval(*[F(1.0)] * 4).bins(np.full(3, F(1.0))) == model.FINE_BINS - 1).all()


def test_an_interval_that_misses() -> None:
    values = np.arange(1000, dtype=F)
    missing = [(995.0, 2000.0), (0.0, 900.0), (100.5, 100.6)]
    for lo, hi in missing:
        assert model.select_in(values, 10, model.ValueInterval(F(lo), F(hi), F(lo), F(hi)))[0] is None
    full = np.zeros(model.STORE_ITEMS + 1, dtype=F)
    around = model.ValueInterval(F(-1.0), F(1.0), F(-1.0), F(1.0))
    assert model.select_in(full, 10, around)[:2] == (None, model.STORE_ITEMS + 1)
    found, inside, kth = model.select_in(full[1:], 10, around)
    assert found is not None
    assert (found.tolist(), inside) == (list(range(10)), model.STORE_ITEMS)
    assert abs(kth) < 2 / model.FINE_BINS


def test_intervals_by_sample_hold_the_kth() -> None:
    for seed in range(20):
        values = normal(WIDTH, seed=seed).numpy()
        interval = model.guess_by_sample(values, K)
        assert interval.lo <= np.sort(values)[-K] <= interval.hi
        assert np.count_nonzero((values >= interval.lo) & (values <= interval.hi)) < model.STORE_ITEMS
    nearly_all = model.guess_by_sample(values, WIDTH - 1)
    assert nearly_all.lo == np.finfo(F).min and nearly_all.first == pytest.approx(values.min(), abs=2)
    few = model.guess_by_sample(values, 1)
    assert few.hi == np.finfo(F).max and few.last < 10
    assert model.guess_by_sample(values[:3], 1).width == INF


NUMBERS = {
    "kPrefillThreads": model.THREADS,
    "kPrefillMaxK": model.MAX_K,
    "kStoreChunks": model.STORE_ITEMS // 32,
    "kLog2Chunk": 5,
    "kMostTies": model.MOST_TIES,
    "kLog2Bins": model.FINE_BINS.bit_length() - 1,
    "kLog2KeyBins": model.LOG2_KEY_BINS,
    "kMaxInside": model.MAX_INSIDE,
    "kMinInside": model.MIN_INSIDE,
    "kErrors": model.ERRORS,
    "kErrorDecay": model.ERROR_DECAY,
    "kFastestDecay": model.FASTEST_DECAY,
    "kDeviations": model.DEVIATIONS,
    "kCloser": model.CLOSER,
    "kWider": model.WIDER,
    "kLog2OfProbe": model.LOG2_OF_PROBE,
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_are_those_of_the_kernel(name: str) -> None:
    headers = [
        *sorted((CPP / "kernels" / "prefill").glob("*.cuh")),
        CPP / "kernels" / "core" / "config.cuh",
        CPP / "kernels" / "core" / "row_predictor.cuh",
        CPP / "include" / "gvr_topk" / "policy.h",
    ]
    text = "\n".join(header.read_text() for header in headers)
    (found,) = set(re.findall(rf"\b(?<!::){name} = ([\d.f +]+)[,;]", text))
    assert F(sum(float(part.rstrip("f ")) for part in found.split("+"))) == F(NUMBERS[name])
