"""Reinforcement learning with top-p: the trainer replays what the sampler kept, so equal logits mean ratio 1.

Run it with `python examples/replay_kept_tokens.py`.
"""

import torch
from torch import Tensor

from gvr_topk import library_status
from gvr_topk.sampling import sample

ROWS, VOCABULARY, TEMPERATURE, TOP_K = 32, 32_000, 0.7, 64


def replayed(logits: Tensor, kept: Tensor) -> Tensor:
    """Log-probabilities of the kept tokens among themselves, with a gradient; those of padding are -inf."""
    few = logits.gather(1, kept.clamp(min=0).long()).masked_fill(kept < 0, -torch.inf)
    exact, ids = torch.empty_like(few, dtype=torch.float32), torch.empty_like(kept)
    # These are the sampler's bits, of TOP_K columns in place of the vocabulary. The draw is not used.
    sample(few.detach(), temperature=TEMPERATURE, seeds=0, positions=0, kept=ids, kept_logprobs=exact)
    smooth = torch.log_softmax(few.float() / TEMPERATURE, dim=1)
    return exact + (smooth - smooth.detach()).masked_fill(kept < 0, 0)


def main() -> None:
    on_gpu = torch.cuda.is_available() and library_status().loaded
    device = torch.device("cuda" if on_gpu else "cpu")
    torch.manual_seed(0)
    logits = (2 * torch.randn(ROWS, VOCABULARY, device=device)).bfloat16()

    # Serving: 64 ids and log-probabilities of each token leave the engine, and nothing as wide as a row.
    kept = torch.empty(ROWS, TOP_K, dtype=torch.int32, device=device)
    recorded = torch.empty(ROWS, TOP_K, device=device)
    where = {"seeds": 7, "positions": torch.arange(ROWS, device=device)}
    record = {"kept": kept, "kept_logprobs": recorded, "temperature": TEMPERATURE}
    tokens = sample(logits, top_k=TOP_K, top_p=0.9, **where, **record)

    # Training: the same set of tokens, whatever the new weights would keep.
    logprobs = replayed(weights := logits.clone().requires_grad_(), kept)
    assert torch.equal(logprobs, recorded)
    ratio = (logprobs - recorded)[kept == tokens[:, None]].exp()
    ratio.sum().backward()
    assert bool((weights.grad.count_nonzero(1) <= (kept >= 0).sum(1)).all())
    exact = int((ratio == 1).sum())
    print(f"replay_kept_tokens: ratio 1 for {exact} of {ROWS} tokens ({device.type})")


if __name__ == "__main__":
    main()
