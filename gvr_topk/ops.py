"""The ops: registration, and the public functions.

The CUDA implementations are the compiled library's; they register themselves for the CUDA dispatch key when
`gvr_topk.library` loads it.
"""

from __future__ import annotations

import numbers
from typing import Any

import torch
from torch import Tensor

from gvr_topk import cpu
from gvr_topk.arguments import (
    BLOCKS,
    BLOCKS_WRITTEN,
    DECODE,
    FLAG_CLAMP_PAGES,
    FLAG_DROP_MASKED,
    FLAG_PDL,
    FLAG_QUANTILE_GUESS,
    IN_BLOCKS,
    IN_BLOCKS_WRITTEN,
    PREFILL,
    PREFILL_PATHS,
    PREFILL_WRITTEN,
    Arguments,
    BlocksArguments,
    Checks,
    InBlocksArguments,
    PrefillArguments,
    check,
    check_blocks,
    check_in_blocks,
    check_prefill,
    schema,
)
from gvr_topk.constants import BLOCK_SIZE, MAX_CHOSEN_BLOCKS, MAX_WIDTH
from gvr_topk.library import LibraryError, library_status
from gvr_topk.policy import parse_path
from gvr_topk.state import TopkState

# Loading registers the CUDA implementation; that it failed is reported only when it is needed.
_LIBRARY = library_status()

torch.library.define("gvr_topk::indexer_topk_decode", schema())
torch.library.define("gvr_topk::indexer_topk_prefill", schema(PrefillArguments, PREFILL_WRITTEN))
torch.library.define("gvr_topk::indexer_topk_blocks", schema(BlocksArguments, BLOCKS_WRITTEN))
torch.library.define("gvr_topk::indexer_topk_in_blocks", schema(InBlocksArguments, IN_BLOCKS_WRITTEN))
_OP = torch.ops.gvr_topk.indexer_topk_decode.default
_PREFILL_OP = torch.ops.gvr_topk.indexer_topk_prefill.default
_BLOCKS_OP = torch.ops.gvr_topk.indexer_topk_blocks.default
_IN_BLOCKS_OP = torch.ops.gvr_topk.indexer_topk_in_blocks.default


@torch.library.impl("gvr_topk::indexer_topk_decode", "CPU")
def _decode_cpu(*arguments: Any, **options: Any) -> None:
    cpu.decode(Arguments(*arguments, **options))


@torch.library.impl("gvr_topk::indexer_topk_prefill", "CPU")
def _prefill_cpu(*arguments: Any, **options: Any) -> None:
    cpu.prefill(PrefillArguments(*arguments, **options))


@torch.library.impl("gvr_topk::indexer_topk_blocks", "CPU")
def _blocks_cpu(*arguments: Any, **options: Any) -> None:
    cpu.blocks(BlocksArguments(*arguments, **options))


@torch.library.impl("gvr_topk::indexer_topk_in_blocks", "CPU")
def _in_blocks_cpu(*arguments: Any, **options: Any) -> None:
    cpu.in_blocks(InBlocksArguments(*arguments, **options))


# Results go into arguments, so fake implementations have no shape to tell: they check what is traced.
@torch.library.register_fake("gvr_topk::indexer_topk_decode")
def _decode_fake(*arguments: Any, **options: Any) -> None:
    check(Arguments(*arguments, **options))


@torch.library.register_fake("gvr_topk::indexer_topk_prefill")
def _prefill_fake(*arguments: Any, **options: Any) -> None:
    check_prefill(PrefillArguments(*arguments, **options))


@torch.library.register_fake("gvr_topk::indexer_topk_blocks")
def _blocks_fake(*arguments: Any, **options: Any) -> None:
    check_blocks(BlocksArguments(*arguments, **options))


@torch.library.register_fake("gvr_topk::indexer_topk_in_blocks")
def _in_blocks_fake(*arguments: Any, **options: Any) -> None:
    check_in_blocks(InBlocksArguments(*arguments, **options))


def _integer(checks: Checks, argument: str, value: Any) -> int:
    """Take any kind of integer, NumPy's too, and nothing that would have to be rounded."""
    if isinstance(value, int | torch.SymInt):  # a symbolic one stays symbolic while a graph is traced
        return value  # type: ignore[return-value]
    if isinstance(value, numbers.Integral):
        return int(value)
    raise checks.fail(argument, "an integer", repr(value))


