import functools

import torch
from stable_topk import chosen


@functools.cache
def get_indexer_topk(backend: str) -> "SparseIndexerTopk":
    return SparseIndexerTopk(backend)


class SparseIndexerTopk(torch.nn.Module):
    def __init__(self, backend: str | None = None) -> None:
        super().__init__()
        self._backend = backend or "auto"

    def resolve_backend(self, logits: torch.Tensor, topk_tokens: int, num_rows: int) -> str:
        return "per_row" if self._backend == "auto" else self._backend

    def forward(
        self,
        logits: torch.Tensor,
        seq_lens: torch.Tensor,
        next_n: int,
        topk_indices: torch.Tensor,
        topk_tokens: int,
        max_seq_len: int,
    ) -> None:
        self.resolve_backend(logits, topk_tokens, logits.shape[0])
        # Lengths are those of rows where a test lets this choose; it does so in no order to rely on.
        topk_indices.copy_(chosen(logits, seq_lens.reshape(-1), topk_tokens))
