"""Time the sampler beside PyTorch and FlashInfer, and compare its tokens with the CPU implementation.

    python -m eval sampling --out out/sampling.json --baseline-dir FOLDER

Each figure is the time of one call, launched from a CUDA graph over several batches of logits that together
are larger than the L2 cache, so rows come from DRAM. The logits are Gaussian with six larger ones in each
row. Top-p alone keeps from one to thousands of such a row. ``peaked`` rows, nearly all of whose mass the six
have, are its usual case, and ``flat`` ones, which are without them, its hard one. PyTorch has no filters:
``torch`` stands for the shortest way to the same distribution. ``flashinfer`` stands for what vLLM 0.33 calls
of FlashInfer, with k and p as tensors: its conversion to fp32, a mask of the k largest logits, a softmax, and
a draw from probabilities. It needs ``sampling.so`` (flashinfer-python 0.7.2's ``sampling`` module, compiled
for sm_90a) and the folder ``tvm_ffi`` below ``--baseline-dir`` or ``$GVR_TOPK_BASELINES``. Peers draw other
tokens of the same distribution: of these it is counted how many the filters, taken exactly, do not keep
(``outside``).
"""

import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eval.bench.baselines import BaselineError, ffi_module, given_folder, on_stream
from eval.bench.bench_report import sampling_table
from eval.common import timing
from eval.common.machine import describe_machine, write_json
from eval.common.options import BaselineFolder, Commit, Out, require_gpu, require_writable
from eval.common.tables import markdown_table
from gvr_topk.sampling import apply_limits_, sample

FORMAT = "gvr_topk.sampling/2"
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
    "p = 0.9, flat": {"top_p": 0.9},
    "temperature": {},
    "temperature, murmur": {"noise": "murmur"},
    "mixed": {"temperature": (0.0, 1.0, 1.0, 1.0), "top_k": (0, 50, 0, 0), "top_p": (1.0, 1.0, 0.9, 1.0)}
    | {"min_p": (0.0, 0.0, 0.0, 0.05)},
}
"""The arguments of a call. Several numbers are those of every so many rows, in turn."""


Peer = Callable[[Tensor], Tensor]
"""From logits to tokens."""


def _softmax(logits: Tensor) -> Tensor:
    return torch.softmax(logits, 1, dtype=torch.float32)


def _torch_topk(logits: Tensor) -> Tensor:
    values, tokens = torch.topk(logits, 50)
    return tokens.gather(1, torch.multinomial(_softmax(values), 1))


TORCH: dict[str, Peer] = {
    "greedy": lambda logits: torch.argmax(logits, 1),
    "k = 50": _torch_topk,
    "temperature": lambda logits: torch.multinomial(_softmax(logits), 1),
}


