"""The ranks that share rows: who owns which position, and how records go round."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gvr_topk.arguments import Checks
from gvr_topk.constants import HEADER_WORDS, MAX_ROWS, MAX_TIMEOUT_NS, MAX_WIDTH
from gvr_topk.contract import DTYPES
from gvr_topk.distributed.peers import Peers, connect

MAX_RANKS = (1 << 31) // (2 * MAX_WIDTH)
"""Most ranks, 512: all positions of a row then lie below ``2**31 - 2**21``, whatever the ownership."""

TWO_ROUNDS_K = 2048
"""Largest k that two rounds serve with records of the default size."""

CHECKS = Checks("gvr_topk.Shards")

# The name of torch 2.13 and later, and that of torch before.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)

_WIDTH_BITS = MAX_WIDTH.bit_length()
_HEADER = (
    (("rows", MAX_ROWS.bit_length()), ("k", _WIDTH_BITS), ("gather", 1), ("expected", 1)),
    (("record", _WIDTH_BITS), ("ownership", _WIDTH_BITS), ("dtype", len(DTYPES).bit_length())),
)
"""What ranks have to agree on: fields of a header's words, with their bits. The last word is the step."""


def record_words(world: int) -> int:
    """Return the size of a record: the least multiple of 32 words with which two rounds serve k = 2,048.

    A round with `words` words for each rank leaves, of a window of ``n`` words, one of
    ``world * ceil(n / words)``: see `gvr_topk.distributed.topk`.
    """
    words = 32
    while world * -(-TWO_ROUNDS_K // words) > words:
        words += 32
    return words


class Shards:
    """Ranks that hold the parts of the same rows. Every rank makes one, in the same order.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup, optional
        The ranks, at most 512; default: all of them. Its backend has to serve `device`. Its timeout is the
        longest that a collective waits for a rank that is late or dead.
    ownership : "contiguous" or int, default "contiguous"
        Where position ``j`` of a rank's part lies in the row. ``"contiguous"``: behind the parts of all ranks
        before it, whose lengths may differ. A number S, 1 to 2**21: S positions go to each rank in turn, so
        position ``j`` of rank ``r`` of ``W`` is ``(j // S) * W * S + r * S + j % S`` of the row.
    device : torch.device or str, default "cpu"
        Where scores and results are.
    record : int, optional
        Words of 8 bytes that a rank sends for each row and round, at least two for each rank, and four.
        Records of at least k words need one round. The default, 64 words for two ranks and 128 for eight,
        needs two rounds for k up to 2,048. It counts where collectives exchange records.
    peer_memory : bool, default True
        Whether up to 16 GPUs of one host agree through memory that all of them write into, for k up to 2,048,
        in one kernel. Where they cannot, and otherwise, collectives exchange records. The same on all ranks.
    timeout_s : float, default 120
        How many seconds that kernel waits for a rank that is late or dead.

    Attributes
    ----------
    rank, world : int
        Number of this rank, and how many there are.

    Raises
    ------
    ValueError
        An argument is wrong, or this process is not in the group.

    Notes
    -----
    On a GPU a call does not wait for the host, so ranks that disagree are reported late: such a call selects
    nothing, and the next call of any rank that has heard of it raises. `check` asks for it.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        ownership: str | int = "contiguous",
        device: torch.device | str = "cpu",
        *,
        record: int | None = None,
        peer_memory: bool = True,
        timeout_s: float = 120.0,
    ) -> None:
        self.interleave = 0
        if ownership != "contiguous":
            if isinstance(ownership, str):
                raise CHECKS.fail("ownership", "'contiguous' or an integer", repr(ownership))
            self.interleave = CHECKS.integer("ownership", ownership, 1, MAX_WIDTH)
        self.group = dist.group.WORLD if group is None else group
        if not isinstance(self.group, dist.ProcessGroup):
            raise CHECKS.fail("group", "a process group with this process", type(self.group).__name__)
        self.rank, self.world = self.group.rank(), self.group.size()
        CHECKS.integer("group", self.world, 1, MAX_RANKS)
        self.record = record_words(self.world)
        if record is not None:
            self.record = CHECKS.integer("record", record, max(4, 2 * self.world), MAX_WIDTH)
        # The headers of a call in which ranks disagreed; equal rows say that there was none. The host reads a
        # copy in its own memory, which it need not wait for.
        device = CHECKS.device("device", device)
        self._seen = torch.zeros((self.world, HEADER_WORDS), dtype=torch.int64, device=device)
        self.device = self._seen.device
        self._late = self._seen.is_cuda  # whether the host hears of it in a later call
        shape = self.world, HEADER_WORDS
        self._told = torch.zeros(shape, dtype=torch.int64, device="cpu", pin_memory=self._late)
        if type(timeout_s) not in (int, float) or not 0 < timeout_s * 1e9 < MAX_TIMEOUT_NS:
            most = MAX_TIMEOUT_NS // 10**9
            raise CHECKS.fail("timeout_s", f"more than 0 and less than {most} seconds", repr(timeout_s))
        self.peers: Peers | None = None
        if CHECKS.flag("peer_memory", peer_memory) and self._late:
            self.peers = connect(self.group, self.device, timeout_s, self.exchange)

    def check(self) -> None:
        """Raise if ranks are known to have disagreed in an earlier call.

        It reads host memory alone. After ``torch.cuda.synchronize()`` it knows of every call.

        Raises
        ------
        ValueError
            The message names what differed and the ranks.
        RuntimeError
            A rank was not heard of in time, through the memory of all ranks.
        """
        found, late = ([], "") if self.peers is None else self.peers.heard()
        for heads in (self._told.tolist(), found):
            for rank, head in enumerate(heads):
                if head != heads[0]:
                    raise _disagreement(heads[0], rank, head)
        if late:
            raise RuntimeError(late)

    def order(self, local: Tensor) -> Tensor:
        """Map local positions, int64, to numbers below ``2**31 - 2**21``, in the order of the row."""
        if self.interleave == 0:
            return local + self.rank * MAX_WIDTH
        return self.positions(local, None)

    def positions(self, local: Tensor, lengths: Tensor | None) -> Tensor:
        """Map local positions to those of the row.

        Only contiguous ownership reads the lengths of all parts, ``[world, rows]``.
        """
        if self.interleave == 0:
            assert lengths is not None
            return local + lengths[: self.rank].sum(0)[:, None]
        turn = torch.div(local, self.interleave, rounding_mode="floor")
        return local + turn * ((self.world - 1) * self.interleave) + self.rank * self.interleave

    def header(
        self, logits: Tensor, k: int, step: int | Tensor, gather: bool = False, expected: bool = False
    ) -> Tensor:
        """Make the header of a call, ``[3]``, int64, on the device, without a copy from the host."""
        head = torch.empty(HEADER_WORDS, dtype=torch.int64, device=self.device)
        for at, word in enumerate(self.header_words(logits, k, gather, expected)):
            head[at].fill_(word)
        if isinstance(step, Tensor):
            head[-1:].copy_(step)
        else:
            head[-1].fill_(step)
        return head

    def header_words(self, logits: Tensor, k: int, gather: bool, expected: bool) -> tuple[int, int]:
        """Return the words of a header ahead of the step."""
        values = {
            "rows": logits.shape[0],
            "k": k,
            "dtype": DTYPES.index(logits.dtype),
            "gather": int(gather),
            "expected": int(expected),
            "record": self.record,
            "ownership": self.interleave,
        }
        first, second = (
            functools.reduce(lambda word, field: word << field[1] | values[field[0]], fields, 0)
            for fields in _HEADER
        )
        return first, second

    def exchange(self, records: Tensor) -> Tensor:
        """Send records, ``[rows, n]``, int32 or int64, to all ranks; returns ``[world, rows, n]``."""
        gathered = records.new_empty((self.world * records.shape[0], records.shape[1]))
        _all_gather(gathered, records, group=self.group)
        return gathered.view(self.world, *records.shape)

    def first_exchange(self, records: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
        """Exchange the first records of a call, with headers that must agree.

        Returns the records of all ranks, ``[world, rows, n]``, and whether all headers are equal, without a
        dimension. On a CPU they are: otherwise every rank raises.
        """
        if not self._late:
            # By itself, because records of different sizes end the process in gloo.
            self._told = self.exchange(head[None])[:, 0]
            self.check()
            return self.exchange(records), torch.ones((), dtype=torch.bool, device=records.device)
        first = torch.nn.functional.pad(head, (0, records.shape[1] - len(head)))
        gathered = self.exchange(torch.cat((first[None], records)))
        heads = gathered[:, 0, : len(head)]
        agreed = (heads == heads[0]).all()
        torch.where(agreed, self._seen, heads, out=self._seen)
        self._told.copy_(self._seen, non_blocking=True)
        return gathered[:, 1:], agreed


def _fields_of(head: list[int]) -> dict[str, Any]:
    """Take a header apart."""
    found: dict[str, Any] = {"step": head[-1]}
    for word, fields in zip(head[:-1], _HEADER, strict=True):
        for name, bits in reversed(fields):
            found[name] = word & ((1 << bits) - 1)
            word >>= bits
    found["dtype"] = dict(enumerate(DTYPES)).get(found["dtype"])
    found["ownership"] = found["ownership"] or "contiguous"
    return found


def _disagreement(first: list[int], rank: int, other: list[int]) -> ValueError:
    """Build the error of a call that is not the same on rank 0 and on another rank."""
    ours, theirs = _fields_of(first), _fields_of(other)
    names = [name for name in ours if ours[name] != theirs[name]]
    of_first, of_other = (", ".join(f"{name} {fields[name]}" for name in names) for fields in (ours, theirs))
    return CHECKS.fail("call", "the same on all ranks", f"{of_first} on rank 0 and {of_other} on rank {rank}")
