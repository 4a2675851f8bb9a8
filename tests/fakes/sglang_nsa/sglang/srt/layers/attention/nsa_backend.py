"""The dispatch of older versions, which know sgl_kernel alone."""

from sglang_base import Metadata, TopkTransformMethod

__all__ = ["Metadata", "TopkTransformMethod"]
