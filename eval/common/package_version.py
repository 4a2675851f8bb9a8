"""One version of the package out of several, and what its op takes to carry a state from step to step.

This module imports nothing of ``gvr_topk`` itself, so that a process which imports it can still choose.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

PACKAGE = "gvr_topk"
CUDA_LIBRARY = Path(PACKAGE, "lib", "libgvr_topk_cuda.so")
"""The compiled kernels, below a version's folder."""

LIBRARY_DIR_VARIABLE = "GVR_TOPK_LIBRARY_DIR"
"""Environment variable by which versions that know it would all load the same library."""

STATE = "state"
GUESS_STATE = "guess_state"
GUESS_AND_PRIOR = "guess_state and prior"
"""What carries a state: a `TopkState`; 16 bytes a slot; or a float a slot, with the positions chosen last."""


class VersionError(RuntimeError):
    """The version that was asked for cannot run in this process, and another one would run."""


@dataclass(frozen=True)
class Hint:
    """What a version's op gets to predict from.

    Attributes
    ----------
    options : dict
        Keyword arguments of the op.
    tensors : tuple of Tensor
        The tensors among them, or inside of them, which each step changes.
    """

    options: dict[str, Any] = field(default_factory=dict)
    tensors: tuple[Tensor, ...] = ()


class _OneFolder(MetaPathFinder):
    """Finds the package and its modules in one folder, and nowhere else.

    A folder at the front of ``sys.path`` would not do: editable installs have finders that come first.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] != PACKAGE:
            return None
        spec = PathFinder.find_spec(fullname, [str(self.folder)] if path is None else path)
        if spec is None:
            raise ModuleNotFoundError(f"wanted the module {fullname} in {self.folder}", name=fullname)
        return spec


def import_version(folder: Path) -> ModuleType:
    """Import the package that a folder holds, for the rest of the process.

    Parameters
    ----------
    folder : Path
        Holds ``gvr_topk/``, whose libraries are loaded whatever `LIBRARY_DIR_VARIABLE` says.

    Raises
    ------
    VersionError
        The process has already imported a version.
    """
    if PACKAGE in sys.modules:
        raise VersionError(f"wanted {PACKAGE} of {folder}, got {sys.modules[PACKAGE].__file__} already")
    os.environ.pop(LIBRARY_DIR_VARIABLE, None)
    sys.meta_path.insert(0, _OneFolder(folder))
    return importlib.import_module(PACKAGE)


def check_library(package: ModuleType, folder: Path) -> None:
    """Make sure that the kernels of a version are those that its folder holds.

    Raises
    ------
    VersionError
        The library did not load, or lies elsewhere.
    """
    status = package.library_status()
    wanted = folder / CUDA_LIBRARY
    if not status.loaded or Path(status.path).resolve() != wanted.resolve():
        raise VersionError(f"wanted the library {wanted}, got {status.path}: {status.reason}")


def state_api(package: ModuleType) -> str:
    """How a version carries a state, told by what it exports: `STATE`, `GUESS_STATE` or `GUESS_AND_PRIOR`."""
    if hasattr(package, "TopkState"):
        return STATE
    return GUESS_STATE if hasattr(package, "new_guess_state") else GUESS_AND_PRIOR


def new_hint(package: ModuleType, slots: int, k: int, device: torch.device | str) -> Hint:
    """A state of slots that nothing is known of, as a version's op takes it.

    Parameters
    ----------
    package : module
        The version.
    slots, k : int
        Requests with a state, items per row.
    device : torch.device or str
        The scores' device.
    """
    api = state_api(package)
    if api == STATE:
        state = package.TopkState(slots, k, device, keep_indices=False)
        return Hint({"state": state}, (state.words,))
    if api == GUESS_STATE:
        words = package.new_guess_state(slots, device)
        return Hint({"guess_state": words}, (words,))
    guesses = torch.full((slots,), -1.0, dtype=torch.float32, device=device)
    prior = torch.full((slots, k), -1, dtype=torch.int32, device=device)
    return Hint({"guess_state": guesses, "prior": prior}, (guesses, prior))
