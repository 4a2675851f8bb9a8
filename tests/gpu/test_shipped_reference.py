"""The kernels do what their model says: their statistics, step by step, are those of shipped_reference.

Each step of the model starts from the state that the kernel itself left, so that steps are independent, and a
difference of the last bit in one does not add up. What is compared, by where a guess came from:

* A prediction by value takes no approximate arithmetic. From the same state the interval is the same bit for
  bit; where it holds, so is all of the statistics. Where it misses, the moved interval comes of approximate
  logarithms: only that it has missed is compared.
* A prediction by z-score goes by a deviation whose square root is approximate in the kernel, and whose sums a
  compiler may fuse. The ends of the interval agree to `TOLERANCE`, so the candidates lie between those of an
  interval that is smaller by it and one that is larger; whether it hits is compared unless the two differ.
  Rounds of the selection depend on the very bits of the lower end, and are not compared.
* The value window of short rows is exact arithmetic: all of the statistics agree, and what is left.
* A sample of the row goes by an approximate power, which may move a rank by one: its source is compared.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from oracle import full_lengths, new_stats, run_forced, words
from torch import Tensor

from gvr_topk.constants import GuessSource, StatsColumn
from gvr_topk.evaluation.shipped_reference import StepResult, topk_step
from gvr_topk.evaluation.shipped_select import count_and_list, exchange
from gvr_topk.evaluation.shipped_types import F, KeyInterval, Row, StepState, finite_interval, key_of
from gvr_topk.policy import Plan, plan
from gvr_topk.state import TopkState

K = 2048
STEPS = 10
JUMP = 7
"""The step at which a chain that jumps does."""

TOLERANCE = 2.0**-19
"""Of an interval by z-score, as a part of its greatest number: 16 units in the last place of float32. The
root and its reciprocal are good to two, the sums of squares of scores around zero to one or two more."""

SHAPES = {
    "small_row": (8192, 0),
    "small_row, long": (16_384, 0),
    "resident": (70_704, 0),
    "resident, wide": (262_144, 0),
    "streaming": (600_000, 0),
    "streaming, 4 CTAs": (262_144, 4),
    "streaming, one CTA": (131_072, 1),
}
"""Width and forced cluster size."""


@dataclass(frozen=True)
class Launch:
    """One launch: what it chose, its statistics, and what it left."""

    indices: Tensor
    stats: Tensor
    left: Tensor


def launch(logits: Tensor, left: Tensor, ctas: int) -> Launch:
    """The op with statistics, from a state that stays as it is; the one place that knows its signature."""
    after, stats = left.clone(), new_stats(logits.shape[0])
    state = TopkState.of(after, None, K)
    got = run_forced(logits, full_lengths(logits), K, ctas, state=state, stats=stats)
    return Launch(got, stats, after)


def plan_of(logits: Tensor, ctas: int) -> Plan:
    """The plan of such a launch on this GPU, all of whose multiprocessors are free."""
    device = torch.cuda.get_device_properties(logits.device)
    rows, width = logits.shape
    return plan(
        rows=rows, width=width, k=K, dtype=logits.dtype, ctas_per_row=ctas,
        sm_count=device.multi_processor_count, arch=10 * device.major + device.minor,
    )  # fmt: skip


def chain(kind: str, width: int, dtype: torch.dtype, seed: int = 5) -> list[Tensor]:
    """Two rows a step of which 97 % of the variance stays: as they are, growing, or jumping once."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    scores = torch.randn(2, width, device="cuda", generator=generator)
    made = []
    for step in range(STEPS):
        grown = 1.25**step if kind == "growing" else 1.0
        moved = 3.0 if kind == "jumping" and step == JUMP else 0.0
        made.append((grown * scores + moved).to(dtype))
        fresh = torch.randn(2, width, device="cuda", generator=generator)
        scores = 0.97**0.5 * scores + 0.03**0.5 * fresh
    return made


def row_of(scores: Tensor, made: Plan) -> Row:
    return Row(scores.cpu().float().numpy(), len(scores), K, scores.dtype, made)


def around(interval: KeyInterval, widen: float) -> KeyInterval:
    """An interval whose ends are further out by so much of its greatest number, or further in."""
    low, high = float(interval.low), float(interval.high)
    by = widen * max(abs(low), abs(high))
    return finite_interval(key_of(F(low - by)), key_of(F(high + by)), interval.source)


