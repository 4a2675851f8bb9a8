"""Run a small model with random weights inside vLLM, with its own top-k and with ours.

``--model-shapes`` says whose shapes it has: DeepSeek-V3.2's, GLM-5's, GLM-5.2's, where some layers attend to
what an earlier one chose, or DeepSeek-V4's, where a score stands for four tokens.

Every engine is a process: part by mode (stock, ours, compare) by graphs (eager, full) by draft tokens. Decode
and prefill calls are both looked at. ``compare`` selects with ours and sorts the same scores inside the
engine, captured graphs included, and counts rows in which the two differ. Tokens are not compared: two runs
of stock vLLM differ by themselves. Times of steps are those of this small model, not of a real one.

Parts: ``cases`` are batches by lengths, with a churn at the end; ``invariance`` runs the same prompt alone
and in batches of 2, 8 and 32, with chunks of two sizes, stock and ours, and counts different answers, which
``--sampled`` draws with a seed. ``sampler`` draws from 128,256 logits with our sampler: ``compare`` draws
every call a second time with vLLM's own and judges every row whose tokens differ, and ``ours`` times what
samples, vLLM's and ours in turns. Its drafts are n-grams. With ``--masks`` vLLM returns masks of kept tokens,
which are compared and timed, too.
"""

import importlib.metadata
import importlib.util
import itertools
import json
import os
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any
from unittest import mock

import torch
import typer

from eval.campaigns.evidence import read_evidence
from eval.campaigns.process import CommandError, output_lines, run_command
from eval.common.machine import describe_machine, write_json
from eval.common.options import Commit, Out, integers, names_of, no_gpu, require_writable
from eval.common.status import REGRESSION, UNDECIDED, WRONG_USE
from eval.engines.vllm_engine import (
    CASES,
    COMPARE,
    GRAPHS,
    INVARIANCE,
    MODES,
    OURS,
    PARTS,
    SAMPLER,
    SAMPLER_VOCABULARY,
    STOCK,
    Specification,
)
from eval.engines.vllm_model import SHAPES, V4, V32, write_model, write_tokenizer
from eval.engines.vllm_sampler import WRONG, common_tokens
from gvr_topk.integrations._kit.environment import ENABLE_DCP, ENABLE_SAMPLER

LAYERS = 4

V4_MODULES = {"tilelang": "tilelang", "cutlass": "nvidia-cutlass-dsl", "quack": "quack-kernels"}
"""Modules that vLLM's DeepSeek-V4 cannot do without on this kind of GPU, and the packages that have them."""

_SIZES = ("batches", "lengths", "steps", "max_model_len")
_SWITCHES = ("split_k", "sampled", "masks", "slices", "row_shards", "dcp")
SHARED = (*_SIZES, "memory", "prefill_rows", "tensor_parallel", "logits_mb", *_SWITCHES)
"""Options that every engine gets as they are."""

LEFT_TO_VLLM = {
    *("sampler with penalties or other processors of logits", "masks of filtered logits"),  # its warm-up's
    "dcp of many rows",  # merging what ranks have selected for a chunk of prompts
}
"""Reasons for which vLLM itself may serve a call; no request of a trial is sampled so."""

LEAST_SECONDS = 45
"""An engine is not started when less is left of the budget: most would end before their first case."""

VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine's process is the one that compares
    "VLLM_PLUGINS": "gvr_topk",  # other plugins are not under trial
    "VLLM_LOGGING_LEVEL": "INFO",  # the log is the evidence that ours ran
    "VLLM_DEEP_GEMM_WARMUP": "skip",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
"""Environment of the engines."""

SEVERAL_GPUS = {
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    # No NVLink multicast: neither NCCL's, nor that of symmetric memory.
    "NCCL_NVLS_ENABLE": "0",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_USE_NCCL_SYMM_MEM": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    "VLLM_USE_DIRECT_DCP_Q_GATHER": "0",
}
"""More of it where an engine runs on several GPUs."""

NO_SPLIT_K = {
    "CUBLAS_WORKSPACE_CONFIG": ":16:8",
    "CUBLASLT_WORKSPACE_SIZE": "1",
    "TORCH_BLAS_PREFER_CUBLASLT": "1",
}
"""Leaves cuBLAS no room to split sums, as vLLM's batch-invariant mode does on Hopper."""


def missing(shapes: str) -> list[str]:
    """What this machine lacks for a trial of these shapes."""
    lacks = []
    if importlib.util.find_spec("vllm") is None:
        lacks.append("wanted the package vllm 0.33, got none: pip install 'gvr-topk[vllm]'")
    if not torch.cuda.is_available():
        lacks.append(no_gpu())
    names = V4_MODULES if shapes == V4 else {}
    if absent := [package for module, package in names.items() if importlib.util.find_spec(module) is None]:
        lacks.append(f"wanted what vLLM's {SHAPES[V4]} imports, got no {', '.join(absent)}")
    return lacks


