"""Figures of docs/engine_evidence.md, from the files of ``vllm-trial``."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from eval.engines.vllm_model import LATENT, SHAPES, V32
from eval.engines.vllm_sampler import (
    BEYOND,
    CUTOFF,
    FEW,
    LAST,
    MARGIN,
    MIXED,
    TIE,
    TIED,
    UNEXPLAINED,
    WRONG_TOKEN,
    why_of,
)
from eval.report.pages import listed, render, shown
from eval.report.provenance import (
    Files,
    Results,
    apart_in,
    commits_of,
    device_of,
    is_of_today,
    older_kernels,
    refuse_if,
    source_of,
)

MODES = {"stock": "vLLM's", "ours": "this package"}
GRAPHS = {"eager": "eager", "full": "FULL graphs"}
TRIALS = "vllm_trial_*.json"
SAMPLERS, SAMPLER_TIMES = "vllm_sampler_*.json", "vllm_sampler_times*.json"
MASKS = "vllm_sampler_masks*.json"
SLICES, TPOTS = "vllm_slices_*.json", "vllm_tpot_*.json"
KEYS = tuple(1 << power for power in range(16, 21))
"""Lengths of rows whose scores and top-k are quoted."""
SLICES_ROWS = 8192
"""Rows that they are quoted for, which are the tokens of a step."""

SAMPLING_PARTS = (("gpu_us", 0), ("host_us", 0), ("decode_ms_median", 2))
ENDED = "no end after"
"""What the problem of an engine says that was stopped by the time; what it had done by then counts."""

PER_STEP = (("step_ms", 2), ("gpu_ms", 3))
IN_ENGINE = (("topk_us", 1), ("prefill_ms", 2), ("gpu_ms", 3), ("step_ms", 2))
"""What README tells of an engine, and its digits."""

Data = Mapping[str, Any]


def vllm_figures(folder: Path) -> str:
    """Everything that was measured inside vLLM, from the folder of one GPU's result files.

    Times are those of another GPU if it has none; rows are counted over all GPUs.
    """
    files = Results(folder)
    compared = _sound(files.quote(files.of_all_gpus(TRIALS, _has_compared)))
    timed = _sound(files.quote(files.of_one_gpu(TRIALS, _has_times)))
    sampled = _sound(files.quote(files.of_all_gpus(SAMPLERS)))
    repeats = list(_sound(files.quote(files.of_all_gpus(TRIALS, _has_invariance))).values())
    return render(
        "engine_evidence.md.j2",
        compared=compared_rows(compared),
        timed=[times(trial) for trial in timed.values()],
        invariance=repeats
        and {
            "source": source_of(*repeats),
            "repeats": [_repeats(trial, engine) for trial in repeats for engine in trial["engines"]],
        },
        slices=slices_tables(slices_figures(files)),
        sampler=sampler_tables(sampled, [files.of_one_gpu(each) for each in (SAMPLER_TIMES, MASKS)]),
        served=served(files.quote(files.of_one_gpu(TPOTS))),
        older=older_kernels(files.quoted),
    )


def sampler_tables(trials: Files, timed: Iterable[Files]) -> dict[str, Any] | None:
    """Tokens that vLLM's sampler drew too, drafts that both verified, and times of both."""
    engines = [engine for trial in trials.values() for engine in trial["engines"] if engine.get("cases")]
    if not engines:
        return None
    drawn, verified, beyond = [], [], []
    for engine in sorted(engines, key=lambda engine: (engine["drafts"], engine["cases"][0]["batch"])):
        if not (draws := engine.get("draws")):
            continue
        count = defaultdict(int, draws)
        beyond += [one["batch"] for one in draws["differences"] if why_of(one) == BEYOND]
        batches = listed([str(batch) for batch in sorted({case["batch"] for case in engine["cases"]})])
        batches += f", {FEW}" * all(case["kind"] == FEW for case in engine["cases"])
        batches += ", masks" * engine.get("masks", False)
        why = Counter(map(why_of, draws["differences"]))
        told = [why[name] for name in (TIED, TIE, CUTOFF, LAST, BEYOND, UNEXPLAINED, WRONG_TOKEN)]
        masks = ("mask_rows", "mask_rows_at_borders", "mask_rows_that_differ")
        scored = [count[name] for name in ("logprob_rows", "logprob_rows_that_differ", *masks)]
        drawn.append(
            [str(engine["drafts"] or "none"), batches]
            + [f"{number:,}" for number in (count["calls"], count["rows"], *told, *scored)]
        )
        if count["drafts_calls"]:
            names = ("calls", "greedy_requests", "greedy_requests_that_differ", "first_drafts")
            sides = [f"accepted_by_{side}{alone}" for alone in ("", "_alone") for side in ("ours", "vllm")]
            verified.append([batches, *(f"{count[f'drafts_{name}']:,}" for name in (*names, *sides))])
    times: defaultdict[str, list[list[str]]] = defaultdict(list)
    for each in filter(None, timed):
        times[source_of(*each.values())] += [
            [str(drafts or "none"), str(batch), kind]
            + [shown(by_side[side][part], digits) for part, digits in SAMPLING_PARTS for side in MODES]
            for (drafts, batch, kind), by_side in sorted(sampling_times(each.values()).items())
        ]
    return {
        "source": source_of(*trials.values()),
        "margin": shown(100 * MARGIN),
        "least_beyond": min(beyond, default=None),
        "drawn": drawn,
        "verified": verified,
        "times": times,
        "cut_off": sum(bool(engine.get("problem")) for engine in engines),
        "streams": [
            [device_of(trial), MODES[stream.pop("side")], *(f"{number:,}" for number in stream.values())]
            for trial in trials.values()
            for stream in map(dict, trial["streams"] * (not trial["setup"].get("split_k", True)))
        ],
    }


