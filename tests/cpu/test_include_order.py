"""The order of folders is the order of includes in cpp/kernels, and assembly stays in one of them."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

KERNELS = Path(__file__).resolve().parents[2] / "cpp" / "kernels"
BELOW = {
    "ptx": set(),
    "core": {"ptx"},
    "cluster": {"ptx", "core"},
    "claims": {"core"},
    "fallback": {"ptx", "core", "cluster"},
    "small_row": {"ptx", "core", "cluster"},
    "resident": {"ptx", "core", "cluster", "small_row"},
    "streaming": {"ptx", "core", "cluster", "fallback", "small_row"},
    "paper_gvr": {"ptx", "core", "cluster", "fallback", "small_row"},
    "prefill": {"ptx", "core"},
    "prefill_short": {"ptx", "core", "cluster", "small_row"},
    "prefill_slice": {"ptx", "core", "prefill"},
    "blocks": {"ptx", "core", "cluster", "small_row"},
    "sampling": {"ptx", "core"},
    "sampling_limits": {"ptx", "core"},
    "sampling_stream": {"ptx", "core", "sampling"},
    "sharded": {"ptx", "core"},
    "topk_items": {"ptx", "core"},
    "topk_logprobs": {"ptx", "core", "sampling"},
    "verify": {"ptx", "core"},
}
"""Folders that the files of a folder may include, beside its own."""
KERNEL_FOLDERS = [folder for folder in BELOW if folder not in ("ptx", "core", "cluster")]
LONGEST_PATH = 6
"""Most files of its own folder that a reader of a kernel meets, ``kernel.cuh`` among them."""
FILES = sorted(file for suffix in ("cuh", "cu") for file in KERNELS.rglob(f"*.{suffix}"))


def folder_of(file: Path) -> str:
    return file.relative_to(KERNELS).parts[0]


@cache
def included(file: Path) -> tuple[Path, ...]:
    """Files of cpp/kernels that a file names in its includes."""
    names = re.findall(r'^#include "([^"]+)"', file.read_text(), re.MULTILINE)
    return tuple(KERNELS / name for name in names if (KERNELS / name).exists())


def reachable(file: Path) -> set[Path]:
    found: set[Path] = set()
    waiting = [file]
    while waiting:
        for other in included(waiting.pop()):
            if other not in found:
                found.add(other)
                waiting.append(other)
    return found


def test_folders_are_known() -> None:
    assert {folder_of(file) for file in FILES} == set(BELOW)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(KERNELS)))
def test_includes_go_down(file: Path) -> None:
    named = re.findall(r'^#include "([^"]+)"', file.read_text(), re.MULTILINE)
    public = {name for name in named if name.startswith("gvr_topk/")}
    assert {name for name in set(named) - public if not (KERNELS / name).exists()} == set()
    own = folder_of(file)
    assert {folder_of(other) for other in included(file)} <= BELOW[own] | {own}


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(KERNELS)))
def test_no_file_includes_itself(file: Path) -> None:
    assert file not in reachable(file)


@pytest.mark.parametrize("folder", KERNEL_FOLDERS)
def test_a_kernel_is_few_files(folder: str) -> None:
    kernel = KERNELS / folder / "kernel.cuh"
    path = {kernel} | {file for file in reachable(kernel) if folder_of(file) == folder}
    assert len(path) <= LONGEST_PATH, sorted(file.name for file in path)


@pytest.mark.parametrize("folder", KERNEL_FOLDERS)
def test_a_kernel_has_one_launch(folder: str) -> None:
    assert [file.name for file in (KERNELS / folder).glob("*.cu")] == ["launch.cu"]
    cmake = (KERNELS.parent / "CMakeLists.txt").read_text()
    assert f"kernels/{folder}/launch.cu" in cmake


def test_assembly_is_in_ptx_alone() -> None:
    sources = [*FILES, *KERNELS.rglob("*.cpp")]
    code = {file: re.sub(r"//.*", "", file.read_text()) for file in sources}
    assert {file for file, text in code.items() if re.search(r"\basm\b", text)} == {
        file for file in FILES if folder_of(file) == "ptx" and re.search(r"\basm\b", code[file])
    }


def test_headers_open_no_namespace_to_others() -> None:
    opening = re.compile(r"^using namespace ", re.MULTILINE)
    assert [file.name for file in FILES if opening.search(file.read_text())] == []


def test_a_type_has_one_definition() -> None:
    """Kernels are compiled one by one, but read together: one name means one thing in all of them."""
    pattern = r"^(?:struct|class) (?:alignas\([^\n]*?\) )?([A-Z]\w+)[^;\n]*\{"
    names = [name for file in FILES for name in re.findall(pattern, file.read_text(), re.MULTILINE)]
    assert len(names) > 80
    assert sorted({name for name in names if names.count(name) > 1}) == []


def test_shared_memory_is_no_multiprocessor() -> None:
    """``sm`` reads as a streaming multiprocessor; shared memory is ``smem``."""
    named = [file.name for file in FILES if re.search(r"\bsm\b", file.read_text())]
    assert named == []
