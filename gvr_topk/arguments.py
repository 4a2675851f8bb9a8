"""The arguments of the ops, described once: schemas, checks and every caller use these lists."""

from __future__ import annotations

import functools
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, get_args, get_type_hints

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

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
    MAX_WIDTH,
    PAPER_MAX_WIDTH,
    STATE_FLOATS,
    Path,
    StatsColumn,
)
from gvr_topk.contract import DTYPES

PREFILL_PATHS = (Path.AUTO, Path.RADIX_ROUNDS)
"""Paths of the prefill op."""

CLUSTER_SIZES = (0, 1, 2, 4, 8, 16)
"""CTAs per row that a call can ask for; 0 leaves the choice to the plan."""

PAPER_K = (512, 1024, 2048)
"""Items per row that path ``paper_gvr`` serves: ``paper_supports_k`` of ``policy.h``."""


@dataclass(frozen=True)
class Written:
    """Mark of a tensor that an op writes."""

    columns: str = ""  # the argument that says how many columns of each row are written; empty if all are
    shown: str = ""  # name of the tensor in messages, if that is not the argument's
    over: str = ""  # the argument that may be the same tensor, which a row is read from before it is written


Output = Annotated[Tensor, Written()]
Results = Annotated[Tensor, Written("k")]


class DecodeArguments(NamedTuple):
    """One call of ``torch.ops.gvr_topk.indexer_topk_decode``, in the order of its schema.

    `gvr_topk.indexer_topk_decode` explains the arguments that users pass. Every argument of the schema costs
    host time in each call, and more if it is passed. So `pdl`, `clamp_pages` and `drop_masked` are bits of
    `flags` here, and what calls need least comes last: the op's overload ``usual`` ends with `flags`. The
    other arguments and flags are for measurements only:

    Attributes
    ----------
    flags : int
        Sum of `FLAG_PDL`, `FLAG_CLAMP_PAGES`, `FLAG_DROP_MASKED` and `FLAG_QUANTILE_GUESS` (paper's kernel:
        first threshold from the ``1 - alpha`` quantile of the hinted values instead of their mean).
    ctas_per_row : int
        Force the cluster size: 1, 2, 4, 8 or 16; 0 follows the plan.
    """

    logits: Tensor
    seq_lens: Tensor
    out: Results
    k: int
    row_slot: Tensor | None = None
    state: Output | None = None
    next_n: int = 1
    compress_ratio: int = 1
    flags: int = FLAG_QUANTILE_GUESS
    page_table: Tensor | None = None
    page_size: int = 0
    slots: Results | None = None
    indices: Annotated[Tensor, Written(shown="state.indices")] | None = None
    next_state: Output | None = None
    counts: Output | None = None
    stats: Output | None = None
    hint_offset: int = 0
    path: int = 0
    max_ctas: int = 0
    ctas_per_row: int = 0


class PrefillArguments(NamedTuple):
    """One call of ``torch.ops.gvr_topk.indexer_topk_prefill``, in the order of its schema.

    `gvr_topk.indexer_topk_prefill` explains what users pass. `path` is one of `PREFILL_PATHS` as a number.
    `flags` is the sum of `FLAG_PDL` and `FLAG_STREAMS`. With `FLAG_STREAMS`, which is for tests only, rows
    stream through shared memory although registers could hold them.
    """

    logits: Tensor
    row_starts: Tensor
    row_ends: Tensor
    out: Results
    k: int
    row_request: Tensor | None = None
    offsets: Tensor | None = None
    counts: Output | None = None
    page_table: Tensor | None = None
    slots: Results | None = None
    stats: Output | None = None
    page_size: int = 0
    path: int = 0
    flags: int = 0


class PrefillSliceArguments(NamedTuple):
    """One call of ``torch.ops.gvr_topk.indexer_topk_prefill_slice``, in the order of its schema.

    This is `gvr_topk.indexer_topk_prefill` with a carry, an op of its own. `carry` is
    `gvr_topk.PrefillCarry.words`, and `flags` is `FLAG_PDL` or 0.
    """

    logits: Tensor
    row_starts: Tensor
    row_ends: Tensor
    carry: Output
    k: int
    column: int
    out: Results | None = None
    row_request: Tensor | None = None
    offsets: Tensor | None = None
    counts: Output | None = None
    page_table: Tensor | None = None
    slots: Results | None = None
    page_size: int = 0
    flags: int = 0


