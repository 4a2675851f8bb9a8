"""One vLLM engine of ``python -m eval vllm-trial``, in a process of its own: ``SPECIFICATION RESULT``.

What a captured graph runs is settled when it is captured, so every mode needs an engine, and every engine a
process, which gives the GPU's memory back.
"""

from __future__ import annotations

import importlib
import itertools
import json
import re
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eval.common.machine import write_json
from gvr_topk.contract import exact_topk, row_lengths
from gvr_topk.evaluation.oracle import sorted_topk

STOCK, OURS, COMPARE = "stock", "ours", "compare"
MODES = (STOCK, OURS, COMPARE)
EAGER, FULL = "eager", "full"
GRAPHS = (EAGER, FULL)

SAMPLE_EVERY = 61
"""Of so many eager calls one has a row compared with the sort in NumPy, too; a prime, to meet all layers."""

FIRST_STEPS = 3
"""Tokens that every request has before a step counts as one of decode alone."""

PROFILED_STEPS = 16
"""Steps of decode alone that are profiled."""

TOP_K_KERNELS = re.compile(r"gvr|top_?k|radix", re.IGNORECASE)
"""Kernels of a decode top-k, by name; those of a sampler may be among them."""

COUNTS = ("rows", "rows_longer_than_k", "rows_that_differ")


@dataclass(frozen=True)
class Specification:
    """What one engine runs.

    Attributes
    ----------
    mode : {"stock", "ours", "compare"}
    graphs : {"eager", "full"}
    drafts : int
        Draft tokens per step, by MTP.
    model : str
        Folder of the checkpoint.
    load_format : str
        ``dummy`` has the engine fill the model, ``auto`` reads the weights.
    batches, lengths : list of int
        Cases: every batch with every context length.
    steps : int
        Tokens that each request generates.
    churn : bool
        Whether more requests than the engine has slots run at the end, of mixed lengths.
    max_model_len : int
    memory : float
        Share of the GPU's memory that the engine takes.
    profile : bool
        Whether every case runs once more under the profiler, which times the kernels.
    """

    mode: str
    graphs: str
    drafts: int
    model: str
    load_format: str
    batches: list[int]
    lengths: list[int]
    steps: int
    churn: bool
    max_model_len: int
    memory: float
    profile: bool = False

    @property
    def name(self) -> str:
        return f"{self.mode}_{self.graphs}_drafts{self.drafts}"


