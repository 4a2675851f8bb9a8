"""Which tensors of a call share memory, against sets of bytes, and where an inner stride counts."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from gvr_topk.arguments import Checks, _overlap, _runs
from gvr_topk.distributed.peers import SHARDED
from tests.wrong_calls import sharded_arguments

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


def test_an_inner_stride_counts_from_two_columns_on() -> None:
    checks, like = Checks(), torch.zeros(2, 2)
    checks.tensor("x", torch.zeros(2, 8)[:, ::8], like, torch.float32, (2, 1))
    for columns, step in ((2, 4), (4, 2)):
        gaps = torch.zeros(2, 8)[:, ::step]
        checks.tensor("x", gaps, like, torch.float32, (2, columns), strided=True)
        with pytest.raises(ValueError, match=f"^x: wanted inner stride 1, got {step}$"):
            checks.tensor("x", gaps, like, torch.float32, (2, columns))


def test_results_may_be_the_tensor_that_their_mark_names() -> None:
    """As it is, with further columns, and as one row; not its memory alone."""
    buffer = torch.zeros(64, dtype=torch.int32)

    def rows(count: int, columns: int, stride: int, offset: int = 0) -> Tensor:
        return buffer.as_strided((count, columns), (stride, 1), offset)

    best = rows(2, 8, 12)
    for out in (best, rows(2, 10, 12), rows(2, 8, 12)):
        SHARDED.memory(sharded_arguments("cpu", {})._replace(best=best, out=out))
    SHARDED.memory(sharded_arguments("cpu", {})._replace(best=best[:1], out=rows(1, 12, 12)))
    for name, out in (("out", rows(2, 8, 24)), ("out", rows(2, 8, 12, 4)), ("local", best)):
        with pytest.raises(
            ValueError, match=f"{name}: wanted memory of its own, got memory shared with best"
        ):
            SHARDED.memory(sharded_arguments("cpu", {})._replace(**{"best": best, name: out}))
