"""The vLLM hook on a GPU: one captured graph for batches that change, with the trial's comparison in it."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from vllm_engine import Runner, draft_batch, fake_vllm, logits_of, sampler_batch, sampler_with

from eval.engines.vllm_compare import Comparison
from gvr_topk.contract import best_blocks
from gvr_topk.evaluation.oracle import sorted_topk
from gvr_topk.integrations import vllm as integration
from gvr_topk.integrations.vllm import plugin
from gvr_topk.integrations.vllm.upstream import INDEXER_MODULE, SAMPLER_MODULES, VERIFY_DRAFTS
from gvr_topk.sampling import sample, topk_logprobs, verify

pytestmark = pytest.mark.gpu

K, SEQS, WIDTH = 512, 4, 40_960


@pytest.fixture(autouse=True)
def hooked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("GVR_TOPK_DISABLE", raising=False)
    monkeypatch.setenv("GVR_TOPK_VERIFY", "100")  # a comparison inside a capture would fail
    with fake_vllm():
        integration.register()
        yield
        integration.unregister()


@pytest.fixture
def runner(hooked: None) -> Runner:
    return Runner(seqs=SEQS, topk=K, width=WIDTH, device="cuda")


def check(runner: Runner, metadata: object, chosen: dict[str, torch.Tensor]) -> None:
    step = runner.seen(metadata, chosen)
    for name, logits in step.logits.items():
        assert torch.equal(step.chosen[name], sorted_topk(logits, step.lengths, K))


def test_eager(runner: Runner) -> None:
    requests = [runner.add(name, length) for name, length in (("a", 30_000), ("b", 40_960), ("c", 400))]
    with torch.inference_mode():
        for _ in range(3):
            metadata = runner.prepare(requests)
            runner.fill()
            check(runner, metadata, runner.forward(metadata))
    assert integration.counters().calls == {("gvr_topk", "hint"): 6}


def test_prefill(runner: Runner) -> None:
    """Prompts beside decode rows: every row of them, shorter and longer than k."""
    with torch.inference_mode():
        first, *prompts = [
            runner.add(name, length) for name, length in (("a", 40_960), ("b", 9_000), ("c", 90))
        ]
        for decode, prefill in (([], [first]), ([first], prompts)):
            metadata = runner.prepare(decode, prefill)
            runner.fill()
            step = runner.seen(metadata, runner.forward(metadata))
            assert step.prompts is not None
            for name, logits in step.prompts.logits.items():
                assert torch.equal(step.prompts.chosen[name], sorted_topk(logits, step.prompts.lengths, K))
    assert integration.counters().calls == {("gvr_topk", "prefill"): 4, ("gvr_topk", "hint"): 2}


def test_one_graph_for_batches_that_change(runner: Runner) -> None:
    """Captured with requests that are none, replayed while requests come, go and change rows."""
    stage = importlib.import_module("vllm.model_executor.layers.indexer_topk").SparseIndexerTopk
    comparison = Comparison("cuda")
    ours = stage.forward
    stage.forward = comparison.wrap(ours)
    with torch.inference_mode():
        captured = runner.prepare(runner.dummies(SEQS, WIDTH))
        runner.fill()
        runner.forward(captured)  # warms up
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            static = runner.forward(captured)
        comparison.reset()
        live = [runner.add("a", 30_000), runner.add("b", 300)]
        rows = 0
        for number in range(12):
            metadata = runner.prepare(live, pads=SEQS - len(live))
            runner.fill()
            graph.replay()
            torch.cuda.synchronize()
            check(runner, metadata, static)
            rows += len(live) * len(runner.names)
            states = plugin._integration.hook.state_of(runner.builder)
            slots = states.slots.row_slot.tolist()
            assert min(slots[: len(live)]) >= 0 and set(slots[len(live) :]) == {-1}
            live.reverse()
            if number % 4 == 1:
                runner.prepare(live, [request := runner.add(f"r{number}", 20_000 + 1000 * number)])
                live.append(request)
            elif number % 4 == 3:
                runner.finish(live.pop())
    counted = comparison.as_dict()
    assert counted["rows"] == rows and counted["rows_that_differ"] == 0
    assert counted["rows_longer_than_k"] > 0
    stage.forward = ours
    assert {path for path, _ in integration.counters().calls} == {"gvr_topk"}


@pytest.mark.parametrize("width", [40_960, 524_288])
def test_candidate_blocks(width: int) -> None:
    """In a graph and outside of one, where all is compared with the fake's own choice."""
    rows, count = 6, 2048
    logits = torch.randn(rows, width, device="cuda").masked_fill(
        torch.rand(rows, 1, device="cuda") < 0.5, 2.0
    )
    logits[0, 9000:] = -torch.inf
    lengths = torch.tensor([width, 30_000, 0, 40_000, 5_000, width - 3], dtype=torch.int32, device="cuda")
    out = torch.zeros(rows, count, dtype=torch.int32, device="cuda")
    indexer = importlib.import_module(INDEXER_MODULE)

    def choose() -> None:
        indexer._select_candidate_blocks(logits, None, lengths, count, 8, out)

    choose()
    wanted = best_blocks(logits, lengths.long(), count, drop=True)
    assert torch.equal(out, wanted) and out[0, 1126] == -1 and bool((out[1] >= 0).all())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        choose()
    lengths.copy_(lengths.flip(0))
    graph.replay()
    assert torch.equal(out, best_blocks(logits, lengths.long(), count, drop=True))
    assert integration.counters().calls == {("gvr_topk", "candidates"): 2}


