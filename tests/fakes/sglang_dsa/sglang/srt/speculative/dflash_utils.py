from typing import Any, Optional

import torch
from sglang_base import CALLS


def build_speculative_verify_target_probs(
    *,
    next_token_logits: torch.Tensor,
    sampling_info: Any,
    draft_token_num: int,
    bs: int,
    max_top_k: Optional[int] = None,
    uniform_top_k_value: Optional[int] = None,
    use_sparse_topk: bool = True,
) -> torch.Tensor:
    """Top-k, then top-p of what is left; min-p does not count."""
    CALLS["target_probs"] += 1
    temperatures, top_ks, top_ps = (
        values.view(-1, 1).repeat_interleave(draft_token_num, dim=0)
        for values in (sampling_info.temperatures, sampling_info.top_ks, sampling_info.top_ps)
    )
    probs, ids = (next_token_logits / temperatures).softmax(-1).sort(dim=-1, descending=True)
    probs[torch.arange(probs.shape[1])[None] >= top_ks] = 0
    probs /= probs.sum(-1, keepdim=True)
    probs[:, 1:][probs.cumsum(-1)[:, :-1] > top_ps] = 0
    probs /= probs.sum(-1, keepdim=True)
    return torch.zeros_like(probs).scatter_(1, ids, probs).view(bs, draft_token_num, -1)
