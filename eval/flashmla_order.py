"""Does the order of the selected ids matter to sparse attention? FlashMLA's kernels, as vLLM calls them.

The same selection is attended to in ascending order, as this package gives it, and in random orders. Both of
vLLM's sparse kernels are run where they are there: ``flash_mla_with_kvcache`` with an fp8 cache, and
``flash_mla_sparse_fwd`` with a bf16 cache. Times are of single calls in turns, with the caches of the GPU
flushed before each (cold) and not (warm). Outputs are compared bit by bit: those of different orders, and
those of the same order run again. A row is compared with attention in fp32, too, so that what is timed is
right.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.metadata
import itertools
import statistics
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eval.common.machine import describe_machine, write_json
from eval.common.options import no_gpu, some_of, why_unwritable
from eval.common.status import UNDECIDED, WRONG_USE

INTERFACE = "vllm.v1.attention.ops.flashmla"
"""Module from which vLLM's sparse attention takes both kernels."""

NOPE, ROPE, TILE, BLOCK, TOPK = 512, 64, 128, 64, 2048
"""Shapes of DeepSeek-V3.2: dimensions without and with position, those per fp8 scale, tokens per block, k."""

SCALE = (NOPE + ROPE) ** -0.5
FLUSH_BYTES = 512 << 20
TOLERANCE = 1e-2
"""Largest difference from attention in fp32: outputs are about 0.04 and up to 0.2, and bf16 has 8 bits."""

KERNELS = ("fp8", "bf16")
SELECTIONS = ("uniform", "recent")
"""Ids anywhere in the context, or half of them among the last tokens."""

Attend = Callable[[Tensor], tuple[Tensor, ...]]
"""Takes ids ``[batch, k]``; gives the output ``[batch, heads, 512]``, and then the kernel's other results."""


class MissingError(Exception):
    """FlashMLA cannot be run here; the message says why."""


@dataclass(frozen=True)
class Case:
    """What is measured.

    Attributes
    ----------
    kernel : {"fp8", "bf16"}
    batch, context, heads : int
        Rows, tokens of each row's context, and query heads.
    selection : {"uniform", "recent"}
    """

    kernel: str
    batch: int
    context: int
    heads: int
    selection: str


def load() -> Any:
    """The module with FlashMLA's functions.

    Raises
    ------
    MissingError
        It is not importable, or does not run on this GPU.
    """
    try:
        module = importlib.import_module(INTERFACE)
    except Exception as error:  # a missing system library shows up in many ways
        raise MissingError(f"wanted {INTERFACE}, got {type(error).__name__}: {error}") from error
    supported, reason = module.is_flashmla_sparse_supported()
    if not supported:
        raise MissingError(f"wanted FlashMLA's sparse kernels, got none: {reason}")
    return module


