"""The hook on a GPU: in front of the real compiled TensorRT-LLM op, and inside one captured graph."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace

import pytest
import torch
from engine import GRAPH_DUMMY, SHAPES, fake_package, load_dsa

from eval.bench.baselines import TRTLLM_LIBRARY, BaselineError, given_folder, load_library
from gvr_topk.contract import exact_topk, row_lengths
from gvr_topk.integrations import tensorrt_llm as integration
from gvr_topk.integrations._kit import environment
from gvr_topk.integrations.tensorrt_llm.selection import DecodeOp
from gvr_topk.integrations.tensorrt_llm.upstream import FUSED_SAMPLER

pytestmark = pytest.mark.gpu

K, REQUESTS, LAYERS, WIDTH = 2048, 8, 2, 40960


class Rank:
    """One rank of the fake engine on the GPU, with scores given directly instead of computed."""

    def __init__(self, dsa) -> None:
        config = SimpleNamespace(index_topk=K, skip_indexer_for_short_seqs=True)
        self.manager = dsa.DSACacheManager(
            num_layers=LAYERS, head_dim=1, max_seq_len=WIDTH, max_batch_size=REQUESTS, device="cuda"
        )
        self.eager = dsa.DSAtrtllmAttentionMetadata(
            max_num_requests=REQUESTS,
            max_num_tokens=4 * REQUESTS,
            kv_cache_manager=self.manager,
            sparse_attention_config=config,
            device="cuda",
        )
        self.indexers = [
            dsa.Indexer(None, None, None, False, config, None, layer_idx=i) for i in range(LAYERS)
        ]
        self.rows = 0
        self.scores = torch.zeros(LAYERS, 4 * REQUESTS, WIDTH, device="cuda")
        sys.modules["fake_base"].fp8_paged_mqa_logits = lambda *_: self.scores[self.layer, : self.rows]

    def prepare(self, metadata, request_ids, lengths, next_n=1):
        self.rows = len(request_ids) * next_n
        metadata.set_batch(request_ids, [next_n] * len(request_ids), 0, [n - next_n for n in lengths])
        metadata.prepare()

    def forward(self, metadata):
        outputs = []
        for layer, indexer in enumerate(self.indexers):
            self.layer = layer
            x = torch.zeros(self.rows, 1, 1, device="cuda")
            outputs.append(indexer.sparse_attn_indexer(metadata, x, x, x, x, x[:, 0]))
        return outputs


def scores(rows: int, seed: int) -> torch.Tensor:
    """Rows without equal values, so that the k largest are one set for every correct op."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    order = torch.argsort(torch.rand(rows, WIDTH, device="cuda", generator=generator), dim=1)
    return order.to(torch.float32) - WIDTH / 2


def wanted(values, lengths, next_n=1):
    lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    return exact_topk(values, row_lengths(lens, values.shape[0], next_n), K)


@pytest.fixture(params=["{}", '{"stats": true}'], ids=["predictor alone", "positions and statistics"])
def hooked(request, monkeypatch):
    monkeypatch.setenv("TRTLLM_GVR_TOPK", "1")
    monkeypatch.setenv("TRTLLM_GVR_TOPK_OPTIONS", request.param)
    try:
        load_library(given_folder(None), TRTLLM_LIBRARY)
    except BaselineError as error:
        pytest.skip(str(error))
    with fake_package("trtllm_1_2", topk=K):
        dsa = load_dsa()
        assert integration.install(), dict(integration.describe())["would happen"]
        yield dsa
        integration.uninstall()


@pytest.mark.parametrize("next_n", [1, 2, 4])
def test_the_real_op_is_replaced_falls_back_and_agrees(hooked, next_n):
    op = torch.ops.trtllm.indexer_topk_decode
    assert isinstance(op, DecodeOp)
    lengths = [3000 + 4500 * i for i in range(REQUESTS)]
    rank = Rank(hooked)
    rank.scores[:, : REQUESTS * next_n] = torch.stack(
        [scores(REQUESTS * next_n, 10 + i) for i in range(LAYERS)]
    )
    rank.prepare(rank.eager, list(range(50, 50 + REQUESTS)), lengths, next_n)
    ours = rank.forward(rank.eager)
    assert integration.counters().calls == {("gvr_topk", "hint"): LAYERS}
    lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    for layer, chosen in enumerate(ours):
        values = rank.scores[layer, : REQUESTS * next_n]
        theirs = torch.full_like(chosen, -7)
        op(values, lens, theirs, next_n)  # outside of the indexer: the original runs
        assert torch.equal(theirs.sort(dim=1).values, chosen.sort(dim=1).values)
        assert torch.equal(chosen, wanted(values, lengths, next_n))
    assert integration.counters().calls["original", "not from the indexer"] == LAYERS


