"""Writes the arguments of the compiled ops, and their checks, from those in Python, which are the only ones.

    python packaging/generate_op_arguments.py build/op_arguments.h

The build runs this, and so does the test of the compiled checks. The sources are read, not imported, so a
build needs no torch in its Python. Checks may divide only numbers that are not negative, which both languages
round alike.
"""

from __future__ import annotations

import ast
import contextlib
import enum
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

PACKAGE = Path(__file__).resolve().parent.parent / "gvr_topk"
SOURCES = (PACKAGE / "arguments.py", PACKAGE / "sampling/arguments.py", PACKAGE / "distributed/peers.py")
CONSTANTS = (PACKAGE / "constants.py", PACKAGE / "sampling/arithmetic.py", *SOURCES)
NUMBERS = {"int": "int64_t", "float": "double"}

CHECKS = """
flag_bits rows_apart results score_rows scores lengths blocks_of_scores pages row_table
_check_state check_decode _check_windows check_prefill check_prefill_slice check_blocks check_in_blocks
check_topk_items rows optional mask limit_rows limits _check_outputs check_apply_limits check_topk_logprobs
check_verify check_sharded
"""
"""Methods and functions that C++ has, too. What they call besides is written by hand in both languages."""

PARAMETERS = {"str": "const char*", "int": "int64_t", "int | None": "int64_t", "torch.dtype": "ScalarType"}
PARAMETERS |= dict.fromkeys(("Tensor", "Tensor | None"), "TensorArgument")
DTYPES = {"torch.int32": "Int", "torch.int64": "Long", "torch.float32": "Float"}
SYMBOLS = {ast.And: "&&", ast.Or: "||", ast.Not: "!", ast.Invert: "~", ast.Lt: "<", ast.LtE: "<="}
SYMBOLS |= {ast.Gt: ">", ast.Eq: "==", ast.NotEq: "!=", ast.Add: "+", ast.Sub: "-", ast.FloorDiv: "/"}
SYMBOLS |= {ast.Mult: "*", ast.Mod: "%", ast.BitAnd: "&"}


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
        over = f', "{mark["over"]}"' if "over" in mark else ""
        memory = f'memory.writes("{mark.get("shown", name)}", a.{name}{columns}{over});'
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


def constants() -> dict[str, Any]:
    """Return the enumerations and numbers that checks name."""
    names: dict[str, Any] = {"enum": enum}
    for source in CONSTANTS:
        for node in ast.parse(source.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign | ast.ClassDef):
                with contextlib.suppress(NameError):  # it is made of more than constants
                    exec(ast.unparse(node), names)
    return names


KNOWN = constants()


def value(node: ast.expr) -> str:
    """Translate an expression of a check. Numbers that are known here take the place of their names.

    Raises
    ------
    ValueError
        Checks have no expressions of this kind.
    """
    with contextlib.suppress(NameError):
        if isinstance(known := eval(ast.unparse(node), KNOWN), int):
            return str(int(known))
    match node:
        case ast.Constant(None):
            return "kAny"
        case ast.Constant(str(text)):
            return f'"{text}"'
        case ast.Name() | ast.Attribute(ast.Name()):
            text = ast.unparse(node)
            return f"ScalarType::{DTYPES[text]}" if text in DTYPES else text
        case ast.Subscript(ast.Attribute(tensor, "shape"), dimension):
            return f"TensorArgument({value(tensor)})->size({value(dimension)})"
        case ast.Call(ast.Attribute(tensor, "stride" | "dim" as asked), given, []):
            return f"TensorArgument({value(tensor)})->{asked}({', '.join(map(value, given))})"
        case ast.Attribute(ast.Attribute() as tensor, "dtype"):
            return f"TensorArgument({value(tensor)})->scalar_type()"
        case ast.Call(ast.Name("list"), [ast.Attribute(tensor, "shape")], []):
            return f"describe(*TensorArgument({value(tensor)}))"
        case ast.Tuple(parts):
            return f"{{{', '.join(map(value, parts))}}}"
        case ast.IfExp(test, one, other):
            return f"({value(test)} ? {value(one)} : {value(other)})"
        case ast.Compare(tensor, [ast.Is() | ast.IsNot() as sign], [ast.Constant(None)]):
            return f"{'!' if isinstance(sign, ast.Is) else ''}TensorArgument({value(tensor)})"
        case ast.Compare(left, signs, rest):
            sides = zip([left, *rest], signs, rest, strict=False)
            return f"({' && '.join(f'{value(a)} {SYMBOLS[type(sign)]} {value(b)}' for a, sign, b in sides)})"
        case ast.BoolOp(operator, parts):
            return f"({f' {SYMBOLS[type(operator)]} '.join(map(value, parts))})"
        case ast.UnaryOp(operator, operand):
            return f"{SYMBOLS[type(operator)]}{value(operand)}"
        case ast.BinOp(left, operator, right):
            return f"({value(left)} {SYMBOLS[type(operator)]} {value(right)})"
    raise ValueError(f"line {node.lineno}: wanted an expression of checks, got {ast.unparse(node)}")