class Cache:
    """Keys of all rows of a case, as one kernel wants them, and as fp32 for comparison.

    Parameters
    ----------
    case : Case
    device : str
    seed : int
    """

    def __init__(self, case: Case, device: str, seed: int = 0) -> None:
        generator = torch.Generator(device).manual_seed(seed)
        self.tokens = case.batch * case.context
        self._fp8 = case.kernel == "fp8"
        width = NOPE + 4 * (NOPE // TILE) + 2 * ROPE if self._fp8 else NOPE + ROPE
        kind = torch.uint8 if self._fp8 else torch.bfloat16
        self.memory = torch.empty((self.tokens, width), dtype=kind, device=device)
        for part in self.memory.split(1 << 20):
            drawn = torch.randn((len(part), NOPE + ROPE), generator=generator, device=device)
            if not self._fp8:
                part.copy_(drawn)
                continue
            scales = torch.full((len(part), NOPE // TILE), 1 / 64, dtype=torch.float32, device=device)
            nope = (drawn[:, :NOPE] * 64).to(torch.float8_e4m3fn)
            rope = drawn[:, NOPE:].to(torch.bfloat16)
            part.copy_(torch.cat([values.view(torch.uint8) for values in (nope, scales, rope)], dim=1))

    def keys(self, ids: Tensor) -> Tensor:
        """Keys ``[ids, 576]`` in fp32; the first 512 numbers of each are its values."""
        rows = self.memory[ids]
        if not self._fp8:
            return rows.float()
        ends = (NOPE, NOPE + 4 * (NOPE // TILE))
        nope, scales, rope = (part.contiguous() for part in rows.tensor_split(ends, dim=1))
        factors = scales.view(torch.float32).repeat_interleave(TILE, dim=1)
        values = nope.view(torch.float8_e4m3fn).float() * factors
        return torch.cat([values, rope.view(torch.bfloat16).float()], dim=1)


def attention(flashmla: Any, case: Case, cache: Cache, queries: Tensor) -> Attend:
    """Make the kernel's call, as vLLM makes it.

    Parameters
    ----------
    flashmla : module
    case : Case
    cache : Cache
    queries : Tensor, ``[batch, heads, 576]``, bfloat16
    """
    if case.kernel == "bf16":

        def sparse_forward(ids: Tensor) -> tuple[Tensor, ...]:
            keys = cache.memory.view(-1, 1, NOPE + ROPE)
            output, *rest = flashmla.flash_mla_sparse_fwd(queries, keys, ids.unsqueeze(1), SCALE)
            return (output, *rest)

        return sparse_forward

    schedule, _ = flashmla.get_mla_metadata()
    blocks = cache.memory.view(-1, BLOCK, 1, cache.memory.shape[1])
    # Both are ignored where there are ids, but have to be there.
    table = torch.zeros((case.batch, 1), dtype=torch.int32, device=queries.device)
    lengths = torch.full((case.batch,), case.context, dtype=torch.int32, device=queries.device)

    def with_cache(ids: Tensor) -> tuple[Tensor, ...]:
        output, sums = flashmla.flash_mla_with_kvcache(
            q=queries.unsqueeze(1),
            k_cache=blocks,
            block_table=table,
            head_dim_v=NOPE,
            cache_seqlens=lengths,
            tile_scheduler_metadata=schedule,
            is_fp8_kvcache=True,
            indices=ids.unsqueeze(1),
            softmax_scale=SCALE,
        )
        return output.squeeze(1), sums

    return with_cache


def ascending_ids(case: Case, device: str, seed: int = 1) -> Tensor:
    """A selection for each row, ``[batch, k]``, int32: cache slots of its own context in ascending order."""
    generator = torch.Generator(device).manual_seed(seed)
    weight = torch.rand((case.batch, case.context), generator=generator, device=device)
    if case.selection == "recent":
        weight[:, -TOPK // 2 :] += 1
    positions = weight.topk(min(TOPK, case.context), dim=1).indices.sort(1).values
    first = torch.arange(case.batch, device=device)[:, None] * case.context
    return (positions + first).to(torch.int32)


def shuffles(ids: Tensor, count: int, seed: int = 2) -> list[Tensor]:
    """The same ids in random orders, another one in each row."""
    generator = torch.Generator(ids.device).manual_seed(seed)
    orders = (torch.rand(ids.shape, generator=generator, device=ids.device).argsort(1) for _ in range(count))
    return [ids.gather(1, order) for order in orders]


def digest(results: Sequence[Tensor]) -> str:
    """Hash of all bits that a call gave."""
    found = hashlib.sha256()
    for tensor in results:
        found.update(tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def outputs(attend: Attend, ascending: Tensor, shuffled: Sequence[Tensor]) -> dict[str, Any]:
    """Compare what different orders give, bit by bit."""
    first = [tensor.clone() for tensor in attend(ascending)]
    of_ascending = [digest(first)] + [digest(attend(ascending)) for _ in shuffled]
    difference = 0.0
    of_shuffled = []
    for ids in shuffled:
        results = attend(ids)
        of_shuffled.append(digest(results))
        difference = max(difference, float((results[0].float() - first[0].float()).abs().max()))
    again = [digest(attend(shuffled[0])) for _ in shuffled]
    return {
        "ascending_runs": len(of_ascending),
        "ascending_distinct": len(set(of_ascending)),
        "shuffles": len(shuffled),
        "shuffles_equal_to_ascending": of_shuffled.count(of_ascending[0]),
        "shuffles_distinct": len(set(of_shuffled)),
        "one_shuffle_again_distinct": len({of_shuffled[0], *again}),
        "largest_difference": difference,
    }


def error(attend: Attend, case: Case, cache: Cache, queries: Tensor, ids: Tensor) -> float:
    """Largest difference of the last row's output from attention in fp32."""
    keys = cache.keys(ids[-1].to(torch.int64))
    weights = (queries[-1].float() @ keys.T * SCALE).softmax(-1)
    return float((attend(ids)[0][-1].float() - weights @ keys[:, :NOPE]).abs().max())


class Clock:
    """Times single calls on a device.

    Parameters
    ----------
    device : str
    """

    def __init__(self, device: str) -> None:
        self._cuda = device == "cuda"
        self._flushed = torch.empty(FLUSH_BYTES if self._cuda else 1 << 20, dtype=torch.uint8, device=device)
        self._times: defaultdict[tuple[str, str], list[Any]] = defaultdict(list)

    def time(self, name: str, kind: str, call: Callable[[], object]) -> None:
        """Time a call; `kind` is ``cold`` or ``warm``."""
        # Either keeps the GPU busy until the host has launched what follows.
        if kind == "cold":
            self._flushed.add_(1)
        elif self._cuda:
            torch.cuda._sleep(400_000)
        if not self._cuda:
            begun = time.perf_counter()
            call()
            self._times[name, kind].append(time.perf_counter() - begun)
            return
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        self._times[name, kind].append((start, stop))

    def take(self) -> dict[str, dict[str, float]]:
        """Median microseconds by name and kind."""
        taken: defaultdict[str, dict[str, float]] = defaultdict(dict)
        if self._cuda:
            torch.cuda.synchronize()
        for (name, kind), calls in self._times.items():
            spent = [1e3 * call[0].elapsed_time(call[1]) if self._cuda else 1e6 * call for call in calls]
            taken[name][kind] = round(statistics.median(spent), 2)
        self._times.clear()
        return dict(taken)


def measure(flashmla: Any, case: Case, options: argparse.Namespace, device: str) -> dict[str, Any]:
    """Measure one case.

    Raises
    ------
    ArithmeticError
        The kernel's output is not attention to the selected ids.
    """
    cache = Cache(case, device)
    generator = torch.Generator(device).manual_seed(3)
    shape = (case.batch, case.heads, NOPE + ROPE)
    queries = torch.randn(shape, generator=generator, device=device).to(torch.bfloat16)
    attend = attention(flashmla, case, cache, queries)
    ascending = ascending_ids(case, device)
    shuffled = shuffles(ascending, options.shuffles)
    found = error(attend, case, cache, queries, ascending)
    if not found <= TOLERANCE:  # a NaN is none, either
        raise ArithmeticError(f"output: wanted within {TOLERANCE} of attention in fp32, got {found:.3g}")
    result = {"error": found, "outputs": outputs(attend, ascending, shuffled)}
    clock = Clock(device)
    for repeat, kind in itertools.product(range(options.repeats), ("cold", "warm")):
        orders = [("ascending", ascending), ("shuffled", shuffled[repeat % len(shuffled)])]
        for name, ids in orders if repeat % 2 else reversed(orders):
            clock.time(name, kind, lambda ids=ids: attend(ids))  # type: ignore[misc]
    times = clock.take()
    ratio = {kind: round(times["shuffled"][kind] / times["ascending"][kind], 4) for kind in ("cold", "warm")}
    return result | {"us": times, "shuffled_over_ascending": ratio}


def plan(options: argparse.Namespace) -> list[Case]:
    """Cases, those of the smallest batches first."""
    return list(
        itertools.starmap(
            lambda batch, context, heads, kernel, selection: Case(kernel, batch, context, heads, selection),
            itertools.product(
                options.batches, options.contexts, options.heads, options.kernels, options.selections
            ),
        )
    )


def _numbers(text: str) -> list[int]:
    given = [int(part) for part in text.split(",") if part.isdecimal()]
    if len(given) < len(text.split(",")) or min(given) < 1:
        raise argparse.ArgumentTypeError(f"wanted positive numbers, got {text!r}")
    return given


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/flashmla_order.json"), help="result file")
    parser.add_argument("--kernels", type=some_of(KERNELS), default=list(KERNELS), help=",".join(KERNELS))
    parser.add_argument(
        "--selections", type=some_of(SELECTIONS), default=list(SELECTIONS), help=",".join(SELECTIONS)
    )
    parser.add_argument("--batches", type=_numbers, default=[1, 8, 32], help="rows at once")
    parser.add_argument(
        "--contexts", type=_numbers, default=[8192, 65536], help=f"tokens, multiples of {BLOCK}"
    )
    parser.add_argument("--heads", type=_numbers, default=[64, 128], help="query heads")
    parser.add_argument("--shuffles", type=int, default=20, help="random orders")
    parser.add_argument("--repeats", type=int, default=60, help="timed calls of each kind")
    parser.add_argument("--seconds", type=float, default=240, help="no case is begun after so many")
    parser.add_argument("--commit", default="", help="of the sources, where the folder has no Git history")
    options = parser.parse_args(argv)
    if any(context % BLOCK for context in options.contexts):
        parser.error(f"--contexts: wanted multiples of {BLOCK}, got {options.contexts}")
    if min(options.shuffles, options.repeats) < 1:
        parser.error("--shuffles, --repeats: wanted at least 1")
    return options


def main(argv: list[str] | None = None) -> int:
    """Measure every case and report."""
    options = parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        if device != "cuda":
            raise MissingError(no_gpu())
        if problem := why_unwritable(options.out):
            raise MissingError(problem)
        flashmla = load()
    except MissingError as missing:
        print(f"flashmla: {missing}", file=sys.stderr)
        return WRONG_USE
    return run(flashmla, options, device)


def run(flashmla: Any, options: argparse.Namespace, device: str) -> int:
    """Measure every case with the given functions; a case that fails is a failure in the result."""
    begun = time.monotonic()
    cases: list[dict[str, Any]] = []
    failures: list[str] = []
    report = {
        "format": "gvr_topk.flashmla_order/1",
        "what": "sparse attention to the same ids in ascending order and shuffled",
        "versions": {"vllm": importlib.metadata.version("vllm")},
        "setup": {"k": TOPK, "shuffles": options.shuffles, "repeats": options.repeats, "block": BLOCK},
        "machine": describe_machine(options.commit, device),
        "cases": cases,
        "failures": failures,
    }
    for case in plan(options):
        given = f"{case.kernel} {case.batch} x {case.context}, {case.heads} heads, {case.selection}"
        try:
            if time.monotonic() - begun > options.seconds:
                raise TimeoutError(f"left out after {options.seconds:.0f} s")
            measured = vars(case) | measure(flashmla, case, options, device)
        except Exception as problem:
            if not isinstance(problem, TimeoutError):
                traceback.print_exc()
            failures.append(f"{given}: {type(problem).__name__}: {problem}")
            print(f"{given}: {type(problem).__name__}: {problem}", flush=True)
        else:
            cases.append(measured)
            print(f"{given}: {_summary(measured)}", flush=True)
        write_json(options.out, report)
    return UNDECIDED if failures else 0


def _summary(measured: dict[str, Any]) -> str:
    times, found = measured["us"], measured["outputs"]
    spent = ", ".join(
        f"{kind} {times['ascending'][kind]} us ascending and {times['shuffled'][kind]} shuffled"
        for kind in ("cold", "warm")
    )
    return (
        f"{spent}; {found['shuffles_equal_to_ascending']} of {found['shuffles']} shuffles equal to "
        f"ascending, {found['ascending_distinct']} outputs in {found['ascending_runs']} runs of ascending"
    )
