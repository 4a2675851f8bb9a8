"""What ``vllm-trial`` says of tokens that our sampler and vLLM's draw, on a fake of vLLM's modules."""

import importlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from sampler_setup import change_op
from vllm_engine import draft_batch, logits_of, sampler_batch, sampler_with
from vllm_lines import break_sampler, calls

from eval.engines import vllm_sampler as trial
from gvr_topk.integrations import vllm as integration
from gvr_topk.integrations._kit.transaction import Transaction
from gvr_topk.integrations.vllm import drafts, sampler
from gvr_topk.integrations.vllm.upstream import VERIFY_DRAFTS
from gvr_topk.sampling import arithmetic

KINDS = len(trial.KINDS[trial.MIXED])
MASKS = {"return_sampling_mask": True, "logprobs_mode": "processed_logprobs"}
OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


@pytest.fixture
def patches(log: list[str]) -> Iterator[Transaction]:
    integration.register()
    made = Transaction()
    sampler_with()  # imports the modules, which ours then patches
    yield made
    made.rollback()


def steps(count: int = 20, kind: str = trial.MIXED, **given: Any) -> None:
    """Draw for requests of all kinds."""
    one, requests = sampler_with(trial.KINDS[kind], **given), len(trial.KINDS[kind])
    for step in range(count):
        one(logits_of(requests, step), sampler_batch(range(requests), step))


def test_tokens_are_compared(patches: Transaction) -> None:
    comparison = trial.Comparison()
    comparison.observe(patches)
    steps()
    told = comparison.as_dict()
    assert told["calls"] == 20 and told["rows"] == 20 * KINDS
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


@pytest.mark.parametrize("wrong", [False, True])
def test_tokens_behind_drafts_are_those_without(
    patches: Transaction, monkeypatch: pytest.MonkeyPatch, wrong: bool
) -> None:
    """Each emitted token is compared with the native one of its row; greedy requests with vLLM's drafts."""
    comparison, logits = trial.Comparison(), logits_of(10)
    comparison.observe(patches)
    greedy = logits.argmax(1).tolist()
    inputs = draft_batch([0, 1, 2], [5, 9, 7], [greedy[:3], [0], [*greedy[6:8], -1]])
    if wrong:
        change_op(monkeypatch, drafts, "verify", lambda found: found.tokens[2, 1].add_(1))
    module = importlib.import_module(VERIFY_DRAFTS.module)
    one = sampler_with([{"temperature": 0.0}, {"top_k": 2, "seed": 3}, {"temperature": 0.0}])
    module.RejectionSampler(one, 3)(logits, inputs)
    told = comparison.as_dict()
    assert told["calls"] == told["drafts_calls"] == 1 and told["rows"] == 4 + 1 + 3
    assert told["drafts_greedy_requests"] == 2 and told["drafts_first_drafts"] == 1
    counts = told["ours is wrong"], told["drafts_greedy_requests_that_differ"], len(told["differences"])
    assert counts == (wrong, wrong, wrong)


@pytest.mark.parametrize("drafts", [0, 1])
@pytest.mark.parametrize("wrong", [False, True])
def test_masks_are_compared(
    patches: Transaction, monkeypatch: pytest.MonkeyPatch, drafts: int, wrong: bool
) -> None:
    """With what vLLM's own filters leave of the same rows."""
    comparison, masked = trial.Comparison(), trial.KINDS[trial.MASKED[1]]
    comparison.observe(patches)
    if wrong:
        own = sampler.MasksHook.run
        changed = lambda *given: (found := own(*given)).token_ids[0, 0].add_(1) and found  # noqa: E731
        monkeypatch.setattr(sampler.MasksHook, "run", changed)
    module = importlib.import_module(VERIFY_DRAFTS.module)
    one, count = sampler_with(masked, **MASKS), len(masked)
    two = module.RejectionSampler(one, 1) if drafts else one
    for step in range(6):
        inputs = draft_batch(range(count), [step] * count, [[0] * drafts] * count)
        two(logits_of(count * (1 + drafts), step), inputs)
    told = comparison.as_dict()
    assert told["mask_rows"] >= 6 * count and told["mask_rows_that_differ"] == 6 * wrong
    assert calls()["gvr_topk", "masks"] == 6


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


def test_times(patches: Transaction) -> None:
    times = trial.Times()
    times.observe(patches)
    steps(9)
    told = times.take()
    assert told["rows"] == KINDS and told["calls"] == 9 and told["host_us"] > 0
    assert told["gpu_us"] is None and told["flashinfer"] is False and times.take() == {"calls": 0}
    assert calls() == {("gvr_topk", "sampler"): 9}
    times.ours = False
    steps(9)
    steps(1, trial.MASKED[1], **MASKS)
    assert times.take()["calls"] == 9 and calls() == {("gvr_topk", "sampler"): 9}
    times.ours = True
    steps(1, trial.MASKED[0], **MASKS)
    assert calls() == {("gvr_topk", "sampler"): 10, ("gvr_topk", "masks"): 1}


def test_what_tokens_were_drawn_from(patches: Transaction) -> None:
    """The row behind a refused draft is sampled again, and then has the digest that it has without drafts."""
    times, plain, drafted = trial.Times(), trial.Digests(), trial.Digests()
    times.observe(patches)
    one = sampler_with([{"seed": 0}])
    rejection = importlib.import_module(VERIFY_DRAFTS.module).RejectionSampler(one, 1)
    for digests in (plain, drafted):
        around = Transaction()
        digests.observe(around)
        for step in range(3 if digests is plain else 0):
            one(logits_of(1, step), sampler_batch([0], step))
        for at, rows in enumerate([(0, 7), (1, 2)] if digests is drafted else []):
            rejection(torch.cat([logits_of(1, row) for row in rows]), draft_batch([0], [at], [[3]]))
        around.rollback()
    answer = [[5, 6, 7]]
    assert None not in plain.of_answers(answer)[0] and len(set(plain.of_answers(answer)[0])) == 3
    assert plain.of_answers(answer) == drafted.of_answers(answer)


@pytest.mark.parametrize(("other", "differences"), [(2, 1), (5, 0), (None, 0)])
def test_streams_are_compared(other: int | None, differences: int) -> None:
    plain = {"tokens": [[1, 2, 3], [4, 5, 6]], "logits": [[7, 8, 9], [1, other, 3]]}
    drafted = {"tokens": [[1, 2, 3], [4, 9, 6]], "logits": [[7, 0, 9], [1, None if other is None else 2, 3]]}
    told = trial.common_tokens(plain, drafted)
    assert list(told.values()) == [2, 1, 6, 4, 3, differences], told
