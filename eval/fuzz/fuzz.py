"""Call the ops with random arguments until the time is over, and compare every answer with the contract's.

    python -m eval fuzz --seconds 600 --seed 1
    python -m eval fuzz --seed 1 --only 12345    # the case that a mismatch names, alone
    python -m eval fuzz --seconds 600 --beside all

Each case runs on poisoned outputs with guard columns. Compared are the result, bit for bit; how many items
each row has; the positions that the state keeps, and every slot that must not be written; the translation
through a page table; and a second call, which finds the first one's state. The oracle is `gvr_topk.contract`.
A sort in NumPy takes its place in one of sixteen cases of up to 2^20 scores, and on the CPU, whose
implementation the contract's is, in all cases. The summary says how many cases of each op were drawn, with
which path, dtype and optional arguments, and how many of them NumPy has checked.

``--prefill`` is the share of the cases that call the prefill op, whose second call has to repeat the first,
and ``--blocks`` that of the others that call both ops of blocks, with the path ``auto``.

With ``--beside`` a neighbour of `eval.stress.stress_neighbours` works on another stream during each call;
several take turns.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor

from eval.common.machine import describe_machine, write_json
from eval.common.options import require_device, require_writable
from eval.fuzz import fuzz_prefill
from eval.fuzz.fuzz_blocks import BlocksCase, draw_blocks_case, make_blocks_problem
from eval.fuzz.fuzz_cases import (
    GUARD_COLUMNS,
    PATHS,
    POISON,
    Case,
    Oracle,
    Problem,
    draw_case,
    make_problem,
    on_cpu,
)
from eval.fuzz.fuzz_prefill import PrefillCase, draw_prefill_case, make_prefill_problem
from eval.stress import converged as collectives
from eval.stress.stress_cases import CONFIGURATIONS
from eval.stress.stress_library import StressError
from eval.stress.stress_neighbours import NEIGHBOURS, Neighbour, make_neighbour
from gvr_topk.arguments import BlocksArguments, DecodeArguments, InBlocksArguments, PrefillArguments
from gvr_topk.constants import (
    FLAG_CLAMP_PAGES,
    FLAG_DROP_MASKED,
    FLAG_PDL,
    FLAG_QUANTILE_GUESS,
    FLAG_STREAMS,
    STATE_FLOATS,
    STATE_MASKED,
    STATE_UNKNOWN,
    HintReason,
    StatsColumn,
)
from gvr_topk.contract import exact_topk
from gvr_topk.evaluation.oracle import sorted_topk
from gvr_topk.ops import launch
from gvr_topk.policy import parse_path
from gvr_topk.state import TopkState

ELEMENTS = {"cuda": 1 << 22, "cpu": 1 << 15}
"""Scores of the largest case."""

PREFILL_SHARE = 0.3
"""Share of the cases that call the prefill op."""

BLOCKS_SHARE = 0.2
"""Share of the other cases that call the ops of blocks."""

SORTED_EVERY, SORTED_SCORES = 16, 1 << 20
"""On a GPU every such case of at most so many scores is compared with the sort in NumPy."""

REPORT_SECONDS = 60.0

LARGEST_SEED = 2**43 - 1
LARGEST_INDEX = 2**53
"""Numbers that torch's generator takes, which gets one of 64 bits made of both."""


OPS = ("decode", "prefill", "blocks")
"""Kinds of case; those of blocks call both ops of blocks."""


class Drawn:
    """How many of the cases of one op had which path, dtype and optional arguments."""

    def __init__(self) -> None:
        self.cases = 0
        self.paths: Counter[str] = Counter()
        self.dtypes: Counter[str] = Counter()
        self.arguments: Counter[str] = Counter()

    def add(self, case: Case | PrefillCase | BlocksCase) -> None:
        self.cases += 1
        self.paths[getattr(case, "path", "auto")] += 1
        self.dtypes[case.dtype] += 1
        self.arguments.update({name: int(is_given) for name, is_given in case.optional().items()})

    def as_json(self) -> dict[str, Any]:
        return {
            "cases": self.cases,
            "paths": dict(self.paths),
            "dtypes": dict(self.dtypes),
            "arguments": dict(self.arguments),
        }


class Mismatch(AssertionError):
    """The op broke its contract."""


def checks_by_sort(case: Case | PrefillCase | BlocksCase, device: str) -> bool:
    """Whether the sort in NumPy is the oracle of a case."""
    return device == "cpu" or (case.index % SORTED_EVERY == 0 and case.rows * case.width <= SORTED_SCORES)