def served(campaigns: Files) -> dict[str, Any] | None:
    """Milliseconds per output token of each server, with vLLM's sampler (off) and with ours (on)."""
    rows = []
    for name, campaign in campaigns.items():
        for case in campaign["cases"]:
            refuse_if(case["failures"], name, "no failures")
            for row in case["decisions"]:
                cells = [campaign["what"].split(" dense")[0].split()[-1], str(row["case"]["MTP"] or "none")]
                cells += [case["parameters"], row["decision"]["verdict"]]
                cells += [", ".join(shown(ms, 3) for ms in row[side]) for side in ("off", "on")]
                pairs = [(row["on"][first:], row["off"][first:]) for first in range(min(2, len(row["on"])))]
                cells += [", ".join(f"{100 * mean(on) / mean(off) - 100:+.1f} %" for on, off in pairs)]
                shares = (row["acceptance_off"], row["acceptance_on"])
                rows.append(cells + [f"{100 * mean(share):.0f} %" if share else "-" for share in shares])
    return {"rows": rows, "source": source_of(*campaigns.values())} if rows else None


def sampling_times(trials: Iterable[Data]) -> dict[tuple[int, int, str], dict[str, dict[str, float]]]:
    """Times of both sides by drafts, requests and parameters: means of the turns in one engine."""
    cases: defaultdict[tuple[int, int, str], defaultdict[str, list[Data]]]
    cases = defaultdict(lambda: defaultdict(list))
    for engine in (engine for trial in trials for engine in trial["engines"] if engine["mode"] == "ours"):
        # An engine without split-K shows streams of tokens.
        for case in engine.get("cases", ()) if engine.get("split_k", True) else ():
            cases[engine["drafts"], case["batch"], case["kind"]][case["side"]].append(case)
    return {
        key: {
            side: {part: mean(case[part] for case in by_side[side]) for part, _ in SAMPLING_PARTS}
            for side in MODES
        }
        for key, by_side in cases.items()
        if set(by_side) == set(MODES)
        and len({case["rows"] for side in by_side.values() for case in side}) == 1
    }


