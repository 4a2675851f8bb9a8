from dataclasses import dataclass

import torch

from vllm.v1.outputs import LogprobsTensors


@dataclass
class SamplerOutput:
    sampled_token_ids: torch.Tensor
    logprobs_tensors: LogprobsTensors | None
    sampling_mask: torch.Tensor | None = None
    """In vLLM `sampling_mask_tensors`: ids and bits; here which logits are finite."""
    num_sampled: torch.Tensor | None = None
    num_rejected: torch.Tensor | None = None
