"""SGLang's DSA top-k functions, computed by this package's ops.

Each method takes the arguments of SGLang's function, and raises `NotServedError` where the ops do not run. It
returns the result of SGLang's function, and what a comparison with that function has to know.
Rows that begin at the first column, each with its own row of a page table, are decode rows, which may have a
state. All other rows go through the prefill op. Items are chosen exactly and deterministically, in ascending
order of positions; SGLang promises no order.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from gvr_topk.integrations._kit.replacement import readable
from gvr_topk.integrations._kit.verify import NOWHERE, PADDING, Selected
from gvr_topk.integrations.sglang.hook import NotServedError, Served
from gvr_topk.integrations.sglang.row_state import Requests
from gvr_topk.ops import indexer_topk_decode, indexer_topk_prefill
from gvr_topk.policy import no_kernels_reason


class Transforms:
    """The hooked functions, as methods."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests

    def positions(
        self, score: Tensor, lengths: Tensor, topk: int, row_starts: Tensor | None = None
    ) -> Served:
        """``fast_topk_v2``: positions in the row, counted from its start."""
        if row_starts is not None:
            return _returned(self._prefill(score, lengths, topk, row_starts))
        return _returned(self._decode(score, lengths, topk))

    def paged(
        self,
        score: Tensor,
        lengths: Tensor,
        page_table_size_1: Tensor,
        cu_seqlens_q: Tensor,
        topk: int,
        row_starts: Tensor | None = None,
    ) -> Served:
        """``fast_topk_transform_fused``: slots of the cache, from a table with one position per page.

        In decode each row has its own row of the table. In prefill and in target verification the rows of a
        request share one row of the table, and `cu_seqlens_q` says which rows belong to which request.
        """
        table = page_table_size_1
        if row_starts is None and table.shape[0] == score.shape[0]:
            return _returned(self._decode(score, lengths, topk, page_table=table, page_size=1))
        request = _requests_of_rows(cu_seqlens_q, score.shape[0])
        return _returned(
            self._prefill(
                score, lengths, topk, row_starts, page_table=table, page_size=1, row_request=request
            )
        )

    def ragged(
        self,
        score: Tensor,
        lengths: Tensor,
        topk_indices_offset: Tensor,
        topk: int,
        row_starts: Tensor | None = None,
    ) -> Served:
        """``fast_topk_transform_ragged_fused``: positions plus an offset of each row."""
        return _returned(self._prefill(score, lengths, topk, row_starts, offsets=topk_indices_offset))

    def paged_v2(
        self,
        scores: Tensor,
        seq_lens: Tensor,
        page_tables: Tensor | None,
        out_page_indices: Tensor,
        page_size: int,
        metadata: Tensor,
        out_raw_indices: Tensor | None = None,
    ) -> Served:
        """``topk_transform_512_v2``: slots into `out_page_indices`, from a table with pages of any size.

        `metadata`, the launch plan of SGLang's kernel, is not needed. Without a table, positions are written
        in place of slots.
        """
        k = out_page_indices.shape[1]
        if page_tables is None:
            selected = self._decode(scores, seq_lens, k, out=out_page_indices)
            if out_raw_indices is None:
                return Served(None, (selected,))
            out_raw_indices.copy_(out_page_indices)
            return Served(None, (selected, Selected(scores, out_raw_indices)))
        decode = functools.partial(
            self._decode, scores, seq_lens, k, page_table=page_tables, page_size=page_size
        )
        if out_raw_indices is None:
            return Served(None, (decode(out=out_page_indices),))
        selected = decode(out=out_raw_indices, slots=out_page_indices)
        return Served(None, (selected, Selected(scores, out_raw_indices)))

    def ragged_v2(
        self,
        scores: Tensor,
        seq_lens: Tensor,
        *,
        out_offsets: Tensor,
        out_indices: Tensor,
        row_starts: Tensor | None = None,
    ) -> Served:
        """``topk_transform_ragged_v2``: positions plus an offset of each row, into `out_indices`."""
        k = out_indices.shape[1]
        selected = self._prefill(scores, seq_lens, k, row_starts, offsets=out_offsets, out=out_indices)
        return Served(None, (selected,))

    def _decode(
        self,
        score: Tensor,
        lengths: Tensor,
        k: int,
        *,
        page_table: Tensor | None = None,
        page_size: int = 0,
        out: Tensor | None = None,
        slots: Tensor | None = None,
    ) -> Selected:
        """Select in rows that begin at the first column."""
        check_scores(score)
        state, row_slot = self._requests.rows(score, k)
        items = indexer_topk_decode(
            score,
            lengths,
            k,
            out=out,
            state=state,
            row_slot=row_slot,
            page_table=page_table,
            page_size=page_size,
            slots=slots,
        )
        if page_table is None:
            return Selected(score, items)
        positions = functools.partial(_positions_in_table, page_table, page_size, None)
        return Selected(score, items if slots is None else slots, positions=positions)

    def _prefill(
        self,
        score: Tensor,
        lengths: Tensor,
        k: int,
        row_starts: Tensor | None,
        *,
        offsets: Tensor | None = None,
        page_table: Tensor | None = None,
        page_size: int = 0,
        row_request: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Selected:
        """Select in rows that begin anywhere, or share a row of the page table, or have an offset."""
        check_scores(score)
        if row_starts is None:
            row_starts, row_ends = torch.zeros_like(lengths), lengths
        else:
            row_ends = row_starts + lengths
        items = indexer_topk_prefill(
            score,
            row_starts,
            row_ends,
            k,
            out=out,
            row_request=row_request,
            offsets=None if offsets is None else offsets.to(torch.int32),
            page_table=page_table,
            page_size=page_size,
        )
        if offsets is not None:
            return Selected(score, items, row_starts, functools.partial(_positions_with_offset, offsets))
        if page_table is None or row_request is None:
            return Selected(score, items, row_starts)
        positions = functools.partial(_positions_in_table, page_table, page_size, row_request)
        return Selected(score, items, row_starts, positions, judged=row_request < page_table.shape[0])


def _returned(selected: Selected) -> Served:
    return Served(selected.items, (selected,))


def _positions_with_offset(offsets: Tensor, rows: Tensor, items: Tensor) -> Tensor:
    """Return the positions of items that have the offset of their row."""
    return torch.where(items == PADDING, PADDING, items - offsets[rows, None])


def _positions_in_table(
    table: Tensor, page_size: int, row_request: Tensor | None, rows: Tensor, items: Tensor
) -> Tensor:
    """Return the first positions at which each row's pages have these cache slots."""
    pages = table[rows if row_request is None else row_request[rows].long()].long()
    slots = pages[:, :, None] * page_size + torch.arange(page_size, device=table.device)
    slots = torch.where(pages[:, :, None] < 0, NOWHERE, slots).flatten(1)
    ordered, positions = slots.sort(dim=1, stable=True)
    at = torch.searchsorted(ordered, items.long()).clamp(max=slots.shape[1] - 1)
    found = (ordered.gather(1, at) == items) & (items >= 0)
    nothing = torch.where(items == PADDING, PADDING, NOWHERE)
    return torch.where(found, positions.gather(1, at), nothing)


def check_scores(score: Tensor) -> None:
    """Refuse scores that our ops do not take, before anything is allocated."""
    _check_device(score.device)
    if not readable(score):
        raise NotServedError(f"scores of {score.dtype} with strides {score.stride()}")


@functools.cache
def _check_device(device: torch.device) -> None:
    """Refuse a device that the op does not run on, before anything is allocated there."""
    if device.type != "cuda":
        return
    if reason := no_kernels_reason(device):
        raise NotServedError(reason)


def _requests_of_rows(cu_seqlens_q: Tensor, rows: int) -> Tensor:
    """Return the request of each row, from where the rows of each request begin; computed on the device.

    Rows behind those of the last request get a number that belongs to no request, and so an empty window.
    """
    row = torch.arange(rows, dtype=cu_seqlens_q.dtype, device=cu_seqlens_q.device)
    return torch.searchsorted(cu_seqlens_q[1:].contiguous(), row, right=True, out_int32=True)
