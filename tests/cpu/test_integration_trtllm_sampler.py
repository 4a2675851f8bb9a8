"""Tokens and probabilities of a fake of TensorRT-LLM's fused sampler, computed by our ops if asked for."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from engine import SHAPES, fake_package, load_llm_args
from integration_setup import Watch, lines_of, undisturbed
from scipy import stats
from torch import Tensor

from gvr_topk import sampling
from gvr_topk.integrations import tensorrt_llm as integration
from gvr_topk.integrations._kit import environment
from gvr_topk.integrations.tensorrt_llm import sampler
from gvr_topk.integrations.tensorrt_llm.upstream import FUSED_SAMPLER, SAMPLER_POINTS

DISPATCH = "tensorrt_llm._torch.pyexecutor.sampler.ops.spec_dispatch"
MODE = SimpleNamespace(is_fused=True)
SWITCH = "TRTLLM_GVR_TOPK_SAMPLER"
LINE = "gvr_topk in TensorRT-LLM 1.3.0rc27: "
NO_K = torch.iinfo(torch.int32).max
KINDS = ("sampler", "sampler with probabilities", "sampler's probabilities")
ROWS: list[tuple[float, int, float, float]] = [
    (0.8, NO_K, 1.0, 0.0),
    (1.3, 0, 1.0, 0.05),
    (0.7, 7, 1.0, 0.0),
    (1.0, -1, 0.8, 0.0),
    (1.0, 12, 0.7, 0.0),
    (0.9, 12, 1.0, 0.1),
    (1.1, 40, 0.9, 0.02),
    (1e-5, NO_K, 1.0, 0.0),
    (0.6, 64, 2.0, -1.0),
]
"""Temperature, top-k, top-p and min-p of rows; 64 is the vocabulary, and 1e-5 marks a greedy row."""

WIDTH = 64

CAPTURED = {"gvr_topk::sample", "gvr_topk::renorm"} | {
    f"aten::{name}"
    for name in (
        *("empty.memory_format", "threshold", "slice.Tensor", "view", "expand", "unsqueeze", "clone"),
        *("eq.Scalar", "ne.Scalar", "bitwise_or.Tensor", "mul.Tensor", "add.Tensor", "sub.Tensor"),
        *("arange", "argsort.stable", "sort.stable", "index.Tensor", "where.self", "where.ScalarOther"),
        *("narrow", "constant_pad_nd", "scalar_tensor", "cummax", "empty_like", "scatter_.src", "full"),
        *("__rshift__.Scalar", "randint.low", "zeros_like", "diff", "fill_.Scalar", "copy_"),
    )
}
"""Ops that a CUDA graph may hold."""


@pytest.fixture
def shape() -> str:
    return SHAPES[-1]


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch, shape: str) -> Iterator[None]:
    """A process that may import the fake, with both switches on."""
    with undisturbed(monkeypatch), fake_package(shape):
        for name in ("GVR_TOPK_VERIFY", "TRTLLM_GVR_TOPK_VERIFY"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("TRTLLM_GVR_TOPK", "1")
        monkeypatch.setenv(SWITCH, "1")
        importlib.import_module("tensorrt_llm.logger")
        yield


def connected() -> ModuleType:
    assert integration.install()
    return importlib.import_module(DISPATCH)


@pytest.fixture
def ops(process: None) -> ModuleType:
    """What the callers of the fused sampler import, with the hook in place."""
    return connected()


def computed_by_theirs() -> list[str]:
    return sys.modules[FUSED_SAMPLER].calls  # type: ignore[no-any-return]


def calls() -> dict[tuple[str, str], int]:
    return integration.counters().calls


def logits_of(rows: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return (2 * torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))).to(dtype)


def filters(rows: list[tuple[float, int, float, float]], longer: int = 0) -> list[Tensor]:
    """Parameters as tensors, which may be longer than the call has rows."""
    columns = (
        zip(*rows, *longer * [(1.0, 1, 0.1, 0.9)], strict=False) if not longer else zip(*rows, strict=True)
    )
    dtypes = (torch.float32, torch.int32, torch.float32, torch.float32)
    tail = longer * [1]
    return [torch.tensor([*c, *tail], dtype=dtype) for c, dtype in zip(columns, dtypes, strict=True)]


def numbers(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def law(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray[Any, Any]:
    """Probabilities of one row in fp64: temperature, min-p, top-k and top-p, one after the other."""
    values = logits.double().numpy()
    if temperature <= 1e-4:
        return (np.arange(len(values)) == values.argmax()).astype(np.float64)
    weights = np.exp((values - values.max()) / np.float32(temperature))
    ranked = [
        int(i) for i in np.lexsort((np.arange(len(values)), -values)) if weights[i] >= np.float32(min_p)
    ]
    if 0 < top_k < len(values):
        ranked = ranked[:top_k]
    before = np.append(0, weights[ranked].cumsum())
    if top_p < 1:
        ranked = [i for i, mass in zip(ranked, before, strict=False) if mass < np.float32(top_p) * before[-1]]
    kept = np.zeros(len(values))
    kept[ranked] = weights[ranked]
    return kept / kept.sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("longer", [0, 3])
def test_the_law_is_that_of_the_filters(ops: ModuleType, dtype: torch.dtype, longer: int) -> None:
    """Rows of all kinds in a call: the kept tokens, their probabilities, and that no other one is drawn."""
    logits, parameters = logits_of(len(ROWS), dtype=dtype), filters(ROWS, longer)
    before = logits.clone()
    wanted = np.stack([law(row, *kind) for row, kind in zip(logits.float(), ROWS, strict=True)])
    probs = ops.spec_compute_probs_from_logits(MODE, logits, *parameters)
    assert probs.dtype == torch.float32 and probs.shape == logits.shape
    assert np.array_equal(probs.numpy() > 0, wanted > 0)
    np.testing.assert_allclose(probs.numpy(), wanted, rtol=0, atol=1e-6)
    for step in range(20):
        noise = {"seed": numbers(7), "offset": numbers(step)}
        tokens, same = ops.spec_sample_from_logits_with_probs(MODE, logits, *parameters, **noise)
        assert torch.equal(same, probs) and tokens.dtype == torch.int32 and tokens.shape == (len(ROWS),)
        assert (wanted[np.arange(len(ROWS)), tokens] > 0).all()
        alone = ops.spec_sample_from_logits(MODE, logits, *parameters, **noise)
        assert torch.equal(alone, tokens) and alone.dtype == torch.int32
    assert torch.equal(logits, before) and computed_by_theirs() == []
    assert calls() == dict(zip([("gvr_topk", kind) for kind in KINDS], (20, 20, 1), strict=True))
    assert [line for line in lines_of("info") if "sampler" in line] == [
        f"{LINE}on: {what} of the fused sampler"
        for what in ("probabilities", "tokens and probabilities", "tokens")
    ]


@pytest.mark.parametrize("kind", [ROWS[1], ROWS[3], ROWS[6]], ids=["min-p", "top-p", "all"])
@pytest.mark.parametrize("how", ["one seed", "offsets", "seeds", "no seed"])
def test_tokens_have_their_distribution(ops: ModuleType, kind: tuple[Any, ...], how: str) -> None:
    """Rows of a call, steps of the same rows, and requests with seeds one apart draw independently."""
    draws = 4000
    row = logits_of(1, 5)
    rows, steps = {
        "one seed": (draws, 1),
        "offsets": (8, draws // 8),
        "seeds": (draws, 1),
        "no seed": (draws, 1),
    }[how]
    seed = torch.arange(draws) if how == "seeds" else numbers(3)
    logits, parameters, tokens = row.expand(rows, -1), filters(rows * [kind]), []
    for step in range(steps):
        noise = {"seed": seed, "offset": torch.full_like(seed, step)} if how != "no seed" else {}
        tokens.append(ops.spec_sample_from_logits(MODE, logits, *parameters, **noise))
    drawn = torch.cat(tokens).numpy()
    wanted = law(row[0], *kind) * draws
    counts = np.bincount(drawn, minlength=WIDTH)
    assert (counts[wanted == 0] == 0).all()
    rare = wanted < 10
    pairs = np.append(counts[~rare], counts[rare].sum()), np.append(wanted[~rare], wanted[rare].sum())
    observed, expected = (side[pairs[1] > 0] for side in pairs)
    assert stats.chisquare(observed, expected).pvalue > 1e-6
    assert calls() == {("gvr_topk", "sampler"): steps}


def drawn(ops: ModuleType, logits: Tensor, seed: Tensor, offset: Tensor) -> list[int]:
    parameters = filters(len(logits) * [ROWS[0]])
    return ops.spec_sample_from_logits(MODE, logits, *parameters, seed=seed, offset=offset).tolist()


def test_noise_is_that_of_seed_and_offset(ops: ModuleType) -> None:
    """Equal ones draw equal tokens; any other seed or offset, in its upper half too, draws others."""
    logits = torch.zeros(30, WIDTH)
    seen = []
    for seed, offset in ((1, 0), (2, 0), (1, 1), (1, 1 << 32), (1, 3 << 40), (-1, 0), (1 << 62, 5)):
        tokens = drawn(ops, logits, numbers(seed), numbers(offset))
        assert tokens == drawn(ops, logits, numbers(seed), numbers(offset))
        assert tokens == drawn(ops, logits, torch.tensor(seed), torch.tensor(offset))
        seen.append(tokens)
    for i, one in enumerate(seen):
        for other in seen[:i]:
            assert sum(a == b for a, b in zip(one, other, strict=True)) < 8


def test_without_seed_or_offset_every_call_is_another_one(ops: ModuleType) -> None:
    """Noise is then that of PyTorch's generator; probabilities alone take none of it."""
    logits, parameters = torch.zeros(30, WIDTH), filters(30 * [ROWS[0]])
    for noise in ({}, {"seed": numbers(4)}, {"offset": numbers(4)}):
        torch.manual_seed(1)
        ops.spec_compute_probs_from_logits(MODE, logits, *parameters)
        first, second = (ops.spec_sample_from_logits(MODE, logits, *parameters, **noise) for _ in range(2))
        torch.manual_seed(1)
        assert torch.equal(first, ops.spec_sample_from_logits(MODE, logits, *parameters, **noise))
        assert (first == second).sum() < 8


