"""Draws of the first calls, compared with those of a fake of vLLM's sampler: what a near tie is."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from vllm_engine import logits_of, native, same_as_native, sampler_batch, sampler_with
from vllm_lines import LINE, break_sampler, register_with

from gvr_topk.integrations import vllm as integration
from gvr_topk.integrations.vllm import sampler
from gvr_topk.sampling import arithmetic

pytestmark = pytest.mark.usefixtures("serving")

OURS, DIFFERS = ("gvr_topk", "sampler"), ("original", "sampler error: Differs")
WIDTH = 300
LAST = WIDTH - 1


def test_the_first_calls_are_verified(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that FlashInfer would draw is compared with the native sampler; one of NaN does not count."""
    register_with(monkeypatch, GVR_TOPK_VERIFY="2")
    one, lines = sampler_with(use_flashinfer=True), []
    nan = logits_of(2)
    nan[:, 5] = torch.nan
    for step, logits in enumerate((nan, logits_of(2), logits_of(2), logits_of(2))):
        one(logits, sampler_batch([7, 9], step))
        lines.append(len(log))
    assert one.use_flashinfer and not one.use_xpu_sampler
    assert integration.counters().calls == {OURS: 4} and lines == [1, 1, 2, 2]
    assert log[1:] == [LINE + "verified 2 calls of sampler"]


WRONG: list[tuple[str, int, Callable[[Tensor], object]]] = [
    ("not kept", 1, lambda tokens: tokens[1].add_(1)),
    ("not kept", 5, lambda tokens: tokens[1].fill_(7)),
    ("not kept", 0, lambda tokens: tokens[1].fill_(WIDTH)),
    ("not kept", 8, lambda tokens: tokens[1].fill_(-1)),
    ("scores [", 0, lambda tokens: tokens[1].copy_(tokens[1] ^ 1 if (tokens[1] ^ 1) % 7 else tokens[1] ^ 2)),
]


@pytest.mark.parametrize(("what", "slot", "change"), WRONG, ids=range(len(WRONG)))
def test_a_wrong_token_is_noticed(
    log: list[str], monkeypatch: pytest.MonkeyPatch, what: str, slot: int, change: Callable[[Tensor], object]
) -> None:
    register_with(monkeypatch, GVR_TOPK_VERIFY="8")
    break_sampler(monkeypatch, change)
    one, logits, inputs = sampler_with(), logits_of(2), sampler_batch([4, slot])
    for _ in range(2):
        got, _ = same_as_native(one, logits, inputs)
    (line,) = log
    assert line.startswith(f"{LINE}fell back: sampler: Differs: row 1 of 2: token ")
    assert line.endswith(" vLLM's own sampler serves from now on")
    assert f"{int(got.sampled_token_ids[1])} by vLLM: {what}" in line
    assert integration.counters().calls == {DIFFERS: 2}


def explained(
    monkeypatch: pytest.MonkeyPatch, logits: Tensor, other: int, position: int, **params: Any
) -> dict[tuple[str, str], int]:
    """Let our op draw another token than vLLM in a row that is compared, and return the counts."""
    register_with(monkeypatch, GVR_TOPK_VERIFY="1")
    break_sampler(monkeypatch, lambda tokens: tokens.fill_(other))
    one = sampler_with([{"seed": 11, **params}])
    inputs = sampler_batch([0], position - 1)  # the input behind it is the one that is sampled
    theirs = int(native(one)(logits, inputs).sampled_token_ids)
    assert theirs != other and int(one(logits, inputs).sampled_token_ids) in (other, theirs)
    return integration.counters().calls


def two_tokens(first: float, second: float) -> Tensor:
    logits = torch.full((1, WIDTH), -torch.inf)
    logits[0, 0], logits[0, LAST] = first, second
    return logits


def position(least: float = 2) -> int:
    """A position at which the last token's noise is larger than that of token 0 by so much."""
    numbers = np.arange(1, 100_000)[:, None]
    noise = arithmetic.gumbel(arithmetic.hash32(11, numbers, np.array([0, LAST])))
    return 1 + int(np.flatnonzero(noise[:, 1] - noise[:, 0] > least)[0])


