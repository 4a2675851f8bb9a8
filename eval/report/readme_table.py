"""Write the figures of README and of two pages of ``docs`` from the JSON files under ``eval/results``.

The figures are those of one GPU's folder, `GPU`, and each caption names the GPU and the commit as the file
has them. A file that this folder lacks is taken from another GPU's folder, or what it shows is left out; the
benchmark's file must be there. A figure of one run is never compared with one of another (`Index`). The
picture of the benchmark is drawn too, where it is not that of the file. With ``--check``, look whether
all is there and write nothing. A file of another format is refused, and so is one that says that something
went wrong, or that names a commit which this history does not have.

    python -m eval readme
    python -m eval readme --check
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from eval.bench.bench_report import (
    BASELINES,
    FLOOR,
    FORMAT,
    LIMITS,
    OURS,
    Index,
    geometric_mean,
    hard_rows,
    hint_ratios,
    worst_launch,
    worst_ratios,
)
from eval.bench.our_kernels import HINTED, NO_HINT, PAPER, PDL, PREFILL, PREFILL_ROUNDS
from eval.bench.peers import peer_names
from eval.bench.picture import digest_in
from eval.common.paths import ROOT
from eval.report.provenance import (
    commits_of,
    device_of,
    digest_of,
    older_kernels,
    result_files,
    source_of,
    sources_of,
    unknown_commits,
)
from eval.report.vllm_report import RefusedError, in_engine, total_compared, vllm_figures

GPU = "h100"
"""Folder of the results that the pages show."""
RESULTS = ROOT / "eval" / "results" / GPU
VLLM_PAGE = ROOT / "docs" / "engine_evidence.md"
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
PEERS = tuple(peer_names(()))
"""Implementations of other projects that the tables show."""
BENCH = "bench.json"
PICTURE = ROOT / "docs" / "bench.png"
"""Picture of the benchmark, for README and the site."""
SHAPES = ((8192, 1), (131072, 1), (1048576, 1), (8192, 64), (131072, 64))
"""Length and batch of the rows that the README shows."""
README_PEERS = ("vllm", "flashinfer_deterministic", "torch")
"""Other projects' implementations that the README shows: the one it replaces, the one with the same contract,
and PyTorch's."""
WIDTH = 120
"""Columns of a line of text."""
MOST_NAMED = 3
"""Cells that a sentence of the README names before it counts the others."""
HARD_LEGEND = """
    "Trace L10" is layer 10 of SmolLM2-135M under an indexer trained to imitate its attention (L10 is shipped,
    the other layers and the rows of "random model" are not); "nine layers" are the paper's, synthetic;
    "random model" is a vLLM run with random weights, whose hint carries no information; "new scale" is a
    random factor for each step's scores. A worst launch is not measured directly: it is the mean time in a
    graph plus the distance between the slowest of so many launches and their mean. These are timed one by
    one, between events, each as the median of three passes.
"""
OWN_COLUMNS = {HINTED: "this package", PDL: "with PDL", NO_HINT: "no hint"}
OWN_PREFILL_COLUMNS = {PREFILL: "this package", PREFILL_ROUNDS: "radix rounds", NO_HINT: "decode op"}
PREFILL_PEERS = {
    "torch": "torch",
    "trtllm_prefill": "trtllm",
    "vllm_prefill": "vllm",
    "flashinfer_ragged": "flashinfer_ragged",
    "flashinfer_deterministic": "flashinfer_deterministic",
}
"""Other projects' operators for prefill, and the implementations whose names they have."""
HARD_GROUPS = ("mask", "adversarial", "scale")
MASK_NAMES = {
    "mask:kth_is_neg_inf": "k-th value -inf",
    "mask:kth_is_pos_inf": "k-th value +inf",
    "mask:kth_is_nan": "k-th value NaN",
    "mask:99_percent": "99 % masked",
}
HARD_SHAPE = (131072, 1)
"""Length and batch of the masked and rescaled rows that the README shows, and of rows with fewer CTAs."""
TRACE_STEPS = 256
"""Steps of a trace: its first row is shorter than its last by one less."""
CELLS = sorted([*LIMITS, (262144, 1), (131072, 8), (1048576, 64)], key=lambda cell: cell[::-1])
"""Shapes for which the time of reading the rows is shown."""
NUMBERS = {1: "one", 2: "two", 3: "three", 5: "five", 7: "seven"}
"""Small numbers in words."""
FAULTY = "stress_ee90c38.json"
"""A stress run of an older commit, whose faults it found."""
EACH_LAUNCHES = 1000
"""Launches that were timed one by one, in files that do not say how many."""
NOISE = 0.01
"""Differences up to this share are not spoken of."""
PHASES = {
    "small_row": ("8,192 x 1", "8,192 x 64"),
    "cluster": ("70,690 x 1", "131,072 x 64", "1,048,576 x 1"),
}
"""Rows of the phase timing that `docs/performance.md` shows, by kernel."""
KERNELS_BEFORE = {"small_row": "single"}
"""Names of kernels in files of version 1 of the phase timing, which has them under ``path``."""


class FormatError(ValueError):
    """A result file is of another format than the one that is read here."""


def find(name: str) -> dict[str, Any] | None:
    """One result file, of this GPU's folder or else of another's; None where there is none."""
    files = result_files(RESULTS, name)
    return next(iter(files.values()), None)


