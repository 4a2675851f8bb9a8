"""The ``gvr-topk`` command: inspect the installation, check a configuration, replay decode steps, sample.

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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from gvr_topk import __version__, indexer_topk_decode, library_status
from gvr_topk.config import ConfigError, ConfigFileError, Problem, load_config
from gvr_topk.config_files import combine
from gvr_topk.constants import MIN_ARCH, HintReason
from gvr_topk.constants import Path as OpPath
from gvr_topk.evaluation import command as replay_command
from gvr_topk.integrations._kit import environment
from gvr_topk.library import LibraryError, build_facts, has_cuda_library
from gvr_topk.policy import asks_for_hint, can_use_heuristic, gpu_arch, no_gpu_reason, no_kernels_reason, plan
from gvr_topk.sampling import command as sample_command

EXIT_OK = 0
EXIT_CHECK_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130  # as shells write it: 128 and SIGINT
EXIT_NO_READER = 141  # 128 and SIGPIPE
EXIT_CODES = (
    "Exit codes: 0 ok; 1 a result was not exact, a checked configuration is wrong, or doctor --require names "
    "what is not ready; 2 wrong usage or bad input, such as a file that cannot be read; 130 interrupted; 141 "
    "nobody reads the output any more."
)

DOCTOR_WIDTH, DOCTOR_K = 65_536, 2048
"""Row length and k for which ``gvr-topk doctor`` asks the gate and the plan; every path serves them."""

ENGINES = {"tensorrt_llm": "TensorRT-LLM", "vllm": "vLLM", "sglang": "SGLang"}
"""Engines by the name of their integration."""

REQUIREMENTS = ("cuda", *ENGINES)
"""What ``gvr-topk doctor --require`` can name."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the ``gvr-topk`` command, by default with the arguments of the process; returns the exit code."""
    options = _parser().parse_args(arguments)
    run: Callable[[argparse.Namespace], int | None] = options.run
    try:
        code = run(options) or EXIT_OK
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
    """Version, the commit of the build, and whether this installation holds CUDA kernels."""
    commit, archs = build_facts()
    holds = "CPU implementation only"
    if has_cuda_library():
        holds = f"with CUDA kernels for {archs}" if archs else "with CUDA kernels"
    return f"gvr-topk {__version__} ({f'commit {commit}, ' if commit else ''}{holds})"


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
        lambda options: EXIT_OK if replay_command.run(options) else EXIT_CHECK_FAILED,
    )
    replay_command.add_arguments(replay)
    _add_json(replay)

    doctor = _add(
        commands,
        "doctor",
        "Say what is installed, which paths can run and why others cannot. The last line is the verdict: "
        "ready, or CPU only where no kernel can run.",
        _doctor,
    )
    doctor.add_argument(
        "--require",
        type=_requirements,
        default=(),
        metavar="NAMES",
        help=f"exit with 1 where one of these is not ready: {', '.join(REQUIREMENTS)}, separated by commas",
    )
    doctor.add_argument(
        "--check",
        action="store_true",
        help="run one call, on the GPU if kernels can, and compare it with a sort; exit with 1 if it differs",
    )
    _add_json(doctor)

    sampling = _add(
        commands,
        "sample",
        "Say how many tokens, and what share of the mass, a setting of the sampler keeps of logits.",
        sample_command.run,
    )
    sample_command.add_arguments(sampling)
    _add_json(sampling)

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
    run: Callable[[argparse.Namespace], int | None],
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name, help=summary, description=summary, epilog=EXIT_CODES, allow_abbrev=False
    )
    parser.set_defaults(run=run)
    return parser


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", dest="as_json", action="store_true", help="print only JSON on stdout")


def _requirements(text: str) -> tuple[str, ...]:
    """Parse the names that ``doctor --require`` is given."""
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in REQUIREMENTS:
            raise argparse.ArgumentTypeError(f"wanted names of {', '.join(REQUIREMENTS)}, got {name!r}")
    return names


def _doctor(options: argparse.Namespace) -> int:
    no_kernels = no_kernels_reason()
    engines = {name: _engine(name, no_kernels) for name in ENGINES}
    sections = {
        "environment": _environment(),
        "paths": _paths(),
        "variables": _variables() or [("variables", "none of this package is set")],
        "integration": engines["tensorrt_llm"],
        "vLLM": engines["vllm"],
        "SGLang": engines["sglang"],
    }
    problems = {"cuda": no_kernels, **{name: _engine_problem(rows) for name, rows in engines.items()}}
    missing = [f"{name}: {problems[name]}" for name in options.require if problems[name]]
    if options.check:
        exact, said = _exact_call("cpu" if no_kernels else "cuda")
        sections["check"] = [("exact call", said)]
        if not exact:
            missing.append(said)
    verdict = _verdict(problems, missing)
    if options.as_json:
        facts = {name: dict(rows) for name, rows in sections.items()}
        ready = {name: not problem for name, problem in problems.items()}
        print(json.dumps(facts | {"ready": ready, "verdict": verdict}))
        return EXIT_CHECK_FAILED if missing else EXIT_OK
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
    print(f"verdict: {verdict}")
    return EXIT_CHECK_FAILED if missing else EXIT_OK


