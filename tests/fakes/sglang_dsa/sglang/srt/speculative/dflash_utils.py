from typing import Any, Optional

import torch
from sglang_base import CALLS

from sglang.kernels.ops.sampling.renorm import top_k_renorm_prob, top_p_renorm_prob


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
        values.repeat_interleave(draft_token_num, dim=0)
        for values in (sampling_info.temperatures, sampling_info.top_ks, sampling_info.top_ps)
    )
    probs = top_k_renorm_prob((next_token_logits / temperatures).softmax(-1), top_ks)
    return top_p_renorm_prob(probs, top_ps).view(bs, draft_token_num, -1)
