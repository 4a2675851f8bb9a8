"""The op inside a function that torch.compile takes as one graph; the scores are computed in the same graph.

Run it with `python examples/torch_compile.py`.
"""

import torch
from torch import Tensor

from gvr_topk import TopkState, indexer_topk_decode, library_status

ROWS, LENGTH, HEADS, DIM, K, STEPS = 2, 16_384, 4, 32, 1024, 4


def decode_step(query: Tensor, keys: Tensor, lengths: Tensor, state: TopkState) -> tuple[Tensor, Tensor]:
    scores = torch.relu(query @ keys.T).sum(dim=1)  # [ROWS, HEADS, LENGTH] summed to [ROWS, LENGTH]
    return scores, indexer_topk_decode(scores, lengths, K, state=state)


def main() -> None:
    on_gpu = torch.cuda.is_available() and library_status().loaded
    device = torch.device("cuda" if on_gpu else "cpu")
    torch.manual_seed(0)
    keys = torch.randn(LENGTH, DIM, device=device)
    query = torch.randn(ROWS, HEADS, DIM, device=device)
    lengths = torch.full((ROWS,), LENGTH, dtype=torch.int32, device=device)
    state = TopkState(ROWS, K, device, keep_indices=False)

    # On the CPU, inductor would need a C++ compiler; aot_eager traces the same graph without one.
    backend = "inductor" if on_gpu else "aot_eager"
    compiled = torch.compile(decode_step, fullgraph=True, backend=backend)
    exact = 0
    for _ in range(STEPS):
        query = 0.95 * query + 0.05 * torch.randn_like(query)
        scores, out = compiled(query, keys, lengths, state)

        chosen = scores.gather(1, out.long()).sort(descending=True).values
        assert torch.equal(chosen, scores.topk(K).values)
        exact += 1
    print(f"torch_compile: exact on {exact} of {STEPS} steps ({device.type})")


if __name__ == "__main__":
    main()
