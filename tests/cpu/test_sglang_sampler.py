"""Tokens of a fake of SGLang 0.5.23's sampler, drawn by our op if asked for; what SGLang draws itself."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import sglang_base as base
import torch
from sampler_setup import change_op, fail, law
from sglang_base import CALLS, HookRegistry
from sglang_setup import fake_sglang, logged
from torch import Tensor

from gvr_topk.integrations.sglang import register, sampler
from gvr_topk.sampling import arithmetic, sample

WIDTH = 200
DRAFTS = 3
REQUESTS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"sampling_seed": 1},
    {"temperature": 0.7, "sampling_seed": 2**40 + 3},
    {"top_k": 5},
    {"top_p": 0.6, "sampling_seed": 5},
    {"temperature": 1.5, "top_k": 20, "top_p": 0.8, "sampling_seed": 6},
    {"min_p": 0.1, "sampling_seed": 7},
    {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "min_p": 0.05, "sampling_seed": 8},
    {"top_k": 1, "sampling_seed": 9},
    {"top_k": -1, "top_p": 1.0, "min_p": 0.0, "sampling_seed": 10},
]
"""Requests of all kinds; one without a seed has SGLang's default, 42."""
ROWS = len(REQUESTS)


class SGLang:
    """The fake, with the plugin in it once a server is started."""

    def start(self, **arguments: Any) -> Any:
        """A runner of a server with these arguments."""
        base.load_plugins([register])
        self.publish(**arguments)
        return importlib.import_module("sglang.srt.model_executor.model_runner").ModelRunner()

    def publish(self, **arguments: Any) -> None:
        args = importlib.import_module("sglang.srt.server_args").ServerArgs(**arguments)
        importlib.import_module("sglang.srt.runtime_context").publish(args)

    @property
    def module(self) -> Any:
        return importlib.import_module("sglang.srt.layers.sampler")

    def batch(self, requests: Any = REQUESTS, **others: Any) -> Any:
        info = importlib.import_module("sglang.srt.sampling.sampling_batch_info")
        return info.SamplingBatchInfo(requests, **others)

    def target_probs(self, requests: Any, logits: Tensor) -> Tensor:
        utils = importlib.import_module("sglang.srt.speculative.dflash_utils")
        return utils.build_speculative_verify_target_probs(
            next_token_logits=logits,
            sampling_info=self.batch(requests),
            draft_token_num=DRAFTS,
            bs=len(requests),
            max_top_k=WIDTH,
        )

    @property
    def trees(self) -> Any:
        return importlib.import_module("sglang.srt.speculative.eagle_utils")

    def tree_probs(
        self, requests: Any, logits: Tensor, bias: Tensor | None = None, mask: Any = None
    ) -> Tensor:
        info = self.batch(requests)
        info.logit_bias = bias
        batch = SimpleNamespace(seq_lens=requests, sampling_info=info)
        output = SimpleNamespace(next_token_logits=logits.clone())
        self.trees.eagle_sample(SimpleNamespace(draft_token_num=DRAFTS), batch, output, mask)
        return self.trees.VERIFIED.pop()


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> Iterator[SGLang]:
    monkeypatch.setenv("GVR_TOPK_SAMPLER", "1")
    monkeypatch.setattr(sampler, "DEVICE", "cpu")
    with fake_sglang("sglang_dsa", monkeypatch):
        yield SGLang()


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Any:
    return logged(caplog)


def logits_of(rows: int = ROWS, step: int = 0) -> Tensor:
    return 2 * torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(step))


def positions_of(rows: int = ROWS, step: int = 0) -> Tensor:
    return 1000 + 10 * step + torch.arange(rows)


def ours(runner: Any, info: Any, logits: Tensor, positions: Tensor, **others: Any) -> Any:
    """Let a runner sample, and see that SGLang has drawn nothing."""
    CALLS.clear()
    result = runner.sample(logits, info, positions, **others)
    assert not CALLS
    return result


def natively(sglang: SGLang, runner: Any, backend: str, *call: Any, **others: Any) -> Any:
    """What SGLang's sampler does with a call."""
    sglang.publish(sampling_backend=backend)
    runner.sampler = sglang.module.Sampler()
    return runner.sample(*call, **others)


