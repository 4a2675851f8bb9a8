"""Time the sampler beside PyTorch, and compare its tokens with the CPU implementation.

    python -m eval sampling --out out/sampling.json

Each figure is the time of one call, launched from a CUDA graph over several batches of logits that
together are larger than the L2 cache, so rows come from DRAM. The logits are Gaussian with six larger ones
in each row. Top-p alone keeps thousands of such a row, so ``p = 0.9`` is its hard case; ``peaked`` rows,
nearly all of whose mass six tokens have, are its usual one. PyTorch has no filters: ``torch`` stands for the
shortest way to the same distribution, which does not give the same tokens.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eval.common.machine import describe_machine, write_json
from eval.common.options import Commit, Out, require_gpu, require_writable
from eval.common.tables import markdown_table
from gvr_topk.sampling import sample

FORMAT = "gvr_topk.sampling/1"
VOCABULARY = 128_256
ROWS = (1, 8, 64, 128, 256, 1024)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
COLD_BYTES = 300e6
MOST_BATCHES = 24
REPLAYS = 7
CHECKED_ROWS = 8
Setting = dict[str, Any]
SETTINGS: dict[str, Setting] = {
    "greedy": {"temperature": 0.0},
    "k = 50": {"top_k": 50},
    "k = 50, p = 0.9": {"top_k": 50, "top_p": 0.9},
    "k = 50, p = 0.9, murmur": {"top_k": 50, "top_p": 0.9, "noise": "murmur"},
    "k = 1000": {"top_k": 1000},
    "min-p = 0.05": {"min_p": 0.05},
    "p = 0.9, peaked": {"top_p": 0.9},
    "p = 0.9": {"top_p": 0.9},
    "temperature": {},
    "temperature, murmur": {"noise": "murmur"},
}


def _torch_topk(logits: Tensor) -> Tensor:
    values, tokens = torch.topk(logits, 50)
    return tokens.gather(1, torch.multinomial(torch.softmax(values, 1, dtype=torch.float32), 1))


TORCH: dict[str, Callable[[Tensor], Any]] = {
    "greedy": lambda logits: torch.argmax(logits, 1),
    "k = 50": _torch_topk,
    "temperature": lambda logits: torch.multinomial(torch.softmax(logits, 1, dtype=torch.float32), 1),
}


def batches(rows: int, dtype: torch.dtype, peaked: bool, count: int) -> list[Tensor]:
    """Draw logits, the same in every run."""
    draw = torch.Generator("cuda").manual_seed(rows)
    made = []
    for _ in range(count):
        logits = 2.5 * torch.randn(rows, VOCABULARY, device="cuda", generator=draw)
        best = 14 + 2 * torch.randn(rows, 6, device="cuda", generator=draw) + 16 * peaked
        at = torch.randint(VOCABULARY, (rows, 6), device="cuda", generator=draw)
        made.append(logits.scatter_(1, at, best).to(dtype))
    return made


def microseconds(calls: Sequence[Callable[[], object]]) -> float:
    """Median time of one of the calls, which a graph launches behind each other."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Other threads, such as the one in which NCCL watches, may call CUDA meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for call in calls:
            call()
    times = []
    for _ in range(REPLAYS):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        graph.replay()
        after.record()
        torch.cuda.synchronize()
        times.append(before.elapsed_time(after) * 1e3 / len(calls))
    return statistics.median(times[1:])


def wrong_tokens(logits: Tensor, tokens: Tensor, setting: Setting) -> int:
    """Count rows, of the first ones, whose token is not that of the CPU implementation."""
    part = logits[:CHECKED_ROWS].cpu()
    order = torch.arange(len(part))
    return int((sample(part, seeds=order, positions=order, **setting) != tokens[: len(part)].cpu()).sum())


def measure(rows: int, dtype: str, name: str) -> dict[str, Any]:
    """Time one setting, and check it."""
    setting, kind = SETTINGS[name], DTYPES[dtype]
    count = int(min(MOST_BATCHES, max(2, COLD_BYTES // (rows * VOCABULARY * kind.itemsize))))
    logits = batches(rows, kind, "peaked" in name, count)
    out = torch.empty(rows, dtype=torch.int64, device="cuda")
    numbers = torch.arange(rows, device="cuda")
    ours = functools.partial(sample, seeds=numbers, positions=numbers, out=out, **setting)
    calls = [functools.partial(ours, each) for each in logits]
    wrong = wrong_tokens(logits[0], calls[0](), setting)
    result = {"rows": rows, "dtype": dtype, "setting": name, "us": microseconds(calls), "wrong": wrong}
    if name in TORCH:
        result["torch_us"] = microseconds([functools.partial(TORCH[name], each) for each in logits])
    return result


def table(results: Sequence[dict[str, Any]]) -> str:
    """Make a table, a setting a row."""
    columns = sorted(
        {(each["dtype"], each["rows"]) for each in results}, key=lambda at: (at[0][0] == "b", at[1])
    )
    lines = []
    for name in SETTINGS:
        for who, key in ((name, "us"), (f"{name}: torch", "torch_us")):
            found = {(each["dtype"], each["rows"]): each for each in results if each["setting"] == name}
            if any(key in each for each in found.values()):
                lines.append([who, *(f"{found[at][key]:.1f}" for at in columns)])
    return markdown_table(["us", *(f"{rows} {dtype}" for dtype, rows in columns)], lines)


def main(
    out: Out = Path("out/sampling.json"),
    commit: Commit = "",
) -> int:
    """Time the sampler beside PyTorch."""
    require_writable(out)
    require_gpu()
    results = [measure(rows, dtype, name) for dtype in DTYPES for rows in ROWS for name in SETTINGS]
    data = {
        "format": FORMAT,
        "machine": describe_machine(commit),
        "vocabulary": VOCABULARY,
        "checked_rows": CHECKED_ROWS,
        "results": results,
    }
    write_json(out, data)
    print(table(results))
    wrong = sum(each["wrong"] for each in results)
    print(f"{wrong} of the checked tokens are wrong")
    return int(wrong > 0)
