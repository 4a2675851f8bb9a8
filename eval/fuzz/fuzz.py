"""Call the ops with random arguments until the time is over, and compare every answer with the contract's.

    python -m eval fuzz --seconds 600 --seed 1
    python -m eval fuzz --seconds 600 --beside all
    python -m eval fuzz --case '{"op": "decode", ...}'    # the case that a mismatch prints, alone

Each case runs on poisoned outputs with guard columns. Compared are the result, bit for bit; how many items
each row has; the positions that the state keeps, and every slot that must not be written; the translation
through a page table; and a second call, which finds the first one's state. The oracle is `gvr_topk.contract`.
A sort in NumPy takes its place in about one of sixteen cases of up to 2^20 scores, and on the CPU, whose
implementation the contract's is, in all cases. The summary says how many cases of each op were drawn, with
which path, dtype and optional arguments, and how many of them NumPy has checked.

``--ops`` names the ops that are called. The second call of prefill has to repeat the first. The ops of blocks
and the sampler's four are called with the path ``auto``; the oracle of the sampler on a GPU is its CPU
implementation, which tests compare with integers and fractions.

With ``--beside`` a neighbour of `eval.stress.stress_neighbours` works on another stream during each call;
several take turns.
"""

import itertools
import json
import shlex
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from eval.common.machine import describe_machine, write_json
from eval.common.options import Commit, Device, names_of, require_device, require_writable
from eval.fuzz.calls import Mismatch, checks_by_sort, make_call
from eval.fuzz.cases import OPS, Case, cases, draw_cases
from eval.stress import converged
from eval.stress.stress_cases import CONFIGURATIONS
from eval.stress.stress_library import StressError
from eval.stress.stress_neighbours import NEIGHBOURS, Neighbour, make_neighbour
from gvr_topk.constants import HintReason, StatsColumn

ELEMENTS = {"cuda": 1 << 22, "cpu": 1 << 15}
"""Scores of the largest case."""

BATCH = 64
"""Cases that are drawn at once; each batch has a seed of its own."""

REPORT_SECONDS = 60.0

LARGEST_SEED = 2**43 - 1


def check_case(case: Case, device: str, *, beside: Neighbour | None = None) -> Tensor | None:
    """Run one case twice, the second time with the state of the first, and compare everything it writes.

    The neighbour `beside` is at work during each call. Returns the op's statistics, where the case asked for
    them. A `Mismatch` says what differs, and where first.
    """
    call = make_call(case, device)
    stats = None
    for which in ("first call", "second call"):
        if beside is not None:
            beside.feed()
        try:
            for name, got, wanted in call():
                _same(name, got, wanted)
                stats = got if name == "stats" else stats
        except Mismatch as error:
            raise Mismatch(f"{which}: {error}") from None
    return stats


def _same(what: str, got: Tensor, wanted: Tensor) -> None:
    if torch.equal(got, wanted):
        return
    wrong = (got != wanted).nonzero()
    first = tuple(wrong[0].tolist())
    raise Mismatch(
        f"{what}: {len(wrong)} of {got.numel()} differ, first at {first}: "
        f"wanted {wanted[first].item()}, got {got[first].item()}"
    )


def drawn_cases(device: str, seed: int, ops: Sequence[str]) -> Iterator[Case]:
    """Cases without end, the same for the same arguments, as `draw_cases` says."""
    strategy = cases(ELEMENTS[device], ops)
    for batch in itertools.count():
        yield from draw_cases(strategy, (seed << 20) + batch, BATCH)


