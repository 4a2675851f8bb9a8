import torch

from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.sample.logprob import LogprobTokenIdsState, compute_topk_scores


class Sampler:
    def __init__(self, logprobs_mode: str = "raw_logprobs", token_ids: list[list[int]] | None = None) -> None:
        self.logprobs_mode = logprobs_mode
        self.logprob_token_ids_state = LogprobTokenIdsState(token_ids or [])

    def __call__(self, logits: torch.Tensor, num_logprobs: int, sampled: torch.Tensor) -> LogprobsTensors:
        """The part of a step that computes log-probabilities."""
        token_ids = self.logprob_token_ids_state.token_ids
        return compute_topk_scores(
            logits,
            num_logprobs,
            sampled,
            None,
            logprob_token_ids_state=self.logprob_token_ids_state,
            expanded_idx_mapping=torch.arange(len(logits), dtype=torch.int32),
            max_per_req_token_ids=max(map(len, token_ids), default=0),
            logits_mode=self.logprobs_mode in ("raw_logits", "processed_logits"),
        )
