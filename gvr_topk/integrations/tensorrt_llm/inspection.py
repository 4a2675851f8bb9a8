"""Find out which shape of `gvr_topk.integrations.tensorrt_llm.upstream` is installed, and whether it fits."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from gvr_topk.config import SWITCH
from gvr_topk.integrations._kit.signatures import Checker, Finding, engine_version, find_engine
from gvr_topk.integrations.tensorrt_llm.upstream import (
    CONFIG,
    ENGINE,
    LLM_ARGS,
    SHAPES,
    SUPPORTED,
    UpstreamShape,
)


def root_of_engine() -> Path | None:
    """Return the folder of the installed TensorRT-LLM; None if there is none."""
    return find_engine(ENGINE)


def version() -> str:
    """Return the version of the installed TensorRT-LLM."""
    root = root_of_engine()
    return engine_version(root, ENGINE) if root else "of unknown version"


@dataclass(frozen=True)
class Inspection:
    """The shape that was found, or that fits best if none fits, with a finding for each of its points."""

    shape: UpstreamShape
    findings: tuple[Finding, ...]

    @property
    def bad(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if not finding.good)


class PatchRefused(RuntimeError):
    """The installed TensorRT-LLM is not one that the table describes."""


def refusal(finding: Finding) -> str:
    """Return the message of a refusal: what was found, which point does not fit, and what to do."""
    keys = "our YAML keys are ignored"
    if finding.point.module == LLM_ARGS:  # its classes are to take our keys
        keys = "a YAML file with our keys may be rejected"
    return (
        f"found TensorRT-LLM {version()}; {finding}. "
        f"Serving continues with TensorRT-LLM's own top-k, and {keys}. "
        f"Use a version from {SUPPORTED}, or set GVR_TOPK_DISABLE=1 to silence this."
    )


def inspect_engine(root: Path | None, loaded: Mapping[str, ModuleType] | None = None) -> Inspection:
    """Find out which shape is installed, from the sources below `root`, if any, and from loaded modules.

    Returns the inspection of the first shape whose points are all good, or else of the shape with the fewest
    bad points. A point whose source cannot be read is ``later``: it is checked when its module is loaded.
    """
    checker = Checker(root, dict(loaded or {}))
    inspections = [
        Inspection(shape, tuple(checker.check(point) for point in shape.points)) for shape in SHAPES
    ]
    # Without sources all shapes whose modules are not loaded look equally good: shapes with a loaded module
    # come first.
    inspections.sort(key=lambda inspection: inspection.shape.dsa not in checker.loaded)
    return min(inspections, key=lambda inspection: len(inspection.bad))


def knows_key(root: Path) -> bool:
    """Whether the engine's sources have ``enable_heuristic_topk`` as a key of their own."""
    owner = Checker(root, {}).find_class(CONFIG)
    return owner is not None and any(
        isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == SWITCH
        for node in owner.body
    )
