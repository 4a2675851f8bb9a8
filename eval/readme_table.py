"""Write the figures of README and ``where_time_goes.md`` from the JSON files under ``eval/results``.

With ``--check``, look whether they are there.

python eval/readme_table.py
python eval/readme_table.py --check
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from eval.common.bench_report import FLOOR, TARGETS

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "eval" / "results"
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
COLUMNS = {
    "cluster": "this package",
    "cluster_pdl": "with PDL",
    "gvr_quantile": "four-phase",
    "radix": "radix",
    "torch": "torch.topk",
    "trtllm": "TensorRT-LLM 1.2.1",
    "vllm": "vLLM 0.33",
    "flashinfer": "FlashInfer 0.7.2",
}
PEERS = ("torch", "trtllm", "vllm", "flashinfer")
CELLS = sorted(TARGETS, key=lambda cell: cell[::-1])
NOISE = 0.01
"""Differences up to this share are not spoken of."""
PHASES = {"single": ("8,192 x 1", "8,192 x 64"), "cluster": ("70,690 x 1", "131,072 x 64", "1,048,576 x 1")}
"""Rows of the phase timing that `where_time_goes` shows, by the kernel's path."""


def load(name: str) -> Any:
    """One result file."""
    return json.loads((RESULTS / name).read_text())


def main_times(bench: dict[str, Any]) -> dict[tuple[int, int, str], float]:
    """Microseconds per launch by length, batch and implementation, of the benchmark's main cells."""
    return {
        (r["cell"]["n"], r["cell"]["batch"], r["impl"]): r["cold_us"]
        for r in bench["results"]
        if r["cell"]["group"] == "main"
        and r["cold_us"] is not None
        and (r["exact"] or r["impl"] == FLOOR)  # which selects nothing
    }


def hint_spread(bench: dict[str, Any]) -> float:
    """Slowest over fastest, over hints of every quality and none."""
    return next(check["reached"] for check in bench["checks"] if "hints of every quality" in check["what"])


def faster_cells(bench: dict[str, Any], other: str) -> list[tuple[str, float]]:
    """Where an implementation is faster than this package, cold, and how many times."""
    ours: dict[str, float] = {}
    theirs: dict[str, tuple[str, float]] = {}
    for r in bench["results"]:
        cell = r["cell"]
        if r["cold_us"] is None or not r["exact"]:
            continue
        if r["impl"] == "cluster":
            ours[cell["key"]] = r["cold_us"]
        elif r["impl"] == other:
            name = f"{cell['n']:,} x {cell['batch']}"
            if cell["group"] == "hint":
                name += f" ({100 * cell['keep']:.0f} % survives)"
            elif cell["rows"] != "gauss":
                name += f" ({cell['group']} rows)"
            theirs[cell["key"]] = (name, r["cold_us"])
    return [
        (name, ours[key] / us) for key, (name, us) in theirs.items() if us < ours.get(key, 0.0) * (1 - NOISE)
    ]


def times_table(bench: dict[str, Any]) -> list[str]:
    """Microseconds per launch of every implementation at the cells that targets exist for."""
    times = main_times(bench)
    lines = ["| N x batch | " + " | ".join(COLUMNS.values()) + " |", "|---|" + "---:|" * len(COLUMNS)]
    for n, batch in CELLS:
        figures = [times.get((n, batch, name)) for name in COLUMNS]
        shown = ["-" if figure is None else f"{figure:.1f}" for figure in figures]
        lines.append(f"| {n:,} x {batch} | " + " | ".join(shown) + " |")
    return lines


def _paragraph(text: str) -> str:
    return " ".join(text.split())


