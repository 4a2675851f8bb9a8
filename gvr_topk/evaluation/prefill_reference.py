"""The algorithm of the prefill kernel, one run of neighbouring rows, exact and readable.

`select_run` reads from top to bottom as one CTA goes through its rows. A row that is longer than k is served
in these phases:

1. **guess** an interval that should hold the k-th value: around the k-th value of the row before
   (`RowPredictor.interval`), or, if that would be too wide, from a sample of the row (`guess_by_sample`);
2. **collect**: mark the elements above the interval, and store the elements inside it as candidates;
3. **verify**: the counts of both say whether the k-th value is a candidate;
4. **refine**: a histogram of the candidates finds the bin of the k-th value, and only this bin is ranked;
5. **emit** the marked positions in ascending order (`select_in` does this and the three phases before it).

A row whose interval has missed is collected once more, with an interval from a sample. If an interval from a
sample misses, a second one is tried. If that fails as well, radix rounds over the keys of the whole row find
the result (`radix_select_row`).

The result is the contract's (`gvr_topk.contract`) for every row; the row before decides only how much work it
takes. The numbers below, and most names, are those of ``cpp/kernels/prefill``. Windows are taken to begin at
multiples of 16 bytes and to fit a CTA's bitmap. The kernel differs in two ways. It finds the ends of a
sample's interval by histograms over keys, which makes the interval a little wider. And its store of
candidates is full a little earlier, because warps fill it in chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from gvr_topk.constants import GuessSource, HintReason
from gvr_topk.contract import row_windows
from gvr_topk.evaluation.shipped_predictor import fma, reciprocal
from gvr_topk.evaluation.shipped_reference import StepStats
from gvr_topk.evaluation.shipped_types import INVARIANT_BITS, KEY_ABSENT, ZERO, F, Floats, keys_of, value_of
from gvr_topk.evaluation.shipped_types import KEY_LEAST_FINITE as LEAST
from gvr_topk.evaluation.shipped_types import KEY_MOST_FINITE as MOST

Positions = npt.NDArray[np.int32]

THREADS, MAX_K, STORE_ITEMS, MOST_TIES = 256, 2048, 88 * 32, 512
FINE_BINS, LOG2_KEY_BINS = 256, 11
MAX_INSIDE, MIN_INSIDE = F(1536.0), F(128.0)
"""Elements in the widest and in the narrowest interval that is taken from the row before."""
ERRORS, ERROR_DECAY, FASTEST_DECAY, UNKNOWN_ERROR = F(5.0), F(0.8), F(0.5), F(-1.0)
FIRST_ERROR = F(1.1)
"""Error after the first row, in widths of ``sqrt(k)`` elements: the distance that the k-th value moves
between independently drawn rows."""
DEVIATIONS, CLOSER, WIDER, PROBE, LOG2_OF_PROBE = F(3.5), F(2.0), F(5.0), 4, 15


@dataclass(frozen=True)
class ValueInterval:
    """An interval with inclusive ends. Bins divide only `first` to `last`: the ends may lie far out."""

    lo: np.float32
    hi: np.float32
    first: np.float32
    last: np.float32

    @property
    def width(self) -> np.float32:
        return F(self.last - self.first)

    def bins(self, values: Floats) -> npt.NDArray[np.int64]:
        depth = (self.last - values) * reciprocal(self.width)
        depth = np.clip(np.where(np.isnan(depth), ZERO, depth), 0, 1)  # as the GPU's saturation does
        return np.maximum(FINE_BINS - 1 - (depth * FINE_BINS).astype(np.int64), 0)

    def value_of(self, fine_bin: int) -> np.float32:
        return fma(F((fine_bin + 0.5) / FINE_BINS), self.width, self.first)


@dataclass(frozen=True)
class RowPredictor:
    """What a row leaves for the next row of its run."""

    value: np.float32 = ZERO  # the k-th value, to the precision of a bin
    error: np.float32 = UNKNOWN_ERROR  # how far `value` moves from row to row; negative if not known
    per_element: np.float32 = ZERO  # width of an interval that held one element
    has_value: bool = False
    tie_key: int = KEY_ABSENT  # the k-th key, if too many elements had it for candidates to help

    @property
    def is_close(self) -> bool:
        return bool(self.error >= 0 and F(2) * ERRORS * self.error <= MAX_INSIDE * self.per_element)

    def interval(self) -> ValueInterval:
        radius = np.fmax(ERRORS * self.error, F(0.5) * MIN_INSIDE * self.per_element)
        lo, hi = np.fmax(self.value - radius, value_of(LEAST)), F(self.value + radius)
        return ValueInterval(lo, hi, lo, hi)

    def learn(self, kth: np.float32, per_element: np.float32, k: int) -> RowPredictor:
        if self.has_value:
            move = abs(F(kth - self.value))
            slow = fma(F(F(1.0) - ERROR_DECAY), move, F(ERROR_DECAY * self.error))
            error = np.fmax(F(FASTEST_DECAY * self.error), slow)
        else:
            error = F(F(FIRST_ERROR * np.sqrt(F(k))) * per_element)
        return RowPredictor(kth, error, per_element, True)


@dataclass(frozen=True)
class RowResult:
    """One row: its positions, its statistics, and what it leaves for the next one."""

    indices: Positions
    stats: StepStats
    predictor: RowPredictor


def select_run(
    scores: Tensor, row_starts: Tensor, row_ends: Tensor, k: int, *, predicts: bool = True
) -> list[RowResult]:
    """Select in neighbouring rows; arguments as in `gvr_topk.indexer_topk_prefill`.

    `predicts` is false for path ``"radix_rounds"``.
    """
    starts, lengths = row_windows(row_starts, row_ends, scores.shape[1])
    rounds = -(-(32 - INVARIANT_BITS[scores.dtype]) // LOG2_KEY_BINS)
    results, last = [], RowPredictor()
    for row, start, n in zip(scores.float().numpy(), starts.tolist(), lengths.tolist(), strict=True):
        if n <= k:
            reason = HintReason.SHORT_ROW if predicts else HintReason.DISABLED
            indices = np.where(np.arange(k) < n, np.arange(k), -1).astype(np.int32)
            result = RowResult(indices, StepStats(reason, 0, 0, 0, -1, GuessSource.NONE, 0, 0), last)
        else:
            with np.errstate(all="ignore"):  # whatever rows hold, as on a GPU
                result = select_row(row[start : start + n], k, last, rounds, predicts=predicts)
        results.append(result)
        last = result.predictor
    return results


def select_row(values: Floats, k: int, last: RowPredictor, rounds: int, *, predicts: bool) -> RowResult:
    """Select in a row that is longer than k; `rounds` are the radix rounds that its dtype takes."""
    samples = 2 if last.tie_key == KEY_ABSENT else 0
    sources = [GuessSource.VALUE] * last.is_close + [GuessSource.ROW_SAMPLE] * samples
    if not predicts or k > MAX_K:
        sources = []
    first = sources[0] if sources else GuessSource.NONE
    reason = HintReason.USED if first is GuessSource.VALUE else HintReason.FIRST_STEP
    reason, inside = reason if predicts else HintReason.DISABLED, 0
    deviations = DEVIATIONS
    for passes, source in enumerate(sources, 1):
        by_value = source is GuessSource.VALUE
        interval = last.interval() if by_value else guess_by_sample(values, k, deviations)
        selected, inside, kth = select_in(values, k, interval)
        if selected is not None:
            stats = StepStats(reason, passes, inside, 0, -1, first, int(passes == 1), 0)
            return RowResult(selected, stats, last.learn(kth, F(interval.width / F(inside)), k))
        if not by_value:  # narrower if there were too many candidates, else wider
            deviations = CLOSER if inside > STORE_ITEMS else WIDER
    indices, tie_key, is_known = radix_select_row(values, k, last.tie_key)
    done = 0 if is_known else rounds
    stats = StepStats(reason, len(sources) + 1, inside, 0, -1, first, 0, done)
    return RowResult(indices, stats, RowPredictor(tie_key=tie_key))


def select_in(values: Floats, k: int, interval: ValueInterval) -> tuple[Positions | None, int, np.float32]:
    """Return positions (None if the interval misses), number of candidates, and a value near the k-th."""
    marked = ~(values <= interval.hi)  # NaN lies above
    candidates = np.flatnonzero(~(values < interval.lo) & ~marked)
    inside, rank = len(candidates), k - int(np.count_nonzero(marked))
    if inside > STORE_ITEMS or not 0 < rank <= inside:
        return None, inside, ZERO
    bins = interval.bins(values[candidates])
    hit = int(np.sort(bins)[-rank])
    marked[candidates[bins > hit]] = True
    boundary = candidates[bins == hit]
    in_order = np.lexsort((boundary, -keys_of(values[boundary])))  # greater first, then smaller positions
    marked[boundary[in_order[: rank - int(np.count_nonzero(bins > hit))]]] = True
    return np.flatnonzero(marked).astype(np.int32), inside, interval.value_of(hit)


def guess_by_sample(values: Floats, k: int, deviations: np.float32 = DEVIATIONS) -> ValueInterval:
    """Return an interval between two order statistics of a sample of the row.

    The two lie about `deviations` standard deviations to both sides of the expected rank of the k-th value.
    The sample has four neighbouring elements at a hashed position of each stratum of the row.
    """
    vectors, log2_length = len(values) // PROBE, (len(values) - 1).bit_length()
    if vectors == 0:
        return ValueInterval(*[value_of(LEAST), value_of(MOST)] * 2)
    probes = THREADS << max(log2_length - LOG2_OF_PROBE, 0)
    number = np.arange(probes, dtype=np.int64)
    vector = (number * vectors + ((number * 2654435761 & 0xFFFFFFFF) * vectors >> 32)) // probes
    sample = np.sort(keys_of(values[(PROBE * vector[:, None] + np.arange(PROBE)).ravel()]))[::-1]
    share = F(k / len(values))
    expected = F(share * F(len(sample)))
    margin = fma(deviations, np.sqrt(F(expected * F(F(1) - share))), F(1))
    upper, lower = int(max(expected - margin, ZERO)), int(expected + margin) + 1
    last = value_of(min(int(sample[max(upper, 1) - 1]), MOST))
    first = value_of(max(int(sample[min(lower, len(sample)) - 1]), LEAST))
    lo = first if lower <= len(sample) else value_of(LEAST)
    return ValueInterval(lo, last if upper > 0 else value_of(MOST), first, last)


def radix_select_row(values: Floats, k: int, tried: int) -> tuple[Positions, int, bool]:
    """Return positions by the k-th key, the key if the next row shall try it, and whether `tried` was it."""
    keys = keys_of(values)
    key = int(np.sort(keys)[-k])
    marked, ties = keys > key, np.flatnonzero(keys == key)
    marked[ties[: k - int(np.count_nonzero(marked))]] = True
    is_tied = len(ties) > MOST_TIES or not LEAST <= key <= MOST
    return np.flatnonzero(marked).astype(np.int32), key if is_tied else KEY_ABSENT, key == tried
