"""What ran: whether the logs show the heuristic top-k, and the builds and GPUs that figures belong to.

The integrations write through the engine's logger, once per process, ``gvr_topk in ENGINE VERSION:``
and then ``on: ...`` at the first step that it computes, ``waiting: ...`` where no row was long enough to need
a top-k before, ``refused: ...`` or ``ignored: ...`` where it does not run, or ``fell back: ...`` or
``not in use: ...`` where the engine runs another top-k. Nothing else counts: a figure of an "on" run in which
the feature did not run would compare off with off.

Resuming must never mix two builds, and a version number alone does not tell a rebuilt wheel from the one
before. The engine's programs may belong to another Python than this one, so its interpreter is asked.
"""

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from eval.common.machine import output_of

_HOOK_LINE = re.compile(r"\bgvr_topk in (?:TensorRT-LLM|vLLM) (?:of unknown version|[^\s:]+): (?P<said>.+)")
_VERSION = re.compile(
    r"TensorRT-LLM version: (\S+)"
    r"|vLLM server version ([^\s,]+)|█\s+version (\d\S*)|gvr_topk in vLLM (\d[^\s:]*)"
)
_REFUSALS = ("refused:", "fell back:", "not in use:", "ignored:")
_NATIVE = re.compile("(sampler|drafts): .* of vLLM (draws|serves) calls (?!with penalties)")
"""Calls that are left to vLLM, but for those with penalties, of which its warm-up has one in every log."""

Subject = Literal["top-k", "sampler"]
TOP_K, SAMPLER = get_args(Subject)
"""What a log may show to be on."""

_ON = {
    TOP_K: re.compile("on:(?! (tokens|drafts|log-probabilities|probabilities) )"),  # on in any model
    SAMPLER: re.compile("on: (tokens|drafts) "),
}

PROBE = """
import hashlib, json, sys
from importlib.metadata import PackageNotFoundError, distribution
found = {}
for name in sys.argv[1:]:
    try:
        files = distribution(name).read_text("RECORD") or ""
        found[f"{name} files"] = hashlib.sha256(files.encode()).hexdigest()
        found[name] = distribution(name).version
    except PackageNotFoundError:
        found[name] = found[f"{name} files"] = "absent"
print(json.dumps(found))
"""
"""Program for the Python of an engine's tools. It imports none of the packages."""

VARIABLES = ("GVR_TOPK_DISABLE", "GVR_TOPK_LIBRARY_DIR", "GVR_TOPK_SAMPLER", "TRTLLM_ENABLE_PDL")
PREFIXES = ("TRTLLM_GVR_TOPK", "GVR_TOPK_VLLM", "VLLM_")
"""Variables of the environment that change what the integration does; those with a prefix do too."""


@dataclass(frozen=True)
class Evidence:
    """What the logs of one run say."""

    subject: Subject
    active: bool  # a process said that it is on
    waiting: bool  # a process said that it is there, and that no row was long enough for it
    refused: bool  # a process said that the engine's own top-k ran; others cannot make up for it
    lines: tuple[str, ...]  # the first different lines of the integration
    version: str | None  # of the engine, where the log names it

    def problem(self, variant: str) -> str | None:
        """Why a run of this variant shows nothing about it; None when it does."""
        if variant == "on" and self.refused:
            return f"gvr_topk did not work, or not alone: {self.lines[0]}"
        if variant == "on" and self.waiting and not self.active:
            return (
                "gvr_topk was there, but the heuristic top-k was never on: no row was longer than "
                "index_topk, and the engine selects nothing in such rows, so the run shows nothing. "
                "Take prompts longer than index_topk (of the accuracy tasks, longbench_v1)"
            )
        if variant == "on" and not self.active:
            return (
                f"no line of gvr_topk in its log says that the {self.subject} was on, so the run shows "
                "nothing about it (is the wheel installed there? does TLLM_LOG_LEVEL or "
                "VLLM_LOGGING_LEVEL hide level info? does VLLM_PLUGINS leave it out?)"
            )
        if variant == "off" and self.active:
            return f"its log says that the {self.subject} was on (is TRTLLM_GVR_TOPK or GVR_TOPK_VLLM set?)"
        return None


def read_evidence(output: Iterable[str], subject: Subject = TOP_K) -> Evidence:
    """Look through the lines that a run printed: its command's, its server's, or both."""
    said: list[str] = []
    lines: list[str] = []
    version = None
    for line in output:
        if match := _VERSION.search(line):
            version = next(filter(None, match.groups()))
        if match := _HOOK_LINE.search(line):
            said.append(match.group("said"))
            lines.append(line.strip())
    # A refusal comes first among the lines that are kept.
    kept = sorted(dict.fromkeys(lines), key=lambda line: not any(f": {word}" in line for word in _REFUSALS))
    return Evidence(
        subject=subject,
        active=any(_ON[subject].match(text) for text in said),
        waiting=any(text.startswith("waiting:") for text in said),
        refused=any(text.startswith(_REFUSALS) for text in said)
        or (subject == SAMPLER and any(map(_NATIVE.match, said))),
        lines=tuple(kept[:5]),
        version=version,
    )


def build_identity(program: str, engine: str = "tensorrt_llm") -> dict[str, str]:
    """Name the build that `program`, a console script of the package `engine` or a Python, runs on.

    Of the engine and of gvr_topk the version, and a hash of the list of files, which holds one for each file
    of a wheel; GPUs with their driver, and the variables of the environment that steer the integration. What
    cannot be found out is ``unknown``, what is not installed ``absent``.
    """
    build = dict.fromkeys((engine, f"{engine} files", "gvr_topk", "gvr_topk files"), "unknown")
    found = shutil.which(program)
    if found is not None and (interpreter := _interpreter(Path(found))):
        with contextlib.suppress(ValueError):  # it printed no JSON
            build |= json.loads(output_of(interpreter, "-c", PROBE, engine, "gvr_topk", timeout_s=120))
    gpus = output_of("nvidia-smi", "--query-gpu=name,uuid,driver_version", "--format=csv,noheader")
    build["GPU"] = "; ".join(gpus.splitlines()) or "none"
    return build | {
        name: os.environ[name]
        for name in sorted(os.environ)
        if name in VARIABLES or name.startswith(PREFIXES)
    }


def _interpreter(script: Path) -> str | None:
    """The program that a script's first line names, or a Python itself; None for another binary."""
    if script.name.startswith("python"):
        return str(script)
    with script.open("rb") as stream:
        first = stream.readline(4096)
    words = first[2:].decode("utf-8", errors="replace").split() if first.startswith(b"#!") else []
    if words and Path(words[0]).name == "env":
        words = [word for word in words[1:] if not word.startswith("-")]
    return words[0] if words and "python" in Path(words[0]).name else None
