"""What the fakes of SGLang share: hooks, request pool, batches, and its top-k functions by sorting.

Written from what the sources of SGLang promise, not copied. `CALLS` counts what SGLang itself computes, and
its results come in descending order of scores, so that a test can tell them from this package's.
"""

from __future__ import annotations

import functools
import pkgutil
from collections import Counter, defaultdict
from enum import Enum, IntEnum, auto
from typing import ClassVar

import torch
from stable_topk import chosen  # noqa: F401  (the fakes and the tests take it from here)

CALLS: Counter = Counter()


class HookType(Enum):
    AFTER = "after"
    AROUND = "around"
    REPLACE = "replace"


class HookRegistry:
    """Hooks by dotted path, applied after all plugins; SGLang's also reach whoever imported a name before."""

    _hooks: ClassVar = defaultdict(list)
    _patched: ClassVar = set()

    @classmethod
    def register(cls, target, hook, hook_type=HookType.AFTER, *, source=None):
        cls._hooks[target].append((hook_type, hook))

    @classmethod
    def apply_hooks(cls):
        for target, hooks in sorted(cls._hooks.items()):
            if target in cls._patched:
                continue
            owner_path, name = target.rsplit(".", 1)
            owner = pkgutil.resolve_name(owner_path)
            wrapped = getattr(owner, name)
            for hook_type, hook in hooks:
                wrapped = _wrap(wrapped, hook, hook_type)
            setattr(owner, name, wrapped)
            cls._patched.add(target)

    @classmethod
    def reset(cls):
        cls._hooks.clear()
        cls._patched.clear()


def _wrap(original, hook, hook_type):
    assert hook_type in (HookType.AROUND, HookType.REPLACE)

    @functools.wraps(original)
    def wrapper(*args, **kwargs):
        return hook(original, *args, **kwargs) if hook_type is HookType.AROUND else hook(*args, **kwargs)

    return wrapper


def load_plugins(registers):
    """Run what entry points name and apply the hooks; SGLang goes on where either raises."""
    for register in registers:
        register()
    HookRegistry.apply_hooks()


class ForwardMode(Enum):
    EXTEND = "extend"
    DECODE = "decode"
    TARGET_VERIFY = "target_verify"

    def is_decode(self):
        return self is ForwardMode.DECODE


class ReqToTokenPool:
    """Row 0 is that of padding; requests have rows from 1 on."""

    def __init__(self, size, max_context_len):
        self.size = size
        self.req_to_token = torch.zeros((size + 1, max_context_len), dtype=torch.int32)


class ForwardBatch:
    def __init__(self, req_pool_indices, forward_mode=ForwardMode.DECODE, pool=None, spec_info=None):
        self.req_pool_indices = torch.tensor(req_pool_indices, dtype=torch.int64)
        self.forward_mode = forward_mode
        self.spec_info = spec_info
        if pool is not None:
            self.req_to_token_pool = pool


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
        lengths = attn.seqlens_expanded
        if not self.fuse:
            return fast_topk_v2(logits, lengths, topk, row_starts=ks)
        call = {"score": logits, "lengths": lengths, "topk": topk, "row_starts": ks}
        if self.method is TopkTransformMethod.RAGGED:
            return fast_topk_transform_ragged_fused(**call, topk_indices_offset=attn.topk_indices_offset)
        return fast_topk_transform_fused(
            **call, page_table_size_1=attn.page_table_1, cu_seqlens_q=attn.cu_seqlens_q
        )


class Indexer(torch.nn.Module):
    """The paged part; the real one computes the scores, here `metadata` carries them."""

    def __init__(self, index_topk):
        super().__init__()
        self.index_topk = index_topk

    def _get_topk_paged(self, forward_batch, layer_id, q_fp8, weights, metadata):
        return metadata.topk_transform(q_fp8, self.index_topk)


def through_table(positions, table, page_size, request):
    """Slots of positions; the table row of each row is `request[row]`."""
    safe = positions.clamp(min=0).long()
    pages = table[request].gather(1, safe // page_size).long()
    return torch.where(positions < 0, -1, pages * page_size + safe % page_size).to(torch.int32)
