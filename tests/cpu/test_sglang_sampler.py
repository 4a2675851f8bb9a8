"""Tokens of a fake of SGLang 0.5.23's sampler, drawn by our op if asked for; what SGLang draws itself."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sglang_base as base
import torch
from sglang_base import CALLS, HookRegistry
from torch import Tensor

from gvr_topk.integrations._kit.engine import Engine
from gvr_topk.integrations.sglang import plugin, register, sampler
from gvr_topk.sampling import arithmetic, sample

FAKES = Path(__file__).resolve().parents[1] / "fakes"
WIDTH = 200
POSITION = 1000
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


def purge() -> None:
    for name in [name for name in sys.modules if name.split(".")[0] in ("sglang", "sgl_kernel")]:
        del sys.modules[name]


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

    def batch(self, requests: list[dict[str, Any]], **others: Any) -> Any:
        info = importlib.import_module("sglang.srt.sampling.sampling_batch_info")
        return info.SamplingBatchInfo(requests, **others)


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> Iterator[SGLang]:
    purge()
    HookRegistry.reset()
    CALLS.clear()
    for name in ("GVR_TOPK_DISABLE", "GVR_TOPK_VERIFY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GVR_TOPK_SGLANG", "1")
    monkeypatch.setenv("GVR_TOPK_SAMPLER", "1")
    monkeypatch.setattr(sampler, "DEVICE", "cpu")
    for folder in ("sglang_kernel", "sglang_dsa"):
        monkeypatch.syspath_prepend(str(FAKES / folder))
    yield SGLang()
    HookRegistry.reset()
    purge()


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Any:
    """What has been logged that holds a text."""
    caplog.set_level(logging.INFO, logger="gvr_topk.integrations.sglang")
    prefix = "gvr_topk in SGLang 0.5.23: "
    return lambda part="": [
        text.removeprefix(prefix)
        for text in (record.getMessage() for record in caplog.records)
        if part in text
    ]


def logits_of(rows: int, step: int = 0) -> Tensor:
    return 2 * torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(step))


def positions_of(rows: int, step: int = 0) -> Tensor:
    return POSITION + 10 * step + torch.arange(rows)


def ours(runner: Any, info: Any, logits: Tensor, positions: Tensor, **others: Any) -> Any:
    """Let a runner sample, and see that SGLang has drawn nothing."""
    CALLS.clear()
    result = runner.sample(logits, info, positions, **others)
    assert not CALLS
    return result


def kept(logits: Tensor, request: dict[str, Any]) -> Tensor:
    """Which tokens of a row stay: top-k and top-p of the whole row, then min-p, in fp64."""
    probs = (logits.double() / (request.get("temperature", 1.0) or 1.0)).softmax(-1)
    ranked, ids = probs.sort(descending=True)
    k = 1 if request.get("temperature") == 0 else request.get("top_k", -1)
    stays = ranked >= request.get("min_p", 0.0) * ranked[0]
    stays &= ranked.cumsum(-1) - ranked < request.get("top_p", 1.0)
    stays &= torch.arange(WIDTH) < (k if k > 0 else WIDTH)
    return torch.zeros(WIDTH, dtype=torch.bool).scatter(0, ids, stays)


def recomputed(logits: Tensor, request: dict[str, Any], position: int) -> int:
    """The token that SGLang's noise in fp64 draws where its uniform number runs the other way."""
    hashes = arithmetic.hash32(request.get("sampling_seed", 42), position, np.arange(WIDTH)).astype(float)
    noise = -np.log(-np.log((2.0**32 - 0.5 - hashes) / 2.0**32))
    scores = logits.double() / (request.get("temperature", 1.0) or 1.0) + torch.from_numpy(noise)
    return int(scores.where(kept(logits, request), -torch.inf).argmax())


@pytest.mark.parametrize("rows", [1, 3, len(REQUESTS)])
def test_tokens_of_requests_of_all_kinds(sglang: SGLang, lines: Any, rows: int) -> None:
    """Seeded rows are a recomputation in fp64; none has a near tie here, so all tokens are equal."""
    runner = sglang.start(enable_deterministic_inference=True)
    steps, drawn = 120 // rows, 0
    for step in range(steps):
        requests = [REQUESTS[(rows * step + row) % len(REQUESTS)] for row in range(rows)]
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
    noise = arithmetic.gumbel(np.sort(mine[0]))
    assert (np.diff(noise) < 0).all()
    logprobs, seed, position = torch.zeros(1, WIDTH), seeds[1:2], positions[1:2]
    assert int(sglang.module.multinomial_with_seed(logprobs, seed, position)) == mine[1].argmax()
    assert int(sample(logprobs, seeds=seed, positions=position, noise="murmur")) == mine[1].argmin()


