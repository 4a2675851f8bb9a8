from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from vllm.v1.outputs import LogprobsTensors

MAX_COMPACT_SUPPORT = 2048


class SamplingMaskTensors(NamedTuple):
    token_ids: torch.Tensor  # [requests * rows_per_request, max_num_kept]
    packed_mask: torch.Tensor  # [requests * rows_per_request, ceil(vocab_size / 8)]
    counts: torch.Tensor
    vocab_size: int
    rows_per_request: int = 1

    @classmethod
    def from_logits(
        cls,
        logits: torch.Tensor,
        cu_num_logits: torch.Tensor,
        num_sampled_tokens: torch.Tensor,
        max_num_kept: int,
        rows_per_request: int = 1,
    ) -> "SamplingMaskTensors":
        """A loop in place of a kernel, which also leaves what it does not write as it was allocated."""
        vocab_size, rows = logits.shape[1], len(num_sampled_tokens) * rows_per_request
        max_num_kept = min(max_num_kept, vocab_size, MAX_COMPACT_SUPPORT)
        token_ids = logits.new_full((rows, max_num_kept), 1 << 30, dtype=torch.int32)
        packed_mask = logits.new_full((rows, (vocab_size + 7) // 8), 0xAA, dtype=torch.uint8)
        counts = logits.new_zeros(rows, dtype=torch.int32)
        for row in range(rows):
            request, slot = divmod(row, rows_per_request)
            if slot < num_sampled_tokens[request]:
                keep = logits[int(cu_num_logits[request]) + slot].isfinite()
                ids = keep.nonzero().flatten()
                counts[row] = len(ids)
                token_ids[row, : len(ids)] = ids[:max_num_kept]
                packed_mask[row] = torch.from_numpy(np.packbits(keep.cpu().numpy(), bitorder="little"))
        return cls(token_ids, packed_mask, counts, vocab_size, rows_per_request)

    @classmethod
    def cat(cls, chunks: Sequence["SamplingMaskTensors"]) -> "SamplingMaskTensors":
        first = chunks[0]
        assert len({(c.vocab_size, c.rows_per_request) for c in chunks}) == 1
        tensors = (torch.cat(parts) for parts in list(zip(*chunks, strict=True))[:3])
        return cls(*tensors, first.vocab_size, first.rows_per_request)

    def tolists(self) -> list[list[int]]:
        """Kept tokens of all rows; vLLM leaves out rows without a token, and joins the others."""
        token_ids, packed_mask, counts = (tensor.cpu().numpy() for tensor in self[:3])
        width = token_ids.shape[1]

        def support(row: int) -> np.ndarray:
            if counts[row] <= width:
                return token_ids[row, : counts[row]]
            return np.flatnonzero(np.unpackbits(packed_mask[row], count=self.vocab_size, bitorder="little"))

        return [support(row).tolist() for row in range(len(counts))]


@dataclass
class SamplerOutput:
    sampled_token_ids: torch.Tensor
    logprobs_tensors: LogprobsTensors | None
    sampling_mask_tensors: SamplingMaskTensors | None = None
    num_sampled: torch.Tensor | None = None
    num_rejected: torch.Tensor | None = None
