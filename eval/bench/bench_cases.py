"""What the kernel benchmark measures: shapes and kinds of rows, and how chains of them are made."""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eval.bench.bench_report import PREFILL_SHAPES, SHAPES
from eval.bench.hard_rows import hard_rows
from eval.bench.kernel_timing import (
    GENERATED_ELEMENTS,
    Chain,
    aligned,
    chain_of,
    chunk_chain,
    gaussian_chain,
    nan_rows,
)
from eval.bench.oracles import BLOCKS_GROUP
from eval.common.dtypes import DTYPES
from gvr_topk.evaluation.synthetic import LAYERS, LayerGenerator
from gvr_topk.evaluation.trace import ScoreSource, Trace, load_trace, shipped_trace

OTHER_LENGTHS = (8192, 70690, 262144)
"""Lengths of rows of another k or dtype."""
LENGTHS = (4096, 8192, 16384, 32768, 70690, 131072, 262144, 524288, 1048576)
BATCHES = (1, 8, 64, 128)
K = 2048

KEEP = 0.9
"""Variance that survives a step in the main sweep: about 60 % of the top-k at N = 70,690."""

ADVERSARIAL_STEPS = 16
"""Different rows of an adversarial chain, each of a seed of its own."""

LAYER_STEPS = 256
"""Different steps of a layer's chain, as many as a trace has."""
_WORKERS = ThreadPoolExecutor(max_workers=len(LAYERS))

ENGINE_ROTATIONS = 8
"""How many times a slot goes through the layers of an engine's file, each time with another request's row."""

V4_CONTEXTS = (65536, 131072)
V4_COMPRESS_RATIO = 4
V4_K = (512, 1024)
"""DeepSeek-V4 scores one entry for every four tokens, and keeps 512 (Flash) or 1,024 (Pro) of them."""
V4_BATCHES = (1, 8, 64)

V41_LENGTHS = (16384, 65536, 131072, 262144, 524288, 1048576)
V41_BATCHES = (1, 8, 64)
V41_K = 512
"""DeepSeek-V4.1's indexer of two levels: up to a context of 1M tokens, four to a score, and of 4M."""

OCTAVES = 3.0
"""Where scales change, that of a row is 2 to the power of a uniform number within this distance of 0."""
SCALE_SHAPES = ((131072, 1), (8192, 1), (70690, 1))
"""Length and batch of rows whose scale changes at each step."""
MASK_SHAPES = ((32768, 1), (131072, 1), (1048576, 1), (131072, 64))
"""Length and batch of masked rows."""

WIDE_LENGTHS = (8192, 65536)
WIDE_BATCHES = (1, 8, 64)
WIDE_BUFFERS = (0, 131072, 1048576)
"""Rows in buffers as wide as the longest that an engine admits: lengths, batches, and columns of the buffers,
of which 0 stands for the row's own."""

UNALIGNED_LENGTHS = (8100, 70690, 131000, 524288, 1048576)
UNALIGNED_BATCHES = (1, 8, 64)
"""Rows in buffers of an odd width, which start anywhere between 16-byte boundaries, and aligned ones."""

LONG_CHUNK = (1048576, 1024)
"""Columns and rows of a chunk far behind in a prompt, whose scores come in slices."""
PREFILL_TRACE_ROWS = 2048
"""Rows of a chunk of real rows: the rows of a trace, again and again in their order."""


@dataclass(frozen=True)
class Cell:
    """One point of the benchmark."""

    group: str  # one of `bench_report.GROUPS`
    n: int  # length of a row
    batch: int = 1  # rows per launch
    k: int = K
    dtype: str = "fp32"  # a key of `DTYPES`
    rows: str = "gauss"  # kind of row, of which `make_chain` knows all; ``KIND:NAME`` for one of several
    keep: float = KEEP  # share of variance that survives a step, of Gaussian rows and those made of them
    shift: int = 0  # positions by which scores move from step to step, and the hint's offset
    width: int = 0  # columns of the buffer, of which CUDA graphs have more than a row; 0: the row's own

    @property
    def key(self) -> str:
        """Every field but the group, as text: ``n70690 b1 k2048 fp32 gauss keep0.9``."""
        kind = f"{self.rows} keep{self.keep:g}" if self.rows in ("gauss", "scale") else self.rows
        shifted = f" shift{self.shift}" if self.shift else ""
        buffer = f" in{self.width}" if self.width else ""
        return f"n{self.n} b{self.batch} k{self.k} {self.dtype} {kind}{shifted}{buffer}"


