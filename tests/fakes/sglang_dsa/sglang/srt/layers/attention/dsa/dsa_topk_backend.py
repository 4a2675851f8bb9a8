"""The dispatch of newer versions: decode goes to v2 where it can, all else to sgl_kernel."""

from enum import IntEnum, auto

import torch


class TopkTransformMethod(IntEnum):
    PAGED = auto()
    RAGGED = auto()


class Metadata:
    """What an attention backend gives its indexer for one batch."""

    def __init__(self, method, attn_metadata, *, fuse=True, v2=True, page_size=64):
        self.method, self.attn_metadata = method, attn_metadata
        self.fuse, self.v2, self.page_size = fuse, v2, page_size

    def topk_transform(self, logits, topk, ks=None):
        from sgl_kernel import fast_topk_transform_fused, fast_topk_transform_ragged_fused, fast_topk_v2

        attn = self.attn_metadata
        lengths = attn.dsa_seqlens_expanded
        if not self.fuse:
            return fast_topk_v2(logits, lengths, topk, row_starts=ks)
        if self.method is TopkTransformMethod.RAGGED:
            return fast_topk_transform_ragged_fused(
                score=logits,
                lengths=lengths,
                topk_indices_offset=attn.topk_indices_offset,
                topk=topk,
                row_starts=ks,
            )
        if self.v2 and ks is None and attn.real_page_table.shape[0] == logits.shape[0]:
            from sglang.kernels.ops.attention.dsv4.topk import topk_transform_512_v2

            out = logits.new_full((logits.shape[0], topk), -1, dtype=torch.int32)
            topk_transform_512_v2(logits, lengths, attn.real_page_table, out, self.page_size, None)
            return out
        return fast_topk_transform_fused(
            score=logits,
            lengths=lengths,
            page_table_size_1=attn.page_table_1,
            cu_seqlens_q=attn.cu_seqlens_q,
            topk=topk,
            row_starts=ks,
        )
