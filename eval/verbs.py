"""The verbs of ``python -m eval``: which module below `eval` has the function ``main`` of each.

Every verb ends with a status of `eval.common.status`.
"""

from __future__ import annotations

from typing import NamedTuple

HOPPER = "one, Hopper or later"
OR_CPU = f"{HOPPER}; none with --device cpu"
ENGINE = "those of the engine; none with --dry-run"


class Verb(NamedTuple):
    """One program of this folder: its module, what it answers, and the GPUs that it needs."""

    module: str
    summary: str
    gpu: str = "none"


VERBS = {
    "bench": Verb("bench.bench_kernels", "time the op and other projects' kernels", HOPPER),
    "compare": Verb("bench.compare", "compare the benchmarks of two commits"),
    "host": Verb("bench.host_time", "time what one eager call costs the host", OR_CPU),
    "sampling": Verb(
        "bench.bench_sampling", "time the sampler, and compare its tokens with the CPU's", HOPPER
    ),
    "sharded": Verb("bench.bench_sharded", "time top-k of rows on two GPUs", "two, Hopper or later"),
    "topk": Verb("bench.bench_topk", "time topk at any k, and compare it with a sort", HOPPER),
    "fuzz": Verb("fuzz.fuzz", "compare random calls with the contract", OR_CPU),
    "stress": Verb("stress.stress", "compare every launch beside other work and under delays", OR_CPU),
    "accuracy": Verb(
        "campaigns.accuracy_regression", "run trtllm-eval with the heuristic off and on, and decide", ENGINE
    ),
    "tpot": Verb("campaigns.tpot_ab", "measure time per output token with the heuristic off and on", ENGINE),
    "vllm-trial": Verb(
        "engines.vllm_trial", "run a small model inside vLLM: stock, ours, and ours beside a sort", HOPPER
    ),
    "readme": Verb("report.readme", "write the figures of README and of two pages of docs, and the pictures"),
    "inspect": Verb("report.inspect_build", "read registers, spills and code size from the built library"),
}
