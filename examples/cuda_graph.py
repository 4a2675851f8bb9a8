"""One captured CUDA graph serves all decode steps, because the op reads lengths and state on the device.

Run it with `python examples/cuda_graph.py`.
"""

import torch

from gvr_topk import TopkState, indexer_topk_decode, library_status

ROWS, WIDTH, K, STEPS = 4, 131_072, 2048, 8


def main() -> None:
    if not (torch.cuda.is_available() and library_status().loaded):
        print("cuda_graph: no GPU with the CUDA library, so nothing is captured")
        return
    torch.manual_seed(0)
    # A graph keeps addresses, so every tensor is allocated once and written in place.
    scores = torch.randn(ROWS, WIDTH, device="cuda")
    lengths = torch.full((ROWS,), WIDTH // 2, dtype=torch.int32, device="cuda")
    out = torch.empty(ROWS, K, dtype=torch.int32, device="cuda")
    state = TopkState(ROWS, K, "cuda", keep_indices=False)

    # The first call loads the kernels, which a capture does not allow.
    indexer_topk_decode(scores, lengths, K, out=out, state=state)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        indexer_topk_decode(scores, lengths, K, out=out, state=state)

    exact = 0
    for _ in range(STEPS):
        scores.mul_(0.9**0.5).add_(torch.randn_like(scores), alpha=0.1**0.5)
        lengths.add_(1)
        graph.replay()

        visible = scores[:, : int(lengths[0])]
        chosen = scores.gather(1, out.long()).sort(descending=True).values
        assert torch.equal(chosen, visible.topk(K).values)
        exact += 1
    print(f"cuda_graph: exact on {exact} of {STEPS} replays")


if __name__ == "__main__":
    main()
