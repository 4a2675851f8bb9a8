"""Time of each phase inside the kernel.

    python -m eval phases --out out/phase_timing.json

Needs a library built with ``-DGVR_PHASE_TIMING=ON``, whose kernels stamp the SM clock at phase boundaries.
Every launch finds its row cold in L2 (the rows rotate over several times its size), its code warm, and the
step before's result as its hint. Cycles are medians over the launches; microseconds are cycles at the SM
clock measured in the same run. A launch whose guess missed goes through a phase more than once and has more
stamps than the plain sequence: such launches are counted, and timed as a whole only.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from eval.bench.bench_cases import Cell, all_cells, load_sources, make_chain
from eval.bench.bench_report import SHAPES
from eval.bench.kernel_timing import Chain, ChainRun
from eval.bench.our_kernels import Variant, prepare_ours
from eval.common.machine import describe_machine, sm_clock_mhz, write_json
from eval.common.options import Commit, Out, TraceFolder, require_gpu, require_writable
from eval.common.status import InputError
from eval.common.tables import markdown_table
from gvr_topk.constants import PHASE_STAMPS
from gvr_topk.policy import plan

AUTO, PAPER_GVR = "auto", "paper_gvr"
CALLS = ((PAPER_GVR, False), (PAPER_GVR, True), (AUTO, False))
"""Paths, and whether the first threshold of the paper's kernel comes from the quantile."""

PHASES: dict[str, tuple[str, ...]] = {
    "paper_gvr": ("P1 pre-index statistics", "P2 threshold search", "P3 collect", "P4 refine"),
    "cluster": ("load, guess", "classify, list", "exchange", "k-th value", "count", "emit"),
    "small_row": ("load", "count", "choose", "write"),
}
"""Phases between consecutive stamps of a launch whose first guess was good, by kernel. Path ``auto`` takes
``small_row`` for rows that one CTA holds, and ``cluster`` stands for all kernels that it takes for others."""

WARM_SWEEPS = 2


def phase_cycles(clocks: npt.NDArray[np.int64], phases: Sequence[str]) -> dict[str, Any]:
    """Median cycles of each phase of the plain sequence, which has one stamp more than phases.

    `clocks` are those of the SM at each boundary, ``[launches, stamps]``, 0 where no stamp was taken.
    """
    taken = (clocks != 0).sum(axis=1)
    if not taken.any():
        raise InputError("no stamps: wanted a library built with -DGVR_PHASE_TIMING=ON")
    plain = clocks[taken == len(phases) + 1][:, : len(phases) + 1]
    rest = clocks[(taken != len(phases) + 1) & (taken > 1)]
    spans = np.diff(plain, axis=1)
    last = rest.max(axis=1) - rest[:, 0] if len(rest) else np.empty(0)
    return {
        "launches": len(clocks),
        "plain": len(plain),
        "cycles": dict(zip(phases, np.median(spans, axis=0).tolist(), strict=True)) if len(plain) else {},
        "total": float(np.median(plain[:, -1] - plain[:, 0])) if len(plain) else None,
        "other_total": float(np.median(last)) if len(rest) else None,
    }


def kernel_of(chain: Chain, path: str) -> str:
    """Key of `PHASES` for a path on these rows."""
    if path == PAPER_GVR:
        return path
    device = torch.cuda.get_device_properties(chain.logits.device)
    made = plan(
        rows=chain.batch,
        width=chain.logits.shape[2],
        k=chain.k,
        dtype=chain.logits.dtype,
        path=path,
        sm_count=device.multi_processor_count,
        arch=10 * device.major + device.minor,
    )
    return "small_row" if made.family == "small_row" else "cluster"


def measure(chain: Chain, path: str, quantile: bool, clock_mhz: float) -> dict[str, Any]:
    """Phases of one path on a chain, and the time of the same launches in a graph."""
    shape = (chain.count, chain.batch, PHASE_STAMPS)
    clocks = torch.zeros(shape, dtype=torch.int64, device="cuda")
    variant = Variant(path=path, indices=path == PAPER_GVR)
    prepared = prepare_ours(chain, variant, quantile=quantile, clocks=clocks)
    run = ChainRun(chain, prepared)
    for _ in range(1 + WARM_SWEEPS):
        clocks.zero_()
        run.begin()
        for step in chain.timed:
            prepared.launch(step)
    torch.cuda.synchronize()
    kernel = kernel_of(chain, path)
    stamps = clocks[chain.lead :].reshape(-1, PHASE_STAMPS).cpu().numpy()
    figures = phase_cycles(stamps, PHASES[kernel])
    figures["kernel"] = kernel
    figures["us"] = {name: cycles / clock_mhz for name, cycles in figures["cycles"].items()}
    figures["total_us"] = None if figures["total"] is None else figures["total"] / clock_mhz
    figures["graph_us"] = run.time(5, 0.2)
    return figures


def table(results: Sequence[dict[str, Any]], kernel: str) -> str:
    """Microseconds of a launch and its phases, medians of launches whose first guess was good."""
    rows = [
        [
            f"{result['rows']}{', quantile' if result['quantile'] else ''}",
            *("-" if us is None else f"{us:.2f}" for us in (result["graph_us"], result["total_us"])),
            *([f"{us:.2f}" for us in result["us"].values()] or ["-"] * len(PHASES[kernel])),
            f"{result['plain']} of {result['launches']}",
        ]
        for result in results
        if result["kernel"] == kernel
    ]
    return f"{kernel}: us\n{markdown_table(['rows', 'graph', 'total', *PHASES[kernel], 'launches'], rows)}"


def main(out: Out = Path("out/phase_timing.json"), traces: TraceFolder = None, commit: Commit = "") -> None:
    """Measure every path on the paper's layers, traces and Gaussian rows, and print the tables."""
    require_gpu()
    require_writable(out)
    sources = load_sources(traces)
    chosen = [cell for cell in all_cells(sources) if cell.group in ("layer", "trace")]
    chosen += [Cell("main", n, batch) for n, batch in SHAPES]
    clock = sm_clock_mhz()
    results = []
    for cell in chosen:
        chain = make_chain(cell, sources)
        name = cell.rows if cell.group != "main" else f"gauss {cell.n:,} x {cell.batch}"
        for path, quantile in CALLS:
            try:
                figures = measure(chain, path, quantile, clock)
            except InputError:
                raise
            except (RuntimeError, ValueError) as error:
                print(f"{name}, path {path}: {str(error).splitlines()[0]}", flush=True)
                continue
            results.append({"cell": cell.as_json(), "rows": name, "quantile": quantile, **figures})
        del chain
        torch.cuda.empty_cache()
    machine = describe_machine(commit)
    write_json(
        out, {"format": "gvr_topk.phase_timing/2", "machine": machine, "clock_mhz": clock, "results": results}
    )
    print(f"SM clock {clock:.0f} MHz")
    for kernel in dict.fromkeys(result["kernel"] for result in results):
        print(table(results, kernel))
