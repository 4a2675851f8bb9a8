"""Decode with and without the TensorRT-LLM hook, on indexer scores of a real trace.

A stand-in for the indexer of TensorRT-LLM 1.2 (`tests/fakes`, same names and signatures) decodes for a
fixed number of requests that arrive and finish. A request enters with one eager step over its last
prompt token, which seeds its hint; all other steps replay **one** CUDA graph, captured once, while rows
grow and requests change. Rows change places when a request comes or goes. Every run does the same steps:

* ``off``: the top-k op of TensorRT-LLM (the compiled one where its package is installed);
* ``on``: the same program with the hook installed and the key set, as `serve` would.

The selected sets of ``off`` and ``on`` are compared at every step. Not run here: TensorRT-LLM itself.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any
from unittest.mock import patch

import torch
import typer
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "fakes"))

from engine import GRAPH_DUMMY, fake_package, load_dsa

from eval.bench.baselines import load_trtllm_op
from eval.common.machine import describe_machine, without_folders, write_json
from eval.common.options import Commit, Device, options_of, require_device, require_writable
from eval.common.timing import microseconds
from gvr_topk.evaluation.trace import Trace, TraceError, load_trace, shipped_trace
from gvr_topk.integrations import tensorrt_llm as integration
from gvr_topk.integrations.tensorrt_llm.hook import LayerHook

SCALE = 8.0
"""Divisor of the traces' score formula."""


@dataclass
class Arrival:
    """One request: which part of the trace it reads."""

    request_id: int
    shift: int  # its first key is this key of the trace
    start: int  # its first decode step is this step of the trace
    steps: int


@dataclass(frozen=True)
class Settings:
    """What to simulate."""

    device: Device = "cuda"
    trace: Annotated[list[Path] | None, typer.Option(help="One layer each; default: the shipped one.")] = None
    requests: Annotated[int, typer.Option(min=1, help="Rows of the captured graph.")] = 8
    steps: Annotated[int, typer.Option(min=3, help="Decode steps.")] = 400
    window: Annotated[int, typer.Option(min=1, help="Longest row, in keys.")] = 32768
    topk: Annotated[int, typer.Option(min=1, help="Items per row.")] = 2048
    seed: Annotated[int, typer.Option(help="Of the arrivals.")] = 0
    out: Annotated[Path | None, typer.Option(help="Result file; default: standard output alone.")] = None
    commit: Commit = ""


