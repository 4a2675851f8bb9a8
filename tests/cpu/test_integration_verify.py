"""``GVR_TOPK_VERIFY``: which differences from the engine's own selection are noticed, and which are none."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from gvr_topk.integrations._kit import environment, verify
from gvr_topk.integrations._kit.verify import Differs, Selected, Verifier

NAN, INF = float("nan"), float("inf")
SCORES = torch.tensor([[5.0, 1.0, 4.0, 4.0, 3.0, 0.0], [-INF, -INF, 2.0, -INF, 1.0, -INF]])


def items(*rows: list[int]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def check(ours: Tensor, theirs: Tensor, scores: Tensor = SCORES, **options: object) -> list[str]:
    """Compare one call of one op, and return the log."""
    lines: list[str] = []
    selected = Selected(scores, ours.clone(), **options)  # type: ignore[arg-type]
    verifier = Verifier(1, "Engine", lambda level, line: lines.append(f"{level}: {line}"))

    def original() -> None:
        selected.items.copy_(theirs)

    verifier.check("decode", original, selected)
    assert torch.equal(selected.items, ours)  # ours serve
    return lines


VERIFIED = ["info: verified 1 calls of decode"]


BEST = items([0, 2, 3], [0, 2, 4])
"""The three best of each row, as the engine has them."""


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (BEST, items([3, 2, 0], [4, 2, 0])),  # another order
        (BEST, items([0, 2, 3], [2, 4, 5])),  # other members of a tie
        (items([0, 1, -1], [0, 2, 4]), items([1, 0, -7], [2, 4, 1])),  # any negative number is padding
    ],
)
def test_the_same_values_are_no_difference(ours: Tensor, theirs: Tensor) -> None:
    assert check(ours, theirs) == VERIFIED


@pytest.mark.parametrize(
    ("ours", "theirs", "text"),
    [
        (items([0, 2, 4], [0, 2, 4]), BEST, "row 0 of 2: selected score 3 is 3, and 4 by"),
        (items([0, 2, 3], [0, 2, -1]), BEST, "row 1 of 2: 2 items are selected, and 3 by"),
        (
            items([0, 2, 3], [2, 4, -1]),
            items([0, 2, 3], [2, 4, 0]),
            "row 1 of 2: 2 items are selected, and 3",
        ),
        (items([0, 2, 3], [0, 2, 2]), items([0, 2, 3], [0, 2, 2]), "row 1 of 2: an item is selected twice"),
        (items([0, 2, 6], [0, 2, 4]), BEST, "row 0 of 2: an item is outside of the row"),
        (
            items([0, 2, -2], [0, 2, 4]),
            items([0, 2, -1], [0, 2, 4]),
            "row 0 of 2: an item is outside of the row",
        ),
        (torch.zeros(2, 3, dtype=torch.int32), BEST, "an item is selected twice"),
    ],
)
def test_differences(ours: Tensor, theirs: Tensor, text: str) -> None:
    with pytest.raises(Differs, match=text):
        check(ours, theirs)


def test_differences_in_later_rows_of_a_long_call() -> None:
    rows = 2 * verify.ROWS_AT_ONCE + 3
    scores = torch.tensor([[2.0, 2.0, 1.0, 0.0]]).expand(rows, 4)
    ours, theirs = torch.zeros(rows, 1, dtype=torch.int32), torch.ones(rows, 1, dtype=torch.int32)  # ties
    Verifier(1, "Engine", print).check("decode", lambda: theirs, Selected(scores, ours.clone()))
    ours[-1] = 2
    with pytest.raises(Differs, match=f"row {rows - 1} of {rows}: selected score 1 is 1, and 2 by Engine"):
        Verifier(1, "Engine", print).check("decode", lambda: theirs, Selected(scores, ours))


def test_windows_and_items_that_are_not_positions() -> None:
    starts = torch.tensor([2, 2], dtype=torch.int32)
    assert check(items([0, 1], [0, 2]), items([1, 0], [0, 2]), starts=starts) == VERIFIED
    with pytest.raises(Differs, match="row 1 of 2: selected score 2 is -inf, and 1 by Engine"):
        check(items([0, 1], [0, 1]), items([1, 0], [0, 2]), starts=starts)
    with pytest.raises(Differs, match="outside"):  # the scores end there
        check(items([0, 4], [0, 2]), items([1, 0], [0, 2]), starts=starts)
    doubled = check(items([0, 4], [4, 8]), items([6, 0], [8, 4]), positions=lambda rows, items: items // 2)
    assert doubled == VERIFIED


def test_rows_that_cannot_be_compared() -> None:
    """Rows with NaN, and those that the engine promises nothing about; a call of such rows does not count."""
    scores = SCORES.clone()
    scores[1, 0] = NAN
    assert check(items([0, 2, 3], [0, 2, 4]), items([0, 2, 3], [2, 4, 5]), scores) == VERIFIED
    assert check(items([0, 1, -1], [0, 2, 4]), items([0, 1, -1], [2, 4, 5]), scores) == []
    judged = torch.tensor([True, False])
    other = items([0, 2, 3], [1, 3, 5])
    assert check(items([0, 2, 3], [-1, -1, -1]), other, judged=judged) == VERIFIED
    assert check(items([0, 1, -1], [-1, -1, -1]), items([0, 1, -1], [1, 3, 5]), judged=judged) == []


class TestCalls:
    """Which calls are compared."""

    @staticmethod
    def verifier(calls: int) -> tuple[Verifier, list[str], Callable[[], Tensor]]:
        lines: list[str] = []
        asked: list[str] = lines  # one list, to see the order

        def original() -> Tensor:
            asked.append("asked")
            return items([3, 2, 0], [4, 2, 0])

        return Verifier(calls, "Engine", lambda level, line: lines.append(line)), lines, original

    SELECTED = Selected(SCORES, items([0, 2, 3], [0, 2, 4]))

    def test_the_first_of_each_op(self) -> None:
        verifier, lines, original = self.verifier(2)
        for op in ("decode", "decode", "prefill", "decode", "prefill", "prefill"):
            verifier.check(op, original, self.SELECTED)
        done = [f"verified 2 calls of {op}" for op in ("decode", "prefill")]
        assert lines == ["asked", "asked", done[0], "asked", "asked", done[1]]

    def test_not_in_a_capture(self, monkeypatch: pytest.MonkeyPatch) -> None:
        verifier, lines, original = self.verifier(1)
        monkeypatch.setattr(verify, "capturing", lambda device: True)
        verifier.check("decode", original, self.SELECTED)
        assert lines == []

    def test_not_where_no_row_can_be_longer_than_k(self) -> None:
        verifier, lines, original = self.verifier(1)
        verifier.check("decode", original, Selected(SCORES[:, :3], self.SELECTED.items))
        assert lines == []

    def test_an_engine_that_fails_where_we_do_not(self) -> None:
        verifier, lines, _ = self.verifier(1)
        fail = Mock(side_effect=RuntimeError("no kernel\nfor this"))
        for _ in range(2):
            verifier.check("decode", fail, self.SELECTED)
        assert lines == ["not verified: Engine's own decode: RuntimeError: no kernel for this"]
        assert torch.equal(self.SELECTED.items, items([0, 2, 3], [0, 2, 4]))

    def test_all_results_of_a_call(self) -> None:
        slots = Selected(SCORES, items([0, 4, 6], [0, 4, 8]), positions=lambda rows, items: items // 2)
        theirs = items([6, 4, 0], [8, 4, 0])

        def original() -> None:
            self.SELECTED.items.copy_(items([3, 2, 0], [4, 2, 0]))
            slots.items.copy_(theirs)

        verifier, lines, _ = self.verifier(1)
        verifier.check("decode", original, self.SELECTED, slots)
        assert lines == ["verified 1 calls of decode"]
        assert torch.equal(slots.items, items([0, 4, 6], [0, 4, 8]))
        theirs[0, 2] = 2
        with pytest.raises(Differs, match="row 0 of 2: selected score 1 is 5, and 4 by"):
            self.verifier(1)[0].check("decode", original, self.SELECTED, slots)


@pytest.mark.parametrize(("value", "calls"), [(None, 0), ("", 0), ("0", 0), (" 64 ", 64)])
def test_the_variable(monkeypatch: pytest.MonkeyPatch, value: str | None, calls: int) -> None:
    monkeypatch.delenv("GVR_TOPK_VERIFY", raising=False)
    if value is not None:
        monkeypatch.setenv("GVR_TOPK_VERIFY", value)
    assert environment.verify_calls() == calls
    assert (Verifier.if_asked_for("Engine", print) is None) == (calls == 0)


@pytest.mark.parametrize("value", ["-1", "all", "1.5", "²"])
def test_a_variable_that_is_no_number(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("GVR_TOPK_VERIFY", value)
    with pytest.raises(ValueError, match="GVR_TOPK_VERIFY: wanted a number of calls, got"):
        environment.verify_calls()
