"""Compute the top-k of SGLang's sparse attention (DSA), and if asked to its tokens, by SGLang's own hooks.

`register` is the entry point ``gvr_topk`` of the group ``sglang.srt.plugins``; SGLang calls it in every
process before it starts to serve. It has not been run inside SGLang: docs/sglang.md says what it is checked
against.
"""

from __future__ import annotations

from gvr_topk.integrations.sglang.plugin import describe, register

__all__ = ["describe", "register"]