class Decoder:
    """Indexers, cache and metadata of one run; one layer per trace."""

    def __init__(self, traces: list[Trace], options: Settings) -> None:
        self.options = options
        self.dsa = load_dsa()
        self.traces = [self._tensors(trace) for trace in traces]
        self.first = traces[0].length(0) - 1  # keys before the first decode step
        config = SimpleNamespace(index_topk=options.topk, skip_indexer_for_short_seqs=True)
        keys = self.traces[0][0]
        self.manager = self.dsa.DSACacheManager(
            num_layers=len(traces),
            head_dim=keys.shape[1],
            max_seq_len=options.window,
            max_batch_size=options.requests,
            device=options.device,
        )
        self.eager = self.dsa.DSAtrtllmAttentionMetadata(
            max_num_requests=options.requests,
            max_num_tokens=options.requests,
            kv_cache_manager=self.manager,
            sparse_attention_config=config,
            device=options.device,
        )
        self.indexers = [
            self.dsa.Indexer(None, None, None, False, config, None, layer_idx=i) for i in range(len(traces))
        ]
        self.replayed = self.eager.create_cuda_graph_metadata(options.requests)
        self.inputs = [
            tuple(torch.zeros(options.requests, *part.shape[1:], device=options.device) for part in parts)
            for parts in ((q, keys, w) for keys, q, w in self.traces)
        ]
        self.graph: torch.cuda.CUDAGraph | None = None
        self.outputs: list[Tensor] = []
        self.logits: list[Tensor] = []  # of the last step, by layer
        self._calls: list[Tensor] = []
        base: Any = sys.modules["fake_base"]
        self._score = base.fp8_paged_mqa_logits
        base.fp8_paged_mqa_logits = self._keep_logits

    def _keep_logits(self, *args: Any) -> Tensor:
        self._calls.append(self._score(*args))
        return self._calls[-1]

    def _tensors(self, trace: Trace) -> tuple[Tensor, Tensor, Tensor]:
        keys, q, weights = (
            torch.from_numpy(part.astype("float32")).to(self.options.device)
            for part in (trace.K, trace.Q, trace.W)
        )
        return keys, q, weights / SCALE

    def admit(self, arrival: Arrival) -> None:
        """Put the prompt's keys into the cache, as a finished prefill or a transfer would."""
        ((block,),) = self.manager.get_batch_cache_indices([arrival.request_id])
        length = self.first + arrival.start - arrival.shift
        for layer, (keys, _, _) in enumerate(self.traces):
            self.manager.pool[layer, block, :length] = keys[arrival.shift : arrival.shift + length]

    def step(self, running: list[tuple[Arrival, int]], new: list[Arrival]) -> tuple[list[Tensor], float]:
        """One decode step, of requests in generation with their trace steps and of those in context phase.

        With any of the latter the step is eager. Returns sorted positions, ``[rows, topk]``, of each layer,
        and the microseconds of the forward pass on the device.
        """
        work = [(a, a.start - 1) for a in new] + running
        pads = 0 if new else self.options.requests - len(work)
        metadata = self.eager if new else self.replayed
        cached = [self.first + step - arrival.shift for arrival, step in work]
        metadata.set_batch(
            [a.request_id for a, _ in work] + [GRAPH_DUMMY] * pads,
            [1] * (len(work) + pads),
            len(new),
            cached + [self.options.topk] * pads,
        )
        metadata.prepare()
        index = torch.tensor([step for _, step in work], device=self.options.device)
        for (keys, q, weights), buffers in zip(self.traces, self.inputs, strict=True):
            for part, source in zip(buffers, (q, keys, weights), strict=True):
                part[: len(work)] = source[index + (self.first if source is keys else 0)]
        if new:
            self._forward(metadata, len(work))
            elapsed = 0.0
        else:
            on_gpu = self.options.device == "cuda"
            if on_gpu:
                torch.cuda.synchronize()
            elapsed = microseconds(self._replay, on_gpu=on_gpu)
        return [out[: len(work)].sort(dim=1).values.cpu() for out in self.outputs], elapsed

    def _forward(self, metadata: Any, rows: int) -> None:
        self.outputs, self.logits = [], []
        for indexer, buffers in zip(self.indexers, self.inputs, strict=True):
            self._calls = []
            self.outputs.append(indexer(*(part[:rows] for part in buffers), metadata))
            # Context requests are scored one by one; in the graph there is one call and no copy.
            self.logits.append(self._calls[0] if len(self._calls) == 1 else torch.cat(self._calls))

    def _replay(self) -> None:
        if self.options.device == "cpu":
            self._forward(self.replayed, self.options.requests)
            return
        assert self.graph is not None
        self.graph.replay()
        self.outputs, self.logits = self.static

    def tied(self, layer: int, row: int, a: Tensor, b: Tensor) -> bool:
        """Whether two selections of a row differ only among equal scores, in the last step."""
        scores = self.logits[layer][row].cpu()
        return torch.equal(*(scores[chosen.long()].sort().values for chosen in (a, b)))

    def capture(self) -> None:
        """Warm up and capture the one graph, with dummy requests in every row, as an engine does."""
        rows = self.options.requests
        self.replayed.set_batch([GRAPH_DUMMY] * rows, [1] * rows, 0, [self.options.topk] * rows)
        self.replayed.prepare()
        if self.options.device == "cpu":
            return
        self._forward(self.replayed, rows)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._forward(self.replayed, rows)
        self.static = self.outputs, self.logits


def schedule(
    trace: Trace, options: Settings
) -> list[tuple[list[tuple[Arrival, int]], list[Arrival], list[int]]]:
    """Who runs, who arrives and who has left, for every step; the same for every run."""
    rng = random.Random(options.seed)
    first = trace.length(0) - 1
    plan: list[tuple[list[tuple[Arrival, int]], list[Arrival], list[int]]] = []
    live: list[tuple[Arrival, int]] = []
    next_id = 1000
    gone: list[int] = []
    for _ in range(options.steps):
        new = []
        room = options.requests - len(live)
        if room and rng.random() < 0.5:
            for _ in range(rng.randint(1, room)):
                shortest = max(0, first - options.window + trace.steps)
                shift = rng.randint(shortest, max(shortest, first - 4 * options.topk))
                length = rng.randint(8, max(9, min(96, trace.steps - 2)))
                start = rng.randint(1, trace.steps - length)
                new.append(Arrival(next_id, shift, start, length))
                next_id += 1
        if not live and not new:
            continue
        plan.append((list(live), new, gone))
        live = [(a, step + 1) for a, step in live] + [(a, a.start) for a in new]
        gone = [a.request_id for a, step in live if step >= a.start + a.steps]
        live = [(a, step) for a, step in live if step < a.start + a.steps]
        if new or gone:
            rng.shuffle(live)
    return plan


@contextmanager
def timed_hook() -> Iterator[list[float]]:
    """Note the microseconds that each call of the hook behind ``prepare`` takes on the host."""
    original = LayerHook._after_prepare
    taken: list[float] = []

    def after_prepare(hook: LayerHook, metadata: Any) -> None:
        begun = time.perf_counter()
        original(hook, metadata)
        taken.append(1e6 * (time.perf_counter() - begun))

    with patch.object(LayerHook, "_after_prepare", after_prepare):
        yield taken


