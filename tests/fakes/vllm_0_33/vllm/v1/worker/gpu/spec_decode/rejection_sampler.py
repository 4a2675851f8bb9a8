import torch

from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm.v1.worker.gpu.sample.sampler import Sampler


class RejectionSampler:
    def __init__(self, sampler: Sampler, enable_adaptive_verification: bool = False) -> None:
        self.sampler = sampler
        self.enable_adaptive_verification = enable_adaptive_verification

    def _get_logprobs_tensors(
        self,
        sampled: torch.Tensor,
        num_sampled: torch.Tensor,
        logits: torch.Tensor,
        cu_num_logits: torch.Tensor,
        max_num_logprobs: int,
    ) -> LogprobsTensors:
        flat_sampled = torch.zeros(len(logits), dtype=sampled.dtype)
        for request, count in enumerate(num_sampled.tolist()):
            start = int(cu_num_logits[request])
            flat_sampled[start : start + count] = sampled[request, :count]
        return compute_topk_scores(
            logits,
            max_num_logprobs,
            flat_sampled,
            cu_num_logits.clone() if self.enable_adaptive_verification else cu_num_logits.tolist(),
            logits_mode=self.sampler.logprobs_mode in ("raw_logits", "processed_logits"),
        )
