"""Measures one version of the package: a process of ``python -m eval side-by-side``, which starts several.

    python eval/common/side_by_side_worker.py JOB.json RESULT.json

Nothing here may import ``gvr_topk`` but `import_version`, or every version would be the checkout's.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import json
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eval.common.package_version import Hint, check_library, import_version, new_hint, state_api
from eval.common.trace_scores import trace_scores
from eval.kernel_timing import POISON, Chain, ChainRun, Prepared, chain_of, gaussian_chain, steps_for

K = 2048
KEEP = 0.9
"""Variance that survives a step of a Gaussian chain."""

LEAST_STEPS = 40
MOST_STEPS = 512
"""Timed steps of a Gaussian chain, between which the L2 cache decides."""

REPLAYS = 5
CHECKED_STEPS = 64
"""Steps whose results are compared at least, where a chain has so many."""

WITH_ROW_SLOT = "state and row_slot"
WITHOUT_ROW_SLOT = "state"
NO_HINT = "no hint"
WAYS = (WITH_ROW_SLOT, WITHOUT_ROW_SLOT, NO_HINT)
"""What the op gets beside scores, lengths and a place for its results."""

SPENT_SHAPE = "8192x8"
"""Rows of the graph that is replayed before any that counts: a process's first one is faster than all later
ones."""


@dataclass(frozen=True)
class Job:
    """What a worker does.

    Attributes
    ----------
    folder : str
        Holds the version's ``gvr_topk/``.
    device : str
        ``cuda``, or ``cpu`` to try the tool itself.
    shapes : list of str
        Gaussian chains, as ``8192x1``: row length by rows of a step.
    traces : list of str
        Files of traces.
    """

    folder: str
    device: str
    shapes: list[str]
    traces: list[str]


def gaussian_cell(shape: str, device: str) -> Chain:
    """A Gaussian chain of a shape such as ``8192x1``."""
    n, batch = map(int, shape.split("x"))
    timed = steps_for(n * batch * torch.float32.itemsize, device, LEAST_STEPS, MOST_STEPS)
    return gaussian_chain(n, batch, K, keep=KEEP, device=device, timed=timed)


def trace_cell(path: Path, device: str) -> Chain:
    """The steps of a trace, over and over until they outgrow the L2 cache."""
    with np.load(path, allow_pickle=False) as archive:
        steps = trace_scores(archive["K"], archive["Q"], archive["W"], device)
    return chain_of(steps, K, device=device)


def cells(job: Job) -> Iterator[tuple[str, Chain]]:
    """Every cell's name and chain, made when it is asked for."""
    for shape in job.shapes:
        yield f"gauss {shape}", gaussian_cell(shape, job.device)
    for path in map(Path, job.traces):
        yield f"trace {path.stem}", trace_cell(path, job.device)


def exact_choice(rows: Tensor, lengths: Tensor, k: int) -> Tensor:
    """The op's contract by a sort of torch, which shares no code with any version.

    Parameters
    ----------
    rows : Tensor, ``[rows, width]``, float32
        Scores.
    lengths : Tensor, ``[rows]``, int32
        Visible scores of each row.
    k : int
        Items per row.

    Returns
    -------
    Tensor, ``[rows, k]``, int32
        Ascending positions of the largest scores, of equal ones those that come first, and then -1.
    """
    width, ends = rows.shape[1], lengths[:, None]
    past = torch.arange(width, device=rows.device) >= ends
    # Adding zero makes -0.0 equal to 0.0 for a sort by bits. What lies past a row's length comes behind a
    # visible -inf, because the sort is stable.
    scores = (rows + 0.0).masked_fill(past, float("-inf"))
    order = torch.sort(scores, dim=1, descending=True, stable=True).indices[:, :k]
    order = torch.nn.functional.pad(order, (0, max(0, k - width)), value=width)
    order = order.masked_fill(order >= ends, width).sort(dim=1).values
    return order.masked_fill(order == width, -1).to(torch.int32)


