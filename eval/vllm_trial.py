"""Run a small DeepSeek-V3.2 with random weights inside vLLM, with its own top-k and with ours.

Every engine is a process: mode (stock, ours, compare) by graphs (eager, full) by draft tokens. ``compare``
selects with ours and sorts the same scores inside the engine, captured graphs included, and counts rows in
which the two differ. Tokens are not compared: two runs of stock vLLM differ by themselves. Times of steps are
those of this small model and say nothing of a real one.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import itertools
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from eval.common.evidence import read_evidence
from eval.common.machine import describe_machine, write_json
from eval.common.process import CommandError, output_lines, run_command
from eval.common.status import REGRESSION, UNDECIDED, WRONG_USE
from eval.common.vllm_engine import COMPARE, GRAPHS, MODES, STOCK, Specification
from eval.common.vllm_model import write_model

LAYERS = 4
VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine's process is the one that compares
    "VLLM_PLUGINS": "gvr_topk",  # other plugins are not under trial
    "VLLM_LOGGING_LEVEL": "INFO",  # the log is the evidence that ours ran
    "VLLM_DEEP_GEMM_WARMUP": "skip",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
"""Environment of the engines."""


def missing() -> list[str]:
    """What this machine lacks for a trial."""
    lacks = []
    if importlib.util.find_spec("vllm") is None:
        lacks.append("wanted the package vllm 0.33, got none: pip install 'gvr-topk[vllm]'")
    if not torch.cuda.is_available():
        lacks.append("wanted a CUDA GPU, got none")
    return lacks


def plan(options: argparse.Namespace) -> list[Specification]:
    """One specification for each engine, in the order to run them."""
    specifications = []
    for drafts, graphs, mode in itertools.product(options.drafts, options.graphs, options.modes):
        # The layer that predicts further tokens has no weights of ours: the engine fills such a model itself.
        name, load_format = ("drafts", "dummy") if drafts else ("plain", "auto")
        specifications.append(
            Specification(
                mode=mode,
                graphs=graphs,
                drafts=drafts,
                model=str(options.work / name),
                load_format=load_format,
                batches=options.batches,
                lengths=options.lengths,
                steps=options.steps,
                churn=options.churn,
                max_model_len=options.max_model_len,
                memory=options.memory,
                profile=options.profile and mode != COMPARE,
            )
        )
    return specifications


def run_engine(spec: Specification, work: Path, seconds: float) -> dict[str, Any]:
    """Run one engine in a process of its own.

    Returns
    -------
    dict
        Its result, with ``evidence`` from its log and ``problem``, which is None where it shows what it is
        for.
    """
    given, result, log = (work / f"{spec.name}.{end}" for end in ("spec.json", "result.json", "log"))
    write_json(given, asdict(spec))
    result.unlink(missing_ok=True)
    command = [sys.executable, "-m", "eval.common.vllm_engine", str(given), str(result)]
    variables = VARIABLES | ({"GVR_TOPK_DISABLE": "1"} if spec.mode == STOCK else {})
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        run_command(command, log, timeout_s=seconds)
    except CommandError as error:
        done = json.loads(result.read_text(encoding="utf-8")) if result.is_file() else {}
        failed = {"mode": spec.mode, "graphs": spec.graphs, "drafts": spec.drafts}
        return failed | done | {"problem": f"{spec.name}: {error}"}
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value
    evidence = read_evidence(output_lines(log, command))
    got: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return got | {"evidence": list(evidence.lines), "problem": problem(spec, got, evidence.active)}


def problem(spec: Specification, result: dict[str, Any], active: bool) -> str | None:
    """Why an engine's result shows nothing; None where it does.

    Parameters
    ----------
    spec : Specification
    result : dict
    active : bool
        Whether its log says that ours was on.
    """
    originals = [call["reason"] for call in result["calls"] if call["path"] != "gvr_topk"]
    if spec.mode == STOCK:
        return f"{spec.name}: ours ran all the same" if active or result["calls"] else None
    if not active:
        return f"{spec.name}: its log does not say that ours was on"
    if originals:
        return f"{spec.name}: vLLM's own top-k served calls: {', '.join(sorted(set(originals)))}"
    if spec.mode == COMPARE and not result["compared"]["rows_longer_than_k"]:
        return f"{spec.name}: no compared row was longer than k"
    return None


def verdict(engines: Sequence[dict[str, Any]]) -> int:
    """Exit code: a row that differs outweighs an engine that failed."""
    counts = [engine["compared"] for engine in engines if engine.get("compared")]
    if any(count["rows_that_differ"] or count["numpy_rows_that_differ"] for count in counts):
        return REGRESSION
    return UNDECIDED if any(engine["problem"] for engine in engines) else 0


def _numbers(least: int) -> Callable[[str], list[int]]:
    def numbers(text: str) -> list[int]:
        given = [int(part) for part in text.split(",") if part.isdecimal()]
        if len(given) < len(text.split(",")) or min(given) < least:
            raise argparse.ArgumentTypeError(f"wanted numbers of at least {least}, got {text!r}")
        return given

    return numbers


def _words(known: Sequence[str]) -> Callable[[str], list[str]]:
    def words(text: str) -> list[str]:
        given = text.split(",")
        if not set(given) <= set(known):
            raise argparse.ArgumentTypeError(f"wanted some of {', '.join(known)}, got {text!r}")
        return given

    return words


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/vllm_trial.json"), help="result file")
    parser.add_argument("--work", type=Path, default=Path("out/vllm_trial"), help="for model and logs")
    parser.add_argument("--modes", type=_words(MODES), default=list(MODES), help=",".join(MODES))
    parser.add_argument("--graphs", type=_words(GRAPHS), default=list(GRAPHS), help=",".join(GRAPHS))
    parser.add_argument("--drafts", type=_numbers(0), default=[0, 1], help="draft tokens, 0 for none")
    parser.add_argument("--batches", type=_numbers(1), default=[1, 8, 32, 96], help="requests at once")
    parser.add_argument("--lengths", type=_numbers(1), default=[8192, 65536], help="tokens of each prompt")
    parser.add_argument("--steps", type=int, default=48, help="tokens that each request generates")
    parser.add_argument("--no-churn", dest="churn", action="store_false", help="leave the churn out")
    parser.add_argument("--profile", action="store_true", help="time kernels, in modes stock and ours")
    parser.add_argument("--max-model-len", type=int, default=131072, help="longest row; its buffer's width")
    parser.add_argument("--memory", type=float, default=0.6, help="share of the GPU's memory")
    parser.add_argument("--seconds", type=float, default=900, help="longest time of one engine")
    parser.add_argument("--commit", default="", help="of the sources, where the folder has no Git history")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run every engine and report."""
    options = parse_args(argv)
    lacks = missing()
    if lacks:
        print(f"vllm-trial: {'; '.join(lacks)}", file=sys.stderr)
        return WRONG_USE
    specifications = plan(options)
    for spec in specifications:
        write_model(Path(spec.model), LAYERS, spec.drafts, weights=spec.load_format == "auto")
    engines = []
    for spec in specifications:
        engines.append(run_engine(spec, options.work, options.seconds))
        write_json(options.out, report(engines, options))
        print(_summary(spec, engines[-1]), flush=True)
    write_json(options.out, report(engines, options) | {"machine": describe_machine(options.commit)})
    return verdict(engines)


