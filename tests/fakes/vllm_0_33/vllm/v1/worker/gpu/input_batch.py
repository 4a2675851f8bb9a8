from dataclasses import dataclass

import numpy as np
import torch


@dataclass
class InputBatch:
    """What the samplers read of a batch; without drafts, requests have a row each."""

    idx_mapping: torch.Tensor  # int64
    idx_mapping_np: np.ndarray
    expanded_idx_mapping: torch.Tensor  # int64
    expanded_local_pos: torch.Tensor
    input_ids: torch.Tensor
    positions: torch.Tensor  # int64, of all tokens
    logits_indices: torch.Tensor
    seq_lens_cpu_upper_bound: torch.Tensor
    cu_num_logits: torch.Tensor | None = None  # int32
    cu_num_logits_np: np.ndarray | None = None
    seq_lens: torch.Tensor | None = None


def get_num_sampled_and_rejected(
    num_sampled: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_num_logits: torch.Tensor,
    idx_mapping: torch.Tensor,
    prefill_len: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A request whose prompt goes on samples nothing; `num_sampled` is changed in place."""
    prompt = seq_lens < prefill_len[idx_mapping]
    num_sampled.masked_fill_(prompt, 0)
    return num_sampled, (cu_num_logits.diff() - num_sampled).masked_fill(prompt, 0)
