"""Our op in place of vLLM's choice of candidate blocks, for indexers of two levels such as DeepSeek-V4.1's.

One layer publishes the best blocks of each row, and later layers mask their scores to those. vLLM calls one
function for it, for each chunk of prompts and for decode rows. Its result is a set: of blocks whose greatest
scores are equal any may be in it. Ours is the contract's, in ascending order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from gvr_topk.constants import BLOCK_SIZE, MAX_CHOSEN_BLOCKS, MAX_WIDTH
from gvr_topk.contract import started_rows
from gvr_topk.integrations._kit.environment import Mode
from gvr_topk.integrations._kit.log import Say
from gvr_topk.integrations._kit.replacement import Replacement, readable
from gvr_topk.integrations._kit.verify import Selected
from gvr_topk.integrations.vllm.backend import BackendSwitch
from gvr_topk.integrations.vllm.metrics import CallMetrics
from gvr_topk.integrations.vllm.upstream import AUTO, ENGINE
from gvr_topk.ops import indexer_topk_blocks


class CandidatesCall(NamedTuple):
    """Arguments of ``select_candidate_blocks``, in its order."""

    logits: Tensor
    row_ks: Tensor | None
    row_ke: Tensor
    topk_blocks: int
    block_size: int
    out: Tensor
    row_repeat: int = 1

    def of_rows(self, bounds: Tensor) -> Tensor:
        """Bounds of all rows, of which `row_repeat` at a time have one."""
        return bounds[:, None].expand(-1, self.row_repeat).reshape(-1)[: len(self.logits)]


class CandidatesHook(Replacement[CandidatesCall]):
    """Chooses candidate blocks of one vLLM process with our op."""

    arguments = CandidatesCall
    reason = "candidates"
    kind = "candidate block"

    def __init__(self, metrics: CallMetrics, mode: Mode, say: Say) -> None:
        super().__init__(ENGINE.name, metrics.count, say)
        self._switch: BackendSwitch = BackendSwitch(mode, say, self.kind)
        self.backend: Any = AUTO

    def reason_against(self, call: CandidatesCall) -> str:
        reason = self._switch.reason_against(self.backend)
        if reason:
            return reason
        if call.block_size != BLOCK_SIZE or not 2 <= call.topk_blocks <= MAX_CHOSEN_BLOCKS:
            return "of another size"
        integers = [bounds for bounds in (call.row_ks, call.row_ke, call.out) if bounds is not None]
        fits = all(each.dtype == torch.int32 and each.stride(-1) == 1 for each in integers)
        return "" if fits and readable(call.logits) and call.logits.shape[1] <= MAX_WIDTH else "layout"

    def run(self, call: CandidatesCall, original: Callable[[], Any]) -> Any:
        lengths, starts = call.of_rows(call.row_ke), None
        if call.row_ks is not None:
            starts = call.of_rows(call.row_ks)
            lengths = lengths - starts
        blocks = call.out[: len(call.logits)]
        options: dict[str, Any] = {"row_starts": starts, "drop_masked": True, "blocks": blocks}
        indexer_topk_blocks(call.logits, lengths, 0, call.topk_blocks, **options)
        if self.verifier is not None and self.verifier.compares(self.kind, call.logits.device):
            scores = _block_scores(call.logits, lengths, starts)
            self.verifier.check(self.kind, original, Selected(scores, blocks[:, : call.topk_blocks]))
        return call.out

    def announcement(self, call: CandidatesCall) -> str:
        return f"{call.topk_blocks} candidate blocks of each row"


def _block_scores(logits: Tensor, lengths: Tensor, starts: Tensor | None) -> Tensor:
    """Return the greatest score of each block as vLLM ranks them: the newest block's is infinite."""
    if starts is not None:
        logits, lengths = started_rows(logits, lengths, starts)
    position = torch.arange(logits.shape[1], device=logits.device)
    scores = logits.float().masked_fill(position >= lengths[:, None], -torch.inf)
    scores = pad(scores, (0, -logits.shape[1] % BLOCK_SIZE), value=-torch.inf)
    greatest = scores.unflatten(1, (-1, BLOCK_SIZE)).amax(2)
    newest = (lengths.clamp(max=logits.shape[1]) - 1) // BLOCK_SIZE
    return greatest.masked_fill(position[: greatest.shape[1]] == newest[:, None], torch.inf)
