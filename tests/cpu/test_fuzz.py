"""What the fuzzer draws, whether it says so, and whether it finds a wrong op or a misused argument."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from eval_fakes import Ended, run_verb

from eval.common.dtypes import DTYPES
from eval.fuzz import calls, fuzz
from eval.fuzz import cases as drawn
from eval.fuzz.contents import CONTENTS
from gvr_topk import cpu
from gvr_topk.arguments import BlocksArguments, DecodeArguments, InBlocksArguments
from gvr_topk.constants import FLAG_CLAMP_PAGES, FLAG_DROP_MASKED, HintReason

LARGE = {
    op: [case for seed in (3, 4, 5) for case in drawn.draw_cases(strategy(1 << 22), seed, 300)]
    for op, strategy in drawn.STRATEGIES.items()
}
"""Cases as those of a GPU. Draws of one seed resemble what came before, so that one may leave out a kind."""


def fuzzed(op: str, most: int = 400, seed: int = 2) -> dict[str, Any]:
    """The summary of a run of cases of one op."""
    chosen = fuzz.drawn_cases("cpu", seed, [op])
    return fuzz.run("cpu", float("inf"), itertools.islice(chosen, most))


@pytest.mark.parametrize(
    ("op", "reached"),
    [
        (
            "decode",
            {
                "extents": set(drawn.LENGTHS) - {"near_blocks"},
                "hints": set(drawn.HINTS),
                "state": {"", *drawn.STATES},
                "slots": {"own", "shuffled", "any"},
                "path": set(drawn.PATHS),
                "ctas_per_row": {0, *drawn.CTAS},
                "max_ctas": {0, *drawn.CTAS},
                "compress_ratio": {1, 4, 128},
                "next_n": {1, 2, 3, 4, 7},
            },
        ),
        ("prefill", {"extents": set(drawn.WINDOWS), "path": set(drawn.PREFILL_PATH_NAMES)}),
        (
            "blocks",
            {
                "extents": set(drawn.LENGTHS),
                "given": set(drawn.GIVEN),
                "compress_ratio": {1, 4, 128},
                "starts": {"", *drawn.STARTS},
            },
        ),
        (
            "sampling",
            {
                "masks": set(drawn.MASKS),
                "order": {"vllm", "hf", "joint", "temperature_last"},
                "noise": {"cdf", "murmur"},
                "logprob_mode": {"raw", "processed"},
                "slots": {"own", "any"},
                "sampled": set(drawn.SAMPLE_OUTPUTS),
                "by_tensor": {"temperature", "top_k", "top_p", "min_p", "seeds", "positions"},
            },
        ),
    ],
)
def test_cases_reach_every_kind(op: str, reached: dict[str, set[Any]]) -> None:
    shared = {
        "contents": set(CONTENTS),
        "dtype": set(DTYPES),
        "poison": set(drawn.POISONS),
        "fresh": {0.0, 0.01, 0.3, 1.0},
    }
    for name, wanted in {**shared, **reached}.items():
        values = [getattr(case, name) for case in LARGE[op]]
        found = set(itertools.chain(*values)) if isinstance(values[0], tuple) else set(values)
        assert found == wanted, name
    assert any(case.rows > 64 for case in LARGE[op])
    assert any(case.width > (1 << 17 if op == "sampling" else 1 << 20) for case in LARGE[op])
    assert all(case.rows * case.width <= 1 << 22 for case in LARGE[op])


@pytest.mark.parametrize("op", drawn.OPS)
def test_a_case_is_made_again_from_its_seed_or_from_what_is_printed(op: str) -> None:
    cases = drawn.draw_cases(drawn.STRATEGIES[op](1 << 13), 5, 20)
    assert drawn.draw_cases(drawn.STRATEGIES[op](1 << 13), 5, 20) == cases
    for case in cases:
        again = drawn.Case.of_json(json.dumps(case.as_json()))
        assert again == case
        first, second = (list(calls.make_call(each, "cpu")()) for each in (case, again))
        for (_, got, wanted), (_, same, expected) in zip(first, second, strict=True):
            assert torch.equal(got, same) and torch.equal(wanted, expected)


@pytest.mark.parametrize("op", drawn.OPS)
def test_oracles_agree(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for case in drawn.draw_cases(drawn.STRATEGIES[op](1 << 13), 9, 60):
        wanted = []
        for by_sort in (False, True):
            monkeypatch.setattr(calls, "checks_by_sort", lambda case, device, by_sort=by_sort: by_sort)
            wanted.append([expected for _, _, expected in calls.make_call(case, "cpu")()])
        assert all(torch.equal(*pair) for pair in zip(*wanted, strict=True)), case


BROKEN_IN_EVERY_OP = {
    "one index": "first call: result",
    "guard": "result",
    "second call": "second call: result",
    "raises": "RuntimeError: launch failed",
}
BROKEN = [
    *itertools.product(("decode", "prefill", "blocks", "in_blocks"), BROKEN_IN_EVERY_OP.items()),
    *itertools.product(
        ("decode", "prefill"),
        [("slots", "slots"), ("counts", "counts"), ("unknown reason", "stats: unknown reason")],
    ),
    *itertools.product(["decode"], [("indices", "indices"), ("words", "words of other slots")]),
    ("blocks", ("blocks", "first call: blocks")),
]


@pytest.mark.parametrize(
    ("op", "fault"), BROKEN, ids=lambda value: value if isinstance(value, str) else value[0]
)
def test_a_broken_op_is_found_and_named(
    op: str, fault: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, named = fault
    real, count = calls.launch, itertools.count(1)

    def launch(a: Any) -> None:
        real(a)
        if op in ("blocks", "in_blocks") and not isinstance(
            a, {"blocks": BlocksArguments, "in_blocks": InBlocksArguments}[op]
        ):
            return
        call = next(count)
        if broken == "raises":
            raise RuntimeError("launch failed")
        if broken == "one index" or (broken == "second call" and call % 2 == 0):
            a.out[-1, a.k - 1] += 1
        elif broken == "guard":
            a.out[0, a.k] = 0
        elif broken == "unknown reason" and a.stats is not None:
            a.stats[0, 0] = len(HintReason)
        elif broken == "words" and a.state is not None:
            if a.row_slot is None or int(a.row_slot.max()) >= 0:
                a.state[:, 2] += 1
        elif broken in ("slots", "counts", "indices", "blocks") and getattr(a, broken) is not None:
            getattr(a, broken).view(-1)[0] += 1

    monkeypatch.setattr(calls, "launch", launch)
    summary = fuzzed(op.removeprefix("in_"))
    assert named in summary["failure"]["error"]
    if op == "in_blocks" and named.endswith("result"):
        assert "result in given blocks" in summary["failure"]["error"]
    assert summary["failure"]["case"]["op"] == op.removeprefix("in_")


SAMPLED = {
    "out": ("SampleArguments", "out"),
    "limits": ("SampleArguments", "limits"),
    "kept": ("SampleArguments", "kept"),
    "logprobs": ("SampleArguments", "logprobs"),
    "probabilities": ("RenormArguments", "out"),
    "masked logits": ("ApplyLimitsArguments", "logits"),
    "largest": ("TopkLogprobsArguments", "ids"),
    "their log-probabilities": ("TopkLogprobsArguments", "logprobs"),
    "rank": ("TopkLogprobsArguments", "ranks"),
    "accepted tokens": ("VerifyArguments", "tokens"),
    "their number": ("VerifyArguments", "lengths"),
}


@pytest.mark.parametrize("named", SAMPLED)
@pytest.mark.parametrize("behind", [False, True])
def test_a_broken_op_of_the_sampler_is_found_and_named(
    named: str, behind: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A word that is wrong, or one behind the last of a result."""
    real, (kind, argument) = calls.launch, SAMPLED[named]

    def launch(a: Any) -> None:
        real(a)
        result = getattr(a, argument, None)
        if type(a).__name__ == kind and result is not None and result.numel():
            last = result.storage_offset() + sum(
                (size - 1) * stride for size, stride in zip(result.shape, result.stride(), strict=True)
            )
            result.as_strided((1,), (1,), last + behind)[0] = 12

    monkeypatch.setattr(calls, "launch", launch)
    assert f"first call: {named}: " in fuzzed("sampling")["failure"]["error"]


