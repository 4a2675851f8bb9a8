"""The ``gvr-topk`` command: replay decode steps, inspect the installation, check a configuration."""

from __future__ import annotations

import importlib
import json
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NoReturn

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from gvr_topk import __version__, gate, library_status, report
from gvr_topk.config import ConfigError, ConfigFileError, ServeConfig, load_config, parse_config
from gvr_topk.library import LibraryError
from gvr_topk.replay import TIMED_PATHS
from gvr_topk.replay import replay as run_replay
from gvr_topk.synthetic import LayerGenerator
from gvr_topk.trace import ScoreSource, load_trace, shipped_trace

EXIT_CHECK_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_CODES = "Exit codes: 0 ok; 1 a result was not exact or a check failed; 2 wrong usage or bad input."

PAPER_LENGTH = 70690
"""Row length of the paper's measurements; the generator's default."""
GENERATOR_STEPS = 64

app = typer.Typer(
    name="gvr-topk",
    help="Exact top-k for sparse-attention decode (Guess-Verify-Refine).",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
config_app = typer.Typer(help="Work with trtllm-serve YAML files.", epilog=EXIT_CODES, no_args_is_help=True)
app.add_typer(config_app, name="config")


def main() -> None:
    """Entry point of the ``gvr-topk`` command."""
    app()


@app.command(epilog=EXIT_CODES)
def replay(
    trace: Annotated[Path | None, typer.Option(help="Trace file (.npz with K, Q, W).")] = None,
    shipped: Annotated[
        bool, typer.Option("--shipped", help="The trace inside the package (default).")
    ] = False,
    generator: Annotated[
        int | None, typer.Option(help="Synthetic layer of the paper: 0, 1, 20 ... 60.")
    ] = None,
    length: Annotated[int, typer.Option(help="Row length at step 0 of --generator.")] = PAPER_LENGTH,
    seed: Annotated[int, typer.Option(help="Seed of --generator.")] = 0,
    config: Annotated[Path | None, typer.Option(help="trtllm-serve YAML; default: heuristic on.")] = None,
    offset: Annotated[int | None, typer.Option(help="Hint offset, instead of the YAML's.")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps to run; default: all.")] = None,
    k: Annotated[int | None, typer.Option("--k", help="Items per row, instead of the YAML's.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda; cuda times the kernels too.")] = "cpu",
    out: Annotated[Path | None, typer.Option(help="Folder for plots (PNG) and the full JSON.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print only JSON on stdout.")] = False,
) -> None:
    """Run decode steps through configuration, gate, prior and op; check each and report beside the paper."""
    if sum((trace is not None, shipped, generator is not None)) > 1:
        _fail("--trace, --shipped, --generator: wanted at most one source, got several")
    with _one_line_errors():
        settings = _settings(config)
        source = _source(trace, generator, length, seed, steps)
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
        with _progress() as progress:
            task = progress.add_task(f"replay {source.name}", total=steps or source.steps)
            result = run_replay(
                source,
                settings,
                k=k,
                hint_offset=offset,
                steps=steps,
                device=device,
                on_step=lambda done: progress.update(task, completed=done),
            )
        written = [] if out is None else [report.save_json(result, out), *report.save_plots(result, out)]
    verdict = f"replay: exact on {result.exact_steps} of {len(result.records)} steps"
    if as_json:
        print(json.dumps(result.to_dict(), allow_nan=False))
        typer.echo(verdict, err=True)
    else:
        console = Console()
        console.print(report.build_table(result))
        timing = report.build_timing_table(result)
        if timing is not None:
            console.print(timing)
        for line in [*report.describe_outcome(result), *(f"wrote {path}" for path in written), verdict]:
            typer.echo(line)
    if not result.is_exact:
        raise typer.Exit(EXIT_CHECK_FAILED)


@app.command(epilog=EXIT_CODES)
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print only JSON on stdout.")] = False,
) -> None:
    """Say what is installed, which paths can run here and why the others cannot."""
    with _one_line_errors():
        sections = {"environment": _environment(), "paths": _paths(), "integration": _integration()}
    if as_json:
        print(json.dumps({name: dict(rows) for name, rows in sections.items()}))
        return
    table = Table(show_header=False, title="gvr-topk doctor", title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for rows in sections.values():
        for label, value in rows:
            table.add_row(label, value)
        table.add_section()
    Console().print(table)


@config_app.command("check", epilog=EXIT_CODES)
def check_config(
    file: Annotated[Path, typer.Argument(help="YAML file as given to trtllm-serve --config.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print only JSON on stdout.")] = False,
) -> None:
    """Check a YAML file and say what it makes this package do."""
    try:
        config = load_config(file)
    except ConfigError as error:
        if as_json:
            problems = [vars(problem) | {"message": str(problem)} for problem in error.problems]
            print(json.dumps({"file": str(file), "ok": False, "problems": problems}))
        _report_error(error)
        missing = isinstance(error, ConfigFileError)
        raise typer.Exit(EXIT_BAD_INPUT if missing else EXIT_CHECK_FAILED) from None
    facts = {
        "heuristic top-k": "on" if config.heuristic_enabled else "off",
        "k": config.index_topk,
        "rows per request": config.next_n,
        "gvr_topk": config.gvr_topk.model_dump(),
        "unknown keys": list(config.unknown_keys),
    }
    if as_json:
        print(json.dumps({"file": str(file), "ok": True, **facts}))
        return
    typer.echo(f"heuristic top-k: {facts['heuristic top-k']}")
    typer.echo(f"k: {config.index_topk}, rows per request: {config.next_n}")
    typer.echo("gvr_topk: " + ", ".join(f"{key} {value}" for key, value in config.gvr_topk))
    _warn_unknown(config)
    typer.echo(f"{file}: ok")


def _settings(path: Path | None) -> ServeConfig:
    if path is None:
        # Nobody replays to see the heuristic switched off; a file that says so is obeyed.
        section = {"algorithm": "dsa", "enable_heuristic_topk": True}
        return parse_config({"sparse_attention_config": section})
    config = load_config(path)
    _warn_unknown(config)
    return config


def _source(
    trace: Path | None, generator: int | None, length: int, seed: int, steps: int | None
) -> ScoreSource:
    if generator is not None:
        return LayerGenerator(generator, length, GENERATOR_STEPS if steps is None else steps, seed)
    return shipped_trace() if trace is None else load_trace(trace)


def _environment() -> list[tuple[str, str]]:
    rows = [
        ("gvr_topk", __version__),
        ("python", f"{platform.python_version()} on {platform.platform()}"),
        ("torch", f"{torch.__version__}, CUDA {torch.version.cuda or 'not built in'}"),
    ]
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        capability = f"sm_{properties.major}{properties.minor}"
        memory = f"{properties.total_memory / 2**30:.0f} GiB"
        rows.append((f"GPU {index}", f"{properties.name}, {capability}, {memory}"))
    if not count:
        rows.append(("GPU", f"none: {_no_gpu_reason()}"))
    return rows


def _paths() -> list[tuple[str, str]]:
    status = library_status()
    try:
        lengths = f"{gate.GVR_MIN_LENGTH:,} to {gate.GVR_MAX_LENGTH:,}"
        policy = f"available: length {lengths} on sm_{gate.MIN_ARCH} or later"
    except LibraryError as error:
        policy = f"not available: {error}"
    rows = [
        ("gate and plan", policy),
        ("CUDA library", f"{status.path}: {status.reason}" if status.path else f"none: {status.reason}"),
    ]
    reason = _no_kernel_reason() if status.loaded else "no CUDA library"
    rows.append(("path cpu", "available"))
    rows += [(f"path {path}", f"not available: {reason}" if reason else "available") for path in TIMED_PATHS]
    return rows


def _no_gpu_reason() -> str:
    if torch.version.cuda is None:
        return "torch is built without CUDA"
    return "torch finds no CUDA device"


def _no_kernel_reason() -> str:
    """Why no kernel can run on the first GPU; empty when one can."""
    if not torch.cuda.is_available():
        return _no_gpu_reason()
    major, minor = torch.cuda.get_device_capability(0)
    if 10 * major + minor < gate.MIN_ARCH:
        return f"the GPU is sm_{major}{minor}, want sm_{gate.MIN_ARCH} or later"
    return ""


def _integration() -> list[tuple[str, str]]:
    try:
        module = importlib.import_module("gvr_topk.integrations.tensorrt_llm")
    except ImportError as error:
        return [("TensorRT-LLM", f"integration not loaded: {error}")]
    describe: Callable[[], list[tuple[str, str]]] = module.describe
    return describe()


def _progress() -> Progress:
    """Progress on stderr, so that stdout holds only the result; silent when nobody watches."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


@contextmanager
def _one_line_errors() -> Iterator[None]:
    """Turn the errors of bad input and of a missing device or library into a line and exit code 2."""
    try:
        yield
    except (ValueError, RuntimeError, OSError, ImportError) as error:
        _report_error(error)
        raise typer.Exit(EXIT_BAD_INPUT) from None


def _warn_unknown(config: ServeConfig) -> None:
    if config.unknown_keys:
        keys = ", ".join(config.unknown_keys)
        typer.echo(f"{config.source}: not checked, unknown to this version: {keys}", err=True)


def _report_error(error: BaseException) -> None:
    lines = str(error).splitlines() if isinstance(error, ConfigError) else [" ".join(str(error).split())]
    for line in lines:
        typer.echo(f"gvr-topk: {line}", err=True)


def _fail(message: str) -> NoReturn:
    typer.echo(f"gvr-topk: {message}", err=True)
    raise typer.Exit(EXIT_BAD_INPUT)
