"""Tokens of a fake of vLLM 0.33's V2 runner, drawn by our op if asked for; what vLLM draws itself."""

from __future__ import annotations

import importlib
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from vllm_engine import Runner, lines_with_sampler

from gvr_topk import sampling
from gvr_topk.integrations import vllm as integration
from gvr_topk.integrations.vllm import sampler
from gvr_topk.integrations.vllm.upstream import SAMPLE, V1_RUNNER_MODULE
from gvr_topk.sampling import arithmetic

OURS = ("gvr_topk", "sampler")
WIDTH = 300
LINE = "gvr_topk in vLLM 0.33.0: "
ON = LINE + "on: tokens of the V2 model runner: temperature, min-p, top-k, top-p and draw"
OFF = " vLLM's own sampler serves from now on"

KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.0, "top_k": 4, "top_p": 0.2, "seed": 3},
    {"temperature": 1e-7, "seed": 4},  # vLLM raises it to 0.01
    {"temperature": 0.7, "seed": -(1 << 63)},
    {"top_k": 5, "seed": 17},
    {"top_k": 1},
    {"temperature": 1.6, "top_p": 0.8},
    {"top_k": 40, "top_p": 0.5, "temperature": 0.9, "seed": (1 << 63) - 1},
    {"min_p": 0.1, "temperature": 1.3},
    {"min_p": 0.02, "top_p": 0.95, "top_k": 30, "seed": 5},
    {"top_k": 1000, "top_p": 1.0, "min_p": 0.0, "seed": 6},
]
SLOTS = len(KINDS)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Lines of the integration, with the switch on, which serves CPUs here."""
    monkeypatch.setattr(sampler, "DEVICE", "cpu")
    random.seed(1)
    with lines_with_sampler(monkeypatch) as lines:
        yield lines


def build(kinds: list[dict[str, Any]] = KINDS, cls: str = "", **given: Any) -> Any:
    """A sampler with a request of each kind."""
    module = importlib.import_module(cls or SAMPLE.module)
    one = (module.GPUWatermarkSampler if cls else module.Sampler)(
        max_num_reqs=SLOTS, vocab_size=WIDTH, **given
    )
    params = importlib.import_module("vllm.sampling_params").SamplingParams
    for slot, kind in enumerate(kinds):
        one.add_request(slot, params(**kind))
    one.apply_staged_writes()
    return one


def batch(slots: list[int], start: int = 0) -> Any:
    """A step of these requests without drafts, as vLLM's runner makes it."""
    count, mapping = len(slots), torch.tensor(slots)
    return importlib.import_module("vllm.v1.worker.gpu.input_batch").InputBatch(
        idx_mapping=mapping,
        idx_mapping_np=mapping.numpy(),
        expanded_idx_mapping=mapping,
        expanded_local_pos=torch.zeros(count, dtype=torch.int32),
        input_ids=torch.zeros(2 * count, dtype=torch.int32),
        positions=torch.arange(start, start + 2 * count),
        logits_indices=torch.arange(1, 2 * count, 2),
        seq_lens_cpu_upper_bound=torch.arange(count),
    )


def scores(rows: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Logits with masked tokens; the rows are longer than the vocabulary."""
    draw = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(rows, WIDTH + 20, generator=draw)
    logits[:, ::7] = -torch.inf
    return logits.to(dtype)[:, :WIDTH]


def native(one: Any, logits: Tensor, step: Any, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """The tokens of vLLM's own sampler."""
    with monkeypatch.context() as patch:
        patch.setattr(type(one), "sample", type(one).sample.__wrapped__)
        return one(logits, step).sampled_token_ids


def calls() -> dict[tuple[str, str], int]:
    return integration.counters().calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 3, SLOTS])
