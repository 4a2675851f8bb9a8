"""When a build needs torch: only with a CUDA compiler, and only where none is installed."""

from __future__ import annotations

import importlib.util
import sysconfig
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("scikit_build_core")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The backend, in an environment without a compiler and without torch."""
    spec = importlib.util.spec_from_file_location("gvr_topk_build", ROOT / "packaging" / "gvr_topk_build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else real(name))
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "site"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("CUDACXX", raising=False)
    monkeypatch.setattr(module.scikit, "get_requires_for_build_wheel", lambda settings: ["cmake"])
    monkeypatch.setattr(module.scikit, "get_requires_for_build_editable", lambda settings: ["cmake"])
    return module


def put_compiler(folder: Path) -> None:
    (folder / "bin").mkdir()
    compiler = folder / "bin" / "nvcc"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)


def put_torch(folder: Path, version: str) -> Path:
    torch = folder / "site" / "torch"
    (torch / "include" / "torch" / "csrc" / "stable").mkdir(parents=True)
    (torch / "lib").mkdir()
    (torch / "lib" / "libtorch.so").touch()
    (torch / "version.py").write_text(f"__version__ = '{version}'\n")
    return torch


def test_no_compiler_no_torch(backend: ModuleType) -> None:
    assert backend.get_requires_for_build_wheel() == ["cmake"]
    assert backend._settings(None)["cmake.define.GVR_TOPK_CUDA"] == "OFF"
    assert backend._settings(None)["wheel.build-tag"] == "0cpu"


def test_compiler_without_torch_fetches_one(backend: ModuleType, tmp_path: Path) -> None:
    put_compiler(tmp_path)
    assert backend.get_requires_for_build_wheel() == ["cmake", backend.TORCH]
    assert backend.get_requires_for_build_editable() == ["cmake", backend.TORCH]


def test_installed_torch_is_taken(backend: ModuleType, tmp_path: Path) -> None:
    put_compiler(tmp_path)
    torch = put_torch(tmp_path, "2.11.0+cu130")
    assert backend.get_requires_for_build_wheel() == ["cmake"]
    assert backend._settings({"cmake.define.GVR_TOPK_ARCHS": "90a-real"}) == {
        "cmake.define.GVR_TOPK_CUDA": "ON",
        "cmake.define.GVR_TOPK_TORCH_ROOT": str(torch),
        "cmake.define.GVR_TOPK_ARCHS": "90a-real",
        "wheel.build-tag": "1cuda",
    }


def test_torch_without_the_stable_interface_does_not_count(backend: ModuleType, tmp_path: Path) -> None:
    put_compiler(tmp_path)
    put_torch(tmp_path, "2.8.0")
    assert backend.get_requires_for_build_wheel() == ["cmake", backend.TORCH]


@pytest.mark.parametrize("how", ["setting", "variable"])
def test_cuda_can_be_switched_off(
    backend: ModuleType, tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_compiler(tmp_path)
    settings = {"cmake.define.GVR_TOPK_CUDA": "OFF"} if how == "setting" else None
    if how == "variable":
        monkeypatch.setenv("CUDACXX", "none")
    assert backend.get_requires_for_build_wheel(settings) == ["cmake"]
    assert backend._settings(settings)["wheel.build-tag"] == "0cpu"
