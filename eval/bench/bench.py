"""Time the op and other projects' kernels over length, batch, k, dtype, hint and kind of row.

    python -m eval bench --out out/bench.json --baseline-dir FOLDER --traces FOLDER
    python -m eval bench --out out/bench.json --only hinted,no_hint,prefill

A figure is the median over replays of a CUDA graph, per launch, and the least of a few graphs. Launches walk
a chain of consecutive decode steps, each on a row that no launch before it has seen and no cache holds, with
the state carried from step to step (`eval.bench.kernel_timing`). Every launch's answer is compared: ours bit
for bit with the contract's oracle, after each timed replay; the others' by the multiset of the values they
chose, after the last one. Outputs are poisoned before each replay. A time without an exact answer is marked
and not compared.

``hinted`` calls the op as the integrations do: ``row_slot``, ``out`` and a ``state`` without indices given.
``no_hint`` gets ``out`` alone and estimates from the row, ``radix_rounds`` estimates nothing,
``pdl`` is ``hinted`` with programmatic dependent launches, and ``paper`` is the paper's kernel, with indices.
``prefill`` and ``prefill_radix_rounds`` are the op for chunks of a prompt, ``prefill_slices`` is the same in
slices, and ``prefill_last_slice`` the last of these alone; ``blocks`` and ``in_blocks``, the source and a
consumer of a two-level indexer, are measured beside the same by PyTorch's operators.

Traces and rows that are hard on a hint are also timed launch by launch: events inside a graph stand between
1,000 launches, each is the median of three passes, and the worst one's distance from their mean is added to
the figure without events, since an event takes time itself.

The JSON is rewritten after each cell, so a run that is stopped keeps what it had; ``--resume`` goes on from
such a file, on the same machine or a later one. Each result says which run made it, and is compared with
those of the same run alone.
``compare`` and ``readme`` read the file.
"""

import re
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from eval.bench import baselines, oracles
from eval.bench.baselines import BaselineError
from eval.bench.bench_cases import (
    Cell,
    K,
    Sources,
    all_cells,
    load_sources,
    make_chain,
    memory_traffic,
    prepare_sources,
)
from eval.bench.bench_report import ALL, BASELINES, FLOOR, FORMAT, MEASURED, OURS
from eval.bench.kernel_timing import Chain, ChainRun, Implementation, Prepared
from eval.bench.our_kernels import (
    HINTED,
    IMPLEMENTATIONS,
    IN_BLOCKS,
    LAST_SLICE,
    NO_HINT,
    VARIANTS,
    prepare_ours,
)
from eval.common.dtypes import DTYPES
from eval.common.machine import describe_machine, without_folders, write_json
from eval.common.options import (
    BaselineFolder,
    Commit,
    Out,
    TraceFolder,
    read_results,
    require_gpu,
    require_writable,
)
from eval.common.timing import microseconds
from gvr_topk.constants import BLOCK_SIZE, StatsColumn

REPLAYS = 9
BUDGET_SECONDS = 0.1
"""Replay time after which a figure has enough replays."""

SLOW_SECONDS = 1.0
"""Another project's call that takes longer is not measured."""

HIT_SAMPLES = 32
"""Steps whose hit ratio is looked at."""

EACH_LAUNCHES = 1000
EACH_GROUPS = ("scale", "engine", "trace")
"""Groups whose launches are also timed one by one."""

COPY_BYTES = 1 << 30
COPIES = 10
"""Size and number of the copies by which a run measures the bandwidth of its memory."""

REPEATS = 20


def implementations(
    names: Sequence[str], folder: Path | None
) -> tuple[list[Implementation], dict[str, dict[str, str]]]:
    """The requested implementations that are there, and for every baseline its version or why it is not."""
    found = [its for name, its in IMPLEMENTATIONS.items() if name in names]
    described = {}
    if any(name in names for name in BASELINES):
        for name, its in baselines.available(folder).items():
            described[name] = {"version": its.version, "why_not": its.why_not}
            if name in names and not its.why_not:
                found.append(its)
    return found, described


