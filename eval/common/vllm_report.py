"""Figures of ``docs/vllm.md`` from the result files of ``vllm-trial``, ``vllm-serve`` and ``flashmla``."""

from __future__ import annotations

import json
import statistics
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from eval.common.vllm_model import SHAPES, V32

MODES = {"stock": "vLLM's", "ours": "this package"}
GRAPHS = {"eager": "eager", "full": "FULL graphs"}


def vllm_figures(results: Path) -> str:
    """Everything that was measured inside vLLM.

    Parameters
    ----------
    results : Path
        Folder of the result files; what is not there is left out.
    """
    trials = [json.loads(path.read_text()) for path in sorted(results.glob("vllm_trial_*.json"))]
    lines = compared_rows(trials)
    for trial in trials:
        lines += kernel_times(trial)
    for trial in trials:
        lines += invariance(trial)
    if (results / "vllm_serve.json").is_file():
        lines += served(json.loads((results / "vllm_serve.json").read_text()))
    if (results / "flashmla_order.json").is_file():
        lines += flashmla(json.loads((results / "flashmla_order.json").read_text()))
    return "\n".join(lines).strip("\n")


def total_compared(results: Path) -> tuple[int, int, int]:
    """Decode rows and prefill rows that were compared, and how many of both differ."""
    counts = [
        engine["compared"]
        for path in sorted(results.glob("vllm_trial_*.json"))
        for engine in json.loads(path.read_text())["engines"]
        if engine.get("compared")
    ]
    return (
        sum(count["rows"] for count in counts),
        sum(count["prefill_rows"] for count in counts),
        sum(count["rows_that_differ"] + count["prefill_rows_that_differ"] for count in counts),
    )


def compared_rows(trials: Sequence[dict[str, Any]]) -> list[str]:
    """A table of every engine that compared its rows with a sort."""
    pairs = [(trial, engine) for trial in trials for engine in trial["engines"] if engine.get("compared")]
    if not pairs:
        return []
    commits = sorted({trial["machine"]["commit"] for trial, _ in pairs})
    gpus = sorted({trial["machine"]["device"] for trial, _ in pairs})
    lines = [
        *_wrapped(
            f"Rows compared with a sort of the same scores inside vLLM {trials[0]['versions']['vllm']}, "
            f"{' and '.join(gpus)}: `eval/results/h200/vllm_trial_*.json`, "
            f"commit {', '.join(commits)}."
        ),
        "",
        "| engine | decode rows | prefill rows | different |",
        "|---|---:|---:|---:|",
    ]
    for _, engine in pairs:
        count = engine["compared"]
        wrong = count["rows_that_differ"] + count["prefill_rows_that_differ"]
        lines.append(f"| {_engine(engine)} | {count['rows']:,} | {count['prefill_rows']:,} | {wrong:,} |")
    return lines


