"""The dispatch of older versions, which know sgl_kernel alone."""

from enum import IntEnum, auto


class TopkTransformMethod(IntEnum):
    PAGED = auto()
    RAGGED = auto()


class Metadata:
    """What an attention backend gives its indexer for one batch."""

    def __init__(self, method, attn_metadata, *, fuse=True):
        self.method, self.attn_metadata, self.fuse = method, attn_metadata, fuse

    def topk_transform(self, logits, topk, ks=None):
        from sgl_kernel import fast_topk_transform_fused, fast_topk_transform_ragged_fused, fast_topk_v2

        attn = self.attn_metadata
        lengths = attn.nsa_seqlens_expanded
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
        return fast_topk_transform_fused(
            score=logits,
            lengths=lengths,
            page_table_size_1=attn.page_table_1,
            cu_seqlens_q=attn.cu_seqlens_q,
            topk=topk,
            row_starts=ks,
        )
