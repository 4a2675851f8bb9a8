"""Time `topk` beside ``torch.topk`` at any k, and compare every item with a sort.

    python -m eval topk --out out/topk.json

Each figure is the time of one call, launched from a CUDA graph over several batches of Gaussian rows that
together are larger than the L2 cache, so rows come from DRAM. ``topk`` returns sorted items, as ``torch``,
which is ``torch.topk``, does, and ``smallest`` those of the other end; ``unsorted`` returns ascending
indices, ``mask`` marks the items, and ``op`` is the decode op with a fill of its lengths.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eval.bench.bench_report import topk_table
from eval.bench.sampling import DTYPES, cold_batches, microseconds
from eval.common.machine import describe_machine, write_json
from eval.common.options import Commit, Out, require_gpu, require_writable
from eval.common.tables import markdown_table
from gvr_topk import topk, topk_mask
from gvr_topk.layers import indexer_topk

FORMAT = "gvr_topk.topk/1"
SHAPES = ((64, 131_072), (1, 1 << 20), (16, 1 << 20), (1, 1 << 24))
K = (1, 64, 512, 2048, 4096, 16_384, 65_536, 131_072)
Call = Callable[[Tensor, int], Any]
OURS: dict[str, Call] = {
    "topk": topk,
    "smallest": functools.partial(topk, largest=False),
    "unsorted": functools.partial(topk, sorted=False),
    "mask": topk_mask,
}


def batches(rows: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    """Draw rows, the same in every run."""
    draw = torch.Generator("cuda").manual_seed(rows)
    return cold_batches(lambda: torch.randn(rows, width, device="cuda", generator=draw).to(dtype))


def wrong_items(given: Tensor, k: int) -> int:
    """Count what differs from a stable sort of the rows: items of `topk`, in each order, and marks."""
    results = {name: call(given, k) for name, call in OURS.items()}
    order = torch.sort(given, dim=1, descending=True, stable=True).indices[:, :k]
    ascending = order.sort(1).values
    mask = torch.zeros_like(given, dtype=torch.bool).scatter(1, order, True)
    values = given.gather(1, order)
    smallest = torch.sort(given, dim=1, stable=True)
    return int(
        (results["topk"].indices != order).sum()
        + (results["topk"].values != values).sum()
        + (results["smallest"].indices != smallest.indices[:, :k]).sum()
        + (results["smallest"].values != smallest.values[:, :k]).sum()
        + (results["unsorted"].indices != ascending).sum()
        + (results["unsorted"].values != given.gather(1, ascending)).sum()
        + (results["mask"] != mask).sum()
    )


def measure(given: list[Tensor], k: int) -> dict[str, Any]:
    """Time each call at one k, and check the first batch."""
    rows, width = given[0].shape
    calls: dict[str, Call] = {**OURS, "torch": torch.topk}
    if width <= 1 << 21:
        calls["op"] = lambda scores, k: indexer_topk(scores, None, k)
    times = {
        f"{name}_us": microseconds([functools.partial(call, each, k) for each in given])
        for name, call in calls.items()
    }
    dtype = str(given[0].dtype).removeprefix("torch.")
    return {
        "rows": rows,
        "width": width,
        "dtype": dtype,
        "k": k,
        **times,
        "wrong": sum(wrong_items(each, k) for each in given),
    }


def main(out: Out = Path("out/topk.json"), commit: Commit = "") -> int:
    """Time topk beside torch.topk."""
    require_writable(out)
    require_gpu()
    results = []
    for dtype in DTYPES.values():
        for rows, width in SHAPES:
            given = batches(rows, width, dtype)
            results += [measure(given, k) for k in K]
    data = {"format": FORMAT, "machine": describe_machine(commit), "results": results}
    write_json(out, data)
    print(markdown_table(*topk_table(results)))
    wrong = sum(each["wrong"] for each in results)
    print(f"{wrong} items are wrong")
    return int(wrong > 0)
