"""What the fake TensorRT-LLM packages share: ops, cache, batch metadata, indexer and the score formula.

Names and signatures are those of the real package, and those that differ between its versions stand in the
folder of each; the bodies are the shortest that are correct. The key cache has one block per request, as
long as the longest sequence.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Literal, Optional

import torch
from pydantic import BaseModel, ConfigDict, Field
from stable_topk import chosen as stable_topk
from stable_topk import draft_lengths

PREFILL_SCHEMA = (
    "indexer_topk_prefill(Tensor logits, Tensor row_starts, Tensor row_ends, Tensor(a!) indices, "
    "int index_topk={topk}) -> ()"
)
DECODE_SCHEMA = (
    "indexer_topk_decode(Tensor logits, Tensor seq_lens, Tensor(a!) indices, int next_n, "
    "int index_topk={topk}, Tensor? pre_idx=None, Tensor? heuristic_scratch=None, "
    "int compress_ratio=1, Tensor? radix_aux_indices=None, Tensor? radix_aux_logits=None) -> ()"
)
CUTE_DSL_SCHEMA = (
    "cute_dsl_indexer_topk_decode(Tensor logits, Tensor seq_lens, Tensor(a!) indices, int top_k, "
    "int next_n) -> ()"
)
OPS = (DECODE_SCHEMA, PREFILL_SCHEMA, CUTE_DSL_SCHEMA)
"""Schemas of the ops from 1.3 on."""

_library: torch.library.Library | None = None
_defined: list[str] = []
_later: tuple[str, ...] = ()

on_decode: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None] | None = None
"""Given scores, visible lengths and result of each decode top-k, where a test looks at them."""


def define_ops(*schemas: str) -> None:
    """Register the ``trtllm`` ops that are not there yet; `forget_ops` takes them back.

    With ``FAKE_LATE_OPS`` they are registered by `load_ops` only: after DSA has been imported. On a GPU
    machine the real compiled ops may be loaded, see `eval.bench.baselines`.
    """
    global _later
    _later = schemas
    forget_ops()
    if not os.environ.get("FAKE_LATE_OPS"):
        load_ops()


def load_ops() -> None:
    """Register what `define_ops` was given."""
    global _library
    # The real default of index_topk is 2048; tests take a small one to stay quick.
    topk = int(os.environ.get("FAKE_INDEX_TOPK", "2048"))
    _library = torch.library.Library("trtllm", "FRAGMENT")
    missing = [s for s in _later if not torch._C._dispatch_has_kernel("trtllm::" + s.split("(")[0])]
    for schema in missing:
        vars(torch.ops.trtllm).pop(schema.split("(")[0], None)
        _library.define(schema.format(topk=topk))

    # The dispatcher leaves out trailing arguments that equal the schema's default, so the bodies need
    # the same default.
    def indexer_topk_decode(
        logits, seq_lens, indices, next_n, index_topk=topk, pre_idx=None, scratch=None, compress_ratio=1, *aux
    ):
        assert logits.dtype == torch.float32 and seq_lens.size(0) * next_n == logits.size(0)
        assert indices.size(1) >= index_topk
        lengths = draft_lengths(seq_lens, next_n) // compress_ratio
        # Unordered by contract: no test may rely on an order.
        indices[:, :index_topk] = stable_topk(logits, lengths, index_topk)

    def indexer_topk_prefill(logits, row_starts, row_ends, indices, index_topk=topk):
        indices[:, :index_topk] = stable_topk(logits, row_ends - row_starts, index_topk, row_starts)

    def cute_dsl_indexer_topk_decode(logits, seq_lens, indices, top_k, next_n):
        indexer_topk_decode(logits, seq_lens, indices, next_n, top_k)

    for body in (indexer_topk_decode, indexer_topk_prefill, cute_dsl_indexer_topk_decode):
        if any(schema.split("(")[0] == body.__name__ for schema in missing):
            _defined.append(body.__name__)
            for device in ("CPU", "CUDA"):
                _library.impl(body.__name__, body, device)


def forget_ops() -> None:
    global _library
    if _library is not None:
        _library._destroy()
        _library = None
    while _defined:
        vars(torch.ops.trtllm).pop(_defined.pop(), None)


def get_sm_version() -> int:
    return int(os.environ.get("FAKE_SM_VERSION", "90"))


class Logger:
    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []

    def info(self, *message) -> None:
        self.lines.append(("info", " ".join(map(str, message))))

    def warning(self, *message) -> None:
        self.lines.append(("warning", " ".join(map(str, message))))


class StrictBaseModel(BaseModel):
    model_config = ConfigDict(extra="forbid")


class BaseSparseAttentionConfig(StrictBaseModel):
    algorithm: str


class RocketSparseAttentionConfig(BaseSparseAttentionConfig):
    algorithm: Literal["rocket"] = "rocket"


class DsaConfig(BaseSparseAttentionConfig):
    algorithm: Literal["dsa"] = "dsa"
    index_n_heads: Optional[int] = None
    index_head_dim: Optional[int] = None
    index_topk: Optional[int] = None
    skip_indexer_for_short_seqs: bool = True


class V4Config(BaseModel):
    """What the class of DeepSeek-V4 adds to that of DSA."""

    algorithm: Literal["deepseek_v4"] = "deepseek_v4"
    compress_ratios: list[int] = Field(default_factory=lambda: [1, 1, 4, 128, 4, 128, 4])


class LlmArgs(StrictBaseModel):
    model: str
    tensor_parallel_size: int = 1


def update_llm_args_with_extra_dict(llm_args: dict, llm_args_dict: dict) -> dict:
    return {**llm_args, **llm_args_dict}


class KVCacheManager:
    """Blocks by request; one block holds a whole sequence."""

    def __init__(
        self, *, num_layers, head_dim, max_seq_len, max_batch_size, device="cpu", first_layer=0, pp_size=1
    ):
        self.mapping = SimpleNamespace(pp_size=pp_size)
        self.num_local_layers = num_layers
        self.layer_offsets = {first_layer + i: i for i in range(num_layers)}
        self.max_seq_len = max_seq_len
        self.max_batch_size = max_batch_size
        self.tokens_per_block = max_seq_len
        self.num_blocks = 2 * max_batch_size
        self._free = list(range(self.num_blocks))
        self._blocks: dict[int, int] = {}
        self.pool = torch.zeros(num_layers, self.num_blocks, max_seq_len, head_dim, device=device)

    def get_batch_cache_indices(self, request_ids):
        return [[self._blocks[i] if i in self._blocks else self._take(i)] for i in request_ids]

    def _take(self, request_id):
        self._blocks[request_id] = self._free.pop(0)
        return self._blocks[request_id]


class TrtllmAttentionMetadata:
    """Batch metadata: context requests first, generation requests after them."""

    def __init__(
        self,
        *,
        max_num_requests,
        max_num_tokens,
        kv_cache_manager,
        sparse_attention_config,
        draft_kv_cache_manager=None,
        device="cpu",
        is_cuda_graph=False,
    ):
        self.max_num_requests = self.max_num_sequences = max_num_requests
        self.max_num_tokens = max_num_tokens
        self.kv_cache_manager = kv_cache_manager
        self.draft_kv_cache_manager = draft_kv_cache_manager
        self.sparse_attention_config = sparse_attention_config
        self.device = device
        self.is_cuda_graph = is_cuda_graph
        self._seq_lens, self._num_contexts = torch.zeros(0, dtype=torch.int32), 0
        self._on_update()
        self.__post_init__()

    def __post_init__(self):
        size, options = (self.max_num_requests,), {"dtype": torch.int32, "device": self.device}
        self.kv_lens_cuda_runtime = torch.zeros(size, **options)
        self.indexer_k_cache_block_offsets = torch.zeros((*size, 1), **options)
        self.slot_mapping_fp8 = torch.zeros(self.max_num_tokens, dtype=torch.int64, device=self.device)
        self.skip_indexer_for_ctx_reqs = self.skip_indexer_for_gen_reqs = False

    def create_cuda_graph_metadata(
        self, max_batch_size, sub_cross_metadata=False, max_draft_tokens=0, buffers=None
    ):
        metadata = copy.copy(self)
        metadata.is_cuda_graph = True
        metadata.max_num_requests = metadata.max_num_sequences = max_batch_size
        metadata.max_num_tokens = max_batch_size * (1 + max_draft_tokens)
        metadata.__post_init__()
        return metadata

    def set_batch(self, request_ids, seq_lens, num_contexts, num_cached_tokens_per_seq):
        """What the model engine assigns before `prepare`."""
        self.request_ids = request_ids
        self.seq_lens = torch.tensor(seq_lens, dtype=torch.int32)
        self.num_contexts = num_contexts
        self.kv_cache_params = SimpleNamespace(
            use_cache=True, num_cached_tokens_per_seq=num_cached_tokens_per_seq, num_extra_kv_tokens=0
        )

    @property
    def num_seqs(self):
        return len(self.seq_lens)

    def _on_update(self):
        """Count requests and tokens when they are assigned, as the real class does, and not when read."""
        contexts = self._seq_lens[: self._num_contexts]
        self.num_generations = len(self._seq_lens) - self._num_contexts
        self.num_tokens, self.num_ctx_tokens = int(self._seq_lens.sum()), int(contexts.sum())

    @property
    def seq_lens(self):
        return self._seq_lens

    @seq_lens.setter
    def seq_lens(self, value):
        self._seq_lens = value
        self._on_update()

    @property
    def num_contexts(self):
        return self._num_contexts

    @num_contexts.setter
    def num_contexts(self, value):
        self._num_contexts = value
        self._on_update()

    def prepare_for_draft_forward(self):
        """Use the draft manager's blocks for the current batch; what was replaced is returned."""
        saved = {name: getattr(self, name) for name in ("indexer_k_cache_block_offsets", "slot_mapping_fp8")}
        for name, tensor in saved.items():
            setattr(self, name, tensor.clone())
        self._map_blocks()
        return saved

    def restore_after_draft_forward(self, saved_state):
        for name, tensor in saved_state.items():
            setattr(self, name, tensor)

    def skip_short_rows(self, topk):
        """Versions up to the first ones of 1.3 decide in ``prepare`` that short rows need no indexer."""
        gen_lens = self.kv_lens[self.num_contexts :]
        skip = self.sparse_attention_config.skip_indexer_for_short_seqs
        self.skip_indexer_for_gen_reqs = skip and len(gen_lens) > 0 and int(gen_lens.max()) <= topk

    def prepare(self):
        seqs = self.num_seqs
        cached = torch.tensor(self.kv_cache_params.num_cached_tokens_per_seq, dtype=torch.int32)
        self.kv_lens_cuda_runtime[:seqs].copy_(cached + self.seq_lens)
        self.kv_lens = cached + self.seq_lens
        self._map_blocks()

    def _map_blocks(self):
        """Where the manager of the moment keeps the batch's keys."""
        blocks = [b[0] for b in self.kv_cache_manager.get_batch_cache_indices(self.request_ids)]
        self.indexer_k_cache_block_offsets[: self.num_seqs, 0].copy_(torch.tensor(blocks, dtype=torch.int32))
        length = self.kv_cache_manager.max_seq_len
        slots = [
            block * length + int(end) - int(n) + i
            for block, end, n in zip(blocks, self.kv_lens, self.seq_lens, strict=True)
            for i in range(int(n))
        ]
        self.slot_mapping_fp8[: len(slots)].copy_(torch.tensor(slots))