def kernel_times(trial: dict[str, Any]) -> list[str]:
    """Microseconds of the decode top-k by its kernels, and of all prefill calls of each case."""
    cases: defaultdict[tuple[int, int], dict[str, str]] = defaultdict(dict)
    for engine in trial["engines"]:
        for case in engine.get("cases", ()):
            kernels = ((case.get("profile") or {}).get("kernels") or {}).items()
            times = [
                f"{times['us_median']:.1f} ({_kernel(name)})"
                for name, times in kernels
                if "::moe::" not in name
            ]
            if times and engine["mode"] in MODES:
                cases[case["length"], case["batch"]][engine["mode"]] = ", ".join(times)
    lines = []
    if cases:
        longest, commit = trial["setup"]["max_model_len"], trial["machine"]["commit"]
        lines += [
            "",
            *_wrapped(
                "Microseconds of a layer's decode top-k inside the engine, "
                f"{GRAPHS[trial['engines'][0]['graphs']]} of a context up to {longest:,}, medians, "
                f"commit {commit}."
            ),
            "",
            f"| requests x length | {' | '.join(MODES.values())} |",
            "|---|---:|---:|",
        ]
        for (length, batch), by_mode in sorted(cases.items()):
            shown = " | ".join(by_mode.get(mode, "-") for mode in MODES)
            lines.append(f"| {batch} x {length:,} | {shown} |")
    if trial.get("prefill"):
        lines += [
            "",
            f"Milliseconds of all prefill calls of a case, commit {trial['machine']['commit']}.",
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


def _kernel(name: str) -> str:
    """Name of a kernel without its namespace and arguments."""
    return f"`{name.partition('<')[0].partition('(')[0].rpartition('::')[2].rpartition(' ')[2]}`"


def invariance(trial: dict[str, Any]) -> list[str]:
    """How many rows have the scores of another row, with either top-k, and whether selections differ."""
    engines = [engine for engine in trial["engines"] if engine.get("invariance")]
    if not engines:
        return []
    preempted = engines[0]["part"] == "preempted"
    what = "with preemptions" if preempted else "alone and in batches"
    what += "" if engines[0].get("split_k", True) else ", cuBLAS without split-K"
    lines = [
        "",
        *_wrapped(
            f"The same prompt {what}, {GRAPHS[engines[0]['graphs']]}, commit {trial['machine']['commit']}: "
            "rows whose scores are bitwise those of another row of the same engine, and how many there would "
            "be at least if no score depended on the batch."
        ),
        "",
        "| top-k | chunk | prefill | at least | decode | at least | other set | other order |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for engine in engines:
        counted, runs = engine["invariance"]["twins"], engine["invariance"]["runs"]
        copies, requests = (sum(run[name] for run in runs) for name in ("copies", "batch"))
        cells = []
        for kind in ("prefill", "decode"):
            rows = counted[kind]["rows"]
            # A request that was preempted has rows again, so that a share of them says nothing.
            wanted = "" if preempted else f"{rows * copies // requests:,}"
            cells += [f"{counted[kind]['rows_with_a_twin']:,} of {rows:,}", wanted]
        lines.append(
            f"| {MODES[engine['mode']]} | {engine['chunk']:,} | {' | '.join(cells)} "
            f"| {counted['all']['set']['rows']:,} | {counted['all']['order']['rows']:,} |"
        )
    lines += ["", *_over_all(trial["twins"])]
    for engine in engines:
        if layers := engine["invariance"]["twins"].get("layers"):
            lines += ["", *_by_layer(engine, layers)]
    for engine in engines:
        if "answers" in engine["invariance"]:
            lines += ["", *_wrapped(_answers(engine))]
    return lines


def _over_all(twins: dict[str, Any]) -> list[str]:
    """Over all engines of a mode, and of both."""
    said = []
    for mode, counted in twins.items():
        rows = counted["all"]
        name = MODES.get(mode, "both")
        said.append(
            f"{name}: {rows['rows_with_a_twin']:,} of {rows['rows']:,} rows, of which "
            f"{rows['set']['rows']:,} have another set and {rows['order']['rows']:,} another order"
        )
    return _wrapped(f"Over all these engines together, {'; '.join(said)}.")


def _by_layer(engine: dict[str, Any], layers: Iterable[dict[str, Any]]) -> list[str]:
    """Different scores in each layer, and how many different ones the prompts alone would make."""
    prompts, runs = engine["invariance"]["prompts"], engine["invariance"]["runs"]
    requests = sum(run["batch"] for run in runs)
    again = engine["part"] == "preempted"
    head = f"Different rows by their scores, {MODES[engine['mode']]}, chunk {engine['chunk']:,}"
    lines = [f"{head}{'' if again else ', and as many as the prompts make'}:", ""]
    lines += ["| layer | prefill | prompts | decode | prompts |", "|---:|---:|---:|---:|---:|"]
    for layer in layers:
        cells = []
        for kind in ("prefill", "decode"):
            rows = layer[kind]["rows"]
            cells += [
                f"{layer[kind]['different_rows']:,}",
                "" if again else f"{rows * prompts // requests:,}",
            ]
        lines.append(f"| {layer['layer']} | {' | '.join(cells)} |")
    return lines


def _answers(engine: dict[str, Any]) -> str:
    counted = engine["invariance"]["answers"]
    where = counted["first_difference"]
    later = "" if where is None else f", which differ from token {where} on"
    times = f"; {engine['preemptions']:,} preemptions" if engine.get("preemptions") is not None else ""
    answers = counted["different_answers"]
    said = "the same answer" if answers == 1 else f"{answers:,} different answers"
    return (
        f"{MODES[engine['mode']]}, chunk {engine['chunk']:,}: {said} to the same prompt in "
        f"{counted['requests']:,} requests of {counted['tokens']:,} tokens{later}{times}."
    )


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
            f"{setup['concurrency']} at once, commit {data['machine']['commit']}: {len(data['runs'])} of "
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
            f"FlashMLA, {len(cases)} cases of two kernels, commit {data['machine']['commit']} "
            "(`eval/results/h200/flashmla_order.json`): the time with shuffled ids is "
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
