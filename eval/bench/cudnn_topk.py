"""Compile cuDNN frontend's ``IndexerTopK`` into a library that needs neither cuDNN nor CuTe DSL to run.

    python -m eval.bench.cudnn_topk FOLDER out/cudnn_topk.so

`FOLDER` holds the unpacked wheels nvidia-cudnn-frontend 1.32.0, nvidia-cutlass-dsl-libs-base, -core and -cu13
4.8.1, cuda-bindings 13, cuda-pathfinder, protobuf and apache-tvm-ffi 0.1.11, for the Python that runs this.
It needs a C compiler and the static CUDA runtime, but no GPU. Each kernel is a function of the library, named
by `cudnn_function`, and called through apache-tvm-ffi; its arguments are those of ``launch_topk_kernel``.
"""

import importlib
import os
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Iterable
from pathlib import Path

CUDNN_ROWS = 148
"""Most rows per launch. For more rows cuDNN compiles another kernel, which is not built here."""

SHAPES = {2048: range(12, 21), 1024: range(13, 19), 512: range(13, 19)}
"""For each k, the logarithms of the numbers of columns that a kernel is built for."""

PACKAGE = "cudnn.deepseek_sparse_attention.indexer_top_k"

ERROR = """
extern void TVMFFIErrorSetRaisedFromCStr(const char*, const char*);
void CuteDSLRT_TVMFFISetRaisedCudaError(int status) {
  TVMFFIErrorSetRaisedFromCStr("RuntimeError", "a CUDA call of a kernel of CuTe DSL failed");
}
"""
"""The one function that kernels need of CuTe DSL's runtime library of 43 MB: it raises an error."""


def cudnn_function(columns: int, k: int) -> str:
    """Name of the function that serves rows of so many columns: cuDNN rounds them up to a power of two."""
    return f"indexer_topk_{1 << (columns - 1).bit_length()}_{k}"


def use_wheels(folder: Path, bare: Iterable[str]) -> None:
    """Import from unpacked wheels, and compile for Hopper. Packages in `bare` run no code of theirs."""
    os.environ["CUTE_DSL_ARCH"] = "sm_90a"
    sys.path[:0] = [str(folder / "nvidia_cutlass_dsl" / "dsl_packages"), str(folder)]
    for name in bare:
        package = types.ModuleType(name)
        package.__path__ = [str(folder / name.replace(".", "/"))]
        sys.modules[name] = package


def compile_kernels(folder: Path, out: Path) -> None:
    """Write an object file for each kernel."""
    import torch

    # Packages' own files of that name import cuDNN's library, which the kernels do not need.
    names = PACKAGE.split(".")
    use_wheels(folder, (*(".".join(names[:last]) for last in (1, 2, 3)), f"{names[0]}.{names[1]}.utils"))
    cuda = torch.cuda
    cuda.is_available = lambda: True
    cuda.get_device_capability = lambda *arguments: (9, 0)
    cuda.current_device = lambda: 0
    kernels = importlib.import_module(f"{PACKAGE}.indexer_top_k_decode_varlen")
    for k, powers in SHAPES.items():
        for columns in (1 << power for power in powers):
            compiled = kernels.compile_topk_kernel(
                torch.float32, 1, columns, k, 1, return_val=False, tie_break=1, deterministic=True
            )
            name = cudnn_function(columns, k)
            compiled.export_to_c(str(out / f"{name}.o"), function_name=name)


def build(compile_kernels: Callable[[Path, Path], None], folder: Path, library: Path) -> None:
    """Compile what is in a folder of wheels into object files, and link them."""
    with tempfile.TemporaryDirectory() as place:
        compile_kernels(folder.resolve(), Path(place))
        (Path(place) / "error.c").write_text(ERROR)
        runtime = folder / "nvidia_cutlass_dsl" / "cu13" / "lib" / "libcuda_dialect_runtime_static.a"
        toolkit = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "lib64"
        objects = sorted(map(str, Path(place).glob("*.o")))
        command = ["cc", "-shared", "-fPIC", "-s", "-o", str(library), f"{place}/error.c", *objects]
        command += [str(runtime), f"-L{toolkit}", "-lcudart_static", "-ldl", "-lpthread", "-lrt"]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    build(compile_kernels, Path(sys.argv[1]), Path(sys.argv[2]))
