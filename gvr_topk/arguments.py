"""The arguments of the op, described once: the schema, the checks and every caller go by this list."""

from __future__ import annotations

from typing import NamedTuple, get_type_hints

import torch
from torch import Tensor

from gvr_topk.constants import (
    MAX_CLUSTER_SIZE,
    MAX_NEXT_N,
    MAX_PAGE_SIZE,
    MAX_ROWS,
    MAX_WIDTH,
    STATE_FLOATS,
    StatsColumn,
)
from gvr_topk.contract import DTYPES

NAME = "gvr_topk.indexer_topk_decode"
"""What every error message begins with."""

FLAG_PDL = 1
FLAG_QUANTILE_GUESS = 2
FLAG_CLAMP_PAGES = 4
FLAG_DROP_MASKED = 8
PHASE_STAMPS = 8
"""Columns of `Arguments.phase_clocks`."""


class Arguments(NamedTuple):
    """One call of ``torch.ops.gvr_topk.indexer_topk_decode``, in the order of its schema.

    `gvr_topk.indexer_topk_decode` explains what users pass; its `pdl`, `clamp_pages` and `drop_masked` are
    bits of `flags`, because every argument of the schema costs host time in each call. The rest is for
    measurements only:

    Attributes
    ----------
    phase_clocks : Tensor, ``[rows, 8]``, int64, or None
        Out: SM clock at phase boundaries, from libraries built with ``GVR_PHASE_TIMING``.
    flags : int
        Sum of `FLAG_PDL`, `FLAG_CLAMP_PAGES`, `FLAG_DROP_MASKED` and `FLAG_QUANTILE_GUESS` (paper's kernel:
        first threshold from the ``1 - alpha`` quantile of the hinted values instead of their mean).
    ctas_per_row : int
        Force the cluster size: 1, 2, 4, 8 or 16; 0 follows the plan.
    """

    logits: Tensor
    seq_lens: Tensor
    out: Tensor
    k: int
    row_slot: Tensor | None = None
    state: Tensor | None = None
    indices: Tensor | None = None
    next_state: Tensor | None = None
    counts: Tensor | None = None
    page_table: Tensor | None = None
    slots: Tensor | None = None
    stats: Tensor | None = None
    phase_clocks: Tensor | None = None
    next_n: int = 1
    page_size: int = 0
    path: int = 0
    max_ctas: int = 0
    flags: int = FLAG_QUANTILE_GUESS
    hint_offset: int = 0
    ctas_per_row: int = 0
    compress_ratio: int = 1


WRITTEN = ("out", "state", "indices", "next_state", "counts", "slots", "stats", "phase_clocks")
"""Tensors that the op writes to."""


def schema() -> str:
    """Schema of the op, in PyTorch's notation."""
    kinds = {Tensor: "Tensor", Tensor | None: "Tensor?", int: "int"}
    letters = dict(zip(WRITTEN, "abcdefghi", strict=False))
    parts = []
    for name, annotation in get_type_hints(Arguments).items():
        kind = kinds[annotation]
        if name in letters:
            kind = kind.replace("Tensor", f"Tensor({letters[name]}!)")
        has_default = name in Arguments._field_defaults
        parts.append(f"{kind} {name}" + (f"={Arguments._field_defaults[name]}" if has_default else ""))
    return f"({', '.join(parts)}) -> ()"


def fail(argument: str, wanted: object, got: object) -> ValueError:
    """Build the error of a wrong argument."""
    return ValueError(f"{NAME}: {argument}: wanted {wanted}, got {got}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_tensor(
    name: str, tensor: Tensor, like: Tensor, dtype: torch.dtype, shape: tuple[int | None, ...]
) -> None:
    if tensor.device != like.device:
        raise fail(name, f"a tensor on {like.device}", tensor.device)
    if tensor.dtype != dtype:
        raise fail(
            name, f"dtype {str(dtype).removeprefix('torch.')}", str(tensor.dtype).removeprefix("torch.")
        )
    same = tensor.dim() == len(shape) and all(
        expected is None or size == expected for size, expected in zip(tensor.shape, shape, strict=True)
    )
    if not same:
        expected = ", ".join("any" if n is None else str(n) for n in shape)
        raise fail(name, f"shape [{expected}]", list(tensor.shape))
    if tensor.dim() > 0 and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise fail(name, "inner stride 1", tensor.stride(-1))


def _check_contiguous(name: str, tensor: Tensor) -> None:
    if not tensor.is_contiguous():
        raise fail(name, "contiguous rows", f"strides {tuple(tensor.stride())}")


def _check_results(name: str, tensor: Tensor, like: Tensor, rows: int, k: int) -> None:
    _check_tensor(name, tensor, like, torch.int32, (rows, None))
    if tensor.shape[1] < k:
        raise fail(name, f"at least k = {k} columns", list(tensor.shape))
    _check_rows_apart(name, tensor, k)


