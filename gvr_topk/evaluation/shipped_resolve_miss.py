"""Finish a row whose interval has missed: by a moved interval, then by radix rounds, which always succeed.

The kernels differ in how much of the row they still have. The resident kernel has all of it in registers. The
streaming kernel buffers the elements that are not below the interval, as far as there is room. The fallback
reads everything again.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gvr_topk.constants import STATE_MASKED
from gvr_topk.contract import KEY_NAN
from gvr_topk.evaluation.shipped_predictor import UNKNOWN_MOMENTS, Moments, next_state
from gvr_topk.evaluation.shipped_sample import guess_by_row
from gvr_topk.evaluation.shipped_select import (
    CountResult,
    Threshold,
    count_and_list,
    exchange,
    select_kth,
)
from gvr_topk.evaluation.shipped_types import (
    EVERYTHING,
    KEY_ABSENT,
    KEY_LEAST,
    KEY_LEAST_FINITE,
    KEY_MOST_FINITE,
    KEY_NEG_INF,
    KEY_POS_INF,
    WARPS,
    F,
    Ints,
    KeyInterval,
    Row,
    StepState,
    key_of,
    only,
)

LOG2_RADIX_BINS = 9
"""Bits of the key that one radix round resolves: CTAs send each other its histogram as if it were a list."""
MOST_RADIX_ROUNDS = 2 + -(-32 // LOG2_RADIX_BINS)
BUFFER_CHUNKS, CHUNK = 256, 32
"""Buffer of one CTA of the streaming kernel: the number of chunks, and the elements of a chunk. Half of the
chunks are given to its 16 warps at the start."""


@dataclass(frozen=True)
class Outcome:
    """A row whose k-th key is known.

    Attributes
    ----------
    threshold : Threshold
        Where the selection ends.
    passes : int
        Looks at all elements, or at all that were kept; radix rounds are included.
    candidates : int
        Elements inside the last interval.
    rounds : int
        Histograms of the selection.
    radix_rounds : int
        Radix rounds that came before the selection.
    guess_hit : bool
        Whether the first interval was enough to find the k-th key.
    state : StepState
        State that the step leaves.
    """

    threshold: Threshold
    passes: int
    candidates: int
    rounds: int
    radix_rounds: int
    guess_hit: bool
    state: StepState


def conclude(
    row: Row,
    interval: KeyInterval,
    found: CountResult,
    moments: Moments,
    last: StepState,
    *,
    passes: int,
    radix_rounds: int = 0,
) -> Outcome:
    """Finish a row whose interval is complete: find the k-th key, and the state for the next step."""
    threshold, rounds = select_kth(row, interval, found)
    state = next_state(row, last, moments, threshold.key, interval, found.inside, found.equal)
    hit = passes == 1 and radix_rounds == 0
    return Outcome(threshold, passes + radix_rounds, found.inside, rounds, radix_rounds, hit, state)


def move_interval(row: Row, interval: KeyInterval, found: CountResult) -> KeyInterval | None:
    """Return a second interval, beside one that just missed.

    If the k-th key lies above, the new interval takes all that lies there, if that is not much. If it lies
    below, the new interval reaches down as far as the counts at the two ends suggest, taken as a tail that
    falls exponentially, and a sixth of k further. The kernels' logarithms and divisions are approximate.

    Returns
    -------
    KeyInterval or None
        None if neither is likely to help, or if the interval contains the k-th key and is too dense.
    """
    room = (row.segment << row.log2_ctas) // 2
    if found.contains_k:
        return None
    if found.above >= row.k:
        if found.above > room:
            return None
        moved = KeyInterval(interval.hi + 1, KEY_MOST_FINITE, interval.source)
    else:
        reached = found.above + found.inside
        wanted = row.k + (row.k - reached) + row.k // 6
        if found.inside == 0 or wanted - reached > room:
            return None
        per_fold = np.log2(F(F(reached) / np.fmax(F(found.above), F(0.5))))
        folds = np.log2(F(F(wanted) / F(reached)))
        low = F(interval.low - F(F(interval.high - interval.low) * F(folds / per_fold)))
        moved = KeyInterval(max(KEY_LEAST_FINITE, key_of(low)), interval.lo - 1, interval.source)
    return moved if KEY_NEG_INF < moved.lo <= moved.hi < KEY_POS_INF else None


def is_masked(row: Row, interval: KeyInterval, found: CountResult) -> bool:
    """Whether the counts say that the k-th value is -inf: fewer than k elements are finite or above."""
    return interval.lo == KEY_LEAST_FINITE and found.above + found.inside < row.k


def range_of(row: Row, interval: KeyInterval, found: CountResult) -> KeyInterval:
    """Return where the k-th key lies after an interval has missed it, or was too dense."""
    if found.contains_k:
        return interval
    if found.above >= row.k:
        return KeyInterval(interval.hi + 1, KEY_NAN)
    return KeyInterval(KEY_LEAST, interval.lo - 1)


def radix_select(row: Row, known: KeyInterval) -> tuple[KeyInterval, int]:
    """Narrow a range that holds the k-th key to an interval whose elements fit the lists.

    Rounds are over finite keys. An element that is neither among nor above these keys is -inf, and above them
    there are only two keys. So a masked row takes one round, and a row of infinities two.

    Returns
    -------
    interval : KeyInterval
        Holds the k-th key; a single key if more elements share it than fit the lists.
    rounds : int
    """
    if known.hi <= KEY_NEG_INF:
        return only(KEY_NEG_INF), 0
    if known.lo > KEY_POS_INF:
        return only(KEY_NAN), 0
    infinite = (KEY_POS_INF, KEY_NAN - KEY_POS_INF)
    base = max(known.lo, KEY_LEAST_FINITE)
    range_length = max(min(known.hi, KEY_MOST_FINITE), base) - base
    if base > KEY_MOST_FINITE:
        base, range_length = infinite
    rank, is_first = row.k, True
    for rounds in range(1, MOST_RADIX_ROUNDS + 1):
        shift = max(0, range_length.bit_length() - LOG2_RADIX_BINS)
        above = int(np.count_nonzero(row.keys > base + range_length)) if is_first else 0
        if above >= rank and base != KEY_POS_INF:
            base, range_length = infinite
            continue
        histograms = _radix_histograms(row, base, range_length, shift)
        from_top = np.cumsum(histograms.sum(axis=0)[::-1])
        if from_top[-1] < rank - above:
            return only(KEY_NEG_INF), rounds
        below_hit = int(np.searchsorted(from_top, rank - above))
        hit = histograms.shape[1] - 1 - below_hit
        if base == KEY_POS_INF:
            return only(KEY_POS_INF if hit == 0 else KEY_NAN), rounds
        rank -= above + (int(from_top[below_hit - 1]) if below_hit else 0)
        is_first = False
        base += hit << shift
        range_length = min(range_length - (hit << shift), (1 << shift) - 1)
        if range_length == 0 or bool((histograms[:, hit] <= row.segment).all()):
            break
    return KeyInterval(base, base + range_length), rounds


def _radix_histograms(row: Row, base: int, range_length: int, shift: int) -> Ints:
    """Count the elements in each of 512 bins of a range; one row of counts for each CTA."""
    histograms = []
    for begin, end in zip(row.cta_starts[:-1], row.cta_starts[1:], strict=True):
        distance = row.keys[begin:end] - base
        distance = distance[(distance >= 0) & (distance <= range_length)]
        histograms.append(np.bincount(distance >> shift, minlength=1 << LOG2_RADIX_BINS))
    return np.array(histograms)


def resolve_miss_masked(row: Row, found: CountResult, passes: int) -> Outcome:
    """Finish a row whose k-th value is -inf: all greater elements are selected, and then the first others."""
    greater = found.above + found.inside
    threshold = Threshold(KEY_NEG_INF, row.k - greater, row.length - greater)
    masked = StepState(F(STATE_MASKED))
    return Outcome(threshold, passes, found.inside, 0, 0, False, masked)


def resolve_miss_resident(
    row: Row, interval: KeyInterval, found: CountResult, moments: Moments, last: StepState
) -> Outcome:
    """Finish a row in registers: one moved interval, then radix rounds over the range of the k-th key."""
    passes = 1
    moved = move_interval(row, interval, found)
    if moved is not None:
        interval, passes = moved, 2
        found = exchange(row, count_and_list(row, interval))
        if found.complete:
            return conclude(row, interval, found, moments, last, passes=passes)
    if is_masked(row, interval, found):
        return resolve_miss_masked(row, found, passes)
    interval, rounds = radix_select(row, range_of(row, interval, found))
    found = exchange(row, count_and_list(row, interval))
    return conclude(row, interval, found, moments, last, passes=passes + 1, radix_rounds=rounds)


def is_buffered(row: Row, interval: KeyInterval) -> bool:
    """Whether a stream keeps all elements that are not below `interval`.

    A tie key inside may be shared by most of the row. With such a key the stream keeps no elements, unless
    the interval is made for masked rows or infinities. Otherwise it keeps what there is room for.
    """
    if interval.tie_key != KEY_ABSENT and interval.lo not in (KEY_LEAST_FINITE, KEY_POS_INF):
        return False
    kept_before = np.concatenate([[0], np.cumsum(row.keys >= interval.lo)])
    of_warp = np.diff(kept_before[row.warp_starts])
    chunks = np.maximum(-(-of_warp // CHUNK), BUFFER_CHUNKS // 2 // WARPS)
    return bool((chunks.reshape(row.ctas, WARPS).sum(axis=1) <= BUFFER_CHUNKS).all())


def resolve_miss_streaming(
    row: Row, interval: KeyInterval, found: CountResult, moments: Moments, last: StepState
) -> Outcome:
    """Finish a row that streamed by: radix rounds over what was kept, or a second stream from further down.

    A row that neither can finish goes to the fallback: one whose interval has a tie key inside, or more
    elements than can be buffered.
    """
    passes = 1
    while True:
        kept = is_buffered(row, interval)
        if kept and is_masked(row, interval, found):
            return resolve_miss_masked(row, found, passes)
        if kept and (found.contains_k or found.above >= row.k):
            interval, rounds = radix_select(row, range_of(row, interval, found))
            found = exchange(row, count_and_list(row, interval))
            return conclude(row, interval, found, moments, last, passes=passes + 1, radix_rounds=rounds)
        if passes > 1 or not kept:
            break
        interval = move_interval(row, interval, found) or guess_by_row(row)
        found = exchange(row, count_and_list(row, interval))
        passes += 1
        if found.complete and is_buffered(row, interval):
            return conclude(row, interval, found, moments, last, passes=passes)
    to_try = interval if interval.tie_key != KEY_ABSENT else None
    return radix_fallback(row.by_fallback(), to_try, last, passes=passes)


def radix_fallback(row: Row, interval: KeyInterval | None, last: StepState, *, passes: int) -> Outcome:
    """Finish any row: by an interval, moved once if it misses, then by radix rounds over all elements.

    Parameters
    ----------
    row : Row
    interval : KeyInterval or None
        Interval to try first; None takes radix rounds at once.
    last : StepState
        What the last step left.
    passes : int
        Looks at the row that were taken before.

    Returns
    -------
    Outcome
        Its `guess_hit` says whether `interval` was the first interval of the row, and complete. Its state
        holds a value alone, because the fallback takes no moments.
    """
    known, rounds = EVERYTHING, 0
    is_first, is_guess = passes == 0, interval is not None
    while interval is not None:
        found = exchange(row, count_and_list(row, interval))
        passes += 1
        if found.complete:
            break
        known = interval if found.contains_k else known
        interval = move_interval(row, interval, found) if is_guess else None
        is_guess = False
    if interval is None:
        interval, rounds = radix_select(row, known)
        found = exchange(row, count_and_list(row, interval))
        passes += 1
        is_guess = False
    threshold, histograms = select_kth(row, interval, found)
    state = next_state(row, last, UNKNOWN_MOMENTS, threshold.key, interval, found.inside, found.equal)
    hit = is_first and is_guess
    return Outcome(threshold, passes + rounds, found.inside, histograms, rounds, hit, state)
