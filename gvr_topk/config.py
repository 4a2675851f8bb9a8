"""The keys that a user writes in the YAML file for ``trtllm-serve --config``, checked before use.

The section ``gvr_topk`` is ours, so it is strict: an unknown key is an error. All other keys belong to
TensorRT-LLM, which refuses unknown ones itself when it starts. Of these, the keys that decide whether and how
this package runs are checked here; the others are carried along.

Key names follow ``tensorrt_llm.llmapi.llm_args`` of the releases from 1.2 to 1.3.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from gvr_topk.arguments import PAPER_K, either
from gvr_topk.constants import MAX_NEXT_N, MAX_WIDTH

DEFAULT_INDEX_TOPK = 2048
"""`index_topk` of DeepSeek-V3.2, used where the file leaves it to the checkpoint."""

HINT_OFFSET_LIMIT = 1 << 20
"""Largest absolute `gvr_topk.hint_offset`; keeps a shifted position far from int32 overflow."""

SWITCH = "enable_heuristic_topk"
"""The key that decides whether this package runs. If a misspelling of it passed, a comparison with and
without this package would compare nothing."""

MISSPELLING = 0.8
"""`difflib` ratio from which an unknown key of TensorRT-LLM counts as a misspelling of one of ours; high,
because its other keys must pass."""

SUGGESTION = 0.6
"""`difflib` ratio from which a key of ours is offered in the message about an unknown one."""


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a configuration: where, what was wanted and what was got."""

    file: str
    key: str
    wanted: str
    got: str
    line: int | None = None
    hint: str = ""

    def __str__(self) -> str:
        place = self.file if self.line is None else f"{self.file}:{self.line}"
        key = f"{self.key}: " if self.key else ""
        hint = f" ({self.hint})" if self.hint else ""
        return f"{place}: {key}wanted {self.wanted}, got {self.got}{hint}"


MOST_BYTES = 1 << 20
"""Of a file, far above what a serving configuration has."""

MOST_SHOWN = 200
"""Characters of a value that a message shows."""


class ConfigError(ValueError):
    """A configuration cannot be used; one line per problem.

    Attributes
    ----------
    problems : tuple of Problem
        Everything found wrong, in the order of the checks.
    """

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = tuple(problems)


class ConfigFileError(ConfigError):
    """There is no file to check: it is missing, or cannot be read."""