def compare_by_z_score(row: Row, seen: dict[StatsColumn, int], want: StepResult) -> None:
    """Statistics of a step whose interval is known but for its last bits."""
    assert want.interval is not None
    inner, outer = (
        exchange(row, count_and_list(row, around(want.interval, widen))) for widen in (-TOLERANCE, TOLERANCE)
    )
    assert outer.inside - inner.inside <= max(32, outer.inside // 4), "the tolerance says nothing"
    if inner.complete != outer.complete:
        return
    assert seen[StatsColumn.GUESS_HIT] == want.stats.guess_hit == int(inner.complete)
    if inner.complete:
        assert inner.inside <= seen[StatsColumn.CANDIDATES] <= outer.inside
        assert (seen[StatsColumn.PASSES], seen[StatsColumn.DONE]) == (1, 0)


def compare(row: Row, seen: dict[StatsColumn, int], want: StepResult, left: StepState) -> None:
    """One step of one row: the kernel's statistics and state, and the model's."""
    assert seen[StatsColumn.REASON] == want.stats.reason
    assert seen[StatsColumn.GUESS] == want.stats.guess
    assert seen[StatsColumn.HITS] == want.stats.hits == -1
    wanted = dict(zip(StatsColumn, want.stats.columns(), strict=True))
    if row.plan.family == "small_row":
        assert seen == wanted
        assert left == want.state
    elif seen[StatsColumn.GUESS] == GuessSource.VALUE:
        assert seen[StatsColumn.GUESS_HIT] == want.stats.guess_hit
        if seen[StatsColumn.GUESS_HIT]:
            assert seen == wanted
            compare_states(left, want)
    elif seen[StatsColumn.GUESS] == GuessSource.ZSCORE:
        compare_by_z_score(row, seen, want)
    else:
        assert seen[StatsColumn.GUESS] == GuessSource.ROW_SAMPLE


def compare_states(left: StepState, want: StepResult) -> None:
    """What is left after the same interval: the value exactly, the rest but for approximate reciprocals.

    Which predictor is gone by may differ where both are about as close, and with it the unit of the limit.
    """
    assert want.state is not None
    assert left.value == want.state.value
    assert left.has_z_score == want.state.has_z_score
    np.testing.assert_allclose(left.first, want.state.first, rtol=1e-5)
    np.testing.assert_allclose(left.value_error, want.state.value_error, rtol=2.0**-6)
    np.testing.assert_allclose(left.z_error, want.state.z_error, rtol=2.0**-6)
    if left.uses_value == want.state.uses_value:
        np.testing.assert_allclose(left.limit, want.state.limit, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["still", "growing", "jumping"])
@pytest.mark.parametrize("shape", SHAPES)
def test_statistics_are_the_model_s(shape: str, kind: str, dtype: torch.dtype) -> None:
    width, ctas = SHAPES[shape]
    left = words(2)
    sources, hits = set(), 0
    for step, logits in enumerate(chain(kind, width, dtype)):
        made = plan_of(logits, ctas)
        before, got = left, launch(logits, left, ctas)
        left = got.left
        for r in range(len(logits)):
            want = topk_step(logits[r], K, made, state=StepState.of_tensor(before[r]))
            np.testing.assert_array_equal(got.indices[r].cpu().numpy(), want.indices, err_msg=f"step {step}")
            seen = dict(zip(StatsColumn, got.stats[r].tolist(), strict=True))
            from_state = StepState.of_tensor(before[r])
            print(f"step {step}, row {r}, from {from_state}: {seen}, the model has {want.stats}")
            compare(row_of(logits[r], made), seen, want, StepState.of_tensor(left[r]))
            hits += seen[StatsColumn.GUESS_HIT] and step > 0
            sources.add(seen[StatsColumn.GUESS])
    # Or hardly anything would have been compared. A short row leaves nothing where more than a few 16-bit
    # scores equal the k-th.
    if made.family in ("resident", "streaming"):
        assert hits >= STEPS
        assert sources & {GuessSource.VALUE, GuessSource.ZSCORE}
        assert kind != "growing" or GuessSource.ZSCORE in sources


@pytest.mark.parametrize("shape", ["resident", "streaming, 4 CTAs"])
def test_a_state_of_a_given_interval_is_gone_by_exactly(shape: str) -> None:
    """Intervals by value that hit, miss on either side, and hold more than can be listed."""
    width, ctas = SHAPES[shape]
    logits = chain("still", width, torch.float32)[0]
    kth = logits.topk(K).values[:, -1]
    for offset, spread in ((0.0, 0.03), (0.01, 0.02), (0.5, 0.01), (-0.5, 0.01), (0.0, 1.5)):
        given = []
        for value in kth.tolist():
            halves = torch.tensor([spread, 0.05]).to(torch.bfloat16).view(torch.int16).tolist()
            packed_errors = ((halves[1] & 0xFFFF) << 16) | (halves[0] & 0xFFFF) | 1
            given.append(StepState(F(66.0), F(value + offset), F(10.0), packed_errors))
        before = torch.stack([one.tensor() for one in given]).to("cuda")
        got = launch(logits, before, ctas)
        made = plan_of(logits, ctas)
        for r, one in enumerate(given):
            want = topk_step(logits[r], K, made, state=one)
            np.testing.assert_array_equal(got.indices[r].cpu().numpy(), want.indices)
            seen = dict(zip(StatsColumn, got.stats[r].tolist(), strict=True))
            assert seen[StatsColumn.GUESS] == want.stats.guess == GuessSource.VALUE
            assert seen[StatsColumn.GUESS_HIT] == want.stats.guess_hit, (offset, spread)
            if want.stats.guess_hit:
                assert seen == dict(zip(StatsColumn, want.stats.columns(), strict=True))


def test_the_tolerance_is_what_it_says() -> None:
    interval = finite_interval(key_of(F(1.5)), key_of(F(2.0)), GuessSource.ZSCORE)
    wider, narrower = around(interval, TOLERANCE), around(interval, -TOLERANCE)
    assert wider.lo < interval.lo < narrower.lo < narrower.hi < interval.hi < wider.hi
    assert wider.lo == interval.lo - 32  # numbers below 2 lie half as far apart as those above
    assert replace(wider, lo=interval.lo, hi=interval.hi) == interval