def test_a_row_with_a_seed_of_its_own_does_not_depend_on_the_batch(ops: ModuleType) -> None:
    """A seeded request draws its tokens wherever its rows stand and whatever the others are."""
    logits = logits_of(6, 3)
    seed, offset = (
        numbers(5, 6, 6, 6, 8, 9, 1, 1),
        numbers(0, 7, 8, 9, 1 << 33, 0, 1, 1),
    )  # longer than needed
    tokens = drawn(ops, logits, seed, offset)
    for order in ([5, 4, 3, 2, 1, 0], [2], [4, 1], [3, 3, 0]):
        got = drawn(ops, logits[order], seed[order], offset[order])
        assert got[0] == tokens[order[0]] and (
            len(set(order)) < len(order) or got == [tokens[i] for i in order]
        )


def test_rows_with_equal_seeds_and_offsets_are_apart(ops: ModuleType) -> None:
    """Rows of a request, and requests without a seed, share both: their order tells them apart."""
    logits = torch.zeros(60, WIDTH)
    first, second = numbers(1).repeat(30), numbers(2).repeat(30)
    mixed = torch.stack((first, second), 1).flatten()
    tokens = drawn(ops, logits, mixed, torch.zeros_like(mixed))
    assert tokens[::2] == drawn(ops, logits[:30], first, torch.zeros_like(first))
    assert tokens[1::2] == drawn(ops, logits[:30], numbers(2), numbers(0))
    assert len(set(tokens[::2])) > 15 and len(set(tokens[1::2])) > 15


