"""Everything the integration assumes about TensorRT-LLM, as one table, and the check of it.

The table is read twice: against the source files, without importing them (`check_sources`, for
``gvr-topk doctor`` and before anything is changed), and against the live objects right before they are
changed (`check_live`).
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

ENGINE = "tensorrt_llm"
LLM_ARGS = "tensorrt_llm.llmapi.llm_args"
DSA = "tensorrt_llm._torch.attention_backend.sparse.dsa"

SUPPORTED = "1.2 to the 1.3 pre-releases"
"""Versions whose sources the table was written from."""

Kind = Literal["class", "method", "op", "instance"]
Status = Literal["ok", "missing", "mismatch", "later"]


@dataclass(frozen=True)
class PatchPoint:
    """One assumption.

    Attributes
    ----------
    name : str
        ``Class`` or ``Class.method`` inside `module`, or the name of an op.
    kind : str
        ``class``: exists; ``method``: parameters; ``op``: schema; ``instance``: attributes that only
        exist on objects, checked at the first step.
    module : str
        Module that exposes it. In later versions the DSA module is a package that re-exports.
    submodule : str
        Module of that package which holds the source.
    expected : tuple of str
        Names that must be there: leading parameters, arguments or attributes. ``a|b`` means either.
    action : str
        What we do with it.
    anywhere : bool
        The parameters may stand at any position.
    """

    name: str
    kind: Kind
    module: str
    expected: tuple[str, ...]
    action: str
    submodule: str = ""
    anywhere: bool = False


CONFIG = PatchPoint(
    "DeepSeekSparseAttentionConfig",
    "class",
    LLM_ARGS,
    ("algorithm", "index_topk"),
    "gains enable_heuristic_topk where it is missing; the value is carried to the workers",
)
ARGS = PatchPoint(
    "TorchLlmArgs",
    "class",
    LLM_ARGS,
    (),
    "gains the optional section gvr_topk",
)
INDEXER_INIT = PatchPoint(
    "Indexer.__init__",
    "method",
    DSA,
    ("layer_idx",),
    "not changed; layer_idx names the layer",
    submodule="indexer",
    anywhere=True,
)
INDEXER_CALL = PatchPoint(
    "Indexer.sparse_attn_indexer",
    "method",
    DSA,
    ("self", "metadata", "hidden_states", "q_fp8", "k_fp8", "k_scale", "weights", "use_custom_topk"),
    "wrapped: says which layer and batch the op is called for; seeds the hint after prefill",
    submodule="indexer",
)
METADATA_PREPARE = PatchPoint(
    "DSAtrtllmAttentionMetadata.prepare",
    "method",
    DSA,
    ("self",),
    "wrapped: fills the slot of each row once per step",
    submodule="metadata",
)
CACHE_MANAGER = PatchPoint(
    "DSACacheManager.get_indexer_k_cache_buffers",
    "method",
    DSA,
    ("self", "layer_idx"),
    "not changed; the hints live as long as the manager",
    submodule="cache_manager",
)
OP = PatchPoint(
    "torch.ops.trtllm.indexer_topk_decode",
    "op",
    DSA,
    ("logits", "seq_lens", "indices", "next_n", "index_topk"),
    "replaced; the original stays as the last fallback",
)
METADATA_OBJECT = PatchPoint(
    "DSAtrtllmAttentionMetadata()",
    "instance",
    DSA,
    (
        "kv_cache_manager",
        "request_ids",
        "seq_lens",
        "num_contexts",
        "num_generations",
        "num_ctx_tokens",
        "num_tokens",
        "sparse_mla_topk|num_sparse_topk",
        "max_num_sequences|max_num_requests",
        "kv_lens_cuda_runtime|kv_lens_cuda",
    ),
    "read once per step, on the host",
)
MANAGER_OBJECT = PatchPoint(
    "DSACacheManager()",
    "instance",
    DSA,
    ("layer_offsets", "num_local_layers"),
    "read when the hints are allocated",
)

TABLE: tuple[PatchPoint, ...] = (
    CONFIG,
    ARGS,
    INDEXER_INIT,
    INDEXER_CALL,
    METADATA_PREPARE,
    CACHE_MANAGER,
    OP,
    METADATA_OBJECT,
    MANAGER_OBJECT,
)


@dataclass(frozen=True)
class Finding:
    """Result of checking one point."""

    point: PatchPoint
    status: Status
    detail: str = ""

    @property
    def good(self) -> bool:
        return self.status in ("ok", "later")


class PatchRefused(RuntimeError):
    """The installed TensorRT-LLM is not the one the table describes; nothing was changed."""


def refusal(version: str, finding: Finding) -> str:
    """The one message: what was found, which point, and what to do."""
    return (
        f"found TensorRT-LLM {version}; {finding.point.name} in {finding.point.module}: {finding.detail}. "
        f"Nothing was changed, serving continues with TensorRT-LLM's own top-k. "
        f"Use a version from {SUPPORTED}, or set GVR_TOPK_DISABLE=1 to silence this."
    )


def compare(point: PatchPoint, names: list[str], required: Iterable[str]) -> Finding:
    """Compare parameter names with the table.

    Parameters
    ----------
    point : PatchPoint
    names : list of str
        Parameters found, in order.
    required : iterable of str
        Those of them without a default.
    """
    wanted = list(point.expected)
    if point.anywhere:
        fits = set(wanted) <= set(names)
    else:
        fits = names[: len(wanted)] == wanted and not set(names[len(wanted) :]) & set(required)
    if fits:
        return Finding(point, "ok")
    where = "among its parameters" if point.anywhere else "as its parameters"
    return Finding(point, "mismatch", f"wanted {', '.join(wanted)} {where}, got {', '.join(names)}")


def check_live(point: PatchPoint, module: ModuleType) -> Finding:
    """Check a point against the imported module."""
    if point.kind == "instance":
        return Finding(point, "later", "checked at the first step")
    if point.kind == "op":
        return _check_op(point)
    owner_name, _, method = point.name.partition(".")
    owner = getattr(module, owner_name, None)
    if owner is None:
        return Finding(point, "missing", f"wanted a class {owner_name}, got none")
    if not method:
        fields = getattr(owner, "model_fields", None)
        if fields is None:
            return Finding(point, "mismatch", f"wanted a pydantic model, got {owner!r}")
        absent = [name for name in point.expected if name not in fields]
        if absent:
            return Finding(
                point, "mismatch", f"wanted the fields {', '.join(absent)}, got {', '.join(fields)}"
            )
        return Finding(point, "ok")
    function = getattr(owner, method, None)
    if function is None:
        return Finding(point, "missing", f"wanted a method {method}, got none")
    parameters = inspect.signature(function).parameters.values()
    plain = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return compare(point, [p.name for p in plain], [p.name for p in plain if p.default is p.empty])


def _check_op(point: PatchPoint) -> Finding:
    import torch

    _, _, namespace, name = point.name.split(".")
    op = getattr(getattr(torch.ops, namespace), name, None)
    if op is None:
        return Finding(point, "missing", "wanted a registered op, got none")
    schema = op.default._schema.arguments
    names = [argument.name for argument in schema]
    required = [argument.name for argument in schema if not argument.has_default_value()]
    if "index_topk" in required:
        return Finding(point, "mismatch", "wanted index_topk with a default, got none")
    return compare(point, names, required)


def check_object(point: PatchPoint, instance: Any) -> Finding:
    """Check the attributes of an object (kind ``instance``)."""
    for names in point.expected:
        if not any(hasattr(instance, name) for name in names.split("|")):
            wanted = " or ".join(names.split("|"))
            return Finding(point, "missing", f"wanted the attribute {wanted}, got none")
    return Finding(point, "ok")


def find_engine() -> Path | None:
    """Folder of the installed package, without importing it."""
    try:
        spec = importlib.util.find_spec(ENGINE)
    except (ImportError, ValueError):  # ValueError: a half-made entry in sys.modules
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def engine_version(root: Path) -> str:
    """Version of the installed package, from its ``version.py`` or its metadata."""
    source = root / "version.py"
    if source.is_file():
        for node in ast.parse(source.read_text(encoding="utf-8")).body:
            match node:
                case ast.Assign(targets=[ast.Name(id="__version__")], value=ast.Constant(value=version)):
                    return str(version)
    from importlib import metadata

    try:
        return metadata.version(ENGINE)
    except metadata.PackageNotFoundError:
        return "of unknown version"


def check_sources(root: Path, points: Iterable[PatchPoint] = TABLE) -> list[Finding]:
    """Check points against source files, importing nothing.

    Parameters
    ----------
    root : Path
        Folder of the ``tensorrt_llm`` package.
    points : iterable of PatchPoint

    Returns
    -------
    list of Finding
        In the order of `points`. A point whose source cannot be read is ``later``: it is checked
        against the live object.
    """
    trees: dict[Path, ast.Module] = {}
    return [_check_source(root, point, trees) for point in points]


def _check_source(root: Path, point: PatchPoint, trees: dict[Path, ast.Module]) -> Finding:
    if point.kind == "op":
        return Finding(point, "later", "checked when its library is loaded")
    if point.kind == "instance":
        return Finding(point, "later", "checked at the first step")
    base = root.joinpath(*point.module.split(".")[1:])
    places = [base.with_suffix(".py"), base / f"{point.submodule}.py", base / "__init__.py"]
    files = [place for place in places if place.is_file()]
    if not files:
        if any(place.with_suffix(".pyc").is_file() for place in places):
            return Finding(point, "later", "no source file; checked when it is loaded")
        return Finding(point, "missing", f"wanted the module {point.module}, got none")
    owner_name, _, method = point.name.partition(".")
    for file in files:
        if file not in trees:
            trees[file] = ast.parse(file.read_text(encoding="utf-8"))
        owner = _definition(trees[file].body, owner_name, ast.ClassDef)
        if owner is not None:
            break
    else:
        return Finding(point, "missing", f"wanted a class {owner_name}, got none")
    if not method:
        return Finding(point, "ok")
    function = _definition(owner.body, method, ast.FunctionDef)
    if function is None:
        return Finding(point, "missing", f"wanted a method {method}, got none")
    arguments = function.args
    positional = [a.arg for a in arguments.posonlyargs + arguments.args]
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
