"""A first interval without a prediction: order statistics of a sample of the row.

Of single elements of a long row so few belong to its top k that their order statistics say little. So each
sample is the greatest of m elements: of such samples a share of ``1 - (1 - k / n)**m`` belongs to the top k.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gvr_topk.constants import GuessSource
from gvr_topk.contract import KEY_NAN
from gvr_topk.evaluation.shipped_predictor import NEIGHBOURS, hashed_position, standard_deviation
from gvr_topk.evaluation.shipped_types import (
    KEY_ABSENT,
    KEY_LEAST_FINITE,
    LANES,
    THREADS,
    WARPS,
    F,
    Ints,
    KeyInterval,
    Row,
    finite_interval,
    key_of,
    keys_of,
)

NEARLY_ALL_ABOVE = F(0.96)
"""A sample of which a larger share lies above the k-th value shows hardly anything below this value."""
MARGIN_SIGMAS = F(0.5)
"""Every warp names order statistics this many standard deviations to both sides of the k-th key's place."""
OUTSIDERS = 2
"""So many of the 16 proposals for an end, one per warp, are left out, and one more for each doubling of
CTAs."""
TAIL_SHARE = F(0.125)
"""If a smaller share of the sample lies above the k-th key, the greatest few of every warp are ranked
together."""
OF_EACH, SIGMAS_UP, SIGMAS_DOWN = 8, F(3.0), F(4.0)
"""Keys that each warp gives to such a ranking, and how many deviations its interval reaches up and down."""


@dataclass(frozen=True)
class RowSampler:
    """How a row is sampled: one key per thread, the greatest of a few scattered elements.

    Attributes
    ----------
    log2_total : int
        Number of elements that a sample is the greatest of, as a power of two.
    log2_lanes, log2_own : int
        Parts of `log2_total`: lanes that join, beside the four that share a look, and looks of one thread.
    log2_parts : int
        CTAs that divide the sample among themselves; 0 if each takes all of it.
    span : int
        Number of elements that the sample is taken from; nearly all of them are the row's.
    """

    log2_total: int
    log2_lanes: int
    log2_own: int
    log2_parts: int
    span: int


def row_sampler(row: Row, *, divided: bool, span: int) -> RowSampler:
    """Return a sampler with as few looks as leave some of the top k among the samples."""
    n, parts = row.length, row.log2_ctas if divided else 0
    total = 2 if n < 1 << 18 else 3 if n < 1 << 19 else 4 if n <= 1 << 20 else 5
    most_lanes = min(parts, 3)
    total = max(total, 2 + most_lanes)
    while total > 0 and row.k << total > 2 * n:  # with more, nearly all samples would lie in the top k
        total -= 1
    total = total if total >= 2 else 0
    lanes = max(min(most_lanes, total - 2), 0)
    return RowSampler(total, lanes, max(total - 2 - lanes, 0), parts, span)


def sample_of_row(row: Row, sampling: RowSampler) -> Ints:
    """Return one key for each thread, the same in all CTAs; shape [512]."""
    shares = [_sample_of_cta(row, sampling, part) for part in range(1 << sampling.log2_parts)]
    # Every CTA contributes its part: one of every 2**log2_parts of its samples.
    return np.concatenate([share[:: 1 << sampling.log2_parts] for share in shares])


def _sample_of_cta(row: Row, sampling: RowSampler, part: int) -> Ints:
    """Return the samples that the threads of one CTA make of their looks, shape [512].

    A thread's four neighbours go to four different samples, because the scores of neighbours are alike: of
    the lanes 8 apart, the first takes the greatest of all first neighbours, and so on.
    """
    greatest = np.zeros((THREADS, NEIGHBOURS), dtype=np.int64)
    number = np.arange(THREADS, dtype=np.int64)
    for look in range(1 << sampling.log2_own):
        at = hashed_position(((look * THREADS + number) << sampling.log2_parts) + part, sampling.span)
        there = (at + NEIGHBOURS <= row.length) | (row.length < NEIGHBOURS)
        positions = np.minimum(at[:, None] + np.arange(NEIGHBOURS), row.length - 1)
        keys = keys_of(row.values[positions.ravel()]).reshape(positions.shape)
        greatest = np.maximum(greatest, np.where(there[:, None], keys, KEY_ABSENT))
    if sampling.log2_total == 0:
        return greatest[:, 0]
    lanes = greatest.reshape(WARPS, 4, 8, NEIGHBOURS).max(axis=1)
    samples = lanes.transpose(0, 2, 1).reshape(WARPS, NEIGHBOURS, 8 >> sampling.log2_lanes, -1)
    joined = np.broadcast_to(samples.max(axis=3, keepdims=True), samples.shape)
    return joined.reshape(THREADS)


