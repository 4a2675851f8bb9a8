"""Figures of docs/engine_evidence.md, from the files of ``vllm-trial`` and of finished studies."""

from __future__ import annotations

import statistics
import textwrap
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eval.engines.vllm_model import SHAPES, V32
from eval.report.provenance import (
    commits_of,
    device_of,
    files_of_all_gpus,
    older_kernels,
    result_files,
    source_of,
    sources_of,
)

MODES = {"stock": "vLLM's", "ours": "this package"}
REPEATS_HEADER = (
    *("GPU", "engine", "top-k", "chunk", "prefill rows alike", "decode rows alike", "scores differ from"),
    *("other set", "other order", "answers"),
)
GRAPHS = {"eager": "eager", "full": "FULL graphs"}


class RefusedError(ValueError):
    """A result file says that something went wrong, so that its figures are no results."""


def vllm_figures(results: Path) -> str:
    """Everything that was measured inside vLLM.

    Parameters
    ----------
    results : Path
        Folder of one GPU's result files. Times are those of another GPU if it has none; rows are counted over
        all GPUs.

    Raises
    ------
    RefusedError
        A part of what was to be measured failed.
    """
    quoted: dict[str, dict[str, Any]] = {}
    lines = []
    for keep, files, report in (
        (_has_compared, files_of_all_gpus, compared_rows),
        (
            _has_times,
            result_files,
            lambda trials: [line for each in trials.values() for line in kernel_times(each)],
        ),
        (_has_invariance, files_of_all_gpus, invariance),
    ):
        trials = _trials(results, keep, files)
        quoted |= trials
        lines += report(trials)
    for name, single in (("vllm_serve.json", served), ("flashmla_order.json", flashmla)):
        for data in result_files(results, name).values():
            quoted[name] = data
            if failures := data.get("failures"):
                raise RefusedError(f"{name}: wanted no failures, got {failures}")
            lines += single(data)
    # FlashMLA's file is none of this package's kernels.
    ours = {name: commits_of(data) for name, data in quoted.items() if name != "flashmla_order.json"}
    if older := older_kernels(ours):
        lines += ["", *_wrapped(older)]
    return "\n".join(lines).strip("\n")


def _trials(
    results: Path, keep: Callable[[Mapping[str, Any]], bool], files: Callable[..., Any] = result_files
) -> dict[str, dict[str, Any]]:
    """Trials that have a part; rows that differ are counted in a table, what failed in none."""
    found: dict[str, dict[str, Any]] = files(results, "vllm_trial_*.json", keep)
    for name, trial in found.items():
        if failures := [line for engine in trial["engines"] for line in engine.get("failures", ())]:
            raise RefusedError(f"{name}: wanted no failures, got {failures}")
    return found


def _has_compared(trial: Mapping[str, Any]) -> bool:
    return any(engine.get("compared") for engine in trial["engines"])


def _has_times(trial: Mapping[str, Any]) -> bool:
    modes = {engine["mode"] for engine in trial["engines"] if engine.get("cases")}
    return bool(trial.get("prefill")) or set(MODES) <= modes


def _has_invariance(trial: Mapping[str, Any]) -> bool:
    return bool(trial["engines"] and trial["engines"][0].get("invariance"))


@dataclass(frozen=True)
class Compared:
    """Rows that were compared inside vLLM. Every rank of an engine compares the same rows: they count once.

    Attributes
    ----------
    decode, prefill : int
        Compared rows.
    seen : int
        Rows of prefill calls, of which some were compared.
    differ : int
        Compared rows of both kinds whose results differ, of all ranks.
    commits : dict of str to set of str
        By file.
    source : str
        GPU and commits, as a caption names them.
    """

    decode: int = 0
    prefill: int = 0
    seen: int = 0
    differ: int = 0
    commits: dict[str, set[str]] = field(default_factory=dict)
    source: str = ""


def total_compared(results: Path) -> Compared:
    """What all engines of one GPU compared."""
    trials = _trials(results, _has_compared)
    engines = [engine for trial in trials.values() for engine in trial["engines"] if engine.get("compared")]
    if not engines:
        return Compared()
    counts = [_once(engine) for engine in engines]
    names = ("rows", "prefill_rows", "prefill_rows_seen", "differ")
    decode, prefill, seen, differ = (sum(each[name] for each in counts) for name in names)
    by_file = {name: commits_of(trial) for name, trial in trials.items()}
    return Compared(decode, prefill, seen, differ, by_file, sources_of(trials.values()))


