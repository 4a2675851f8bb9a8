"""Calls that the ops refuse, and what they say: one list for the CPU, for traces and for the compiled checks.

A row changes arguments of a call that is valid otherwise. Tests run all rows on a CPU (test_arguments.py),
through the compiled checks (test_compiled_checks.py) and on a GPU (tests/gpu/test_errors.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gvr_topk.arguments import (
    BLOCKS,
    DECODE,
    IN_BLOCKS,
    PREFILL,
    TOPK,
    BlocksArguments,
    Checks,
    DecodeArguments,
    InBlocksArguments,
    PrefillArguments,
    PrefillSliceArguments,
    TopkItemsArguments,
)
from gvr_topk.constants import (
    BLOCK_SIZE,
    FLAG_CLAMP_PAGES,
    FLAG_DROP_MASKED,
    FLAG_PDL,
    FLAG_QUANTILE_GUESS,
    FLAG_STREAMS,
    MAX_CHOSEN_BLOCKS,
    MAX_ELEMENTS_PER_CTA,
    MAX_NEXT_N,
    MAX_PAGE_SIZE,
    MAX_ROWS,
    MAX_TIMEOUT_NS,
    MAX_WIDTH,
    PAPER_MAX_WIDTH,
    PEER_CTAS,
    STATE_FLOATS,
    StatsColumn,
)
from gvr_topk.distributed.peers import SHARDED, ShardedArguments
from gvr_topk.sampling.arguments import (
    APPLY_LIMITS,
    RENORM,
    TOPK_LOGPROBS,
    VERIFY,
    ApplyLimitsArguments,
    RenormArguments,
    TopkLogprobsArguments,
    VerifyArguments,
)
from gvr_topk.sampling.arithmetic import MAX_VOCABULARY


def zeros(device: str, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.zeros(*shape, dtype=dtype, device=device)


def floats(device: str, *shape: int) -> Tensor:
    return zeros(device, *shape, dtype=torch.float32)


class Zeros(NamedTuple):
    """A tensor of zeros that is made on the device of a call; strides and offset count elements."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None  # None for those of a contiguous tensor
    offset: int = 0  # where it begins in its memory
    memory: str = ""  # tensors of one call that name the same share it; without a name it has its own

    def make(self, device: str, memories: dict[str, Tensor]) -> Tensor:
        strides = self.strides or torch.empty(self.shape, device="meta").stride()
        size = self.offset + 1 + sum((n - 1) * stride for n, stride in zip(self.shape, strides, strict=True))
        memory = zeros(device, max(size, 1), dtype=self.dtype)
        if self.memory:
            memory = memories.setdefault(self.memory, zeros(device, 128, dtype=torch.int64)).view(self.dtype)
        return memory.as_strided(self.shape, strides, self.offset)


def of_dtype(dtype: torch.dtype) -> Callable[..., Zeros]:
    return lambda *shape, **layout: Zeros(dtype, shape, **layout)


f32, f64, i32, i64 = map(of_dtype, (torch.float32, torch.float64, torch.int32, torch.int64))

Changes = dict[str, Any]
"""Arguments by their names, tensors as `Zeros`."""

Row = tuple[str, Any]
"""A message, and `Changes`, or the value of the one argument that the message begins with."""


def made(changes: Changes, device: str) -> dict[str, Any]:
    """Make the tensors among `changes`."""
    memories: dict[str, Tensor] = {}
    return {
        name: value.make(device, memories) if isinstance(value, Zeros) else value
        for name, value in changes.items()
    }


def each(name: str, wanted: str, *values: int) -> list[Row]:
    """A row for each wrong value of a number."""
    return [(f"{name}: wanted {wanted}, got {value}", value) for value in values]


def shared(name: str, other: str, place: Zeros, other_place: Zeros, **beside: Any) -> Row:
    """Two arguments in one memory, of which the first one is written."""
    changes = {
        key.removeprefix("state."): value._replace(memory="shared")
        for key, value in ((name, place), (other, other_place))
    }
    return f"{name}: wanted memory of its own, got memory shared with {other}", {**beside, **changes}


def too_wide(most: int, more: int = 1, why: str = "", **changes: Any) -> Row:
    """Two rows of that many columns more than a call may have."""
    wide = f32(2, most + more, strides=(0, 1))
    return f"logits: wanted at most {most} columns{why}, got {most + more}", {"logits": wide, **changes}


