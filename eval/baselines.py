"""Other top-k kernels behind one interface, and what to say where one of them cannot be had.

Each needs files that this project does not hold. They are looked for below ``--baseline-dir`` (or
``$GVR_TOPK_BASELINES``), at any depth, plain or compressed as ``NAME.xz``:

==============  =========================================  =================================================
name            file                                       where it comes from
==============  =========================================  =================================================
``trtllm``      ``libtrtllm_kernel.so``, ``libnuma.so.1``  wheel tokenspeed-trtllm-kernel 1.2.1.post20260427
                                                           (TensorRT-LLM 1.2.1); Debian package libnuma1
``vllm``        ``_C_stable_libtorch.abi3.so``             wheel vllm 0.33.0
``flashinfer``  ``topk.so``, folder ``tvm_ffi``            flashinfer-python 0.7.2's ``topk`` module, compiled
                                                           for sm_90a; wheel apache-tvm-ffi 0.1.11
==============  =========================================  =================================================

``torch`` is always there. An operator is called as its own project calls it in decode: its output is
allocated beforehand where its interface allows that, and never sorted or converted.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import lzma
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from eval.kernel_timing import Rows

ENVIRONMENT = "GVR_TOPK_BASELINES"
POISON = -7777
VLLM_WORKSPACE_BYTES = 1 << 20
VLLM_K = (512, 1024, 2048)
VLLM_COOPERATIVE_ROWS = 64
FLASHINFER_STATES_BYTES = 1 << 20

_MISSING = re.compile(r"(\S+): cannot open shared object file")


class BaselineError(RuntimeError):
    """A baseline cannot be loaded here; the message says what is missing."""


@dataclass(frozen=True)
class Prepared:
    """An implementation bound to rows: ``launch(i)`` serves buffer ``i``, ``results[i]`` is its answer."""

    launch: Callable[[int], None]
    results: Tensor  # [count, batch, k] int32 or int64
    statistics: Callable[[int], Tensor] | None = None  # launches once more, with the op's statistics

    def poison(self) -> None:
        self.results.fill_(POISON)


@dataclass(frozen=True)
class Baseline:
    """One foreign implementation.

    Attributes
    ----------
    name, version : str
        Short label, and what exactly was loaded.
    refuse : callable
        ``refuse(rows, dtype, k) -> str``: why it cannot serve a shape, or an empty string.
    prepare : callable
        ``prepare(Rows) -> Prepared``.
    why_not : str
        Why it cannot be loaded here; empty when it can.
    """

    name: str
    version: str
    refuse: Callable[[int, torch.dtype, int], str]
    prepare: Callable[[Rows], Prepared]
    why_not: str = ""


def available(folder: Path | None = None) -> dict[str, Baseline]:
    """Every baseline by name, also those that cannot be loaded: their `why_not` says why.

    Parameters
    ----------
    folder : Path, optional
        Where the files are; default ``$GVR_TOPK_BASELINES``.
    """
    if folder is None and ENVIRONMENT in os.environ:
        folder = Path(os.environ[ENVIRONMENT])
    found = {"torch": Baseline("torch", f"torch.topk of torch {torch.__version__}", _any_shape, _torch)}
    for name, version, load in (
        ("trtllm", "TensorRT-LLM 1.2.1 indexer_topk_decode (tokenspeed-trtllm-kernel)", _load_trtllm),
        ("vllm", "vLLM 0.33.0: cooperative_topk, persistent_topk above 64 rows", _load_vllm),
        ("vllm_per_row", "vLLM 0.33.0 top_k_per_row_decode", _load_vllm_per_row),
        ("flashinfer", "FlashInfer 0.7.2 top_k, its backends for captured graphs", _load_flashinfer),
    ):
        try:
            if not torch.cuda.is_available():
                raise BaselineError("no CUDA device")
            if folder is None:
                raise BaselineError(f"no folder given (--baseline-dir or ${ENVIRONMENT})")
            found[name] = load(name, version, folder)
        except (BaselineError, OSError, AttributeError, ImportError) as error:
            found[name] = Baseline(name, version, _any_shape, _unloaded, str(error).splitlines()[0])
    return found


def find_file(folder: Path, name: str) -> Path:
    """Path of a plain copy of `name` below `folder`; a compressed one is unpacked to a temporary folder.

    Raises
    ------
    BaselineError
        There is neither.
    """
    for path in sorted(folder.rglob(name)):
        return path
    for path in sorted(folder.rglob(name + ".xz")):
        # Not below `folder`, which may be read-only or under version control.
        unpacked = Path(tempfile.gettempdir()) / f"gvr_topk_baselines_{os.getuid()}" / name
        unpacked.parent.mkdir(exist_ok=True)
        partial = unpacked.with_name(f"{name}.{os.getpid()}")
        with lzma.open(path) as source, partial.open("wb") as target:
            shutil.copyfileobj(source, target)
        partial.replace(unpacked)
        return unpacked
    raise BaselineError(f"no {name} or {name}.xz below {folder}")


@functools.cache
def load_library(path: Path, helpers: Path) -> None:
    """Load a library whose static initialisers register torch operators.

    Symbols bind on first call: such libraries hold operators whose own libraries are not there. A needed
    library that the loader cannot find is taken from `helpers` or from the NVIDIA wheels beside torch.

    Raises
    ------
    OSError
        What the loader said.
    """
    while True:
        try:
            ctypes.CDLL(str(path), mode=os.RTLD_LAZY)
            return
        except OSError as error:
            missing = _MISSING.match(str(error))
            if missing is None or missing[1] == str(path):
                raise
            helper = _find_helper(missing[1], helpers)
            if helper is None:
                raise
            ctypes.CDLL(str(helper), mode=ctypes.RTLD_GLOBAL)


def _find_helper(name: str, helpers: Path) -> Path | None:
    packages = Path(torch.__file__).resolve().parent.parent
    places = [
        *helpers.rglob(name),
        *packages.glob(f"nvidia/**/lib/{name}"),
        packages / "torch" / "lib" / name,
    ]
    return next((place for place in places if place.is_file()), None)


def _any_shape(rows: int, dtype: torch.dtype, k: int) -> str:
    return ""


def _only_fp32(rows: int, dtype: torch.dtype, k: int) -> str:
    return "" if dtype == torch.float32 else "takes float32 only"


def _vllm_shapes(rows: int, dtype: torch.dtype, k: int) -> str:
    if k not in VLLM_K:
        return f"takes k of {VLLM_K} only"
    return _only_fp32(rows, dtype, k)


def _unloaded(rows: Rows) -> Prepared:
    raise BaselineError("not loaded")


def _results(rows: Rows, dtype: torch.dtype = torch.int32) -> Tensor:
    count, batch, _ = rows.logits.shape
    return torch.full((count, batch, rows.k), POISON, dtype=dtype, device=rows.logits.device)


def _full_rows(rows: Rows) -> Tensor:
    """The rows for operators without lengths: what lies past a row's length must not win."""
    width = rows.logits.shape[2]
    lengths = rows.lengths.expand(rows.logits.shape[:2])
    if bool((lengths == width).all()):
        return rows.logits
    beyond = torch.arange(width, device=lengths.device) >= lengths[..., None]
    return rows.logits.masked_fill(beyond, float("-inf"))


