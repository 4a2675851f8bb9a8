"""What ``vllm-trial`` says of tokens that our sampler and vLLM's draw, on a fake of vLLM's modules."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from vllm_engine import logits_of, sampler_batch, sampler_with
from vllm_lines import break_sampler, lines_of_draws

from eval.engines.vllm_sampler import (
    BEYOND,
    GRAMMAR,
    KINDS,
    LAST,
    MIXED,
    NO_TOP_K,
    TIE,
    WRONG,
    Comparison,
    Times,
    common_tokens,
    judge,
    settings_of,
    shows,
)
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
    one = sampler_with(KINDS[MIXED])
    for step in range(count):
        one(logits_of(len(KINDS[MIXED]), step), sampler_batch(range(len(KINDS[MIXED])), step))
    return one


def test_tokens_are_compared(patches: Transaction) -> None:
    comparison = Comparison()
    comparison.observe(patches)
    steps()
    told = comparison.as_dict()
    assert told["calls"] == 20 and told["rows"] == 20 * len(KINDS[MIXED])
    assert not any(told[name] for name in WRONG)
    assert len(told["differences"]) == told.get("near tie", 0) + told.get("cutoff", 0)


def test_a_wrong_token_is_found(patches: Transaction, monkeypatch: pytest.MonkeyPatch) -> None:
    break_sampler(monkeypatch, lambda tokens: tokens[0].add_(1))
    comparison = Comparison()
    comparison.observe(patches)
    steps(3)
    told = comparison.as_dict()
    assert told["ours is wrong"] == 3 == len(told["differences"])
    assert {one["temperature"] for one in told["differences"]} == {0.0}


def seed_of(
    wanted: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]],
) -> tuple[int, np.ndarray[Any, Any]]:
    """A seed with which the noise of tokens 0 and 1 is as wanted, and that noise."""
    seeds = np.arange(100_000)[:, None]
    noise = arithmetic.gumbel(arithmetic.hash32(seeds, 5, np.arange(2)))
    seed = int(np.flatnonzero(wanted(noise))[0])
    return seed, noise[seed].astype(float)


@pytest.mark.parametrize(("more", "why"), [(3e-6, "near tie"), (1e-2, "unexplained")])
def test_scores_that_tie(more: float, why: str) -> None:
    seed, noise = seed_of(lambda noise: noise[:, 1] > noise[:, 0])
    values = np.float32([noise[1] - noise[0] + more, 0])
    told = judge(values, OFF, seed, 5, 0, 1)
    assert told["why"] == why and told["gap"] == pytest.approx(more, abs=1e-6) and told["kept"] == 2


@pytest.mark.parametrize(
    ("filters", "second", "why"),
    [
        ({"top_p": 0.424}, 0.9981, "cutoff"),
        ({"top_p": 0.6}, 0.9981, "unexplained"),
        ({"top_p": 0.6}, 1.0, TIE),
        ({"top_p": 0.6, "top_k": 2}, 0.9981, LAST),
        ({"min_p": 0.25}, 0.25001, "cutoff"),
        ({"min_p": 0.25}, 0.3, "unexplained"),
    ],
)
def test_a_token_that_vllm_does_not_keep(filters: dict[str, float], second: float, why: str) -> None:
    """Ours draws the second token, and vLLM the first one, because it cuts off ahead of it."""
    seed, _ = seed_of(lambda noise: noise[:, 1] - noise[:, 0] > 3)
    values = np.float32([0, math.log(second), -1])
    told = judge(values, OFF | filters, seed, 5, 1, 0)
    assert told["why"] == why


def test_a_token_that_the_exact_arithmetic_does_not_keep() -> None:
    seed, _ = seed_of(lambda noise: noise[:, 1] - noise[:, 0] > 3)
    first = 1 / (1 + math.exp(-1))
    for top_p, why in ((first - 1e-4, "cutoff"), (0.4, "unexplained")):
        told = judge(np.float32([1, 0]), OFF | {"top_p": top_p}, seed, 5, 0, 1)
        assert told["why"] == why and told["kept"] == 1
        assert told["shares"] == [pytest.approx((first / top_p, 1 / top_p), abs=1e-5)]
    beyond = judge(np.float32([1, 0]), OFF | {"top_p": 0.4, "top_k": NO_TOP_K}, seed, 5, 0, 1)
    assert beyond["why"] == BEYOND and beyond["shares"][0][0] > 1.8
    told = judge(np.float32([0, 0]), OFF | {"top_p": 0.4}, seed, 5, 0, 1)
    assert (told["why"], told["kept"], told["equals"]) == (TIE, 1, 2)
    assert judge(np.float32([0, 0]), OFF | {"top_k": 1}, seed, 5, 0, 1)["why"] == "unexplained"


def test_times(patches: Transaction) -> None:
    times = Times()
    times.observe(patches)
    steps(9)
    told = times.take()
    assert told["rows"] == len(KINDS[MIXED]) and told["calls"] == 9 and told["host_us"] > 0
    assert told["gpu_us"] is None and told["flashinfer"] is False and times.take() == {"calls": 0}


def test_common_tokens() -> None:
    assert common_tokens([[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 7, 6]]) == {
        "requests": 2,
        "requests_alike": 1,
        "tokens": 6,
        "tokens_before_a_difference": 4,
    }


def test_settings() -> None:
    every = [settings_of(MIXED, 8, number, drafts=False) for number in (0, 1)]
    assert (
        every[0] + every[1][:1]
        == [
            setting | ({"seed": setting["seed"] + 100 * at} if "seed" in setting else {})
            for at, setting in enumerate(KINDS[MIXED][:8])
        ]
        + KINDS[MIXED][8:]
    )
    assert not any("min_p" in setting for setting in settings_of(MIXED, 30, 0, drafts=True))


def test_what_is_run() -> None:
    assert [kind for kind in KINDS if shows(kind, 1, compares=True)] == [
        kind for kind in KINDS if MIXED in kind
    ]
    timed = [[kind for kind in KINDS if shows(kind, batch, compares=False)] for batch in (8, 9)]
    assert [len(kinds) for kinds in timed] == [2, 4] and GRAMMAR not in timed[1]
