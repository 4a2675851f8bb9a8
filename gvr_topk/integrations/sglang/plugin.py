"""The plugin's entry point: finds the functions to hook, and hooks those that have the known parameters."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib import metadata
from typing import Any

from gvr_topk.integrations import environment
from gvr_topk.integrations.patch_points import engine_version, find_engine
from gvr_topk.integrations.sglang import points
from gvr_topk.integrations.sglang.notes import Notes, around
from gvr_topk.integrations.sglang.points import HookPoint
from gvr_topk.integrations.sglang.row_state import Requests
from gvr_topk.integrations.sglang.transforms import Transforms

ENGINE = "sglang"
ENTRY_POINT, ENTRY_POINT_GROUP = "gvr_topk", "sglang.srt.plugins"


def register() -> None:
    """Register the hooks; never raises, whatever SGLang is like.

    A function that is missing or has other parameters than the known ones is left alone, with one log line.
    The functions do not depend on one another, so the other functions are still hooked.
    """
    notes = Notes()
    if environment.disabled():
        notes.say(f"off: {environment.DISABLE} is set")
        return
    try:
        _register(notes)
    except Exception as error:  # a server must start even if we cannot
        notes.failed("not active", error)


def describe() -> list[tuple[str, str]]:
    """Describe for ``gvr-topk doctor`` which SGLang is installed, and whether it calls the plugin.

    Does not import SGLang, so that it does not say which functions will be hooked: the server's log does.

    Returns
    -------
    list of (str, str)
        Label and text, in the order to print.
    """
    root = find_engine(ENGINE)
    if root is None:
        return [("SGLang", "not installed")]
    found = [entry.value for entry in metadata.entry_points(group=ENTRY_POINT_GROUP, name=ENTRY_POINT)]
    outlook = "the server's log says which functions are hooked"
    if environment.disabled():
        outlook = f"nothing: {environment.DISABLE} is set"
    elif not found:
        outlook = "nothing: SGLang does not find the entry point"
    return [
        ("SGLang", f"{engine_version(root, ENGINE)} in {root}"),
        ("entry point", f"{ENTRY_POINT} = {found[0]}" if found else f"none in {ENTRY_POINT_GROUP}"),
        ("would happen", outlook),
    ]


def _register(notes: Notes) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    requests = Requests(notes)
    transforms = Transforms(requests)
    served: tuple[tuple[HookPoint, Callable[..., Any]], ...] = (
        (points.POSITIONS, transforms.positions),
        (points.PAGED, transforms.paged),
        (points.RAGGED, transforms.ragged),
        (points.PAGED_V2, transforms.paged_v2),
        (points.RAGGED_V2, transforms.ragged_v2),
    )
    hooks = [(point, around(point.name, serve, notes)) for point, serve in served]
    hooks.append((points.INDEXER, requests.around_indexer))
    for point, hook in hooks:
        try:
            target = point.find()
        except Exception as error:  # importing a module of SGLang may fail in any way
            notes.say(f"{point.name} not hooked: {error}", level=logging.WARNING)
            continue
        # AROUND and not REPLACE: a REPLACE hook is not given the original, which serves the calls that we
        # refuse.
        HookRegistry.register(target, hook, HookType.AROUND)
