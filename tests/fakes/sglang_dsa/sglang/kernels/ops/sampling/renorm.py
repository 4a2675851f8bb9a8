import torch
from sglang_base import CALLS


class LazyImport:
    """A function of FlashInfer, which is imported when anything of it is looked at."""

    def __init__(self, function):
        self._function = function

    def __getattr__(self, name):
        raise AssertionError(f"FlashInfer is imported for {name}, without a call")

    def __call__(self, probs, *args):
        CALLS["renorm"] += 1
        kept = self._function(probs, *args)
        return kept / kept.sum(-1, keepdim=True)


def _top_k(probs, top_k):
    """Keep all that tie with the k-th."""
    values = probs.sort(descending=True).values
    return probs.masked_fill(probs < values.gather(1, top_k[:, None].long().clamp(max=probs.shape[1]) - 1), 0)


def _top_p(probs, top_p):
    kept, ids = probs.sort(descending=True)
    kept[:, 1:][kept.cumsum(-1)[:, :-1] > top_p[:, None]] = 0
    return torch.zeros_like(kept).scatter_(1, ids, kept)


top_k_renorm_prob, top_p_renorm_prob = LazyImport(_top_k), LazyImport(_top_p)