class _Theirs(BaseModel):
    """A section of TensorRT-LLM: the keys that this package reads are checked, others are carried along."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)


def _default_topk(value: Any) -> Any:
    return DEFAULT_INDEX_TOPK if value is None else value


class SparseAttentionConfig(_Theirs):
    """``sparse_attention_config``: the indexer."""

    algorithm: str
    index_topk: Annotated[int, BeforeValidator(_default_topk)] = Field(
        default=DEFAULT_INDEX_TOPK, ge=1, le=MAX_WIDTH
    )
    enable_heuristic_topk: bool = False


class GvrTopkConfig(BaseModel):
    """``gvr_topk``: our own optional section, without any other key. Every default is right for serving.

    Attributes
    ----------
    hint_offset : int
        Added to the hinted positions before they are read. 0 reads the previous step's result as it
        is; 1 follows a score landscape that moves with the query. Positions are read only for statistics and
        by ``path: paper_gvr``.
    min_length, max_length : int or None
        Row lengths, in elements, between which the hint is used; None sets no limit.
    path : str
        ``auto``, or one path to force on every call (for measurements): ``paper_gvr``, ``no_hint`` or
        ``radix_rounds``.
    stats : bool
        Keep the per-row statistics tensor of the op, for metrics: hit ratio, guesses, and their misses.
    keep_positions : bool or None
        Keep the previous positions of each request, ``4 k`` bytes a layer, beside the 16 bytes of the
        predictor. Only path ``paper_gvr`` and the hit ratio of `stats` read them; None keeps them if one of
        these two is configured.
    nvtx : bool
        Mark each call with an NVTX range.
    max_ctas : int
        Most CTAs per row, for GPUs shared with long-running communication or prefill kernels; 0 sets no cap.
        See `gvr_topk.indexer_topk_decode`.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    hint_offset: int = Field(default=0, ge=-HINT_OFFSET_LIMIT, le=HINT_OFFSET_LIMIT)
    min_length: int | None = Field(default=None, ge=1, le=MAX_WIDTH)
    max_length: int | None = Field(default=None, ge=1, le=MAX_WIDTH)
    path: Literal["auto", "paper_gvr", "no_hint", "radix_rounds"] = "auto"
    stats: bool = False
    keep_positions: bool | None = None
    nvtx: bool = False
    max_ctas: int = 0

    @property
    def positions_kept(self) -> bool:
        """Whether serving keeps previous positions besides the predictor."""
        if self.keep_positions is not None:
            return self.keep_positions
        return self.stats or self.path == "paper_gvr"

    @property
    def length_limits(self) -> tuple[int, int]:
        """Lengths of the shortest and of the longest row that use the hint, in elements."""
        return (
            0 if self.min_length is None else self.min_length,
            MAX_WIDTH if self.max_length is None else self.max_length,
        )

    @model_validator(mode="after")
    def _path_has_positions(self) -> GvrTopkConfig:
        if self.path == "paper_gvr" and not self.positions_kept:
            raise ValueError("keep_positions true or null with path paper_gvr|keep_positions false")
        return self

    @field_validator("max_ctas")
    @classmethod
    def _cluster_size(cls, value: int) -> int:
        if value not in (0, 1, 2, 4, 8, 16):
            raise ValueError(f"0, 1, 2, 4, 8 or 16|{value}")
        return value

    @model_validator(mode="after")
    def _lengths_in_order(self) -> GvrTopkConfig:
        if self.min_length is not None and self.max_length is not None and self.min_length > self.max_length:
            raise ValueError(
                f"min_length <= max_length|min_length {self.min_length}, max_length {self.max_length}"
            )
        return self


class SpeculativeConfig(_Theirs):
    """``speculative_config``: how many rows a request has in one step."""

    decoding_type: str
    num_nextn_predict_layers: int | None = Field(default=None, ge=1, le=MAX_NEXT_N - 1)
    max_draft_len: int | None = Field(default=None, ge=0, le=MAX_NEXT_N - 1)

    @property
    def draft_tokens(self) -> int:
        """Draft tokens per request and step."""
        if self.decoding_type.upper() == "MTP":
            return self.num_nextn_predict_layers or self.max_draft_len or 1
        return self.max_draft_len or 0


class ServeConfig(_Theirs):
    """A YAML file of ``trtllm-serve``, ``trtllm-bench`` or ``trtllm-eval``."""

    sparse_attention_config: SparseAttentionConfig | None = None
    speculative_config: SpeculativeConfig | None = None
    gvr_topk: GvrTopkConfig = GvrTopkConfig()

    @field_validator("gvr_topk", mode="before")
    @classmethod
    def _empty_section(cls, value: Any) -> Any:
        return {} if value is None else value  # `gvr_topk:` with every line commented out

    @model_validator(mode="after")
    def _path_serves_topk(self) -> ServeConfig:
        if self.gvr_topk.path == "paper_gvr" and self.index_topk not in PAPER_K:
            wanted = f"index_topk {either(PAPER_K)} with path paper_gvr"
            raise ValueError(f"{wanted}|index_topk {self.index_topk}")
        return self

    @property
    def heuristic_enabled(self) -> bool:
        """Whether the file asks for the heuristic top-k."""
        section = self.sparse_attention_config
        return section is not None and section.enable_heuristic_topk

    @property
    def index_topk(self) -> int:
        """Items per row the indexer selects."""
        section = self.sparse_attention_config
        return DEFAULT_INDEX_TOPK if section is None else section.index_topk

    @property
    def next_n(self) -> int:
        """Score rows of one request in one decode step: 1 plus the draft tokens."""
        return 1 + (self.speculative_config.draft_tokens if self.speculative_config else 0)