def _oracle(case: Case | PrefillCase, device: str) -> Oracle:
    return on_cpu(sorted_topk) if checks_by_sort(case, device) else exact_topk


def check_case(
    case: Case, device: str, *, repeat: bool = True, beside: Neighbour | None = None
) -> Tensor | None:
    """Run one case and compare everything it writes.

    Parameters
    ----------
    case : Case
    device : str
    repeat : bool
        Call it a second time, with the state of the first.
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
    problem = make_problem(case, device, _oracle(case, device))
    before = None
    if problem.state is not None:
        indices = problem.state.indices
        before = TopkState.of(
            problem.state.words.clone(), None if indices is None else indices.clone(), case.k
        )
    stats = None
    for call in ("first call", "second call")[: 1 + repeat]:
        if beside is not None:
            beside.feed()
        arguments = _arguments(case, problem)
        launch(arguments)
        stats = arguments.stats
        results = {"result": (arguments.out, problem.wanted)}
        if arguments.slots is not None:
            results["slots"] = (arguments.slots, problem.wanted_slots(case))
        elif problem.page_table is not None:
            results["result"] = (arguments.out, problem.wanted_slots(case))
        _check_written(call, case.k, arguments, results, (problem.wanted >= 0).sum(dim=1))
        if problem.state is not None and before is not None:
            _check_state(call, case, problem, problem.state, before)
        if arguments.next_state is not None:
            _check_next_state(call, case, problem, arguments.next_state)
    return stats


def check_prefill_case(
    case: PrefillCase, device: str, *, repeat: bool = True, beside: Neighbour | None = None
) -> Tensor | None:
    """Run one case of the prefill op and compare everything it writes; as `check_case`."""
    problem = make_prefill_problem(case, device, _oracle(case, device))

    def poisoned(*shape: int) -> Tensor:
        return torch.full(shape, POISON, dtype=torch.int32, device=device)

    stats = None
    for call in ("first call", "second call")[: 1 + repeat]:
        if beside is not None:
            beside.feed()
        arguments = PrefillArguments(
            logits=problem.logits,
            row_starts=problem.row_starts,
            row_ends=problem.row_ends,
            out=poisoned(case.rows, case.k + GUARD_COLUMNS),
            k=case.k,
            row_request=problem.row_request,
            offsets=problem.offsets,
            counts=poisoned(case.rows) if case.counts else None,
            page_table=problem.page_table,
            slots=poisoned(case.rows, case.k + GUARD_COLUMNS) if case.cache_slots else None,
            stats=poisoned(case.rows, len(StatsColumn)) if case.stats else None,
            page_size=case.page_size,
            path=parse_path(case.path),
            flags=FLAG_PDL * case.pdl + FLAG_STREAMS * case.streams,
        )
        launch(arguments)
        stats = arguments.stats
        results = {"result": (arguments.out, problem.out)}
        if arguments.slots is not None and problem.slots is not None:
            results["slots"] = (arguments.slots, problem.slots)
        _check_written(call, case.k, arguments, results, problem.lengths.clamp(max=case.k))
    return stats


def check_blocks_case(
    case: BlocksCase, device: str, *, repeat: bool = True, beside: Neighbour | None = None
) -> None:
    """Run one case of the ops of blocks and compare everything they write; as `check_case`."""
    problem = make_blocks_problem(case, device, by_sort=checks_by_sort(case, device))

    def poisoned(columns: int) -> Tensor:
        shape = (case.rows, columns + GUARD_COLUMNS)
        return torch.full(shape, POISON, dtype=torch.int32, device=device)

    options = {
        "next_n": case.next_n,
        "flags": FLAG_PDL * case.pdl,
        "compress_ratio": case.compress_ratio,
    }
    for call in ("first call", "second call")[: 1 + repeat]:
        if beside is not None:
            beside.feed()
        out, blocks, in_given = poisoned(case.k), poisoned(case.block_k), poisoned(case.given_k)
        logits, seq_lens = problem.logits, problem.seq_lens
        launch(BlocksArguments(logits, seq_lens, out, blocks, case.k, case.block_k, **options))
        launch(InBlocksArguments(logits, seq_lens, problem.given, in_given, case.given_k, **options))
        for name, got, wanted in (
            ("result", out, problem.positions),
            ("blocks", blocks, problem.blocks),
            ("result in given blocks", in_given, problem.in_given),
        ):
            _same(f"{call}: {name}", got[:, : wanted.shape[1]], wanted)
            if not bool((got[:, wanted.shape[1] :] == POISON).all()):
                raise Mismatch(f"{call}: {name}: wrote past column {wanted.shape[1]}")


def _check_written(
    call: str,
    k: int,
    arguments: DecodeArguments | PrefillArguments,
    results: dict[str, tuple[Tensor, Tensor]],
    items: Tensor,
) -> None:
    """Results and their guard columns, how many items each row has, and the reasons of the statistics."""
    for name, (got, wanted) in results.items():
        _same(f"{call}: {name}", got[:, :k], wanted)
        if not bool((got[:, k:] == POISON).all()):
            raise Mismatch(f"{call}: {name}: wrote past column k")
    if arguments.counts is not None:
        _same(f"{call}: counts", arguments.counts, items.to(torch.int32))
    stats = arguments.stats
    if stats is not None and not set(stats[:, StatsColumn.REASON].tolist()) <= set(HintReason):
        raise Mismatch(f"{call}: stats: unknown reason in {stats[:, StatsColumn.REASON].tolist()}")


def _arguments(case: Case, problem: Problem) -> DecodeArguments:
    """The call, on poisoned outputs."""
    device = problem.logits.device

    def poisoned(*shape: int) -> Tensor:
        return torch.full(shape, POISON, dtype=torch.int32, device=device)

    state = problem.state
    next_state = None
    if case.next_state:  # a guard row before and behind
        next_state = torch.full((case.rows + 2, STATE_FLOATS), float(POISON), device=device)[1:-1]
    return DecodeArguments(
        logits=problem.logits,
        seq_lens=problem.seq_lens,
        out=poisoned(case.rows, case.k + GUARD_COLUMNS),
        row_slot=problem.row_slot,
        state=None if state is None else state.words,
        indices=None if state is None else state.indices,
        next_state=next_state,
        counts=poisoned(case.rows) if case.counts else None,
        page_table=problem.page_table,
        slots=poisoned(case.rows, case.k + GUARD_COLUMNS) if case.cache_slots else None,
        stats=poisoned(case.rows, len(StatsColumn)) if case.stats else None,
        phase_clocks=None,
        k=case.k,
        next_n=case.next_n,
        page_size=case.page_size,
        path=parse_path(case.path),
        max_ctas=case.max_ctas,
        flags=FLAG_QUANTILE_GUESS * case.quantile_guess
        + FLAG_PDL * case.pdl
        + FLAG_CLAMP_PAGES * case.clamp_pages
        + FLAG_DROP_MASKED * case.drop_masked,
        hint_offset=case.offset,
        ctas_per_row=case.ctas_per_row,
        compress_ratio=case.compress_ratio,
    )


def _check_state(call: str, case: Case, problem: Problem, state: TopkState, before: TopkState) -> None:
    """The last row of each request writes its slot, unless states go by row; nothing else is written."""
    writers = problem.written_slots(case)
    if state.indices is not None and before.indices is not None:
        wanted = before.indices.clone()
        for slot, row in writers.items():
            wanted[slot] = problem.wanted[row]
        _same(f"{call}: indices", state.indices, wanted)
    # As bits: what other slots hold may be any NaN.
    untouched = torch.ones(state.slots, dtype=torch.bool, device=state.words.device)
    untouched[list(writers)] = False
    kept, old = (words[untouched].view(torch.int32) for words in (state.words, before.words))
    _same(f"{call}: words of other slots", kept, old)
    # The paper's kernel leaves nothing where the state keeps no indices.
    if state.indices is None and case.path == "paper_gvr":
        return
    kinds, visible = state.words[:, 0].tolist(), problem.visible.tolist()
    for slot, row in writers.items():
        if visible[row] > case.k and not -math.inf < kinds[slot] <= STATE_MASKED:
            raise Mismatch(
                f"{call}: words: slot {slot}: wanted a number up to {STATE_MASKED} first, got {kinds[slot]}"
            )


def _check_next_state(call: str, case: Case, problem: Problem, left: Tensor) -> None:
    """Each row leaves what a next step may read; a row no longer than `k` leaves nothing."""
    base = left._base
    assert base is not None
    if not bool((base[[0, -1]] == POISON).all()):
        raise Mismatch(f"{call}: next_state: wrote before or behind the rows")
    for row, (kind, visible) in enumerate(zip(left[:, 0].tolist(), problem.visible.tolist(), strict=True)):
        if visible > case.k and not (kind != POISON and -math.inf < kind <= STATE_MASKED):
            raise Mismatch(
                f"{call}: next_state: row {row}: wanted a number up to {STATE_MASKED} first, got {kind}"
            )
        if visible <= case.k and kind != STATE_UNKNOWN:
            raise Mismatch(f"{call}: next_state: row {row}: wanted {STATE_UNKNOWN} first, got {kind}")


def _same(what: str, got: Tensor, wanted: Tensor) -> None:
    if torch.equal(got, wanted):
        return
    wrong = (got != wanted).nonzero()
    first = tuple(wrong[0].tolist())
    raise Mismatch(
        f"{what}: {len(wrong)} of {got.numel()} differ, first at {first}: "
        f"wanted {wanted[first].item()}, got {got[first].item()}"
    )


def calls_prefill(seed: int, index: int, share: float) -> bool:
    """Whether a case calls the prefill op: a number of its own, so that other cases stay what they are."""
    return bool(np.random.default_rng((seed, index, 1)).random() < share)


def calls_blocks(seed: int, index: int, share: float) -> bool:
    """Whether a case that does not call prefill calls the ops of blocks: a number of its own, too."""
    return bool(np.random.default_rng((seed, index, 2)).random() < share)


def run(
    device: str,
    seconds: float,
    seed: int,
    first: int = 0,
    paths: tuple[str, ...] = PATHS,
    most: int = 2**62,
    beside: Sequence[Neighbour] = (),
    prefill: float = PREFILL_SHARE,
    blocks: float = BLOCKS_SHARE,
) -> dict[str, Any]:
    """Fuzz until the time is over or a case fails; neighbours take turns, case by case.

    `prefill` is the share of the cases that call the prefill op, by those of the paths that it has, and
    `blocks` that of the others that call the ops of blocks, if ``auto`` is among the paths.

    Returns
    -------
    dict
        Summary: cases, rows, scores, how often each path was asked for and what became of the hints, the
        same of the prefill op alone, what was drawn for each op, and the failed case if any.
    """
    started = reported = time.monotonic()
    paths_asked: dict[bool, Counter[str]] = {False: Counter(), True: Counter()}  # by whether it is prefill
    reasons: dict[bool, Counter[str]] = {False: Counter(), True: Counter()}
    prefill_paths = tuple(path for path in paths if path in fuzz_prefill.PATHS)
    drawn = {op: Drawn() for op in OPS}
    rows = scores = of_blocks = by_sort = 0
    failure: dict[str, Any] | None = None
    index = first
    while time.monotonic() - started < seconds and index - first < most:
        neighbour = beside[index % len(beside)] if beside else Neighbour("none")
        is_prefill = bool(prefill_paths) and calls_prefill(seed, index, prefill)
        case: Case | PrefillCase | BlocksCase
        if is_prefill:
            case = draw_prefill_case(seed, index, elements=ELEMENTS[device], paths=prefill_paths)
        elif "auto" in paths and calls_blocks(seed, index, blocks):
            case = draw_blocks_case(seed, index, elements=ELEMENTS[device])
        else:
            case = draw_case(seed, index, elements=ELEMENTS[device], paths=paths)
        try:
            with neighbour:
                if isinstance(case, PrefillCase):
                    stats = check_prefill_case(case, device, beside=neighbour)
                elif isinstance(case, BlocksCase):
                    check_blocks_case(case, device, beside=neighbour)
                    stats = None
                else:
                    stats = check_case(case, device, beside=neighbour)
        except (Mismatch, RuntimeError, ValueError) as error:
            text = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            failure = {"case": case.as_json(), "error": text}
            break
        drawn[case.as_json()["op"]].add(case)
        if isinstance(case, BlocksCase):
            of_blocks += 1
        else:
            paths_asked[is_prefill][case.path] += 1
        if stats is not None:
            codes = stats[:, StatsColumn.REASON].tolist()
            reasons[is_prefill].update(HintReason(code).name.lower() for code in codes)
        by_sort += checks_by_sort(case, device)
        rows += case.rows
        scores += case.rows * case.width
        index += 1
        if time.monotonic() - reported > REPORT_SECONDS:
            reported = time.monotonic()
            print(f"{reported - started:5.0f}s {index - first} cases", flush=True)
    return {
        "format": "gvr_topk.fuzz/3",
        "device": device,
        "seed": seed,
        "first": first,
        "cases": index - first,
        "calls": 2 * (index - first),
        "checked_by_sort": by_sort,
        "rows": rows,
        "scores": scores,
        "seconds": time.monotonic() - started,
        "beside": [neighbour.name for neighbour in beside],
        "paths_asked_for": dict(paths_asked[False]),
        "reasons_of_rows_with_stats": dict(reasons[False]),
        "prefill": {
            "cases": paths_asked[True].total(),
            "paths_asked_for": dict(paths_asked[True]),
            "reasons_of_rows_with_stats": dict(reasons[True]),
        },
        "blocks": {"cases": of_blocks},
        "drawn": {op: counts.as_json() for op, counts in drawn.items()},
        "failure": failure,
    }


def main(
    seconds: Annotated[float, typer.Option(help="Time to fuzz for.", min=0.001)] = 60.0,
    seed: Annotated[int, typer.Option(help="Seed of the cases.", min=0, max=LARGEST_SEED)] = 0,
    first: Annotated[int, typer.Option(help="Index of the first case.", min=0, max=LARGEST_INDEX)] = 0,
    only: Annotated[int | None, typer.Option(help="Run this case alone.", min=0, max=LARGEST_INDEX)] = None,
    paths: Annotated[str, typer.Option(help="Paths to force, comma-separated.")] = ",".join(PATHS),
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    beside: Annotated[str, typer.Option(help="Neighbours on another stream, comma-separated, or all.")] = "",
    prefill: Annotated[float, typer.Option(help="Share of the cases that call prefill.")] = PREFILL_SHARE,
    blocks: Annotated[
        float, typer.Option(help="Share of the other cases that call the ops of blocks.")
    ] = BLOCKS_SHARE,
    out: Annotated[Path | None, typer.Option(help="Summary as JSON.")] = None,
    converged: Annotated[
        Path | None, typer.Option(help="File of tables of collectives to add this run's to.")
    ] = None,
    commit: Annotated[str, typer.Option(help="Commit of the sources, where Git cannot say.")] = "",
) -> None:
    """Fuzz the ops."""
    require_device(device)
    require_writable(out)
    require_writable(converged, "--converged")
    wanted = tuple(path for path in paths.split(",") if path)
    if not wanted or not set(wanted) <= set(PATHS):
        raise typer.BadParameter(f"--paths: wanted some of {','.join(PATHS)}, got {paths!r}")
    if not 0.0 <= prefill <= 1.0:
        raise typer.BadParameter(f"--prefill: wanted 0 to 1, got {prefill}")
    if not 0.0 <= blocks <= 1.0:
        raise typer.BadParameter(f"--blocks: wanted 0 to 1, got {blocks}")
    names = NEIGHBOURS[1:] if beside == "all" else tuple(name for name in beside.split(",") if name)
    try:
        # The second instance of the op has wide rows, whose clusters are large.
        neighbours = [make_neighbour(name, device, CONFIGURATIONS[3]) for name in names]
    except (ValueError, StressError) as error:
        raise typer.BadParameter(f"--beside: {error}") from None
    summary = run(
        device,
        seconds,
        seed,
        first if only is None else only,
        wanted,
        2**62 if only is None else 1,
        neighbours,
        prefill,
        blocks,
    )
    summary["machine"] = describe_machine(commit)
    explained = collectives.record(summary, converged)
    if out is not None:
        write_json(out, summary)
    print(
        f"{summary['cases']} cases, of which NumPy checked {summary['checked_by_sort']}, "
        f"{summary['calls']} calls, {summary['rows']} rows, {summary['scores']:.3g} scores without mismatch "
        f"in {summary['seconds']:.0f} s on {device}, seed {seed}"
    )
    print(f"paths asked for {summary['paths_asked_for']}, hints {summary['reasons_of_rows_with_stats']}")
    part = summary["prefill"]
    print(
        f"of these, prefill: {part['cases']} cases, paths asked for {part['paths_asked_for']}, "
        f"predictions {part['reasons_of_rows_with_stats']}"
    )
    print(f"and of blocks: {summary['blocks']['cases']} cases")
    if summary["failure"] is not None:
        case = summary["failure"]["case"]
        # A call that fails is a finding too, but no wrong result.
        problem = summary["failure"]["error"]
        verdict = "MISMATCH" if problem.startswith("Mismatch:") else "FAILED"
        print(f"{verdict} {problem}\n  {case}")
        again = f"python -m eval fuzz --device {device} --seed {seed} --only {case['index']}"
        again += f" --paths {','.join(wanted)} --prefill {prefill} --blocks {blocks}"
        print(f"again: {again}" + (f" --beside {beside}" if beside else ""))
    if summary["failure"] is not None or not explained:
        raise typer.Exit(1)
