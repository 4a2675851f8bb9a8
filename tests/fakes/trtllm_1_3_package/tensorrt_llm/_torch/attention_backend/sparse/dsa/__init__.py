from .cache_manager import DSACacheManager
from .indexer import Indexer
from .metadata import DSAtrtllmAttentionMetadata

__all__ = ["DSACacheManager", "DSAtrtllmAttentionMetadata", "Indexer"]
