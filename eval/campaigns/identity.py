"""What a run depends on besides its command and its files: versions, package contents and the GPU.

Resuming must never mix two builds, and a version number alone does not tell a rebuilt wheel from the one
before. The engine's programs may belong to another Python than this script, so its interpreter is asked.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

PROBE = Path(__file__).with_name("probe_build.py")
PROBE_TIMEOUT_S = 120.0

VARIABLES = ("GVR_TOPK_DISABLE", "GVR_TOPK_LIBRARY_DIR", "TRTLLM_ENABLE_PDL")
PREFIXES = ("TRTLLM_GVR_TOPK", "GVR_TOPK_VLLM", "VLLM_")
"""Variables of the environment that change what the integration does; those with a prefix do too."""


def build_identity(program: str, engine: str = "tensorrt_llm") -> dict[str, str]:
    """Name the build that `program` runs on.

    Parameters
    ----------
    program : str
        Console script of the engine, such as ``trtllm-eval``, or a Python, looked up on PATH.
    engine : str
        Package of the engine.

    Returns
    -------
    dict of str to str
        Version of the engine and hash of its list of files, version of gvr_topk and hash of its files,
        GPUs with their driver, and the variables of the environment that steer the integration. What
        cannot be found out is ``unknown``, what is not installed ``absent``.
    """
    variables = {
        name: value for name, value in os.environ.items() if name in VARIABLES or name.startswith(PREFIXES)
    }
    return {**_packages(program, engine), "GPU": _gpus(), **dict(sorted(variables.items()))}


def _packages(program: str, engine: str) -> dict[str, str]:
    unknown = dict.fromkeys((engine, f"{engine} files", "gvr_topk", "gvr_topk files"), "unknown")
    found = shutil.which(program)
    interpreter = None if found is None else _interpreter(Path(found))
    if found is None or interpreter is None:
        return unknown
    try:
        done = subprocess.run(
            [interpreter, str(PROBE), engine],
            capture_output=True,
            text=True,
            timeout=PROBE_TIMEOUT_S,
            check=True,
        )
        return {**unknown, **json.loads(done.stdout)}
    except (OSError, subprocess.SubprocessError, ValueError):
        return unknown


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


def _gpus() -> str:
    query = ["nvidia-smi", "--query-gpu=name,uuid,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return "none"
    return "; ".join(done.stdout.split("\n")).strip("; ")
