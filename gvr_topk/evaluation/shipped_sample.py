"""A first interval without a prediction: order statistics of a sample of the row, or of the hinted scores.

Of single elements so few belong to the top k of a long row that their order statistics say little; of the
greatest of m elements, a share of ``1 - (1 - k / n)**m`` do.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gvr_topk.contract import KEY_NAN
from gvr_topk.evaluation.shipped_predictor import NEIGHBOURS, deviation_of, sample_place
from gvr_topk.evaluation.shipped_types import (
    HINT,
    KEY_ABSENT,
    KEY_LEAST_FINITE,
    LANES,
    ROW_SAMPLE,
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

NEARLY_ALL = F(0.96)
"""Hints that hit nearly always show nothing below the k-th value."""
BESIDE = F(0.5)
"""Every warp names order statistics so many standard deviations beside the place where the k-th stands."""
OUTSIDERS = 2
"""So many of 16 warps' ideas of an end are left out, and one more for each doubling of CTAs."""
TAIL_SHARE = F(0.125)
"""With less of the sample above the k-th, the greatest few of every warp are ranked together."""
TAIL_OF_EACH, REACH_UP, REACH_DOWN = 8, F(3.0), F(4.0)
"""So many of each warp, and how many deviations an interval of these reaches up and down."""


@dataclass(frozen=True)
class RowSampling:
    """How a row is sampled: one key per thread, the greatest of a few scattered elements.

    Attributes
    ----------
    log2_total : int
        Elements that a sample is the greatest of, as a power of two.
    log2_lanes, log2_own : int
        Of these, lanes that join beside the four that share a look, and looks of one thread.
    log2_parts : int
        CTAs that divide the sample among them; 0 where each takes it all.
    span : int
        Elements it is taken from, of which the row has nearly all.
    """

    log2_total: int
    log2_lanes: int
    log2_own: int
    log2_parts: int
    span: int


def row_sampling(row: Row, *, divided: bool, span: int) -> RowSampling:
    """As few looks as leave some of the top k among the samples."""
    n, parts = row.length, row.log2_ctas if divided else 0
    total = 2 if n < 1 << 18 else 3 if n < 1 << 19 else 4 if n <= 1 << 20 else 5
    most_lanes = min(parts, 3)
    total = max(total, 2 + most_lanes)
    while total > 0 and row.k << total > 2 * n:  # of more, nearly all would lie in the top k
        total -= 1
    total = total if total >= 2 else 0
    lanes = max(min(most_lanes, total - 2), 0)
    return RowSampling(total, lanes, max(total - 2 - lanes, 0), parts, span)


def sample_of_row(row: Row, sampling: RowSampling) -> Ints:
    """One key for each thread, the same in all CTAs; shape [512]."""
    shares = [_sample_of_cta(row, sampling, part) for part in range(1 << sampling.log2_parts)]
    # Of each CTA so many as it has threads for: those of every so many-th lane.
    return np.concatenate([share[:: 1 << sampling.log2_parts] for share in shares])


def _sample_of_cta(row: Row, sampling: RowSampling, part: int) -> Ints:
    """What the threads of one CTA make of their looks, shape [512].

    A thread's four neighbours go to four samples, for neighbours' scores are alike: of the lanes 8 apart,
    the first takes the greatest of all first neighbours, and so on.
    """
    greatest = np.zeros((THREADS, NEIGHBOURS), dtype=np.int64)
    number = np.arange(THREADS, dtype=np.int64)
    for look in range(1 << sampling.log2_own):
        at = sample_place(((look * THREADS + number) << sampling.log2_parts) + part, sampling.span)
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


def share_above(row: Row, sampling: RowSampling) -> np.float32:
    """The share of samples that lie in the top k; the kernels' power and divisions are approximate."""
    n = F(row.length)
    elements = F(F(n / F(sampling.span)) * F(1 << sampling.log2_total))
    outside = F(F(1.0) - F(F(row.k) / n))
    return F(F(1.0) - np.exp2(F(np.log2(outside) * elements)))


def interval_by_row(row: Row, *, divided: bool = False, span: int | None = None) -> KeyInterval:
    """A first interval from the row alone.

    Parameters
    ----------
    row : Row
    divided : bool
        Whether the CTAs of the cluster divide the sample, as they do where nothing is fed back.
    span : int, optional
        Elements to look among; default the row's.

    Returns
    -------
    KeyInterval
    """
    sampling = row_sampling(row, divided=divided, span=row.length if span is None else span)
    sample = sample_of_row(row, sampling)
    return sample_interval(sample, share_above(row, sampling), ROW_SAMPLE, row.log2_ctas)


