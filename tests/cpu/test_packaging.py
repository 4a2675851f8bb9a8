"""The wheel, built and installed as a user gets it, away from the checkout."""

from __future__ import annotations

import configparser
import email
import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
import torch
import yaml

import gvr_topk

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "gvr_topk"
HOOK = {"gvr_topk_autoload.py", "gvr_topk_autoload.pth"}
LICENSES = ["LICENSE", "NOTICE"]

# Whichever test comes first builds the wheel, and compiles everything if `make` has not been here before.
pytestmark = pytest.mark.timeout(900)
CUDA = (PACKAGE / "lib" / "libgvr_topk_cuda.so").is_file()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For the GPUs that the checkout is built for, in the folder of that build: nothing is compiled again."""
    archs: dict[str, str] = {}
    if (PACKAGE / "_build.py").is_file():
        exec((PACKAGE / "_build.py").read_text(), archs)
    folder, built = tmp_path_factory.mktemp("wheel"), archs.get("ARCHS") or ("" if CUDA else "none")
    environ = {**os.environ, **({"GVR_TOPK_ARCHS": built} if built else {})}
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps"]
    subprocess.run([*pip, "--wheel-dir", str(folder), str(ROOT)], check=True, env=environ)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(wheel, tmp_path_factory.mktemp("environment"))


def install(wheel: Path, folder: Path) -> Path:
    """Make an environment with the wheel in it, and the tests' torch and other requirements in reach."""
    venv.create(folder)
    python = folder / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    # As a path, so that the .pth files in there, this checkout's among them, are not followed.
    (site / "requirements.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", wheel)
    return folder


