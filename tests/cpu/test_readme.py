"""Every command of the README is run here, or named here with what it needs."""

from __future__ import annotations

import json
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


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


COMMANDS = [line for block in blocks("sh") for line in block.splitlines() if line]

# Run as written: what must be in the output.
RUN = {
    "gvr-topk doctor": "path radix_rounds",
    "gvr-topk replay --generator 20 --length 70690 --steps 8 --offset 1": "replay: exact on 8 of 8 steps",
    "python -m eval accuracy --model MODEL --dry-run": "trtllm-eval --model MODEL",
    "python -m eval tpot --model MODEL --prompts short=tests/data/eval_samples/prompts.jsonl"
    " --entry 0 --dry-run": "trtllm-bench --model MODEL",
}
# `make` would install while the tests run, so its recipe is looked at and the end of it is run.
RECIPES = {
    "make replay": "gvr-topk replay --shipped --config configs/heuristic_on.yaml --out ",
    "make test": "python -m pytest -n 2 --dist loadfile tests/cpu",
    "make test-gpu": "python -m pytest tests/gpu",
}
ELSEWHERE = {
    "pip install .": "test_packaging.py, which builds the wheel",
    "gvr-topk replay --shipped --config configs/heuristic_on.yaml --out out/replay": "test_replay_recipe",
}
NEEDS_MORE = {
    "python -m eval bench --out out/bench.json --quick": "a GPU, and minutes of it",
    "python -m eval stress --launches 1000000 --out out/stress.json": "a GPU, and minutes of it",
}


def run(command: str | list[str], *, check: bool = True) -> str:
    """Run a command from the checkout, with the programs of this environment first on PATH."""
    words = shlex.split(command) if isinstance(command, str) else command
    words = [sys.executable if word == "python" else word for word in words]
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
    # No MAKEFLAGS: under `make test` a `make` in here would take its options for its own.
    environ = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL")}
    done = subprocess.run(
        words, env={**environ, "PATH": path}, cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0 or not check, done.stdout + done.stderr
    return done.stdout


def test_every_command_is_accounted_for() -> None:
    assert len(COMMANDS) > 10
    assert sorted(COMMANDS) == sorted([*RUN, *RECIPES, *ELSEWHERE, *NEEDS_MORE])


@pytest.mark.parametrize("command", RUN)
def test_command(command: str) -> None:
    assert RUN[command] in run(command)


@pytest.mark.parametrize("command", RECIPES)
def test_make_recipe(command: str) -> None:
    assert RECIPES[command] in run([*shlex.split(command), "--dry-run"])


def test_replay_recipe(tmp_path: Path) -> None:
    *_, last = run(["make", "--dry-run", "replay", f"OUT={tmp_path}"]).splitlines()
    out = run([Path(last.split()[0]).name, *shlex.split(last)[1:]])
    assert out.splitlines()[-1] == "replay: exact on 256 of 256 steps"
    assert f"`{out.splitlines()[-1]}`" in README
    assert len(list(tmp_path.glob("*.png"))) >= 3


@pytest.mark.skipif(not CUDA, reason="built without a CUDA compiler")
def test_inspect_build() -> None:
    assert "sm_90a" in run("python -m eval inspect")


def test_ci_runs_what_the_makefile_runs() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert re.findall(r"^make (.+)$", script, re.MULTILINE) == [
        "lint",
        "docs",
        "mutation-changed",
        "test",
    ]
    for name in ("run", "matrix"):
        run(["bash", "-n", f".ci/{name}"])


def test_pre_commit_knows_its_configuration() -> None:
    run("pre-commit validate-config .pre-commit-config.yaml")
    hooks = re.findall(r"^ +entry: (.+)$", (ROOT / ".pre-commit-config.yaml").read_text(), re.MULTILINE)
    recipe = run("make --dry-run lint")
    for hook in hooks:
        assert all(word in recipe for word in hook.split() if word != "--force-exclude"), hook


@pytest.mark.parametrize("code", blocks("python"))
def test_python_example(code: str) -> None:
    exec(compile(code, "README.md", "exec"), {})


def test_yaml_example_is_the_shipped_one(tmp_path: Path) -> None:
    (example,) = blocks("yaml")
    (tmp_path / "example.yaml").write_text(example)
    assert "heuristic top-k: on" in run(["gvr-topk", "config", "check", str(tmp_path / "example.yaml")])


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
    assert len(variables) == 9
    interface = (ROOT / "docs" / "interface.md").read_text()
    assert {name for name in variables if f"`{name}" not in interface} == set()
    assert "](docs/interface.md) describes" in README  # which leaves the table there


def test_functions_are_all_told() -> None:
    for page in (README, (ROOT / "docs" / "interface.md").read_text()):
        assert {name for name in gvr_topk.__all__ if f"`{name}(" not in page} == set()


def test_length_and_lines_that_need_a_checkout() -> None:
    assert len(README.splitlines()) <= 250
    outside = re.sub(r"<!-- results:begin -->.*<!-- results:end -->", "", README, flags=re.DOTALL)
    for part in re.split(r"^## ", outside, flags=re.MULTILINE):
        if re.search(r"`make |`configs/|`examples/|^make |python -m eval", part, re.MULTILINE):
            assert re.search(r"[Ff]rom a checkout:|in the checkout", part), part.splitlines()[0]


def test_what_serving_with_vllm_shows_is_the_verdict_of_its_file() -> None:
    served = json.loads((ROOT / "eval" / "results" / "h200" / "vllm_serve.json").read_text())
    undecided = {row["verdict"] for row in served["rows"]} == {"open"}
    assert (
        "whether `vllm serve` is faster with this package is undecided" in " ".join(README.split())
    ) == undecided


def test_one_block_of_results_and_the_honest_sentence() -> None:
    assert README.count("<!-- results:begin -->") == README.count("<!-- results:end -->") == 1
    assert "checked against fakes and the real compiled op, not run inside TensorRT-LLM" in README


def test_figures_stand_in_the_generated_block_alone() -> None:
    before, rest = README.split("<!-- results:begin -->")
    outside = before + rest.split("<!-- results:end -->")[1]
    assert re.findall(r"[\d.]+ us\b|\d[\d.]* times", outside) == []


def test_lessons_name_no_figures_of_their_own() -> None:
    """A figure in prose has no file that it is compared with, and is wrong after the next change."""
    page = (ROOT / "docs" / "performance.md").read_text()
    outside = re.sub(r"<!-- results:begin -->.*<!-- results:end -->", "", page, flags=re.DOTALL)
    assert re.findall(r"[\d.]+ us\b|\d[\d.]* times|\d+ to \d+ %|->", outside) == []
    assert "SmolLM2" in outside and "L01, L20 and the rows of a vLLM engine" in outside


def test_every_page_is_in_the_site() -> None:
    site = (ROOT / "mkdocs.yml").read_text()
    assert {page.name for page in (ROOT / "docs").glob("*.md")} == set(
        re.findall(r": (\w+\.md)$", site, re.M)
    )


def test_results_are_those_of_the_result_files() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "eval", "readme", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
