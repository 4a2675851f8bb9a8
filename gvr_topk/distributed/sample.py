"""Sampling of tokens over a vocabulary that is spread over ranks: the best tokens of each rank go round."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gvr_topk.distributed.shards import Shards
from gvr_topk.distributed.topk import check_step
from gvr_topk.ops import indexer_topk_decode
from gvr_topk.sampling import Flag, sample
from gvr_topk.sampling.arguments import SampleArguments, SamplingChecks, check_sample, fields_of
from gvr_topk.sampling.arithmetic import MAX_VOCABULARY

CHECKS = SamplingChecks("gvr_topk.sharded_sample")

ORDERS = ("vllm", "hf", "temperature_last")
"""Orders in which nothing depends on tokens that top-k leaves out."""

_LOW = 0xFFFFFFFF
_MINUS_INFINITY = 0xFF800000  # as bits of an fp32 number
_NO_TOKEN = 1 << 30  # above every token of 512 ranks, also behind those of ranks before


def sharded_sample(
    logits: Tensor,
    most: int,
    *,
    shards: Shards,
    seeds: int | Tensor,
    positions: int | Tensor,
    temperature: float | Tensor = 1.0,
    top_k: int | Tensor = 0,
    top_p: float | Tensor = 1.0,
    min_p: float | Tensor = 0.0,
    slots: Tensor | None = None,
    order: str = "vllm",
    out: Tensor | None = None,
    step: int | Tensor = 0,
) -> Tensor:
    """Draw a token of every row of logits whose columns lie on several ranks; all ranks get the same tokens.

    A row keeps at most `most` tokens. Where its `top_k` is off, or larger, it counts as `most`. With that
    `top_k` the tokens are those of `gvr_topk.sampling.sample` of the whole row, bit for bit.

    Parameters
    ----------
    logits : Tensor, ``[rows, width]``, float32, bfloat16 or float16
        This rank's part of the vocabulary, at least one column.
    most : int
        Tokens that a rank sends for each row, 1 to 2**20 for all ranks together.
    shards : Shards
        The ranks, and who owns which token.
    seeds, positions, temperature, top_k, top_p, min_p, slots, out
        As for `gvr_topk.sampling.sample`, and the same on all ranks.
    order : {"vllm", "hf", "temperature_last"}, default "vllm"
        As for `gvr_topk.sampling.sample`, without ``"joint"``, which needs the mass of the whole row.
    step : int, or Tensor of one element, int64, same device, default 0
        A number that ranks have to agree on.

    Returns
    -------
    Tensor, ``[rows]``
        `out`. Tokens count in the whole vocabulary.

    Raises
    ------
    ValueError
        As in `gvr_topk.distributed.sharded_topk` and `gvr_topk.sampling.sample`.
    RuntimeError
        A rank is late or dead: the error of `torch.distributed`, when the timeout of the group is over.

    Notes
    -----
    Each rank sends ``8 * (2 + most)`` bytes for each row, once. The noise is that of ``noise="cdf"``, which
    depends on no number of a token. Nothing is read on the host. Arguments are checked before anything is
    sent, but for a limit of a GPU: candidates of all ranks are rows of `sample`, of at most 1,695,744 bytes.
    """
    if not isinstance(shards, Shards):
        raise CHECKS.wrong_type("shards", Shards, shards)
    CHECKS.rows(logits)
    if logits.device != shards.device:
        raise CHECKS.fail("logits", f"a tensor on {shards.device}", logits.device)
    most = CHECKS.integer("most", most, 1, MAX_VOCABULARY // shards.world)
    if order not in ORDERS:
        raise CHECKS.fail("order", " or ".join(map(repr, ORDERS)), repr(order))
    check_step(CHECKS, step, logits)
    parameters: dict[str, Any] = {
        "seeds": seeds,
        "positions": positions,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
    }
    if out is None:
        out = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    check_sample(SampleArguments(logits, out, slots=slots, **fields_of(**parameters)))
    shards.check()
    head = shards.header(logits, most, step)
    gathered, agreed = shards.first_exchange(_record(shards, logits, most), head)
    tokens = gathered[:, :, 2:] >> 32
    if shards.interleave == 0:
        before = gathered[:, :, 0].cumsum(0) - gathered[:, :, 0]
        stand_in = gathered[:, :, 1] + before
        tokens = tokens + before[:, :, None]
    else:
        stand_in = gathered[:, :, 1]
    # Candidates by ascending token, as the noise counts them.
    values = gathered[:, :, 2:] & _LOW
    candidates = ((tokens << 32) | values).transpose(0, 1).flatten(1).sort(dim=1).values
    tokens = candidates >> 32
    of_candidates = candidates.to(torch.int32).contiguous().view(torch.float32)
    flags = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
    parameters["top_k"] = _limited(top_k, most, logits.device)
    at = sample(of_candidates, slots=slots, order=order, flags=flags, **parameters)
    token = tokens.gather(1, at.clamp(min=0)[:, None])[:, 0]
    first = stand_in.amin(0)
    first = torch.where(first < _NO_TOKEN, first, 0)
    token = torch.where(flags & Flag.NO_CANDIDATE != 0, first, token)
    return out.copy_(torch.where((at >= 0) & agreed, token, -1))


def _limited(top_k: int | Tensor, most: int, device: torch.device) -> int | Tensor:
    """Set a `top_k` that is off or larger to `most`."""
    if isinstance(top_k, Tensor):
        # From pinned memory, too, for which no host waits.
        top_k = top_k.to(device, non_blocking=True)  # pragma: no mutate: nothing waits on a CPU
        return torch.where((top_k > 0) & (top_k < most), top_k, most)
    return top_k if 0 < top_k < most else most


def _record(shards: Shards, logits: Tensor, most: int) -> Tensor:
    """Return what this rank sends, ``[rows, 2 + most]``, int64.

    It is the number of columns, the first token that is not NaN (a contiguous part counts its own), and
    the best tokens with the bits of their logits below them. NaN ranks as -inf.
    """
    rows, width = logits.shape
    nan = logits.isnan()
    usable = logits.masked_fill(nan, -torch.inf)
    lengths = torch.full((rows,), width, dtype=torch.int32, device=logits.device)
    best = indexer_topk_decode(usable, lengths, most).to(torch.int64)
    bits = usable.gather(1, best.clamp(min=0)).to(torch.float32).view(torch.int32).to(torch.int64) & _LOW
    token = best if shards.interleave == 0 else shards.positions(best, None)
    words = torch.where(best >= 0, (token << 32) | bits, (_NO_TOKEN << 32) | _MINUS_INFINITY)
    number = (~nan).to(torch.int8).argmax(1)
    first = number if shards.interleave == 0 else shards.positions(number, None)
    first = torch.where(nan.gather(1, number[:, None])[:, 0], _NO_TOKEN, first)
    columns = torch.full_like(first, width)
    return torch.cat((columns[:, None], first[:, None], words), 1)