def run(*command: str | Path, **variables: str) -> str:
    """Run a command from a folder that is not the checkout, and with nothing that points at it."""
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONPATH" and not k.startswith("GVR_")}
    done = subprocess.run(
        [str(part) for part in command],
        env={**environ, **variables},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_one_wheel_for_every_python(wheel: Path) -> None:
    tag = "1cuda" if CUDA else "0cpu"
    assert wheel.name == f"gvr_topk-{gvr_topk.__version__}-{tag}-py3-none-linux_x86_64.whl"


def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    sources = {
        str(file.relative_to(ROOT))
        for file in PACKAGE.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts and file.suffix != ".so"
    }
    libraries = {str(file.relative_to(ROOT)) for file in (PACKAGE / "lib").glob("*.so")}
    libraries -= {"gvr_topk/lib/libgvr_topk_neighbours.so"}  # of use to stress tests alone
    files = zipfile.ZipFile(wheel).infolist()
    held = {each.filename for each in files if ".dist-info/" not in each.filename}
    large = {each.filename for each in files if each.file_size > 100_000}
    assert {Path(name).suffix for name in large} <= {".so"}  # no data
    assert "gvr_topk/lib/libgvr_topk_policy.so" in libraries
    assert {"gvr_topk/py.typed"} <= sources
    assert held == sources | libraries | HOOK | {"gvr_topk/_build.py"}


def test_wheel_knows_what_it_was_built_from(wheel: Path) -> None:
    told: dict[str, str] = {}
    exec(zipfile.ZipFile(wheel).read("gvr_topk/_build.py"), told)
    assert bool(told["ARCHS"]) == CUDA
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    commit = told["COMMIT"].removesuffix("-dirty")
    assert head.stdout.startswith(commit) and len(commit) == (12 if head.stdout else 0)


def test_reading_requirements_compiles_nothing(tmp_path: Path) -> None:
    """Tools read them of every project that depends on this one. The compiler of this test only fails."""
    (tmp_path / "nvcc").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "nvcc").chmod(0o755)
    environ = {**os.environ, "CUDACXX": str(tmp_path / "nvcc"), "GVR_TOPK_ARCHS": "all"}
    pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-deps", "--no-build-isolation"]
    done = subprocess.run([*pip, str(ROOT)], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"Would install gvr-topk-{gvr_topk.__version__}" in done.stdout


def test_metadata(wheel: Path) -> None:
    files = zipfile.ZipFile(wheel)
    (name,) = (name for name in files.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = email.message_from_bytes(files.read(name))
    required = [line for line in metadata.get_all("Requires-Dist") or [] if "extra ==" not in line]
    # What serving imports, and no more. An exact requirement would take the user's own torch away.
    assert sorted(required) == ["numpy", "prometheus-client", "pydantic>=2.7", "pyyaml", "torch>=2.9"]
    extras = {"replay", "eval", "docs", "test", "vllm", "hf"}
    assert extras == set(metadata.get_all("Provides-Extra") or [])
    assert (metadata.get_payload() or "").startswith("# gvr_topk")
    assert {"top-k", "sparse attention"} <= set((metadata["Keywords"] or "").split(","))
    classifiers = metadata.get_all("Classifier") or []
    assert "Operating System :: POSIX :: Linux" in classifiers and "Typing :: Typed" in classifiers
    assert not any(line.startswith("License ::") for line in classifiers)  # beside a License-Expression


def test_engines_find_their_entry_points(wheel: Path) -> None:
    files = zipfile.ZipFile(wheel)
    (name,) = (name for name in files.namelist() if name.endswith(".dist-info/entry_points.txt"))
    points = configparser.ConfigParser()
    points.read_string(files.read(name).decode())
    for group, module in (("vllm.general_plugins", "vllm"), ("sglang.srt.plugins", "sglang")):
        assert points[group]["gvr_topk"] == f"gvr_topk.integrations.{module}:register"


def test_wheel_carries_its_license(wheel: Path) -> None:
    files = zipfile.ZipFile(wheel)
    folder = f"gvr_topk-{gvr_topk.__version__}.dist-info/"
    held = {name for name in files.namelist() if name.startswith(f"{folder}licenses/")}
    assert held == {f"{folder}licenses/{name}" for name in LICENSES}
    for name in LICENSES:
        assert files.read(f"{folder}licenses/{name}") == (ROOT / name).read_bytes()
    metadata = email.message_from_bytes(files.read(f"{folder}METADATA"))
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_all("License-File") == LICENSES


def test_notice_names_the_data_that_is_shipped() -> None:
    notice = (ROOT / "NOTICE").read_text()
    shipped = [str(file.relative_to(ROOT)) for file in (ROOT / "eval" / "data").glob("*.npz")]
    assert shipped
    assert all(path in notice for path in shipped)


def test_changelog_and_citation_know_the_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    releases = re.findall(r"^## \[(.+?)\]", changelog, re.MULTILINE)
    assert releases[0] == "Unreleased"
    assert gvr_topk.__version__ == releases[1] or gvr_topk.__version__.endswith(".dev0")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == gvr_topk.__version__
    assert citation["license"] == "Apache-2.0"


def test_installed_package_computes_and_finds_its_libraries(environment: Path) -> None:
    seen = json.loads(run(environment / "bin" / "python", ROOT / "tests" / "installed_wheel.py"))
    here = gvr_topk.library_status()
    assert seen["loaded"] == seen["cuda_registered"] == here.loaded
    assert seen["library"] == here.reason


def test_installed_package_is_not_the_checkout(environment: Path) -> None:
    code = (
        "import gvr_topk, gvr_topk.policy as g; print(gvr_topk.__file__, g.policy_library()._name, sep='\\n')"
    )
    for path in run(environment / "bin" / "python", "-c", code).split():
        assert Path(path).is_relative_to(environment)


def test_installed_command_replays_a_trace(environment: Path) -> None:
    config = ROOT / "configs" / "heuristic_on.yaml"
    trace = ROOT / "eval" / "data" / "smollm2_dsaidx_L10_32k.npz"
    command = [environment / "bin" / "gvr-topk", "replay", "--config", config, "--steps", "3"]
    out = run(*command, "--trace", trace)
    assert out.splitlines()[-1] == "replay: exact on 3 of 3 steps"
    assert "gate: used 2, first_step 1" in out.splitlines()
    # The wheel holds no trace, and says where one is.
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stdout == ""
    where = "run this in the folder of a checkout, or give --trace FILE or --generator LAYER"
    assert f"and the wheel holds no trace: {where}" in done.stderr


def test_import_costs_torch_and_little_more(environment: Path) -> None:
    """Who serves must not pay for plots, tables or configuration files."""
    code = """
import sys, torch
before = set(sys.modules)
import gvr_topk
print(*(set(sys.modules) - before))
"""
    modules = run(environment / "bin" / "python", "-c", code).split()
    names = {name.partition(".")[0] for name in modules}
    assert "gvr_topk" in names and "gvr_topk.evaluation" not in modules
    assert not names & {"matplotlib", "typer", "rich", "scipy", "pydantic", "yaml", "prometheus_client"}


def test_the_import_hook_is_installed_and_imports_nothing_else(environment: Path) -> None:
    """test_integration_install.py has the values of the switch, and all that the hook imports."""
    code = "import sys; print(sys.meta_path, {'torch', 'numpy', 'gvr_topk'} & set(sys.modules))"
    out = run(environment / "bin" / "python", "-c", code)
    assert "gvr_topk_autoload.Finder" in out and out.endswith(" set()\n")


def test_versions_agree() -> None:
    """The lint tools judge by version, so those of .venv are those that pyproject.toml names."""
    pinned = dict(re.findall(r'"(ruff|mypy|clang-format)==([\d.]+)"', (ROOT / "pyproject.toml").read_text()))
    assert set(pinned) == {"ruff", "mypy", "clang-format"}
    for tool, version in pinned.items():
        assert version in run(Path(sysconfig.get_path("scripts")) / tool, "--version")


def test_uninstall_leaves_nothing(wheel: Path, tmp_path: Path) -> None:
    """In an environment of its own: it takes the package away."""
    environment = install(wheel, tmp_path)
    python = environment / "bin" / "python"
    assert list(environment.rglob("*gvr_topk*"))
    run(sys.executable, "-m", "pip", "--python", python, "uninstall", "--quiet", "--yes", "gvr-topk")
    left = [file.name for file in environment.rglob("*gvr_topk*")]
    assert left == []
    assert "gvr_topk_autoload" not in run(python, "-c", "import sys; print(*sys.modules)")