def _once(engine: Mapping[str, Any]) -> dict[str, int]:
    """Rows of one engine by kind, those that several ranks compared counted once."""
    count, ranks = engine["compared"], engine.get("tensor_parallel") or 1
    names = ("rows", "prefill_rows", "prefill_rows_seen", "numpy_rows")
    return {name: count[name] // ranks for name in names} | {
        "differ": count["rows_that_differ"] + count["prefill_rows_that_differ"]
    }


def in_engine(results: Path) -> tuple[str, dict[str, Any], list[dict[str, Any]]] | None:
    """Times of both kinds of top-k inside one engine: the file, and the cases that have both.

    A case has ``batch`` and ``length``, and by mode ``topk_us``, ``step_ms`` and ``prefill_ms``, as far as
    they were measured.
    """
    trials = _trials(results, _has_times)
    for name, trial in trials.items():
        cases: defaultdict[tuple[int, int], dict[str, dict[str, float]]] = defaultdict(
            lambda: {mode: {} for mode in MODES}
        )
        for engine in trial["engines"]:
            for case in engine.get("cases", ()) if engine["mode"] in MODES else ():
                found = cases[case["batch"], case["length"]][engine["mode"]]
                times = list(_topk_kernels(case).values())
                if len(times) == 1:
                    found["topk_us"] = times[0]
                if case.get("decode_ms_median") is not None:
                    found["step_ms"] = case["decode_ms_median"]
        for case in trial.get("prefill") or ():
            for mode in MODES:
                cases[case["batch"], case["length"]][mode]["prefill_ms"] = case[f"{mode}_us"] / 1000
        shown = [
            {"batch": batch, "length": length} | by_mode
            for (batch, length), by_mode in sorted(cases.items())
            if all(by_mode.values())
        ]
        if shown:
            return name, trial, shown
    return None


def _topk_kernels(case: Mapping[str, Any]) -> dict[str, float]:
    """Median microseconds of the kernels of a case's decode top-k."""
    kernels = ((case.get("profile") or {}).get("kernels") or {}).items()
    return {name: times["us_median"] for name, times in kernels if "::moe::" not in name}


def compared_rows(trials: Mapping[str, dict[str, Any]]) -> list[str]:
    """A table of every engine that compared its rows with a sort."""
    engines = [
        (device_of(trial), engine)
        for trial in trials.values()
        for engine in trial["engines"]
        if engine.get("compared")
    ]
    if not engines:
        return []
    first = next(iter(trials.values()))
    by_numpy = sum(_once(engine)["numpy_rows"] for _, engine in engines)
    lines = [
        *_wrapped(
            f"Rows compared with a sort of the same scores inside vLLM {first['versions']['vllm']}, "
            f"{sources_of(trials.values())} (`vllm_trial_*.json`). The sort is "
            f"`gvr_topk.contract.exact_topk`; {by_numpy:,} of the rows were sorted by NumPy, too. Rows that "
            "several ranks compared count once."
        ),
        "",
        "| GPU | engine | decode rows | prefill rows, of those seen | different |",
        "|---|---|---:|---:|---:|",
    ]
    for gpu, engine in engines:
        count = _once(engine)
        prefill = f"{count['prefill_rows']:,} of {count['prefill_rows_seen']:,}"
        row = (_short(gpu), _engine(engine), f"{count['rows']:,}", prefill, f"{count['differ']:,}")
        lines.append(f"| {' | '.join(row)} |")
    return lines


def _short(device: str) -> str:
    """Name of a GPU without its maker, memory and form."""
    return device.removeprefix("NVIDIA ").partition(" ")[0]


def kernel_times(trial: dict[str, Any]) -> list[str]:
    """Microseconds of the decode top-k by its kernels, and of all prefill calls of each case."""
    cases: defaultdict[tuple[int, int], dict[str, str]] = defaultdict(dict)
    for engine in trial["engines"]:
        for case in engine.get("cases", ()):
            times = [f"{us:.1f} ({_kernel(name)})" for name, us in _topk_kernels(case).items()]
            if times and engine["mode"] in MODES:
                cases[case["length"], case["batch"]][engine["mode"]] = ", ".join(times)
    lines = []
    if cases:
        longest = trial["setup"]["max_model_len"]
        lines += [
            "",
            *_wrapped(
                "Microseconds of a layer's decode top-k inside the engine, "
                f"{GRAPHS[trial['engines'][0]['graphs']]} of a context up to {longest:,}, medians, "
                f"{source_of(trial)}."
            ),
            "",
            f"| requests x length | {' | '.join(MODES.values())} |",
            "|---|---:|---:|",
        ]
        for (length, batch), by_mode in sorted(cases.items()):
            shown = " | ".join(by_mode.get(mode, "-") for mode in MODES)
            lines.append(f"| {batch} x {length:,} | {shown} |")
        lines += step_times(trial)
    if trial.get("prefill"):
        lines += [
            "",
            f"Milliseconds of all prefill calls of a case, {source_of(trial)}.",
            "",
        ]
        lines += [
            f"| requests x length | calls | rows | {' | '.join(MODES.values())} |",
            "|---|---:|---:|---:|---:|",
        ]
        for case in trial["prefill"]:
            spent = " | ".join(f"{case[f'{mode}_us'] / 1000:.2f}" for mode in MODES)
            name = f"{case['batch']} x {case['length']:,}"
            lines.append(f"| {name} | {case['calls']:,} | {case['rows']:,} | {spent} |")
    return lines


