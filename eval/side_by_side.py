"""Time several versions of the package in turns, in one run on one GPU.

    python -m eval side-by-side --package before --commit-of before=ee90c38 --out out/side_by_side.json

The working tree is always the first version. Each ``--package`` is a folder that holds another one, with its
compiled library:

    mkdir -p before/gvr_topk/lib
    git archive ee90c38 gvr_topk | tar x -C before
    cp LIBRARY before/gvr_topk/lib/libgvr_topk_cuda.so

A version runs in a process of its own, and the versions take turns for some rounds, so that what changes on
the GPU over time falls on all of them. The op is called as each version wants it: with a `TopkState`, with a
``guess_state`` of 16 bytes a slot, or, before those, with a ``guess_state`` and the ``prior`` without which
it counted for nothing. ``GVR_TOPK_LIBRARY_DIR`` is left out of account: each version loads its own library.

A figure is the median over the rounds, and in a round the median over replays of a CUDA graph, per launch
(`eval.kernel_timing`). The rows are Gaussian chains and, with ``--traces``, real ones, the same for all
versions. Results of at least 64 steps, or of all where there are fewer, are compared with a sort after every
replay. The ratio is the working tree's time over that of the first ``--package``.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from eval.common.bench_cases import load_traces
from eval.common.machine import ROOT, describe_machine, sources_commit, write_json
from eval.common.options import TraceFolder, refuse_repeats, require_device, require_writable
from eval.common.package_version import CUDA_LIBRARY, PACKAGE
from eval.common.process import CommandError, run_command
from eval.common.side_by_side_report import TREE, Run, figures, largest_ratio, problems, table, verdict
from eval.common.side_by_side_worker import Job, K
from eval.common.store import file_hash
from gvr_topk.evaluation.trace import Trace, TraceError

FORMAT = "gvr_topk.side_by_side/1"
WORKER = Path(__file__).with_name("common") / "side_by_side_worker.py"
WORKER_SECONDS = 900.0
"""Longest time of one version in one round."""

SHAPES = "8192x1,32768x1,70690x1,131072x1,131072x8,131072x64,8192x64,1048576x1"
COMMIT_FILE = "COMMIT"
"""Text file in a version's folder that names its commit, where no option does."""

METHOD = (
    "a process for each version and round, versions in turn; CUDA graph over a chain of fresh decode steps, "
    "state carried and restored before each replay, buffers of more than 4x L2 (Gaussian: 40 to 512 steps), "
    "L2 emptied before each replay; median over 5 replays of replay time / launches, median over rounds; "
    "results of at least 64 steps (or all) compared after each replay"
)


@dataclass(frozen=True)
class Version:
    """One version of the package.

    Attributes
    ----------
    name : str
        `TREE`, or the folder as it was given.
    folder : Path
        Holds ``gvr_topk/``.
    commit : str
        Of its sources.
    """

    name: str
    folder: Path
    commit: str

    def missing(self, device: str) -> str:
        """What the folder lacks to be measured; empty when it lacks nothing."""
        needed = [Path(PACKAGE, "__init__.py")] + ([CUDA_LIBRARY] if device == "cuda" else [])
        lacks = [str(path) for path in needed if not (self.folder / path).is_file()]
        return f"{self.folder}: wanted {' and '.join(lacks)}, got none" if lacks else ""

    def as_json(self, api: str) -> dict[str, Any]:
        """The version's entry in the JSON."""
        library = self.folder / CUDA_LIBRARY
        return {
            "name": self.name,
            "folder": str(self.folder),
            "commit": self.commit,
            "library_sha256": file_hash(library) if library.is_file() else None,
            "api": api,
        }


def commit_names(given: Sequence[str], packages: Sequence[Path]) -> dict[Path, str]:
    """Commits by folder, from options ``DIR=HASH`` and from files in the folders.

    Raises
    ------
    typer.BadParameter
        An option has another form, or names a folder that is no ``--package``.
    """
    found = {}
    for package in packages:
        file = package / COMMIT_FILE
        found[package] = file.read_text().strip() if file.is_file() else "unknown"
    for text in given:
        folder, equals, commit = text.rpartition("=")
        if not equals or not commit or Path(folder) not in packages:
            raise typer.BadParameter(f"--commit-of: wanted DIR=HASH with a DIR of --package, got {text!r}")
        found[Path(folder)] = commit
    return found


