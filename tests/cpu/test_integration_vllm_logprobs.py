"""Log-probabilities of a fake of vLLM 0.33's V2 runner, computed by our op if asked for; how that fails."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sampler_setup import change_op, fail
from torch import Tensor
from vllm_engine import Runner
from vllm_lines import LINE, calls, register_with

from gvr_topk.integrations._kit.verify import Differs
from gvr_topk.integrations.vllm import logprobs
from gvr_topk.integrations.vllm.upstream import SAMPLER_MODULES
from gvr_topk.sampling import TopkLogprobs, topk_logprobs

pytestmark = pytest.mark.usefixtures("serving")

OURS, VLLMS = ("gvr_topk", "logprobs"), "original"
WIDTH = 300


def loaded() -> list[Any]:
    """The sampler, the rejection sampler, and the prompts' log-probabilities."""
    return [importlib.import_module(name) for name in SAMPLER_MODULES]


def rows(count: int = 6, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits with masked tokens, and a token of each row; the rows are longer than the vocabulary."""
    draw = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(count, WIDTH + 20, generator=draw)[:, :WIDTH]
    logits[:, ::7] = -torch.inf
    sampled = torch.randint(WIDTH, (count,), generator=draw)
    sampled[0] = 7  # whose probability is zero
    return logits, sampled


def assert_like(got: Any, logits: Tensor, n: int, sampled: Tensor, ours: bool = True) -> None:
    assert type(got).__name__ == "LogprobsTensors"
    ids = got.logprob_token_ids
    ranked = logits.sort(dim=1, descending=True, stable=True).indices
    assert torch.equal(ids, torch.cat((sampled[:, None], ranked[:, :n]), 1))
    exact = logits.double().log_softmax(1).gather(1, ids)
    torch.testing.assert_close(got.logprobs.double(), exact, atol=1e-5, rtol=0)
    assert got.logprobs.dtype == torch.float32
    ranks = (logits >= logits.gather(1, sampled[:, None])).sum(1)
    if not ours:  # places behind the row count, too
        ranks[logits.gather(1, sampled[:, None])[:, 0] == -torch.inf] = 8192
    assert torch.equal(got.selected_token_ranks, ranks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_caller_is_served(log: list[str], dtype: torch.dtype, monkeypatch: Any) -> None:
    sampler, rejection, prompt = loaded()
    logits, sampled = rows()
    logits = logits.to(dtype)
    for n in (0, 1, 20):
        assert_like(got := sampler.Sampler().score(logits, n, sampled), logits, n, sampled)
        assert got.cu_num_generated_tokens is None and got.cu_num_generated_tokens_tensor is None
    assert_like(sampler.compute_topk_scores(logits, 2, sampled), logits, 2, sampled)
    tokens = torch.tensor([[9, 10, 11], [12, -1, -1], [13, 14, -1]])
    starts, lengths = torch.tensor([0, 3, 4, 6], dtype=torch.int32), torch.tensor([3, 1, 2])
    for adaptive in (False, True):
        verifier = rejection.RejectionSampler(sampler.Sampler(), enable_adaptive_verification=adaptive)
        got = verifier._get_logprobs_tensors(tokens, lengths, logits, starts, starts.numpy(), 5)
        assert_like(got, logits, 5, torch.arange(9, 15))
        assert got.cu_num_generated_tokens == (None if adaptive else [0, 3, 4, 6])
        on_device = got.cu_num_generated_tokens_tensor
        assert torch.equal(on_device, starts) if adaptive else on_device is None
    monkeypatch.setattr(prompt, "CHUNK_SIZE", 4)
    parts = prompt.compute_prompt_logprobs_with_chunking(sampled.int(), logits, lambda states: states, 3)
    whole = topk_logprobs(logits, 3, sampled)
    assert all(map(torch.equal, parts, whole))
    assert calls() == {OURS: 8}
    assert log == [LINE + "on: log-probabilities of 0 and the sampled token"]


def test_a_token_behind_the_vocabulary() -> None:
    """It keeps its number, as that of an image does in a prompt, and is not compared."""
    sampler, *_ = loaded()
    logits, sampled = rows()
    sampled[2] = WIDTH + 5  # the rows of vLLM's buffer are longer
    got = sampler.compute_topk_scores(logits, 2, sampled)
    assert torch.equal(got.logprob_token_ids[:, 0], sampled) and calls() == {OURS: 1}
    theirs = topk_logprobs(logits, 2, sampled.clamp(max=WIDTH - 1))
    ids = torch.cat((sampled[:, None], theirs.ids[:, 1:]), 1)
    other = SimpleNamespace(
        logprob_token_ids=ids, logprobs=theirs.logprobs, selected_token_ranks=theirs.ranks
    )
    assert logprobs._agree(logits, topk_logprobs(logits, 2, sampled), other)
    sampled[2] = 0
    first = topk_logprobs(logits, 2, sampled)
    other.logprob_token_ids, other.logprobs = first.ids, first.logprobs.clone()
    other.selected_token_ranks = first.ranks
    other.logprobs[2] += 1
    with pytest.raises(Differs, match="row 2 of 6: a log-probability differs"):
        logprobs._agree(logits, first, other)


def test_what_vllm_computes_itself(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing is switched off by it."""
    monkeypatch.setattr(logprobs, "MAX_RANKED_TOKENS", 20)
    sampler, _, prompt = loaded()
    logits, sampled = rows()
    own = sampler.compute_topk_scores.__wrapped__
    for given, n, scores, reason in (
        ({"logprobs_mode": "raw_logits"}, 3, logits, "are logits"),
        ({"token_ids": [[5, 6]] * 6}, 3, logits, "of given tokens"),
        ({}, 21, logits, "of too many tokens"),
        ({}, 3, logits.double(), "layout"),
        ({}, 3, logits.t().contiguous().t(), "layout"),
    ):
        before = calls().get((VLLMS, f"logprobs {reason}"), 0)
        got = sampler.Sampler(**given).score(scores, n, sampled)
        assert calls()[VLLMS, f"logprobs {reason}"] == before + 1
        if reason in ("layout", "of too many tokens"):
            assert all(map(torch.equal, got[:3], own(scores, n, sampled)[:3]))
    prompt.compute_prompt_logprobs_with_chunking(sampled, logits, lambda states: states, -1)
    assert OURS not in calls() and sum(calls().values()) == 6
    sampler.Sampler().score(logits, 20, sampled)
    assert calls()[OURS] == 1 and len(log) == 1


def test_an_error_falls_back_and_switches_off(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The top-k of the layers goes on."""
    sampler, *_ = loaded()
    logits, sampled = rows()
    change_op(monkeypatch, logprobs, "topk_logprobs", fail)
    for _ in range(2):
        assert_like(sampler.Sampler().score(logits, 4, sampled), logits, 4, sampled, ours=False)
        monkeypatch.undo()
    runner = Runner()
    runner.step([runner.add("a", 300)])
    assert calls() == {(VLLMS, "logprobs error: RuntimeError"): 2, ("gvr_topk", "hint"): 2}
    assert log[0] == LINE + (
        "fell back: log-probability: RuntimeError: no room for this launch."
        " vLLM's own log-probability top-k serves from now on"
    )


def test_an_argument_that_is_not_known() -> None:
    sampler, *_ = loaded()
    with pytest.raises(TypeError, match="unexpected keyword"):  # of vLLM's own function
        sampler.compute_topk_scores(*rows()[:1], 3, rows()[1], temperature=1.0)
    assert calls() == {(VLLMS, "logprobs error: TypeError"): 1}


def test_the_first_calls_are_verified(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ties may be named in any order, and a call whose rows all have NaN does not count."""
    register_with(monkeypatch, GVR_TOPK_VERIFY="2")
    sampler, *_ = loaded()
    lines = []
    logits, sampled = rows()
    nan = logits.clone()
    nan[:, 5] = torch.nan
    tied = logits.round().clamp(min=-20)
    for scores in (nan, tied, logits, logits):
        sampler.Sampler().score(scores, 9, sampled)
        lines.append(len(log))
    assert calls() == {OURS: 4} and lines == [1, 1, 2, 2]
    assert log[0] == LINE + "on: log-probabilities of 9 and the sampled token"
    assert log[1] == LINE + "verified 2 calls of logprobs"


WRONG: list[tuple[str, Callable[[TopkLogprobs], object]]] = [
    ("a token is named twice", lambda found: found.ids[2, 2].copy_(found.ids[2, 1])),
    ("a token has another logit", lambda found: found.ids[2, 2:4].copy_(found.ids[2, 2:4].flip(0))),
    ("a token has another logit", lambda found: found.ids[2, 0].add_(1)),
    ("a log-probability differs", lambda found: found.logprobs[2, 5].mul_(1.01)),
    ("a log-probability differs", lambda found: found.logprobs[2, 0].fill_(-torch.inf)),
    ("the rank differs", lambda found: found.ranks[2].add_(1)),
]


@pytest.mark.parametrize(("what", "change"), WRONG, ids=range(len(WRONG)))
def test_a_result_that_is_wrong_is_noticed(
    log: list[str], monkeypatch: pytest.MonkeyPatch, what: str, change: Callable[[TopkLogprobs], object]
) -> None:
    register_with(monkeypatch, GVR_TOPK_VERIFY="8")
    sampler, *_ = loaded()
    logits, sampled = rows()
    change_op(monkeypatch, logprobs, "topk_logprobs", change)
    for _ in range(2):
        assert_like(sampler.Sampler().score(logits, 6, sampled), logits, 6, sampled, ours=False)
    (line,) = log
    assert f"fell back: log-probability: Differs: row 2 of 6: {what}. vLLM's own" in line
    assert calls() == {(VLLMS, "logprobs error: Differs"): 2}
