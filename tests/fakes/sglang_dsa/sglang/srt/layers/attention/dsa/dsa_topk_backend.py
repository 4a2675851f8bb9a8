"""The dispatch of newer versions: decode goes to v2 where it can, all else to sgl_kernel."""

import sglang_base
import torch
from sglang_base import TopkTransformMethod

__all__ = ["Metadata", "TopkTransformMethod"]


class Metadata(sglang_base.Metadata):
    def __init__(self, method, attn_metadata, *, fuse=True, v2=True, page_size=64):
        super().__init__(method, attn_metadata, fuse=fuse)
        self.v2, self.page_size = v2, page_size

    def topk_transform(self, logits, topk, ks=None):
        table = self.attn_metadata.real_page_table
        paged = self.fuse and self.method is TopkTransformMethod.PAGED
        if not (paged and self.v2 and ks is None and table.shape[0] == logits.shape[0]):
            return super().topk_transform(logits, topk, ks)
        from sglang.kernels.ops.attention.dsv4.topk import topk_transform_512_v2

        lengths = self.attn_metadata.seqlens_expanded
        out = logits.new_full((logits.shape[0], topk), -1, dtype=torch.int32)
        topk_transform_512_v2(logits, lengths, table, out, self.page_size, None)
        return out
