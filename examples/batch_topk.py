"""BatchTopK of a sparse autoencoder: the largest activations of a batch stay, however tokens share them.

Run it with `python examples/batch_topk.py`.
"""

import torch

from gvr_topk import library_status, topk_mask

TOKENS, DIM, FEATURES, PER_TOKEN, STEPS = 64, 32, 1024, 8, 30


def main() -> None:
    on_gpu = torch.cuda.is_available() and library_status().loaded
    device = torch.device("cuda" if on_gpu else "cpu")
    torch.manual_seed(0)
    encoder = torch.nn.Linear(DIM, FEATURES, device=device)
    decoder = torch.nn.Linear(FEATURES, DIM, device=device)
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=3e-3)
    inputs = torch.randn(TOKENS, DIM, device=device)

    losses, exact = [], 0
    for _ in range(STEPS):
        activations = torch.relu(encoder(inputs))
        mask = topk_mask(activations, TOKENS * PER_TOKEN, dim=None)
        loss = (decoder(activations * mask) - inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        losses.append(loss.item())
        exact += int(mask.sum()) == TOKENS * PER_TOKEN and bool(
            activations[mask].min() >= activations[~mask].max()
        )
    assert losses[-1] < losses[0] / 2
    print(f"batch_topk: exact in {exact} of {STEPS} steps ({device.type})")


if __name__ == "__main__":
    main()
