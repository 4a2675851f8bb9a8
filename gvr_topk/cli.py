"""The ``gvr-topk`` command: inspect the installation, check a configuration, replay decode steps.

Inspecting and checking need the packages that serving needs and no more. ``replay`` is implemented in
`gvr_topk.evaluation.command`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from gvr_topk import __version__, library_status
from gvr_topk.config import ConfigError, ConfigFileError, load_config
from gvr_topk.config_files import combine
from gvr_topk.constants import MIN_ARCH, HintReason
from gvr_topk.constants import Path as OpPath
from gvr_topk.evaluation import command as replay_command
from gvr_topk.integrations import environment
from gvr_topk.library import LibraryError, has_cuda_library
from gvr_topk.policy import asks_for_hint, can_use_heuristic, plan

EXIT_OK = 0
EXIT_CHECK_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130  # as shells write it: 128 and SIGINT
EXIT_NO_READER = 141  # 128 and SIGPIPE
EXIT_CODES = (
    "Exit codes: 0 ok; 1 a result was not exact or a checked configuration is wrong; 2 wrong usage or bad "
    "input, such as a file that cannot be read; 130 interrupted; 141 nobody reads the output any more."
)

DOCTOR_WIDTH, DOCTOR_K = 65_536, 2048
"""Row length and k for which ``gvr-topk doctor`` asks the gate and the plan; every path serves them."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the ``gvr-topk`` command.

    Parameters
    ----------
    arguments : sequence of str, optional
        Default: the arguments of the process.

    Returns
    -------
    int
        The exit code.
    """
    options = _parser().parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        code = run(options)
        sys.stdout.flush()  # a failure of this at the end of the process could not be caught
        return code
    except KeyboardInterrupt:
        print("gvr-topk: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # What is still buffered would fail again when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_NO_READER
    except (ValueError, RuntimeError, OSError, ImportError, MemoryError) as error:
        # Bad input, also one that asks for too much, or a missing device, library or package.
        _report_error(error)
        return EXIT_BAD_INPUT


def version_line() -> str:
    """Version, and whether this installation holds CUDA kernels."""
    holds = "with CUDA kernels" if has_cuda_library() else "CPU implementation only"
    return f"gvr-topk {__version__} ({holds})"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gvr-topk",
        description="Exact top-k for sparse-attention decode (Guess-Verify-Refine).",
        epilog=EXIT_CODES,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=version_line())
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    replay = _add(
        commands,
        "replay",
        "Run decode steps through configuration, gate, state and op, check each step, and report beside the "
        "paper. Needs the extra: pip install 'gvr-topk[replay]'.",
        _replay,
    )
    replay_command.add_arguments(replay)

    doctor = _add(
        commands, "doctor", "Say what is installed, which paths can run and why others cannot.", _doctor
    )
    _add_json(doctor)

    summary = "Work with trtllm-serve YAML files."
    config = commands.add_parser(
        "config", help=summary, description=summary, epilog=EXIT_CODES, allow_abbrev=False
    )
    verbs = config.add_subparsers(title="commands", metavar="COMMAND", required=True)
    check = _add(verbs, "check", "Check a YAML file and say what it makes this package do.", _check_config)
    check.add_argument("file", type=Path, help="YAML file as given to trtllm-serve --config")
    _add_json(check)
    together = _add(
        verbs, "combine", "Put YAML files together; of a key that two set, the later counts.", _combine
    )
    together.add_argument(
        "files", type=Path, nargs="+", metavar="FILE", help="a base, then what overrides it"
    )
    together.add_argument("--out", type=Path, metavar="FILE", help="file to write; default: standard output")
    return parser


def _add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    summary: str,
    run: Callable[[argparse.Namespace], int],
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name, help=summary, description=summary, epilog=EXIT_CODES, allow_abbrev=False
    )
    parser.set_defaults(run=run)
    return parser


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", dest="as_json", action="store_true", help="print only JSON on stdout")


def _replay(options: argparse.Namespace) -> int:
    return EXIT_OK if replay_command.run(options) else EXIT_CHECK_FAILED


def _doctor(options: argparse.Namespace) -> int:
    sections = {
        "environment": _environment(),
        "paths": _paths(),
        "variables": environment.describe() or [("variables", "none of this package is set")],
        "integration": _engine("TensorRT-LLM", "tensorrt_llm", _arch()),
        "vLLM": _engine("vLLM", "vllm"),
        "SGLang": _engine("SGLang", "sglang"),
    }
    if options.as_json:
        print(json.dumps({name: dict(rows) for name, rows in sections.items()}))
        return EXIT_OK
    label_width = max(len(label) for rows in sections.values() for label, _ in rows)
    indent = " " * (label_width + 2)
    width = max(len(indent) + 20, shutil.get_terminal_size().columns)
    for name, rows in sections.items():
        print(f"{name}:")
        for label, value in rows:
            # Paths and names are not broken, so that they can be copied.
            print(
                textwrap.fill(
                    value,
                    width,
                    initial_indent=label.ljust(len(indent)),
                    subsequent_indent=indent,
                    break_long_words=False,
                    break_on_hyphens=False,
                )
            )
    return EXIT_OK


def _config_exit_code(error: ConfigError) -> int:
    return EXIT_BAD_INPUT if isinstance(error, ConfigFileError) else EXIT_CHECK_FAILED


def _check_config(options: argparse.Namespace) -> int:
    file = options.file
    try:
        config = load_config(file)
    except ConfigError as error:
        if options.as_json:
            problems = [vars(problem) | {"message": str(problem)} for problem in error.problems]
            print(json.dumps({"file": str(file), "ok": False, "problems": problems}))
        _report_error(error)
        return _config_exit_code(error)
    facts = {
        "heuristic top-k": "on" if config.heuristic_enabled else "off",
        "k": config.index_topk,
        "rows per request": config.next_n,
        "gvr_topk": config.gvr_topk.model_dump(),
        "unknown keys": list(config.unknown_keys),
    }
    if options.as_json:
        print(json.dumps({"file": str(file), "ok": True, **facts}))
        return EXIT_OK
    print(f"heuristic top-k: {facts['heuristic top-k']}")
    print(f"k: {config.index_topk}, rows per request: {config.next_n}")
    print("gvr_topk: " + ", ".join(f"{key} {value}" for key, value in config.gvr_topk))
    if config.unknown_keys:
        keys = ", ".join(config.unknown_keys)
        print(f"{config.source}: not checked, unknown to this version: {keys}", file=sys.stderr)
    print(f"{file}: ok")
    return EXIT_OK


def _combine(options: argparse.Namespace) -> int:
    try:
        text = combine(options.files)
    except ConfigError as error:
        _report_error(error)
        return _config_exit_code(error)
    if options.out is None:
        print(text, end="")
        return EXIT_OK
    try:
        options.out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--out: wanted a file to write to, got {options.out}: {error.strerror}") from None
    print(f"wrote {options.out}")
    return EXIT_OK


def _environment() -> list[tuple[str, str]]:
    rows = [
        ("gvr_topk", version_line().removeprefix("gvr-topk ")),
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
    rows = [
        ("gate and plan", _gate()),
        ("CUDA library", f"{status.path}: {status.reason}" if status.path else f"none: {status.reason}"),
        ("on a CPU", "available: one implementation serves all paths, which differ on a GPU alone"),
    ]
    return rows + [(f"path {path.name.lower()}", _availability(path)) for path in OpPath]


def _gate() -> str:
    """Say whether the compiled policy answers, and name every answer that the gate can give."""
    try:
        can_use_heuristic(length=DOCTOR_WIDTH, k=DOCTOR_K)
    except LibraryError as error:
        return f"not available: {error}"
    against = ", ".join(reason.name.lower() for reason in HintReason if reason is not HintReason.USED)
    return f"available: answers for each row with used, or with why the state is not used ({against})"


def _availability(path: OpPath) -> str:
    """Say whether kernels of a path can run on the first GPU, and what the gate decides for their rows."""
    name = path.name.lower()
    reason = _no_kernel_reason() if library_status().loaded else "no CUDA library"
    if reason:
        return f"not available on a GPU: {reason}"
    try:
        planned = plan(rows=1, width=DOCTOR_WIDTH, k=DOCTOR_K, path=name, arch=_arch() or MIN_ARCH)
        state = can_use_heuristic(length=DOCTOR_WIDTH, k=DOCTOR_K, enabled=asks_for_hint(path))
    except (ValueError, LibraryError) as error:
        return f"not available on a GPU: {error}"
    return f"available: a row of {DOCTOR_WIDTH:,} takes the {planned.family} kernel, its state {state.reason}"


def _arch() -> int | None:
    """Compute capability of the first GPU times ten."""
    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability(0)
    return 10 * major + minor


def _no_gpu_reason() -> str:
    if torch.version.cuda is None:
        return "torch is built without CUDA"
    return "torch finds no CUDA device"


def _no_kernel_reason() -> str:
    """Why no kernel can run on the first GPU; empty when one can."""
    arch = _arch()
    if arch is None:
        return _no_gpu_reason()
    if arch < MIN_ARCH:
        return f"the GPU is sm_{arch}, wanted sm_{MIN_ARCH} or later"
    return ""


def _engine(name: str, module: str, *facts: int | None) -> list[tuple[str, str]]:
    """Let an integration describe itself; one that does not import is no reason to say nothing else."""
    try:
        found = importlib.import_module(f"gvr_topk.integrations.{module}")
    except ImportError as error:
        return [(name, f"integration not loaded: {error}")]
    describe: Callable[..., list[tuple[str, str]]] = found.describe
    return describe(*facts)


def _report_error(error: BaseException) -> None:
    lines = str(error).splitlines() if isinstance(error, ConfigError) else [" ".join(str(error).split())]
    for line in lines:
        print(f"gvr-topk: {line}", file=sys.stderr)
