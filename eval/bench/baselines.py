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
``cudnn``       ``cudnn_topk.so``, folder ``tvm_ffi``      cuDNN frontend 1.32.0's ``IndexerTopK``, compiled
                                                           for sm_90a by ``eval.bench.cudnn_topk``
``vllm_merge``  ``vllm_merge.so``, folder ``tvm_ffi``      vLLM 0.33.0's merge of ranks, compiled for sm_90a
                                                           by ``eval.bench.vllm_merge``, for ``eval sharded``
==============  =========================================  =================================================

``torch`` is always there, and so are ``torch_blocks`` and ``torch_in_blocks``: the two-level indexer of
DeepSeek-V4.1 by PyTorch's operators, as engines have it where no kernel of its own serves.
``flashinfer_ragged``, ``flashinfer_deterministic``, ``trtllm_prefill`` and ``vllm_prefill`` are further
operators of the same files. ``flashinfer_deterministic`` and ``cudnn`` promise what this package promises:
one selection, of which ties with the smallest indices are members. An operator is called as its own project
calls it: its output is allocated beforehand where its interface allows that, and never sorted or converted.
Each step's tensors are made beforehand too, so that a launch costs the host no more than the operator does.
"""

import atexit
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
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from eval.bench.cudnn_topk import CUDNN_ROWS, cudnn_function
from eval.bench.kernel_timing import Chain, Implementation, Prepared
from eval.bench.oracles import BLOCK_K, given_blocks
from eval.common.options import no_gpu
from gvr_topk.constants import BLOCK_SIZE

ENVIRONMENT = "GVR_TOPK_BASELINES"
TRTLLM_LIBRARY = "libtrtllm_kernel.so"
VLLM_LIBRARY = "_C_stable_libtorch.abi3.so"
VLLM_WORKSPACE_BYTES = 1 << 20
VLLM_K = (512, 1024, 2048)
VLLM_COOPERATIVE_ROWS = 64
FLASHINFER_STATES_BYTES = 1 << 20
FLASHINFER_SMALL_TIES = 1
"""``TopKTieBreak.SMALL``."""
WITHOUT_LENGTHS = ("torch", "flashinfer")
"""Operators that rank a whole row. Behind its length they get -inf, and choose it in rows shorter than k."""

_MISSING = re.compile(r"(\S+): cannot open shared object file")


class BaselineError(RuntimeError):
    """A baseline cannot be loaded here; the message says what is missing."""


Call = Callable[..., Any]
Arguments = Callable[..., tuple[Any, ...]]
Prepare = Callable[[Chain], Prepared]
Refuse = Callable[[int, int, int, torch.dtype], str]


def given_folder(folder: Path | None) -> Path:
    """The folder of other projects' files, which the environment names by default."""
    if folder is not None:
        return folder
    if ENVIRONMENT not in os.environ:
        raise BaselineError(f"no folder given (--baseline-dir or ${ENVIRONMENT})")
    return Path(os.environ[ENVIRONMENT])


def find_file(folder: Path, name: str) -> Path:
    """Path of a plain copy of `name` below `folder`; a compressed one is unpacked for this process."""
    for path in sorted(folder.rglob(name)):
        return path
    for path in sorted(folder.rglob(name + ".xz")):
        return _unpacked(path)
    raise BaselineError(f"no {name} or {name}.xz below {folder}")