def plan(options: SimpleNamespace) -> list[Specification]:
    """One specification for each engine, in the order to run them."""
    specifications = []
    for part, drafts, graphs, mode in itertools.product(
        options.parts, options.drafts, options.graphs, options.modes
    ):
        if mode not in PARTS[part] or (part == INVARIANCE and drafts):
            continue
        if part == SAMPLER and options.model_shapes != V32:
            continue  # the sampler sees nothing of other shapes
        if options.tensor_parallel > 1 and (mode != COMPARE or part == SAMPLER):
            continue  # nothing else is observed in the workers
        for chunk in options.chunks if part == INVARIANCE else options.chunks[:1]:
            specifications.append(
                Specification(
                    mode=mode,
                    graphs=graphs,
                    drafts=drafts,
                    part=part,
                    chunk=chunk,
                    model=str(options.work / f"{part}_{options.model_shapes}_drafts{drafts}"),
                    shapes=options.model_shapes,
                    churn=options.churn and part == CASES,
                    profile=options.profile and mode != COMPARE and part == CASES,
                    **{name: getattr(options, name) for name in SHARED},
                )
            )
    return specifications


def run_engine(spec: Specification, options: SimpleNamespace, seconds: float) -> dict[str, Any]:
    """Run one engine in a process of its own: its result, ``evidence`` from its log, and its ``problem``.

    Whatever goes wrong is its problem, and the next engine follows.
    """
    if options.budget and seconds < LEAST_SECONDS:
        return _identity(spec) | {"problem": f"{spec.name}: left out, {max(seconds, 0):.0f} s were left"}
    ends = ("spec.json", "result.json", "log")
    given, result, log = (options.work / f"{spec.name}.{end}" for end in ends)
    command = [sys.executable, "-m", "eval.engines.vllm_engine", str(given), str(result)]
    variables = VARIABLES | ({"GVR_TOPK_DISABLE": "1"} if spec.mode == STOCK else {})
    variables |= {"VLLM_SPARSE_INDEXER_MAX_LOGITS_MB": str(spec.logits_mb)}
    variables |= {ENABLE_DCP: "1"} if spec.dcp and spec.mode != STOCK else {}
    variables |= {ENABLE_SAMPLER: "" if spec.samples else "0"}  # the default, unless top-k is on trial alone
    variables |= (SEVERAL_GPUS if spec.in_workers else {}) | ({} if spec.split_k else NO_SPLIT_K)
    try:
        if spec.part == SAMPLER:  # one dense layer: the step is short, and most of it is the head
            write_model(Path(spec.model), 1, 0, spec.shapes, SAMPLER_VOCABULARY)
            write_tokenizer(Path(spec.model), SAMPLER_VOCABULARY)
        else:
            write_model(Path(spec.model), LAYERS, spec.drafts, spec.shapes)
        write_json(given, asdict(spec))
        result.unlink(missing_ok=True)
        with mock.patch.dict(os.environ, variables):
            run_command(command, log, timeout_s=seconds)
        evidence = read_evidence(output_lines(log, command))
        got: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
        return got | {"evidence": list(evidence.lines), "problem": problem(spec, got, evidence.active)}
    except CommandError as error:
        return _identity(spec) | _done(result) | {"problem": f"{spec.name}: {error}"}
    except Exception as error:
        traceback.print_exc()
        return _identity(spec) | {"problem": f"{spec.name}: {type(error).__name__}: {error}"}