class MonolithMetadata(TrtllmAttentionMetadata):
    """That of DSA where it is one module."""

    max_draft_tokens: int = 0

    def __post_init__(self):
        super().__post_init__()
        self.sparse_mla_topk = self.sparse_attention_config.index_topk

    def prepare(self):
        super().prepare()
        self.skip_short_rows(self.sparse_mla_topk)


class PackageMetadata(TrtllmAttentionMetadata):
    """That of DSA where it is a package."""

    max_draft_tokens: int = 0

    def __post_init__(self):
        super().__post_init__()
        self.num_sparse_topk = self.sparse_attention_config.index_topk
        self.compress_ratios = getattr(self.sparse_attention_config, "compress_ratios", [1])
        self._indexer_compress_ratio = next((r for r in (4, 1) if r in self.compress_ratios), 0)
        # TensorRT-LLM's own hints, by row of the batch.
        self.heuristic_prev_topk = torch.zeros(
            (self.kv_cache_manager.num_local_layers, self.max_num_requests, self.num_sparse_topk),
            dtype=torch.int32,
            device=self.device,
        )

    def get_indexer_max_seq_len(self) -> int:
        return self.kv_cache_manager.max_seq_len // max(1, self._indexer_compress_ratio)


class DraftMetadata(PackageMetadata):
    """The same from about rc25, told of the drafts."""

    in_mtp_draft_loop: bool = False
    indexer_skip_topk: bool = False
    mtp_num_accepted = None
    shared_topk_indices = None

    def set_mtp_num_accepted(self, num_accepted):
        self.mtp_num_accepted = num_accepted

    def set_in_mtp_draft_loop(self, active):
        self.in_mtp_draft_loop = active

    def set_skip_topk(self, skip):
        self.indexer_skip_topk = skip


