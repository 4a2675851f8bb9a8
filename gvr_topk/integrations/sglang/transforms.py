"""SGLang's DSA top-k functions, computed by this package's op.

Each method takes what the function of SGLang takes, and raises `NotServedError` for what the op cannot do.
Items are chosen exactly and deterministically, in ascending order of positions; SGLang promises no order.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from gvr_topk.constants import MIN_ARCH
from gvr_topk.integrations.sglang.notes import NotServedError
from gvr_topk.integrations.sglang.row_state import Requests
from gvr_topk.library import library_status
from gvr_topk.ops import indexer_topk_decode


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
        """``fast_topk_v2``: positions in the row."""
        return self._select(score, lengths, topk, row_starts)

    def paged(
        self,
        score: Tensor,
        lengths: Tensor,
        page_table_size_1: Tensor,
        cu_seqlens_q: Tensor,
        topk: int,
        row_starts: Tensor | None = None,
    ) -> Tensor:
        """``fast_topk_transform_fused``: slots of the cache, from a table with one position per page."""
        if page_table_size_1.shape[0] != score.shape[0]:
            raise NotServedError("several rows share a row of the page table")
        return self._select(score, lengths, topk, row_starts, page_table=page_table_size_1, page_size=1)

    def ragged(
        self,
        score: Tensor,
        lengths: Tensor,
        topk_indices_offset: Tensor,
        topk: int,
        row_starts: Tensor | None = None,
    ) -> Tensor:
        """``fast_topk_transform_ragged_fused``: positions plus an offset of each row."""
        chosen = self._select(score, lengths, topk, row_starts)
        return _add_offsets(chosen, topk_indices_offset)

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

        `metadata`, the launch plan of SGLang's kernel, is not needed. Without a table positions take the
        place of slots.
        """
        k = out_page_indices.shape[1]
        if page_tables is None:
            self._select(scores, seq_lens, k, out=out_page_indices)
            if out_raw_indices is not None:
                out_raw_indices.copy_(out_page_indices)
            return
        raw = out_raw_indices is not None
        self._select(
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
        chosen = self._select(scores, seq_lens, out_indices.shape[1], row_starts)
        out_indices.copy_(_add_offsets(chosen, out_offsets))

    def _select(
        self,
        score: Tensor,
        lengths: Tensor,
        k: int,
        row_starts: Tensor | None = None,
        *,
        page_table: Tensor | None = None,
        page_size: int = 0,
        out: Tensor | None = None,
        slots: Tensor | None = None,
    ) -> Tensor:
        if row_starts is not None:
            # Where a row begins is known on the device alone, and the op reads rows from their first column.
            raise NotServedError("rows that begin inside the scores (prefill)")
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


def _add_offsets(chosen: Tensor, offsets: Tensor) -> Tensor:
    """Add each row's offset to its positions and leave -1: the op has no offset, so this follows it."""
    return torch.where(chosen < 0, chosen, chosen + offsets.to(torch.int32).unsqueeze(1))
