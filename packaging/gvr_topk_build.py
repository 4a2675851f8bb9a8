"""Build backend: scikit-build-core, with torch as a build requirement only where it is unavoidable.

The CUDA library needs torch's headers and the name of a library to link; nothing of torch is copied or run.
So a build without a CUDA compiler does not require torch, and a build with one takes the torch of the
environment if there is one. Otherwise `pip install .` would fetch gigabytes into a folder that it deletes
afterwards.

The wheel's build tag says what is in it: ``0cpu`` or ``1cuda``. Where pip finds both, it takes the second.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sysconfig
from pathlib import Path
from typing import Any

from scikit_build_core import build as scikit

get_requires_for_build_sdist = scikit.get_requires_for_build_sdist
build_sdist = scikit.build_sdist

TORCH = "torch==2.13.0"
"""Requirement of a build that finds no torch; one exact release keeps builds alike."""
OLDEST_TORCH = (2, 9)
"""First release with the stable C++ interface that the library is built on."""

Settings = dict[str, Any]


def cuda_compiler(settings: Settings | None) -> str | None:
    """Path of the CUDA compiler that CMake will find; None where there is none or it is switched off."""
    switch = str((settings or {}).get("cmake.define.GVR_TOPK_CUDA", "ON"))
    if switch.upper() in ("0", "OFF", "FALSE", "NO"):
        return None
    return shutil.which(os.environ.get("CUDACXX") or "nvcc")


def torch_folder() -> Path | None:
    """Folder of a torch that the library can be built against, here or in the installing environment.

    pip builds with the interpreter of the environment it installs into, but hides what is installed there.
    """
    found = importlib.util.find_spec("torch")
    folders = [Path(each) for each in found.submodule_search_locations or ()] if found else []
    folders += [Path(sysconfig.get_path(name)) / "torch" for name in ("purelib", "platlib")]
    return next((folder for folder in folders if _can_build_with(folder)), None)


def _can_build_with(folder: Path) -> bool:
    stable = folder / "include" / "torch" / "csrc" / "stable"
    if not stable.is_dir() or not (folder / "lib" / "libtorch.so").is_file():
        return False
    text = (folder / "version.py").read_text() if (folder / "version.py").is_file() else ""
    version = re.search(r"__version__ = ['\"](\d+)\.(\d+)", text)
    return version is not None and tuple(map(int, version.groups())) >= OLDEST_TORCH


def _requirements(settings: Settings | None) -> list[str]:
    return [TORCH] if cuda_compiler(settings) and torch_folder() is None else []


def _settings(settings: Settings | None) -> Settings:
    compiler = cuda_compiler(settings)
    added: Settings = {"cmake.define.GVR_TOPK_CUDA": "ON" if compiler else "OFF"}
    added["wheel.build-tag"] = "1cuda" if compiler else "0cpu"
    if compiler:
        added["cmake.define.GVR_TOPK_TORCH_ROOT"] = str(torch_folder())
    return {**added, **(settings or {})}


def get_requires_for_build_wheel(config_settings: Settings | None = None) -> list[str]:
    """Return the requirements for building a wheel."""
    return [*scikit.get_requires_for_build_wheel(config_settings), *_requirements(config_settings)]


def get_requires_for_build_editable(config_settings: Settings | None = None) -> list[str]:
    """Return the requirements of an editable installation, which are the same."""
    return [*scikit.get_requires_for_build_editable(config_settings), *_requirements(config_settings)]


def build_wheel(
    wheel_directory: str, config_settings: Settings | None = None, metadata_directory: str | None = None
) -> str:
    """Build a wheel; returns its name."""
    return scikit.build_wheel(wheel_directory, _settings(config_settings), metadata_directory)


def build_editable(
    wheel_directory: str, config_settings: Settings | None = None, metadata_directory: str | None = None
) -> str:
    """Build the wheel of an editable installation; returns its name."""
    return scikit.build_editable(wheel_directory, _settings(config_settings), metadata_directory)
