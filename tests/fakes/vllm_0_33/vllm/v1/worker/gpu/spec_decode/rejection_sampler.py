from collections.abc import Iterator

import numpy as np
import torch

from vllm.config.model import PROCESSED_LOGPROBS_MODES
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.input_batch import InputBatch, get_num_sampled_and_rejected
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm.v1.worker.gpu.sample.output import SamplerOutput, SamplingMaskTensors
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample

MAX_CHUNK_LOGITS = 1 << 20
"""In vLLM as many as 1 GiB of fp32 logits has."""


def _chunks(cu_num_logits: np.ndarray) -> Iterator[tuple[int, int]]:
    """Ranges of whole requests, with as many logits as fit, but at least one request."""
    start, count = 0, len(cu_num_logits) - 1
    while start < count:
        end = start + 1
        while end < count and cu_num_logits[end + 1] - cu_num_logits[start] <= MAX_CHUNK_LOGITS:
            end += 1
        yield start, end
        start = end


class RejectionSampler:
    """vLLM's takes the number of drafts and the method from its configuration."""

    def __init__(
        self,
        sampler: Sampler,
        num_speculative_steps: int = 3,
        method: str = "standard",
        enable_adaptive_verification: bool = False,
    ) -> None:
        self.sampler = sampler
        self.num_speculative_steps = num_speculative_steps
        self.enable_adaptive_verification = enable_adaptive_verification
        self.use_block_verification = method == "block"
        self.fly_window_size = 2 if method == "fly" else 0
        rates = torch.ones(num_speculative_steps)
        self.synthetic_conditional_rates = rates if method == "synthetic" else None
        self.accept = method != "standard"

    def _get_logprobs_tensors(
        self,
        sampled: torch.Tensor,
        num_sampled: torch.Tensor,
        logits: torch.Tensor,
        cu_num_logits: torch.Tensor,
        cu_num_logits_np: np.ndarray,
        max_num_logprobs: int,
    ) -> LogprobsTensors | None:
        if max_num_logprobs < 0:
            return None
        flat_sampled = torch.zeros(len(logits), dtype=sampled.dtype)
        for request, count in enumerate(num_sampled.tolist()):
            start = int(cu_num_logits[request])
            flat_sampled[start : start + count] = sampled[request, :count]
        return compute_topk_scores(
            logits,
            max_num_logprobs,
            flat_sampled,
            cu_num_logits.clone() if self.enable_adaptive_verification else cu_num_logits_np.tolist(),
            logits_mode=self.sampler.logprobs_mode in ("raw_logits", "processed_logits"),
        )

    def _verify(
        self,
        logits: torch.Tensor,
        draft_logits: torch.Tensor | None,
        draft_sampled: torch.Tensor,
        pos: torch.Tensor,
        cu_num_logits: torch.Tensor,
        idx_mapping: torch.Tensor,
        idx_mapping_np: np.ndarray,
        expanded_idx_mapping: torch.Tensor,
        expanded_local_pos: torch.Tensor,
        seq_lens_upper_bound_np: np.ndarray,
        verify_draft_sampled: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Another method than the standard one accepts all drafts here."""
        states = self.sampler.sampling_states
        processed = self.sampler.apply_sampling_params(logits, expanded_idx_mapping, idx_mapping_np)
        processed = states.apply_top_k_top_p(processed, expanded_idx_mapping, idx_mapping_np)
        sampled, num_sampled = rejection_sample(
            processed,
            verify_draft_sampled,
            cu_num_logits,
            pos,
            expanded_idx_mapping,
            states.temperature.gpu,
            states.seeds.gpu,
            self.num_speculative_steps,
            accept=self.accept,
            use_fp64=self.sampler.use_fp64_gumbel,
        )
        return processed, sampled, num_sampled

    def __call__(
        self,
        logits: torch.Tensor,
        input_batch: InputBatch,
        draft_logits: torch.Tensor | None = None,
        invalid_drafts: torch.Tensor | None = None,
    ) -> SamplerOutput:
        """VLLM joins the log-probabilities of several chunks; here these have none."""
        slots, local_pos = input_batch.expanded_idx_mapping, input_batch.expanded_local_pos
        pos, prefill_len = input_batch.positions[input_batch.logits_indices], self.sampler.prefill_len.gpu
        # Drafts of a request that is still at its prompt are placeholders.
        prompt = (local_pos > 0) & (pos - local_pos < prefill_len[slots])
        drafts = input_batch.input_ids[input_batch.logits_indices].masked_fill(prompt, -1)
        checked = drafts if invalid_drafts is None else drafts.masked_fill(invalid_drafts, -1)
        starts_np, requests_np = input_batch.cu_num_logits_np, input_batch.idx_mapping_np
        num_logprobs = int(self.sampler.sampling_states.num_logprobs[requests_np].max())
        # Behind adaptive verification the host has the sums of before, and there is one chunk.
        whole = len(logits) <= MAX_CHUNK_LOGITS
        parts = []
        for start, end in [(0, len(requests_np))] if whole else _chunks(starts_np):
            rows = slice(int(starts_np[start]), int(starts_np[end]))
            starts = input_batch.cu_num_logits[start : end + 1] - rows.start
            processed, sampled, num_sampled = self._verify(
                logits[rows],
                draft_logits,
                drafts[rows],
                pos[rows],
                starts,
                input_batch.idx_mapping[start:end],
                requests_np[start:end],
                slots[rows],
                local_pos[rows],
                input_batch.seq_lens_cpu_upper_bound.numpy()[start:end],
                checked[rows],
            )
            scores = None
            if whole:
                used = processed if self.sampler.logprobs_mode in PROCESSED_LOGPROBS_MODES else logits
                scores = self._get_logprobs_tensors(
                    sampled, num_sampled, used, starts, starts_np, num_logprobs
                )
            masks = None
            if self.sampler.return_sampling_mask:
                max_num_kept = int(np.max(self.sampler.sampling_states.top_k.np[requests_np]))
                masks = SamplingMaskTensors.from_logits(
                    processed, starts, num_sampled, max_num_kept, self.num_speculative_steps + 1
                )
            parts.append((sampled, num_sampled, scores, masks))
        sampled, num_sampled = (torch.cat([part[at] for part in parts]) for at in (0, 1))
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            num_sampled, input_batch.seq_lens, input_batch.cu_num_logits, input_batch.idx_mapping, prefill_len
        )
        masks = SamplingMaskTensors.cat([part[3] for part in parts]) if parts[0][3] else None
        return SamplerOutput(sampled, parts[0][2], masks, num_sampled, num_rejected)
