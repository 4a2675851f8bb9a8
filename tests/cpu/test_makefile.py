"""The Makefile: every target explains itself, and cleaning leaves results and the installation alone."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z][a-z-]*):", MAKEFILE, re.MULTILINE))


def make(*arguments: str) -> str:
    # Not as a make within `make test`, which would say which folders it enters.
    outside = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")}
    done = subprocess.run(
        ["make", *arguments], cwd=ROOT, capture_output=True, text=True, check=True, env=outside
    )
    return done.stdout


def test_help_lists_every_target() -> None:
    listed = {line.split()[1]: line.split(maxsplit=2)[2] for line in make("help").splitlines()}
    assert set(listed) == TARGETS
    assert all(len(text) > 10 for text in listed.values())
    assert make() == make("help")


def test_targets_are_no_files() -> None:
    phony = re.search(r"^\.PHONY:((?:.*\\\n)*.*)", MAKEFILE, re.MULTILINE)
    assert phony is not None
    assert set(phony.group(1).replace("\\", " ").split()) == TARGETS


def test_clean_leaves_results_and_libraries(tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    kept = [tmp_path / "out" / "result.json", tmp_path / "gvr_topk" / "lib" / "library.so"]
    built = [tmp_path / "build" / "x", tmp_path / "dist" / "x"]
    for path in (*kept, *built):
        path.parent.mkdir(parents=True)
        path.touch()
    subprocess.run(["make", "clean"], cwd=tmp_path, check=True, capture_output=True)
    assert [path.exists() for path in (*kept, *built)] == [True, True, False, False]


def test_a_wheel_is_alone_in_dist_and_has_every_gpu() -> None:
    """Two wheels of one name at once are refused by pip."""
    recipe = make("--dry-run", "wheel").splitlines()
    assert "rm -f dist/gvr_topk-*.whl" in recipe
    assert recipe.index("rm -f dist/gvr_topk-*.whl") < len(recipe) - 2 and "--wheel-dir dist ." in recipe[-2]
    assert recipe[-1] == "ls dist/gvr_topk-*.whl"
    assert re.search(r"^wheel: export GVR_TOPK_ARCHS \?= all$", MAKEFILE, re.MULTILINE)


BUILD = """
echo '  gvr_topk: compiling kernels'
echo '  [1/3] Building CXX object CMakeFiles/gvr_topk_policy.dir/policy/policy_c.cpp.o'
echo '  [2/3] Building CUDA object CMakeFiles/gvr_topk_cuda.dir/kernels/small_row/launch.cu.o'
echo '  ptxas info: of no interest' >&2
echo '  [3/3] Linking CXX shared library libgvr_topk_policy.so'
"""


def test_a_build_is_shown_file_by_file(tmp_path: Path) -> None:
    def shown(script: str) -> subprocess.CompletedProcess[str]:
        command = [ROOT / "packaging" / "show_build", "sh", "-c", script]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    short = "gvr_topk: compiling kernels\n[1/3] policy/policy_c.cpp\n[2/3] small_row/launch.cu\n"
    short += "[3/3] libgvr_topk_policy.so\n"
    done = shown(BUILD)
    assert (done.returncode, done.stdout) == (0, short)
    failed = shown(f"{BUILD}exit 3")
    assert failed.returncode == 1
    assert failed.stdout.startswith(short) and "ptxas info: of no interest" in failed.stdout
