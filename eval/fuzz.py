"""Call the op with random arguments until the time is over, and compare every answer with the contract's.

    python -m eval fuzz --seconds 600 --seed 1
    python -m eval fuzz --seed 1 --only 12345    # the case that a mismatch names, alone
    python -m eval fuzz --seconds 600 --beside all

Each case runs on poisoned outputs with guard columns. Compared are the result, bit for bit; the positions
written back as the next hint, and every slot that must not be written; the translation through a page
table; and a second call, which finds the first one's hints. On the CPU, whose implementation the oracle
is, a sort in NumPy takes the oracle's place.

With ``--beside`` a neighbour of `eval.common.stress_neighbours` works on another stream during each call;
several take turns.

Exit status: 0 no mismatch, 1 a mismatch or a call that failed, 2 wrong use or a missing GPU.
"""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import typer
from torch import Tensor

from eval.common.fuzz_cases import (
    GUARD_COLUMNS,
    PATHS,
    POISON,
    Case,
    Oracle,
    Problem,
    draw_case,
    make_problem,
)
from eval.common.machine import describe_machine, write_json
from eval.common.stress_cases import CONFIGURATIONS
from eval.common.stress_library import StressError
from eval.common.stress_neighbours import NEIGHBOURS, Neighbour, make_neighbour
from gvr_topk.contract import MASKED, STATS_COLUMNS, exact_topk
from gvr_topk.contract import PATHS as PATH_NAMES
from gvr_topk.evaluation.oracle import sorted_topk
from gvr_topk.ops import indexer_topk_decode, to_slots

ELEMENTS = {"cuda": 1 << 22, "cpu": 1 << 15}
"""Scores of the largest case."""

REPORT_SECONDS = 60.0


class Mismatch(AssertionError):
    """The op broke its contract."""


def check_case(
    case: Case, device: str, *, repeat: bool = True, beside: Neighbour | None = None
) -> Tensor | None:
    """Run one case and compare everything it writes.

    Parameters
    ----------
    case : Case
    device : str
    repeat : bool
        Call it a second time, with the hints of the first.
    beside : Neighbour, optional
        Is at work during each call.

    Returns
    -------
    Tensor or None
        Its statistics, where the case asked for them.

    Raises
    ------
    Mismatch
        With what differs, and where first.
    """
    oracle: Oracle = sorted_topk if device == "cpu" else exact_topk
    problem = make_problem(case, device, oracle)
    prior_before = None if problem.prior is None else problem.prior.clone()
    guess_before = None if problem.guess_state is None else problem.guess_state.clone()
    stats = None
    for call in ("first call", "second call")[: 1 + repeat]:
        if beside is not None:
            beside.feed()
        out, stats = _call(case, problem)
        want = problem.want
        if problem.page_table is not None:
            want = to_slots(want, problem.page_table, case.page_size, case.next_n)
        _same(f"{call}: result", out[:, : case.k], want)
        if not bool((out[:, case.k :] == POISON).all()):
            raise Mismatch(f"{call}: wrote past column k")
        if problem.prior is not None or problem.guess_state is not None:
            _check_written(call, case, problem, prior_before, guess_before)
        if stats is not None and not set(stats[:, 0].tolist()) <= set(PATH_NAMES):
            raise Mismatch(f"{call}: stats: unknown path in {stats[:, 0].tolist()}")
    return stats


def _call(case: Case, problem: Problem) -> tuple[Tensor, Tensor | None]:
    device = problem.logits.device
    out = torch.full((case.rows, case.k + GUARD_COLUMNS), POISON, dtype=torch.int32, device=device)
    stats = None
    if case.stats:
        stats = torch.full((case.rows, len(STATS_COLUMNS)), POISON, dtype=torch.int32, device=device)
    indexer_topk_decode(
        problem.logits,
        problem.seq_lens,
        case.k,
        next_n=case.next_n,
        out=out,
        prior=problem.prior,
        row_slot=problem.row_slot,
        prior_offset=case.offset,
        guess_state=problem.guess_state,
        stats=stats,
        page_table=problem.page_table,
        page_size=case.page_size,
        path=case.path,
        ctas_per_row=case.ctas_per_row,
        quantile_guess=case.quantile_guess,
        pdl=case.pdl,
    )
    return out, stats


def _check_written(
    call: str, case: Case, problem: Problem, prior_before: Tensor | None, guess_before: Tensor | None
) -> None:
    """The last row of each request writes its slot; nothing else is written."""
    writers = problem.written_slots(case.next_n)
    if problem.prior is not None and prior_before is not None:
        want = prior_before.clone()
        for slot, row in writers.items():
            want[slot] = problem.want[row]
        _same(f"{call}: prior", problem.prior, want)
    if problem.guess_state is None or guess_before is None:
        return
    # As bits: what other slots hold may be any NaN.
    untouched = torch.ones(len(guess_before), dtype=torch.bool, device=guess_before.device)
    untouched[list(writers)] = False
    kept, before = (state[untouched].view(torch.int32) for state in (problem.guess_state, guess_before))
    _same(f"{call}: guess_state of other slots", kept, before)
    # The four-phase kernel leaves nothing where it is given no prior.
    if problem.prior is None and case.path == "gvr":
        return
    kinds, visible = problem.guess_state[:, 0].tolist(), problem.visible.tolist()
    for slot, row in writers.items():
        if visible[row] > case.k and not -math.inf < kinds[slot] <= MASKED:
            raise Mismatch(
                f"{call}: guess_state: slot {slot}: wanted a number up to {MASKED} first, got {kinds[slot]}"
            )