def prepare_attn_metadata_for_draft_replay(attn_metadata, draft_kv_cache_manager):
    """What a draft loop does first where drafts have a cache of their own."""
    if draft_kv_cache_manager is None:
        return None
    saved = {"target_kv_cache_manager": attn_metadata.kv_cache_manager}
    attn_metadata.kv_cache_manager = draft_kv_cache_manager
    return {**saved, "saved_backend_state": attn_metadata.prepare_for_draft_forward()}


def restore_attn_metadata_after_draft_replay(attn_metadata, saved_state):
    if saved_state is None:
        return
    attn_metadata.kv_cache_manager = saved_state["target_kv_cache_manager"]
    attn_metadata.restore_after_draft_forward(saved_state["saved_backend_state"])


def fp8_paged_mqa_logits(q, k_cache, weights, context_lens, block_table, max_seq_len):
    """Scores ``[B * next_n, max_seq_len]``: sum over heads of weight times relu(q . k)."""
    batch, next_n, heads, dim = q.shape
    keys = k_cache.index_select(0, block_table[:, 0])[:, :max_seq_len]
    dots = torch.relu(q.reshape(batch, next_n * heads, dim) @ keys.transpose(1, 2))
    dots = dots.view(batch * next_n, heads, -1)
    return torch.bmm(weights.unsqueeze(1), dots).squeeze(1)