def all_versions(
    packages: Sequence[Path], commit: str, commit_of: Sequence[str], device: str
) -> list[Version]:
    """The working tree and the versions of the folders, each with its commit.

    Raises
    ------
    typer.BadParameter
        A version lacks something that it needs.
    """
    commits = commit_names(commit_of, packages)
    versions = [Version(TREE, ROOT, sources_commit(commit))]
    versions += [Version(str(folder), folder.resolve(), commits[folder]) for folder in packages]
    for version in versions:
        if lacks := version.missing(device):
            raise typer.BadParameter(lacks)
    return versions


def run_version(version: Version, job: Job, number: int) -> Run:
    """Measure a version in a process of its own, for the round of a number."""
    with tempfile.TemporaryDirectory() as folder:
        given, result, log = (Path(folder) / name for name in ("job.json", "result.json", "log"))
        write_json(given, asdict(job))
        try:
            run_command([sys.executable, str(WORKER), str(given), str(result)], log, timeout_s=WORKER_SECONDS)
        except CommandError as error:
            return Run(version.name, number, problem=str(error))
        return Run(version.name, number, **json.loads(result.read_text()))


def report(versions: Sequence[Version], runs: Sequence[Run], rounds: int) -> dict[str, Any]:
    """The result file, but for the machine, which is looked at when no version needs it any more."""
    names = [version.name for version in versions]
    apis = {run.version: run.api for run in runs}
    rows = figures(names, runs)
    return {
        "format": FORMAT,
        "method": METHOD,
        "command": f"{sys.argv[0]} {shlex.join(sys.argv[1:])}",
        "k": K,
        "rounds": rounds,
        "versions": [version.as_json(apis.get(version.name, "")) for version in versions],
        "cells": rows,
        "largest_ratio": largest_ratio(rows),
        "problems": problems(runs),
    }


def check_options(
    packages: Sequence[Path], shapes: Sequence[str], traces: Path | None, rounds: int, device: str
) -> None:
    """Refuse options that cannot be followed.

    Raises
    ------
    typer.BadParameter
        With the option, what was wanted and what was got.
    """
    require_device(device)
    if not packages:
        raise typer.BadParameter("--package: wanted a folder with another version, got none")
    refuse_repeats([package.resolve() for package in packages], "--package")
    refuse_repeats(shapes, "--cells")
    if not shapes and traces is None:
        raise typer.BadParameter("--cells: wanted at least one, or --traces, got neither")
    for shape in shapes:
        if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", shape):
            raise typer.BadParameter(f"--cells: wanted N x batch, as 8192x1, got {shape!r}")
    if rounds < 1:
        raise typer.BadParameter(f"--rounds: wanted at least 1, got {rounds}")


def trace_files(folder: Path | None) -> list[str]:
    """The traces of a folder and the shipped one, read once to see that they are sound.

    Raises
    ------
    typer.BadParameter
        A file is not.
    """
    try:
        return [str(trace.path.resolve()) for trace in load_traces(folder) if isinstance(trace, Trace)]
    except TraceError as error:
        raise typer.BadParameter(f"--traces: {error}") from None


def main(
    package: Annotated[
        list[Path] | None, typer.Option(help="Folder with another version's gvr_topk/; may be repeated.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Result file.")] = Path("out/side_by_side.json"),
    rounds: Annotated[int, typer.Option(help="How often each version takes its turn.")] = 3,
    cells: Annotated[str, typer.Option(help="N x batch of Gaussian chains, comma-separated.")] = SHAPES,
    traces: TraceFolder = None,
    commit_of: Annotated[
        list[str] | None,
        typer.Option(help=f"DIR=HASH: commit of a --package; default: its file {COMMIT_FILE}."),
    ] = None,
    device: Annotated[str, typer.Option(help="cuda, or cpu to try the tool itself.")] = "cuda",
    commit: Annotated[str, typer.Option(help="Commit of the working tree, where Git cannot say.")] = "",
) -> None:
    """Measure every version in turn, write the file and print the table."""
    packages, shapes = package or [], [shape for shape in cells.split(",") if shape]
    check_options(packages, shapes, traces, rounds, device)
    require_writable(out)
    versions = all_versions(packages, commit, commit_of or [], device)
    files = trace_files(traces)
    runs: list[Run] = []
    for number in range(1, rounds + 1):
        for version in versions:
            run = run_version(version, Job(str(version.folder), device, shapes, files), number)
            runs.append(run)
            print(f"round {number} of {rounds}, {version.name}: {run.summary}", flush=True)
            write_json(out, report(versions, runs, rounds))
    data = report(versions, runs, rounds)
    write_json(out, data | {"machine": describe_machine(versions[0].commit, device)})
    print(f"\n{table([version.name for version in versions], data['cells'])}")
    for problem in data["problems"]:
        print(problem, file=sys.stderr)
    raise typer.Exit(verdict(runs))
