import torch

from vllm.v1.worker.gpu.sample.sampler import Sampler


class GPUWatermarkSampler(Sampler):
    def _sample_random(
        self, processed_logits: torch.Tensor, *args: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Here the mark is that all tokens are even."""
        marked = processed_logits.float().clone()
        marked[:, 1::2] = -torch.inf
        return super()._sample_random(marked, *args)
