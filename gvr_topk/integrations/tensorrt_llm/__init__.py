"""``enable_heuristic_topk: true`` in TensorRT-LLM, without changing its files.

The import hook of the wheel (`gvr_topk_autoload`) calls `module_loaded` after a watched module has run;
`install` does the same by hand. `gvr_topk.integrations.tensorrt_llm.upstream` lists what is patched, and what
is assumed about it.
"""

from __future__ import annotations

from gvr_topk.integrations.tensorrt_llm.plugin import (
    counters,
    describe,
    install,
    installed,
    module_loaded,
    prometheus_text,
    uninstall,
)

__all__ = [
    "counters",
    "describe",
    "install",
    "installed",
    "module_loaded",
    "prometheus_text",
    "uninstall",
]
