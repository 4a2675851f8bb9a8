"""Finding and loading the compiled libraries. Nothing here fails at import.

Libraries lie beside the package. The environment variable ``GVR_TOPK_LIBRARY_DIR``, read when a library is
first needed, names another folder to take all of them from, so that tests run on a build with other options.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import torch

_CUDA_LIBRARY = "libgvr_topk_cuda.so"
_POLICY_LIBRARY = "libgvr_topk_policy.so"

LIBRARY_DIR_VARIABLE = "GVR_TOPK_LIBRARY_DIR"
"""Environment variable that names the folder of the libraries if it is not the package's own."""


class LibraryError(RuntimeError):
    """A compiled library is needed and cannot be used; the message says why and what to do."""


@dataclass(frozen=True)
class LibraryStatus:
    """Whether the CUDA library is loaded, from where, and if not, why."""

    loaded: bool
    path: str | None
    reason: str


def _library_path(name: str) -> Path | None:
    chosen = os.environ.get(LIBRARY_DIR_VARIABLE)
    if chosen:
        named = Path(chosen).absolute() / name
        return named if named.is_file() else None
    found = resources.files("gvr_topk").joinpath("lib").joinpath(name)
    return Path(str(found)) if found.is_file() else None


def _chosen_folder_lacks(name: str) -> str:
    """Say that the folder of the environment variable does not hold a library; empty if none is chosen."""
    chosen = os.environ.get(LIBRARY_DIR_VARIABLE)
    return f"{LIBRARY_DIR_VARIABLE}={chosen} holds no {name}" if chosen else ""


def has_cuda_library() -> bool:
    """Whether this installation holds CUDA kernels; it does not say whether they load here."""
    return _library_path(_CUDA_LIBRARY) is not None


def build_facts() -> tuple[str, str]:
    """Return from which commit and for which GPU architectures the installed libraries were built.

    Both are empty in a checkout that nothing was built in.
    """
    try:
        built = importlib.import_module("gvr_topk._build")  # written by the build
    except ImportError:
        return "", ""
    archs = getattr(built, "ARCHS", "").replace("-real", "").replace(";", " ")
    return getattr(built, "COMMIT", ""), archs


@functools.cache
def library_status() -> LibraryStatus:
    """Load the CUDA library once, if there is one.

    Returns
    -------
    LibraryStatus
        ``loaded`` false means CUDA tensors cannot be served; the reason says whether the package was
        built without a CUDA compiler or the library does not load on this torch.
    """
    path = _library_path(_CUDA_LIBRARY)
    if path is None and (lacking := _chosen_folder_lacks(_CUDA_LIBRARY)):
        return LibraryStatus(False, None, lacking)
    if path is None and _library_path(_POLICY_LIBRARY) is None:
        # Every build has the policy library, so a missing compiler is not the reason.
        return LibraryStatus(False, None, "the package holds no compiled library at all: install it again")
    if path is None:
        return LibraryStatus(
            False,
            None,
            "built without a CUDA compiler: install from source where nvcc 12.9 or later is on PATH",
        )
    try:
        torch.ops.load_library(str(path))
    except (OSError, RuntimeError) as error:
        return LibraryStatus(False, str(path), f"does not load on torch {torch.__version__}: {error}")
    return LibraryStatus(True, str(path), f"loaded on torch {torch.__version__}")


@functools.cache
def policy_library() -> ctypes.CDLL:
    """Load the gate and plan (``policy.h``), which every installation has.

    A `LibraryError` if the package was not built (a source tree without the compiled policy), or the library
    does not load or is another version's.
    """
    path = _library_path(_POLICY_LIBRARY)
    if path is None and (lacking := _chosen_folder_lacks(_POLICY_LIBRARY)):
        raise LibraryError(f"gvr_topk: {lacking}")
    if path is None:
        raise LibraryError(
            f"gvr_topk: wanted {_POLICY_LIBRARY} beside the package, got none: "
            "install the package (pip install .)"
        )
    try:
        return _declared(ctypes.CDLL(str(path)))
    except (OSError, AttributeError) as error:  # AttributeError: a function is missing
        raise LibraryError(f"gvr_topk: {path} does not load: {error}") from None


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    """Declare the functions of the policy library."""
    library.gvr_topk_can_use_heuristic.argtypes = [
        *[ctypes.c_int32] * 2,
        *[ctypes.c_int64] * 6,
        ctypes.c_int32,
    ]
    library.gvr_topk_make_plan.argtypes = [
        *[ctypes.c_int64] * 3,
        *[ctypes.c_int32] * 7,
        ctypes.POINTER(ctypes.c_int32),
    ]
    library.gvr_topk_archs.argtypes = [ctypes.c_int32]
    library.gvr_topk_archs.restype = ctypes.c_char_p
    library.gvr_topk_has_code.argtypes = [ctypes.c_int32, ctypes.c_char_p]
    return library
