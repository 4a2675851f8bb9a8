"""The compiled libraries: what they need from outside, and what happens when they are not there."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile

from gvr_topk import library, policy
from gvr_topk.constants import HintReason, PlanProblem
from gvr_topk.library import LibraryError, library_status, policy_library

SYSTEM = {"libstdc++.so.6", "libgcc_s.so.1", "libc.so.6", "libm.so.6", "ld-linux-x86-64.so.2"}
# libtorch.so alone, which every build of torch has: naming libtorch_cuda.so or libcudart.so would keep
# the library from loading on a CPU build, or tie it to one CUDA release.
NEEDED = {"libtorch.so", "libstdc++.so.6", "libgcc_s.so.1", "libc.so.6"}
# Symbol versions of the C and C++ runtimes; whatever carries one is theirs.
RUNTIME_VERSION = re.compile(r"^(GLIBC|GLIBCXX|CXXABI|GCC)_[0-9.]+$")
# torch's stable C interface as of 2.9. A name that came later would keep the library from loading there,
# so names, not prefixes; only the dtype and device numbers are families.
TORCH = {
    "aoti_torch_abi_version",
    "aoti_torch_delete_library_object",
    "aoti_torch_delete_tensor_object",
    "aoti_torch_empty_strided",
    "aoti_torch_get_data_ptr",
    "aoti_torch_get_device_index",
    "aoti_torch_get_device_type",
    "aoti_torch_get_dim",
    "aoti_torch_get_dtype",
    "aoti_torch_get_sizes",
    "aoti_torch_get_strides",
    "aoti_torch_library_impl",
    "aoti_torch_library_init_impl",
}
TORCH_FAMILIES = ("aoti_torch_dtype_", "aoti_torch_device_type_")
# May stay unresolved: the first is in CUDA builds of torch only, the others are the linker's own.
WEAK = {
    "aoti_torch_get_current_cuda_stream",
    "_ITM_deregisterTMCloneTable",
    "_ITM_registerTMCloneTable",
    "__gmon_start__",
}


@dataclass(frozen=True)
class Symbol:
    name: str
    version: str
    weak: bool
    defined: bool


def symbols(path: Path) -> Iterator[Symbol]:
    with path.open("rb") as file:
        elf = ELFFile(file)
        numbers = elf.get_section_by_name(".gnu.version")
        versions = elf.get_section_by_name(".gnu.version_r")  # absent where no other library is needed
        names = {
            auxiliary["vna_other"]: auxiliary.name
            for _, auxiliaries in (versions.iter_versions() if versions else ())
            for auxiliary in auxiliaries
        }
        for index, symbol in enumerate(elf.get_section_by_name(".dynsym").iter_symbols()):
            if symbol.name:
                yield Symbol(
                    name=symbol.name,
                    version=names.get(numbers.get_symbol(index)["ndx"], "") if numbers else "",
                    weak=symbol["st_info"]["bind"] == "STB_WEAK",
                    defined=symbol["st_shndx"] != "SHN_UNDEF",
                )


def dynamic(path: Path, tag: str) -> set[str]:
    attribute = tag.removeprefix("DT_").lower()
    with path.open("rb") as file:
        (section,) = (s for s in ELFFile(file).iter_sections() if isinstance(s, DynamicSection))
        return {getattr(entry, attribute) for entry in section.iter_tags(tag)}


def test_undefined_symbols_are_on_the_allow_list(cuda_library: Path) -> None:
    unknown = {
        symbol.name
        for symbol in symbols(cuda_library)
        if not symbol.defined
        and not RUNTIME_VERSION.match(symbol.version)
        and symbol.name not in TORCH
        and not symbol.name.startswith(TORCH_FAMILIES)
        and not (symbol.weak and symbol.name in WEAK)
    }
    assert unknown == set()


def test_the_allow_list_has_nothing_more(cuda_library: Path) -> None:
    undefined = {symbol.name for symbol in symbols(cuda_library) if not symbol.defined}
    assert undefined >= TORCH


def test_needed_libraries(cuda_library: Path) -> None:
    needed = dynamic(cuda_library, "DT_NEEDED")
    assert needed >= NEEDED and needed <= NEEDED | SYSTEM
    # A path of the build machine's torch would be tried first on the user's.
    assert dynamic(cuda_library, "DT_RUNPATH") == dynamic(cuda_library, "DT_RPATH") == set()


def test_the_library_defines_nothing_others_could_bind_to(cuda_library: Path) -> None:
    """A second copy of the CUDA runtime is inside: its names must not meet torch's."""
    exported = {symbol.name for symbol in symbols(cuda_library) if symbol.defined}
    assert {name for name in exported if re.match(r"_ZN?K?8gvr_topk|cuda|__cuda|aoti_|torch_", name)} == set()


