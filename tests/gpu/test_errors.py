"""Wrong arguments: the compiled ops refuse what the CPU refuses, in the same words, naming the argument."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import call, full_lengths, wrong_rows
from torch import Tensor

import gvr_topk
from gvr_topk.arguments import NAME, PREFILL_NAME, Arguments, PrefillArguments
from gvr_topk.constants import (
    FLAG_CLAMP_PAGES,
    MAX_NEXT_N,
    MAX_PAGE_SIZE,
    MAX_ROWS,
    MAX_WIDTH,
    STATE_FLOATS,
    StatsColumn,
)
from gvr_topk.ops import launch, launch_prefill

Change = Callable[[str], dict[str, Any]]


def zeros(device: str, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.zeros(*shape, dtype=dtype, device=device)


def floats(device: str, *shape: int) -> Tensor:
    return zeros(device, *shape, dtype=torch.float32)


def arguments(device: str, changes: dict[str, Any]) -> Arguments:
    """One valid call, some of its arguments replaced: two rows of 64 scores, k = 8."""
    lengths = torch.full((2,), 64, dtype=torch.int32, device=device)
    valid = call(floats(device, 2, 64), lengths, zeros(device, 2, 8))
    return valid._replace(**changes)


def both(device: str, state: Tensor | None = None, indices: Tensor | None = None) -> dict[str, Any]:
    """A state that keeps indices, of which one is wrong."""
    return {
        "state": floats(device, 2, STATE_FLOATS) if state is None else state,
        "indices": zeros(device, 2, 8) if indices is None else indices,
    }


WRONG: dict[str, tuple[Change, str]] = {
    "dtype of logits": (
        lambda d: {"logits": zeros(d, 2, 64, dtype=torch.float64)},
        "logits: wanted dtype float32, bfloat16 or float16, got float64",
    ),
    "dimensions of logits": (
        lambda d: {"logits": floats(d, 64)},
        "logits: wanted shape [rows, width], got [64]",
    ),
    "inner stride of logits": (
        lambda d: {"logits": floats(d, 2, 128)[:, ::2]},
        "logits: wanted inner stride 1, got 2",
    ),
    "too wide": (
        lambda d: {"logits": floats(d, 1, MAX_WIDTH + 1).expand(2, -1)},
        f"logits: wanted at most {MAX_WIDTH} columns, got {MAX_WIDTH + 1}",
    ),
    "too many rows": (
        lambda d: {"logits": floats(d, 1, 1).expand(MAX_ROWS + 1, 1)},
        f"logits: wanted at most {MAX_ROWS} rows, got {MAX_ROWS + 1}",
    ),
    "k of zero": (lambda d: {"k": 0}, f"k: wanted 1 to {MAX_WIDTH}, got 0"),
    "k too large": (lambda d: {"k": MAX_WIDTH + 1}, f"k: wanted 1 to {MAX_WIDTH}, got {MAX_WIDTH + 1}"),
    "next_n of zero": (lambda d: {"next_n": 0}, f"next_n: wanted 1 to {MAX_NEXT_N}, got 0"),
    "next_n too large": (
        lambda d: {"next_n": MAX_NEXT_N + 1},
        f"next_n: wanted 1 to {MAX_NEXT_N}, got {MAX_NEXT_N + 1}",
    ),
    "rows of no request": (
        lambda d: {"next_n": 3},
        "logits: wanted a multiple of next_n = 3 rows, got 2",
    ),
    "dtype of seq_lens": (
        lambda d: {"seq_lens": zeros(d, 2, dtype=torch.int64)},
        "seq_lens: wanted dtype int32, got int64",
    ),
    "seq_lens": (lambda d: {"seq_lens": zeros(d, 3)}, "seq_lens: wanted 2 elements, got [3]"),
    "seq_lens of drafts": (
        lambda d: {"seq_lens": zeros(d, 3), "next_n": 2},
        "seq_lens: wanted 1 or 2 elements, got [3]",
    ),
    "rows of out": (lambda d: {"out": zeros(d, 3, 8)}, "out: wanted shape [2, any], got [3, 8]"),
    "columns of out": (lambda d: {"out": zeros(d, 2, 7)}, "out: wanted at least k = 8 columns, got [2, 7]"),
    "rows of out in one place": (
        lambda d: {"out": zeros(d, 1, 8).expand(2, 8)},
        "out: wanted rows that do not overlap, at least 8 elements apart, got 0",
    ),
    "rows of out that overlap": (
        lambda d: {"out": zeros(d, 16).as_strided((2, 8), (7, 1))},
        "out: wanted rows that do not overlap, at least 8 elements apart, got 7",
    ),
    "row_slot alone": (
        lambda d: {"row_slot": zeros(d, 2)},
        "row_slot: wanted a state beside it, got None",
    ),
    "rows of row_slot": (
        lambda d: {**both(d), "row_slot": zeros(d, 3)},
        "row_slot: wanted shape [2], got [3]",
    ),
    "indices alone": (
        lambda d: {"indices": zeros(d, 2, 8)},
        "indices: wanted a state beside them, got None",
    ),
    "dtype of state": (
        lambda d: both(d, zeros(d, 2, STATE_FLOATS)),
        "state: wanted dtype float32, got int32",
    ),
    "columns of state": (lambda d: both(d, floats(d, 2, 3)), "state: wanted shape [any, 4], got [2, 3]"),
    "dimensions of state": (lambda d: both(d, floats(d, 2)), "state: wanted shape [any, 4], got [2]"),
    "stride of state": (
        lambda d: both(d, floats(d, 2, 8)[:, :4]),
        "state: wanted contiguous rows, got strides (8, 1)",
    ),
    "slots of state": (
        lambda d: {"state": floats(d, 1, STATE_FLOATS)},
        "state: wanted at least 2 slots without row_slot, got 1",
    ),
    "slots of indices": (
        lambda d: both(d, indices=zeros(d, 3, 8)),
        "state.indices: wanted shape [2, 8], got [3, 8]",
    ),
    "k of indices": (
        lambda d: both(d, indices=zeros(d, 2, 9)),
        "state.indices: wanted shape [2, 8], got [2, 9]",
    ),
    "slots of indices in one place": (
        lambda d: both(d, indices=zeros(d, 1, 8).expand(2, 8)),
        "state.indices: wanted rows that do not overlap, at least 8 elements apart, got 0",
    ),
    "counts": (lambda d: {"counts": zeros(d, 3)}, "counts: wanted shape [2], got [3]"),
    "dtype of counts": (
        lambda d: {"counts": zeros(d, 2, dtype=torch.int64)},
        "counts: wanted dtype int32, got int64",
    ),
    "slots alone": (lambda d: {"slots": zeros(d, 2, 8)}, "slots: wanted a page_table beside it, got None"),
    "columns of slots": (
        lambda d: {"slots": zeros(d, 2, 7), "page_table": zeros(d, 2, 4), "page_size": 16},
        "slots: wanted at least k = 8 columns, got [2, 7]",
    ),
    "rows of slots that overlap": (
        lambda d: {
            "slots": zeros(d, 16).as_strided((2, 8), (7, 1)),
            "page_table": zeros(d, 2, 4),
            "page_size": 16,
        },
        "slots: wanted rows that do not overlap, at least 8 elements apart, got 7",
    ),
    "clamp_pages alone": (
        lambda d: {"flags": FLAG_CLAMP_PAGES},
        "clamp_pages: wanted a page_table beside it, got None",
    ),
    "requests of page_table": (
        lambda d: {"page_table": zeros(d, 3, 4), "page_size": 16},
        "page_table: wanted shape [2, any], got [3, 4]",
    ),
    "no page_size": (
        lambda d: {"page_table": zeros(d, 2, 4)},
        f"page_size: wanted 1 to {MAX_PAGE_SIZE} with a page_table, got 0",
    ),
    "page_size too large": (
        lambda d: {"page_table": zeros(d, 2, 4), "page_size": MAX_PAGE_SIZE + 1},
        f"page_size: wanted 1 to {MAX_PAGE_SIZE} with a page_table, got {MAX_PAGE_SIZE + 1}",
    ),
    "columns of stats": (
        lambda d: {"stats": zeros(d, 2, 7)},
        f"stats: wanted shape [2, {len(StatsColumn)}], got [2, 7]",
    ),
    "stride of stats": (
        lambda d: {"stats": zeros(d, 1, 8).expand(2, 8)},
        "stats: wanted contiguous rows, got strides (0, 1)",
    ),
    "stride of phase_clocks": (
        lambda d: {"phase_clocks": zeros(d, 1, 8, dtype=torch.int64).expand(2, 8)},
        "phase_clocks: wanted contiguous rows, got strides (0, 1)",
    ),
    "columns of next_state": (
        lambda d: {"next_state": zeros(d, 2, 3, dtype=torch.float32)},
        f"next_state: wanted shape [2, {STATE_FLOATS}], got [2, 3]",
    ),
    "compress_ratio": (
        lambda d: {"compress_ratio": 0},
        f"compress_ratio: wanted 1 to {MAX_WIDTH}, got 0",
    ),
    "hint_offset": (
        lambda d: {"hint_offset": MAX_WIDTH + 1},
        f"hint_offset: wanted -{MAX_WIDTH} to {MAX_WIDTH}, got {MAX_WIDTH + 1}",
    ),
    "max_ctas": (lambda d: {"max_ctas": 3}, "max_ctas: wanted 0, 1, 2, 4, 8 or 16, got 3"),
    "negative max_ctas": (lambda d: {"max_ctas": -1}, "max_ctas: wanted 0, 1, 2, 4, 8 or 16, got -1"),
    "ctas_per_row above max_ctas": (
        lambda d: {"max_ctas": 4, "ctas_per_row": 8},
        "ctas_per_row: wanted at most max_ctas = 4, got 8",
    ),
}
"""What is wrong, and what both implementations say."""


def prefill_arguments(device: str, changes: dict[str, Any]) -> PrefillArguments:
    """One valid call of the prefill op with every table: two rows of 64 scores, three requests, k = 8."""
    valid = PrefillArguments(
        logits=floats(device, 2, 64),
        row_starts=zeros(device, 2),
        row_ends=torch.full((2,), 64, dtype=torch.int32, device=device),
        out=zeros(device, 2, 8),
        k=8,
        row_request=zeros(device, 2),
        offsets=zeros(device, 3),
        counts=zeros(device, 2),
        page_table=zeros(device, 3, 4),
        slots=zeros(device, 2, 8),
        stats=zeros(device, 2, len(StatsColumn)),
        page_size=16,
    )
    return valid._replace(**changes)


NO_TABLES: dict[str, Any] = {"page_table": None, "slots": None, "offsets": None, "row_request": None}

WRONG_PREFILL: dict[str, tuple[Change, str]] = {
    **{
        what: WRONG[what]
        for what in (
            "dtype of logits",
            "dimensions of logits",
            "inner stride of logits",
            "too wide",
            "too many rows",
            "k of zero",
            "k too large",
            "rows of out",
            "columns of out",
            "rows of out in one place",
            "rows of out that overlap",
            "counts",
            "dtype of counts",
            "columns of stats",
            "stride of stats",
        )
    },
    "row_starts": (lambda d: {"row_starts": zeros(d, 3)}, "row_starts: wanted shape [2], got [3]"),
    "dimensions of row_starts": (
        lambda d: {"row_starts": zeros(d, 2, 1)},
        "row_starts: wanted shape [2], got [2, 1]",
    ),
    "dtype of row_starts": (
        lambda d: {"row_starts": zeros(d, 2, dtype=torch.int64)},
        "row_starts: wanted dtype int32, got int64",
    ),
    "stride of row_starts": (
        lambda d: {"row_starts": zeros(d, 4)[::2]},
        "row_starts: wanted inner stride 1, got 2",
    ),
    "row_ends": (lambda d: {"row_ends": zeros(d, 1)}, "row_ends: wanted shape [2], got [1]"),
    "dtype of row_ends": (
        lambda d: {"row_ends": floats(d, 2)},
        "row_ends: wanted dtype int32, got float32",
    ),
    "row_request alone": (
        lambda d: {**NO_TABLES, "row_request": zeros(d, 2)},
        "row_request: wanted a page_table or offsets beside it, got None",
    ),
    "row_request": (lambda d: {"row_request": zeros(d, 3)}, "row_request: wanted shape [2], got [3]"),
    "dtype of row_request": (
        lambda d: {"row_request": zeros(d, 2, dtype=torch.int64)},
        "row_request: wanted dtype int32, got int64",
    ),
    "slots alone": (lambda d: {"page_table": None}, "slots: wanted a page_table beside it, got None"),
    "columns of slots": (
        lambda d: {"slots": zeros(d, 2, 7)},
        "slots: wanted at least k = 8 columns, got [2, 7]",
    ),
    "rows of slots that overlap": (
        lambda d: {"slots": zeros(d, 16).as_strided((2, 8), (7, 1))},
        "slots: wanted rows that do not overlap, at least 8 elements apart, got 7",
    ),
    "rows of page_table": (
        lambda d: {"row_request": None},
        "page_table: wanted shape [2, any], got [3, 4]",
    ),
    "dimensions of page_table": (
        lambda d: {"page_table": zeros(d, 3)},
        "page_table: wanted shape [any, any], got [3]",
    ),
    "no page_size": (
        lambda d: {"page_size": 0},
        f"page_size: wanted 1 to {MAX_PAGE_SIZE} with a page_table, got 0",
    ),
    "page_size too large": (
        lambda d: {"page_size": MAX_PAGE_SIZE + 1},
        f"page_size: wanted 1 to {MAX_PAGE_SIZE} with a page_table, got {MAX_PAGE_SIZE + 1}",
    ),
    "offsets without slots": (
        lambda d: {"slots": None},
        "offsets: wanted slots beside page_table, so that out keeps positions, got None",
    ),
    "offsets of other requests": (lambda d: {"offsets": zeros(d, 2)}, "offsets: wanted shape [3], got [2]"),
    "offsets by row": (
        lambda d: {**NO_TABLES, "offsets": zeros(d, 3)},
        "offsets: wanted shape [2], got [3]",
    ),
    "dimensions of offsets": (
        lambda d: {**NO_TABLES, "row_request": zeros(d, 2), "offsets": zeros(d, 3, 1)},
        "offsets: wanted shape [any], got [3, 1]",
    ),
    "dtype of offsets": (
        lambda d: {"offsets": zeros(d, 3, dtype=torch.int64)},
        "offsets: wanted dtype int32, got int64",
    ),
    "path of decode": (lambda d: {"path": 2}, "path: wanted 0 or 3, got 2"),
    "path": (lambda d: {"path": 9}, "path: wanted 0 or 3, got 9"),
}
"""The same of the prefill op."""


def refused_alike(name: str, message: str, launch_on: Callable[[str], None]) -> None:
    """Launches on both devices say this, and leave the context as good as it was."""
    said = []
    for device in ("cpu", "cuda"):
        with pytest.raises(ValueError, match=re.escape(message)) as refused:
            launch_on(device)
        said.append(str(refused.value))
    assert said == [f"{name}: {message}"] * 2
    torch.cuda.synchronize()


@pytest.mark.parametrize("what", WRONG)
def test_both_implementations_refuse_in_the_same_words(what: str) -> None:
    change, message = WRONG[what]
    refused_alike(NAME, message, lambda device: launch(arguments(device, change(device))))


@pytest.mark.parametrize("what", WRONG_PREFILL)
def test_both_implementations_of_prefill_refuse_in_the_same_words(what: str) -> None:
    change, message = WRONG_PREFILL[what]
    refused_alike(
        PREFILL_NAME, message, lambda device: launch_prefill(prefill_arguments(device, change(device)))
    )


@pytest.mark.parametrize(
    "name",
    ["row_starts", "row_ends", "out", "row_request", "offsets", "counts", "page_table", "slots", "stats"],
)
def test_prefill_takes_every_tensor_on_the_device_of_the_scores(name: str) -> None:
    on_cpu = {name: getattr(prefill_arguments("cpu", {}), name)}
    with pytest.raises(
        ValueError, match=rf"^{re.escape(PREFILL_NAME)}: {name}: wanted a tensor on cuda:\d+, "
    ):
        launch_prefill(prefill_arguments("cuda", on_cpu))
    torch.cuda.synchronize()


WRONG_ON_CUDA: dict[str, tuple[Change, str]] = {
    "lengths on the CPU": (
        lambda d: {"seq_lens": zeros("cpu", 2)},
        r"seq_lens: wanted a tensor on cuda:\d+, got ",
    ),
    "out on the CPU": (lambda d: {"out": zeros("cpu", 2, 8)}, r"out: wanted a tensor on cuda:\d+, got "),
    "state on the CPU": (
        lambda d: {"state": floats("cpu", 2, STATE_FLOATS)},
        r"state: wanted a tensor on cuda:\d+, got ",
    ),
    "address of state": (
        lambda d: {"state": floats(d, 9)[1:].view(2, 4)},
        "state: wanted an address that is a multiple of 16, got ",
    ),
    "path": (lambda d: {"path": 9}, "path: wanted 0 to 3, got 9"),
    "max_ctas beyond 32 bits": (lambda d: {"max_ctas": 2**32 + 1}, "max_ctas: wanted 0, 1, 2, 4, 8 or 16, "),
    "ctas_per_row": (lambda d: {"ctas_per_row": 3}, "ctas_per_row: wanted 0, 1, 2, 4, 8 or 16 and enough "),
    "k of the paper's kernel": (
        lambda d: {"path": 1},
        "k: wanted 512, 1024 or 2048 for path 'paper_gvr', got 8",
    ),
}
"""What only a GPU minds."""


@pytest.mark.parametrize("what", WRONG_ON_CUDA)
def test_the_compiled_op_refuses(what: str) -> None:
    change, message = WRONG_ON_CUDA[what]
    with pytest.raises(ValueError, match=rf"^{re.escape(NAME)}: {message}"):
        launch(arguments("cuda", change("cuda")))
    torch.cuda.synchronize()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"k": 2.5}, "k: wanted an integer, got 2.5"),
        ({"k": 0}, f"k: wanted 1 to {MAX_WIDTH}, got 0"),
        ({"max_ctas": 3}, "max_ctas: wanted 0, 1, 2, 4, 8 or 16, got 3"),
        ({"page_size": "1"}, "page_size: wanted an integer, got '1'"),
    ],
)
def test_the_public_function_refuses_alike_on_both(given: dict[str, Any], message: str) -> None:
    for device in ("cpu", "cuda"):
        logits = floats(device, 2, 64)
        lengths = torch.full((2,), 64, dtype=torch.int32, device=device)
        with pytest.raises(ValueError, match=f"^{re.escape(f'{NAME}: {message}')}$"):
            gvr_topk.indexer_topk_decode(logits, lengths, **{"k": 8, **given})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"k": 2.5}, "k: wanted an integer, got 2.5"),
        ({"k": MAX_WIDTH + 1}, f"k: wanted 1 to {MAX_WIDTH}, got {MAX_WIDTH + 1}"),
        ({"path": "no_hint"}, "path: wanted one of 'auto', 'radix_rounds', got 'no_hint'"),
    ],
)
def test_the_public_function_of_prefill_refuses_alike_on_both(given: dict[str, Any], message: str) -> None:
    for device in ("cpu", "cuda"):
        windows = zeros(device, 2), zeros(device, 2)
        with pytest.raises(ValueError, match=f"^{re.escape(f'{PREFILL_NAME}: {message}')}$"):
            gvr_topk.indexer_topk_prefill(floats(device, 2, 64), *windows, **{"k": 8, **given})


def test_one_row_has_no_stride() -> None:
    stats, out = zeros("cuda", 1, 16)[:, :8], zeros("cuda", 1, 8).as_strided((1, 8), (0, 1))
    logits = torch.randn(1, 64, device="cuda")
    lengths = full_lengths(logits)
    launch(call(logits, lengths, out, stats=stats))
    assert wrong_rows(out, logits, lengths, 8) == []


def test_no_rows_are_no_error() -> None:
    out = gvr_topk.indexer_topk_decode(floats("cuda", 0, 64), zeros("cuda", 0), 8)
    assert out.shape == (0, 8)