def _torch(rows: Rows) -> Prepared:
    logits = _full_rows(rows)
    results = _results(rows, torch.int64)
    values = torch.empty(*results.shape[1:], dtype=logits.dtype, device=logits.device)

    def launch(i: int) -> None:
        torch.topk(logits[i], rows.k, dim=-1, sorted=False, out=(values, results[i]))

    return Prepared(launch, results)


def _load_trtllm(name: str, version: str, folder: Path) -> Baseline:
    load_library(find_file(folder, "libtrtllm_kernel.so"), folder)
    operator = torch.ops.trtllm.indexer_topk_decode.default

    def prepare(rows: Rows) -> Prepared:
        results = _results(rows)

        def launch(i: int) -> None:
            operator(rows.logits[i], rows.lengths_of(i), results[i], 1, rows.k)

        return Prepared(launch, results)

    return Baseline(name, version, _only_fp32, prepare)


def _load_vllm(name: str, version: str, folder: Path) -> Baseline:
    load_library(find_file(folder, "_C_stable_libtorch.abi3.so"), folder)
    cooperative, persistent = torch.ops._C.cooperative_topk.default, torch.ops._C.persistent_topk.default

    def prepare(rows: Rows) -> Prepared:
        results = _results(rows)
        _, batch, width = rows.logits.shape
        if rows.logits.stride(1) % 4:
            raise BaselineError(f"cooperative_topk wants rows of a multiple of 4 elements, got {width}")
        workspace = torch.empty(VLLM_WORKSPACE_BYTES, dtype=torch.uint8, device=results.device)
        operator = cooperative if batch <= VLLM_COOPERATIVE_ROWS else persistent

        def launch(i: int) -> None:
            operator(rows.logits[i], rows.lengths_of(i), results[i], workspace, rows.k, width)

        return Prepared(launch, results)

    return Baseline(name, version, _vllm_shapes, prepare)


