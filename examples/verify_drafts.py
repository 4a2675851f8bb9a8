"""Speculative decoding: drafts are verified in one call, and change no token of what is drawn without them.

Run it with `python examples/verify_drafts.py`.
"""

import torch

from gvr_topk import library_status
from gvr_topk.sampling import sample, verify

REQUESTS, DRAFTS, LENGTH, VOCABULARY = 4, 3, 64, 1024
CHOICE = {"temperature": 0.6, "top_p": 0.95, "noise": "murmur"}


def main() -> None:
    on_gpu = torch.cuda.is_available() and library_status().loaded
    device = torch.device("cuda" if on_gpu else "cpu")
    torch.manual_seed(0)
    logits_after = 3 * torch.randn(VOCABULARY, VOCABULARY, device=device)  # A model that sees one token.
    seeds = torch.arange(REQUESTS, device=device)
    slots = seeds.int().repeat_interleave(1 + DRAFTS)  # The request of each row.

    plain = torch.zeros(REQUESTS, LENGTH, dtype=torch.int64, device=device)
    for place in range(1, LENGTH):
        positions = torch.full_like(seeds, place)
        plain[:, place] = sample(
            logits_after[plain[:, place - 1]], seeds=seeds, positions=positions, **CHOICE
        )

    streams, steps = [[0] for _ in range(REQUESTS)], 0
    while min(map(len, streams)) < LENGTH:
        rows = [torch.tensor([stream[-1] for stream in streams], device=device)]
        for _ in range(DRAFTS):  # The most likely tokens are the drafts.
            rows.append(logits_after[rows[-1]].argmax(1))
        fed = torch.stack(rows, 1).flatten()
        first = torch.tensor([len(stream) for stream in streams], device=device)
        positions = (first[:, None] + torch.arange(1 + DRAFTS, device=device)).flatten()
        given = {"slots": slots, "seeds": seeds, "positions": positions, **CHOICE}
        tokens, lengths = verify(logits_after[fed], fed, DRAFTS, **given)
        for stream, new, length in zip(streams, tokens.tolist(), lengths.tolist(), strict=True):
            stream += new[:length]
        steps += 1
    assert [stream[:LENGTH] for stream in streams] == plain.tolist()
    print(f"verify_drafts: the same {LENGTH - 1} tokens in {steps} steps ({device.type})")


if __name__ == "__main__":
    main()
