"""What ``vllm-trial`` says of tokens that our sampler and vLLM's draw, on a fake of vLLM's modules."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from vllm_engine import logits_of, sampler_batch, sampler_with
from vllm_lines import break_sampler, lines_of_draws

from eval.engines import vllm_sampler as trial
from gvr_topk.integrations import vllm as integration
from gvr_topk.integrations._kit.transaction import Transaction
from gvr_topk.sampling import arithmetic

OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


@pytest.fixture
def patches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Transaction]:
    with lines_of_draws(monkeypatch):
        integration.register()
        made = Transaction()
        sampler_with()  # imports the modules, which ours then patches
        yield made
        made.rollback()


def steps(count: int = 20) -> Any:
    """Draw for requests of all kinds."""
    one = sampler_with(trial.KINDS[trial.MIXED])
    for step in range(count):
        one(
            logits_of(len(trial.KINDS[trial.MIXED]), step),
            sampler_batch(range(len(trial.KINDS[trial.MIXED])), step),
        )
    return one


def test_tokens_are_compared(patches: Transaction) -> None:
    comparison = trial.Comparison()
    comparison.observe(patches)
    steps()
    told = comparison.as_dict()
    assert told["calls"] == 20 and told["rows"] == 20 * len(trial.KINDS[trial.MIXED])
    assert not any(told[name] for name in trial.WRONG)
    assert len(told["differences"]) == told.get("near tie", 0) + told.get("cutoff", 0)


def test_a_wrong_token_is_found(patches: Transaction, monkeypatch: pytest.MonkeyPatch) -> None:
    break_sampler(monkeypatch, lambda tokens: tokens[0].add_(1))
    comparison = trial.Comparison()
    comparison.observe(patches)
    steps(3)
    told = comparison.as_dict()
    assert told["ours is wrong"] == 3 == len(told["differences"])
    assert {one["temperature"] for one in told["differences"]} == {0.0}


def seed_of(wanted: Callable[[Any], Any]) -> tuple[int, Any]:
    """A seed with which the noise of tokens 0 and 1 is as wanted, and that noise."""
    seeds = np.arange(100_000)[:, None]
    noise = arithmetic.gumbel(arithmetic.hash32(seeds, 5, np.arange(2)))
    seed = int(np.flatnonzero(wanted(noise))[0])
    return seed, noise[seed].astype(float)


@pytest.mark.parametrize(("more", "why"), [(3e-6, "near tie"), (1e-2, "unexplained")])
def test_scores_that_tie(more: float, why: str) -> None:
    seed, noise = seed_of(lambda noise: noise[:, 1] > noise[:, 0])
    values = np.float32([noise[1] - noise[0] + more, 0])
    told = trial.judge(values, OFF, seed, 5, 0, 1)
    assert told["why"] == why and told["gap"] == pytest.approx(more, abs=1e-6) and told["kept"] == 2


FIRST = 1 / (1 + math.exp(-1))


@pytest.mark.parametrize(
    ("values", "filters", "ours", "told"),
    [
        # vLLM draws the first token, because it cuts off ahead of the second one.
        ([0, math.log(0.9981), -1], {"top_p": 0.424}, 1, {"why": "cutoff"}),
        ([0, math.log(0.9981), -1], {"top_p": 0.6}, 1, {"why": "unexplained"}),
        ([0, 0, -1], {"top_p": 0.6}, 1, {"why": trial.TIE}),
        ([0, math.log(0.9981), -1], {"top_p": 0.6, "top_k": 2}, 1, {"why": trial.LAST}),
        ([0, math.log(0.25001), -1], {"min_p": 0.25}, 1, {"why": "cutoff"}),
        ([0, math.log(0.3), -1], {"min_p": 0.25}, 1, {"why": "unexplained"}),
        # It draws the second one, which the exact arithmetic does not keep.
        ([1, 0], {"top_p": FIRST - 1e-4}, 0, {"why": "cutoff", "kept": 1}),
        ([1, 0], {"top_p": 0.4}, 0, {"why": "unexplained", "kept": 1}),
        ([1, 0], {"top_p": 0.4, "top_k": trial.NO_TOP_K}, 0, {"why": trial.BEYOND}),
        ([0, 0], {"top_p": 0.4}, 0, {"why": trial.TIE, "kept": 1, "equals": 2}),
        ([0, 0], {"top_k": 1}, 0, {"why": "unexplained"}),
    ],
)
def test_a_token_that_one_does_not_keep(values: Any, filters: Any, ours: int, told: dict[str, Any]) -> None:
    seed, _ = seed_of(lambda noise: noise[:, 1] - noise[:, 0] > 3)
    got = trial.judge(np.float32(values), OFF | filters, seed, 5, ours, 1 - ours)
    assert got.items() >= told.items()
    if values == [1, 0]:
        top_p = filters["top_p"]
        assert got["shares"] == [pytest.approx((FIRST / top_p, 1 / top_p), abs=1e-5)]