@pytest.mark.parametrize("n", [0, 20])
def test_log_probabilities(n: int) -> None:
    """The bits of the CPU, and the fake's own results; a vocabulary that is too wide is vLLM's."""
    draw = torch.Generator().manual_seed(n)
    logits = (3 * torch.randn(64, 128_256, generator=draw)).bfloat16()
    sampled = torch.randint(128_256, (64,), generator=draw)
    sampler = importlib.import_module(SAMPLER_MODULES[0]).Sampler()
    got = sampler.score(logits.cuda(), n, sampled.cuda())
    wanted = topk_logprobs(logits, n, sampled)
    assert all(torch.equal(mine.cpu(), other) for mine, other in zip(got[:3], wanted, strict=True))
    assert integration.counters().calls == {("gvr_topk", "logprobs"): 1}
    wide = torch.randn(1, 1 << 19, device="cuda")
    for _ in range(2):
        assert sampler.score(wide, n, sampled[:1].cuda()).logprobs.shape == (1, n + 1)
    assert integration.counters().calls["original", "logprobs error: ValueError"] == 2


def parameters_of(sampler: Any) -> dict[str, Any]:
    names = ("temperature", "top_k", "top_p", "min_p", "seeds")
    return {name: getattr(sampler.sampling_states, name).cpu for name in names}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sampler(dtype: torch.dtype) -> None:
    """The tokens of the CPU, and the fake's own; a vocabulary that is too wide is vLLM's."""
    width, places = 128_256, range(12)
    logits = logits_of(12, dtype=dtype, width=width)
    importlib.import_module("vllm.v1.worker.gpu.buffer_utils").DEVICE = "cuda"
    sampler = sampler_with(vocab_size=width)
    got = sampler(logits.cuda(), sampler_batch(places, 5, "cuda")).sampled_token_ids[:, 0]
    parameters = parameters_of(sampler)
    positions = torch.arange(6, 30, 2)
    assert torch.equal(got.cpu(), sample(logits, **parameters, positions=positions, noise="murmur"))
    for start in range(100, 2000, 100):
        sampler(logits.cuda(), sampler_batch(places, start, "cuda"))
    assert integration.counters().calls == {("gvr_topk", "sampler"): 20}
    wide = torch.randn(1, 1 << 19, device="cuda")
    for _ in range(2):
        assert sampler(wide, sampler_batch([1], 0, "cuda")).sampled_token_ids == wide.argmax()
    assert integration.counters().calls["original", "sampler error: ValueError"] == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_drafts(dtype: torch.dtype) -> None:
    """The tokens of the CPU, and of greedy requests the fake's own, with right drafts and wrong ones."""
    width, steps, places = 128_256, 3, range(12)
    logits = logits_of(12 * (1 + steps), dtype=dtype, width=width)
    importlib.import_module("vllm.v1.worker.gpu.buffer_utils").DEVICE = "cuda"
    sampler = sampler_with(vocab_size=width)
    parameters = parameters_of(sampler)
    rows = draft_batch(places, [5] * 12, [[0] * steps] * 12)
    parameters |= {
        "slots": rows.expanded_idx_mapping,
        "positions": rows.positions,
        "noise": "murmur",
    }
    right = sample(logits, **parameters).view(12, 1 + steps)[:, :steps].tolist()
    for place in places:
        right[place][place % (1 + steps) :] = [place] * (steps - place % (1 + steps))
    batch = draft_batch(places, [5] * 12, right, "cuda")
    module = importlib.import_module(VERIFY_DRAFTS.module)
    got = module.RejectionSampler(sampler, steps)(logits.cuda(), batch)
    wanted = verify(logits, batch.input_ids.cpu(), steps, **parameters)
    assert torch.equal(got.sampled_token_ids.cpu(), wanted.tokens)
    assert torch.equal(got.num_sampled.cpu(), wanted.lengths) and wanted.lengths.unique().numel() > 2
    assert integration.counters().calls == {("gvr_topk", "drafts"): 1}
