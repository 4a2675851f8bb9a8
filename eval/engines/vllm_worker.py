"""The comparison inside vLLM's worker processes, where the layers of a model on several GPUs run.

vLLM mixes `Observed` into its worker class (``worker_extension_cls``), calls `init_worker_extension` in each
worker once its GPU is chosen and before the model is loaded, and the other methods by ``collective_rpc``.
"""

import importlib
import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from eval.engines.vllm_compare import Comparison, observe
from eval.engines.vllm_model import patch_loading
from gvr_topk.integrations._kit.transaction import Transaction

EXTENSION = "eval.engines.vllm_worker.Observed"
"""Name of the class below, as ``vllm.LLM`` takes it."""

PREFILL_ROWS = "GVR_TOPK_TRIAL_PREFILL_ROWS"
"""Environment variable: most rows of a prefill call that are compared; 0 for all."""


class Observed:
    """Methods of a worker; none has the name of one of vLLM's."""

    gvr_topk_comparison: Comparison
    gvr_topk_patches: Transaction

    def init_worker_extension(self) -> None:
        """Put the comparison around both calls of this worker; ours is there by then."""
        importlib.import_module("gvr_topk.integrations.vllm").register()
        on_gpu = torch.cuda.is_available()
        device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        self.gvr_topk_comparison = Comparison(device, int(os.environ[PREFILL_ROWS]))
        self.gvr_topk_patches = Transaction()
        observe(self.gvr_topk_patches, self.gvr_topk_comparison)
        patch_loading(self.gvr_topk_patches)

    def gvr_topk_reset(self) -> None:
        """Forget what was counted while the engine started."""
        self.gvr_topk_comparison.reset()

    def gvr_topk_observed(self) -> dict[str, Any]:
        """What was compared in this worker, and its calls."""
        return observed(self.gvr_topk_comparison)


def observed(comparison: Comparison | None) -> dict[str, Any]:
    """What was compared in this process, if it was, and its calls."""
    counters = importlib.import_module("gvr_topk.integrations.vllm").counters().as_dict()
    compared = None if comparison is None else comparison.as_dict()
    return {"compared": compared, "calls": counters["calls"], "slots": counters["requests"]}


def merge_workers(workers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sum what all workers saw: ``compared`` and ``calls``; ``workers`` has what each has compared."""
    compared: Counter[str] = Counter()
    calls: Counter[tuple[str, str]] = Counter()
    for worker in workers:
        compared.update(worker["compared"])
        calls.update({(call["path"], call["reason"]): call["count"] for call in worker["calls"]})
    return {
        "compared": dict(compared),
        "calls": [
            {"path": path, "reason": reason, "count": count} for (path, reason), count in calls.items()
        ],
        "slots": workers[0]["slots"],
        "workers": [worker["compared"] for worker in workers],
    }
