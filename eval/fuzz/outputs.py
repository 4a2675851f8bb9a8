"""What calls of decode and of prefill write, of which the fuzzer and the stress runs check every word."""

import torch
from torch import Tensor

from gvr_topk.evaluation.oracle import translate_positions

INT32 = torch.iinfo(torch.int32)


def expected_outputs(
    positions: Tensor,
    table_row: Tensor,
    *,
    page_table: Tensor | None,
    page_size: int,
    cache_slots: bool,
    offsets: Tensor | None = None,
) -> dict[str, Tensor]:
    """Outputs by the name of their argument: ``out``, and ``slots`` where these go beside it.

    Of selected positions ``[rows, k]`` int32, -1 for none. `table_row` is the row of the tables for each row,
    and may be any number where all positions are -1. With `cache_slots` the slots of a page table go beside
    the positions instead of in their place.
    """
    out = positions
    if offsets is not None:
        moved = positions.to(torch.int64) + offsets[table_row.clamp(0, len(offsets) - 1), None]
        fits = (positions >= 0) & (moved >= INT32.min) & (moved <= INT32.max)
        out = torch.where(fits, moved, -1).to(torch.int32)
    if page_table is None:
        return {"out": out}
    slots = translate_positions(positions, page_table, page_size, table_row)
    return {"out": out, "slots": slots} if cache_slots else {"out": slots}
