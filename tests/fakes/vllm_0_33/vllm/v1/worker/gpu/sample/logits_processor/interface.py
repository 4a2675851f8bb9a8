from dataclasses import dataclass

import numpy as np
import torch

from vllm.sampling_params import SamplingParams


@dataclass(frozen=True)
class LogitsContext:
    expanded_idx_mapping: torch.Tensor
    idx_mapping_np: np.ndarray


class LogitsProcessor:
    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        return True

    def apply_staged_writes(self) -> None: ...

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        raise NotImplementedError