def test_min_p_may_be_absent(ops: ModuleType) -> None:
    logits, parameters = logits_of(len(ROWS)), filters(ROWS)
    parameters[3].zero_()
    wanted = ops.spec_compute_probs_from_logits(MODE, logits, *parameters)
    assert torch.equal(ops.spec_compute_probs_from_logits(MODE, logits, *parameters[:3], None), wanted)
    assert computed_by_theirs() == []


def test_greedy_rows_take_the_first_of_the_largest(ops: ModuleType) -> None:
    logits = torch.full((3, WIDTH), 1.0)
    logits[:, 20:40] = 2.0
    parameters = filters([(1e-5, NO_K, 1.0, 0.0), (0.0, 5, 0.5, 0.5), (9e-5, NO_K, 1.0, 0.0)])
    noise = {"seed": numbers(1), "offset": numbers(1)}
    tokens, probs = ops.spec_sample_from_logits_with_probs(MODE, logits, *parameters, **noise)
    assert tokens.tolist() == [20, 20, 20] and probs[:, 20].tolist() == [1, 1, 1] and probs.sum() == 3


def test_nothing_is_read_back(ops: ModuleType) -> None:
    """The calls stand in a CUDA graph, where no op may wait for a result or have a shape that is one."""
    arguments = logits_of(len(ROWS)), *filters(ROWS)
    noise = {"seed": numbers(1), "offset": numbers(1)}
    with Watch() as watch:
        ops.spec_sample_from_logits(MODE, *arguments)
        ops.spec_sample_from_logits_with_probs(MODE, *arguments, **noise)
        ops.spec_compute_probs_from_logits(MODE, *arguments)
    assert watch.seen.count("gvr_topk::sample") == 3 and watch.seen.count("gvr_topk::renorm") == 2
    assert set(watch.seen) <= CAPTURED


