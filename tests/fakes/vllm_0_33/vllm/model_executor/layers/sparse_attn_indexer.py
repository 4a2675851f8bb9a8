"""The score of position p for a query of value q is whatever `scores` of the test says."""

from collections.abc import Callable
from typing import Any

import torch

from vllm import _custom_ops as ops
from vllm.distributed import get_dcp_group, get_tensor_model_parallel_rank
from vllm.forward_context import get_forward_context
from vllm.model_executor.kernels.attention.dsa.candidate_blocks import (
    apply_candidate_mask as _apply_candidate_mask,
)
from vllm.model_executor.kernels.attention.dsa.candidate_blocks import (
    select_candidate_blocks as _select_candidate_blocks,
)
from vllm.model_executor.layers.indexer_topk import get_indexer_topk
from vllm.utils.deep_gemm import fp8_fp4_mqa_logits
from vllm.utils.torch_utils import LayerNameType, _encode_layer_name, _resolve_layer_name
from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerMetadata


def as_fp32_logits(logits: torch.Tensor, row_ends: torch.Tensor) -> torch.Tensor:
    return logits if logits.dtype == torch.float32 else logits.float()


def _merge_dcp_topk_global(
    logits: torch.Tensor,
    topk_indices: torch.Tensor,
    topk_tokens: int,
    dcp_rank: int,
    dcp_world_size: int,
    cp_interleave: int,
    row_starts: torch.Tensor | None = None,
) -> None:
    """The k best candidates of all ranks, of equal ones the first positions, in no order, -1 padded."""
    if dcp_world_size <= 1:
        return
    local = topk_indices.long()
    columns = local.clamp(min=0) + (0 if row_starts is None else row_starts[:, None])
    scores = torch.full(local.shape, -torch.inf)
    if logits.shape[1]:
        scores = logits.gather(1, columns.clamp(max=logits.shape[1] - 1))
    turns = torch.div(local, cp_interleave, rounding_mode="floor")
    places = (turns * dcp_world_size + dcp_rank) * cp_interleave + local % cp_interleave
    packed = torch.stack((scores, torch.where(local < 0, -1, places).float()), 2)
    scores, places = get_dcp_group().all_gather(packed, dim=1).unbind(2)
    order = places.argsort(dim=1, stable=True)
    ranked = scores.gather(1, order).argsort(dim=1, descending=True, stable=True)
    order = order.gather(1, ranked)
    absent = (places.gather(1, order) < 0).to(torch.uint8)
    order = order.gather(1, absent.argsort(dim=1, stable=True))[:, :topk_tokens]
    topk_indices.copy_(places.gather(1, order).int())


