"""A program for an environment with the wheel alone: it loads, and computes the contract's result."""

import json

import torch

import gvr_topk
import gvr_topk.policy

status = gvr_topk.library_status()
scores = torch.tensor([[0.5, 3.0, float("nan"), 3.0, 3.0], [1.0, 2.0, 0.0, 9.0, 9.0]])
lengths = torch.tensor([5, 3], dtype=torch.int32)
state = gvr_topk.TopkState(2, 2)
chosen = gvr_topk.indexer_topk_decode(scores, lengths, 2, state=state).tolist()
assert chosen == state.indices.tolist() == [[1, 2], [0, 1]], chosen
assert gvr_topk.policy.can_use_heuristic(length=1 << 17, k=2048).allowed
cuda = torch._C._dispatch_has_kernel_for_dispatch_key("gvr_topk::indexer_topk_decode", "CUDA")
print(json.dumps({"library": status.reason, "loaded": status.loaded, "cuda_registered": cuda}))