def law_of(logits: Tensor, request: dict[str, Any]) -> Tensor:
    asked = {"temperature": 1.0, "top_k": -1, "top_p": 1.0, "min_p": 0.0} | request
    asked.pop("sampling_seed", None)
    return law(logits, **asked, joint=True)


def recomputed(logits: Tensor, request: dict[str, Any], position: int) -> int:
    """The token that SGLang's noise in fp64 draws where its uniform number runs the other way."""
    hashes = arithmetic.hash32(request.get("sampling_seed", 42), position, np.arange(WIDTH)).astype(float)
    noise = -np.log(-np.log((2.0**32 - 0.5 - hashes) / 2.0**32))
    return int((law_of(logits, request).log() + torch.from_numpy(noise)).argmax())


@pytest.mark.parametrize("rows", [1, 3, ROWS])
def test_tokens_of_requests_of_all_kinds(sglang: SGLang, lines: Any, rows: int) -> None:
    """Seeded rows are a recomputation in fp64; none has a near tie here, so all tokens are equal."""
    runner = sglang.start(enable_deterministic_inference=True)
    drawn = 0
    for step in range(120 // rows):
        requests = [REQUESTS[(rows * step + row) % ROWS] for row in range(rows)]
        logits, positions = logits_of(rows, step), positions_of(rows, step)
        before = logits.clone()
        tokens, _ = ours(runner, sglang.batch(requests), logits, positions)
        assert torch.equal(logits, before)
        wanted = [recomputed(*call) for call in zip(logits, requests, positions.tolist(), strict=True)]
        assert tokens.tolist() == wanted
        drawn += int((tokens != logits.argmax(1)).sum())
    assert drawn > 30  # the others are not greedy alone
    assert lines("sampler") == ["on: sampler"]


def test_the_hash_is_that_of_sglang_and_the_noise_is_not(sglang: SGLang) -> None:
    """Its uniform number rises with the hash and ours falls, so tokens differ, with the same law."""
    seeds = torch.tensor([0, 42, -3, 2**40 + 5, 2**62 + 11])
    positions = torch.tensor([0, 1, 5, 131_072, 2**31 + 3])
    theirs = sglang.module.murmur_hash32(seeds, positions, torch.arange(WIDTH)).numpy()
    mine = arithmetic.hash32(seeds.numpy()[:, None], positions.numpy()[:, None], np.arange(WIDTH))
    assert np.array_equal(theirs, mine)
    assert (np.diff(arithmetic.gumbel(np.sort(mine[0]))) < 0).all()
    logprobs, seed, position = torch.zeros(1, WIDTH), seeds[1:2], positions[1:2]
    assert int(sglang.module.multinomial_with_seed(logprobs, seed, position)) == mine[1].argmax()
    assert int(sample(logprobs, seeds=seed, positions=position, noise="murmur")) == mine[1].argmin()


def test_without_seeds(sglang: SGLang) -> None:
    """PyTorch's generator decides; greedy rows stay greedy, and the others keep to what is kept."""
    runner = sglang.start()
    info, logits = sglang.batch(), logits_of()
    assert info.sampling_seed is None
    draws = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        # Positions may be of other rows, as they are not looked at.
        draws += [ours(runner, info, logits, torch.arange(3))[0] for _ in range(20)]
    assert torch.equal(torch.stack(draws[:20]), torch.stack(draws[20:40]))
    drawn = torch.stack(draws).T
    assert (drawn[[0, 8]] == logits[[0, 8]].argmax(1)[:, None]).all()
    for row, request in enumerate(REQUESTS):
        assert (law_of(logits[row], request)[drawn[row]] > 0).all()
        assert len(set(drawn[row].tolist())) > 1 or row in (0, 8)
    alike, _ = ours(runner, sglang.batch(30 * [{}]), torch.zeros(30, WIDTH), torch.arange(30))
    assert len(set(alike.tolist())) > 15


# ------------------------------------------------------------- which sampler a server has


@pytest.mark.parametrize(
    ("switch", "arguments", "on"),
    [
        ("0", {"sampling_backend": "gvr_topk"}, True),
        ("0", {}, False),
        ("0", {"enable_deterministic_inference": True}, False),
        # SGLang sets the backend to its own then, whatever was asked for.
        ("1", {"sampling_backend": "gvr_topk", "enable_deterministic_inference": True}, True),
    ],
)
def test_the_switch_or_the_backend(
    sglang: SGLang, monkeypatch: pytest.MonkeyPatch, lines: Any, switch: str, arguments: Any, on: bool
) -> None:
    monkeypatch.setenv("GVR_TOPK_SAMPLER", switch)
    base.load_plugins([register])  # before the arguments are read
    runner = sglang.start(**arguments)
    runner.sample(logits_of(1), sglang.batch([{"top_k": 3}]), positions_of(1))
    assert dict(CALLS) == ({} if on else {"draw": 1})
    assert lines("sampler") == (["on: sampler"] if on else [])
    assert on or type(runner.sampler) is sglang.module.Sampler
    sglang.target_probs(REQUESTS[:1], logits_of(DRAFTS))
    sglang.tree_probs(REQUESTS[3:4], logits_of(DRAFTS))
    assert CALLS["target_probs"] == CALLS["softmax"] == (switch == "0")


def test_a_sampler_of_somebody_else_stays(sglang: SGLang) -> None:
    other = type("Other", (sglang.module.Sampler,), {})
    sglang.module.register_sampler_backend("other", other)
    assert type(sglang.start(sampling_backend="other").sampler) is other


@pytest.mark.parametrize(("variable", "value"), [("GVR_TOPK_SGLANG", "0"), ("GVR_TOPK_DISABLE", "1")])
def test_off(sglang: SGLang, monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    monkeypatch.setenv(variable, value)
    assert type(sglang.start().sampler) is sglang.module.Sampler
    assert not HookRegistry._hooks and not sglang.module._CUSTOM_SAMPLER_FACTORIES
    with pytest.raises(ValueError, match="invalid choice"):
        sglang.publish(sampling_backend="gvr_topk")


@pytest.mark.parametrize(
    ("switch", "owner", "method", "level"),
    [
        ("1", "Sampler.", "forward", "WARNING"),
        ("0", "Sampler.", "_sample_from_probs", "INFO"),
        ("1", "", "create_sampler", "WARNING"),
    ],
)
def test_a_changed_signature(
    sglang: SGLang,
    monkeypatch: Any,
    lines: Any,
    caplog: Any,
    switch: str,
    owner: str,
    method: str,
    level: str,
) -> None:
    """One line says so, nothing is offered, and the top-k of the layers is hooked all the same."""
    monkeypatch.setenv("GVR_TOPK_SAMPLER", switch)
    module = sglang.module
    monkeypatch.setattr(module.Sampler if owner else module, method, lambda self, logits: None)
    base.load_plugins([register])
    assert "gvr_topk" not in module._CUSTOM_SAMPLER_FACTORIES
    (line,) = lines("sampler not offered")
    where = f"{module.__name__}.{owner}{method}"
    assert line.startswith(f"sampler not offered: LookupError: {where}: wanted (")
    assert line.endswith("got (self, logits)")
    assert [one.levelname for one in caplog.records if line in one.getMessage()] == [level]
    assert "sgl_kernel.fast_topk_v2" in HookRegistry._hooks
    assert f"{module.__name__}.create_sampler" not in HookRegistry._hooks


# ------------------------------------------------------------- beside the tokens


def test_nan_is_replaced_if_sglang_is_asked_to(sglang: SGLang) -> None:
    sglang.module.SANITIZE_NAN_LOGITS = True
    logits = logits_of(1)
    logits[0, 7] = torch.nan
    ours(sglang.start(), sglang.batch(REQUESTS[:1]), logits, positions_of(1))
    assert logits[0, 7] == -1e30


def test_log_probabilities_are_those_of_sglang(sglang: SGLang) -> None:
    """Of the token that was drawn, at the temperature of its request."""
    runner = sglang.start(enable_deterministic_inference=True)
    info, logits, positions = sglang.batch(), logits_of(), positions_of()
    wanted, _ = runner.sample(logits, info, positions)
    tokens, output = ours(runner, info, logits.clone(), positions, return_logprob=True)
    assert torch.equal(tokens, wanted)
    logprobs = (logits / info.temperatures).log_softmax(-1)
    for got, values in (
        (output.next_token_logprobs, logprobs.gather(1, tokens[:, None].long())[:, 0]),
        (output.next_token_top_logprobs_val, logprobs.topk(2).values),
    ):
        torch.testing.assert_close(got, values, rtol=1e-5, atol=1e-5)
    # The tokens of one call are not those of the next.
    again, _ = ours(runner, info, logits.clone(), positions + 7, return_logprob=True)
    assert not torch.equal(again, tokens)


@pytest.mark.parametrize("return_logprob", [False, True])
def test_ranks_agree_on_tokens_of_a_grammar(sglang: SGLang, return_logprob: bool) -> None:
    runner = sglang.start()
    info = sglang.batch([{"top_k": 3}], grammars=[object()])
    tokens, _ = ours(runner, info, logits_of(1), positions_of(1), return_logprob=return_logprob)
    assert runner.sampler.synced == [tokens]


# ------------------------------------------------------------- left to SGLang


@pytest.mark.parametrize(
    ("reason", "given", "others"),
    [
        ("a watermark", {"watermark": True}, {}),
        ("a watermark", {}, {"logprob_logits": logits_of(2)}),
        ("custom logit processors", {"processors": [lambda logits: logits[:, 3].add_(4)]}, {}),
        ("sampling masks", {"masks": torch.tensor([1])}, {}),
        (
            "log-probabilities of greedy requests alone",
            {"requests": 2 * [REQUESTS[0]]},
            {"return_logprob": True},
        ),
    ],
)
@pytest.mark.parametrize("backend", ["gvr_topk", "flashinfer"])
def test_calls(sglang: SGLang, lines: Any, backend: str, reason: str, given: Any, others: Any) -> None:
    """Under our backend the one of PyTorch draws; a batch without such a request is ours."""
    runner = sglang.start(sampling_backend=backend)
    info = sglang.batch(**{"requests": [{"top_k": 4, "top_p": 0.9}, {"temperature": 0.3}]} | given)
    logits, results, mine = logits_of(2), [], sglang.batch(REQUESTS[:2])
    ours(runner, mine, logits.clone(), positions_of(2), return_logprob=True)
    for _ in range(2):
        torch.manual_seed(5)
        results.append(runner.sample(logits.clone(), info, positions_of(2), **others))
    assert sglang.module.get_exec().kernel.sampling_backend == backend
    assert CALLS["argmax" if "requests" in given else "draw"] == 2 == CALLS.total()
    assert lines("left") == [f"sampler left to SGLang: {reason}"]
    ours(runner, mine, logits, positions_of(2))
    torch.manual_seed(5)
    inner = "pytorch" if backend == "gvr_topk" else backend
    tokens, output = natively(sglang, runner, inner, logits_of(2), info, positions_of(2), **others)
    for drawn, beside in results:
        assert torch.equal(drawn, tokens) and vars(beside).keys() == vars(output).keys()
        assert all(torch.equal(value, vars(output)[name]) for name, value in vars(beside).items())


def test_the_policy_of_a_trainer(sglang: SGLang, lines: Any) -> None:
    runner = sglang.start(rl_on_policy_target="fsdp")
    runner.sample(logits_of(1), sglang.batch(REQUESTS[1:2]), positions_of(1))
    assert CALLS == {"draw": 1}
    assert lines("left") == ["sampler left to SGLang: the policy of a trainer"]


def test_logits_that_the_ops_do_not_take(sglang: SGLang, lines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, info = sglang.start(), sglang.batch(REQUESTS[:2])
    for logits in (logits_of(2).double(), logits_of(2).T.contiguous().T):
        runner.sample(logits, info, positions_of(2))
    monkeypatch.setattr(sampler, "DEVICE", "cuda")
    runner.sample(logits_of(2), info, positions_of(2))
    assert CALLS == {"draw": 3}
    assert [line.removeprefix("sampler left to SGLang: ") for line in lines("left")] == [
        "scores of torch.float64 with strides (200, 1)",
        "scores of torch.float32 with strides (1, 2)",
        "logits on cpu",
    ]


def test_an_error_switches_it_off(sglang: SGLang, lines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = sglang.start(enable_deterministic_inference=True)
    requests = [request for request in REQUESTS if "min_p" not in request]  # SGLang refuses it here
    info, logits, positions = sglang.batch(requests), logits_of(len(requests)), positions_of(len(requests))
    with monkeypatch.context() as broken:
        change_op(broken, sampler, "sample", fail)
        first, _ = runner.sample(logits.clone(), info, positions)
    second, _ = runner.sample(logits.clone(), info, positions)
    wanted, _ = natively(sglang, runner, "pytorch", logits.clone(), info, positions)
    assert torch.equal(first, wanted) and torch.equal(second, wanted)
    error = "fell back: sampler: RuntimeError: no room for this launch"
    assert lines("sampler") == [f"{error}. SGLang's own sampler serves from now on"]


@pytest.mark.parametrize(
    ("name", "way"),
    [("build_speculative_verify_target_probs", SGLang.target_probs), ("eagle_sample", SGLang.tree_probs)],
)
def test_target_probs_are_those_of_sglang(
    sglang: SGLang, monkeypatch: Any, lines: Any, name: str, way: Callable[[SGLang, Any, Tensor], Tensor]
) -> None:
    """And the same bits in every batch; SGLang does not look at min-p there, either."""
    sglang.publish()
    requests: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8},
        {"top_k": 7, "top_p": 0.7},
        {"temperature": 1.3, "top_p": 0.5, "min_p": 0.4},
    ]
    logits = logits_of(len(requests) * DRAFTS)
    wanted = way(sglang, requests, logits)
    base.load_plugins([register])
    CALLS.clear()
    got = way(sglang, requests, logits)
    assert got.shape == wanted.shape and got.dtype == torch.float32
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-7)
    assert ((got > 0) == (wanted > 0)).all() and (got[0].amax(-1) == 1).all()
    for row, request in enumerate(requests):
        alone = way(sglang, [request], logits.view(-1, DRAFTS, WIDTH)[row])
        assert torch.equal(alone[0], got[row])
    assert not CALLS
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(sampler, "DEVICE", "cuda")
        assert torch.equal(way(sglang, requests, logits), wanted)
    change_op(monkeypatch, sampler, "renorm", fail)
    assert torch.equal(way(sglang, requests, logits), wanted)
    on, left, fell = lines(name)
    assert (on, left) == (f"on: {name}", f"{name} left to SGLang: logits on cpu")
    assert fell.startswith(f"fell back: {name}: RuntimeError: no room for this launch")


def test_a_bias_and_a_grammar_come_before_trees_are_filtered(sglang: SGLang) -> None:
    """Of equal logits the smallest ids stay; other calls of the same functions are SGLang's own."""
    sglang.publish()
    base.load_plugins([register])
    bias, logits = (torch.arange(WIDTH)[None] == 60).float(), torch.zeros(DRAFTS, WIDTH)
    grammar = SimpleNamespace(apply=lambda rows: rows[:, :50].fill_(-torch.inf))
    probs = sglang.tree_probs([{"top_k": 3}], logits, bias, grammar)
    wanted = torch.zeros(1, DRAFTS, WIDTH)
    wanted[:, :, [50, 51, 60]] = torch.tensor([1, 1, math.e]) / (2 + math.e)
    assert not CALLS
    torch.testing.assert_close(probs, wanted)
    module = sglang.trees
    flat = module.sampling_softmax(logits)
    assert torch.equal(module.top_k_renorm_prob(flat, torch.full((DRAFTS,), 3)), flat)  # all tie
    assert CALLS == {"softmax": 1, "renorm": 1}


@pytest.mark.parametrize("name", ["sampling_softmax", "top_p_renorm_prob"])
def test_trees_of_another_sglang(sglang: SGLang, lines: Any, monkeypatch: Any, name: str) -> None:
    sglang.publish()
    monkeypatch.delattr(sglang.trees, name)
    base.load_plugins([register])
    (line,) = lines("eagle_sample")
    assert line.startswith("eagle_sample not hooked: ") and name in line
    assert f"{sglang.trees.__name__}.eagle_sample" not in HookRegistry._hooks
