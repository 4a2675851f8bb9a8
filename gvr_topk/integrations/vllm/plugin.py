"""`register`, which vLLM calls in each of its processes, and what ``gvr-topk doctor`` says about vLLM.

The patches are one transaction: if one class or signature is unlike the known one, all patches are undone,
one log line says why, and vLLM serves with its own top-k.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

import gvr_topk_autoload
from gvr_topk.integrations._kit import environment
from gvr_topk.integrations._kit.counters import Snapshot
from gvr_topk.integrations._kit.environment import Mode
from gvr_topk.integrations._kit.log import LogOnce, one_line
from gvr_topk.integrations._kit.signatures import Checker, PatchPoint, check_live
from gvr_topk.integrations._kit.transaction import Transaction
from gvr_topk.integrations.vllm.dcp import DcpHook
from gvr_topk.integrations.vllm.drafts import DraftsHook
from gvr_topk.integrations.vllm.hook import LayerHook
from gvr_topk.integrations.vllm.logprobs import LogprobsHook
from gvr_topk.integrations.vllm.metrics import CallMetrics
from gvr_topk.integrations.vllm.sampler import MasksHook, SamplerHook
from gvr_topk.integrations.vllm.upstream import (
    ATTENTION_MODULE,
    BUILD,
    BUILDER_MODULE,
    CALLED_CANDIDATES,
    CANDIDATES,
    ENGINE,
    INDEXER,
    INDEXER_MODULE,
    MASKS,
    MERGE,
    POINTS,
    PREFILL,
    RESOLVE,
    SAMPLE,
    SAMPLER_MODULES,
    SCORES,
    SPLIT,
    TOP_K,
    TOP_K_MODULE,
    TOPK_SCORES,
    V1_RUNNER_MODULE,
    VERIFY_DRAFTS,
    WATCHED,
)
from gvr_topk.policy import no_kernels_reason

LOGGER = "vllm.gvr_topk"
"""A child of vLLM's own logger, so it has the handlers and the level of that logger."""

_asks_for_slices = functools.partial(environment.asks_for, environment.ENABLE_SLICES, Mode.ON)
_asks_for_dcp = functools.partial(environment.asks_for, environment.ENABLE_DCP)
_asks_for_sampler = functools.partial(environment.asks_for, environment.ENABLE_SAMPLER, Mode.ON)

OPTIONAL: tuple[tuple[str, Callable[[], bool], tuple[PatchPoint, ...]], ...] = (
    ("candidate blocks", lambda: True, (CANDIDATES,)),
    ("scores of long prompts", _asks_for_slices, (SPLIT, SCORES)),
    ("the merge of ranks", _asks_for_dcp, (MERGE,)),
    ("log-probabilities", _asks_for_sampler, (TOPK_SCORES,)),
    ("the sampler", _asks_for_sampler, (SAMPLE,)),
    ("drafts", _asks_for_sampler, (VERIFY_DRAFTS,)),
    ("masks", _asks_for_sampler, (MASKS,)),
)
"""What else may be replaced: its name, whether it is asked for, and its points."""


class Finder(gvr_topk_autoload.Finder):
    """Watches for the modules that are patched, and imports none of them: other models may not need them."""

    watched = WATCHED


class _Unlike(RuntimeError):
    """The installed vLLM is not one that the table describes, or no kernel runs on its GPU."""