def without(name: str, value: object) -> Callable[[DecodeArguments], None]:
    """The op as if an argument had not been given."""
    return lambda a: cpu.decode(a._replace(**{name: value}))


def without_flag(flag: int) -> Callable[[DecodeArguments], None]:
    return lambda a: cpu.decode(a._replace(flags=a.flags & ~flag))


def states_of_the_row_before(a: DecodeArguments) -> None:
    cpu.decode(a)
    if a.next_state is not None:
        a.next_state.copy_(a.next_state.roll(1, 0))


def one_state_too_many(a: DecodeArguments) -> None:
    cpu.decode(a)
    if a.next_state is not None:
        a.next_state._base[-1, 0] = 0.0


def state_written_all_the_same(a: DecodeArguments) -> None:
    cpu.decode(a)
    if a.next_state is not None and a.state is not None:
        cpu.decode(a._replace(next_state=None))


@pytest.mark.parametrize(
    ("op", "named"),
    [
        (without("compress_ratio", 1), "result"),
        (without_flag(FLAG_CLAMP_PAGES), ""),
        (without_flag(FLAG_DROP_MASKED), "result"),
        (without("next_state", None), ""),
        (states_of_the_row_before, "next_state: row"),
        (one_state_too_many, "next_state: before and behind"),
        (state_written_all_the_same, ""),
    ],
)
def test_a_wrong_use_of_an_argument_is_found(
    op: Callable[[DecodeArguments], None], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "launch", op)
    summary = fuzzed("decode")
    assert summary["failure"] is not None and named in summary["failure"]["error"]