def load_bench(name: str = BENCH) -> dict[str, Any]:
    """The kernel benchmark's file.

    Raises
    ------
    FormatError
        Another version of the benchmark wrote it.
    RefusedError
        A result of this package was not exact, one set of scores had several selections, or runs are of
        several kinds of GPU.
    """
    data = json.loads((RESULTS / name).read_text())
    if data.get("format") != FORMAT:
        raise FormatError(
            f"{name}: wanted format {FORMAT!r}, got {data.get('format')!r}; "
            "run python -m eval bench on the GPU and put its file there"
        )
    wrong = [
        f"{its['impl']} at {its['cell']}"
        for its in data["results"]
        if its["impl"] in OURS and its["exact"] is False
    ]
    refuse_if(wrong, name, "exact results of this package")
    several = {impl: run["sets_in_20_runs"].get(impl, 1) for run in data["runs"] for impl in OURS}
    refuse_if([impl for impl, sets in several.items() if sets != 1], name, "one selection in all runs")
    devices = {run["machine"]["device"] for run in data["runs"]}
    refuse_if(len(devices) > 1 and sorted(devices), name, "runs on one kind of GPU")
    return dict(data)


def refuse_if(wrong: Any, name: str, wanted: str) -> None:
    """Refuse a file whose figures would be told beside words that they contradict.

    Raises
    ------
    RefusedError
        If something is wrong.
    """
    if wrong:
        raise RefusedError(f"{name}: wanted {wanted}, got {wrong}")


def fuzz_of(commit: str) -> dict[str, Any]:
    """The fuzzer's files of one commit; if there is none, those of the commit that was fuzzed last."""
    runs = result_files(RESULTS, "fuzz_*.json")
    if commit not in {run["machine"]["commit"] for run in runs.values()} and runs:
        commit = max(runs.values(), key=lambda run: run["machine"]["date"])["machine"]["commit"]
    return {name: run for name, run in runs.items() if run["machine"]["commit"] == commit}


def trace_name(cell: Mapping[str, Any]) -> str:
    """Short name of the trace that a cell's rows are of; empty where they are of none."""
    name: str = cell["rows"].partition(":")[2]
    return short_trace(name)


def short_trace(name: str) -> str:
    """Name of a trace of SmolLM2 without what all have in common."""
    return name.removeprefix("smollm2_dsaidx_").removesuffix("_32k")


def real_and_hard(index: Index) -> dict[str, list[Mapping[str, Any]]]:
    """Cells of real traces, layers and rows that are hard, by the name that a table gives them."""
    shown: dict[str, list[Mapping[str, Any]]] = {}
    for cell in index.group("trace"):
        shown[f"trace {trace_name(cell)}"] = [cell]
    layers = index.group("layer")
    shown[f"{'nine' if len(layers) == 9 else len(layers)} layers, mean"] = layers
    for cell in index.group("engine"):
        shown["random model"] = [cell]
    for cell in index.group("scale"):
        if (cell["n"], cell["batch"]) == HARD_SHAPE:
            shown["new scale each step"] = [cell]
    for rows, name in MASK_NAMES.items():
        kind = (*HARD_SHAPE, rows)
        shown[name] = [c for c in index.group("mask") if (c["n"], c["batch"], c["rows"]) == kind]
    return {name: cells for name, cells in shown.items() if cells}


def mean_figure(
    index: Index, cells: Sequence[Mapping[str, Any]], impl: str, name: str = "cold_us"
) -> float | None:
    """Mean over cells; None where one of them has no figure."""
    figures = [index.figure(cell["key"], impl, name) for cell in cells]
    known = [figure for figure in figures if figure is not None]
    return sum(known) / len(known) if len(known) == len(figures) else None


def slowest(index: Index, n: int, batch: int, groups: Sequence[str]) -> float | None:
    """Slowest cell of some groups at a shape; traces, whose rows grow, count at the length they grow to."""

    def fits(cell: Mapping[str, Any]) -> bool:
        shorter = TRACE_STEPS if cell["group"] == "trace" else 1
        return n - shorter < cell["n"] <= n and cell["batch"] == batch

    times = [index.figure(cell["key"], HINTED) for cell in index.group(*groups) if fits(cell)]
    return max((time for time in times if time is not None), default=None)


def faster_cells(index: Index) -> dict[str, dict[str, float]]:
    """Of each implementation that is faster than this package: at which cells, and how many times."""
    names = {cell["key"]: cell_name(cell) for cell in index.cells()}
    found = {}
    for other in (PAPER, *BASELINES):
        ratios = index.ratios(other, HINTED).items()
        if faster := {names[key]: 1 / ratio for key, ratio in ratios if ratio < 1 - NOISE}:
            found[other] = faster
    return found


def cell_name(cell: Mapping[str, Any]) -> str:
    """Length, batch and, where it is wider than the rows, the buffer's width."""
    width = cell.get("width")
    return f"{cell['n']:,} x {cell['batch']}" + (f" in {width:,} columns" if width else "")


def with_figures(index: Index, peers: Mapping[str, str]) -> dict[str, str]:
    """Implementations of other projects that have a figure at some shape of the main sweep."""
    keys = [cell["key"] for cell in index.group("main")]
    return {
        impl: name for impl, name in peers.items() if any(index.figure(key, impl) is not None for key in keys)
    }


def _shown(figure: float | None) -> str:
    return "-" if figure is None else f"{figure:.1f}"


