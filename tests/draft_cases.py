"""Random calls of the op behind `gvr_topk.sampling.verify`, and a loop over their tokens."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gvr_topk.sampling.arguments import VerifyArguments

POISON = 77
ENDS = np.iinfo(np.int32)


def random_call(rng: np.random.Generator, device: str = "cpu") -> VerifyArguments:
    """Drafts that are often right, tokens of skipped rows, and starts of all kinds, some beyond the rows."""
    columns, requests = int(rng.choice([1, 2, 4, 33, 70])), int(rng.integers(0, 9))
    kind = rng.choice(["equal", "ragged", "any", "extreme"])
    rows = requests * columns if kind == "equal" else int(rng.integers(0, 200))
    drawn = np.where(rng.random(rows) < 0.005, -1, rng.integers(0, 3, rows))
    wrong = rng.choice([-1, 1, 5], rows)
    drafts = np.where(rng.random(rows) < rng.choice([0.7, 0.995]), np.roll(drawn, 1), wrong)
    wide_drawn, wide_drafts, wide_tokens = rng.random(3) < 0.5
    if wide_drafts:  # only the upper half of some is wrong
        drafts = np.where(rng.random(rows) < 0.005, drafts + 2**32, drafts)
    starts = rng.integers(-3, rows + 4, requests + 1)
    if kind == "ragged":
        starts = np.sort(starts)
    elif kind == "extreme":
        starts = np.where(rng.random(requests + 1) < 0.5, starts, rng.choice([ENDS.min, ENDS.max]))

    def ids(values: Any, wide: bool) -> Tensor:
        return torch.as_tensor(values).to(device, torch.int64 if wide else torch.int32)

    return VerifyArguments(
        ids(drawn, wide_drawn),
        ids(drafts, wide_drafts),
        None if kind == "equal" else ids(starts, wide=False),
        ids(torch.full((requests, columns + 1), POISON), wide_tokens)[:, :columns],
        ids(torch.full((requests,), POISON), wide=False),
    )


def accepted(call: VerifyArguments) -> tuple[list[list[int]], list[int]]:
    """Tokens of each request, with what stays in memory behind them, and lengths: one row after the other."""
    drawn, drafts, columns = call.drawn.tolist(), call.draft_tokens.tolist(), call.tokens.shape[1]
    starts = range(0, len(drawn) + 1, columns) if call.starts is None else call.starts.tolist()
    tokens, lengths = [], []
    for first, end in pairwise(starts):
        taken: list[int] = []
        for row in range(first, end):
            if len(taken) == columns or not 0 <= row < len(drawn) or drawn[row] < 0:
                break
            if taken and drafts[row] != taken[-1]:
                break
            taken.append(drawn[row])
        tokens.append([*taken, *[-1] * (columns - len(taken)), POISON])
        lengths.append(len(taken))
    return tokens, lengths


def written(call: VerifyArguments) -> tuple[list[list[int]], list[int]]:
    """What a call has written, in the form of `accepted`."""
    whole = call.tokens._base
    return [] if whole is None else whole.tolist(), call.lengths.tolist()
