"""What every GPU test compares with: the contract's oracle, run after the kernel, on poisoned memory."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from contents import integers
from torch import Tensor

from gvr_topk.arguments import DecodeArguments, PrefillArguments
from gvr_topk.carry import PrefillCarry
from gvr_topk.constants import (
    FLAG_DROP_MASKED,
    FLAG_PDL,
    FLAG_QUANTILE_GUESS,
    FLAG_STREAMS,
    MAX_WIDTH,
    STATE_FLOATS,
    STATE_UNKNOWN,
    Path,
    StatsColumn,
)
from gvr_topk.contract import drop_masked, exact_topk, order_key, row_lengths
from gvr_topk.ops import indexer_topk_decode, indexer_topk_prefill, launch
from gvr_topk.policy import Plan, parse_path, plan
from gvr_topk.state import TopkState

POISON = -7777
PATHS = tuple(path.name.lower() for path in Path)
ANY_K = tuple(path for path in PATHS if path != "paper_gvr")
"""Paths that take any k, and rows of any length."""


def place(rows: Tensor, *, pad: int = 0, shift: int = 0, around: float = float("nan")) -> Tensor:
    """Copy rows into a buffer full of `around`: `pad` columns behind each, `shift` elements off alignment."""
    count, width = rows.shape
    buffer = torch.full((count * (width + pad) + shift + 8,), around, dtype=rows.dtype, device="cuda")
    view = buffer[shift : shift + count * (width + pad)].view(count, width + pad)
    view[:, :width] = rows.to("cuda")
    return view[:, :width]


def run(logits: Tensor, lengths: Tensor, k: int, **arguments: Any) -> Tensor:
    """Call the op on a poisoned output with guard columns, and check that the guards survive."""
    out = poisoned(logits.shape[0], k + 3)
    indexer_topk_decode(logits, lengths, k, out=out, **arguments)
    assert bool((out[:, k:] == POISON).all()), "wrote past column k"
    return out[:, :k]


def call(
    logits: Tensor,
    lengths: Tensor,
    out: Tensor,
    *,
    k: int | None = None,
    state: TopkState | None = None,
    path: str = "auto",
    quantile: bool = True,
    pdl: bool = False,
    drop: bool = False,
    **others: Any,
) -> DecodeArguments:
    """The arguments of a call as the op's users give them, beside those that are for measurements only."""
    tensors = ("row_slot", "counts", "page_table", "slots", "stats")
    return DecodeArguments(
        logits=logits,
        seq_lens=lengths,
        out=out,
        state=None if state is None else state.words,
        indices=None if state is None else state.indices,
        k=out.shape[1] if k is None else k,
        path=parse_path(path),
        flags=FLAG_QUANTILE_GUESS * quantile + FLAG_PDL * pdl + FLAG_DROP_MASKED * drop,
        **{**dict.fromkeys(tensors), **others},
    )


def run_forced(logits: Tensor, lengths: Tensor, k: int, ctas: int, **arguments: Any) -> Tensor:
    """As `run`, with so many CTAs for each row; 0 follows the plan."""
    out = poisoned(logits.shape[0], k + 3)
    launch(call(logits, lengths, out, k=k, ctas_per_row=ctas, **arguments))
    assert bool((out[:, k:] == POISON).all()), "wrote past column k"
    return out[:, :k]


def visible_lengths(logits: Tensor, lengths: Tensor, next_n: int = 1) -> Tensor:
    """Length of every row, from lengths by request or by row, at most the width."""
    rows, width = logits.shape
    return row_lengths(lengths, rows, 1 if len(lengths) == rows else next_n).clamp(max=width)


def wrong_rows(got: Tensor, logits: Tensor, lengths: Tensor, k: int, next_n: int = 1) -> list[int]:
    """Rows whose result is not bit for bit the contract's."""
    wanted = exact_topk(logits, visible_lengths(logits, lengths, next_n), k)
    return torch.nonzero((got != wanted).any(dim=1)).flatten().tolist()


def wrong_dropped_rows(got: Tensor, logits: Tensor, lengths: Tensor, k: int, next_n: int = 1) -> list[int]:
    """As `wrong_rows`, of a call that drops masked columns."""
    wanted = drop_masked(logits, exact_topk(logits, visible_lengths(logits, lengths, next_n), k))
    return torch.nonzero((got != wanted).any(dim=1)).flatten().tolist()


