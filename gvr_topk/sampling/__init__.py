"""Exact, deterministic sampling of tokens: filters and draw in one call.

`sample` draws a token of each row of logits, and says on demand how likely it was and what else was kept.
`verify` does so in the rows of drafts, and accepts the drafts that are the tokens drawn.
`apply_limits_` and `renorm` turn the limits that it writes into masked logits and into probabilities.
`topk_logprobs` gives log-probabilities without a draw. `docs/sampling.md` is the contract.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gvr_topk.constants import FLAG_PDL, MAX_ROWS
from gvr_topk.ops import Op, launch, register
from gvr_topk.sampling import reference
from gvr_topk.sampling.arguments import (
    APPLY_LIMITS,
    LIMIT_WORDS,
    RENORM,
    SAMPLE,
    TOPK_LOGPROBS,
    VERIFY,
    ApplyLimitsArguments,
    Fed,
    Flag,
    LogprobMode,
    Noise,
    Order,
    RenormArguments,
    SampleArguments,
    TopkLogprobsArguments,
    VerifyArguments,
    check_apply_limits,
    check_renorm,
    check_sample,
    check_topk_logprobs,
    check_verify,
    fields_of,
)

__all__ = ["LIMIT_WORDS", "Flag", "apply_limits_", "renorm", "sample", "topk_logprobs", "verify"]


def sample(
    logits: Tensor,
    *,
    seeds: int | Tensor,
    positions: int | Tensor,
    temperature: float | Tensor = 1.0,
    top_k: int | Tensor = 0,
    top_p: float | Tensor = 1.0,
    min_p: float | Tensor = 0.0,
    slots: Tensor | None = None,
    order: str = "vllm",
    noise: str = "cdf",
    allow: Tensor | None = None,
    allow_row: Tensor | None = None,
    out: Tensor | None = None,
    logprobs: Tensor | None = None,
    logprob_mode: str = "raw",
    ranks: Tensor | None = None,
    kept: Tensor | None = None,
    counts: Tensor | None = None,
    kept_logprobs: Tensor | None = None,
    limits: Tensor | None = None,
    flags: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """Draw a token of every row from what temperature, top-k, top-p and min-p leave of it.

    The token of a row is a function of its logits, parameters, seed and position alone: of no other row, no
    row number and no GPU. Rows of all kinds (greedy, filtered, neither) may stand in one call.

    Parameters
    ----------
    logits : Tensor, ``[rows, vocabulary]``, float32, bfloat16 or float16
        Inner stride 1, any row stride. At most 2**20 columns; on a GPU, rows of at most 1,695,744 bytes (on
        consumer Blackwell 737,280).
    seeds, positions : int, or Tensor, ``[rows]``, int64
        Seed of each request and position of each token, from which the noise is made. They are read where
        they lie, so a replayed CUDA graph draws afresh when positions advance.
    temperature : float, or Tensor, ``[rows]``, float32, default 1
        Below 1e-5 (and for NaN) the smallest id of the largest logit is taken.
    top_k : int, or Tensor, ``[rows]``, int32, default 0
        Tokens to keep: exactly so many, the smallest ids among equal logits. Off if at most 0, or at least
        the vocabulary.
    top_p : float, or Tensor, ``[rows]``, float32, default 1
        Keeps the shortest prefix of the ranked tokens whose mass reaches `top_p`, taken as the fp32 number it
        is. Off at 1 or more; 0 or less keeps one token.
    min_p : float, or Tensor, ``[rows]``, float32, default 0
        Keeps tokens with at least this share of the most probable one's mass. Off at 0 or less.
    slots : Tensor, ``[rows]``, int32 or int64, optional
        Where the parameters of a row stand: `temperature`, `top_k`, `top_p`, `min_p` and `seeds` are then
        tensors ``[slots]`` (or numbers). A row whose slot is negative, or past their end, is skipped: its
        token is -1. `positions` stay those of rows.
    order : {"vllm", "hf", "joint", "temperature_last"}, default "vllm"
        In which order filters apply: ``"vllm"`` begins with min-p, ``"hf"`` ends with it, ``"joint"`` takes
        top-k and top-p both of the whole row, and ``"temperature_last"`` filters at temperature 1.
    noise : {"cdf", "murmur"}, default "cdf"
        ``"cdf"`` inverts the distribution. ``"murmur"`` is Gumbel-max with the noise of vLLM's second model
        runner, so it draws vLLM's tokens but for near ties.
    allow : Tensor, ``[masks, ceil(vocabulary / 32)]``, int32, optional
        Packed mask of a grammar, as xgrammar makes it: bit 1 allows a token. Tokens that are not allowed
        count as -inf, and are not looked at.
    allow_row : Tensor, ``[rows]``, int32, optional
        Mask of each row; a number that is none allows everything. Default: the row's own number.
    out : Tensor, ``[rows]``, int64 or int32, optional
        Where to write; allocated as int64 when absent.
    logprobs : Tensor, ``[rows]``, float32, optional
        Output: log-probability of the token.
    logprob_mode : {"raw", "processed"}, default "raw"
        Of which distribution: the whole row at temperature 1, or what is kept at the row's temperature.
    ranks : Tensor, ``[rows]``, int64, optional
        Output: how many logits are not below the token's, its own included.
    kept : Tensor, ``[rows, columns]``, int32, optional
        Output: kept tokens, ascending, then -1. If there are more than columns, the smallest ids.
    counts : Tensor, ``[rows]``, int32, optional
        Output: number of kept tokens, whatever `kept` has room for.
    kept_logprobs : Tensor, ``[rows, columns]``, float32, optional
        Output: log-probabilities of `kept` among the kept tokens, then -inf.
    limits : Tensor, ``[rows, 8]``, int32, contiguous, optional
        Output: what the row keeps, in 32 bytes, for `apply_limits_` and `renorm`. See `docs/sampling.md`.
    flags : Tensor, ``[rows]``, int32, optional
        Output: sum of `Flag`.
    pdl : bool, default False
        Whether the launch may begin before the kernel ahead of it ends (programmatic dependent launch).

    Returns
    -------
    Tensor, ``[rows]``
        `out`. At least one token is always kept, so every row that is not skipped has a token.

    Raises
    ------
    ValueError, LibraryError
        As in `gvr_topk.indexer_topk_decode`.

    Notes
    -----
    `docs/sampling.md` is the contract. NaN ranks as -inf, unlike in the top-k ops. A row without any logit
    above -inf yields its smallest allowed id that is not NaN. Both set a flag.

    Examples
    --------
    >>> import torch
    >>> from gvr_topk.sampling import sample
    >>> logits = torch.tensor([[1.0, 5.0, 5.0, -3.0]])
    >>> kept = torch.empty(1, 4, dtype=torch.int32)
    >>> sample(logits, temperature=0.0, seeds=7, positions=0)
    tensor([1])
    >>> _ = sample(logits, top_p=0.6, seeds=7, positions=0, kept=kept)
    >>> kept
    tensor([[ 1,  2, -1, -1]], dtype=torch.int32)
    """
    SAMPLE.rows(logits)
    parameters = fields_of(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seeds=seeds, positions=positions
    )
    arguments = SampleArguments(
        logits,
        torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device) if out is None else out,
        slots=slots,
        allow=allow,
        allow_row=allow_row,
        logprobs=logprobs,
        ranks=ranks,
        kept=kept,
        counts=counts,
        kept_logprobs=kept_logprobs,
        limits=limits,
        flags=flags,
        order=SAMPLE.choice("order", order, Order),
        noise=SAMPLE.choice("noise", noise, Noise),
        logprob_mode=SAMPLE.choice("logprob_mode", logprob_mode, LogprobMode),
        options=FLAG_PDL * SAMPLE.flag("pdl", pdl),
        **parameters,
    )
    launch(arguments)
    return arguments.out


class Verified(NamedTuple):
    """What `verify` returns.

    Attributes
    ----------
    tokens : Tensor, ``[requests, 1 + num_drafts]``, int64 or int32
        The next tokens of each request: the accepted drafts, the token after them, then -1.
    lengths : Tensor, ``[requests]``, int32
        How many they are: one more than the accepted drafts, or 0 in a request that has no row, or whose
        first row is skipped.
    """

    tokens: Tensor
    lengths: Tensor


def verify(
    logits: Tensor,
    draft_tokens: Tensor,
    num_drafts: int,
    *,
    starts: Tensor | None = None,
    **parameters: Any,
) -> Verified:
    """Draw a token of every row as `sample` does, and accept drafts as long as they are the tokens drawn.

    A request has a row for the token before its drafts and one for each draft, in this order. The tokens are
    those that `sample` draws one row at a time, at the same seeds and positions, without any draft.

    Parameters
    ----------
    logits
        As in `sample`. Row i of a request is what follows its token i of `draft_tokens`.
    draft_tokens : Tensor, ``[rows]``, int64 or int32
        The token that stands at each row. That of the first row of a request is no draft and is not looked
        at. A negative one, such as a placeholder, is never accepted.
    num_drafts : int
        The most drafts that a request has, at least 0.
    starts : Tensor, ``[requests + 1]``, int32, optional
        First row of each request, and behind them the end of the last one. Default: each request has
        ``1 + num_drafts`` rows. Of a request with more rows, only the first so many count.
    **parameters
        All other arguments of `sample`. Parameters without `slots`, `positions` and outputs have a number for
        each row, and `out` gets the tokens of all rows.

    Returns
    -------
    Verified

    Raises
    ------
    ValueError, LibraryError
        As in `sample`.

    Notes
    -----
    Nothing is read on the host, and no shape depends on what is accepted, so a CUDA graph can capture it.

    Examples
    --------
    >>> import torch
    >>> from gvr_topk.sampling import verify
    >>> logits = torch.eye(4)[[2, 1, 3, 0, 0, 0]]
    >>> tokens, lengths = verify(
    ...     logits, torch.tensor([0, 2, 1, 3, 3, 0]), 2, temperature=0.0, seeds=7, positions=0
    ... )
    >>> tokens
    tensor([[ 2,  1,  3],
            [ 0, -1, -1]])
    >>> lengths
    tensor([3, 1], dtype=torch.int32)
    """
    num_drafts = VERIFY.integer("num_drafts", num_drafts, 0, MAX_ROWS)
    SAMPLE.rows(logits)
    rows = logits.shape[0]
    given = {name: parameters[name] for name in Fed._fields if parameters.get(name) is not None}
    drawn = given.get("out")
    if drawn is None:
        drawn = torch.empty(rows, dtype=torch.int64, device=logits.device)
    SAMPLE.dense("out", drawn)
    if starts is None:
        requests = rows // (1 + num_drafts)
    else:
        VERIFY.dense("starts", starts)
        requests = max(starts.numel() - 1, 0)
    results = Verified(
        torch.empty((requests, 1 + num_drafts), dtype=drawn.dtype, device=drawn.device),
        torch.empty(requests, dtype=torch.int32, device=drawn.device),
    )
    arguments = VerifyArguments(drawn, draft_tokens, starts, *results)
    if given:  # Nothing of the caller's is written before all is checked.
        SAMPLE.ids("out", drawn, logits, (rows,))
        check_verify(arguments)
        VERIFY.memory(Fed(draft_tokens, starts, **{**given, "out": drawn}))
    sample(logits, **{**parameters, "out": drawn})
    launch(arguments)
    return results


def apply_limits_(
    logits: Tensor, limits: Tensor, *, allow: Tensor | None = None, allow_row: Tensor | None = None
) -> Tensor:
    """Set the logits of tokens that a call of `sample` did not keep to -inf, in place.

    Parameters
    ----------
    logits : Tensor, ``[rows, vocabulary]``, float32, bfloat16 or float16
        Input and output: the logits that `sample` was given. NaN becomes -inf.
    limits : Tensor, ``[rows, 8]``, int32, contiguous
        What `sample` wrote. Skipped rows stay as they are.
    allow, allow_row : Tensor, int32, optional
        The masks that `sample` was given.

    Returns
    -------
    Tensor
        `logits`.

    Raises
    ------
    ValueError, LibraryError
        As in `sample`.
    """
    launch(ApplyLimitsArguments(logits, limits, allow, allow_row))
    return logits


def renorm(
    logits: Tensor,
    limits: Tensor,
    *,
    allow: Tensor | None = None,
    allow_row: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Compute the probabilities from which a call of `sample` drew.

    Parameters
    ----------
    logits : Tensor, ``[rows, vocabulary]``, float32, bfloat16 or float16
        The logits that `sample` was given.
    limits, allow, allow_row
        As for `apply_limits_`. Skipped rows have probabilities of 0.
    out : Tensor, ``[rows, vocabulary]``, float32, optional
        Where to write, which may be `logits`; allocated when absent.

    Returns
    -------
    Tensor, ``[rows, vocabulary]``, float32
        `out`: a token's mass over the sum of the kept masses; 0 for tokens that are not kept.

    Raises
    ------
    ValueError, LibraryError
        As in `sample`.
    """
    RENORM.rows(logits)
    if out is None:
        out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    launch(RenormArguments(logits, limits, out, allow, allow_row))
    return out


