"""Small parts of the integrations: the device of a call, the switch of an engine, depths and defaults."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gvr_topk.integrations._kit.device import arch_of, capturing, multiprocessors
from gvr_topk.integrations._kit.switch import Switch
from gvr_topk.integrations._kit.transaction import Transaction
from gvr_topk.integrations.tensorrt_llm.selection import PLAIN, Selection, wrap_top_k
from gvr_topk.integrations.tensorrt_llm.type_hints import classes_in


@pytest.mark.parametrize(("capability", "arch"), [((9, 0), 90), ((10, 3), 103), ((12, 1), 121)])
def test_arch_of_a_device(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], arch: int) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    arch_of.cache_clear()
    assert arch_of(torch.device("cuda", 0)) == arch
    assert arch_of(torch.device("cpu")) == 0
    arch_of.cache_clear()


def test_only_a_gpu_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert capturing(torch.device("cuda", 0)) and not capturing(torch.device("cpu"))


def test_multiprocessors_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert multiprocessors(torch.device("cuda", 0)) == 132
    assert multiprocessors(torch.device("cpu")) == 1


def test_a_switch_announces_once() -> None:
    said: list[tuple[str, str]] = []
    switch = Switch("engine", lambda level, text: said.append((level, text)))
    for _ in range(3):
        switch.announce(lambda: "61 layers")
    assert said == [("info", "on: 61 layers")] and switch.failed == ""


def test_a_top_k_without_next_n_has_one_row_for_each_request() -> None:
    seen: list[Selection] = []
    top_k = SimpleNamespace(decode_implementation=PLAIN, top_k=5, compress_ratio=4)
    tensors = [torch.zeros(2, 8), torch.zeros(2), torch.zeros(2), torch.zeros(2, 5)]

    def select(selection: Selection, original: Any) -> bool:
        seen.append(selection)
        return True

    forward = wrap_top_k(lambda *args: None, select)
    assert forward(top_k, *tensors) is tensors[3]
    forward(top_k, *tensors, 3)
    found = [(one.next_n, one.k, one.compress_ratio, one.native) for one in seen]
    assert found == [(1, 5, 4, ""), (3, 5, 4, "")]
    assert Selection(*tensors[:2], tensors[3], 1, 5).compress_ratio == 1


def test_classes_are_found_anywhere_in_an_annotation() -> None:
    found = list(classes_in(dict[str, list[int] | tuple[bool, ...]] | None, int))
    assert found == [int, bool]
    assert list(classes_in(str, int)) == [] == list(classes_in("int", int))
    # Python 3.10 takes list[int] for a type of its own, which is no class.
    assert list(classes_in(list[int], list)) == []


def test_undos_run_newest_first() -> None:
    order: list[str] = []
    transaction, owner = Transaction(), SimpleNamespace(a=1)
    for name in ("older", "newer"):
        transaction.callback(order.append, name)
    transaction.set_attribute(owner, "a", 2)
    transaction.set_attribute(owner, "a", 3)
    assert owner.a == 3
    transaction.rollback()
    transaction.rollback()  # has nothing to undo any more
    assert (owner.a, order) == (1, ["newer", "older"])