def _done(result: Path) -> dict[str, Any]:
    """What an engine has written before it failed."""
    try:
        return dict(json.loads(result.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def _identity(spec: Specification) -> dict[str, Any]:
    return {name: getattr(spec, name) for name in ("part", "mode", "graphs", "drafts", "chunk", "shapes")}


def problem(spec: Specification, result: dict[str, Any], active: bool) -> str | None:
    """Why an engine's result shows nothing; None where it does. Its log says whether ours was `active`."""
    if result["failures"]:
        return f"{spec.name}: {'; '.join(result['failures'])}"
    if spec.mode == STOCK:
        if active or result["calls"]:
            return f"{spec.name}: ours ran all the same"
    else:
        served = {call["reason"] for call in result["calls"] if call["path"] == "gvr_topk"}
        originals = {call["reason"] for call in result["calls"] if call["path"] != "gvr_topk"}
        originals -= LEFT_TO_VLLM
        if not active:
            return f"{spec.name}: its log does not say that ours was on"
        if originals:
            return f"{spec.name}: vLLM itself served calls: {', '.join(sorted(originals))}"
        wanted = {"sampler"} | ({"drafts"} if spec.drafts else set()) | ({"masks"} if spec.masks else set())
        if spec.part != SAMPLER:
            wanted = {"prefill"} | ({"prefill slices"} if spec.slices else set())
            wanted |= {"dcp"} if spec.dcp else set()
        if lacks := wanted - served:
            return f"{spec.name}: no {', '.join(sorted(lacks))} call was served by ours"
    if spec.mode == COMPARE and spec.part != SAMPLER:
        empty = [
            rank for rank, rows in enumerate(result.get("workers", ())) if not rows["rows_longer_than_k"]
        ]
        if empty:
            return f"{spec.name}: no compared decode row was longer than k in worker {empty[0]}"
        kinds = [("", "decode"), ("prefill_", "prefill")]
        for kind, what in [*kinds, ("merged_", "merged")] if spec.dcp else kinds:
            if not result["compared"][f"{kind}rows_longer_than_k"]:
                return f"{spec.name}: no compared {what} row was longer than k"
    return None


def verdict(engines: Sequence[dict[str, Any]]) -> int:
    """Exit code: a row that differs, or an answer that depends on the batch, outweighs an engine that failed.

    With split-K the sums of other kernels depend on the batch, and so may the answers.
    """
    wrong = [f"{kind}rows_that_differ" for kind in ("", "prefill_", "merged_", "numpy_")]
    counts = [engine["compared"] for engine in engines if engine.get("compared")]
    differ = any(count[name] for count in counts for name in wrong)
    differ |= any(count[name] for engine in engines if (count := engine.get("draws")) for name in WRONG)
    repeated = [each for each in engines if each.get("invariance")]
    answers = [
        each["invariance"]["answers"] for each in repeated if each["mode"] == OURS and not each["split_k"]
    ]
    if differ or any(each["different_answers"] > 1 for each in answers):
        return REGRESSION
    return UNDECIDED if any(engine["problem"] for engine in engines) else 0


def streams(engines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """How far tokens of the same requests with and without drafts are the same; takes them from `engines`."""
    drawn = [(engine, sides) for engine in engines if (sides := engine.pop("streams", None))]
    plain = {engine["graphs"]: sides for engine, sides in drawn if not engine["drafts"]}
    return [
        {"drafts": engine["drafts"], "side": side} | common_tokens(plain[engine["graphs"]][side], stream)
        for engine, sides in drawn
        if engine["drafts"] and engine["graphs"] in plain
        for side, stream in sides.items()
    ]


def main(
    out: Out = Path("out/vllm_trial.json"),
    work: Annotated[Path, typer.Option(help="Folder for models and logs.")] = Path("out/vllm_trial"),
    parts: Annotated[str, typer.Option(help=f"Of {','.join(PARTS)}.")] = "all",
    modes: Annotated[str, typer.Option(help=f"Of {','.join(MODES)}.")] = "all",
    graphs: Annotated[str, typer.Option(help=f"Of {','.join(GRAPHS)}.")] = "all",
    model_shapes: Annotated[str, typer.Option(help=f"One of {','.join(SHAPES)}.")] = V32,
    drafts: Annotated[str, typer.Option(help="Draft tokens, 0 for none.")] = "0,1",
    batches: Annotated[str, typer.Option(help="Requests at once.")] = "1,8,32,96",
    lengths: Annotated[str, typer.Option(help="Tokens of each prompt.")] = "8192,65536",
    steps: Annotated[int, typer.Option(help="Tokens that each request generates.")] = 48,
    chunks: Annotated[str, typer.Option(help="Tokens of a step; all for invariance alone.")] = "8192,2048",
    prefill_rows: Annotated[int, typer.Option(help="Most compared rows of a call; 0 for all.")] = 1024,
    churn: Annotated[bool, typer.Option(help="More requests than slots after the cases.")] = True,
    tensor_parallel: Annotated[int, typer.Option(help="GPUs; mode compare alone, in every worker.")] = 1,
    row_shards: Annotated[bool, typer.Option("--row-shards", help="These share rows of prompts.")] = False,
    dcp: Annotated[bool, typer.Option("--dcp", help="They share the keys of requests.")] = False,
    split_k: Annotated[bool, typer.Option(help="Leave cuBLAS room to split sums, by the batch.")] = True,
    logits_mb: Annotated[int, typer.Option(help="MiB of scores of prompts that vLLM may have.")] = 512,
    slices: Annotated[bool, typer.Option("--slices", help="Prompts have to come in slices.")] = False,
    sampled: Annotated[bool, typer.Option(help="Draw the answers to repeated prompts with a seed.")] = False,
    masks: Annotated[bool, typer.Option("--masks", help="The sampler returns masks of kept tokens.")] = False,
    profile: Annotated[bool, typer.Option("--profile", help="Time kernels of stock and ours.")] = False,
    max_model_len: Annotated[int, typer.Option(help="Longest row; its buffer's width.")] = 131072,
    memory: Annotated[float, typer.Option(help="Share of the GPU's memory.")] = 0.6,
    seconds: Annotated[float, typer.Option(help="Longest time of one engine.")] = 900,
    budget: Annotated[float, typer.Option(help="Longest time of all engines; 0 for any.")] = 0,
    commit: Commit = "",
) -> int:
    """Run every engine and report."""
    options = parse(locals())
    if lacks := missing(options.model_shapes):
        print(f"vllm-trial: {'; '.join(lacks)}", file=sys.stderr)
        return WRONG_USE
    require_writable(out)
    begun = time.monotonic()
    specifications = plan(options)
    if not specifications:
        raise typer.BadParameter("wanted modes in which a part shows something, got none")
    engines: list[dict[str, Any]] = []
    for spec in specifications:
        left = budget - (time.monotonic() - begun) if budget else seconds
        engines.append(run_engine(spec, options, min(left, seconds)))
        write_json(out, report(engines, options))
        print(_summary(spec, engines[-1]), flush=True)
    write_json(
        out, report(engines, options) | {"streams": streams(engines), "machine": describe_machine(commit)}
    )
    return verdict(engines)


def parse(given: Mapping[str, Any]) -> SimpleNamespace:
    """The options of `main`, with lists in place of texts with commas."""
    options = SimpleNamespace(**given)
    for name, known in (("parts", tuple(PARTS)), ("modes", MODES), ("graphs", GRAPHS)):
        setattr(options, name, names_of(f"--{name}", given[name], known))
    for name, least in (("drafts", 0), ("batches", 1), ("lengths", 1), ("chunks", 256)):
        setattr(options, name, integers(f"--{name}", given[name], least))
    (options.model_shapes,) = names_of("--model-shapes", given["model_shapes"], tuple(SHAPES))
    return options


def report(engines: Sequence[dict[str, Any]], options: SimpleNamespace) -> dict[str, Any]:
    """The result file, but for the machine, which is looked at when no engine needs its memory any more."""
    return {
        "format": "gvr_topk.vllm_trial/2",
        "what": f"a small model of {SHAPES[options.model_shapes]}'s shapes with random weights inside vLLM",
        "versions": {"vllm": importlib.metadata.version("vllm")},
        "setup": {
            "shapes": options.model_shapes,
            "layers": LAYERS,
            "chunks": options.chunks,
            **{name: getattr(options, name) for name in SHARED if name != "memory"},
        },
        "engines": list(engines),
    }


def _summary(spec: Specification, engine: dict[str, Any]) -> str:
    lines = [str(engine["problem"])] if engine["problem"] else []
    if compared := engine.get("compared"):
        rows = f"{compared['rows_that_differ']} of {compared['rows']} rows"
        prefill = (
            f"{compared['prefill_rows_that_differ']} of {compared['prefill_rows']} compared prefill rows"
        )
        lines.append(f"{spec.name}: {rows} and {prefill} differ")
        if merged := compared["merged_rows"]:
            differ = compared["merged_rows_that_differ"]
            lines.append(f"{spec.name}: {differ} of {merged} merged rows differ")
    if draws := engine.get("draws"):
        counts = {name: count for name, count in draws.items() if name != "differences"}
        lines.append(f"{spec.name}: {counts}")
    for case in engine.get("cases", ()):
        if "kind" in case:
            sampling = f"sampling {case.get('gpu_us')} us on the GPU, {case.get('host_us')} on the host"
            each = f"{case['decode_ms_median']} ms per step"
            lines.append(f"{spec.name}: {case['batch']} x {case['kind']}: {each}, {sampling}")
            continue
        prefill = f", prefill calls {case['prefill']['us']} us" if case.get("prefill") else ""
        step = f"{case.get('decode_ms_median')} ms per step{prefill}"
        lines.append(f"{spec.name}: {case['batch']} x {case['length']}: {step}")
        for name, times in ((case.get("profile") or {}).get("kernels") or {}).items():
            lines.append(f"  {times['us_median']} us median of {times['calls']}, {name[:90]}")
    if churn := engine.get("churn"):
        lines.append(f"{spec.name}: churn: {churn['requests']} requests in {churn['slots']} slots")
    if invariance := engine.get("invariance"):
        answers = invariance["answers"]
        told = f"{answers['different_answers']} answers to the same prompt in {answers['requests']} requests"
        lines.append(f"{spec.name}: {told}")
    return "\n".join(lines) or f"{spec.name}: no case"
