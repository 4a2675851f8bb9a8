"""What tests of the engines' integrations share: a process no other test has changed, and lines of a log."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from engine import SHAPES, fake_package
from vllm_engine import fake_vllm


@pytest.fixture
def undisturbed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """TensorRT-LLM's integration without our variables and hooks, on one thread."""
    from integration_setup import VARIABLES

    from gvr_topk.integrations import tensorrt_llm as integration

    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # so that it is put back whatever a test makes of it
        monkeypatch.delenv(name)
    integration.uninstall()  # where the package is installed, its import hook waits for the fakes
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the tensors are tiny: threads would only wait for each other
    yield
    torch.set_num_threads(threads)
    integration.uninstall()


@pytest.fixture(params=SHAPES)
def shape(request: pytest.FixtureRequest) -> Iterator[str]:
    """A fake of TensorRT-LLM that can be imported."""
    with fake_package(request.param):
        yield request.param


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Lines of vLLM's integration, where the fake can be imported and our sampler serves CPUs."""
    from vllm_lines import logged, without_variables

    from gvr_topk.integrations.vllm import plugin, sampler

    monkeypatch.setattr(sampler, "DEVICE", "cpu")
    random.seed(1)
    without_variables(monkeypatch)
    with logged() as lines, fake_vllm():
        yield lines
        plugin.unregister()


@pytest.fixture
def serving(log: list[str]) -> None:
    """The fake of vLLM with our plugin."""
    from gvr_topk.integrations.vllm import plugin

    plugin.register()
