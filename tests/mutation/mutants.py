"""Small faults of a module, one at a time, and the digest by which a module is known.

A mutant differs from its module in one expression: a comparison moves by one, ``+`` becomes ``-``, an integer
grows by one, a condition is negated, ``and`` becomes ``or``.
"""

from __future__ import annotations

import ast
import copy
import hashlib
from collections import Counter
from typing import Any, NamedTuple

SEED = 21
LEFT_OUT = "pragma: no mutate"

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Mod: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}  # fmt: skip


class Mutant(NamedTuple):
    """One changed place of a module."""

    line: int
    last_line: int  # of the expression that is changed
    code: str  # its first line, without the indentation
    change: str
    source: str  # the whole module without the change
    index: int  # of the changed node in the order of `ast.walk`

    def tree(self) -> ast.Module:
        """Return the whole module with the change."""
        tree = ast.parse(self.source)
        node = next(node for index, node in enumerate(ast.walk(tree)) if index == self.index)
        mutate(node)
        return ast.fix_missing_locations(tree)


def mutate(node: ast.AST) -> str:
    """Change `node` in place and name the change; empty where there is none for such a node."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        old, new = type(node.ops[0]), COMPARISONS[type(node.ops[0])]
        node.ops = [new(), *node.ops[1:]]
        return f"{old.__name__} to {new.__name__}"
    if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        before, after = type(node.op), ARITHMETIC[type(node.op)]
        node.op = after()
        return f"{before.__name__} to {after.__name__}"
    if isinstance(node, ast.BoolOp):
        swapped = ast.Or if isinstance(node.op, ast.And) else ast.And
        node.op = swapped()
        return f"to {swapped.__name__}"
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        node.value = not node.value
        return f"to {node.value}"
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        node.value += 1
        return f"{node.value - 1} to {node.value}"
    if isinstance(node, ast.If | ast.IfExp | ast.While):
        node.test = ast.copy_location(ast.UnaryOp(ast.Not(), node.test), node.test)
        return "negated condition"
    return ""


MUTABLE = (ast.Compare, ast.BinOp, ast.BoolOp, ast.Constant, ast.If, ast.IfExp, ast.While)
"""Kinds of node that `mutate` may change."""


def mutants(source: str) -> list[Mutant]:
    """Every mutant of a module; annotations, decorators and messages are left alone."""
    tree = ast.parse(source)
    text = source.splitlines()
    skipped = set()
    for node in ast.walk(tree):
        parts = [getattr(node, field, None) for field in ("annotation", "returns")]
        for part in [*parts, *getattr(node, "decorator_list", ())]:
            if isinstance(part, ast.AST):
                skipped |= {id(inner) for inner in ast.walk(part)}
        if isinstance(node, ast.keyword) and node.arg == "strict":  # a guard of zip that cannot fire
            skipped |= {id(part) for part in ast.walk(node)}
        if isinstance(node, ast.JoinedStr | ast.Raise):  # what a message says is no behaviour
            skipped |= {id(part) for part in ast.walk(node)}
    found = []
    for index, node in enumerate(ast.walk(tree)):
        line = getattr(node, "lineno", 0)
        if not isinstance(node, MUTABLE) or id(node) in skipped or (line and LEFT_OUT in text[line - 1]):
            continue
        # The body of a statement is no part of what is changed.
        last = node.test if isinstance(node, ast.If | ast.While) else node
        end = getattr(last, "end_lineno", None) or line
        if change := mutate(copy.copy(node)):
            code = text[line - 1].strip()
            found.append(Mutant(line, end, code, change, source, index))
    return found


def draw(every: list[Mutant], count: int) -> list[Mutant]:
    """`count` of these mutants, or all where there are no more or `count` is 0, in the order of a hash.

    The hash is of what a mutant changes, and not of where that stands, so that a change elsewhere in the
    module leaves the sample as it is.
    """
    seen: Counter[tuple[str, str]] = Counter()
    ranked = []
    for mutant in every:
        name = (mutant.code, mutant.change)
        seen[name] += 1
        text = f"{SEED} {mutant.code} {mutant.change} {seen[name]}"
        ranked.append((hashlib.sha256(text.encode()).digest(), mutant))
    ranked.sort(key=lambda pair: pair[0])
    return [mutant for _, mutant in ranked[: count or None]]


def digest(source: str) -> str:
    """Digest of what a module does: of its syntax tree without comments, layout and docstrings.

    Lines that `LEFT_OUT` names are part of it, because the mutants depend on them.
    """
    text = _canonical(ast.parse(source))
    marked = [line.split("#")[0].strip() for line in source.splitlines() if LEFT_OUT in line]
    return hashlib.sha256("\n".join([text, *marked]).encode()).hexdigest()[:16]


def _canonical(value: Any) -> str:
    """Text of a syntax tree that is the same on every version of Python; `ast.dump` is not."""
    if isinstance(value, ast.AST):
        fields = [(name, part) for name, part in ast.iter_fields(value) if name not in ("ctx", "kind")]
        texts = [f"{name}={_canonical(part)}" for name, part in fields if part is not None and part != []]
        return f"{type(value).__name__}({', '.join(texts)})"
    if isinstance(value, list):
        return f"[{', '.join(_canonical(part) for part in value if not _is_docstring(part))}]"
    return repr(value)


def _is_docstring(node: Any) -> bool:
    """Whether a statement is a string alone: the docstring of a module, class, function or attribute."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )
