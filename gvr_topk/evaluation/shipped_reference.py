"""The algorithm of the shipped kernels, one step of one row, exact and readable.

`topk_step` reads from top to bottom as a kernel runs:

1. ask the **gate** (`gvr_topk.policy.can_use_heuristic`) whether the state that the last step left is used;
2. **predict** an interval of keys for the k-th score, from that state
   (`gvr_topk.evaluation.shipped_predictor`), or from a sample of the row
   (`gvr_topk.evaluation.shipped_sample`);
3. **count** what lies above the interval, and **list** what lies inside, in each CTA of the cluster;
4. **exchange** the counts and the lists, so that all CTAs go on alike (`gvr_topk.evaluation.shipped_select`,
   which also has steps 3, 5 and 6);
5. **select** the k-th key among the listed, by histograms; if the interval has missed it, the interval is
   moved first, or radix rounds take its place (`gvr_topk.evaluation.shipped_resolve_miss`);
6. **emit** the selected positions in ascending order; of equal scores the smallest positions are selected;
7. leave a **state** for the next step.

A row short enough for one CTA is predicted by a window of values (`gvr_topk.evaluation.shipped_small_row`).
If its buffer is so wide that a cluster was launched, the cluster's first CTA selects alone.

The result is the contract's (`gvr_topk.contract`) for every row and every state; the state decides only how
much work it takes. The statistics are the kernels' (`gvr_topk.constants.StatsColumn`). Most functions have
the name of the one under ``cpp/kernels`` that they stand for.

The model covers what is counted and decided, not when: it has neither threads nor memory nor overlap. Rows
are taken to be aligned to 16 bytes if their buffer is at least 32 elements wide, and nobody writes them
meanwhile. Every row has a slot if there is a state. Means, deviations and moved intervals may differ from a
kernel's in the last bits, because kernels take approximate reciprocals, roots and logarithms; then an element
at an interval's end may count as inside in one and not in the other.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gvr_topk.arguments import Checks
from gvr_topk.constants import MAX_WIDTH, GuessSource, HintReason, Path
from gvr_topk.evaluation.shipped_predictor import (
    NO_SAMPLE,
    UNKNOWN_MOMENTS,
    Moments,
    predicted,
    sample_moments,
)
from gvr_topk.evaluation.shipped_resolve_miss import (
    Outcome,
    conclude,
    is_buffered,
    radix_fallback,
    resolve_miss_resident,
    resolve_miss_streaming,
)
from gvr_topk.evaluation.shipped_sample import guess_by_row
from gvr_topk.evaluation.shipped_select import count_and_list, emit, exchange
from gvr_topk.evaluation.shipped_small_row import (
    held_row,
    known_window,
    narrow_keys,
    shared_state,
    try_predicted_window,
)
from gvr_topk.evaluation.shipped_types import (
    KEY_LEAST_FINITE,
    KEY_MOST_FINITE,
    KEY_POS_INF,
    LANES,
    UNKNOWN,
    KeyInterval,
    Row,
    StepState,
)
from gvr_topk.policy import Plan, asks_for_hint, can_use_heuristic, parse_path, values_of_solo_row

Hint = npt.NDArray[np.integer]


@dataclass(frozen=True)
class StepStats:
    """The columns of the statistics, in their order: `gvr_topk.constants.StatsColumn`."""

    reason: HintReason
    passes: int
    candidates: int
    snap: int
    hits: int
    guess: GuessSource
    guess_hit: int
    done: int

    def columns(self) -> tuple[int, ...]:
        return astuple(self)


@dataclass(frozen=True)
class StepResult:
    """One step of one row.

    Attributes
    ----------
    indices : ndarray, shape [k], int32
        Ascending positions, then -1.
    stats : StepStats
    state : StepState or None
        State for the next step; None if the launch has no state.
    interval : KeyInterval or None
        The first interval. None for rows without one: short rows, rows no longer than k, and all rows on path
        ``"radix_rounds"``.
    """

    indices: npt.NDArray[np.int32]
    stats: StepStats
    state: StepState | None
    interval: KeyInterval | None


def topk_step(
    scores: Tensor,
    k: int,
    plan: Plan,
    *,
    length: int | None = None,
    state: StepState | None = None,
    hint: Hint | None = None,
    hint_offset: int = 0,
) -> StepResult:
    """Run one step of one row, as the kernel of `plan` does.

    Parameters
    ----------
    scores : Tensor, shape [width], float32, bfloat16 or float16
        The row's buffer, any content.
    k : int
        Items wanted, at least 1.
    plan : Plan
        Plan of the launch, from `gvr_topk.policy.plan`, for any path but ``"paper_gvr"``.
    length : int, optional
        Visible elements of the buffer; default all.
    state : StepState, optional
        What the last step left in the row's slot, any content;
        `gvr_topk.evaluation.shipped_types.UNKNOWN` at first. None: the launch has no state.
    hint : ndarray, shape [k], integer, optional
        Positions of the last step that the slot keeps. They are counted for the statistics, and for nothing
        else.
    hint_offset : int
        Added to hinted positions.

    Returns
    -------
    StepResult

    Raises
    ------
    ValueError
        `scores` has another dtype, or is not one row; `k` or `length` is out of range, `hint` does not hold
        k positions, or the plan is that of the paper's kernel.

    Examples
    --------
    >>> from gvr_topk.policy import plan
    >>> topk_step(torch.tensor([3.0, 1.0, 2.0, 3.0]), 2, plan(rows=1, width=4, k=2)).indices
    array([0, 3], dtype=int32)
    """
    row = _selected_alone(_checked_row(scores, k, plan, length, hint))
    path = parse_path(plan.path)
    reads_state = state is not None and asks_for_hint(path) and row.width >= LANES
    last = state if state is not None and reads_state else UNKNOWN
    reason = gate(row, path, last, has_state=state is not None)
    if row.length <= k:
        return _short_result(row, reason, state)
    with np.errstate(all="ignore"):  # whatever rows and states hold, as on a GPU
        interval, source = None, GuessSource.NONE
        if row.plan.family == "small_row":
            source = GuessSource.VALUE if reason is HintReason.USED else GuessSource.NONE
            outcome = _step_of_small_row(row, reason, last)
        elif path is Path.RADIX_ROUNDS:
            # CTAs agree on the length first, which is an exchange without a look at the row.
            outcome = radix_fallback(row, None, last, passes=1)
        else:
            moments = _moments(row, reads_state=reads_state)
            if reads_state or row.plan.family == "fallback":
                interval = guess(row, reason, shared_state(last), moments)
            else:
                interval = guess_without_state(row)
            source = interval.source
            outcome = verify(row, interval, moments, last)
        indices = emit(row, outcome.threshold)
    stats = StepStats(
        reason=reason,
        passes=outcome.passes,
        candidates=outcome.candidates,
        snap=outcome.rounds,
        hits=_count_hits(row, outcome, hint, hint_offset),
        guess=source,
        guess_hit=int(outcome.guess_hit),
        done=outcome.radix_rounds,
    )
    return StepResult(indices, stats, outcome.state if state is not None else None, interval)


def gate(row: Row, path: Path, last: StepState, *, has_state: bool) -> HintReason:
    """Whether the state of the last step is used, or why not.

    Parameters
    ----------
    row : Row
    path : Path
    last : StepState
        The state that was read.
    has_state : bool
        Whether the launch has a state, read or not.

    Returns
    -------
    HintReason
    """
    is_small = row.plan.family == "small_row"
    return can_use_heuristic(
        length=row.length,
        k=row.k,
        enabled=asks_for_hint(path),
        has_state=has_state,
        aligned=row.width >= LANES,
        known=known_window(last) is not None if is_small else shared_state(last).is_known,
    ).code


def guess(row: Row, reason: HintReason, last: StepState, moments: Moments) -> KeyInterval:
    """Return an interval that should hold the k-th key, if CTAs may have read different states.

    No CTA waits for another, so each takes the whole sample if one is needed.

    Parameters
    ----------
    row : Row
    reason : HintReason
        The gate's answer.
    last : StepState
        What the last step left.
    moments : Moments
        Moments of this step's sample.

    Returns
    -------
    KeyInterval
    """
    if reason is HintReason.USED:
        if last.has_value:
            return predicted(moments, last)
        if last.is_infinite:
            return KeyInterval(KEY_POS_INF, KEY_POS_INF, GuessSource.VALUE)
        return KeyInterval(KEY_LEAST_FINITE, KEY_MOST_FINITE, GuessSource.VALUE)  # a masked row
    if moments.counted == 0:  # a row that is masked nearly everywhere
        return KeyInterval(KEY_LEAST_FINITE, KEY_MOST_FINITE, GuessSource.ROW_SAMPLE)
    return guess_by_row(row)


def guess_without_state(row: Row) -> KeyInterval:
    """Return such an interval if all CTAs know that no state is read: they divide a larger sample."""
    span = row.length if row.is_laid_out_anew else row.width
    is_near = row.width >= LANES and row.length > span - span // 16
    return guess_by_row(row, divided=True, span=span if is_near else row.length)


def verify(row: Row, interval: KeyInterval, moments: Moments, last: StepState) -> Outcome:
    """Count, list and exchange, then find the k-th key: among the listed keys if the interval is complete."""
    if row.plan.family == "fallback":
        return radix_fallback(row, interval, last, passes=0)
    found = exchange(row, count_and_list(row, interval))
    if row.plan.family == "resident":
        if found.complete:
            return conclude(row, interval, found, moments, last, passes=1)
        return resolve_miss_resident(row, interval, found, moments, last)
    if found.complete and is_buffered(row, interval):
        return conclude(row, interval, found, moments, last, passes=1)
    return resolve_miss_streaming(row, interval, found, moments, last)


def _moments(row: Row, *, reads_state: bool) -> Moments:
    if row.plan.family == "fallback":
        return UNKNOWN_MOMENTS
    return sample_moments(row) if reads_state else NO_SAMPLE


def _selected_alone(row: Row) -> Row:
    """Return the row, as the kernel of short rows has it if the first CTA of its cluster selects alone."""
    values = values_of_solo_row(row.plan, width=row.width, length=row.length, k=row.k)
    if values == 0:
        return row
    return replace(row, plan=replace(row.plan, family="small_row", ctas_per_row=1, values_per_thread=values))


def _step_of_small_row(row: Row, reason: HintReason, last: StepState) -> Outcome:
    """Run the step of a row that one CTA holds: by the last window, or by rounds over the keys."""
    held, window = held_row(row), known_window(last) if reason is HintReason.USED else None
    recalled = try_predicted_window(row, held, window) if window is not None else None
    outcome, left = recalled or narrow_keys(row, held, int(window is not None))
    return replace(outcome, state=StepState(left))


def _count_hits(row: Row, outcome: Outcome, hint: Hint | None, offset: int) -> int:
    """Hinted positions at or above the k-th key, duplicates counted; -1 without a hint."""
    if hint is None:
        return -1
    # Padding is recognised before the offset: -1 + 1 is not position 0.
    positions = hint[hint >= 0].astype(np.int64) + offset
    positions = positions[(positions >= 0) & (positions < row.length)]
    return int(np.count_nonzero(row.keys[positions] >= outcome.threshold.key))


def _short_result(row: Row, reason: HintReason, state: StepState | None) -> StepResult:
    """Return all positions of a row that is no longer than k; its state stays as it is."""
    indices = np.full(row.k, -1, dtype=np.int32)
    indices[: row.length] = np.arange(row.length)
    stats = StepStats(reason, 0, 0, 0, -1, GuessSource.NONE, 0, 0)
    return StepResult(indices, stats, state, None)


def _checked_row(scores: Tensor, k: int, plan: Plan, length: int | None, hint: Hint | None) -> Row:
    checks = Checks()
    checks.score_values("scores", scores)
    if scores.dim() != 1:
        raise checks.fail("scores", "shape [width]", list(scores.shape))
    k = checks.integer("k", k, 1, MAX_WIDTH)
    visible = len(scores)
    if length is not None:
        visible = checks.integer("length", length, high=len(scores))
    if plan.family == "paper_gvr":
        raise checks.fail(
            "plan", "another kernel than the paper's, see gvr_topk.evaluation.paper_reference", plan.family
        )
    if hint is not None and hint.shape != (k,):
        raise checks.fail("hint", f"shape [{k}]", list(hint.shape))
    values = scores.detach().cpu().to(torch.float32).numpy()
    return Row(values, max(visible, 0), k, scores.dtype, plan)
