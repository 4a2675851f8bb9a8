"""Which parts of the Python code may import which others: serving code depends on nothing that judges it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
INTEGRATIONS = "gvr_topk.integrations"
ENGINES = ("tensorrt_llm", "vllm", "sglang")
"""Folders of `INTEGRATIONS` beside ``_kit``, which knows none of them."""
COMMAND_LINE = "gvr_topk/cli.py"
"""Not serving code: it has subcommands of the evaluation."""


def imported(source: str, package: str) -> set[str]:
    """Dotted names of what a file of `package` imports, anywhere in it: modules, or what is in them."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            names |= {f"{module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            names |= {arg.value for arg in node.args if isinstance(arg, ast.Constant) and arg.value}
    return names


def imports_of(path: str) -> set[str]:
    return imported((ROOT / path).read_text(encoding="utf-8"), path.rpartition("/")[0].replace("/", "."))


def within(names: set[str], *packages: str) -> set[str]:
    """Names that lie in one of the packages."""
    return {name for name in names if any(f"{name}.".startswith(f"{package}.") for package in packages)}


def files_of(folder: str) -> list[str]:
    found = [str(path.relative_to(ROOT)) for path in sorted((ROOT / folder).rglob("*.py"))]
    assert found
    return found


SERVING = [
    path
    for path in ["gvr_topk_autoload.py", *files_of("gvr_topk")]
    if path != COMMAND_LINE and not path.startswith("gvr_topk/evaluation/")
]


def test_serving_code_imports_no_evaluation() -> None:
    assert f"{INTEGRATIONS.replace('.', '/')}/vllm/hook.py" in SERVING and "gvr_topk/ops.py" in SERVING
    wrong = {path: within(imports_of(path), "gvr_topk.evaluation", "eval", "tests") for path in SERVING}
    assert {path: names for path, names in wrong.items() if names} == {}


def test_ops_import_no_integrations() -> None:
    ops = [path for path in SERVING if path.startswith("gvr_topk/") and path.count("/") == 1]
    wrong = {path: within(imports_of(path), INTEGRATIONS) for path in ops}
    assert {path: names for path, names in wrong.items() if names} == {}


@pytest.mark.parametrize("folder", ["_kit", *ENGINES])
def test_engines_share_the_kit_alone(folder: str) -> None:
    allowed = {f"{INTEGRATIONS}._kit", f"{INTEGRATIONS}.{folder}"}
    used = {path: imports_of(path) for path in files_of(f"gvr_topk/integrations/{folder}")}
    wrong = {path: within(names, INTEGRATIONS) - within(names, *allowed) for path, names in used.items()}
    assert {path: names for path, names in wrong.items() if names} == {}


def test_top_k_of_tensorrt_llm_loads_no_sampler() -> None:
    """Nothing that is wrong with the sampler may keep top-k from working, and no worker need load it."""
    code = "import sys, gvr_topk.integrations.tensorrt_llm.hook; sys.exit('gvr_topk.sampling' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_eval_imports_no_tests() -> None:
    fakes = [path.stem for path in (ROOT / "tests" / "fakes").glob("*.py")]
    assert not [path for path in files_of("eval") if within(imports_of(path), "tests", *fakes)]


def test_fakes_import_nothing_of_the_package() -> None:
    """Otherwise the engine's own selection and this package's could have the same fault."""
    wrong = {path: within(imports_of(path), "gvr_topk", "eval") for path in files_of("tests/fakes")}
    assert {path: names for path, names in wrong.items() if names} == {}