@dataclass(frozen=True)
class Mask:
    """A value that is put into Gaussian rows, at positions drawn anew at every step.

    Whether the k-th value is this one is many standard deviations away from chance.
    """

    value: float
    share: Callable[[int, int], float]  # ``share(n, k)``: probability of each position to get the value

    def __call__(self, rows: Tensor, generator: torch.Generator, k: int) -> Tensor:
        drawn = torch.rand(rows.shape, device=rows.device, generator=generator)
        return rows.masked_fill(drawn < self.share(rows.shape[-1], k), self.value)


MASKS = {
    "kth_is_neg_inf": Mask(float("-inf"), lambda n, k: 1 - k / (2 * n)),
    "99_percent": Mask(float("-inf"), lambda n, k: 1 - max(0.01, 1.5 * k / n)),
    "half": Mask(float("-inf"), lambda n, k: 0.5),
    "kth_is_pos_inf": Mask(float("inf"), lambda n, k: min(0.5, 2 * k / n)),
    "kth_is_nan": Mask(float("nan"), lambda n, k: min(0.5, 2 * k / n)),
    "some_nan": Mask(float("nan"), lambda n, k: k / (4 * n)),
}
"""Kinds of masked rows. ``kth_is_neg_inf``: half of k are finite; ``99_percent``: 99 % are minus infinity, or
as many as leave one and a half times k finite; ``kth_is_pos_inf`` and ``kth_is_nan``: about twice k are
infinite or NaN; ``some_nan``: a quarter of k is."""


@dataclass(frozen=True)
class EngineRows:
    """One decode step of several layers of a serving engine."""

    name: str  # the file's stem
    layers: tuple[Tensor, ...]  # fp32 rows of each layer, ``[requests, length]``

    @property
    def batch(self) -> int:
        return self.layers[0].shape[0]

    @property
    def length(self) -> int:
        return self.layers[0].shape[1]

    def steps(self) -> list[Tensor]:
        """The layers as consecutive steps of one state, the requests' rows rotated after each round.

        So each slot meets every row of every layer once, and the choice of the step before hits by chance
        alone.
        """
        rotations = min(ENGINE_ROTATIONS, self.batch)
        return [layer.roll(-turn, dims=0) for turn in range(rotations) for layer in self.layers]


@dataclass(frozen=True)
class Sources:
    """Rows that come from files."""

    traces: Sequence[ScoreSource] = ()
    engines: Sequence[EngineRows] = ()


