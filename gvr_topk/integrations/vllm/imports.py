"""Watch for imports of vLLM's modules and import none of them: other models may not need them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import ClassVar

import gvr_topk_autoload
from gvr_topk.integrations.vllm.upstream import WATCHED


class Finder(gvr_topk_autoload.Finder):
    """A ``sys.meta_path`` entry for the modules that the integration patches."""

    watched = WATCHED
    callback: ClassVar[Callable[[str], object] | None] = None

    @classmethod
    def loaded(cls, name: str) -> None:
        if cls.callback is not None:
            cls.callback(name)


def watch(callback: Callable[[str], object]) -> None:
    """Call `callback` for each watched module: at once if it is imported already, else after its import."""
    Finder.callback = callback
    Finder.start()
    for name in WATCHED:
        if name in sys.modules:
            callback(name)


def unwatch() -> None:
    """Stop watching."""
    Finder.callback = None
    Finder.stop()
