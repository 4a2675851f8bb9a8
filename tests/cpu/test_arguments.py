"""Arguments of all ops: what is refused, in which words, and what reaches the op."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import gvr_topk
from gvr_topk import ops
from gvr_topk.arguments import PREFILL_PATHS, Checks, DecodeArguments, Output, Written, schema
from gvr_topk.constants import (
    FLAG_CLAMP_PAGES,
    FLAG_DROP_MASKED,
    FLAG_PDL,
    FLAG_QUANTILE_GUESS,
    MAX_ROWS,
    MAX_WIDTH,
    STATE_FLOATS,
    Path,
)
from gvr_topk.layers import indexer_topk
from gvr_topk.library import LibraryError, LibraryStatus
from tests.wrong_calls import CASES, VALID, Case, name_of, valid_call
from tests.wrong_calls import OPS as WRONG_OPS

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


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_wrong_call_is_refused_whether_it_runs_or_is_traced(case: Case) -> None:
    refusal = f"^{re.escape(case.message)}$"
    with pytest.raises(ValueError, match=refusal):
        ops.launch(case.call("cpu"))
    with FakeTensorMode():
        traced = case.call("cpu")
        with pytest.raises(ValueError, match=refusal):
            ops.launch(traced)
    registered = getattr(torch.ops.gvr_topk, name_of(case.op)).default
    with pytest.raises(ValueError, match=refusal):
        registered(*case.call("cpu"))


@pytest.mark.parametrize("what", VALID)
def test_a_valid_call_is_accepted_whether_it_runs_or_is_traced(what: str) -> None:
    ops.launch(valid_call(what, "cpu"))
    with FakeTensorMode():
        ops.launch(valid_call(what, "cpu"))


@pytest.mark.parametrize(
    ("op", "name"),
    [
        *itertools.product(["decode"], ["seq_lens", "out", "state"]),
        *itertools.product(
            ["prefill"], ["row_starts", "row_ends", "offsets", "page_table", "slots", "stats"]
        ),
        *itertools.product(["blocks", "in_blocks"], ["seq_lens", "out", "blocks", "row_starts"]),
    ],
)
def test_every_tensor_is_on_the_device_of_the_scores(op: str, name: str) -> None:
    changes = {"state": torch.zeros(2, STATE_FLOATS), "row_starts": int32(2)}
    changes = {} if name not in changes or op == "prefill" else {name: changes[name]}
    call = WRONG_OPS[op].arguments("cpu", changes)
    with pytest.raises(ValueError, match=f"{name}: wanted a tensor on cpu, got meta$"):
        ops.launch(call._replace(**{name: getattr(call, name).to("meta")}))


TENSORS = {
    decode: ("logits", "seq_lens", "out", "row_slot", "next_state", "counts", "page_table", "slots", "stats"),
    prefill: ("logits", "row_starts", "row_ends", "out", "row_request", "offsets", "page_table", "slots"),
    blocks: ("logits", "seq_lens", "out", "blocks", "row_starts"),
    in_blocks: ("logits", "seq_lens", "out", "blocks", "row_starts"),
}


@pytest.mark.parametrize("value", [[1, 2], np.zeros((ROWS, WIDTH), np.float32), 3])
@pytest.mark.parametrize(("op", "name"), [(op, name) for op, names in TENSORS.items() for name in names])
def test_what_is_no_tensor_is_refused_by_its_name(op: Op, name: str, value: Any) -> None:
    refused(op, f"{name}: wanted a Tensor, got {type(value).__name__}", **{name: value})


@pytest.mark.parametrize("out", [None, OUT])
@pytest.mark.parametrize(("op", "name"), [(op, name) for op, names in TENSORS.items() for name in names[:2]])
def test_tensors_that_a_call_needs_may_not_be_none(op: Op, name: str, out: Tensor | None) -> None:
    refused(op, f"{name}: wanted a Tensor, got NoneType", **{name: None, "out": out})


@pytest.mark.parametrize("value", [{}, torch.zeros(4, STATE_FLOATS)])
def test_a_state_is_a_topk_state(value: Any) -> None:
    refused(decode, f"state: wanted a TopkState, got {type(value).__name__}", state=value)


@pytest.mark.parametrize("path", ["fast", "gvr", "radix", "AUTO", None, 1, []])
@pytest.mark.parametrize(
    ("op", "names"),
    [(decode, "'auto', 'paper_gvr', 'no_hint', 'radix_rounds'"), (prefill, "'auto', 'radix_rounds'")],
)
def test_unknown_paths(op: Op, names: str, path: Any) -> None:
    refused(op, re.escape(f"path: wanted one of {names}, got {path!r}"), path=path)


@pytest.mark.parametrize("op", OPS)
def test_nothing_is_allocated_for_numbers_out_of_range(op: Op) -> None:
    fewest = 0 if op is blocks else 1
    for k in (fewest - 1, MAX_WIDTH + 1):
        refused(op, f"k: wanted {fewest} to {MAX_WIDTH}, got {k}", k=k)
    if op is blocks:
        for block_k in (1, 2049, 1 << 60):
            refused(op, f"block_k: wanted 2 to 2048, more than k = {K}, got {block_k}", block_k=block_k)


BOTH_BLOCKS = {"next_n": 2, "compress_ratio": 5, "block_size": 8, "row_starts": int32(ROWS)}
PASSED: dict[Op, dict[str, Any]] = {
    decode: {
        "row_slot": int32(ROWS),
        "next_state": torch.zeros(ROWS, STATE_FLOATS),
        "counts": int32(ROWS),
        "page_table": int32(ROWS, 1),
        "slots": int32(ROWS, K),
        "stats": int32(ROWS, 8),
        "next_n": 2,
        "page_size": 16,
        "max_ctas": 4,
        "hint_offset": 7,
        "compress_ratio": 5,
    },
    prefill: {
        "row_request": int32(ROWS),
        "offsets": int32(ROWS),
        "counts": int32(ROWS),
        "page_table": int32(ROWS, 1),
        "slots": int32(ROWS, K),
        "stats": int32(ROWS, 8),
        "page_size": 16,
    },
    blocks: {"blocks": int32(ROWS, K + 1), "block_k": K + 1} | BOTH_BLOCKS,
    in_blocks: {"blocks": int32(ROWS, 2)} | BOTH_BLOCKS,
}
"""Optional arguments of each op, with numbers that cannot be taken for each other."""

FLAGS = {"pdl": FLAG_PDL, "clamp_pages": FLAG_CLAMP_PAGES, "drop_masked": FLAG_DROP_MASKED}


@pytest.mark.parametrize(
    ("op", "flag", "path"),
    [
        *itertools.product([decode], [None, *FLAGS], Path),
        *itertools.product([prefill], [None, "pdl"], PREFILL_PATHS),
        *itertools.product([blocks, in_blocks], [None, "pdl", "drop_masked"], [Path.AUTO]),
    ],
)
def test_every_argument_reaches_the_op(op: Op, flag: str | None, path: Path, launched: list[Any]) -> None:
    """The public functions pass arguments by position, each of which has to find its own."""
    passed = {**PASSED[op], "logits": torch.zeros(ROWS, WIDTH), "out": OUT, "k": K}
    passed |= {"row_starts": OUT[0], "row_ends": OUT[1]} if op is prefill else {"seq_lens": int32(ROWS)}
    kept = gvr_topk.TopkState(ROWS, K)
    options: dict[str, Any] = {} if flag is None else {flag: True}
    options |= {"path": path.name.lower()} if op in (decode, prefill) else {}
    op(**passed, **options, **({"state": kept} if op is decode else {}))
    wanted: dict[str, Any] = {**passed, "flags": FLAGS.get(flag or "", 0)}
    if op in (decode, prefill):
        wanted["path"] = int(path)
    if op is decode:
        wanted |= {"state": kept.words, "indices": kept.indices, "ctas_per_row": 0}
        wanted["flags"] += FLAG_QUANTILE_GUESS
    assert set(wanted) == set(launched[0]._fields)
    for name, value in wanted.items():
        got = getattr(launched[0], name)
        assert got is value or (not isinstance(value, Tensor) and got == value), name


def raising(described: type, error: Exception) -> Any:
    """What calls an op, all of whose overloads raise an error."""
    op = Mock(side_effect=error)
    return ops._CALLS[described]._replace(every=op, usual=op)


@pytest.mark.parametrize("op", OPS)
def test_errors_of_the_cuda_library_are_of_the_same_type(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its checks arrive as RuntimeError, with a place in the sources before and a stack behind."""
    described = type(WRONG_OPS[op.__name__].arguments("cpu", {}))
    checks = WRONG_OPS[op.__name__].checks
    text = f"{checks.op}: k: wanted 1 to 2097152, got 0"
    for message in (text, f"Expected k to hold: {text}\nException raised from check at op.cpp:1"):
        monkeypatch.setitem(ops._CALLS, described, raising(described, RuntimeError(message)))
        with pytest.raises(ValueError, match=f"^{text}$"):
            op()
    for message in ("CUDA error: an illegal memory access was encountered", "gvr_topk.another_op: k"):
        monkeypatch.setitem(ops._CALLS, described, raising(described, RuntimeError(message)))
        with pytest.raises(RuntimeError, match=f"^{message}"):
            op()
    lacking = "gvr_topk: cannot allocate 64 bytes of device memory"
    message = f"Expected status to hold: {lacking}\nException raised from require at check.h:1"
    monkeypatch.setitem(ops._CALLS, described, raising(described, RuntimeError(message)))
    with pytest.raises(torch.OutOfMemoryError, match=f"^{lacking}$"):
        op()