def times_table(index: Index, peers: Mapping[str, str]) -> list[str]:
    """Microseconds per launch of every implementation at the shapes that limits exist for."""
    columns = {**OWN_COLUMNS, **with_figures(index, peers)}
    names = [*list(columns.values())[:1], "real traces", "worst case", *list(columns.values())[1:]]
    lines = [f"| N x batch | {' | '.join(names)} |", "|---|" + "---:|" * len(names)]
    for n, batch in sorted(LIMITS, key=lambda cell: cell[::-1]):
        first, *rest = (index.figure(index.main(n, batch), impl) for impl in columns)
        hard = slowest(index, n, batch, HARD_GROUPS)
        figures = [first, slowest(index, n, batch, ("trace",)), hard, *rest]
        lines.append(f"| {n:,} x {batch} | {' | '.join(map(_shown, figures))} |")
    return lines


def prefill_table(bench: Mapping[str, Any], index: Index, peers: Mapping[str, str]) -> list[str]:
    """Microseconds of chunks of a prefill, with what the table shows before it; nothing without results."""
    cells = index.group("prefill")
    if not cells:
        return []
    keys = {cell["key"] for cell in cells}
    runs = {result["run"] for result in index.results if result["cell"] in keys}
    commits = sorted({bench["runs"][run]["machine"]["commit"] for run in runs})
    rates = {rate for run in runs if (rate := bench["runs"][run].get("copy_bytes_per_second"))}
    shown_rates = " and ".join(f"{rate / 1e12:.2f}" for rate in sorted(rates))
    rate = f" at {shown_rates} TB/s, which copying 1 GiB reached in the same run" if rates else ""
    lead = f"""
        **Prefill** ({device_of(bench)}, commit {", ".join(commits)}): microseconds of `indexer_topk_prefill`
        on a chunk, which is many query tokens of one request at once, a row for each. Gaussian rows have
        causal lengths: each sees one column more than the row before; rows of a trace are repeated. "Radix
        rounds" guesses nothing, "decode op" is
        `indexer_topk_decode` with `path="no_hint"`, the columns of other projects are their operators for
        prefill{f', and "memory" is the time to move the bytes{rate}' if rates else ""}. "-" marks a result
        that is not exact, or of another run.
    """
    ran = {result["impl"] for result in index.results if result["cell"] in keys}
    named = OWN_PREFILL_COLUMNS | {impl: peers[other] for impl, other in PREFILL_PEERS.items()}
    columns = {impl: name for impl, name in named.items() if impl in ran}
    if absent := [name for impl, name in named.items() if impl not in ran]:
        lead = f"{lead.rstrip()} Not measured here: {'; '.join(absent)}."
    names = [*columns.values(), *(["memory"] if rates else [])]
    lines = [_paragraph(lead), ""]
    lines += [f"| rows x columns | {' | '.join(names)} |", "|---|" + "---:|" * len(names)]
    for cell in cells:
        figures = [index.figure(cell["key"], impl) for impl in columns]
        name = f"{cell['batch']:,} x {cell['n']:,}"
        if trace := trace_name(cell):
            name += f", trace {trace}"
        figures += [cell.get("memory_us")] if rates else []
        shown = " | ".join(map(_shown_whole, figures))
        lines.append(f"| {name} | {shown} |")
    return [*lines, ""]


def wide_table(index: Index, peer: str = "vLLM", caption: str = "") -> list[str]:
    """Microseconds of rows in buffers wider than they are, and what they mean; nothing without results."""
    keys: dict[tuple[int, int], dict[int, str]] = {}
    for cell in index.group("main", "wide_buffers"):
        keys.setdefault((cell["n"], cell["batch"]), {})[cell.get("width") or 0] = cell["key"]
    widths = (0, 131072, 1048576)
    measured = {shape: found for shape, found in sorted(keys.items()) if set(widths) <= set(found)}
    if not measured:
        return []
    lead = f"""
        **Rows shorter than their buffer**{caption}: the buffer of a captured graph is as wide as the longest
        row that the engine admits. Microseconds of this package (in brackets {peer}), by the columns of the
        buffer:
    """
    lines = [_paragraph(lead), "", "| N x batch | as the row | 131,072 | 1,048,576 |", "|---|---:|---:|---:|"]
    for (n, batch), found in measured.items():
        times = [
            f"{_shown(index.figure(found[width], HINTED))} ({_shown(index.figure(found[width], 'vllm'))})"
            for width in widths
        ]
        lines.append(f"| {n:,} x {batch} | {' | '.join(times)} |")
    return [*lines, ""]


def blocks(index: Index, caption: str = "") -> list[str]:
    """What `docs/performance.md` says of the two-level indexer; nothing without results."""
    cells = {(cell["n"], cell["batch"]): cell["key"] for cell in index.group("v41")}
    shown = []
    for n, batch in ((16384, 1), (131072, 1), (131072, 64)):
        key = cells.get((n, batch), "")
        ours, chain = (
            [_shown(index.figure(key, f"{prefix}{name}")) for name in ("blocks", "in_blocks")]
            for prefix in ("", "torch_")
        )
        shown.append(f"{n:,} x {batch} {ours[0]} and {ours[1]} ({chain[0]} and {chain[1]})")
    if not cells:
        return []
    return [
        f"""**DeepSeek-V4.1's blocks**{caption}: us for the top 512 and the best 2,048 blocks of 8, and for
        the top 512 in given blocks (in brackets the chain of PyTorch's operators): {", ".join(shown)}."""
    ]


def _shown_whole(figure: float | None) -> str:
    """As `_shown`, without a fraction from 100 on."""
    return _shown(figure) if figure is None or figure < 100 else f"{figure:,.0f}"


def each_launches(index: Index) -> str:
    """How many launches were timed one by one, as the results say."""
    each = [
        result["each_us"].get("launches", EACH_LAUNCHES) for result in index.results if "each_us" in result
    ]
    return " or ".join(f"{launches:,}" for launches in sorted({*each} or {EACH_LAUNCHES}))


