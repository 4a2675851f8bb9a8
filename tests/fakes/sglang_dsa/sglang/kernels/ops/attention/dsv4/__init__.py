from sglang.kernels.ops.attention.dsv4.topk import topk_transform_512_v2, topk_transform_ragged_v2

__all__ = ["topk_transform_512_v2", "topk_transform_ragged_v2"]
