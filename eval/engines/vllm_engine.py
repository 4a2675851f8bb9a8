"""One vLLM engine of ``python -m eval vllm-trial``, in a process of its own: ``SPECIFICATION RESULT``.

What a captured graph runs is settled when it is captured, so every mode needs an engine, and every engine a
process, which gives the GPU's memory back.
"""

import functools
import importlib
import itertools
import json
import os
import re
import statistics
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from eval.common.machine import write_json
from eval.engines import vllm_sampler
from eval.engines.vllm_compare import Comparison, PrefillTimes, observe
from eval.engines.vllm_model import V32, patch_loading
from eval.engines.vllm_worker import EXTENSION, PREFILL_ROWS, merge_workers, observed
from gvr_topk.integrations._kit.transaction import Transaction

STOCK, OURS, COMPARE = "stock", "ours", "compare"
MODES = (STOCK, OURS, COMPARE)
EAGER, FULL = "eager", "full"
GRAPHS = (EAGER, FULL)
CASES, INVARIANCE, SAMPLER = "cases", "invariance", "sampler"
PARTS = {CASES: MODES, INVARIANCE: (STOCK, OURS), SAMPLER: (OURS, COMPARE)}
"""Parts of a trial, and the modes in which each shows something."""

DCP_HEADS = 16
"""Heads of a GPU where several share the keys of requests: FlashMLA then serves fewer than 32."""

INVARIANCE_BATCHES = (1, 1, 2, 8, 32)
"""Batches that the same prompt is in; twice alone, for a run may differ from the next one, too."""

INVARIANCE_LENGTH, INVARIANCE_STEPS = 6144, 12
"""Tokens of that prompt, and tokens that each request generates."""

SAMPLER_VOCABULARY, SAMPLER_PROMPT = 128_256, 64
"""Logits of a row, and tokens of a prompt, where the sampler is looked at."""

GREEDY: dict[str, Any] = {"temperature": 0.0}
SEEDED = {"temperature": 0.8, "top_p": 0.95, "seed": 7}
"""Parameters of requests, and of those whose answers are repeated, where they are sampled."""

TURNS = (STOCK, OURS, OURS, STOCK)
"""Whose functions sample, one after the other, where both are timed."""

SAMPLER_CACHE = 4 << 30
"""Bytes of the cache there, so that several engines may share a GPU while they compare."""

STREAMS, STREAM_STEPS = 32, 64
"""Requests, and their tokens, whose answers with and without drafts are compared."""

FIRST_STEPS = 3
"""Tokens that every request has before a step counts as one of decode alone."""

PROFILED_STEPS = 16
"""Steps of decode alone that are profiled."""

TOP_K_KERNELS = re.compile(r"gvr|top_?k|radix", re.IGNORECASE)
"""Kernels of a decode top-k, by name; those of a sampler may be among them."""