def step_times(trial: dict[str, Any]) -> list[str]:
    """Milliseconds of a whole decode step in one process, and the part of it that the GPU works."""
    steps: defaultdict[tuple[int, int], dict[str, list[str]]] = defaultdict(dict)
    for engine in trial["engines"]:
        for case in engine.get("cases", ()):
            took, works = case.get("decode_ms_median"), (case.get("profile") or {}).get("gpu_us_per_step")
            if took is not None and works is not None and engine["mode"] in MODES:
                steps[case["length"], case["batch"]][engine["mode"]] = [f"{took:.2f}", f"{works / 1000:.3f}"]
    if not steps:
        return []
    names = [f"{name}{part}" for part in (": step", ": GPU works") for name in MODES.values()]
    lines = ["", "Milliseconds of a whole decode step in the same engines, medians.", ""]
    lines += [f"| requests x length | {' | '.join(names)} |", "|---|---:|---:|---:|---:|"]
    for (length, batch), by_mode in sorted(steps.items()):
        figures = [by_mode.get(mode, ["-", "-"])[part] for part in (0, 1) for mode in MODES]
        lines.append(f"| {batch} x {length:,} | {' | '.join(figures)} |")
    return lines


def _kernel(name: str) -> str:
    """Name of a kernel without its namespace and arguments."""
    return f"`{name.partition('<')[0].partition('(')[0].rpartition('::')[2].rpartition(' ')[2]}`"


