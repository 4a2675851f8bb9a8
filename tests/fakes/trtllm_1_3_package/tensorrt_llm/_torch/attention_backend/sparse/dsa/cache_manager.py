from fake_base import KVCacheManager


class DSACacheManager(KVCacheManager):
    def get_indexer_k_cache_buffers(self, layer_idx: int):
        return self.pool[self.layer_offsets[layer_idx]]