def refusal(name: ast.expr, wanted: ast.expr, got: ast.expr) -> str:
    """Translate what a check refuses."""
    pieces = wanted.values if isinstance(wanted, ast.JoinedStr) else [wanted]
    parts = [value(piece.value if isinstance(piece, ast.FormattedValue) else piece) for piece in pieces]
    told = '"None"' if ast.unparse(got) == "None" else value(got)
    return f"""check(false, {value(name)}, ": wanted ", {", ".join(parts)}, ", got ", {told});"""


def statements(body: list[ast.stmt], declared: set[str]) -> Iterator[str]:
    """Translate the statements of a check.

    Raises
    ------
    ValueError
        Checks have no statements of this kind.
    """
    for line in body:
        match line:
            case ast.Expr(ast.Constant()):  # a docstring
                pass
            case ast.Expr(ast.Call(ast.Name(name) | ast.Attribute(_, name), given, [])):
                yield f"{compiled_name(name)}({', '.join(map(value, given))});"
            case ast.Raise(ast.Call(_, [name, wanted, got], []), None):
                yield refusal(name, wanted, got)
            case ast.Return(None):
                yield "return;"
            case ast.If(test, inner, []):
                yield f"if ({value(test)}) {{"
                yield from (f"  {each}" for each in statements(inner, declared))
                yield "}"
            case ast.Assign([ast.Tuple(names)], ast.Attribute(tensor, "shape")):
                for i, name in enumerate(names):
                    yield f"auto {value(name)} = TensorArgument({value(tensor)})->size({i});"
            case ast.Assign([ast.Name(name)], given) | ast.AnnAssign(ast.Name(name), _, given):
                yield f"{'' if name in declared else 'auto '}{name} = {value(given)};"
                declared.add(name)
            case _:
                raise ValueError(f"line {line.lineno}: wanted a statement of checks, got {ast.unparse(line)}")


def compiled_name(name: str) -> str:
    """Name in C++ of a method or function that checks. The types of ops tell their checks apart."""
    return "check_arguments" if name.startswith("check_") else f"check_{name.removeprefix('_check_')}"


def check(described: ast.FunctionDef) -> Iterator[str]:
    """Yield the lines of a check."""
    name, parameters, template = compiled_name(described.name), [], "inline "
    for each in described.args.args:
        if each.annotation is None:  # self
            continue
        kind = ast.unparse(each.annotation)
        if kind not in PARAMETERS and name != "check_arguments":
            template, kind = "template <typename Arguments>\n", "Arguments"
        parameters.append(f"{PARAMETERS.get(kind, f'const {kind}&')} {each.arg}")
    for i, default in enumerate(described.args.defaults, -len(described.args.defaults)):
        parameters[i] += f" = {value(default)}"
    yield f"{template}void {name}({', '.join(parameters)}) {{"
    yield from (f"  {line}" for line in statements(described.body, set()))
    yield "}\n"


def generate() -> str:
    """Text of the header."""
    lines = ["// Written by packaging/generate_op_arguments.py at every build; do not edit.", "#pragma once"]
    lines += ["// Follows memory.h, as arguments.h includes the two.\n", "namespace gvr_topk {\n"]
    aliases: dict[str, ast.expr] = {}
    checks = ["inline void check_plan(const DecodeArguments& a);  // by hand, in arguments.h\n"]
    for source in SOURCES:
        for node in ast.parse(source.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign):
                aliases |= {ast.unparse(target): node.value for target in node.targets}
            elif isinstance(node, ast.ClassDef) and node.name.endswith("Arguments"):
                lines += structure(node, aliases)
            for each in node.body if isinstance(node, ast.ClassDef) else (node,):
                if isinstance(each, ast.FunctionDef) and each.name in CHECKS.split():
                    checks += check(each)
    return "\n".join([*lines, *checks, "}  // namespace gvr_topk"]) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(generate(), encoding="utf-8")