def sparse_attn_indexer(
    hidden_states: torch.Tensor,
    k_cache_prefix: LayerNameType,
    kv_cache: torch.Tensor,
    q_quant: torch.Tensor,
    q_scale: torch.Tensor | None,
    k: torch.Tensor | None,
    weights: torch.Tensor,
    quant_block_size: int,
    scale_fmt: str | None,
    topk_tokens: int,
    head_dim: int,
    max_model_len: int,
    total_seq_lens: int,
    topk_indices_buffer: torch.Tensor,
    skip_k_cache_insert: bool,
    use_pcp: bool,
    pcp_shard_decode_requests: bool,
    dense_mha_metadata_layer_name: LayerNameType,
    use_fp4_cache: bool = False,
    dcp_rank: int = 0,
    dcp_world_size: int = 1,
    cp_kv_cache_interleave_size: int = 1,
    skip_topk_buffer_clear: bool = False,
    candidate_blocks: torch.Tensor | None = None,
    candidate_block_size: int = 0,
    candidate_write: bool = False,
    topk_backend: str = "auto",
) -> torch.Tensor:
    # Here `kv_cache` holds the scores of all rows, decode rows first, as wide as the longest sequence can be.
    merged = topk_tokens, dcp_rank, dcp_world_size, cp_kv_cache_interleave_size
    attn_metadata = get_forward_context().attn_metadata
    k_cache_prefix = _resolve_layer_name(k_cache_prefix)
    metadata = attn_metadata[k_cache_prefix]
    assert isinstance(metadata, DeepseekV32IndexerMetadata)
    _resolve_layer_name(dense_mha_metadata_layer_name)
    topk_indices_buffer[: hidden_states.shape[0]] = -1
    if metadata.num_prefills > 0:
        for chunk in metadata.prefill.chunks:
            first, last = chunk.token_start, chunk.token_end
            if sizes := metadata.prefill.row_shard_sizes:  # what the ranks choose is not gathered
                rank = get_tensor_model_parallel_rank()
                begin = metadata.num_decode_tokens + sum(sizes[:rank])
                first, last = max(first, begin), min(last, begin + sizes[rank])
                if first >= last:
                    continue
            rows, own = slice(first, last), slice(first - chunk.token_start, last - chunk.token_start)
            starts, ends = chunk.cu_seqlen_ks[own], chunk.cu_seqlen_ke[own]
            row_ends = ends - starts
            q = torch.zeros((len(starts), chunk.total_seq_lens), device=kv_cache.device)
            for row, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
                q[row, start:end] = kv_cache[first + row, : max(end - start, 0)]
            logits = q
            if chunk.total_seq_lens > 0:
                kv = (q.new_empty(chunk.total_seq_lens, 1), q.new_empty(chunk.total_seq_lens))
                logits = as_fp32_logits(
                    fp8_fp4_mqa_logits((q, None), kv, weights[rows], starts, ends, chunk.max_seqlen_k),
                    row_ends,
                )
                if candidate_blocks is not None:
                    candidates = candidate_blocks[rows]
                    if candidate_write:
                        count = candidates.shape[1]
                        _select_candidate_blocks(
                            logits, None, row_ends, count, candidate_block_size, candidates
                        )
                    else:
                        _apply_candidate_mask(logits, None, row_ends, candidates, candidate_block_size)
                ops.top_k_per_row_prefill(
                    logits,
                    torch.zeros_like(row_ends),
                    row_ends,
                    topk_indices_buffer[rows, :topk_tokens],
                    logits.shape[0],
                    logits.stride(0),
                    logits.stride(1),
                    topk_tokens,
                )
            _merge_dcp_topk_global(logits, topk_indices_buffer[rows, :topk_tokens], *merged, row_starts=None)
    if metadata.num_decodes > 0:
        seq_lens = metadata.decode.seq_lens
        next_n = seq_lens.shape[1]
        rows = seq_lens.shape[0] * next_n
        logits = kv_cache[:rows, :max_model_len]
        if candidate_blocks is not None:
            visible = seq_lens.reshape(-1)
            repeat = next_n if visible.numel() != rows else 1
            visible, candidates = visible[:rows], candidate_blocks[:rows]
            if candidate_write:
                count = candidates.shape[1]
                _select_candidate_blocks(
                    logits, None, visible, count, candidate_block_size, candidates, repeat
                )
            else:
                _apply_candidate_mask(logits, None, visible, candidates, candidate_block_size, repeat)
        get_indexer_topk(topk_backend)(
            logits,
            seq_lens,
            next_n,
            topk_indices_buffer[:rows, :topk_tokens],
            topk_tokens,
            metadata.max_seq_len,
        )
        if metadata.decode.global_seq_lens is not None:
            _merge_dcp_topk_global(logits, topk_indices_buffer[:rows, :topk_tokens], *merged)
    return topk_indices_buffer


# The dispatcher keeps the function as it was registered: wrapping the module's attribute does not reach it.
_registered_op = sparse_attn_indexer


class SparseAttnIndexer(torch.nn.Module):
    """Models other than `vllm.models.deepseek_v32` come this way, through ``torch.ops.vllm``."""

    def __init__(self, k_cache, topk_tokens, max_model_len, topk_indices_buffer, topk_backend="auto"):
        super().__init__()
        self.candidate_blocks, self.candidate_write = None, False
        self.dcp_rank, self.dcp_world_size, self.cp_interleave = 0, 1, 1
        self.k_cache = k_cache
        self.topk_tokens = topk_tokens
        self.max_model_len = max_model_len
        self.topk_indices_buffer = topk_indices_buffer
        self.topk_backend = topk_backend

    def arguments(self, hidden_states: torch.Tensor, name: Callable[[str], LayerNameType]) -> tuple[Any, ...]:
        """Those of the function, in its order; `name` makes its names of layers."""
        return (
            hidden_states,
            name(self.k_cache.prefix),
            self.k_cache.kv_cache,
            hidden_states,
            None,
            None,
            hidden_states,
            128,
            "ue8m0",
            self.topk_tokens,
            128,
            self.max_model_len,
            self.max_model_len,
            self.topk_indices_buffer,
            True,
            False,
            False,
            name("model.layers.0.self_attn.attn"),
            False,
            self.dcp_rank,
            self.dcp_world_size,
            self.cp_interleave,
            False,
            self.candidate_blocks,
            8,
            self.candidate_write,
            self.topk_backend,
        )

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return _registered_op(*self.arguments(hidden_states, _encode_layer_name))
