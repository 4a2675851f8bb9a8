"""The plugin's entry point: finds the functions to hook, and hooks those that have the known parameters."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any

from gvr_topk.integrations._kit import environment
from gvr_topk.integrations._kit.environment import Mode
from gvr_topk.integrations._kit.log import LogOnce, Say, one_line
from gvr_topk.integrations._kit.verify import Verifier
from gvr_topk.integrations.sglang import points, sampler
from gvr_topk.integrations.sglang.hook import Served, around
from gvr_topk.integrations.sglang.points import ENGINE, HookPoint
from gvr_topk.integrations.sglang.row_state import Requests
from gvr_topk.integrations.sglang.transforms import Transforms

LOGGER = logging.getLogger("gvr_topk.integrations.sglang")


def register() -> None:
    """Register the hooks if ``GVR_TOPK_SGLANG`` asks for them; never raises, whatever SGLang is like.

    A function that is missing or has other parameters than the known ones is left alone, with one log line.
    The functions do not depend on one another, so the other functions are still hooked.
    """
    say = LogOnce(ENGINE.name, ENGINE.version, lambda: LOGGER)
    try:
        mode, reason = ENGINE.outlook()
        if reason:
            ENGINE.leave(say, reason, off=mode is Mode.OFF)
        else:
            _register(say)
    except Exception as error:  # a server must start even if we cannot
        say("warning", f"not active: {one_line(error)}")


def describe() -> list[tuple[str, str]]:
    """Describe for ``gvr-topk doctor`` which SGLang is installed, and whether it calls the plugin.

    Does not import SGLang, so that it does not say which functions will be hooked: the server's log does.
    """
    root = ENGINE.root()
    if root is None:
        return [("SGLang", "not installed")]
    found = ENGINE.entry_points()
    _, reason = ENGINE.outlook()
    if not reason and not found:
        reason = "SGLang does not find the entry point"
    outlook = f"nothing: {reason}" if reason else "the server's log says which functions are hooked"
    if not reason and environment.asks_for(environment.ENABLE_SAMPLER):
        outlook += ", and whether tokens are drawn"
    return [
        ("SGLang", f"{ENGINE.version()} in {root}"),
        ("entry point", f"gvr_topk = {found[0]}" if found else f"none in {ENGINE.group}"),
        ("would happen", outlook),
    ]


def _register(say: Say) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    requests = Requests(say)
    transforms = Transforms(requests)
    verifier = Verifier.if_asked_for(ENGINE.name, say)
    served: tuple[tuple[HookPoint, Callable[..., Served]], ...] = (
        (points.POSITIONS, transforms.positions),
        (points.PAGED, transforms.paged),
        (points.RAGGED, transforms.ragged),
        (points.PAGED_V2, transforms.paged_v2),
        (points.RAGGED_V2, transforms.ragged_v2),
    )
    hooks = [(point, around(point.name, serve, say, verifier)) for point, serve in served]
    hooks.append((points.INDEXER, requests.around_indexer))
    if environment.asks_for(environment.ENABLE_SAMPLER):
        hooks.append((points.TARGET_PROBS, around(points.TARGET_PROBS.name, sampler.target_probs, say)))
        hooks += _trees(say)
    hooks += _samplers(say)
    for point, hook in hooks:
        try:
            target = point.find()
        except Exception as error:  # importing a module of SGLang may fail in any way
            say("warning", f"{point.name} not hooked: {error}")
            continue
        # AROUND, because a REPLACE hook is not given the original, which serves what we refuse.
        HookRegistry.register(target, hook, HookType.AROUND)


def _trees(say: Say) -> list[tuple[HookPoint, Callable[..., Any]]]:
    """Have the module of ``eagle_sample`` call our filters; return the hook that tells these of a call."""
    try:
        points.TREES_SOFTMAX.find()
        trees = sampler.TreeProbs(say)
        trees.install(importlib.import_module(points.EAGLE))
    except Exception as error:  # as above
        say("warning", f"{points.TREES.name} not hooked: {one_line(error)}")
        return []
    return [(points.TREES, trees.around_sample)]


def _samplers(say: Say) -> list[tuple[HookPoint, Callable[..., Any]]]:
    """Offer our sampler as a backend; return the hook that makes it SGLang's own, if that is asked for."""
    asked = environment.asks_for(environment.ENABLE_SAMPLER)
    try:
        for point in points.SAMPLER:
            point.find()
        samplers = sampler.Samplers(say)
        module = importlib.import_module(points.SAMPLER_MODULE)
        module.register_sampler_backend(sampler.BACKEND, samplers.make)
    except Exception as error:  # as above
        say("warning" if asked else "info", f"sampler not offered: {one_line(error)}")
        return []
    return [(points.CREATE_SAMPLER, samplers.around_create)] if asked else []
