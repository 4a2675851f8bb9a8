"""Exact top-k of rows in parts: ranks agree on the k-th largest score, and each keeps its own share.

A **word** orders a score of the row among all others: the key of the score above, and below it a number
that falls as positions ascend. No two words are equal, so the k largest words are the contract's choice, ties
included, and finding them is finding the k-th largest word.

In memory that all ranks write into, one kernel finds that word and writes the results
(`gvr_topk.distributed.peers`). What follows is for collectives.

Each rank's k best positions hold its share, and they are all it sorts. A **round** narrows the search. Each
rank has a window of its sorted words that holds what is undecided, at most ``n`` words, and sends every
``stride``-th of them, ``stride = ceil(n / record)``. Among the samples of all W ranks, in descending order,
the sample number j (from 1) has at least ``stride * j`` undecided words that are not below it, and at most
``stride * j + (W - 1) * (stride - 1)``. With ``remaining`` words to be found, the last sample for which the
upper number is less than ``remaining`` lies above the k-th word, and so does all that is not below it. What
stays undecided on a rank are at most ``W * stride`` words. With a stride of 1 the samples are all undecided
words, and the sample number ``remaining`` is the k-th word.

So the number of rounds follows from k, the size of a record and the number of ranks alone. Nothing is read on
the host, and a CUDA graph can hold a call.

A **guess** may end the search in one round. Each rank guesses how many of its words are chosen, leaves out
most of so many, and sends the words from there on. The word that is then the k-th is right if, on every rank,
the last word left out lies above it, and the last word sent does not. Records have both, so all ranks know.
If it is not right, the rounds above follow.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from gvr_topk.arguments import Checks, Results, Written
from gvr_topk.constants import PEER_MAX_K
from gvr_topk.contract import order_key
from gvr_topk.distributed.peers import SHARDED as CHECKS
from gvr_topk.distributed.shards import Shards
from gvr_topk.ops import indexer_topk_decode, launch
from gvr_topk.state import TopkState

_POSITION_BITS = 31
_LAST = (1 << _POSITION_BITS) - 1
_ABOVE_ALL = (1 << 63) - 1
_NO_POSITION = torch.iinfo(torch.int32).max


class _Tensors(NamedTuple):
    """What a call reads and writes, of which nothing that is written shares memory with anything else."""

    logits: Tensor
    lengths: Tensor
    k: int
    expected: Tensor | None
    out: Results | None
    local: Results | None
    counts: Annotated[Tensor, Written(over="expected")] | None


class ShardedTopk(NamedTuple):
    """What `sharded_topk` returns.

    Attributes
    ----------
    positions : Tensor, ``[rows, >= k]``, int32
        Positions in the row, ascending, then -1: this rank's part of the choice, or with `gather` all of it.
    local : Tensor, ``[rows, >= k]``, int32
        Positions of this rank's part of the choice in its part of the row, ascending, then -1.
    counts : Tensor, ``[rows]``, int32
        How many items this rank's part has.
    """

    positions: Tensor
    local: Tensor
    counts: Tensor


def sharded_topk(
    logits: Tensor,
    lengths: Tensor,
    k: int,
    *,
    shards: Shards,
    state: TopkState | None = None,
    row_slot: Tensor | None = None,
    out: Tensor | None = None,
    local: Tensor | None = None,
    counts: Tensor | None = None,
    gather: bool = False,
    expected: Tensor | None = None,
    step: int | Tensor = 0,
    selected: bool = False,
) -> ShardedTopk:
    """Select the `k` largest scores of rows whose parts lie on several ranks, exactly.

    All ranks together choose what `gvr_topk.indexer_topk_decode` chooses of the whole row, bit for bit: among
    scores equal to the k-th one, the smallest positions of the row win, wherever they lie.

    Parameters
    ----------
    logits : Tensor, ``[rows, width]``, float32, bfloat16 or float16
        This rank's part of every row. The width is the rank's own, and may be 0.
    lengths : Tensor, ``[rows]``, int32, same device
        Visible length of each part. Lengths above `width` count as `width`, negative ones as zero.
    k : int
        Items per row, 1 to 2**21.
    shards : Shards
        The ranks, and who owns which position.
    state, row_slot : TopkState and Tensor, optional
        Of this rank's part, as for `gvr_topk.indexer_topk_decode`. They change only the time.
    out, local : Tensor, ``[rows, >= k]``, int32, optional
        Where positions in the row and in the part are written; allocated when absent.
    counts : Tensor, ``[rows]``, int32, optional
        Where the number of items of this rank's part is written; allocated when absent.
    gather : bool, default False
        Whether every rank gets all positions of the row. It costs one more exchange, of ``4 * k`` bytes for
        each row and rank.
    expected : Tensor, ``[rows]``, int32, optional
        How many items this rank's part may have, such as `counts` of the last step, and it may be `counts`;
        on all ranks or on none. If every rank is right in every row to within half of a record, one round is
        enough, else there is one more. Any content is safe. The host reads whether it was enough, so no CUDA
        graph can hold the call. In memory of all ranks it saves nothing.
    step : int, or Tensor of one element, int64, same device, default 0
        A number that ranks have to agree on, such as that of a decode step.
    selected : bool, default False
        Whether `out` has the `k` best positions of this rank's part, in any order, with -1 for none, as from
        `gvr_topk.indexer_topk_decode` or `gvr_topk.indexer_topk_prefill`. They are not selected again then,
        and this rank's results are in their order. Ranks may differ in it.

    Returns
    -------
    ShardedTopk

    Raises
    ------
    ValueError
        An argument is wrong, or ranks disagree about `k`, rows, dtype, ownership, the size of a record,
        `gather`, `step`, or whether there is something `expected`. On a GPU a later call raises for the
        latter, see `Shards.check`; the call itself selects nothing.
    RuntimeError
        A rank is late or dead: the error of `torch.distributed`, when the timeout of the group is over. In
        memory of all ranks, the call selects nothing after `timeout_s` of `Shards`, and a later one raises.

    Notes
    -----
    Every rank makes the same calls in the same order. A call that a wrong argument ends on one rank alone
    leaves the others waiting for their timeout.

    Over collectives, each rank sends ``8 * (1 + record)`` bytes for each row and round, and once a call a
    header. Without `expected`, nothing is read on the host. NCCL needs one call before the first that a CUDA
    graph captures.
    """
    k = CHECKS.integer("k", k)
    gather = CHECKS.flag("gather", gather)
    selected = CHECKS.flag("selected", selected)
    _check(_Tensors(logits, lengths, k, expected, out, local, counts), shards, step)
    shards.check()
    if not selected:
        best = indexer_topk_decode(logits, lengths, k, state=state, row_slot=row_slot)
    elif out is not None:
        best = out[:, :k]
    else:
        raise CHECKS.fail("selected", "out with what is selected", "none")
    if shards.peers is not None and k <= PEER_MAX_K:
        results = (
            torch.empty_like(best) if gather or out is None else out,
            torch.empty_like(best) if local is None else local,
            torch.empty_like(lengths) if counts is None else counts,
        )
        header = shards.header_words(logits, k, gather, expected is not None)
        launch(shards.peers.arguments(logits, lengths, best, results, k, shards.interleave, header, step))
        positions, local, counts = results
        if gather:
            positions = _written(out, _gathered(shards, positions))
        return ShardedTopk(positions, local, counts)
    own = lengths.to(torch.int64).clamp(0, logits.shape[1])
    words = _words(shards, logits, best)
    head = shards.header(logits, k, step, gather, expected is not None)
    kth, of_all = _agree(shards, words, own, k, head, expected)
    chosen = words >= kth[:, None]
    places = chosen.cumsum(1)
    # Positions that are not chosen share the place behind the others.
    compact = torch.full((len(best), k + 1), -1, dtype=torch.int32, device=best.device)
    compact.scatter_(1, torch.where(chosen, places - 1, k), best)
    compact = compact[:, :k]
    positions = torch.where(compact >= 0, shards.positions(compact, of_all).to(torch.int32), -1)
    if gather:
        positions = _gathered(shards, positions)
    return ShardedTopk(
        _written(out, positions), _written(local, compact), _written(counts, places[:, -1].to(torch.int32))
    )


def _check(a: _Tensors, shards: Shards, step: int | Tensor) -> None:
    """Refuse wrong arguments, before anything is sent."""
    if not isinstance(shards, Shards):
        raise CHECKS.wrong_type("shards", Shards, shards)
    CHECKS.scores(a.logits, a.k)
    rows = a.logits.shape[0]
    if a.logits.device != shards.device:
        raise CHECKS.fail("logits", f"a tensor on {shards.device}", a.logits.device)
    CHECKS.tensor("lengths", a.lengths, a.logits, torch.int32, (rows,))
    for name, tensor in (("out", a.out), ("local", a.local)):
        if tensor is not None:
            CHECKS.results(name, tensor, a.logits, rows, a.k)
    for name, tensor in (("counts", a.counts), ("expected", a.expected)):
        if tensor is not None:
            CHECKS.tensor(name, tensor, a.logits, torch.int32, (rows,))
    CHECKS.memory(a)
    check_step(CHECKS, step, a.logits)


def check_step(checks: Checks, step: int | Tensor, like: Tensor) -> None:
    """Check the number that ranks compare."""
    if isinstance(step, Tensor):
        checks.tensor("step", step, like, torch.int64, (1,) if step.dim() else ())
    else:
        checks.integer("step", step, -(1 << 63), _ABOVE_ALL)


def _words(shards: Shards, logits: Tensor, best: Tensor) -> Tensor:
    """Return the words of the best positions of this rank, ``[rows, k]``, int64; -1 for none.

    A position that this rank does not have, in what was selected before, counts as none.
    """
    position = best.to(torch.int64)
    there = (position >= 0) & (position < logits.shape[1])
    if logits.shape[1] == 0:
        return torch.full_like(position, -1)
    keys = order_key(logits.gather(1, torch.where(there, position, 0)))
    # The numbers of `order` are small enough to leave out the largest word, which stands above all scores.
    ranked = (keys << _POSITION_BITS) | (_LAST - 1 - shards.order(position))
    return torch.where(there, ranked, -1)


def _agree(
    shards: Shards, words: Tensor, own: Tensor, k: int, head: Tensor, expected: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Find the k-th largest word of all ranks in every row, and the lengths of all parts, ``[world, rows]``.

    The words of this rank, ``[rows, k]``, are -1 for none; `own` are the lengths of its parts. `expected`
    says how many of its words may be chosen. The k-th word is 0, which is below all, where there are fewer
    words, and above all if ranks disagree.
    """
    if k > shards.record:  # otherwise all words are sent, in any order
        words = torch.sort(words, dim=1, descending=True).values
    words = pad(words, (0, 1), value=-1)  # one more column, for every index behind the words
    ordinal = torch.arange(1, shards.record + 1, device=words.device)
    lengths = agreed = None
    if expected is not None and k > shards.record:
        gathered, agreed = shards.first_exchange(_around(shards, words, own, expected, k), head)
        lengths = gathered[:, :, 0]
        kth, right = _verify(gathered, k)
        if bool(right.all() | ~agreed):
            return torch.where(agreed, kth, _ABOVE_ALL), lengths
    above = torch.zeros_like(own)  # words of this rank that are known to lie above the k-th
    undecided = k  # at most, on every rank
    while True:
        stride = -(-undecided // shards.record)
        samples = words.gather(1, (above[:, None] + stride * ordinal - 1).clamp(max=k))
        if lengths is None:
            gathered, agreed = shards.first_exchange(torch.cat((own[:, None], samples), 1), head)
            lengths, remaining = gathered[:, :, 0], torch.full_like(own, k)
        else:
            gathered = shards.exchange(torch.cat((above[:, None], samples), 1))
            remaining = k - gathered[:, :, 0].sum(0)
        ranked = _merged(gathered[:, :, 1:])
        if stride == 1:
            break
        # Samples that lie above the k-th word for certain.
        spread = (shards.world - 1) * (stride - 1)
        certain = torch.div(remaining - spread - 1, stride, rounding_mode="floor")
        # A row with fewer samples has fewer than k words, all of which are chosen: those from 0 on.
        least = torch.where(certain > 0, _sample(ranked, certain), _ABOVE_ALL)
        above = above.maximum((words >= least[:, None]).sum(1))
        undecided = shards.world * stride
    assert agreed is not None
    return torch.where(agreed, _sample(ranked, remaining), _ABOVE_ALL), lengths


def _around(shards: Shards, descending: Tensor, own: Tensor, expected: Tensor, k: int) -> Tensor:
    """Return the record of a guess: length, number of words left out, the last of these, and those behind."""
    sent = shards.record - 2
    before = (expected.to(torch.int64) - sent // 2).clamp(0, k)
    at = before[:, None] + torch.arange(-1, sent, device=own.device)
    samples = descending.gather(1, at.clamp(0, k))
    samples[:, 0] = torch.where(before > 0, samples[:, 0], _ABOVE_ALL)
    return torch.cat((own[:, None], before[:, None], samples), 1)


def _verify(gathered: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k-th word that follows from the guesses of all ranks, and whether it does, ``[rows]``."""
    remaining = k - gathered[:, :, 1].sum(0)
    kth = _sample(_merged(gathered[:, :, 3:]), remaining)
    right = ((gathered[:, :, 2] > kth) & (gathered[:, :, -1] <= kth)).all(0)
    return kth, right & (remaining > 0)


def _merged(samples: Tensor) -> Tensor:
    """Sort the samples of all ranks, ``[world, rows, n]``, in descending order for each row."""
    return torch.sort(samples.transpose(0, 1).flatten(1), dim=1, descending=True).values


def _sample(ranked: Tensor, number: Tensor) -> Tensor:
    """Return the sample with a number, from 1 on, of each row; 0, which is below all words, for none."""
    columns = ranked.shape[1]
    found = ranked.gather(1, (number - 1).clamp(0, columns - 1)[:, None])[:, 0]
    return torch.where(number > columns, 0, found.clamp(min=0))


def _gathered(shards: Shards, positions: Tensor) -> Tensor:
    """Merge the parts of all ranks, which ascend and end in -1."""
    k = positions.shape[1]
    parts = shards.exchange(torch.where(positions >= 0, positions, _NO_POSITION))
    merged = torch.sort(parts.transpose(0, 1).flatten(1), dim=1).values[:, :k]
    return torch.where(merged == _NO_POSITION, -1, merged)


def _written(target: Tensor | None, values: Tensor) -> Tensor:
    """Write results where the caller wants them."""
    if target is None:
        return values
    (target if target.dim() == 1 else target[:, : values.shape[1]]).copy_(values)
    return target