def _same(what: str, got: Tensor, want: Tensor) -> None:
    if torch.equal(got, want):
        return
    wrong = (got != want).nonzero()
    first = tuple(wrong[0].tolist())
    raise Mismatch(
        f"{what}: {len(wrong)} of {got.numel()} differ, first at {first}: "
        f"wanted {want[first].item()}, got {got[first].item()}"
    )


def run(
    device: str,
    seconds: float,
    seed: int,
    first: int = 0,
    paths: tuple[str, ...] = PATHS,
    most: int = 2**62,
    beside: Sequence[Neighbour] = (),
) -> dict[str, Any]:
    """Fuzz until the time is over or a case fails; neighbours take turns, case by case.

    Returns
    -------
    dict
        Summary: cases, rows, scores, how often each path ran, and the failed case if any.
    """
    started = reported = time.monotonic()
    forced: Counter[str] = Counter()
    ran: Counter[str] = Counter()
    rows = scores = 0
    failure: dict[str, Any] | None = None
    index = first
    while time.monotonic() - started < seconds and index - first < most:
        case = draw_case(seed, index, elements=ELEMENTS[device], paths=paths)
        neighbour = beside[index % len(beside)] if beside else Neighbour("none")
        try:
            with neighbour:
                stats = check_case(case, device, beside=neighbour)
        except (Mismatch, RuntimeError, ValueError) as error:
            text = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            failure = {"case": case.as_json(), "error": text}
            break
        forced[case.path] += 1
        if stats is not None:
            ran.update(PATH_NAMES[code] for code in stats[:, 0].tolist())
        rows += case.rows
        scores += case.rows * case.width
        index += 1
        if time.monotonic() - reported > REPORT_SECONDS:
            reported = time.monotonic()
            print(f"{reported - started:5.0f}s {index - first} cases", flush=True)
    return {
        "format": "gvr_topk.fuzz/1",
        "device": device,
        "seed": seed,
        "first": first,
        "cases": index - first,
        "calls": 2 * (index - first),
        "rows": rows,
        "scores": scores,
        "seconds": time.monotonic() - started,
        "beside": [neighbour.name for neighbour in beside],
        "paths_asked_for": dict(forced),
        "paths_of_rows_with_stats": dict(ran),
        "failure": failure,
    }


def main(
    seconds: Annotated[float, typer.Option(help="Time to fuzz for.")] = 60.0,
    seed: Annotated[int, typer.Option(help="Seed of the cases.")] = 0,
    first: Annotated[int, typer.Option(help="Index of the first case.")] = 0,
    only: Annotated[int, typer.Option(help="Run this case alone.")] = -1,
    paths: Annotated[str, typer.Option(help="Paths to force, comma-separated.")] = ",".join(PATHS),
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    beside: Annotated[str, typer.Option(help="Neighbours on another stream, comma-separated, or all.")] = "",
    out: Annotated[Path | None, typer.Option(help="Summary as JSON.")] = None,
    commit: Annotated[str, typer.Option(help="Commit of the sources, where Git cannot say.")] = "",
) -> None:
    """Fuzz the op."""
    if device not in ELEMENTS:
        raise typer.BadParameter(f"--device: wanted cuda or cpu, got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        # A missing GPU must not look like a wrong result.
        raise typer.BadParameter("--device: wanted a CUDA device, got none; --device cpu runs without")
    wanted = tuple(path for path in paths.split(",") if path)
    if not wanted or not set(wanted) <= set(PATHS):
        raise typer.BadParameter(f"--paths: wanted some of {','.join(PATHS)}, got {paths!r}")
    names = NEIGHBOURS[1:] if beside == "all" else tuple(name for name in beside.split(",") if name)
    try:
        # The second instance of the op has wide rows, whose clusters are large.
        neighbours = [make_neighbour(name, device, CONFIGURATIONS[3]) for name in names]
    except (ValueError, StressError) as error:
        raise typer.BadParameter(f"--beside: {error}") from None
    alone = only >= 0
    summary = run(device, seconds, seed, only if alone else first, wanted, 1 if alone else 2**62, neighbours)
    summary["machine"] = describe_machine(commit)
    if out is not None:
        write_json(out, summary)
    print(
        f"{summary['cases']} cases, {summary['calls']} calls, {summary['rows']} rows, "
        f"{summary['scores']:.3g} scores without a mismatch "
        f"in {summary['seconds']:.0f} s on {device}, seed {seed}"
    )
    print(f"paths asked for {summary['paths_asked_for']}, run {summary['paths_of_rows_with_stats']}")
    if summary["failure"] is not None:
        case = summary["failure"]["case"]
        # A call that fails is a finding too, but no wrong result.
        problem = summary["failure"]["error"]
        verdict = "MISMATCH" if problem.startswith("Mismatch:") else "FAILED"
        print(f"{verdict} {problem}\n  {case}")
        again = f"python -m eval fuzz --device {device} --seed {seed} --only {case['index']}"
        print(f"again: {again} --paths {','.join(wanted)}" + (f" --beside {beside}" if beside else ""))
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