def exact(
    logits: Tensor,
    lengths: Tensor,
    k: int,
    *,
    ctas: int | None = None,
    names: list[str] | None = None,
    said: object = "",
    **arguments: Any,
) -> Tensor:
    """Call the op, with so many CTAs for each row if they are given, and compare with the contract.

    A failure lists the rows that are wrong, by their `names` if they have some, and shows what is `said`.
    """
    if ctas is None:
        got = run(logits, lengths, k, **arguments)
    else:
        got = run_forced(logits, lengths, k, ctas, **arguments)
    wrong = wrong_rows(got, logits, lengths, k, arguments.get("next_n", 1))
    assert [row if names is None else names[row % len(names)] for row in wrong] == [], said
    return got


def words(
    slots: int,
    first: float | Tensor = STATE_UNKNOWN,
    *,
    value: float | Tensor = 0.0,
    limit: float = 0.0,
    spreads: float = 0.0,
) -> Tensor:
    """Words of a state whose slots hold these numbers; the first says of what kind the others are."""
    made = torch.empty(slots, STATE_FLOATS, device="cuda")
    for column, number in enumerate((first, value, limit, spreads)):
        made[:, column] = number
    return made


def new_state(slots: int, k: int, *, keep_indices: bool = False) -> TopkState:
    """A state in which no step has left anything."""
    return TopkState(slots, k, "cuda", keep_indices=keep_indices)


def clone(state: TopkState) -> TopkState:
    """A state with the same content."""
    indices = None if state.indices is None else state.indices.clone()
    return TopkState.of(state.words.clone(), indices, state.k)


def new_stats(rows: int) -> Tensor:
    """Room for statistics."""
    return torch.full((rows, len(StatsColumn)), POISON, dtype=torch.int32, device="cuda")


def columns(stats: Tensor) -> dict[StatsColumn, list[int]]:
    """Statistics of all rows by column."""
    return {column: stats[:, column].tolist() for column in StatsColumn}


def plan_here(rows: int, width: int, k: int, dtype: torch.dtype = torch.float32, ctas: int = 0) -> Plan:
    """The plan of a launch on this GPU, all of whose multiprocessors are free."""
    device = torch.cuda.get_device_properties(0)
    arch = 10 * device.major + device.minor
    sizes = {"sm_count": device.multi_processor_count, "ctas_per_row": ctas}
    return plan(rows=rows, width=width, k=k, dtype=dtype, arch=arch, **sizes)


def poisoned(*shape: int) -> Tensor:
    """Integers that no call leaves."""
    return torch.full(shape, POISON, dtype=torch.int32, device="cuda")


def full_lengths(logits: Tensor) -> Tensor:
    """Every row visible to its end."""
    return torch.full((logits.shape[0],), logits.shape[1], dtype=torch.int32, device="cuda")


# ---------------------------------------------------------------- prefill

GUARD_WORDS = 16
CARRY_GUARD = 0x5A5A5A5A5A5A5A5A
SORTED_AT_ONCE = 1 << 24
"""Elements that the oracle of windows sorts in one go."""


def guarded(rows: int, columns: int, gap: int = 3) -> tuple[Tensor, Tensor]:
    """A poisoned buffer, and `rows` of `columns` within it, with guard words around and between them."""
    pitch = columns + gap
    buffer = poisoned(rows * pitch + 2 * GUARD_WORDS)
    inner = buffer[GUARD_WORDS : GUARD_WORDS + rows * pitch].view(rows, pitch)[:, :columns]
    return buffer, inner


def check_guards(name: str, buffer: Tensor, inner: Tensor) -> None:
    """Every word of the buffer that lies outside of its rows is as it was."""
    copy = buffer.clone()
    offset = inner.storage_offset() - buffer.storage_offset()
    copy.as_strided(inner.shape, inner.stride(), offset).fill_(POISON)
    assert bool((copy == POISON).all()), f"{name}: a guard word was overwritten"


class Written(NamedTuple):
    """What one call of the prefill op has written."""

    out: Tensor
    counts: Tensor
    slots: Tensor | None
    stats: Tensor | None


def run_prefill(
    logits: Tensor,
    starts: Tensor,
    ends: Tensor,
    k: int,
    *,
    slots: bool = False,
    stats: bool = False,
    streams: bool = False,
    path: str = "auto",
    **arguments: Any,
) -> Written:
    """Call the op on poisoned outputs, and check the guard words around all of them.

    `streams` asks for the kernel of long rows, whatever their length.
    """
    rows = len(logits)
    outputs = {"out": guarded(rows, k), "counts": guarded(1, rows)}
    if slots:
        outputs["slots"] = guarded(rows, k, gap=1)
    if stats:
        outputs["stats"] = guarded(rows, len(StatsColumn), gap=0)
    given = {name: inner for name, (_, inner) in outputs.items()}
    given["counts"] = given["counts"][0]
    given |= arguments
    if streams:
        given |= {"flags": FLAG_STREAMS, "path": int(parse_path(path))}
        launch(PrefillArguments(logits, starts, ends, k=k, **given))
    else:
        assert indexer_topk_prefill(logits, starts, ends, k, path=path, **given) is given["out"]
    for name, (buffer, inner) in outputs.items():
        check_guards(name, buffer, inner)
    return Written(given["out"], given["counts"], given.get("slots"), given.get("stats"))


