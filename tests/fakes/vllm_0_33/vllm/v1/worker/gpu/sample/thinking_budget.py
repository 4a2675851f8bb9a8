import numpy as np
import torch

from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext


class ThinkingBudgetState:
    """Here a budget is always spent, and token 0 ends the thinking."""

    def __init__(self, max_num_reqs: int, enabled: bool) -> None:
        self.enabled = enabled
        if enabled:
            self.use_thinking_budget = np.zeros(max_num_reqs, dtype=bool)

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        if not self.enabled:
            return False
        self.use_thinking_budget[req_idx] = sampling_params.thinking_token_budget is not None
        return bool(self.use_thinking_budget[req_idx])

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> None:
        if self.enabled:
            for row, slot in enumerate(ctx.expanded_idx_mapping.tolist()):
                if self.use_thinking_budget[slot]:
                    logits[row, 0] = 1.0e9