class BlocksArguments(NamedTuple):
    """One call of ``torch.ops.gvr_topk.indexer_topk_blocks``, in the order of its schema.

    `gvr_topk.indexer_topk_blocks` explains what users pass. `flags` is the sum of `FLAG_PDL` and
    `FLAG_DROP_MASKED`.
    """

    logits: Tensor
    seq_lens: Tensor
    out: Results
    blocks: Annotated[Tensor, Written("block_k")]
    k: int
    block_k: int
    next_n: int = 1
    flags: int = 0
    compress_ratio: int = 1
    block_size: int = BLOCK_SIZE
    row_starts: Tensor | None = None


class InBlocksArguments(NamedTuple):
    """One call of ``torch.ops.gvr_topk.indexer_topk_in_blocks``, in the order of its schema.

    `gvr_topk.indexer_topk_in_blocks` explains what users pass. `flags` is the sum of `FLAG_PDL` and
    `FLAG_DROP_MASKED`.
    """

    logits: Tensor
    seq_lens: Tensor
    blocks: Tensor
    out: Results
    k: int
    next_n: int = 1
    flags: int = 0
    compress_ratio: int = 1
    block_size: int = BLOCK_SIZE
    row_starts: Tensor | None = None


class TopkItemsArguments(NamedTuple):
    """One call of ``torch.ops.gvr_topk.topk_items``, in the order of its schema.

    It selects as many items of each row of `logits` as `indices` has columns, and writes them.

    Attributes
    ----------
    indices, values : Tensor, ``[rows, k]``, contiguous, int64 and of the dtype of `logits`
    sorted : int
        1: the best item comes first, and of equal ones, or of NaN, that at the smallest position. 0: items
        come by ascending positions.
    largest : int
        1; 0 selects the smallest, where NaN ranks above all others, too. Of equal scores those at the
        smallest positions are selected.
    candidates : Tensor, ``[rows, width]``, int64, contiguous
        The index of each position of a row; without it, itself.
    """

    logits: Tensor
    indices: Output
    values: Output | None = None
    sorted: int = 0
    largest: int = 1
    candidates: Tensor | None = None


class _Argument(NamedTuple):
    """What the annotation of an argument says."""

    name: str
    kind: str  # in PyTorch's notation
    optional: bool
    written: Written | None


@functools.cache
def _arguments_of(kind: Any) -> tuple[_Argument, ...]:
    """Return the arguments of an op, in the order of its schema."""
    found = []
    for name, annotation in get_type_hints(kind, include_extras=True).items():
        choices = [each for each in get_args(annotation) if each is not type(None)]
        optional = len(choices) < len(get_args(annotation))
        plain = choices[0] if optional and len(choices) == 1 else annotation
        mark, *others = getattr(plain, "__metadata__", (None,))
        is_tensor = getattr(plain, "__origin__", plain) is Tensor
        if others or not (isinstance(mark, Written | None) if is_tensor else annotation in (int, float)):
            wanted = "int, float or a Tensor, which may be marked Written and may be None"
            raise TypeError(f"{kind.__name__}.{name}: wanted {wanted}, got {annotation}")
        found.append(_Argument(name, "Tensor" if is_tensor else annotation.__name__, optional, mark))
    return tuple(found)


def schema(kind: Any, count: int | None = None) -> str:
    """Schema of an op, in PyTorch's notation.

    Parameters
    ----------
    kind : type
        `DecodeArguments`, or the arguments of another op.
    count : int, optional
        How many arguments, the first ones; default: all.
    """
    parts, letters = [], iter("abcdefghi")
    for name, what, optional, written in _arguments_of(kind)[:count]:
        what = f"Tensor({next(letters)}!)" if written else what
        default = f"={kind._field_defaults[name]}" if name in kind._field_defaults else ""
        parts.append(f"{what}{'?' if optional else ''} {name}{default}")
    return f"({', '.join(parts)}) -> ()"


