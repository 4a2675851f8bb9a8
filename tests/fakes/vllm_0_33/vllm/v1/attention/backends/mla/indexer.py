from dataclasses import dataclass

import torch

from vllm.v1.attention.backend import AttentionMetadataBuilder, CommonAttentionMetadata


@dataclass
class DeepSeekV32IndexerDecodeMetadata:
    seq_lens: torch.Tensor


@dataclass
class DeepseekV32IndexerPrefillChunkMetadata:
    cu_seqlen_ks: torch.Tensor
    cu_seqlen_ke: torch.Tensor
    token_start: int
    token_end: int
    num_reqs: int
    max_seqlen_k: int = 0


@dataclass
class DeepseekV32IndexerPrefillMetadata:
    chunks: list[DeepseekV32IndexerPrefillChunkMetadata]


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

    def _prefill(self, common, lens: torch.Tensor, decodes: int) -> DeepseekV32IndexerPrefillMetadata:
        """Chunks of two requests, whose keys lie one after the other; a row sees the keys up to its own."""
        starts, keys = common.query_start_loc_cpu.tolist(), common.seq_lens.tolist()
        chunks = []
        for first in range(decodes, common.num_reqs, 2):
            last = min(first + 2, common.num_reqs)
            begins, ends = [], []
            for request in range(first, last):
                begin, count = sum(keys[first:request]), int(lens[request])
                begins += [begin] * count
                ends += [begin + max(keys[request] - count + row + 1, 0) for row in range(count)]
            bounds = [torch.tensor(b, dtype=torch.int32, device=self.device) for b in (begins, ends)]
            longest = max(keys[first:last])
            chunks.append(
                DeepseekV32IndexerPrefillChunkMetadata(
                    *bounds, starts[first], starts[last], last - first, longest
                )
            )
        return DeepseekV32IndexerPrefillMetadata(chunks)

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
