"""Tokens of a fake of vLLM 0.33's V2 runner, drawn by our op; what vLLM draws itself."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from sampler_setup import change_op, fail
from torch import Tensor
from vllm_engine import SAMPLING, Runner, logits_of, same_as_native, sampler_batch, sampler_with
from vllm_lines import LINE, calls

from gvr_topk import sampling
from gvr_topk.integrations.vllm import sampler

pytestmark = pytest.mark.usefixtures("serving")

SLOTS = len(SAMPLING)
OURS = ("gvr_topk", "sampler")
ON = LINE + "on: tokens of the V2 model runner: temperature, min-p, top-k, top-p and draw"
OFF = " vLLM's own sampler serves from now on"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 3, SLOTS])
def test_tokens_are_those_of_vllm(
    log: list[str], monkeypatch: pytest.MonkeyPatch, rows: int, dtype: torch.dtype
) -> None:
    """Requests of all kinds in a batch, in any order; no row has a near tie here, so all tokens are equal."""
    one = sampler_with()
    drawn = []
    steps = 240 // rows
    for step in range(steps):
        slots = random.sample(range(SLOTS), rows)
        logits, inputs = logits_of(rows, step, dtype), sampler_batch(slots, 1000 * step)
        before = logits.clone()
        got = same_as_native(one, logits, inputs)[0].sampled_token_ids
        assert got.shape == (rows, 1) and got.dtype == torch.int64
        assert torch.equal(logits, before)
        drawn.append((got[:, 0] != logits.float().argmax(1)).sum())
    assert sum(drawn) > 0.3 * 240  # most rows are not greedy
    assert calls() == {OURS: steps} and log == [ON]


def test_what_the_op_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits and the parameters are those of vLLM, where they lie; the position is that of the input."""
    given: dict[str, Any] = {}

    def run(logits: Tensor, **others: Any) -> Tensor:
        given.update(others, logits=logits)
        return sampling.sample(logits, **others)

    monkeypatch.setattr(sampler, "sample", run)
    one = sampler_with(logprobs_mode="processed_logprobs")  # which are not asked for
    logits, inputs = logits_of(2, dtype=torch.bfloat16), sampler_batch([4, 5], 7)
    mapping = inputs.expanded_idx_mapping, inputs.idx_mapping, inputs.idx_mapping_np
    tokens, processed = one.sample(logits, *mapping, torch.tensor([8, 10]), *3 * (None,))
    assert given["logits"] is processed is logits and tokens.dtype == torch.int64
    for name in ("temperature", "top_k", "top_p", "min_p", "seeds"):
        assert given[name] is getattr(one.sampling_states, name).gpu
    assert given["positions"].tolist() == [8, 10] and given["slots"] is inputs.expanded_idx_mapping
    assert (given["order"], given["noise"]) == ("vllm", "murmur")
    assert one(logits, inputs).sampled_token_ids[:, 0].tolist() == tokens.tolist()


def test_rows_of_no_request_are_skipped() -> None:
    one, logits, inputs = sampler_with(), logits_of(4), sampler_batch([2, 3, 4, 5])
    wanted = one(logits, inputs).sampled_token_ids
    inputs.expanded_idx_mapping = torch.tensor([-1, 3, 4, -1])
    got = one(logits, inputs).sampled_token_ids
    assert torch.equal(got[1:3], wanted[1:3]) and got[0] == got[3] == -1


