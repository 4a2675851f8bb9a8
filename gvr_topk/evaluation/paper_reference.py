"""The paper's four phases on one row, exact and readable (Guess-Verify-Refine, section 4).

This is the model of the four-phase kernel, path ``"paper_gvr"``, which gives one CTA to a row: the same
thresholds in the same order, hence the same counting passes. The result is the contract's
(`gvr_topk.contract`) for every row and every hint; a hint decides only how many passes the result takes.

The arithmetic is fixed, so that a kernel can repeat it:

* A count is ``#{not (x < T)}``: NaN counts as above every threshold, as the contract ranks it. The count is
  taken on the order key, so that a process that flushes denormals counts alike.
* A threshold is float32. The mean is the float64 sum of the finite gathered values over their
  number, rounded once to float32. A quantile is a gathered value itself, never an interpolation.
* A secant step is ``T1 + (T0 - T1) * (float(target - c1) / float(c0 - c1))`` and a bisection
  ``0.5 * low + 0.5 * high``, both in float32 without fused multiply-add. Counts are below 2**24.
* If floats do not lead to a threshold, the search goes on over the order-preserving 32-bit key: integers
  only, at most 32 passes, always successful.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from gvr_topk.constants import GuessSource, SearchEnd
from gvr_topk.contract import KEY_NAN, order_key

GuessKind = Literal["mean", "quantile"]

DONE: dict[int, str] = {end.value: end.name.lower() for end in SearchEnd}
"""Meaning of the ``done`` column of the statistics tensor, for the path ``paper_gvr``."""

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
Point = tuple[np.float32, int]

CAPACITY = 6144
"""Candidates that refinement holds (the paper's MAX_CANDIDATES, three times its k)."""

QUANTILE_MARGIN = 0.75
"""How far below the k-th value the quantile guess aims: ``share = alpha + margin * alpha * (1 - alpha)``.

At margin 0 the guess aims at the k-th value itself, and half the guesses fall just short of it. The
margin is a share of the hint's misses, and smaller for a poor hint, whose misses are spread over the
row and reach the capacity at once. Mean passes of `topk_row` over 127 steps of the layer 10 trace
(k = 2048, offset 0, N = 32,640): 1.57 at margin 0, 1.17 at 0.5, 1.05 at 0.75, 1.04 at 1.
"""

SECANT_PASSES = 4
"""Passes before bisection replaces the secant; the paper saw at most six in all on real rows."""

FLOAT_PASSES = 8
"""Passes before the search leaves floats for the key."""

SAMPLE = 2048
"""Elements of the row that stand in for a missing or worthless hint."""

BINS = 2048
"""Histogram bins of the refinement."""

SNAP_LIMIT = 32
"""Most members of a histogram bin that snap steps may walk through; a bin with more is divided again. The
paper saw at most 20 steps on real rows."""

_KEY_END = KEY_NAN + 1
_NAN = np.float32(np.nan)
_NOTHING: Floats = np.empty(0, dtype=np.float32)


@dataclass(frozen=True)
class RowStats:
    """How much work one row took, and why."""

    n: int  # length of the row
    k: int  # items wanted
    hint_valid: int  # distinct hinted positions inside the row, after the offset
    hit_count: int  # how many of these positions are in the result
    hit_ratio: float  # `hit_count / k`
    alpha: float | None
    """Share of the gathered values at or above the k-th value, for the next step's quantile guess; None when
    nothing was gathered."""
    guess: str  # where the first threshold came from: a `gvr_topk.constants.GuessSource` in lower case
    passes: int  # counting passes over the row (phase 2)
    done: str
    """A `gvr_topk.constants.SearchEnd` in lower case: ``short`` (n <= k, nothing to search), ``guess`` (the
    first threshold was good), ``secant``, ``tie``, ``bisect``, ``key`` (the kind of step that ended the
    search), or ``tie_key`` (more than `capacity` values at or above the k-th, because of ties)."""
    candidates: int  # elements collected in phase 3
    snap_iterations: int  # scans of the candidates in phase 4 after the first histogram


@dataclass(frozen=True)
class RowResult:
    """Top-k of one row: ascending positions, then -1, ``[k]``, and how they were found."""

    indices: npt.NDArray[np.int32]
    stats: RowStats


def topk_row(
    row: Floats,
    k: int,
    hint: npt.NDArray[np.integer] | None = None,
    *,
    hint_offset: int = 0,
    guess: GuessKind = "mean",
    alpha: float | None = None,
    capacity: int = CAPACITY,
) -> RowResult:
    """Exact top-k of one row by guess, verify, collect and refine.

    Which items and in what order: see `gvr_topk.contract`. Neither depends on the hint, the guess or the
    capacity.

    Parameters
    ----------
    row : ndarray, shape [n], float32
        The visible scores of the row, any content.
    k : int
        Items wanted, at least 1.
    hint : ndarray, shape [any], integer, optional
        Positions guessed to be in the result, usually the step before's. Any content is safe; negative
        entries are padding.
    hint_offset : int
        Added to every non-negative hinted position: position-relative scores move with the query.
    guess : {"mean", "quantile"}
        First threshold: the mean of the gathered values, as the paper has it, or the quantile that `alpha`
        names.
    alpha : float, optional
        ``RowStats.alpha`` of the step before. None, or a number outside of 0 to 1: the mean is taken.
    capacity : int
        Most candidates that refinement can hold, at least `k`.

    Examples
    --------
    >>> topk_row(np.array([3, 1, 2, 3], dtype=np.float32), 2).indices
    array([0, 3], dtype=int32)
    """
    n = len(row)
    positions = _hinted_positions(hint, hint_offset, n)
    gathered = row[positions]
    if n <= k:
        indices = np.arange(n)
        kth_key = int(_keys(row).min()) if n else KEY_NAN
        candidates = n
        found = _Verified(0, SearchEnd.SHORT, 0)
        first, snaps = _Guess(math.nan, _NOTHING, 0, GuessSource.NONE), 0
    else:
        first = _guess(row, gathered, guess, alpha, k, capacity)
        found = _verify(row, first, k, capacity)
        indices = _collect(row, found, k)
        kth_key, snaps = _refine(row[indices], k)
        candidates = len(indices)
        indices = indices[_partition(_keys(row[indices]), kth_key, k)]
    distinct = np.unique(positions)
    hits = int(np.isin(distinct, indices, assume_unique=True).sum())
    stats = RowStats(
        n=n,
        k=k,
        hint_valid=len(distinct),
        hit_count=hits,
        hit_ratio=hits / k,
        alpha=float(np.mean(_keys(gathered) >= kth_key)) if len(gathered) else None,
        guess=first.source.name.lower(),
        passes=found.passes,
        done=DONE[found.done],
        candidates=candidates,
        snap_iterations=snaps,
    )
    padded = np.full(k, -1, dtype=np.int32)
    padded[: len(indices)] = indices
    return RowResult(padded, stats)


@dataclass(frozen=True)
class _Guess:
    """Phase 1's outcome: a first threshold, and the values that place the secant's other end."""

    threshold: float
    values: Floats
    low_count: int
    source: GuessSource


@dataclass(frozen=True)
class _Verified:
    """Phase 2's outcome: ``k <= #{key >= threshold_key} <= capacity``, or ``done`` is ``TIE_KEY``."""

    threshold_key: int
    done: SearchEnd
    passes: int


def _guess(
    row: Floats, gathered: Floats, kind: GuessKind, alpha: float | None, k: int, capacity: int
) -> _Guess:
    """Phase 1: statistics of the hinted values, and from them the first threshold.

    Duplicates are kept and non-finite values dropped: a kernel can do both without a search. Values
    that are all equal say nothing about the row (a cold hint of zeros gathers one element k times),
    so an even sample of the row replaces them.
    """
    n = len(row)
    values = gathered[np.isfinite(gathered)]
    if len(values) and values.min() < values.max():
        # The count at the smallest hinted value is unknown: twice the capacity is a better estimate
        # than the row's length, because most misses of a hint lie just below the k-th value.
        low_count = min(n, 2 * capacity)
        if kind == "quantile" and alpha is not None and 0 <= alpha <= 1:
            share = alpha + QUANTILE_MARGIN * alpha * (1 - alpha)
            return _Guess(_upper_quantile(values, share), values, low_count, GuessSource.HINT)
        mean = np.float32(values.sum(dtype=np.float64) / len(values))
        return _Guess(float(mean), values, low_count, GuessSource.HINT)
    count = min(n, SAMPLE)
    sample = row[np.arange(count) * n // count]
    sample = sample[np.isfinite(sample)]
    if not len(sample):
        return _Guess(0.0, _NOTHING, n, GuessSource.NONE)
    return _Guess(_upper_quantile(sample, _target(k, capacity) / n), sample, n, GuessSource.ROW_SAMPLE)


def _verify(row: Floats, first: _Guess, k: int, capacity: int) -> _Verified:
    """Phase 2: find a threshold that at least `k` and at most `capacity` elements reach.

    The search takes float steps while they work (`_next_threshold`), and then steps over the key, which
    always work.
    """
    target = _target(k, capacity)
    low, high = (np.float32(-np.inf), len(row)), (np.float32(np.inf), 0)
    points: list[Point] = []
    done = SearchEnd.GUESS
    step: np.float32 | None = np.float32(first.threshold)
    keys = _keys(row)
    while step is not None:
        count = int(np.count_nonzero(keys >= _key_of(step)))
        points.append((step, count))
        if k <= count <= capacity:
            return _Verified(_key_of(step), done, len(points))
        if count > capacity:
            low = points[-1]
        else:
            high = points[-1]
        if len(points) == 1:
            extremes = _finite_extremes(row)
        step, done = _next_threshold(points, low[0], high[0], extremes, first, target)
    # At least k elements may reach +inf itself (infinities, NaNs), so an upper end that no pass measured lies
    # beyond NaN.
    top = _key_of(high[0]) if math.isfinite(high[0]) else _KEY_END
    key, is_tie_key, passes = _bisect_keys(keys, k, capacity, (_key_of(low[0]), low[1]), top)
    return _Verified(key, SearchEnd.TIE_KEY if is_tie_key else SearchEnd.KEY, len(points) + passes)


def _next_threshold(
    points: list[Point],
    low: np.float32,
    high: np.float32,
    extremes: tuple[np.float32, np.float32],
    first: _Guess,
    target: int,
) -> tuple[np.float32 | None, SearchEnd]:
    """The next float threshold and the kind of step, or None when the key has to decide.

    The first secant goes from the guess to the hint's largest or smallest value, whose counts are
    estimates; the later ones go through the last two measured points. Only an upward first step is
    halved: the count falls steeply from a low threshold, and the chord overshoots. A step outside the
    measured bracket (`low`, `high`) is a stall, and so are too many steps. On a stall the bracket is halved;
    its open side is closed by the row's finite `extremes`, which the first pass found.

    A gathered value that occurs twice is probably a plateau (zeros, after a ReLU), through which no line
    leads. So the value itself is tested, and then the next float above it.
    """
    if len(points) >= FLOAT_PASSES:
        return None, SearchEnd.KEY
    t1, c1 = points[-1]
    if c1 > target and np.count_nonzero(first.values == t1) > 1:
        step = np.nextafter(t1, np.float32(np.inf))
        return (step, SearchEnd.TIE) if step < high else (None, SearchEnd.KEY)
    if len(points) == 1 and c1 < target and len(first.values):
        least = first.values.min()
        if least < t1 and np.count_nonzero(first.values == least) > 1:
            return least, SearchEnd.TIE
    if len(points) > SECANT_PASSES:
        step = _NAN
    elif len(points) > 1:
        step = _secant(points[-2], points[-1], target)
    elif not len(first.values):
        step = _NAN
    elif c1 < target:
        step = _secant((first.values.min(), first.low_count), points[-1], target)
    else:
        step = _halfway(t1, _secant((first.values.max(), 1), points[-1], target))
    if low < step < high:
        return step, SearchEnd.SECANT
    bottom = low if np.isfinite(low) else extremes[0]
    top = high if np.isfinite(high) else extremes[1]
    step = _halfway(bottom, top)
    return (step, SearchEnd.BISECT) if bottom < step < top else (None, SearchEnd.KEY)


def _secant(end: Point, start: Point, target: int) -> np.float32:
    """Where the line through two (threshold, count) points reaches `target`; NaN when it does not."""
    (t0, c0), (t1, c1) = end, start
    if c0 == c1:
        return _NAN
    with np.errstate(over="ignore", invalid="ignore"):
        return np.float32(t1 + (t0 - t1) * (np.float32(target - c1) / np.float32(c0 - c1)))


def _halfway(a: np.float32, b: np.float32) -> np.float32:
    """Midpoint that does not overflow."""
    return np.float32(0.5) * a + np.float32(0.5) * b


def _finite_extremes(row: Floats) -> tuple[np.float32, np.float32]:
    """Smallest and largest finite value of the row; NaN when it has none."""
    finite = row[np.isfinite(row)]
    return (finite.min(), finite.max()) if len(finite) else (_NAN, _NAN)


def _bisect_keys(keys: Ints, k: int, capacity: int, low: tuple[int, int], top: int) -> tuple[int, bool, int]:
    """Search the key for a threshold with ``k <= count <= capacity``, in at most 32 counts.

    `low` is a key with its count, `top` a key, and ``count(low) >= k > count(top)``. Each count also yields
    the two keys next to the middle, and the bracket shrinks to them: empty stretches of the key, such as the
    one between a plateau of zeros and the smallest positive value, cost one count. Returns the threshold;
    whether it is the k-th value and still more than `capacity` elements reach it; and the number of counts.
    """
    bottom, bottom_count = low
    passes = 0
    while bottom_count > capacity and top - bottom > 1:
        middle = (bottom + top) // 2
        reach = keys >= middle
        count = int(np.count_nonzero(reach))
        passes += 1
        if count >= k:
            bottom, bottom_count = int(keys[reach].min()), count
        else:
            top = int(keys[~reach].max()) + 1
    return bottom, bottom_count > capacity, passes


def _collect(row: Floats, found: _Verified, k: int) -> Ints:
    """Phase 3: positions of the candidates, in index order.

    The elements of a tie key do not fit, but all of them are equal: everything above that key and the first
    of its ties are the answer already.
    """
    keys = _keys(row)
    if found.done is SearchEnd.TIE_KEY:
        return np.flatnonzero(_partition(keys, found.threshold_key, k))
    return np.flatnonzero(keys >= found.threshold_key)


def _refine(values: Floats, k: int) -> tuple[int, int]:
    """Phase 4: the exact k-th key of the candidates, and how many scans it took after the histogram.

    The histogram leads to the bin of the k-th value; from its lower edge each snap scan moves to the
    next distinct value until ``count_gt < k <= count_ge``. An edge that rounding put one value off
    costs a scan, never exactness.
    """
    keys = _keys(values)
    if len(values) == k:
        return int(keys.min()), 0
    key, scans = _histogram_start(values, keys, k)
    while True:
        scans += 1
        above, below = keys > key, keys < key
        count_gt, count_ge = int(np.count_nonzero(above)), len(keys) - int(np.count_nonzero(below))
        if count_gt < k <= count_ge:
            return key, scans
        key = int(keys[above].min()) if count_gt >= k else int(keys[below].max())


def _histogram_start(values: Floats, keys: Ints, k: int) -> tuple[int, int]:
    """Key of the lower edge of the bin that holds the k-th candidate, and the extra histograms.

    Bins are even in value over the finite candidates. A bin with too many members (an outlier
    stretched the range) is divided again, evenly in key: three times at most, 11 bits each.
    """
    bins, low, scale = _value_bins(values)
    kth = _kth_bin(bins, k)
    edge = _key_of(np.float32(low + np.float32(kth) / scale))
    extra = 0
    while True:
        members = bins == kth
        if np.count_nonzero(members) <= SNAP_LIMIT:
            return edge, extra
        k -= int(np.count_nonzero(bins > kth))
        keys = keys[members]
        lowest = int(keys.min())
        span = int(keys.max()) - lowest
        if not span:
            return lowest, extra
        shift = max(0, span.bit_length() - (BINS - 1).bit_length())
        bins = (keys - lowest) >> shift
        kth = _kth_bin(bins, k)
        edge = lowest + (kth << shift)
        extra += 1


def _value_bins(values: Floats) -> tuple[Ints, np.float32, np.float32]:
    """Bin of each candidate, the lowest finite value, and bins per unit of value.

    +inf and NaN go to the top bin, -inf to the lowest. Without a usable width (equal values, a
    denormal or overflowing range) all share the lowest.
    """
    finite = values[np.isfinite(values)]
    if len(finite):
        low, high = finite.min(), finite.max()
        with np.errstate(over="ignore", divide="ignore"):
            scale = np.float32(BINS) / (high - low)
        if np.isfinite(scale) and scale > 0:
            scaled = (np.clip(np.nan_to_num(values, nan=high), low, high) - low) * scale
            return np.minimum(scaled.astype(np.int64), BINS - 1), low, scale
    return np.zeros(len(values), dtype=np.int64), np.float32(0), np.float32(1)


def _kth_bin(bins: Ints, k: int) -> int:
    """The bin, counted from the top, in which the k-th element falls."""
    from_top = np.cumsum(np.bincount(bins, minlength=BINS)[::-1])
    return BINS - 1 - int(np.searchsorted(from_top, k))


def _partition(keys: Ints, kth_key: int, k: int) -> npt.NDArray[np.bool_]:
    """Mask of the `k` chosen: all above the k-th key, then the ties with the smallest positions."""
    chosen = keys > kth_key
    ties = np.flatnonzero(keys == kth_key)
    chosen[ties[: k - int(np.count_nonzero(chosen))]] = True
    return chosen


def _hinted_positions(hint: npt.NDArray[np.integer] | None, offset: int, n: int) -> Ints:
    if hint is None:
        return np.empty(0, dtype=np.int64)
    # Padding is recognised before the offset: -1 + 1 is not position 0.
    positions: Ints = hint[hint >= 0].astype(np.int64) + offset
    return positions[(positions >= 0) & (positions < n)]


def _target(k: int, capacity: int) -> int:
    """Return the count that thresholds aim at: halfway between `k` and `capacity`."""
    return (k + capacity) // 2


def _upper_quantile(values: Floats, share: float) -> float:
    """Return the element of `values` that the share `share` of the values reaches."""
    rank = math.ceil(np.float32(share) * np.float32(len(values)))
    return float(np.sort(values)[::-1][min(max(rank, 1), len(values)) - 1])


def _keys(values: Floats) -> Ints:
    return order_key(torch.from_numpy(np.array(values, dtype=np.float32))).numpy()


def _key_of(value: np.float32) -> int:
    """Key of one float32."""
    return int(_keys(np.array([value], dtype=np.float32))[0])
