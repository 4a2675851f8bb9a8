"""`topk` with the signature of ``torch.topk``, and the k-th value, the threshold and the mask of its set.

**Which items.** The `k` largest along a dimension, or the `k` smallest. Of equal values those with the
smallest indices, so the set is unique. Values compare as in `gvr_topk.contract`: ``-0.0`` equals ``+0.0``,
and every NaN is equal to every other and above ``+inf``. So NaN comes first among the largest and last among
the smallest.

**In what order.** By value, then by index. `topk` with ``sorted=False`` returns ascending indices.

**What serves a call.** An op that selects in rows of float32, bfloat16 and float16, by the kernels of decode
without a state, and gives values and indices, sorted or not. In rows longer than it takes, it selects in
pieces first. A stable sort of the rows serves the rest: other dtypes, more than 2**26 rows, and a `k` above
2**20 in rows longer than 2**21.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from gvr_topk.arguments import TOPK, Checks, TopkItemsArguments
from gvr_topk.constants import MAX_ROWS, MAX_WIDTH
from gvr_topk.contract import DTYPES
from gvr_topk.ops import launch

_KTH_VALUE = Checks("gvr_topk.kth_value")
_THRESHOLD, _MASK = Checks("gvr_topk.topk_threshold"), Checks("gvr_topk.topk_mask")

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
TOPK_DTYPES = (torch.float64, *DTYPES, *_INTEGERS)
"""Dtypes of the inputs that these functions select from."""

_DTYPE_NAMES = " or ".join(str(dtype).removeprefix("torch.") for dtype in TOPK_DTYPES)

_INDEX_DTYPES = (torch.int64, torch.int32)


class TopkResult(NamedTuple):
    """What `topk` and `kth_value` return.

    Attributes
    ----------
    values : Tensor
        Elements of the input; they carry its gradient.
    indices : Tensor, integer
        Where they stand along the dimension.
    """

    values: Tensor
    indices: Tensor


class TopkThreshold(NamedTuple):
    """What `topk_threshold` returns.

    Attributes
    ----------
    value : Tensor
        The k-th value: what ranks above it belongs to the set.
    tie_quota : Tensor, int64
        How many of the elements equal to it belong to the set, 1 or more: those with the smallest indices.
    """

    value: Tensor
    tie_quota: Tensor


def topk(
    input: Tensor,
    k: int,
    dim: int = -1,
    largest: bool = True,
    sorted: bool = True,
    *,
    out: tuple[Tensor, Tensor] | None = None,
    index_dtype: torch.dtype = torch.int64,
) -> TopkResult:
    """Select the `k` largest elements along a dimension, exactly and deterministically, as ``torch.topk``.

    Parameters
    ----------
    input : Tensor, any shape and strides, of a dtype of `TOPK_DTYPES`
        Without dimensions, it counts as one of one element.
    k : int
        Items, 0 to the size of the dimension; 1 where there is none.
    dim : int, default -1
    largest : bool, default True
        If false, the `k` smallest, for which a GPU makes a float32 copy first.
    sorted : bool, default True
        Order items by value, the best first, and then by index. If false, by index alone, which saves time.
    out : tuple of two Tensors, optional
        Where values and indices are copied to, of exactly their dtypes; tensors without elements are resized.
    index_dtype : torch.dtype, default torch.int64
        torch.int64 or torch.int32.

    Returns
    -------
    TopkResult
        `values` and `indices`, of the shape of `input` with `k` in place of its size along `dim`.

    Raises
    ------
    ValueError
        An argument is wrong; the message names it.
    IndexError
        `input` has no such dimension.
    LibraryError
        The tensors are on a GPU, and the CUDA library is not available.

    Notes
    -----
    The values are those of ``torch.topk``, except where that ranks NaN by its sign (see `docs/topk.md`, which
    also says what is launched and what is copied). Of equal values those with the smallest indices are
    chosen, and smaller indices stand first. The gradient of the values goes to the chosen elements. On a GPU
    nothing is read on the host, so a CUDA graph can capture the call. ``torch.func.vmap`` is not supported.

    Examples
    --------
    >>> topk(torch.tensor([0.5, 3.0, 1.0, 3.0]), 3).indices
    tensor([1, 3, 2])
    """
    rows, k, dim = _checked(TOPK, input, k, TOPK.integer("dim", dim), low=0)
    largest, sorted = TOPK.flag("largest", largest), TOPK.flag("sorted", sorted)
    if index_dtype not in _INDEX_DTYPES:
        raise TOPK.fail("index_dtype", "torch.int64 or torch.int32", repr(index_dtype))
    if index_dtype is torch.int32 and rows.shape[dim] > 1 << 31:
        raise TOPK.fail("index_dtype", "torch.int64 for more than 2**31 elements", repr(index_dtype))
    chosen = _topk(rows, k, dim, largest, sorted)
    found = chosen if index_dtype is torch.int64 else chosen._replace(indices=chosen.indices.to(index_dtype))
    if input.dim() == 0:
        found = TopkResult(*(tensor.squeeze(0) for tensor in found))
    return found if out is None else _copied(found, out)


def kth_value(
    input: Tensor, k: int, dim: int | None = -1, keepdim: bool = False, *, largest: bool = True
) -> TopkResult:
    """Find the k-th largest element along a dimension, or the k-th smallest as ``torch.kthvalue`` does.

    Parameters
    ----------
    input : Tensor, any shape and strides, of a dtype of `TOPK_DTYPES`
    k : int
        1 to the size of the dimension.
    dim : int or None, default -1
        None: among all elements, with indices into the flattened input.
    keepdim : bool, default False
        Keep the dimension, with a size of 1. Not with ``dim=None``.
    largest : bool, default True
        If false, the k-th smallest, which ``torch.kthvalue(input, k, dim)`` returns.

    Returns
    -------
    TopkResult
        The value, which carries its gradient, and its int64 index. Among equal values the index is the last
        one that `topk` selects.

    Raises
    ------
    ValueError, IndexError, LibraryError
        As in `topk`.

    Notes
    -----
    It costs what `topk` costs with ``sorted=False``, and a few passes over the `k` values of each row.

    Examples
    --------
    >>> kth_value(torch.tensor([0.5, 3.0, 1.0, 3.0]), 2)
    TopkResult(values=tensor(3.), indices=tensor(3))
    """
    rows, k, axis = _checked(_KTH_VALUE, input, k, dim, low=1)
    keep = _kept(_KTH_VALUE, keepdim, dim) and input.dim() > 0
    found = TopkResult(*_last(rows, k, axis, _KTH_VALUE.flag("largest", largest))[:2])
    return found if keep else TopkResult(*(tensor.squeeze(axis) for tensor in found))


def topk_threshold(
    input: Tensor, k: int, dim: int | None = -1, keepdim: bool = False, *, largest: bool = True
) -> TopkThreshold:
    """Describe the set that `topk` selects by its k-th value and its share of the elements equal to that.

    Parameters
    ----------
    input, k, dim, keepdim, largest
        As in `kth_value`.

    Returns
    -------
    TopkThreshold
        Two numbers for each row.

    Raises
    ------
    ValueError, IndexError, LibraryError
        As in `topk`.

    Notes
    -----
    It costs what `kth_value` costs.

    Examples
    --------
    >>> topk_threshold(torch.tensor([3.0, 1.0, 3.0, 3.0, 5.0, 4.0]), 4)
    TopkThreshold(value=tensor(3.), tie_quota=tensor(2))
    """
    rows, k, axis = _checked(_THRESHOLD, input, k, dim, low=1)
    keep = _kept(_THRESHOLD, keepdim, dim) and input.dim() > 0
    kth, _, quota = _last(rows, k, axis, _THRESHOLD.flag("largest", largest))
    found = TopkThreshold(kth, quota)
    return found if keep else TopkThreshold(*(tensor.squeeze(axis) for tensor in found))


def topk_mask(
    input: Tensor, k: int, dim: int | None = -1, *, largest: bool = True, out: Tensor | None = None
) -> Tensor:
    """Mark the elements that `topk` selects.

    Parameters
    ----------
    input : Tensor, any shape and strides, of a dtype of `TOPK_DTYPES`
    k : int
        0 to the size of the dimension.
    dim : int or None, default -1
        None: among all elements, as BatchTopK of a sparse autoencoder selects.
    largest : bool, default True
        If false, the `k` smallest.
    out : Tensor, shape of `input`, bool, contiguous, optional
        Where to write; allocated when absent.

    Returns
    -------
    Tensor, shape of `input`, bool
        `out`: true for exactly `k` elements of each row, whatever ties there are.

    Raises
    ------
    ValueError, IndexError, LibraryError
        As in `topk`.

    Examples
    --------
    >>> topk_mask(torch.tensor([[3.0, 1.0], [2.0, 3.0]]), 3, dim=None)
    tensor([[ True, False],
            [ True,  True]])
    """
    rows, k, axis = _checked(_MASK, input, k, dim, low=0)
    chosen = _positions(rows.detach(), k, axis, _MASK.flag("largest", largest))
    if out is None:
        out = torch.zeros(input.shape, dtype=torch.bool, device=input.device)
    else:
        _MASK.tensor("out", out, input, torch.bool, tuple(input.shape), strided=True)
        _MASK.contiguous("out", out)
        out.zero_()
    out.view(rows.shape).scatter_(axis, chosen, True)
    return out


def _checked(checks: Checks, input: Tensor, k: int, dim: int | None, *, low: int) -> tuple[Tensor, int, int]:
    """Return the input with a dimension to select along, the number of items, and that dimension."""
    checks.dense("input", input)
    if input.dtype not in TOPK_DTYPES:
        raise checks.fail("input", f"dtype {_DTYPE_NAMES}", str(input.dtype).removeprefix("torch."))
    if dim is None:
        rows, axis = input.reshape(-1), 0
    else:
        rows, axis = input.reshape(1) if input.dim() == 0 else input, checks.integer("dim", dim)
    size = rows.size(axis)  # or the IndexError of torch
    k = checks.integer("k", k, low if input.dim() > 0 else 1, size)
    return rows, k, axis % rows.dim()


def _kept(checks: Checks, keepdim: bool, dim: int | None) -> bool:
    """Return whether a result keeps the dimension."""
    if checks.flag("keepdim", keepdim) and dim is None:
        raise checks.fail("keepdim", "a dim beside it", None)
    return keepdim


def _copied(found: TopkResult, out: Any) -> TopkResult:
    """Copy results to where the caller wants them."""
    if not isinstance(out, tuple | list) or len(out) != 2:
        raise TOPK.fail("out", "a tuple of values and indices", type(out).__name__)
    if found.values.requires_grad:
        raise TOPK.fail("out", "an input without a gradient, or torch.no_grad", "an input with one")
    for name, target, result in zip(("out[0]", "out[1]"), out, found, strict=True):
        if isinstance(target, Tensor) and target.numel() == 0:
            target.resize_(result.shape)
        TOPK.tensor(name, target, result, result.dtype, tuple(result.shape), strided=True)
        target.copy_(result)
    return TopkResult(*out)


def _last(input: Tensor, k: int, dim: int, largest: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the last item that `topk` selects, its index, and how many of the items are equal to it.

    Nothing is sorted: it is the worst of the items and, of equal ones, that with the greatest index.
    """
    values, indices = _topk(input.detach(), k, dim, largest, False)
    nan = values != values
    if largest and values.is_floating_point():
        numbers = values.masked_fill(nan, torch.inf)
        worst = numbers.amin(dim, keepdim=True).masked_fill(nan.all(dim, keepdim=True), torch.nan)
    else:
        worst = (torch.amin if largest else torch.amax)(values, dim, keepdim=True)  # NaN is the greatest
    equal = (values == worst) | (nan & (worst != worst))
    index = torch.where(equal, indices, -1).amax(dim, keepdim=True)
    return input.gather(dim, index), index, equal.sum(dim, keepdim=True)