class TopkLogprobs(NamedTuple):
    """What `topk_logprobs` returns.

    Attributes
    ----------
    ids : Tensor, ``[rows, 1 + n]``, int64
        The given token, then the `n` largest logits, the largest first; smaller ids first among equal ones.
    logprobs : Tensor, ``[rows, 1 + n]``, float32
        Their log-probabilities at temperature 1.
    ranks : Tensor, ``[rows]``, int64
        How many logits are not below that of the given token, its own included.
    """

    ids: Tensor
    logprobs: Tensor
    ranks: Tensor


def topk_logprobs(logits: Tensor, n: int, sampled: Tensor) -> TopkLogprobs:
    """Log-probabilities of one given token and of the `n` most probable tokens of every row.

    Parameters
    ----------
    logits : Tensor, ``[rows, vocabulary]``, float32, bfloat16 or float16
        As in `sample`.
    n : int
        0 to the size of the vocabulary; on a GPU at most 1,024.
    sampled : Tensor, ``[rows]``, int64 or int32
        A token of each row. For a number that is no token the id is -1, its log-probability and rank are 0.

    Returns
    -------
    TopkLogprobs

    Raises
    ------
    ValueError, LibraryError
        As in `sample`.
    """
    TOPK_LOGPROBS.rows(logits)
    rows, n = logits.shape[0], TOPK_LOGPROBS.integer("n", n, 0, logits.shape[1])
    results = TopkLogprobs(
        torch.empty((rows, n + 1), dtype=torch.int64, device=logits.device),
        torch.empty((rows, n + 1), dtype=torch.float32, device=logits.device),
        torch.empty(rows, dtype=torch.int64, device=logits.device),
    )
    launch(TopkLogprobsArguments(logits, n, sampled, *results))
    return results


for _op in (
    Op(SAMPLE, SampleArguments, check_sample, reference.sample),
    Op(APPLY_LIMITS, ApplyLimitsArguments, check_apply_limits, reference.apply_limits_),
    Op(RENORM, RenormArguments, check_renorm, reference.renorm),
    Op(TOPK_LOGPROBS, TopkLogprobsArguments, check_topk_logprobs, reference.topk_logprobs),
    Op(VERIFY, VerifyArguments, check_verify, reference.verify),
):
    register(_op)