@pytest.mark.parametrize("next_n", [1, 3])
def test_one_graph_serves_growing_rows_and_changing_requests(hooked, next_n):
    rank = Rank(hooked)
    metadata = rank.eager.create_cuda_graph_metadata(REQUESTS, max_draft_tokens=next_n - 1)
    rank.prepare(rank.eager, [GRAPH_DUMMY] * REQUESTS, [K + next_n] * REQUESTS, next_n)
    rank.prepare(metadata, [GRAPH_DUMMY] * REQUESTS, [K + next_n] * REQUESTS, next_n)
    rank.forward(metadata)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = rank.forward(metadata)
    rows = REQUESTS * next_n
    base = torch.stack([scores(rows, i) for i in range(LAYERS)])
    lengths = {100 + i: 2500 + 900 * i for i in range(12)}
    for step in range(25):
        live = [100 + (step // 3 + i * 5) % 12 for i in range(REQUESTS - step % 3)]
        ids = live + [GRAPH_DUMMY] * (REQUESTS - len(live))
        seen = [lengths.get(i, K + next_n) for i in ids]
        noise = torch.randn(rows, WIDTH, device="cuda", generator=torch.Generator("cuda").manual_seed(step))
        rank.scores[:, :rows] = base + 50 * noise
        rank.prepare(metadata, ids, seen, next_n)
        graph.replay()
        for layer, chosen in enumerate(outputs):
            assert torch.equal(chosen, wanted(rank.scores[layer, :rows], seen, next_n))
        for request in live:
            lengths[request] += 37
    counted = integration.counters()
    assert counted.rows["dummy"] > 0 and counted.requests["evicted"] > 0
    if environment.options().stats:
        assert counted.measured.hinted > 0 and 0 <= counted.measured.hit_ratio <= 1
    assert not any(path == "original" for path, _ in counted.calls)


def test_the_hooked_call_allocates_nothing(hooked):
    rank = Rank(hooked)
    rank.prepare(rank.eager, [1, 2, 3], [5000, 6000, 7000])
    op, hook = torch.ops.trtllm.indexer_topk_decode, integration.plugin._integration.hook
    out = torch.empty(3, K, dtype=torch.int32, device="cuda")
    lens, values = rank.eager.kv_lens_cuda_runtime[:3], rank.scores[0, :3]
    hook._local.call = hook._open_call(rank.indexers[0], rank.eager)
    try:
        op(values, lens, out, 1)
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        torch.cuda.set_sync_debug_mode("error")
        op(values, lens, out, 1)
        torch.cuda.set_sync_debug_mode("default")
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    finally:
        torch.cuda.set_sync_debug_mode("default")
        del hook._local.call


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fused_sampler_in_one_graph(monkeypatch, dtype):
    """A replay draws the CPU's tokens of its offsets, and other ones at every replay without a seed."""
    monkeypatch.setenv("TRTLLM_GVR_TOPK", "1")
    monkeypatch.setenv("TRTLLM_GVR_TOPK_SAMPLER", "1")
    rows, generator = 8, torch.Generator().manual_seed(3)
    logits = (2 * torch.randn(rows, 32_000, generator=generator)).to(dtype)
    columns = (
        [1.0, 0.7, 1e-5, 1.3] * 2,
        [0, 50, 0, 500] * 2,
        [1.0, 0.9, 1.0, 0.8] * 2,
        [0.0, 0.0, 0.0, 0.01] * 2,
    )
    kinds = (torch.float32, torch.int32, torch.float32, torch.float32)
    parameters = [torch.tensor(column, dtype=kind) for column, kind in zip(columns, kinds, strict=True)]
    seed, offset = torch.arange(rows) // 2, torch.zeros(rows, dtype=torch.int64)
    with fake_package(SHAPES[-1]):
        assert integration.install()
        fused = importlib.import_module(FUSED_SAMPLER)
        arguments, noise = [each.cuda() for each in (logits, *parameters)], [seed.cuda(), offset.cuda()]

        def run():
            named = dict(zip(("seed", "offset"), noise, strict=True))
            drawn = fused.fused_sample_from_logits_with_probs(*arguments, **named)
            return *drawn, fused.fused_sample_from_logits(*arguments)

        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            tokens, probs, fresh = run()
        seen = []
        for step in range(4):
            noise[1].fill_(step)
            graph.replay()
            wanted = fused.fused_sample_from_logits_with_probs(
                logits, *parameters, seed=seed, offset=offset + step
            )
            assert torch.equal(tokens.cpu(), wanted[0]) and torch.equal(probs.cpu(), wanted[1])
            seen += [tuple(tokens.tolist()), tuple(fresh.tolist())]
        assert len(set(seen)) == len(seen) and fused.calls == []
        integration.uninstall()
