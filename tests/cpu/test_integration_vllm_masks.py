"""Masks of kept tokens of a fake of vLLM 0.33's V2 runner, made of what our draw kept."""

from __future__ import annotations

import importlib
import random
from typing import Any

import pytest
import torch
from sampler_setup import fail
from vllm_engine import draft_batch, logits_of, native, same_as_native, sampler_batch, sampler_with
from vllm_lines import LINE, calls

from gvr_topk.integrations.vllm import sampler
from gvr_topk.integrations.vllm.upstream import MASKS, VERIFY_DRAFTS

KINDS: list[dict[str, Any]] = [
    {"top_k": 5, "seed": 17},
    {"top_k": 1},
    {"top_k": 12, "temperature": 1.6},
    {"top_k": 40, "top_p": 0.5, "temperature": 0.9, "seed": 3},
    {"min_p": 0.02, "top_p": 0.95, "top_k": 30, "seed": 5},
    {"min_p": 0.1, "temperature": 0.7, "top_k": 60},
]
"""What vLLM allows with masks: a top-k, and no greedy request."""

MODE = {"return_sampling_mask": True, "logprobs_mode": "processed_logprobs"}
OURS, THEIRS = ("gvr_topk", "masks"), ("original", "masks of filtered logits")
STEPS = 3


@pytest.fixture(autouse=True)
def served(serving: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module(MASKS.module), "MAX_COMPACT_SUPPORT", 100)


def same(got: Any, wanted: Any) -> None:
    """The same sets of the same rows, in tensors of the same kind."""
    assert got.tolists() == wanted.tolists() and torch.equal(got.counts, wanted.counts)
    for mine, theirs in zip(got[:3], wanted[:3], strict=True):
        assert (mine.shape, mine.dtype, mine.device) == (theirs.shape, theirs.dtype, theirs.device)
    assert got[3:] == wanted[3:]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masks_are_those_of_vllm(log: list[str], dtype: torch.dtype) -> None:
    """Of the tokens drawn, of requests in any order, some of which are still at their prompts."""
    one, kept = sampler_with(KINDS, **MODE), set()
    for step in range(30):
        places = random.sample(range(len(KINDS)), random.randint(1, len(KINDS)))
        one.prefill_len.gpu[:] = torch.tensor([0, 1 << 20]).repeat(6) if step % 3 == 0 else 0
        logits, inputs = logits_of(len(places), step, dtype), sampler_batch(places, 1000 * step)
        logits[0, 3 * step + 1 :] = -torch.inf  # a grammar allows few tokens
        before = logits.clone()
        got, wanted = same_as_native(one, logits, inputs)
        same(got.sampling_mask_tensors, wanted.sampling_mask_tensors)
        assert torch.equal(logits, before)
        kept |= set(got.sampling_mask_tensors.counts.tolist())
    assert 0 in kept and len(kept) > 10
    assert calls() == {("gvr_topk", "sampler"): 30, OURS: 30, THEIRS: 30}
    assert log[1:] == [LINE + "on: masks of kept tokens, from the call that draws"]


