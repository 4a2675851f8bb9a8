"""Ranks of vLLM's decode context parallelism agree on the k-th score, in place of merging candidates.

Each rank selects from its part of a row. vLLM then gathers the k best of all ranks, and merges them:
``_merge_dcp_topk_global``, called for decode rows and for each chunk of prompts, by all ranks alike, because
it waits for all. Here `gvr_topk.distributed` agrees on the k-th score, and each rank keeps what it owns of
the choice. The attention of a rank drops everything else in any case.

**No rank leaves the others.** All ranks settle at the first step, before a graph is captured, whether calls
are ours. From then on only what is the same on all ranks leaves a call to vLLM. After an error, of which one
rank may know alone, the engine ends: its ranks would wait for each other in two places.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gvr_topk.constants import MAX_WIDTH, PEER_MAX_K
from gvr_topk.distributed import Shards, sharded_topk
from gvr_topk.integrations._kit.device import capturing
from gvr_topk.integrations._kit.environment import Mode
from gvr_topk.integrations._kit.log import Say, one_line
from gvr_topk.integrations._kit.replacement import Replacement
from gvr_topk.integrations._kit.verify import PADDING, Differs
from gvr_topk.integrations.vllm.backend import BackendSwitch, backend_of, uses_microbatches
from gvr_topk.integrations.vllm.metrics import CallMetrics
from gvr_topk.integrations.vllm.upstream import ENGINE, INDEXER_MODULE

ALL_THERE = timedelta(seconds=120)
"""How long ranks wait for one without this hook, such as on a host where the package is not installed."""

MAX_ROWS = 128
"""Most rows of a call. On two H200 vLLM's merge took longer up to 64 rows. With k = 512 it took less from 256
rows on, and with k = 2,048 with 4,096. So chunks of prompts are left to it, unless they are short."""

TIMEOUT_S = 600.0
"""How long a call waits for a rank: as long as NCCL, because a rank may compile its kernels meanwhile."""


class MergeCall(NamedTuple):
    """Arguments of ``_merge_dcp_topk_global``, in its order."""

    logits: Tensor
    topk_indices: Tensor
    topk_tokens: int
    dcp_rank: int
    dcp_world_size: int
    cp_interleave: int
    row_starts: Tensor | None = None


class _CommonSwitch(BackendSwitch):
    """A switch that all ranks turn, or none."""

    def fail(self, error: Exception, what: str = "fell back") -> str:
        if isinstance(error, Differs):  # which all ranks have found
            return super().fail(error, what)
        raise error


class DcpHook(Replacement[MergeCall]):
    """Merges what the ranks of one vLLM process have selected."""

    arguments = MergeCall
    reason = "dcp"
    kind = own = "merge of ranks"

    def __init__(self, mode: Mode, metrics: CallMetrics, say: Say) -> None:
        super().__init__(ENGINE.name, metrics.count, say)
        self._switch: BackendSwitch = _CommonSwitch(mode, say, self.kind, self.own)
        self._shards: Shards | None = None
        self._against = "of one rank"  # why no call is ours; empty once some are
        self._asked = False
        self._lengths = torch.zeros(0, dtype=torch.int32)  # say nothing where ranks have positions in turn

    def note_builder(self, builder: Any) -> None:
        """Connect the ranks at the first step, and end the engine if one is known to be lost later."""
        if self._shards is not None:
            self._shards.check()
        elif not self._asked and getattr(builder, "dcp_world_size", 1) > 1 and not capturing(builder.device):
            self._asked = True
            self._connect(builder)

    def _connect(self, builder: Any) -> None:
        against = ""
        try:
            group = sys.modules[INDEXER_MODULE].get_dcp_group().cpu_group
            interleave, device = builder.cp_kv_cache_interleave_size, builder.device
            against = self._reason_against(builder)
            if all_say(group, "asked", not against):
                with torch.inference_mode(False):  # they outlive the mode that vLLM runs in
                    shards = Shards(group, interleave, device, timeout_s=TIMEOUT_S)
                    self._lengths = torch.zeros(MAX_ROWS, dtype=torch.int32, device=device)
                if shards.peers is None and shards.device.type != "cpu":
                    against = "the GPUs cannot reach each other's memory"
                if all_say(group, "connected", not against):
                    self._shards = shards
                    return
        except Exception as error:  # this rank says nothing, so the others leave the calls to vLLM, too
            against = one_line(error)
        self._against = "not agreed"
        self.say("info", f"not in use: merge of ranks: {against or 'another rank cannot'}")

    def _reason_against(self, builder: Any) -> str:
        """Return why no call can be ours; empty if some can."""
        config = builder.vllm_config
        if self._switch.reason_against(backend_of(builder)):
            return "another backend was chosen"
        if uses_microbatches(builder):
            return "microbatches run beside each other"
        longest = config.model_config.max_model_len
        return f"rows of {longest} tokens" if longest > MAX_WIDTH else ""

    def reason_against(self, call: MergeCall) -> str:
        """See `Replacement`. What it reads is the same on all ranks, so not the width of the scores."""
        if self._shards is None:
            return self._against
        ranks = (self._shards.rank, self._shards.world, self._shards.interleave)
        if ranks != (call.dcp_rank, call.dcp_world_size, call.cp_interleave):
            return "of other ranks"
        if len(call.topk_indices) > MAX_ROWS:
            return "of many rows"
        if call.row_starts is not None or call.topk_tokens > PEER_MAX_K:
            return "of windows" if call.row_starts is not None else "of a large k"
        return "" if call.logits.dtype == torch.float32 else "layout"

    def run(self, call: MergeCall, original: Callable[[], Any]) -> Any:
        assert self._shards is not None
        logits, chosen = call.logits, call.topk_indices
        selected = None
        if self.verifier is not None and self.verifier.compares(self.own, chosen.device):
            selected = chosen.clone()
        k, lengths = call.topk_tokens, self._lengths[: len(chosen)]
        sharded_topk(logits, lengths, k, shards=self._shards, out=chosen, selected=True)
        if self.verifier is not None and selected is not None:
            ours, agree = chosen.clone(), functools.partial(_agree, self._shards, logits)
            chosen.copy_(selected)  # from which vLLM merges
            try:
                self.verifier.compare(self.own, lambda: self._merge(original), lambda _: agree(ours, chosen))
            except Differs:
                chosen.copy_(selected)
                raise
            chosen.copy_(ours)
        return chosen

    def _merge(self, original: Callable[[], Any]) -> None:
        """Let vLLM merge on all ranks; raise on all where one could not, so that none compares alone."""
        assert self._shards is not None
        failed = None
        try:
            original()
        except Exception as error:
            failed = error
        if not self._shards.exchange(torch.tensor([[int(failed is None)]], device="cpu")).all():
            raise failed or RuntimeError("another rank could not")

    def announcement(self, call: MergeCall) -> str:
        return f"{call.dcp_world_size} ranks agree on the score of rank {call.topk_tokens}"


def all_say(group: dist.ProcessGroup, question: str, able: bool) -> bool:
    """Whether all ranks of a group say that they are able, each once; the answer is the same on all.

    A rank that says nothing in `ALL_THERE` is not able. Nothing is sent through the group: a rank that does
    not take part may use it for something else.
    """
    from torch.distributed.distributed_c10d import PrefixStore, _get_process_group_store

    store = PrefixStore(f"gvr_topk {question}", _get_process_group_store(group))
    ranks = [str(rank) for rank in range(group.size())]
    store.set(ranks[group.rank()], str(able))
    try:
        store.wait(ranks, ALL_THERE)
        able = all(store.get(rank) == b"True" for rank in ranks)
    except RuntimeError:  # somebody has not said anything
        able = False
    # The first one to know what all say settles it, because a late one may change what the next would know.
    return store.compare_set("all", "", str(able)) == b"True"


def _agree(shards: Shards, logits: Tensor, ours: Tensor, theirs: Tensor) -> bool:
    """Return whether a row of k items was compared; raise `Differs` if one has other scores on some rank.

    vLLM tells zeros of both signs apart, so an equal score may be chosen on another rank. So each rank
    compares the scores of all, and all find the same.
    """
    both = torch.cat([_own_scores(shards, logits, chosen) for chosen in (ours, theirs)], 1)
    gathered = shards.exchange(both.cpu().view(torch.int32)).view(torch.float32)
    of_both = gathered.transpose(0, 1).unflatten(2, (2, -1)).movedim(2, 0)  # [2, rows, ranks, k + 1]
    counts, scores = of_both[..., -1].sum(2), of_both[..., :-1].flatten(2).sort(2).values
    judged = ~scores.isnan().any(2).any(0)
    differs = (scores[0] != scores[1]).any(1) | (counts[0] != counts[1])
    at = (differs & judged).nonzero()
    if len(at):
        raise Differs(f"row {int(at[0])} of {len(ours)}: the ranks have chosen other scores")
    return bool((judged & (counts == ours.shape[1]).all(0)).any())


def _own_scores(shards: Shards, logits: Tensor, chosen: Tensor) -> Tensor:
    """Return the scores of a rank's own positions, -inf for others, and how many it has, ``[rows, k + 1]``.

    The number is negative where one of them is outside of the rank's part, or is there twice.
    """
    width = logits.shape[1]
    if width == 0:
        logits = logits.new_full((len(chosen), 1), -torch.inf)
    turn, within = chosen // shards.interleave, chosen % shards.interleave
    own = (chosen != PADDING) & (turn % shards.world == shards.rank)
    local = torch.where(own, turn // shards.world * shards.interleave + within, PADDING).sort(1).values
    twice = (local.diff(dim=1) == 0) & (local[:, 1:] != PADDING)
    wrong = twice.any(1) | (local >= width).any(1)
    scores = logits.gather(1, local.clamp(0, logits.shape[1] - 1).long())
    scores = torch.where(local == PADDING, -torch.inf, scores)
    return torch.cat((scores, torch.where(wrong, -1, own.sum(1))[:, None]), 1)
