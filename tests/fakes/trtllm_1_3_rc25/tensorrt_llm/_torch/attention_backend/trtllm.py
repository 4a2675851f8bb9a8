from fake_base import TrtllmAttentionMetadata

__all__ = ["TrtllmAttentionMetadata"]