@dataclass(frozen=True)
class Specification:
    """What one engine runs. ``invariance`` has batches, lengths and steps of its own."""

    mode: str  # one of `MODES`
    graphs: str  # one of `GRAPHS`
    drafts: int  # draft tokens per step, by MTP
    model: str  # folder of the configuration
    batches: list[int]  # cases: every batch with every context length
    lengths: list[int]
    steps: int  # tokens that each request generates
    churn: bool  # more requests than the engine has slots run at the end, of mixed lengths
    max_model_len: int  # longest row
    memory: float  # share of the GPU's memory that the engine takes
    profile: bool = False  # every case runs once more under the profiler, which times the kernels
    part: str = CASES  # one of `PARTS`
    chunk: int = 8192  # most tokens of a step, and so of a chunk of a prompt
    prefill_rows: int = 0  # most rows of a prefill call that ``compare`` compares; 0 for all
    tensor_parallel: int = 1  # GPUs; with several, layers and comparison run in worker processes
    split_k: bool = True  # cuBLAS may split the sums of a product, which it does by the size of the batch
    shapes: str = V32  # whose shapes the model has
    logits_mb: int = 512  # the budget of vLLM's scores of prompts, in MiB
    slices: bool = False  # some prompts have to be scored in slices, unless the mode is stock
    row_shards: bool = False  # each GPU scores its share of the rows of prompts, however few they are
    dcp: bool = False  # the GPUs share the keys of requests
    sampled: bool = False  # repeated prompts are answered with a seed, by our sampler where the mode is ours
    masks: bool = False  # where the sampler is looked at, vLLM returns masks of kept tokens

    @property
    def in_workers(self) -> bool:
        """Whether the layers run in other processes than the engine."""
        return self.tensor_parallel > 1

    @property
    def name(self) -> str:
        part = "" if self.part == CASES else f"_{self.part}"
        part += f"_chunk{self.chunk}" if self.part == INVARIANCE else ""
        ranks = f"_tp{self.tensor_parallel}" if self.in_workers else ""
        switches = ("row_shards", "dcp", "sampled", "masks")
        ranks += "".join(f"_{name}" for name in switches if getattr(self, name))
        products = "" if self.split_k else "_no_split_k"
        shapes = "" if self.shapes == V32 else f"_{self.shapes}"
        shapes += f"_slices{self.logits_mb}" if self.slices else ""
        return f"{self.mode}_{self.graphs}_drafts{self.drafts}{part}{shapes}{ranks}{products}"

    @property
    def samples(self) -> bool:
        """Whether our sampler is asked for, unless the mode is stock."""
        return self.sampled or self.part == SAMPLER

    @property
    def sequences(self) -> list[int]:
        """Requests at once, in the cases of this part."""
        return sorted(set(INVARIANCE_BATCHES if self.part == INVARIANCE else self.batches))