APART = "rows that do not overlap, at least"
ADDRESS = "wanted an address that is a multiple of 16, got one that is not"
STATE: Changes = {"state": f32(2, STATE_FLOATS), "indices": i32(2, 8)}
PAPER: Changes = {"path": 1, "k": 512, "out": i32(2, 512)}
PAGES: Changes = {"page_table": i32(2, 4), "page_size": 16}

LOGITS: list[Row] = [
    ("logits: wanted dtype float32, bfloat16 or float16, got float64", f64(2, 64)),
    ("logits: wanted shape [rows, width], got [64]", f32(64)),
    ("logits: wanted inner stride 1, got 2", f32(2, 64, strides=(128, 2))),
]
SCORE_ROWS: list[Row] = [
    *LOGITS,
    too_wide(MAX_WIDTH),
    (f"logits: wanted at most {MAX_ROWS} rows, got {MAX_ROWS + 1}", f32(MAX_ROWS + 1, 1, strides=(0, 1))),
]
SCORES: list[Row] = [*SCORE_ROWS, *each("k", f"1 to {MAX_WIDTH}", 0, MAX_WIDTH + 1)]
REQUESTS: list[Row] = [
    *each("next_n", f"1 to {MAX_NEXT_N}", 0, MAX_NEXT_N + 1),
    ("logits: wanted a multiple of next_n = 3 rows, got 2", {"next_n": 3}),
    ("seq_lens: wanted dtype int32, got int64", i64(2)),
    ("seq_lens: wanted 2 elements, got [3]", i32(3)),
    ("seq_lens: wanted shape [any], got [2, 1]", i32(2, 1)),
    ("seq_lens: wanted inner stride 1, got 2", i32(2, strides=(2,))),
    ("seq_lens: wanted 1 or 2 elements, got [3]", {"seq_lens": i32(3), "next_n": 2}),
    (f"compress_ratio: wanted 1 to {MAX_WIDTH}, got 0", 0),
]
OUT_OF_8: list[Row] = [
    ("out: wanted dtype int32, got float32", f32(2, 8)),
    ("out: wanted shape [2, any], got [3, 8]", i32(3, 8)),
    ("out: wanted at least k = 8 columns, got [2, 7]", i32(2, 7)),
    (f"out: wanted {APART} 8 elements apart, got 0", i32(2, 8, strides=(0, 1))),
    (f"out: wanted {APART} 8 elements apart, got 7", i32(2, 8, strides=(7, 1))),
    ("counts: wanted shape [2], got [3]", i32(3)),
    ("counts: wanted dtype int32, got int64", i64(2)),
    (f"stats: wanted shape [2, {len(StatsColumn)}], got [2, 7]", i32(2, 7)),
    ("stats: wanted contiguous rows, got strides (0, 1)", i32(2, 8, strides=(0, 1))),
]
SLOTS_OF_8: list[Row] = [
    ("slots: wanted at least k = 8 columns, got [2, 7]", {**PAGES, "slots": i32(2, 7)}),
    (f"slots: wanted {APART} 8 elements apart, got 7", {**PAGES, "slots": i32(2, 8, strides=(7, 1))}),
    *(
        (message, {"page_table": i32(2, 4), "page_size": size})
        for message, size in each(
            "page_size", f"1 to {MAX_PAGE_SIZE} with a page_table", 0, MAX_PAGE_SIZE + 1
        )
    ),
]
CTAS = "0, 1, 2, 4, 8 or 16"


def arguments(device: str, changes: dict[str, Any]) -> DecodeArguments:
    """One valid call, some of its arguments replaced: two rows of 64 scores, k = 8."""
    lengths = torch.full((2,), 64, dtype=torch.int32, device=device)
    return DecodeArguments(floats(device, 2, 64), lengths, zeros(device, 2, 8), 8)._replace(**changes)