def test_tokens_are_those_of_vllm(
    log: list[str], monkeypatch: pytest.MonkeyPatch, rows: int, dtype: torch.dtype
) -> None:
    """Requests of all kinds in a batch, in any order; no row has a near tie here, so all tokens are equal."""
    integration.register()
    one = build()
    drawn = []
    steps = 240 // rows
    for step in range(steps):
        slots = random.sample(range(SLOTS), rows)
        logits, inputs = scores(rows, step, dtype), batch(slots, 1000 * step)
        before = logits.clone()
        got = one(logits, inputs).sampled_token_ids
        assert got.shape == (rows, 1) and got.dtype == torch.int64
        assert torch.equal(got, native(one, logits, inputs, monkeypatch))
        assert torch.equal(logits, before)
        drawn.append((got[:, 0] != logits.float().argmax(1)).sum())
    assert sum(drawn) > 0.3 * 240  # most rows are not greedy
    assert calls() == {OURS: steps} and log == [ON]


def test_a_row_does_not_see_its_batch(log: list[str]) -> None:
    integration.register()
    one, logits = build(), scores(SLOTS)
    whole = one(logits, batch(list(range(SLOTS)))).sampled_token_ids
    for slot in range(SLOTS):
        alone = batch([slot])
        alone.positions += 2 * slot
        assert torch.equal(one(logits[slot : slot + 1], alone).sampled_token_ids[0], whole[slot])


def test_what_the_op_is_given(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits and the parameters are those of vLLM, where they lie; the position is that of the input."""
    integration.register()
    given: dict[str, Any] = {}
    monkeypatch.setattr(
        sampler, "sample", lambda logits, **k: given.update(k) or sampling.sample(logits, **k)
    )
    one, logits, inputs = build(), scores(2, dtype=torch.bfloat16), batch([4, 5], 7)
    arguments = (
        inputs.expanded_idx_mapping,
        inputs.idx_mapping,
        inputs.idx_mapping_np,
        torch.tensor([8, 10]),
    )
    tokens, processed = one.sample(logits, *arguments, *3 * (None,))
    assert processed is logits and tokens.dtype == torch.int64
    for name in ("temperature", "top_k", "top_p", "min_p", "seeds"):
        assert given[name] is getattr(one.sampling_states, name).gpu
    assert given["positions"].tolist() == [8, 10] and given["slots"].dtype == torch.int32
    assert (given["order"], given["noise"]) == ("vllm", "murmur")
    assert one(logits, inputs).sampled_token_ids[:, 0].tolist() == tokens.tolist()


def test_rows_of_no_request_are_skipped(log: list[str]) -> None:
    integration.register()
    one, logits, inputs = build(), scores(4), batch([2, 3, 4, 5])
    wanted = one(logits, inputs).sampled_token_ids
    inputs.expanded_idx_mapping = torch.tensor([-1, 3, 4, -1])
    got = one(logits, inputs).sampled_token_ids
    assert torch.equal(got[1:3], wanted[1:3]) and got[0] == got[3] == -1


def test_log_probabilities_of_raw_logits(log: list[str]) -> None:
    """They stay those of the row that vLLM has."""
    integration.register()
    one = build([{"logprobs": 3, "top_p": 0.5}])
    logits = scores(1)
    got = one(logits, batch([0]))
    ids = got.logprobs_tensors.logprob_token_ids
    assert ids[0, 0] == got.sampled_token_ids[0, 0]
    torch.testing.assert_close(got.logprobs_tensors.logprobs, logits.log_softmax(1).gather(1, ids))
    assert calls() == {OURS: 1, ("gvr_topk", "logprobs"): 1}


class Quiet:
    """A processor of somebody else's."""

    def add_request(self, slot: int, params: Any) -> bool:
        return False

    def apply_staged_writes(self) -> None: ...

    def apply(self, logits: Tensor, ctx: Any) -> Tensor:
        return logits


PROCESSORS = "with penalties or other processors of logits"
THEIRS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("of another sampler, such as a watermark's", {"cls": "vllm.v1.watermarking.gpu_sampler"}, {}),
    ("with fp64 noise", {"use_fp64_gumbel": True}, {}),
    ("whose filtered logits are asked for", {"return_sampling_mask": True}, {}),
    ("whose filtered logits are asked for", {"logprobs_mode": "processed_logprobs"}, {"logprobs": 0}),
    ("whose filtered logits are asked for", {"logprobs_mode": "processed_logits"}, {"logprobs": 2}),
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
    integration.register()
    given = dict(given)
    monkeypatch.setattr(sampler, "DEVICE", given.pop("device", "cpu"))
    logits = scores(2).t().contiguous().t() if given.pop("layout", False) else scores(2)
    one = build([{"temperature": 0.8, "seed": 3}, {"seed": 4, **params}, {"seed": 5}], **given)
    for _ in range(2):
        got = one(logits, batch([0, 1])).sampled_token_ids
        assert torch.equal(got, native(one, logits, batch([0, 1]), monkeypatch))
    assert calls() == {("original", f"sampler {reason}"): 2, **_scored(params)}
    assert [line for line in log if "on:" not in line] == [
        f"{LINE}sampler: Sampler.sample of vLLM draws calls {reason}"
    ]
    if params or reason == PROCESSORS:
        one(scores(1), batch([2]))
        assert calls()[OURS] == 1


def _scored(params: dict[str, Any]) -> dict[tuple[str, str], int]:
    """Calls for log-probabilities, those beside native tokens included."""
    if "logprobs" not in params:
        return {}
    return {("original", "logprobs are logits") if params["logprobs"] else ("gvr_topk", "logprobs"): 4}


@pytest.mark.parametrize("value", [None, "0"])
def test_off_unless_asked_for(log: list[str], monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    monkeypatch.delenv("GVR_TOPK_SAMPLER")
    if value is not None:
        monkeypatch.setenv("GVR_TOPK_SAMPLER", value)
    integration.register()
    one = build()
    importlib.import_module(V1_RUNNER_MODULE)
    assert not hasattr(type(one).sample, "__wrapped__")
    one(scores(2), batch([0, 1]))
    assert calls() == {} and log == []


def test_unregister_restores_the_method(log: list[str]) -> None:
    before = vars(type(build()))["sample"]
    integration.register()
    assert vars(type(build()))["sample"].__wrapped__ is before
    integration.unregister()
    assert vars(type(build()))["sample"] is before


def test_the_v1_runner_says_that_it_is_none_of_ours(log: list[str]) -> None:
    integration.register()
    importlib.import_module(V1_RUNNER_MODULE)
    assert log == [LINE + "sampler: the V1 model runner draws its tokens itself"]


def broken(monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensor], object]) -> None:
    """Change the tokens of the op, but not what the comparison asks of it."""

    def run(logits: Tensor, **others: Any) -> Tensor:
        tokens = sampling.sample(logits, **others)
        if "limits" not in others:
            change(tokens)
        return tokens

    monkeypatch.setattr(sampler, "sample", run)