_SECTIONS: dict[str, type[BaseModel]] = {
    "sparse_attention_config": SparseAttentionConfig,
    "gvr_topk": GvrTopkConfig,
    "speculative_config": SpeculativeConfig,
}


def load_config(path: str | Path) -> ServeConfig:
    """Read and check a YAML file, as given to ``trtllm-serve --config``.

    Raises
    ------
    ConfigFileError
        Missing or unreadable file.
    ConfigError
        Broken YAML, duplicate key, wrong root, or a key that is unknown, misspelled, misplaced or ill-typed.
        Every problem found is listed.
    """
    return parse_text(read_text(path), str(path))


def read_text(path: str | Path) -> str:
    """Read a YAML file, a regular one of at most `MOST_BYTES`; raises as `load_config`."""
    source, file = str(path), Path(path)
    try:
        data = b""
        if regular := file.is_file() or not file.exists():
            with file.open("rb") as opened:
                data = opened.read(MOST_BYTES + 1)  # for a size that is not told, as of files in /proc
        if not regular or len(data) > MOST_BYTES:
            wanted = f"a YAML file, a regular one of at most {MOST_BYTES} bytes"
            raise ConfigFileError([Problem(source, "", wanted, "another kind of file, or more")])
        return data.decode()
    except UnicodeDecodeError as error:
        got = f"bytes that are not UTF-8 at offset {error.start}"
        raise ConfigError([Problem(source, "", "UTF-8 text", got)]) from None
    except OSError as error:
        got = (error.strerror or str(error)).lower().removesuffix(" or directory")
        raise ConfigFileError([Problem(source, "", "a YAML file", got)]) from None


def parse_text(text: str, source: str) -> ServeConfig:
    """Check the text of a YAML file, which error messages call `source`; raises as `load_config`."""
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        lines: dict[str, int] = {}
        if problems := _index_keys(source, node, "", lines, set()):
            raise ConfigError(problems)
        data = yaml.safe_load(text)
    except ConfigError:
        raise
    except Exception as error:  # such as a ValueError for 2024-02-30, which looks like YAML
        raise ConfigError([_yaml_problem(source, error)]) from None
    return parse_config(data, source=source, lines=lines)


def parse_config(
    data: Any, *, source: str = "<mapping>", lines: Mapping[str, int] | None = None
) -> ServeConfig:
    """Check a configuration that is already parsed; raises `ConfigError` as `load_config`.

    Error messages call it `source`, and name the line of a dotted key, if `lines` has it.
    """
    lines = lines or {}
    if not isinstance(data, Mapping):
        got = "nothing" if data is None else f"a {type(data).__name__}"
        raise ConfigError([Problem(source, "", "a mapping of keys at the root", got)])
    problems = _key_problems(source, data, lines)
    try:
        config = ServeConfig.model_validate(dict(data))
    except ValidationError as error:
        # Unknown keys were judged above, with suggestions, which pydantic's own messages lack.
        problems += [
            _field_problem(source, detail, lines)
            for detail in error.errors()
            if detail["type"] not in ("extra_forbidden", "invalid_key")
        ]
    if problems:
        raise ConfigError(problems)
    return config


def _yaml_problem(source: str, error: Exception) -> Problem:
    mark = getattr(error, "problem_mark", None)
    text = getattr(error, "problem", None) or f"{type(error).__name__}: {error}".splitlines()[0]
    line = None if mark is None else mark.line + 1
    return Problem(source, "", "valid YAML", f"an error: {text[:MOST_SHOWN]}", line)