def engine_arguments(spec: Specification) -> dict[str, Any]:
    """Arguments of ``vllm.LLM``."""
    arguments: dict[str, Any] = {
        "model": spec.model,
        "load_format": "dummy",  # whose weights are those of `fill_weights`
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "seed": 0,
        "max_model_len": spec.max_model_len,
        "max_num_seqs": max(spec.sequences),
        "max_num_batched_tokens": spec.chunk,
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
    if spec.in_workers:
        arguments |= {
            "tensor_parallel_size": spec.tensor_parallel,
            "distributed_executor_backend": "mp",
            "disable_custom_all_reduce": True,
            "worker_extension_cls": EXTENSION,
        }
        os.environ[PREFILL_ROWS] = str(spec.prefill_rows)  # the workers inherit it
    if spec.dcp:
        heads = DCP_HEADS * spec.tensor_parallel
        arguments |= {
            "decode_context_parallel_size": spec.tensor_parallel,
            "kv_cache_dtype": "fp8_ds_mla",
            "hf_overrides": {"num_attention_heads": heads, "num_key_value_heads": heads},
        }
    if spec.row_shards:
        arguments["attention_config"]["indexer_tp_shard_min_rows"] = 1
    if spec.graphs == FULL:
        sizes = [batch * (1 + spec.drafts) for batch in spec.sequences]
        arguments["compilation_config"] = {
            "cudagraph_mode": "FULL_AND_PIECEWISE",
            "cudagraph_capture_sizes": sizes,
        }
    if spec.drafts:
        arguments["speculative_config"] = {"method": "mtp", "num_speculative_tokens": spec.drafts}
        if spec.part == SAMPLER:  # the random weights of another layer would never draft what is drawn
            arguments["speculative_config"] |= {
                "method": "ngram",
                "prompt_lookup_min": 1,
                "prompt_lookup_max": 3,
            }
    if spec.part == SAMPLER:  # grammars want a tokenizer, and not that of DeepSeek-V3.2
        arguments |= {"skip_tokenizer_init": False, "tokenizer_mode": "hf"}
        arguments["structured_outputs_config"] = {"backend": "xgrammar"}
        arguments["kv_cache_memory_bytes"] = SAMPLER_CACHE
        if spec.masks:
            arguments |= {"return_sampling_mask": True, "logprobs_mode": "processed_logprobs"}
    if spec.part == INVARIANCE:
        arguments["max_model_len"] = INVARIANCE_LENGTH + 1024
        arguments["enable_prefix_caching"] = False  # every prompt is computed anew, whatever was before it
    return arguments


def prompts(count: int, lengths: Sequence[int], seed: int, common_share: float = 0.75) -> list[list[int]]:
    """Random token ids of some lengths in turn; `common_share` of each prompt is common, for its cache."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randint(10, 32000, (max(lengths),), generator=generator).tolist()
    made = []
    for length in itertools.islice(itertools.cycle(lengths), count):
        shared = int(length * common_share)
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
    """Run requests to their end; what was timed, and ``answers``, the tokens of each request.

    `kernels` sees the steps of decode alone.
    """
    names = {f"{label}-{number}": number for number in range(len(requests))}
    for name, number in names.items():
        engine.add_request(name, {"prompt_token_ids": requests[number]}, make_parameters(number))
    cached: dict[str, int] = {}
    answers: list[list[int]] = [[] for _ in requests]
    decode: list[float] = []
    steps = 0
    while engine.has_unfinished_requests():
        decoding = min(map(len, answers)) >= FIRST_STEPS
        profiled = kernels if decoding and len(decode) < PROFILED_STEPS else None
        if profiled is not None:
            profiled.before_step()
        begun = time.perf_counter()
        for output in engine.step():
            cached[output.request_id] = output.num_cached_tokens
            answers[names[output.request_id]] = list(output.outputs[0].token_ids)
        steps += 1
        if decoding:
            decode.append(1e3 * (time.perf_counter() - begun))
        if profiled is not None:
            profiled.after_step()
    return {
        "tokens": sum(map(len, answers)),
        "cached": sum(cached.values()),
        "steps": steps,
        "decode_steps": len(decode),
        "decode_ms_median": round(statistics.median(decode), 3) if decode else None,
        "decode_ms_least": round(min(decode), 3) if decode else None,
        "answers": answers,
    }


def count_answers(answers: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Compare what was generated for the same prompt, as far as the shortest answer goes.

    ``first_difference`` is the number of the first token in which two differ, from 0, or None.
    """
    shortest = min(map(len, answers), default=0)
    counts = Counter(tuple(answer[:shortest]) for answer in answers)
    differ = (number for number, tokens in enumerate(zip(*counts, strict=True)) if len(set(tokens)) > 1)
    return {
        "requests": len(answers),
        "tokens": shortest,
        "different_answers": len(counts),
        "most_agree": max(counts.values(), default=0),
        "first_difference": next(differ, None),
    }


def _memory(peak: bool = False) -> int:
    """Bytes that tensors take on the GPU now, or the most of them since the last call without `peak`."""
    if not torch.cuda.is_available():
        return 0
    if peak:
        return torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


class Trial:
    """One engine's cases, each of which may fail without the others.

    `keep` takes the result so far after each case, so that an engine that is stopped leaves what it has done.
    What is put around vLLM's functions is noted in `patches`.
    """

    def __init__(
        self, spec: Specification, keep: Callable[[dict[str, Any]], None], patches: Transaction
    ) -> None:
        self.spec = spec
        self._keep = keep
        device = "cuda" if torch.cuda.is_available() else "cpu"
        compares = spec.mode == COMPARE and not spec.in_workers and spec.part != SAMPLER
        self._comparison = Comparison(device, spec.prefill_rows) if compares else None
        timed = spec.part == CASES and spec.mode != COMPARE and device == "cuda"
        self._times = PrefillTimes() if timed else None
        self._done: dict[str, Any] = {"cases": [], "churn": None, "failures": []}
        if spec.mode != STOCK:
            # Also where the checkout runs without being installed, and vLLM finds no entry point.
            importlib.import_module("gvr_topk.integrations.vllm").register()
        if not spec.in_workers:
            observe(patches, self._comparison, self._times)
            patch_loading(patches)
        self._draws: vllm_sampler.Comparison | vllm_sampler.Times | None = None
        if spec.part == SAMPLER:
            self._draws = vllm_sampler.Comparison() if spec.mode == COMPARE else vllm_sampler.Times()
            self._draws.observe(patches)
        self._vllm = importlib.import_module("vllm")
        begun = time.perf_counter()
        self._engine = self._vllm.LLM(**engine_arguments(spec)).llm_engine
        self._started = time.perf_counter() - begun
        if self._comparison is not None:
            self._comparison.reset()
        if spec.in_workers:
            self._engine.collective_rpc("gvr_topk_reset")
        if self._times is not None:
            self._times.take()
        if isinstance(self._draws, vllm_sampler.Comparison):
            self._draws.reset()

    def result(self) -> dict[str, Any]:
        """What was done so far, ready for JSON."""
        given = asdict(self.spec)
        for name in ("model", "batches", "lengths"):
            del given[name]
        seen = observed(self._comparison)
        if self.spec.in_workers:
            seen = merge_workers(self._engine.collective_rpc("gvr_topk_observed"))
        return {
            **given,
            "vllm": self._vllm.__version__,
            "start_s": round(self._started, 1),
            **self._done,
            "draws": self._draws.as_dict() if isinstance(self._draws, vllm_sampler.Comparison) else None,
            **seen,
        }

    def run(self) -> dict[str, Any]:
        """Run every case of the part."""
        if self.spec.part == INVARIANCE:
            self._attempt("invariance", self._vary_batches)
        elif self.spec.part == SAMPLER:
            for batch, kind in itertools.product(self.spec.batches, vllm_sampler.KINDS):
                if vllm_sampler.shows(kind, batch, self.spec.mode == COMPARE, self.spec.masks):
                    self._attempt(f"{batch} x {kind}", functools.partial(self._sample, batch, kind))
            if self.spec.mode == OURS and not self.spec.masks:
                self._attempt("streams", self._stream)
        else:
            cases = itertools.product(self.spec.lengths, self.spec.batches)
            for seed, (length, batch) in enumerate(cases):
                self._attempt(f"{batch} x {length}", functools.partial(self._case, seed, length, batch))
            if self.spec.churn:
                self._attempt("churn", self._churn)
        return self.result()

    def _attempt(self, what: str, case: Callable[[], None]) -> None:
        """Run one case; an error is a failure in the result, and the next case follows."""
        try:
            case()
        except Exception as error:
            line = f"{what}: {type(error).__name__}: {' '.join(str(error).split())[:500]}"
            self._done["failures"].append(line)
            print(f"vllm-trial: {line}", file=sys.stderr, flush=True)
            traceback.print_exc()
            self._abort_requests()
        self._keep(self.result())

    def _abort_requests(self) -> None:
        """Take what a failed case has left from the engine, which may not be able to."""
        try:
            while self._engine.has_unfinished_requests():
                self._engine.step()
        except Exception as error:
            self._done["failures"].append(f"requests left behind: {type(error).__name__}")

    def _parameters(
        self, tokens: Callable[[int], int], settings: Sequence[dict[str, Any]] = (GREEDY,)
    ) -> Callable[[int], Any]:
        grammars = importlib.import_module("vllm.sampling_params")

        def make(number: int) -> Any:
            given = dict(settings[number % len(settings)])
            if regex := given.pop("regex", None):
                given["structured_outputs"] = grammars.StructuredOutputsParams(regex=regex)
            return self._vllm.SamplingParams(
                **given, max_tokens=tokens(number), ignore_eos=True, detokenize=False
            )

        return make

    def _case(self, seed: int, length: int, batch: int) -> None:
        requests, label = prompts(batch, [length], seed), f"{length}x{batch}"
        case: dict[str, Any] = {"length": length, "batch": batch}
        before = _memory()
        case |= run_requests(self._engine, self._parameters(lambda n: self.spec.steps), requests, label)
        del case["answers"]
        self._done["cases"].append(case)
        if self._times is not None:
            case |= {"prefill": self._times.take(), "peak_bytes": _memory(peak=True) - before}
        if self.spec.profile:
            self._keep(self.result())
            times = KernelTimes()
            enough = self._parameters(lambda n: FIRST_STEPS + PROFILED_STEPS + 8)
            run_requests(self._engine, enough, requests, f"{label} profiled", times)
            case["profile"] = times.as_dict()
            if self._times is not None:
                self._times.take()

    def _sample(self, batch: int, kind: str) -> None:
        """Run batches whose requests have parameters of a kind, as many as it takes to have all of them."""
        batches = -(-len(vllm_sampler.KINDS[kind]) // batch)
        steps = self.spec.steps // batches // (10 if kind == vllm_sampler.GRAMMAR else 1)
        timed = self._draws if isinstance(self._draws, vllm_sampler.Times) else None
        sides = TURNS if timed is not None else (self.spec.mode,)
        for number, side in itertools.product(range(batches), sides):
            case = {"batch": batch, "kind": kind, "number": number, "side": side}
            if timed is not None:
                timed.ours = side == OURS
            settings = vllm_sampler.settings_of(kind, batch, number, drafts=self.spec.drafts > 0)
            parameters = self._parameters(lambda n: steps, settings)
            requests = prompts(batch, [SAMPLER_PROMPT], number)
            case |= run_requests(self._engine, parameters, requests, f"{kind} {batch} {number} {side}")
            del case["answers"]
            if timed is not None:
                case |= timed.take()
            self._done["cases"].append(case)

    def _stream(self) -> None:
        """Keep tokens of requests with seeds, which drafts should not change, and their digests, by side."""
        settings = vllm_sampler.settings_of(vllm_sampler.MIXED, STREAMS, 0, drafts=True)
        settings = [setting | {"seed": number} for number, setting in enumerate(settings)]
        requests = prompts(STREAMS, [SAMPLER_PROMPT], 4000)
        parameters = self._parameters(lambda n: STREAM_STEPS, settings)
        self._done["streams"] = {}
        assert isinstance(self._draws, vllm_sampler.Times)
        for side in (STOCK, OURS):
            self._draws.ours = side == OURS
            patches, digests = Transaction(), vllm_sampler.Digests()
            digests.observe(patches)
            try:
                tokens = run_requests(self._engine, parameters, requests, f"streams {side}")["answers"]
            finally:
                patches.rollback()
            self._done["streams"][side] = {"tokens": tokens, "logits": digests.of_answers(tokens)}

    def _churn(self) -> None:
        slots = max(self.spec.batches)
        requests = prompts(slots + slots // 2 + 8, range(2200, 4421, 370), 1000)
        parameters = self._parameters(lambda n: 8 + 5 * (n * 5 % 9))
        figures = run_requests(self._engine, parameters, requests, "churn")
        del figures["answers"]
        self._done["churn"] = figures | {"requests": len(requests), "slots": slots}

    def _vary_batches(self) -> None:
        """Run the same prompt alone and in batches whose other half are other prompts."""
        (prompt,) = prompts(1, [INVARIANCE_LENGTH], 3000, common_share=0.0)
        runs = []
        answers: list[list[int]] = []
        different = {tuple(prompt)}
        for number, batch in enumerate(INVARIANCE_BATCHES):
            others = prompts(batch // 2, [INVARIANCE_LENGTH], 3000 + batch, common_share=0.0)
            different |= set(map(tuple, others))
            # Neighbours differ, and the last request is a copy.
            requests = [prompt if (batch - 1 - n) % 2 == 0 else others[n // 2] for n in range(batch)]
            tokens = self._parameters(lambda n: INVARIANCE_STEPS, [SEEDED if self.spec.sampled else GREEDY])
            figures = run_requests(self._engine, tokens, requests, f"{number}_batch_{batch}")
            own = [answer for n, answer in enumerate(figures.pop("answers")) if requests[n] is prompt]
            answers += own
            run: dict[str, Any] = {"batch": batch, "copies": len(own)}
            runs.append(figures | run | {"answers": count_answers(own)})
            self._done["invariance"] = {
                "length": INVARIANCE_LENGTH,
                "runs": runs,
                "prompts": len(different),
                "answers": count_answers(answers),
            }
            self._keep(self.result())


def run(spec: Specification, keep: Callable[[dict[str, Any]], None] = lambda result: None) -> dict[str, Any]:
    """Start the engine and run every case; the result's ``failures`` name those that failed."""
    patches = Transaction()
    try:
        return Trial(spec, keep, patches).run()
    finally:
        patches.rollback()


def main(arguments: Sequence[str]) -> None:
    """Run the specification in the first file, and write the second."""
    specification, target = map(Path, arguments)
    spec = Specification(**json.loads(specification.read_text()))
    write_json(target, run(spec, lambda result: write_json(target, result)))


if __name__ == "__main__":
    main(sys.argv[1:])
