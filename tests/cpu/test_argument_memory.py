"""Which tensors of a call share memory, against sets of bytes, and what else the checks refuse."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from gvr_topk.arguments import (
    BlocksArguments,
    Checks,
    DecodeArguments,
    InBlocksArguments,
    PrefillArguments,
    _overlap,
    _runs,
    check_decode,
)
from gvr_topk.constants import BLOCK_SIZE, FLAG_QUANTILE_GUESS, Path

BUFFER = torch.zeros(256, dtype=torch.int16)
"""Of two bytes each, so that a count of elements is no count of bytes."""


def view(rows: int, columns: int, stride: int, offset: int) -> Tensor:
    return BUFFER.as_strided((rows, columns), (stride, 1), offset)


def bytes_of(tensor: Tensor, columns: int) -> set[int]:
    size = tensor.element_size()
    firsts = [
        tensor.data_ptr() + size * (row * tensor.stride(0) + column)
        for row in range(tensor.shape[0])
        for column in range(columns)
    ]
    return {first + byte for first in firsts for byte in range(size)}


def test_tensors_overlap_where_they_share_a_byte() -> None:
    """Rows with gaps and without; those with two different strides overlap if their ranges do."""
    draw = random.Random(3)
    seen = {True: 0, False: 0}
    for _ in range(3000):
        tensors, columns, strides = [], [], set()
        common = draw.randint(1, 24)
        for _ in range(2):
            width = draw.randint(1, 12)
            stride = draw.choice([common, common, width, draw.randint(1, 24)])
            rows = draw.choice([1, 2, 3, 5])
            tensors.append(view(rows, width, stride, draw.randint(0, 100)))
            columns.append(draw.choice([width, draw.randint(1, width)]))
            if rows > 1 and stride > columns[-1]:
                strides.add(stride)
        runs = [_runs(tensor, count) for tensor, count in zip(tensors, columns, strict=True)]
        assert runs[0] is not None and runs[1] is not None
        a, b = (bytes_of(tensor, count) for tensor, count in zip(tensors, columns, strict=True))
        wanted, got = bool(a & b), _overlap(runs[0], runs[1])
        assert got == _overlap(runs[1], runs[0])
        if len(strides) == 2:
            assert got == (max(min(a), min(b)) <= min(max(a), max(b)))
        else:
            assert got == wanted, (runs, a & b)
        seen[got] += 1
    assert min(seen.values()) > 500


def test_memory_that_is_not_there_overlaps_nothing() -> None:
    for tensor in (torch.zeros(0, 4), torch.zeros(4, 0), torch.zeros(0)):
        assert _runs(tensor, None) is None
    assert _runs(torch.zeros(4, 4), 0) is None


def test_vectors_are_one_run() -> None:
    run = _runs(BUFFER[3:8], None)
    assert run is not None and (run.begin, run.rows, run.size) == (BUFFER.data_ptr() + 6, 1, 10)
    assert run.end == run.begin + 10


def test_traced_tensors_have_the_memory_of_their_storage() -> None:
    storage = torch.zeros(8, 4, device="meta")
    first, second, other = _runs(storage[:4], None), _runs(storage[3:], None), _runs(storage.clone(), None)
    assert first is not None and second is not None and other is not None
    assert _overlap(first, second) and not _overlap(first, other)
    apart = _runs(storage[4:], None)
    assert apart is not None and not _overlap(first, apart)


def test_an_inner_stride_counts_from_two_columns_on() -> None:
    checks, like = Checks(), torch.zeros(2, 2)
    checks.tensor("x", torch.zeros(2, 8)[:, ::8], like, torch.float32, (2, 1))
    for columns, step in ((2, 4), (4, 2)):
        gaps = torch.zeros(2, 8)[:, ::step]
        checks.tensor("x", gaps, like, torch.float32, (2, columns), strided=True)
        with pytest.raises(ValueError, match=f"^x: wanted inner stride 1, got {step}$"):
            checks.tensor("x", gaps, like, torch.float32, (2, columns))


@pytest.mark.parametrize(
    ("kind", "defaults"),
    [
        (
            DecodeArguments,
            {
                "next_n": 1,
                "page_size": 0,
                "path": 0,
                "max_ctas": 0,
                "flags": FLAG_QUANTILE_GUESS,
                "hint_offset": 0,
                "ctas_per_row": 0,
                "compress_ratio": 1,
            },
        ),
        (PrefillArguments, {"page_size": 0, "path": 0, "flags": 0}),
        (BlocksArguments, {"next_n": 1, "flags": 0, "compress_ratio": 1, "block_size": BLOCK_SIZE}),
        (InBlocksArguments, {"next_n": 1, "flags": 0, "compress_ratio": 1, "block_size": BLOCK_SIZE}),
    ],
)
def test_defaults_of_the_schemas(kind: Any, defaults: dict[str, int]) -> None:
    assert {name: value for name, value in kind._field_defaults.items() if value is not None} == defaults


def _call(width: int = 600, k: int = 512, **changes: Any) -> DecodeArguments:
    logits, lengths = torch.zeros(1, width), torch.tensor([width], dtype=torch.int32)
    return DecodeArguments(logits, lengths, torch.zeros(1, k, dtype=torch.int32), k, **changes)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (_call(ctas_per_row=3), "ctas_per_row: wanted 0, 1, 2, 4, 8 or 16 and enough for the width, got 3"),
        (_call(k=513, path=int(Path.PAPER_GVR)), "k: wanted 512, 1024 or 2048 for path 'paper_gvr', got 513"),
        (_call(ctas_per_row=4, max_ctas=2), "ctas_per_row: wanted at most max_ctas = 2, got 4"),
        (_call(max_ctas=3), "max_ctas: wanted 0, 1, 2, 4, 8 or 16, got 3"),
    ],
)
def test_plans_that_cannot_be_are_refused(call: DecodeArguments, message: str) -> None:
    with pytest.raises(ValueError, match=f"^gvr_topk.indexer_topk_decode: {message}$"):
        check_decode(call)


def test_plans_that_can_be_are_taken() -> None:
    for changes in ({}, {"ctas_per_row": 4, "max_ctas": 4}, {"path": int(Path.PAPER_GVR)}, {"max_ctas": 2}):
        check_decode(_call(**changes))