_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def _name(kind: torch.dtype | torch.layout) -> str:
    return str(kind).removeprefix("torch.")


def either(choices: Sequence[object]) -> str:
    """Write numbers or names as a choice, such as ``1, 2 or 3``."""
    return f"{', '.join(map(str, choices[:-1]))} or {choices[-1]}"


class _Runs(NamedTuple):
    """The memory of a tensor: `rows` runs of `size` bytes each, `stride` bytes apart."""

    owner: int  # what the addresses count from: 0, or the storage of a tensor without memory
    begin: int
    rows: int
    size: int
    stride: int

    @property
    def end(self) -> int:
        return self.begin + (self.rows - 1) * self.stride + self.size


def _address(tensor: Tensor) -> tuple[int, Any]:
    """Return the address of a tensor. A traced one has none, and its place in its storage counts instead."""
    if isinstance(tensor, FakeTensor) or tensor.is_meta:
        return tensor.untyped_storage()._cdata, tensor.storage_offset() * tensor.element_size()
    return 0, tensor.data_ptr()


def _runs(tensor: Tensor, columns: int | None) -> _Runs | None:
    """Return the memory of the first `columns` elements of each row of a tensor of one or two dimensions.

    The result is None if there are none, or if sizes are symbolic: comparing those would fix them.
    """
    rows = tensor.shape[0] if tensor.dim() == 2 else 1
    columns = tensor.shape[-1] if columns is None else columns
    owner, begin = _address(tensor)
    stride = tensor.stride(0) if tensor.dim() == 2 else 0
    if any(isinstance(number, torch.SymInt) for number in (rows, columns, begin, stride)):
        return None
    if rows == 0 or columns == 0:
        return None
    size, stride = columns * tensor.element_size(), stride * tensor.element_size()
    if stride <= size:  # rows without gaps are one run
        rows, size = 1, (rows - 1) * stride + size
    return _Runs(owner, begin, rows, size, stride)


def _overlap(a: _Runs, b: _Runs) -> bool:
    """Whether two tensors have a byte in common.

    Rows may lie side by side, as columns of one buffer. Rows with different strides count as overlapping if
    the ranges of memory that they span do.
    """
    if a.owner != b.owner or a.begin >= b.end or b.begin >= a.end:
        return False
    if (a.rows > 1 and b.rows > 1 and a.stride != b.stride) or a.rows == b.rows == 1:
        return True
    stride = a.stride if a.rows > 1 else b.stride
    distance = (b.begin - a.begin) % stride
    return distance < a.size or distance + b.size > stride


