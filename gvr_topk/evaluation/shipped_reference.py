"""The algorithm of the shipped kernels, one step of one row, exact and readable.

`topk_step` reads from top to bottom as a kernel runs:

1. **predict** an interval of keys for the k-th score, from the state that the last step left
   (`gvr_topk.evaluation.shipped_predictor`), or from a sample (`gvr_topk.evaluation.shipped_sample`);
2. **count** what lies above the interval, and **list** what lies inside, in each CTA of the cluster;
3. **exchange** the counts and the lists, so that all CTAs go on alike
   (`gvr_topk.evaluation.shipped_select`, as the two before and after it);
4. **select** the k-th key among the listed, by histograms;
5. **settle** what the interval has missed: move it, or find the k-th key by radix rounds
   (`gvr_topk.evaluation.shipped_settle`);
6. **emit** the selected positions in ascending order, of equal scores the smallest positions;
7. leave the **state** for the next step.

A row short enough for one CTA goes by a window of values (`gvr_topk.evaluation.shipped_short_rows`).

The result is the contract's (`gvr_topk.contract`) for every row and every state; the state decides only how
much work it takes. The statistics are the kernels' (`gvr_topk.contract.STATS_COLUMNS`).

What is modelled is what is counted and decided, not when: neither threads nor memory nor overlap. Rows are
aligned to 16 bytes, buffers at least 32 elements wide count as such, and nobody writes them meanwhile. Means,
deviations and moved intervals may differ from a kernel's in the last bits, because kernels take approximate
reciprocals, roots and logarithms; then an element at an interval's end may count as inside or not.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gvr_topk import gate
from gvr_topk.contract import DTYPES
from gvr_topk.evaluation.shipped_predictor import NO_SAMPLE, Moments, predicted_interval, sample_moments
from gvr_topk.evaluation.shipped_sample import interval_by_hint, interval_by_row
from gvr_topk.evaluation.shipped_select import CountResult, count_and_list, emit, exchange
from gvr_topk.evaluation.shipped_settle import (
    Outcome,
    conclude,
    is_kept,
    settle_general,
    settle_resident,
    settle_stream,
)
from gvr_topk.evaluation.shipped_short_rows import held_row, known_window, narrow, recall
from gvr_topk.evaluation.shipped_types import (
    KEY_LEAST_FINITE,
    KEY_MOST_FINITE,
    KEY_POS_INF,
    LANES,
    NO_STATE,
    NONE,
    ROW_SAMPLE,
    UNKNOWN,
    VALUE,
    F,
    KeyInterval,
    Row,
    StepState,
)
from gvr_topk.gate import Plan

Hint = npt.NDArray[np.integer]

PATH_SHORT, PATH_CLUSTER = 0, 3
"""Of the ``path`` column."""
WORTHLESS_SHARE, WORTHLESS_AT_HAND = F(0.1), F(0.25)
"""Of a hint of which less was chosen, a sample of the row is worth more: sooner with the row in registers."""


@dataclass(frozen=True)
class StepStats:
    """The columns of the statistics, in their order: `gvr_topk.contract.STATS_COLUMNS`."""

    path: int
    passes: int
    candidates: int
    snap: int
    hits: int
    guess: int
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
        For the next step; None where the launch has none.
    interval : KeyInterval or None
        The first interval; None of rows that have none: short ones, and rows no longer than k.
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
    """One step of one row, as the kernel of `plan` takes it on path ``"cluster"`` or ``"auto"``.

    Parameters
    ----------
    scores : Tensor, shape [width], float32, bfloat16 or float16
        The row's buffer, any content.
    k : int
        Items wanted, at least 1.
    plan : Plan
        Of the launch: `gvr_topk.gate.plan`. Its family is ``resident``, ``stream``, ``single`` or
        ``general``.
    length : int, optional
        Visible elements of the buffer; default all.
    state : StepState, optional
        What the last step left, any content; `gvr_topk.evaluation.shipped_types.UNKNOWN` at first. None: the
        launch has no ``guess_state``.
    hint : ndarray, shape [k], integer, optional
        The slot's ``prior``. It is looked at where the state holds a share of it, and counted in any case.
    hint_offset : int
        Added to hinted positions.

    Returns
    -------
    StepResult

    Raises
    ------
    TypeError
        `scores` has another dtype, or is not one row.
    ValueError
        `k` or `length` is out of range, `hint` does not hold k positions, or the plan is the paper's
        kernel's.

    Examples
    --------
    >>> from gvr_topk.gate import plan
    >>> topk_step(torch.tensor([3.0, 1.0, 2.0, 3.0]), 2, plan(rows=1, width=4, k=2)).indices
    array([0, 3], dtype=int32)
    """
    row = _checked_row(scores, k, plan, length, hint)
    if row.length <= k:
        return _short_result(row, state)
    with np.errstate(all="ignore"):  # whatever rows and states hold, as on a GPU
        is_fed = state is not None and row.width >= LANES
        last = state if state is not None and is_fed else UNKNOWN
        if plan.family == "single":
            interval, source = None, VALUE if known_window(last) is not None else NONE
            outcome = _step_of_short_row(row, state, last)
        else:
            moments = sample_moments(row) if is_fed and plan.family != "general" else NO_SAMPLE
            interval = predict(row, moments, last, hint, hint_offset, is_fed=is_fed)
            source = interval.source
            found = exchange(row, count_and_list(row, interval))
            outcome = select_or_settle(row, interval, found, moments, last)
        indices = emit(row, outcome.threshold)
    hits, hinted = _count_hits(row, outcome, hint, hint_offset)
    stats = StepStats(
        path=PATH_CLUSTER,
        passes=outcome.passes,
        candidates=outcome.candidates,
        snap=outcome.rounds,
        hits=hits if hint is not None else -1,
        guess=source,
        guess_hit=int(outcome.guess_hit),
        done=outcome.radix_rounds,
    )
    left = outcome.state or StepState(F(F(hits) / F(hinted)) if hinted else F(NO_STATE))
    return StepResult(indices, stats, left if state is not None else None, interval)


def predict(
    row: Row, moments: Moments, last: StepState, hint: Hint | None, offset: int, *, is_fed: bool
) -> KeyInterval:
    """Phase 1: an interval of keys that should hold the k-th.

    Parameters
    ----------
    row : Row
    moments : Moments
        Of this step's sample.
    last : StepState
        What the last step left.
    hint : ndarray, shape [k], integer, or None
    offset : int
        Added to hinted positions.
    is_fed : bool
        Whether the launch has a state at all. Without one the CTAs divide a larger sample among them;
        with one they may have read different states, so none waits for another.

    Returns
    -------
    KeyInterval
    """
    is_general = row.plan.family == "general"
    everything_finite = (KEY_LEAST_FINITE, KEY_MOST_FINITE)
    if not is_general:
        if not is_fed:
            span = row.length if row.is_laid_out_anew else row.width
            is_near = row.width >= LANES and row.length > span - span // 16
            return interval_by_row(row, divided=True, span=span if is_near else row.length)
        if last.has_value:
            return predicted_interval(moments, last)
        if last.is_infinite:
            return KeyInterval(KEY_POS_INF, KEY_POS_INF, VALUE)
        if last.is_masked:
            return KeyInterval(*everything_finite, VALUE)
        if moments.counted == 0:  # a row that is masked nearly everywhere
            return KeyInterval(*everything_finite, ROW_SAMPLE)
    worthless = WORTHLESS_AT_HAND if row.plan.family == "resident" else WORTHLESS_SHARE
    is_allowed = gate.GVR_MIN_LENGTH <= row.length <= gate.GVR_MAX_LENGTH
    if is_allowed and worthless <= last.first <= 1:
        return interval_by_hint(row, hint, offset, last.first)
    return interval_by_row(row)


def select_or_settle(
    row: Row, interval: KeyInterval, found: CountResult, moments: Moments, last: StepState
) -> Outcome:
    """Phases 4 and 5: the k-th key where the interval holds it, or what the kernel does where it does not."""
    if row.plan.family == "general":
        return settle_general(row, interval, passes=0)
    if row.plan.family == "resident":
        if found.holds:
            return conclude(row, interval, found, moments, last, passes=1)
        return settle_resident(row, interval, found, moments, last)
    if found.holds and is_kept(row, interval):
        return conclude(row, interval, found, moments, last, passes=1)
    return settle_stream(row, interval, found, moments, last)


def _step_of_short_row(row: Row, state: StepState | None, last: StepState) -> Outcome:
    """A row that one CTA holds: by the last window, or by rounds over the keys.

    Nothing but the first number of a state is written.
    """
    held, window = held_row(row), known_window(last)
    recalled = recall(row, held, window) if window is not None else None
    outcome, left = recalled or narrow(row, held, int(window is not None))
    return replace(outcome, state=replace(state or UNKNOWN, first=left))


def _count_hits(row: Row, outcome: Outcome, hint: Hint | None, offset: int) -> tuple[int, int]:
    """Hinted positions at or above the k-th key, and all that lie in the row; duplicates count."""
    if hint is None:
        return 0, 0
    # Padding is recognised before the offset: -1 + 1 is not position 0.
    positions = hint[hint >= 0].astype(np.int64) + offset
    positions = positions[(positions >= 0) & (positions < row.length)]
    return int(np.count_nonzero(row.keys[positions] >= outcome.threshold.key)), len(positions)


def _short_result(row: Row, state: StepState | None) -> StepResult:
    """All of a row that is no longer than k; its state stays as it is."""
    indices = np.full(row.k, -1, dtype=np.int32)
    indices[: row.length] = np.arange(row.length)
    return StepResult(indices, StepStats(PATH_SHORT, 0, 0, 0, -1, NONE, 0, 0), state, None)


def _checked_row(scores: Tensor, k: int, plan: Plan, length: int | None, hint: Hint | None) -> Row:
    if scores.dtype not in DTYPES or scores.dim() != 1:
        raise TypeError(f"scores: want one row of {DTYPES}, got {scores.dim()}-D {scores.dtype}")
    if k < 1:
        raise ValueError(f"k: want at least 1, got {k}")
    visible = len(scores) if length is None else length
    if visible > len(scores):
        raise ValueError(f"length: want at most {len(scores)}, got {length}")
    if plan.family == "four_phase":
        raise ValueError(
            "plan: want another kernel than the paper's, see gvr_topk.evaluation.paper_reference"
        )
    if hint is not None and hint.shape != (k,):
        raise ValueError(f"hint: want shape [{k}], got {list(hint.shape)}")
    values = scores.detach().cpu().to(torch.float32).numpy()
    return Row(values, max(visible, 0), k, scores.dtype, plan)
