"""Every command of the README is run here, or named here with what it needs."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import gvr_topk
from eval.verbs import VERBS
from gvr_topk import library_status

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
CUDA = library_status().path is not None


def blocks(language: str, page: str = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


COMMANDS = [line for block in blocks("sh") for line in block.splitlines() if line]

# `make` would install while the tests run, so its recipe is looked at and the end of it is run.
RECIPES = {
    "make replay": "gvr-topk replay --shipped --config configs/heuristic_on.yaml --out ",
    "make test": "python -m pytest -n 2 --dist loadfile tests/cpu",
    "git clone REPOSITORY gvr_topk && make -C gvr_topk wheel": "pip wheel --verbose --no-build-isolation",
}
ELSEWHERE = {
    "pip install --verbose .": "test_packaging.py, which builds the wheel",
    "pip install gvr_topk/dist/gvr_topk-*.whl": "test_packaging.py, which installs it",
    "gvr-topk --version": "test_version_says_what_is_installed",
    "gvr-topk doctor --require cuda,vllm": "test_what_doctor_can_require",
    "gvr-topk doctor --require cuda,tensorrt_llm": "test_what_doctor_can_require",
}
NEEDS_MORE = {
    "vllm serve MODEL": "vLLM and a GPU; docs/engine_evidence.md says what was run",
    "trtllm-serve MODEL --config topk.yaml": "TensorRT-LLM and a GPU",
}


def run(command: str | list[str], *, status: int = 0) -> str:
    """Run a command from the checkout, with the programs of this environment first on PATH."""
    words = shlex.split(command) if isinstance(command, str) else command
    words = [sys.executable if word == "python" else word for word in words]
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
    # No MAKEFLAGS: under `make test` a `make` in here would take its options for its own.
    environ = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL")}
    done = subprocess.run(
        words, env={**environ, "PATH": path}, cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


def test_every_command_is_accounted_for() -> None:
    others = [command for command in COMMANDS if not command.startswith("printf ")]
    assert len(others) == len(COMMANDS) - 1
    assert set(others) == {*RECIPES, *ELSEWHERE, *NEEDS_MORE}


@pytest.mark.parametrize("command", RECIPES)
def test_make_recipe(command: str) -> None:
    recipe = command.rpartition("&& ")[2].replace("-C gvr_topk ", "")
    assert RECIPES[command] in run([*shlex.split(recipe), "--dry-run"])


def test_version_says_what_is_installed() -> None:
    assert run("gvr-topk --version").startswith(f"gvr-topk {gvr_topk.__version__}")


@pytest.mark.parametrize("engine", ["vllm", "tensorrt_llm"])
def test_what_doctor_can_require(engine: str) -> None:
    """What is required is missing here: the last line says so, and the exit code is 1."""
    assert run(["gvr-topk", "doctor", "--require", f"cuda,{engine}"], status=1).splitlines()[-1]


def test_the_yaml_that_is_written_switches_it_on(tmp_path: Path) -> None:
    (command,) = [command for command in COMMANDS if command.startswith("printf ")]
    subprocess.run(["bash", "-c", command], cwd=tmp_path, check=True)
    assert "heuristic top-k: on" in run(["gvr-topk", "config", "check", str(tmp_path / "topk.yaml")])


def test_replay_recipe(tmp_path: Path) -> None:
    *_, last = run(["make", "--dry-run", "replay", f"OUT={tmp_path}"]).splitlines()
    out = run([Path(last.split()[0]).name, *shlex.split(last)[1:]])
    assert out.splitlines()[-1] == "replay: exact on 256 of 256 steps"
    assert f"`{out.splitlines()[-1]}`" in README
    assert len(list(tmp_path.glob("*.png"))) == 1


@pytest.mark.skipif(not CUDA, reason="built without a CUDA compiler")
def test_inspect() -> None:
    assert "sm_90a" in run("python -m eval inspect")


def test_ci_runs_what_the_makefile_runs() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert re.findall(r"^make (.+)$", script, re.MULTILINE) == ["lint", "docs", "test"]
    for name in ("run", "matrix", "nvcc", "torch", "wheel"):
        run(["bash", "-n", f".ci/{name}"])


START = (ROOT / "docs" / "index.md").read_text()


@pytest.mark.parametrize("code", [*blocks("python"), *blocks("python", START)], ids=["README", "index"])
def test_python_example(code: str) -> None:
    exec(compile(code, "README.md", "exec"), {})


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_exist(page: Path) -> None:
    named = set(
        re.findall(r"`((?:configs|eval|tests|cpp|gvr_topk|examples|packaging)/[\w./]*)`", page.read_text())
    )
    assert {path for path in named if not (ROOT / path).exists()} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
    local = [target for target in targets if not target.startswith("http")]
    assert [target for target in local if not (page.parent / target).exists()] == []


def test_kernel_files_exist() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    named = set(re.findall(r"`([a-z_]+/[a-z_]+\.cuh)`", page))
    assert len(named) > 8
    assert {name for name in named if not (ROOT / "cpp" / "kernels" / name).exists()} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_verbs_exist(page: Path) -> None:
    assert set(re.findall(r"python -m eval ([a-z-]+)", page.read_text())) <= set(VERBS)


def test_sources_name_results_that_exist() -> None:
    """A constant stands beside the measurement that it comes from."""
    sources = [*(ROOT / "cpp").rglob("*.*"), *(ROOT / "gvr_topk").rglob("*.py")]
    named = {path for file in sources for path in re.findall(r"eval/results/[\w/.]+\w", file.read_text())}
    assert named
    assert {path for path in named if not (ROOT / path).exists()} == set()


def test_environment_variables_are_all_told() -> None:
    files = [ROOT / "gvr_topk_autoload.py", *(ROOT / "gvr_topk").rglob("*.py")]
    sources = " ".join(file.read_text() for file in files)
    variables = set(re.findall(r'"((?:TRTLLM_GVR|GVR)_TOPK_?[A-Z_]*|TRTLLM_ENABLE_PDL)"', sources))
    assert len(variables) == 16
    interface = (ROOT / "docs" / "interface.md").read_text()
    assert {name for name in variables if f"`{name}" not in interface} == set()
    assert "](docs/interface.md) lists" in README  # which leaves the table there
    assert "`GVR_TOPK_ARCHS`" in interface and "`GVR_TOPK_ARCHS`" in README


def test_functions_are_all_told() -> None:
    for page in (README, (ROOT / "docs" / "interface.md").read_text()):
        assert {name for name in gvr_topk.__all__ if f"`{name}(" not in page} == set()


def test_figures_stand_in_the_generated_blocks_alone() -> None:
    outside = re.sub(r"<!-- (\w+):begin -->.*?<!-- \1:end -->", "", README, flags=re.DOTALL)
    assert re.findall(r"[\d.]+ us\b|\d[\d.]* times", outside) == []


def test_lessons_name_no_figures_of_their_own() -> None:
    """A figure in prose has no file that it is compared with, and is wrong after the next change."""
    page = (ROOT / "docs" / "performance.md").read_text()
    outside = re.sub(r"<!-- results:begin -->.*<!-- results:end -->", "", page, flags=re.DOTALL)
    assert re.findall(r"[\d.]+ us\b|\d[\d.]* times|\d+ to \d+ %|->", outside) == []
    assert "SmolLM2" in outside and "L01, L20 and the rows of a vLLM engine" in outside


def test_results_are_those_of_the_result_files() -> None:
    run("python -m eval readme --check")


def test_at_most_150_lines_and_the_honest_sentence() -> None:
    assert README.count("\n") <= 150
    assert "and the real compiled op, not run inside TensorRT-LLM" in " ".join(README.split())


def test_every_page_is_in_the_site() -> None:
    site = (ROOT / "mkdocs.yml").read_text()
    assert {page.name for page in (ROOT / "docs").glob("*.md")} == set(
        re.findall(r": (\w+\.md)$", site, re.M)
    )
