"""Whether a run's logs show that the heuristic top-k was active, refused, or not there at all.

The integrations write through the engine's logger, once per process, ``gvr_topk in ENGINE VERSION:``
and then ``on: ...`` at the first step that it computes, ``waiting: ...`` where no row was long enough to need
a top-k before, ``refused: ...`` or ``ignored: ...`` where it does not run, or ``fell back: ...`` or
``not in use: ...`` where the engine runs another top-k. Nothing else counts: a figure of an "on" run in which
the feature did not run would compare off with off.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_HOOK_LINE = re.compile(r"\bgvr_topk in (?:TensorRT-LLM|vLLM) (?:of unknown version|[^\s:]+): (?P<said>.+)")
_VERSION = re.compile(
    r"TensorRT-LLM version: (\S+)"
    r"|vLLM server version ([^\s,]+)|█\s+version (\d\S*)|gvr_topk in vLLM (\d[^\s:]*)"
)
_REFUSALS = ("refused:", "fell back:", "not in use:", "ignored:")
_KEPT_LINES = 5


@dataclass(frozen=True)
class Evidence:
    """What the logs of one run say.

    Attributes
    ----------
    active : bool
        A process said that the heuristic top-k is on.
    waiting : bool
        A process said that the heuristic top-k is there, and that no row was long enough for it.
    refused : bool
        A process said that it refused to patch the engine, or that the engine's own top-k ran; the others
        cannot make up for it.
    lines : tuple of str
        The first different lines of the integration.
    version : str or None
        Version of the engine, where the log names it.
    """

    active: bool
    waiting: bool
    refused: bool
    lines: tuple[str, ...]
    version: str | None

    def problem(self, variant: str) -> str | None:
        """Why a run of this variant shows nothing about it; None when it does."""
        if variant == "on":
            if self.refused:
                return f"gvr_topk did not work, or not alone: {self.lines[0]}"
            if not self.active and self.waiting:
                return (
                    "gvr_topk was there, but the heuristic top-k was never on: no row was longer than "
                    "index_topk, and the engine selects nothing in such rows, so the run shows nothing. "
                    "Take prompts longer than index_topk (of the accuracy tasks, longbench_v1)"
                )
            if not self.active:
                return (
                    "no line of gvr_topk in its log says that the heuristic top-k was on, so the run shows "
                    "nothing about it (is the wheel installed there? does TLLM_LOG_LEVEL or "
                    "VLLM_LOGGING_LEVEL hide level info? does VLLM_PLUGINS leave it out?)"
                )
        elif self.active:
            return "its log says that the heuristic top-k was on (is TRTLLM_GVR_TOPK or GVR_TOPK_VLLM set?)"
        return None


def read_evidence(output: Iterable[str]) -> Evidence:
    """Look through the lines that a run printed: its command's, its server's, or both."""
    said: list[str] = []
    lines: list[str] = []
    version = None
    for line in output:
        if match := _VERSION.search(line):
            version = next(filter(None, match.groups()))
        if match := _HOOK_LINE.search(line):
            said.append(match.group("said"))
            if line.strip() not in lines:
                lines.append(line.strip())
    # A refusal comes first among the lines that are kept.
    lines.sort(key=lambda line: not any(f": {word}" in line for word in _REFUSALS))
    return Evidence(
        active=any(text.startswith("on:") for text in said),
        waiting=any(text.startswith("waiting:") for text in said),
        refused=any(text.startswith(_REFUSALS) for text in said),
        lines=tuple(lines[:_KEPT_LINES]),
        version=version,
    )
