from collections.abc import Sequence

import numpy as np
import torch

from vllm.config.model import PROCESSED_LOGPROBS_MODES
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p, flashinfer_sample
from vllm.v1.worker.gpu.buffer_utils import UvaBackedTensor
from vllm.v1.worker.gpu.input_batch import InputBatch, get_num_sampled_and_rejected
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.sample.logits_processors import (
    BadWordsState,
    LogitBiasState,
    LogitsProcessor,
    PenaltiesState,
    ThinkingBudgetState,
)
from vllm.v1.worker.gpu.sample.logprob import LogprobTokenIdsState, compute_topk_scores
from vllm.v1.worker.gpu.sample.output import SamplerOutput, SamplingMaskTensors
from vllm.v1.worker.gpu.sample.states import SamplingStates


class Sampler:
    """vLLM's takes its configuration in place of some of these arguments."""

    def __init__(
        self,
        max_num_reqs: int = 8,
        vocab_size: int = 300,
        logprobs_mode: str = "raw_logprobs",
        use_fp64_gumbel: bool = False,
        return_sampling_mask: bool = False,
        custom_logits_processors: Sequence[LogitsProcessor] = (),
        thinking: bool = False,
        use_flashinfer: bool = False,
        token_ids: list[list[int]] | None = None,
    ) -> None:
        self.logprobs_mode = logprobs_mode
        self.use_fp64_gumbel = use_fp64_gumbel
        self.sampling_states = SamplingStates(max_num_reqs, vocab_size)
        self.logits_processors: list[LogitsProcessor] = [
            LogitBiasState(max_num_reqs),
            PenaltiesState(max_num_reqs),
            BadWordsState(max_num_reqs),
            *custom_logits_processors,
        ]
        self.logprob_token_ids_state = LogprobTokenIdsState(token_ids or [])
        self.thinking_budget_state = ThinkingBudgetState(max_num_reqs, thinking)
        self.needs_logits_processing = np.zeros(max_num_reqs, dtype=bool)
        self.prefill_len = UvaBackedTensor(max_num_reqs, dtype=torch.int32)  # in vLLM in its `req_states`
        self.return_sampling_mask = return_sampling_mask
        self.use_flashinfer = use_flashinfer and not return_sampling_mask
        self.use_xpu_sampler = False

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> None:
        states = (self.sampling_states, self.thinking_budget_state, *self.logits_processors)
        needs = [state.add_request(req_idx, sampling_params) for state in states]
        self.needs_logits_processing[req_idx] = any(needs)

    def apply_staged_writes(self) -> None:
        self.sampling_states.apply_staged_writes()

    def __call__(self, logits: torch.Tensor, input_batch: InputBatch) -> SamplerOutput:
        requests = input_batch.idx_mapping_np
        num_logprobs = int(self.sampling_states.num_logprobs[requests].max())
        sampled, processed_logits = self.sample(
            logits,
            input_batch.expanded_idx_mapping,
            input_batch.idx_mapping,
            requests,
            input_batch.positions[input_batch.logits_indices],
            input_batch.input_ids[input_batch.logits_indices],
            input_batch.expanded_local_pos,
            input_batch.seq_lens_cpu_upper_bound.numpy(),
            return_logprobs=num_logprobs >= 0,
        )
        scores = None
        if num_logprobs >= 0:
            processed = self.logprobs_mode in PROCESSED_LOGPROBS_MODES
            scores = self.score(processed_logits if processed else logits, num_logprobs, sampled)
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            input_batch.seq_lens.new_ones(len(requests)),
            input_batch.seq_lens,
            input_batch.cu_num_logits,
            input_batch.idx_mapping,
            self.prefill_len.gpu,
        )
        masks = None
        if self.return_sampling_mask:
            max_num_kept = int(np.max(self.sampling_states.top_k.np[requests]))
            masks = SamplingMaskTensors.from_logits(
                processed_logits, input_batch.cu_num_logits, num_sampled, max_num_kept
            )
        return SamplerOutput(sampled.view(-1, 1), scores, masks, num_sampled, num_rejected)

    def score(self, logits: torch.Tensor, num_logprobs: int, sampled: torch.Tensor) -> LogprobsTensors:
        """The part of a step that computes log-probabilities; in vLLM it is no method."""
        token_ids = self.logprob_token_ids_state.token_ids
        return compute_topk_scores(
            logits,
            num_logprobs,
            sampled,
            None,
            logprob_token_ids_state=self.logprob_token_ids_state,
            expanded_idx_mapping=torch.arange(len(logits)),
            max_per_req_token_ids=max(map(len, token_ids), default=0),
            logits_mode=self.logprobs_mode in ("raw_logits", "processed_logits"),
        )

    def apply_sampling_params(
        self, logits: torch.Tensor, expanded_idx_mapping: torch.Tensor, idx_mapping_np: np.ndarray
    ) -> torch.Tensor:
        """All but top-k and top-p, in a copy; vLLM's takes the other arguments of `sample`, too."""
        if not self.needs_logits_processing[idx_mapping_np].any():
            return logits
        logits = logits.to(torch.float32, copy=True)
        for processor in (*self.logits_processors, self.thinking_budget_state):
            logits = processor.apply(logits, expanded_idx_mapping)
        self.sampling_states.apply_temperature_and_min_p(logits, expanded_idx_mapping)
        return logits

    def sample(
        self,
        logits: torch.Tensor,
        expanded_idx_mapping: torch.Tensor,
        idx_mapping: torch.Tensor,
        idx_mapping_np: np.ndarray,
        pos: torch.Tensor,
        input_ids: torch.Tensor,
        expanded_local_pos: torch.Tensor,
        seq_lens_upper_bound_np: np.ndarray,
        return_logprobs: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        states = self.sampling_states
        processed = self.apply_sampling_params(logits, expanded_idx_mapping, idx_mapping_np)
        top_k, top_p, alone = states.get_top_k_top_p(expanded_idx_mapping, idx_mapping_np)
        fused = self.use_flashinfer and not (
            (top_k is None and top_p is None)
            or (return_logprobs and self.logprobs_mode in PROCESSED_LOGPROBS_MODES)
            or (states.temperature.np[idx_mapping_np] == 0).any()
            or states.seeds_set[idx_mapping_np].any()
        )
        return self._sample_random(
            processed, expanded_idx_mapping, idx_mapping_np, pos, top_k, top_p, alone, fused
        )

    def _sample_random(
        self,
        processed_logits: torch.Tensor,
        expanded_idx_mapping: torch.Tensor,
        idx_mapping_np: np.ndarray,
        pos: torch.Tensor,
        top_k: torch.Tensor | None,
        top_p: torch.Tensor | None,
        has_topp_only_rows: bool,
        use_fused_sampler: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if use_fused_sampler:
            return flashinfer_sample(processed_logits, top_k, top_p).to(torch.int64), processed_logits
        processed_logits = apply_top_k_top_p(processed_logits, top_k, top_p, has_topp_only_rows)
        states = self.sampling_states
        sampled = gumbel_sample(
            processed_logits,
            expanded_idx_mapping,
            states.temperature.gpu,
            states.seeds.gpu,
            pos,
            use_fp64=self.use_fp64_gumbel,
        )
        return sampled, processed_logits