WRONG: list[Row] = [
    *SCORES,
    *REQUESTS,
    *OUT_OF_8,
    *SLOTS_OF_8,
    ("row_slot: wanted a state beside it, got None", i32(2)),
    ("row_slot: wanted shape [2], got [3]", {**STATE, "row_slot": i32(3)}),
    ("row_slot: wanted dtype int32, got int64", {**STATE, "row_slot": i64(2)}),
    ("indices: wanted a state beside them, got None", i32(2, 8)),
    ("state: wanted dtype float32, got int32", {**STATE, "state": i32(2, STATE_FLOATS)}),
    ("state: wanted shape [any, 4], got [2, 3]", {**STATE, "state": f32(2, 3)}),
    ("state: wanted shape [any, 4], got [2]", {**STATE, "state": f32(2)}),
    ("state: wanted contiguous rows, got strides (8, 1)", {**STATE, "state": f32(2, 4, strides=(8, 1))}),
    ("state: wanted inner stride 1, got 2", {**STATE, "state": f32(2, 4, strides=(1, 2))}),
    ("state: wanted at least 2 slots without row_slot, got 1", f32(1, STATE_FLOATS)),
    (f"state: {ADDRESS}", f32(2, 4, offset=1)),
    ("state.indices: wanted shape [2, 8], got [3, 8]", {**STATE, "indices": i32(3, 8)}),
    ("state.indices: wanted shape [2, 8], got [2, 9]", {**STATE, "indices": i32(2, 9)}),
    ("state.indices: wanted dtype int32, got float32", {**STATE, "indices": f32(2, 8)}),
    (
        f"state.indices: wanted {APART} 8 elements apart, got 0",
        STATE | {"indices": i32(2, 8, strides=(0, 1))},
    ),
    ("counts: wanted inner stride 1, got 2", i32(2, strides=(2,))),
    ("slots: wanted a page_table beside it, got None", i32(2, 8)),
    ("slots: wanted dtype int32, got float32", {**PAGES, "slots": f32(2, 8)}),
    ("clamp_pages: wanted a page_table beside it, got None", {"flags": FLAG_CLAMP_PAGES}),
    ("page_table: wanted shape [2, any], got [3, 4]", {**PAGES, "page_table": i32(3, 4)}),
    *(("page_size: wanted a page_table beside it, got None", size) for size in (16, -5)),
    (f"next_state: wanted shape [2, {STATE_FLOATS}], got [2, 3]", f32(2, 3)),
    ("next_state: wanted contiguous rows, got strides (8, 1)", f32(2, 4, strides=(8, 1))),
    (f"next_state: {ADDRESS}", f32(2, 4, offset=1)),
    (f"hint_offset: wanted -{MAX_WIDTH} to {MAX_WIDTH}, got {MAX_WIDTH + 1}", MAX_WIDTH + 1),
    *each("max_ctas", CTAS, 3, -1, 2**32 + 1),
    ("ctas_per_row: wanted at most max_ctas = 4, got 8", {"max_ctas": 4, "ctas_per_row": 8}),
    *each("ctas_per_row", f"{CTAS} and enough for the width", 3, -1, 32, 2**32 + 4),
    (
        f"ctas_per_row: wanted {CTAS} and enough for the width, got 1",
        {"ctas_per_row": 1, "logits": f32(2, MAX_ELEMENTS_PER_CTA + 1, strides=(0, 1))},
    ),
    ("k: wanted 512, 1024 or 2048 for path 'paper_gvr', got 8", {"path": 1}),
    too_wide(PAPER_MAX_WIDTH, why=" for path 'paper_gvr'", **PAPER),
    *each("path", "0 to 3", 9, -1),
    *each("flags", "no bits outside of 15", FLAG_STREAMS, 2**40, -1 & ~FLAG_CLAMP_PAGES),
    shared("slots", "out", i32(2, 8), i32(2, 8), **PAGES),
    shared("slots", "out", i32(2, 8, strides=(16, 1), offset=7), i32(2, 8, strides=(16, 1)), **PAGES),
    # The last column of the first row of slots lies in the second row of out.
    shared("slots", "out", i32(2, 8, strides=(15, 1), offset=9), i32(2, 8, strides=(15, 1)), **PAGES),
    shared("out", "logits", i32(2, 8, strides=(64, 1), offset=8), f32(2, 64)),
    shared("counts", "seq_lens", i32(2), i32(2)),
    shared("counts", "row_slot", i32(2), i32(2), **STATE),
    shared("counts", "out", i32(2, offset=11), i32(2, 8)),
    shared("slots", "page_table", i32(2, 8), i32(2, 8), page_size=16),
    shared("state.indices", "out", i32(2, 8), i32(2, 8), state=f32(2, STATE_FLOATS)),
    shared("state", "out", f32(4, 4), i32(2, 8)),
    shared("next_state", "state", f32(2, STATE_FLOATS), f32(2, STATE_FLOATS)),
    shared("next_state", "state", f32(2, STATE_FLOATS, offset=STATE_FLOATS), f32(2, STATE_FLOATS)),
]
"""What every implementation says of a call of the decode op, and what is wrong with it."""


