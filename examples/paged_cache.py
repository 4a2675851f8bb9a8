"""One call of the op returns the positions that it selects and their slots in a paged cache.

Run it with `python examples/paged_cache.py`.
"""

import torch

from gvr_topk import TopkState, indexer_topk_decode, library_status

REQUESTS, LENGTH, PAGE, K, STEPS = 3, 16_384, 64, 1024, 4


def main() -> None:
    on_gpu = torch.cuda.is_available() and library_status().loaded
    device = torch.device("cuda" if on_gpu else "cpu")
    torch.manual_seed(0)
    pages = LENGTH // PAGE
    # The pages of all requests lie mixed in one pool.
    table = torch.randperm(REQUESTS * pages, device=device).view(REQUESTS, pages).to(torch.int32)
    lengths = torch.full((REQUESTS,), LENGTH, dtype=torch.int32, device=device)
    slots = torch.empty(REQUESTS, K, dtype=torch.int32, device=device)
    state = TopkState(REQUESTS, K, device, keep_indices=False)

    scores = torch.randn(REQUESTS, LENGTH, device=device)
    exact = 0
    for _ in range(STEPS):
        scores = 0.9**0.5 * scores + 0.1**0.5 * torch.randn_like(scores)
        # Without `slots`, cache slots take the place of positions in the result.
        positions = indexer_topk_decode(
            scores, lengths, K, state=state, page_table=table, page_size=PAGE, slots=slots
        )
        # This cache holds the score of each position, so it shows which scores the slots lead to.
        cache = torch.empty(REQUESTS * pages, PAGE, device=device)
        cache[table.long()] = scores.view(REQUESTS, pages, PAGE)
        expected = scores.topk(K).values
        assert torch.equal(cache.flatten()[slots.long()].sort(descending=True).values, expected)
        assert torch.equal(scores.gather(1, positions.long()).sort(descending=True).values, expected)
        exact += 1
    print(f"paged_cache: exact on {exact} of {STEPS} steps ({device.type})")


if __name__ == "__main__":
    main()