def _integers(checks: Checks, next_n: Any, compress_ratio: Any, block_size: Any) -> tuple[int, int, int]:
    """What the ops of blocks take beside the numbers of items."""
    return (
        _integer(checks, "next_n", next_n),
        _integer(checks, "compress_ratio", compress_ratio),
        _integer(checks, "block_size", block_size),
    )


def _new_out(checks: Checks, logits: Tensor, k: int) -> Tensor:
    """Room for the results of a call that was given none."""
    if not 1 <= k <= MAX_WIDTH:  # before so much is allocated
        raise checks.fail("k", f"1 to {MAX_WIDTH}", k)
    return torch.empty((logits.shape[0], k), dtype=torch.int32, device=logits.device)


def _launch(
    op: Any, checks: Checks, arguments: Arguments | PrefillArguments | BlocksArguments | InBlocksArguments
) -> None:
    """Call one of the ops; its errors about arguments are of one type on every device."""
    if arguments.logits.is_cuda and not _LIBRARY.loaded:
        raise LibraryError(f"{checks.op}: CUDA library: {_LIBRARY.reason}")
    try:
        op(*arguments)
    except NotImplementedError as error:
        if not arguments.logits.is_cuda:
            raise
        reason = "holds no such op: install the package again (pip install .)"
        raise LibraryError(f"{checks.op}: CUDA library: {_LIBRARY.path} {reason}") from error
    except RuntimeError as error:
        # The compiled op checks CUDA arguments, and its errors arrive as RuntimeError.
        message = str(error).split("\n", 1)[0]
        if f"{checks.op}: " not in message:
            raise
        raise ValueError(message[message.index(checks.op) :]) from None


def launch(arguments: Arguments) -> None:
    """Run one call of the decode op as it is described, measuring arguments included.

    Parameters
    ----------
    arguments : Arguments

    Raises
    ------
    ValueError
        A wrong argument; the message names it.
    LibraryError
        CUDA tensors, and the CUDA library is not available.
    RuntimeError
        The launch failed for a reason that lies in no argument.
    """
    _launch(_OP, DECODE, arguments)


def launch_prefill(arguments: PrefillArguments) -> None:
    """Run one call of the prefill op as it is described.

    Parameters
    ----------
    arguments : PrefillArguments

    Raises
    ------
    ValueError
        A wrong argument; the message names it.
    LibraryError
        CUDA tensors, and the CUDA library is not available.
    RuntimeError
        The launch failed for a reason that lies in no argument.
    """
    _launch(_PREFILL_OP, PREFILL, arguments)


def launch_blocks(arguments: BlocksArguments) -> None:
    """Run one call of the op that chooses blocks as it is described.

    Parameters
    ----------
    arguments : BlocksArguments

    Raises
    ------
    ValueError
        A wrong argument; the message names it.
    LibraryError
        CUDA tensors, and the CUDA library is not available.
    RuntimeError
        The launch failed for a reason that lies in no argument.
    """
    _launch(_BLOCKS_OP, BLOCKS, arguments)


