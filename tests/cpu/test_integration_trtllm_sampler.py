"""Tokens and probabilities of a fake of TensorRT-LLM's fused sampler, computed by our ops if asked for."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from engine import SHAPES, fake_package, load_llm_args
from integration_setup import Watch, lines_of
from sampler_setup import change_op, fail, law
from scipy import stats
from torch import Tensor

from gvr_topk import sampling
from gvr_topk.integrations import tensorrt_llm as integration
from gvr_topk.integrations._kit import environment
from gvr_topk.integrations.tensorrt_llm import sampler
from gvr_topk.integrations.tensorrt_llm.upstream import FUSED_SAMPLER, SAMPLER_POINTS

SWITCH = "TRTLLM_GVR_TOPK_SAMPLER"
LINE = "gvr_topk in TensorRT-LLM 1.3.0rc27: "
NO_K = torch.iinfo(torch.int32).max
THEIRS = ["tokens", "both", "probs"]
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

WIDTH, DRAWS = 64, 4000

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


@pytest.fixture(params=SHAPES[-1:])
def process(
    undisturbed: None, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[None]:
    """A process that may import the fake, with both switches on."""
    with fake_package(request.param):
        for name in ("GVR_TOPK_VERIFY", "TRTLLM_GVR_TOPK_VERIFY"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("TRTLLM_GVR_TOPK", "1")
        monkeypatch.setenv(SWITCH, "1")
        importlib.import_module("tensorrt_llm.logger")
        yield


def connected() -> ModuleType:
    assert integration.install()
    return importlib.import_module(FUSED_SAMPLER)


@pytest.fixture
def ops(process: None) -> ModuleType:
    """The fused sampler with the hook in place; `calls` lists its functions that have computed themselves."""
    return connected()


def wrapped() -> int:
    functions = vars(sys.modules[FUSED_SAMPLER])
    return sum(hasattr(functions[point.name], "__wrapped__") for point in SAMPLER_POINTS)


def calls() -> dict[tuple[str, str], int]:
    return integration.counters().calls


def logits_of(rows: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return (2 * torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))).to(dtype)


def filters(rows: list[tuple[float, int, float, float]] = ROWS, longer: int = 0) -> list[Tensor]:
    """Parameters as tensors, which may be longer than the call has rows."""
    columns = zip(*rows, *longer * [(1.0, 1, 0.1, 0.9)], strict=True)
    dtypes = (torch.float32, torch.int32, torch.float32, torch.float32)
    return [torch.tensor(column, dtype=dtype) for column, dtype in zip(columns, dtypes, strict=True)]


def numbers(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def every(ops: ModuleType, logits: Tensor, parameters: list[Tensor], **noise: Tensor) -> list[Tensor]:
    """Tokens, tokens and probabilities, and probabilities alone."""
    noise = noise or {"seed": numbers(1), "offset": numbers(1)}
    return [
        ops.fused_sample_from_logits(logits, *parameters, **noise),
        *ops.fused_sample_from_logits_with_probs(logits, *parameters, **noise),
        ops.fused_compute_probs_from_logits(logits, *parameters),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("longer", [0, 3])
def test_the_law_is_that_of_the_filters(ops: ModuleType, dtype: torch.dtype, longer: int) -> None:
    """Rows of all kinds in a call: the kept tokens, their probabilities, and that no other one is drawn.

    Min-p may be absent.
    """
    logits = logits_of(len(ROWS), dtype=dtype)
    before = logits.clone()
    wanted = torch.stack([law(row, *kind) for row, kind in zip(logits, ROWS, strict=True)])
    for step in range(20):
        tokens, same, *probs = every(
            ops, logits, filters(ROWS, longer), seed=numbers(7), offset=numbers(step)
        )
        for each in probs:
            assert each.dtype == torch.float32 and torch.equal(each > 0, wanted > 0)
            torch.testing.assert_close(each.double(), wanted, rtol=0, atol=1e-6)
        assert torch.equal(same, tokens) and same.dtype == tokens.dtype == torch.int32
        assert (wanted.gather(1, tokens[:, None].long()) > 0).all()
    assert calls() == {("gvr_topk", kind): 20 for kind in KINDS}
    assert [line for line in lines_of("info") if "sampler" in line] == [
        f"{LINE}on: {what} of the fused sampler"
        for what in ("tokens", "tokens and probabilities", "probabilities")
    ]
    *others, min_p = filters()
    wanted = ops.fused_compute_probs_from_logits(logits, *others, min_p.zero_())
    assert torch.equal(ops.fused_compute_probs_from_logits(logits, *others, None), wanted)
    assert torch.equal(logits, before) and ops.calls == []


@pytest.mark.parametrize("kind", [ROWS[1], ROWS[3], ROWS[6]], ids=["min-p", "top-p", "all"])
@pytest.mark.parametrize(("rows", "seeds"), [(DRAWS, 1), (8, 1), (DRAWS, DRAWS), (DRAWS, 0)])
def test_tokens_have_their_distribution(
    ops: ModuleType, kind: tuple[Any, ...], rows: int, seeds: int
) -> None:
    """Rows of a call, steps of the same rows, and requests with seeds one apart draw independently."""
    row, seed = logits_of(1, 5), torch.arange(seeds) + 3
    logits, parameters, tokens = row.expand(rows, -1), filters(rows * [kind]), []
    for step in range(DRAWS // rows):
        noise = {"seed": seed, "offset": torch.full_like(seed, step)} if seeds else {}
        tokens.append(ops.fused_sample_from_logits(logits, *parameters, **noise))
    wanted = law(row[0], *kind).numpy() * DRAWS
    counts = np.bincount(torch.cat(tokens).numpy(), minlength=WIDTH)
    assert (counts[wanted == 0] == 0).all()
    rare = wanted < 10
    observed, expected = (np.append(side[~rare], side[rare].sum()) for side in (counts, wanted))
    assert stats.chisquare(observed[expected > 0], expected[expected > 0]).pvalue > 1e-6
    assert calls() == {("gvr_topk", "sampler"): DRAWS // rows}


def drawn(ops: ModuleType, logits: Tensor, seed: Tensor, offset: Tensor) -> list[int]:
    parameters = filters(len(logits) * [ROWS[0]])
    return ops.fused_sample_from_logits(logits, *parameters, seed=seed, offset=offset).tolist()


def alike(one: Sequence[int], other: Sequence[int]) -> int:
    return sum(a == b for a, b in zip(one, other, strict=True))


def test_noise_is_that_of_seed_and_offset(ops: ModuleType) -> None:
    """Equal ones draw equal tokens; any other seed or offset, in its upper half too, draws others."""
    logits, seen = torch.zeros(30, WIDTH), []
    for seed, offset in ((1, 0), (2, 0), (1, 1), (1, 1 << 32), (1, 3 << 40), (-1, 0), (1 << 62, 5)):
        tokens = drawn(ops, logits, numbers(seed), numbers(offset))
        assert tokens == drawn(ops, logits, torch.tensor(seed), torch.tensor(offset))
        assert all(alike(tokens, other) < 8 for other in seen)
        seen.append(tokens)


def test_without_seed_or_offset_every_call_is_another_one(ops: ModuleType) -> None:
    """Noise is then that of PyTorch's generator; probabilities alone take none of it."""
    call = torch.zeros(30, WIDTH), *filters(30 * [ROWS[0]])
    for noise in ({}, {"seed": numbers(4)}, {"offset": numbers(4)}):
        torch.manual_seed(1)
        ops.fused_compute_probs_from_logits(*call)
        first, second = (ops.fused_sample_from_logits(*call, **noise) for _ in range(2))
        torch.manual_seed(1)
        assert torch.equal(first, ops.fused_sample_from_logits(*call, **noise))
        assert (first == second).sum() < 8


