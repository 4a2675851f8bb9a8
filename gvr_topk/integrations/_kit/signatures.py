"""What an engine must look like to be patched: points, their signatures, and arguments of hooked calls.

A point is checked against the live object if its module is loaded, and otherwise against the source file,
without importing it. ``gvr-topk doctor`` runs the checks, and they run before anything is changed.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

Kind = Literal["class", "method", "function", "op", "instance"]
Status = Literal["ok", "missing", "mismatch", "later"]


@dataclass(frozen=True)
class PatchPoint:
    """One assumption about the sources."""

    name: str  # ``Class``, ``Class.method`` or ``function`` inside `module`, or the name of an op
    kind: Kind
    """``class``: exists; ``method``, ``function``: parameters; ``op``: schema; ``instance``: attributes that
    only exist on objects, checked at the first step."""
    module: str  # exposes it
    expected: tuple[str, ...]
    """Names that must be there: leading parameters, arguments or attributes. ``a|b`` means either."""
    action: str  # what the integration does with it
    submodule: str = ""  # inside `module`, holds the source, if `module` is a package that re-exports it
    more: Literal["optional", "any", "anywhere", "none"] = "optional"
    """What else a method may take: parameters with a default, any, the expected ones anywhere, or none."""


@dataclass(frozen=True)
class Finding:
    """Result of checking one point."""

    point: PatchPoint
    status: Status
    detail: str = ""

    def __str__(self) -> str:
        where = f" in {self.point.module}" if self.point.module else ""
        return f"{self.point.name}{where}: {self.detail}"

    @property
    def good(self) -> bool:
        return self.status in ("ok", "later")

    @property
    def row(self) -> tuple[str, str]:
        """What ``gvr-topk doctor`` prints: name of the point, and what was found."""
        detail = f" ({self.detail})" if self.detail else ""
        return self.point.name, f"{self.status}{detail}: {self.point.action}"


def check_live(point: PatchPoint, module: ModuleType) -> Finding:
    """Check one point against a loaded module."""
    if point.kind == "op":
        return _check_op(point)
    if point.kind == "function":
        return _check_callable(point, getattr(module, point.name, None))
    owner_name, _, method = point.name.partition(".")
    owner = getattr(module, owner_name, None)
    if not isinstance(owner, type):
        return Finding(point, "missing", f"wanted a class {owner_name}, got none")
    return _check_callable(point, getattr(owner, method, None)) if method else Finding(point, "ok")


def _check_callable(point: PatchPoint, function: Any) -> Finding:
    if not callable(function):
        return _missing(point)
    parameters = inspect.signature(function).parameters.values()
    plain = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return compare(point, [p.name for p in plain], [p.name for p in plain if p.default is p.empty])


def _missing(point: PatchPoint) -> Finding:
    name = point.name.rpartition(".")[2]
    return Finding(point, "missing", f"wanted a {point.kind} {name}, got none")


def check_object(point: PatchPoint, instance: Any) -> Finding:
    """Check the attributes of an object (kind ``instance``)."""
    for names in point.expected:
        if not any(hasattr(instance, name) for name in names.split("|")):
            wanted = " or ".join(names.split("|"))
            return Finding(point, "missing", f"wanted the attribute {wanted}, got none")
    return Finding(point, "ok")


def compare(point: PatchPoint, names: list[str], required: Iterable[str]) -> Finding:
    """Compare parameter names, in order, with the table; the required ones have no default."""
    wanted = list(point.expected)
    if point.more == "anywhere":
        fits = set(wanted) <= set(names)
    else:
        rest = set(names[len(wanted) :]) if point.more != "any" else set()
        rest &= set(names if point.more == "none" else required)
        fits = names[: len(wanted)] == wanted and not rest
    if fits:
        return Finding(point, "ok")
    where = "among its parameters" if point.more == "anywhere" else "as its parameters"
    return Finding(point, "mismatch", f"wanted {', '.join(wanted)} {where}, got {', '.join(names)}")


def find_engine(name: str) -> Path | None:
    """Folder of an installed package, without importing it."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # ValueError: a half-made entry in sys.modules
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def engine_version(root: Path, name: str) -> str:
    """Version of an installed package, from its ``version.py`` or its metadata."""
    source = root / "version.py"
    if source.is_file():
        for node in ast.parse(source.read_text(encoding="utf-8")).body:
            match node:
                case ast.Assign(targets=[ast.Name(id="__version__")], value=ast.Constant(value=version)):
                    return str(version)
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "of unknown version"


