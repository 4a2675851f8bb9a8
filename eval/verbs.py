"""The verbs of ``python -m eval``: the folder of each, whose module of that name has its function ``main``.

Every verb ends with a status of `eval.common.status`.
"""

from typing import NamedTuple

HOPPER = "one, Hopper or later"
OR_CPU = f"{HOPPER}; none with --device cpu"
ENGINE = "those of the engine; none with --dry-run"


class Verb(NamedTuple):
    """One program of this folder: where it lies, what it answers, and the GPUs that it needs."""

    folder: str
    summary: str
    gpu: str = "none"


VERBS = {
    "bench": Verb("bench", "time the op and other projects' kernels", HOPPER),
    "compare": Verb("bench", "compare the benchmarks of two commits"),
    "host": Verb("bench", "time what one eager call costs the host", OR_CPU),
    "sampling": Verb("bench", "time the sampler, and compare its tokens with the CPU's", HOPPER),
    "sharded": Verb("bench", "time top-k of rows on two GPUs", "two, Hopper or later"),
    "topk": Verb("bench", "time topk at any k, and compare it with a sort", HOPPER),
    "fuzz": Verb("fuzz", "compare random calls with the contract", OR_CPU),
    "stress": Verb("stress", "compare every launch beside other work and under delays", OR_CPU),
    "accuracy": Verb("campaigns", "run trtllm-eval with the heuristic off and on, and decide", ENGINE),
    "tpot": Verb("campaigns", "measure time per output token with the top-k or sampler off and on", ENGINE),
    "vllm-trial": Verb("engines", "run a small model in vLLM: stock, ours, and ours beside a sort", HOPPER),
    "readme": Verb("report", "write the figures of README and of two pages of docs, and the pictures"),
    "inspect": Verb("report", "read registers, spills and code size from the built library"),
}


def module_of(name: str) -> str:
    """Module that has the function ``main`` of a verb."""
    return f"eval.{VERBS[name].folder}.{name.replace('-', '_')}"
