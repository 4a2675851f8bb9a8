import itertools
from dataclasses import dataclass

import torch

from vllm.v1.attention.backend import AttentionMetadataBuilder, CommonAttentionMetadata


@dataclass
class DeepSeekV32IndexerDecodeMetadata:
    seq_lens: torch.Tensor
    global_seq_lens: torch.Tensor | None = None


@dataclass
class DeepseekV32IndexerPrefillChunkMetadata:
    cu_seqlen_ks: torch.Tensor
    cu_seqlen_ke: torch.Tensor
    token_start: int
    token_end: int
    num_reqs: int
    max_seqlen_k: int
    total_seq_lens: int


@dataclass
class DeepseekV32IndexerPrefillMetadata:
    chunks: list[DeepseekV32IndexerPrefillChunkMetadata]
    row_shard_sizes: list[int] | None = None


@dataclass
class DeepseekV32IndexerMetadata:
    seq_lens: torch.Tensor
    max_seq_len: int
    slot_mapping: torch.Tensor
    num_decodes: int
    num_decode_tokens: int
    num_prefills: int
    num_prefill_tokens: int
    decode: DeepSeekV32IndexerDecodeMetadata | None = None
    prefill: DeepseekV32IndexerPrefillMetadata | None = None
    positions: torch.Tensor | None = None
    block_table: torch.Tensor | None = None


class DeepseekV32IndexerMetadataBuilder(AttentionMetadataBuilder):
    def __init__(self, *args, block_table_width: int, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        vllm_config = self.vllm_config
        spec = vllm_config.speculative_config
        self.decode_threshold = 1 + (spec.num_speculative_tokens if spec else 0)
        self.use_flattening = getattr(vllm_config, "fake_flattening", False)
        self.max_logits_bytes = getattr(vllm_config, "fake_logits_bytes", 1 << 29)
        self.part = getattr(vllm_config, "fake_part", (0, 1, 1))
        self.dcp_rank, world, self.cp_kv_cache_interleave_size = self.part
        self.dcp_world_size = max(world, getattr(vllm_config, "fake_dcp", 1))
        self.use_pcp = getattr(vllm_config, "fake_pcp", False)
        self.tp_size = getattr(vllm_config, "fake_tp", 1)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> DeepseekV32IndexerMetadata:
        common = common_attn_metadata
        lens = torch.diff(common.query_start_loc_cpu)
        short = lens <= self.decode_threshold
        if not self.use_flattening:  # all have as many rows as the first, or none, which is padding
            short &= (lens == lens[:1]) | (lens == 0)
        decodes = int(short.int().cumprod(0).sum())  # those that come first
        tokens = int(lens[:decodes].sum())
        decode = None
        if decodes:
            decode = self._decode(common.seq_lens[:decodes], lens[:decodes])
            if self.part[1] > 1:
                decode.global_seq_lens = common.seq_lens[:decodes]
                decode.seq_lens = self._local(decode.seq_lens)
        return DeepseekV32IndexerMetadata(
            seq_lens=common.seq_lens,
            max_seq_len=common.max_seq_len,
            slot_mapping=common.slot_mapping,
            num_decodes=decodes,
            num_decode_tokens=tokens,
            num_prefills=common.num_reqs - decodes,
            num_prefill_tokens=common.num_actual_tokens - tokens,
            decode=decode,
            prefill=self._prefill(common, lens, decodes) if decodes < common.num_reqs else None,
            block_table=common.block_table_tensor,
        )

    @staticmethod
    def _split_indexer_prefill_chunks(
        compressed_seq_lens_cpu: torch.Tensor,
        prefill_query_lens_cpu: torch.Tensor,
        workspace_size: int,
        max_logits_bytes: int,
        request_offset: int = 0,
    ) -> list[tuple[slice, slice]]:
        """Requests whose scores fit the budget together, at most two; of one that does not fit, some rows."""
        keys, queries = compressed_seq_lens_cpu.tolist(), prefill_query_lens_cpu.tolist()
        budget = max_logits_bytes // 4
        chunks, first = [], 0
        while first < len(keys):
            both = slice(first, first + 2)
            fits = first + 2 <= len(keys) and sum(queries[both]) * sum(keys[both]) <= budget
            last = first + 1 + fits
            rows = sum(queries[first:last])
            step = rows if fits else max(budget // max(keys[first], 1), 1)
            requests = slice(first + request_offset, last + request_offset)
            chunks += [(requests, slice(at, min(at + step, rows))) for at in range(0, rows, step)]
            first = last
        return chunks

    def _local(self, keys: torch.Tensor) -> torch.Tensor:
        """Keys that this rank has of as many."""
        rank, world, size = self.part
        of_turn = keys % (world * size) - rank * size
        return (keys // (world * size) * size + of_turn.clamp(0, size)).to(torch.int32)

    def _prefill(self, common, lens: torch.Tensor, decodes: int) -> DeepseekV32IndexerPrefillMetadata:
        """The keys of a chunk's requests lie one after the other; a row sees the keys up to its own."""
        starts, keys = common.query_start_loc_cpu.tolist(), common.seq_lens.tolist()
        split = self._split_indexer_prefill_chunks(
            common.seq_lens[decodes:].cpu(),
            lens[decodes:],
            1 << 20,
            self.max_logits_bytes,
            request_offset=decodes,
        )
        chunks = []
        for requests, rows in split:
            begins, ends = [], []
            parts = self._local(torch.tensor(keys)).tolist()
            for request in range(requests.start, requests.stop):
                begin, count = sum(parts[requests.start : request]), int(lens[request])
                begins += [begin] * count
                seen = torch.tensor([max(keys[request] - count + row + 1, 0) for row in range(count)])
                ends += (begin + self._local(seen)).tolist()
            bounds = [torch.tensor(b[rows], dtype=torch.int32, device=self.device) for b in (begins, ends)]
            chunks.append(
                DeepseekV32IndexerPrefillChunkMetadata(
                    *bounds,
                    token_start=starts[requests.start] + rows.start,
                    token_end=starts[requests.start] + rows.stop,
                    num_reqs=requests.stop - requests.start,
                    max_seqlen_k=max(parts[requests]),
                    total_seq_lens=sum(parts[requests]),
                )
            )
        # The rows of ranks differ by one at most; in vLLM their keys are alike.
        bounds = [int(lens[decodes:].sum()) * rank // self.tp_size for rank in range(self.tp_size + 1)]
        sizes = [end - begin for begin, end in itertools.pairwise(bounds)]
        return DeepseekV32IndexerPrefillMetadata(chunks, sizes if self.tp_size > 1 else None)

    def _decode(self, seq_lens: torch.Tensor, lens: torch.Tensor) -> DeepSeekV32IndexerDecodeMetadata:
        if self.use_flattening:
            rows = [
                int(keys) - int(count) + 1 + i
                for keys, count in zip(seq_lens, lens, strict=True)
                for i in range(int(count))
            ]
            ends = torch.tensor(rows, dtype=torch.int32)
            return DeepSeekV32IndexerDecodeMetadata(ends.unsqueeze(-1))
        longest = int(lens.max())
        ends = seq_lens.unsqueeze(1)
        if longest > 1:
            drafts = torch.arange(longest, dtype=torch.int32, device=ends.device)
            ends = (ends - longest + 1 + drafts).clamp_(min=0)
        return DeepSeekV32IndexerDecodeMetadata(ends)