class Comparison:
    """Compares each result with a sort of the same scores, on the device and without a sync.

    Parameters
    ----------
    device : str or torch.device
    """

    def __init__(self, device: torch.device | str) -> None:
        # Made before the engine starts: what is made inside a capture is made anew at each replay.
        self.counts = torch.zeros(len(COUNTS), dtype=torch.int64, device=device)
        self.sampled = {"rows": 0, "rows_that_differ": 0}
        self._calls = 0

    def wrap(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``SparseIndexerTopk.forward``, whatever it runs by now."""

        def compared(
            stage: Any,
            logits: Tensor,
            seq_lens: Tensor,
            next_n: int,
            topk_indices: Tensor,
            topk_tokens: int,
            max_seq_len: int,
        ) -> None:
            forward(stage, logits, seq_lens, next_n, topk_indices, topk_tokens, max_seq_len)
            rows = logits.shape[0]
            lengths = seq_lens.reshape(-1).to(torch.int64)
            if lengths.shape[0] != rows:
                lengths = row_lengths(lengths, rows, next_n)
            self._count(logits, lengths.clamp(0, logits.shape[1]), topk_indices[:rows], topk_tokens)

        return compared

    def reset(self) -> None:
        """Forget what was counted."""
        self.counts.zero_()
        self.sampled = dict.fromkeys(self.sampled, 0)

    def as_dict(self) -> dict[str, int]:
        """What was counted; reads it from the device."""
        counted = dict(zip(COUNTS, self.counts.tolist(), strict=True))
        return counted | {f"numpy_{name}": count for name, count in self.sampled.items()}

    def _count(self, logits: Tensor, lengths: Tensor, chosen: Tensor, k: int) -> None:
        real = lengths > 0
        differ = (exact_topk(logits, lengths, k) != chosen).any(1)
        self.counts += torch.stack([real.sum(), (lengths > k).sum(), (differ & real).sum()])
        self._calls += 1
        capturing = logits.is_cuda and torch.cuda.is_current_stream_capturing()
        if self._calls % SAMPLE_EVERY == 0 and not capturing:
            wanted = sorted_topk(logits[:1].cpu(), lengths[:1].cpu(), k)
            self.sampled["rows"] += 1
            self.sampled["rows_that_differ"] += int(not torch.equal(wanted, chosen[:1].cpu()))


def engine_arguments(spec: Specification) -> dict[str, Any]:
    """Arguments of ``vllm.LLM``."""
    arguments: dict[str, Any] = {
        "model": spec.model,
        "load_format": spec.load_format,
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "seed": 0,
        "max_model_len": spec.max_model_len,
        "max_num_seqs": max(spec.batches),
        "max_num_batched_tokens": 8192,
        "gpu_memory_utilization": spec.memory,
        "enforce_eager": spec.graphs == EAGER,
        # Decode rows attend to what was chosen, however short they are.
        "attention_config": {"sparse_mla_force_mqa": True},
        # Warming up for shapes that are not run would take most of the time.
        "kernel_config": {
            "enable_jit_warmup": False,
            "enable_cutedsl_warmup": False,
            "enable_flashinfer_autotune": False,
        },
    }
    if spec.graphs == FULL:
        sizes = sorted({batch * (1 + spec.drafts) for batch in spec.batches})
        arguments["compilation_config"] = {
            "cudagraph_mode": "FULL_AND_PIECEWISE",
            "cudagraph_capture_sizes": sizes,
        }
    if spec.drafts:
        arguments["speculative_config"] = {"method": "mtp", "num_speculative_tokens": spec.drafts}
    return arguments


def prompts(count: int, lengths: Sequence[int], seed: int) -> list[list[int]]:
    """Random token ids; three quarters of each prompt are common, so that prefix caching saves time.

    Parameters
    ----------
    count : int
    lengths : sequence of int
        Of the prompts, in turn.
    seed : int
    """
    generator = torch.Generator().manual_seed(seed)
    common = torch.randint(10, 32000, (max(lengths),), generator=generator).tolist()
    made = []
    for length in itertools.islice(itertools.cycle(lengths), count):
        shared = length * 3 // 4
        own = torch.randint(10, 32000, (length - shared,), generator=generator).tolist()
        made.append(common[:shared] + own)
    return made


class KernelTimes:
    """Profiles a few steps of the engine and keeps the times of the kernels that look like a top-k."""

    def __init__(self) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities)
        self._steps = 0

    def before_step(self) -> None:
        """Start before the first step."""
        if self._steps == 0:
            self._profiler.start()
        self._steps += 1

    def after_step(self) -> None:
        """Stop after the last step."""
        if self._steps == PROFILED_STEPS:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self._profiler.stop()

    def as_dict(self) -> dict[str, Any] | None:
        """Calls and microseconds by kernel; None where there were too few steps."""
        if self._steps < PROFILED_STEPS:
            return None
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder) / "trace.json"
            self._profiler.export_chrome_trace(str(trace))
            events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
        times = defaultdict(list)
        for event in events:
            if event.get("cat") == "kernel":
                times[event["name"][:160]].append(event["dur"])
        kernels = {
            name: {
                "calls": len(spent),
                "us_median": round(statistics.median(spent), 2),
                "us_mean": round(statistics.mean(spent), 2),
                "us_longest": round(max(spent), 2),
            }
            for name, spent in times.items()
            if TOP_K_KERNELS.search(name)
        }
        total = sum(map(sum, times.values())) / PROFILED_STEPS
        return {"steps": PROFILED_STEPS, "gpu_us_per_step": round(total, 1), "kernels": kernels}


def run_requests(
    engine: Any,
    make_parameters: Callable[[int], Any],
    requests: Sequence[list[int]],
    label: str,
    kernels: KernelTimes | None = None,
) -> dict[str, Any]:
    """Run requests to their end.

    Parameters
    ----------
    engine : LLMEngine
    make_parameters : callable
        Sampling parameters of a request by its number.
    requests : sequence of list of int
    label : str
        Part of the requests' names.
    kernels : KernelTimes, optional
        Sees the steps of decode alone.

    Returns
    -------
    dict
        ``tokens``, ``steps``, ``decode_steps`` and the milliseconds of the latter, median and least.
    """
    for number, tokens in enumerate(requests):
        engine.add_request(f"{label}-{number}", {"prompt_token_ids": tokens}, make_parameters(number))
    have: dict[str, int] = {}
    decode: list[float] = []
    steps = 0
    while engine.has_unfinished_requests():
        decoding = len(have) == len(requests) and min(have.values()) >= FIRST_STEPS
        profiled = kernels if decoding and len(decode) < PROFILED_STEPS else None
        if profiled is not None:
            profiled.before_step()
        begun = time.perf_counter()
        for output in engine.step():
            have[output.request_id] = len(output.outputs[0].token_ids)
        steps += 1
        if decoding:
            decode.append(1e3 * (time.perf_counter() - begun))
        if profiled is not None:
            profiled.after_step()
    return {
        "tokens": sum(have.values()),
        "steps": steps,
        "decode_steps": len(decode),
        "decode_ms_median": round(statistics.median(decode), 3) if decode else None,
        "decode_ms_least": round(min(decode), 3) if decode else None,
    }


def run(spec: Specification, keep: Callable[[dict[str, Any]], None] = lambda result: None) -> dict[str, Any]:
    """Start the engine and run every case.

    Parameters
    ----------
    spec : Specification
    keep : callable
        Takes the result so far after each case, so that an engine that is stopped leaves what it has done.

    Returns
    -------
    dict
        JSON-ready result.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    comparison = Comparison(device) if spec.mode == COMPARE else None
    if spec.mode != STOCK:
        # Also where the checkout runs without being installed, and vLLM finds no entry point.
        importlib.import_module("gvr_topk.integrations.vllm").register()
    if comparison is not None:
        stage = importlib.import_module("vllm.model_executor.layers.indexer_topk").SparseIndexerTopk
        stage.forward = comparison.wrap(stage.forward)
    vllm = importlib.import_module("vllm")
    begun = time.perf_counter()
    engine = vllm.LLM(**engine_arguments(spec)).llm_engine
    started = time.perf_counter() - begun

    def parameters(tokens: Callable[[int], int]) -> Callable[[int], Any]:
        return lambda number: vllm.SamplingParams(
            temperature=0.0, max_tokens=tokens(number), ignore_eos=True, detokenize=False
        )

    if comparison is not None:
        comparison.reset()
    cases: list[dict[str, Any]] = []
    churn: dict[str, Any] | None = None
    given = {
        name: value for name, value in asdict(spec).items() if name not in ("model", "batches", "lengths")
    }

    def result() -> dict[str, Any]:
        counters = importlib.import_module("gvr_topk.integrations.vllm").counters().as_dict()
        return {
            **given,
            "vllm": vllm.__version__,
            "start_s": round(started, 1),
            "cases": cases,
            "churn": churn,
            "compared": None if comparison is None else comparison.as_dict(),
            "calls": counters["calls"],
            "slots": counters["requests"],
        }

    for seed, (length, batch) in enumerate(itertools.product(spec.lengths, spec.batches)):
        requests, label = prompts(batch, [length], seed), f"{length}x{batch}"
        figures = run_requests(engine, parameters(lambda number: spec.steps), requests, label)
        case = {"length": length, "batch": batch, **figures}
        cases.append(case)
        keep(result())
        if spec.profile:
            times = KernelTimes()
            enough = parameters(lambda number: FIRST_STEPS + PROFILED_STEPS + 8)
            run_requests(engine, enough, requests, f"{label} profiled", times)
            case["profile"] = times.as_dict()
            keep(result())
    if spec.churn:
        slots = max(spec.batches)
        lengths = [2200 + 370 * step for step in range(7)]
        requests = prompts(slots + slots // 2 + 8, lengths, 1000)
        figures = run_requests(engine, parameters(lambda n: 8 + 5 * (n * 5 % 9)), requests, "churn")
        churn = figures | {"requests": len(requests), "slots": slots}
    return result()


def main(arguments: Sequence[str]) -> None:
    """Run the specification in the first file, and write the second."""
    specification, target = map(Path, arguments)
    spec = Specification(**json.loads(specification.read_text()))
    write_json(target, run(spec, lambda result: write_json(target, result)))


if __name__ == "__main__":
    main(sys.argv[1:])