def _load_vllm_per_row(name: str, version: str, folder: Path) -> Baseline:
    load_library(find_file(folder, "_C_stable_libtorch.abi3.so"), folder)
    operator = torch.ops._C.top_k_per_row_decode.default

    def prepare(rows: Rows) -> Prepared:
        results = _results(rows)
        batch, stride = rows.logits.shape[1], rows.logits.stride(1)

        def launch(i: int) -> None:
            operator(rows.logits[i], 1, rows.lengths_of(i), results[i], batch, stride, 1, rows.k)

        return Prepared(launch, results)

    return Baseline(name, version, _only_fp32, prepare)


def _load_flashinfer(name: str, version: str, folder: Path) -> Baseline:
    path = find_file(folder, "topk.so")
    ffi = _import_from("tvm_ffi", folder)
    module: Any = ffi.load_module(str(path))

    def prepare(rows: Rows) -> Prepared:
        logits = _full_rows(rows)
        _, batch, width = logits.shape
        values = torch.empty(batch, rows.k, dtype=logits.dtype, device=logits.device)
        # FlashInfer's own rule for calls inside a captured graph.
        long_row = 32768 if logits.dtype == torch.float32 else 65536
        cub = batch < 128 or width <= 8192 or width >= long_row
        results = _results(rows, torch.int64 if cub else torch.int32)
        if cub:
            workspace = torch.empty(
                int(module.cub_topk_workspace_size(logits[0], rows.k, 0)),
                dtype=torch.uint8,
                device=logits.device,
            )
        else:
            workspace = torch.zeros(FLASHINFER_STATES_BYTES, dtype=torch.uint8, device=logits.device)

        def launch(i: int) -> None:
            # The module takes its stream from the library's own notion of the current one.
            with ffi.use_raw_stream(ffi.device("cuda:0"), torch.cuda.current_stream().cuda_stream):
                if cub:
                    module.cub_topk(logits[i], results[i], values, workspace, rows.k, 0)
                else:
                    module.radix_topk(
                        logits[i], results[i], values, workspace, rows.k, False, False, 0, False
                    )

        return Prepared(launch, results)

    return Baseline(name, version, _any_shape, prepare)


def _import_from(name: str, folder: Path) -> ModuleType:
    """Import a package that may lie in a folder of its own below `folder`."""
    try:
        return importlib.import_module(name)
    except ImportError:
        for place in sorted(folder.rglob(f"{name}/__init__.py")):
            sys.path.append(str(place.parent.parent))
            return importlib.import_module(name)
        raise
