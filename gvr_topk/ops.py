"""The op: schema, fake kernel, CPU implementation, and the public function.

The CUDA implementation is the compiled library's; it registers itself for the CUDA dispatch key when
`gvr_topk.library` loads it.
"""

from __future__ import annotations

import numbers
from typing import Any

import torch
from torch import Tensor

from gvr_topk.contract import (
    CLUSTER_SIZES,
    DTYPES,
    MAX_PAGE_SIZE,
    MAX_ROWS,
    MAX_WIDTH,
    PLACES,
    STATE_FLOATS,
    STATS_COLUMNS,
    exact_topk,
    order_key,
    row_lengths,
)
from gvr_topk.gate import Path
from gvr_topk.library import LibraryError, LibraryStatus, library_status

__all__ = [
    "LibraryError",
    "LibraryStatus",
    "indexer_topk_decode",
    "library_status",
    "new_guess_state",
]

FLAG_PDL = 1
FLAG_QUANTILE_GUESS = 2
_CPU_PATH = 4

# Loading registers the CUDA implementation; that it failed is reported only when it is needed.
_LIBRARY = library_status()

torch.library.define(
    "gvr_topk::indexer_topk_decode",
    "(Tensor logits, Tensor seq_lens, Tensor(a!) indices, Tensor(b!)? prior, Tensor? row_slot, "
    "Tensor(c!)? guess_state, Tensor(d!)? stats, Tensor? page_table, Tensor(e!)? phase_clocks, "
    "int k, int next_n=1, int prior_offset=0, int page_size=0, int path=0, int ctas_per_row=0, "
    "int flags=0, int max_ctas=0) -> ()",
)


def _fail(argument: str, wanted: str, got: object) -> ValueError:
    return ValueError(f"gvr_topk.indexer_topk_decode: {argument}: want {wanted}, got {got}")


def _integer(argument: str, value: Any) -> int:
    """Take any kind of integer, NumPy's too, and nothing that would have to be rounded."""
    if isinstance(value, int | torch.SymInt):  # a symbolic one stays symbolic while a graph is traced
        return value  # type: ignore[return-value]
    if isinstance(value, numbers.Integral):
        return int(value)
    raise _fail(argument, "an integer", repr(value))


def _check_tensor(
    name: str, tensor: Tensor, like: Tensor, dtype: torch.dtype, shape: tuple[int | None, ...]
) -> None:
    if tensor.device != like.device:
        raise _fail(name, f"a tensor on {like.device}", tensor.device)
    if tensor.dtype != dtype:
        raise _fail(name, f"dtype {dtype}", tensor.dtype)
    same = tensor.dim() == len(shape) and all(
        want is None or have == want for have, want in zip(tensor.shape, shape, strict=True)
    )
    if not same:
        wanted = ", ".join("any" if n is None else str(n) for n in shape)
        raise _fail(name, f"shape [{wanted}]", list(tensor.shape))
    if tensor.dim() > 0 and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise _fail(name, "inner stride 1", tensor.stride(-1))


def _check_rows_apart(name: str, tensor: Tensor, columns: int) -> None:
    # Two rows that share memory would be written by two blocks at once, and hold neither's result.
    if tensor.shape[0] > 1 and tensor.stride(0) < columns:
        raise _fail(name, f"rows that do not overlap, at least {columns} elements apart", tensor.stride(0))