def prefill_arguments(device: str, changes: dict[str, Any]) -> PrefillArguments:
    """One valid call of the prefill op with every table: two rows of 64 scores, three requests, k = 8."""
    valid = PrefillArguments(
        logits=floats(device, 2, 64),
        row_starts=zeros(device, 2),
        row_ends=torch.full((2,), 64, dtype=torch.int32, device=device),
        out=zeros(device, 2, 8),
        k=8,
        row_request=zeros(device, 2),
        offsets=zeros(device, 3),
        counts=zeros(device, 2),
        page_table=zeros(device, 3, 4),
        slots=zeros(device, 2, 8),
        stats=zeros(device, 2, len(StatsColumn)),
        page_size=16,
    )
    return valid._replace(**changes)


NO_TABLES: Changes = {**dict.fromkeys(("page_table", "slots", "offsets", "row_request")), "page_size": 0}

WRONG_SLICE_TOO: list[Row] = [
    *SCORES,
    *OUT_OF_8[:-2],
    ("row_starts: wanted shape [2], got [3]", i32(3)),
    ("row_starts: wanted shape [2], got [2, 1]", i32(2, 1)),
    ("row_starts: wanted dtype int32, got int64", i64(2)),
    ("row_starts: wanted inner stride 1, got 2", i32(2, strides=(2,))),
    ("row_ends: wanted shape [2], got [1]", i32(1)),
    ("row_ends: wanted dtype int32, got float32", f32(2)),
    ("row_ends: wanted inner stride 1, got 2", i32(2, strides=(2,))),
    ("row_request: wanted a page_table or offsets beside it, got None", NO_TABLES | {"row_request": i32(2)}),
    ("row_request: wanted shape [2], got [3]", i32(3)),
    ("row_request: wanted dtype int32, got int64", i64(2)),
    ("slots: wanted a page_table beside it, got None", {"page_table": None}),
    *((message, {**changes, "page_table": i32(3, 4)}) for message, changes in SLOTS_OF_8),
    ("page_table: wanted shape [2, any], got [3, 4]", {"row_request": None}),
    ("page_table: wanted dtype int32, got int64", i64(3, 4)),
    ("page_table: wanted shape [any, any], got [3]", i32(3)),
    ("offsets: wanted slots beside page_table, so that out keeps positions, got None", {"slots": None}),
    ("offsets: wanted shape [3], got [2]", i32(2)),
    ("offsets: wanted shape [2], got [3]", {**NO_TABLES, "offsets": i32(3)}),
    ("offsets: wanted shape [any], got [3, 1]", NO_TABLES | {"row_request": i32(2), "offsets": i32(3, 1)}),
    ("offsets: wanted dtype int32, got int64", i64(3)),
    ("page_size: wanted a page_table beside it, got None", {**NO_TABLES, "page_size": 16}),
    shared("slots", "out", i32(2, 8), i32(2, 8)),
    shared("out", "logits", i32(2, 64), f32(2, 64)),
    *(shared("counts", name, i32(2), i32(2)) for name in ("row_starts", "row_ends", "row_request")),
    shared("counts", "offsets", i32(2, offset=1), i32(3)),
    shared("out", "page_table", i32(2, 8), i32(3, 8)),
]
WRONG_PREFILL: list[Row] = [
    *WRONG_SLICE_TOO,
    *OUT_OF_8[-2:],
    *each("path", "0 or 3", 2, 9),
    *each("flags", "no bits outside of 17", FLAG_QUANTILE_GUESS, FLAG_CLAMP_PAGES, 2**40),
    shared("stats", "slots", i32(2, 8), i32(2, 8)),
]
"""The same of the prefill op."""


COLUMN = 64
"""First column of the slice of a valid call."""


def slice_arguments(device: str, changes: dict[str, Any]) -> PrefillSliceArguments:
    """One valid call of the prefill op on a slice: as above, and a carry of three rows."""
    given = prefill_arguments(device, {})._asdict()
    shared_ones = {name: given[name] for name in PrefillSliceArguments._fields if name in given}
    carry = zeros(device, 3, 9, dtype=torch.int64)
    return PrefillSliceArguments(**shared_ones, carry=carry, column=COLUMN)._replace(**changes)


LAST_COLUMN = MAX_WIDTH - 64
NO_OUT: Changes = {**NO_TABLES, "out": None, "counts": None}

