"""What the policy says of a GPU and the library, and what it hands over, with stand-ins for both."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch

from gvr_topk import policy
from gvr_topk.constants import PlanProblem
from gvr_topk.library import LibraryError, LibraryStatus

LOADED = LibraryStatus(True, "/lib", "loaded")


class Library:
    """Notes its arguments; holds code for Hopper, and in all builds for Blackwell too."""

    def __init__(self) -> None:
        self.planned: tuple[Any, ...] = ()

    def gvr_topk_archs(self, all_builds: bool) -> bytes:
        return b"90a 100f" if all_builds else b"90a"

    def gvr_topk_has_code(self, arch: int, archs: bytes) -> int:
        return int(str(arch) in archs.decode())

    def gvr_topk_make_plan(self, *arguments: Any) -> int:
        self.planned = arguments[:-1]
        return int(PlanProblem.NONE)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    stand_in = Library()
    monkeypatch.setattr(policy, "policy_library", lambda: stand_in)
    return stand_in


def _set_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)


def test_architectures_are_those_of_this_build_unless_all_are_asked_for(library: Library) -> None:
    assert policy.architectures() == "90a"
    assert policy.architectures(all_builds=True) == "90a 100f"
    assert (policy.has_code(100), policy.has_code(100, all_builds=True)) == (False, True)


@pytest.mark.parametrize(("capability", "arch"), [((9, 0), 90), ((10, 3), 103), ((12, 1), 121), (None, None)])
def test_arch_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None, arch: int | None
) -> None:
    _set_gpu(monkeypatch, capability)
    assert policy.gpu_arch() == arch


@pytest.mark.parametrize(
    ("version", "reason"), [(None, "torch is built without CUDA"), ("13.0", "torch finds no CUDA device")]
)
def test_no_gpu_has_a_reason(
    monkeypatch: pytest.MonkeyPatch, library: Library, version: str | None, reason: str
) -> None:
    monkeypatch.setattr(torch.version, "cuda", version)
    monkeypatch.setattr(policy, "library_status", lambda: LOADED)
    _set_gpu(monkeypatch, None)
    assert policy.no_gpu_reason() == policy.no_kernels_reason() == reason


def test_kernels_that_cannot_run_have_a_reason(monkeypatch: pytest.MonkeyPatch, library: Library) -> None:
    monkeypatch.setattr(policy, "library_status", lambda: LOADED)
    _set_gpu(monkeypatch, (9, 0))
    assert policy.no_kernels_reason() == ""
    _set_gpu(monkeypatch, (10, 0))
    wanted = "wanted a GPU that the library holds code for (90a), got compute capability 10.0"
    assert policy.no_kernels_reason() == wanted
    monkeypatch.setattr(policy, "library_status", lambda: LibraryStatus(False, None, "gone"))
    assert policy.no_kernels_reason() == "the CUDA library is not usable: gone"


def test_a_library_that_cannot_be_asked_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "policy_library", Mock(side_effect=LibraryError("no policy")))
    monkeypatch.setattr(policy, "library_status", lambda: LOADED)
    _set_gpu(monkeypatch, (9, 0))
    assert policy.no_kernels_reason() == "no policy"


def test_a_plan_is_asked_for_with_the_defaults_that_are_said(library: Library) -> None:
    """A whole H200, float32, no forced size and no cap."""
    policy.plan(rows=3, width=5000, k=7)
    assert library.planned == (3, 5000, 7, 0, 0, 132, 90, 0, 0, True)