def test_no_rows(ops: ModuleType) -> None:
    noise = {"seed": numbers(1), "offset": numbers(1)}
    parameters = filters(ROWS)
    tokens, probs = ops.spec_sample_from_logits_with_probs(MODE, torch.zeros(0, WIDTH), *parameters, **noise)
    assert tokens.shape == (0,) and probs.shape == (0, WIDTH) and computed_by_theirs() == []


def every(ops: ModuleType, logits: Tensor, parameters: list[Tensor]) -> list[Any]:
    noise = {"seed": numbers(1), "offset": numbers(1)}
    return [
        ops.spec_sample_from_logits(MODE, logits, *parameters, **noise),
        *ops.spec_sample_from_logits_with_probs(MODE, logits, *parameters, **noise),
        ops.spec_compute_probs_from_logits(MODE, logits, *parameters),
    ]


@pytest.mark.parametrize(
    ("variable", "value"),
    [(SWITCH, None), (SWITCH, "0"), (SWITCH, "all"), ("GVR_TOPK_DISABLE", "1")],
)
def test_off_unless_asked_for(
    process: None, monkeypatch: pytest.MonkeyPatch, variable: str, value: str | None
) -> None:
    monkeypatch.delenv(variable, raising=False)
    if value is not None:
        monkeypatch.setenv(variable, value)
    integration.install()
    ops = importlib.import_module(DISPATCH)
    fused = sys.modules[FUSED_SAMPLER]
    assert not any(hasattr(getattr(fused, point.name), "__wrapped__") for point in SAMPLER_POINTS)
    every(ops, logits_of(2), filters(ROWS[:2]))
    assert computed_by_theirs() == ["tokens", "both", "probs"] and calls() == {}
    wrong = f"{SWITCH}: wanted 0, 1 or force, got 'all'"
    assert lines_of("warning") == (
        [f"{LINE}sampling stays TensorRT-LLM's own: {wrong}"] if value == "all" else []
    )
    assert ((SWITCH, f"refused: {wrong}") in environment.describe()) == (value == "all")