def guarded_carry(rows: int, k: int) -> tuple[Tensor, PrefillCarry]:
    """A carry between guard words, and the buffer that it lies in."""
    size = rows * (k + 1)
    buffer = torch.full((size + 32,), CARRY_GUARD, dtype=torch.int64, device="cuda")
    carry = PrefillCarry(1, k, "cuda")
    carry.words = buffer[16:-16].view(rows, k + 1)
    carry.reset()
    return buffer, carry


def check_carry(buffer: Tensor) -> None:
    """The guard words around a carry are as they were."""
    assert bool((buffer[:16] == CARRY_GUARD).all()) and bool((buffer[-16:] == CARRY_GUARD).all())


def run_slices(
    logits: Tensor,
    starts: Tensor,
    ends: Tensor,
    k: int,
    bounds: Sequence[int],
    *,
    carry: PrefillCarry | None = None,
    slots: bool = False,
    **options: Any,
) -> list[Tensor]:
    """Select slice by slice, with guard words around all that is written: positions, counts, cache slots."""
    rows = len(logits)
    buffer, own = guarded_carry(rows, k)
    carry = carry or own
    outputs = {"out": guarded(rows, k), "counts": guarded(1, rows)}
    if slots:
        outputs["slots"] = guarded(rows, k, gap=1)
    written = {name: inner for name, (_, inner) in outputs.items()}
    written["counts"] = written["counts"][0]
    for begin, end in itertools.pairwise(bounds):
        last = end == bounds[-1]
        given = {**written, **options} if last else {}
        part = logits[:, begin:end]
        indexer_topk_prefill(part, starts, ends, k, carry=carry, column=begin, **given)
        if last:
            break
        for _, inner in outputs.values():
            assert bool((inner == POISON).all()), "a call without out wrote a result"
    for name, (whole, inner) in outputs.items():
        check_guards(name, whole, inner)
    check_carry(buffer)
    assert bool((carry.words[:rows, 0] == 0).all())
    return list(written.values())


def cuts(width: int, pieces: int, seed: int) -> list[int]:
    """Bounds of slices of any width."""
    return [0, *sorted(integers(0, width + 1, pieces - 1, seed).tolist()), width]


def sorted_windows(logits: Tensor, starts: Tensor, ends: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Positions that a stable sort of each window's keys gives, and how many there are of each row."""
    rows, width = logits.shape
    first = starts.to(torch.int64).clamp(min=0)
    length = (ends.to(torch.int64).clamp(max=width) - first).clamp(min=0)
    result = torch.full((rows, k), -1, dtype=torch.int32, device=logits.device)
    # Longest first: the rows that are sorted in one go are about equally long.
    order = length.argsort(descending=True)
    longest = length[order].tolist()
    at = 0
    while at < rows and longest[at] > 0:
        n = longest[at]
        some = order[at : at + max(1, SORTED_AT_ONCE // n)]
        at += len(some)
        position = torch.arange(n, device=logits.device)
        columns = (first[some, None] + position).clamp(max=width - 1)
        keys = order_key(logits[some[:, None], columns])
        keys = torch.where(position < length[some, None], keys, -1)
        chosen = keys.sort(dim=1, descending=True, stable=True).indices[:, :k]
        chosen = torch.where(position[: chosen.shape[1]] < length[some, None], chosen, MAX_WIDTH)
        chosen = chosen.sort(dim=1).values
        result[some, : chosen.shape[1]] = torch.where(chosen < MAX_WIDTH, chosen, -1).to(torch.int32)
    return result, length.clamp(max=k).to(torch.int32)


def wrong_windows(written: Written, logits: Tensor, starts: Tensor, ends: Tensor, k: int) -> list[int]:
    """Rows whose result or count is not bit for bit the contract's; of a call without offsets and pages."""
    wanted, counts = sorted_windows(logits, starts, ends, k)
    wrong = (written.out != wanted).any(dim=1) | (written.counts != counts)
    return torch.nonzero(wrong).flatten().tolist()