WRONG_PREFILL_SLICE: list[Row] = [
    *WRONG_SLICE_TOO,
    *(
        (f"{name}: wanted an out beside it, got None", NO_OUT | {name: i32(2)})
        for name in ("counts", "offsets")
    ),
    ("page_table: wanted an out beside it, got None", NO_OUT | PAGES),
    ("carry: wanted shape [any, 9], got [3, 8]", i64(3, 8)),
    ("carry: wanted shape [any, 9], got [3, 9, 1]", i64(3, 9, 1)),
    ("carry: wanted dtype int64, got int32", i32(3, 9)),
    ("carry: wanted at least 2 rows, got 1", i64(1, 9)),
    ("carry: wanted contiguous rows, got strides (10, 1)", i64(3, 9, strides=(10, 1))),
    *each("column", f"0 to {LAST_COLUMN} for 64 columns", -1, LAST_COLUMN + 1),
    (f"flags: wanted no bits outside of 1, got {FLAG_STREAMS}", FLAG_STREAMS),
    shared("carry", "logits", i64(3, 9), f32(2, 18)),
    shared("out", "carry", i32(2, 18, offset=18), i64(3, 9)),
]
"""The same of the prefill op on slices."""


def blocks_arguments(device: str, changes: dict[str, Any]) -> BlocksArguments:
    """One valid call of the op that chooses blocks: two rows of 64 scores, k = 3 and four blocks."""
    lengths = torch.full((2,), 64, dtype=torch.int32, device=device)
    valid = BlocksArguments(floats(device, 2, 64), lengths, zeros(device, 2, 3), zeros(device, 2, 4), 3, 4)
    return valid._replace(**changes)


def in_blocks_arguments(device: str, changes: dict[str, Any]) -> InBlocksArguments:
    """One valid call of the op that selects in blocks: two rows of 64 scores, four blocks, k = 3."""
    lengths = torch.full((2,), 64, dtype=torch.int32, device=device)
    valid = InBlocksArguments(floats(device, 2, 64), lengths, zeros(device, 2, 4), zeros(device, 2, 3), 3)
    return valid._replace(**changes)


def items_arguments(device: str, changes: dict[str, Any]) -> TopkItemsArguments:
    """One valid call of the op that selects items: three of each of two rows of 64 scores, sorted."""
    indices, candidates = (zeros(device, 2, n, dtype=torch.int64) for n in (3, 64))
    valid = TopkItemsArguments(floats(device, 2, 64), indices, floats(device, 2, 3), 1, 0, candidates)
    return valid._replace(**changes)


WRONG_ITEMS: list[Row] = [
    *SCORE_ROWS,
    ("indices: wanted shape [2, any], got [3, 3]", i64(3, 3)),
    ("indices: wanted dtype int64, got int32", i32(2, 3)),
    ("indices: wanted contiguous rows, got strides (0, 1)", i64(2, 3, strides=(0, 1))),
    ("values: wanted dtype float32, got int32", i32(2, 3)),
    ("values: wanted dtype bfloat16, got float32", {"logits": Zeros(torch.bfloat16, (2, 64))}),
    ("values: wanted shape [2, 3], got [2, 4]", f32(2, 4)),
    ("values: wanted contiguous rows, got strides (4, 1)", f32(2, 3, strides=(4, 1))),
    *each("sorted", "0 to 1", -1, 2),
    ("indices: wanted at most 64 columns, got 65", {"values": None, "indices": i64(2, 65)}),
    *each("largest", "0 to 1", -1, 2),
    ("candidates: wanted shape [2, 64], got [2, 3]", i64(2, 3)),
    ("candidates: wanted dtype int64, got int32", i32(2, 64)),
    ("candidates: wanted contiguous rows, got strides (0, 1)", i64(2, 64, strides=(0, 1))),
    shared("values", "logits", f32(2, 3), f32(2, 64)),
    shared("indices", "candidates", i64(2, 3), i64(2, 64)),
]
"""The same of the op that selects items."""