class _Integration:
    """State of this process."""

    def __init__(self) -> None:
        self.say = LogOnce(ENGINE.name, ENGINE.version, lambda: logging.getLogger(LOGGER))
        self.patches = Transaction()
        self.metrics = CallMetrics(self.say)
        self.hook: LayerHook | None = None
        self.asked_for: dict[PatchPoint, Callable[..., Any]] = {}
        self.started = False
        self.refused = ""
        self.connected: set[str] = set()

    def start(self) -> None:
        if self.started:
            return
        self.started = True
        mode, reason = ENGINE.outlook()
        if mode is None or reason:
            self.refuse(reason, off=mode is Mode.OFF)
            return
        self.hook = LayerHook(self.metrics, mode, self.say)
        reports = (ENGINE.name, self.metrics.count, self.say)
        self.asked_for[CALLED_CANDIDATES] = self.hook.candidates.wrap
        if _asks_for_slices():
            self.asked_for |= {SPLIT: self.hook.slices.wrap_split, SCORES: self.hook.slices.wrap_scores}
        if _asks_for_dcp():
            self.hook.dcp = DcpHook(mode, self.metrics, self.say)
            self.asked_for[MERGE] = self.hook.dcp.wrap
        if _asks_for_sampler():
            self.asked_for[TOPK_SCORES] = LogprobsHook(*reports).wrap
            self.asked_for[SAMPLE] = SamplerHook(*reports).wrap
            self.asked_for[VERIFY_DRAFTS] = DraftsHook(*reports).wrap
            self.asked_for[MASKS] = MasksHook(*reports).wrap
        try:
            self.metrics.open()
        except (ImportError, ValueError) as error:
            self.say("info", f"no metric in vLLM's registry: {error}")
        Finder.watch(self.module_loaded)

    def module_loaded(self, name: str) -> None:
        """Patch what a loaded module offers; take everything back if it does not fit."""
        if self.refused or name in self.connected or self.hook is None:
            return
        self.connected.add(name)
        try:
            if torch.cuda.is_initialized() and (reason := no_kernels_reason()):  # before, asking would do it
                raise _Unlike(reason)
            self._connect(self.hook, sys.modules[name])
        except Exception as error:  # vLLM must start even if we cannot
            self.refuse(str(error) if isinstance(error, _Unlike) else one_line(error))

    def _connect(self, hook: LayerHook, module: ModuleType) -> None:
        name = module.__name__
        if name == TOP_K_MODULE:
            self._wrap_method(module, TOP_K, hook.wrap_top_k)
        elif name == BUILDER_MODULE:
            self._wrap_method(module, BUILD, hook.wrap_build)
            self._wrap_if_asked_for(module, SPLIT, "chunks of prompts stay")
        elif name == INDEXER_MODULE:
            if self._replace_prefill(hook, module):
                self._wrap_if_asked_for(module, SCORES, "scores of prompts stay")
            self._wrap_if_asked_for(module, CALLED_CANDIDATES, "candidate blocks stay")
            self._wrap_if_asked_for(module, MERGE, "the merge of ranks stays")
            if callable(getattr(module, RESOLVE.name, None)):
                self.patches.wrap(module, RESOLVE.name, hook.wrap_resolve)
        elif name == ATTENTION_MODULE and callable(getattr(module, INDEXER.name, None)):
            self.patches.wrap(module, INDEXER.name, hook.wrap_indexer)
        # Without either function the layer is unknown, and the op runs without state.
        elif name == V1_RUNNER_MODULE and SAMPLE in self.asked_for:
            self.say("info", "sampler: the V1 model runner draws its tokens itself")
        if name in SAMPLER_MODULES:
            self._wrap_if_asked_for(module, TOPK_SCORES, "log-probabilities stay")
        stays = {SAMPLE: "sampling stays", VERIFY_DRAFTS: "drafts stay", MASKS: "masks stay"}
        for point, what in stays.items():
            if name == point.module:
                self._wrap_if_asked_for(module, point, what)

    def _wrap_if_asked_for(self, module: ModuleType, point: PatchPoint, what: str) -> None:
        """Wrap a function that may be unlike the known one."""
        if point not in self.asked_for:
            return
        finding = check_live(point, module)
        if finding.good:
            self.patches.wrap(module, point.name, self.asked_for[point])
        else:
            self.say("warning", f"{what} vLLM's own: {finding}")

    def _replace_prefill(self, hook: LayerHook, module: ModuleType) -> bool:
        """Replace the op of prefill, if there is one; whether there is."""
        finding = check_live(PREFILL, module)
        if not finding.good:
            raise _Unlike(str(finding))
        if finding.status == "later":  # this vLLM has no kernels, or has other names for them
            self.say("warning", f"prefill top-k stays vLLM's own: wanted the op {PREFILL.name}, got none")
            return False
        self.patches.wrap(torch, PREFILL.name.removeprefix("torch."), hook.prefill.wrap)
        return True

    def _wrap_method(self, module: ModuleType, point: PatchPoint, wrap: Any) -> None:
        finding = check_live(point, module)
        if not finding.good:
            raise _Unlike(str(finding))
        self.patches.wrap(module, point.name, wrap)

    def refuse(self, reason: str, off: bool = False) -> None:
        """Leave vLLM as it is, and say why; `off` says that the user wants it."""
        self.refused = reason
        self.stop()
        ENGINE.leave(self.say, reason, off)

    def stop(self) -> None:
        Finder.stop()
        self.patches.rollback()
        self.metrics.close()