def _check(
    logits: Tensor,
    seq_lens: Tensor,
    indices: Tensor,
    prior: Tensor | None,
    row_slot: Tensor | None,
    guess_state: Tensor | None,
    stats: Tensor | None,
    page_table: Tensor | None,
    phase_clocks: Tensor | None,
    k: int,
    next_n: int,
    prior_offset: int,
    page_size: int,
    ctas_per_row: int,
    max_ctas: int,
) -> None:
    """Refuse, on the host, every argument that would be undefined on the device."""
    if logits.dtype not in DTYPES:
        raise _fail("logits", "dtype float32, bfloat16 or float16", logits.dtype)
    if logits.dim() != 2:
        raise _fail("logits", "shape [rows, width]", list(logits.shape))
    rows, width = logits.shape
    if width > 1 and logits.stride(1) != 1:
        raise _fail("logits", "inner stride 1", logits.stride(1))
    if width > MAX_WIDTH:
        raise _fail("logits", f"at most {MAX_WIDTH} columns", width)
    if rows > MAX_ROWS:
        raise _fail("logits", f"at most {MAX_ROWS} rows", rows)
    if not 1 <= k <= MAX_WIDTH:
        raise _fail("k", f"1 to {MAX_WIDTH}", k)
    if not 1 <= next_n <= 1024:
        raise _fail("next_n", "1 to 1024", next_n)
    if rows % next_n != 0:
        raise _fail("logits", f"a multiple of next_n = {next_n} rows", rows)
    requests = rows // next_n
    _check_tensor("seq_lens", seq_lens, logits, torch.int32, (requests,))
    _check_tensor("out", indices, logits, torch.int32, (rows, None))
    if indices.shape[1] < k:
        raise _fail("out", f"at least k = {k} columns", list(indices.shape))
    _check_rows_apart("out", indices, k)
    if prior is not None:
        _check_tensor("prior", prior, logits, torch.int32, (None, k))
        _check_rows_apart("prior", prior, k)
        if row_slot is None and prior.shape[0] < requests:
            raise _fail("prior", f"at least {requests} slots without row_slot", prior.shape[0])
    if row_slot is not None:
        if prior is None and guess_state is None:
            raise _fail("row_slot", "a prior or a guess_state beside it", None)
        _check_tensor("row_slot", row_slot, logits, torch.int32, (rows,))
    if guess_state is not None:
        slots = None if prior is None else prior.shape[0]
        _check_tensor("guess_state", guess_state, logits, torch.float32, (slots, STATE_FLOATS))
        if not guess_state.is_contiguous():
            raise _fail("guess_state", "contiguous rows", guess_state.stride())
        if row_slot is None and guess_state.shape[0] < requests:
            raise _fail("guess_state", f"at least {requests} slots without row_slot", guess_state.shape[0])
    if stats is not None:
        _check_tensor("stats", stats, logits, torch.int32, (rows, len(STATS_COLUMNS)))
        if not stats.is_contiguous():
            raise _fail("stats", "contiguous rows", stats.stride())
    if page_table is not None:
        _check_tensor("page_table", page_table, logits, torch.int32, (requests, None))
        if page_size < 1:
            raise _fail("page_size", "at least 1 with a page_table", page_size)
        if page_size > MAX_PAGE_SIZE:
            raise _fail("page_size", f"at most {MAX_PAGE_SIZE}", page_size)
    if phase_clocks is not None:
        _check_tensor("phase_clocks", phase_clocks, logits, torch.int64, (rows, 8))
        if not phase_clocks.is_contiguous():
            raise _fail("phase_clocks", "contiguous rows", phase_clocks.stride())
    if abs(prior_offset) > MAX_WIDTH:
        raise _fail("prior_offset", f"|offset| <= {MAX_WIDTH}", prior_offset)
    if max_ctas != 0 and max_ctas not in CLUSTER_SIZES:
        raise _fail("max_ctas", "0, 1, 2, 4, 8 or 16", max_ctas)
    if 0 < max_ctas < ctas_per_row:
        raise _fail("ctas_per_row", f"at most max_ctas = {max_ctas}", ctas_per_row)


def to_slots(positions: Tensor, page_table: Tensor, page_size: int, next_n: int) -> Tensor:
    """Physical slots of positions in a paged cache; ``-1`` where there is none.

    Parameters
    ----------
    positions : Tensor, ``[rows, k]``, int32
    page_table : Tensor, ``[rows / next_n, pages]``, int32
    page_size : int
        Positions per page.
    next_n : int
        Rows per request.

    Returns
    -------
    Tensor, ``[rows, k]``, int32
        ``page_table[position // page_size] * page_size + position % page_size``, in 64 bits. ``-1`` for
        the position ``-1``, for a page the table does not hold or holds as a negative number, and for a
        slot beyond int32.
    """
    if page_table.shape[1] == 0:
        return torch.full_like(positions, -1)
    position = positions.to(torch.int64)
    page = torch.div(position, page_size, rounding_mode="floor")
    known = (position >= 0) & (page < page_table.shape[1])
    request = torch.arange(positions.shape[0], device=positions.device) // next_n
    base = page_table[request].gather(1, torch.where(known, page, 0)).to(torch.int64)
    slot = base * page_size + position % page_size
    known &= (base >= 0) & (slot <= torch.iinfo(torch.int32).max)
    return torch.where(known, slot, -1).to(torch.int32)