WRONG_BOTH_BLOCKS: list[Row] = [
    *REQUESTS,
    (f"block_size: wanted {BLOCK_SIZE}, got 4", 4),
    ("out: wanted shape [2, any], got [3, 3]", i32(3, 3)),
    ("out: wanted at least k = 3 columns, got [2, 2]", i32(2, 2)),
    (f"out: wanted {APART} 3 elements apart, got 2", i32(2, 3, strides=(2, 1))),
    ("blocks: wanted inner stride 1, got 2", i32(2, 4, strides=(1, 2))),
    ("blocks: wanted shape [2, any], got [3, 4]", i32(3, 4)),
    ("blocks: wanted dtype int32, got float32", f32(2, 4)),
    ("row_starts: wanted shape [2], got [1]", i32(1)),
    ("row_starts: wanted shape [2], got [2, 1]", i32(2, 1)),
    ("row_starts: wanted dtype int32, got int64", i64(2)),
    (f"flags: wanted no bits outside of {FLAG_PDL + FLAG_DROP_MASKED}, got 2", FLAG_QUANTILE_GUESS),
    shared("out", "logits", i32(2, 64), f32(2, 64)),
    shared("out", "row_starts", i32(2, 3), i32(2)),
]
WRONG_BLOCKS: list[Row] = [
    *SCORE_ROWS,
    *each("k", f"0 to {MAX_WIDTH}", -1, MAX_WIDTH + 1),
    *WRONG_BOTH_BLOCKS,
    *each("block_k", f"2 to {MAX_CHOSEN_BLOCKS}, more than k = 3", 3, MAX_CHOSEN_BLOCKS + 1),
    (
        f"block_k: wanted 2 to {MAX_CHOSEN_BLOCKS}, more than k = 0, got 1",
        {"block_k": 1, "k": 0, "out": i32(2, 0)},
    ),
    ("blocks: wanted at least block_k = 5 columns, got [2, 4]", {"block_k": 5}),
    (f"blocks: wanted {APART} 4 elements apart, got 0", i32(2, 4, strides=(0, 1))),
    shared("blocks", "out", i32(2, 4), i32(2, 4)),
    shared("blocks", "seq_lens", i32(2, 4), i32(2)),
]
"""The same of the op that chooses blocks."""

WRONG_IN_BLOCKS: list[Row] = [
    *SCORES,
    *WRONG_BOTH_BLOCKS,
    (
        f"blocks: wanted at most {MAX_CHOSEN_BLOCKS} columns, got {MAX_CHOSEN_BLOCKS + 1}",
        i32(2, MAX_CHOSEN_BLOCKS + 1, strides=(0, 1)),
    ),
    shared("out", "blocks", i32(2, 4), i32(2, 4)),
]
"""The same of the op that selects in blocks."""


def together(**tensors: Zeros) -> Changes:
    """Tensors in one memory."""
    return {name: tensor._replace(memory="together") for name, tensor in tensors.items()}


WIDE = i32(2, 8, strides=(16, 1))

VALID: dict[str, Changes] = {
    "as it is": {},
    "slots beside out": PAGES | together(out=WIDE, slots=WIDE._replace(offset=8)),
    "slots in the columns of out behind k": PAGES | together(out=i32(2, 16), slots=WIDE._replace(offset=8)),
    "rows of slots behind those of out": PAGES | together(out=i32(2, 8), slots=i32(2, 8, offset=16)),
    "counts between rows of out": together(out=WIDE, counts=i32(2, offset=9)),
    "next_state behind state": together(state=f32(2, 4), next_state=f32(2, 4, offset=8)),
    "tensors that are read share memory": STATE | together(seq_lens=i32(2), row_slot=i32(2)),
    "nothing to write": {"logits": f32(0, 64), "seq_lens": i32(0), "counts": i32(0), "out": i32(0, 8)},
    "no page": {"page_table": i32(2, 0), "page_size": 16},
    "forced clusters": {"ctas_per_row": 16, "max_ctas": 16},
}
"""Changes of the call of the decode op that leave it valid."""


def valid_call(what: str, device: str) -> DecodeArguments:
    """The arguments of a call that is not refused."""
    return arguments(device, made(VALID[what], device))


# ---------------------------------------------------------------- the sampler


def apply_limits_arguments(device: str, changes: dict[str, Any]) -> ApplyLimitsArguments:
    """One valid call, some of its arguments replaced: two rows of 64 logits."""
    return ApplyLimitsArguments(floats(device, 2, 64), zeros(device, 2, 8))._replace(**changes)


def renorm_arguments(device: str, changes: dict[str, Any]) -> RenormArguments:
    """One valid call, some of its arguments replaced: two rows of 64 logits."""
    call = RenormArguments(floats(device, 2, 64), zeros(device, 2, 8), floats(device, 2, 64))
    return call._replace(**changes)


def topk_logprobs_arguments(device: str, changes: dict[str, Any]) -> TopkLogprobsArguments:
    """One valid call, some of its arguments replaced: two rows of 64 logits, n = 3."""
    ids, ranks = (zeros(device, *shape, dtype=torch.int64) for shape in ((2, 4), (2,)))
    call = TopkLogprobsArguments(floats(device, 2, 64), 3, zeros(device, 2), ids, floats(device, 2, 4), ranks)
    return call._replace(**changes)


