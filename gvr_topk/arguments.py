"""The arguments of the ops, described once: schemas, checks and every caller use these lists."""

from __future__ import annotations

import numbers
from dataclasses import dataclass
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor

from gvr_topk.constants import (
    BLOCK_SIZE,
    FLAG_CLAMP_PAGES,
    FLAG_QUANTILE_GUESS,
    MAX_BLOCKS_WIDTH,
    MAX_CHOSEN_BLOCKS,
    MAX_CLUSTER_SIZE,
    MAX_NEXT_N,
    MAX_PAGE_SIZE,
    MAX_ROWS,
    MAX_WIDTH,
    PHASE_STAMPS,
    STATE_FLOATS,
    Path,
    StatsColumn,
)
from gvr_topk.contract import DTYPES

NAME = "gvr_topk.indexer_topk_decode"
"""What every error message of the decode op begins with."""

PREFILL_NAME = "gvr_topk.indexer_topk_prefill"
"""What every error message of the prefill op begins with."""

BLOCKS_NAME = "gvr_topk.indexer_topk_blocks"
"""What every error message of the op that chooses blocks begins with."""

IN_BLOCKS_NAME = "gvr_topk.indexer_topk_in_blocks"
"""What every error message of the op that selects in given blocks begins with."""

PREFILL_PATHS = (Path.AUTO, Path.RADIX_ROUNDS)
"""Paths of the prefill op."""