@torch.library.impl("gvr_topk::indexer_topk_decode", "CPU")
def _indexer_topk_decode_cpu(
    logits: Tensor,
    seq_lens: Tensor,
    indices: Tensor,
    prior: Tensor | None,
    row_slot: Tensor | None,
    guess_state: Tensor | None,
    stats: Tensor | None,
    page_table: Tensor | None,
    phase_clocks: Tensor | None,
    k: int,
    next_n: int = 1,
    prior_offset: int = 0,
    page_size: int = 0,
    path: int = 0,
    ctas_per_row: int = 0,
    flags: int = 0,
    max_ctas: int = 0,
) -> None:
    _check(
        logits,
        seq_lens,
        indices,
        prior,
        row_slot,
        guess_state,
        stats,
        page_table,
        phase_clocks,
        k,
        next_n,
        prior_offset,
        page_size,
        ctas_per_row,
        max_ctas,
    )
    rows, width = logits.shape
    if rows == 0:
        return
    lengths = row_lengths(seq_lens, rows, next_n).clamp(max=width)
    positions = exact_topk(logits, lengths, k)
    indices[:, :k] = positions if page_table is None else to_slots(positions, page_table, page_size, next_n)
    if stats is not None:
        stats.zero_()
        stats[:, STATS_COLUMNS.index("path")] = torch.where(lengths > k, _CPU_PATH, 0).to(torch.int32)
        stats[:, STATS_COLUMNS.index("hits")] = -1
    slotted = prior if prior is not None else guess_state
    if slotted is None:
        return
    for row in range(rows):
        slot = int(row_slot[row]) if row_slot is not None else row // next_n
        if not 0 <= slot < slotted.shape[0]:
            continue
        length, last = int(lengths[row]), row % next_n == next_n - 1
        if prior is None:
            if guess_state is not None and last and length > k:
                guess_state[slot].zero_()[0] = _place(logits[row, :length], positions[row])
            continue
        if length > k and (stats is not None or guess_state is not None):
            hinted = prior[slot].to(torch.int64)
            hinted = hinted[hinted >= 0] + prior_offset
            hinted = hinted[(hinted >= 0) & (hinted < length)]
            keys = order_key(logits[row])
            kth = keys[positions[row].to(torch.int64)].min()
            hits = int((keys[hinted] >= kth).sum())
            if stats is not None:
                stats[row, STATS_COLUMNS.index("hits")] = hits
            if guess_state is not None and last:
                guess_state[slot].zero_()[0] = hits / len(hinted) if len(hinted) else -1.0
        if last:
            prior[slot] = positions[row]


def _place(scores: Tensor, chosen: Tensor) -> float:
    """First number of a slot of `guess_state`: where the k-th value stands in its row; -1 if nowhere."""
    values = scores.to(torch.float64)
    kth = values[chosen.to(torch.int64)].min()
    finite = values[values.isfinite()]
    deviation = finite.std(correction=0) if finite.numel() else finite.new_zeros(())
    if not kth.isfinite() or deviation == 0:
        return -1.0
    low, high = PLACES
    return float(((low + high) / 2 + (kth - finite.mean()) / deviation).clamp(low, high))


@torch.library.register_fake("gvr_topk::indexer_topk_decode")
def _indexer_topk_decode_fake(*_arguments: object, **_options: object) -> None:
    """Results go into arguments, so there is no shape to tell."""


def new_guess_state(slots: int, device: torch.device | str | None = None) -> Tensor:
    """State of slots that nothing is known of, to be passed to `indexer_topk_decode` in every step.

    Parameters
    ----------
    slots : int
        One for each request that may be alive.
    device : torch.device or str, optional
        The scores' device.

    Returns
    -------
    Tensor, ``[slots, 4]``, float32
    """
    return torch.full((slots, STATE_FLOATS), -1.0, dtype=torch.float32, device=device)