class CellRun:
    """The chain of one cell with the oracle's answers, shared by the implementations measured on it."""

    def __init__(
        self,
        cell: Cell,
        sources: Sources,
        device: torch.device | str = "cuda",
        each_launches: int = EACH_LAUNCHES,
        bytes_per_second: float = 0.0,
    ) -> None:
        self.cell = cell
        self.bytes_per_second = bytes_per_second
        self.chain = make_chain(cell, sources, device=device)
        self.expected = oracles.topk_results(self.chain)
        self._of_blocks: dict[bool, Tensor] = {}  # of a two-level indexer: of its source, of a consumer
        self.each_launches = each_launches

    def describe(self) -> dict[str, Any]:
        """The cell's entry in the JSON."""
        described = {**asdict(self.cell), "launches": len(self.chain.timed), "fresh": self.chain.fresh}
        if self.cell.group == "prefill":
            return described | memory_traffic(self.chain, self.bytes_per_second)
        return described | {"hit_ratio": round(self.hit_ratio(), 4)}

    def expected_of(self, name: str) -> Tensor:
        """What an implementation has to give: in a two-level indexer it may be the source or a consumer."""
        if self.cell.group != oracles.BLOCKS_GROUP:
            return self.expected
        is_consumer = name.endswith(IN_BLOCKS)
        if is_consumer not in self._of_blocks:
            make = oracles.consumer_results if is_consumer else oracles.source_results
            self._of_blocks[is_consumer] = make(self.chain)
        return self._of_blocks[is_consumer]

    def hit_ratio(self) -> float:
        """Share of a step's choice that was the step before's, moved as the scores were; of some steps."""
        timed = self.chain.timed
        ratios = []
        for step in timed[:: max(1, len(timed) // HIT_SAMPLES)]:
            early, late = self.expected[step - 1, 0] + self.chain.shift, self.expected[step, 0]
            ratios.append(torch.isin(late, early).float().mean())
        return float(torch.stack(ratios).mean())

    def measure(self, implementation: Implementation) -> dict[str, Any]:
        """Result of one implementation at this cell; an error is a result too."""
        name = implementation.name
        result: dict[str, Any] = {"cell": self.cell.key, "impl": name, "cold_us": None, "exact": None}
        cell = self.cell
        width = max(cell.n, cell.width)
        if refused := implementation.refuse(cell.batch, width, cell.k, DTYPES[cell.dtype]):
            return {**result, "note": refused}
        try:
            prepared = implementation.prepare(self.chain)
            if name not in OURS and self.cell.group == "prefill":
                seconds = min(self.seconds_of_call(prepared) for _ in range(2))
                if seconds > SLOW_SECONDS:
                    return {**result, "note": f"one call takes {seconds:.1f} s, more than {SLOW_SECONDS:g} s"}
            run = ChainRun(self.chain, prepared)
            if name in OURS:
                self.measure_ours(name, run, result)
            else:
                result["cold_us"] = round(run.time(REPLAYS, BUDGET_SECONDS), 4)
                result["exact"] = self.all_same_values(name, prepared)
        except (RuntimeError, ValueError, BaselineError) as error:
            result |= {"note": f"{type(error).__name__}: {str(error).splitlines()[0]}", "exact": False}
        return result

    def seconds_of_call(self, prepared: Prepared) -> float:
        """The host's time from one call to its result."""
        synchronize = torch.cuda.synchronize if self.chain.logits.is_cuda else lambda: None
        synchronize()
        started = time.perf_counter()
        prepared.launch(self.chain.lead)
        synchronize()
        return time.perf_counter() - started

    def measure_ours(self, name: str, run: ChainRun, result: dict[str, Any]) -> None:
        """Time one of ours, compare it after each replay, and say how its guesses did."""
        wrong: list[Tensor] = []
        result["exact"] = False
        expected = self.expected_of(name)
        took = run.time(
            REPLAYS, BUDGET_SECONDS, lambda: wrong.append(self.differences(run.prepared, expected))
        )
        result["cold_us"] = round(took, 4)
        self.add_statistics(run, result)
        if name in (HINTED, NO_HINT) and self.cell.group in EACH_GROUPS:
            try:
                self.measure_each(run, result)
                wrong.append(self.differences(run.prepared, expected, in_order=False))
            except (RuntimeError, TypeError) as error:
                result["note"] = f"launch by launch: {type(error).__name__}: {str(error).splitlines()[0]}"
        count = int(torch.stack(wrong).sum())
        result["exact"] = count == 0
        if count:
            result["note"] = f"{count} wrong rows in {len(wrong)} replays"

    def measure_each(self, run: ChainRun, result: dict[str, Any]) -> None:
        """Time one of ours launch by launch; the distance to the mean is what the events leave as it is."""
        each = run.time_each(self.each_launches)
        mean, worst = sum(each) / len(each), max(each)
        result["worst_us"] = round(result["cold_us"] + worst - mean, 4)
        figures = {"mean": mean, "median": sorted(each)[len(each) // 2], "worst": worst}
        rounded = {what: round(figure, 4) for what, figure in figures.items()}
        result["each_us"] = rounded | {"launches": len(each)}

    def differences(self, prepared: Prepared, expected: Tensor, in_order: bool = True) -> Tensor:
        """How many rows of the timed steps differ from the oracle's, as a number on the device.

        What the last step has left of its choice for the next one counts as rows too, unless the launches
        ended at some other step: fewer launches than steps leave the rest poisoned.
        """
        launched = len(self.chain.timed) if in_order else min(self.each_launches, len(self.chain.timed))
        timed = slice(self.chain.lead, self.chain.lead + launched)
        wrong = (prepared.results[timed] != expected[timed]).any(dim=2).sum()
        if in_order and prepared.carried is not None:
            wrong = wrong + (prepared.carried() != self.expected[-1]).any(dim=1).sum()
        return wrong

    def all_same_values(self, name: str, prepared: Prepared) -> bool:
        """Whether every timed row has the oracle's values; those of blocks are their greatest scores.

        Of operators that know no lengths what lies behind a row's length counts as nothing.
        """
        chain, k = self.chain, self.chain.k
        lengths = chain.lengths.expand(chain.count, chain.batch)
        tensors = (prepared.results, self.expected_of(name), chain.logits, lengths[:, :, None])
        steps = max(1, oracles.ORACLE_ELEMENTS // (16 * chain.batch * k))
        for first in range(chain.lead, chain.count, steps):
            got, wanted, scores, ends = (tensor[first : first + steps].flatten(0, 1) for tensor in tensors)
            if name in baselines.WITHOUT_LENGTHS:
                got = torch.where(got < ends, got, -1)
            if not oracles.same_values(got[:, :k], wanted[:, :k], scores):
                return False
            if got.shape[1] > k:
                keys = scores.unflatten(1, (-1, BLOCK_SIZE)).amax(dim=2)
                if not oracles.same_values(got[:, k:], wanted[:, k:], keys):
                    return False
        return True

    def add_statistics(self, run: ChainRun, result: dict[str, Any]) -> None:
        """Walk the chain once more, untimed: share of guesses good at once, and passes of a row."""
        if run.prepared.statistics is None:
            return
        run.restore()
        shape = (len(self.chain.timed), self.chain.batch, len(StatsColumn))
        figures = torch.zeros(shape, dtype=torch.int32, device=self.chain.logits.device)
        for step, of_step in zip(self.chain.timed, figures, strict=True):
            run.prepared.statistics(step, of_step)
        means = figures.float().mean(dim=(0, 1)).tolist()
        for column in (StatsColumn.GUESS_HIT, StatsColumn.PASSES):
            result[column.name.lower()] = round(means[column], 4)

    def floor(self) -> dict[str, Any]:
        """Time to read the rows and do nothing else."""
        result: dict[str, Any] = {"cell": self.cell.key, "impl": FLOOR, "cold_us": None, "exact": None}
        try:
            from eval.bench.read_floor import read_floor

            result["cold_us"] = round(read_floor(self.chain, REPLAYS, BUDGET_SECONDS), 4)
        except (ImportError, RuntimeError) as error:
            result["note"] = str(error).splitlines()[0]
        return result


def repeatability(found: Sequence[Implementation], device: str = "cuda") -> dict[str, int | str]:
    """Different sets each implementation gives in `REPEATS` runs on a zero plateau at the k-th value."""
    cell = Cell("adversarial", 65536, rows="adversarial:relu_zero_plateau")
    chain = make_chain(cell, device=device)
    chain = Chain(chain.logits[:2], chain.lengths[:2], K)
    sets: dict[str, int | str] = {}
    for implementation in found:
        if oracles.BLOCKS_GROUP in MEASURED[implementation.name] or implementation.name == LAST_SLICE:
            continue  # Their results have another shape, or depend on what a launch before has left.
        try:
            prepared = implementation.prepare(chain)
            seen = set()
            for _ in range(REPEATS):
                prepared.poison()
                prepared.launch(0)
                seen.add(tuple(sorted(prepared.results[0, 0].tolist())))
            sets[implementation.name] = len(seen)
        except (RuntimeError, ValueError, BaselineError) as error:
            sets[implementation.name] = str(error).splitlines()[0]
    return sets


def copy_bytes_per_second() -> float:
    """Bytes read and written in a second by the fastest of a few copies of a large buffer."""
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = [microseconds(lambda: target.copy_(source), on_gpu=True) for _ in range(COPIES)]
    return 2e6 * COPY_BYTES / min(times)


def spend_first_graph() -> None:
    """Replay a graph that is not measured: a process's first one is faster than all later ones."""
    chain = make_chain(Cell("main", 8192, 8))
    ChainRun(chain, prepare_ours(chain)).time(3)


def main(
    out: Out = Path("out/bench.json"),
    only: Annotated[str, typer.Option(help=f"Implementations, comma-separated, of {', '.join(ALL)}.")] = "",
    cells: Annotated[str, typer.Option(help="Regular expression on cell keys, such as 'n70690 b1 '.")] = "",
    baseline_dir: BaselineFolder = None,
    traces: TraceFolder = None,
    resume: Annotated[Path | None, typer.Option(help="Result file whose figures are kept.")] = None,
    seconds: Annotated[float, typer.Option(help="Start no cell after so long.")] = 510.0,
    commit: Commit = "",
) -> None:
    """Measure the selected cells."""
    require_gpu()
    require_writable(out)
    names = [name for name in only.split(",") if name] or [*ALL, FLOOR]
    if unknown := set(names) - {*ALL, FLOOR}:
        raise typer.BadParameter(f"--only: no implementation {', '.join(sorted(unknown))}")
    started = time.monotonic()
    data: dict[str, Any] = {"format": FORMAT, "runs": [], "cells": {}, "results": []}
    if resume is not None:
        kept = read_results(resume, FORMAT)
        data |= {name: kept[name] for name in ("runs", "cells", "results")}
    data["results"] = [result for result in data["results"] if not _failed(result)]
    done = {(result["cell"], result["impl"]) for result in data["results"]}
    sources = load_sources(traces)
    chosen = [cell for cell in all_cells(sources) if re.search(cells, cell.key)]
    prepare_sources(chosen)
    found, described = implementations(names, baseline_dir)
    bandwidth = copy_bytes_per_second()
    data["runs"].append(
        {
            "machine": describe_machine(commit),
            "copy_bytes_per_second": round(bandwidth),
            **{name: list(VARIANTS[name].arguments) for name in (HINTED, NO_HINT)},
            "baselines": described,
            "sets_in_20_runs": repeatability(found),
        }
    )
    spend_first_graph()
    stopped = False
    for cell in chosen:
        its_own = [its for its in found if cell.group in MEASURED[its.name]]
        missing = [its for its in its_own if (cell.key, its.name) not in done]
        floor = cell.group in ("main", "prefill") and FLOOR in names and (cell.key, FLOOR) not in done
        if not missing and not floor:
            continue
        if stopped := time.monotonic() - started > seconds:
            break
        run = CellRun(cell, sources, bytes_per_second=bandwidth)
        data["cells"][cell.key] = run.describe()
        results = [run.measure(its) for its in missing] + ([run.floor()] if floor else [])
        data["results"] += [{**result, "run": len(data["runs"]) - 1} for result in results]
        hits = data["cells"][cell.key].get("hit_ratio")
        shown = ", ".join(
            f"{its['impl']} {_shown(its)}"
            for its in results
            if its["cold_us"] is not None or its["exact"] is not None
        )
        guessed = "" if hits is None else f" hits {hits:.2f}"
        print(f"{time.monotonic() - started:5.0f}s {cell.key}{guessed}: {shown}", flush=True)
        del run
        torch.cuda.empty_cache()
        write_json(out, without_folders(data))
    write_json(out, without_folders(data))
    if any(_failed(result) for result in data["results"] if result["impl"] in OURS):
        raise typer.Exit(1)
    if stopped:
        raise typer.Exit(3)


def _failed(result: dict[str, Any]) -> bool:
    """Ours failed when it is wrong; a baseline when it raised an error (a wrong answer is its answer)."""
    if result["impl"] in OURS:
        return result["exact"] is False
    return result["cold_us"] is None and result["exact"] is False


def _shown(result: dict[str, Any]) -> str:
    if result["cold_us"] is None:
        return f"({result['note']})"
    return f"{result['cold_us']:.2f}" + ("*" if result["exact"] is False else "")
