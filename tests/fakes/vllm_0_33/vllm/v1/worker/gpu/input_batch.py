from dataclasses import dataclass

import numpy as np
import torch


@dataclass
class InputBatch:
    """What the sampler reads of a batch without drafts, whose requests have a row each."""

    idx_mapping: torch.Tensor  # int64
    idx_mapping_np: np.ndarray
    expanded_idx_mapping: torch.Tensor  # int64
    expanded_local_pos: torch.Tensor
    input_ids: torch.Tensor
    positions: torch.Tensor  # int64, of all tokens
    logits_indices: torch.Tensor
    seq_lens_cpu_upper_bound: torch.Tensor