@pytest.mark.parametrize("chunk", [5, 1 << 20])
@pytest.mark.parametrize("counts", [[3, 3, 0, 2, 1, 3], [1, 2, 3, 3, 3, 0]])
def test_of_drafts(monkeypatch: pytest.MonkeyPatch, counts: list[int], chunk: int) -> None:
    """Each token has the mask that vLLM makes of its row without drafts; slots behind them have none."""
    module = importlib.import_module(VERIFY_DRAFTS.module)
    monkeypatch.setattr(module, "MAX_CHUNK_LOGITS", chunk)
    one, places, starts = sampler_with(KINDS, **MODE), range(len(KINDS)), [5] * len(counts)
    rows = [1 + count for count in counts]
    logits, inputs = logits_of(sum(rows)), draft_batch(places, starts, [[-1] * count for count in counts])
    slots, positions = inputs.expanded_idx_mapping.tolist(), inputs.positions.tolist()
    alone = native(one)(logits, draft_batch(slots, positions, [[]] * sum(rows)))
    wanted = iter(alone.sampling_mask_tensors.tolists())
    right = [part[:-1].tolist() for part in alone.sampled_token_ids[:, 0].split(rows)]
    right[0][-1] = -1
    got = module.RejectionSampler(one, STEPS)(logits, draft_batch(places, starts, right))
    assert got.num_sampled.tolist() == [counts[0], *rows[1:]]
    assert got.sampling_mask_tensors.rows_per_request == 1 + STEPS
    lists = iter(got.sampling_mask_tensors.tolists())
    for count, emitted in zip(rows, got.num_sampled.tolist(), strict=True):
        theirs = [next(wanted) for _ in range(count)]
        assert [next(lists) for _ in range(1 + STEPS)] == theirs[:emitted] + [[]] * (1 + STEPS - emitted)
    # In chunks those whose widest request is not the batch's have other columns, and are vLLM's.
    assert calls()[OURS] == 1 and (calls()[THEIRS] > 1) == (chunk == 5)


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize(
    ("params", "mode", "ours"),
    [
        ({"top_k": 101}, "processed_logprobs", False),
        ({"temperature": 0.9}, "processed_logprobs", False),
        ({"temperature": 0.0, "seed": 3}, "raw_logprobs", False),
        ({"top_k": 3, "logprobs": 0}, "processed_logprobs", False),
        ({"top_k": 3, "logprobs": 0}, "processed_logits", False),
        ({"top_k": 100}, "processed_logprobs", True),
        ({"top_k": 3, "logprobs": 0}, "raw_logprobs", True),
    ],
)
def test_which_are_made_of_filtered_logits(
    monkeypatch: pytest.MonkeyPatch, params: dict[str, Any], mode: str, ours: bool, drafts: bool
) -> None:
    """Where a request keeps many tokens or is greedy, and where log-probabilities are made of them, too."""
    one = sampler_with([*KINDS, params], return_sampling_mask=True, logprobs_mode=mode)
    if params.get("temperature") == 0:  # which has no top-k
        monkeypatch.setattr(importlib.import_module(MASKS.module), "MAX_COMPACT_SUPPORT", 300)
    # A request whose log-probabilities are asked for may be in another call of the step.
    places = [0] if drafts and "logprobs" in params else [0, 6]
    logits, inputs = logits_of(len(places)), draft_batch(places, [5] * len(places), [[]] * len(places))
    two = importlib.import_module(VERIFY_DRAFTS.module).RejectionSampler(one, 0) if drafts else one
    got = two(logits, inputs)
    assert calls()[OURS if ours else THEIRS] == 1 and (OURS in calls()) == ours
    same(got.sampling_mask_tensors, native(one)(logits, inputs).sampling_mask_tensors)


def test_other_calls(log: list[str]) -> None:
    """Other columns, another tensor, an error: vLLM makes the mask, of filtered logits or of those given."""
    one, logits, inputs = sampler_with(KINDS, **MODE), logits_of(2), sampler_batch([3, 5])
    mapping = inputs.expanded_idx_mapping, inputs.idx_mapping, inputs.idx_mapping_np
    _, left = one.sample(logits, *mapping, torch.tensor([1, 3]), *3 * (None,))
    assert left.data_ptr() == logits.data_ptr() and left.dtype == logits.dtype
    wanted = native(one)(logits, inputs).sampling_mask_tensors
    make, batch = wanted.from_logits, (inputs.cu_num_logits, torch.tensor([1, 1]))
    assert make(left, *batch, max_num_kept=60).tolists() == wanted.tolists()
    for columns in (2, 59, 61):
        found = make(left, *batch, columns)
        assert found.tolists() == wanted.tolists() and found.token_ids.shape == (2, columns)
    ids = [row.isfinite().nonzero().flatten().tolist() for row in logits]
    assert make(left[:], *batch, 60).tolists() == make(logits, *batch, 60).tolists() == ids
    assert calls()[OURS] == 1 and calls()[THEIRS] == 6
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler.MasksHook, "run", lambda *given: fail(given))
        same(one(logits, inputs).sampling_mask_tensors, wanted)
    own = "vLLM's own mask serves from now on"
    assert log[-1] == f"{LINE}fell back: mask: RuntimeError: no room for this launch. {own}"
    same(one(logits, inputs).sampling_mask_tensors, wanted)
    assert calls()["original", "masks error: RuntimeError"] == 2


def test_a_mask_that_is_not_replaced_is_made_of_filtered_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one of another plugin, which may be given any logits."""
    one, logits, inputs = sampler_with(KINDS, **MODE), logits_of(2), sampler_batch([3, 5])
    masks = importlib.import_module(MASKS.module).SamplingMaskTensors
    own = masks.from_logits
    monkeypatch.setattr(masks, "from_logits", lambda logits, *others: own(logits.clone(), *others))
    wanted = native(one)(logits, inputs).sampling_mask_tensors
    same(one(logits, inputs).sampling_mask_tensors, wanted)
    assert OURS not in calls()