def fail(tokens: Tensor) -> None:
    raise RuntimeError("no room\nfor this launch")


def test_an_error_falls_back_and_switches_off(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The top-k of the layers goes on."""
    integration.register()
    broken(monkeypatch, fail)
    one, logits = build(), scores(3)
    for _ in range(2):
        got = one(logits, batch([2, 5, 9])).sampled_token_ids
        assert torch.equal(got, native(one, logits, batch([2, 5, 9]), monkeypatch))
        monkeypatch.setattr(sampler, "sample", sampling.sample)
    runner = Runner()
    runner.step([runner.add("a", 300)])
    assert calls() == {("original", "sampler error: RuntimeError"): 2, ("gvr_topk", "hint"): 2}
    assert log[0] == f"{LINE}fell back: sampler: RuntimeError: no room for this launch.{OFF}"


def test_a_method_that_has_changed_is_left_alone(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One line says so; log-probabilities are replaced all the same."""

    def sample(self: Any, logits: Tensor, input_batch: Any) -> None: ...

    cls = importlib.import_module(SAMPLE.module).Sampler
    monkeypatch.setattr(cls, "sample", sample)
    integration.register()
    assert cls.sample is sample
    (line,) = log
    start = (
        f"sampling stays vLLM's own: Sampler.sample in {SAMPLE.module}: wanted self, logits, expanded_idx_"
    )
    assert line.startswith(LINE + start) and line.endswith("got self, logits, input_batch")
    assert hasattr(importlib.import_module(SAMPLE.module).compute_topk_scores, "__wrapped__")


def test_the_first_calls_are_verified(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that FlashInfer would draw is compared with the native sampler; one of NaN does not count."""
    monkeypatch.setenv("GVR_TOPK_VERIFY", "2")
    integration.register()
    one, lines = build(use_flashinfer=True), []
    nan = scores(2)
    nan[:, 5] = torch.nan
    for step, logits in enumerate((nan, scores(2), scores(2), scores(2))):
        one(logits, batch([7, 9], step))
        lines.append(len(log))
    assert one.use_flashinfer and not one.use_xpu_sampler
    assert calls() == {OURS: 4} and lines == [1, 1, 2, 2]
    assert log == [ON, LINE + "verified 2 calls of sampler"]


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
    monkeypatch.setenv("GVR_TOPK_VERIFY", "8")
    integration.register()
    broken(monkeypatch, change)
    one, logits, inputs = build(), scores(2), batch([4, slot])
    for _ in range(2):
        got = one(logits, inputs).sampled_token_ids
        assert torch.equal(got, native(one, logits, inputs, monkeypatch))
    (line,) = log
    assert line.startswith(f"{LINE}fell back: sampler: Differs: row 1 of 2: token ") and line.endswith(OFF)
    assert f"{int(got[1])} by vLLM: {what}" in line
    assert calls() == {("original", "sampler error: Differs"): 2}


def explained(
    monkeypatch: pytest.MonkeyPatch, logits: Tensor, other: int, position: int, **params: Any
) -> dict[tuple[str, str], int]:
    """Let our op draw another token than vLLM in a row that is compared, and return the counts."""
    monkeypatch.setenv("GVR_TOPK_VERIFY", "1")
    integration.register()
    broken(monkeypatch, lambda tokens: tokens.fill_(other))
    one = build([{"seed": 11, **params}])
    inputs = batch([0], position - 1)  # the input behind it is the one that is sampled
    assert int(native(one, logits, inputs, monkeypatch)) != other
    assert one(logits, inputs).sampled_token_ids.item() in (
        other,
        int(native(one, logits, inputs, monkeypatch)),
    )
    return calls()


def two_tokens(first: float, second: float) -> Tensor:
    logits = torch.full((1, WIDTH), -torch.inf)
    logits[0, 20], logits[0, 30] = first, second
    return logits


def position_where(better: int) -> int:
    """A position at which the noise of token 20 or 30 is the larger one by far."""
    for position in range(1, 1000):
        noise = arithmetic.gumbel(arithmetic.hash32(11, position, np.array([20, 30])))
        if (noise[0] - noise[1]) * (better - 25) < -2:
            return position
    raise AssertionError


@pytest.mark.parametrize("more", [0.0, 1e-3])
@pytest.mark.parametrize("sign", [-1, 1])
def test_a_near_tie_of_the_noise(
    log: list[str], monkeypatch: pytest.MonkeyPatch, sign: int, more: float
) -> None:
    """Two scores that are equal but for the rounding may change places; others may not."""
    position = position_where(30)
    noise = arithmetic.gumbel(arithmetic.hash32(11, position, np.array([20, 30]))).astype(float)
    logits = two_tokens(noise[1] - noise[0] + sign * (3e-6 + more), 0.0)
    counts = explained(monkeypatch, logits, 30 if sign > 0 else 20, position)
    assert counts == ({("original", "sampler error: Differs"): 1} if more else {OURS: 1})


@pytest.mark.parametrize(
    ("params", "second", "near"),
    [
        ({"top_p": 0.5}, 1.0, True),
        ({"top_p": 0.4}, 1.0, False),
        ({"min_p": 0.25}, 0.2499, True),
        ({"min_p": 0.25}, 0.24, False),
    ],
)
def test_a_token_at_the_border_of_a_filter(
    log: list[str], monkeypatch: pytest.MonkeyPatch, params: dict[str, float], second: float, near: bool
) -> None:
    """Sums and thresholds of vLLM are rounded, so it may drop it; one that is further away it may not."""
    counts = explained(monkeypatch, two_tokens(0.0, math.log(second)), 30, position_where(30), **params)
    assert counts == ({OURS: 1} if near else {("original", "sampler error: Differs"): 1})
