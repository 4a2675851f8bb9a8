"""Calls that the ops refuse, and what they say: one list for the CPU, for traces and for the compiled checks.

A row changes arguments of a call that is valid otherwise. Tests run all rows on a CPU (test_arguments.py),
through the compiled checks (test_compiled_checks.py) and on a GPU (tests/gpu/test_errors.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gvr_topk.arguments import (
    BLOCKS,
    DECODE,
    IN_BLOCKS,
    PREFILL,
    BlocksArguments,
    Checks,
    DecodeArguments,
    InBlocksArguments,
    PrefillArguments,
    PrefillSliceArguments,
)
from gvr_topk.constants import (
    BLOCK_SIZE,
    FLAG_CLAMP_PAGES,
    FLAG_QUANTILE_GUESS,
    FLAG_STREAMS,
    MAX_BLOCKS_WIDTH,
    MAX_CHOSEN_BLOCKS,
    MAX_ELEMENTS_PER_CTA,
    MAX_NEXT_N,
    MAX_PAGE_SIZE,
    MAX_ROWS,
    MAX_WIDTH,
    PAPER_MAX_WIDTH,
    STATE_FLOATS,
    StatsColumn,
)
from gvr_topk.sampling.arguments import (
    APPLY_LIMITS,
    RENORM,
    TOPK_LOGPROBS,
    ApplyLimitsArguments,
    RenormArguments,
    TopkLogprobsArguments,
)
from gvr_topk.sampling.arithmetic import MAX_VOCABULARY

Change = Callable[[str], dict[str, Any]]


def zeros(device: str, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.zeros(*shape, dtype=dtype, device=device)


def floats(device: str, *shape: int) -> Tensor:
    return zeros(device, *shape, dtype=torch.float32)


def arguments(device: str, changes: dict[str, Any]) -> DecodeArguments:
    """One valid call, some of its arguments replaced: two rows of 64 scores, k = 8."""
    lengths = torch.full((2,), 64, dtype=torch.int32, device=device)
    return DecodeArguments(floats(device, 2, 64), lengths, zeros(device, 2, 8), 8)._replace(**changes)


def both(device: str, state: Tensor | None = None, indices: Tensor | None = None) -> dict[str, Any]:
    """A state that keeps indices, of which one is wrong."""
    return {
        "state": floats(device, 2, STATE_FLOATS) if state is None else state,
        "indices": zeros(device, 2, 8) if indices is None else indices,
    }


def pages(device: str) -> dict[str, Any]:
    """A page table, with which cache slots can be written."""
    return {"page_table": zeros(device, 2, 4), "page_size": 16}


def beside(device: str, first: int) -> dict[str, Any]:
    """One buffer with `out` in its first eight columns, and `slots` in eight from column `first` on."""
    buffer = zeros(device, 2, 16)
    return {**pages(device), "out": buffer[:, :8], "slots": buffer[:, first : first + 8]}


def shared(name: str, other: str) -> str:
    return f"{name}: wanted memory of its own, got memory shared with {other}"


WRONG: dict[str, tuple[Change, str]] = {
    "dtype of logits": (
        lambda d: {"logits": zeros(d, 2, 64, dtype=torch.float64)},
        "logits: wanted dtype float32, bfloat16 or float16, got float64",
    ),
    "dimensions of logits": (
        lambda d: {"logits": floats(d, 64)},
        "logits: wanted shape [rows, width], got [64]",
    ),
    "inner stride of logits": (
        lambda d: {"logits": floats(d, 2, 128)[:, ::2]},
        "logits: wanted inner stride 1, got 2",
    ),
    "too wide": (
        lambda d: {"logits": floats(d, 1, MAX_WIDTH + 1).expand(2, -1)},
        f"logits: wanted at most {MAX_WIDTH} columns, got {MAX_WIDTH + 1}",
    ),
    "too many rows": (
        lambda d: {"logits": floats(d, 1, 1).expand(MAX_ROWS + 1, 1)},
        f"logits: wanted at most {MAX_ROWS} rows, got {MAX_ROWS + 1}",
    ),
    "k of zero": (lambda d: {"k": 0}, f"k: wanted 1 to {MAX_WIDTH}, got 0"),
    "k too large": (lambda d: {"k": MAX_WIDTH + 1}, f"k: wanted 1 to {MAX_WIDTH}, got {MAX_WIDTH + 1}"),
    "next_n of zero": (lambda d: {"next_n": 0}, f"next_n: wanted 1 to {MAX_NEXT_N}, got 0"),
    "next_n too large": (
        lambda d: {"next_n": MAX_NEXT_N + 1},
        f"next_n: wanted 1 to {MAX_NEXT_N}, got {MAX_NEXT_N + 1}",
    ),
    "rows of no request": (
        lambda d: {"next_n": 3},
        "logits: wanted a multiple of next_n = 3 rows, got 2",
    ),
    "dtype of seq_lens": (
        lambda d: {"seq_lens": zeros(d, 2, dtype=torch.int64)},
        "seq_lens: wanted dtype int32, got int64",
    ),
    "seq_lens": (lambda d: {"seq_lens": zeros(d, 3)}, "seq_lens: wanted 2 elements, got [3]"),
    "dimensions of seq_lens": (
        lambda d: {"seq_lens": zeros(d, 2, 1)},
        "seq_lens: wanted shape [any], got [2, 1]",
    ),
    "stride of seq_lens": (
        lambda d: {"seq_lens": zeros(d, 4)[::2]},
        "seq_lens: wanted inner stride 1, got 2",
    ),
    "seq_lens of drafts": (
        lambda d: {"seq_lens": zeros(d, 3), "next_n": 2},
        "seq_lens: wanted 1 or 2 elements, got [3]",
    ),
    "dtype of out": (lambda d: {"out": floats(d, 2, 8)}, "out: wanted dtype int32, got float32"),
    "rows of out": (lambda d: {"out": zeros(d, 3, 8)}, "out: wanted shape [2, any], got [3, 8]"),
    "columns of out": (lambda d: {"out": zeros(d, 2, 7)}, "out: wanted at least k = 8 columns, got [2, 7]"),
    "rows of out in one place": (
        lambda d: {"out": zeros(d, 1, 8).expand(2, 8)},
        "out: wanted rows that do not overlap, at least 8 elements apart, got 0",
    ),
    "rows of out that overlap": (
        lambda d: {"out": zeros(d, 16).as_strided((2, 8), (7, 1))},
        "out: wanted rows that do not overlap, at least 8 elements apart, got 7",
    ),
    "row_slot alone": (
        lambda d: {"row_slot": zeros(d, 2)},
        "row_slot: wanted a state beside it, got None",
    ),
    "rows of row_slot": (
        lambda d: {**both(d), "row_slot": zeros(d, 3)},
        "row_slot: wanted shape [2], got [3]",
    ),
    "dtype of row_slot": (
        lambda d: {**both(d), "row_slot": zeros(d, 2, dtype=torch.int64)},
        "row_slot: wanted dtype int32, got int64",
    ),
    "indices alone": (
        lambda d: {"indices": zeros(d, 2, 8)},
        "indices: wanted a state beside them, got None",
    ),
    "dtype of state": (
        lambda d: both(d, zeros(d, 2, STATE_FLOATS)),
        "state: wanted dtype float32, got int32",
    ),
    "columns of state": (lambda d: both(d, floats(d, 2, 3)), "state: wanted shape [any, 4], got [2, 3]"),
    "dimensions of state": (lambda d: both(d, floats(d, 2)), "state: wanted shape [any, 4], got [2]"),
    "stride of state": (
        lambda d: both(d, floats(d, 2, 8)[:, :4]),
        "state: wanted contiguous rows, got strides (8, 1)",
    ),
    "inner stride of state": (
        lambda d: both(d, floats(d, 4, 2).T),
        "state: wanted inner stride 1, got 2",
    ),
    "slots of state": (
        lambda d: {"state": floats(d, 1, STATE_FLOATS)},
        "state: wanted at least 2 slots without row_slot, got 1",
    ),
    "slots of indices": (
        lambda d: both(d, indices=zeros(d, 3, 8)),
        "state.indices: wanted shape [2, 8], got [3, 8]",
    ),
    "dtype of indices": (
        lambda d: both(d, indices=floats(d, 2, 8)),
        "state.indices: wanted dtype int32, got float32",
    ),
    "k of indices": (
        lambda d: both(d, indices=zeros(d, 2, 9)),
        "state.indices: wanted shape [2, 8], got [2, 9]",
    ),
    "slots of indices in one place": (
        lambda d: both(d, indices=zeros(d, 1, 8).expand(2, 8)),
        "state.indices: wanted rows that do not overlap, at least 8 elements apart, got 0",
    ),
    "counts": (lambda d: {"counts": zeros(d, 3)}, "counts: wanted shape [2], got [3]"),
    "stride of counts": (
        lambda d: {"counts": zeros(d, 4)[::2]},
        "counts: wanted inner stride 1, got 2",
    ),
    "dtype of counts": (
        lambda d: {"counts": zeros(d, 2, dtype=torch.int64)},
        "counts: wanted dtype int32, got int64",
    ),
    "slots alone": (lambda d: {"slots": zeros(d, 2, 8)}, "slots: wanted a page_table beside it, got None"),
    "dtype of slots": (
        lambda d: {**pages(d), "slots": floats(d, 2, 8)},
        "slots: wanted dtype int32, got float32",
    ),
    "columns of slots": (
        lambda d: {**pages(d), "slots": zeros(d, 2, 7)},
        "slots: wanted at least k = 8 columns, got [2, 7]",
    ),
    "rows of slots that overlap": (
        lambda d: {**pages(d), "slots": zeros(d, 16).as_strided((2, 8), (7, 1))},
        "slots: wanted rows that do not overlap, at least 8 elements apart, got 7",
    ),
    "clamp_pages alone": (
        lambda d: {"flags": FLAG_CLAMP_PAGES},
        "clamp_pages: wanted a page_table beside it, got None",
    ),
    "requests of page_table": (
        lambda d: {"page_table": zeros(d, 3, 4), "page_size": 16},
        "page_table: wanted shape [2, any], got [3, 4]",
    ),
    "no page_size": (
        lambda d: {"page_table": zeros(d, 2, 4)},
        f"page_size: wanted 1 to {MAX_PAGE_SIZE} with a page_table, got 0",
    ),
    "page_size too large": (
        lambda d: {"page_table": zeros(d, 2, 4), "page_size": MAX_PAGE_SIZE + 1},
        f"page_size: wanted 1 to {MAX_PAGE_SIZE} with a page_table, got {MAX_PAGE_SIZE + 1}",
    ),
    "columns of stats": (
        lambda d: {"stats": zeros(d, 2, 7)},
        f"stats: wanted shape [2, {len(StatsColumn)}], got [2, 7]",
    ),
    "stride of stats": (
        lambda d: {"stats": zeros(d, 1, 8).expand(2, 8)},
        "stats: wanted contiguous rows, got strides (0, 1)",
    ),
    "stride of phase_clocks": (
        lambda d: {"phase_clocks": zeros(d, 1, 8, dtype=torch.int64).expand(2, 8)},
        "phase_clocks: wanted contiguous rows, got strides (0, 1)",
    ),
    "columns of next_state": (
        lambda d: {"next_state": zeros(d, 2, 3, dtype=torch.float32)},
        f"next_state: wanted shape [2, {STATE_FLOATS}], got [2, 3]",
    ),
    "compress_ratio": (
        lambda d: {"compress_ratio": 0},
        f"compress_ratio: wanted 1 to {MAX_WIDTH}, got 0",
    ),
    "hint_offset": (
        lambda d: {"hint_offset": MAX_WIDTH + 1},
        f"hint_offset: wanted -{MAX_WIDTH} to {MAX_WIDTH}, got {MAX_WIDTH + 1}",
    ),
    "max_ctas": (lambda d: {"max_ctas": 3}, "max_ctas: wanted 0, 1, 2, 4, 8 or 16, got 3"),
    "negative max_ctas": (lambda d: {"max_ctas": -1}, "max_ctas: wanted 0, 1, 2, 4, 8 or 16, got -1"),
    "ctas_per_row above max_ctas": (
        lambda d: {"max_ctas": 4, "ctas_per_row": 8},
        "ctas_per_row: wanted at most max_ctas = 4, got 8",
    ),
    "max_ctas beyond 32 bits": (
        lambda d: {"max_ctas": 2**32 + 1},
        f"max_ctas: wanted 0, 1, 2, 4, 8 or 16, got {2**32 + 1}",
    ),
    **{
        f"ctas_per_row of {ctas}": (
            lambda d, ctas=ctas: {"ctas_per_row": ctas},
            f"ctas_per_row: wanted 0, 1, 2, 4, 8 or 16 and enough for the width, got {ctas}",
        )
        for ctas in (3, -1, 32, 2**32 + 4)
    },
    "ctas_per_row below the width": (
        lambda d: {"ctas_per_row": 1, "logits": floats(d, 1, MAX_ELEMENTS_PER_CTA + 1).expand(2, -1)},
        "ctas_per_row: wanted 0, 1, 2, 4, 8 or 16 and enough for the width, got 1",
    ),
    "k of the paper's kernel": (
        lambda d: {"path": 1},
        "k: wanted 512, 1024 or 2048 for path 'paper_gvr', got 8",
    ),
    "width of the paper's kernel": (
        lambda d: {
            "path": 1,
            "k": 512,
            "out": zeros(d, 2, 512),
            "logits": floats(d, 1, PAPER_MAX_WIDTH + 1).expand(2, -1),
        },
        f"logits: wanted at most {PAPER_MAX_WIDTH} columns for path 'paper_gvr', got {PAPER_MAX_WIDTH + 1}",
    ),
    "path": (lambda d: {"path": 9}, "path: wanted 0 to 3, got 9"),
    "negative path": (lambda d: {"path": -1}, "path: wanted 0 to 3, got -1"),
    **{
        f"flags {flags}": (
            lambda d, flags=flags: {"flags": flags},
            f"flags: wanted no bits outside of 15, got {flags}",
        )
        for flags in (FLAG_STREAMS, 2**40, -1 & ~FLAG_CLAMP_PAGES)
    },
    "page_size alone": (lambda d: {"page_size": 16}, "page_size: wanted a page_table beside it, got None"),
    "negative page_size alone": (
        lambda d: {"page_size": -5},
        "page_size: wanted a page_table beside it, got None",
    ),
    "address of state": (
        lambda d: {"state": floats(d, 9)[1:].view(2, 4)},
        "state: wanted an address that is a multiple of 16, got one that is not",
    ),
    "address of next_state": (
        lambda d: {"next_state": floats(d, 9)[1:].view(2, 4)},
        "next_state: wanted an address that is a multiple of 16, got one that is not",
    ),
    "stride of next_state": (
        lambda d: {"next_state": floats(d, 2, 8)[:, :4]},
        "next_state: wanted contiguous rows, got strides (8, 1)",
    ),
    "slots as out": (lambda d: beside(d, 0), shared("slots", "out")),
    "slots and out share a column": (lambda d: beside(d, 7), shared("slots", "out")),
    "slots reach into the next row of out": (
        lambda d: (
            lambda buffer: {
                **pages(d),
                "out": buffer.as_strided((2, 8), (15, 1)),
                "slots": buffer.as_strided((2, 8), (15, 1), 9),
            }
        )(zeros(d, 40)),
        shared("slots", "out"),
    ),
    "out in the scores": (
        lambda d: (lambda scores: {"logits": scores, "out": scores.view(torch.int32)[:, 8:]})(
            floats(d, 2, 64)
        ),
        shared("out", "logits"),
    ),
    "counts as lengths": (
        lambda d: dict.fromkeys(("seq_lens", "counts"), zeros(d, 2)),
        shared("counts", "seq_lens"),
    ),
    "counts as slots of rows": (
        lambda d: {**both(d), **dict.fromkeys(("row_slot", "counts"), zeros(d, 2))},
        shared("counts", "row_slot"),
    ),
    "counts in out": (
        lambda d: (lambda out: {"out": out, "counts": out.view(-1)[11:13]})(zeros(d, 2, 8)),
        shared("counts", "out"),
    ),
    "slots in the page table": (
        lambda d: {**pages(d), **dict.fromkeys(("page_table", "slots"), zeros(d, 2, 8))},
        shared("slots", "page_table"),
    ),
    "out as kept positions": (
        lambda d: (lambda out: {**both(d, indices=out), "out": out})(zeros(d, 2, 8)),
        shared("state.indices", "out"),
    ),
    "state in out": (
        lambda d: (lambda out: {"out": out, "state": out.view(torch.float32).view(4, 4)})(zeros(d, 2, 8)),
        shared("state", "out"),
    ),
    "next_state as state": (
        lambda d: dict.fromkeys(("state", "next_state"), floats(d, 2, STATE_FLOATS)),
        shared("next_state", "state"),
    ),
    "next_state from the second slot on": (
        lambda d: (lambda words: {"state": words[:2], "next_state": words[1:]})(floats(d, 3, STATE_FLOATS)),
        shared("next_state", "state"),
    ),
    "stats in phase_clocks": (
        lambda d: (
            lambda clocks: {"phase_clocks": clocks, "stats": clocks.view(torch.int32).view(4, 8)[1:3]}
        )(zeros(d, 2, 8, dtype=torch.int64)),
        shared("phase_clocks", "stats"),
    ),
}
"""What is wrong with a call of the decode op, and what every implementation says."""


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


NO_TABLES: dict[str, Any] = dict.fromkeys(("page_table", "slots", "offsets", "row_request")) | {
    "page_size": 0
}

WRONG_PREFILL: dict[str, tuple[Change, str]] = {
    **{
        what: WRONG[what]
        for what in (
            "dtype of logits",
            "dimensions of logits",
            "inner stride of logits",
            "too wide",
            "too many rows",
            "k of zero",
            "k too large",
            "dtype of out",
            "rows of out",
            "columns of out",
            "rows of out in one place",
            "rows of out that overlap",
            "counts",
            "dtype of counts",
            "columns of stats",
            "stride of stats",
        )
    },
    "row_starts": (lambda d: {"row_starts": zeros(d, 3)}, "row_starts: wanted shape [2], got [3]"),
    "dimensions of row_starts": (
        lambda d: {"row_starts": zeros(d, 2, 1)},
        "row_starts: wanted shape [2], got [2, 1]",
    ),
    "dtype of row_starts": (
        lambda d: {"row_starts": zeros(d, 2, dtype=torch.int64)},
        "row_starts: wanted dtype int32, got int64",
    ),
    "stride of row_starts": (
        lambda d: {"row_starts": zeros(d, 4)[::2]},
        "row_starts: wanted inner stride 1, got 2",
    ),
    "row_ends": (lambda d: {"row_ends": zeros(d, 1)}, "row_ends: wanted shape [2], got [1]"),
    "dtype of row_ends": (
        lambda d: {"row_ends": floats(d, 2)},
        "row_ends: wanted dtype int32, got float32",
    ),
    "stride of row_ends": (
        lambda d: {"row_ends": zeros(d, 4)[::2]},
        "row_ends: wanted inner stride 1, got 2",
    ),
    "row_request alone": (
        lambda d: {**NO_TABLES, "row_request": zeros(d, 2)},
        "row_request: wanted a page_table or offsets beside it, got None",
    ),
    "row_request": (lambda d: {"row_request": zeros(d, 3)}, "row_request: wanted shape [2], got [3]"),
    "dtype of row_request": (
        lambda d: {"row_request": zeros(d, 2, dtype=torch.int64)},
        "row_request: wanted dtype int32, got int64",
    ),
    "slots alone": (lambda d: {"page_table": None}, "slots: wanted a page_table beside it, got None"),
    "columns of slots": (
        lambda d: {"slots": zeros(d, 2, 7)},
        "slots: wanted at least k = 8 columns, got [2, 7]",
    ),
    "rows of slots that overlap": (
        lambda d: {"slots": zeros(d, 16).as_strided((2, 8), (7, 1))},
        "slots: wanted rows that do not overlap, at least 8 elements apart, got 7",
    ),
    "rows of page_table": (
        lambda d: {"row_request": None},
        "page_table: wanted shape [2, any], got [3, 4]",
    ),
    "dtype of page_table": (
        lambda d: {"page_table": zeros(d, 3, 4, dtype=torch.int64)},
        "page_table: wanted dtype int32, got int64",
    ),
    "dimensions of page_table": (
        lambda d: {"page_table": zeros(d, 3)},
        "page_table: wanted shape [any, any], got [3]",
    ),
    "no page_size": (
        lambda d: {"page_size": 0},
        f"page_size: wanted 1 to {MAX_PAGE_SIZE} with a page_table, got 0",
    ),
    "page_size too large": (
        lambda d: {"page_size": MAX_PAGE_SIZE + 1},
        f"page_size: wanted 1 to {MAX_PAGE_SIZE} with a page_table, got {MAX_PAGE_SIZE + 1}",
    ),
    "offsets without slots": (
        lambda d: {"slots": None},
        "offsets: wanted slots beside page_table, so that out keeps positions, got None",
    ),
    "offsets of other requests": (lambda d: {"offsets": zeros(d, 2)}, "offsets: wanted shape [3], got [2]"),
    "offsets by row": (
        lambda d: {**NO_TABLES, "offsets": zeros(d, 3)},
        "offsets: wanted shape [2], got [3]",
    ),
    "dimensions of offsets": (
        lambda d: {**NO_TABLES, "row_request": zeros(d, 2), "offsets": zeros(d, 3, 1)},
        "offsets: wanted shape [any], got [3, 1]",
    ),
    "dtype of offsets": (
        lambda d: {"offsets": zeros(d, 3, dtype=torch.int64)},
        "offsets: wanted dtype int32, got int64",
    ),
    "path of decode": (lambda d: {"path": 2}, "path: wanted 0 or 3, got 2"),
    "path": (lambda d: {"path": 9}, "path: wanted 0 or 3, got 9"),
    **{
        f"flags {flags}": (
            lambda d, flags=flags: {"flags": flags},
            f"flags: wanted no bits outside of 17, got {flags}",
        )
        for flags in (FLAG_QUANTILE_GUESS, FLAG_CLAMP_PAGES, 2**40)
    },
    "page_size alone": (
        lambda d: {**NO_TABLES, "page_size": 16},
        "page_size: wanted a page_table beside it, got None",
    ),
    "slots as out": (lambda d: dict.fromkeys(("out", "slots"), zeros(d, 2, 8)), shared("slots", "out")),
    "out as scores": (
        lambda d: (lambda scores: {"logits": scores, "out": scores.view(torch.int32)})(floats(d, 2, 64)),
        shared("out", "logits"),
    ),
    **{
        f"counts as {name}": (
            lambda d, name=name: dict.fromkeys((name, "counts"), zeros(d, 2)),
            shared("counts", name),
        )
        for name in ("row_starts", "row_ends", "row_request")
    },
    "counts in offsets": (
        lambda d: (lambda offsets: {"offsets": offsets, "counts": offsets[1:]})(zeros(d, 3)),
        shared("counts", "offsets"),
    ),
    "out in the page table": (
        lambda d: (lambda table: {"page_table": table, "out": table[:2]})(zeros(d, 3, 8)),
        shared("out", "page_table"),
    ),
    "stats as slots": (
        lambda d: dict.fromkeys(("slots", "stats"), zeros(d, 2, 8)),
        shared("stats", "slots"),
    ),
}
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

WRONG_PREFILL_SLICE: dict[str, tuple[Change, str]] = {
    **{
        what: wrong
        for what, wrong in WRONG_PREFILL.items()
        if not any(word in what for word in ("stats", "path", "flags"))
    },
    **{
        f"{name} without out": (
            lambda d, name=name: {
                **NO_TABLES,
                "out": None,
                "counts": None,
                "page_size": 16 * (name == "page_table"),
                name: zeros(d, 2, 4) if name == "page_table" else zeros(d, 2),
            },
            f"{name}: wanted an out beside it, got None",
        )
        for name in ("counts", "offsets", "page_table")
    },
    "items of carry": (
        lambda d: {"carry": zeros(d, 3, 8, dtype=torch.int64)},
        "carry: wanted shape [any, 9], got [3, 8]",
    ),
    "dimensions of carry": (
        lambda d: {"carry": zeros(d, 3, 9, 1, dtype=torch.int64)},
        "carry: wanted shape [any, 9], got [3, 9, 1]",
    ),
    "dtype of carry": (lambda d: {"carry": zeros(d, 3, 9)}, "carry: wanted dtype int64, got int32"),
    "rows of carry": (
        lambda d: {"carry": zeros(d, 1, 9, dtype=torch.int64)},
        "carry: wanted at least 2 rows, got 1",
    ),
    "stride of carry": (
        lambda d: {"carry": zeros(d, 3, 10, dtype=torch.int64)[:, :9]},
        "carry: wanted contiguous rows, got strides (10, 1)",
    ),
    "negative column": (
        lambda d: {"column": -1},
        f"column: wanted 0 to {LAST_COLUMN} for 64 columns, got -1",
    ),
    "column too large": (
        lambda d: {"column": LAST_COLUMN + 1},
        f"column: wanted 0 to {LAST_COLUMN} for 64 columns, got {LAST_COLUMN + 1}",
    ),
    "flags": (lambda d: {"flags": FLAG_STREAMS}, f"flags: wanted no bits outside of 1, got {FLAG_STREAMS}"),
    "carry in the scores": (
        lambda d: (lambda words: {"logits": words.view(torch.float32)[:2], "carry": words})(
            zeros(d, 3, 9, dtype=torch.int64)
        ),
        shared("carry", "logits"),
    ),
    "out in the carry": (
        lambda d: (lambda words: {"carry": words, "out": words.view(torch.int32)[1:]})(
            zeros(d, 3, 9, dtype=torch.int64)
        ),
        shared("out", "carry"),
    ),
}
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


WRONG_BOTH_BLOCKS: dict[str, tuple[Change, str]] = {
    **{
        what: WRONG[what]
        for what in (
            "dtype of logits",
            "dimensions of logits",
            "inner stride of logits",
            "too wide",
            "too many rows",
            "k of zero",
            "k too large",
            "next_n of zero",
            "next_n too large",
            "rows of no request",
            "dtype of seq_lens",
            "dimensions of seq_lens",
            "stride of seq_lens",
            "seq_lens",
            "seq_lens of drafts",
            "compress_ratio",
        )
    },
    "block_size": (lambda d: {"block_size": 4}, f"block_size: wanted {BLOCK_SIZE}, got 4"),
    "rows of out": (lambda d: {"out": zeros(d, 3, 3)}, "out: wanted shape [2, any], got [3, 3]"),
    "columns of out": (lambda d: {"out": zeros(d, 2, 2)}, "out: wanted at least k = 3 columns, got [2, 2]"),
    "rows of out that overlap": (
        lambda d: {"out": zeros(d, 5).as_strided((2, 3), (2, 1))},
        "out: wanted rows that do not overlap, at least 3 elements apart, got 2",
    ),
    "stride of blocks": (
        lambda d: {"blocks": zeros(d, 4, 2).T},
        "blocks: wanted inner stride 1, got 2",
    ),
    "rows of blocks": (lambda d: {"blocks": zeros(d, 3, 4)}, "blocks: wanted shape [2, any], got [3, 4]"),
    "dtype of blocks": (lambda d: {"blocks": floats(d, 2, 4)}, "blocks: wanted dtype int32, got float32"),
    "flags": (lambda d: {"flags": FLAG_QUANTILE_GUESS}, "flags: wanted no bits outside of 1, got 2"),
    "out in the scores": (
        lambda d: (lambda scores: {"logits": scores, "out": scores.view(torch.int32)})(floats(d, 2, 64)),
        shared("out", "logits"),
    ),
}

WRONG_BLOCKS: dict[str, tuple[Change, str]] = {
    **WRONG_BOTH_BLOCKS,
    "block_k as k": (
        lambda d: {"block_k": 3},
        f"block_k: wanted more than k = 3 and at most {MAX_CHOSEN_BLOCKS}, got 3",
    ),
    "block_k too large": (
        lambda d: {"block_k": MAX_CHOSEN_BLOCKS + 1},
        f"block_k: wanted more than k = 3 and at most {MAX_CHOSEN_BLOCKS}, got {MAX_CHOSEN_BLOCKS + 1}",
    ),
    "too wide for blocks": (
        lambda d: {"logits": floats(d, 1, MAX_BLOCKS_WIDTH + 8).expand(2, -1)},
        f"logits: wanted at most {MAX_BLOCKS_WIDTH} columns, got {MAX_BLOCKS_WIDTH + 8}",
    ),
    "columns of blocks": (
        lambda d: {"block_k": 5},
        "blocks: wanted at least block_k = 5 columns, got [2, 4]",
    ),
    "rows of blocks that overlap": (
        lambda d: {"blocks": zeros(d, 1, 4).expand(2, 4)},
        "blocks: wanted rows that do not overlap, at least 4 elements apart, got 0",
    ),
    "blocks as out": (lambda d: dict.fromkeys(("out", "blocks"), zeros(d, 2, 4)), shared("blocks", "out")),
    "blocks in the lengths": (
        lambda d: (lambda both: {"seq_lens": both[:2], "blocks": both.view(2, 4)})(zeros(d, 8)),
        shared("blocks", "seq_lens"),
    ),
}
"""The same of the op that chooses blocks."""

WRONG_IN_BLOCKS: dict[str, tuple[Change, str]] = {
    **WRONG_BOTH_BLOCKS,
    "too many blocks": (
        lambda d: {"blocks": zeros(d, 1, MAX_CHOSEN_BLOCKS + 1).expand(2, -1)},
        f"blocks: wanted at most {MAX_CHOSEN_BLOCKS} columns, got {MAX_CHOSEN_BLOCKS + 1}",
    ),
    "out as blocks": (lambda d: dict.fromkeys(("out", "blocks"), zeros(d, 2, 4)), shared("out", "blocks")),
}
"""The same of the op that selects in blocks."""

VALID: dict[str, Change] = {
    "as it is": lambda d: {},
    "slots beside out": lambda d: beside(d, 8),
    "slots in the columns of out behind k": lambda d: (
        lambda buffer: {**pages(d), "out": buffer, "slots": buffer[:, 8:]}
    )(zeros(d, 2, 16)),
    "rows of slots behind those of out": lambda d: (
        lambda buffer: {**pages(d), "out": buffer[:2], "slots": buffer[2:]}
    )(zeros(d, 4, 8)),
    "counts between rows of out": lambda d: (
        lambda buffer: {"out": buffer.view(2, 16)[:, :8], "counts": buffer[9:11]}
    )(zeros(d, 32)),
    "next_state behind state": lambda d: (lambda words: {"state": words[:2], "next_state": words[2:]})(
        floats(d, 4, STATE_FLOATS)
    ),
    "tensors that are read share memory": lambda d: (
        both(d) | dict.fromkeys(("seq_lens", "row_slot"), zeros(d, 2))
    ),
    "nothing to write": lambda d: {
        "logits": floats(d, 0, 64),
        **dict.fromkeys(("seq_lens", "counts"), zeros(d, 0)),
        "out": zeros(d, 0, 8),
    },
    "no page": lambda d: {"page_table": zeros(d, 2, 0), "page_size": 16},
    "forced clusters": lambda d: {"ctas_per_row": 16, "max_ctas": 16},
}
"""Changes of the call of the decode op that leave it valid."""


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


WRONG_LOGITS: dict[str, tuple[Change, str]] = {
    "dtype of logits": (
        lambda d: {"logits": zeros(d, 2, 64, dtype=torch.float64)},
        "logits: wanted dtype float32, bfloat16 or float16, got float64",
    ),
    "dimensions of logits": (
        lambda d: {"logits": floats(d, 128)},
        "logits: wanted shape [rows, width], got [128]",
    ),
    "logits with gaps": (
        lambda d: {"logits": floats(d, 2, 128)[:, ::2]},
        "logits: wanted inner stride 1, got 2",
    ),
    "no column": (
        lambda d: {"logits": floats(d, 2, 0)},
        f"logits: wanted 1 to {MAX_VOCABULARY} columns, got 0",
    ),
    "too many columns": (
        lambda d: {"logits": floats(d, 1, MAX_VOCABULARY + 1).expand(2, -1)},
        f"logits: wanted 1 to {MAX_VOCABULARY} columns, got {MAX_VOCABULARY + 1}",
    ),
}

WRONG_LIMITS: dict[str, tuple[Change, str]] = {
    **WRONG_LOGITS,
    "dtype of limits": (
        lambda d: {"limits": floats(d, 2, 8)},
        "limits: wanted dtype int32, got float32",
    ),
    "shape of limits": (lambda d: {"limits": zeros(d, 3, 8)}, "limits: wanted shape [2, 8], got [3, 8]"),
    "limits with gaps": (
        lambda d: {"limits": zeros(d, 2, 12)[:, :8]},
        "limits: wanted contiguous rows, got strides (12, 1)",
    ),
    "address of limits": (
        lambda d: {"limits": zeros(d, 17)[1:].view(2, 8)},
        "limits: wanted an address that is a multiple of 16, got one that is not",
    ),
    "allow_row alone": (
        lambda d: {"allow_row": zeros(d, 2)},
        "allow_row: wanted allow beside it, got None",
    ),
    "a mask too few": (lambda d: {"allow": zeros(d, 1, 2)}, "allow: wanted shape [2, 2], got [1, 2]"),
    "words of a mask": (
        lambda d: {"allow": zeros(d, 1, 3), "allow_row": zeros(d, 2)},
        "allow: wanted shape [any, 2], got [1, 3]",
    ),
    "dtype of allow_row": (
        lambda d: {"allow": zeros(d, 1, 2), "allow_row": floats(d, 2)},
        "allow_row: wanted dtype int32, got float32",
    ),
}

WRONG_APPLY_LIMITS: dict[str, tuple[Change, str]] = {
    **WRONG_LIMITS,
    "rows of logits that overlap": (
        lambda d: {"logits": floats(d, 1, 64).expand(2, 64)},
        "logits: wanted rows that do not overlap, at least 64 elements apart, got 0",
    ),
    "logits in the limits": (
        lambda d: (
            lambda both: {"logits": both[:128].view(2, 64), "limits": both[112:].view(torch.int32).view(2, 8)}
        )(floats(d, 128)),
        shared("logits", "limits"),
    ),
}

WRONG_RENORM: dict[str, tuple[Change, str]] = {
    **WRONG_LIMITS,
    "dtype of out": (
        lambda d: {"out": zeros(d, 2, 64)},
        "out: wanted dtype float32, got int32",
    ),
    "columns of out": (lambda d: {"out": floats(d, 2, 65)}, "out: wanted shape [2, 64], got [2, 65]"),
    "rows of out that overlap": (
        lambda d: {"out": floats(d, 1, 64).expand(2, 64)},
        "out: wanted rows that do not overlap, at least 64 elements apart, got 0",
    ),
    "out a column behind logits": (
        lambda d: (lambda both: {"logits": both[:, :64], "out": both[:, 1:]})(floats(d, 2, 65)),
        shared("out", "logits"),
    ),
}

WRONG_TOPK_LOGPROBS: dict[str, tuple[Change, str]] = {
    **WRONG_LOGITS,
    "n below 0": (lambda d: {"n": -1}, "n: wanted 0 to 64, got -1"),
    "n too large": (lambda d: {"n": 65}, "n: wanted 0 to 64, got 65"),
    "dtype of sampled": (
        lambda d: {"sampled": floats(d, 2)},
        "sampled: wanted dtype int64 or int32, got float32",
    ),
    "rows of sampled": (lambda d: {"sampled": zeros(d, 3)}, "sampled: wanted shape [2], got [3]"),
    "dtype of ids": (lambda d: {"ids": zeros(d, 2, 4)}, "ids: wanted dtype int64, got int32"),
    "columns of logprobs": (
        lambda d: {"logprobs": floats(d, 2, 3)},
        "logprobs: wanted shape [2, 4], got [2, 3]",
    ),
    "shape of ranks": (
        lambda d: {"ranks": zeros(d, 2, 1, dtype=torch.int64)},
        "ranks: wanted shape [2], got [2, 1]",
    ),
    "rows of ids that overlap": (
        lambda d: {"ids": zeros(d, 1, 4, dtype=torch.int64).expand(2, 4)},
        "ids: wanted rows that do not overlap, at least 4 elements apart, got 0",
    ),
    "rows of logprobs that overlap": (
        lambda d: {"logprobs": floats(d, 1, 4).expand(2, 4)},
        "logprobs: wanted rows that do not overlap, at least 4 elements apart, got 0",
    ),
    "ranks in ids": (
        lambda d: (lambda both: {"ids": both, "ranks": both[0, :2]})(zeros(d, 2, 4, dtype=torch.int64)),
        shared("ranks", "ids"),
    ),
}


@dataclass(frozen=True)
class WrongCalls:
    """The wrong calls of one op."""

    checks: Checks
    """Have the op's name."""
    arguments: Callable[[str, dict[str, Any]], Any]
    """The arguments of a call on a device, with these changes."""
    wrong: dict[str, tuple[Change, str]]


