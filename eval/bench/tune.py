"""Time every cluster size over length, batch and dtype: the sweep behind the plan in ``policy.h``.

    python -m eval sweep --out out/tune.json

Prints, for each dtype, the fastest number of CTAs per row at each N x batch, what the plan chooses there
and what that costs. Rows are a chain of Gaussian steps of which 90 % of the variance survives, cold in L2.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from eval.bench.bench_cases import KEEP, LENGTHS, K
from eval.bench.kernel_timing import ChainRun, gaussian_chain
from eval.bench.our_kernels import prepare_ours
from eval.common.machine import describe_machine, write_json
from eval.common.options import Commit, Out, require_gpu, require_writable
from eval.common.outputs import DTYPES
from eval.common.tables import markdown_table
from gvr_topk.policy import plan

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
CTAS = (1, 2, 4, 8, 16)
REPLAYS = 7
BUDGET_SECONDS = 0.06


def offered(rows: int, width: int, dtype: torch.dtype, sm_count: int) -> tuple[list[int], int]:
    """Cluster sizes that can serve a shape, and the one the plan chooses."""
    sizes = []
    for ctas in CTAS:
        try:
            plan(rows=rows, width=width, k=K, dtype=dtype, sm_count=sm_count, ctas_per_row=ctas)
        except ValueError:
            continue
        sizes.append(ctas)
    return sizes, plan(rows=rows, width=width, k=K, dtype=dtype, sm_count=sm_count).ctas_per_row


def measure(n: int, batch: int, dtype: str, sm_count: int) -> dict[str, Any]:
    """Microseconds of each cluster size at one shape."""
    chain = gaussian_chain(n, batch, K, keep=KEEP, dtype=DTYPES[dtype])
    sizes, planned = offered(batch, chain.logits.shape[2], DTYPES[dtype], sm_count)
    times = {}
    for ctas in sizes:
        prepared = prepare_ours(chain, ctas_per_row=ctas)
        times[str(ctas)] = ChainRun(chain, prepared).time(REPLAYS, BUDGET_SECONDS)
    return {"n": n, "batch": batch, "dtype": dtype, "planned": planned, "us": times}


def regret(shape: dict[str, Any]) -> float:
    """Time of the planned size over the time of the best."""
    return float(shape["us"][str(shape["planned"])] / min(shape["us"].values()))


def policy_table(shapes: Sequence[dict[str, Any]], dtype: str) -> str:
    """Best CTAs per row and its time; where the plan chooses another, that one and its cost."""
    entries = {(shape["n"], shape["batch"]): _entry(shape) for shape in shapes if shape["dtype"] == dtype}
    lengths, batches = (sorted({shape[at] for shape in entries}) for at in (0, 1))
    rows = [[f"{n:,}", *(entries.get((n, batch), "-") for batch in batches)] for n in lengths]
    title = f"{dtype}: best CTAs per row: us (plan: CTAs, times the best)"
    return f"{title}\n{markdown_table(['N, batch', *map(str, batches)], rows)}"


def _entry(shape: dict[str, Any]) -> str:
    best = min(shape["us"], key=lambda ctas: float(shape["us"][ctas]))
    planned = "" if int(best) == shape["planned"] else f" ({shape['planned']}, {regret(shape):.2f})"
    return f"{best}: {shape['us'][best]:.1f}{planned}"


def report(data: dict[str, Any]) -> str:
    """Tables of a sweep, and the shapes at which the plan costs most."""
    dtypes = dict.fromkeys(shape["dtype"] for shape in data["shapes"])
    worst = sorted(data["shapes"], key=regret, reverse=True)[:5]
    lines = [
        f"plan over best {regret(s):.2f} at N = {s['n']:,}, batch {s['batch']}, {s['dtype']}" for s in worst
    ]
    return "\n".join([*(policy_table(data["shapes"], dtype) for dtype in dtypes), *lines])


def main(
    out: Out = Path("out/tune.json"),
    lengths: Annotated[str, typer.Option(help="Row lengths.")] = ",".join(map(str, LENGTHS)),
    batches: Annotated[str, typer.Option(help="Rows per launch.")] = ",".join(map(str, BATCHES)),
    dtypes: Annotated[str, typer.Option(help="fp32, bf16, fp16.")] = "fp32,bf16",
    seconds: Annotated[float, typer.Option(help="Start no shape after so long.")] = 510.0,
    commit: Commit = "",
) -> None:
    """Sweep and print."""
    require_gpu()
    if unknown := set(dtypes.split(",")) - set(DTYPES):
        raise typer.BadParameter(f"--dtypes: wanted some of {','.join(DTYPES)}, got {','.join(unknown)}")
    require_writable(out)
    started = time.monotonic()
    machine = describe_machine(commit)
    data: dict[str, Any] = {
        "format": "gvr_topk.tune/1",
        "command": " ".join(["python -m eval sweep", *sys.argv[1:]]),
        "machine": machine,
        "k": K,
        "shapes": [],
    }
    shapes = [
        (d, int(b), int(n)) for d in dtypes.split(",") for b in batches.split(",") for n in lengths.split(",")
    ]
    for dtype, batch, n in shapes:
        if time.monotonic() - started > seconds:
            print(f"stopped after {seconds:.0f} s, before {dtype} batch {batch} N {n}")
            break
        data["shapes"].append(measure(n, batch, dtype, machine["multiprocessors"]))
        torch.cuda.empty_cache()
        write_json(out, data)
    print(report(data))
