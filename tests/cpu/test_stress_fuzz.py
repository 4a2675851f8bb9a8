"""What the fuzzer draws for decode, whether it says so, and whether it finds a wrong use of an argument."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from eval.fuzz import fuzz, fuzz_cases
from gvr_topk import cpu
from gvr_topk.arguments import DecodeArguments
from gvr_topk.constants import FLAG_CLAMP_PAGES, FLAG_DROP_MASKED


def test_cases_reach_every_argument() -> None:
    cases = [fuzz_cases.draw_case(3, index, elements=1 << 22) for index in range(400)]
    assert {case.max_ctas for case in cases} == {0, 1, 2, 4, 8, 16}
    assert {case.compress_ratio for case in cases} == {1, 4, 128}
    assert all(case.page_size for case in cases if case.clamp_pages)
    assert any(case.page_size and not case.clamp_pages for case in cases)
    assert all(case.ctas_per_row <= case.max_ctas for case in cases if case.max_ctas)
    for argument in ("next_state", "drop_masked", "clamp_pages"):
        shares = sum(getattr(case, argument) for case in cases) / len(cases)
        assert 0.05 < shares < 0.5, argument
    assert any(case.next_state and case.state == fuzz_cases.ABSENT for case in cases)
    assert any(case.next_state and case.hints and case.slots == "any" for case in cases)


def test_the_summary_counts_what_was_drawn() -> None:
    summary = fuzz.run("cpu", 60.0, seed=7, most=150)
    assert summary["failure"] is None
    assert summary["checked_by_sort"] == 150
    drawn = summary["drawn"]
    assert set(drawn) == set(fuzz.OPS)
    assert sum(part["cases"] for part in drawn.values()) == summary["cases"] == 150
    assert drawn["decode"]["paths"] == summary["paths_asked_for"]
    assert drawn["prefill"]["cases"] == summary["prefill"]["cases"]
    assert drawn["blocks"]["cases"] == summary["blocks"]["cases"]
    for part in drawn.values():
        assert sum(part["paths"].values()) == sum(part["dtypes"].values()) == part["cases"]
        assert all(0 < count < part["cases"] for count in part["arguments"].values()), part
    assert set(drawn["decode"]["arguments"]) >= {
        *("next_n", "state", "indices", "row_slot", "next_state", "counts", "page_table", "slots"),
        *("clamp_pages", "drop_masked", "compress_ratio", "max_ctas", "ctas_per_row", "stats", "pdl"),
    }


def test_on_a_gpu_numpy_checks_a_share_of_the_cases() -> None:
    """The same cases each time, so that the one that a mismatch names is compared with the same oracle."""
    cases = [fuzz_cases.draw_case(3, index, elements=1 << 22) for index in range(400)]
    chosen = [case.index for case in cases if fuzz.checks_by_sort(case, "cuda")]
    assert 10 < len(chosen) <= 25 and all(index % 16 == 0 for index in chosen)
    assert all(fuzz.checks_by_sort(case, "cpu") for case in cases)


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
        (one_state_too_many, "next_state: wrote before or behind"),
        (state_written_all_the_same, ""),
    ],
)
def test_a_wrong_use_of_an_argument_is_found(
    op: Callable[[DecodeArguments], None], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fuzz, "launch", op)
    summary = fuzz.run("cpu", 60.0, seed=2, most=400, prefill=0.0, blocks=0.0)
    assert summary["failure"] is not None and named in summary["failure"]["error"]
    assert summary["failure"]["case"]["op"] == "decode"


def test_a_wrong_page_table_of_the_op_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The translation is the oracle's own: a fault of the op's is none of the oracle's."""
    real = cpu.to_slots_of_requests

    def off_by_one(positions: torch.Tensor, *rest: object) -> torch.Tensor:
        slots = real(positions, *rest)  # type: ignore[arg-type]
        return torch.where(slots > 0, slots - 1, slots)

    monkeypatch.setattr(cpu, "to_slots_of_requests", off_by_one)
    for prefill in (0.0, 1.0):
        summary = fuzz.run("cpu", 60.0, seed=2, most=100, prefill=prefill, blocks=0.0)
        assert summary["failure"] is not None and summary["failure"]["case"]["page_size"] > 0
