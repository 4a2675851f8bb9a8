"""Run ``python -m eval tpot --engine vllm`` once against ``vllm serve`` of a small model with random weights.

    python -m eval vllm-serve --out out/vllm_serve.json

The model is that of ``python -m eval vllm-trial``: DeepSeek-V3.2's shapes, 4 layers, no tokenizer. The prompt
is random token ids. The servers take turns, with this package off and on. What is shown is that the tool
meets a real server: its commands start one, its client reads the stream and counts the tokens, the logs prove
which side ran what. The times are those of 4 layers, and so few repetitions have no verdict: no speed is
claimed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from eval.common.machine import ROOT, describe_machine, write_json
from eval.common.options import at_least, why_unwritable
from eval.common.status import WRONG_USE
from eval.common.vllm_model import VOCABULARY, write_model
from eval.vllm_trial import LAYERS, VARIABLES, missing

SERVER_OPTIONS = (
    "--skip-tokenizer-init",  # prompts are token ids, and the model has no tokenizer
    "--attention-config",
    '{"sparse_mla_force_mqa": true}',  # decode rows attend to what was chosen, however short they are
    "--kernel-config",
    '{"enable_jit_warmup": false, "enable_cutedsl_warmup": false, "enable_flashinfer_autotune": false}',
)
"""Options of ``vllm serve``; warming up for shapes that are not run would take most of the time."""

START_S, RUN_S = 120, 120
"""Longest time until a server is ready, and of the client's requests."""

ERROR_LINES = 30
"""Most lines with an error that are shown of a server's log."""


def graph_sizes(concurrency: int) -> list[int]:
    """Batches that get a CUDA graph: powers of two below the largest, and that."""
    return sorted({*(1 << bit for bit in range(concurrency.bit_length())), concurrency})


def tpot_options(options: argparse.Namespace, prompts: Path) -> list[str]:
    """Options of ``python -m eval tpot``."""
    graphs = {
        "cudagraph_mode": "FULL_AND_PIECEWISE",
        "cudagraph_capture_sizes": graph_sizes(options.concurrency),
    }
    extra = [*SERVER_OPTIONS, "--compilation-config", json.dumps(graphs)]
    extra += ["--gpu-memory-utilization", str(options.memory)]
    label = f"{options.length}_tokens"
    given = ["--engine", "vllm", "--model", str(options.work / "plain"), "--prompts", f"{label}={prompts}"]
    given += ["--entry", "0", "--mtp", "0", "--gpus", "1", "--repetitions", str(options.repetitions)]
    given += ["--concurrency", str(options.concurrency), "--requests", str(options.requests)]
    given += ["--warmup", str(options.concurrency), "--output-tokens", str(options.output_tokens)]
    given += ["--port", str(options.port), "--start-timeout", str(START_S), "--timeout", str(RUN_S)]
    if options.program:
        given += ["--program", options.program]
    return [*given, "--extra-args", shlex.join(extra), "--out", str(options.work / "tpot")]


def write_prompt(path: Path, length: int) -> None:
    """Write a prompt of random token ids, in trtllm-bench's dataset format."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(10, VOCABULARY, (length,), generator=generator).tolist()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"input_ids": tokens}) + "\n", encoding="utf-8")


def errors(log: Path) -> Iterator[str]:
    """Lines of a server's log that name an error; the engine's own are far above those of its front end."""
    named = [line for line in log.read_text(errors="replace").splitlines() if "Error" in line]
    yield from dict.fromkeys(named[:ERROR_LINES])


def report(results: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """The result file; folders and the GPU's serial number are left out."""
    setup = {
        name: getattr(options, name)
        for name in ("length", "concurrency", "requests", "output_tokens", "repetitions")
    }
    text = json.dumps(results)
    for path, name in ((options.work, "WORK"), (ROOT, "."), (Path(sys.executable), "python3")):
        text = text.replace(json.dumps(str(path))[1:-1], name)
    text = re.sub(r", GPU-[0-9a-f-]+", "", text)
    return {
        "format": "gvr_topk.vllm_serve/1",
        "what": "eval tpot against vllm serve of a small model with random weights: shows the tool, no speed",
        "setup": setup | {"layers": LAYERS},
        **json.loads(text),
    }


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/vllm_serve.json"), help="result file")
    parser.add_argument("--work", type=Path, default=Path("out/vllm_serve"), help="for model and logs")
    parser.add_argument("--repetitions", type=at_least(1), default=2, help="servers of each side")
    parser.add_argument("--length", type=at_least(1), default=8192, help="tokens of the prompt")
    parser.add_argument("--concurrency", type=at_least(1), default=8, help="requests at once")
    parser.add_argument("--requests", type=at_least(1), default=24, help="timed requests of each server")
    parser.add_argument("--output-tokens", type=at_least(1), default=64, help="tokens of each answer")
    parser.add_argument("--memory", type=float, default=0.4, help="share of the GPU's memory")
    parser.add_argument("--port", type=at_least(1), default=8123, help="of the servers, one at a time")
    parser.add_argument(
        "--program",
        default="",
        help="words before `serve`, such as 'python3 -m vllm.entrypoints.cli.main'; default: vllm, from PATH",
    )
    parser.add_argument("--commit", default="", help="of the sources, where the folder has no Git history")
    parser.add_argument("--dry-run", action="store_true", help="print the commands and stop")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Write model and prompt, run the comparison, and keep its result."""
    options = parse_args(argv)
    lacks = [] if options.dry_run else [*missing(), *filter(None, [why_unwritable(options.out)])]
    if lacks:
        print(f"vllm-serve: {'; '.join(lacks)}", file=sys.stderr)
        return WRONG_USE
    options.work = options.work.absolute()
    prompts = options.work / "prompt.jsonl"
    write_prompt(prompts, options.length)
    if not options.dry_run:
        write_model(options.work / "plain", LAYERS)
    tpot = [sys.executable, "-m", "eval", "tpot", *tpot_options(options, prompts)]
    print(f"$ {shlex.join(tpot)}", flush=True)
    environment = VARIABLES | dict(os.environ) | {"VLLM_LOGGING_LEVEL": "INFO"}
    del environment["VLLM_ENABLE_V1_MULTIPROCESSING"]  # a server's engine is a process of its own
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    status = subprocess.run([*tpot, *(["--dry-run"] if options.dry_run else [])], env=environment).returncode
    if options.dry_run:
        return status
    if status:
        for log in sorted((options.work / "tpot").rglob("*.server.log")):
            print("\n".join([f"errors in {log.name}:", *(f"  {line}" for line in errors(log))]))
    results = options.work / "tpot" / "results.json"
    if results.is_file():
        measured = report(json.loads(results.read_text(encoding="utf-8")), options)
        write_json(options.out, measured | {"machine": describe_machine(options.commit)})
        print(f"written: {options.out}")
    return status
