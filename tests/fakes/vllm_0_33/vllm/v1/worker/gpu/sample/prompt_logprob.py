from collections.abc import Callable

import torch

from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores

CHUNK_SIZE = 1024


def compute_prompt_logprobs_with_chunking(
    prompt_token_ids: torch.Tensor,
    prompt_hidden_states: torch.Tensor,
    logits_fn: Callable[[torch.Tensor], torch.Tensor],
    num_prompt_logprobs: int,
    logprobs_mode: str = "raw_logprobs",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    results = []
    chunks = prompt_token_ids.to(torch.int64).split(CHUNK_SIZE)
    for tokens, states in zip(chunks, prompt_hidden_states.split(CHUNK_SIZE), strict=True):
        logits = logits_fn(states)
        n = logits.shape[-1] if num_prompt_logprobs == -1 else num_prompt_logprobs
        logits_mode = logprobs_mode in ("raw_logits", "processed_logits")
        results.append(compute_topk_scores(logits, n, tokens, logits_mode=logits_mode))
    ids, scores, ranks, *_ = (list(parts) for parts in zip(*results, strict=True))
    return torch.cat(ids), torch.cat(scores), torch.cat(ranks)