def share_above(row: Row, sampling: RowSampler) -> np.float32:
    """Return the share of samples that lie in the top k; the kernels' power and divisions are approximate."""
    n = F(row.length)
    elements = F(F(n / F(sampling.span)) * F(1 << sampling.log2_total))
    outside = F(F(1.0) - F(F(row.k) / n))
    return F(F(1.0) - np.exp2(F(np.log2(outside) * elements)))


def guess_by_row(row: Row, *, divided: bool = False, span: int | None = None) -> KeyInterval:
    """Return a first interval from the row alone.

    Parameters
    ----------
    row : Row
    divided : bool
        Whether the CTAs of the cluster divide the sample, as they do if no state is read.
    span : int, optional
        Number of elements to look among; default the row's length.

    Returns
    -------
    KeyInterval
    """
    sampling = row_sampler(row, divided=divided, span=row.length if span is None else span)
    sample = sample_of_row(row, sampling)
    return sample_interval(sample, share_above(row, sampling), row.log2_ctas)


def sample_interval(keys: Ints, share: np.float32, log2_ctas: int) -> KeyInterval:
    """Return an interval around the ``1 - share`` quantile of one key per thread, by a sign test of 16 warps.

    Each warp takes the order statistics to both sides of that quantile from its own 32 keys. Of the 16
    proposals for an end, the one is taken that has `OUTSIDERS` others outside of it, and one more for each
    doubling of CTAs.

    Parameters
    ----------
    keys : ndarray, shape [512], int64
    share : float32
        Share of the sample that lies above the k-th key.
    log2_ctas : int
        CTAs of the cluster, as a power of two: the more CTAs, the narrower the interval.

    Returns
    -------
    KeyInterval
    """
    if share < TAIL_SHARE:
        return tail_interval(keys, share)
    margin = F(MARGIN_SIGMAS * standard_deviation(F(F(F(32.0) * share) * F(F(1.0) - share))))
    tops, bottoms = [], []
    for of_warp in keys.reshape(WARPS, LANES):
        present = int(np.count_nonzero(of_warp != KEY_ABSENT))
        place = F(share * F(present))
        upper = max(int(F(place - margin)) - 1, 0)
        lower = min(int(np.ceil(F(place + margin))), present - 1)
        tops.append(_at_rank(of_warp, upper))
        bottoms.append(_at_rank(of_warp, lower))
    is_tight = bool(share > NEARLY_ALL_ABOVE)
    hi = _at_rank(np.array(tops), OUTSIDERS + log2_ctas)
    inverted = KEY_NAN - np.array(bottoms)
    lo = KEY_NAN - _at_rank(inverted, 0 if is_tight else OUTSIDERS + log2_ctas)
    interval = finite_interval(lo, hi, GuessSource.ROW_SAMPLE)
    if not is_tight:
        return interval
    wider = F(interval.low - F(interval.high - interval.low))
    return KeyInterval(
        max(min(interval.lo, key_of(wider)), KEY_LEAST_FINITE), interval.hi, GuessSource.ROW_SAMPLE
    )


def tail_interval(keys: Ints, share: np.float32) -> KeyInterval:
    """Return the interval if few samples are above the k-th key: the greatest of all warps, ranked together.

    Each warp gives eight keys. If more keys tie for them, those of the first lanes are taken, even before
    greater keys of later lanes: that is allowed because the interval is a guess.
    """
    greatest = np.concatenate([_greatest_of(warp) for warp in keys.reshape(WARPS, LANES)])
    expected = F(F(THREADS) * share)
    spread = standard_deviation(F(expected * F(F(1.0) - share)))
    upper = max(int(F(expected - F(SIGMAS_UP * spread))) - 1, 0)
    lower = int(np.ceil(F(expected + F(SIGMAS_DOWN * spread))))
    return finite_interval(_at_rank(greatest, lower), _at_rank(greatest, upper), GuessSource.ROW_SAMPLE)


def _greatest_of(keys: Ints) -> Ints:
    return keys[keys >= _at_rank(keys, OF_EACH - 1)][:OF_EACH]


def _at_rank(keys: Ints, rank: int) -> int:
    """Return the key at `rank` from the top, counted from 0, or the last; `KEY_NAN` for a negative rank."""
    if rank < 0:
        return KEY_NAN
    return int(np.sort(keys)[::-1][min(rank, len(keys) - 1)])
