"""The verbs of ``python -m eval``: which module each runs, what it needs and how it ends.

Exit codes stand here alone. Every verb ends with 130 if it is interrupted, and with 2 if ``--out`` cannot be
written.
"""

from __future__ import annotations

from dataclasses import dataclass

FINISHED = "0 finished, 2 wrong use or a missing GPU or file"


@dataclass(frozen=True)
class Verb:
    """One program of this folder.

    Attributes
    ----------
    module : str
        Module below `eval` with a function `main`.
    summary : str
        What it answers.
    gpu, files, time : str
        What it needs, and how long it takes; an empty `files` means none beside the checkout.
    exits : str
        Its exit codes.
    """

    module: str
    summary: str
    gpu: str
    time: str
    exits: str
    files: str = ""

    @property
    def needs(self) -> str:
        """The needs as one sentence each."""
        files = f" Files: {self.files}." if self.files else ""
        return f"GPU: {self.gpu}.{files} Time: {self.time}."


HOPPER = "one, Hopper or later"
ENGINE = "eight, with TensorRT-LLM; none with --dry-run"
EITHER_ENGINE = "eight, with TensorRT-LLM or vLLM (--gpus); none with --dry-run"

VERBS = {
    "bench": Verb(
        "bench.bench_kernels",
        "time the op and other projects' kernels",
        f"{HOPPER}; none with --report",
        "5 minutes with --quick, up to an hour in all (--seconds, --resume)",
        "0 all exact; 1 a kernel of ours was not exact or failed; 2 wrong use or a missing GPU or file;"
        " 3 stopped by --seconds",
        "for other projects' kernels those that eval/bench/baselines.py lists; for real rows a folder of"
        " traces",
    ),
    "compare": Verb(
        "bench.compare",
        "compare the benchmarks of two commits",
        "none",
        "seconds",
        FINISHED,
        "result files of the verb bench",
    ),
    "host": Verb(
        "bench.host_time",
        "time what one eager call costs the host",
        f"{HOPPER}; none with --device cpu",
        "a minute",
        FINISHED,
        "for other projects' kernels those that eval/bench/baselines.py lists",
    ),
    "sampling": Verb(
        "bench.bench_sampling",
        "time the sampler beside PyTorch, and compare its tokens with the CPU's",
        HOPPER,
        "2 minutes",
        "0 every checked token is right; 1 not so; 2 wrong use or a missing GPU",
    ),
    "sharded": Verb(
        "bench.bench_sharded",
        "time top-k of rows on two GPUs beside other exact ways, and compare it with that of one GPU",
        "two, Hopper or later",
        "3 minutes",
        "0 every checked row is right; 1 not so; 2 wrong use or a missing GPU",
    ),
    "fuzz": Verb(
        "fuzz.fuzz",
        "compare random calls with the contract",
        f"{HOPPER}; none with --device cpu",
        "--seconds, 60 by default",
        "0 no mismatch; 1 a mismatch or a call that failed; 2 wrong use or a missing GPU",
        "for --beside the library of `make neighbours`",
    ),
    "stress": Verb(
        "stress.stress",
        "compare every launch beside other work, under delays, and on rewritten arguments",
        f"{HOPPER}; none with --device cpu",
        "minutes to an hour (--launches, --seconds)",
        "0 nothing wrong; 1 something wrong; 2 wrong use or a missing GPU or library;"
        " 3 stopped by --seconds with nothing wrong",
        "the library of `make neighbours`; for --chaos-launches that of `make chaos`",
    ),
    "phases": Verb(
        "bench.phase_timing",
        "time each phase inside the kernels",
        HOPPER,
        "2 minutes",
        FINISHED,
        "a library built with -DGVR_PHASE_TIMING=ON",
    ),
    "sweep": Verb(
        "bench.tune",
        "time every cluster size, which the plan's constants come from",
        HOPPER,
        "9 minutes",
        FINISHED,
    ),
    "accuracy": Verb(
        "campaigns.accuracy_regression",
        "run trtllm-eval with the heuristic off and on, and decide",
        ENGINE,
        "hours",
        "0 every task within; 1 a regression; 2 wrong use or a missing program;"
        " 3 undecided, runs failed, or no evidence that the feature ran; 4 the tool failed;"
        " 143 and 129 ended by SIGTERM and SIGHUP",
        "a checkpoint of the model",
    ),
    "tpot": Verb(
        "campaigns.tpot_ab",
        "measure time per output token with the heuristic off and on",
        EITHER_ENGINE,
        "hours",
        "0 all runs finished; 2 wrong use or a missing program;"
        " 3 runs failed, or no evidence that the feature ran; 4 the tool failed;"
        " 143 and 129 ended by SIGTERM and SIGHUP",
        "a checkpoint of the model and a file of prompts",
    ),
    "stream": Verb(
        "campaigns.streaming_client",
        "measure time per output token of a server that runs",
        "none here, the server's",
        "that of the requests",
        "0 all requests measured; 2 wrong use; 3 no usable stream; 4 the tool failed",
        "a file of prompts",
    ),
    "verdicts": Verb(
        "campaigns.simulate_verdicts",
        "simulate how often the verdicts of accuracy and tpot are right",
        "none",
        "minutes; seconds with --table",
        "0 finished; 2 wrong use",
    ),
    "decode": Verb(
        "engines.simulated_decode",
        "compare the hook with TensorRT-LLM's op over a simulated decode",
        f"{HOPPER}; none with --device cpu",
        "2 minutes",
        "0 same sets; 1 a set differs; 2 wrong use or a missing GPU",
        "for TensorRT-LLM's compiled op its wheel, tokenspeed-trtllm-kernel",
    ),
    "vllm-trial": Verb(
        "engines.vllm_trial",
        "run a small DeepSeek-V3.2 with random weights inside vLLM: stock, ours, and ours beside a sort",
        f"{HOPPER}, with 40 GB free",
        "minutes per engine; 24 engines by default (--parts, --modes, --graphs, --drafts; --budget)",
        "0 every compared row is the sort's, and equal scores have equal selections; 1 not so;"
        " 2 wrong use or a missing GPU or package;"
        " 3 an engine failed, or its log does not say that it ran ours",
        "the extra [vllm], and 1 GB of disk for the weights",
    ),
    "plot": Verb(
        "bench.plot_bench", "draw a benchmark", "none", "seconds", FINISHED, "a result file of the verb bench"
    ),
    "readme": Verb(
        "report.readme",
        "write the figures of README and of docs/performance.md and engine_evidence.md, and the picture",
        "none",
        "seconds",
        "0 written, or the figures are those of the files; 1 they are not, or a file is refused; 2 wrong use",
    ),
    "inspect": Verb(
        "report.inspect_build",
        "read registers, spills and code size from the built library",
        "none",
        "10 seconds",
        "0 no kernel spills, and each has code for all architectures; 1 not so; 2 no library",
        "a CUDA library, as `make install` builds where nvcc is",
    ),
    "wheel": Verb(
        "report.check_wheel",
        "install one wheel with several torch releases and run it",
        "none",
        "10 minutes",
        "0 it works on every release; 1 it does not; 2 wrong use",
        "15 GB of disk and a package index",
    ),
}