def run(
    device: str, seconds: float, chosen: Iterator[Case], beside: Sequence[Neighbour] = ()
) -> dict[str, Any]:
    """Fuzz until the time is over, the cases are, or one fails; neighbours take turns, case by case.

    The summary says what was drawn for each op, what became of its hints, and which case failed, if any.
    """
    started = reported = time.monotonic()
    counted = ("paths", "dtypes", "arguments", "reasons")
    drawn: dict[str, dict[str, Counter[str]]] = {op: {name: Counter() for name in counted} for op in OPS}
    count = rows = scores = by_sort = 0
    failure: dict[str, Any] | None = None
    for case in chosen:
        neighbour = beside[count % len(beside)] if beside else Neighbour("none")
        try:
            with neighbour:
                stats = check_case(case, device, beside=neighbour)
        except (Mismatch, RuntimeError, ValueError) as error:
            text = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            failure = {"case": case.as_json(), "error": text}
            break
        of_op = drawn[case.op]
        of_op["paths"][case.path] += 1
        of_op["dtypes"][case.dtype] += 1
        of_op["arguments"].update(case.optional())
        if stats is not None:
            codes = stats[:, StatsColumn.REASON].tolist()
            of_op["reasons"].update(HintReason(code).name.lower() for code in codes)
        by_sort += checks_by_sort(case, device)
        rows += case.rows
        scores += case.rows * case.width
        count += 1
        if time.monotonic() - reported > REPORT_SECONDS:
            reported = time.monotonic()
            print(f"{reported - started:5.0f}s {count} cases", flush=True)
        if time.monotonic() - started > seconds:
            break
    return {
        "format": "gvr_topk.fuzz/5",
        "device": device,
        "cases": count,
        "calls": 2 * count,
        "checked_by_sort": by_sort,
        "rows": rows,
        "scores": scores,
        "seconds": time.monotonic() - started,
        "beside": [neighbour.name for neighbour in beside],
        "drawn": {op: {"cases": counts["paths"].total(), **counts} for op, counts in drawn.items()},
        "failure": failure,
    }


def _case_of(text: str) -> Case:
    try:
        return Case.of_json(text)
    except (ValueError, TypeError, AttributeError) as error:
        raise typer.BadParameter(f"--case: wanted a case as a mismatch prints it, got {error}") from None


def main(
    seconds: Annotated[float, typer.Option(help="Time to fuzz for.", min=0.001)] = 60.0,
    seed: Annotated[int, typer.Option(help="Seed of the cases.", min=0, max=LARGEST_SEED)] = 0,
    case: Annotated[str, typer.Option(help="Run this case alone, as a mismatch prints it.")] = "",
    device: Device = "cuda",
    beside: Annotated[str, typer.Option(help="Neighbours on another stream, comma-separated, or all.")] = "",
    ops: Annotated[str, typer.Option(help=f"Of {','.join(OPS)}.")] = "all",
    out: Annotated[Path | None, typer.Option(help="Summary as JSON.")] = None,
    commit: Commit = "",
) -> None:
    """Fuzz the ops."""
    require_device(device)
    require_writable(out)
    names = NEIGHBOURS[1:] if beside == "all" else tuple(name for name in beside.split(",") if name)
    try:
        # The second instance of the op has wide rows, whose clusters are large.
        neighbours = [make_neighbour(name, device, CONFIGURATIONS[3]) for name in names]
    except (ValueError, StressError) as error:
        raise typer.BadParameter(f"--beside: {error}") from None
    drawn = drawn_cases(device, seed, names_of("--ops", ops, tuple(OPS)))
    chosen = iter([_case_of(case)]) if case else drawn
    summary = run(device, seconds, chosen, neighbours)
    summary |= {"seed": seed, "machine": describe_machine(commit)}
    if out is not None:
        write_json(out, summary)
    print(
        f"{summary['cases']} cases, of which NumPy checked {summary['checked_by_sort']}, "
        f"{summary['calls']} calls, {summary['rows']} rows, {summary['scores']:.3g} scores without mismatch "
        f"in {summary['seconds']:.0f} s on {device}, seed {seed}"
    )
    for op, part in summary["drawn"].items():
        print(f"of {op}: {part['cases']} cases, paths {part['paths']}, hints {part['reasons']}")
    if summary["failure"] is not None:
        # A call that fails is a finding too, but no wrong result.
        problem, case = summary["failure"]["error"], json.dumps(summary["failure"]["case"])
        print(f"{'MISMATCH' if problem.startswith('Mismatch:') else 'FAILED'} {problem}")
        again = f"python -m eval fuzz --device {device} --case {shlex.quote(case)}"
        print(f"again: {again}" + (f" --beside {beside}" if beside else ""))
    if not converged.record(summary, out) or summary["failure"] is not None:
        raise typer.Exit(1)
