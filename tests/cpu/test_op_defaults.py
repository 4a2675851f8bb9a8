"""What a call without options hands to each op, and which of two wrong arguments is named."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rows import scores

import gvr_topk
from gvr_topk import ops
from gvr_topk.arguments import DecodeArguments
from gvr_topk.constants import (
    BLOCK_SIZE,
    FLAG_CLAMP_PAGES,
    FLAG_DROP_MASKED,
    FLAG_PDL,
    FLAG_QUANTILE_GUESS,
    Path,
)
from gvr_topk.library import LibraryStatus
from gvr_topk.state import TopkState

SCORES, LENGTHS = torch.zeros(2, 32), torch.tensor([32, 20], dtype=torch.int32)
STARTS = torch.zeros(2, dtype=torch.int32)
BLOCKS = torch.tensor([[0, 1]], dtype=torch.int32).repeat(2, 1)
CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "decode": (ops.indexer_topk_decode, (SCORES, LENGTHS, 3)),
    "prefill": (ops.indexer_topk_prefill, (SCORES, STARTS, LENGTHS, 3)),
    "blocks": (ops.indexer_topk_blocks, (SCORES, LENGTHS, 2, 3)),
    "in_blocks": (ops.indexer_topk_in_blocks, (SCORES, LENGTHS, BLOCKS, 3)),
}
DEFAULTS = {"next_n": 1, "compress_ratio": 1, "block_size": BLOCK_SIZE, "path": int(Path.AUTO)}
DEFAULTS |= dict.fromkeys(("page_size", "max_ctas", "hint_offset"), 0)


@pytest.mark.parametrize("op", sorted(CALLS))
def test_a_call_without_options(op: str, launched: list[Any]) -> None:
    function, given = CALLS[op]
    function(*given)
    (arguments,) = launched
    assert arguments.flags == (FLAG_QUANTILE_GUESS if op == "decode" else 0)
    got = {name: getattr(arguments, name) for name in DEFAULTS if hasattr(arguments, name)}
    assert got == {name: DEFAULTS[name] for name in got} and len(got) >= 2
    optional = ["row_slot", "next_state", "counts", "page_table", "slots", "stats", "row_request", "offsets"]
    optional += ["row_starts"] * (op != "prefill")
    assert [name for name in optional if getattr(arguments, name, None) is not None] == []
    function(*given, pdl=True)
    assert launched[1].flags == arguments.flags | FLAG_PDL


def numbers(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


STATE, WITH_INDICES = (TopkState(2, 3, keep_indices=keep) for keep in (False, True))
USUAL: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"row_slot": (slots := numbers(2))}, {"row_slot": slots}),
    ({"state": STATE}, {"state": STATE.words}),
    ({"next_n": 2}, {"next_n": 2}),
    ({"compress_ratio": 2}, {"compress_ratio": 2}),
    ({"pdl": True}, {"flags": FLAG_QUANTILE_GUESS + FLAG_PDL}),
    ({"clamp_pages": True}, {"flags": FLAG_QUANTILE_GUESS + FLAG_CLAMP_PAGES}),
    ({"drop_masked": True}, {"flags": FLAG_QUANTILE_GUESS + FLAG_DROP_MASKED}),
]
PASSED_ON: dict[str, Any] = {
    "page_table": numbers(2, 4),
    "page_size": 8,
    "slots": numbers(2, 3),
    "next_state": torch.zeros(2, 4),
    "counts": numbers(2),
    "stats": numbers(2, 8),
    "hint_offset": 1,
    "max_ctas": 4,
}
LESS_USUAL: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"state": WITH_INDICES}, {"state": WITH_INDICES.words, "indices": WITH_INDICES.indices}),
    ({"path": "no_hint"}, {"path": int(Path.NO_HINT)}),
    *(({name: value}, {name: value}) for name, value in PASSED_ON.items()),
]


@pytest.mark.parametrize(
    ("overload", "options", "changed"),
    [*(("usual", *each) for each in USUAL), *(("every", *each) for each in LESS_USUAL)],
    ids=str,
)
def test_each_option_arrives_alone(
    overload: str, options: dict[str, Any], changed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, DecodeArguments] = {}

    def seen_by(name: str) -> Callable[..., None]:
        return lambda *passed: seen.update({name: DecodeArguments(*passed)})

    calls = ops._CALLS[DecodeArguments]._replace(every=seen_by("every"), usual=seen_by("usual"))
    monkeypatch.setitem(ops._CALLS, DecodeArguments, calls)
    out = numbers(2, 3)
    ops.indexer_topk_decode(SCORES, LENGTHS, 3, out=out, **options)
    assert list(seen) == [overload]
    expected = DecodeArguments(SCORES, LENGTHS, out, 3)._replace(**changed)
    assert all(got is wanted for got, wanted in zip(seen[overload], expected, strict=True))


@pytest.mark.parametrize("op", sorted(CALLS))
def test_decode_alone_has_an_overload(op: str) -> None:
    packet = getattr(torch.ops.gvr_topk, f"indexer_topk_{op}")
    (calls,) = (each for each in ops._CALLS.values() if each.every is packet.default)
    assert packet.overloads() == ["default", "usual"][: 1 + (op == "decode")]
    assert calls.usual is (packet.usual if op == "decode" else packet.default)


BOUND: list[dict[str, Any]] = [{}, {"pdl": True}, {"next_n": 2, "compress_ratio": 2}, {"drop_masked": True}]


@pytest.mark.parametrize("options", BOUND, ids=str)
@pytest.mark.parametrize("keep", [None, False, True])
def test_a_bound_call_is_that_of_decode(keep: bool | None, options: dict[str, Any]) -> None:
    """It reads what the tensors hold, and passes what is not as by default, as decode does."""
    bound, other = (None if keep is None else TopkState(2, 3, keep_indices=keep) for _ in range(2))
    logits, out, expected = SCORES.clone(), numbers(2, 3), numbers(2, 3)
    slots = None if keep is None else torch.tensor([1, 0], dtype=torch.int32)
    step = gvr_topk.bind(logits, LENGTHS, 3, out=out, state=bound, row_slot=slots, **options)
    for seed in range(2):
        logits.copy_(scores(2, 32, seed))
        step()
        ops.indexer_topk_decode(logits, LENGTHS, 3, out=expected, state=other, row_slot=slots, **options)
        assert torch.equal(out, expected)
    if bound is not None and other is not None:
        assert torch.equal(bound.words, other.words)
        assert not keep or torch.equal(bound.indices, other.indices)
    assert isinstance(step, functools.partial)
    assert step.func is getattr(torch.ops.gvr_topk.indexer_topk_decode, "default" if keep else "usual")
    if not options:
        assert len(step.args) == (4 if keep is None else 13 if keep else 6)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"k": 2.5}, "k: wanted an integer, got 2.5"),
        ({"k": 0}, "k: wanted 1 to"),
        ({"state": torch.zeros(2, 4)}, "state: wanted a TopkState, got Tensor"),
        ({"out": None}, "out: wanted a Tensor, got NoneType"),
        ({"seq_lens": LENGTHS.long()}, "seq_lens: wanted dtype int32, got int64"),
    ],
)
def test_what_is_bound_is_checked(wrong: dict[str, Any], message: str) -> None:
    given = {"logits": SCORES, "seq_lens": LENGTHS, "k": 3, "out": numbers(2, 3)} | wrong
    with pytest.raises(ValueError, match=f"^gvr_topk.indexer_topk_decode: {message}"):
        gvr_topk.bind(**given)


def test_a_bound_call_on_a_cpu_needs_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_LIBRARY", LibraryStatus(False, None, "not built"))
    out = numbers(2, 3)
    gvr_topk.bind(SCORES, LENGTHS, 3, out=out)()
    assert out.tolist() == [[0, 1, 2]] * 2


def test_a_wrong_k_is_named_before_the_number_of_blocks() -> None:
    out = torch.empty(2, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"indexer_topk_blocks: k: wanted .*, got -1"):
        ops.indexer_topk_blocks(SCORES, LENGTHS, -1, 2, out=out)
