"""Only the integration's own line shows that the feature ran, and a build changes with all of its parts."""

import sys
from pathlib import Path

import pytest
from eval_fakes import HOOK_LINE, VLLM_HOOK_LINE, VLLM_LOGO, write_program

from eval.campaigns.evidence import build_identity, read_evidence

WAITING = "gvr_topk in TensorRT-LLM 1.2.1: waiting: no row is longer than index_topk = 2048 so far, and more"
REFUSED = "gvr_topk in TensorRT-LLM 1.3.0rc1: refused: found TensorRT-LLM 1.3.0rc1; Indexer.forward: gone"


@pytest.mark.parametrize(
    ("lines", "active", "refused"),
    [
        ([HOOK_LINE], True, False),
        (["[TRT-LLM] [I] " + HOOK_LINE], True, False),
        ([REFUSED], False, True),
        ([HOOK_LINE, REFUSED], True, True),
        ([HOOK_LINE, "gvr_topk in TensorRT-LLM 1.2.1: fell back: ValueError: logits: no"], True, True),
        ([HOOK_LINE, "gvr_topk in TensorRT-LLM 1.2.1: not in use: TensorRT-LLM runs its own"], True, True),
        (["gvr_topk in TensorRT-LLM 1.2.1: ignored: sparse_attention_config.x: refused"], False, True),
        (["gvr_topk in TensorRT-LLM of unknown version: on: 61 layers"], True, False),
        ([HOOK_LINE, "gvr_topk in TensorRT-LLM 1.2.1: no metrics file: OSError: refused: x"], True, False),
        ([WAITING], False, False),
        ([WAITING, HOOK_LINE], True, False),
        ([], False, False),
        (["loading /opt/gvr_topk/on: x"], False, False),
        (["gvr_topk in vLLM 0.33.0: on: tokens of the V2 model runner: top-k"], False, False),
        (["gvr_topk: on"], False, False),
        (["xgvr_topk in TensorRT-LLM 1.2.1: on: 61 layers"], False, False),
        (["gvr_topk in TensorRT-LLM 1.2.1: patched, will say on: later"], False, False),
        (["gvr_topk: not active: ImportError: no such file"], False, False),
    ],
)
def test_lines_that_count(lines: list[str], active: bool, refused: bool) -> None:
    got = read_evidence(lines)
    assert (got.active, got.refused) == (active, refused)
    assert (got.problem("on") is None, got.problem("off") is None) == (active and not refused, not active)


def test_a_sampler_that_leaves_calls_to_vllm() -> None:
    said = ("on: tokens ", "sampler: x of vLLM draws calls with penalties", "drafts: x of vLLM serves calls ")
    lines = [f"gvr_topk in vLLM 0.33.0: {text}" for text in said]
    assert [read_evidence(lines[:count], "sampler").refused for count in (1, 2, 3)] == [False, False, True]
    assert read_evidence(lines, "sampler").active and not read_evidence(lines).refused


@pytest.mark.parametrize(
    ("lines", "variant", "message"),
    [
        ([WAITING], "on", "Take prompts longer than index_topk (of the accuracy tasks, longbench_v1)"),
        ([WAITING, REFUSED], "on", "did not work, or not alone"),
        ([], "on", "says that the top-k was on, so the run shows nothing"),
        ([HOOK_LINE, REFUSED], "on", f"did not work, or not alone: {REFUSED}"),
        ([HOOK_LINE], "off", "is TRTLLM_GVR_TOPK or GVR_TOPK_VLLM set"),
    ],
)
def test_problem(lines: list[str], variant: str, message: str) -> None:
    assert message in str(read_evidence(lines).problem(variant))


def test_version_and_first_lines_are_kept() -> None:
    others = [f"gvr_topk in TensorRT-LLM 1.2.1: note {index}" for index in range(9)]
    got = read_evidence(["TensorRT-LLM version: 1.2.1", *others, others[0], HOOK_LINE, REFUSED])
    assert got.version == "1.2.1"
    assert got.lines == (REFUSED, *others[:4])
    assert read_evidence([]).version is None


def test_version_of_vllm_is_known_on_either_side() -> None:
    assert read_evidence([VLLM_LOGO]).version == "0.33.0"
    assert read_evidence(["INFO vLLM server version 0.33.0, serving model m"]).version == "0.33.0"
    got = read_evidence([VLLM_HOOK_LINE])
    assert (got.version, got.active, got.problem("on")) == ("0.33.0", True, None)
    got = read_evidence(["gvr_topk in vLLM of unknown version: on: decode"])
    assert (got.version, got.active) == (None, True)


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


def test_it_is_that_of_the_tools_python(site: Path) -> None:
    got = build_identity("trtllm-eval")
    assert (got["tensorrt_llm"], got["gvr_topk"], got["GPU"]) == ("1.2.1", "0.1.0", "none")
    assert len(got["gvr_topk files"]) == len(got["tensorrt_llm files"]) == 64
    assert build_identity("trtllm-eval") == got


@pytest.mark.parametrize("installed", ["gvr_topk-0.1.0", "tensorrt_llm-1.2.1"])
def test_another_wheel_of_the_same_version_shows(site: Path, installed: str) -> None:
    before = build_identity("trtllm-eval")
    (site / f"{installed}.dist-info" / "RECORD").write_text("lib.so,sha256=new,1\n")
    assert build_identity("trtllm-eval") != before


def test_the_gpu_and_the_environment_count(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = ("NVIDIA H200, GPU-1, 570.1", "NVIDIA H200, GPU-2, 570.1")
    write_program(site.parent / "bin", "nvidia-smi", f"print(*{gpus}, sep=chr(10))")
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