def hard_table(index: Index) -> list[str]:
    """Microseconds on real traces and hard rows, and the worst single launch."""
    shown = real_and_hard(index)
    lines = [f"| rows | {' | '.join(shown)} |", "|---|" + "---:|" * len(shown)]
    shapes = [" and ".join(dict.fromkeys(cell_name(cell) for cell in cells)) for cells in shown.values()]
    lines.append(f"| N x batch | {' | '.join(shapes)} |")

    def line(name: str, figures: Sequence[float | None]) -> None:
        lines.append(f"| {name} | {' | '.join(map(_shown, figures))} |")

    for impl in (HINTED, NO_HINT):
        line(OWN_COLUMNS[impl], [mean_figure(index, cells, impl) for cells in shown.values()])
    worst = [mean_figure(index, cells, HINTED, "worst_us") for cells in shown.values()]
    line(f"worst launch of {each_launches(index)}", worst)
    best = []
    for cells in shown.values():
        times = [mean_figure(index, cells, peer) for peer in PEERS]
        best.append(min((time for time in times if time is not None), default=None))
    line("fastest other", best)
    return lines


def _paragraph(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), WIDTH, break_long_words=False, break_on_hyphens=False)


def _point(text: str) -> str:
    """An item of a list."""
    words = " ".join(text.split())
    return textwrap.fill(
        words,
        WIDTH,
        initial_indent="- ",
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def earlier_figures(bench: Mapping[str, Any]) -> str:
    """How many figures are of other commits than the first run's, as part of a sentence; empty for none."""
    commits = [run["machine"]["commit"] for run in bench["runs"]]
    measured = [commits[result["run"]] for result in bench["results"]]
    earlier = [commit for commit in measured if commit != commits[0]]
    if not earlier:
        return ""
    names = ", ".join(sorted(set(earlier)))
    return f"; {len(earlier):,} of the file's {len(measured):,} figures are of commit {names}"


def results() -> str:
    """The README's section: one table, what was measured in an engine, and a few sentences."""
    bench = load_bench()
    index = Index(bench)
    peers = peer_names(run["baselines"] for run in bench["runs"])
    main = index.group("main")
    k, dtype = (" or ".join(_different(main, what)) for what in ("k", "dtype"))
    lead = f"""
        Microseconds of one launch on one {device_of(bench)} ({_commits(bench)}), median; {dtype}, k = {k}; a
        CUDA graph over fresh decode steps, whose rows no cache holds. Every launch's result is compared, and
        exact. Method and all other figures: [docs/performance.md](docs/performance.md).
    """
    quoted: dict[str, set[str]] = {BENCH: commits_of(bench)}
    text = [_paragraph(lead), "", *short_table(index, peers), ""]
    if engines := engine_lines(quoted):
        text += [_paragraph(engines), ""]
    points = [
        *others(index, peers),
        worst_launches(index),
        eager_calls(quoted),
        hook_price(quoted),
        stressed(quoted),
        deterministic(bench, peers),
    ]
    if older := older_kernels(quoted, name_files=False):
        points.append(f"**Commits.** {older}")
    return "\n".join([*text, *(_point(point) for point in points if point)])


def _commits(bench: Mapping[str, Any]) -> str:
    return f"commit {bench['runs'][0]['machine']['commit']}{earlier_figures(bench)}"


def short_table(index: Index, peers: Mapping[str, str]) -> list[str]:
    """Times of this package and of the nearest others at a few shapes; who was not measured has no column."""
    shown = with_figures(index, {impl: peers[impl] for impl in README_PEERS})
    lines = [f"| scores x rows | this package | {' | '.join(shown.values())} |"]
    lines.append("|---|" + "---:|" * (1 + len(shown)))
    for n, batch in SHAPES:
        key = index.main(n, batch)
        figures = [index.figure(key, impl) for impl in (HINTED, *shown)]
        lines.append(f"| {n:,} x {batch} | {' | '.join(map(_shown, figures))} |")
    return lines


def engine_lines(quoted: dict[str, set[str]]) -> str:
    """What was timed and compared inside vLLM; empty where nothing was."""
    said = ""
    if timed := in_engine(RESULTS):
        name, trial, cases = timed
        quoted[name] = commits_of(trial)
        told = []
        for case in cases:
            figures = [
                f"{what} takes {case['ours'][part]:.{digits}f} {unit} "
                f"instead of {case['stock'][part]:.{digits}f}"
                for part, what, digits, unit in (
                    ("topk_us", "a decode top-k", 1, "us"),
                    ("step_ms", "a whole step", 2, "ms"),
                    ("prefill_ms", "the top-k of all prefill", 2, "ms"),
                )
                if part in case["ours"] and part in case["stock"]
            ]
            told.append(f"at {case['batch']} x {case['length']:,} tokens {', '.join(figures)}")
        said = f"""**Inside vLLM** {trial["versions"]["vllm"]} ({source_of(trial)}), small random model:
            {"; ".join(told)}."""
    compared = total_compared(RESULTS)
    if compared.decode or compared.prefill:
        quoted.update(compared.commits)
        said += f""" Compared with a sort inside vLLM ({compared.source}): {compared.decode:,} decode rows,
            and {compared.prefill:,} of {compared.seen:,} prefill rows; {compared.differ:,} differ."""
    return said


def others(index: Index, peers: Mapping[str, str]) -> list[str]:
    """Ratios to every other project, over the cells that both serve exactly, and where one is faster."""
    ratios = {row["other"]: row for row in worst_ratios(index)}
    told = ", ".join(
        f"{_name(peer, peers)} {ratios[peer]['geometric_mean']:.2f} ({ratios[peer]['ratio']:.2f}, "
        f"{ratios[peer]['cells']} cells{_wrong(ratios[peer]['wrong'])})"
        for peer in peers
        if peer in ratios
    )
    faster = [f"{_name(other, peers)} {_where(where)}" for other, where in faster_cells(index).items()]
    return [
        f"""**Other projects.** The time of each divided by this package's: geometric mean (closest cell, and
        the number of cells that it serves exactly in the same run): {told}.""",
        f"""**Faster than this package** by more than {100 * NOISE:.0f} %:
        {"; ".join(faster) or "none of them in any cell"}.""",
    ]


def _wrong(cells: int) -> str:
    return f"; wrong in {cells}" if cells else ""


def _where(cells: Mapping[str, float]) -> str:
    """Cells and how many times as fast, the largest first."""
    named = sorted(cells.items(), key=lambda cell: -cell[1])
    told = ", ".join(f"{cell} ({ratio:.2f} times)" for cell, ratio in named[:MOST_NAMED])
    rest = len(named) - MOST_NAMED
    return f"at {told}{f' and {rest} more' if rest > 0 else ''}"


def worst_launches(index: Index) -> str:
    """The slowest single launch of all groups whose launches were timed one by one."""
    ratios = {
        cell["key"]: ratio
        for cell in index.cells()
        if (ratio := worst_launch(index, cell["key"])) is not None
    }
    if not ratios:
        return ""
    worst = max(ratios, key=lambda key: ratios[key])
    (cell,) = index.cells(lambda cell: cell["key"] == worst)
    rows = f"trace {trace_name(cell)}" if cell["group"] == "trace" else f"{cell['group']} rows"
    return f"""**Worst launch.** On real traces and on rows that change at random the slowest of
        {each_launches(index)} launches takes up to {ratios[worst]:.2f} times the mean launch without a hint:
        {index.figure(worst, HINTED, "worst_us"):.1f} us ({rows}, {cell_name(cell)}), where the mean launch
        takes {index.figure(worst, HINTED):.1f}."""


def eager_calls(quoted: dict[str, set[str]]) -> str:
    """Whether a call outside of a CUDA graph costs the host more than another project's."""
    host = find("host_time.json")
    if host is None:
        return ""
    quoted["host_time.json"] = commits_of(host)
    us = {result["call"]: result["us"] for result in host["results"]}
    named = {"vllm": "vLLM", "trtllm": "TensorRT-LLM", "torch": "torch.topk"}
    theirs = {name: us[call] for call, name in named.items() if call in us}
    told = ", ".join(f"{name} {time:.1f}" for name, time in theirs.items())
    slower = [name for name, time in theirs.items() if us["hinted"] > (1 + NOISE) * time]
    end = f"slower than {_listed(slower)}" if slower else "no slower"
    return f"""**Eager calls.** Outside of a CUDA graph a call costs the host {us["hinted"]:.1f} us
        ({told}): {end} ({source_of(host)})."""


def _listed(names: Sequence[str]) -> str:
    """Names with commas and an ``and``."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def hook_price(quoted: dict[str, set[str]]) -> str:
    """What TensorRT-LLM's hook saves and costs in a step."""
    decode = find("simulated_decode.json")
    if decode is None:
        return ""
    step = decode["step_us"]
    quoted["simulated_decode.json"] = commits_of(decode)
    saved = step["off"] - step["on"]
    layers = decode["setup"]["layers"]
    what = f"{layers} layer{'s' if layers > 1 else ''}"
    return f"""**TensorRT-LLM's hook** saves {saved:.0f} us of GPU time in a simulated step of {what}.
        {_hook_on_the_host(decode)} ({source_of(decode)})."""


def _hook_on_the_host(decode: Mapping[str, Any]) -> str:
    """What the hook takes of the host before a step."""
    hook = decode.get("hook_us")
    if hook is None:  # the file is of a commit that timed all of ``prepare``, in a run each
        same, moved = decode["prepare_us"], decode["prepare_moved_us"]
        return f"""In one run each the host prepares it in {same["on"]:.0f} us instead of {same["off"]:.0f},
            changed batches in {moved["on"]:.0f} instead of {moved["off"]:.0f}"""
    kinds = {"same": "has not changed", "moved": "has moved rows", "arrivals": "has new requests"}
    told = [
        f"{hook[kind]['median']:.0f} us ({hook[kind]['p90']:.0f}) where the batch {what}"
        for kind, what in kinds.items()
    ]
    return f"On the host the hook takes, in the median (90th percentile), {_listed(told)}"


def stress_files() -> dict[str, dict[str, Any]]:
    """Runs of today's kernels under load, none of which may have found a fault."""
    found = result_files(RESULTS, "stress*.json", elsewhere=False)
    runs = {name: run for name, run in found.items() if name != FAULTY}
    for name, run in runs.items():
        refuse_if(run.get("failure"), name, "no failure")
        refuse_if(not run["totals"]["clean"] and run["totals"], name, "a clean run")
        if run["mode"] == "rewrite":
            inexact = sum(not result["exact_after"] for result in run["results"])
            refuse_if(inexact, name, "exact launches after the last rewriting")
        elif run["chaos_build"]:
            undelayed = run["totals"]["launches"] - run["totals"]["launches_with_delays"]
            refuse_if(undelayed, name, "delays in every launch")
    return runs


def _of_kind(runs: Mapping[str, dict[str, Any]], mode: str, chaos: bool = False) -> list[dict[str, Any]]:
    return [run for run in runs.values() if (run["mode"], run["chaos_build"]) == (mode, chaos)]


def _launches(runs: Iterable[Mapping[str, Any]]) -> int:
    return sum(run["totals"]["launches"] for run in runs)


def stressed(quoted: dict[str, set[str]]) -> str:
    """How many launches were compared beside other work, and which rate of faults they leave open."""
    runs = stress_files()
    beside = _of_kind(runs, "launches")
    if not beside:
        return ""
    quoted.update({name: commits_of(run) for name, run in runs.items()})
    launches = _launches(beside)
    neighbours = len({result["neighbour"] for run in beside for result in run["results"]} - {"none"})
    return f"""**Under load.** {launches:,} launches, alone and beside {neighbours} kinds of other work
        ({sources_of(beside)}): none wrong. That bounds the rate of wrong launches, with 95 % confidence, at
        one in {launches // 3:,}."""


def stress_details(quoted: dict[str, set[str]]) -> str:
    """What was run beside other work, under delays, and on arguments that are rewritten."""
    runs = stress_files()
    beside, delayed, rewritten = (
        _of_kind(runs, mode, chaos)
        for mode, chaos in (("launches", False), ("launches", True), ("rewrite", False))
    )
    quoted.update({name: commits_of(run) for name, run in runs.items()})
    told = []
    if beside:
        configurations = {result["configuration"]["name"] for run in beside for result in run["results"]}
        told.append(
            f"""{_launches(beside):,} launches of {len(configurations)} configurations beside other work:
            {_wrong_launches(beside)}; guard words lie behind every output, and nothing may write there"""
        )
    if delayed:
        told.append(
            f"""{_launches(delayed):,} launches of a build that delays threads: {_wrong_launches(delayed)}"""
        )
    if rewritten:
        results = [result for run in rewritten for result in run["results"]]
        ways = {result["rewritten"] for result in results}
        arguments = {way.partition(":")[0] for way in ways}
        disturbed = sum(result["disturbed_launches"] for result in results)
        told.append(
            f"""{_launches(rewritten):,} launches while another stream overwrote one of
            {_number(len(arguments))} arguments in {_number(len(ways))} ways, of which {disturbed:,} were
            seen to be disturbed: none hung, {_guard_words(rewritten):,} guard words overwritten, exact
            afterwards"""
        )
    if not told:
        return ""
    text = f"**Under load** ({sources_of(runs.values())}): {'; '.join(told)}."
    older = find(FAULTY)
    if older is not None:
        refuse_if(older["totals"]["clean"], FAULTY, "the faults of the older commit")
        text += f""" The same harness finds the faults of an older commit ({source_of(older)}):
            {older["totals"]["launches"]:,} launches, {_wrong_launches([older])}."""
    return text


def _guard_words(runs: Iterable[Mapping[str, Any]]) -> int:
    return sum(run["totals"]["guard_words"] for run in runs)


def _wrong_launches(runs: Sequence[Mapping[str, Any]]) -> str:
    wrong = sum(run["totals"]["wrong_launches"] for run in runs)
    return f"{wrong:,} wrong, {_guard_words(runs):,} guard words overwritten"


def _number(count: int) -> str:
    return NUMBERS.get(count, str(count))


def deterministic(bench: Mapping[str, Any], peers: Mapping[str, str]) -> str:
    """How many selections each implementation makes of the same row."""
    sets: dict[str, int] = {}
    for run in bench["runs"]:
        for impl, seen in run["sets_in_20_runs"].items():
            if isinstance(seen, int):
                sets[impl] = max(seen, sets.get(impl, 0))
    seen = ", ".join(f"{_name(peer, peers)} {sets[peer]}" for peer in peers if peer in sets)
    return f"""**Deterministic.** Different selections in 20 launches on a row with many ties: this package
        {sets[HINTED]}, {seen}."""


def _different(cells: Iterable[Mapping[str, Any]], what: str) -> list[str]:
    """Values that cells have, in words; shares are per cent."""
    values = sorted({cell[what] for cell in cells})
    return [f"{100 * value:g} %" if isinstance(value, float) else str(value) for value in values]


def hint_lines(index: Index) -> list[str]:
    """What the hint, masks and PDL do to the time."""
    pdl = ", ".join(f"{shape} ({ratio:.2f} times)" for shape, ratio in slower_with_pdl(index).items())
    masked = max(hard_rows(index, "mask").values(), default=None)
    costs = [row["ratio"] for row in hint_ratios(index)]
    mean, most = (geometric_mean(costs), max(costs)) if costs else (None, None)
    changing = [worst_launch(index, cell["key"]) for cell in index.group("engine", "scale")]
    worst = max((ratio for ratio in changing if ratio is not None), default=None)
    return [
        f"""**The hint.** The time with a hint divided by the time without is {_ratio(mean)} in the mean, and
        {_ratio(most)} at worst. Where rows change at random, the slowest launch of {each_launches(index)}
        takes at most {_ratio(worst)} times the mean launch without a hint.""",
        f"""**Masked rows** take at most {_ratio(masked)} times as long as usual ones. **PDL** saves time at
        most shapes and is slower at {pdl or "none"}.""",
    ]


def slower_with_pdl(index: Index) -> dict[str, float]:
    """Shapes of the main sweep at which PDL costs time, and how many times the time without."""
    ratios = index.ratios(PDL, HINTED, lambda cell: cell["group"] == "main")
    cells = {cell["key"]: f"{cell['n']:,} x {cell['batch']}" for cell in index.cells()}
    return {cells[key]: ratio for key, ratio in ratios.items() if ratio > 1 + NOISE}


def fewer_ctas(sweep: Mapping[str, Any]) -> str:
    """What `docs/performance.md` says of `max_ctas` on an idle GPU."""
    n, batch = HARD_SHAPE
    shape = (n, batch, "fp32")
    (us,) = [each["us"] for each in sweep["shapes"] if (each["n"], each["batch"], each["dtype"]) == shape]
    return f"""**Fewer CTAs per row** ({source_of(sweep)}): at {n:,} x {batch} `max_ctas` of 8 and 4 take
        {us["8"]:.1f} and {us["4"]:.1f} us on an idle GPU, where 16 take {us["16"]:.1f}."""


def fuzzed(commit: str, quoted: dict[str, set[str]]) -> str:
    """What the fuzzer called and found; files of version 1 are of decode alone."""
    files = fuzz_of(commit)
    if not files:
        return ""
    for name, run in files.items():
        refuse_if(run.get("failure"), name, "no mismatch")
        quoted[name] = commits_of(run)
    runs = list(files.values())
    cases, rows, seconds = (sum(run[what] for run in runs) for what in ("cases", "rows", "seconds"))
    prefill, of_blocks = (
        sum(run.get(op, {}).get("cases", 0) for run in runs) for op in ("prefill", "blocks")
    )
    of_prefill = [run["prefill"] for run in runs if "prefill" in run]
    ops = [f"{cases - prefill - of_blocks:,} of decode ({_paths(runs)})"]
    ops.append(f"{prefill:,} of prefill ({_paths(of_prefill)})" if prefill else "none of prefill")
    ops.append(f"{of_blocks:,} of blocks" if of_blocks else "none of blocks")
    neighbours = len({name for run in runs for name in run.get("beside", ())})
    beside = f", beside {neighbours} kinds of neighbour" if neighbours else ""
    return f"""**Fuzzing** ({source_of(runs[0])}): {cases:,} random cases, {", ".join(ops)};
        {rows:,} rows{beside}, no mismatch in {seconds:,.0f} s."""


def _paths(runs: Iterable[Mapping[str, Any]]) -> str:
    """Paths that were asked for."""
    names = sorted({path for run in runs for path in run.get("paths_asked_for", ())})
    return ", ".join(f"`{name}`" for name in names)


def simulated(quoted: dict[str, set[str]]) -> str:
    """What the simulated decode compared, and what a step takes on the GPU and on the host."""
    decode = find("simulated_decode.json")
    if decode is None:
        return ""
    sets, step = decode["sets"], decode["step_us"]
    refuse_if(sets["different"], "simulated_decode.json", "no different set")
    quoted["simulated_decode.json"] = commits_of(decode)
    traces = [short_trace(name) for name in decode["setup"]["traces"]]
    what = f"{_number(len(traces))} trace{'s' if len(traces) > 1 else ''} of SmolLM2"
    return f"""**Simulated decode** over {what} ({", ".join(traces)}) in one captured graph
        ({source_of(decode)}): {sets["identical"]:,} of {sets["rows"]:,} rows select the same set
        with the hook on and off; a step, most of which is scoring, takes {step["on"]:.0f} us instead of
        {step["off"]:.0f} with TensorRT-LLM's compiled op. {_hook_on_the_host(decode)}."""


def _ratio(figure: float | None) -> str:
    return "-" if figure is None else f"{figure:.2f}"


def _name(impl: str, peers: Mapping[str, str]) -> str:
    return "the paper's kernel" if impl in OURS else peers.get(impl, impl)


def performance() -> str:
    """Figures of the page that says what takes how long."""
    bench = load_bench()
    index = Index(bench)
    peers = peer_names(run["baselines"] for run in bench["runs"])
    device, commits = device_of(bench), _commits(bench)
    caption = f" ({device}, {commits})"
    quoted: dict[str, set[str]] = {BENCH: commits_of(bench)}
    run = bench["runs"][0]
    *given, last = (f"`{name}`" for name in run[HINTED])
    bare = " and ".join(f"`{name}`" for name in run[NO_HINT])
    main = index.group("main")
    k, dtype = (" or ".join(_different(main, what)) for what in ("k", "dtype"))
    kept = " or ".join(f"{keep**0.5:.2f}" for keep in sorted({cell["keep"] for cell in main}))
    lead = f"""
        **Decode** (`eval/results/{RESULTS.name}/{BENCH}`, {device}, {commits}): microseconds per launch,
        median; {dtype}, k = {k}. N is the number of scores of a row, and batch that of rows. "This package"
        is called as the integrations call it, with {", ".join(given)} and {last}; "with PDL" (programmatic
        dependent launch) adds `pdl=True`, and "no hint" is {bare} alone. Rows are Gaussian, with a
        correlation of {kept} from step to step. "Real traces" is the slowest trace, and "worst case" the
        slowest of masked (-inf, +inf, NaN), tied and rescaled rows. "-" marks what was not measured in the
        same run, or was not exact:
    """
    lines = [_paragraph(lead), "", *times_table(index, peers), ""]
    lines += [f"**Real and hard rows**{caption}: microseconds.", "", *hard_table(index), ""]
    lines += [_paragraph(HARD_LEGEND), ""]
    lines += prefill_table(bench, index, peers) + wide_table(index, peers["vllm"], caption)
    lines += [f"**Reading the rows alone**{caption}: microseconds.", ""]
    lines += ["| N x batch | this package | reading alone |", "|---|---:|---:|"]
    for n, batch in CELLS:
        key = index.main(n, batch)
        reached = index.figure(key, HINTED)
        row = ["-" if reached is None else f"{reached:.2f}", _shown(index.figure(key, FLOOR))]
        lines.append(f"| {n:,} x {batch} | {' | '.join(row)} |")
    lines += ["", *deepseek_v4(index, peers, caption)]
    if (host := find("host_time.json")) is not None:
        quoted["host_time.json"] = commits_of(host)
        lines += [*host_time(host), ""]
    lines += [_point(point) for point in others(index, peers) + hint_lines(index)]
    points = [deterministic(bench, peers), fuzzed(run["machine"]["commit"], quoted), simulated(quoted)]
    points += [stress_details(quoted), *blocks(index, caption)]
    if (sweep := find("tune.json")) is not None:
        quoted["tune.json"] = commits_of(sweep)
        points.append(fewer_ctas(sweep))
    lines += [_point(point) for point in points if point]
    if (timing := find("phase_timing.json")) is not None:
        quoted["phase_timing.json"] = commits_of(timing)
        lines += ["", f"**Phases** ({source_of(timing)}): microseconds."]
        for kernel, shown in PHASES.items():
            lines += ["", *phase_table(timing, kernel, shown)]
    if older := older_kernels(quoted):
        lines += ["", _paragraph(older)]
    return "\n".join(lines)


def deepseek_v4(index: Index, peers: Mapping[str, str], caption: str) -> list[str]:
    """Microseconds on rows of DeepSeek-V4's shapes, a score for every four keys; nothing without results."""
    columns = {name: OWN_COLUMNS[name] for name in (HINTED, NO_HINT)} | with_figures(index, peers)
    if not index.group("v4"):
        return []
    lines = [
        f"**DeepSeek-V4**{caption}: microseconds on rows of one score for four keys.",
        "",
        f"| k | N x batch | {' | '.join(columns.values())} |",
        "|---:|---|" + "---:|" * len(columns),
    ]
    for cell in index.group("v4"):
        figures = " | ".join(_shown(index.figure(cell["key"], name)) for name in columns)
        lines.append(f"| {cell['k']:,} | {cell['n']:,} x {cell['batch']} | {figures} |")
    return [*lines, ""]


def host_time(data: dict[str, Any]) -> list[str]:
    """Microseconds of the host for one eager call."""
    us = {result["call"]: result["us"] for result in data["results"]}
    peers = peer_names([data["baselines"]])
    rows = {
        "this package: `state`, `row_slot` and `out` given": us["hinted"],
        "of which its Python function": us["hinted"] - us["dispatcher"],
        **{name: us[impl] for impl, name in peers.items() if impl in us},
        "`zero_` of one element": us["zero_"],
    }
    lines = [f"**Host time of an eager call** ({source_of(data)}): microseconds of the host."]
    lines += ["", "| call | us |", "|---|---:|"]
    return [*lines, *(f"| {name} | {figure:.1f} |" for name, figure in rows.items())]


def phase_table(timing: dict[str, Any], kernel: str, shown: Sequence[str]) -> list[str]:
    """Microseconds of every phase of a kernel, in some cells."""
    known_as = (kernel, KERNELS_BEFORE.get(kernel))
    its = [result for result in timing["results"] if result.get("kernel", result.get("path")) in known_as]
    rows = {result["rows"].removeprefix("gauss "): result for result in its if result["us"]}
    names = list(rows[shown[0]]["us"])
    lines = [f"| us | {' | '.join(names)} | launch and end |", "|---|" + "---:|" * (len(names) + 1)]
    for name in shown:
        us = rows[name]["us"]
        rest = rows[name]["graph_us"] - rows[name]["total_us"]
        lines.append(f"| {name} | {' | '.join(f'{us[phase]:.1f}' for phase in names)} | {rest:.1f} |")
    return lines


def picture(check: bool) -> str:
    """Draw the picture anew where it is not that of its file; what is wrong with it, or nothing."""
    digest = digest_of(RESULTS / BENCH)
    if digest_in(PICTURE) == digest:
        return ""
    if check:
        return f"{PICTURE.name}: it was not drawn from {BENCH} as it is; run python -m eval readme"
    if importlib.util.find_spec("matplotlib") is None:
        return f"{PICTURE.name}: wanted the package matplotlib to draw it, got none: pip install -e '.[eval]'"
    from eval.bench.plot_bench import draw

    draw(load_bench(), PICTURE, digest=digest)
    print(f"drawn: {PICTURE}")
    return ""


def main(argv: Sequence[str] | None = None) -> int:
    """Write, or check, the figures of each page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, and say what would change")
    check = parser.parse_args(argv).check
    failed = False
    try:
        pages = {
            ROOT / "README.md": results(),
            ROOT / "docs" / "performance.md": performance(),
            VLLM_PAGE: vllm_figures(RESULTS),
        }
    except (FormatError, RefusedError) as error:
        print(error, file=sys.stderr)
        return 1
    if unknown := unknown_commits("\n".join(pages.values())):
        print(f"commits: wanted ancestors of this one, got {', '.join(unknown)}", file=sys.stderr)
        return 1
    for page, figures in pages.items():
        text = page.read_text()
        head, rest = text.split(BEGIN)
        expected = f"{head}{BEGIN}\n{figures}\n{END}{rest.split(END)[1]}"
        if not check:
            page.write_text(expected)
        elif text != expected:
            failed = True
            print(f"{page.name}: its figures are not those of eval/results; run python -m eval readme")
    if problem := picture(check):
        failed = True
        print(problem, file=sys.stderr)
    return int(failed)
