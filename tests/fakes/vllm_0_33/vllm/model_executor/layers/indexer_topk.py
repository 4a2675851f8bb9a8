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

    @staticmethod
    def _row_ends(seq_lens: torch.Tensor, next_n: int, num_rows: int) -> torch.Tensor:
        if seq_lens.numel() == num_rows:
            return seq_lens.reshape(-1)
        ends = seq_lens.reshape(-1, 1) - next_n + 1 + torch.arange(next_n, dtype=torch.int32)
        return ends.clamp_(min=0).reshape(-1)

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
        ends = self._row_ends(seq_lens, next_n, logits.shape[0])
        topk_indices.copy_(chosen(logits, ends, topk_tokens))  # in no order that a test may rely on
