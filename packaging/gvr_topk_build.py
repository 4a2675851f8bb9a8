"""Build backend: scikit-build-core, with torch as a build requirement only where it is unavoidable.

`gvr_topk_archs` says for which GPUs kernels are compiled. The CUDA library needs torch's headers and the name
of a library to link; nothing of torch is copied or run. So a build without kernels does not require torch. A
build with kernels takes the torch of the environment if there is one; otherwise `pip install .` would fetch
gigabytes into a folder that it deletes afterwards.

The wheel's build tag says what is in it: ``0cpu`` or ``1cuda``. Of both, pip chooses the second.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sysconfig
from pathlib import Path
from typing import Any

import gvr_topk_archs
from scikit_build_core import build as scikit

build_sdist = scikit.build_sdist
get_requires_for_build_sdist = scikit.get_requires_for_build_sdist

TORCH = "torch==2.13.0"
"""Requirement of a build that finds no torch; one exact release keeps builds alike."""
OLDEST_TORCH = (2, 9)
"""First release with the stable C++ interface that the library is built on."""

Settings = dict[str, Any]


def architectures(settings: Settings | None) -> tuple[str, ...]:
    """GPU architectures to compile for; empty where no kernels are compiled."""
    return gvr_topk_archs.choose(str((settings or {}).get("cmake.define.GVR_TOPK_ARCHS", ""))).archs


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
    return [TORCH] if architectures(settings) and torch_folder() is None else []


def _settings(settings: Settings | None) -> Settings:
    archs = architectures(settings)
    os.environ["CMAKE_BUILD_PARALLEL_LEVEL"] = str(gvr_topk_archs.jobs())
    # One folder for each choice of architectures, for editable installs and wheels alike, so that nothing is
    # compiled twice.
    names = [arch.removesuffix("-real") for arch in archs] or ["cpu"]
    added: Settings = {
        "build-dir": f"build/{'-'.join(names)}",
        "wheel.build-tag": "1cuda" if archs else "0cpu",
    }
    if archs:
        added["cmake.define.GVR_TOPK_TORCH_ROOT"] = str(torch_folder())
    return {**added, **(settings or {})}


def get_requires_for_build_wheel(config_settings: Settings | None = None) -> list[str]:
    """Return the requirements for building a wheel."""
    return [*scikit.get_requires_for_build_wheel(config_settings), *_requirements(config_settings)]


def get_requires_for_build_editable(config_settings: Settings | None = None) -> list[str]:
    """Return the requirements of an editable installation, which are the same."""
    return [*scikit.get_requires_for_build_editable(config_settings), *_requirements(config_settings)]


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: Settings | None = None) -> str:
    """Write the metadata of a wheel, which pip reads without compiling; returns its folder."""
    return scikit.prepare_metadata_for_build_wheel(metadata_directory, _settings(config_settings))


def prepare_metadata_for_build_editable(
    metadata_directory: str, config_settings: Settings | None = None
) -> str:
    """Write the metadata of an editable installation; returns its folder."""
    return scikit.prepare_metadata_for_build_editable(metadata_directory, _settings(config_settings))


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
