"""``enable_heuristic_topk: true`` in TensorRT-LLM, without changing its files.

`module_loaded` is called by the import hook (`gvr_topk_autoload`) after a watched module has run;
`install` does the same by hand. There are two transactions. The first one changes the configuration classes,
so that a YAML file with our keys is valid. It stays when the integration is refused or switched off, because
a server must start with the file it has; the keys are then ignored with a warning. The second one patches the
layers: either all points of the table in `gvr_topk.integrations.tensorrt_llm.upstream`, or none.
"""

from __future__ import annotations

import importlib
import logging
import os
import site
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import gvr_topk_autoload
from gvr_topk.config import SWITCH
from gvr_topk.integrations._kit import environment
from gvr_topk.integrations._kit.counters import Counters, Snapshot
from gvr_topk.integrations._kit.environment import Mode
from gvr_topk.integrations._kit.log import LogOnce, one_line
from gvr_topk.integrations._kit.signatures import Checker, Finding, PatchPoint, check_live
from gvr_topk.integrations._kit.transaction import Transaction
from gvr_topk.integrations.tensorrt_llm.inspection import (
    Inspection,
    PatchRefused,
    inspect_engine,
    knows_key,
    refusal,
    root_of_engine,
    version,
)
from gvr_topk.integrations.tensorrt_llm.upstream import (
    ARGS,
    CONFIG,
    DSA_MODULES,
    ENGINE,
    FUSED_SAMPLER,
    LLM_ARGS,
    NAME,
    SAMPLER_POINTS,
    TOP_K,
    UpstreamShape,
)

if TYPE_CHECKING:
    from gvr_topk.integrations.tensorrt_llm.hook import LayerHook

NATIVE_ARCH = 100
"""Compute capability times ten from which TensorRT-LLM runs its own heuristic top-k, where it has one."""


def _logger() -> logging.Logger:
    """Return the engine's logger, where there is one."""
    engine = sys.modules.get(f"{ENGINE}.logger")
    return getattr(engine, "logger", None) or logging.getLogger(__name__)