def launch_in_blocks(arguments: InBlocksArguments) -> None:
    """Run one call of the op that selects in given blocks as it is described.

    Parameters
    ----------
    arguments : InBlocksArguments

    Raises
    ------
    ValueError
        A wrong argument; the message names it.
    LibraryError
        CUDA tensors, and the CUDA library is not available.
    RuntimeError
        The launch failed for a reason that lies in no argument.
    """
    _launch(_IN_BLOCKS_OP, IN_BLOCKS, arguments)


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
    path: str = "auto",
    compress_ratio: int = 1,
    max_ctas: int = 0,
    pdl: bool = False,
    hint_offset: int = 0,
    stats: Tensor | None = None,
) -> Tensor:
    """Select the `k` largest scores of every row, exactly and deterministically.

    A row is visible up to its length ``n_r``; what lies at and past ``n_r`` is never read as a score. The
    result is a function of the visible scores alone: the same on every run, GPU, batch position, state and
    path. The state changes only the time.

    Parameters
    ----------
    logits : Tensor, ``[rows, width]``, float32, bfloat16 or float16
        Indexer scores. Inner stride 1; any row stride and alignment. 16-byte aligned rows are faster.
        At most 2**21 columns and 2**26 rows. Rows may overlap.
    seq_lens : Tensor, ``[rows / next_n]`` or ``[rows]``, int32, same device
        By request: its key count, draft positions included, so that
        ``n_r = seq_lens[r // next_n] - next_n + (r % next_n) + 1``. By row: ``n_r`` itself. Read on the
        device, so one captured CUDA graph serves growing rows. Lengths above `width` count as `width`,
        negative ones as zero.
    k : int
        Items per row, 1 to 2**21; more than `width` is fine, for the rest is ``-1``.
    next_n : int, default 1
        Rows per request: 1 plus the number of draft tokens.
    out : Tensor, ``[rows, >= k]``, int32, optional
        Where to write; allocated when absent. Pass it inside CUDA graphs. Rows must not overlap.
    state : TopkState, optional
        In and out: what the last step left in each slot, from which this step predicts the k-th value; the
        last row of each request writes it anew. Any content is safe, garbage is at worst slow. Without a
        state, a sample of the row takes its place.
    row_slot : Tensor, ``[rows]``, int32, optional
        Slot of each row in `state`. Negative or too large: no hint and no write-back (padding rows).
        Default: request ``r // next_n`` uses slot ``r // next_n``. Requests may share a slot. In a state that
        keeps positions, what the last request that names a slot leaves there is left, and the others leave
        nothing. In one that keeps predictions alone, the slot holds the prediction of one of them, never a
        mixture; of which one, a GPU does not say.
    next_state : Tensor, ``[rows, 4]``, float32, contiguous, optional
        Out: what each row leaves for the next step. `state` is then read and not written, until
        `TopkState.accept` copies the rows whose draft tokens were accepted.
    counts : Tensor, ``[rows]``, int32, optional
        Out: how many items each row has, ``min(max(n_r, 0), k)``, or fewer with `drop_masked`; what follows
        them is ``-1``.
    page_table : Tensor, ``[rows / next_n, pages]``, int32, optional
        Translates positions to slots of a paged cache on the way out:
        ``page_table[position // page_size] * page_size + position % page_size``, computed in 64 bits.
        ``-1`` for a page that the table does not hold (a table of zero columns holds none) or holds as a
        negative number, and for a slot that int32 cannot hold. The state keeps positions.
    page_size : int
        Positions per page, 1 to 2**31 - 1; needed with `page_table`.
    slots : Tensor, ``[rows, >= k]``, int32, optional
        Where cache slots go, so that `out` keeps positions. Without it they take the place of positions
        in `out`. Rows must not overlap.
    clamp_pages : bool, default False
        Limit ``n_r`` to the ``pages * page_size`` positions that `page_table` covers, computed in 64 bits:
        the call then selects as if `logits` had no columns behind them. Needs `page_table`. Without it rows
        may select positions behind the table, which have no slot. A page that the table holds as a negative
        number counts as covered.
    drop_masked : bool, default False
        Do not select masked columns, those whose score is ``-inf``: the items of a row are the others among
        its `k` largest, in ascending order, and what is missing at the end is ``-1``, in `out`, in `slots`
        and in the positions that the state keeps. Statistics and predictions stay those of the `k` largest.
        Without it masked columns fill up a row in which fewer than `k` others are visible. Rows no longer
        than `k`, which are otherwise written without being read, are read then.
    path : {"auto", "paper_gvr", "no_hint", "radix_rounds"}
        ``"auto"`` predicts from `state` where the gate allows it (`gvr_topk.policy.can_use_heuristic`).
        ``"no_hint"`` does not read the state and estimates from a sample of the row. ``"radix_rounds"``
        estimates nothing: it runs the radix rounds over the keys that settle what an estimate misses.
        ``"paper_gvr"`` is the paper's four-phase kernel. CPU tensors have one implementation.
    compress_ratio : int, default 1
        Keys to a score, for indexers that score groups of keys: lengths count keys as above, and ``n_r`` is
        the length of the row divided by this, rounded down.
    max_ctas : {0, 1, 2, 4, 8, 16}
        Cap the cluster size, the number of CTAs that share a row; 0 sets no cap. For GPUs shared with
        long-running communication or prefill kernels: a cluster starts only when one GPC has room for all
        of it. 16 CTAs need a whole free GPC and wait until the kernel that holds SMs ends; on an H200 8
        CTAs still start beside 64 held SMs, and 4 beside 96. One CTA holds 2**20 columns (2**18 on compute
        capability 12); a row too wide for the cap takes the smallest size that holds it. With or without a
        cap, a context that has no room for the planned cluster (a green context, a MIG slice) gets the
        largest one it has room for.
    pdl : bool
        Launch with programmatic stream serialization: the kernel may start while the one before still runs,
        and waits for its end before the first read. It lets the next one start as soon as that is over, the
        paper's kernel when its result is written.
    hint_offset : int, default 0
        Added to the positions of the last step before the paper's kernel and the ``hits`` of the statistics
        look them up; 1 follows scores that move with the query.
    stats : Tensor, ``[rows, 8]``, int32, contiguous, optional
        Out: one number for each `gvr_topk.constants.StatsColumn`.

    Returns
    -------
    Tensor, ``[rows, >= k]``, int32
        `out`. **Which items:** the value multiset of ``torch.topk``; among values equal to the k-th the
        smallest indices. NaN ranks above +inf, ``-0.0`` equals ``+0.0``. **In what order:** ascending
        index. ``n_r <= k``: ``0 .. n_r - 1``, then ``-1``; ``n_r <= 0``: all ``-1``. With `drop_masked` items
        of ``-inf`` are left out.

    Raises
    ------
    ValueError
        An argument has the wrong device, dtype, shape, stride or range; the message names it.
    LibraryError
        CUDA tensors, and the CUDA library is not available.

    Notes
    -----
    The op allocates nothing when `out` is given, needs no workspace (everything is on chip), reads nothing
    on the host and never synchronizes. Two calls that share slots of a state belong on one stream.

    Should another stream write `logits`, `seq_lens`, `row_slot` or `state` while a launch reads them, the
    result of that launch is unspecified. Even then nothing is written but the row's own `k` places of `out`
    and `slots`, its slot of `state`, its count and its row of `stats`, and the launch ends.

    References
    ----------
    Guess-Verify-Refine, section 4 (algorithm) and section 5.5 (integration).

    Examples
    --------
    >>> scores = torch.tensor([[0.5, 3.0, 1.0, 3.0]])
    >>> indexer_topk_decode(scores, torch.tensor([4], dtype=torch.int32), 2)
    tensor([[1, 3]], dtype=torch.int32)
    """
    # A call costs host time, so what is an integer already is not looked at one by one.
    if not (type(k) is type(next_n) is type(page_size) is type(max_ctas) is type(compress_ratio) is int):
        k, next_n = _integer(DECODE, "k", k), _integer(DECODE, "next_n", next_n)
        page_size = _integer(DECODE, "page_size", page_size)
        max_ctas = _integer(DECODE, "max_ctas", max_ctas)
        compress_ratio = _integer(DECODE, "compress_ratio", compress_ratio)
    if type(hint_offset) is not int:
        hint_offset = _integer(DECODE, "hint_offset", hint_offset)
    if out is None:
        out = _new_out(DECODE, logits, k)
    words = indices = None
    if state is not None:
        words, indices = state.words, state.indices
    flags = FLAG_PDL | FLAG_QUANTILE_GUESS if pdl else FLAG_QUANTILE_GUESS
    if clamp_pages:
        flags |= FLAG_CLAMP_PAGES
    if drop_masked:
        flags |= FLAG_DROP_MASKED
    launch(
        Arguments(
            logits,
            seq_lens,
            out,
            k,
            row_slot,
            words,
            indices,
            next_state,
            counts,
            page_table,
            slots,
            stats,
            None,
            next_n,
            page_size,
            int(parse_path(path)),
            max_ctas,
            flags,
            hint_offset,
            0,
            compress_ratio,
        )
    )
    return out


