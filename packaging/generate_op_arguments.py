"""Writes the arguments of the compiled ops from their descriptions in Python, which are the only ones.

    python packaging/generate_op_arguments.py build/op_arguments.h

The build runs this, and so does the test of the compiled checks. The classes are read, not imported, so a
build needs no torch in its Python.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).resolve().parent.parent / "gvr_topk"
SOURCES = (PACKAGE / "arguments.py", PACKAGE / "sampling/arguments.py")
NUMBERS = {"int": "int64_t", "float": "double"}


class Argument(NamedTuple):
    """An argument: its types in the structure and in the op's signature, and what checks its memory."""

    name: str
    stored: str
    given: str
    memory: str = ""


def translate(line: ast.AnnAssign, aliases: dict[str, ast.expr]) -> Argument:
    """Translate the annotation of an argument.

    Raises
    ------
    ValueError
        Ops have no arguments of this kind.
    """
    name, kind = ast.unparse(line.target), line.annotation
    prefix = ""
    if isinstance(kind, ast.BinOp):  # ... | None
        prefix, kind = "Optional", kind.left
    text = ast.unparse(aliases.get(ast.unparse(kind), kind))
    if text in NUMBERS and not prefix:
        return Argument(name, NUMBERS[text], NUMBERS[text])
    memory = f'memory.reads("{name}", a.{name});'
    if text.startswith("Annotated[Tensor, Written("):
        call = ast.parse(text, mode="eval").body.slice.elts[1]  # type: ignore[attr-defined]
        mark = dict(zip(("columns", "shown"), (word.value for word in call.args), strict=False))
        mark |= {key.arg: key.value.value for key in call.keywords}
        columns = f", a.{mark['columns']}" if mark.get("columns") else ""
        memory = f'memory.writes("{mark.get("shown", name)}", a.{name}{columns});'
    elif text != "Tensor":
        raise ValueError(f"{name}: wanted int, float or a Tensor, which may be marked Written, got {text}")
    return Argument(name, f"{prefix}Tensor", f"{prefix}GivenTensor", memory)


def structure(described: ast.ClassDef, aliases: dict[str, ast.expr]) -> Iterator[str]:
    """Yield the lines of one class of arguments: the structure, and the check of its memory."""
    kind = described.name
    every = [translate(line, aliases) for line in described.body if isinstance(line, ast.AnnAssign)]
    yield f"struct {kind} {{"
    yield from (f"  {each.stored} {each.name};" for each in every)
    yield "\n  // An op of this signature, which runs `run` on its arguments."
    yield f"  template <void (*run)(const {kind}&)>"
    yield f"  static void call({', '.join(f'{each.given} {each.name}' for each in every)}) {{"
    yield f"    run({{{', '.join(each.name for each in every)}}});\n  }}\n}};\n"
    yield f"inline void check_memory(const {kind}& a) {{\n  MemoryCheck memory;"
    # As in Python: each written tensor is compared with those that are read, and the written ones before it.
    yield from sorted(
        (f"  {each.memory}" for each in every if each.memory), key=lambda line: "writes" in line
    )
    yield "}\n"


def generate() -> str:
    """Text of the header."""
    lines = ["// Written by packaging/generate_op_arguments.py at every build; do not edit.", "#pragma once"]
    lines += ["// Follows memory.h, as arguments.h includes the two.\n", "namespace gvr_topk {\n"]
    aliases: dict[str, ast.expr] = {}
    for source in SOURCES:
        for node in ast.parse(source.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign):
                aliases |= {ast.unparse(target): node.value for target in node.targets}
            elif isinstance(node, ast.ClassDef) and node.name.endswith("Arguments"):
                lines += structure(node, aliases)
    return "\n".join([*lines, "}  // namespace gvr_topk"]) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(generate(), encoding="utf-8")