@pytest.mark.parametrize("op", ["decode", "prefill"])
def test_a_wrong_page_table_of_the_op_is_found(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The translation is the oracle's own: a fault of the op's is none of the oracle's."""
    real = cpu.to_slots_of_requests

    def off_by_one(positions: torch.Tensor, *rest: object) -> torch.Tensor:
        slots = real(positions, *rest)  # type: ignore[arg-type]
        return torch.where(slots > 0, slots - 1, slots)

    monkeypatch.setattr(cpu, "to_slots_of_requests", off_by_one)
    assert fuzzed(op)["failure"]["case"]["page_size"] > 0


def invoke(*options: str) -> Ended:
    return run_verb("fuzz", "--device", "cpu", *options)


def test_the_summary_counts_what_was_drawn() -> None:
    chosen = fuzz.drawn_cases("cpu", 7, list(drawn.OPS))
    summary = fuzz.run("cpu", float("inf"), itertools.islice(chosen, 220))
    assert summary["failure"] is None
    assert summary["checked_by_sort"] == summary["cases"] == 220
    parts = summary["drawn"]
    assert set(parts) == set(drawn.OPS)
    assert sum(part["cases"] for part in parts.values()) == 220
    assert 0.1 < parts["prefill"]["cases"] / 220 < 0.5 and parts["prefill"]["reasons"]
    for part in parts.values():
        assert sum(part["paths"].values()) == sum(part["dtypes"].values()) == part["cases"]
        # What is drawn also depends on the modules that hypothesis finds loaded, so a few cases may be alike.
        assert all(
            0 < count < max(part["cases"], 50)
            for name, count in part["arguments"].items()
            if name[:5] not in ("given", "block", "by_te", "order")
        ), part
    assert set(parts["decode"]["arguments"]) >= {
        *("next_n", "state", "hints", "slots", "next_state", "counts", "page_size", "cache_slots", "stats"),
        *("clamp_pages", "drop_masked", "compress_ratio", "max_ctas", "ctas_per_row", "pdl", "by_row"),
    }


def test_the_command_prints_the_case_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "fuzz.json"
    case = next(case for case in LARGE["prefill"] if case.rows * case.width < 1 << 13 and case.requests > 1)
    text = json.dumps(case.as_json())
    assert invoke("--case", text, "--out", str(out)).exit_code == 0
    assert json.loads(out.read_text())["drawn"]["prefill"]["cases"] == 1
    monkeypatch.setattr(calls, "launch", lambda arguments: None)
    ended = invoke("--case", text, "--out", str(out))
    assert ended.exit_code == 1 and "MISMATCH Mismatch: first call: result" in ended.output
    assert f"again: python -m eval fuzz --device cpu --case '{text}'" in ended.output
    assert json.loads(out.read_text())["failure"]["case"] == json.loads(text)
    assert invoke("--seconds", "9", "--seed", "4").exit_code == 1
