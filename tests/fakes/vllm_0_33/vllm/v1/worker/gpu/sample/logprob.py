"""vLLM computes this with three Triton kernels; here PyTorch's functions stand in for them."""

import torch

from vllm.v1.outputs import LogprobsTensors


class LogprobTokenIdsState:
    def __init__(self, token_ids: list[list[int]]) -> None:
        self.token_ids = token_ids


def compute_topk_scores(
    logits: torch.Tensor,
    num_logprobs: int,
    sampled_token_ids: torch.Tensor,
    cu_num_logits: list[int] | torch.Tensor | None = None,
    logprob_token_ids_state: "LogprobTokenIdsState | None" = None,
    expanded_idx_mapping: torch.Tensor | None = None,
    max_per_req_token_ids: int = 0,
    logits_mode: bool = False,
) -> LogprobsTensors:
    ids = torch.cat((sampled_token_ids[:, None], logits.topk(num_logprobs).indices), dim=1)
    scores = logits.float() if logits_mode else logits.float().log_softmax(1)
    if max_per_req_token_ids > 0:
        custom = [logprob_token_ids_state.token_ids[slot] for slot in expanded_idx_mapping.tolist()]
        ids = torch.cat((sampled_token_ids[:, None], torch.tensor(custom)), dim=1)
    # The kernel's last block reaches behind the row, and what it loads from there is -inf.
    padded = torch.nn.functional.pad(logits, (0, -logits.shape[1] % 8192), value=-torch.inf)
    on_device = isinstance(cu_num_logits, torch.Tensor)
    return LogprobsTensors(
        logprob_token_ids=ids,
        logprobs=scores.gather(1, ids),
        selected_token_ranks=(padded >= logits.gather(1, sampled_token_ids[:, None])).sum(1),
        cu_num_generated_tokens=None if on_device else cu_num_logits,
        cu_num_generated_tokens_tensor=cu_num_logits if on_device else None,
    )