def results() -> str:
    """The README's section."""
    bench, decode = load("bench_h200.json"), load("simulated_decode_h200.json")
    fuzz = [load(path.name) for path in sorted(RESULTS.glob("fuzz_h200_*.json"))]
    cases, rows = (sum(part[what] for part in fuzz) for what in ("cases", "rows"))
    phases = load("phase_timing_h200.json")["machine"]["commit"]
    run = bench["runs"][0]
    ratios = {r["other"]: r for r in bench["worst_ratios"] if r["which"] == "cold"}
    sets = run["sets_in_20_runs"]
    others = ", ".join(
        f"{COLUMNS[name]} {ratios[name]['geometric_mean']:.2f} ({ratios[name]['ratio']:.2f})"
        for name in PEERS
    )
    met, targets = sum(check["met"] for check in bench["checks"]), len(bench["checks"])
    faster = []
    ours = {"gvr_quantile": "our four-phase kernel", "radix": "our radix select"}
    for name, text in {**ours, **{name: COLUMNS[name] for name in PEERS}}.items():
        found = faster_cells(bench, name)
        if found:
            cells, times = zip(*found, strict=True)
            counted = [f"{n} cells of {name}" if n > 1 else name for name, n in Counter(cells).items()]
            faster.append(f"{text} at {' and '.join(counted)} (at most {max(times):.2f} times)")
    step = decode["step_us"]
    lead = f"""
        {run["machine"]["device"]}, us per launch, cold L2, CUDA graph, median; fp32, k = 2048, Gaussian rows
        of which 90 % of the variance survives a step; every figure with an exact result
        (`eval/results/bench_h200.json`, commit {run["machine"]["commit"]};
        [plot](eval/results/bench_h200.png)):
    """
    comparison = f"""
        Their time over ours, geometric mean of all cells (worst cell): {others}. Different sets in 20 runs on
        a zero plateau: ours {sets["cluster"]}, TensorRT-LLM {sets["trtllm"]}, vLLM {sets["vllm"]}, FlashInfer
        {sets["flashinfer"]}.
    """
    limits = f"""
        Of the benchmark's {targets} speed targets, {"all" if met == targets else met} are reached. Faster
        than this package, by more than {100 * NOISE:.0f} %: {"; ".join(faster) or "nothing measured"}.
        Hints of every quality and none are within {hint_spread(bench):.2f} times of the
        best. `eval/results/where_time_goes.md` says where the time
        goes (stamps at commit {phases}) and what was tried. With PDL: launched while the kernel before, here
        the same one, still runs (`pdl=True`; in TensorRT-LLM with
        `TRTLLM_ENABLE_PDL=1`).
    """
    commits = ", ".join(sorted({part["machine"]["commit"] for part in fuzz}))
    seconds = sum(part["seconds"] for part in fuzz)
    checks = f"""
        Fuzzing (commit {commits}): {cases:,} random cases, {rows:,} rows, every path, no mismatch in
        {seconds:.0f} s. Simulated decode over real traces with one
        captured graph (commit {decode["versions"]["commit"]}): {decode["sets"]["identical"]:,} of
        {decode["sets"]["rows"]:,} rows select the same set with the hook on and off,
        {step["on"]:.0f} against {step["off"]:.0f} us a step, most of it scoring, with TensorRT-LLM's
        compiled op (rows of 32,768; never inside TensorRT-LLM).
    """
    parts = [_paragraph(lead), *times_table(bench), _paragraph(comparison), _paragraph(limits)]
    lines = [parts[0], "", *parts[1:-2], "", parts[-2], "", parts[-1], "", _paragraph(checks)]
    return "\n".join(lines)


def where_time_goes() -> str:
    """Figures of the page that says what takes how long."""
    bench, timing = load("bench_h200.json"), load("phase_timing_h200.json")
    times = main_times(bench)
    lines = [
        f"Times: `bench_h200.json`, commit {bench['runs'][0]['machine']['commit']}.",
        "",
        "| N x batch | us, at most | reached | reading the row alone |",
        "|---|---:|---:|---:|",
    ]
    for n, batch in CELLS:
        reached, floor = times[n, batch, "cluster"], times[n, batch, FLOOR]
        lines.append(f"| {n:,} x {batch} | {TARGETS[n, batch]:.1f} | {reached:.2f} | {floor:.1f} |")
    lines += [
        "",
        f"Phases: `phase_timing_h200.json`, commit {timing['machine']['commit']}.",
    ]
    for path, shown in PHASES.items():
        lines += ["", *phase_table(timing, path, shown)]
    return "\n".join(lines)


def phase_table(timing: dict[str, Any], path: str, shown: Sequence[str]) -> list[str]:
    """Microseconds of every phase of a kernel, in some cells."""
    rows = {r["rows"].removeprefix("gauss "): r for r in timing["results"] if r["path"] == path and r["us"]}
    names = list(rows[shown[0]]["us"])
    lines = [f"| us | {' | '.join(names)} | launch and end |", "|---|" + "---:|" * (len(names) + 1)]
    for name in shown:
        us = rows[name]["us"]
        rest = rows[name]["graph_us"] - rows[name]["total_us"]
        lines.append(f"| {name} | {' | '.join(f'{us[phase]:.1f}' for phase in names)} | {rest:.1f} |")
    return lines


def main() -> int:
    """Write, or check, the figures of each page."""
    failed = False
    pages = {ROOT / "README.md": results(), RESULTS / "where_time_goes.md": where_time_goes()}
    for page, figures in pages.items():
        text = page.read_text()
        head, rest = text.split(BEGIN)
        wanted = f"{head}{BEGIN}\n{figures}\n{END}{rest.split(END)[1]}"
        if "--check" not in sys.argv[1:]:
            page.write_text(wanted)
        elif text != wanted:
            failed = True
            print(f"{page.name}: its figures are not those of eval/results; run python eval/readme_table.py")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