def _topk(input: Tensor, k: int, dim: int, largest: bool, sorted: bool) -> TopkResult:
    """Select items, with their gradient, of arguments that are checked; all results are contiguous."""
    tracked = _is_tracked(input)
    scores, is_last = input.detach() if tracked else input, dim == input.dim() - 1
    if not is_last:
        scores = scores.movedim(dim, -1)
    if not op_serves(scores, k):
        indices = _by_sorting(scores, k, largest, ascending=not sorted).movedim(-1, dim).contiguous()
        return TopkResult(input.gather(dim, indices), indices)
    values, indices = _items(scores, k, largest, sorted)
    if not is_last:
        values, indices = (items.movedim(-1, dim).contiguous() for items in (values, indices))
    if tracked:
        values = input.gather(dim, indices)
    return TopkResult(values, indices)


def _is_tracked(input: Tensor) -> bool:
    """Whether the values have to carry a gradient."""
    # What is exported may be given an input with a gradient later.
    if input.requires_grad or forward_ad._current_level >= 0 or torch.compiler.is_exporting():
        return True
    # `requires_grad` tells of the innermost transform of torch.func alone.
    return not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None


def _items(scores: Tensor, k: int, largest: bool, sorted: bool) -> tuple[Tensor, Tensor]:
    """Select items along the last dimension with the op; returns values and int64 indices."""
    rows = _rows(scores)
    values = rows.new_empty(rows.shape[0], k)
    indices = _select(rows, k, largest, sorted, values)
    if scores.dim() == 2:
        return values, indices
    shape = (*scores.shape[:-1], k)
    return values.reshape(shape), indices.reshape(shape)


