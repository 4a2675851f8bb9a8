"""Compare the first calls of each op with what the engine itself selects, for ``GVR_TOPK_VERIFY=N``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gvr_topk.integrations._kit import environment
from gvr_topk.integrations._kit.device import capturing
from gvr_topk.integrations._kit.log import Say, one_line

PADDING = -1
NOWHERE = -2
"""Position of an item that is nowhere in the scores."""

ROWS_AT_ONCE = 64
"""Rows whose scores are copied at once: a call of a long prompt has thousands of wide rows."""


class Differs(Exception):
    """The engine's own result has other values; the message says where."""


class Selected(NamedTuple):
    """A selection that our op has made."""

    scores: Tensor  # ``[rows, width]``
    items: Tensor
    """``[rows, k]``, int32: the result in the engine's memory, which is positions in each row's window, or
    what the engine has for them."""
    starts: Tensor | None = None  # ``[rows]``: first column of each row's window; default 0
    positions: Callable[[Tensor, Tensor], Tensor] | None = None
    """Takes the numbers of some rows and their items, and returns the positions of these: `PADDING` for an
    item that is none, `NOWHERE` for one that no position has. Default: items are positions."""
    judged: Tensor | None = None
    """``[rows]``, bool: rows that the engine promises something about; default all."""


class Verifier:
    """Compares the first calls of each op by values.

    Only calls outside of a capture with rows that may be longer than k are compared, and a call counts if it
    selected k items in some row without NaN: engines promise nothing about NaN.
    """

    def __init__(self, calls: int, engine: str, say: Say) -> None:
        self._calls = calls
        self._engine = engine
        self._say = say
        self._left: dict[str, int] = {}

    @classmethod
    def if_asked_for(cls, engine: str, say: Say) -> Verifier | None:
        """Return a verifier if ``GVR_TOPK_VERIFY`` asks for one."""
        calls = environment.verify_calls()
        return cls(calls, engine, say) if calls else None

    def check(self, op: str, original: Callable[[], object], *selected: Selected) -> None:
        """Compare a call, if it is one of the first; `op` is what the log calls the op.

        `original` lets the engine select. It either writes into the items of all `selected`, or returns the
        items of the only one in a tensor of its own. Raises `Differs` if the engine has selected other
        values; what is in the items is then of no use.
        """
        scores, items, *_ = selected[0]
        if scores.shape[1] <= items.shape[1] or not self.compares(op, scores.device):
            return
        ours = [one.items.clone() for one in selected]
        for one in selected:
            one.items.fill_(PADDING)  # the engines fill their buffers so

        def agree(returned: object) -> bool:
            theirs = [one.items for one in selected]
            if isinstance(returned, Tensor):
                theirs = [returned[:, : items.shape[1]]]
            agreed = [self._agree(*results) for results in zip(selected, ours, theirs, strict=True)]
            return all(agreed)

        self.compare(op, original, agree)
        for one, kept in zip(selected, ours, strict=True):
            one.items.copy_(kept)

    def compares(self, op: str, device: torch.device) -> bool:
        """Whether a call of an op on a device is one of those to compare."""
        return self._left.setdefault(op, self._calls) > 0 and not capturing(device)

    def compare(self, op: str, original: Callable[[], Any], agree: Callable[[Any], bool]) -> None:
        """Compare one call, which `original` lets the engine compute, of an op with other results than items.

        `agree` takes what `original` returned, and returns whether this call counts, or raises `Differs`.
        """
        try:
            agreed = agree(original())
        except Differs:
            raise
        except Exception as error:  # ours can still serve
            self._left[op] = 0
            self._say("warning", f"not verified: {self._engine}'s own {op}: {one_line(error)}")
            return
        if agreed:
            self._left[op] -= 1
            if self._left[op] == 0:
                self._say("info", f"verified {self._calls} calls of {op}")

    def _agree(self, selected: Selected, ours: Tensor, theirs: Tensor) -> bool:
        """Return whether a row of k items was compared; raise `Differs` if a row has other values."""
        ours, theirs = ours.sort(1).values, theirs.to(ours.dtype).clamp(min=PADDING).sort(1).values
        twice = ((ours[:, 1:] == ours[:, :-1]) & (ours[:, 1:] != PADDING)).any(1)
        apart = (ours != theirs).any(1) | twice  # the other rows have the same set
        full = ours.ge(0).all(1)
        if selected.judged is not None:
            apart, full = apart & selected.judged, full & selected.judged
        for rows in apart.nonzero().flatten().split(ROWS_AT_ONCE):
            mine, mine_there = _values(selected, rows, ours[rows])
            other, other_there = _values(selected, rows, theirs[rows])
            ordered = ~(mine.isnan() | other.isnan()).any(1)
            full[rows] &= ordered
            counts = mine_there.sum(1) != other_there.sum(1)
            outside = (ours[rows].ne(PADDING) & ~mine_there).any(1)
            values = (mine != other).any(1)
            differs = (twice[rows] | outside | (ordered & (counts | values))).nonzero().flatten()
            if len(differs) == 0:
                continue
            at = int(differs[0])
            if twice[rows][at]:
                what = "an item is selected twice"
            elif outside[at]:
                what = "an item is outside of the row"
            elif counts[at]:
                has, had = int(mine_there[at].sum()), int(other_there[at].sum())
                what = f"{has} items are selected, and {had} by {self._engine}"
            else:
                rank = int((mine[at] != other[at]).nonzero()[0])
                mine_is, other_is = float(mine[at, rank]), float(other[at, rank])
                what = f"selected score {rank + 1} is {mine_is:g}, and {other_is:g} by {self._engine}"
            raise Differs(f"row {int(rows[at])} of {len(ours)}: {what}")
        return bool(full.any())


def _values(selected: Selected, rows: Tensor, items: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scores of items of some rows in descending order, and which items have a score.

    An item without a score stands as ``-inf``.
    """
    positions = items if selected.positions is None else selected.positions(rows, items)
    columns = positions.long()
    if selected.starts is not None:
        columns = columns + selected.starts[rows, None]
    there = (positions >= 0) & (columns >= 0) & (columns < selected.scores.shape[1])
    values = selected.scores[rows].gather(1, torch.where(there, columns, 0)).float()
    return torch.where(there, values, -torch.inf).sort(1, descending=True).values, there