def invariance(files: Mapping[str, dict[str, Any]]) -> list[str]:
    """How much of a repeated prompt depends on its batch, for either top-k: two tables of all engines."""
    trials = list(files.values())
    if not trials:
        return []
    lines = [
        "",
        *_wrapped(
            "The same prompt alone and in batches of 2 to 32 requests, or again after preemptions, "
            f"{sources_of(trials)}. *Rows alike*: rows whose scores are bitwise those of another row, of the "
            "rows that repeat a prompt (after preemptions: of all rows). *Scores differ from*: the first "
            "layer where repeated rows have different scores, in prefill and in decode. *Other set* and "
            "*other order* count rows whose scores equal those of another row, while the selections differ. "
            "*Answers* counts different answers to the repeated prompt."
        ),
        "",
        f"| {' | '.join(REPEATS_HEADER)} |",
        "|---|---|---|---:|---:|---:|---|---:|---:|---:|",
    ]
    lines += [
        f"| {_short(device_of(trial))} {_engine_of_repeats(engine)}"
        for trial in trials
        for engine in trial["engines"]
    ]
    lines += [
        "",
        *_wrapped(
            "The same over both chunk sizes, and over the engines of both kinds of top-k together. Sets that "
            "differ where the *other values* are 0 differ by ties alone."
        ),
        "",
        "| GPU | engine | top-k | rows alike | other set | other values | other order |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    for trial in trials:
        name = f"{_short(device_of(trial))} | {_setting(trial['engines'][0])}"
        for mode, counted in trial["twins"].items():
            rows = counted["all"]
            lines.append(
                f"| {name} | {MODES.get(mode, 'both')} | {rows['rows_with_a_twin']:,} of {rows['rows']:,} "
                f"| {rows['set']['rows']:,} | {_values(rows)} | {rows['order']['rows']:,} |"
            )
    return lines


def _values(rows: Mapping[str, Any]) -> str:
    """Rows whose selected values differ; files of before these were compared do not say."""
    return f"{rows['values']['rows']:,}" if "values" in rows else "not compared"


def _setting(engine: dict[str, Any]) -> str:
    words = [GRAPHS[engine["graphs"]]]
    if not engine.get("split_k", True):
        words.append("no split-K")
    if engine["part"] == "preempted":
        words.append(f"{engine['preemptions']:,} preemptions")
    return ", ".join(words)


def _engine_of_repeats(engine: dict[str, Any]) -> str:
    """A row of the first table."""
    counted, runs = engine["invariance"]["twins"], engine["invariance"]["runs"]
    copies, requests = (sum(run[name] for run in runs) for name in ("copies", "batch"))
    again = engine["part"] == "preempted"  # A request that was preempted has rows again.
    alike = []
    for kind in ("prefill", "decode"):
        rows = counted[kind]["rows"]
        repeated = rows if again else rows * copies // requests
        alike.append(f"{counted[kind]['rows_with_a_twin']:,} of {repeated:,}")
    return (
        f"| {_setting(engine)} | {MODES[engine['mode']]} | {engine['chunk']:,} | {' | '.join(alike)} "
        f"| {'' if again else _first_layers(engine)} | {counted['all']['set']['rows']:,} "
        f"| {counted['all']['order']['rows']:,} | {_answers(engine['invariance'].get('answers'))} |"
    )


def _first_layers(engine: dict[str, Any]) -> str:
    """The first layers with more different rows than the prompts make, in prefill and in decode."""
    by_layer = engine["invariance"]["twins"].get("layers", ())
    if not by_layer:
        return ""
    prompts = engine["invariance"]["prompts"]
    requests = sum(run["batch"] for run in engine["invariance"]["runs"])
    found = []
    for kind in ("prefill", "decode"):
        layers = [
            layer["layer"]
            for layer in by_layer
            if layer[kind]["different_rows"] > layer[kind]["rows"] * prompts // requests
        ]
        found.append(f"layer {layers[0]}" if layers else "none")
    return "none" if found == ["none", "none"] else ", ".join(found)


def _answers(counted: dict[str, Any] | None) -> str:
    if counted is None:
        return ""
    where = counted["first_difference"]
    later = "" if where is None else f", from token {where} on"
    return f"{counted['different_answers']:,} in {counted['requests']:,} requests{later}"


def served(data: dict[str, Any]) -> list[str]:
    """Time per output token of `vllm serve`, every server."""
    (row,) = data["rows"]
    setup = data["setup"]
    sides = [
        f"{name} {', '.join(f'{figure:.3f}' for figure in row[side])} ms"
        for side, name in (("off", "off:"), ("on", "on:"))
    ]
    return [
        "",
        *_wrapped(
            f"`eval tpot --engine vllm` against `vllm serve` of the small model, {setup['length']:,} tokens, "
            f"{setup['concurrency']} at once, {source_of(data)}: {len(data['runs'])} of "
            f"{2 * setup['repetitions']} servers measured, verdict {row['verdict']}; {'; '.join(sides)} "
            "per output token. It shows that the tool meets a real server, and no speed."
        ),
    ]


def flashmla(data: dict[str, Any]) -> list[str]:
    """Whether the order of the ids matters to FlashMLA's sparse kernels."""
    cases = data["cases"]
    outputs = [case["outputs"] for case in cases]
    ratios = [case["shuffled_over_ascending"][kind] for case in cases for kind in ("cold", "warm")]
    shuffles = sum(output["shuffles"] for output in outputs)
    equal = sum(output["shuffles_equal_to_ascending"] for output in outputs)
    repeated = sum(output["ascending_distinct"] == 1 for output in outputs)
    distinct = sum(output["shuffles_distinct"] for output in outputs)
    return [
        "",
        *_wrapped(
            f"FlashMLA, {len(cases)} cases of two kernels ({source_of(data)}, `flashmla_order.json`): "
            "the time with shuffled ids is "
            f"{min(ratios):.3f} to {max(ratios):.3f} of that with ascending ones, "
            f"{statistics.median(ratios):.3f} in the median. Ascending ids gave the same bits whenever they "
            f"were repeated in {repeated} of {len(cases)} cases. Of {shuffles:,} shuffles of the same ids "
            f"{equal:,} gave those bits, and {distinct:,} differed from all others of their case."
        ),
    ]


def _engine(engine: dict[str, Any]) -> str:
    """What an engine ran, in words."""
    words = [GRAPHS[engine["graphs"]]]
    if (shapes := engine.get("shapes", V32)) != V32:
        words.append(f"{SHAPES[shapes]}'s shapes")
    if engine["drafts"]:
        words.append(f"MTP {engine['drafts']}")
    if engine.get("tensor_parallel", 1) > 1:
        words.append(f"{engine['tensor_parallel']} GPUs")
    lengths = sorted({case["length"] for case in engine.get("cases", ())})
    for length in lengths:
        batches = [str(case["batch"]) for case in engine["cases"] if case["length"] == length]
        words.append(f"{' and '.join(filter(None, [', '.join(batches[:-1]), batches[-1]]))} x {length:,}")
    if churn := engine.get("churn"):
        times = "" if engine["preemptions"] is None else f", {engine['preemptions']} preemptions"
        words.append(f"{churn['requests']} requests in {churn['slots']} slots{times}")
    return ", ".join(words)


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(" ".join(text.split()), 110, break_long_words=False, break_on_hyphens=False)