def verify_arguments(device: str, changes: dict[str, Any]) -> VerifyArguments:
    """One valid call, some of its arguments replaced: two requests of two drafts."""
    drawn, fed, tokens, lengths = (zeros(device, *shape) for shape in ((6,), (6,), (2, 3), (2,)))
    return VerifyArguments(drawn, fed, None, tokens, lengths)._replace(**changes)


WRONG_LOGITS: list[Row] = [
    *LOGITS,
    *(
        (f"logits: wanted 1 to {MAX_VOCABULARY} columns, got {columns}", f32(2, columns, strides=(0, 1)))
        for columns in (0, MAX_VOCABULARY + 1)
    ),
]
WRONG_LIMITS: list[Row] = [
    *WRONG_LOGITS,
    ("limits: wanted dtype int32, got float32", f32(2, 8)),
    ("limits: wanted shape [2, 8], got [3, 8]", i32(3, 8)),
    ("limits: wanted contiguous rows, got strides (12, 1)", i32(2, 8, strides=(12, 1))),
    (f"limits: {ADDRESS}", i32(2, 8, offset=1)),
    ("allow_row: wanted allow beside it, got None", i32(2)),
    ("allow: wanted shape [2, 2], got [1, 2]", i32(1, 2)),
    ("allow: wanted shape [any, 2], got [1, 3]", {"allow": i32(1, 3), "allow_row": i32(2)}),
    ("allow_row: wanted dtype int32, got float32", {"allow": i32(1, 2), "allow_row": f32(2)}),
]
WRONG_APPLY_LIMITS: list[Row] = [
    *WRONG_LIMITS,
    (f"logits: wanted {APART} 64 elements apart, got 0", f32(2, 64, strides=(0, 1))),
    shared("logits", "limits", f32(2, 64), i32(2, 8, offset=112)),
]
WRONG_RENORM: list[Row] = [
    *WRONG_LIMITS,
    ("out: wanted dtype float32, got int32", i32(2, 64)),
    ("out: wanted shape [2, 64], got [2, 65]", f32(2, 65)),
    (f"out: wanted {APART} 64 elements apart, got 0", f32(2, 64, strides=(0, 1))),
    shared("out", "logits", f32(2, 64, strides=(65, 1), offset=1), f32(2, 64, strides=(65, 1))),
]
WRONG_TOPK_LOGPROBS: list[Row] = [
    *WRONG_LOGITS,
    *each("n", "0 to 64", -1, 65),
    ("sampled: wanted dtype int64 or int32, got float32", f32(2)),
    ("sampled: wanted shape [2], got [3]", i32(3)),
    ("ids: wanted dtype int64, got int32", i32(2, 4)),
    ("logprobs: wanted shape [2, 4], got [2, 3]", f32(2, 3)),
    ("ranks: wanted shape [2], got [2, 1]", i64(2, 1)),
    (f"ids: wanted {APART} 4 elements apart, got 0", i64(2, 4, strides=(0, 1))),
    (f"logprobs: wanted {APART} 4 elements apart, got 0", f32(2, 4, strides=(0, 1))),
    shared("ranks", "ids", i64(2), i64(2, 4)),
]
WRONG_VERIFY: list[Row] = [
    ("drawn: wanted dtype int64 or int32, got float32", f32(6)),
    ("drawn: wanted shape [any], got [6, 1]", i32(6, 1)),
    ("draft_tokens: wanted shape [6], got [5]", i64(5)),
    ("tokens: wanted shape [any, any], got [6]", i64(6)),
    ("num_drafts: wanted 0 to 67108864, got -1", {"tokens": i32(2, 0)}),
    ("requests: wanted 0 to 67108864, got 67108865", {"tokens": i32(2**26 + 1, 3, strides=(0, 1))}),
    (f"tokens: wanted {APART} 3 elements apart, got 2", i32(2, 3, strides=(2, 1))),
    ("lengths: wanted dtype int32, got int64", i64(2)),
    ("starts: wanted shape [3], got [2]", i32(2)),
    (
        "logits: wanted 1 + num_drafts = 3 rows for each request, got 5",
        {"drawn": i32(5), "draft_tokens": i32(5)},
    ),
    shared("tokens", "draft_tokens", i32(2, 3), i32(6)),
]


# ---------------------------------------------------------------- rows on several ranks


