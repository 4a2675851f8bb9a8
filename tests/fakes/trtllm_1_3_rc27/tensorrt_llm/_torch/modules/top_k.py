"""From about rc27 on every top-k goes through this class."""

from __future__ import annotations

from enum import Enum

import torch


class TopKImplementation(str, Enum):
    TORCH = "torch"
    CUDA_RADIX = "cuda_radix"
    CUTE_DSL_RADIX = "cute_dsl_radix"
    CUTE_DSL_GVR = "cute_dsl_gvr"


class TopK(torch.nn.Module):
    def __init__(self, top_k, *, prefill_implementation=None, decode_implementation=None, compress_ratio=1):
        super().__init__()
        self.top_k = top_k
        self.decode_implementation = TopKImplementation(
            decode_implementation or TopKImplementation.CUDA_RADIX
        )
        self.compress_ratio = compress_ratio

    def forward(
        self,
        scores,
        output_indices,
        *,
        is_prefill,
        row_starts=None,
        row_ends=None,
        sequence_lengths=None,
        scan_lengths=None,
        next_n=1,
        max_seq_len=None,
        gvr_ext_kwargs=None,
    ):
        if is_prefill:
            torch.ops.trtllm.indexer_topk_prefill(scores, row_starts, row_ends, output_indices, self.top_k)
            return output_indices
        return self._forward_decode(
            scores, sequence_lengths, scan_lengths, output_indices, next_n, max_seq_len, gvr_ext_kwargs
        )

    def _forward_decode(
        self,
        scores: torch.Tensor,
        sequence_lengths: torch.Tensor,
        scan_lengths: torch.Tensor,
        output_indices: torch.Tensor,
        next_n: int,
        max_seq_len: int | None,
        gvr_ext_kwargs: dict[str, torch.Tensor | None] | None,
    ) -> torch.Tensor:
        if self.decode_implementation == TopKImplementation.CUTE_DSL_RADIX:
            torch.ops.trtllm.cute_dsl_indexer_topk_decode(
                scores, scan_lengths, output_indices, self.top_k, next_n
            )
            return output_indices
        gvr = self.decode_implementation == TopKImplementation.CUTE_DSL_GVR
        torch.ops.trtllm.indexer_topk_decode(
            scores,
            sequence_lengths,
            output_indices,
            next_n,
            self.top_k,
            pre_idx=gvr_ext_kwargs["gvr_prior_indices"] if gvr else None,
            compress_ratio=self.compress_ratio,
        )
        return output_indices
