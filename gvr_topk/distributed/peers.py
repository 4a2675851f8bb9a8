"""Memory of all ranks of one host that each GPU writes into, in which one kernel agrees on the k-th score."""

from __future__ import annotations

import contextlib
import os
import socket
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gvr_topk.arguments import Checks, Output, Results, Written
from gvr_topk.constants import (
    HEADER_WORDS,
    MAX_TIMEOUT_NS,
    MAX_WIDTH,
    PEER_CELLS,
    PEER_CTAS,
    PEER_MAX_K,
    PEER_RANKS,
)
from gvr_topk.ops import Op, register

SHARDED = Checks("gvr_topk.sharded_topk")


class ShardedArguments(NamedTuple):
    """One call of ``torch.ops.gvr_topk.sharded_topk``, in the order of its schema.

    `gvr_topk.distributed.sharded_topk` selects the `best` positions of this rank's part, in whose order
    results are, and then calls this; `out` may be `best`. `first_word`, `second_word` and the step are its
    header. `Peers` has the rest.

    Attributes
    ----------
    inboxes : Tensor, ``[world]``, int64, on the host
        Address of the memory of each rank.
    progress : Tensor, ``[PEER_CTAS]``, int32
        Number of the last exchange of each CTA; others stand for a launch under way and for a failure.
    told : Tensor, ``[world + 1, HEADER_WORDS]``, int64, pinned memory of the host
        Headers of a call in which they differed; then 1 + a rank that was not heard of, or 1 + this one if
        two of its calls ran at once.
    """

    logits: Tensor
    lengths: Tensor
    best: Tensor
    out: Annotated[Tensor, Written("k", over="best")]
    local: Results
    counts: Output
    inboxes: Tensor
    progress: Output
    told: Output
    k: int
    rank: int
    interleave: int
    timeout_ns: int
    first_word: int
    second_word: int
    step_value: int = 0
    step: Tensor | None = None


def check_sharded(a: ShardedArguments) -> None:
    """Refuse wrong arguments of a call through the memory of peers."""
    SHARDED.score_rows(a.logits)
    rows = a.logits.shape[0]
    SHARDED.integer("k", a.k, 1, PEER_MAX_K)
    SHARDED.tensor("lengths", a.lengths, a.logits, torch.int32, (rows,))
    SHARDED.results("best", a.best, a.logits, rows, a.k)
    SHARDED.results("out", a.out, a.logits, rows, a.k)
    SHARDED.results("local", a.local, a.logits, rows, a.k)
    SHARDED.tensor("counts", a.counts, a.logits, torch.int32, (rows,))
    SHARDED.tensor("inboxes", a.inboxes, a.inboxes, torch.int64, (None,))
    world = a.inboxes.shape[0]
    SHARDED.integer("world", world, 1, PEER_RANKS)
    SHARDED.tensor("progress", a.progress, a.logits, torch.int32, (PEER_CTAS,))
    SHARDED.tensor("told", a.told, a.inboxes, torch.int64, (world + 1, HEADER_WORDS))
    SHARDED.contiguous("told", a.told)
    SHARDED.integer("rank", a.rank, 0, world - 1)
    SHARDED.integer("interleave", a.interleave, 0, MAX_WIDTH)
    SHARDED.integer("timeout_ns", a.timeout_ns, 0, MAX_TIMEOUT_NS)
    if a.step is not None:
        SHARDED.tensor("step", a.step, a.logits, torch.int64, (None,))
        SHARDED.integer("step", a.step.shape[0], 1, 1)
    SHARDED.memory(a)


def _on_cpu(a: ShardedArguments) -> None:
    raise SHARDED.fail("logits", "a tensor on a GPU", a.logits.device)


register(Op(SHARDED, ShardedArguments, check_sharded, _on_cpu))


INBOX_WORDS = 2 * PEER_CTAS * PEER_CELLS
"""Numbers of 8 bytes of the memory of a rank."""


