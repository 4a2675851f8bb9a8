"""What else than layers' top-k is replaced in a fake of vLLM 0.33: when, and what an unlike one keeps."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import pytest
from vllm_engine import Runner
from vllm_lines import LINE, calls

from gvr_topk.integrations import vllm as integration
from gvr_topk.integrations._kit import environment
from gvr_topk.integrations.vllm import plugin
from gvr_topk.integrations.vllm import upstream as known

WHERE = "decode and prefill top-k are replaced where sparse_indexer_topk_backend is auto"
WHERE += ", and candidate blocks"


@dataclass(frozen=True)
class Point:
    """A function of vLLM: where it is found, what stays if it is unlike, and what doctor says of it."""

    places: tuple[str, ...]  # modules, with a class behind a colon
    name: str
    stays: str
    row: str  # of doctor, and how it begins
    told: str
    happens: str = ""  # behind `WHERE`
    variable: str = ""  # of the switch; empty for what is always asked for

    def owners(self) -> list[Any]:
        """Import the modules; what holds the function."""
        parts = [place.partition(":") for place in self.places]
        modules = [(importlib.import_module(module), name) for module, _, name in parts]
        return [getattr(module, name) if name else module for module, name in modules]

    def found(self) -> list[Any]:
        return [vars(owner)[self.name] for owner in self.owners()]

    def wrapped(self) -> bool:
        """Whether the function is replaced, of which all places agree."""
        (one,) = {hasattr(getattr(owner, self.name), "__wrapped__") for owner in self.owners()}
        return one


SLICES, DCP, SAMPLER = environment.ENABLE_SLICES, environment.ENABLE_DCP, environment.ENABLE_SAMPLER
PROMPTS = ", and scores of long prompts"
DRAWN = ", and log-probabilities, and the sampler, and drafts, and masks"
BUILDER = f"{known.BUILDER_MODULE}:DeepseekV32IndexerMetadataBuilder"
POINTS = [
    Point(
        (known.INDEXER_MODULE,), "_select_candidate_blocks", "candidate blocks stay",
        "select_candidate_blocks", f"ok: wrapped where {known.INDEXER_MODULE} calls it",
    ),
    Point(
        (known.INDEXER_MODULE,), "_merge_dcp_topk_global", "the merge of ranks stays",
        known.MERGE.name, f"ok: with {DCP}=1 wrapped: ranks agree", ", and the merge of ranks", DCP,
    ),
    Point(
        (known.INDEXER_MODULE,), "fp8_fp4_mqa_logits", "scores of prompts stay",
        "fp8_fp4_mqa_logits", f"ok: wrapped, unless {SLICES}=0, where", PROMPTS, SLICES,
    ),
    Point(
        (BUILDER,), "_split_indexer_prefill_chunks", "chunks of prompts stay",
        known.SPLIT.name, f"ok: wrapped, unless {SLICES}=0, so that", PROMPTS, SLICES,
    ),
    Point(
        tuple(known.SAMPLER_MODULES), "compute_topk_scores", "log-probabilities stay",
        "compute_topk_scores", f"ok: wrapped, unless {SAMPLER}=0, where", DRAWN, SAMPLER,
    ),
    Point(
        (f"{known.SAMPLE.module}:Sampler",), "sample", "sampling stays",
        "Sampler.sample", f"ok: wrapped, unless {SAMPLER}=0, and draws", DRAWN, SAMPLER,
    ),
    Point(
        (f"{known.VERIFY_DRAFTS.module}:RejectionSampler",), "_verify", "drafts stay",
        "RejectionSampler._verify", f"ok: wrapped, unless {SAMPLER}=0, and verifies", DRAWN, SAMPLER,
    ),
    Point(
        (f"{known.MASKS.module}:SamplingMaskTensors",), "from_logits", "masks stay",
        known.MASKS.name, f"ok: wrapped, unless {SAMPLER}=0, and takes", DRAWN, SAMPLER,
    ),
]  # fmt: skip


@pytest.fixture(params=POINTS, ids=lambda point: point.name)
def point(request: pytest.FixtureRequest) -> Point:
    return request.param


@pytest.fixture(autouse=True)
def switched_on(point: Point, log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With the switch of the point on alone."""
    for variable in (SAMPLER, SLICES):
        monkeypatch.setenv(variable, "0")
    if point.variable:
        monkeypatch.setenv(point.variable, "1")
    monkeypatch.setattr(plugin, "_entry_points", lambda: ["there"])


@pytest.mark.parametrize("early", [False, True])
def test_wrapped_and_put_back(point: Point, log: list[str], early: bool) -> None:
    """Whether vLLM's modules are loaded before the plugin or after it."""
    before = point.found() if early else []
    integration.register()
    assert point.wrapped()
    integration.unregister()
    assert not point.wrapped() and (point.found() == before or not early)
    assert not any("stays" in line or "stay " in line for line in log)


@pytest.mark.parametrize("value", ["", "0"])
def test_which_are_on_by_default(point: Point, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    if point.variable:
        monkeypatch.setenv(point.variable, value)
    integration.register()
    on = not point.variable or (value == "" and point.variable != DCP)
    assert point.wrapped() == on
    assert dict(integration.describe())["would happen"] == WHERE + point.happens * on


def test_what_has_changed_is_left_alone(
    point: Point, log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line says so, and the top-k of the layers is replaced all the same."""

    def other(q: object, renamed: object) -> None: ...

    for owner in point.owners():
        monkeypatch.setattr(owner, point.name, staticmethod(other) if point.places == (BUILDER,) else other)
    integration.register()
    assert not point.wrapped()
    (line,) = log
    assert line.startswith(f"{LINE}{point.stays} vLLM's own: ") and ": wanted " in line
    assert point.name.lstrip("_") in line and line.endswith("as its parameters, got q, renamed")
    runner = Runner()
    runner.step([runner.add("a", 300)])
    assert calls() == {("gvr_topk", "hint"): 2}


def test_doctor(point: Point, log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    rows = dict(integration.describe())
    assert rows[point.row].startswith(point.told)
    assert rows["would happen"] == WHERE + point.happens
    if not point.variable:
        return
    monkeypatch.setenv(point.variable, "all")
    wrong = f"{point.variable}: wanted 0, 1 or force, got 'all'"
    assert dict(integration.describe())["would happen"] == f"nothing: {wrong}"
    assert (point.variable, f"refused: {wrong}") in environment.describe()
    integration.register()
    assert log == [f"{LINE}refused: {wrong}. vLLM serves with its own top-k"]


def test_the_v1_runner_draws_its_tokens_itself(point: Point, log: list[str]) -> None:
    integration.register()
    importlib.import_module(known.V1_RUNNER_MODULE)
    said = [LINE + "sampler: the V1 model runner draws its tokens itself"] * (point.variable == SAMPLER)
    assert log == said
