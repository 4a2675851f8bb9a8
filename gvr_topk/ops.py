"""Register the ops, and define their public functions.

The compiled library holds the CUDA implementations. They register themselves for the CUDA dispatch key when
`gvr_topk.library` loads that library.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gvr_topk import cpu
from gvr_topk.arguments import (
    BLOCKS,
    DECODE,
    IN_BLOCKS,
    PREFILL,
    PREFILL_PATHS,
    TOPK,
    BlocksArguments,
    Checks,
    DecodeArguments,
    InBlocksArguments,
    PrefillArguments,
    PrefillSliceArguments,
    TopkItemsArguments,
    check_blocks,
    check_decode,
    check_in_blocks,
    check_prefill,
    check_prefill_slice,
    check_topk_items,
    either,
    schema,
)
from gvr_topk.carry import PrefillCarry
from gvr_topk.constants import (
    BLOCK_SIZE,
    FLAG_CLAMP_PAGES,
    FLAG_DROP_MASKED,
    FLAG_PDL,
    FLAG_QUANTILE_GUESS,
    MAX_CHOSEN_BLOCKS,
    MAX_WIDTH,
    Path,
)
from gvr_topk.library import LibraryError, library_status
from gvr_topk.policy import ALL_PATHS, parse_path, paths_by_name
from gvr_topk.state import TopkState

# Loading the library registers the CUDA implementations. A failed load is reported only by a call that needs
# them.
_LIBRARY = library_status()

_PREFILL_PATHS = paths_by_name(PREFILL_PATHS)

_NO_MEMORY = "gvr_topk: cannot allocate"  # the message of cpp/torch/call.h

_AUTO = "auto"  # the object that a call gives without a path


class _Calls(NamedTuple):
    """What calls an op: with all arguments, or with no more than the first `usual_count`."""

    every: Callable[..., None]
    usual: Callable[..., None]
    usual_count: int
    checks: Checks


class Op(NamedTuple):
    """An op: a new one takes a row of `OPS`, what the row names, a public function and its kernels."""

    checks: Checks  # has the name of the public function, which is the op's too unless `suffix` follows it
    arguments: type[Any]  # from which the schema is made
    check: Callable[[Any], None]  # refuses wrong arguments, in a traced call too
    cpu: Callable[[Any], None]  # serves a call on a CPU, whose arguments are checked
    usual: int = 0
    """Number of arguments, the first ones, that the op's overload ``usual`` has; 0: there is none. Arguments
    that are left out cost host time, too, so most calls run this overload."""
    suffix: str = ""  # tells the ops of one public function apart

    @property
    def name(self) -> str:
        """Name of the op in ``torch.ops.gvr_topk``."""
        return self.checks.op.partition(".")[2] + self.suffix

    def register(self) -> _Calls:
        """Define the op with its implementations, and return what calls it."""
        every = self._overload("", None)
        usual = self._overload("usual", self.usual) if self.usual else every
        return _Calls(every, usual, self.usual, self.checks)

    def _overload(self, overload: str, count: int | None) -> Any:
        """Define the overload that has the first `count` arguments.

        Results are written into arguments, so a fake implementation has no output shape to compute: it only
        checks the traced arguments.
        """
        qualified = f"gvr_topk::{self.name}" + (f".{overload}" if overload else "")
        torch.library.define(qualified, schema(self.arguments, count))
        torch.library.impl(qualified, "CPU")(self._on_cpu)
        torch.library.register_fake(qualified)(self._traced)
        return getattr(getattr(torch.ops.gvr_topk, self.name), overload or "default")

    def _traced(self, *given: Any, **options: Any) -> None:
        self.check(self.arguments(*given, **options))

    def _on_cpu(self, *given: Any, **options: Any) -> None:
        arguments = self.arguments(*given, **options)
        self.check(arguments)
        self.cpu(arguments)


OPS = (
    Op(DECODE, DecodeArguments, check_decode, cpu.decode, usual=9),
    Op(PREFILL, PrefillArguments, check_prefill, cpu.prefill),
    Op(PREFILL, PrefillSliceArguments, check_prefill_slice, cpu.prefill_slice, suffix="_slice"),
    Op(BLOCKS, BlocksArguments, check_blocks, cpu.blocks),
    Op(IN_BLOCKS, InBlocksArguments, check_in_blocks, cpu.in_blocks),
    Op(TOPK, TopkItemsArguments, check_topk_items, cpu.topk_items, suffix="_items"),
)
_CALLS = {op.arguments: op.register() for op in OPS}


def register(op: Op) -> None:
    """Register an op of another module, so that `launch` serves its arguments too."""
    _CALLS[op.arguments] = op.register()


def _integers(checks: Checks, next_n: Any, compress_ratio: Any, block_size: Any) -> tuple[int, int, int]:
    """Convert the integer arguments that both block ops take, apart from the numbers of items."""
    return (
        checks.integer("next_n", next_n),
        checks.integer("compress_ratio", compress_ratio),
        checks.integer("block_size", block_size),
    )


def _common_flags(checks: Checks, pdl: Any, drop_masked: Any) -> int:
    """Add up the flags that `bind` and both block ops take."""
    return FLAG_PDL * checks.flag("pdl", pdl) + FLAG_DROP_MASKED * checks.flag("drop_masked", drop_masked)


def _parse_path(checks: Checks, path: str | Path, paths: Mapping[str, Path]) -> int:
    """Look up the number of a path by its name among those of an op."""
    try:
        return int(parse_path(path, paths))
    except ValueError as error:
        raise ValueError(f"{checks.op}: {error}") from None


def _error_of(check: Callable[..., None], *arguments: Any) -> ValueError | None:
    """Return what a check finds wrong, for a call that has failed already."""
    try:
        check(*arguments)
    except ValueError as error:
        return error
    return None


def _allocate(checks: Checks, logits: Tensor, columns: int) -> Tensor:
    """Allocate a result tensor, for as many rows as there are scores for."""
    try:
        return torch.empty((logits.shape[0], columns), dtype=torch.int32, device=logits.device)
    except (RuntimeError, AttributeError, IndexError):
        wrong = _error_of(checks.score_rows, logits)
        if wrong is not None:
            raise wrong from None
        raise


def _new_out(checks: Checks, logits: Tensor, k: int, fewest: int = 1) -> Tensor:
    """Allocate the result tensor of a call that was given no `out`."""
    checks.integer("k", k, fewest, MAX_WIDTH)  # before so much is allocated
    return _allocate(checks, logits, k)


def _argument_error(checks: Checks, arguments: NamedTuple, message: str) -> ValueError | None:
    """Build the error of a wrong argument from the message of a call that failed; None if all are right."""
    if f"{checks.op}: " in message:
        # The compiled op checks CUDA arguments, and its errors arrive as RuntimeError.
        return ValueError(message[message.index(checks.op) :])
    # PyTorch refuses some arguments in words of its own, and lets None pass.
    return _error_of(checks.types, arguments)


def launch(arguments: Any) -> None:
    """Run one call of the op whose arguments these are, those for measurements included.

    Arguments of no op are a `TypeError`; a failed launch is a `RuntimeError`, and a workspace for which there
    is no memory a `torch.OutOfMemoryError`; the rest as in `indexer_topk_decode`.
    """
    if type(arguments) not in _CALLS:
        kinds = either([op.arguments.__name__ for op in OPS])
        raise TypeError(f"gvr_topk.ops.launch: arguments: wanted {kinds}, got {type(arguments).__name__}")
    _launch(type(arguments), *arguments)


def _launch(kind: type[Any], *given: Any) -> None:
    """Run one call of the op that has these arguments, without those at the end that are as by default."""
    every, usual, usual_count, checks = _CALLS[kind]
    if not _LIBRARY.loaded and getattr(given[0], "is_cuda", False):
        raise LibraryError(f"{checks.op}: CUDA library: {_LIBRARY.reason}")
    try:
        (usual if len(given) <= usual_count else every)(*given)
    except (RuntimeError, AttributeError) as error:
        arguments, message = kind(*given), str(error).split("\n", 1)[0]
        if _NO_MEMORY in message:
            raise torch.OutOfMemoryError(message[message.index(_NO_MEMORY) :]) from error
        wrong = _argument_error(checks, arguments, message)
        if wrong is not None:
            raise wrong from None
        if isinstance(error, NotImplementedError) and given[0].is_cuda:
            reason = "holds no such op: install the package again (pip install .)"
            raise LibraryError(f"{checks.op}: CUDA library: {_LIBRARY.path} {reason}") from error
        raise


def indexer_topk_decode(
    logits: Tensor,
    seq_lens: Tensor,
    k: int,
    *,
    next_n: int = 1,
    out: Tensor | None = None,
    state: TopkState | None = None,
    row_slot: Tensor | None = None,
    next_state: Tensor | None = None,
    counts: Tensor | None = None,
    page_table: Tensor | None = None,
    page_size: int = 0,
    slots: Tensor | None = None,
    clamp_pages: bool = False,
    drop_masked: bool = False,
    path: str | Path = "auto",
    compress_ratio: int = 1,
    max_ctas: int = 0,
    pdl: bool = False,
    hint_offset: int = 0,
    stats: Tensor | None = None,
) -> Tensor:
    """Select the `k` largest scores of every row, exactly and deterministically.

    A row is visible up to its length ``n_r``; elements at and past ``n_r`` are never read as scores. The
    result depends on the visible scores alone: it is the same on every run, GPU, batch position, state and
    path. The state changes only the time.

    Parameters
    ----------
    logits : Tensor, ``[rows, width]``, float32, bfloat16 or float16
        Indexer scores. Inner stride 1; any row stride and alignment. Rows that start at multiples of 16
        bytes are faster. At most 2**21 columns and 2**26 rows. Rows may overlap.
    seq_lens : Tensor, ``[rows / next_n]`` or ``[rows]``, int32, same device
        With one number per request: the key count of the request, draft positions included, so that
        ``n_r = seq_lens[r // next_n] - next_n + (r % next_n) + 1``. With one number per row: ``n_r`` itself.
        The op reads the lengths on the device, so one captured CUDA graph serves growing rows. Lengths above
        `width` count as `width`, negative ones as zero.
    k : int
        Items per row, 1 to 2**21. It may exceed `width`: places without an item get ``-1``.
    next_n : int, default 1
        Rows per request: 1 plus the number of draft tokens.
    out : Tensor, ``[rows, >= k]``, int32, optional
        Where to write; allocated when absent. Pass it inside CUDA graphs. Rows must not overlap.
    state : TopkState, optional
        Input and output: what the last step left in each slot. This step predicts the k-th value from it, and
        the last row of each request then overwrites its slot. Any content is safe; garbage is at worst slow.
        Without a state, the op uses a sample of the row instead.
    row_slot : Tensor, ``[rows]``, int32, optional
        Slot of each row in `state`. A negative or too large number means no hint and no write-back (padding
        rows). Default: request ``r // next_n`` uses slot ``r // next_n``. Requests may share a slot. If the
        state keeps positions, the slot gets what the last of these requests leaves, and the other requests
        leave nothing. If it keeps predictions alone, the slot gets the prediction of one of them, never a
        mixture; on a GPU it is not defined of which one.
    next_state : Tensor, ``[rows, 4]``, float32, contiguous, optional
        Output: what each row leaves for the next step. The op then reads `state` but does not write it;
        `TopkState.accept` later copies the last accepted row of each request to it.
    counts : Tensor, ``[rows]``, int32, optional
        Output: how many items each row has, ``min(max(n_r, 0), k)``, or fewer with `drop_masked`. The places
        after the items hold ``-1``.
    page_table : Tensor, ``[rows / next_n, pages]``, int32, optional
        Page table of a paged cache. The op translates each selected position to a cache slot:
        ``page_table[position // page_size] * page_size + position % page_size``, computed in 64 bits; ``-1``
        for a page that the table does not hold or holds as a negative number, and for a slot beyond int32.
        The state keeps positions.
    page_size : int, default 0
        Positions per page, 1 to 2**31 - 1; needed with `page_table`, and refused without one.
    slots : Tensor, ``[rows, >= k]``, int32, optional
        Where cache slots are written, so that `out` keeps positions. Without it the cache slots take the
        place of positions in `out`. Rows must not overlap.
    clamp_pages : bool, default False
        Limit ``n_r`` to the ``pages * page_size`` positions that `page_table`, which it needs, covers: the
        call then selects as if `logits` had no columns behind them. A page that the table holds as a negative
        number counts as covered. If false, rows may select positions behind the table, which have no slot.
    drop_masked : bool, default False
        Select no column whose score is ``-inf``: the items of a row are then the others among its `k`
        largest, in `out`, in `slots` and in the positions that the state keeps. Statistics and predictions
        stay those of the `k` largest. Rows no longer than `k` are then read, too.
    path : {"auto", "paper_gvr", "no_hint", "radix_rounds"} or gvr_topk.constants.Path, default "auto"
        ``"auto"`` predicts from `state` where the gate allows it (`gvr_topk.policy.can_use_heuristic`).
        ``"no_hint"`` estimates from a sample of the row, ``"radix_rounds"`` not at all, and ``"paper_gvr"``
        is the paper's four-phase kernel. On a CPU there is one implementation for all paths.
    compress_ratio : int, default 1
        Keys per score, for indexers that score groups of keys. Lengths count keys as above, and ``n_r`` is
        the length of the row divided by `compress_ratio`, rounded down.
    max_ctas : {0, 1, 2, 4, 8, 16}, default 0
        Cap the cluster size, the number of CTAs that share a row; 0 sets no cap. A cap helps on GPUs shared
        with long-running kernels, because a cluster starts only when one GPC has room for all of it: on an
        H200 16 CTAs wait for a free GPC, 8 still start beside 64 held SMs, and 4 beside 96. A row too wide
        for the cap takes the smallest size that holds it. With or without a cap, a context that has no room
        for the planned cluster (a green context, a MIG slice) gets the largest that it has room for.
    pdl : bool, default False
        Launch with programmatic stream serialization: the kernel may start while the previous kernel still
        runs, and waits for the end of that kernel before the first read. It then lets the next kernel start;
        the paper's kernel does so when its result is written.
    hint_offset : int, default 0
        Added to the positions of the last step when they are looked up, by the paper's kernel and for the
        ``hits`` of the statistics. 1 suits scores that move with the query.
    stats : Tensor, ``[rows, 8]``, int32, contiguous, optional
        Output: for each row one number per `gvr_topk.constants.StatsColumn`.

    Returns
    -------
    Tensor, ``[rows, >= k]``, int32
        `out`. **Which items:** those with the same multiset of values as ``torch.topk``; among values equal
        to the k-th, those with the smallest indices. NaN ranks above +inf, ``-0.0`` equals ``+0.0``.
        **In what order:** by ascending index. A row with ``n_r <= k`` yields ``0 .. n_r - 1`` and then
        ``-1``; a row with ``n_r <= 0`` yields only ``-1``. With `drop_masked` items of ``-inf`` are left out.

    Raises
    ------
    ValueError
        An argument has the wrong device, dtype, shape, stride or range, or shares memory with another one
        that the call writes; the message names it. Under ``torch.compile`` torch raises an exception of its
        own, which holds this message.
    LibraryError
        The tensors are on a GPU, and the CUDA library is not available.

    Notes
    -----
    The op allocates nothing when `out` is given, needs no workspace (everything is on chip), reads nothing
    on the host and never synchronizes. Two calls that share slots of a state belong on one stream.

    If another stream writes an argument while a launch reads it, the result of that launch is unspecified.
    Even then the launch ends, and for each row it writes only the row's own places of each output, and its
    slot of `state`.

    No tensor that the call writes may share memory with another of its tensors. ``torch.func.vmap`` is not
    supported: give one call the rows of the whole batch.

    Examples
    --------
    >>> scores = torch.tensor([[0.5, 3.0, 1.0, 3.0]])
    >>> indexer_topk_decode(scores, torch.tensor([4], dtype=torch.int32), 2)
    tensor([[1, 3]], dtype=torch.int32)
    """
    # Checks cost host time in every call, so arguments that are all plain integers take one test together,
    # and flags are compared before they are checked.
    if not (type(k) is type(next_n) is type(page_size) is type(max_ctas) is type(compress_ratio) is int):
        k, next_n = DECODE.integer("k", k), DECODE.integer("next_n", next_n)
        page_size = DECODE.integer("page_size", page_size)
        max_ctas = DECODE.integer("max_ctas", max_ctas)
        compress_ratio = DECODE.integer("compress_ratio", compress_ratio)
    if type(hint_offset) is not int:
        hint_offset = DECODE.integer("hint_offset", hint_offset)
    if out is None:
        out = _new_out(DECODE, logits, k)
    words = indices = None
    if state is not None:
        if not isinstance(state, TopkState):
            raise DECODE.wrong_type("state", TopkState, state)
        words, indices = state.words, state.indices
    flags = FLAG_QUANTILE_GUESS
    if pdl is not False and (pdl is True or DECODE.flag("pdl", pdl)):
        flags |= FLAG_PDL
    if clamp_pages is not False and (clamp_pages is True or DECODE.flag("clamp_pages", clamp_pages)):
        flags |= FLAG_CLAMP_PAGES
    if drop_masked is not False and (drop_masked is True or DECODE.flag("drop_masked", drop_masked)):
        flags |= FLAG_DROP_MASKED
    number = 0 if path is _AUTO else _parse_path(DECODE, path, ALL_PATHS)
    # The dispatcher takes longer over an argument that is passed than over one that is as by default.
    used: tuple[Any, ...] = ()
    if not (
        page_table is slots is indices is next_state is counts is stats is None
        and page_size == hint_offset == number == max_ctas == 0
    ):
        used = (page_table, page_size, slots, indices, next_state, counts, stats)
        used = (*used, hint_offset, number, max_ctas)
    if used or not (next_n == compress_ratio == 1 and flags == FLAG_QUANTILE_GUESS):
        used = (next_n, compress_ratio, flags, *used)
    _launch(DecodeArguments, logits, seq_lens, out, k, row_slot, words, *used)
    return out


def bind(
    logits: Tensor,
    seq_lens: Tensor,
    k: int,
    *,
    out: Tensor,
    next_n: int = 1,
    state: TopkState | None = None,
    row_slot: Tensor | None = None,
    drop_masked: bool = False,
    compress_ratio: int = 1,
    pdl: bool = False,
) -> Callable[[], None]:
    """Prepare a call of `indexer_topk_decode`, to be made again and again on the same tensors.

    The arguments, some of that function's, are checked here and not again: each call costs the host
    what PyTorch's dispatcher and a launch take. It reads what the tensors hold then, as the replay of a CUDA
    graph does.

    Returns
    -------
    callable
        Runs one step and writes `out`; takes nothing and returns nothing.

    Raises
    ------
    ValueError, LibraryError
        As `indexer_topk_decode`. A call of what is returned raises PyTorch's own errors.

    Examples
    --------
    >>> scores, chosen = torch.tensor([[0.5, 3.0, 1.0, 3.0]]), torch.empty(1, 2, dtype=torch.int32)
    >>> step = bind(scores, torch.tensor([4], dtype=torch.int32), 2, out=chosen)
    >>> step(); chosen
    tensor([[1, 3]], dtype=torch.int32)
    """
    if state is not None and not isinstance(state, TopkState):
        raise DECODE.wrong_type("state", TopkState, state)
    arguments = DecodeArguments(
        logits,
        seq_lens,
        out,
        DECODE.integer("k", k),
        row_slot,
        None if state is None else state.words,
        DECODE.integer("next_n", next_n),
        DECODE.integer("compress_ratio", compress_ratio),
        FLAG_QUANTILE_GUESS | _common_flags(DECODE, pdl, drop_masked),
        indices=None if state is None else state.indices,
    )
    DECODE.types(arguments)
    check_decode(arguments)
    if logits.is_cuda and not _LIBRARY.loaded:
        raise LibraryError(f"{DECODE.op}: CUDA library: {_LIBRARY.reason}")
    every, usual, usual_count, _ = _CALLS[DecodeArguments]
    given, defaults = list(arguments), list(DecodeArguments._field_defaults.values())
    while defaults and given[-1] is defaults.pop():  # what is as by default costs host time if it is passed
        given.pop()
    return functools.partial(usual if len(given) <= usual_count else every, *given)


def indexer_topk_prefill(
    logits: Tensor,
    row_starts: Tensor,
    row_ends: Tensor,
    k: int,
    *,
    carry: PrefillCarry | None = None,
    column: int = 0,
    out: Tensor | None = None,
    counts: Tensor | None = None,
    row_request: Tensor | None = None,
    offsets: Tensor | None = None,
    page_table: Tensor | None = None,
    page_size: int = 0,
    slots: Tensor | None = None,
    path: str | Path = "auto",
    pdl: bool = False,
    stats: Tensor | None = None,
) -> Tensor:
    """Select the `k` largest scores in a window of every row, exactly and deterministically.

    The window of row ``r`` is ``logits[r, start_r:end_r]`` with ``start_r = max(row_starts[r], 0)`` and
    ``end_r = min(row_ends[r], width)``, and holds ``n_r = max(end_r - start_r, 0)`` scores. Elements outside
    of the window are never read as scores. The result depends on the scores in the window alone: it is the
    same on every run, GPU, batch position and path.

    Parameters
    ----------
    logits : Tensor, ``[rows, width]``, float32, bfloat16 or float16
        Indexer scores, a row for each query token. Inner stride 1; any row stride and alignment. At most
        2**21 columns and 2**26 rows, and any number of elements. Rows may overlap.
    row_starts : Tensor, ``[rows]``, int32, same device
        First column of each row's window; negative ones count as zero. The op reads it on the device, like
        `row_ends`, so one captured CUDA graph serves windows that change.
    row_ends : Tensor, ``[rows]``, int32, same device
        One past the last column of each row's window; values above `width` count as `width`. A window that
        ends where it starts, or before, is empty. Windows of neighbouring rows need not be related; where
        they belong to one request and grow, as in causal prefill, each row's k-th value may predict that of
        the next row.
    k : int
        Items per row, 1 to 2**21. It may exceed a window's length: places without an item get ``-1``.
    carry : PrefillCarry, optional
        Input and output: what is best so far of rows whose scores come in slices, one call for each slice, in
        ascending order. `logits` are columns ``column .. column + width - 1`` of the rows. `row_starts` and
        `row_ends` count in columns of the whole rows, and are the same in all calls of a row. The call that
        is given `out` brings the last slice. It writes what one call on the whole rows writes, bit for bit,
        and leaves the rows of the carry empty. A call without `out` writes nothing but the carry, takes no
        `counts`, `offsets` or `page_table`, and returns None. Slices may have any width, narrower than `k`
        too, and a row may be at most 2**21 columns long in all. `path` makes no difference to slices.
    column : int, default 0
        First column of the slice; only with a carry.
    out : Tensor, ``[rows, >= k]``, int32, optional
        Where to write; allocated when absent, unless there is a carry. Pass it inside CUDA graphs. Rows must
        not overlap.
    counts : Tensor, ``[rows]``, int32, optional
        Output: how many items each row has, ``min(n_r, k)``. The places after the items hold ``-1``.
    row_request : Tensor, ``[rows]``, int32, optional
        Request of each row, which is its row of `offsets` and `page_table`. Without it each row has its own
        request. A row whose request is negative, or not below the number of requests, has an empty window
        (padding rows).
    offsets : Tensor, ``[rows]``, or ``[requests]`` with `row_request`, int32, optional
        Added to every position that is written to `out`, computed in 64 bits; a result that int32 cannot hold
        becomes ``-1``. Padding stays ``-1``. If there is a page table, too, `slots` is needed.
    page_table : Tensor, ``[rows, pages]``, or ``[requests, pages]`` with `row_request`, int32, optional
        Page table of a paged cache, as for `indexer_topk_decode`: each position in the window, without
        offset, is translated to a cache slot.
    page_size, slots, pdl
        As for `indexer_topk_decode`.
    path : {"auto", "radix_rounds"} or gvr_topk.constants.Path, default "auto"
        ``"auto"`` predicts the k-th value of a row from the rows before, or guesses it from a sample of a row
        of more than 32,768 columns that these do not predict closely; ``"radix_rounds"`` does neither. On a
        CPU there is one implementation for both.
    stats : Tensor, ``[rows, 8]``, int32, contiguous, optional
        Output: for each row one number per `gvr_topk.constants.StatsColumn`. The reason is ``USED`` where a
        row was predicted from the row before, ``FIRST_STEP`` where it was not, ``SHORT_ROW`` where the window
        holds no more than `k` scores, and ``DISABLED`` with path ``"radix_rounds"``. There are none of
        slices.

    Returns
    -------
    Tensor, ``[rows, >= k]``, int32, or None
        `out`; None if there is a carry and no `out`. **Which items:** those with the same multiset of values
        as ``torch.topk`` of the window; among values equal to the k-th, those with the smallest positions.
        NaN ranks above +inf, ``-0.0`` equals ``+0.0``. **In what order:** by ascending position, counted from
        the start of the window. A row with ``n_r <= k`` yields ``0 .. n_r - 1`` and then ``-1``; an empty
        window yields only ``-1``.

    Raises
    ------
    ValueError, LibraryError
        As in `indexer_topk_decode`.

    Notes
    -----
    As for `indexer_topk_decode`. The op keeps no state but a carry: a row may be predicted from the row
    before within one call, never across calls.

    Examples
    --------
    Two requests of two and three keys lie one behind the other. The call has the last two rows of each:

    >>> scores = torch.tensor([[3.0, 1.0, 5.0, 2.0, 4.0]]).repeat(4, 1)
    >>> starts = torch.tensor([0, 0, 2, 2], dtype=torch.int32)
    >>> ends = torch.tensor([1, 2, 4, 5], dtype=torch.int32)
    >>> indexer_topk_prefill(scores, starts, ends, 2)
    tensor([[ 0, -1],
            [ 0,  1],
            [ 0,  1],
            [ 0,  2]], dtype=torch.int32)
    >>> indexer_topk_prefill(scores, starts, ends, 2, offsets=starts)
    tensor([[ 0, -1],
            [ 0,  1],
            [ 2,  3],
            [ 2,  4]], dtype=torch.int32)

    The same columns in two slices:

    >>> carry, out = PrefillCarry(4, 2), torch.empty(4, 2, dtype=torch.int32)
    >>> indexer_topk_prefill(scores[:, :3], starts, ends, 2, carry=carry)
    >>> indexer_topk_prefill(scores[:, 3:], starts, ends, 2, carry=carry, column=3, out=out)
    tensor([[ 0, -1],
            [ 0,  1],
            [ 0,  1],
            [ 0,  2]], dtype=torch.int32)
    """
    if not (type(k) is type(page_size) is int):
        k, page_size = PREFILL.integer("k", k), PREFILL.integer("page_size", page_size)
    number = _parse_path(PREFILL, path, _PREFILL_PATHS)
    flags = FLAG_PDL if pdl is True or (pdl is not False and PREFILL.flag("pdl", pdl)) else 0
    if carry is not None:
        if not isinstance(carry, PrefillCarry):
            raise PREFILL.wrong_type("carry", PrefillCarry, carry)
        if stats is not None:
            raise PREFILL.fail("stats", "None beside a carry", type(stats).__name__)
        column = PREFILL.integer("column", column)
        tables = (row_request, offsets, counts, page_table, slots, page_size)
        _launch(
            PrefillSliceArguments,
            *(logits, row_starts, row_ends, carry.words, k, column, out, *tables, flags),
        )
        return out  # type: ignore[return-value]  # None has no use, and callers without a carry never get it
    if column != 0:
        raise PREFILL.fail("column", "a carry beside it", None)
    if out is None:
        out = _new_out(PREFILL, logits, k)
    _launch(
        PrefillArguments,
        *(logits, row_starts, row_ends, out, k, row_request, offsets, counts, page_table, slots, stats),
        *(page_size, number, flags),
    )
    return out


def indexer_topk_blocks(
    logits: Tensor,
    seq_lens: Tensor,
    k: int,
    block_k: int,
    *,
    block_size: int = BLOCK_SIZE,
    next_n: int = 1,
    compress_ratio: int = 1,
    row_starts: Tensor | None = None,
    out: Tensor | None = None,
    blocks: Tensor | None = None,
    drop_masked: bool = False,
    pdl: bool = False,
) -> tuple[Tensor, Tensor]:
    """Select the `k` largest scores and the `block_k` best blocks of each row exactly, in one read of it.

    This op serves indexers of two levels, as DeepSeek-V4.1 has one (sgl-project/sglang#39671 and #40574): one
    layer scores all positions, selects its own positions, and publishes blocks of neighbouring positions.
    Other layers then select within these blocks by `indexer_topk_in_blocks`. Block ``b`` holds the
    `block_size` positions from ``b * block_size`` on, and its key is its largest visible score.

    Parameters
    ----------
    logits, seq_lens, next_n, compress_ratio, pdl
        As for `indexer_topk_decode`.
    k : int
        Positions per row, 0 to ``block_k - 1``. It may exceed a row's length: places without an item get
        ``-1``. With 0 blocks alone are chosen, which takes less time.
    block_k : int
        Blocks per row, 2 to 2,048. It must exceed `k`, so that the `k` largest scores lie in chosen blocks.
    block_size : {8}, default 8
        Positions per block.
    row_starts : Tensor, ``[rows]``, int32, same device, optional
        Column from which each row's length, positions and blocks count, for rows of prefill that lie behind
        one another in the columns; 0 without it. Negative numbers count as 0, and those above `width` as
        `width`; a row ends with its columns. Rows that start at 16-byte boundaries are faster.
    out : Tensor, ``[rows, >= k]``, int32, optional
        Where positions are written; allocated when absent. Pass it inside CUDA graphs. Rows must not overlap.
    blocks : Tensor, ``[rows, >= block_k]``, int32, optional
        Where block numbers are written, likewise.
    drop_masked : bool, default False
        Select no position whose score is ``-inf``, as for `indexer_topk_decode`, and choose no block that
        holds only such scores, but for the newest. The places that are left at the end get ``-1``.

    Returns
    -------
    positions : Tensor, ``[rows, >= k]``, int32
        `out`, with the result of `indexer_topk_decode`: ascending positions, then ``-1``.
    blocks : Tensor, ``[rows, >= block_k]``, int32
        `blocks`. **Which blocks:** the newest block, which holds position ``n_r - 1``, whatever its scores
        are; and of the other blocks those with the largest keys. Among keys equal to the last one taken, the
        smallest block numbers win. NaN ranks above +inf, and so does a block that holds a NaN.
        **In what order:** by ascending number. A row of at most `block_k` blocks yields all of them and then
        ``-1``; a row with ``n_r <= 0`` yields only ``-1``. With `drop_masked` masked blocks are left out.

    Raises
    ------
    ValueError, LibraryError
        As in `indexer_topk_decode`.

    Notes
    -----
    As for `indexer_topk_decode`, up to 262,144 columns (102,400 on compute capability 12). On a GPU, wider
    rows take three launches and a workspace of 4 bytes for each block of each row, about ``rows * width / 2``
    bytes. It comes from torch's allocator and goes back there at the end of the call, so ``torch.cuda.graph``
    captures it as it does other allocations.

    Examples
    --------
    Of four blocks the two best are chosen: the newest one, and the one that holds the largest score.

    >>> scores = torch.zeros(1, 32)
    >>> scores[0, [3, 12, 20]] = torch.tensor([1.0, 3.0, 2.0])
    >>> positions, blocks = indexer_topk_blocks(scores, torch.tensor([32], dtype=torch.int32), 1, 2)
    >>> positions
    tensor([[12]], dtype=torch.int32)
    >>> blocks
    tensor([[1, 3]], dtype=torch.int32)
    """
    if not (type(k) is type(block_k) is type(next_n) is type(compress_ratio) is type(block_size) is int):
        k, block_k = BLOCKS.integer("k", k), BLOCKS.integer("block_k", block_k)
        next_n, compress_ratio, block_size = _integers(BLOCKS, next_n, compress_ratio, block_size)
    if out is None:
        out = _new_out(BLOCKS, logits, k, 0)
    if blocks is None:
        if not 2 <= block_k <= MAX_CHOSEN_BLOCKS:  # before so much is allocated
            raise BLOCKS.fail("block_k", f"2 to {MAX_CHOSEN_BLOCKS}, more than k = {k}", block_k)
        blocks = _allocate(BLOCKS, logits, block_k)
    flags = _common_flags(BLOCKS, pdl, drop_masked)
    _launch(
        BlocksArguments,
        *(logits, seq_lens, out, blocks, k, block_k, next_n, flags, compress_ratio, block_size, row_starts),
    )
    return out, blocks


def indexer_topk_in_blocks(
    logits: Tensor,
    seq_lens: Tensor,
    blocks: Tensor,
    k: int,
    *,
    block_size: int = BLOCK_SIZE,
    next_n: int = 1,
    compress_ratio: int = 1,
    row_starts: Tensor | None = None,
    out: Tensor | None = None,
    drop_masked: bool = False,
    pdl: bool = False,
) -> Tensor:
    """Select the `k` largest scores within given blocks of every row, exactly.

    Elements outside of the given blocks are never read as scores, so they need not hold any.

    Parameters
    ----------
    logits, seq_lens, next_n, compress_ratio, drop_masked, pdl
        As for `indexer_topk_decode`.
    blocks : Tensor, ``[rows, n_blocks]``, int32, same device
        Blocks of each row, ascending, as `indexer_topk_blocks` gives them; at most 2,048. Inner stride 1, any
        row stride. Numbers of blocks that the row does not have, such as ``-1``, are ignored wherever they
        stand, and so are positions at and past ``n_r`` in the row's last block. Any content is safe. If the
        blocks do not ascend, positions come in the order of the blocks, and among equal scores those of
        earlier blocks win. A repeated block is used once for each time it occurs, so its positions may be
        repeated.
    k : int
        Items per row, 1 to 2**21. It may exceed what the blocks hold: places without an item get ``-1``.
    block_size, row_starts
        As for `indexer_topk_blocks`.
    out : Tensor, ``[rows, >= k]``, int32, optional
        Where to write; allocated when absent. Pass it inside CUDA graphs. Rows must not overlap.

    Returns
    -------
    Tensor, ``[rows, >= k]``, int32
        `out`. **Which items:** the `k` largest scores of the blocks; among values equal to the k-th, those
        with the smallest positions. NaN ranks above +inf, ``-0.0`` equals ``+0.0``. **In what order:** by
        ascending position in the row, then ``-1`` if the blocks hold fewer than `k` positions.

    Raises
    ------
    ValueError, LibraryError
        As in `indexer_topk_decode`.

    Notes
    -----
    As for `indexer_topk_decode`.

    Examples
    --------
    The largest score lies in block 1, which is not given:

    >>> scores = torch.zeros(1, 32)
    >>> scores[0, [3, 12, 20]] = torch.tensor([1.0, 3.0, 2.0])
    >>> blocks = torch.tensor([[0, 2, -1]], dtype=torch.int32)
    >>> indexer_topk_in_blocks(scores, torch.tensor([32], dtype=torch.int32), blocks, 3)
    tensor([[ 0,  3, 20]], dtype=torch.int32)
    """
    if not (type(k) is type(next_n) is type(compress_ratio) is type(block_size) is int):
        k = IN_BLOCKS.integer("k", k)
        next_n, compress_ratio, block_size = _integers(IN_BLOCKS, next_n, compress_ratio, block_size)
    if out is None:
        out = _new_out(IN_BLOCKS, logits, k)
    flags = _common_flags(IN_BLOCKS, pdl, drop_masked)
    _launch(
        InBlocksArguments,
        *(logits, seq_lens, blocks, out, k, next_n, flags, compress_ratio, block_size, row_starts),
    )
    return out
