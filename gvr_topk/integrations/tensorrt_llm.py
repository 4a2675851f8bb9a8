"""``enable_heuristic_topk: true`` in TensorRT-LLM, without changing its files.

`module_loaded` is called by the import hook (`gvr_topk_autoload`) after a watched module has run;
`install` does the same by hand. Every change belongs to one transaction: either all patch points of the
table in `gvr_topk.integrations.patch_points` fit and are patched, or none is.
"""

from __future__ import annotations

import logging
import os
import sys
from types import ModuleType

import gvr_topk_autoload
from gvr_topk.integrations import environment
from gvr_topk.integrations.counters import Counters, Snapshot
from gvr_topk.integrations.patch_points import (
    DSA,
    ENGINE,
    INDEXER_CALL,
    LLM_ARGS,
    METADATA_PREPARE,
    OP,
    TABLE,
    Finding,
    PatchPoint,
    PatchRefused,
    check_live,
    check_sources,
    engine_version,
    find_engine,
    refusal,
)
from gvr_topk.integrations.transaction import Transaction

__all__ = [
    "counters",
    "describe",
    "install",
    "installed",
    "module_loaded",
    "prometheus_text",
    "uninstall",
]


class _Integration:
    """State of this process."""

    def __init__(self) -> None:
        self.transaction = Transaction()
        self.done: set[str] = set()
        self.refused = ""
        self.native = False
        self.counters = Counters()
        self.said: set[str] = set()

    def load(self, module: ModuleType) -> None:
        """Patch what a loaded module offers; undo everything if it does not fit."""
        name = module.__name__
        if name in self.done or self.refused or environment.disabled():
            return
        try:
            self._verify(module)
            if name == LLM_ARGS:
                from gvr_topk.integrations import llm_config

                self.native = llm_config.apply(module, self.transaction)
            else:
                self._patch_layers(module)
        except PatchRefused as error:
            self._give_up(str(error))
        except Exception as error:
            finding = Finding(_point_of(name), "mismatch", f"{type(error).__name__}: {error}")
            self._give_up(refusal(_version(), finding))
        else:
            self.done.add(name)

    def _verify(self, module: ModuleType) -> None:
        """Check the points of this module live, and those of modules still to come by their sources."""
        findings = [check_live(point, module) for point in TABLE if point.module == module.__name__]
        pending = [point for point in TABLE if point.module not in self.done | {module.__name__}]
        root = find_engine()
        if root is not None:
            findings += check_sources(root, pending)
        for finding in findings:
            if not finding.good:
                raise PatchRefused(refusal(_version(), finding))

    def _patch_layers(self, module: ModuleType) -> None:
        import torch

        from gvr_topk.integrations.layer_hook import LayerHook

        hook = LayerHook(self.counters, self.say)
        for point, wrap in ((INDEXER_CALL, hook.wrap_indexer), (METADATA_PREPARE, hook.wrap_prepare)):
            owner_name, _, method = point.name.partition(".")
            owner = getattr(module, owner_name)
            self.transaction.set_attribute(owner, method, wrap(getattr(owner, method)))
        _, _, namespace_name, op_name = OP.name.split(".")
        namespace = getattr(torch.ops, namespace_name)
        self.transaction.set_attribute(namespace, op_name, hook.wrap_op(getattr(namespace, op_name)))

    def _give_up(self, reason: str) -> None:
        self.refused = reason
        self.done.clear()
        self.transaction.rollback()
        environment.withdraw_all()
        self.say("warning", f"refused: {reason}")

    def say(self, level: str, line: str) -> None:
        """Log a line once per process, through the engine's logger where there is one."""
        # "on" once, however many cache managers there are; each refusal once.
        key = line.split(":")[0] if level == "info" else line
        if key in self.said:
            return
        self.said.add(key)
        engine = sys.modules.get(f"{ENGINE}.logger")
        logger = getattr(engine, "logger", None) or logging.getLogger(__name__)
        getattr(logger, level)(f"gvr_topk in TensorRT-LLM {_version()}: {line}")


_integration = _Integration()


def module_loaded(name: str) -> None:
    """Do what there is to do after a module of TensorRT-LLM has been imported.

    Parameters
    ----------
    name : str
        One of `gvr_topk_autoload.WATCHED`, already in ``sys.modules``.
    """
    _integration.load(sys.modules[name])


def install() -> bool:
    """Patch TensorRT-LLM where it is loaded already, and watch for the rest of it.

    Needed only where the wheel's ``.pth`` file does not run, for example from a module given to
    ``--custom_module_dirs``. Again is harmless. After a refusal, `uninstall` first to try once more.

    Returns
    -------
    bool
        False when the integration is switched off or was refused.
    """
    if environment.disabled():
        return False
    gvr_topk_autoload.install(module_loaded)
    for name in gvr_topk_autoload.WATCHED:
        if name in sys.modules:
            module_loaded(name)
    return not _integration.refused


def uninstall() -> None:
    """Restore every patched object, the environment and the import machinery."""
    global _integration
    gvr_topk_autoload.uninstall()
    before, _integration = _integration, _Integration()
    environment.withdraw_all()
    before.transaction.rollback()


def installed() -> bool:
    """Whether the layers are patched."""
    return DSA in _integration.done


def counters() -> Snapshot:
    """Counters of this process.

    In TensorRT-LLM the layers run in worker processes: see ``TRTLLM_GVR_TOPK_METRICS_DIR`` for
    reading theirs.
    """
    return _integration.counters.snapshot()


def prometheus_text() -> str:
    """The same in Prometheus text format; needs ``prometheus-client``."""
    return _integration.counters.prometheus_text()


def describe() -> list[tuple[str, str]]:
    """State for ``gvr-topk doctor``: version found, patch points, and what would happen and why.

    Reads source files; imports neither torch nor TensorRT-LLM.

    Returns
    -------
    list of (str, str)
        Label and text, in the order to print.
    """
    root = find_engine()
    if root is None:
        return [("TensorRT-LLM", "not installed"), ("would happen", "nothing: there is nothing to speed up")]
    version = engine_version(root)
    rows = [("TensorRT-LLM", f"{version} in {root}")]
    findings = check_sources(root)
    for finding in findings:
        detail = f" ({finding.detail})" if finding.detail else ""
        rows.append((finding.point.name, f"{finding.status}{detail}: {finding.point.action}"))
    watching = gvr_topk_autoload.Finder in sys.meta_path
    rows.append(("import hook", "active" if watching else "not active: gvr_topk_autoload.pth did not run"))
    rows.append(("would happen", _outlook(version, findings, watching)))
    return rows


def _outlook(version: str, findings: list[Finding], watching: bool) -> str:
    if environment.disabled():
        return f"nothing: {environment.DISABLE} is set"
    bad = [finding for finding in findings if not finding.good]
    if _integration.refused or bad:
        return f"refused: {_integration.refused or refusal(version, bad[0])}"
    try:
        mode = environment.mode()
    except ValueError as error:
        return f"refused: {error}"
    if mode is not environment.Mode.OFF:
        asked = f"on: {environment.ENABLE}={mode.value}"
    elif environment.ENABLE in os.environ:
        return f"off: {environment.ENABLE}=0 overrules the YAML key"
    else:
        asked = "on where the YAML has sparse_attention_config.enable_heuristic_topk: true"
    return asked if watching or installed() else f"{asked}, after install()"


def _version() -> str:
    root = find_engine()
    return engine_version(root) if root else "of unknown version"


def _point_of(module: str) -> PatchPoint:
    return next(point for point in TABLE if point.module == module)
