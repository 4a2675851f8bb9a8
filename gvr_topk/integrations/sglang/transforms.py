"""SGLang's DSA top-k functions, computed by this package's ops.

Each method takes the arguments of SGLang's function, and raises `NotServedError` where the ops do not run.
Rows that begin at the first column, each with its own row of a page table, are decode rows, which may have a
state. All other rows go through the prefill op. Items are chosen exactly and deterministically, in ascending
order of positions; SGLang promises no order.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from gvr_topk.constants import MIN_ARCH
from gvr_topk.integrations.sglang.notes import NotServedError
from gvr_topk.integrations.sglang.row_state import Requests
from gvr_topk.library import library_status
from gvr_topk.ops import indexer_topk_decode, indexer_topk_prefill


class Transforms:
    """The hooked functions, as methods.

    Parameters
    ----------
    requests : Requests
        Knows the state of the rows.
    """

    def __init__(self, requests: Requests) -> None:
        self._requests = requests

    def positions(
        self, score: Tensor, lengths: Tensor, topk: int, row_starts: Tensor | None = None
    ) -> Tensor:
        """``fast_topk_v2``: positions in the row, counted from its start."""
        if row_starts is not None:
            return self._prefill(score, lengths, topk, row_starts)
        return self._decode(score, lengths, topk)

    def paged(
        self,
        score: Tensor,
        lengths: Tensor,
        page_table_size_1: Tensor,
        cu_seqlens_q: Tensor,
        topk: int,
        row_starts: Tensor | None = None,
    ) -> Tensor:
        """``fast_topk_transform_fused``: slots of the cache, from a table with one position per page.

        In decode each row has its own row of the table. In prefill and in target verification the rows of a
        request share one row of the table, and `cu_seqlens_q` says which rows belong to which request.
        """
        table = page_table_size_1
        if row_starts is None and table.shape[0] == score.shape[0]:
            return self._decode(score, lengths, topk, page_table=table, page_size=1)
        request = _requests_of_rows(cu_seqlens_q, score.shape[0])
        return self._prefill(
            score, lengths, topk, row_starts, page_table=table, page_size=1, row_request=request
        )

    def ragged(
        self,
        score: Tensor,
        lengths: Tensor,
        topk_indices_offset: Tensor,
        topk: int,
        row_starts: Tensor | None = None,
    ) -> Tensor:
        """``fast_topk_transform_ragged_fused``: positions plus an offset of each row."""
        return self._prefill(score, lengths, topk, row_starts, offsets=topk_indices_offset)

    def paged_v2(
        self,
        scores: Tensor,
        seq_lens: Tensor,
        page_tables: Tensor | None,
        out_page_indices: Tensor,
        page_size: int,
        metadata: Tensor,
        out_raw_indices: Tensor | None = None,
    ) -> None:
        """``topk_transform_512_v2``: slots into `out_page_indices`, from a table with pages of any size.

        `metadata`, the launch plan of SGLang's kernel, is not needed. Without a table, positions are written
        in place of slots.
        """
        k = out_page_indices.shape[1]
        if page_tables is None:
            self._decode(scores, seq_lens, k, out=out_page_indices)
            if out_raw_indices is not None:
                out_raw_indices.copy_(out_page_indices)
            return
        raw = out_raw_indices is not None
        self._decode(
            scores,
            seq_lens,
            k,
            page_table=page_tables,
            page_size=page_size,
            out=out_raw_indices if raw else out_page_indices,
            slots=out_page_indices if raw else None,
        )

    def ragged_v2(
        self,
        scores: Tensor,
        seq_lens: Tensor,
        *,
        out_offsets: Tensor,
        out_indices: Tensor,
        row_starts: Tensor | None = None,
    ) -> None:
        """``topk_transform_ragged_v2``: positions plus an offset of each row, into `out_indices`."""
        k = out_indices.shape[1]
        self._prefill(scores, seq_lens, k, row_starts, offsets=out_offsets, out=out_indices)

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
    ) -> Tensor:
        """Select in rows that begin at the first column."""
        _check_device(score.device)
        state, row_slot = self._requests.rows(score, k)
        return indexer_topk_decode(
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
    ) -> Tensor:
        """Select in rows that begin anywhere, or share a row of the page table, or have an offset."""
        _check_device(score.device)
        if row_starts is None:
            row_starts, row_ends = torch.zeros_like(lengths), lengths
        else:
            row_ends = row_starts + lengths
        return indexer_topk_prefill(
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


@functools.cache
def _check_device(device: torch.device) -> None:
    """Refuse a device that the op does not run on, before anything is allocated there."""
    if device.type != "cuda":
        return
    status = library_status()
    if not status.loaded:
        raise NotServedError(f"the CUDA library is not usable: {status.reason}")
    major, minor = torch.cuda.get_device_capability(device)
    if 10 * major + minor < MIN_ARCH:
        raise NotServedError(f"compute capability {major}.{minor}, wanted {MIN_ARCH / 10} or later")


def _requests_of_rows(cu_seqlens_q: Tensor, rows: int) -> Tensor:
    """Return the request of each row, from where the rows of each request begin; computed on the device.

    Rows behind those of the last request get a number that belongs to no request, and so an empty window.
    """
    row = torch.arange(rows, dtype=cu_seqlens_q.dtype, device=cu_seqlens_q.device)
    return torch.searchsorted(cu_seqlens_q[1:].contiguous(), row, right=True, out_int32=True)
