import torch


def apply_top_k_top_p(
    logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None, has_topp_only_rows: bool = True
) -> torch.Tensor:
    """Exactly k tokens, the first of equal ones; then those before which less than p has been reached."""
    if k is None and p is None:
        return logits
    ordered, ids = logits.sort(dim=1, descending=True, stable=True)
    if k is not None:
        ordered[torch.arange(logits.shape[1], device=logits.device) >= k[:, None]] = -torch.inf
    if p is not None:
        mass = ordered.softmax(1)
        before = mass.cumsum(1) - mass
        before[:, 0] = -1
        ordered[(before >= p[:, None]) & (p[:, None] < 1)] = -torch.inf
    return torch.empty_like(logits).scatter_(1, ids, ordered)


def flashinfer_sample(logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None) -> torch.Tensor:
    """Drawn with PyTorch's generator, as FlashInfer draws with one of its own."""
    return apply_top_k_top_p(logits, k, p).softmax(1).multinomial(1)[:, 0].int()
