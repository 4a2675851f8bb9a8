"""vLLM's merge of what ranks have selected, to run without vLLM and CuTe DSL, and its compilation.

    python -m eval.bench.vllm_merge FOLDER out/vllm_merge.so

`FOLDER` holds the unpacked wheels vllm 0.33.0, quack-kernels 0.6.5 and, of 4.8.0, those of CuTe DSL that
`eval.bench.cudnn_topk` names, with what else that names. Each kernel is a function of the library, named by
`vllm_function`, and called through apache-tvm-ffi.
"""

import importlib
import importlib.util
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eval.bench.cudnn_topk import build, use_wheels

KS, WORLDS = (512, 2048), (2, 4)
MODULE = "vllm.model_executor.kernels.attention.dsa.dcp_indexer_cutedsl"
LIBRARY = "vllm_merge.so"


def vllm_function(k: int, world: int) -> str:
    """Name of the function that merges the k best of so many ranks."""
    return f"stable_topk_{k}_{world}"


def compile_kernels(folder: Path, out: Path) -> None:
    """Write an object file for each kernel."""
    # vLLM's packages import all of vLLM, and the other kernel of the file is Triton's.
    use_wheels(folder, ("vllm", "vllm.model_executor", "vllm.model_executor.warmup", "quack"))
    triton = types.SimpleNamespace(jit=lambda **options: lambda function: function)
    for name, found in (
        ("vllm.triton_utils", {"tl": types.SimpleNamespace(constexpr=int), "triton": triton}),
        (
            "vllm.model_executor.warmup.jit_warmup_triton_helper",
            {"LaunchSpec": dict, "TritonWarmupTensor": object, "VllmTritonJitKernel": list},
        ),
    ):
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(found)
    file = folder / f"{MODULE.replace('.', '/')}.py"
    spec = importlib.util.spec_from_file_location("dcp_indexer_cutedsl", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where CuTe DSL looks for the source
    spec.loader.exec_module(module)
    kernel = module._STABLE_TOPK_FROM_GATHERED_CANDIDATES_KERNEL
    for k, world in ((k, world) for k in KS for world in WORLDS):
        key = kernel.CompileKey(topk=k, num_candidates=k * world)
        kernel.compile(key)
        name = vllm_function(k, world)
        kernel._compiled_cache[key].export_to_c(str(out / f"{name}.o"), function_name=name)


def merge_of(folder: Path) -> Callable[..., Any]:
    """Return a way of `eval.bench.sharded`: positions of all ranks in no order, as vLLM has them."""
    from eval.bench.baselines import ffi_module, on_stream
    from eval.bench.vllm_pack import pack
    from gvr_topk import indexer_topk_decode

    ffi, module = ffi_module(folder, LIBRARY)

    def merged(shards: Any, scores: Any, lengths: Any, k: int) -> Any:
        best = indexer_topk_decode(scores, lengths, k)
        packed = pack(scores, best, shards.rank, shards.world, shards.interleave)
        gathered = shards.exchange(packed).transpose(0, 1).reshape(len(best), -1, 2)
        on_stream(ffi, module[vllm_function(k, shards.world)])(gathered, best)
        return best

    return merged


if __name__ == "__main__":
    build(compile_kernels, Path(sys.argv[1]), Path(sys.argv[2]))
