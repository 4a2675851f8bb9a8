"""Calls of `gvr_topk.distributed` for tests, and what each rank has to get, by a sort of the whole row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from gvr_topk import indexer_topk_decode
from gvr_topk.distributed import Shards, sharded_sample, sharded_topk
from gvr_topk.evaluation.oracle import sorted_row
from gvr_topk.sampling import sample

INF, NAN = torch.inf, torch.nan
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
POISON = 77
Case = dict[str, Any]


def places(rank: int, lengths: Sequence[int], ownership: str | int) -> np.ndarray[Any, Any]:
    """Positions in the row of the visible part of a rank, of parts of these lengths."""
    j = np.arange(lengths[rank])
    if isinstance(ownership, str):
        return j + sum(lengths[:rank])
    return (j // ownership) * len(lengths) * ownership + rank * ownership + j % ownership


def chosen(
    parts: Sequence[Tensor], lengths: Sequence[Tensor], k: int, ownership: str | int
) -> list[list[tuple[list[int], list[int]]]]:
    """For each row and rank, the positions in the row and in the part that a sort of the whole row chooses.

    They ascend.
    """
    found = []
    for row in range(len(parts[0])):
        visible = [
            min(max(int(length[row]), 0), part.shape[1]) for part, length in zip(parts, lengths, strict=True)
        ]
        where = [places(rank, visible, ownership) for rank in range(len(parts))]
        scores = [part[row, :n].float().numpy() for part, n in zip(parts, visible, strict=True)]
        at = np.concatenate(where)
        by_position = np.argsort(at)
        best = set(at[by_position][sorted_row(np.concatenate(scores)[by_position], k)].tolist())
        of_row = []
        for each in where:
            mine = [(int(position), j) for j, position in enumerate(each.tolist()) if position in best]
            of_row.append(([position for position, _ in mine], [j for _, j in mine]))
        found.append(of_row)
    return found


def some_scores(rng: np.random.Generator, rows: int, width: int) -> Tensor:
    """Rows of one of five kinds: distinct, tied, all equal, masked, or with all that is not a number."""
    values = rng.standard_normal((rows, width)).astype(np.float32)
    kind = rng.integers(5)
    if kind == 1:
        values = rng.integers(0, 3, (rows, width)).astype(np.float32)
    elif kind == 2:
        values[:] = 1.5
    elif kind == 3:
        values[rng.random((rows, width)) < 0.7] = -np.inf
    elif kind == 4:
        values = rng.choice(np.array([NAN, INF, -INF, 0.0, -0.0, 1e-40, 1.0], np.float32), (rows, width))
    return torch.from_numpy(values)


def some_case(rng: np.random.Generator, world: int) -> Case:
    """Draw a call: parts of every rank, with their lengths, and the options."""
    rows = int(rng.integers(1, 4))
    ownership = rng.choice(["contiguous", "1", "3", "16", "200"])
    widths = rng.integers(0, 90, world) if rng.random() < 0.3 else np.full(world, rng.integers(1, 150))
    dtype = DTYPES[rng.integers(3)]
    one = rng.random() < 0.2  # all large scores on one rank
    parts = [
        (some_scores(rng, rows, int(width)) + 100 * (one and rank == world - 1)).to(dtype)
        for rank, width in enumerate(widths)
    ]
    ends = [
        np.full(rows, width) if rng.random() < 0.4 else rng.integers(-2, width + 4, rows) for width in widths
    ]
    k = int(rng.choice([1, 2, 7, 33, 64, 150, 333]))
    return {
        "parts": parts,
        "lengths": [torch.tensor(end, dtype=torch.int32) for end in ends],
        "k": k,
        "ownership": ownership if ownership == "contiguous" else int(ownership),
        "record": int(rng.choice([max(4, 2 * world), 2 * world + 3, 16, 40])),
        "gather": bool(rng.random() < 0.3),
        "peer_memory": bool(rng.random() < 0.5),
        "expected": some_guesses(rng, k, [np.clip(end, 0, None) for end in ends]),
        "selected": rng.random(world) < 0.3,
    }


def some_guesses(rng: np.random.Generator, k: int, lengths: list[Any]) -> list[Tensor | None]:
    """Draw what each rank expects to have of each row: nothing, in proportion to the lengths, or anything."""
    kind = rng.integers(3)
    if kind == 0:
        return [None] * len(lengths)
    if kind == 1:
        total = sum(lengths) + 1
        return [torch.tensor(k * length // total, dtype=torch.int32) for length in lengths]
    return [torch.tensor(rng.integers(-50, 400, len(length)), dtype=torch.int32) for length in lengths]


def call(case: Case, group: dist.ProcessGroup | None = None, device: str = "cpu") -> tuple[Tensor, ...]:
    """Run a case as one rank, with poisoned outputs that are wider than k."""
    shards = Shards(
        group, case["ownership"], device, record=case["record"], peer_memory=case.get("peer_memory", True)
    )
    part, guess = case["parts"][shards.rank], case["expected"][shards.rank]
    length = case["lengths"][shards.rank].to(device)
    rows, k = len(part), case["k"]
    wide = torch.full((rows, part.shape[1] + 3), INF, dtype=part.dtype, device=device)
    wide[:, : part.shape[1]] = part
    out, local = (torch.full((rows, k + 2), POISON, dtype=torch.int32, device=device) for _ in range(2))
    counts = torch.full((rows,), POISON, dtype=torch.int32, device=device)
    selected = bool(case["selected"][shards.rank]) if "selected" in case else False
    if selected:
        indexer_topk_decode(part.to(device), length, k, out=out[:, :k])
    returned = sharded_topk(
        wide[:, : part.shape[1]],
        length,
        k,
        shards=shards,
        out=out,
        local=local,
        counts=counts,
        gather=case["gather"],
        expected=None if guess is None else guess.to(device),
        selected=selected,
    )
    assert returned.positions is out and returned.local is local and returned.counts is counts
    return out.cpu(), local.cpu(), counts.cpu()


def expected(case: Case, rank: int) -> tuple[Tensor, ...]:
    """What a rank has to get, poison included."""
    found = chosen(case["parts"], case["lengths"], case["k"], case["ownership"])
    out, local = (torch.full((len(found), case["k"] + 2), -1, dtype=torch.int32) for _ in range(2))
    out[:, case["k"] :] = local[:, case["k"] :] = POISON
    for row, ranks in enumerate(found):
        positions, columns = ranks[rank]
        if case["gather"]:
            positions = sorted(position for each, _ in ranks for position in each)
        out[row, : len(positions)] = torch.tensor(positions)
        local[row, : len(columns)] = torch.tensor(columns)
    return out, local, torch.tensor([len(ranks[rank][1]) for ranks in found], dtype=torch.int32)


def share(best: Tensor, turn: int, world: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """What a rank has to get of chosen positions, ``[rows, k]``, `turn` of which go to each rank in turn."""
    mine = (best >= 0) & (best // turn % world == rank)
    positions = torch.sort(torch.where(mine, best, 1 << 30), dim=1).values
    positions = torch.where(positions < 1 << 30, positions, -1)
    local = torch.where(positions >= 0, positions // (turn * world) * turn + positions % turn, -1)
    return positions, local, mine.sum(1, dtype=torch.int32)


def cut(whole: Tensor, world: int, rank: int, ownership: str | int, draw: int) -> Tensor:
    """Columns of a rank: every part that the ownership gives it, or a stretch of any length."""
    width = whole.shape[1]
    if isinstance(ownership, int):
        return whole[:, (torch.arange(width) // ownership) % world == rank]
    ends = sorted(torch.randperm(width - 1, generator=torch.Generator().manual_seed(draw))[: world - 1] + 1)
    return whole[:, [0, *ends][rank] : [*ends, width][rank]]


def some_logits(rng: np.random.Generator, rows: int, width: int) -> Tensor:
    """Logits of several kinds, and sometimes the first ones NaN and all others masked."""
    logits = 3 * some_scores(rng, rows, width)
    if rng.random() < 0.3:
        logits[0] = -INF
        logits[0, : rng.integers(width + 1)] = NAN
    return logits


def some_draws(rng: np.random.Generator, world: int) -> Case:
    """Draw logits, their ownership and the parameters of every row, some of them in slots."""
    rows, width = int(rng.integers(1, 5)), int(rng.integers(5 * world, 120))
    count = rows + 2
    parameters: Case = {
        "temperature": torch.tensor(rng.choice([0.0, 0.3, 1.0, 2.5], count), dtype=torch.float32),
        "top_k": torch.tensor(rng.choice([-1, 0, 1, 2, 7, 20, 500], count), dtype=torch.int32),
        "top_p": torch.tensor(rng.choice([1.0, 0.9, 0.4, 0.0], count), dtype=torch.float32),
        "min_p": torch.tensor(rng.choice([0.0, 0.01, 0.3], count), dtype=torch.float32),
        "seeds": torch.tensor(rng.integers(-(2**62), 2**62, count)),
    }
    if rng.random() < 0.5:
        parameters["slots"] = torch.tensor(rng.integers(-1, count, rows), dtype=torch.int32)
    else:
        parameters = {name: values[:rows] for name, values in parameters.items()}
    if rng.random() < 0.3:
        parameters["top_k"] = int(rng.choice([0, 1, 3, 500]))
    return {
        "logits": some_logits(rng, rows, width).to(DTYPES[rng.integers(3)]),
        "ownership": ["contiguous", 1, 5][rng.integers(3)],
        "most": int(rng.choice([1, 2, 9, 40])),
        "draw": int(rng.integers(1000)),
        "parameters": {
            **parameters,
            "positions": torch.tensor(rng.integers(0, 10**6, rows)),
            "order": str(rng.choice(["vllm", "hf", "temperature_last"])),
        },
    }


def draw_as(case: Case, group: dist.ProcessGroup | None = None, device: str = "cpu") -> Tensor:
    """Draw the tokens of a case as one rank."""
    shards = Shards(group, case["ownership"], device)
    part = cut(case["logits"], shards.world, shards.rank, case["ownership"], case["draw"])
    given = {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in case["parameters"].items()
    }
    return sharded_sample(part.contiguous().to(device), case["most"], shards=shards, **given).cpu()


def tokens(case: Case) -> Tensor:
    """Draw them of the whole row, where no row keeps more than the case allows."""
    parameters = dict(case["parameters"])
    top_k = torch.as_tensor(parameters["top_k"], dtype=torch.int32)
    top_k = torch.where((top_k < 1) | (top_k > case["most"]), case["most"], top_k).to(torch.int32)
    parameters["top_k"] = top_k if top_k.dim() else int(top_k)
    return sample(case["logits"], **parameters)
