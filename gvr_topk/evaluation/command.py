"""The command ``gvr-topk replay``: its options, and what it prints and writes.

Only `run` imports what the extra ``gvr-topk[replay]`` installs, so that ``gvr-topk replay --help`` works
without it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from gvr_topk.arguments import Checks
from gvr_topk.config import ServeConfig, load_config, parse_config
from gvr_topk.constants import MAX_WIDTH
from gvr_topk.policy import no_kernels_reason

if TYPE_CHECKING:
    from rich.progress import Progress

    from gvr_topk.evaluation.trace import ScoreSource

NEEDED = ("matplotlib", "rich", "scipy")
"""Packages that the extra installs."""

PAPER_LENGTH = 70690
"""Row length of the paper's measurements; the generator's default."""
GENERATOR_STEPS = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``gvr-topk replay``."""
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--trace", type=Path, metavar="FILE", help="trace file (.npz with K, Q, W)")
    source.add_argument(
        "--shipped", action="store_true", help="the trace in a checkout's eval/data (default)"
    )
    source.add_argument(
        "--generator", type=int, metavar="LAYER", help="synthetic layer of the paper: 0, 1, 20 ... 60"
    )
    parser.add_argument(
        "--length",
        type=int,
        metavar="N",
        help=f"row length at step 0 of --generator (default: {PAPER_LENGTH})",
    )
    parser.add_argument("--seed", type=int, help="seed of --generator (default: 0)")
    parser.add_argument("--config", type=Path, metavar="FILE", help="serving YAML; default: heuristic on")
    parser.add_argument("--offset", type=int, metavar="P", help="hint offset, instead of the YAML's")
    parser.add_argument("--steps", type=int, metavar="COUNT", help="steps to run; default: all")
    parser.add_argument("--k", type=int, help=f"items per row, 1 to {MAX_WIDTH}, instead of the YAML's")
    parser.add_argument("--device", help="cpu or cuda (default: cuda, if kernels can run here)")
    parser.add_argument(
        "--paper", action="store_true", help="replay the paper's kernel too, beside its figures"
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write plots (PNG) and the full JSON here")


def run(options: argparse.Namespace) -> bool:
    """Replay, print the tables and write the files; returns whether every step was exact.

    Raises
    ------
    ImportError
        The extra is not installed.
    ValueError
        An option is out of range, or a file is not what it should be; the message names it.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(
            f"replay: wanted the packages of the extra, got no {', '.join(missing)}: "
            "pip install 'gvr-topk[replay]'"
        )
    from rich.console import Console

    from gvr_topk.evaluation import report
    from gvr_topk.evaluation.replay import replay

    settings = _settings(options.config)
    source = _source(options)
    if options.out is not None:
        try:
            options.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"--out: wanted a folder to write to, got {options.out}: {error.strerror}"
            ) from None
    with _progress() as progress:
        task = progress.add_task(f"replay {source.name}", total=options.steps or source.steps)
        result = replay(
            source,
            settings,
            k=options.k,
            hint_offset=options.offset,
            steps=options.steps,
            device=options.device or ("cpu" if no_kernels_reason() else "cuda"),
            paper=options.paper,
            on_step=lambda done: progress.update(task, completed=done),
        )
    written = []
    if options.out is not None:
        written = [report.save_json(result, options.out), *report.save_plots(result, options.out)]
    verdict = f"replay: exact on {result.exact_steps} of {len(result.records)} steps"
    if options.as_json:
        print(json.dumps(result.to_dict(), allow_nan=False))
        print(verdict, file=sys.stderr)
        return result.is_exact
    console = Console()
    console.print(report.build_table(result))
    if (table := report.build_paper_table(result)) is not None:
        console.print(table)
    for line in [*report.describe_outcome(result), *(f"wrote {path}" for path in written), verdict]:
        print(line)
    return result.is_exact


def _settings(path: Path | None) -> ServeConfig:
    if path is None:
        # Without a file the heuristic is on: nobody replays to see it off. A file that says off is obeyed.
        section = {"algorithm": "dsa", "enable_heuristic_topk": True}
        return parse_config({"sparse_attention_config": section})
    return load_config(path)


def _given(value: int | None, default: int) -> int:
    return default if value is None else value


def _source(options: argparse.Namespace) -> ScoreSource:
    from gvr_topk.evaluation.synthetic import LAYERS, LayerGenerator
    from gvr_topk.evaluation.trace import load_trace, shipped_trace

    checks = Checks()
    if options.generator is not None:
        if options.generator not in LAYERS:
            raise checks.fail("--generator", f"one of {sorted(LAYERS)}", options.generator)
        length = checks.integer("--length", _given(options.length, PAPER_LENGTH), 1, MAX_WIDTH)
        # The row grows by one element a step.
        steps = checks.integer("--steps", _given(options.steps, GENERATOR_STEPS), 1, MAX_WIDTH - length + 1)
        seed = checks.integer("--seed", _given(options.seed, 0), 0)
        return LayerGenerator(options.generator, length, steps, seed)
    for name, value in (("--length", options.length), ("--seed", options.seed)):
        if value is not None:
            raise checks.fail(name, "--generator beside it", value)
    return shipped_trace() if options.trace is None else load_trace(options.trace)


@contextmanager
def _progress() -> Iterator[Progress]:
    """Progress on stderr, so that stdout holds only the result; silent when nobody watches."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    text = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("steps,")
    times = TimeElapsedColumn(), TextColumn("elapsed,"), TimeRemainingColumn(), TextColumn("left")
    with Progress(
        *text, *times, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        yield progress