class Peers:
    """What a rank needs of the others for `ShardedArguments`.

    `addresses` say where the memory of each rank lies, `INBOX_WORDS` numbers of 8 bytes, which were 0 at the
    start. An exchange waits `timeout_s` seconds for a rank. The memory belongs to `owner`, and goes with it.
    """

    def __init__(
        self, rank: int, addresses: Sequence[int], device: torch.device, timeout_s: float, owner: Any = None
    ) -> None:
        self.rank, self.timeout_s, self._owner = rank, timeout_s, owner
        self._inboxes = torch.tensor(addresses, dtype=torch.int64, device="cpu")
        self._progress = torch.zeros(PEER_CTAS, dtype=torch.int32, device=device)
        shape, is_cuda = (len(addresses) + 1, HEADER_WORDS), device.type == "cuda"
        self._told = torch.zeros(shape, dtype=torch.int64, device="cpu", pin_memory=is_cuda)

    def heard(self) -> tuple[list[list[int]], str]:
        """Return headers that differ, if any, of all ranks; and an error if an exchange has failed."""
        *heads, (late, *_) = self._told.tolist()
        if late == 0:
            return heads, ""
        if late - 1 == self.rank:
            why = "two calls ran at once, on two streams"
        else:
            why = f"rank {late - 1} was not heard of within {self.timeout_s:g} s"
        return heads, f"gvr_topk.Shards: {why}; all ranks have to make their Shards anew"

    def arguments(
        self,
        logits: Tensor,
        lengths: Tensor,
        best: Tensor,
        results: tuple[Tensor, Tensor, Tensor],
        k: int,
        interleave: int,
        header: tuple[int, int],
        step: int | Tensor,
    ) -> ShardedArguments:
        """Return the arguments of a call; `results` are `out`, `local` and `counts`."""
        tensor, value = (step.reshape(1), 0) if isinstance(step, Tensor) else (None, step)
        return ShardedArguments(
            *(logits, lengths, best, *results, self._inboxes, self._progress, self._told),
            *(k, self.rank, interleave, int(self.timeout_s * 1e9), *header, value, tensor),
        )


def connect(
    group: dist.ProcessGroup, device: torch.device, timeout_s: float, exchange: Callable[[Tensor], Tensor]
) -> Peers | None:
    """Share memory among all ranks of a group, which must all call this.

    All ranks get None if they are too many, on several hosts, or cannot reach each other's memory.
    """
    world = group.size()
    hosts = exchange(torch.tensor([[_host()]], device=device))
    if world > PEER_RANKS or len(hosts.unique()) > 1:
        return None
    inbox: Tensor | None = None
    with _no_multicast(), contextlib.suppress(ImportError, RuntimeError):
        from torch._C._distributed_c10d import _SymmetricMemory
        from torch.distributed import _symmetric_memory

        # Not from a pool: other ranks may know its memory from a group that is gone.
        inbox = _SymmetricMemory.empty_strided_p2p((INBOX_WORDS,), (1,), torch.int64, device)
        inbox.zero_()
        torch.cuda.synchronize(device)  # before another rank can write there
    if not exchange(torch.tensor([[int(inbox is not None)]], device=device)).all() or inbox is None:
        return None
    starts: list[int] = []
    with _no_multicast(), contextlib.suppress(RuntimeError):
        handle = _symmetric_memory.rendezvous(inbox, group)
        starts = [] if handle is None else list(handle.buffer_ptrs)
    # A tensor may lie behind the start of what its rank shares.
    able = len(starts) == world and all(starts)
    behind = inbox.data_ptr() - starts[group.rank()] if able else -1
    offsets = exchange(torch.tensor([[behind]], device=device)).flatten().tolist()
    if min(offsets) < 0:
        return None
    addresses = [start + offset for start, offset in zip(starts, offsets, strict=True)]
    peers = Peers(group.rank(), addresses, device, timeout_s, (inbox, handle))
    torch.cuda.synchronize(device)  # before a call on any stream
    return peers


def _host() -> int:
    """Return a number that tells hosts apart."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return zlib.crc32((socket.gethostname() + (boot.read_text() if boot.exists() else "")).encode())


@contextlib.contextmanager
def _no_multicast() -> Iterator[None]:
    """Make no objects of multicast, which are not needed here, and which some hosts cannot make."""
    name = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
