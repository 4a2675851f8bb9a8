import numpy as np
import torch

from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext, LogitsProcessor


class LogitBiasState(LogitsProcessor):
    def __init__(self, max_num_reqs: int) -> None:
        self.use_logit_bias = np.zeros(max_num_reqs, dtype=bool)
        self.biases: dict[int, dict[int, float]] = {}

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        self.biases[req_idx] = sampling_params.logit_bias
        self.use_logit_bias[req_idx] = bool(sampling_params.logit_bias)
        return bool(self.use_logit_bias[req_idx])

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        for row, slot in enumerate(ctx.expanded_idx_mapping.tolist()):
            for token, bias in self.biases.get(slot, {}).items():
                logits[row, token] += bias
        return logits
