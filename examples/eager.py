"""Decode steps called one by one: each step leaves its state to the next.

Run it with `python examples/eager.py`.
"""

import torch

from gvr_topk import TopkState, indexer_topk_decode, library_status

ROWS, LENGTH, K, STEPS = 4, 32_768, 2048, 8


def main() -> None:
    on_gpu = torch.cuda.is_available() and library_status().loaded
    device = torch.device("cuda" if on_gpu else "cpu")
    torch.manual_seed(0)
    out = torch.empty(ROWS, K, dtype=torch.int32, device=device)
    # Each step leaves 16 bytes a row here, from which the next step predicts. The op rewrites them in place.
    state = TopkState(ROWS, K, device, keep_indices=False)

    scores = torch.randn(ROWS, LENGTH, device=device)
    exact = 0
    for step in range(STEPS):
        # Consecutive steps choose nearly the same positions: 90 % of the variance survives a step.
        scores = 0.9**0.5 * scores + 0.1**0.5 * torch.randn_like(scores)
        visible = LENGTH - STEPS + 1 + step
        lengths = torch.full((ROWS,), visible, dtype=torch.int32, device=device)
        indexer_topk_decode(scores, lengths, K, out=out, state=state)

        chosen = scores.gather(1, out.long()).sort(descending=True).values
        assert torch.equal(chosen, scores[:, :visible].topk(K).values)
        exact += 1
    print(f"eager: exact on {exact} of {STEPS} steps ({device.type})")


if __name__ == "__main__":
    main()
