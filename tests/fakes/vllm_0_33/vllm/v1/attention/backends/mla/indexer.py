from dataclasses import dataclass

import torch

from vllm.v1.attention.backend import CommonAttentionMetadata


@dataclass
class DeepSeekV32IndexerDecodeMetadata:
    seq_lens: torch.Tensor
    decode_lens: torch.Tensor
    requires_padding: bool


@dataclass
class DeepseekV32IndexerMetadata:
    seq_lens: torch.Tensor
    max_seq_len: int
    num_decodes: int
    num_decode_tokens: int
    num_prefills: int
    num_prefill_tokens: int
    decode: DeepSeekV32IndexerDecodeMetadata | None = None


class DeepseekV32IndexerMetadataBuilder:
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.kv_cache_spec = kv_cache_spec
        self.layer_names = layer_names
        self.vllm_config = vllm_config
        self.device = device
        spec = vllm_config.speculative_config
        self.decode_threshold = 1 + (spec.num_speculative_tokens if spec else 0)
        self.use_flattening = getattr(vllm_config, "fake_flattening", False)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> DeepseekV32IndexerMetadata:
        common = common_attn_metadata
        lens = torch.diff(common.query_start_loc_cpu)
        decodes = int((lens <= self.decode_threshold).int().cumprod(0).sum())  # those that come first
        tokens = int(lens[:decodes].sum())
        decode = None
        if decodes:
            decode = self._decode(common.seq_lens[:decodes], lens[:decodes])
        return DeepseekV32IndexerMetadata(
            seq_lens=common.seq_lens,
            max_seq_len=common.max_seq_len,
            num_decodes=decodes,
            num_decode_tokens=tokens,
            num_prefills=common.num_reqs - decodes,
            num_prefill_tokens=common.num_actual_tokens - tokens,
            decode=decode,
        )

    def _decode(self, seq_lens: torch.Tensor, lens: torch.Tensor) -> DeepSeekV32IndexerDecodeMetadata:
        if self.use_flattening:
            rows = [
                int(keys) - int(count) + 1 + i
                for keys, count in zip(seq_lens, lens, strict=True)
                for i in range(int(count))
            ]
            ends = torch.tensor(rows, dtype=torch.int32)
            return DeepSeekV32IndexerDecodeMetadata(ends.unsqueeze(-1), torch.ones_like(ends), False)
        longest = int(lens.max())
        ends = seq_lens.unsqueeze(1)
        if longest > 1:
            drafts = torch.arange(longest, dtype=torch.int32, device=ends.device)
            ends = (ends - longest + 1 + drafts).clamp_(min=0)
        return DeepSeekV32IndexerDecodeMetadata(ends, lens, int(lens.min()) != longest)
