from sglang_base import load_plugins

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

__all__ = ["HookRegistry", "HookType", "load_plugins"]
