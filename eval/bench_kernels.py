"""Time the kernels and other projects' kernels over length, batch, k, dtype, hint and kind of row.

    python eval/bench_kernels.py --out bench.json --baseline-dir FOLDER --traces FOLDER

Every figure is the median over replays of a CUDA graph, per launch, on rows that no cache holds (cold) and
on rows that L2 holds (warm; see `eval.kernel_timing`). Every implementation first runs on poisoned outputs,
and its answer is compared before and after timing: ours bit for bit with the contract's oracle, the others
by the multiset of the values they chose. A time without an exact answer is marked and not compared.

The JSON is rewritten after each cell, so a run that is stopped keeps what it had; ``--resume`` goes on from
such a file, on the same machine or a later one (each result says which run made it). ``--report`` prints the
tables of a file and measures nothing.

Exit status: 0, 1 a kernel of ours was not exact or failed, 2 wrong use, 3 stopped by ``--seconds``.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import typer
from rich.console import Console
from torch import Tensor

from eval import baselines
from eval.baselines import BaselineError, Prepared
from eval.common.bench_cases import DTYPES, Cell, all_cells, load_traces, make_rows
from eval.common.bench_report import (
    ALL,
    EARLY,
    FLOOR,
    OURS,
    Index,
    checks,
    checks_table,
    ratios_table,
    times_table,
    worst_ratios,
)
from eval.common.machine import describe_machine, write_json
from eval.common.our_kernels import prepare_ours
from eval.kernel_timing import Rows, buffers_for, fits_in_l2, time_graph
from gvr_topk.contract import STATS_COLUMNS, exact_topk, order_key
from gvr_topk.gate import plan
from gvr_topk.trace import ScoreSource

FORMAT = "gvr_topk.bench_kernels/1"
REPLAYS = 9
BUDGET_SECONDS = 0.15
"""Replay time after which a figure has enough replays."""

REPEATS = 20
METHOD = (
    "CUDA graph, at least 20 launches, median over up to 9 replays of replay time / launches; "
    "cold: row buffers rotate over 4x L2 (at most 4000 buffers); warm: buffers within half of L2"
)

app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class Implementation:
    """One of our kernels, or a baseline, bound to nothing yet."""

    name: str
    refuse: Callable[[Cell], str]
    prepare: Callable[[Rows, Cell], Prepared]


def ours(name: str) -> Implementation:
    """One of our paths."""
    path = {"cluster": "auto", EARLY: "auto", "gvr_mean": "gvr", "gvr_quantile": "gvr", "radix": "radix"}[
        name
    ]

    def prepare(rows: Rows, cell: Cell) -> Prepared:
        return prepare_ours(
            rows,
            path,
            hinted=cell.hint == "previous",
            quantile=name == "gvr_quantile",
            pdl=name == EARLY,
        )

    def refuse(cell: Cell) -> str:
        try:
            plan(rows=cell.batch, width=cell.n, k=cell.k, dtype=DTYPES[cell.dtype], path=path)
        except ValueError as error:
            return str(error)
        usual = cell.group == "main" and cell.dtype == "fp32" and cell.k == 2048
        return "" if usual or name != EARLY else "measured at fp32, k = 2048, with a hint"

    return Implementation(name, refuse, prepare)


def implementations(
    names: Sequence[str], folder: Path | None
) -> tuple[list[Implementation], dict[str, dict[str, str]]]:
    """The wanted implementations that are there, and for every baseline its version or why it is not."""
    found = [ours(name) for name in OURS if name in names]
    described = {}
    for name, baseline in baselines.available(folder).items():
        described[name] = {"version": baseline.version, "why_not": baseline.why_not}
        if name in names and not baseline.why_not:
            found.append(
                Implementation(
                    name,
                    lambda cell, its=baseline: its.refuse(cell.batch, DTYPES[cell.dtype], cell.k),  # type: ignore[misc]
                    lambda rows, cell, its=baseline: its.prepare(rows),  # type: ignore[misc]
                )
            )
    return found, described


def same_values(got: Tensor, want: Tensor, logits: Tensor) -> bool:
    """Whether two selections, ``[rows, k]``, are the same multiset of values at distinct positions.

    Positions of -1 stand for nothing and must be as many in both.
    """
    got, want = got.to(torch.int64), want.to(torch.int64)
    if bool(((got < -1) | (got >= logits.shape[1])).any()):
        return False
    order = torch.sort(got, dim=1).values
    if bool(((order[:, 1:] == order[:, :-1]) & (order[:, 1:] >= 0)).any()):
        return False
    keys = order_key(logits)

    def chosen(positions: Tensor) -> Tensor:
        picked = keys.gather(1, positions.clamp(min=0))
        return torch.sort(torch.where(positions >= 0, picked, -1), dim=1).values

    return torch.equal(chosen(got), chosen(want))


class CellRun:
    """Rows of one cell with the oracle's answers, shared by the implementations measured on them."""

    def __init__(self, cell: Cell, traces: Sequence[ScoreSource]) -> None:
        self.cell = cell
        self.rows = make_rows(cell, traces)
        self.step_bytes = self.rows.logits[0].numel() * self.rows.logits.element_size()
        # Both steps of a pair, the first without a hint that means anything, then again with one.
        self.order = (0, self.rows.half, 0, self.rows.half)
        self.want = {i: self.oracle(self.rows, i) for i in set(self.order)}

    @staticmethod
    def oracle(rows: Rows, i: int) -> Tensor:
        return exact_topk(rows.logits[i], rows.lengths_of(i), rows.k)

    def hit_ratio(self) -> float:
        """Share of the later step's result that the earlier step's contains, moved as the scores were."""
        early = self.want[0] + self.rows.shift
        late = self.want[self.rows.half]
        hits = [torch.isin(row, hint).sum().item() for row, hint in zip(late, early, strict=True)]
        return float(sum(hits)) / late.numel()

    def measure(self, implementation: Implementation) -> dict[str, Any]:
        """Result of one implementation at this cell; an error is a result too."""
        result: dict[str, Any] = {
            "cell": self.cell.as_json(),
            "impl": implementation.name,
            "cold_us": None,
            "warm_us": None,
            "exact": None,
            "note": implementation.refuse(self.cell),
        }
        if result["note"]:
            return result
        try:
            prepared = implementation.prepare(self.rows, self.cell)
            exact = self.is_exact(implementation.name, prepared)
            result["cold_us"] = time_graph(prepared.launch, self.rows.count, REPLAYS, BUDGET_SECONDS)
            torch.cuda.synchronize()
            exact &= all(self.agrees(implementation.name, prepared, i) for i in self.want)
            result["exact"] = exact
            if prepared.statistics is not None:
                stats = prepared.statistics(self.rows.half).float().mean(dim=0).tolist()
                result["stats"] = dict(zip(STATS_COLUMNS, stats, strict=True))
            if fits_in_l2(self.step_bytes):
                few = self.rows.few(buffers_for(self.step_bytes, cold=False))
                warm = implementation.prepare(few, self.cell)
                result["warm_us"] = time_graph(warm.launch, few.count, REPLAYS, BUDGET_SECONDS)
        except (RuntimeError, ValueError, BaselineError) as error:
            result["note"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            result["exact"] = False
        return result

    def is_exact(self, name: str, prepared: Prepared) -> bool:
        """Run both steps of the first pair, twice, each time on poisoned outputs."""
        exact = True
        for i in self.order:
            prepared.poison()
            prepared.launch(i)
            torch.cuda.synchronize()
            exact &= self.agrees(name, prepared, i)
        return exact

    def agrees(self, name: str, prepared: Prepared, i: int) -> bool:
        if name in OURS:
            return torch.equal(prepared.results[i], self.want[i])
        return same_values(prepared.results[i], self.want[i], self.rows.logits[i])

    def floor(self) -> dict[str, Any]:
        """Time to read the rows and do nothing else."""
        result: dict[str, Any] = {
            "cell": self.cell.as_json(),
            "impl": FLOOR,
            "cold_us": None,
            "warm_us": None,
            "exact": None,
            "note": "",
        }
        try:
            from eval.read_floor import read_floor

            result["cold_us"] = read_floor(self.rows, REPLAYS, BUDGET_SECONDS)
        except (ImportError, RuntimeError) as error:
            result["note"] = str(error).splitlines()[0]
        return result


def repeatability(found: Sequence[Implementation]) -> dict[str, int | str]:
    """Different sets each implementation gives in `REPEATS` runs on a zero plateau at the k-th value."""
    cell = Cell("adversarial", 65536, rows="adversarial:relu_zero_plateau")
    rows = make_rows(cell).few(2)
    sets: dict[str, int | str] = {}
    for implementation in found:
        try:
            prepared = implementation.prepare(rows, cell)
            seen = set()
            for _ in range(REPEATS):
                prepared.poison()
                prepared.launch(0)
                seen.add(tuple(sorted(prepared.results[0, 0].tolist())))
            sets[implementation.name] = len(seen)
        except (RuntimeError, ValueError, BaselineError) as error:
            sets[implementation.name] = str(error).splitlines()[0]
    return sets


def report(data: dict[str, Any], console: Console) -> None:
    """Print every table of a result file."""
    for number, run in enumerate(data["runs"]):
        machine = ", ".join(f"{name} {value}" for name, value in run["machine"].items())
        console.print(f"run {number}: {machine}", style="dim")
        for name, its in run["baselines"].items():
            console.print(f"  {name}: {its['why_not'] or its['version']}", style="dim")
        console.print(f"  sets in {REPEATS} runs on a zero plateau: {run['sets_in_20_runs']}", style="dim")
    console.print(data["method"], style="dim")
    index = Index(data["results"])
    for group in dict.fromkeys(cell["group"] for cell in index.cells()):
        console.print(times_table(index, group))
    console.print(ratios_table(worst_ratios(index), "cluster"))
    console.print(checks_table(checks(index)))


def load(path: Path) -> dict[str, Any]:
    """Read a result file.

    Raises
    ------
    typer.BadParameter
        It is not one.
    """
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{path}: {error}") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise typer.BadParameter(f"{path}: wanted format {FORMAT!r}")
    return data


def select(cells: Sequence[Cell], groups: str, pattern: str) -> list[Cell]:
    """Cells of the named groups (comma-separated; empty: all) whose key the regular expression finds."""
    wanted = {group for group in groups.split(",") if group}
    unknown = wanted - {cell.group for cell in cells}
    if unknown:
        raise typer.BadParameter(f"--groups: no cells of {', '.join(sorted(unknown))}")
    return [cell for cell in cells if (not wanted or cell.group in wanted) and re.search(pattern, cell.key)]


@app.command()
def main(
    out: Annotated[Path, typer.Option(help="Result file.")] = Path("bench_kernels.json"),
    only: Annotated[str, typer.Option(help=f"Implementations, comma-separated, of {', '.join(ALL)}.")] = "",
    groups: Annotated[str, typer.Option(help="main, hint, adversarial, layer, trace, k, dtype.")] = "",
    cells: Annotated[str, typer.Option(help="Regular expression on cell keys, such as 'n70690 b1 '.")] = "",
    baseline_dir: Annotated[Path | None, typer.Option(help="Folder of `eval.baselines`' files.")] = None,
    traces: Annotated[Path | None, typer.Option(help="Folder of .npz traces; adds the shipped one.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Result file whose figures are kept.")] = None,
    seconds: Annotated[float, typer.Option(help="Start no cell after so long.")] = 510.0,
    commit: Annotated[str, typer.Option(help="Commit of the sources, where Git cannot say.")] = "",
    show: Annotated[Path | None, typer.Option("--report", help="Print this file's tables only.")] = None,
) -> None:
    """Measure the selected cells, or print the tables of a file."""
    console = Console(width=170)
    if show is not None:
        report(load(show), console)
        return
    if not torch.cuda.is_available():
        raise typer.BadParameter("wanted a CUDA device, got none")
    names = [name for name in only.split(",") if name] or [*ALL, FLOOR]
    if unknown := set(names) - {*ALL, FLOOR}:
        raise typer.BadParameter(f"--only: no implementation {', '.join(sorted(unknown))}")
    started = time.monotonic()
    data: dict[str, Any] = {"format": FORMAT, "method": METHOD, "runs": [], "results": []}
    if resume is not None:
        data |= load(resume)
    done = {(result["cell"]["key"], result["impl"]) for result in data["results"] if not _failed(result)}
    data["results"] = [result for result in data["results"] if not _failed(result)]
    found, described = implementations(names, baseline_dir)
    data["runs"].append(
        {"machine": describe_machine(commit), "baselines": described, "sets_in_20_runs": repeatability(found)}
    )
    sources = load_traces(traces)
    stopped = False
    for cell in select(all_cells(sources), groups, cells):
        wanted = [its for its in found if (cell.key, its.name) not in done]
        floor = cell.group == "main" and FLOOR in names and (cell.key, FLOOR) not in done
        if not wanted and not floor:
            continue
        if stopped := time.monotonic() - started > seconds:
            break
        run = CellRun(cell, sources)
        hit_ratio = run.hit_ratio()
        results = [run.measure(its) for its in wanted] + ([run.floor()] if floor else [])
        for result in results:
            data["results"].append({**result, "hit_ratio": hit_ratio, "run": len(data["runs"]) - 1})
        line = ", ".join(f"{its['impl']} {_shown(its)}" for its in results)
        print(f"{time.monotonic() - started:5.0f}s {cell.key} hits {hit_ratio:.2f}: {line}", flush=True)
        del run
        torch.cuda.empty_cache()
        _finish(data, out)
    _finish(data, out)
    report(data, console)
    if any(_failed(result) for result in data["results"] if result["impl"] in OURS):
        raise typer.Exit(1)
    if stopped:
        raise typer.Exit(3)


def _finish(data: dict[str, Any], out: Path) -> None:
    index = Index(data["results"])
    write_json(out, {**data, "worst_ratios": worst_ratios(index), "checks": checks(index)})


def _failed(result: dict[str, Any]) -> bool:
    """Ours failed when it is wrong; a baseline when it raised an error (a wrong answer is its answer)."""
    if result["impl"] in OURS:
        return result["exact"] is False
    return result["cold_us"] is None and result["exact"] is False


def _shown(result: dict[str, Any]) -> str:
    if result["cold_us"] is None:
        return f"({result['note']})"
    return f"{result['cold_us']:.2f}" + ("*" if result["exact"] is False else "")


if __name__ == "__main__":
    app()
