"""Command-line options that several verbs share, and checks of them."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

TraceFolder = Annotated[
    Path | None,
    typer.Option(help="Folder of .npz traces; adds the shipped one.", exists=True, file_okay=False),
]
"""Option for a folder of traces. One that is not there is refused: its traces would be missed in silence."""

Commit = Annotated[str, typer.Option(help="Commit of the sources, where Git cannot say.")]
Device = Annotated[str, typer.Option(help="cuda, or cpu to try the program itself.")]
Out = Annotated[Path, typer.Option(help="Result file.")]
BaselineFolder = Annotated[Path | None, typer.Option(help="Folder of other projects' files.")]


def no_gpu(option: str = "") -> str:
    """What to say where a CUDA GPU is missing, with the option that ``cpu`` may be given to."""
    if option:
        return f"{option}: wanted a CUDA GPU, got none; {option} cpu runs without"
    return "GPU: wanted a CUDA GPU, got none"


def names_of(option: str, text: str, known: Sequence[str]) -> list[str]:
    """Names in a comma-separated text, of which there is one at least; ``all`` stands for all."""
    names = list(known) if text == "all" else [name for name in text.split(",") if name]
    if not names or not set(names) <= set(known):
        raise typer.BadParameter(f"{option}: wanted all or some of {','.join(known)}, got {text!r}")
    return names


def require_gpu(option: str = "") -> None:
    """Refuse to go on without a CUDA GPU: one that is missing must not look like a wrong result."""
    import torch

    if not torch.cuda.is_available():
        raise typer.BadParameter(no_gpu(option))


def require_device(device: str) -> None:
    """Refuse a ``--device`` that is neither ``cuda`` nor ``cpu``, or missing."""
    if device not in ("cuda", "cpu"):
        raise typer.BadParameter(f"--device: wanted cuda or cpu, got {device!r}")
    if device == "cuda":
        require_gpu("--device")


def require_writable(out: Path | None, option: str = "--out") -> None:
    """Make the folder of a result file and try it, before hours are spent on what it is to hold."""
    if out is None:
        return
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        if out.is_dir():
            raise IsADirectoryError(0, "a folder")
        existed = out.exists()
        with out.open("ab"):
            pass
        if not existed:
            out.unlink()
    except OSError as error:
        wanted = f"{option}: wanted a file that can be written, got {out}: {_reason(error)}"
        raise typer.BadParameter(wanted) from None


def read_results(file: Path, version: str) -> dict[str, Any]:
    """Content of a result file, which must be JSON of a format."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise typer.BadParameter(f"{file}: wanted a result file, got {_reason(error)}") from None
    except ValueError:
        raise typer.BadParameter(f"{file}: wanted a result file, got no JSON") from None
    got = data.get("format") if isinstance(data, dict) else None
    if got != version:
        raise typer.BadParameter(f"{file}: wanted format {version!r}, got {got!r}")
    return dict(data)


def _reason(error: OSError) -> str:
    """Why a file could not be opened, without Python's number."""
    return (error.strerror or os.strerror(error.errno or 0)).lower()


def integers(option: str, text: str, least: int = 1) -> list[int]:
    """Integers in a comma-separated text."""
    given = [int(part) for part in text.split(",") if part.isdecimal()]
    if len(given) < len(text.split(",")) or min(given) < least:
        raise typer.BadParameter(f"{option}: wanted integers of at least {least}, got {text!r}")
    return given