def test_it_needs_the_integration(process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTLLM_GVR_TOPK", "0")
    every(connected(), logits_of(2), filters(ROWS[:2]))
    assert computed_by_theirs() == ["tokens", "both", "probs"]
    assert calls() == {("original", f"{kind} not asked for"): 1 for kind in KINDS}
    assert lines_of("info") == [f"{LINE}off: sampler: neither TRTLLM_GVR_TOPK=1 nor the YAML key is set"]


@pytest.mark.parametrize("shape", SHAPES[:2])
def test_an_older_version_has_no_fused_sampler(process: None, shape: str) -> None:
    """One line, and the rest of the integration stays."""
    load_llm_args()
    assert integration.install()
    (line,) = lines_of("warning")
    assert line.endswith(
        f"sampling stays TensorRT-LLM's own: fused_sample_from_logits in {FUSED_SAMPLER}: "
        f"wanted the module {FUSED_SAMPLER}, got none"
    )
    assert dict(integration.describe())["fused_sample_from_logits"].startswith("missing (wanted the module")


@pytest.mark.parametrize("function", [point.name for point in SAMPLER_POINTS])
def test_another_signature(process: None, function: str) -> None:
    """None of the three is touched if one of them is another one."""
    ops = importlib.import_module(DISPATCH)
    fused = sys.modules[FUSED_SAMPLER]
    setattr(fused, function, lambda logits, temperature: None)
    before = {point.name: getattr(fused, point.name) for point in SAMPLER_POINTS}
    assert integration.install()
    assert {name: getattr(fused, name) for name in before} == before and ops.fused is fused
    (line,) = lines_of("warning")
    assert line.startswith(
        f"{LINE}sampling stays TensorRT-LLM's own: {function} in {FUSED_SAMPLER}: wanted logits,"
    )
    assert line.endswith("got logits, temperature") and calls() == {}


def test_doctor_and_uninstall(ops: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = dict(integration.describe())
    for point in SAMPLER_POINTS:
        assert rows[point.name].startswith("ok: with TRTLLM_GVR_TOPK_SAMPLER=1 wrapped")
    fused = sys.modules[FUSED_SAMPLER]
    assert all(hasattr(getattr(fused, point.name), "__wrapped__") for point in SAMPLER_POINTS)
    integration.uninstall()
    assert not any(hasattr(getattr(fused, point.name), "__wrapped__") for point in SAMPLER_POINTS)
    monkeypatch.delenv(SWITCH)
    assert not {point.name for point in SAMPLER_POINTS} & dict(integration.describe()).keys()


def test_after_an_error_all_calls_are_theirs(ops: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **others: Any) -> Tensor:
        raise RuntimeError("no room\nfor this launch")

    logits, parameters = logits_of(2), filters(ROWS[:2])
    with monkeypatch.context() as broken:
        broken.setattr(sampler, "sample", fail)
        every(ops, logits, parameters)
    every(ops, logits, parameters)
    assert computed_by_theirs() == 2 * ["tokens", "both", "probs"]
    assert calls() == {("original", f"{kind} error: RuntimeError"): 2 for kind in KINDS}
    assert lines_of("warning") == [
        f"{LINE}fell back: {kind}: RuntimeError: no room for this launch. "
        "TensorRT-LLM's own sampler serves from now on"
        for kind in KINDS
    ]


@pytest.mark.parametrize(
    "logits",
    [logits_of(2).double(), logits_of(2).t().contiguous().t(), logits_of(2)[None]],
    ids=["fp64", "t", "3"],
)
def test_logits_of_another_layout_are_theirs(ops: ModuleType, logits: Tensor) -> None:
    """Only this call, and nothing is switched off."""
    fused = sys.modules[FUSED_SAMPLER]
    if logits.dim() == 2:
        fused.fused_compute_probs_from_logits(logits, *filters(ROWS[:2]))
    else:
        with pytest.raises(ValueError, match="too many values"):
            fused.fused_compute_probs_from_logits(logits, *filters(ROWS[:1]))
    fused.fused_compute_probs_from_logits(logits_of(2), *filters(ROWS[:2]))
    assert calls() == {("original", f"{KINDS[2]} layout"): 1, ("gvr_topk", KINDS[2]): 1}


def test_what_torch_compile_traces_is_theirs(ops: ModuleType) -> None:
    """A whole graph is traced, without a break."""

    def probabilities(logits: Tensor, *parameters: Tensor) -> Tensor:
        return ops.spec_compute_probs_from_logits(MODE, logits, *parameters) + 0  # type: ignore[no-any-return]

    compiled = torch.compile(probabilities, backend="eager", fullgraph=True)
    logits, parameters = logits_of(3), filters(ROWS[:3])
    torch.testing.assert_close(
        compiled(logits, *parameters), probabilities(logits, *parameters), rtol=0, atol=1e-5
    )
    assert calls() == {("gvr_topk", KINDS[2]): 1}


class TestVerify:
    """``TRTLLM_GVR_TOPK_VERIFY``: calls are compared with TensorRT-LLM's own."""

    @pytest.fixture
    def verified(self, process: None, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
        monkeypatch.setenv("TRTLLM_GVR_TOPK_VERIFY", "4")
        return connected()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("ties", [False, True])
    def test_calls_agree(self, verified: ModuleType, dtype: torch.dtype, ties: bool) -> None:
        """With ties at every border, too, of which TensorRT-LLM keeps all, in greedy rows as well."""
        for step in range(5):
            logits = logits_of(8 * len(ROWS), step, dtype)
            every(verified, logits.round() if ties else logits, filters(8 * ROWS))
        assert computed_by_theirs() == 4 * ["tokens", "both", "probs"]
        assert [line for line in lines_of("info") if "verified" in line] == [
            f"{LINE}verified 4 calls of {kind}" for kind in KINDS
        ]
        assert lines_of("warning") == [] and calls() == {("gvr_topk", kind): 5 for kind in KINDS}

    def test_rows_that_nobody_judges(self, verified: ModuleType) -> None:
        logits = logits_of(3)
        logits[0, 3], logits[1, 3], logits[2] = torch.nan, torch.inf, -torch.inf
        every(verified, logits, filters(ROWS[:3]))
        assert lines_of("warning") == [] and calls() == {("gvr_topk", kind): 1 for kind in KINDS}

    @pytest.mark.parametrize(
        ("name", "change", "kinds", "text"),
        [
            ("sample", lambda tokens: tokens.fill_(3), KINDS[:2], "row 1 of 2: a token is not kept"),
            ("renorm", lambda probs: probs[1, :9].add_(0.01), KINDS[1:], "row 1 of 2: a probability differs"),
        ],
    )
    def test_a_difference_is_named(
        self,
        verified: ModuleType,
        monkeypatch: pytest.MonkeyPatch,
        name: str,
        change: Callable[[Tensor], object],
        kinds: tuple[str, ...],
        text: str,
    ) -> None:
        real = getattr(sampling, name)

        def broken(*args: Any, **others: Any) -> Tensor:
            result = real(*args, **others)
            change(result)
            return result  # type: ignore[no-any-return]

        monkeypatch.setattr(sampler, name, broken)
        logits = logits_of(2)
        logits[0, 3], logits[1, 3] = 9.0, -9.0
        got = every(verified, logits, filters([ROWS[2], ROWS[2]]))
        assert lines_of("warning") == [
            f"{LINE}fell back: {kind}: Differs: {text}. TensorRT-LLM's own sampler serves from now on"
            for kind in kinds
        ]
        assert {("original", f"{kind} error: Differs"): 1 for kind in kinds}.items() <= calls().items()
        assert got[0][1] != 3 or name == "renorm"

    def test_another_order_of_filters_is_noticed(
        self, verified: ModuleType, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def other(logits: Tensor, *, order: str, **others: Any) -> Tensor:
            return sampling.sample(logits, order="joint", **others)

        monkeypatch.setattr(sampler, "sample", other)
        verified.spec_compute_probs_from_logits(MODE, logits_of(8), *filters(8 * [ROWS[4]]))
        assert calls() == {("original", f"{KINDS[2]} error: Differs"): 1}


def test_requests_without_a_seed_are_apart_over_steps(ops: ModuleType) -> None:
    """They all have the default seed, and offsets that others have had; seeded ones keep to their own."""
    streams: dict[int, list[list[int]]] = {42: [[], []], 41: [[], []]}
    for step in range(40):
        for seed, (first, second) in streams.items():
            offset = numbers(4 * step, 4 * max(step - 1, 0))  # the second request came a step later
            tokens = drawn(ops, torch.zeros(2, WIDTH), numbers(seed).repeat(2), offset)
            first.append(tokens[0])
            second.append(tokens[1])
    first, second = streams[42]
    assert sum(a == b for a, b in zip(first[:-1], second[1:], strict=True)) < 6
    first, second = streams[41]
    assert first[1:-1] == second[2:]


def test_engines_of_one_process_have_switches_of_their_own(ops: ModuleType, monkeypatch: Any) -> None:
    for asked, path in (("1", "gvr_topk"), ("0", "original"), ("1", "gvr_topk")):
        monkeypatch.setenv("TRTLLM_GVR_TOPK", asked)
        before = calls()
        every(ops, logits_of(2), filters(ROWS[:2]))
        assert {made for made, count in calls().items() if count != before.get(made)} == {
            (path, kind if asked == "1" else f"{kind} not asked for") for kind in KINDS
        }
