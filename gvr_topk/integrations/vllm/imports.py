"""Watch for imports of vLLM's modules and import none of them: other models may not need them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import ClassVar

import gvr_topk_autoload
from gvr_topk.integrations.vllm.upstream import WATCHED


class Loader(gvr_topk_autoload.Loader):
    """Calls `callback` once the module has run."""

    callback: ClassVar[Callable[[str], object] | None] = None

    def loaded(self, name: str) -> None:
        if Loader.callback is not None:
            Loader.callback(name)


class Finder(gvr_topk_autoload.Finder):
    """A ``sys.meta_path`` entry for the modules that the integration patches."""

    watched = WATCHED
    loader = Loader


def watch(callback: Callable[[str], object]) -> None:
    """Call `callback` for each watched module: at once if it is imported already, else after its import."""
    Loader.callback = callback
    if Finder not in sys.meta_path:
        sys.meta_path.insert(0, Finder)
    for name in WATCHED:
        if name in sys.modules:
            callback(name)


def unwatch() -> None:
    """Stop watching."""
    Loader.callback = None
    if Finder in sys.meta_path:
        sys.meta_path.remove(Finder)