@pytest.mark.parametrize("op", OPS)
def test_cuda_tensors_without_the_library_or_without_the_op(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = WRONG_OPS[op.__name__]
    with FakeTensorMode():
        call = calls.arguments("cpu", {})._replace(logits=torch.empty(2, 64, device="cuda"))
        monkeypatch.setattr(ops, "_LIBRARY", LibraryStatus(False, None, "built without it"))
        message = f"{calls.checks.op}: CUDA library: built without it"
        with pytest.raises(LibraryError, match=f"^{re.escape(message)}$"):
            ops.launch(call)
        monkeypatch.setattr(ops, "_LIBRARY", LibraryStatus(True, "lib.so", "loaded"))
        missing = raising(type(call), NotImplementedError(f"Could not run '{calls.checks.op}'"))
        monkeypatch.setitem(ops._CALLS, type(call), missing)
        with pytest.raises(
            LibraryError, match=r"CUDA library: lib\.so holds no such op: install the package"
        ):
            ops.launch(call)
    with pytest.raises(NotImplementedError):  # on the CPU it has another reason
        op()


USUAL = (
    "Tensor logits, Tensor seq_lens, Tensor(a!) out, int k, Tensor? row_slot=None, Tensor(b!)? state=None, "
    "int next_n=1, int compress_ratio=1, int flags=2"
)
SCHEMAS = {
    "decode.usual": USUAL,
    "decode": f"{USUAL}, Tensor? page_table=None, int page_size=0, "
    "Tensor(c!)? slots=None, Tensor(d!)? indices=None, Tensor(e!)? next_state=None, "
    "Tensor(f!)? counts=None, Tensor(g!)? stats=None, int hint_offset=0, int path=0, int max_ctas=0, "
    "int ctas_per_row=0",
    "prefill": "Tensor logits, Tensor row_starts, Tensor row_ends, Tensor(a!) out, "
    "int k, Tensor? row_request=None, Tensor? offsets=None, Tensor(b!)? counts=None, "
    "Tensor? page_table=None, Tensor(c!)? slots=None, Tensor(d!)? stats=None, int page_size=0, "
    "int path=0, int flags=0",
    "prefill_slice": "Tensor logits, Tensor row_starts, Tensor row_ends, Tensor(a!) carry, "
    "int k, int column, Tensor(b!)? out=None, Tensor? row_request=None, Tensor? offsets=None, "
    "Tensor(c!)? counts=None, Tensor? page_table=None, Tensor(d!)? slots=None, int page_size=0, int flags=0",
    "blocks": "Tensor logits, Tensor seq_lens, Tensor(a!) out, Tensor(b!) blocks, "
    "int k, int block_k, int next_n=1, int flags=0, int compress_ratio=1, int block_size=8, "
    "Tensor? row_starts=None",
    "in_blocks": "Tensor logits, Tensor seq_lens, Tensor blocks, Tensor(a!) out, "
    "int k, int next_n=1, int flags=0, int compress_ratio=1, int block_size=8, Tensor? row_starts=None",
}


@pytest.mark.parametrize("op", SCHEMAS)
def test_the_schema_is_the_one_that_the_library_is_written_for(op: str) -> None:
    name, _, overload = op.partition(".")
    schema = getattr(getattr(torch.ops.gvr_topk, f"indexer_topk_{name}"), overload or "default")._schema
    assert str(schema) == f"gvr_topk::indexer_topk_{op}({SCHEMAS[op]}) -> ()"


@pytest.mark.parametrize(
    "value", ["no", 1, 0, None, [], torch.tensor([True, True]), torch.tensor(True), bool]
)
@pytest.mark.parametrize(
    ("op", "name"),
    [
        *((op, "pdl") for op in OPS),
        (decode, "clamp_pages"),
        *((op, "drop_masked") for op in (decode, blocks, in_blocks)),
    ],
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
    for value, shown in ((True, "True"), (2.0, r"2\.0"), ("8", "'8'"), (torch.tensor(8), r"tensor\(8\)")):
        refused(op, f"{name}: wanted an integer, got {shown}", out=out, **{name: value})
    for value in (2**63, -(2**63) - 1, 2**70):
        others: dict[str, Any] = {"blocks": int32(ROWS, K + 1)} if op is blocks else {}
        with pytest.raises(ValueError, match=rf"_{op.__name__}: {name}: wanted .*, got {value}$"):
            op(out=out, **others | {name: value})


UNEVEN = [torch.randn(4), torch.randn(3)]
UNFIT: list[tuple[Callable[[], Any], str]] = [
    (lambda: torch.tensor(1.0), r"shape \[rows, width\], got \[\]"),
    (lambda: torch.randn(ROWS, WIDTH).to_sparse(), "a dense tensor, got sparse_coo"),
    (lambda: torch.randn(ROWS, WIDTH).to_sparse_csr(), "a dense tensor, got sparse_csr"),
    (lambda: torch.nested.nested_tensor(UNEVEN), "a dense tensor, got nested"),
    (lambda: torch.nested.nested_tensor(UNEVEN, layout=torch.jagged), "a dense tensor, got nested"),
    (
        lambda: torch.quantize_per_tensor(OUT.float(), 0.1, 0, torch.quint8),
        "a tensor that is not quantized, got quint8",
    ),
    (lambda: torch.randn(1, 4).expand(MAX_ROWS + 1, 4), f"at most {MAX_ROWS} rows, got {MAX_ROWS + 1}"),
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
        windows = {"logits": given["logits"], "row_starts": int32(1) - 8, "row_ends": int32(1)}
        assert torch.equal(prefill(**windows, path=path), prefill(**windows, path=path.name.lower()))
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
    kinds = (
        "DecodeArguments, PrefillArguments, PrefillSliceArguments, BlocksArguments, InBlocksArguments or "
        "TopkItemsArguments"
    )
    message = f"gvr_topk.ops.launch: arguments: wanted {kinds}, got {type(given).__name__}"
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        ops.launch(given)


@pytest.mark.parametrize(
    "annotation",
    [
        str,
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
    wanted = "wanted int, float or a Tensor, which may be marked Written and may be None"
    with pytest.raises(TypeError, match=f"^{re.escape(f'Given.scale: {wanted}, got {annotation}')}$"):
        schema(NamedTuple("Given", kinds))


def test_annotations_say_what_the_schema_says() -> None:
    kinds = [("a", int), ("b", Tensor), ("c", Tensor | None), ("d", Output), ("e", None | Output)]
    given = schema(NamedTuple("Given", kinds))
    assert given == "(int a, Tensor b, Tensor? c, Tensor(a!) d, Tensor(b!)? e) -> ()"