class _Integration:
    """State of this process."""

    def __init__(self) -> None:
        self.keys = Transaction()
        self.layers = Transaction()
        self.done: set[str] = set()
        self.refused = ""
        self.hook: LayerHook | None = None
        self.counters = Counters()
        self.say = LogOnce(NAME, version, _logger)

    def load(self, module: ModuleType) -> None:
        """Patch what a loaded module offers; undo it if the module does not fit."""
        if module.__name__ in self.done:
            return
        if module.__name__ == LLM_ARGS:
            self._accept_keys(module)
        elif not self.refused and not environment.disabled():
            if module.__name__ == FUSED_SAMPLER:
                self._connect_sampler({FUSED_SAMPLER: module})
            else:
                self._connect_layers(module)

    def _accept_keys(self, module: ModuleType) -> None:
        from gvr_topk.integrations.tensorrt_llm import llm_config

        for point in (CONFIG, ARGS):
            finding = check_live(point, module)
            if not finding.good:
                self._refuse(refusal(finding))
                return
        try:
            llm_config.apply(module, self.keys, self.note)
        except Exception as error:  # TensorRT-LLM must start even if its classes do not take our keys
            self.keys.rollback()
            self._refuse(refusal(_failure(CONFIG, error)))
            return
        self.done.add(module.__name__)
        if not self.refused and not environment.disabled():
            bad = inspect_engine(root_of_engine(), {LLM_ARGS: module}).bad
            if bad:
                self._refuse(refusal(bad[0]))
            else:
                self._connect_sampler({})

    def note(self, enable: bool | None = None, options: Mapping[str, Any] | None = None) -> None:
        """Publish what a validated configuration asks for, or say that it is ignored."""
        reason = f"{environment.DISABLE} is set" if environment.disabled() else self.refused
        if not reason:
            environment.publish(enable, options)
        elif enable:
            if environment.disabled():  # which does not reach workers, but our keys do
                self.keys.set_item(os.environ, environment.ENABLE_TRTLLM, Mode.OFF.value)
            self.say("warning", f"ignored: sparse_attention_config.{SWITCH}: {reason}")

    def _connect_layers(self, module: ModuleType) -> None:
        loaded = {name: sys.modules[name] for name in (LLM_ARGS, TOP_K) if name in sys.modules}
        inspection = inspect_engine(root_of_engine(), {**loaded, module.__name__: module})
        shape = inspection.shape
        with self._refusing(shape.indexer_call):
            if inspection.bad:
                raise PatchRefused(refusal(inspection.bad[0]))
            self._patch_layers(shape, module)
            self.done.add(module.__name__)

    def _patch_layers(self, shape: UpstreamShape, module: ModuleType) -> None:
        from gvr_topk.integrations.tensorrt_llm.hook import LayerHook

        self.hook = hook = LayerHook(self.counters, self.say)
        self.layers.wrap(module, shape.indexer_call.name, hook.wrap_indexer)
        self.layers.wrap(module, shape.metadata_prepare.name, hook.wrap_prepare)
        if shape.has_top_k:
            self.layers.wrap(importlib.import_module(TOP_K), shape.top_k_decode.name, hook.wrap_top_k)
        elif check_live(shape.op, module).status == "ok":
            self._replace_op(shape, module, hook)
        else:
            hook.before_first_step = lambda: self._replace_late_op(shape, module, hook)

    def _connect_sampler(self, loaded: dict[str, ModuleType]) -> None:
        """Wrap the fused sampler if it is asked for and loaded, or say what is unlike the known one."""
        try:
            if not environment.asks_for(environment.ENABLE_SAMPLER_TRTLLM):
                return
            checker = Checker(root_of_engine(), loaded)
            bad = [finding for point in SAMPLER_POINTS if not (finding := checker.check(point)).good]
            if bad:
                raise PatchRefused(str(bad[0]))
            for module in loaded.values():
                self._wrap_sampler(module)
        except Exception as error:  # TensorRT-LLM must start even if its sampler is another one
            why = error if isinstance(error, (PatchRefused, ValueError)) else one_line(error)
            self.say("warning", f"sampling stays {NAME}'s own: {why}")

    def _wrap_sampler(self, module: ModuleType) -> None:
        from gvr_topk.integrations.tensorrt_llm.sampler import FusedProbs, FusedTokens, FusedTokensAndProbs

        hooks = (FusedTokens, FusedTokensAndProbs, FusedProbs)
        for point, hook in zip(SAMPLER_POINTS, hooks, strict=True):
            self.layers.wrap(module, point.name, hook(NAME, self.counters.count, self.say).wrap)
        self.done.add(module.__name__)

    def _replace_op(self, shape: UpstreamShape, module: ModuleType, hook: LayerHook) -> None:
        import torch

        finding = check_live(shape.op, module)
        if finding.status != "ok":
            raise PatchRefused(refusal(finding))
        self.layers.wrap(torch, shape.op.name.removeprefix("torch."), hook.wrap_op)

    def _replace_late_op(self, shape: UpstreamShape, module: ModuleType, hook: LayerHook) -> None:
        """Replace an op that was not registered yet when the DSA module was imported."""
        with self._refusing(shape.op):  # the op of another version may be anything
            self._replace_op(shape, module, hook)

    @contextmanager
    def _refusing(self, point: PatchPoint) -> Iterator[None]:
        """Turn an error of patching, at this point unless the error names another, into a refusal."""
        try:
            yield
        except PatchRefused as error:
            self._refuse(str(error))
        except Exception as error:
            self._refuse(refusal(_failure(point, error)))

    def _refuse(self, reason: str) -> None:
        self.refused = reason
        self.done -= set(DSA_MODULES)
        self.layers.rollback()
        environment.withdraw()
        self.say("warning", f"refused: {reason}")
        with suppress(ValueError):  # of the variable; then nothing is asked for
            if environment.asks_for(environment.ENABLE_SAMPLER_TRTLLM):
                self.say("warning", f"sampling stays {NAME}'s own, too")


_integration = _Integration()


def module_loaded(name: str) -> None:
    """Patch a module of TensorRT-LLM, one of `gvr_topk_autoload.WATCHED`, after it has been imported."""
    _integration.load(sys.modules[name])


def install() -> bool:
    """Patch the modules of TensorRT-LLM that are loaded already, and watch for the others.

    Needed only where the wheel's ``.pth`` file does not run, for example from a module given to
    ``--custom_module_dirs``. A second call is harmless. To try once more after a refusal, call `uninstall`
    first.

    Returns
    -------
    bool
        False when the integration is switched off or was refused.
    """
    gvr_topk_autoload.Finder.watch(module_loaded)
    return not _integration.refused and not environment.disabled()


