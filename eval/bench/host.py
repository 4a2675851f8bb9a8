"""Measure what one eager call of the op costs the host, beside an empty launch and other projects' kernels.

    python -m eval host --out out/host_time.json --baseline-dir FOLDER

In a CUDA graph only the device's time counts; outside of one, a call also costs the time that Python, the
dispatcher and the launch take on the host. Every way to call is timed over many calls, one behind the other,
on the same preallocated tensors. The device is waited for after every 200 calls, outside of the time, so that
the queue of launches never fills. Ways take turns, and each figure is the median over the turns.

``hinted`` calls the op as the integrations do: ``state``, ``row_slot`` and ``out`` given. ``bare`` gets
``out`` alone, ``every_output`` also counts, indices and cache slots, and ``dispatcher`` is ``hinted`` as
`gvr_topk.bind` prepares it, without a Python function of the package. ``topk`` and ``unsorted`` are
`gvr_topk.topk`, which makes its results, as ``torch_topk`` does; ``torch`` is given them. ``zero_`` is
`torch.Tensor.zero_` of one element: hardly more than a launch.
"""

import functools
import statistics
import timeit
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from eval.bench import baselines
from eval.bench.baselines import BaselineError
from eval.bench.bench_cases import K
from eval.bench.kernel_timing import Chain
from eval.common.machine import describe_machine, write_json
from eval.common.options import BaselineFolder, Commit, Device, Out, require_device, require_writable
from eval.common.tables import markdown_table
from gvr_topk import TopkState, bind, indexer_topk_decode, topk

FORMAT = "gvr_topk.host_time/1"
CALLS = 2000
CALLS_PER_WAIT = 200
TURNS = 7
WARM_CALLS = 50
PAGE_SIZE = 64

Call = Callable[[], object]


def our_calls(chain: Chain) -> dict[str, Call]:
    """Ways to call the op on the first step of a chain."""
    device = chain.logits.device
    logits, lengths = chain.logits[0], chain.lengths_of(0)
    row_slot = torch.arange(chain.batch, dtype=torch.int32, device=device)
    words, whole = (TopkState(chain.batch, chain.k, device, keep_indices=keep) for keep in (False, True))
    pages = -(-logits.shape[1] // PAGE_SIZE)
    table = torch.arange(chain.batch * pages, dtype=torch.int32, device=device).view(chain.batch, pages)
    op = functools.partial(indexer_topk_decode, logits, lengths, chain.k)
    return {
        "hinted": functools.partial(op, out=chain.outputs()[0], state=words, row_slot=row_slot),
        "bare": functools.partial(op, out=chain.outputs()[0]),
        "every_output": functools.partial(
            op,
            out=chain.outputs()[0],
            state=whole,
            row_slot=row_slot,
            counts=torch.empty_like(row_slot),
            page_table=table,
            page_size=PAGE_SIZE,
            slots=chain.outputs()[0],
        ),
        "dispatcher": bind(logits, lengths, chain.k, out=chain.outputs()[0], state=words, row_slot=row_slot),
        "topk": functools.partial(topk, logits, chain.k),
        "unsorted": functools.partial(topk, logits, chain.k, sorted=False),
        "torch_topk": functools.partial(torch.topk, logits, chain.k),
        "zero_": torch.zeros(1, device=device).zero_,
    }


def their_calls(chain: Chain, folder: Path | None) -> tuple[dict[str, Call], dict[str, dict[str, str]]]:
    """Calls of the baselines that are there, and for each its version or why it is not."""
    calls: dict[str, Call] = {}
    described = {}
    for name, baseline in baselines.available(folder).items():
        shape = (chain.batch, chain.logits.shape[2], chain.k, chain.logits.dtype)
        why_not = baseline.why_not or baseline.refuse(*shape)
        if not why_not:
            try:
                calls[name] = functools.partial(baseline.prepare(chain).launch, 0)
            except (RuntimeError, BaselineError) as error:
                why_not = str(error).splitlines()[0]
        described[name] = {"version": baseline.version, "why_not": why_not}
    return calls, described


def microseconds(call: Call, calls: int, wait: Callable[[], object]) -> float:
    """Host time of a call, over so many, of which none waits for the device."""
    timer, taken = timeit.Timer(call), 0.0  # which lets no garbage be collected meanwhile
    for left in range(calls, 0, -CALLS_PER_WAIT):
        wait()
        taken += timer.timeit(min(left, CALLS_PER_WAIT))
    wait()
    return 1e6 * taken / calls


def measure(calls: Mapping[str, Call], wait: Callable[[], object], count: int) -> list[dict[str, Any]]:
    """Median host time of each way to call, and of every turn."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        microseconds(call, WARM_CALLS, wait)
    for _ in range(TURNS):
        for name, call in calls.items():
            taken[name].append(microseconds(call, count, wait))
    return [
        {
            "call": name,
            "us": round(statistics.median(times), 3),
            "turns_us": [round(each, 3) for each in times],
        }
        for name, times in taken.items()
    ]


def main(
    out: Out = Path("out/host_time.json"),
    length: Annotated[int, typer.Option(min=1, help="Short, or the device cannot keep up.")] = 8192,
    batch: Annotated[int, typer.Option(min=1, help="Rows.")] = 1,
    calls: Annotated[int, typer.Option(min=1, help="Calls of each way and turn.")] = CALLS,
    baseline_dir: BaselineFolder = None,
    device: Device = "cuda",
    commit: Commit = "",
) -> None:
    """Measure and print."""
    require_device(device)
    require_writable(out)
    lengths = torch.full((batch,), length, dtype=torch.int32, device=device)
    chain = Chain(torch.randn(1, batch, length, device=device), lengths, min(K, length), lead=0)
    theirs, described = their_calls(chain, baseline_dir)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    data: dict[str, Any] = {
        "format": FORMAT,
        "machine": describe_machine(commit, device),
        "n": length,
        "batch": batch,
        "k": chain.k,
        "calls": calls,
        "calls_per_wait": CALLS_PER_WAIT,
        "baselines": described,
        "results": measure({**our_calls(chain), **theirs}, wait, calls),
    }
    write_json(out, data)
    rows = [
        [each["call"], *(f"{us:.2f}" for us in (each["us"], min(each["turns_us"]), max(each["turns_us"])))]
        for each in data["results"]
    ]
    print(markdown_table(("call", "us", "least", "most"), rows))
    for name, its in described.items():
        if its["why_not"]:
            print(f"{name}: {its['why_not']}")