def _index_keys(
    source: str, node: yaml.Node | None, prefix: str, lines: dict[str, int], seen: set[int]
) -> list[Problem]:
    """Record the line of every key below `node`; return a problem for every key written twice."""
    # An alias may lead back to a node above it; one visit per node is enough and ends.
    if not isinstance(node, yaml.CollectionNode) or id(node) in seen:
        return []
    seen.add(id(node))
    problems = []
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            problems += _index_keys(source, item, f"{prefix}{index}.", lines, seen)
        return problems
    here: dict[str, int] = {}
    for key_node, value_node in node.value:
        # A key that is not a scalar has no name, and a YAML merge key may occur several times.
        if not isinstance(key_node, yaml.ScalarNode) or key_node.tag == "tag:yaml.org,2002:merge":
            problems += _index_keys(source, value_node, prefix, lines, seen)
            continue
        key = f"{prefix}{key_node.value}"
        line = key_node.start_mark.line + 1
        if key in here:
            problems.append(
                Problem(source, key, "each key once", f"it again (first on line {here[key]})", line)
            )
        here[key] = line
        problems += _index_keys(source, value_node, f"{key}.", lines, seen)
    lines.update(here)
    return problems


def _key_problems(source: str, data: Mapping[Any, Any], lines: Mapping[str, int]) -> list[Problem]:
    """Find the keys that are unknown to us and may not pass."""
    problems: list[Problem] = []
    levels: list[tuple[str, type[BaseModel], Mapping[Any, Any]]] = [("", ServeConfig, data)]
    levels += [
        (name, _SECTIONS[name], data[name]) for name in _SECTIONS if isinstance(data.get(name), Mapping)
    ]
    for section, model, content in levels:
        for key in (key for key in content if key not in model.model_fields):
            problem: tuple[str, str] | None = "a text as key", ""
            if isinstance(key, str):
                problem = _unknown_key(section, key, sorted(model.model_fields))
            if problem:
                dotted = f"{section}.{key}" if section else str(key)
                wanted, hint = problem
                problems.append(Problem(source, dotted, wanted, "an unknown key", lines.get(dotted), hint))
    return problems


def _unknown_key(section: str, key: str, known: list[str]) -> tuple[str, str] | None:
    """Return ``(wanted, hint)`` for the message about an unknown key; None if TensorRT-LLM may know it."""
    where = f"a key of {section}" if section else "a key at the top level"
    is_ours = section == "gvr_topk"
    for owner in ("sparse_attention_config", "gvr_topk"):
        if not is_ours and section != owner and key in _SECTIONS[owner].model_fields:
            return where, f"it belongs under {owner}"
    ours = known if is_ours else [name for name in known if name in (SWITCH, *_SECTIONS)]
    folded = {_fold(name): name for name in ours}
    cutoff = SUGGESTION if is_ours else MISSPELLING
    if close := difflib.get_close_matches(_fold(key), folded, n=1, cutoff=cutoff):
        return where, f"did you mean {folded[close[0]]}?"
    return (f"one of {', '.join(known)}", "") if is_ours else None


def _fold(key: str) -> str:
    return key.lower().replace("-", "").replace("_", "")


def _shown(value: Any) -> str:
    """Write a value for a message; aliases may make it endless, and some integers are too long to write."""
    short = reprlib.Repr()
    short.maxlevel, short.maxstring, short.maxother = 2, MOST_SHOWN, MOST_SHOWN
    try:
        return short.repr(value)[:MOST_SHOWN]
    except ValueError:
        return f"a very large {type(value).__name__}"


def _field_problem(source: str, detail: Any, lines: Mapping[str, int]) -> Problem:
    """Turn one pydantic error into a problem."""
    key = ".".join(str(part) for part in detail["loc"])
    value = detail["input"]
    got = str(value).lower() if isinstance(value, bool) else _shown(value)
    wanted = detail["msg"].removeprefix("Input should be ")
    if detail["type"] == "value_error":  # the validators of our models write "wanted|got"
        wanted, _, got = str(detail["ctx"]["error"]).partition("|")
    elif detail["type"] == "missing":
        wanted, got = "a value", "no such key"
    return Problem(source, key, wanted, got, lines.get(key) or lines.get(key.rpartition(".")[0]))