def uninstall() -> None:
    """Restore every patched object, the environment and the import machinery."""
    global _integration
    gvr_topk_autoload.uninstall()
    before, _integration = _integration, _Integration()
    environment.withdraw()
    before.layers.rollback()
    before.keys.rollback()


def installed() -> bool:
    """Whether the layers are patched."""
    return bool(_integration.done & set(DSA_MODULES))


def counters() -> Snapshot:
    """Counters of this process.

    In TensorRT-LLM the layers run in worker processes: ``TRTLLM_GVR_TOPK_METRICS_DIR`` makes their counters
    readable.
    """
    return _integration.counters.snapshot()


def prometheus_text() -> str:
    """Counters of this process in Prometheus text format; needs ``prometheus-client``."""
    return _integration.counters.prometheus_text()


def describe(arch: int | None = None) -> list[tuple[str, str]]:
    """Describe the state for ``gvr-topk doctor``: version found, patch points, what would happen and why.

    Reads source files; does not import TensorRT-LLM. `arch` is the compute capability of the GPU
    times ten, where there is one.
    """
    root = root_of_engine()
    if root is None:
        return [("TensorRT-LLM", "not installed"), ("would happen", "nothing: there is nothing to speed up")]
    inspection = inspect_engine(root)
    fits = "sources" if inspection.bad else "sources of"
    known = "unlike any known" if inspection.bad else inspection.shape.versions
    rows = [("TensorRT-LLM", f"{version()} in {root}"), (fits, known)]
    rows += [finding.row for finding in inspection.findings]
    with suppress(ValueError):  # what is wrong with the variable stands with the others
        if environment.asks_for(environment.ENABLE_SAMPLER_TRTLLM):
            rows += [Checker(root, {}).check(point).row for point in SAMPLER_POINTS]
    watching = gvr_topk_autoload.Finder.state()
    rows.append(("import hook", watching or f"not active: {_why_no_hook()}"))
    rows.append(("would happen", _outlook(root, inspection, bool(watching), arch)))
    return rows


def _outlook(root: Path, inspection: Inspection, watching: bool, arch: int | None) -> str:
    if environment.disabled():
        return f"nothing: {environment.DISABLE} is set; our YAML keys are accepted and ignored"
    if _integration.refused or inspection.bad:
        return f"refused: {_integration.refused or refusal(inspection.bad[0])}"
    try:
        asked = environment.user_mode(environment.ENABLE_TRTLLM)
    except ValueError as error:
        return f"refused: {error}"
    if asked is Mode.OFF:
        return f"off: {environment.ENABLE_TRTLLM}=0 overrules the YAML key"
    outlook = f"on where the YAML has sparse_attention_config.{SWITCH}: true"
    if asked is not None:
        outlook = f"on: {environment.ENABLE_TRTLLM}={asked.value}"
    if asked is not Mode.FORCE and arch is not None and arch >= NATIVE_ARCH and knows_key(root):
        outlook = (
            f"off: with {SWITCH} this TensorRT-LLM runs its own heuristic top-k on a GPU of compute "
            f"capability {arch / 10:.1f}; {environment.ENABLE_TRTLLM}=force runs ours instead"
        )
    return outlook if watching or installed() else f"{outlook}, after install()"


def _why_no_hook() -> str:
    """Say why the wheel's ``.pth`` file did not run in this process, and what to do."""
    folder = Path(gvr_topk_autoload.__file__).parent
    file = folder / "gvr_topk_autoload.pth"
    otherwise = "use trtllm-serve --custom_module_dirs, or call gvr_topk.integrations.tensorrt_llm.install()"
    if not file.is_file():
        return f"there is no {file.name} beside {Path(gvr_topk_autoload.__file__)}; {otherwise}"
    sites = [*site.getsitepackages(), site.getusersitepackages()]
    if not any(Path(entry).resolve() == folder.resolve() for entry in sites):
        return (
            f"Python runs no {file.name} in {folder}, which is on the path but no site-packages folder "
            f"(pip install --target, PYTHONPATH); install the wheel without --target, or {otherwise}"
        )
    return f"{file} did not run (python -S or -I?); {otherwise}"


def _failure(point: PatchPoint, error: Exception) -> Finding:
    return Finding(point, "mismatch", one_line(error))