_PREFILL_PATHS = {path.name.lower(): int(path) for path in PREFILL_PATHS}


def indexer_topk_prefill(
    logits: Tensor,
    row_starts: Tensor,
    row_ends: Tensor,
    k: int,
    *,
    out: Tensor | None = None,
    counts: Tensor | None = None,
    row_request: Tensor | None = None,
    offsets: Tensor | None = None,
    page_table: Tensor | None = None,
    page_size: int = 0,
    slots: Tensor | None = None,
    path: str = "auto",
    pdl: bool = False,
    stats: Tensor | None = None,
) -> Tensor:
    """Select the `k` largest scores in a window of every row, exactly and deterministically.

    The window of row ``r`` is ``logits[r, start_r:end_r]`` with ``start_r = max(row_starts[r], 0)`` and
    ``end_r = min(row_ends[r], width)``, and holds ``n_r = max(end_r - start_r, 0)`` scores. What lies outside
    of it is never read as a score. The result is a function of the scores in the window alone: the same on
    every run, GPU, batch position and path.

    Parameters
    ----------
    logits : Tensor, ``[rows, width]``, float32, bfloat16 or float16
        Indexer scores, a row for each query token. Inner stride 1; any row stride and alignment. At most
        2**21 columns and 2**26 rows, and any number of elements. Rows may overlap.
    row_starts : Tensor, ``[rows]``, int32, same device
        First column of each row's window; negative ones count as zero. Read on the device, as `row_ends` is,
        so one captured CUDA graph serves windows that change.
    row_ends : Tensor, ``[rows]``, int32, same device
        One past the last column of each row's window; those above `width` count as `width`. A window that
        ends where it starts, or before, is empty. Windows of neighbouring rows need have nothing in common;
        where they belong to one request and grow, as in causal prefill, each row predicts the next one.
    k : int
        Items per row, 1 to 2**21; more than a window holds is fine, for the rest is ``-1``.
    out : Tensor, ``[rows, >= k]``, int32, optional
        Where to write; allocated when absent. Pass it inside CUDA graphs. Rows must not overlap.
    counts : Tensor, ``[rows]``, int32, optional
        Out: how many items each row has, ``min(n_r, k)``; what follows them is ``-1``.
    row_request : Tensor, ``[rows]``, int32, optional
        Request of each row, by which `offsets` and `page_table` are read; without it each row has its own.
        A row whose request is negative, or not below the number of requests, has an empty window (padding
        rows).
    offsets : Tensor, ``[rows]``, or ``[requests]`` with `row_request`, int32, optional
        Added to every position that `out` gets, computed in 64 bits; a result that int32 cannot hold becomes
        ``-1``. Padding stays ``-1``. With a page table `slots` is needed, too.
    page_table : Tensor, ``[rows, pages]``, or ``[requests, pages]`` with `row_request`, int32, optional
        Translates positions in the window, without offset, to slots of a paged cache on the way out:
        ``page_table[position // page_size] * page_size + position % page_size``, computed in 64 bits.
        ``-1`` for a page that the table does not hold (a table of zero columns holds none) or holds as a
        negative number, and for a slot that int32 cannot hold.
    page_size : int
        Positions per page, 1 to 2**31 - 1; needed with `page_table`.
    slots : Tensor, ``[rows, >= k]``, int32, optional
        Where cache slots go, so that `out` keeps positions. Without it they take the place of positions
        in `out`. Rows must not overlap.
    path : {"auto", "radix_rounds"}
        ``"auto"`` predicts the k-th value of a row from the row before. ``"radix_rounds"`` predicts nothing:
        it runs the radix rounds over the keys that settle what a prediction misses. CPU tensors have one
        implementation.
    pdl : bool
        Launch with programmatic stream serialization: the kernel may start while the one before still runs,
        and waits for its end before the first read.
    stats : Tensor, ``[rows, 8]``, int32, contiguous, optional
        Out: one number for each `gvr_topk.constants.StatsColumn`. The reason is ``USED`` where a row was
        predicted from the row before, ``FIRST_STEP`` where there was none, ``SHORT_ROW`` where the window
        holds no more than `k` scores, and ``DISABLED`` with path ``"radix_rounds"``.

    Returns
    -------
    Tensor, ``[rows, >= k]``, int32
        `out`. **Which items:** the value multiset of ``torch.topk`` of the window; among values equal to the
        k-th the smallest positions. NaN ranks above +inf, ``-0.0`` equals ``+0.0``. **In what order:**
        ascending positions, which count from the start of the window. ``n_r <= k``: ``0 .. n_r - 1``, then
        ``-1``; an empty window: all ``-1``.

    Raises
    ------
    ValueError
        An argument has the wrong device, dtype, shape, stride or range; the message names it.
    LibraryError
        CUDA tensors, and the CUDA library is not available.

    Notes
    -----
    The op keeps no state: rows follow each other within a call, not from one call to the next. It allocates
    nothing when `out` is given, needs no workspace, reads nothing on the host and never synchronizes.

    Should another stream write an argument while a launch reads it, the result of that launch is
    unspecified. Even then nothing is written but the row's own `k` places of `out` and `slots`, its count and
    its row of `stats`, and the launch ends.

    Examples
    --------
    Two requests of two and three keys, which lie one behind the other, and the last two rows of each:

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
    """
    if not (type(k) is type(page_size) is int):
        k, page_size = _integer(PREFILL, "k", k), _integer(PREFILL, "page_size", page_size)
    if not isinstance(path, str) or path not in _PREFILL_PATHS:
        wanted = ", ".join(repr(known) for known in _PREFILL_PATHS)
        raise PREFILL.fail("path", f"one of {wanted}", repr(path))
    if out is None:
        out = _new_out(PREFILL, logits, k)
    launch_prefill(
        PrefillArguments(
            logits,
            row_starts,
            row_ends,
            out,
            k,
            row_request,
            offsets,
            counts,
            page_table,
            slots,
            stats,
            page_size,
            _PREFILL_PATHS[path],
            FLAG_PDL if pdl else 0,
        )
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
    out: Tensor | None = None,
    blocks: Tensor | None = None,
    pdl: bool = False,
) -> tuple[Tensor, Tensor]:
    """Select the `k` largest scores of every row and its `block_k` best blocks, exactly, in one read of it.

    For indexers of two levels, as DeepSeek-V4.1's: one layer scores all positions, selects its own, and
    publishes blocks of neighbouring positions, in which other layers select by `indexer_topk_in_blocks`.
    Block ``b`` is the positions from ``b * block_size`` on, and its key is its largest visible score.

    Parameters
    ----------
    logits : Tensor, ``[rows, width]``, float32, bfloat16 or float16
        Indexer scores. Inner stride 1; any row stride and alignment. 16-byte aligned rows are faster.
        At most 262,144 columns and 2**26 rows. Rows may overlap.
    seq_lens : Tensor, ``[rows / next_n]`` or ``[rows]``, int32, same device
        As for `indexer_topk_decode`: the key count of each request, or the visible length ``n_r`` of each
        row.
    k : int
        Positions per row, 1 to ``block_k - 1``; more than a row has is fine, for the rest is ``-1``.
    block_k : int
        Blocks per row, at most 2,048, and more than `k`: then the `k` largest scores lie in chosen blocks.
    block_size : {8}
        Positions per block.
    next_n, compress_ratio : int, default 1
        As for `indexer_topk_decode`.
    out : Tensor, ``[rows, >= k]``, int32, optional
        Where positions go; allocated when absent. Pass it inside CUDA graphs. Rows must not overlap.
    blocks : Tensor, ``[rows, >= block_k]``, int32, optional
        Where blocks go, likewise.
    pdl : bool
        Launch with programmatic stream serialization: the kernel may start while the one before still runs,
        and waits for its end before the first read.

    Returns
    -------
    positions : Tensor, ``[rows, >= k]``, int32
        `out`, with what `indexer_topk_decode` selects: ascending positions, then ``-1``.
    blocks : Tensor, ``[rows, >= block_k]``, int32
        `blocks`. **Which blocks:** the newest, which holds position ``n_r - 1``, whatever its scores are; and
        of the others those with the largest keys, the smallest numbers among keys equal to the last one
        taken. NaN ranks above +inf, so a block that holds one does. **In what order:** ascending numbers.
        Rows of at most `block_k` blocks: all of them, then ``-1``; ``n_r <= 0``: all ``-1``.

    Raises
    ------
    ValueError
        An argument has the wrong device, dtype, shape, stride or range; the message names it.
    LibraryError
        CUDA tensors, and the CUDA library is not available.

    Notes
    -----
    The op allocates nothing when `out` and `blocks` are given, needs no workspace, reads nothing on the host
    and never synchronizes.

    Should another stream write an argument while a launch reads it, the result of that launch is
    unspecified. Even then nothing is written but the row's own `k` places of `out` and `block_k` places of
    `blocks`, and the launch ends.

    References
    ----------
    DeepSeek-V4.1's indexer of two levels, as sgl-project/sglang#39671 and #40574 describe it.

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
        k, block_k = _integer(BLOCKS, "k", k), _integer(BLOCKS, "block_k", block_k)
        next_n, compress_ratio, block_size = _integers(BLOCKS, next_n, compress_ratio, block_size)
    if out is None:
        out = _new_out(BLOCKS, logits, k)
    if blocks is None:
        if not 1 <= block_k <= MAX_CHOSEN_BLOCKS:  # before so much is allocated
            raise BLOCKS.fail("block_k", f"more than k = {k} and at most {MAX_CHOSEN_BLOCKS}", block_k)
        blocks = torch.empty((logits.shape[0], block_k), dtype=torch.int32, device=logits.device)
    flags = FLAG_PDL if pdl else 0
    launch_blocks(
        BlocksArguments(logits, seq_lens, out, blocks, k, block_k, next_n, flags, compress_ratio, block_size)
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
    out: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """Select the `k` largest scores among those of given blocks of every row, exactly.

    Nothing else of a row is read as a score, so the rest of `logits` need not hold any.

    Parameters
    ----------
    logits : Tensor, ``[rows, width]``, float32, bfloat16 or float16
        Indexer scores. Inner stride 1; any row stride and alignment. 16-byte aligned rows are faster.
        At most 2**21 columns and 2**26 rows. Rows may overlap.
    seq_lens : Tensor, ``[rows / next_n]`` or ``[rows]``, int32, same device
        As for `indexer_topk_decode`: the key count of each request, or the visible length ``n_r`` of each
        row.
    blocks : Tensor, ``[rows, n_blocks]``, int32, same device
        Blocks of each row, ascending, as `indexer_topk_blocks` gives them; at most 2,048. Inner stride 1, any
        row stride. Those that the row does not have, ``-1`` too, are ignored wherever they stand, and of the
        last one what lies at and past ``n_r``. Any content is safe. If blocks do not ascend, positions come
        in the order of the blocks, and earlier ones win among equal scores. A block that is repeated is
        selected from as often, so that its positions may be repeated.
    k : int
        Items per row, 1 to 2**21; more than the blocks hold is fine, for the rest is ``-1``.
    block_size : {8}
        Positions per block.
    next_n, compress_ratio : int, default 1
        As for `indexer_topk_decode`.
    out : Tensor, ``[rows, >= k]``, int32, optional
        Where to write; allocated when absent. Pass it inside CUDA graphs. Rows must not overlap.
    pdl : bool
        Launch with programmatic stream serialization: the kernel may start while the one before still runs,
        and waits for its end before the first read.

    Returns
    -------
    Tensor, ``[rows, >= k]``, int32
        `out`. **Which items:** the `k` largest scores of the blocks; among values equal to the k-th the
        smallest positions. NaN ranks above +inf, ``-0.0`` equals ``+0.0``. **In what order:** ascending
        positions in the row, then ``-1``, if the blocks hold fewer.

    Raises
    ------
    ValueError
        An argument has the wrong device, dtype, shape, stride or range; the message names it.
    LibraryError
        CUDA tensors, and the CUDA library is not available.

    Notes
    -----
    The op allocates nothing when `out` is given, needs no workspace, reads nothing on the host and never
    synchronizes. Should another stream write an argument while a launch reads it, the result of that launch
    is unspecified. Even then nothing is written but the row's own `k` places of `out`, and the launch ends.

    References
    ----------
    DeepSeek-V4.1's indexer of two levels, as sgl-project/sglang#39671 and #40574 describe it.

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
        k = _integer(IN_BLOCKS, "k", k)
        next_n, compress_ratio, block_size = _integers(IN_BLOCKS, next_n, compress_ratio, block_size)
    if out is None:
        out = _new_out(IN_BLOCKS, logits, k)
    flags = FLAG_PDL if pdl else 0
    launch_in_blocks(
        InBlocksArguments(logits, seq_lens, blocks, out, k, next_n, flags, compress_ratio, block_size)
    )
    return out