@dataclass(frozen=True)
class Checks:
    """The checks that ops, states and layers share.

    ``packaging/generate_op_arguments.py`` writes those that only ops need, and the functions below that check
    a whole call, in C++ too. It says which, and refuses statements that it does not know.

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
        for (name, kind, optional, _), value in zip(_arguments_of(type(arguments)), arguments, strict=True):
            if kind != "Tensor":
                if kind == "int" and not -(2**63) <= value < 2**63:
                    raise self.fail(name, "an integer of 64 bits", value)
            elif value is not None or not optional:
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
        """Convert the name of a device that this torch can use."""
        try:
            device = torch.device(value)
        except (RuntimeError, TypeError):
            raise self.fail(argument, "a torch.device or the name of one", repr(value)) from None
        try:
            torch.empty(0, device=device)
        except (AssertionError, RuntimeError) as error:  # what a torch without CUDA, or without a GPU, says
            reason = str(error).split("\n", 1)[0]
            raise self.fail(
                argument, "a device that torch can use here", f"{str(device)!r}: {reason}"
            ) from None
        return device

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

    def states(self, name: str, tensor: Tensor) -> None:
        """Check that kernels can read and write a tensor of states 16 bytes at a time."""
        self.contiguous(name, tensor)
        address = _address(tensor)[1]
        if not isinstance(address, torch.SymInt) and address % 16 != 0:
            raise self.fail(name, "an address that is a multiple of 16", "one that is not")

    def flag_bits(self, flags: int, known: int) -> None:
        """Check that `flags` has no bits besides those of the op."""
        if flags & ~known:
            raise self.fail("flags", f"no bits outside of {known}", flags)

    def memory(self, arguments: NamedTuple) -> None:
        """Check that no written tensor of a call shares memory with another one, but as its mark says."""
        tensors = [
            (mark is not None, (mark and mark.shown) or name, mark, tensor)
            for (name, kind, _, mark), tensor in zip(_arguments_of(type(arguments)), arguments, strict=True)
            if kind == "Tensor" and tensor is not None
        ]
        others: list[tuple[str, _Runs]] = []
        for written, name, mark, tensor in sorted(tensors, key=lambda each: each[0]):
            columns, over = (mark.columns, mark.over) if mark else ("", "")
            runs = _runs(tensor, getattr(arguments, columns) if columns else None)
            if runs is None:
                continue
            for other, its in others if written else ():
                same = other == over and (runs.begin, runs.stride) == (its.begin, its.stride)
                if _overlap(runs, its) and not same:
                    raise self.fail(name, "memory of its own", f"memory shared with {other}")
            others.append((name, runs))

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

    def scores(self, logits: Tensor, k: int, fewest: int = 1) -> None:
        """Check that the kernels take these score rows and this number of items per row."""
        self.score_rows(logits)
        self.integer("k", k, fewest, MAX_WIDTH)

    def lengths(self, a: DecodeArguments | BlocksArguments | InBlocksArguments) -> None:
        """Check how rows belong to requests, and the length of each request or row."""
        rows = a.logits.shape[0]
        self.integer("next_n", a.next_n, 1, MAX_NEXT_N)
        if rows % a.next_n != 0:
            raise self.fail("logits", f"a multiple of next_n = {a.next_n} rows", rows)
        self.integer("compress_ratio", a.compress_ratio, 1, MAX_WIDTH)
        self.tensor("seq_lens", a.seq_lens, a.logits, torch.int32, (None,))
        requests = rows // a.next_n
        lengths = a.seq_lens.shape[0]
        if lengths != requests and lengths != rows:
            if requests == rows:
                raise self.fail("seq_lens", f"{requests} elements", list(a.seq_lens.shape))
            raise self.fail("seq_lens", f"{requests} or {rows} elements", list(a.seq_lens.shape))

    def blocks_of_scores(self, a: BlocksArguments | InBlocksArguments, fewest: int) -> None:
        """Check the arguments that both block ops share: scores, where rows lie, the tensor for positions."""
        self.scores(a.logits, a.k, fewest)
        rows = a.logits.shape[0]
        if a.block_size != BLOCK_SIZE:
            raise self.fail("block_size", BLOCK_SIZE, a.block_size)
        self.lengths(a)
        if a.row_starts is not None:
            self.tensor("row_starts", a.row_starts, a.logits, torch.int32, (rows,))
        self.results("out", a.out, a.logits, rows, a.k)
        self.flag_bits(a.flags, FLAG_PDL | FLAG_DROP_MASKED)

    def pages(
        self, a: DecodeArguments | PrefillArguments | PrefillSliceArguments, requests: int | None
    ) -> None:
        """Check the page table, for this number of requests (None: any), and the tensor for cache slots."""
        if a.slots is not None:
            if a.page_table is None:
                raise self.fail("slots", "a page_table beside it", None)
            self.results("slots", a.slots, a.logits, a.logits.shape[0], a.k)
        if a.page_table is None:
            if a.page_size != 0:
                raise self.fail("page_size", "a page_table beside it", None)
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


DECODE = Checks("gvr_topk.indexer_topk_decode")
PREFILL = Checks("gvr_topk.indexer_topk_prefill")
BLOCKS = Checks("gvr_topk.indexer_topk_blocks")
IN_BLOCKS = Checks("gvr_topk.indexer_topk_in_blocks")
TOPK = Checks("gvr_topk.topk")


def _check_state(a: DecodeArguments, rows: int, requests: int) -> None:
    if a.row_slot is not None:
        if a.state is None:
            raise DECODE.fail("row_slot", "a state beside it", None)
        DECODE.tensor("row_slot", a.row_slot, a.logits, torch.int32, (rows,))
    if a.state is None:
        if a.indices is not None:
            raise DECODE.fail("indices", "a state beside them", None)
        return
    DECODE.tensor("state", a.state, a.logits, torch.float32, (None, STATE_FLOATS))
    DECODE.states("state", a.state)
    if a.row_slot is None and a.state.shape[0] < requests:
        raise DECODE.fail("state", f"at least {requests} slots without row_slot", a.state.shape[0])
    if a.indices is not None:
        DECODE.tensor("state.indices", a.indices, a.logits, torch.int32, (a.state.shape[0], a.k))
        DECODE.rows_apart("state.indices", a.indices, a.k)


def check_decode(a: DecodeArguments) -> None:
    """Refuse every argument of the decode op whose effect on the device would be undefined.

    What is raised is a ValueError, here and below, that names the argument, what was wanted and what was got.
    """
    DECODE.scores(a.logits, a.k)
    rows = a.logits.shape[0]
    DECODE.lengths(a)
    requests = rows // a.next_n
    DECODE.results("out", a.out, a.logits, rows, a.k)
    _check_state(a, rows, requests)
    DECODE.row_table("next_state", a.next_state, a.logits, torch.float32, STATE_FLOATS)
    if a.next_state is not None:
        DECODE.states("next_state", a.next_state)
    DECODE.pages(a, requests)
    if a.page_table is None and a.flags & FLAG_CLAMP_PAGES:
        raise DECODE.fail("clamp_pages", "a page_table beside it", None)
    if a.counts is not None:
        DECODE.tensor("counts", a.counts, a.logits, torch.int32, (rows,))
    DECODE.row_table("stats", a.stats, a.logits, torch.int32, len(StatsColumn))
    DECODE.integer("hint_offset", a.hint_offset, -MAX_WIDTH, MAX_WIDTH)
    DECODE.integer("path", a.path, 0, len(Path) - 1)
    DECODE.flag_bits(a.flags, FLAG_PDL | FLAG_QUANTILE_GUESS | FLAG_CLAMP_PAGES | FLAG_DROP_MASKED)
    _check_plan(a)
    DECODE.memory(a)


def _check_plan(a: DecodeArguments) -> None:
    """Refuse what ``plan_problem`` of ``policy.h`` refuses on the least restricted GPU."""
    sizes = either(CLUSTER_SIZES)
    if a.max_ctas not in CLUSTER_SIZES:
        raise DECODE.fail("max_ctas", sizes, a.max_ctas)
    if 0 < a.max_ctas < a.ctas_per_row:
        raise DECODE.fail("ctas_per_row", f"at most max_ctas = {a.max_ctas}", a.ctas_per_row)
    forced, paper = a.ctas_per_row != 0, a.path == Path.PAPER_GVR
    if not forced and not paper:
        return
    width = a.logits.shape[1]
    if a.page_table is not None and a.flags & FLAG_CLAMP_PAGES:
        width = min(width, a.page_table.shape[1] * a.page_size)
    if forced and (a.ctas_per_row not in CLUSTER_SIZES or width > a.ctas_per_row * MAX_ELEMENTS_PER_CTA):
        raise DECODE.fail("ctas_per_row", f"{sizes} and enough for the width", a.ctas_per_row)
    if paper and a.k not in PAPER_K:
        raise DECODE.fail("k", f"{either(PAPER_K)} for path 'paper_gvr'", a.k)
    if paper and width > PAPER_MAX_WIDTH:
        raise DECODE.fail("logits", f"at most {PAPER_MAX_WIDTH} columns for path 'paper_gvr'", width)


def _check_windows(a: PrefillArguments | PrefillSliceArguments) -> None:
    """Check scores, windows and tables, and the tensors for results beside the statistics."""
    PREFILL.scores(a.logits, a.k)
    rows = a.logits.shape[0]
    PREFILL.tensor("row_starts", a.row_starts, a.logits, torch.int32, (rows,))
    PREFILL.tensor("row_ends", a.row_ends, a.logits, torch.int32, (rows,))
    if a.out is not None:
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


def check_prefill(a: PrefillArguments) -> None:
    """Refuse every argument of the prefill op whose effect on the device would be undefined."""
    _check_windows(a)
    PREFILL.row_table("stats", a.stats, a.logits, torch.int32, len(StatsColumn))
    if a.path != Path.AUTO and a.path != Path.RADIX_ROUNDS:
        raise PREFILL.fail("path", f"{Path.AUTO:d} or {Path.RADIX_ROUNDS:d}", a.path)
    PREFILL.flag_bits(a.flags, FLAG_PDL | FLAG_STREAMS)
    PREFILL.memory(a)


def check_prefill_slice(a: PrefillSliceArguments) -> None:
    """Refuse every argument of the prefill op on slices whose effect on the device would be undefined."""
    _check_windows(a)
    rows, width = a.logits.shape
    if a.out is None:
        if a.offsets is not None:
            raise PREFILL.fail("offsets", "an out beside it", None)
        if a.counts is not None:
            raise PREFILL.fail("counts", "an out beside it", None)
        if a.page_table is not None:
            raise PREFILL.fail("page_table", "an out beside it", None)
    PREFILL.tensor("carry", a.carry, a.logits, torch.int64, (None, a.k + 1))
    PREFILL.contiguous("carry", a.carry)
    if a.carry.shape[0] < rows:
        raise PREFILL.fail("carry", f"at least {rows} rows", a.carry.shape[0])
    if not 0 <= a.column <= MAX_WIDTH - width:
        raise PREFILL.fail("column", f"0 to {MAX_WIDTH - width} for {width} columns", a.column)
    PREFILL.flag_bits(a.flags, FLAG_PDL)
    PREFILL.memory(a)


def check_blocks(a: BlocksArguments) -> None:
    """Refuse every argument of the op that chooses blocks whose effect on the device would be undefined."""
    BLOCKS.blocks_of_scores(a, 0)
    if not a.k < a.block_k <= MAX_CHOSEN_BLOCKS or a.block_k < 2:
        raise BLOCKS.fail("block_k", f"2 to {MAX_CHOSEN_BLOCKS}, more than k = {a.k}", a.block_k)
    BLOCKS.results("blocks", a.blocks, a.logits, a.logits.shape[0], a.block_k, "block_k")
    BLOCKS.memory(a)


def check_in_blocks(a: InBlocksArguments) -> None:
    """Refuse every argument of the op in given blocks whose effect on the device would be undefined."""
    IN_BLOCKS.blocks_of_scores(a, 1)
    IN_BLOCKS.tensor("blocks", a.blocks, a.logits, torch.int32, (a.logits.shape[0], None))
    if a.blocks.shape[1] > MAX_CHOSEN_BLOCKS:
        raise IN_BLOCKS.fail("blocks", f"at most {MAX_CHOSEN_BLOCKS} columns", a.blocks.shape[1])
    IN_BLOCKS.memory(a)


def check_topk_items(a: TopkItemsArguments) -> None:
    """Refuse every argument of the op that selects items whose effect on the device would be undefined."""
    TOPK.score_rows(a.logits)
    rows, width = a.logits.shape
    TOPK.tensor("indices", a.indices, a.logits, torch.int64, (rows, None))
    TOPK.contiguous("indices", a.indices)
    k = a.indices.shape[1]
    if a.values is not None:
        TOPK.tensor("values", a.values, a.logits, a.logits.dtype, (rows, k))
        TOPK.contiguous("values", a.values)
    TOPK.integer("sorted", a.sorted, 0, 1)
    if k > width:
        raise TOPK.fail("indices", f"at most {width} columns", k)
    TOPK.integer("largest", a.largest, 0, 1)
    TOPK.row_table("candidates", a.candidates, a.logits, torch.int64, width)
    TOPK.memory(a)
