"""Where and with what a measurement was made, and JSON files that survive an interrupted run."""

import datetime
import json
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import gvr_topk
from eval.common.paths import ROOT
from eval.common.timing import microseconds

MACHINE_PATH = re.compile(r"(?<![\w./-])/(?:root|home|tmp|work)/(?:[\w.+@-]+/)*([\w.+@-]*)")
"""A path that only one machine has."""


def describe_machine(commit: str = "", device: str = "cuda") -> dict[str, Any]:
    """Machine (a GPU if there is one, or a CPU), versions, commit and time, to stand beside every figure.

    `commit` is that of the sources where the folder has no Git history of its own.
    """
    described: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit or output_of("git", "-C", str(ROOT), "describe", "--always", "--dirty") or "unknown",
        "gvr_topk": gvr_topk.__version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "device": f"CPU {platform.machine()}",
    }
    if device == "cuda" and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        described |= {
            "device": properties.name,
            "multiprocessors": properties.multi_processor_count,
            "l2_bytes": properties.L2_cache_size,
            "driver": _of_first_gpu("driver_version"),
            "sm_clock_mhz": round(sm_clock_mhz()),
        }
    return described


def compute_capability() -> float:
    """That of the first GPU, 9.0 for Hopper; 0 where there is none.

    The driver's tool is asked and not torch, which would hold memory of a GPU that others are to measure.
    """
    return float(_of_first_gpu("compute_cap") or 0)


def sm_clock_mhz(cycles: int = 20_000_000) -> float:
    """SM clock under load: a kernel that waits for so many of its own cycles, timed with events."""
    torch.cuda._sleep(cycles)
    return cycles / microseconds(lambda: torch.cuda._sleep(cycles), on_gpu=True)


def without_folders(data: Any) -> Any:
    """The same data without folders of this machine: results are for others, who have none of them.

    The checkout is ``.``, and of other paths below a home or temporary folder the last part is kept.
    """
    if isinstance(data, Mapping):
        return {without_folders(key): without_folders(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [without_folders(value) for value in data]
    if isinstance(data, str):
        return MACHINE_PATH.sub(r"WORK/\1", re.sub(rf"{re.escape(str(ROOT))}(?![\w.-])", ".", data))
    return data


def write_json(path: Path, data: Any) -> None:
    """Write strict JSON; results, which name their machine, without its folders."""
    if isinstance(data, Mapping) and "machine" in data:
        data = without_folders(data)
    write_text(path, json.dumps(data, indent=1, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file in one step: a killed run leaves the last whole one, and several writers one of theirs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_text(text)
    os.replace(partial, path)


def _of_first_gpu(field: str) -> str:
    """What the driver's tool says of a field, which has one line for each GPU; empty where there is none."""
    lines = output_of("nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader").splitlines()
    return lines[0].strip() if lines else ""


def output_of(*command: str, timeout_s: float = 20) -> str:
    """What a command prints, stripped; nothing where it fails or is not there."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
