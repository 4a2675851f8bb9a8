import random

import numpy as np
import torch

from vllm.sampling_params import SamplingParams
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.worker.gpu.buffer_utils import UvaBackedTensor

LIMITS = np.iinfo(np.int64)


class SamplingStates:
    """Parameters of the requests, by slot."""

    def __init__(self, max_num_reqs: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.temperature = UvaBackedTensor(max_num_reqs, dtype=torch.float32)
        self.top_k = UvaBackedTensor(max_num_reqs, dtype=torch.int32)
        self.top_p = UvaBackedTensor(max_num_reqs, dtype=torch.float32)
        self.min_p = UvaBackedTensor(max_num_reqs, dtype=torch.float32)
        self.seeds = UvaBackedTensor(max_num_reqs, dtype=torch.int64)
        self.seeds_set = np.zeros(max_num_reqs, dtype=bool)
        self.top_k.np.fill(vocab_size)
        self.top_p.np.fill(1.0)
        self.num_logprobs = np.full(max_num_reqs, -1, dtype=np.int32)
        self.apply_staged_writes()

    def add_request(self, slot: int, params: SamplingParams) -> bool:
        self.temperature.np[slot], self.top_p.np[slot] = params.temperature, params.top_p
        self.top_k.np[slot] = params.top_k if 0 < params.top_k <= self.vocab_size else self.vocab_size
        self.min_p.np[slot] = params.min_p
        self.seeds_set[slot] = params.seed is not None
        drawn = random.randint(LIMITS.min, LIMITS.max)
        self.seeds.np[slot] = drawn if params.seed is None else params.seed
        self.num_logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        filtered = params.min_p != 0 or self.top_k.np[slot] != self.vocab_size or params.top_p != 1
        return params.temperature != 0 and (params.temperature != 1 or filtered)

    def apply_staged_writes(self) -> None:
        for one in (self.temperature, self.top_k, self.top_p, self.min_p, self.seeds):
            one.copy_to_uva()

    def apply_temperature_and_min_p(self, logits: torch.Tensor, slots: torch.Tensor) -> None:
        """In vLLM a kernel each, which return early in rows where they are off."""
        temperature, min_p = self.temperature.gpu[slots, None], self.min_p.gpu[slots, None]
        logits /= torch.where(temperature == 0, 1, temperature)
        logits[(logits < logits.amax(1, keepdim=True) + min_p.log()) & (min_p != 0)] = -torch.inf

    def get_top_k_top_p(
        self, slots: torch.Tensor, requests: np.ndarray
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, bool]:
        do_top_k = bool(np.any(self.top_k.np[requests] != self.vocab_size))
        do_top_p = bool(np.any(self.top_p.np[requests] != 1))
        alone = bool(np.any((self.top_k.np[requests] >= self.vocab_size) & (self.top_p.np[requests] < 1)))
        top_k = self.top_k.gpu[slots] if do_top_k else None
        return top_k, self.top_p.gpu[slots] if do_top_p else None, alone

    def apply_top_k_top_p(
        self, logits: torch.Tensor, slots: torch.Tensor, requests: np.ndarray
    ) -> torch.Tensor:
        top_k, top_p, alone = self.get_top_k_top_p(slots, requests)
        return apply_top_k_top_p(logits, top_k, top_p, has_topp_only_rows=alone)