def test_a_row_with_a_seed_of_its_own_does_not_depend_on_the_batch(ops: ModuleType) -> None:
    """A seeded request draws its tokens wherever its rows stand and whatever the others are."""
    logits = logits_of(6, 3)
    seed, offset = (
        numbers(5, 6, 6, 6, 8, 9, 1, 1),
        numbers(0, 7, 8, 9, 1 << 33, 0, 1, 1),
    )  # longer than needed
    tokens = drawn(ops, logits, seed, offset)
    for order in ([5, 4, 3, 2, 1, 0], [2], [4, 1]):
        assert drawn(ops, logits[order], seed[order], offset[order]) == [tokens[i] for i in order]
    assert drawn(ops, logits[[3, 3, 0]], seed[[3, 3, 0]], offset[[3, 3, 0]])[::2] == [tokens[3], tokens[0]]


def test_rows_with_equal_seeds_and_offsets_are_apart(ops: ModuleType) -> None:
    """Rows of a request, and requests without a seed, share both: their order tells them apart."""
    mixed = numbers(1, 2).repeat(30)
    tokens = drawn(ops, torch.zeros(60, WIDTH), mixed, torch.zeros_like(mixed))
    for first in (0, 1):
        request = numbers(1 + first).repeat(30)
        assert tokens[first::2] == drawn(ops, torch.zeros(30, WIDTH), request, torch.zeros_like(request))
        assert tokens[first::2] == drawn(ops, torch.zeros(30, WIDTH), numbers(1 + first), numbers(0))
        assert len(set(tokens[first::2])) > 15