def _check_op(point: PatchPoint) -> Finding:
    import torch

    _, _, namespace, name = point.name.split(".")
    op = getattr(getattr(torch.ops, namespace), name, None)
    if op is None:
        return Finding(point, "later", "not registered yet; checked at the first step")
    schema = op.default._schema.arguments
    names = [argument.name for argument in schema]
    required = [argument.name for argument in schema if not argument.has_default_value()]
    if "index_topk" in required:
        return Finding(point, "mismatch", "wanted index_topk with a default, got none")
    return compare(point, names, required)


@dataclass
class Checker:
    """Checks points of an engine, parsing each source file once.

    Sources are read below `root`, if there is one. Modules that are `loaded` are checked live.
    """

    root: Path | None
    loaded: dict[str, ModuleType]
    trees: dict[Path, ast.Module] = field(default_factory=dict)

    def check(self, point: PatchPoint) -> Finding:
        if point.kind == "instance":
            return Finding(point, "later", "checked at the first step")
        if point.module in self.loaded:
            return check_live(point, self.loaded[point.module])
        if point.kind == "op":
            return Finding(point, "later", "checked when its library is loaded")
        if self.root is None:
            return Finding(point, "later", "no source file; checked when it is loaded")
        return self._check_source(point)

    def find_class(self, point: PatchPoint) -> ast.ClassDef | None:
        """Return the definition of a point's class; None where there is none, or no source."""
        name = point.name.partition(".")[0]
        for file in filter(Path.is_file, self._places(point)):
            owner: ast.ClassDef | None = _definition(self._tree(file).body, name, ast.ClassDef)
            if owner is not None:
                return owner
        return None

    def _tree(self, file: Path) -> ast.Module:
        """A source file, parsed."""
        if file not in self.trees:
            self.trees[file] = ast.parse(file.read_text(encoding="utf-8"))
        return self.trees[file]

    def _places(self, point: PatchPoint) -> list[Path]:
        """Files that may define what a point names."""
        assert self.root is not None
        base = self.root.joinpath(*point.module.split(".")[1:])
        return [base.with_suffix(".py"), base / f"{point.submodule}.py", base / "__init__.py"]

    def _check_source(self, point: PatchPoint) -> Finding:
        places = self._places(point)
        files = list(filter(Path.is_file, places))
        if not files:
            if any(place.with_suffix(".pyc").is_file() for place in places):
                return Finding(point, "later", "no source file; checked when it is loaded")
            return Finding(point, "missing", f"wanted the module {point.module}, got none")
        if point.kind == "function":
            body = self._tree(files[0]).body
            return self._check_function(point, _definition(body, point.name, ast.FunctionDef))
        owner_name, _, method = point.name.partition(".")
        owner = self.find_class(point)
        if owner is None:
            return Finding(point, "missing", f"wanted a class {owner_name}, got none")
        if not method:
            return Finding(point, "ok")
        return self._check_function(point, _definition(owner.body, method, ast.FunctionDef))

    def _check_function(self, point: PatchPoint, function: ast.FunctionDef | None) -> Finding:
        if function is None:
            return _missing(point)
        arguments = function.args
        # A class that is loaded does not show the first parameter of its class methods.
        positional = [a.arg for a in arguments.posonlyargs + arguments.args if a.arg != "cls"]
        names = positional + [a.arg for a in arguments.kwonlyargs]
        required = positional[: len(positional) - len(arguments.defaults)]
        required += [
            a.arg
            for a, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
            if default is None
        ]
        return compare(point, names, required)


def _definition(body: list[ast.stmt], name: str, kind: type[Any]) -> Any:
    return next((node for node in body if isinstance(node, kind) and node.name == name), None)


def argument(args: Sequence[Any], kwargs: Mapping[str, Any], position: int, name: str, default: Any) -> Any:
    """Return an argument that is given by position or by name, or else the default."""
    return args[position] if position < len(args) else kwargs.get(name, default)