def test_logits_that_are_not_filtered_are_not_copied() -> None:
    one, logits = sampler_with(return_sampling_mask=True), logits_of(2, dtype=torch.bfloat16)
    for slots, same in (([0, 1], True), ([1, 4], False)):
        inputs = sampler_batch(slots)
        mapping = inputs.expanded_idx_mapping, inputs.idx_mapping, inputs.idx_mapping_np
        _, left = one.sample(logits, *mapping, torch.tensor([8, 10]), *3 * (None,), return_logprobs=False)
        assert (left is logits) == same and (left.dtype == torch.float32) != same
    assert calls() == {OURS: 2}


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs", "processed_logits"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_made_of_the_logits(mode: str, dtype: torch.dtype) -> None:
    """Log-probabilities and masks are those of vLLM, of greedy rows too."""
    for masks in (False, True):
        one = sampler_with(
            [{**kind, "logprobs": 3} for kind in SAMPLING], logprobs_mode=mode, return_sampling_mask=masks
        )
        logits, inputs = logits_of(SLOTS, dtype=dtype), sampler_batch(range(SLOTS))
        before = logits.clone()
        got, wanted = same_as_native(one, logits, inputs)
        mine, theirs = got.logprobs_tensors, wanted.logprobs_tensors
        torch.testing.assert_close(mine.logprobs, theirs.logprobs, rtol=1e-5, atol=1e-5)
        assert torch.equal(mine.selected_token_ranks, theirs.selected_token_ranks)
        if masks:
            assert got.sampling_mask_tensors.tolists() == wanted.sampling_mask_tensors.tolists()
        assert torch.equal(logits, before)
    assert calls()[OURS] == 2


class Quiet:
    """A processor of somebody else's."""

    def add_request(self, slot: int, params: Any) -> bool:
        return False

    def apply(self, logits: Tensor, slots: Tensor) -> Tensor:
        return logits


WATERMARK = "vllm.v1.watermarking.gpu_sampler:GPUWatermarkSampler"
PROCESSORS = "with penalties or other processors of logits"
THEIRS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("of another sampler, such as a watermark's", {"cls": WATERMARK}, {}),
    ("with fp64 noise", {"use_fp64_gumbel": True}, {}),
    (PROCESSORS, {}, {"logit_bias": {5: 3.0}}),
    (PROCESSORS, {}, {"presence_penalty": 0.5}),
    (PROCESSORS, {}, {"bad_words_token_ids": [9]}),
    (PROCESSORS, {"thinking": True}, {"thinking_token_budget": 1}),
    (PROCESSORS, {"custom_logits_processors": [Quiet()]}, {}),
    ("on another device", {"device": "cuda"}, {}),
    ("of another layout", {"layout": True}, {}),
]


@pytest.mark.parametrize(("reason", "given", "params"), THEIRS, ids=range(len(THEIRS)))
def test_what_vllm_draws_itself(
    log: list[str],
    monkeypatch: pytest.MonkeyPatch,
    reason: str,
    given: dict[str, Any],
    params: dict[str, Any],
) -> None:
    """Its tokens, one line, and nothing is switched off; a batch without such a request is ours."""
    given = dict(given)
    monkeypatch.setattr(sampler, "DEVICE", given.pop("device", "cpu"))
    logits = logits_of(2).t().contiguous().t() if given.pop("layout", False) else logits_of(2)
    one = sampler_with([{"temperature": 0.8, "seed": 3}, {"seed": 4, **params}, {"seed": 5}], **given)
    for _ in range(2):
        same_as_native(one, logits, sampler_batch([0, 1]))
    assert calls() == {("original", f"sampler {reason}"): 2}
    assert log == [f"{LINE}sampler: Sampler.sample of vLLM draws calls {reason}"]
    if params or reason == PROCESSORS:
        one(logits_of(1), sampler_batch([2]))
        assert calls()[OURS] == 1


def test_an_error_falls_back_and_switches_off(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The top-k of the layers goes on."""
    change_op(monkeypatch, sampler, "sample", fail)
    one, logits = sampler_with(), logits_of(3)
    for _ in range(2):
        same_as_native(one, logits, sampler_batch([2, 5, 9]))
        monkeypatch.setattr(sampler, "sample", sampling.sample)
    runner = Runner()
    runner.step([runner.add("a", 300)])
    assert calls() == {("original", "sampler error: RuntimeError"): 2, ("gvr_topk", "hint"): 2}
    assert log[0] == f"{LINE}fell back: sampler: RuntimeError: no room for this launch.{OFF}"