OPS = {
    "decode": WrongCalls(DECODE, arguments, WRONG),
    "prefill": WrongCalls(PREFILL, prefill_arguments, WRONG_PREFILL),
    "prefill_slice": WrongCalls(PREFILL, slice_arguments, WRONG_PREFILL_SLICE),
    "blocks": WrongCalls(BLOCKS, blocks_arguments, WRONG_BLOCKS),
    "in_blocks": WrongCalls(IN_BLOCKS, in_blocks_arguments, WRONG_IN_BLOCKS),
    "apply_limits_": WrongCalls(APPLY_LIMITS, apply_limits_arguments, WRONG_APPLY_LIMITS),
    "renorm": WrongCalls(RENORM, renorm_arguments, WRONG_RENORM),
    "topk_logprobs": WrongCalls(TOPK_LOGPROBS, topk_logprobs_arguments, WRONG_TOPK_LOGPROBS),
}
CASES = [(op, what) for op, calls in OPS.items() for what in calls.wrong]
"""Every wrong call, by its op and by what is wrong with it."""


def message_of(op: str, what: str) -> str:
    """What every implementation says of a wrong call."""
    return f"{OPS[op].checks.op}: {OPS[op].wrong[what][1]}"


def name_of(op: str) -> str:
    """The op's name in ``torch.ops.gvr_topk``. A slice's messages have the name of the public function."""
    return OPS[op].checks.op.removeprefix("gvr_topk.") + ("_slice" if op == "prefill_slice" else "")


def wrong_call(op: str, what: str, device: str) -> Any:
    """The arguments of a wrong call."""
    return OPS[op].arguments(device, OPS[op].wrong[what][0](device))
