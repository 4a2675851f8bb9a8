"""What a call without options hands to each op, and which of two wrong arguments is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from gvr_topk import ops
from gvr_topk.constants import BLOCK_SIZE, FLAG_PDL, FLAG_QUANTILE_GUESS, Path

SCORES, LENGTHS = torch.zeros(2, 32), torch.tensor([32, 20], dtype=torch.int32)
STARTS = torch.zeros(2, dtype=torch.int32)
BLOCKS = torch.tensor([[0, 1]], dtype=torch.int32).repeat(2, 1)
CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "decode": (ops.indexer_topk_decode, (SCORES, LENGTHS, 3)),
    "prefill": (ops.indexer_topk_prefill, (SCORES, STARTS, LENGTHS, 3)),
    "blocks": (ops.indexer_topk_blocks, (SCORES, LENGTHS, 2, 3)),
    "in_blocks": (ops.indexer_topk_in_blocks, (SCORES, LENGTHS, BLOCKS, 3)),
}
DEFAULTS = {
    "next_n": 1,
    "compress_ratio": 1,
    "block_size": BLOCK_SIZE,
    "page_size": 0,
    "max_ctas": 0,
    "hint_offset": 0,
    "path": int(Path.AUTO),
}


@pytest.mark.parametrize("op", sorted(CALLS))
def test_a_call_without_options(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, given = CALLS[op]
    seen: list[Any] = []
    monkeypatch.setattr(ops, "launch", seen.append)
    function(*given)
    (arguments,) = seen
    assert arguments.flags == (FLAG_QUANTILE_GUESS if op == "decode" else 0)
    got = {name: getattr(arguments, name) for name in DEFAULTS if hasattr(arguments, name)}
    assert got == {name: DEFAULTS[name] for name in got} and len(got) >= 2
    optional = ("row_slot", "next_state", "counts", "page_table", "slots", "stats", "row_request", "offsets")
    assert [name for name in optional if getattr(arguments, name, None) is not None] == []
    function(*given, pdl=True)
    assert seen[1].flags == arguments.flags | FLAG_PDL


def test_a_wrong_k_is_named_before_the_number_of_blocks() -> None:
    out = torch.empty(2, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"indexer_topk_blocks: k: wanted .*, got 0"):
        ops.indexer_topk_blocks(SCORES, LENGTHS, 0, 1, out=out)