class Expected:
    """The exact results of steps spread evenly over a chain's timed ones.

    Attributes
    ----------
    steps : Tensor, ``[checked]``, int64
        Which steps.
    rows : int
        Rows of all of these steps.
    """

    def __init__(self, chain: Chain) -> None:
        chosen = chain.timed[:: max(1, len(chain.timed) // CHECKED_STEPS)]
        self.steps = torch.tensor(list(chosen), device=chain.logits.device)
        self.rows = len(chosen) * chain.batch
        answers = [exact_choice(chain.logits[step], chain.lengths_of(step), chain.k) for step in chosen]
        self._answers = torch.stack(answers)

    def differences(self, results: Tensor) -> Tensor:
        """How many of the rows differ, as a number on the device."""
        return (results[self.steps] != self._answers).any(dim=2).sum()


def prepare(package: ModuleType, chain: Chain, way: str) -> Prepared:
    """Bind a version's op to a chain, called in one of `WAYS`."""
    device = chain.logits.device
    results = torch.full((chain.count, chain.batch, chain.k), POISON, dtype=torch.int32, device=device)
    hint = Hint() if way == NO_HINT else new_hint(package, chain.batch, chain.k, device)
    options = dict(hint.options)
    if way == WITH_ROW_SLOT:
        order = torch.randperm(chain.batch, generator=torch.Generator().manual_seed(chain.batch))
        options["row_slot"] = order.to(device, torch.int32)

    def launch(step: int) -> None:
        package.indexer_topk_decode(
            chain.logits[step], chain.lengths_of(step), chain.k, out=results[step], **options
        )

    return Prepared(launch, results, hint.tensors)


def measure(package: ModuleType, chain: Chain, expected: Expected, way: str) -> dict[str, Any]:
    """Time a version on a chain, called in one of `WAYS`, and compare its results after each replay.

    Returns
    -------
    dict
        ``us`` per launch, None where it failed; ``steps``; ``rows`` compared in all replays and ``wrong``
        ones among them; ``note``, why it failed.
    """
    result: dict[str, Any] = {"us": None, "steps": len(chain.timed), "rows": 0, "wrong": 0, "note": ""}
    wrong: list[Tensor] = []
    try:
        prepared = prepare(package, chain, way)
        run = ChainRun(chain, prepared)
        us = run.time(REPLAYS, after=lambda: wrong.append(expected.differences(prepared.results)))
        result["wrong"] = int(torch.stack(wrong).sum())
        result["rows"] = len(wrong) * expected.rows
        result["us"] = round(us, 4)
    except (RuntimeError, ValueError, TypeError) as error:
        first, *_ = str(error).split("\n")
        result["note"] = f"{type(error).__name__}: {first}"
    return result


def run(job: Job) -> dict[str, Any]:
    """Measure one version in all cells.

    Returns
    -------
    dict
        ``api``, how the version carries a state, and ``results`` by cell and way.
    """
    package = import_version(Path(job.folder))
    if job.device == "cuda":
        check_library(package, Path(job.folder))
        chain = gaussian_cell(SPENT_SHAPE, job.device)
        measure(package, chain, Expected(chain), NO_HINT)
    results = []
    for name, chain in cells(job):
        expected = Expected(chain)
        results += [{"cell": name, "way": way, **measure(package, chain, expected, way)} for way in WAYS]
        if job.device == "cuda":
            del chain, expected
            torch.cuda.empty_cache()  # the next chain's buffers have other sizes
    return {"api": state_api(package), "results": results}


def main(arguments: list[str]) -> None:
    """Read a job, and write what came out of it."""
    given, out = map(Path, arguments)
    job = Job(**json.loads(given.read_text()))
    out.write_text(json.dumps(run(job)))


if __name__ == "__main__":
    main(sys.argv[1:])
