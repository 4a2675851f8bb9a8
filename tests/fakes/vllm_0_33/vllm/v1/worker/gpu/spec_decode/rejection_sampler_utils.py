"""vLLM's kernels as loops; the noise of acceptance is not that of draws, here a hash with its own domain."""

import torch

from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample, murmur3_hash32

DOMAIN = 77


def _uniform(seed: torch.Tensor, pos: torch.Tensor) -> float:
    return (int(murmur3_hash32(seed, pos, torch.zeros_like(seed), DOMAIN)) + 0.5) / 2**32


def rejection_sample(
    logits: torch.Tensor,
    draft_sampled: torch.Tensor,
    cu_num_logits: torch.Tensor,
    pos: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    num_speculative_steps: int,
    accept: bool = False,
    use_fp64: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What stands behind the tokens of a request is garbage; with `accept` all drafts but -1 are accepted."""
    requests = len(cu_num_logits) - 1
    sampled = torch.full((requests, num_speculative_steps + 1), 1 << 40, device=logits.device)
    num_sampled = torch.ones(requests, dtype=torch.int32, device=logits.device)
    starts = cu_num_logits.tolist()
    for request in range(requests):
        for column, row in enumerate(range(starts[request], starts[request + 1])):
            slot, residual = expanded_idx_mapping[row], logits[row].float()
            last = row + 1 == starts[request + 1]
            draft = -1 if last else int(draft_sampled[row + 1])
            if draft >= 0:
                share = residual.softmax(0)[draft] if temperature[slot] else residual.argmax() == draft
                if accept or _uniform(seeds[slot], pos[row]) < share:
                    sampled[request, column] = draft
                    num_sampled[request] += 1
                    continue
                residual = residual.clone()
                residual[draft] = -torch.inf
            rows = slice(row, row + 1)
            sampled[request, column] = gumbel_sample(
                residual[None], expanded_idx_mapping[rows], temperature, seeds, pos[rows], use_fp64
            )
            break
    return sampled, num_sampled