class Arguments(NamedTuple):
    """One call of ``torch.ops.gvr_topk.indexer_topk_decode``, in the order of its schema.

    `gvr_topk.indexer_topk_decode` explains the arguments that users pass. Its `pdl`, `clamp_pages` and
    `drop_masked` are bits of `flags` here, because every argument of the schema costs host time in each call.
    The other arguments and flags are for measurements only:

    Attributes
    ----------
    phase_clocks : Tensor, ``[rows, 8]``, int64, or None
        Output: SM clock at phase boundaries, written only by libraries built with ``GVR_PHASE_TIMING``.
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
"""Tensors that the decode op writes to."""


class PrefillArguments(NamedTuple):
    """One call of ``torch.ops.gvr_topk.indexer_topk_prefill``, in the order of its schema.

    `gvr_topk.indexer_topk_prefill` explains what users pass. `path` is one of `PREFILL_PATHS` as a number.
    `flags` is the sum of `FLAG_PDL` and `FLAG_STREAMS`. With `FLAG_STREAMS`, which is for tests only, rows
    stream through shared memory although registers could hold them.
    """

    logits: Tensor
    row_starts: Tensor
    row_ends: Tensor
    out: Tensor
    k: int
    row_request: Tensor | None = None
    offsets: Tensor | None = None
    counts: Tensor | None = None
    page_table: Tensor | None = None
    slots: Tensor | None = None
    stats: Tensor | None = None
    page_size: int = 0
    path: int = 0
    flags: int = 0


PREFILL_WRITTEN = ("out", "counts", "slots", "stats")
"""Tensors that the prefill op writes to."""


class BlocksArguments(NamedTuple):
    """One call of ``torch.ops.gvr_topk.indexer_topk_blocks``, in the order of its schema.

    `gvr_topk.indexer_topk_blocks` explains what users pass. `flags` is `FLAG_PDL` or 0.
    """

    logits: Tensor
    seq_lens: Tensor
    out: Tensor
    blocks: Tensor
    k: int
    block_k: int
    next_n: int = 1
    flags: int = 0
    compress_ratio: int = 1
    block_size: int = BLOCK_SIZE


BLOCKS_WRITTEN = ("out", "blocks")
"""Tensors that the op that chooses blocks writes to."""


class InBlocksArguments(NamedTuple):
    """One call of ``torch.ops.gvr_topk.indexer_topk_in_blocks``, in the order of its schema.

    `gvr_topk.indexer_topk_in_blocks` explains what users pass. `flags` is `FLAG_PDL` or 0.
    """

    logits: Tensor
    seq_lens: Tensor
    blocks: Tensor
    out: Tensor
    k: int
    next_n: int = 1
    flags: int = 0
    compress_ratio: int = 1
    block_size: int = BLOCK_SIZE


IN_BLOCKS_WRITTEN = ("out",)
"""Tensors that the op that selects in given blocks writes to."""


def schema(arguments: type[Any] = Arguments, written: tuple[str, ...] = WRITTEN) -> str:
    """Schema of an op, in PyTorch's notation.

    Parameters
    ----------
    arguments : type
        `Arguments`, or the arguments of another op.
    written : tuple of str
        Names of the tensors that the op writes to.
    """
    kinds = {Tensor: "Tensor", Tensor | None: "Tensor?", int: "int"}
    letters = dict(zip(written, "abcdefghi", strict=False))
    parts = []
    for name, annotation in get_type_hints(arguments).items():
        kind = kinds[annotation]
        if name in letters:
            kind = kind.replace("Tensor", f"Tensor({letters[name]}!)")
        has_default = name in arguments._field_defaults
        parts.append(f"{kind} {name}" + (f"={arguments._field_defaults[name]}" if has_default else ""))
    return f"({', '.join(parts)}) -> ()"


_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def _name(kind: torch.dtype | torch.layout) -> str:
    return str(kind).removeprefix("torch.")


@dataclass(frozen=True)
class Checks:
    """The checks that ops, states and layers share.

    Attributes
    ----------
    op : str
        Name of the op; every message begins with it. Empty outside of the ops.
    """

    op: str = ""

    def fail(self, argument: str, wanted: object, got: object) -> ValueError:
        """Build the error of a wrong argument."""
        where = f"{self.op}: " if self.op else ""
        return ValueError(f"{where}{argument}: wanted {wanted}, got {got}")

    def wrong_type(self, argument: str, wanted: type, value: object) -> ValueError:
        """Build the error of an argument of a wrong type."""
        return self.fail(argument, f"a {wanted.__name__}", type(value).__name__)

    def types(self, arguments: NamedTuple) -> None:
        """Check of each argument of a call what PyTorch would refuse in words of its own."""
        for name, annotation in get_type_hints(type(arguments)).items():
            value = getattr(arguments, name)
            if annotation is int:
                if not -(2**63) <= value < 2**63:
                    raise self.fail(name, "an integer of 64 bits", value)
            elif value is not None or annotation is Tensor:
                self.dense(name, value)

    def dense(self, name: str, tensor: Any) -> None:
        """Check that an argument is a tensor whose elements lie in memory as strides say."""
        if not isinstance(tensor, Tensor):
            raise self.wrong_type(name, Tensor, tensor)
        if tensor.layout is not torch.strided or tensor.is_nested:
            raise self.fail(name, "a dense tensor", "nested" if tensor.is_nested else _name(tensor.layout))
        if tensor.is_quantized:
            raise self.fail(name, "a tensor that is not quantized", _name(tensor.dtype))

    def integer(self, argument: str, value: Any, low: int | None = None, high: int | None = None) -> int:
        """Convert any kind of integer, and refuse what would have to be rounded or is out of range."""
        number = value
        if type(value) is not int and not isinstance(value, torch.SymInt):  # a symbolic one stays symbolic
            if isinstance(value, bool) or not isinstance(value, numbers.Integral):
                raise self.fail(argument, "an integer", repr(value))
            number = int(value)
        if (low is not None and number < low) or (high is not None and number > high):
            both = f"{low} to {high}" if low is not None else f"at most {high}"
            raise self.fail(argument, f"at least {low}" if high is None else both, number)
        return number

    def flag(self, argument: str, value: Any) -> bool:
        """Refuse what is merely true or false in a condition, such as a text or a tensor."""
        if isinstance(value, bool):
            return value
        # NumPy's scalars are known by what they look like, because a packed kernel may not import NumPy.
        if str(getattr(value, "dtype", None)) != "bool" or getattr(value, "shape", None) != ():
            raise self.fail(argument, "true or false", repr(value))
        return bool(value)

    def device(self, argument: str, value: Any) -> torch.device:
        """Convert the name of a device."""
        try:
            return torch.device(value)
        except (RuntimeError, TypeError):
            raise self.fail(argument, "a torch.device or the name of one", repr(value)) from None

    def integers(self, name: str, tensor: Any, like: Tensor, shape: tuple[int | None, ...]) -> None:
        """Check that an argument is a tensor of integers of any size, on the device of `like`."""
        if not isinstance(tensor, Tensor):
            raise self.wrong_type(name, Tensor, tensor)
        if tensor.dtype not in _INTEGERS:
            raise self.fail(name, "an integer dtype", _name(tensor.dtype))
        self.tensor(name, tensor, like, tensor.dtype, shape, strided=True)

    def tensor(
        self,
        name: str,
        tensor: Tensor,
        like: Tensor,
        dtype: torch.dtype,
        shape: tuple[int | None, ...],
        *,
        strided: bool = False,
    ) -> None:
        """Check device (that of `like`), dtype, shape and, unless `strided`, that the inner stride is 1."""
        if not isinstance(tensor, Tensor):
            raise self.wrong_type(name, Tensor, tensor)
        if tensor.device != like.device:
            raise self.fail(name, f"a tensor on {like.device}", tensor.device)
        if tensor.dtype != dtype:
            raise self.fail(name, f"dtype {_name(dtype)}", _name(tensor.dtype))
        same = tensor.dim() == len(shape) and all(
            expected is None or size == expected for size, expected in zip(tensor.shape, shape, strict=True)
        )
        if not same:
            expected = ", ".join("any" if n is None else str(n) for n in shape)
            raise self.fail(name, f"shape [{expected}]", list(tensor.shape))
        if not strided and tensor.dim() > 0 and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise self.fail(name, "inner stride 1", tensor.stride(-1))

    def contiguous(self, name: str, tensor: Tensor) -> None:
        """Check that there is no gap between rows."""
        if not tensor.is_contiguous():
            raise self.fail(name, "contiguous rows", f"strides {tuple(tensor.stride())}")

    def rows_apart(self, name: str, tensor: Tensor, columns: int) -> None:
        """Check that no two rows share an element."""
        # Two blocks would write rows that share memory at once, and the rows would hold neither's result.
        if tensor.shape[0] > 1 and tensor.stride(0) < columns:
            raise self.fail(
                name, f"rows that do not overlap, at least {columns} elements apart", tensor.stride(0)
            )

    def results(self, name: str, tensor: Tensor, like: Tensor, rows: int, k: int, count: str = "k") -> None:
        """Check that a tensor can take `k` results of each row; `count` is the name of the argument `k`."""
        self.tensor(name, tensor, like, torch.int32, (rows, None))
        if tensor.shape[1] < k:
            raise self.fail(name, f"at least {count} = {k} columns", list(tensor.shape))
        self.rows_apart(name, tensor, k)

    def score_values(self, name: str, scores: Any) -> None:
        """Check that an argument is a tensor of scores, of any shape."""
        self.dense(name, scores)
        if scores.dtype not in DTYPES:
            raise self.fail(name, "dtype float32, bfloat16 or float16", _name(scores.dtype))

    def score_rows(self, logits: Tensor) -> None:
        """Check that the kernels take these score rows."""
        self.score_values("logits", logits)
        if logits.dim() != 2:
            raise self.fail("logits", "shape [rows, width]", list(logits.shape))
        rows, width = logits.shape
        if width > 1 and logits.stride(1) != 1:
            raise self.fail("logits", "inner stride 1", logits.stride(1))
        if width > MAX_WIDTH:
            raise self.fail("logits", f"at most {MAX_WIDTH} columns", width)
        if rows > MAX_ROWS:
            raise self.fail("logits", f"at most {MAX_ROWS} rows", rows)

    def scores(self, logits: Tensor, k: int) -> None:
        """Check that the kernels take these score rows and this number of items per row."""
        self.score_rows(logits)
        if not 1 <= k <= MAX_WIDTH:
            raise self.fail("k", f"1 to {MAX_WIDTH}", k)

    def lengths(self, a: Arguments | BlocksArguments | InBlocksArguments) -> None:
        """Check how rows belong to requests, and the length of each request or row."""
        rows = a.logits.shape[0]
        if not 1 <= a.next_n <= MAX_NEXT_N:
            raise self.fail("next_n", f"1 to {MAX_NEXT_N}", a.next_n)
        if rows % a.next_n != 0:
            raise self.fail("logits", f"a multiple of next_n = {a.next_n} rows", rows)
        if not 1 <= a.compress_ratio <= MAX_WIDTH:
            raise self.fail("compress_ratio", f"1 to {MAX_WIDTH}", a.compress_ratio)
        requests = rows // a.next_n
        self.tensor("seq_lens", a.seq_lens, a.logits, torch.int32, (None,))
        if a.seq_lens.shape[0] != requests and a.seq_lens.shape[0] != rows:
            either = f"{requests} elements" if requests == rows else f"{requests} or {rows} elements"
            raise self.fail("seq_lens", either, list(a.seq_lens.shape))

    def blocks_of_scores(self, a: BlocksArguments | InBlocksArguments) -> None:
        """Check the arguments that both block ops share: scores, lengths, and the tensor for positions."""
        self.scores(a.logits, a.k)
        if a.block_size != BLOCK_SIZE:
            raise self.fail("block_size", BLOCK_SIZE, a.block_size)
        self.lengths(a)
        self.results("out", a.out, a.logits, a.logits.shape[0], a.k)

    def pages(self, a: Arguments | PrefillArguments, requests: int | None) -> None:
        """Check the page table, for this number of requests (None: any), and the tensor for cache slots."""
        if a.slots is not None:
            if a.page_table is None:
                raise self.fail("slots", "a page_table beside it", None)
            self.results("slots", a.slots, a.logits, a.logits.shape[0], a.k)
        if a.page_table is None:
            return
        self.tensor("page_table", a.page_table, a.logits, torch.int32, (requests, None))
        if not 1 <= a.page_size <= MAX_PAGE_SIZE:
            raise self.fail("page_size", f"1 to {MAX_PAGE_SIZE} with a page_table", a.page_size)

    def row_table(
        self, name: str, tensor: Tensor | None, like: Tensor, dtype: torch.dtype, columns: int
    ) -> None:
        """Check an optional tensor without gaps that has `columns` numbers for each row."""
        if tensor is not None:
            self.tensor(name, tensor, like, dtype, (like.shape[0], columns))
            self.contiguous(name, tensor)


DECODE = Checks(NAME)
PREFILL = Checks(PREFILL_NAME)
BLOCKS = Checks(BLOCKS_NAME)
IN_BLOCKS = Checks(IN_BLOCKS_NAME)


def check(a: Arguments) -> None:
    """Refuse every argument of the decode op whose effect on the device would be undefined.

    Raises
    ------
    ValueError
        The message names the argument, what was wanted and what was got.
    """
    DECODE.scores(a.logits, a.k)
    rows = a.logits.shape[0]
    DECODE.lengths(a)
    requests = rows // a.next_n
    DECODE.results("out", a.out, a.logits, rows, a.k)
    _check_state(a, rows, requests)
    DECODE.row_table("next_state", a.next_state, a.logits, torch.float32, STATE_FLOATS)
    DECODE.pages(a, requests)
    if a.page_table is None and a.flags & FLAG_CLAMP_PAGES:
        raise DECODE.fail("clamp_pages", "a page_table beside it", None)
    if a.counts is not None:
        DECODE.tensor("counts", a.counts, a.logits, torch.int32, (rows,))
    DECODE.row_table("stats", a.stats, a.logits, torch.int32, len(StatsColumn))
    DECODE.row_table("phase_clocks", a.phase_clocks, a.logits, torch.int64, PHASE_STAMPS)
    if abs(a.hint_offset) > MAX_WIDTH:
        raise DECODE.fail("hint_offset", f"-{MAX_WIDTH} to {MAX_WIDTH}", a.hint_offset)
    if a.max_ctas != 0 and a.max_ctas not in (1, 2, 4, 8, MAX_CLUSTER_SIZE):
        raise DECODE.fail("max_ctas", "0, 1, 2, 4, 8 or 16", a.max_ctas)
    if 0 < a.max_ctas < a.ctas_per_row:
        raise DECODE.fail("ctas_per_row", f"at most max_ctas = {a.max_ctas}", a.ctas_per_row)


def _check_state(a: Arguments, rows: int, requests: int) -> None:
    if a.row_slot is not None:
        if a.state is None:
            raise DECODE.fail("row_slot", "a state beside it", None)
        DECODE.tensor("row_slot", a.row_slot, a.logits, torch.int32, (rows,))
    if a.state is None:
        if a.indices is not None:
            raise DECODE.fail("indices", "a state beside them", None)
        return
    DECODE.tensor("state", a.state, a.logits, torch.float32, (None, STATE_FLOATS))
    DECODE.contiguous("state", a.state)
    if a.row_slot is None and a.state.shape[0] < requests:
        raise DECODE.fail("state", f"at least {requests} slots without row_slot", a.state.shape[0])
    if a.indices is not None:
        DECODE.tensor("state.indices", a.indices, a.logits, torch.int32, (a.state.shape[0], a.k))
        DECODE.rows_apart("state.indices", a.indices, a.k)


def check_prefill(a: PrefillArguments) -> None:
    """Refuse every argument of the prefill op whose effect on the device would be undefined.

    Raises
    ------
    ValueError
        The message names the argument, what was wanted and what was got.
    """
    PREFILL.scores(a.logits, a.k)
    rows = a.logits.shape[0]
    for name, ends in (("row_starts", a.row_starts), ("row_ends", a.row_ends)):
        PREFILL.tensor(name, ends, a.logits, torch.int32, (rows,))
    PREFILL.results("out", a.out, a.logits, rows, a.k)
    requests: int | None = rows
    if a.row_request is not None:
        if a.page_table is None and a.offsets is None:
            raise PREFILL.fail("row_request", "a page_table or offsets beside it", None)
        PREFILL.tensor("row_request", a.row_request, a.logits, torch.int32, (rows,))
        requests = None
    PREFILL.pages(a, requests)
    if a.offsets is not None:
        if a.page_table is not None:
            if a.slots is None:
                raise PREFILL.fail("offsets", "slots beside page_table, so that out keeps positions", None)
            requests = a.page_table.shape[0]
        PREFILL.tensor("offsets", a.offsets, a.logits, torch.int32, (requests,))
    if a.counts is not None:
        PREFILL.tensor("counts", a.counts, a.logits, torch.int32, (rows,))
    PREFILL.row_table("stats", a.stats, a.logits, torch.int32, len(StatsColumn))
    if a.path not in PREFILL_PATHS:
        raise PREFILL.fail("path", " or ".join(str(int(path)) for path in PREFILL_PATHS), a.path)


def check_blocks(a: BlocksArguments) -> None:
    """Refuse every argument of the op that chooses blocks whose effect on the device would be undefined.

    Raises
    ------
    ValueError
        The message names the argument, what was wanted and what was got.
    """
    BLOCKS.blocks_of_scores(a)
    if a.logits.shape[1] > MAX_BLOCKS_WIDTH:
        raise BLOCKS.fail("logits", f"at most {MAX_BLOCKS_WIDTH} columns", a.logits.shape[1])
    if not a.k < a.block_k <= MAX_CHOSEN_BLOCKS:
        raise BLOCKS.fail("block_k", f"more than k = {a.k} and at most {MAX_CHOSEN_BLOCKS}", a.block_k)
    BLOCKS.results("blocks", a.blocks, a.logits, a.logits.shape[0], a.block_k, "block_k")


def check_in_blocks(a: InBlocksArguments) -> None:
    """Refuse every argument of the op that selects in blocks whose effect on the device would be undefined.

    Raises
    ------
    ValueError
        The message names the argument, what was wanted and what was got.
    """
    IN_BLOCKS.blocks_of_scores(a)
    IN_BLOCKS.tensor("blocks", a.blocks, a.logits, torch.int32, (a.logits.shape[0], None))
    if a.blocks.shape[1] > MAX_CHOSEN_BLOCKS:
        raise IN_BLOCKS.fail("blocks", f"at most {MAX_CHOSEN_BLOCKS} columns", a.blocks.shape[1])