def test_a_normal_build_delays_nothing(cuda_library: Path) -> None:
    """What a chaos build (CMake option GVR_TOPK_CHAOS) exports, or any name of it."""
    assert b"gvr_topk_set_chaos" not in cuda_library.read_bytes()
    assert {symbol.name for symbol in symbols(cuda_library) if "chaos" in symbol.name} == set()


def test_policy_library_needs_only_the_c_runtime() -> None:
    path = Path(str(policy_library()._name))
    assert dynamic(path, "DT_NEEDED") <= SYSTEM
    exported = {symbol.name for symbol in symbols(path) if symbol.defined}
    assert {name for name in exported if not name.startswith("_")} == {
        "gvr_topk_archs",
        "gvr_topk_can_use_heuristic",
        "gvr_topk_has_code",
        "gvr_topk_make_plan",
    }


def test_the_library_loads_on_this_torch(cuda_library: Path) -> None:
    status = library_status()
    assert status.loaded and status.path == str(cuda_library)
    assert torch.__version__ in status.reason
    for op in ("indexer_topk_decode", "indexer_topk_decode.usual"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"gvr_topk::{op}", "CUDA")


def test_status_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    real = library._library_path
    monkeypatch.setattr(library, "_library_path", lambda name: None if "cuda" in name else real(name))
    status = library_status.__wrapped__()
    assert not status.loaded and status.path is None
    assert status.reason.startswith("built without a CUDA compiler")
    monkeypatch.setenv("GVR_TOPK_LIBRARY_DIR", "")  # which chooses no folder
    assert Path(str(policy_library.__wrapped__()._name)).parent.name == "lib"


def test_a_package_that_lost_its_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_library_path", lambda name: None)
    status = library_status.__wrapped__()
    assert (status.loaded, status.path) == (False, None)
    assert status.reason == "the package holds no compiled library at all: install it again"
    monkeypatch.setattr(policy, "policy_library", policy_library.__wrapped__)
    with pytest.raises(LibraryError, match=r"wanted libgvr_topk_policy\.so beside the package, got none"):
        policy.can_use_heuristic(length=1, k=1)


def test_status_of_a_library_that_does_not_load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "libgvr_topk_cuda.so"
    broken.write_bytes(b"\x7fELF not a library")
    monkeypatch.setattr(library, "_library_path", lambda name: broken)
    status = library_status.__wrapped__()
    assert not status.loaded and status.path == str(broken)
    assert status.reason.startswith(f"does not load on torch {torch.__version__}: ")


def test_libraries_of_another_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "libgvr_topk_policy.so").write_bytes(Path(str(policy_library()._name)).read_bytes())
    monkeypatch.setenv("GVR_TOPK_LIBRARY_DIR", str(tmp_path))
    chosen = policy_library.__wrapped__()
    assert Path(str(chosen._name)).parent == tmp_path
    assert chosen.gvr_topk_can_use_heuristic(1, 1, 0, 1, 9, 8, 0, 9, 1) == HintReason.USED
    planned = (ctypes.c_int32 * 8)()
    assert chosen.gvr_topk_make_plan(1, 8192, 8, 0, 0, 132, 90, 0, 0, 0, planned) == PlanProblem.NONE
    assert planned[4] == 32  # elements a thread, with room for what is read ahead of a row
    status = library_status.__wrapped__()
    assert (status.loaded, status.path) == (False, None)
    assert status.reason == f"GVR_TOPK_LIBRARY_DIR={tmp_path} holds no libgvr_topk_cuda.so"


def test_a_chosen_folder_without_a_policy_that_loads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GVR_TOPK_LIBRARY_DIR", str(tmp_path))
    message = f"^gvr_topk: GVR_TOPK_LIBRARY_DIR={tmp_path} holds no libgvr_topk_policy.so$"
    with pytest.raises(LibraryError, match=message):
        policy_library.__wrapped__()
    broken = tmp_path / "libgvr_topk_policy.so"
    broken.write_bytes(b"x")
    with pytest.raises(LibraryError, match=f"^gvr_topk: {broken} does not load: .*file too short"):
        policy_library.__wrapped__()


def test_a_policy_of_another_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library.ctypes, "CDLL", lambda path: object())
    with pytest.raises(LibraryError, match=r"libgvr_topk_policy\.so does not load: .*no attribute"):
        policy_library.__wrapped__()
