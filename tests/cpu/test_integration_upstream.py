"""The table of TensorRT-LLM's shapes against stored signatures."""

from __future__ import annotations

import ast
import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from engine import SHAPES as FAKES
from engine import tree_of

from gvr_topk.integrations._kit.signatures import compare
from gvr_topk.integrations.tensorrt_llm.inspection import Inspection, inspect_engine, knows_key
from gvr_topk.integrations.tensorrt_llm.upstream import DSA_MODULES, SHAPES, UpstreamShape
from gvr_topk_autoload import WATCHED

TESTS = Path(__file__).resolve().parents[1]
STORED = json.loads((TESTS / "data" / "tensorrt_llm_signatures.json").read_text())
"""Parameters as they stand in TensorRT-LLM's sources, by version."""

IDS = [entry["fake"] for entry in STORED]


def found(fake: str) -> Inspection:
    return inspect_engine(tree_of(fake) / "tensorrt_llm")


def parameters(fake: str) -> dict[str, list[str]]:
    """Parameters of every method in the sources of a fake."""
    methods = {}
    for file in tree_of(fake).rglob("*.py"):
        for owner in ast.walk(ast.parse(file.read_text())):
            if isinstance(owner, ast.ClassDef):
                for item in owner.body:
                    if isinstance(item, ast.FunctionDef):
                        arguments = item.args
                        every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
                        names = [a.arg for a in every]
                        methods[f"{owner.name}.{item.name}"] = names
    return methods


def test_there_is_one_entry_per_stored_shape_and_one_fake() -> None:
    assert [entry["versions"] for entry in STORED] == [shape.versions for shape in reversed(SHAPES)]
    assert list(FAKES) == IDS
    assert set(DSA_MODULES) <= set(WATCHED)


@pytest.mark.parametrize("entry", STORED, ids=IDS)
def test_the_fake_has_the_stored_signatures(entry: dict) -> None:
    got = parameters(entry["fake"])
    assert {name: got[name] for name in entry["methods"]} == entry["methods"]


def test_the_newest_top_k_has_the_stored_signatures_and_the_same_shape() -> None:
    got, later = parameters("trtllm_1_4"), STORED[-1]["later"]
    assert {name: got[name] for name in later} == later
    point = SHAPES[0].top_k_decode
    names = later["TopK._forward_decode"]
    assert names[: len(point.expected)] == list(point.expected) and compare(point, names, names).good


@pytest.mark.parametrize("entry", STORED, ids=IDS)
def test_the_shape_is_picked_by_what_is_there(entry: dict) -> None:
    inspection = found(entry["fake"])
    assert inspection.bad == ()
    assert (inspection.shape.versions, inspection.shape.dsa) == (entry["versions"], entry["dsa"])
    assert inspection.shape.has_top_k == ("TopK._forward_decode" in entry["methods"])
    checked = {point.name for point in inspection.shape.points if point.kind == "method"}
    assert checked == set(entry["methods"])


@pytest.mark.parametrize("entry", STORED, ids=IDS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.versions)
def test_an_entry_takes_its_own_signature_and_later_additions_only(entry: dict, shape: UpstreamShape) -> None:
    names = entry["methods"]["Indexer.sparse_attn_indexer"]
    optional = ("use_custom_topk", "q_scale", "is_generation")
    finding = compare(shape.indexer_call, names, [n for n in names if n not in optional])
    wanted = list(shape.indexer)
    assert finding.good == (names[: len(wanted)] == wanted)
    assert compare(shape.indexer_call, [*wanted, "new"], wanted).good
    assert not compare(shape.indexer_call, [*wanted, "new"], [*wanted, "new"]).good


def test_some_entries_take_no_additions() -> None:
    point = replace(SHAPES[0].indexer_call, more="none")
    wanted = list(SHAPES[0].indexer)
    assert compare(point, wanted, wanted).good and not compare(point, [*wanted, "new"], wanted).good


def test_the_key_is_theirs_from_the_package_on() -> None:
    native = [knows_key(tree_of(fake) / "tensorrt_llm") for fake in FAKES]
    assert native == [False, False, True, True, True]


def test_without_sources_a_loaded_module_tells_the_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(UpstreamShape, "points", ())
    assert SHAPES[0].dsa != SHAPES[-1].dsa
    for shape in (SHAPES[0], SHAPES[-1]):
        assert inspect_engine(None, {shape.dsa: ModuleType(shape.dsa)}).shape.dsa == shape.dsa
