"""The sampler: probabilities in place of the logits, a draw from them, log-probabilities of the tokens."""

from collections.abc import Callable
from typing import Optional

import torch
from murmur3 import LOW, murmur3_hash32
from sglang_base import CALLS
from torch import nn

from sglang.srt.runtime_context import get_exec, get_server_args
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

_CUSTOM_SAMPLER_FACTORIES: dict[str, Callable[[], "Sampler"]] = {}
SANITIZE_NAN_LOGITS = False
"""An environment variable of SGLang's, off as there."""


class Sampler(nn.Module):
    def __init__(self):
        super().__init__()
        self.rl_on_policy_target = get_exec().deterministic.rl_on_policy_target
        self.synced = []

    def _preprocess_logits(self, logits: torch.Tensor, sampling_info: SamplingBatchInfo) -> torch.Tensor:
        for process in sampling_info.processors:
            process(logits)
        if SANITIZE_NAN_LOGITS:
            torch.nan_to_num_(logits, nan=-1e30, posinf=1e30, neginf=-1e30)
        return logits

    def forward(
        self,
        logits_output,
        sampling_info: SamplingBatchInfo,
        return_logprob: bool,
        top_logprobs_nums: list[int],
        token_ids_logprobs: list[list[int]],
        positions: torch.Tensor,
        *,
        logprob_logits: Optional[torch.Tensor] = None,
    ):
        logits = self._preprocess_logits(logits_output.next_token_logits, sampling_info)
        mask = None
        if sampling_info.is_all_greedy:
            CALLS["argmax"] += 1
            tokens = logits.argmax(-1)
            logprobs = logits.log_softmax(-1)
        else:
            simple = not (
                sampling_info.need_top_p_sampling
                or sampling_info.need_top_k_sampling
                or sampling_info.need_min_p_sampling
            )
            logits.div_(sampling_info.temperatures)
            logits[:] = logits.softmax(-1)
            tokens, mask = self._sample_from_probs(logits, sampling_info, positions, simple)
            logprobs = logits.log()
        if return_logprob:
            rows = torch.arange(len(tokens))
            logits_output.next_token_logprobs = logprobs[rows, tokens]
            logits_output.next_token_top_logprobs_val = logprobs.topk(max(top_logprobs_nums)).values
        self._sync_token_ids_across_tp(tokens, sampling_info)
        if sampling_info.sampling_mask_batch_indices is not None:
            logits_output.sampling_mask_output = tokens[:, None] if mask is None else mask
        return tokens

    def _sample_from_probs(
        self,
        probs: torch.Tensor,
        sampling_info: SamplingBatchInfo,
        positions: torch.Tensor,
        simple_sampling_case: bool,
    ):
        CALLS["draw"] += 1
        info, backend = sampling_info, get_exec().kernel.sampling_backend
        seeds = info.sampling_seed
        kept, ids = probs.sort(dim=-1, descending=True)
        if simple_sampling_case:
            kept, ids = probs.clone(), None
        else:
            assert backend in ("pytorch", "flashinfer"), f"Invalid sampling backend: {backend}"
            assert not info.need_min_p_sampling, "Here no call with min-p is SGLang's"
            assert seeds is None or backend == "pytorch", (
                "Sampling seed is not supported for flashinfer backend"
            )
            sums = kept.cumsum(-1)  # both filters look at the whole row
            kept[torch.arange(kept.shape[1]) >= info.top_ks[:, None]] = 0
            kept[:, 1:][sums[:, :-1] > info.top_ps[:, None]] = 0
        if seeds is None:
            drawn = torch.multinomial(kept, num_samples=1)
        else:
            drawn = multinomial_with_seed(kept.double().log(), seeds, positions)
        tokens = (drawn if ids is None else ids.gather(1, drawn)).view(-1).to(torch.int32)
        return tokens, (kept > 0 if info.sampling_mask_batch_indices is not None else None)

    def _sync_token_ids_across_tp(self, batch_next_token_ids: torch.Tensor, sampling_info: SamplingBatchInfo):
        if sampling_info.grammars:
            self.synced.append(batch_next_token_ids)


def register_sampler_backend(backend: str, factory: Callable[[], "Sampler"]) -> None:
    from sglang.srt.server_args import SAMPLING_BACKEND_CHOICES

    SAMPLING_BACKEND_CHOICES.add(backend)
    _CUSTOM_SAMPLER_FACTORIES[backend] = factory


def create_sampler(backend: Optional[str] = None) -> "Sampler":
    backend = backend or (get_exec().kernel.sampling_backend if get_server_args() else None)
    if backend in _CUSTOM_SAMPLER_FACTORIES:
        return _CUSTOM_SAMPLER_FACTORIES[backend]()
    return Sampler()


def multinomial_with_seed(
    logprobs: torch.Tensor, seed: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Gumbel-max in fp64; a column's noise rises with its hash."""
    hashes = murmur_hash32(seed, positions, torch.arange(logprobs.shape[1]))
    uniform = hashes.double() / LOW
    exponential = -uniform.log().clamp(torch.finfo(torch.float64).min, -(2.0**-32))
    return (logprobs.double() - exponential.log()).argmax(dim=1, keepdim=True)


def murmur_hash32(seed, positions, col_indices):
    return murmur3_hash32(seed[:, None], positions[:, None], col_indices[None])
