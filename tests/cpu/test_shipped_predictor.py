"""What the model of the shipped kernels guesses by: samples, predictions, states and value windows."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from gvr_topk.constants import STATE_UNKNOWN, STATE_VALUE_ONLY, GuessSource
from gvr_topk.evaluation import shipped_predictor as predictor
from gvr_topk.evaluation import shipped_sample as sampling
from gvr_topk.evaluation import shipped_small_row as short_rows
from gvr_topk.evaluation import shipped_types as types
from gvr_topk.policy import plan

F = np.float32


def normal(width: int) -> Tensor:
    return torch.randn(width, generator=torch.Generator().manual_seed(0))


def row_of(values: Tensor, k: int = 512, ctas: int = 2) -> types.Row:
    made = plan(rows=1, width=len(values), k=k, ctas_per_row=ctas)
    return types.Row(values.numpy(), len(values), k, values.dtype, made)


def test_moments_of_a_sample():
    row = row_of(3.0 + 2.0 * normal(70_000), ctas=16)
    moments = predictor.sample_moments(row)
    assert moments.known and moments.counted == types.THREADS
    assert abs(moments.mean - 3) < 0.2 and abs(moments.deviation - 2) < 0.2
    with np.errstate(all="ignore"):
        masked = predictor.sample_moments(row_of(torch.full((70_000,), -torch.inf), ctas=16))
    assert masked.counted == 0 and not masked.known
    # What lies behind the row's end does not count; a row much shorter than its buffer is looked at alone.
    buffer = row_of(torch.cat([normal(60_000), torch.full((10_000,), 1e6)]), ctas=16)
    assert abs(predictor.sample_moments(replace(buffer, length=60_000)).mean) < 0.2
    assert predictor.sample_moments(replace(buffer, length=60_000)).counted < types.THREADS
    assert predictor.sample_moments(replace(buffer, length=20_000)).counted == types.THREADS
    few = torch.full((70_000,), -torch.inf)
    few[:3000] = 1.0
    assert not predictor.sample_moments(row_of(few, ctas=16)).known
    assert len(set(predictor.hashed_position(np.arange(512), 70_000).tolist())) > 500
    assert (predictor.hashed_position(np.arange(512), 3) == 0).all()


def test_predictions_reach_as_far_as_their_error():
    moments = predictor.Moments(F(1.0), F(2.0), 512, True)
    packed_errors = predictor._packed(F(0.25), F(0.5), False)
    by_z = predictor.predicted(moments, types.StepState(F(65.0), F(7.0), F(10.0), packed_errors))
    assert (by_z.low, by_z.high, by_z.source) == (2.0, 4.0, GuessSource.ZSCORE)
    limited = predictor.predicted(moments, types.StepState(F(65.0), F(7.0), F(0.125), packed_errors))
    assert (limited.low, limited.high) == (2.5, 3.5)
    uses_value = types.StepState(F(65.0), F(7.0), F(0.25), packed_errors | 1)
    interval = predictor.predicted(moments, uses_value)
    assert (interval.low, interval.high, interval.source) == (6.75, 7.25, GuessSource.VALUE)
    unknown = predictor.Moments(F(1.0), F(2.0), 3, False)
    interval = predictor.predicted(unknown, types.StepState(F(65.0), F(7.0), F(0.25), packed_errors))
    assert (interval.low, interval.high, interval.source) == (6.5, 7.5, GuessSource.ZSCORE)


def left_by(
    last: types.StepState, moments: predictor.Moments, kth: float, inside: int = 100
) -> types.StepState:
    row = row_of(normal(70_000), ctas=16)
    used = types.KeyInterval(types.key_of(F(1.0)), types.key_of(F(2.0)))
    return predictor.next_state(row, last, moments, types.key_of(F(kth)), used, inside, 0)


def test_what_a_step_leaves():
    moments = predictor.Moments(F(0.0), F(1.0), 512, True)
    first = left_by(types.UNKNOWN, moments, 1.5)
    assert (first.z_score, first.value) == (1.5, 1.5)
    # 100 elements lay inside of an interval of 1, half of which is 0.005 for each.
    assert first.value_error == pytest.approx(600 * 0.005, rel=0.01)
    assert first.z_error == pytest.approx(0.05, rel=0.01) and not first.uses_value
    assert first.limit == pytest.approx(1500 * 0.005 / 2.5, rel=0.01)
    # What is expected moves half of the way; an error grows to so many times the miss, or shrinks by a tenth.
    second = left_by(first, moments, 1.75)
    assert (second.z_score, second.value) == (1.625, 1.625)
    assert second.z_error == pytest.approx(1.6 * 0.25 / 2.75, rel=0.01)
    assert second.value_error == pytest.approx(0.9 * first.value_error, rel=0.01)
    third = left_by(second, moments, 1.625)
    assert third.z_error == pytest.approx(0.9 * second.z_error, rel=0.01)
    # An offset leaves no deviation to speak of, nor a place further out than 16.
    assert left_by(first, predictor.Moments(F(100.0), F(1.0), 512, True), 1.5).first == STATE_VALUE_ONLY
    assert left_by(first, predictor.Moments(F(0.0), F(0.01), 512, True), 1.5).first == STATE_VALUE_ONLY
    assert left_by(first, moments, math.inf).is_infinite and left_by(first, moments, -math.inf).is_masked


def test_a_state_survives_as_a_tensor():
    state = types.StepState(F(65.5), F(-2.0), F(0.5), 0xFFC1BEEF)
    assert types.StepState.of_tensor(state.tensor()) == state
    assert types.StepState.of_tensor(types.UNKNOWN.tensor()) == types.UNKNOWN


@pytest.mark.parametrize("divided", [False, True])
@pytest.mark.parametrize(("width", "k"), [(70_000, 2048), (600_000, 2048), (70_000, 20_000), (40_000, 100)])
def test_samples_of_the_row_surround_the_kth_key(width, k, divided):
    row = row_of(normal(width), k=k, ctas=16)
    interval = sampling.guess_by_row(row, divided=divided)
    assert interval.source == GuessSource.ROW_SAMPLE
    assert interval.holds_key(int(np.sort(row.keys)[::-1][k - 1]))
    inside = np.count_nonzero((row.keys >= interval.lo) & (row.keys <= interval.hi))
    assert inside < max(4 * k, width // 8)


def test_the_window_follows_the_kth_value():
    left = short_rows.window_around(F(1.5), F(0.3))
    window = short_rows.known_window(types.StepState(left))
    assert window is not None
    assert window.exponent == 125 << 23 and window.centre == 384  # 0.25, and 1.5 in 64ths of that
    bins = window.bins(
        np.array([-9.0, 1.25, 1.5, 1.75, 9.0, math.inf, math.nan, -math.inf], dtype=np.float32)
    )
    assert bins.tolist() == [0, 0, 1024, 2047, 2047, 2047, 2047, 0]
    ascending = window.bins(np.sort(normal(5000).numpy()))
    assert (np.diff(ascending) >= 0).all()
    moved = short_rows.known_window(types.StepState(window.updated(1024 + 160, 600)))
    assert moved is not None and (moved.exponent, moved.centre) == (window.exponent, 384 + 10)
    wider = short_rows.known_window(types.StepState(window.updated(1024 - 160, 100)))
    assert wider is not None and (wider.exponent, wider.centre) == (126 << 23, (384 - 10) >> 1)
    narrower = short_rows.known_window(types.StepState(window.updated(1024 + 15, 200)))
    assert narrower is not None and (narrower.exponent, narrower.centre) == (124 << 23, 2 * 384)
    for unsound in (F(0), F(math.inf), F(math.nan), F(2.0**80)):
        assert short_rows.window_around(F(1.5), unsound) == STATE_UNKNOWN
    for unknown in (-1.0, 0.5, 64.0, math.nan, -math.inf):
        assert short_rows.known_window(types.StepState(F(unknown))) is None