def _positions(input: Tensor, k: int, dim: int, largest: bool) -> Tensor:
    """Ascending indices of the `k` best elements along a dimension, int64."""
    scores = input.movedim(dim, -1)
    if op_serves(scores, k):
        chosen = _select(_rows(scores), k, largest).reshape(*scores.shape[:-1], k)
    else:
        chosen = _by_sorting(scores, k, largest, ascending=True)
    return chosen.movedim(-1, dim)


def _rows(scores: Tensor) -> Tensor:
    """Scores as rows that lie densely, ``[rows, width]``."""
    rows = scores if scores.dim() == 2 else scores.reshape(-1, scores.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _by_sorting(scores: Tensor, k: int, largest: bool, ascending: bool) -> Tensor:
    """Indices of the `k` best elements along the last dimension, int64: ascending, or the best first."""
    if k == 0 or scores.numel() == 0:
        return torch.empty((*scores.shape[:-1], k), dtype=torch.int64, device=scores.device)
    best = _order(scores, largest)[..., :k]
    return _sorted(best, False)[0] if ascending else best


def op_serves(scores: Tensor, k: int) -> bool:
    """Whether the op can select `k` items in each of these rows, in pieces or at once.

    Parameters
    ----------
    scores : Tensor, ``[..., width]``
    k : int
        0 to `width`. Nothing has to be selected where it is 0.
    """
    width = scores.shape[-1]
    return (
        k > 0
        and scores.numel() > 0
        and scores.dtype in DTYPES
        and scores.device.type in ("cpu", "cuda", "meta")
        # Of longer pieces, too much would be left to select among.
        and (width <= MAX_WIDTH or k <= MAX_WIDTH // 2)
        and scores.numel() // width <= MAX_ROWS
    )


def _select(
    rows: Tensor, k: int, largest: bool, sorted: bool = False, values: Tensor | None = None
) -> Tensor:
    """Run the op, on rows of any length; `values` are written, and int64 indices returned."""
    candidates: Tensor | None = None
    while rows.shape[1] > MAX_WIDTH:
        best = _best_of_pieces(rows, k, largest)
        rows = rows.gather(1, best)
        candidates = best if candidates is None else candidates.gather(1, best)
    indices = rows.new_empty((rows.shape[0], k), dtype=torch.int64)
    launch(TopkItemsArguments(rows, indices, values, int(sorted), int(largest), candidates))
    return indices


def _best_of_pieces(rows: Tensor, k: int, largest: bool) -> Tensor:
    """Ascending indices of the `k` best of every piece of rows that are longer than the op takes, int64.

    The best of a row are among them. Both are listed by ascending position, so the smallest positions win
    among equal scores, as within one piece.
    """
    count, width = rows.shape
    whole = width - width % MAX_WIDTH
    best = _select(rows[:, :whole].reshape(-1, MAX_WIDTH), k, largest).reshape(count, -1, k)
    starts = torch.arange(0, whole, MAX_WIDTH, device=rows.device)
    candidates = (best + starts[:, None]).flatten(1)
    if whole == width:
        return candidates
    rest = _select(rows[:, whole:], min(k, width - whole), largest) + whole
    return torch.cat((candidates, rest), 1)


def _order(values: Tensor, largest: bool) -> Tensor:
    """Indices that sort rows, the best value first and equal ones as they stand."""
    if values.is_floating_point():
        # CUDA sorts short rows by the bits of their elements, where some NaN lie outside of all numbers. So
        # integers are sorted that rank as the numbers do, NaN above all; the sum turns -0.0 into +0.0.
        kind = _SAME_SIZE[values.element_size()]
        bits = (values + 0.0).view(kind)
        most = torch.iinfo(kind).max
        values = (bits ^ (bits >> 8 * bits.element_size() - 1 & most)).masked_fill_(values != values, most)
    return _sorted(values, largest)[1]


def _sorted(values: Tensor, descending: bool) -> tuple[Tensor, Tensor]:
    """Sort rows stably; returns their values and where they stood."""
    # A compiled sort that was fused with its neighbours has left the row on a GPU, so it stays an operator.
    if torch.compiler.is_compiling():  # pragma: no mutate: a CPU sorts alike either way
        return _opaque_sort(values, descending)
    return _stable_sort(values, descending)


def _stable_sort(values: Tensor, descending: bool) -> tuple[Tensor, Tensor]:
    found = torch.sort(values.contiguous(), descending=descending, stable=True)
    return found.values, found.indices


_opaque_sort = torch.library.custom_op("gvr_topk::stable_sort", _stable_sort, mutates_args=())


@_opaque_sort.register_fake
def _(values: Tensor, descending: bool) -> tuple[Tensor, Tensor]:
    values = torch.empty_like(values, memory_format=torch.contiguous_format)
    return values, torch.empty_like(values, dtype=torch.int64)


_SAME_SIZE = {2: torch.int16, 4: torch.int32, 8: torch.int64}
