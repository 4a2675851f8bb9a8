"""Multi-token prediction in a shifting batch: each request has two rows, and owns a slot for its state.

Run it with `python examples/drafts_with_slots.py`.
"""

import torch

from gvr_topk import RequestSlots, indexer_topk_decode, library_status

NEXT_N, WIDTH, K = 2, 16_384, 512
# Requests move to other rows, finish and arrive. None is a padding row, as CUDA graphs have them.
BATCHES: list[list[str | None]] = [["a", "b"], ["a", "b"], ["b", "c"], ["c", None, "b"], ["c", "d", "b"]]


def main() -> None:
    on_gpu = torch.cuda.is_available() and library_status().loaded
    device = torch.device("cuda" if on_gpu else "cpu")
    torch.manual_seed(0)
    requests = RequestSlots(num_layers=1, num_slots=4, k=K, max_rows=3 * NEXT_N, device=device)
    exact = rows = 0
    for step, batch in enumerate(BATCHES):
        requests.retain(request for request in batch if request is not None)
        row_slot = requests.set_rows(batch, next_n=NEXT_N)  # The slot of each row, -1 for padding.
        state = requests.layer(0)
        # These scores are new in every step, so the predictions of this example save no time.
        scores = torch.randn(len(batch) * NEXT_N, WIDTH, device=device)
        # The length of a request counts its draft token, so the first of its rows sees one key less.
        sizes = [0 if request is None else WIDTH - 100 + NEXT_N * step for request in batch]
        lengths = torch.tensor(sizes, dtype=torch.int32, device=device)
        out = indexer_topk_decode(scores, lengths, K, next_n=NEXT_N, state=state, row_slot=row_slot)
        for row, chosen in enumerate(out):
            visible = max(0, sizes[row // NEXT_N] - NEXT_N + row % NEXT_N + 1)
            expected = scores[row, :visible].topk(min(K, visible)).values
            assert torch.equal(scores[row, chosen[chosen >= 0].long()].sort(descending=True).values, expected)
            exact += 1
        for place, request in enumerate(batch):
            if request is not None:  # The last row of a request leaves the state for its next step.
                kept = state.indices[requests.slot_of(request)]
                assert torch.equal(kept, out[place * NEXT_N + NEXT_N - 1])
        rows += len(out)
    print(f"drafts_with_slots: exact on {exact} of {rows} rows ({device.type})")


if __name__ == "__main__":
    main()