def test_a_token_is_the_same_in_every_batch(sglang: SGLang) -> None:
    runner = sglang.start(enable_deterministic_inference=True)
    rows = len(REQUESTS)
    logits, positions = logits_of(rows), positions_of(rows)
    whole, _ = ours(runner, sglang.batch(REQUESTS), logits, positions)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(3))
    shuffled, _ = ours(runner, sglang.batch([REQUESTS[i] for i in order]), logits[order], positions[order])
    assert torch.equal(shuffled, whole[order])
    for row, request in enumerate(REQUESTS):
        alone, _ = ours(runner, sglang.batch([request]), logits[row : row + 1], positions[row : row + 1])
        assert alone.tolist() == whole[row : row + 1].tolist()


def test_without_seeds(sglang: SGLang) -> None:
    """PyTorch's generator decides; greedy rows stay greedy, and the others keep to what is kept."""
    runner = sglang.start()
    info, logits = sglang.batch(REQUESTS), logits_of(len(REQUESTS))
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
        assert kept(logits[row], request)[drawn[row]].all()
        assert len(set(drawn[row].tolist())) > 1 or row in (0, 8)


class TestChosen:
    """Which sampler a server has."""

    def test_the_backend(self, sglang: SGLang, monkeypatch: pytest.MonkeyPatch, lines: Any) -> None:
        monkeypatch.delenv("GVR_TOPK_SAMPLER")
        runner = sglang.start(sampling_backend="gvr_topk")
        ours(runner, sglang.batch(REQUESTS), logits_of(len(REQUESTS)), positions_of(len(REQUESTS)))
        assert lines("sampler") == ["on: sampler"]

    @pytest.mark.parametrize("arguments", [{}, {"enable_deterministic_inference": True}])
    def test_without_the_switch_the_backend_decides(
        self, sglang: SGLang, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, bool], lines: Any
    ) -> None:
        monkeypatch.delenv("GVR_TOPK_SAMPLER")
        runner = sglang.start(**arguments)
        assert type(runner.sampler) is sglang.module.Sampler
        runner.sample(logits_of(1), sglang.batch([{"top_k": 3}]), positions_of(1))
        assert CALLS == {"draw": 1} and lines("sampler") == []

    def test_the_switch_survives_deterministic_inference(self, sglang: SGLang) -> None:
        """SGLang sets the backend to its own then, whatever was asked for."""
        base.load_plugins([register])
        runner = sglang.start(sampling_backend="gvr_topk", enable_deterministic_inference=True)
        assert sglang.module.get_exec().kernel.sampling_backend == "pytorch"
        ours(runner, sglang.batch(REQUESTS), logits_of(len(REQUESTS)), positions_of(len(REQUESTS)))

    def test_a_sampler_of_somebody_else_stays(self, sglang: SGLang) -> None:
        class Other(sglang.module.Sampler):  # type: ignore[misc, name-defined]
            pass

        sglang.module.register_sampler_backend("other", Other)
        assert type(sglang.start(sampling_backend="other").sampler) is Other

    @pytest.mark.parametrize("variable", ["GVR_TOPK_SGLANG", "GVR_TOPK_DISABLE"])
    def test_off(self, sglang: SGLang, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
        monkeypatch.setenv(variable, "0" if variable == "GVR_TOPK_SGLANG" else "1")
        assert type(sglang.start().sampler) is sglang.module.Sampler
        assert not HookRegistry._hooks and not sglang.module._CUSTOM_SAMPLER_FACTORIES
        with pytest.raises(ValueError, match="invalid choice"):
            sglang.publish(sampling_backend="gvr_topk")

    @pytest.mark.parametrize(
        ("switch", "name", "level"),
        [
            ("1", "Sampler.forward", "WARNING"),
            ("0", "Sampler._sample_from_probs", "INFO"),
            ("1", "create_sampler", "WARNING"),
        ],
    )
    def test_a_changed_signature(
        self,
        sglang: SGLang,
        monkeypatch: pytest.MonkeyPatch,
        lines: Any,
        caplog: Any,
        switch: str,
        name: str,
        level: str,
    ) -> None:
        """One line says so, nothing is offered, and the top-k of the layers is hooked all the same."""

        def changed(self: Any, logits: Tensor) -> None: ...

        monkeypatch.setenv("GVR_TOPK_SAMPLER", switch)
        owner, _, method = name.rpartition(".")
        target = sglang.module.Sampler if owner else sglang.module
        monkeypatch.setattr(target, method, changed)
        base.load_plugins([register])
        assert "gvr_topk" not in sglang.module._CUSTOM_SAMPLER_FACTORIES
        (line,) = lines("sampler not offered")
        where = f"{sglang.module.__name__}.{name}"
        assert line.startswith(f"sampler not offered: LookupError: {where}: wanted (")
        assert line.endswith("got (self, logits)")
        assert [one.levelname for one in caplog.records if line in one.getMessage()] == [level]
        assert "sgl_kernel.fast_topk_v2" in HookRegistry._hooks
        assert f"{sglang.module.__name__}.create_sampler" not in HookRegistry._hooks

    def test_what_doctor_says(self, sglang: SGLang, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        (tmp_path / "version.py").write_text('__version__ = "0.5.23"\n')
        monkeypatch.setattr(Engine, "root", lambda engine: tmp_path)
        monkeypatch.setattr(Engine, "entry_points", lambda engine: ["gvr_topk.integrations.sglang:register"])
        said = "the server's log says which functions are hooked, and whether tokens are drawn"
        assert dict(plugin.describe())["would happen"] == said


class TestBesideTheTokens:
    def test_nan_is_replaced_if_sglang_is_asked_to(self, sglang: SGLang) -> None:
        sglang.module.SANITIZE_NAN_LOGITS = True
        logits = logits_of(1)
        logits[0, 7] = torch.nan
        ours(sglang.start(), sglang.batch(REQUESTS[:1]), logits, positions_of(1))
        assert logits[0, 7] == -1e30

    def test_log_probabilities_are_those_of_sglang(self, sglang: SGLang) -> None:
        """Of the token that was drawn, at the temperature of its request."""
        runner = sglang.start(enable_deterministic_inference=True)
        rows = len(REQUESTS)
        info, logits, positions = sglang.batch(REQUESTS), logits_of(rows), positions_of(rows)
        wanted, _ = runner.sample(logits, info, positions)
        tokens, output = ours(runner, info, logits.clone(), positions, return_logprob=True)
        assert torch.equal(tokens, wanted)
        logprobs = (logits / info.temperatures).log_softmax(-1)
        picked = logprobs.gather(1, tokens[:, None].long())[:, 0]
        torch.testing.assert_close(output.next_token_logprobs, picked, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(
            output.next_token_top_logprobs_val, logprobs.topk(2).values, rtol=1e-5, atol=1e-5
        )
        # The tokens of one call are not those of the next.
        again, _ = ours(runner, info, logits.clone(), positions + 7, return_logprob=True)
        assert not torch.equal(again, tokens)

    @pytest.mark.parametrize("return_logprob", [False, True])
    def test_ranks_agree_on_tokens_of_a_grammar(self, sglang: SGLang, return_logprob: bool) -> None:
        runner = sglang.start()
        info = sglang.batch([{"top_k": 3}], grammars=[object()])
        tokens, _ = ours(runner, info, logits_of(1), positions_of(1), return_logprob=return_logprob)
        assert runner.sampler.synced == [tokens]


def natively(sglang: SGLang, runner: Any, backend: str, *call: Any, **others: Any) -> Any:
    """What SGLang's sampler does with a call."""
    sglang.publish(sampling_backend=backend)
    runner.sampler = sglang.module.Sampler()
    return runner.sample(*call, **others)


class TestLeftToSGLang:
    """SGLang's own draw, and one line for each reason."""

    @pytest.mark.parametrize(
        ("reason", "given", "others"),
        [
            ("a watermark", {"watermark": True}, {}),
            ("a watermark", {}, {"logprob_logits": logits_of(2)}),
            ("custom logit processors", {"processors": [lambda logits: logits[:, 3].add_(4)]}, {}),
            ("sampling masks", {"masks": torch.tensor([1])}, {}),
        ],
    )
    @pytest.mark.parametrize("backend", ["gvr_topk", "flashinfer"])
    def test_calls(
        self, sglang: SGLang, lines: Any, backend: str, reason: str, given: Any, others: Any
    ) -> None:
        """Under our backend the one of PyTorch draws; a batch without such a request is ours."""
        runner = sglang.start(sampling_backend=backend)
        info = sglang.batch([{"top_k": 4, "top_p": 0.9}, {"temperature": 0.3}], **given)
        logits, results = logits_of(2), []
        mine = sglang.batch(REQUESTS[:2])
        ours(runner, mine, logits.clone(), positions_of(2), return_logprob=True)
        for _ in range(2):
            torch.manual_seed(5)
            results.append(runner.sample(logits.clone(), info, positions_of(2), **others))
        assert sglang.module.get_exec().kernel.sampling_backend == backend
        assert CALLS == {"draw": 2} and lines("left") == [f"sampler left to SGLang: {reason}"]
        ours(runner, mine, logits, positions_of(2))
        torch.manual_seed(5)
        inner = "pytorch" if backend == "gvr_topk" else backend
        tokens, output = natively(sglang, runner, inner, logits.clone(), info, positions_of(2), **others)
        for drawn, beside in results:
            assert torch.equal(drawn, tokens)
            if reason == "sampling masks":
                assert torch.equal(beside.sampling_mask_output, output.sampling_mask_output)

    def test_greedy_requests_with_log_probabilities(self, sglang: SGLang, lines: Any) -> None:
        runner = sglang.start()
        info, logits = sglang.batch([{"temperature": 0.0}] * 2), logits_of(2)
        tokens, output = runner.sample(logits, info, positions_of(2), return_logprob=True)
        assert CALLS == {"argmax": 1} and torch.equal(tokens, logits.argmax(1))
        assert output.next_token_logprobs.tolist() == logits.log_softmax(-1).amax(1).tolist()
        assert lines("left") == ["sampler left to SGLang: log-probabilities of greedy requests alone"]

    def test_the_policy_of_a_trainer(self, sglang: SGLang, lines: Any) -> None:
        runner = sglang.start(rl_on_policy_target="fsdp")
        runner.sample(logits_of(1), sglang.batch(REQUESTS[1:2]), positions_of(1))
        assert CALLS == {"draw": 1}
        assert lines("left") == ["sampler left to SGLang: the policy of a trainer"]

    def test_logits_that_the_ops_do_not_take(
        self, sglang: SGLang, lines: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        runner = sglang.start()
        info = sglang.batch(REQUESTS[:2])
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

    def test_an_error_switches_it_off(
        self, sglang: SGLang, lines: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*args: Any, **options: Any) -> Tensor:
            raise RuntimeError("no room\nfor this launch")

        runner = sglang.start(enable_deterministic_inference=True)
        requests = [request for request in REQUESTS if "min_p" not in request]  # SGLang refuses it here
        rows = len(requests)
        info, logits, positions = sglang.batch(requests), logits_of(rows), positions_of(rows)
        with monkeypatch.context() as broken:
            broken.setattr(sampler, "sample", fail)
            first, _ = runner.sample(logits.clone(), info, positions)
        second, _ = runner.sample(logits.clone(), info, positions)
        wanted, _ = natively(sglang, runner, "pytorch", logits.clone(), info, positions)
        assert torch.equal(first, wanted) and torch.equal(second, wanted)
        (line,) = lines("sampler")
        error, _, after = line.partition(". ")
        assert error == "fell back: sampler: RuntimeError: no room for this launch"
        assert after == "SGLang's own sampler serves from now on"


class TestTargetProbs:
    """Probabilities against which the drafts of DFlash are verified."""

    REQUESTS: tuple[dict[str, Any], ...] = (
        {"temperature": 0.0},
        {"temperature": 0.8},
        {"top_k": 7, "top_p": 0.7},
        {"temperature": 1.3, "top_p": 0.5, "min_p": 0.4},
    )
    DRAFTS = 3

    def probs(self, sglang: SGLang, requests: Any, logits: Tensor) -> Tensor:
        utils = importlib.import_module("sglang.srt.speculative.dflash_utils")
        return utils.build_speculative_verify_target_probs(
            next_token_logits=logits,
            sampling_info=sglang.batch(requests),
            draft_token_num=self.DRAFTS,
            bs=len(requests),
            max_top_k=WIDTH,
        )

    def test_are_those_of_sglang(self, sglang: SGLang, monkeypatch: pytest.MonkeyPatch, lines: Any) -> None:
        """And the same bits in every batch; SGLang does not look at min-p there, either."""
        sglang.publish()
        logits = logits_of(len(self.REQUESTS) * self.DRAFTS)
        wanted = self.probs(sglang, self.REQUESTS, logits)
        base.load_plugins([register])
        CALLS.clear()
        got = self.probs(sglang, self.REQUESTS, logits)
        assert not CALLS and got.shape == wanted.shape and got.dtype == torch.float32
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-7)
        assert ((got > 0) == (wanted > 0)).all() and (got[0].amax(-1) == 1).all()
        for row, request in enumerate(self.REQUESTS):
            alone = self.probs(sglang, [request], logits.view(-1, self.DRAFTS, WIDTH)[row])
            assert torch.equal(alone[0], got[row])
        monkeypatch.setattr(sampler, "DEVICE", "cuda")
        assert torch.equal(self.probs(sglang, self.REQUESTS, logits), wanted)
        name = "build_speculative_verify_target_probs"
        assert lines(name) == [f"on: {name}", f"{name} left to SGLang: logits on cpu"]

    def test_stay_without_the_switch(self, sglang: SGLang, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("GVR_TOPK_SAMPLER", "0")
        base.load_plugins([register])
        sglang.publish()
        self.probs(sglang, self.REQUESTS[:1], logits_of(self.DRAFTS))
        assert CALLS == {"target_probs": 1}


def test_rows_without_seeds_are_independent(sglang: SGLang) -> None:
    runner, info = sglang.start(), sglang.batch([{}] * 30)
    torch.manual_seed(0)
    (tokens,) = ours(runner, info, torch.zeros(30, 64), torch.arange(30))[:1]
    assert len(set(tokens.tolist())) > 15
