"""The time to read score rows once and do nothing with them: no exact top-k can be faster.

The smallest time of a few block sizes, for a kernel that loads every score and stores one value per
block. Triton, because it is beside every CUDA build of torch and needs no compiler.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]

from eval.bench.kernel_timing import Chain, ChainRun, Prepared

BLOCKS = (1024, 4096, 16384)


@triton.jit
def _read(scores, out, n, stride, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(1)
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(scores + row.to(tl.int64) * stride + offsets, mask=offsets < n, other=0.0)
    tl.store(out + row * tl.num_programs(0) + tl.program_id(0), tl.max(values.to(tl.float32), axis=0))


def read_floor(chain: Chain, replays: int, budget: float) -> float:
    """Microseconds to read one step's rows, in a CUDA graph over the chain (`eval.bench.kernel_timing`)."""
    n, stride = chain.logits.shape[2], chain.logits.stride(1)
    times = []
    for block in BLOCKS:
        parts = triton.cdiv(n, block)
        out = torch.empty(chain.batch * parts, device=chain.logits.device)

        def launch(step: int, parts: int = parts, out: torch.Tensor = out, block: int = block) -> None:
            _read[(parts, chain.batch)](
                chain.logits[step], out, n, stride, BLOCK=block, num_warps=max(4, block // 1024)
            )

        times.append(ChainRun(chain, Prepared(launch, out)).time(replays, budget))
    return min(times)
