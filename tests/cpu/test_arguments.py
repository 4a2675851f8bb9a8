"""Arguments that PyTorch, or a condition in Python, would refuse in other words or not at all."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

import gvr_topk
from gvr_topk import ops
from gvr_topk.arguments import PREFILL_PATHS, Checks, DecodeArguments, Output, Written, schema
from gvr_topk.constants import MAX_ROWS, MAX_WIDTH, Path
from gvr_topk.layers import indexer_topk

ROWS, WIDTH, K = 2, 16, 3


def int32(*shape: int) -> Tensor:
    return torch.full(shape, 8, dtype=torch.int32)


Op = Callable[..., Any]


def decode(**changes: Any) -> Any:
    given: dict[str, Any] = {"logits": torch.randn(ROWS, WIDTH), "seq_lens": int32(ROWS), "k": K}
    return gvr_topk.indexer_topk_decode(**given | changes)


def prefill(**changes: Any) -> Any:
    given: dict[str, Any] = {"logits": torch.randn(ROWS, WIDTH), "k": K}
    given |= {"row_starts": int32(ROWS) - 8, "row_ends": int32(ROWS)}
    return gvr_topk.indexer_topk_prefill(**given | changes)


def blocks(**changes: Any) -> Any:
    given: dict[str, Any] = {"logits": torch.randn(ROWS, WIDTH), "seq_lens": int32(ROWS), "k": K}
    return gvr_topk.indexer_topk_blocks(**given | {"block_k": K + 1} | changes)


def in_blocks(**changes: Any) -> Any:
    given: dict[str, Any] = {"logits": torch.randn(ROWS, WIDTH), "seq_lens": int32(ROWS), "k": K}
    return gvr_topk.indexer_topk_in_blocks(**given | {"blocks": int32(ROWS, 2) - 8} | changes)


OPS = [decode, prefill, blocks, in_blocks]
OUT = int32(ROWS, K)


def refused(op: Op, message: str, **changes: Any) -> None:
    with pytest.raises(ValueError, match=rf"^gvr_topk\.indexer_topk_{op.__name__}: {message}$"):
        op(**changes)


@pytest.mark.parametrize(
    "value", ["no", 1, 0, None, [], torch.tensor([True, True]), torch.tensor(True), bool]
)
@pytest.mark.parametrize(
    ("op", "name"),
    [*((op, "pdl") for op in OPS), (decode, "clamp_pages"), (decode, "drop_masked")],
)
def test_a_flag_is_true_or_false(op: Op, name: str, value: Any) -> None:
    shown = repr(value).replace("(", r"\(").replace(")", r"\)").replace("[", r"\[")
    refused(op, f"{name}: wanted true or false, got {shown}", **{name: value})


def test_flags_of_numpy_are_flags() -> None:
    masked = torch.full((1, WIDTH), -float("inf"))
    lengths = int32(1)
    for value in (np.array([True]), np.int64(1)):
        with pytest.raises(ValueError, match=r"^n: wanted true or false, got "):
            Checks().flag("n", value)
    for flag in (True, np.True_):
        got = decode(logits=masked, seq_lens=lengths, drop_masked=flag)
        assert got.tolist() == [[-1] * K]
    assert decode(logits=masked, seq_lens=lengths, drop_masked=np.False_).tolist() == [[0, 1, 2]]


@pytest.mark.parametrize(
    ("op", "name"),
    [
        *((op, "k") for op in OPS),
        *((op, "next_n") for op in (decode, blocks, in_blocks)),
        *((op, "compress_ratio") for op in (decode, blocks, in_blocks)),
        (decode, "max_ctas"),
        (decode, "hint_offset"),
        (decode, "page_size"),
        (prefill, "page_size"),
        (blocks, "block_k"),
        (blocks, "block_size"),
        (in_blocks, "block_size"),
    ],
)
@pytest.mark.parametrize("out", [None, OUT])
def test_integers_are_neither_flags_nor_beyond_64_bits(op: Op, name: str, out: Tensor | None) -> None:
    refused(op, f"{name}: wanted an integer, got True", out=out, **{name: True})
    for value in (2**63, -(2**63) - 1, 2**70):
        others: dict[str, Any] = {"blocks": int32(ROWS, K + 1)} if op is blocks else {}
        with pytest.raises(ValueError, match=rf"_{op.__name__}: {name}: wanted .*, got {value}$"):
            op(out=out, **others | {name: value})


UNFIT: list[tuple[Callable[[], Any], str]] = [
    (lambda: torch.tensor(1.0), r"shape \[rows, width\], got \[\]"),
    (lambda: torch.randn(ROWS, WIDTH).to_sparse(), "a dense tensor, got sparse_coo"),
    (lambda: torch.randn(ROWS, WIDTH).to_sparse_csr(), "a dense tensor, got sparse_csr"),
    (lambda: torch.nested.nested_tensor([torch.randn(4), torch.randn(3)]), "a dense tensor, got nested"),
    (
        lambda: torch.nested.nested_tensor([torch.randn(4), torch.randn(3)], layout=torch.jagged),
        "a dense tensor, got nested",
    ),
    (
        lambda: torch.quantize_per_tensor(torch.randn(ROWS, WIDTH), 0.1, 0, torch.quint8),
        "a tensor that is not quantized, got quint8",
    ),
    (
        lambda: torch.randn(1, 4).expand(MAX_ROWS + 1, 4),
        f"at most {MAX_ROWS} rows, got {MAX_ROWS + 1}",
    ),
]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("make", "message"), UNFIT, ids=[message for _, message in UNFIT])
@pytest.mark.parametrize("out", [None, OUT])
def test_scores_are_checked_before_anything_is_allocated_for_them(
    op: Op, make: Callable[[], Any], message: str, out: Tensor | None
) -> None:
    k = MAX_WIDTH if out is None and op is not blocks else K
    refused(op, f"logits: wanted {message}", logits=make(), out=out, k=k)


def test_other_tensors_are_dense_too() -> None:
    refused(decode, "seq_lens: wanted a dense tensor, got sparse_coo", seq_lens=int32(ROWS).to_sparse())
    refused(decode, "counts: wanted a dense tensor, got sparse_coo", counts=int32(ROWS).to_sparse())


def test_bounds_of_an_integer() -> None:
    checks = Checks()
    assert checks.integer("n", np.int64(3), 3, 4) == 3 and type(checks.integer("n", np.uint8(3))) is int
    for value in (True, False, np.True_):
        with pytest.raises(ValueError, match=r"^n: wanted an integer, got "):
            checks.integer("n", value)
    for low, high, wanted in ((3, None, "at least 3"), (3, 4, "3 to 4"), (None, 1, "at most 1")):
        with pytest.raises(ValueError, match=f"^n: wanted {wanted}, got 2$"):
            checks.integer("n", 2, low, high)


@pytest.mark.parametrize("path", Path)
def test_a_path_has_a_name_or_is_one(path: Path) -> None:
    given: dict[str, Any] = {"logits": torch.randn(1, 600), "seq_lens": int32(1) + 592, "k": 512}
    assert torch.equal(decode(**given, path=path), decode(**given, path=path.name.lower()))
    if path in PREFILL_PATHS:
        same = {"logits": given["logits"]}
        assert torch.equal(
            prefill(**same, row_starts=int32(1) - 8, row_ends=int32(1), path=path),
            prefill(**same, row_starts=int32(1) - 8, row_ends=int32(1), path=path.name.lower()),
        )
    else:
        refused(prefill, "path: wanted one of 'auto', 'radix_rounds', got <Path.*", path=path)
    refused(decode, "path: wanted one of .*, got 0", path=0)


def test_the_ops_are_not_mapped_over_batches() -> None:
    """As their docstrings say."""
    with pytest.raises(RuntimeError):
        torch.func.vmap(lambda logits: decode(logits=logits))(torch.randn(2, ROWS, WIDTH))


def test_the_default_device_does_not_count() -> None:
    page_table = int32(ROWS, 1)
    masked = torch.full((ROWS, WIDTH), -float("inf"))
    state, next_state = gvr_topk.TopkState(ROWS, K), torch.empty(ROWS, 4)
    given = {"page_table": page_table, "page_size": WIDTH}
    logits, lengths = torch.randn(ROWS, WIDTH), int32(ROWS)
    windows = {"row_starts": lengths - 8, "row_ends": lengths}
    starts = int32(ROWS, 2) - 8
    with torch.device("meta"):
        for scores in (logits, masked):
            got = decode(logits=scores, seq_lens=lengths, state=state, next_state=next_state, **given)
            assert got.device.type == "cpu"
            decode(logits=scores, seq_lens=lengths, state=state)
        assert prefill(logits=logits, **windows, **given).device.type == "cpu"
        assert blocks(logits=logits, seq_lens=lengths)[1].device.type == "cpu"
        assert in_blocks(logits=logits, seq_lens=lengths, blocks=starts).device.type == "cpu"
        assert indexer_topk(logits, None, K).device.type == "cpu"


@pytest.mark.parametrize("given", [3, None, (torch.zeros(1, 1),), DecodeArguments])
def test_only_arguments_of_an_op_are_launched(given: Any) -> None:
    kinds = "DecodeArguments, PrefillArguments, BlocksArguments or InBlocksArguments"
    message = f"gvr_topk.ops.launch: arguments: wanted {kinds}, got {type(given).__name__}"
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        ops.launch(given)


@pytest.mark.parametrize(
    "annotation",
    [
        float,
        bool,
        int | None,
        Tensor | int,
        Tensor | int | None,
        Annotated[int, Written()],
        Annotated[Tensor, "written"],
        Annotated[Tensor, Written(), Written("k")],
        Annotated[Tensor, "written"] | None,
    ],
)
def test_an_annotation_without_a_meaning_is_refused(annotation: Any) -> None:
    kinds = [("k", int), ("scale", annotation)]
    wanted = "wanted int or a Tensor, which may be marked Written and may be None"
    with pytest.raises(TypeError, match=f"^{re.escape(f'Given.scale: {wanted}, got {annotation}')}$"):
        schema(NamedTuple("Given", kinds))


def test_annotations_say_what_the_schema_says() -> None:
    kinds = [("a", int), ("b", Tensor), ("c", Tensor | None), ("d", Output), ("e", None | Output)]
    given = schema(NamedTuple("Given", kinds))
    assert given == "(int a, Tensor b, Tensor? c, Tensor(a!) d, Tensor(b!)? e) -> ()"