class IndexerBase(torch.nn.Module):
    """The part of ``Indexer`` that is alike in all versions.

    A subclass has ``sparse_attn_indexer`` with the signature of its version, which calls `select_rows`, and
    ``decode_topk``, which calls the top-k of its version.
    """

    def __init__(self, config, layer_idx, aux_stream, compress_ratio=1):
        super().__init__()
        self.index_topk = config.index_topk
        self.layer_idx = layer_idx
        self.aux_stream = aux_stream
        self.compress_ratio = compress_ratio
        self._use_cute_dsl_topk = getattr(config, "use_cute_dsl_topk", False) and get_sm_version() >= 100
        self._enable_heuristic_topk = (
            getattr(config, "enable_heuristic_topk", False) and get_sm_version() >= 100
        )

    def _update_k_cache(self, k_fp8, k_scale, metadata):
        """Store keys; where they are compressed, the last one of each whole group stands for the group."""
        cache = metadata.kv_cache_manager.get_indexer_k_cache_buffers(self.layer_idx)
        slots = metadata.slot_mapping_fp8[: k_fp8.shape[0]]
        if self.compress_ratio > 1:
            length = metadata.kv_cache_manager.max_seq_len
            block, position = slots // length, slots % length
            whole = (position + 1) % self.compress_ratio == 0
            slots, k_fp8 = (block * length + position // self.compress_ratio)[whole], k_fp8[whole]
        cache.view(-1, cache.shape[-1])[slots] = k_fp8

    def forward(self, q, k, weights, metadata):
        """The real one projects q, k and weights from hidden states; here they are given."""
        self._update_k_cache(k, None, metadata)
        return self.sparse_attn_indexer(metadata, q, q, k, k, weights)

    def select_rows(self, metadata, hidden_states, q, weights, is_generation=None):
        """Select for the context tokens, the generation tokens, or both; other rows stay garbage."""
        contexts, generations = metadata.num_contexts, metadata.num_generations
        gen_tokens = metadata.num_tokens - metadata.num_ctx_tokens
        offset = metadata.num_ctx_tokens if is_generation is None else 0
        buffer = torch.empty(
            (hidden_states.shape[0], self.index_topk), dtype=torch.int32, device=hidden_states.device
        )
        if contexts > 0 and is_generation is not True and not metadata.skip_indexer_for_ctx_reqs:
            self._select_contexts(metadata, q, weights, buffer)
        if generations == 0 or is_generation is False:
            return buffer
        chosen = buffer[offset : offset + gen_tokens]
        next_n = gen_tokens // generations
        lengths = metadata.kv_lens_cuda_runtime[contexts : contexts + generations]
        draft = getattr(metadata, "in_mtp_draft_loop", False)
        if metadata.skip_indexer_for_gen_reqs:
            dense = torch.arange(self.index_topk, dtype=torch.int32, device=hidden_states.device)
            ends = draft_lengths(lengths, next_n)
            chosen.copy_(torch.where(dense < ends[:, None], dense, -1))
        elif draft and metadata.indexer_skip_topk:
            chosen.copy_(metadata.shared_topk_indices)
        else:
            rows = slice(offset, offset + gen_tokens)
            logits = fp8_paged_mqa_logits(
                q[rows].view(generations, next_n, *q.shape[1:]),
                metadata.kv_cache_manager.get_indexer_k_cache_buffers(self.layer_idx),
                weights[rows],
                lengths,
                metadata.indexer_k_cache_block_offsets[contexts : contexts + generations],
                metadata.kv_cache_manager.max_seq_len // self.compress_ratio,
            )
            self.decode_topk(metadata, logits, lengths, chosen, next_n)
            if on_decode is not None:
                on_decode(logits, draft_lengths(lengths, next_n) // self.compress_ratio, chosen)
            if draft:
                metadata.shared_topk_indices = chosen[self.last_rows(metadata, contexts, next_n)]
        return buffer

    def decode_by_either_op(self, logits, lengths, indices, next_n):
        """The top-k of a decode step where DSA is one module and there are two ops."""
        if self._use_cute_dsl_topk:
            torch.ops.trtllm.cute_dsl_indexer_topk_decode(logits, lengths, indices, self.index_topk, next_n)
        else:
            torch.ops.trtllm.indexer_topk_decode(logits, lengths, indices, next_n, self.index_topk)

    def decode_by_op(self, metadata, logits, lengths, indices, next_n):
        """The top-k of a decode step where DSA is a package and calls the op itself."""
        if self._use_cute_dsl_topk and not self._enable_heuristic_topk:
            torch.ops.trtllm.cute_dsl_indexer_topk_decode(
                logits, lengths // self.compress_ratio, indices, self.index_topk, next_n
            )
            return
        layer = metadata.kv_cache_manager.layer_offsets[self.layer_idx]
        prior = metadata.heuristic_prev_topk[layer, : metadata.num_generations]
        torch.ops.trtllm.indexer_topk_decode(
            logits,
            lengths,
            indices,
            next_n,
            self.index_topk,
            pre_idx=prior if self._enable_heuristic_topk else None,
            heuristic_scratch=None,
            compress_ratio=self.compress_ratio,
            radix_aux_indices=None,
            radix_aux_logits=None,
        )
        if self._enable_heuristic_topk:
            prior.copy_(indices[next_n - 1 :: next_n])

    @staticmethod
    def last_rows(metadata, contexts, next_n):
        """The last accepted row of each generation request; the last one where that is not told."""
        first = torch.arange(metadata.num_generations, device=metadata.device) * next_n
        if metadata.mtp_num_accepted is None:
            return first + next_n - 1
        return first + (metadata.mtp_num_accepted[contexts:] - 1).clamp(0, next_n - 1)

    def _select_contexts(self, metadata, q, weights, buffer):
        """Top-k of every context token, one request at a time."""
        cache = metadata.kv_cache_manager.get_indexer_k_cache_buffers(self.layer_idx)
        width = metadata.kv_cache_manager.max_seq_len // self.compress_ratio
        start = 0
        for i in range(metadata.num_contexts):
            tokens, kv_len = int(metadata.seq_lens[i]), int(metadata.kv_lens[i])
            rows = slice(start, start + tokens)
            block = metadata.indexer_k_cache_block_offsets[i : i + 1]
            logits = fp8_paged_mqa_logits(q[rows].unsqueeze(0), cache, weights[rows], None, block, width)
            ends = torch.arange(kv_len - tokens + 1, kv_len + 1, dtype=torch.int32, device=q.device)
            ends //= self.compress_ratio
            torch.ops.trtllm.indexer_topk_prefill(
                logits, torch.zeros_like(ends), ends, buffer[rows], self.index_topk
            )
            start += tokens


class TopKIndexerBase(IndexerBase):
    """That from about rc27 on, which has a module of the package for its top-k."""

    def __init__(self, config, layer_idx, aux_stream, compress_ratio=1):
        super().__init__(config, layer_idx, aux_stream, compress_ratio)
        kind = "cute_dsl_radix" if self._use_cute_dsl_topk else "cuda_radix"
        self.top_k = sys.modules["tensorrt_llm._torch.modules.top_k"].TopK(
            self.index_topk,
            decode_implementation="cute_dsl_gvr" if self._enable_heuristic_topk else kind,
            compress_ratio=compress_ratio,
        )

    def decode_by_op(self, metadata, logits, lengths, indices, next_n):
        layer = metadata.kv_cache_manager.layer_offsets[self.layer_idx]
        self.top_k(
            logits,
            indices,
            is_prefill=False,
            sequence_lengths=lengths,
            scan_lengths=lengths // self.compress_ratio,
            next_n=next_n,
            max_seq_len=metadata.get_indexer_max_seq_len(),
            gvr_ext_kwargs={"gvr_prior_indices": metadata.heuristic_prev_topk[layer]},
        )