_integration = _Integration()


def register() -> None:
    """Connect gvr_topk with vLLM: the entry point ``gvr_topk`` of ``vllm.general_plugins``.

    A second call is harmless. It never raises and does not initialize CUDA, because vLLM may fork this
    process.
    """
    try:
        _integration.start()
    except Exception as error:  # vLLM must start even if we cannot
        _integration.refuse(one_line(error))


def unregister() -> None:
    """Restore every patched object and the import machinery.

    CUDA graphs that were captured before keep the kernels that they hold.
    """
    global _integration
    before, _integration = _integration, _Integration()
    before.stop()


def counters() -> Snapshot:
    """Counters of this process.

    In vLLM the layers run in worker processes: ``GVR_TOPK_VLLM_METRICS_DIR`` makes their counters readable.
    """
    return _integration.metrics.counters.snapshot()


def prometheus_text() -> str:
    """Counters of this process in Prometheus text format; needs ``prometheus-client``."""
    return _integration.metrics.counters.prometheus_text()


def describe() -> list[tuple[str, str]]:
    """Describe for ``gvr-topk doctor`` version, entry point, patch points, and what would happen and why.

    Reads source files; does not import vLLM.

    Returns
    -------
    list of (str, str)
        Label and text, in the order to print.
    """
    root = ENGINE.root()
    if root is None:
        return [("vLLM", "not installed")]
    checker = Checker(root, {})
    findings = [checker.check(point) for point in POINTS]
    optional = [[checker.check(point) for point in points] for _, _, points in OPTIONAL]
    rows = [("vLLM", f"{ENGINE.version()} in {root}"), ("entry point", _entry_point())]
    rows += [finding.row for finding in (*findings, *itertools.chain(*optional))]
    bad = [finding for finding in findings if not finding.good]
    mode, reason = ENGINE.outlook()
    if not reason and bad:
        reason = str(bad[0])
    if not reason and not _entry_points():
        reason = "vLLM does not find the entry point"
    setting = "sparse_indexer_topk_backend"
    where = f"whatever {setting} says" if mode is Mode.FORCE else f"where {setting} is auto"
    if not reason:
        for (what, asked_for, _), found in zip(OPTIONAL, optional, strict=True):
            if asked_for() and all(finding.good for finding in found):
                where += f", and {what}"
    rows.append(
        ("would happen", f"nothing: {reason}" if reason else f"decode and prefill top-k are replaced {where}")
    )
    return rows


def _entry_points() -> list[str]:
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "gvr_topk" not in [name.strip() for name in allowed.split(",")]:
        return []
    return ENGINE.entry_points()


def _entry_point() -> str:
    found = _entry_points()
    if found:
        return f"gvr_topk = {found[0]} in {ENGINE.group}"
    if "VLLM_PLUGINS" in os.environ:
        return f"not loaded: VLLM_PLUGINS={os.environ['VLLM_PLUGINS']} has to name gvr_topk, too"
    return f"none in {ENGINE.group}: install the wheel into the environment of vLLM"
