"""Exact top-k and sampling over rows whose parts lie on several ranks of `torch.distributed`.

`Shards` says which ranks hold the parts and how. `sharded_topk` selects: each rank gets its own part of the
choice that `gvr_topk.indexer_topk_decode` makes of the whole row. `sharded_sample` draws the token that
`gvr_topk.sampling.sample` draws of it. `docs/distributed.md` is the contract.
"""

from __future__ import annotations

from gvr_topk.distributed.sample import sharded_sample
from gvr_topk.distributed.shards import Shards
from gvr_topk.distributed.topk import ShardedTopk, sharded_topk

__all__ = ["ShardedTopk", "Shards", "sharded_sample", "sharded_topk"]