def slices_figures(files: Results) -> dict[str, Any] | None:
    """Milliseconds of scores and top-k of prompts, and MiB that a step takes, by heads, budget and keys."""
    trials = _sound(files.quote(files.of_one_gpu(SLICES)))
    times: defaultdict[tuple[int, ...], dict[str, float]] = defaultdict(dict)
    peaks: defaultdict[tuple[int, ...], dict[str, float]] = defaultdict(dict)
    for trial in trials.values():
        for engine in trial["engines"]:
            heads, budget = LATENT[engine["shapes"]].index_heads, engine["logits_mb"]
            for case in engine["cases"]:
                peaks[heads, budget, case["length"]][engine["mode"]] = case["peak_bytes"] / 2**20
                for part in case["prefill"]["chunks"]:
                    if part["width"] in KEYS:
                        ms = part["us"] / 1000 / part["rows"] * SLICES_ROWS
                        times[heads, budget, part["width"]][engine["mode"]] = ms
    if not trials:
        return None
    return {"source": source_of(*trials.values()), "rows": SLICES_ROWS, "times": times, "peaks": peaks}


def slices_tables(figures: dict[str, Any] | None) -> dict[str, Any] | None:
    """The same, as two tables."""
    if figures is None:
        return None
    return figures | {
        name: [
            [*(f"{number:,}" for number in key), *(shown(by_mode.get(mode), digits) for mode in MODES)]
            for key, by_mode in sorted(figures[name].items())
        ]
        for name, digits in (("times", 1), ("peaks", 0))
    }


def mixed_call(files: Results, requests: int = 64) -> dict[str, Any] | None:
    """Microseconds on the GPU of one call that samples mixed requests: ``stock``, ``ours`` and ``source``."""
    for name, trial in _sound(files.of_one_gpu(SAMPLER_TIMES)).items():
        if by_side := sampling_times([trial]).get((0, requests, MIXED)):
            files.quote({name: trial})
            us = {side: times["gpu_us"] for side, times in by_side.items()}
            return us | {"requests": requests, "source": source_of(trial)}
    return None


def _sound(trials: Files) -> Files:
    """Trials in which nothing failed; rows that differ are counted in a table, what failed in none."""
    for name, trial in trials.items():
        failures = [line for engine in trial["engines"] for line in engine.get("failures", ())]
        refuse_if(failures, name, "no failures")
        problems = [str(engine.get("problem") or ENDED) for engine in trial["engines"]]
        wrong = [problem for problem in problems if ENDED not in problem]
        refuse_if(wrong, name, "engines without a problem, or ended by the time")
    return trials


def _has_compared(trial: Data) -> bool:
    return any(engine.get("compared") for engine in trial["engines"])


def _has_times(trial: Data) -> bool:
    modes = {engine["mode"] for engine in trial["engines"] if engine.get("cases")}
    return set(MODES) <= modes


def _has_invariance(trial: Data) -> bool:
    return bool(trial["engines"] and trial["engines"][0].get("invariance"))