@pytest.mark.parametrize("more", [0.0, 1e-3])
@pytest.mark.parametrize("sign", [-1, 1])
def test_a_near_tie_of_the_noise(monkeypatch: pytest.MonkeyPatch, sign: int, more: float) -> None:
    """Two scores that are equal but for the rounding may change places; others may not."""
    where, temperature = position(), 0.5
    noise = arithmetic.gumbel(arithmetic.hash32(11, where, np.array([0, LAST]))).astype(float)
    logits = two_tokens(temperature * (noise[1] - noise[0] + sign * (3e-6 + more)), 0.0)
    counts = explained(monkeypatch, logits, LAST if sign > 0 else 0, where, temperature=temperature)
    assert counts == ({DIFFERS: 1} if more else {OURS: 1})


@pytest.mark.parametrize(
    ("params", "second", "near"),
    [
        ({"temperature": 0.0, "top_p": 0.4}, 1.0, False),
        ({"top_p": 0.5}, 1.0, True),
        ({"top_p": 0.4}, 1.0, True),
        ({"top_p": 0.4}, 0.99, False),
        ({"min_p": 0.25}, 0.2499, True),
        ({"min_p": 0.25}, 0.24, False),
    ],
)
def test_a_token_at_the_border_of_a_filter(
    monkeypatch: pytest.MonkeyPatch, params: dict[str, float], second: float, near: bool
) -> None:
    """Sums and thresholds of vLLM are rounded, so it may drop it; one that is further away it may not.

    Of equal logits there it keeps all, but those of a greedy row are at no border.
    """
    counts = explained(monkeypatch, two_tokens(0.0, math.log(second)), LAST, position(), **params)
    assert counts == ({OURS: 1} if near else {DIFFERS: 1})


@pytest.mark.parametrize("count", [64, 65])
def test_rows_that_vllm_leaves_without_top_p(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """In calls of more than 64 rows it may; its token is then what is drawn without top-p."""
    register_with(monkeypatch, GVR_TOPK_VERIFY="9")
    one, inputs = sampler_with([{"seed": 11, "top_p": 0.4}]), sampler_batch([0] * count, position() - 1)
    module = sys.modules[type(one).__module__]
    monkeypatch.setattr(module, "apply_top_k_top_p", lambda logits, *others, **named: logits)
    logits = two_tokens(1.0, 0.0).repeat(count, 1)
    ours = one(logits, inputs).sampled_token_ids
    assert integration.counters().calls == ({OURS: 1} if count > 64 else {DIFFERS: 1})
    assert int(ours[0]) == (0 if count > 64 else LAST)
    assert int(native(one)(logits, inputs).sampled_token_ids[0]) == LAST


@pytest.mark.parametrize(("least", "alike"), [(-12.0, True), (-5.0, False)])
def test_the_cut_of_a_search(least: float, alike: bool) -> None:
    """Beside a large probability, vLLM's search does not tell small ones apart."""
    logits = two_tokens(0.0, -torch.inf)
    logits[0, 1:100] = least + 0.1 * torch.arange(99) / 99
    mass = logits.exp().sum() - logits[:, 50:100].exp().sum() / 2
    one = sampler_with([{"top_p": float(mass / logits.exp().sum())}])
    at = torch.tensor([0])
    call = sampler.SampleCall(one, logits, at, at, at.numpy(), at, at, at, at.numpy())
    tokens = torch.tensor([[0, 1, 99]])
    assert sampler._at_cut(call, at, tokens).tolist() == [[False, alike, alike]]
    assert sampler._keeps(call, at, tokens, 0.0).tolist() == [[True, False, True]]


def test_a_filter_that_is_off_has_no_border(monkeypatch: pytest.MonkeyPatch) -> None:
    """The token that vLLM draws has less mass than the margin, and ours is none the less wrong."""
    logits = two_tokens(0.0, -8.0)
    assert explained(monkeypatch, logits, 0, position(8.5)) == {DIFFERS: 1}