def test_requests_without_a_seed_are_apart_over_steps(ops: ModuleType) -> None:
    """They all have the default seed, and offsets that others have had; seeded ones keep to their own."""
    for seed, least, most in ((42, 0, 5), (41, 38, 38)):
        offsets = [numbers(4 * step, 4 * max(step - 1, 0)) for step in range(40)]  # one came a step later
        steps = [drawn(ops, torch.zeros(2, WIDTH), numbers(seed, seed), offset) for offset in offsets]
        first, second = zip(*steps, strict=True)
        assert least <= alike(first[1:-1], second[2:]) <= most


def test_greedy_rows_take_the_first_of_the_largest(ops: ModuleType) -> None:
    logits = torch.full((3, WIDTH), 1.0)
    logits[:, 20:40] = 2.0
    parameters = filters([(1e-5, NO_K, 1.0, 0.0), (0.0, 5, 0.5, 0.5), (9e-5, NO_K, 1.0, 0.0)])
    _, tokens, probs, _ = every(ops, logits, parameters)
    assert tokens.tolist() == [20, 20, 20] and probs[:, 20].tolist() == [1, 1, 1] and probs.sum() == 3


def test_nothing_is_read_back(ops: ModuleType) -> None:
    """The calls stand in a CUDA graph, where no op may wait for a result or have a shape that is one."""
    call, noise = (logits_of(len(ROWS)), filters()), {"seed": numbers(1), "offset": numbers(1)}
    with Watch() as watch:
        every(ops, *call, **noise)
        ops.fused_sample_from_logits(call[0], *call[1])
    assert watch.seen.count("gvr_topk::sample") == 4 and watch.seen.count("gvr_topk::renorm") == 2
    assert set(watch.seen) <= CAPTURED


def test_no_rows(ops: ModuleType) -> None:
    shapes = [result.shape for result in every(ops, torch.zeros(0, WIDTH), filters())]
    assert shapes == [(0,), (0,), (0, WIDTH), (0, WIDTH)] and ops.calls == []


# ------------------------------------------------------------- what is left to TensorRT-LLM


