"""What a build compiles: kernels for the GPU that is here, and torch only where kernels are compiled."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("scikit_build_core")
ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "packaging" / "gvr_topk_archs.py"


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The backend, in an environment without a compiler, without a GPU and without torch."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    for name in ("gvr_topk_archs", "gvr_topk_build"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import gvr_topk_build as module

    real = module.importlib.util.find_spec
    monkeypatch.setattr(
        module.importlib.util, "find_spec", lambda name: None if name == "torch" else real(name)
    )
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "site"))
    (tmp_path / "bin").mkdir()
    put_program(tmp_path, "nvidia-smi", "")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    for name in ("CUDACXX", "GVR_TOPK_ARCHS", "CMAKE_BUILD_PARALLEL_LEVEL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(module.scikit, "get_requires_for_build_wheel", lambda settings: ["cmake"])
    monkeypatch.setattr(module.scikit, "get_requires_for_build_editable", lambda settings: ["cmake"])
    return module


def put_program(folder: Path, name: str, prints: str) -> None:
    program = folder / "bin" / name
    program.write_text(f"#!/bin/sh\nprintf '%s' '{prints}'\n")
    program.chmod(0o755)


def put_torch(folder: Path, version: str) -> Path:
    torch = folder / "site" / "torch"
    (torch / "include" / "torch" / "csrc" / "stable").mkdir(parents=True)
    (torch / "lib").mkdir()
    (torch / "lib" / "libtorch.so").touch()
    (torch / "version.py").write_text(f"__version__ = '{version}'\n")
    return torch


@pytest.mark.parametrize(
    "gpus, archs",
    [
        ("9.0\n", ("90a-real",)),
        ("9.0\n9.0\n", ("90a-real",)),
        ("12.0\n10.3\n9.0\n", ("90a-real", "100f-real", "120f-real")),
        ("8.0\n9.0\n", ("90a-real",)),
        ("8.0\n", ()),
        ("No devices were found\n", ()),
        ("", ()),
    ],
)
def test_native_is_what_is_here(backend: ModuleType, tmp_path: Path, gpus: str, archs: tuple[str]) -> None:
    put_program(tmp_path, "nvcc", "")
    put_program(tmp_path, "nvidia-smi", gpus)
    assert backend.architectures(None) == archs
    assert backend.gvr_topk_archs.choose().line.startswith("WARNING: ") == (not archs)


def test_the_driver_is_asked_where_nvidia_smi_is_missing(tmp_path: Path) -> None:
    source = tmp_path / "driver.c"
    source.write_text(
        "int cuInit(unsigned flags) { return flags; }\n"
        "int cuDeviceGetCount(int* count) { *count = 2; return 0; }\n"
        "int cuDeviceGetAttribute(int* value, int which, int device) {\n"
        "  *value = which == 75 ? 9 + device : which == 76 ? 0 : -1; return 0; }\n"
    )
    library = tmp_path / "libcuda.so.1"
    subprocess.run(["g++", "-x", "c", "-shared", "-fPIC", "-o", library, source], check=True)
    code = "import gvr_topk_archs; print(gvr_topk_archs.compute_capabilities())"
    environ = {"PATH": "", "LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": str(SCRIPT.parent)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    assert done.stdout == "[(9, 0), (10, 0)]\n"


@pytest.mark.parametrize(
    "wanted, archs",
    [
        ("none", ()),
        ("all", ("90a-real", "100f-real", "120f-real")),
        ("90a", ("90a-real",)),
        ("120f, 90a-real", ("90a-real", "120f-real")),
        ("90a-real;100f-real", ("90a-real", "100f-real")),
    ],
)
@pytest.mark.parametrize("how", ["setting", "variable"])
def test_choice_of_architectures(
    backend: ModuleType, tmp_path: Path, wanted: str, archs: tuple[str], how: str, monkeypatch: Any
) -> None:
    put_program(tmp_path, "nvcc", "")
    put_program(tmp_path, "nvidia-smi", "9.0\n")
    settings = {"cmake.define.GVR_TOPK_ARCHS": wanted} if how == "setting" else None
    if how == "variable":
        monkeypatch.setenv("GVR_TOPK_ARCHS", wanted)
    assert backend.architectures(settings) == archs


def test_architectures_without_kernels_are_refused(backend: ModuleType) -> None:
    message = "^GVR_TOPK_ARCHS: wanted native, all, none or a list of 90a-real, .*, got '80;90a'$"
    with pytest.raises(ValueError, match=message):
        backend.gvr_topk_archs.choose("80;90a")
    done = subprocess.run([sys.executable, SCRIPT, "80;90a"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("gvr_topk: GVR_TOPK_ARCHS: wanted native")


def test_no_kernels_no_torch(backend: ModuleType) -> None:
    assert backend.get_requires_for_build_wheel() == ["cmake"]
    assert backend._settings(None) == {"build-dir": "build/cpu", "wheel.build-tag": "0cpu"}


def test_kernels_without_torch_fetch_one(backend: ModuleType, tmp_path: Path) -> None:
    put_program(tmp_path, "nvcc", "")
    settings = {"cmake.define.GVR_TOPK_ARCHS": "90a"}
    assert backend.get_requires_for_build_wheel() == ["cmake"]
    assert backend.get_requires_for_build_wheel(settings) == ["cmake", backend.TORCH]
    assert backend.get_requires_for_build_editable(settings) == ["cmake", backend.TORCH]


def test_installed_torch_is_taken_if_it_has_the_stable_interface(backend: ModuleType, tmp_path: Path) -> None:
    put_program(tmp_path, "nvcc", "")
    torch = put_torch(tmp_path, "2.8.0")
    requirements = backend.get_requires_for_build_wheel({"cmake.define.GVR_TOPK_ARCHS": "all"})
    assert requirements == ["cmake", backend.TORCH]
    shutil.rmtree(torch)
    put_torch(tmp_path, "2.11.0+cu130")
    settings = {"cmake.define.GVR_TOPK_ARCHS": "100f;90a"}
    assert backend.get_requires_for_build_wheel(settings) == ["cmake"]
    assert backend._settings(settings) == {
        "build-dir": "build/90a-100f",
        "cmake.define.GVR_TOPK_TORCH_ROOT": str(torch),
        "cmake.define.GVR_TOPK_ARCHS": "100f;90a",
        "wheel.build-tag": "1cuda",
    }


def cmake(*arguments: str | Path, **variables: str) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "GVR_TOPK_ARCHS"} | variables
    done = subprocess.run(["cmake", *arguments], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def configure(folder: Path, *options: str, **variables: str) -> str:
    """Configure the libraries in this folder; returns what is built there."""
    python = f"-DPython_EXECUTABLE={sys.executable}"
    cmake("-S", ROOT / "cpp", "-B", folder, "-G", "Ninja", python, *options, **variables)
    return (folder / "build.ninja").read_text()


def test_a_folder_that_was_configured_with_nvcc_compiles_nothing_if_asked(tmp_path: Path) -> None:
    if shutil.which("nvcc"):
        torch = f"-DGVR_TOPK_TORCH_ROOT={tmp_path}"
        assert "small_row/launch.cu" in configure(tmp_path, "-DGVR_TOPK_ARCHS=90a", torch)
    else:  # a compiler in the cache, as it is after that
        configure(tmp_path, "-DCMAKE_CUDA_COMPILER=/usr/bin/true", "-DGVR_TOPK_ARCHS=none")
    for archs, variables in (("none", {}), ("", {"GVR_TOPK_ARCHS": "none"}), ("90a", {"CUDACXX": "none"})):
        built = configure(tmp_path, f"-DGVR_TOPK_ARCHS={archs}", **variables)
        assert "libgvr_topk_policy.so" in built
        assert "launch.cu" not in built, (archs, variables)


def test_an_installation_without_kernels_keeps_none_of_an_earlier_one(tmp_path: Path) -> None:
    configure(tmp_path / "build", "-DGVR_TOPK_ARCHS=none")
    cmake("--build", tmp_path / "build")
    package = tmp_path / "gvr_topk"
    (package / "lib").mkdir(parents=True)
    (package / "lib" / "libgvr_topk_cuda.so").touch()
    cmake("--install", tmp_path / "build", "--prefix", tmp_path)
    assert [file.name for file in (package / "lib").iterdir()] == ["libgvr_topk_policy.so"]
    written: dict[str, str] = {}
    exec((package / "_build.py").read_text(), written)
    assert written["ARCHS"] == ""
    assert re.fullmatch(r"([0-9a-f]{12}(-dirty)?)?", written["COMMIT"])
