import numpy as np
import torch

from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.buffer_utils import UvaBackedTensor
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext, LogitsProcessor


class PenaltiesState(LogitsProcessor):
    """Here as if the output so far had the tokens 0 to 9."""

    def __init__(self, max_num_reqs: int) -> None:
        self.presence_penalty = UvaBackedTensor(max_num_reqs, dtype=torch.float32)
        self.use_penalty = np.zeros(max_num_reqs, dtype=bool)

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        self.presence_penalty.np[req_idx] = sampling_params.presence_penalty
        self.use_penalty[req_idx] = sampling_params.presence_penalty != 0
        return bool(self.use_penalty[req_idx])

    def apply_staged_writes(self) -> None:
        self.presence_penalty.copy_to_uva()

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        logits[:, :10] -= self.presence_penalty.gpu[ctx.expanded_idx_mapping, None]
        return logits