def summary(times: list[float]) -> dict[str, float]:
    """Median and 90th percentile of times, and of how many steps they are."""
    p90 = sorted(times)[9 * len(times) // 10]
    return {"median": round(statistics.median(times), 1), "p90": round(p90, 1), "steps": len(times)}


def run(
    traces: list[Trace], options: Settings, arm: str, expected: list[list[Tensor]] | None = None
) -> dict[str, Any]:
    """Run the schedule once, with the hook ``off`` or ``on``.

    ``sets`` has per step one tensor per layer, ``agreement`` how far they are those `expected`, and
    ``hook_us`` the times by kind of step, which `simulate` explains.
    """
    engine_ops: Any = torch.ops.trtllm
    sets: list[list[Tensor]] = []
    graph_us: list[float] = []
    hook_us: dict[str, list[float]] = {}
    rows: list[int] = []
    agreement = {"rows": 0, "identical": 0, "other_ties": 0, "different": 0}
    with patch.dict(os.environ), fake_package("trtllm_1_2", topk=options.topk), timed_hook() as taken:
        os.environ.pop("TRTLLM_GVR_TOPK", None)
        load_dsa()
        op = engine_ops.indexer_topk_decode
        try:
            if arm == "on":
                os.environ["TRTLLM_GVR_TOPK"] = "1"
                if not integration.install():
                    raise RuntimeError(
                        f"the hook was refused: {dict(integration.describe())['would happen']}"
                    )
            decoder = Decoder(traces, options)
            decoder.capture()
            for running, new, gone in schedule(traces[0], options):
                for request_id in gone:
                    decoder.manager.free_resources(request_id)
                for arrival in new:
                    decoder.admit(arrival)
                chosen, elapsed = decoder.step(running, new)
                if expected is not None:
                    compare(decoder, expected[len(sets)], chosen, agreement)
                sets.append(chosen)
                if not new:
                    graph_us.append(elapsed)
                before, rows = rows, [] if new else [a.request_id for a, _ in running]
                if arm == "on":
                    kind = "arrivals" if new else "same" if rows == before else "moved"
                    hook_us.setdefault(kind, []).append(taken[-1])
            seen = integration.counters().as_dict() if arm == "on" else None
        finally:
            integration.uninstall()
            engine_ops.indexer_topk_decode = op
    return {"sets": sets, "agreement": agreement, "graph_us": graph_us, "hook_us": hook_us, "counters": seen}


def compare(decoder: Decoder, wanted: list[Tensor], got: list[Tensor], agreement: dict[str, int]) -> None:
    """Count rows of one step whose selected sets agree, and those that differ only among equal scores."""
    for layer, (a, b) in enumerate(zip(wanted, got, strict=True)):
        agreement["rows"] += a.shape[0]
        for row in range(a.shape[0]):
            if torch.equal(a[row], b[row]):
                agreement["identical"] += 1
            elif decoder.tied(layer, row, a[row], b[row]):
                agreement["other_ties"] += 1
            else:
                agreement["different"] += 1


def simulate(traces: list[Trace], options: Settings, original: str) -> dict[str, Any]:
    """Run both arms and compare them; what goes into JSON. `original` is what the ``off`` arm runs."""
    results = {"off": run(traces, options, "off")}
    results["on"] = run(traces, options, "on", expected=results["off"]["sets"])
    plan = schedule(traces[0], options)
    medians = {arm: statistics.median(result["graph_us"]) for arm, result in results.items()}
    layers = len(traces)
    described = describe_machine(options.commit, options.device)
    return {
        "what": "simulated decode: indexer scores of a real trace, hook off and on; not TensorRT-LLM itself",
        "machine": described["device"],
        "versions": {
            **{name: described[name] for name in ("gvr_topk", "torch", "commit")},
            "original_op": original,
        },
        "setup": {
            "traces": [trace.name for trace in traces],
            "layers": layers,
            "requests": options.requests,
            "index_topk": options.topk,
            "longest_row": options.window,
            "steps": len(plan),
            "graph_steps": len(results["on"]["graph_us"]),
            "graphs_captured": 0 if options.device == "cpu" else 1,
            "arrivals": sum(len(new) for _, new, _ in plan),
            "finished": sum(len(gone) for _, _, gone in plan),
            "seed": options.seed,
        },
        "sets": results["on"]["agreement"],
        "step_us": {arm: round(value, 2) for arm, value in medians.items()},
        "hook_us": {kind: summary(times) for kind, times in sorted(results["on"]["hook_us"].items())},
        "method": "median over the replayed steps, CUDA events around one replay; hook_us is the host time "
        "of the hook's own call behind prepare: in replayed steps with the rows of the step before (same), "
        "in other replayed steps (moved), and in eager steps with new requests (arrivals)",
        "counters": results["on"]["counters"],
    }


@options_of(Settings)
def main(options: Settings) -> int:
    """Run and report; 1 when a set differs."""
    require_device(options.device)
    require_writable(options.out)
    if options.device == "cpu":
        torch.set_num_threads(1)
    try:
        traces = [load_trace(path) for path in options.trace] if options.trace else [shipped_trace()]
    except TraceError as error:
        raise typer.BadParameter(str(error)) from None
    compiled = options.device == "cuda" and options.topk == 2048
    missing = load_trtllm_op() if compiled else "CPU, or another k"
    original = "torch.ops.trtllm.indexer_topk_decode, compiled"
    if missing:
        original = f"exact reference in torch ({missing})"
    result = simulate(traces, options, original)
    if options.out is not None:
        write_json(options.out, result)
    print(json.dumps(without_folders(result), indent=1))
    return int(result["sets"]["different"] > 0)
