from sglang_base import Indexer as _Indexer


class Indexer(_Indexer):
    def _get_topk_paged(self, forward_batch, layer_id, q_fp8, weights, metadata):
        return super()._get_topk_paged(forward_batch, layer_id, q_fp8, weights, metadata)
