"""The time to read score rows once and do nothing with them: no exact top-k can be faster.

The smallest time of a few block sizes, for a kernel that loads every score and stores one value per
block. Triton, because it is beside every CUDA build of torch and needs no compiler.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]

from eval.kernel_timing import Rows, time_graph

BLOCKS = (1024, 4096, 16384)


@triton.jit
def _read(scores, out, n, stride, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(1)
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(scores + row.to(tl.int64) * stride + offsets, mask=offsets < n, other=0.0)
    tl.store(out + row * tl.num_programs(0) + tl.program_id(0), tl.max(values.to(tl.float32), axis=0))


def read_floor(rows: Rows, replays: int, budget: float) -> float:
    """Microseconds to read one step's rows, in a CUDA graph over all buffers; see `time_graph`."""
    _, batch, n = rows.logits.shape
    stride = rows.logits.stride(1)
    times = []
    for block in BLOCKS:
        parts = triton.cdiv(n, block)
        out = torch.empty(batch * parts, device=rows.logits.device)

        def launch(i: int, parts: int = parts, out: torch.Tensor = out, block: int = block) -> None:
            _read[(parts, batch)](
                rows.logits[i], out, n, stride, BLOCK=block, num_warps=max(4, block // 1024)
            )

        times.append(time_graph(launch, rows.count, replays, budget))
    return min(times)