def indexer_topk_decode(
    logits: Tensor,
    seq_lens: Tensor,
    k: int,
    *,
    next_n: int = 1,
    out: Tensor | None = None,
    prior: Tensor | None = None,
    row_slot: Tensor | None = None,
    prior_offset: int = 0,
    guess_state: Tensor | None = None,
    stats: Tensor | None = None,
    page_table: Tensor | None = None,
    page_size: int = 0,
    path: str = "auto",
    ctas_per_row: int = 0,
    max_ctas: int = 0,
    quantile_guess: bool = True,
    pdl: bool = False,
    phase_clocks: Tensor | None = None,
) -> Tensor:
    """Select the `k` largest scores of every row, exactly and deterministically.

    Row ``r`` is visible up to ``n_r = seq_lens[r // next_n] - next_n + (r % next_n) + 1``; what lies at
    and past ``n_r`` is never read as a score. The result is the same on every run, GPU, batch position,
    hint and path; a hint changes only the time.

    Parameters
    ----------
    logits : Tensor, ``[rows, width]``, float32, bfloat16 or float16
        Indexer scores. Inner stride 1; any row stride and alignment. 16-byte aligned rows are faster.
        At most 2**21 columns and 2**26 rows. Rows may overlap.
    seq_lens : Tensor, ``[rows / next_n]``, int32, same device
        Key count of each request, its draft positions included. Read on the device, so one captured
        CUDA graph serves growing rows. Lengths above `width` are taken as `width`.
    k : int
        Items per row, 1 to 2**21; more than `width` is fine, for the rest is ``-1``.
    next_n : int, default 1
        Rows per request: 1 plus the number of draft tokens.
    out : Tensor, ``[rows, >= k]``, int32, optional
        Where to write; allocated when absent. Pass it inside CUDA graphs. Rows must not overlap.
    prior : Tensor, ``[slots, k]``, int32, optional
        In: the previous step's result of each request, in any order; any content is safe, garbage is
        at worst slow. Out: this step's positions, written by the last row of each request. Slots must
        not overlap.
    row_slot : Tensor, ``[rows]``, int32, optional
        Slot of each row in `guess_state` and `prior`. Negative or too large: no hint and no write-back
        (padding rows). Default: request ``r // next_n`` uses slot ``r // next_n``.
    prior_offset : int, default 0
        Added to hinted positions before use; 1 follows scores that move with the query.
    guess_state : Tensor, ``[slots, 4]``, float32, contiguous, optional
        In and out: what one step leaves for the guess of the next, 16 bytes a slot. Start with
        `new_guess_state`; any content is safe, garbage is at worst slow. It is all the hint that CUDA
        kernels need: `prior` beside it serves the hits of `stats`, path ``"gvr"`` and the first step.
        What the numbers mean is the kernels' own affair (cpp/kernels/cluster/predictor.cuh,
        cpp/kernels/single/window.cuh). Without it the first threshold comes from a sample of the row.
    stats : Tensor, ``[rows, 8]``, int32, contiguous, optional
        Out: see `gvr_topk.contract.STATS_COLUMNS`.
    page_table : Tensor, ``[rows / next_n, pages]``, int32, optional
        Translates positions to slots of a paged cache on the way out:
        ``page_table[position // page_size] * page_size + position % page_size``, computed in 64 bits.
        ``-1`` for a page that the table does not hold (a table of zero columns holds none) or holds as a
        negative number, and for a slot that int32 cannot hold. `prior` keeps positions.
    page_size : int
        Positions per page, 1 to 2**31 - 1; needed with `page_table`.
    path : {"auto", "cluster", "gvr", "radix"}
        ``"cluster"`` guesses from the step before, ``"radix"`` from a sample of the row, whatever it is
        given; in both, radix rounds over the key settle what a guess misses. ``"gvr"`` is the paper's
        four-phase kernel. CPU tensors have one implementation and ignore it.
    ctas_per_row : int
        Force the cluster size of ``"cluster"`` and ``"radix"``; 0 follows the plan.
    max_ctas : {0, 1, 2, 4, 8, 16}
        Cap the cluster size, the number of CTAs that share a row; 0 sets no cap. For GPUs shared with
        long-running communication or prefill kernels: a cluster starts only when one GPC has room for all
        of it. 16 CTAs need a whole free GPC and wait until the kernel that holds SMs ends; on an H200 8
        CTAs still start beside 64 held SMs, and 4 beside 96. One CTA holds 2**20 columns (2**18 on compute
        capability 12); a row too wide for the cap takes the smallest size that holds it. A `ctas_per_row`
        above the cap is an error. With or without a cap, a context that has no room for the planned cluster
        (a green context, a MIG slice) gets the largest one it has room for.
    quantile_guess : bool, default True
        Four-phase kernel only: first threshold from the ``1 - alpha`` quantile of the hinted values
        instead of their mean.
    pdl : bool
        Launch with programmatic stream serialization: the kernel may start while the one before still runs,
        and waits for its end before the first read. It lets the next one start as soon as that is over, the
        four-phase kernel when its result is written.
    phase_clocks : Tensor, ``[rows, 8]``, int64, optional
        Out: SM clock at phase boundaries, from libraries built with ``GVR_PHASE_TIMING``.

    Returns
    -------
    Tensor, ``[rows, >= k]``, int32
        `out`. **Which items:** the value multiset of ``torch.topk``; among values equal to the k-th the
        smallest indices. NaN ranks above +inf, ``-0.0`` equals ``+0.0``. **In what order:** ascending
        index. ``n_r <= k``: ``0 .. n_r - 1``, then ``-1``; ``n_r <= 0``: all ``-1``.

    Raises
    ------
    ValueError
        An argument has the wrong device, dtype, shape, stride or range; the message names it.
    LibraryError
        CUDA tensors, and the CUDA library is not available.

    Notes
    -----
    The op allocates nothing when `out` is given, needs no workspace (all state is on chip), reads
    nothing on the host and never synchronizes. Two calls that share slots of `prior` belong on one
    stream.

    Should another stream write `logits`, `seq_lens`, `row_slot`, `prior` or `guess_state` while a launch
    reads them, the result of that launch is unspecified. Even then nothing is written but the row's own
    `k` places of `out`, its slot of `prior` and `guess_state` and its row of `stats`, and the launch ends.

    References
    ----------
    Guess-Verify-Refine, section 4 (algorithm) and section 5.5 (integration).

    Examples
    --------
    >>> scores = torch.tensor([[0.5, 3.0, 1.0, 3.0]])
    >>> indexer_topk_decode(scores, torch.tensor([4], dtype=torch.int32), 2)
    tensor([[1, 3]], dtype=torch.int32)
    """
    if logits.is_cuda and not _LIBRARY.loaded:
        raise LibraryError(f"gvr_topk.indexer_topk_decode: CUDA library: {_LIBRARY.reason}")
    k, next_n = _integer("k", k), _integer("next_n", next_n)
    prior_offset, page_size = _integer("prior_offset", prior_offset), _integer("page_size", page_size)
    ctas_per_row, max_ctas = _integer("ctas_per_row", ctas_per_row), _integer("max_ctas", max_ctas)
    if out is None:
        if not 1 <= k <= MAX_WIDTH:  # before so much is allocated
            raise _fail("k", f"1 to {MAX_WIDTH}", k)
        out = torch.empty((logits.shape[0], k), dtype=torch.int32, device=logits.device)
    _check(
        logits,
        seq_lens,
        out,
        prior,
        row_slot,
        guess_state,
        stats,
        page_table,
        phase_clocks,
        k,
        next_n,
        prior_offset,
        page_size,
        ctas_per_row,
        max_ctas,
    )
    torch.ops.gvr_topk.indexer_topk_decode(
        logits,
        seq_lens,
        out,
        prior,
        row_slot,
        guess_state,
        stats,
        page_table,
        phase_clocks,
        k,
        next_n,
        prior_offset,
        page_size,
        int(Path.parse(path)),
        ctas_per_row,
        FLAG_PDL * pdl + FLAG_QUANTILE_GUESS * quantile_guess,
        max_ctas,
    )
    return out