@pytest.mark.parametrize(
    ("variable", "value"), [(SWITCH, ""), (SWITCH, "0"), (SWITCH, "all"), ("GVR_TOPK_DISABLE", "1")]
)
def test_off_unless_asked_for(
    process: None, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    if not value:
        monkeypatch.delenv(variable)
    integration.install()
    every(ops := importlib.import_module(FUSED_SAMPLER), logits_of(2), filters(ROWS[:2]))
    assert not wrapped() and ops.calls == THEIRS and calls() == {}
    wrong = f"{SWITCH}: wanted 0, 1 or force, got 'all'"
    line = f"{LINE}sampling stays TensorRT-LLM's own: {wrong}"
    assert lines_of("warning") == ([line] if value == "all" else [])
    assert ((SWITCH, f"refused: {wrong}") in environment.describe()) == (value == "all")


def test_it_needs_the_integration_of_its_engine(process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of one process have switches of their own."""
    for asked, path in (("0", "original"), ("1", "gvr_topk"), ("0", "original")):
        monkeypatch.setenv("TRTLLM_GVR_TOPK", asked)
        ops, before = connected(), calls()
        every(ops, logits_of(2), filters(ROWS[:2]))
        assert {made for made, count in calls().items() if count != before.get(made)} == {
            (path, kind if asked == "1" else f"{kind} not asked for") for kind in KINDS
        }
    assert ops.calls == 2 * THEIRS
    assert lines_of("info")[0] == f"{LINE}off: sampler: neither TRTLLM_GVR_TOPK=1 nor the YAML key is set"


@pytest.mark.parametrize("process", SHAPES[:2], indirect=True)
def test_an_older_version_has_no_fused_sampler(process: None) -> None:
    """One line, and the rest of the integration stays."""
    load_llm_args()
    assert integration.install()
    (line,) = lines_of("warning")
    wanted = f"wanted the module {FUSED_SAMPLER}"
    assert line.endswith(f"own: fused_sample_from_logits in {FUSED_SAMPLER}: {wanted}, got none")
    assert dict(integration.describe())["fused_sample_from_logits"].startswith("missing (wanted the module")


@pytest.mark.parametrize("function", [point.name for point in SAMPLER_POINTS])
def test_another_signature(process: None, function: str) -> None:
    """None of the three is touched if one of them is another one."""
    ops = importlib.import_module(FUSED_SAMPLER)
    setattr(ops, function, lambda logits, temperature: None)
    before = dict(vars(ops))
    assert integration.install()
    assert vars(ops) == before and calls() == {}
    (line,) = lines_of("warning")
    start = f"sampling stays TensorRT-LLM's own: {function} in {FUSED_SAMPLER}: wanted logits,"
    assert line.startswith(LINE + start) and line.endswith("got logits, temperature")


def test_doctor_and_uninstall(ops: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = dict(integration.describe())
    for point in SAMPLER_POINTS:
        assert rows[point.name].startswith("ok: with TRTLLM_GVR_TOPK_SAMPLER=1 wrapped")
    assert wrapped() == 3
    integration.uninstall()
    assert wrapped() == 0
    monkeypatch.delenv(SWITCH)
    assert not {point.name for point in SAMPLER_POINTS} & dict(integration.describe()).keys()


def fell_back(kinds: Sequence[str], error: str) -> list[str]:
    end = "TensorRT-LLM's own sampler serves from now on"
    return [f"{LINE}fell back: {kind}: {error}. {end}" for kind in kinds]


def test_after_an_error_all_calls_are_theirs(ops: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as broken:
        change_op(broken, sampler, "sample", fail)
        every(ops, logits_of(2), filters(ROWS[:2]))
    every(ops, logits_of(2), filters(ROWS[:2]))
    assert ops.calls == 2 * THEIRS
    assert calls() == {("original", f"{kind} error: RuntimeError"): 2 for kind in KINDS}
    assert lines_of("warning") == fell_back(KINDS, "RuntimeError: no room for this launch")


@pytest.mark.parametrize(
    "logits",
    [logits_of(2).double(), logits_of(2).t().contiguous().t(), logits_of(2)[None]],
    ids=["fp64", "t", "3"],
)
def test_logits_of_another_layout_are_theirs(ops: ModuleType, logits: Tensor) -> None:
    """Only this call, and nothing is switched off."""
    probabilities = ops.fused_compute_probs_from_logits
    with nullcontext() if logits.dim() == 2 else pytest.raises(ValueError, match="too many values"):
        probabilities(logits, *filters(ROWS[: len(logits)]))
    probabilities(logits_of(2), *filters(ROWS[:2]))
    assert calls() == {("original", f"{KINDS[2]} layout"): 1, ("gvr_topk", KINDS[2]): 1}


def test_what_torch_compile_traces_is_theirs(ops: ModuleType) -> None:
    """A whole graph is traced, without a break."""

    def probabilities(logits: Tensor, *parameters: Tensor) -> Tensor:
        return ops.fused_compute_probs_from_logits(logits, *parameters) + 0  # type: ignore[no-any-return]

    compiled = torch.compile(probabilities, backend="eager", fullgraph=True)
    call = logits_of(3), *filters(ROWS[:3])
    torch.testing.assert_close(compiled(*call), probabilities(*call), rtol=0, atol=1e-5)
    assert calls() == {("gvr_topk", KINDS[2]): 1}


# ------------------------------------------------------------- verification


@pytest.fixture
def verified(process: None, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """``TRTLLM_GVR_TOPK_VERIFY``: calls are compared with TensorRT-LLM's own."""
    monkeypatch.setenv("TRTLLM_GVR_TOPK_VERIFY", "4")
    return connected()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ties", [False, True])
def test_calls_agree(verified: ModuleType, dtype: torch.dtype, ties: bool) -> None:
    """With ties at every border, too, of which TensorRT-LLM keeps all, in greedy rows as well."""
    for step in range(5):
        logits = logits_of(8 * len(ROWS), step, dtype)
        every(verified, logits.round() if ties else logits, filters(8 * ROWS))
    assert verified.calls == 4 * THEIRS
    assert [line for line in lines_of("info") if "verified" in line] == [
        f"{LINE}verified 4 calls of {kind}" for kind in KINDS
    ]
    assert lines_of("warning") == [] and calls() == {("gvr_topk", kind): 5 for kind in KINDS}


def test_rows_that_nobody_judges(verified: ModuleType) -> None:
    logits = logits_of(3)
    logits[0, 3], logits[1, 3], logits[2] = torch.nan, torch.inf, -torch.inf
    for _ in range(4):
        every(verified, logits, filters(ROWS[:3]))
    assert lines_of("warning") == [] and calls() == {("gvr_topk", kind): 4 for kind in KINDS}
    assert not [line for line in lines_of("info") if "verified" in line]


@pytest.mark.parametrize(
    ("name", "change", "kinds", "text"),
    [
        ("sample", lambda tokens: tokens.fill_(3), KINDS[:2], "row 1 of 2: a token is not kept"),
        ("renorm", lambda probs: probs[1, :9].add_(0.01), KINDS[1:], "row 1 of 2: a probability differs"),
    ],
)
def test_a_difference_is_named(
    verified: ModuleType, monkeypatch: Any, name: str, change: Any, kinds: tuple[str, ...], text: str
) -> None:
    change_op(monkeypatch, sampler, name, change)
    logits = logits_of(2)
    logits[0, 3], logits[1, 3] = 9.0, -9.0
    got = every(verified, logits, filters([ROWS[2], ROWS[2]]))
    assert lines_of("warning") == fell_back(kinds, f"Differs: {text}")
    assert {("original", f"{kind} error: Differs"): 1 for kind in kinds}.items() <= calls().items()
    assert got[0][1] != 3 or name == "renorm"


def test_another_order_of_filters_is_noticed(verified: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    joint = {"order": "joint"}
    monkeypatch.setattr(sampler, "sample", lambda logits, **others: sampling.sample(logits, **others | joint))
    verified.fused_compute_probs_from_logits(logits_of(8), *filters(8 * [ROWS[4]]))
    assert calls() == {("original", f"{KINDS[2]} error: Differs"): 1}
