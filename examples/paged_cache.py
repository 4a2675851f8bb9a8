"""The op returns slots of a paged cache, while `prior` keeps positions in the sequence.

Run it with `python examples/paged_cache.py`.
"""

import torch

from gvr_topk import indexer_topk_decode, library_status, new_guess_state

REQUESTS, LENGTH, PAGE, K, STEPS = 3, 16_384, 64, 1024, 4


def main() -> None:
    on_gpu = torch.cuda.is_available() and library_status().loaded
    device = torch.device("cuda" if on_gpu else "cpu")
    torch.manual_seed(0)
    pages = LENGTH // PAGE
    # The pages of all requests lie mixed in one pool.
    table = torch.randperm(REQUESTS * pages, device=device).view(REQUESTS, pages).to(torch.int32)
    lengths = torch.full((REQUESTS,), LENGTH, dtype=torch.int32, device=device)
    prior = torch.full((REQUESTS, K), -1, dtype=torch.int32, device=device)
    guess_state = new_guess_state(REQUESTS, device)

    scores = torch.randn(REQUESTS, LENGTH, device=device)
    exact = 0
    for _ in range(STEPS):
        scores = 0.9**0.5 * scores + 0.1**0.5 * torch.randn_like(scores)
        slots = indexer_topk_decode(
            scores, lengths, K, prior=prior, guess_state=guess_state, page_table=table, page_size=PAGE
        )
        # A cache that holds the score of each position tells what the slots lead to.
        cache = torch.empty(REQUESTS * pages, PAGE, device=device)
        cache[table.long()] = scores.view(REQUESTS, pages, PAGE)
        expected = scores.topk(K).values
        assert torch.equal(cache.flatten()[slots.long()].sort(descending=True).values, expected)
        assert torch.equal(scores.gather(1, prior.long()).sort(descending=True).values, expected)
        exact += 1
    print(f"paged_cache: exact on {exact} of {STEPS} steps ({device.type})")


if __name__ == "__main__":
    main()