def sharded_arguments(device: str, changes: dict[str, Any]) -> ShardedArguments:
    """A call of two ranks for which a rank's memory would lie at address 0: two rows of 64 scores."""
    lengths, best, out, local, counts = (
        zeros(device, *shape) for shape in ((2,), (2, 8), (2, 8), (2, 8), (2,))
    )
    call = ShardedArguments(
        *(floats(device, 2, 64), lengths, best, out, local, counts),
        *(zeros(device, 2, dtype=torch.int64), zeros(device, PEER_CTAS)),
        zeros(device, 3, 3, dtype=torch.int64),
        *(8, 0, 0, 1000, 0, 0),
    )._replace(**changes)
    return call._replace(inboxes=call.inboxes.cpu(), told=call.told.cpu())


WRONG_SHARDED: list[Row] = [
    *SCORE_ROWS,
    *each("k", "1 to 2048", 0, 2049),
    ("lengths: wanted shape [2], got [3]", i32(3)),
    ("best: wanted at least k = 8 columns, got [2, 7]", i32(2, 7)),
    ("out: wanted at least k = 8 columns, got [2, 7]", i32(2, 7)),
    (f"local: wanted {APART} 8 elements apart, got 0", i32(2, 8, strides=(0, 1))),
    ("counts: wanted dtype int32, got int64", i64(2)),
    ("inboxes: wanted shape [any], got [2, 1]", i64(2, 1)),
    ("world: wanted 1 to 16, got 17", {"inboxes": i64(17)}),
    ("progress: wanted shape [64], got [63]", i32(63)),
    ("told: wanted shape [3, 3], got [2, 3]", i64(2, 3)),
    *each("rank", "0 to 1", -1, 2),
    *each("interleave", f"0 to {MAX_WIDTH}", -1, MAX_WIDTH + 1),
    *each("timeout_ns", f"0 to {MAX_TIMEOUT_NS}", -1, MAX_TIMEOUT_NS + 1),
    ("step: wanted dtype int64, got int32", i32(1)),
    ("step: wanted 1 to 1, got 2", i64(2)),
    shared("local", "out", i32(2, 8), i32(2, 8, offset=4)),
    shared("out", "best", i32(2, 8), i32(2, 8, offset=4)),
    shared("out", "best", i32(2, 8, strides=(16, 1)), i32(2, 8, strides=(8, 1))),
]


@dataclass(frozen=True)
class WrongCalls:
    """The wrong calls of one op."""

    checks: Checks
    """Have the op's name."""
    arguments: Callable[[str, dict[str, Any]], Any]
    """The arguments of a call on a device, with these changes."""
    wrong: Sequence[Row]


OPS = {
    "decode": WrongCalls(DECODE, arguments, WRONG),
    "prefill": WrongCalls(PREFILL, prefill_arguments, WRONG_PREFILL),
    "prefill_slice": WrongCalls(PREFILL, slice_arguments, WRONG_PREFILL_SLICE),
    "blocks": WrongCalls(BLOCKS, blocks_arguments, WRONG_BLOCKS),
    "in_blocks": WrongCalls(IN_BLOCKS, in_blocks_arguments, WRONG_IN_BLOCKS),
    "topk_items": WrongCalls(TOPK, items_arguments, WRONG_ITEMS),
    "apply_limits_": WrongCalls(APPLY_LIMITS, apply_limits_arguments, WRONG_APPLY_LIMITS),
    "renorm": WrongCalls(RENORM, renorm_arguments, WRONG_RENORM),
    "topk_logprobs": WrongCalls(TOPK_LOGPROBS, topk_logprobs_arguments, WRONG_TOPK_LOGPROBS),
    "verify": WrongCalls(VERIFY, verify_arguments, WRONG_VERIFY),
    "sharded": WrongCalls(SHARDED, sharded_arguments, WRONG_SHARDED),
}


def name_of(op: str) -> str:
    """The op's name in ``torch.ops.gvr_topk``. Messages have the name of the public function."""
    suffix = {"prefill_slice": "_slice", "topk_items": "_items"}.get(op, "")
    return OPS[op].checks.op.removeprefix("gvr_topk.") + suffix


@dataclass(frozen=True)
class Case:
    """A call of an op that is refused, and what every implementation says of it."""

    op: str
    said: str
    changes: Changes

    def __str__(self) -> str:
        return f"{self.op}: {self.said}"

    @property
    def message(self) -> str:
        return f"{OPS[self.op].checks.op}: {self.said}"

    def call(self, device: str) -> Any:
        return OPS[self.op].arguments(device, made(self.changes, device))


def case_of(op: str, said: str, wrong: Any) -> Case:
    name = said.partition(":")[0].removeprefix("state.")
    return Case(op, said, wrong if isinstance(wrong, dict) else {name: wrong})


CASES = [case_of(op, *row) for op, calls in OPS.items() for row in calls.wrong]
