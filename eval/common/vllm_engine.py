"""One vLLM engine of ``python -m eval vllm-trial``, in a process of its own: ``SPECIFICATION RESULT``.

What a captured graph runs is settled when it is captured, so every mode needs an engine, and every engine a
process, which gives the GPU's memory back.
"""

from __future__ import annotations

import importlib
import itertools
import json
import statistics
import sys
import time
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


def run_requests(
    engine: Any, make_parameters: Callable[[int], Any], requests: Sequence[list[int]], label: str
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
        begun = time.perf_counter()
        for output in engine.step():
            have[output.request_id] = len(output.outputs[0].token_ids)
        steps += 1
        if len(have) == len(requests) and min(have.values()) >= FIRST_STEPS:
            decode.append(1e3 * (time.perf_counter() - begun))
    return {
        "tokens": sum(have.values()),
        "steps": steps,
        "decode_steps": len(decode),
        "decode_ms_median": round(statistics.median(decode), 3) if decode else None,
        "decode_ms_least": round(min(decode), 3) if decode else None,
    }


def run(spec: Specification) -> dict[str, Any]:
    """Start the engine and run every case.

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
    engine = vllm.LLM(**engine_arguments(spec)).llm_engine

    def parameters(tokens: Callable[[int], int]) -> Callable[[int], Any]:
        return lambda number: vllm.SamplingParams(
            temperature=0.0, max_tokens=tokens(number), ignore_eos=True, detokenize=False
        )

    if comparison is not None:
        comparison.reset()
    cases = []
    for seed, (length, batch) in enumerate(itertools.product(spec.lengths, spec.batches)):
        figures = run_requests(
            engine, parameters(lambda number: spec.steps), prompts(batch, [length], seed), f"{length}x{batch}"
        )
        cases.append({"length": length, "batch": batch, **figures})
    churn = None
    if spec.churn:
        slots = max(spec.batches)
        lengths = [2200 + 370 * step for step in range(7)]
        requests = prompts(slots + slots // 2 + 8, lengths, 1000)
        churn = run_requests(engine, parameters(lambda n: 8 + 5 * (n * 5 % 9)), requests, "churn")
        churn |= {"requests": len(requests), "slots": slots}
    counters = importlib.import_module("gvr_topk.integrations.vllm").counters()
    return {
        **{
            name: value for name, value in asdict(spec).items() if name not in ("model", "batches", "lengths")
        },
        "vllm": vllm.__version__,
        "cases": cases,
        "churn": churn,
        "compared": None if comparison is None else comparison.as_dict(),
        "calls": counters.as_dict()["calls"],
    }


def main(arguments: Sequence[str]) -> None:
    """Run the specification in the first file, and write the second."""
    specification, result = map(Path, arguments)
    write_json(result, run(Specification(**json.loads(specification.read_text()))))


if __name__ == "__main__":
    main(sys.argv[1:])