def all_cells(sources: Sources = Sources()) -> list[Cell]:
    """Every cell, those that the pages show first, each shape and kind of rows once."""
    main = [Cell("main", n, batch) for batch in BATCHES for n in LENGTHS]
    cells = [cell for cell in main if (cell.n, cell.batch) in SHAPES]
    cells += [Cell("trace", max(1, trace.length(0)), rows=f"trace:{trace.name}") for trace in sources.traces]
    cells += [Cell("engine", its.length, its.batch, rows=f"engine:{its.name}") for its in sources.engines]
    cells += [Cell("scale", n, batch, rows="scale") for n, batch in SCALE_SHAPES]
    cells += [Cell("mask", n, batch, rows=f"mask:{kind}") for n, batch in MASK_SHAPES for kind in MASKS]
    cells += [Cell("layer", 70690, rows=f"layer:{layer}") for layer in LAYERS]
    shapes = (*PREFILL_SHAPES, LONG_CHUNK)
    cells += [Cell("prefill", n, rows, rows="causal", width=w) for n, rows in shapes for w in (0, n + 1)]
    cells += [Cell("prefill", n, rows, rows="causal_scale") for n, rows in PREFILL_SHAPES if n > 32768]
    for trace in sources.traces:
        longest = max(1, trace.length(trace.steps - 1))
        cells.append(Cell("prefill", longest, PREFILL_TRACE_ROWS, rows=f"causal:{trace.name}"))
    cells += [cell for cell in main if (cell.n, cell.batch) not in SHAPES]
    for batch in (1, 64):
        cells += [Cell("hint", 70690, batch, keep=keep) for keep in (0.0, 0.5, 0.99)]
        cells += [Cell("hint", 70690, batch, shift=1)]
    cells += [Cell("hint", n, keep=0.0) for n in (8192, 32768, 131072, 1048576)]
    of_v4 = itertools.product(V4_K, V4_CONTEXTS, V4_BATCHES)
    cells += [Cell("v4", context // V4_COMPRESS_RATIO, batch, k) for k, context, batch in of_v4]
    of_v41 = itertools.product(V41_BATCHES, V41_LENGTHS)
    cells += [Cell(BLOCKS_GROUP, n, batch, V41_K, rows="blocks") for batch, n in of_v41]
    cells += [Cell("adversarial", 131072, rows=f"adversarial:{name}") for name in hard_rows(1, 1, 0)]
    cells += [
        Cell("wide_buffers", n, batch, width=width)
        for n, batch, width in itertools.product(WIDE_LENGTHS, WIDE_BATCHES, WIDE_BUFFERS)
        if width or n not in LENGTHS or batch not in BATCHES
    ]
    of_unaligned = itertools.product(UNALIGNED_BATCHES, UNALIGNED_LENGTHS)
    for batch, n in of_unaligned:
        if n not in LENGTHS:
            cells.append(Cell("unaligned", n, batch))
        cells.append(Cell("unaligned", n, batch, width=n + 1))
    for batch in (1, 64):
        cells += [Cell("k", n, batch, k) for k in (512, 1024) for n in OTHER_LENGTHS]
        cells += [Cell("dtype", n, batch, dtype=dtype) for dtype in ("bf16", "fp16") for n in OTHER_LENGTHS]
    return cells


def make_chain(cell: Cell, sources: Sources = Sources(), *, device: torch.device | str = "cuda") -> Chain:
    """Rows of a cell, as many steps as a cold graph needs.

    Kinds are ``gauss``, ``scale``, ``blocks`` (Gaussian, of the two-level indexer), ``mask:KIND`` of `MASKS`,
    ``layer:20`` (generator), ``trace:NAME``, ``engine:NAME``, ``adversarial:NAME``; of a chunk of a prefill
    ``causal``, Gaussian rows of which each sees one column more than the one before and the last sees all,
    ``causal_scale``, the same with a scale of its own for each row, or ``causal:NAME``, rows of a trace.
    """
    dtype = DTYPES[cell.dtype]
    kind, _, name = cell.rows.partition(":")
    if kind in ("gauss", "scale", "blocks", "mask"):
        mask = MASKS[name] if kind == "mask" else None
        return gaussian_chain(
            cell.n,
            cell.batch,
            cell.k,
            keep=cell.keep,
            dtype=dtype,
            device=device,
            shift=cell.shift,
            octaves=OCTAVES if kind == "scale" else 0.0,
            width=cell.width,
            change=None if mask is None else functools.partial(mask, k=cell.k),
        )
    if kind in ("causal", "causal_scale"):
        steps = trace_rows(_named(name, sources.traces), device) if name else None
        return causal_chunk(cell, steps, dtype, device)
    if kind == "adversarial":
        steps = [_row(hard_rows(cell.n, cell.k, seed)[name]) for seed in range(ADVERSARIAL_STEPS)]
    elif kind == "layer":
        steps = list(_layer_rows(int(name), cell.n).result())
    elif kind == "trace":
        steps = trace_rows(_named(name, sources.traces), device)
    elif kind == "engine":
        steps = _named(name, sources.engines).steps()
    else:
        raise ValueError(
            "rows: wanted gauss, scale, blocks, mask:KIND, layer:L, trace:NAME, engine:NAME, "
            f"adversarial:NAME, causal, causal_scale or causal:NAME, got {cell.rows!r}"
        )
    if steps[0].shape[0] not in (1, cell.batch):
        raise ValueError(f"batch: wanted 1 or {steps[0].shape[0]} with rows {cell.rows}, got {cell.batch}")
    return chain_of([step.expand(cell.batch, -1) for step in steps], cell.k, dtype=dtype, device=device)


def causal_chunk(
    cell: Cell, steps: Sequence[Tensor] | None, dtype: torch.dtype, device: torch.device | str
) -> Chain:
    """A chunk of one request's prefill: the `steps` of a trace in turn, or Gaussian rows.

    Of the latter row ``r`` sees ``n - rows + 1 + r`` columns, so that there may be at most `n`.
    """
    n, rows, k = cell.n, cell.batch, cell.k
    (chunk,) = nan_rows(1, rows, cell.width or aligned(n), dtype, device)
    if steps is not None:
        lengths = torch.empty(rows, dtype=torch.int32, device=device)
        for at, step in enumerate(steps[:rows]):
            where = slice(at, None, len(steps))
            chunk[where, : step.shape[1]] = step.to(device, dtype)
            lengths[where] = step.shape[1]
        return chunk_chain(chunk, lengths, k)
    if rows > n:
        raise ValueError(f"rows: wanted at most one for each of the {n} columns, got {rows}")
    lengths = torch.arange(n - rows + 1, n + 1, dtype=torch.int32, device=device)
    generator = torch.Generator(device).manual_seed(0)
    position = torch.arange(n, device=device)
    at_once = max(1, GENERATED_ELEMENTS // n)
    for some, ends in zip(chunk[:, :n].split(at_once), lengths.split(at_once), strict=True):
        drawn = torch.randn(some.shape, device=device, generator=generator)
        if cell.rows == "causal_scale":
            drawn *= torch.exp2(OCTAVES * torch.erf(drawn[:, :1] / 2**0.5))  # erf gives a uniform number
        some.copy_(drawn.masked_fill_(position >= ends[:, None], float("nan")))
    return chunk_chain(chunk, lengths, k)


def memory_traffic(chain: Chain, bytes_per_second: float = 0.0) -> dict[str, float]:
    """Bytes that any exact top-k of a chunk reads and writes, and the time of the memory, if it was measured.

    Rows of at most `k` scores need not be read. A window is two numbers, its start and its end.
    """
    lengths = chain.lengths_of(chain.lead).to(torch.int64)
    scores = int(lengths[lengths > chain.k].sum())
    read = scores * chain.logits.element_size() + 2 * 4 * chain.batch
    written = 4 * chain.batch * chain.k
    traffic: dict[str, float] = {"bytes_read": read, "bytes_written": written}
    if bytes_per_second:
        traffic["memory_us"] = round(1e6 * (read + written) / bytes_per_second, 4)
    return traffic


def prepare_sources(cells: Sequence[Cell]) -> None:
    """Begin, in threads of their own, with the rows that take the processor seconds to make."""
    for cell in cells:
        kind, _, name = cell.rows.partition(":")
        if kind == "layer":
            _layer_rows(int(name), cell.n)


def trace_rows(source: ScoreSource, device: torch.device | str) -> list[Tensor]:
    """Rows ``[1, length]`` of all steps of a source, those of a trace scored on the device.

    The last step sees all keys, each step before one less.
    """
    if not isinstance(source, Trace):
        return [_row(source.scores(step)) for step in range(source.steps)]
    arrays = (source.K, source.Q, source.W)
    keys, queries, weights = (torch.from_numpy(array).to(device, torch.float32) for array in arrays)
    weights = weights * keys.shape[1] ** -0.5
    first = len(keys) - source.steps + 1
    return [
        (weights[step] @ (queries[step] @ keys[: first + step].T).relu())[None]
        for step in range(source.steps)
    ]


def load_sources(folder: Path | None) -> Sources:
    """The shipped trace, and the traces and the engines' rows of a folder, whose other archives are left out.

    An engine's rows are ``0.logits``, ``1.logits`` and so on.
    """
    if folder is None:
        return Sources()
    shipped = shipped_trace()
    traces: list[ScoreSource] = [shipped]
    engines = []
    for path in sorted(folder.glob("*.npz")):
        try:
            with np.load(path) as archive:
                is_trace = "K" in archive
                names = sorted(name for name in archive if name.endswith(".logits"))
                layers = tuple(torch.from_numpy(archive[name]) for name in names)
        except Exception:  # damage shows up in many ways, and `load_trace` refuses it
            is_trace, layers = True, ()
        if is_trace and path.stem != shipped.name:
            traces.append(load_trace(path))
        if layers:
            engines.append(EngineRows(path.stem, layers))
    return Sources(traces, engines)


def _named(name: str, sources: Sequence[Any]) -> Any:
    found: Mapping[str, Any] = {source.name: source for source in sources}
    if name not in found:
        raise ValueError(f"rows: wanted one of the files {sorted(found)}, got {name!r}")
    return found[name]


def _row(scores: np.typing.NDArray[np.float32]) -> Tensor:
    return torch.from_numpy(scores)[None]


@functools.cache
def _layer_rows(layer: int, n: int) -> Future[list[Tensor]]:
    """Steps of a layer whose lengths, which grow by one at each, end at `n`."""

    def make() -> list[Tensor]:
        steps = min(LAYER_STEPS, n)
        source = LayerGenerator(layer, n - steps + 1, steps)
        return [_row(source.scores(step)) for step in range(steps)]

    return _WORKERS.submit(make)
