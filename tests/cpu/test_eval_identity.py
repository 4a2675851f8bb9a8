"""The identity of a build changes with everything that a figure depends on besides command and files."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from eval.campaigns.identity import build_identity


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An engine's environment: a tool on PATH, and packages that its Python finds."""
    folder = tmp_path / "site"
    for name, version in (("tensorrt_llm", "1.2.1"), ("gvr_topk", "0.1.0")):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text("raise SystemExit('a probe must not import this')\n")
        info = folder / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "RECORD").write_text(f"{name}/__init__.py,sha256=abc,1\n")
    (tmp_path / "bin").mkdir()
    tool = tmp_path / "bin" / "trtllm-eval"
    # Not the environment of the tests: a package that is installed there to be edited is found first.
    tool.write_text(f"#!{Path(sys.executable).resolve()}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    for name in ("GVR_TOPK_DISABLE", "GVR_TOPK_LIBRARY_DIR", "TRTLLM_GVR_TOPK", "TRTLLM_ENABLE_PDL"):
        monkeypatch.delenv(name, raising=False)
    return folder


def _gpu(folder: Path, text: str) -> None:
    tool = folder.parent / "bin" / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\nprintf '{text}'\n")
    tool.chmod(0o755)


def test_it_is_that_of_the_tools_python(site: Path) -> None:
    got = build_identity("trtllm-eval")
    assert (got["tensorrt_llm"], got["gvr_topk"], got["GPU"]) == ("1.2.1", "0.1.0", "none")
    assert len(got["gvr_topk files"]) == len(got["tensorrt_llm files"]) == 64
    assert build_identity("trtllm-eval") == got


def _new_library(site: Path) -> None:
    (site / "gvr_topk" / "lib.so").write_bytes(b"\x7fELF")


def _new_content(site: Path) -> None:
    path = site / "gvr_topk" / "__init__.py"
    path.write_text(path.read_text().replace("must not", "may not"))


def _new_engine(site: Path) -> None:
    (site / "tensorrt_llm-1.2.1.dist-info" / "RECORD").write_text("tensorrt_llm/__init__.py,sha256=new,1\n")


def _new_version(site: Path) -> None:
    shutil.move(site / "tensorrt_llm-1.2.1.dist-info", site / "tensorrt_llm-1.2.2.dist-info")
    metadata = site / "tensorrt_llm-1.2.2.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace("1.2.1", "1.2.2"))


@pytest.mark.parametrize("change", [_new_library, _new_content, _new_engine, _new_version])
def test_every_change_of_a_package_shows(site: Path, change: object) -> None:
    before = build_identity("trtllm-eval")
    assert callable(change)
    change(site)
    assert build_identity("trtllm-eval") != before


def test_compiled_caches_do_not_count(site: Path) -> None:
    before = build_identity("trtllm-eval")
    (site / "gvr_topk" / "__pycache__").mkdir()
    (site / "gvr_topk" / "__pycache__" / "x.pyc").write_bytes(b"1")
    assert build_identity("trtllm-eval") == before


def test_the_gpu_and_the_environment_count(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _gpu(site, "NVIDIA H200, GPU-1, 570.1\\nNVIDIA H200, GPU-2, 570.1\\n")
    assert build_identity("trtllm-eval")["GPU"] == "NVIDIA H200, GPU-1, 570.1; NVIDIA H200, GPU-2, 570.1"
    before = build_identity("trtllm-eval")
    monkeypatch.setenv("TRTLLM_GVR_TOPK_OPTIONS", "{}")
    assert build_identity("trtllm-eval") == {**before, "TRTLLM_GVR_TOPK_OPTIONS": "{}"}
    monkeypatch.setenv("UNRELATED", "1")
    monkeypatch.setenv("TRTLLM_ENABLE_PDL", "1")
    assert set(build_identity("trtllm-eval")) - set(before) == {
        "TRTLLM_GVR_TOPK_OPTIONS",
        "TRTLLM_ENABLE_PDL",
    }


def test_what_cannot_be_found_out_is_said(site: Path) -> None:
    tool = site.parent / "bin" / "trtllm-eval"
    tool.write_bytes(b"\x7fELF")
    assert set(list(build_identity("trtllm-eval").values())[:4]) == {"unknown"}
    tool.write_text("#!/usr/bin/env -S python3-not-there -u\n")
    assert build_identity("trtllm-eval")["gvr_topk"] == "unknown"
    assert build_identity("no-such-tool")["tensorrt_llm"] == "unknown"
    tool.write_text(f"#!/usr/bin/env {sys.executable}\n")
    assert build_identity("trtllm-eval")["tensorrt_llm"] == "1.2.1"
    shutil.rmtree(site / "tensorrt_llm-1.2.1.dist-info")
    shutil.rmtree(site / "gvr_topk")
    got = build_identity("trtllm-eval")
    assert (got["tensorrt_llm"], got["tensorrt_llm files"]) == ("absent", "absent")


def test_a_python_is_asked_itself_and_the_engine_is_named(site: Path) -> None:
    tool = site.parent / "bin" / "python3"
    tool.symlink_to(Path(sys.executable).resolve())
    got = build_identity("python3", "vllm")
    assert (got["vllm"], got["vllm files"], got["gvr_topk"]) == ("absent", "absent", "0.1.0")
    info = site / "vllm-0.33.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.33.0\n")
    assert build_identity("python3", "vllm")["vllm"] == "0.33.0"
    assert build_identity("no-such-tool", "vllm")["vllm"] == "unknown"
