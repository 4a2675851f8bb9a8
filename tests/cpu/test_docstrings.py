"""Examples run; docstrings say of each parameter what its signature and the ops' own tables say."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import gvr_topk
from gvr_topk import distributed, sampling
from gvr_topk.arguments import _arguments_of
from tests.wrong_calls import CASES, OPS

ROOT = Path(gvr_topk.__file__).parents[1]
EXAMPLES = {
    ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): text.count(">>> ")
    for file in Path(gvr_topk.__file__).parent.rglob("*.py")
    if ">>> " in (text := file.read_text())
}
"""How many lines of examples each module has."""

FUNCTIONS = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module in (gvr_topk, sampling, distributed)
    for name in module.__all__
    if inspect.isfunction(getattr(module, name))
}
SECTION = re.compile(r"^Parameters\n-+\n(.*?)(?=^\w[^\n]*\n---|\Z)", re.DOTALL | re.MULTILINE)
PARAMETER = re.compile(r"^(\w[\w, ]*) : (.*)\n((?:[ \n].*\n?)*)", re.MULTILINE)


@pytest.mark.parametrize("module", EXAMPLES)
def test_examples(module: str) -> None:
    tried = doctest.testmod(importlib.import_module(module), extraglobs={"torch": torch})
    assert (tried.failed, tried.attempted) == (0, EXAMPLES[module])


def documented(function: Callable[..., Any]) -> dict[str, tuple[str, str]]:
    """What stands behind the name of each parameter, and below, in the order of the docstring."""
    section = SECTION.search(inspect.getdoc(function) or "")
    found = PARAMETER.findall(section[1]) if section else []
    return {name: (kind, text.strip()) for names, kind, text in found for name in names.split(", ")}


def function_of(op: str) -> Callable[..., Any]:
    name = OPS[op].checks.op.rpartition(".")[2]
    (function,) = (function for function in FUNCTIONS.values() if function.__name__ == name)
    return function


@pytest.mark.parametrize("name", FUNCTIONS)
def test_parameters_and_defaults_are_those_of_the_signature(name: str) -> None:
    function = FUNCTIONS[name]
    said, signature = documented(function), inspect.signature(function).parameters
    assert list(said) == [parameter for parameter in signature if parameter in said]
    for parameter, (kind, _) in said.items():
        default = signature[parameter].default
        stated = re.search(r"default (\S+)$", kind)
        if default in (None, inspect.Parameter.empty):
            assert kind.endswith("optional") == (default is None), (parameter, kind)
        else:
            written = repr(default).replace("'", '"').removesuffix(".0")
            assert stated and stated[1] == written, (parameter, kind)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_parameter_that_is_left_out_is_that_of_a_function_the_docstring_names(name: str) -> None:
    text = inspect.getdoc(FUNCTIONS[name]) or ""
    named = [other for other in FUNCTIONS if f"`{other.rpartition('.')[2]}`" in text or f"`{other}`" in text]
    elsewhere = {parameter for other in named for parameter in documented(FUNCTIONS[other])}
    taken = inspect.signature(FUNCTIONS[name]).parameters.values()
    own = {parameter.name for parameter in taken if parameter.kind is not parameter.VAR_KEYWORD}
    assert own <= set(documented(FUNCTIONS[name])) | elsewhere


@pytest.mark.parametrize("op", OPS)
def test_what_an_op_writes_is_said_to_be_written(op: str) -> None:
    table = _arguments_of(type(OPS[op].arguments("cpu", {})))
    said = documented(function_of(op))
    for name, _, _, written in table:
        if name in said:
            assert said[name][1].startswith(("Where", "Output", "Input and output")) == bool(written), name


DTYPES_OF = {
    (case.op, match[1]): set(re.split(r", | or ", match[2]))
    for case in CASES
    if (match := re.match(r"(\w+): wanted dtype (.+), got", case.said))
}
"""What the checks of each op want, as its wrong calls show."""


@pytest.mark.parametrize("op, argument", DTYPES_OF)
def test_dtypes_are_those_that_the_checks_want(op: str, argument: str) -> None:
    kind, _ = documented(function_of(op)).get(argument, ("", ""))
    if kind.startswith("Tensor"):
        assert set(re.findall(r"\b(?:b?float|int)\d+\b", kind)) == DTYPES_OF[op, argument]