def _verdict(problems: Mapping[str, str], missing: Sequence[str]) -> str:
    """Say in one line what can be used, from what is in the way of each and what is missing."""
    if missing:
        return f"not ready: {'; '.join(missing)}"
    if problems["cuda"]:
        return f"CPU only: no kernels ({problems['cuda']})"
    served = [title for name, title in ENGINES.items() if not problems[name]]
    return f"ready: kernels run on this GPU{', and in ' + ' and '.join(served) if served else ''}"


def _exact_call(device: str) -> tuple[bool, str]:
    """Run one call with ties, and compare it with a stable sort on the CPU."""
    scores = (8 * torch.randn(2, DOCTOR_WIDTH, generator=torch.Generator().manual_seed(0))).round() / 8
    lengths = [DOCTOR_WIDTH, DOCTOR_WIDTH // 2]
    what = f"{len(lengths)} rows of up to {DOCTOR_WIDTH:,} scores on {device}"
    try:
        given = torch.tensor(lengths, dtype=torch.int32, device=device)
        got = indexer_topk_decode(scores.to(device), given, DOCTOR_K).cpu()
    except (RuntimeError, ValueError) as error:
        return False, f"failed: {what}: {' '.join(str(error).split())}"
    for row, length in enumerate(lengths):
        order = torch.sort(scores[row, :length], descending=True, stable=True).indices
        if not torch.equal(got[row].long(), order[:DOCTOR_K].sort().values):
            return False, f"not exact: {what} differ from torch.sort"
    return True, f"exact: {what} agree with torch.sort"


def _variables() -> list[tuple[str, str]]:
    """Environment variables that are set, with the one that a validated YAML sets for worker processes."""
    rows = environment.describe()
    published = os.environ.get(environment.YAML)
    if published is not None:
        rows.append((environment.YAML, f"{published}: what a validated YAML asks for"))
    return rows


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
    }
    if options.as_json:
        print(json.dumps({"file": str(file), "ok": True, **facts}))
        return EXIT_OK
    print(f"heuristic top-k: {facts['heuristic top-k']}")
    print(f"k: {config.index_topk}, rows per request: {config.next_n}")
    # As the file would say it: null, true, and texts without quotes.
    values = {key: value if isinstance(value, str) else json.dumps(value) for key, value in config.gvr_topk}
    print("gvr_topk: " + ", ".join(f"{key} {value}" for key, value in values.items()))
    print(f"{file}: ok")
    return EXIT_OK


def _combine(options: argparse.Namespace) -> int:
    try:
        text = combine(options.files)
        if options.out is not None and options.out.resolve() in [file.resolve() for file in options.files]:
            raise ConfigError([Problem(str(options.out), "", "a file of its own", "one that is combined")])
    except ConfigError as error:
        _report_error(error)
        return _config_exit_code(error)
    if options.out is not None:
        options.out.write_text(text, encoding="utf-8")
        text = f"wrote {options.out}\n"
    print(text, end="")
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
        rows.append(("GPU", f"none: {no_gpu_reason()}"))
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
    reason = no_kernels_reason() if library_status().loaded else "no CUDA library"
    if reason:
        return f"not available on a GPU: {reason}"
    try:
        planned = plan(rows=1, width=DOCTOR_WIDTH, k=DOCTOR_K, path=name, arch=gpu_arch() or MIN_ARCH)
        state = can_use_heuristic(length=DOCTOR_WIDTH, k=DOCTOR_K, enabled=asks_for_hint(path))
    except (ValueError, LibraryError) as error:
        return f"not available on a GPU: {error}"
    return f"available: a row of {DOCTOR_WIDTH:,} takes the {planned.family} kernel, its state {state.reason}"


def _engine(name: str, no_kernels: str) -> list[tuple[str, str]]:
    """Let an integration describe itself; one that does not import is no reason to say nothing else.

    Where no kernel can run, nothing happens in any engine, whatever its integration would do.
    """
    try:
        found = importlib.import_module(f"gvr_topk.integrations.{name}")
    except ImportError as error:
        return [(ENGINES[name], f"integration not loaded: {error}")]
    describe: Callable[..., list[tuple[str, str]]] = found.describe
    rows = describe(gpu_arch()) if name == "tensorrt_llm" else describe()
    if no_kernels and not _engine_problem(rows):
        return [
            (label, f"nothing: {no_kernels}" if label == "would happen" else text) for label, text in rows
        ]
    return rows


def _engine_problem(rows: Sequence[tuple[str, str]]) -> str:
    """Say why an engine is not served, from how its integration describes itself; empty if it is."""
    (_, found), outlook = rows[0], dict(rows).get("would happen")
    if outlook is None or found == "not installed":
        return found
    return (
        outlook if outlook.startswith(("nothing", "off", "refused")) or "after install()" in outlook else ""
    )


def _report_error(error: BaseException) -> None:
    lines = str(error).splitlines() if isinstance(error, ConfigError) else [" ".join(str(error).split())]
    for line in lines:
        print(f"gvr-topk: {line}", file=sys.stderr)
