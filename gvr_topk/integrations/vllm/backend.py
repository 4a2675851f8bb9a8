"""Whether vLLM's own choice of a top-k backend leaves its calls to us."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gvr_topk.integrations._kit.device import arch_of
from gvr_topk.integrations._kit.environment import ENABLE_VLLM, Mode
from gvr_topk.integrations._kit.log import Say
from gvr_topk.integrations._kit.switch import Switch
from gvr_topk.integrations.vllm.upstream import AUTO, ENGINE

GVR = "gvr"
"""What the names of vLLM's own guess-verify-refine backends contain, such as ``flashinfer_gvr2``."""

GVR_ARCH = 100
"""Compute capability times ten from which ``auto`` may choose such a backend."""


def backend_of(builder: Any) -> Any:
    """Return which top-k backend the configuration of a metadata builder asks for."""
    kernels = getattr(getattr(builder, "vllm_config", None), "kernel_config", None)
    return getattr(kernels, "sparse_indexer_topk_backend", AUTO)


def uses_microbatches(builder: Any) -> bool:
    """Whether two halves of a batch run beside each other, on a part of the GPU each."""
    return getattr(getattr(builder.vllm_config, "parallel_config", None), "use_ubatching", False)


class BackendSwitch(Switch):
    """Leaves calls to vLLM where another backend was chosen, and for good once our op has failed."""

    def __init__(self, mode: Mode, say: Say, kind: str = "", own: str = "") -> None:
        super().__init__(ENGINE.name, say, kind, own)
        self._mode = mode

    def reason_against(self, backend: Any) -> str:
        """Return why vLLM has to do a call for which this backend was chosen; empty if it does not."""
        if self.failed:
            return self.failed
        if backend == AUTO or self._mode is Mode.FORCE:
            return ""
        subject = f"{self._kind}, for " if self._kind else ""
        self._leave(f"{subject}sparse_indexer_topk_backend is {backend!r} and not {AUTO!r}")
        return "backend chosen"

    def reason_against_auto(self, stage: Any, logits: Tensor, k: int) -> str:
        """Return why vLLM has to do a call itself where the backend is `AUTO`; empty if it does not.

        On Blackwell versions after 0.33 may resolve `AUTO` to a guess-verify-refine top-k, which is exact,
        too. It was made for that GPU, so it is left alone.
        """
        if self._mode is Mode.FORCE or arch_of(logits.device) < GVR_ARCH:
            return ""
        resolved = str(stage.resolve_backend(logits, k, logits.shape[0]))
        if GVR not in resolved:
            return ""
        self._leave(f"sparse_indexer_topk_backend {AUTO!r} is {resolved!r} here, a top-k of the same kind")
        return "native GVR"

    def _leave(self, why: str) -> None:
        self._say("info", f"not in use: {why}; {ENABLE_VLLM}=force runs gvr_topk instead")
