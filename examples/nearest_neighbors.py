"""Nearest neighbors by dot product: for each query the vectors of the largest products, the nearest first.

Run it with `python examples/nearest_neighbors.py`.
"""

import torch

from gvr_topk import library_status, topk

QUERIES, VECTORS, DIM, K = 16, 50_000, 64, 10


def main() -> None:
    on_gpu = torch.cuda.is_available() and library_status().loaded
    device = torch.device("cuda" if on_gpu else "cpu")
    torch.manual_seed(0)
    vectors = torch.randn(VECTORS, DIM, device=device)
    queries = torch.randn(QUERIES, DIM, device=device)
    products = (queries @ vectors.T).repeat(1, 2)  # as if each vector were there twice, so all are tied

    values, neighbors = topk(products, K)
    assert torch.equal(values, torch.topk(products, K).values)
    # Of two equal vectors the one with the smaller index stands first; torch.topk does not say which does.
    first, second = neighbors[:, ::2], neighbors[:, 1::2]
    exact = int((second == first + VECTORS).all(dim=1).sum())
    print(f"nearest_neighbors: ties in order for {exact} of {QUERIES} queries ({device.type})")


if __name__ == "__main__":
    main()
