"""Passes of the paper's kernel with each first guess and hint offset, on traces and the generator.

    python -m eval guesses --traces FOLDER --out out/guess_table.json

``mean`` is the paper's first threshold, the mean of the hinted values; ``quantile`` the value that the share
of last step's hits names. Every step's hint is the step before's result. On ``--device cuda`` the figures
are the kernel's own statistics, beside how often its number of passes was the reference's; on ``cpu`` the
reference's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from eval.common.bench_cases import K, load_traces
from eval.common.machine import describe_machine, write_json
from eval.common.options import TraceFolder, require_device, require_writable
from eval.common.tables import markdown_table
from gvr_topk.arguments import Arguments
from gvr_topk.constants import FLAG_QUANTILE_GUESS, StatsColumn
from gvr_topk.constants import Path as KernelPath
from gvr_topk.evaluation.paper_reference import GuessKind, topk_row
from gvr_topk.evaluation.synthetic import LAYERS, LayerGenerator
from gvr_topk.evaluation.trace import ScoreSource
from gvr_topk.ops import launch
from gvr_topk.state import TopkState

GUESSES: tuple[GuessKind, ...] = ("mean", "quantile")
OFFSETS = (0, 1)
GENERATED_LENGTH = 70690


@dataclass(frozen=True)
class StepPasses:
    """Counting passes of one step, by the kernel if it ran and by the reference, and the hinted hits."""

    kernel: int | None
    reference: int
    hits: int


def replay(
    source: ScoreSource, k: int, guess: GuessKind, offset: int, steps: int, device: str
) -> list[StepPasses]:
    """Passes of consecutive steps; the first has no hint and is left out, and so are rows not over k.

    Raises
    ------
    ValueError
        The kernel's answer is not the reference's.
    """
    kernel = _Kernel(k, guess, offset) if device == "cuda" else None
    passes = []
    hint = alpha = None
    for step in range(min(steps, source.steps)):
        scores = source.scores(step)
        row = topk_row(scores, k, hint, hint_offset=offset, guess=guess, alpha=alpha)
        counted = None
        if kernel is not None:
            counted, indices = kernel.step(scores)
            if not np.array_equal(indices, row.indices):
                raise ValueError(f"{source.name}: step {step}: the kernel's answer is not the reference's")
        if hint is not None and row.stats.done != "short":
            passes.append(StepPasses(counted, row.stats.passes, row.stats.hit_count))
        hint, alpha = row.indices, row.stats.alpha
    return passes


class _Kernel:
    """The paper's kernel over the steps of one request."""

    def __init__(self, k: int, guess: GuessKind, offset: int) -> None:
        self.k, self.offset = k, offset
        self.flags = FLAG_QUANTILE_GUESS if guess == "quantile" else 0
        self.state = TopkState(1, k, "cuda")
        self.stats = torch.zeros(1, len(StatsColumn), dtype=torch.int32, device="cuda")

    def step(self, scores: np.ndarray[Any, np.dtype[np.float32]]) -> tuple[int, np.ndarray[Any, Any]]:
        out = torch.empty(1, self.k, dtype=torch.int32, device="cuda")
        launch(
            Arguments(
                logits=torch.from_numpy(scores).to("cuda")[None],
                seq_lens=torch.tensor([len(scores)], dtype=torch.int32, device="cuda"),
                out=out,
                row_slot=None,
                state=self.state.words,
                indices=self.state.indices,
                counts=None,
                page_table=None,
                slots=None,
                stats=self.stats,
                phase_clocks=None,
                k=self.k,
                path=KernelPath.PAPER_GVR,
                flags=self.flags,
                hint_offset=self.offset,
            )
        )
        return int(self.stats[0, StatsColumn.PASSES]), out[0].cpu().numpy()


def summarize(passes: Sequence[StepPasses], k: int) -> dict[str, Any]:
    """Figures of one table row; the kernel's where it ran."""
    counts = np.array([step.reference if step.kernel is None else step.kernel for step in passes])
    ran = [step for step in passes if step.kernel is not None]
    return {
        "steps": len(passes),
        "hit_ratio": float(np.mean([step.hits / k for step in passes])),
        "mean_passes": float(counts.mean()),
        "within": [float((counts <= most).mean()) for most in (1, 2, 3)],
        "max_passes": int(counts.max()),
        "as_reference": float(np.mean([step.kernel == step.reference for step in ran])) if ran else None,
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The figures as Markdown."""
    headers = (
        "source",
        "guess",
        "offset",
        "hit ratio",
        "passes",
        "in 1",
        "in 2",
        "in 3",
        "most",
        "as reference",
    )
    lines = [
        [
            row["source"],
            row["guess"],
            str(row["offset"]),
            f"{row['hit_ratio']:.2f}",
            f"{row['mean_passes']:.2f}",
            *(f"{share:.0%}" for share in row["within"]),
            str(row["max_passes"]),
            "" if row["as_reference"] is None else f"{row['as_reference']:.0%}",
        ]
        for row in rows
    ]
    return markdown_table(headers, lines)


def main(
    out: Annotated[Path, typer.Option(help="Result file; the table goes beside it as .md.")] = Path(
        "out/guess_table.json"
    ),
    traces: TraceFolder = None,
    layers: Annotated[str, typer.Option(help="Layers of the generator.")] = ",".join(map(str, LAYERS)),
    steps: Annotated[int, typer.Option(help="Most steps of a trace.", min=1)] = 256,
    generated: Annotated[int, typer.Option(help="Steps of the generator.", min=1)] = 24,
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    commit: Annotated[str, typer.Option(help="Commit of the sources, where Git cannot say.")] = "",
) -> None:
    """Replay every source with every guess."""
    names = [layer for layer in layers.split(",") if layer]
    known = {str(layer) for layer in LAYERS}
    if not set(names) <= known:
        raise typer.BadParameter(f"--layers: wanted some of {','.join(known)}, got {layers!r}")
    require_device(device)
    require_writable(out)
    torch.set_num_threads(1)  # rows are too short to share
    sources: list[ScoreSource] = [*load_traces(traces)]
    sources += [LayerGenerator(int(layer), GENERATED_LENGTH, generated) for layer in names]
    rows = []
    for source in sources:
        for guess in GUESSES:
            for offset in OFFSETS:
                figures = summarize(replay(source, K, guess, offset, steps, device), K)
                rows.append({"source": source.name, "guess": guess, "offset": offset, **figures})
        print(f"{source.name} done", flush=True)
    kind = "the kernel" if device == "cuda" else "the reference"
    data = {
        "format": "gvr_topk.guess_table/1",
        "of": kind,
        "k": K,
        "machine": describe_machine(commit),
        "rows": rows,
    }
    write_json(out, data)
    out.with_suffix(".md").write_text(table(rows) + "\n")
    print(f"passes of {kind}, k = {K}\n{table(rows)}")
