from sglang_base import HookRegistry, HookType

__all__ = ["HookRegistry", "HookType"]
