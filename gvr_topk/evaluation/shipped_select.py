"""What every CTA does with an interval: count, list, exchange, select the k-th key, and emit.

All CTAs of a cluster have the same lists after the exchange, so each finds the same threshold by itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gvr_topk.evaluation.shipped_types import (
    KEY_ABSENT,
    Ints,
    KeyInterval,
    Row,
    whole_key,
)

LOG2_BINS = 10
"""Bits of the key that one round of the selection resolves."""
RANK_DIRECTLY = 32
"""Most keys that one warp ranks by comparison."""


@dataclass(frozen=True)
class CtaCounts:
    """What one CTA has counted in its part of the row.

    Attributes
    ----------
    above : int
        Elements above the interval.
    listed : ndarray, int64
        Keys of the elements inside the interval, except those at its tie key; in any order.
    equal : int
        Elements at the tie key.
    """

    above: int
    listed: Ints
    equal: int


@dataclass(frozen=True)
class CountResult:
    """The counts of all CTAs together.

    Attributes
    ----------
    above : int
        Elements above the interval.
    inside : int
        Elements inside the interval, those at the tie key included.
    equal : int
        Elements at the tie key.
    rank : int
        Rank of the k-th key among the keys inside, from the top; no valid rank if the k-th key is not inside.
    contains_k : bool
        The interval contains the k-th key.
    complete : bool
        The interval contains the k-th key, and every CTA could list all that it has inside.
    listed : ndarray, int64
        The keys listed.
    """

    above: int
    inside: int
    equal: int
    rank: int
    contains_k: bool
    complete: bool
    listed: Ints


@dataclass(frozen=True)
class Threshold:
    """Where the selection ends: all above `key` are selected, and the first `tie_quota` of the `equal` ties.

    If all of a histogram bin is selected, `key` is the bin's lower edge. No element need have this key, but
    nothing lies between it and the k-th key.
    """

    key: int
    tie_quota: int
    equal: int

    @property
    def takes_all(self) -> bool:
        return self.tie_quota == self.equal


def count_and_list(row: Row, interval: KeyInterval) -> list[CtaCounts]:
    """One look at every element: each CTA counts and lists its part of the row."""
    tie = interval.tie_key
    counts = []
    for begin, end in zip(row.cta_starts[:-1], row.cta_starts[1:], strict=True):
        keys = row.keys[begin:end]
        inside = keys[(keys >= interval.lo) & (keys <= interval.hi)]
        above, equal = np.count_nonzero(keys > interval.hi), np.count_nonzero(inside == tie)
        counts.append(CtaCounts(int(above), inside[inside != tie], int(equal)))
    return counts


def exchange(row: Row, counts: list[CtaCounts]) -> CountResult:
    """Send the counts and the list of every CTA to every other, so that all come to the same result.

    A list has room for `row.segment` keys of each CTA; further keys are counted, not listed.
    """
    above = sum(of_cta.above for of_cta in counts)
    equal = sum(of_cta.equal for of_cta in counts)
    inside = sum(len(of_cta.listed) for of_cta in counts) + equal
    rank = row.k - above
    contains_k = 1 <= rank <= inside
    fits = all(len(of_cta.listed) <= row.segment for of_cta in counts)
    listed = np.concatenate([of_cta.listed[: row.segment] for of_cta in counts])
    return CountResult(above, inside, equal, rank, contains_k, contains_k and fits, listed)


def select_kth(row: Row, interval: KeyInterval, found: CountResult) -> tuple[Threshold, int]:
    """Find the k-th key among the listed keys, with a histogram over 10 bits of the key in each round.

    A round keeps the bin in which the rank falls. The rounds end when all of a bin is wanted, when only the
    tie key is left, or when so few keys are left that they are ranked by comparison.

    Parameters
    ----------
    row : Row
    interval : KeyInterval
    found : CountResult
        The counts of `interval`; they must be complete.

    Returns
    -------
    threshold : Threshold
    rounds : int
        Histograms that were made.
    """
    idle, tie = row.invariant_bits, interval.tie_key
    keys = np.concatenate([found.listed, np.full(found.equal, tie, dtype=np.int64)]) >> idle
    # In keys without their idle bits, the range starts with the first whole key of the interval.
    base = interval.lo >> idle
    base += whole_key(base, idle) < interval.lo
    range_length = (interval.hi >> idle) - base
    rank, inside, rounds = found.rank, found.inside, 0
    while range_length != 0 and rank != inside:
        if inside <= RANK_DIRECTLY:
            key = int(np.sort(keys)[::-1][rank - 1])
            tie_quota = rank - int(np.count_nonzero(keys > key))
            return Threshold(whole_key(key, idle), tie_quota, int(np.count_nonzero(keys == key))), rounds
        shift = max(0, range_length.bit_length() - LOG2_BINS)
        bins = (keys - base) >> shift
        hit, above = locate(bins, rank)
        rounds += 1
        keys = keys[bins == hit]
        rank, inside = rank - above, len(keys)
        base += hit << shift
        range_length = min(range_length - (hit << shift), (1 << shift) - 1)
        # Around zero keys lie far apart: rounds would go on where nothing but the tie key is left.
        if tie != KEY_ABSENT and bool((keys == tie >> idle).all()):
            base, range_length = tie >> idle, 0
    return Threshold(whole_key(base, idle), rank, inside), rounds


def locate(bins: Ints, rank: int) -> tuple[int, int]:
    """Return the bin that the rank-th largest falls into, and how many elements lie in higher bins."""
    hit = int(np.sort(bins)[::-1][rank - 1])
    return hit, int(np.count_nonzero(bins > hit))


def emit(row: Row, threshold: Threshold) -> npt.NDArray[np.int32]:
    """Return the selected positions, ascending; shape [k]. Of equal keys the smallest positions are taken.

    In the kernels every CTA writes its own positions. Where they go follows from the counts of the CTAs,
    warps and lanes before it, so nothing is sorted.
    """
    if threshold.takes_all:
        return np.flatnonzero(row.keys >= threshold.key).astype(np.int32)
    chosen = row.keys > threshold.key
    ties = np.flatnonzero(row.keys == threshold.key)
    chosen[ties[: threshold.tie_quota]] = True
    return np.flatnonzero(chosen).astype(np.int32)