def report(engines: Sequence[dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    """The result file, but for the machine, which is looked at when no engine needs its memory any more."""
    return {
        "format": "gvr_topk.vllm_trial/1",
        "what": "a small model of DeepSeek-V3.2's shapes with random weights inside vLLM",
        "versions": {"vllm": importlib.metadata.version("vllm")},
        "setup": {
            "layers": LAYERS,
            "batches": options.batches,
            "lengths": options.lengths,
            "max_model_len": options.max_model_len,
            "steps": options.steps,
        },
        "engines": list(engines),
    }


def _summary(spec: Specification, engine: dict[str, Any]) -> str:
    lines = [str(engine["problem"])] if engine["problem"] else []
    if compared := engine.get("compared"):
        longer = f"{compared['rows_longer_than_k']} of them longer than k"
        lines.append(
            f"{spec.name}: {compared['rows_that_differ']} of {compared['rows']} rows differ, {longer}"
        )
    for case in engine.get("cases", ()):
        figure = case.get("decode_ms_median")
        lines.append(f"{spec.name}: {case['batch']} x {case['length']}: {figure} ms per step")
        for name, times in ((case.get("profile") or {}).get("kernels") or {}).items():
            lines.append(f"  {times['us_median']} us median of {times['calls']}, {name[:90]}")
    if churn := engine.get("churn"):
        lines.append(f"{spec.name}: churn: {churn['requests']} requests in {churn['slots']} slots")
    return "\n".join(lines) or f"{spec.name}: no case"


if __name__ == "__main__":
    sys.exit(main())