def flashinfer(folder: Path | None, rows: int) -> dict[str, Peer]:
    """FlashInfer's calls for batches of so many rows; none where its files are missing."""
    try:
        ffi, module = ffi_module(given_folder(folder), "sampling.so")
    except BaselineError as error:
        print(f"flashinfer: {error}")
        return {}

    def filled(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((rows,), value, dtype=dtype, device="cuda")

    tokens, valid = filled(0, torch.int32), filled(0, torch.bool)
    k, p, min_p = filled(50, torch.int32), filled(0.9, torch.float32), filled(0.05, torch.float32)
    states = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
    random = (True, None, 1, None, 0)  # deterministic, and seed and offset as numbers

    def drawn(name: str, probs: Tensor, *parameter: object) -> Tensor:
        on_stream(ffi, getattr(module, name))(probs, tokens, valid, None, *parameter, *random)
        return tokens

    def by_both(logits: Tensor) -> Tensor:
        logits = logits.float()
        masked = torch.empty_like(logits)
        on_stream(ffi, module.top_k_mask_logits)(logits, masked, k, 0, states)
        return by_p(masked)

    def by_p(logits: Tensor) -> Tensor:
        return drawn("top_p_sampling_from_probs", _softmax(logits), p, 0.0)

    return {
        "k = 50": lambda logits: drawn("top_k_sampling_from_probs", _softmax(logits), k, 0),
        "k = 50, p = 0.9": by_both,
        "min-p = 0.05": lambda logits: drawn("min_p_sampling_from_probs", _softmax(logits), min_p, 0.0),
        "p = 0.9, peaked": by_p,
        "p = 0.9": by_p,
        "p = 0.9, flat": by_p,
        "temperature": lambda logits: drawn("sampling_from_probs", _softmax(logits)),
    }


def for_rows(setting: Setting, rows: int) -> Setting:
    """Put tensors, a number for each row, in place of several numbers."""

    def tensor(numbers: tuple[float, ...]) -> Tensor:
        kind = torch.int32 if type(numbers[0]) is int else torch.float32
        return torch.tensor(numbers, dtype=kind, device="cuda").repeat(rows)[:rows]

    return {name: tensor(each) if isinstance(each, tuple) else each for name, each in setting.items()}


def cold_batches(make: Callable[[], Tensor]) -> list[Tensor]:
    """Batches that together are larger than the L2 cache."""
    first = make()
    return [first, *(make() for _ in range(int(min(MOST_BATCHES, max(2, COLD_BYTES // first.nbytes))) - 1))]


def batches(rows: int, dtype: torch.dtype, name: str) -> list[Tensor]:
    """Draw logits, the same in every run."""
    draw = torch.Generator("cuda").manual_seed(rows)

    def make() -> Tensor:
        logits = 2.5 * torch.randn(rows, VOCABULARY, device="cuda", generator=draw)
        best = 14 + 2 * torch.randn(rows, 6, device="cuda", generator=draw) + 16 * ("peaked" in name)
        at = torch.randint(VOCABULARY, (rows, 6), device="cuda", generator=draw)
        return (logits if "flat" in name else logits.scatter_(1, at, best)).to(dtype)

    return cold_batches(make)


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
    times = [timing.microseconds(graph.replay, on_gpu=True) for _ in range(REPLAYS)]
    return statistics.median(times[1:]) / len(calls)


def wrong_tokens(logits: Tensor, tokens: Tensor, setting: Setting) -> int:
    """Count rows, of the first ones, whose token is not that of the CPU implementation."""
    part = logits[:CHECKED_ROWS].cpu()
    order = torch.arange(len(part))
    setting = {
        name: each[: len(part)].cpu() if isinstance(each, Tensor) else each for name, each in setting.items()
    }
    return int((sample(part, seeds=order, positions=order, **setting) != tokens[: len(part)].cpu()).sum())


def outside(logits: Tensor, limits: Tensor, tokens: Tensor) -> int:
    """Count rows, of the first ones, whose token is not among those that were kept."""
    kept = apply_limits_(logits[:CHECKED_ROWS].cpu(), limits[:CHECKED_ROWS].cpu())
    return int(torch.isneginf(kept.gather(1, tokens.view(-1, 1)[:CHECKED_ROWS].cpu().long())).sum())


def measure(rows: int, dtype: str, name: str, peers: Mapping[str, Mapping[str, Peer]]) -> dict[str, Any]:
    """Time one setting, and check it."""
    setting, kind = for_rows(SETTINGS[name], rows), DTYPES[dtype]
    logits = batches(rows, kind, name)
    out = torch.empty(rows, dtype=torch.int64, device="cuda")
    limits = torch.empty(rows, 8, dtype=torch.int32, device="cuda")
    numbers = torch.arange(rows, device="cuda")
    ours: Callable[..., Tensor] = functools.partial(
        sample, seeds=numbers, positions=numbers, out=out, **setting
    )
    wrong = wrong_tokens(logits[0], ours(logits[0]), setting)  # the call that is timed
    result = {"rows": rows, "dtype": dtype, "setting": name, "wrong": wrong}
    result["us"] = microseconds([functools.partial(ours, each) for each in logits])
    ours(logits[0], limits=limits)
    result["peers"] = {
        peer: {
            "outside": outside(logits[0], limits, by_setting[name](logits[0])),
            "us": microseconds([functools.partial(by_setting[name], each) for each in logits]),
        }
        for peer, by_setting in peers.items()
        if name in by_setting
    }
    return result


def main(
    out: Out = Path("out/sampling.json"), baseline_dir: BaselineFolder = None, commit: Commit = ""
) -> int:
    """Time the sampler beside PyTorch and FlashInfer."""
    require_writable(out)
    require_gpu()
    results = []
    for rows in ROWS:
        peers = {"torch": TORCH, "flashinfer": flashinfer(baseline_dir, rows)}
        results += [measure(rows, dtype, name, peers) for dtype in DTYPES for name in SETTINGS]
    data = {
        "format": FORMAT,
        "machine": describe_machine(commit),
        "vocabulary": VOCABULARY,
        "checked_rows": CHECKED_ROWS,
        "results": results,
    }
    write_json(out, data)
    print(markdown_table(*sampling_table(results)))
    wrong = sum(each["wrong"] for each in results)
    print(f"{wrong} of the checked tokens are wrong")
    return int(wrong > 0)