def _check_rows_apart(name: str, tensor: Tensor, columns: int) -> None:
    # Two rows that share memory would be written by two blocks at once, and hold neither's result.
    if tensor.shape[0] > 1 and tensor.stride(0) < columns:
        raise fail(name, f"rows that do not overlap, at least {columns} elements apart", tensor.stride(0))


def check(a: Arguments) -> None:
    """Refuse every argument that would be undefined on the device.

    Raises
    ------
    ValueError
        The message names the argument, what was wanted and what was got.
    """
    if a.logits.dtype not in DTYPES:
        raise fail("logits", "dtype float32, bfloat16 or float16", _name(a.logits.dtype))
    if a.logits.dim() != 2:
        raise fail("logits", "shape [rows, width]", list(a.logits.shape))
    rows, width = a.logits.shape
    if width > 1 and a.logits.stride(1) != 1:
        raise fail("logits", "inner stride 1", a.logits.stride(1))
    if width > MAX_WIDTH:
        raise fail("logits", f"at most {MAX_WIDTH} columns", width)
    if rows > MAX_ROWS:
        raise fail("logits", f"at most {MAX_ROWS} rows", rows)
    if not 1 <= a.k <= MAX_WIDTH:
        raise fail("k", f"1 to {MAX_WIDTH}", a.k)
    if not 1 <= a.next_n <= MAX_NEXT_N:
        raise fail("next_n", f"1 to {MAX_NEXT_N}", a.next_n)
    if rows % a.next_n != 0:
        raise fail("logits", f"a multiple of next_n = {a.next_n} rows", rows)
    if not 1 <= a.compress_ratio <= MAX_WIDTH:
        raise fail("compress_ratio", f"1 to {MAX_WIDTH}", a.compress_ratio)
    requests = rows // a.next_n
    _check_tensor("seq_lens", a.seq_lens, a.logits, torch.int32, (None,))
    if a.seq_lens.shape[0] != requests and a.seq_lens.shape[0] != rows:
        either = f"{requests} elements" if requests == rows else f"{requests} or {rows} elements"
        raise fail("seq_lens", either, list(a.seq_lens.shape))
    _check_results("out", a.out, a.logits, rows, a.k)
    _check_state(a, rows, requests)
    if a.next_state is not None:
        _check_tensor("next_state", a.next_state, a.logits, torch.float32, (rows, STATE_FLOATS))
        _check_contiguous("next_state", a.next_state)
    _check_pages(a, rows, requests)
    if a.counts is not None:
        _check_tensor("counts", a.counts, a.logits, torch.int32, (rows,))
    for name, tensor, dtype, columns in (
        ("stats", a.stats, torch.int32, len(StatsColumn)),
        ("phase_clocks", a.phase_clocks, torch.int64, PHASE_STAMPS),
    ):
        if tensor is not None:
            _check_tensor(name, tensor, a.logits, dtype, (rows, columns))
            _check_contiguous(name, tensor)
    if abs(a.hint_offset) > MAX_WIDTH:
        raise fail("hint_offset", f"-{MAX_WIDTH} to {MAX_WIDTH}", a.hint_offset)
    if a.max_ctas != 0 and a.max_ctas not in (1, 2, 4, 8, MAX_CLUSTER_SIZE):
        raise fail("max_ctas", "0, 1, 2, 4, 8 or 16", a.max_ctas)
    if 0 < a.max_ctas < a.ctas_per_row:
        raise fail("ctas_per_row", f"at most max_ctas = {a.max_ctas}", a.ctas_per_row)


def _check_state(a: Arguments, rows: int, requests: int) -> None:
    if a.row_slot is not None:
        if a.state is None:
            raise fail("row_slot", "a state beside it", None)
        _check_tensor("row_slot", a.row_slot, a.logits, torch.int32, (rows,))
    if a.state is None:
        if a.indices is not None:
            raise fail("indices", "a state beside them", None)
        return
    _check_tensor("state", a.state, a.logits, torch.float32, (None, STATE_FLOATS))
    _check_contiguous("state", a.state)
    if a.row_slot is None and a.state.shape[0] < requests:
        raise fail("state", f"at least {requests} slots without row_slot", a.state.shape[0])
    if a.indices is not None:
        _check_tensor("state.indices", a.indices, a.logits, torch.int32, (a.state.shape[0], a.k))
        _check_rows_apart("state.indices", a.indices, a.k)


def _check_pages(a: Arguments, rows: int, requests: int) -> None:
    if a.slots is not None:
        if a.page_table is None:
            raise fail("slots", "a page_table beside it", None)
        _check_results("slots", a.slots, a.logits, rows, a.k)
    if a.page_table is None:
        if a.flags & FLAG_CLAMP_PAGES:
            raise fail("clamp_pages", "a page_table beside it", None)
        return
    _check_tensor("page_table", a.page_table, a.logits, torch.int32, (requests, None))
    if not 1 <= a.page_size <= MAX_PAGE_SIZE:
        raise fail("page_size", f"1 to {MAX_PAGE_SIZE} with a page_table", a.page_size)