@functools.cache
def _own_folder() -> Path:
    """A new folder that only this user can write to, removed at exit: nobody else can put a library there."""
    folder = Path(tempfile.mkdtemp(prefix="gvr_topk_baselines_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@functools.cache
def _unpacked(compressed: Path) -> Path:
    """Unpack a file once. Its own folder may be read-only or under version control."""
    unpacked = _own_folder() / compressed.stem
    with lzma.open(compressed) as source, unpacked.open("wb") as target:
        shutil.copyfileobj(source, target)
    return unpacked


@functools.cache
def load_library(folder: Path, name: str) -> None:
    """Load a library below `folder` whose static initialisers register torch operators.

    Symbols bind on first call: such libraries hold operators whose own libraries are not there. A needed
    library that the loader cannot find is taken from `folder` or from the NVIDIA wheels beside torch.
    """
    path = find_file(folder, name)
    while True:
        try:
            ctypes.CDLL(str(path), mode=os.RTLD_LAZY)
            return
        except OSError as error:
            missing = _MISSING.match(str(error))
            if missing is None or missing[1] == str(path):
                raise
            helper = _find_helper(missing[1], folder)
            if helper is None:
                raise
            ctypes.CDLL(str(helper), mode=ctypes.RTLD_GLOBAL)


def _find_helper(name: str, folder: Path) -> Path | None:
    try:
        return find_file(folder, name)
    except BaselineError:
        packages = Path(torch.__file__).resolve().parent.parent
        candidates = [*packages.glob(f"nvidia/**/lib/{name}"), packages / "torch" / "lib" / name]
        return next((path for path in candidates if path.is_file()), None)


def _any_shape(rows: int, width: int, k: int, dtype: torch.dtype) -> str:
    return ""


def _only_fp32(rows: int, width: int, k: int, dtype: torch.dtype) -> str:
    return "" if dtype == torch.float32 else "takes float32 only"


def _vllm_shapes(rows: int, width: int, k: int, dtype: torch.dtype) -> str:
    return _only_fp32(rows, width, k, dtype) if k in VLLM_K else f"takes k of {VLLM_K} only"


def _unloaded(chain: Chain) -> Prepared:
    raise BaselineError("not loaded")


def _calls(
    operator: Call, chain: Chain, results: Tensor, arguments: Arguments, logits: Tensor | None = None
) -> Prepared:
    """An operator with its ``arguments(row, lengths, out)`` at each step, which are made beforehand."""
    rows = zip(chain.logits if logits is None else logits, results, strict=True)
    of_steps = [arguments(row, chain.lengths_of(step), out) for step, (row, out) in enumerate(rows)]

    def launch(step: int) -> None:
        operator(*of_steps[step])

    return Prepared(launch, results)


def _full_rows(chain: Chain) -> Tensor:
    """The rows for operators without lengths: what lies past a row's length must not win."""
    width = chain.logits.shape[2]
    lengths = chain.lengths.expand(chain.logits.shape[:2])
    if bool((lengths == width).all()):
        return chain.logits
    beyond = torch.arange(width, device=lengths.device) >= lengths[..., None]
    return chain.logits.masked_fill(beyond, float("-inf"))


def _torch(chain: Chain) -> Prepared:
    results = chain.outputs(dtype=torch.int64)
    logits = _full_rows(chain)
    values = torch.empty(*results.shape[1:], dtype=logits.dtype, device=logits.device)

    def topk(row: Tensor, out: Tensor) -> None:
        torch.topk(row, chain.k, dim=-1, sorted=False, out=(values, out))

    return _calls(topk, chain, results, lambda row, _, out: (row, out), logits)


def _rows_of_blocks(chain: Chain) -> tuple[Tensor, ...]:
    """Rows of a two-level indexer, which have as many blocks as are chosen."""
    least, width = BLOCK_K * BLOCK_SIZE, chain.logits.shape[2]
    if width < least:
        raise BaselineError(f"takes rows of at least {least} elements, got {width}")
    return _full_rows(chain).unbind()


def _block_mask(best: Tensor, blocks: int) -> Tensor:
    """Which of the blocks of each row are among the best."""
    mask = torch.zeros(best.shape[0], blocks, dtype=torch.bool, device=best.device)
    return mask.scatter_(1, best, True)


def _torch_blocks(chain: Chain) -> Prepared:
    """The source: positions, blocks in ascending order, and the mask of blocks that its consumers take."""
    rows = _rows_of_blocks(chain)
    results = chain.outputs(chain.k + BLOCK_K, torch.int64)
    newest = [(chain.lengths_of(step).long()[:, None] - 1) // BLOCK_SIZE for step in range(chain.count)]

    def launch(step: int) -> None:
        keys = rows[step].unflatten(1, (-1, BLOCK_SIZE)).amax(dim=2)
        keys.scatter_(1, newest[step], float("inf"))
        best = keys.topk(BLOCK_K, dim=1, sorted=False).indices.sort(dim=1).values
        _block_mask(best, keys.shape[1])
        results[step][:, chain.k :] = best
        results[step][:, : chain.k] = rows[step].topk(chain.k, dim=1, sorted=False).indices

    return Prepared(launch, results)


def _torch_in_blocks(chain: Chain) -> Prepared:
    """A consumer, whose mask the source has made."""
    rows = _rows_of_blocks(chain)
    results = chain.outputs(dtype=torch.int64)
    blocks = rows[0].shape[1] // BLOCK_SIZE
    outside = [~_block_mask(given.long(), blocks)[:, :, None] for given in given_blocks(chain)]

    def launch(step: int) -> None:
        masked = rows[step].unflatten(1, (-1, BLOCK_SIZE)).masked_fill(outside[step], float("-inf"))
        results[step] = masked.flatten(1).topk(chain.k, dim=1, sorted=False).indices

    return Prepared(launch, results)


@functools.cache
def _zeros(size: int, device: torch.device, dtype: torch.dtype = torch.uint8) -> Tensor:
    return torch.zeros(size, dtype=dtype, device=device)


def _starts(chain: Chain) -> Tensor:
    """Starts of windows, all at column 0."""
    return _zeros(chain.batch, chain.logits.device, torch.int32)


def _operator(
    library: str, names: str, arguments: Arguments, choose: Callable[[Chain], int] = lambda chain: 0
) -> Callable[[Path], Prepare]:
    """Loader of an operator that a library registers, ``namespace::name``.

    Several have spaces between them, and ``choose(chain)`` gives the place of one. Those of a step are
    ``arguments(chain, row, lengths, out)``.
    """

    def load(folder: Path) -> Prepare:
        load_library(folder, library)
        pairs = (name.split("::") for name in names.split())
        operators = [getattr(getattr(torch.ops, space), name).default for space, name in pairs]

        def prepare(chain: Chain) -> Prepared:
            operator, results = operators[choose(chain)], chain.outputs()
            return _calls(operator, chain, results, functools.partial(arguments, chain))

        return prepare

    return load


def _vllm_choice(chain: Chain) -> int:
    if chain.logits.stride(1) % 4:
        width = chain.logits.shape[2]
        raise BaselineError(f"cooperative_topk takes rows of a multiple of 4 elements, got {width}")
    return int(chain.batch > VLLM_COOPERATIVE_ROWS)


def _vllm_arguments(chain: Chain, row: Tensor, lengths: Tensor, out: Tensor) -> tuple[Any, ...]:
    workspace = _zeros(VLLM_WORKSPACE_BYTES, row.device)
    return row, lengths, out, workspace, chain.k, row.shape[1]


def _bytes(size: int, like: Tensor) -> Tensor:
    return torch.zeros(size, dtype=torch.uint8, device=like.device)


def _flashinfer(folder: Path) -> Prepare:
    ffi, module = ffi_module(folder, "topk.so")

    def prepare(chain: Chain) -> Prepared:
        logits, k = _full_rows(chain), chain.k
        values = torch.empty(chain.batch, k, dtype=logits.dtype, device=logits.device)
        rest: tuple[Any, ...]
        cub = flashinfer_takes_cub(chain.batch, logits.shape[2], logits.dtype)
        results = chain.outputs(dtype=torch.int64 if cub else torch.int32)
        if cub:
            function, rest = module.cub_topk, (k, 0)
            workspace = _bytes(int(module.cub_topk_workspace_size(logits[0], *rest)), logits)
        else:
            function, rest = module.radix_topk, (k, False, False, 0, False)
            workspace = _bytes(FLASHINFER_STATES_BYTES, logits)
        call = on_stream(ffi, function)
        return _calls(call, chain, results, lambda row, _, out: (row, out, values, workspace, *rest), logits)

    return prepare


def _flashinfer_ragged(folder: Path, *, deterministic: bool = False) -> Prepare:
    """The call that takes a length for each row; deterministic calls prefer smaller indices, too."""
    ffi, module = ffi_module(folder, "topk.so")
    tie_break = FLASHINFER_SMALL_TIES if deterministic else 0

    def prepare(chain: Chain) -> Prepared:
        logits, k, offsets = chain.logits, chain.k, _starts(chain)
        results = chain.outputs()
        rest: tuple[Any, ...]
        # FlashInfer's own rule: CUB's calls have no reproducible order, so deterministic ones never take it.
        cub = not deterministic and flashinfer_ragged_takes_cub(chain.batch, logits.shape[2], logits.dtype)
        if cub:
            function, rest = module.cub_topk_ragged_transform, (k, tie_break, None)
            size = module.cub_topk_ragged_transform_workspace_size(
                logits[0], chain.lengths_of(0), k, tie_break, False
            )
            workspace = _bytes(int(size), logits)
        else:
            function = module.radix_topk_ragged_transform
            rest = (k, deterministic, tie_break, False, None)
            workspace = _bytes(FLASHINFER_STATES_BYTES, logits)
        call = on_stream(ffi, function)
        return _calls(
            call, chain, results, lambda row, lengths, out: (row, out, offsets, lengths, workspace, *rest)
        )

    return prepare


def _cudnn(folder: Path) -> Prepare:
    """Kernels of cuDNN are compiled for k and for a power of two of columns; rows take the next of these."""
    ffi, module = ffi_module(folder, "cudnn_topk.so")

    def prepare(chain: Chain) -> Prepared:
        width = chain.logits.shape[2]
        if chain.batch > CUDNN_ROWS:
            raise BaselineError(f"compiled for at most {CUDNN_ROWS} rows, got {chain.batch}")
        try:
            kernel = module[cudnn_function(width, chain.k)]
        except AttributeError:
            raise BaselineError(f"compiled for other columns and k than {width} and {chain.k}") from None
        results = chain.outputs()
        scratch = torch.empty((chain.batch, 2, width), dtype=torch.int32, device=results.device)
        call = on_stream(ffi, kernel)
        return _calls(
            call, chain, results, lambda row, lengths, out: (row, None, scratch, None, lengths, out, None)
        )

    return prepare


def flashinfer_takes_cub(rows: int, width: int, dtype: torch.dtype) -> bool:
    """FlashInfer's rule for `top_k` inside a captured graph, ``is_cub_topk_beneficial``."""
    return rows < 128 or width <= 8192 or width >= (32768 if dtype == torch.float32 else 65536)


def flashinfer_ragged_takes_cub(rows: int, width: int, dtype: torch.dtype) -> bool:
    """FlashInfer's rule for ragged calls inside a captured graph, ``is_cub_ragged_transform_beneficial``."""
    if rows < 128:
        return width >= 32768
    return rows <= 256 and width >= (131072 if dtype == torch.float16 else 65536)


def ffi_module(folder: Path, name: str) -> tuple[ModuleType, Any]:
    """The bindings' own package, and a module that was compiled for them."""
    path = find_file(folder, name)
    ffi = _import_from("tvm_ffi", folder)
    return ffi, ffi.load_module(str(path))


def on_stream(ffi: Any, function: Call) -> Call:
    """A function of such a module on torch's stream: it has a notion of its own of the current one."""

    def call(*arguments: Any) -> None:
        device = ffi.device(f"cuda:{torch.cuda.current_device()}")
        with ffi.use_raw_stream(device, torch.cuda.current_stream().cuda_stream):
            function(*arguments)

    return call


def _import_from(name: str, folder: Path) -> ModuleType:
    """Import a package that may lie in a folder of its own below `folder`."""
    try:
        return importlib.import_module(name)
    except ImportError:
        for init in sorted(folder.rglob(f"{name}/__init__.py")):
            sys.path.append(str(init.parent.parent))
            return importlib.import_module(name)
        raise


TORCH: dict[str, tuple[str, Prepare]] = {
    "torch": ("torch.topk", _torch),
    "torch_blocks": ("amax, topk of blocks, sort, mask and topk of positions", _torch_blocks),
    "torch_in_blocks": ("masked_fill and topk", _torch_in_blocks),
}
"""What is called of torch, and how."""

FP32, ANY = _only_fp32, _any_shape
LOADED: dict[str, tuple[str, Refuse, Callable[[Path], Prepare]]] = {
    "trtllm": (
        *("TensorRT-LLM 1.2.1 indexer_topk_decode", FP32),
        _operator(TRTLLM_LIBRARY, "trtllm::indexer_topk_decode", lambda c, *its: (*its, 1, c.k)),
    ),
    "vllm": (
        *("vLLM 0.33.0: cooperative_topk, persistent_topk above 64 rows", _vllm_shapes),
        _operator(VLLM_LIBRARY, "_C::cooperative_topk _C::persistent_topk", _vllm_arguments, _vllm_choice),
    ),
    "flashinfer": ("FlashInfer 0.7.2 top_k, as in a captured graph", ANY, _flashinfer),
    "flashinfer_ragged": ("FlashInfer 0.7.2 top_k_ragged_transform", ANY, _flashinfer_ragged),
    "flashinfer_deterministic": (
        *("FlashInfer 0.7.2 top_k_ragged_transform, deterministic, smaller indices of ties", ANY),
        functools.partial(_flashinfer_ragged, deterministic=True),
    ),
    "cudnn": ("cuDNN frontend 1.32.0 IndexerTopK, deterministic, smaller indices of ties", FP32, _cudnn),
    "trtllm_prefill": (
        *("TensorRT-LLM 1.2.1 indexer_topk_prefill", FP32),
        _operator(
            *(TRTLLM_LIBRARY, "trtllm::indexer_topk_prefill"),
            lambda c, row, n, out: (row, _starts(c), n, out, c.k),
        ),
    ),
    "vllm_prefill": (
        *("vLLM 0.33.0 top_k_per_row_prefill", FP32),
        _operator(
            *(VLLM_LIBRARY, "_C::top_k_per_row_prefill"),
            lambda c, row, n, out: (row, _starts(c), n, out, c.batch, c.logits.stride(1), 1, c.k),
        ),
    ),
}
"""What is loaded of other projects, the shapes that it serves, and how."""


def available(folder: Path | None = None) -> dict[str, Implementation]:
    """Every baseline by name, also those that cannot be loaded: their `why_not` says why."""
    found = {
        name: Implementation(name, prepare, version=f"{what} of torch {torch.__version__}")
        for name, (what, prepare) in TORCH.items()
    }
    for name, (version, refuse, load) in LOADED.items():
        try:
            if not torch.cuda.is_available():
                raise BaselineError(no_gpu())
            found[name] = Implementation(name, load(given_folder(folder)), refuse, version)
        except (BaselineError, OSError, AttributeError, ImportError) as error:
            why_not = str(error).splitlines()[0]
            found[name] = Implementation(name, _unloaded, version=version, why_not=why_not)
    return found