def _engines_compared(trials: Iterable[Data]) -> list[tuple[str, Data, dict[str, int]]]:
    """The GPU, and the rows by kind, of engines that compared theirs.

    Rows that every rank of an engine compares count once. What differs on any counts.
    """
    prefill = ("prefill_rows", "prefill_rows_seen")
    found = []
    for trial in trials:
        for engine in trial["engines"]:
            if count := engine.get("compared"):
                ranks = engine.get("tensor_parallel") or 1
                once = {name: count[name] // ranks for name in ("rows", *prefill, "numpy_rows")}
                once |= {name: count[name] for name in prefill if engine.get("row_shards")}
                once["differ"] = count["rows_that_differ"] + count["prefill_rows_that_differ"]
                found.append((_gpu(trial), engine, once))
    return found


def total_compared(files: Results) -> dict[str, Any] | None:
    """What engines of one GPU compared with today's kernels, or at the last commit: counts and ``source``."""
    found = files.of_one_gpu(TRIALS, _has_compared)
    if not found:
        return None
    last = commits_of(max(found.values(), key=lambda data: str(data["machine"].get("date"))))
    newest = {
        name: data
        for name, data in found.items()
        if commits_of(data) == last or is_of_today(data, apart_in(name))
    }
    trials = _sound(files.quote(newest))
    counts = [count for _, _, count in _engines_compared(trials.values())]
    named = {"decode": "rows", "prefill": "prefill_rows", "seen": "prefill_rows_seen", "differ": "differ"}
    total = {name: sum(count[what] for count in counts) for name, what in named.items()}
    return total | {"source": source_of(*trials.values())}


def compared_rows(trials: Files) -> dict[str, Any] | None:
    """Every engine that compared its rows with a sort."""
    engines = _engines_compared(trials.values())
    if not engines:
        return None
    return {
        "version": next(iter(trials.values()))["versions"]["vllm"],
        "source": source_of(*trials.values()),
        "numpy": sum(count["numpy_rows"] for _, _, count in engines),
        "rows": [
            (
                gpu,
                _engine(engine),
                f"{count['rows']:,}",
                f"{count['prefill_rows']:,} of {count['prefill_rows_seen']:,}",
                f"{count['differ']:,}",
            )
            for gpu, engine, count in engines
        ],
    }


def _by_case(trial: Data) -> dict[tuple[int, int], dict[str, dict[str, Any]]]:
    """What was timed, by length and batch, and by mode, as far as it was."""
    found: defaultdict[tuple[int, int], dict[str, dict[str, Any]]] = defaultdict(
        lambda: {mode: {} for mode in MODES}
    )
    for engine in trial["engines"]:
        for case in engine.get("cases", ()) if engine["mode"] in MODES else ():
            profile = case.get("profile") or {}
            kernels = {
                name: times["us_median"]
                for name, times in (profile.get("kernels") or {}).items()
                if "::moe::" not in name  # the experts' top-k
            }
            found[case["length"], case["batch"]][engine["mode"]] |= {
                "kernels": kernels,
                "topk_us": next(iter(kernels.values())) if len(kernels) == 1 else None,
                "step_ms": case.get("decode_ms_median"),
                "gpu_ms": profile["gpu_us_per_step"] / 1000 if profile.get("gpu_us_per_step") else None,
                "prefill": (case.get("prefill") or {}).get("shapes", ()),
            }
    for modes in found.values():
        for mode, ms in prefill_times(*(modes[mode].get("prefill", ()) for mode in MODES)).items():
            modes[mode]["prefill_ms"] = ms
    return dict(sorted(found.items()))


def prefill_times(stock: Sequence[Data], ours: Sequence[Data]) -> dict[str, float]:
    """Milliseconds of all prefill calls of each side, from their shapes: the median of each for each call.

    There are none where the sides differ in rows, or where a call of ours has more scores than any of
    vLLM's: those are computed in the call.
    """

    def most(shapes: Sequence[Data]) -> int:
        return max((shape["rows"] * shape["width"] for shape in shapes), default=0)

    if not ours or _rows(stock) != _rows(ours) or most(ours) > most(stock):
        return {}
    sides = zip(MODES, (stock, ours), strict=True)
    return {mode: sum(each["calls"] * each["us_median"] for each in shapes) / 1000 for mode, shapes in sides}


def _rows(shapes: Sequence[Data]) -> int:
    return sum(shape["calls"] * shape["rows"] for shape in shapes)


def in_engine(files: Results) -> dict[str, Any] | None:
    """Times inside one engine, vLLM's in brackets: ``version``, ``source`` and rows of ``cases``."""
    trials = _sound(files.of_one_gpu(TRIALS, _has_times))
    for name in sorted(trials, key=lambda name: str(trials[name]["machine"].get("date")), reverse=True):
        trial, cases = trials[name], []
        for (length, batch), modes in sorted(_by_case(trial).items(), key=lambda case: case[0][::-1]):
            cells = [
                "-"
                if any(modes[mode].get(part) is None for mode in MODES)
                else f"{shown(modes['ours'][part], digits)} ({shown(modes['stock'][part], digits)})"
                for part, digits in IN_ENGINE
            ]
            cases += [[f"{batch} x {length:,}", *cells]] if set(cells) != {"-"} else []
        if cases:
            files.quote({name: trial})
            return {"version": trial["versions"]["vllm"], "source": source_of(trial), "cases": cases}
    return None


def times(trial: Data) -> dict[str, Any]:
    """Rows of the tables of times: the decode top-k by its kernels, a whole step, and all prefill calls."""
    cases = {f"{batch} x {length:,}": modes for (length, batch), modes in _by_case(trial).items()}
    kernels = {
        name: [
            ", ".join(
                f"{us:.1f} ({_kernel(kernel)})" for kernel, us in modes[mode].get("kernels", {}).items()
            )
            for mode in MODES
        ]
        for name, modes in cases.items()
    }
    steps = {
        name: [shown(modes[mode].get(part), digits) for part, digits in PER_STEP for mode in MODES]
        for name, modes in cases.items()
        if any(modes[mode].get(part) is not None for part, _ in PER_STEP[1:] for mode in MODES)
    }
    return {
        "source": source_of(trial),
        "longest": trial["setup"]["max_model_len"],
        "graphs": GRAPHS[trial["engines"][0]["graphs"]],
        "kernels": [
            [name, *(us or "-" for us in by_mode)] for name, by_mode in kernels.items() if any(by_mode)
        ],
        "steps": [[name, *figures] for name, figures in steps.items()],
        "prefill": [
            (
                name,
                f"{sum(shape['calls'] for shape in modes['ours']['prefill']):,}",
                f"{_rows(modes['ours']['prefill']):,}",
                *(shown(modes[mode]["prefill_ms"], 2) for mode in MODES),
            )
            for name, modes in cases.items()
            if "prefill_ms" in modes["ours"]
        ],
    }


def _kernel(name: str) -> str:
    """Name of a kernel without its namespace and arguments."""
    return f"`{name.partition('<')[0].partition('(')[0].rpartition('::')[2].rpartition(' ')[2]}`"


def _gpu(trial: Data) -> str:
    return device_of(trial).removeprefix("NVIDIA ").partition(" ")[0]


def _setting(engine: Data) -> str:
    words = [GRAPHS[engine["graphs"]]]
    words += [] if engine.get("split_k", True) else ["no split-K"]
    words += ["drawn with a seed"] if engine.get("sampled") else []
    words += [f"{engine['preemptions']:,} preemptions"] if engine.get("preemptions") else []
    return ", ".join(words)


def _repeats(trial: Data, engine: Data) -> list[str]:
    """How much of a repeated prompt depends on its batch, in one engine.

    A finished study hashed every row, and counted rows of equal scores with other selections.
    """
    seen, answers = engine["invariance"], "-"
    if counted := seen.get("answers"):
        where = counted["first_difference"]
        answers = f"{counted['different_answers']:,} in {counted['requests']:,} requests"
        answers += "" if where is None else f", from token {where} on"
    hashed = seen.get("twins", {}).get("all")
    rows = [f"{hashed[what]['rows']:,}" if hashed else "-" for what in ("set", "order")]
    return [_gpu(trial), _setting(engine), MODES[engine["mode"]], f"{engine['chunk']:,}", *rows, answers]


def _engine(engine: Data) -> str:
    """What an engine ran, in words."""
    words = [GRAPHS[engine["graphs"]]]
    if (shapes := engine.get("shapes", V32)) != V32:
        words.append(f"{SHAPES[shapes]}'s shapes")
    if engine["drafts"]:
        words.append(f"MTP {engine['drafts']}")
    if engine.get("slices"):
        words.append(f"slices of {engine['logits_mb']} MiB")
    if engine.get("tensor_parallel", 1) > 1:
        words.append(f"{engine['tensor_parallel']} GPUs")
        words += ["each with its share of the prompts' rows"] if engine.get("row_shards") else []
    for length in sorted({case["length"] for case in engine.get("cases", ())}):
        batches = [str(case["batch"]) for case in engine["cases"] if case["length"] == length]
        words.append(f"{listed(batches)} x {length:,}")
    if cached := sum(case.get("cached", 0) for case in engine.get("cases", ())):
        words.append(f"{cached:,} tokens cached")
    if churn := engine.get("churn"):
        times = f", {engine['preemptions']} preemptions" if engine.get("preemptions") else ""
        words.append(f"{churn['requests']} requests in {churn['slots']} slots{times}")
    return ", ".join(words)