def interval_by_hint(
    row: Row, hint: npt.NDArray[np.integer] | None, offset: int, share: np.float32
) -> KeyInterval:
    """A first interval from the scores at hinted positions, of which `share` is believed to be chosen.

    The hint is sampled evenly over its length, all of it if it is short; warps look all over it.
    """
    thread = np.arange(THREADS, dtype=np.int64)
    lane, warp = thread % LANES, thread // LANES
    place = (lane & 28) * WARPS + 4 * warp + (lane & 3)
    at = place * row.k // THREADS if row.k > THREADS else place
    keys = np.zeros(THREADS, dtype=np.int64)
    if hint is not None:
        hinted = np.where(at < row.k, hint[np.minimum(at, row.k - 1)].astype(np.int64), -1)
        position = hinted + offset
        there = (hinted >= 0) & (position >= 0) & (position < row.length)
        keys = np.where(there, row.keys[np.where(there, position, 0)], KEY_ABSENT)
    return sample_interval(keys, share, HINT, row.log2_ctas)


def sample_interval(keys: Ints, share: np.float32, source: int, log2_ctas: int) -> KeyInterval:
    """An interval around the ``1 - share`` quantile of one key per thread: a sign test of 16 warps.

    Each warp reads the order statistics beside that place off its own 32 keys. Of the 16 ideas of an end, the
    one that so many others lie outside of is taken.

    Parameters
    ----------
    keys : ndarray, shape [512], int64
    share : float32
        Which part of the sample lies above the k-th key.
    source : int
        `HINT` or `ROW_SAMPLE`.
    log2_ctas : int
        CTAs of the cluster: the more, the narrower.

    Returns
    -------
    KeyInterval
    """
    if share < TAIL_SHARE and source == ROW_SAMPLE:
        return _tail_interval(keys, share)
    beside = F(BESIDE * deviation_of(F(F(F(32.0) * share) * F(F(1.0) - share))))
    tops, bottoms = [], []
    for of_warp in keys.reshape(WARPS, LANES):
        present = int(np.count_nonzero(of_warp != KEY_ABSENT))
        place = F(share * F(present))
        upper = max(int(F(place - beside)) - 1, 0)
        lower = min(int(np.ceil(F(place + beside))), present - 1)
        tops.append(_at_rank(of_warp, upper))
        bottoms.append(_at_rank(of_warp, lower))
    is_tight = bool(share > NEARLY_ALL)
    hi = _at_rank(np.array(tops), OUTSIDERS + log2_ctas)
    inverted = KEY_NAN - np.array(bottoms)
    lo = KEY_NAN - _at_rank(inverted, 0 if is_tight else OUTSIDERS + log2_ctas)
    interval = finite_interval(lo, hi, source)
    if not is_tight:
        return interval
    wider = F(interval.low - F(interval.high - interval.low))
    return KeyInterval(max(min(interval.lo, key_of(wider)), KEY_LEAST_FINITE), interval.hi, source)


def _tail_interval(keys: Ints, share: np.float32) -> KeyInterval:
    """The same where few samples are above the k-th key: the greatest of all warps, ranked together.

    Of more than eight that share the last rank of a warp's, the first lanes' are taken, and then even before
    greater ones of later lanes: the interval is a guess.
    """
    greatest = np.concatenate([_greatest_of(warp) for warp in keys.reshape(WARPS, LANES)])
    expected = F(F(THREADS) * share)
    spread = deviation_of(F(expected * F(F(1.0) - share)))
    upper = max(int(F(expected - F(REACH_UP * spread))) - 1, 0)
    lower = int(np.ceil(F(expected + F(REACH_DOWN * spread))))
    return finite_interval(_at_rank(greatest, lower), _at_rank(greatest, upper), ROW_SAMPLE)


def _greatest_of(keys: Ints) -> Ints:
    return keys[keys >= _at_rank(keys, TAIL_OF_EACH - 1)][:TAIL_OF_EACH]


def _at_rank(keys: Ints, rank: int) -> int:
    """The smallest key that no more than `rank` are greater than; `KEY_NAN` where there is none."""
    if rank < 0:
        return KEY_NAN
    return int(np.sort(keys)[::-1][min(rank, len(keys) - 1)])
