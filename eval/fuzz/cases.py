"""Random calls of the ops as plain values: a strategy of hypothesis for each op.

The tensors of a case are drawn from its seed (`eval.fuzz.calls`), so a case can be made again on the same
kind of device from what it prints.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from eval.common.dtypes import DTYPES
from eval.fuzz.contents import CONTENTS
from eval.fuzz.outputs import INT32
from gvr_topk.arguments import PREFILL_PATHS
from gvr_topk.constants import BLOCK_SIZE, MAX_CHOSEN_BLOCKS, MAX_WIDTH, ONE_LAUNCH_BLOCKS_WIDTH, Path
from gvr_topk.policy import plan
from gvr_topk.sampling.arguments import SLOT_PARAMETERS, LogprobMode, Noise, Order

OPS = {"decode": 4, "prefill": 3, "blocks": 1, "sampling": 1}
"""Kinds of case, and how often each is drawn; those of blocks call both ops of blocks, those of sampling the
sampler's four."""

PATHS = tuple(path.name.lower() for path in Path)
TUNED_K = (512, 1024, 2048)
CTAS = (1, 2, 4, 8, 16)

LENGTHS = ("full", "random", "near_k", "near_blocks", "tiny", "beyond", "any_int32")
STARTS = ("few", "aligned", "random", "any_int32")
WINDOWS = ("full", "causal", "random", "near_k", "tiny", "beyond", "inverted", "any_int32")
HINTS = ("true", "half", "random", "any_int32", "minus_one", "zero", "one_position", "past_the_end")
GIVEN = ("chosen", "ascending", "unordered", "repeated", "any_int32", "none")
STATES = (
    *("unknown", "share", "zscore", "value", "either", "absurd", "infinite", "masked", "window"),
    *("zero", "one", "nan", "inf", "huge", "bits"),
)
POISONS = ("none", "nan", "inf")
MASKS = ("none", "row", "table")
SAMPLE_OUTPUTS = ("logprobs", "ranks", "counts", "kept", "kept_logprobs", "flags")
WIDEST_SAMPLED = 184_320
"""fp32 logits of the longest row that every GPU samples."""


@dataclass(frozen=True)
class Case:
    """One call of an op, or of both ops of blocks, before its tensors."""

    op: str
    seed: int  # of the tensors
    by_sort: bool  # a sort in NumPy is the oracle, where the scores are few enough
    requests: int  # of prefill: rows
    width: int
    k: int
    dtype: str  # a key of DTYPES
    contents: tuple[str, ...]  # kinds of row (CONTENTS)
    extents: tuple[str, ...]  # kinds of length (LENGTHS), of prefill kinds of window (WINDOWS)
    by_turns: bool  # kinds of row take turns from row to row, instead of one behind the other
    fresh: float  # share of its scores in which a row differs from the others of its kind
    poison: str  # what lies outside of a row's visible scores: "none" (other scores), "nan" or "inf"
    pad: int  # elements between rows
    shift: int  # elements by which the first row misses its alignment
    next_n: int = 1
    pdl: bool = False
    by_row: bool = False  # a length for each row, which differ within a request
    compress_ratio: int = 1
    path: str = "auto"
    counts: bool = False
    stats: bool = False
    page_size: int = 0  # 0: no page table
    holes: bool = False  # a part of the pages is not there
    cache_slots: bool = False  # the cache slots go beside the positions instead of in their place
    state: str = ""  # content of the state's words (STATES); empty: no state
    hints: tuple[str, ...] = ()  # kinds of previous choice (HINTS); empty: the state keeps no indices
    # "own": no row_slot; "shuffled": one per request, some without; "any": rows of a request differ.
    slots: str = "own"
    indices_pad: int = 0  # elements between slots of the indices
    hint_offset: int = 0
    next_state: bool = False  # what rows leave goes there, and the state is read alone
    clamp_pages: bool = False
    drop_masked: bool = False
    quantile_guess: bool = False
    ctas_per_row: int = 0
    max_ctas: int = 0
    table_requests: int = 0  # requests that rows of prefill are of; 0: no row_request, a row of tables a row
    offsets: bool = False
    streams: bool = False
    slices: int = 0  # slices that the columns of prefill come in; 0: all at once, without a carry
    block_k: int = 0  # blocks that are selected of a row
    given_k: int = 0  # positions that are selected in given blocks
    given: tuple[str, ...] = ()  # kinds of given blocks (GIVEN)
    given_blocks: int = 0  # how many are given for each row
    blocks_pad: int = 0  # elements between rows of given blocks
    starts: str = ""  # kind of the columns from which rows of blocks count (STARTS); empty: none
    by_tensor: tuple[str, ...] = ()  # parameters of the sampler that are tensors
    pinned: bool = False  # those of slots lie in pinned memory
    masks: str = "none"  # allowed tokens: a mask for each row, or a table of masks that rows name
    order: str = "vllm"
    noise: str = "cdf"
    logprob_mode: str = "raw"
    sampled: tuple[str, ...] = ()  # outputs of the sampler (SAMPLE_OUTPUTS), beside the token and its limits
    columns: int = 0  # of the kept tokens
    narrow: bool = False  # tokens are of int32
    n: int = 0  # largest values with log-probabilities

    @property
    def rows(self) -> int:
        return self.requests * self.next_n

    @property
    def table_rows(self) -> int:
        """Rows of the page table, and numbers of the offsets."""
        return self.table_requests or self.requests

    def optional(self) -> set[str]:
        """The optional arguments that the call has, beside its path."""
        return (self.as_json().keys() & _DEFAULTS.keys()) - {"path"}

    def as_json(self) -> dict[str, Any]:
        """The fields that the case does not leave at their defaults."""
        return {name: value for name, value in asdict(self).items() if value != _DEFAULTS.get(name, MISSING)}

    @classmethod
    def of_json(cls, text: str) -> "Case":
        """The case of what `as_json` gave."""
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in json.loads(text).items()
        }
        return cls(**values)


_DEFAULTS = {field.name: field.default for field in fields(Case) if field.default is not MISSING}


def _chance(draw: st.DrawFn, share: float) -> bool:
    """True in a share of the cases, in hundredths; the simplest case is without."""
    return draw(st.integers(1, 100)) > 100 - round(100 * share)


def _size(draw: st.DrawFn, low: int, high: int) -> int:
    """A number of ``[low, high]``, of any size alike."""
    bits = draw(st.integers(low.bit_length(), high.bit_length()))
    return draw(st.integers(max(low, 1 << bits - 1), min(high, (1 << bits) - 1)))


def _some(draw: st.DrawFn, kinds: Sequence[str], most: int) -> tuple[str, ...]:
    """One to `most` of the kinds; any may come twice."""
    return tuple(draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=most)))


def _pick(draw: st.DrawFn, *choices: Any) -> Any:
    return draw(st.sampled_from(choices))


def _width(draw: st.DrawFn, shortest: int, longest: int, near: int) -> int:
    """A width, in a part of the cases at most `near` columns from a power of two."""
    width = _size(draw, min(shortest, longest) if _chance(draw, 0.8) else 1, longest)
    if _chance(draw, 0.3):
        width = (1 << width.bit_length() - 1) + draw(st.integers(-near, near))
    return max(1, min(longest, width))


def _layout(draw: st.DrawFn) -> dict[str, Any]:
    """Fields that every op has, beside its sizes."""
    return {
        "seed": draw(st.integers(0, 2**24 - 1)),
        "by_sort": _chance(draw, 0.06),
        "dtype": _pick(draw, *DTYPES),
        "contents": _some(draw, tuple(CONTENTS), 3),
        "by_turns": _chance(draw, 0.6),
        "fresh": _pick(draw, 1.0, 1.0, 0.3, 0.01, 0.0),
        "poison": _pick(draw, *POISONS),
        "pad": _pick(draw, 0, 1, 3, 8, 64),
        "shift": _pick(draw, 0, 0, 1, 2, 3, 5),
        "pdl": _chance(draw, 0.3),
    }


def _lengths(draw: st.DrawFn, next_n: int, kinds: Sequence[str]) -> dict[str, Any]:
    return {
        "extents": _some(draw, kinds, 3) if _chance(draw, 0.6) else ("full",),
        "by_row": next_n > 1 and _chance(draw, 0.4),
        "compress_ratio": _pick(draw, 1, 1, 1, 4, 128),
    }


def _outputs(draw: st.DrawFn) -> dict[str, Any]:
    return {"counts": _chance(draw, 0.4), "stats": _chance(draw, 0.5)}


def _pages(draw: st.DrawFn, share: float) -> dict[str, Any]:
    if not _chance(draw, share):
        return {}
    return {
        "page_size": _pick(draw, 16, 1, 64, 1000, INT32.max),
        "holes": _chance(draw, 0.5),
        "cache_slots": _chance(draw, 0.5),
    }


def _has_plan(case: Case) -> bool:
    try:
        plan(
            rows=case.rows,
            width=case.width,
            k=case.k,
            dtype=DTYPES[case.dtype],
            path=case.path,
            ctas_per_row=case.ctas_per_row,
            max_ctas=case.max_ctas,
        )
    except ValueError:
        return False
    return True


@st.composite
def decode_cases(draw: st.DrawFn, elements: int) -> Case:
    """Calls of the decode op of at most about `elements` scores."""
    next_n = _pick(draw, 1, 1, 1, 1, 1, 1, 2, 2, 3, 4, 7)
    longest = min(elements // next_n, MAX_WIDTH if _chance(draw, 0.1) else 1 << 17)
    k = _pick(draw, *TUNED_K) if _chance(draw, 0.6) else _size(draw, 1, 5792)
    # Rows no longer than k have nothing to search: most cases are longer.
    width = _width(draw, k, longest, 1)
    state: dict[str, Any] = {}
    if _chance(draw, 0.8):
        state = {"state": _pick(draw, *STATES), "slots": _pick(draw, "own", "shuffled", "any")}
        if _chance(draw, 0.6):
            state["hints"] = _some(draw, HINTS, 2)
            state["indices_pad"] = _pick(draw, 0, 0, 1, 5)
            state["hint_offset"] = _pick(draw, 0, 0, 1, -1, 100, -MAX_WIDTH, MAX_WIDTH)
    pages = _pages(draw, 0.25)
    case = Case(
        op="decode",
        requests=_size(draw, 1, max(1, min(elements // (max(width, k) * next_n), 160))),
        next_n=next_n,
        width=width,
        k=k,
        **_layout(draw),
        **_lengths(draw, next_n, [kind for kind in LENGTHS if kind != "near_blocks"]),
        **_outputs(draw),
        **state,
        **pages,
        next_state=_chance(draw, 0.2),
        clamp_pages=bool(pages) and _chance(draw, 0.5),
        drop_masked=_chance(draw, 0.25),
        quantile_guess=_chance(draw, 0.5),
    )
    servable = [path for path in PATHS if _has_plan(replace(case, path=path))]
    case = replace(case, path=_pick(draw, *servable or ["auto"]))
    for name, share in (("ctas_per_row", 0.4), ("max_ctas", 0.3)):
        if _chance(draw, share):
            asked = replace(case, **{name: _pick(draw, *CTAS)})
            case = asked if _has_plan(asked) else case
    return case


PREFILL_PATH_NAMES = tuple(path.name.lower() for path in PREFILL_PATHS)


@st.composite
def prefill_cases(draw: st.DrawFn, elements: int) -> Case:
    """Calls of the prefill op of at most about `elements` scores."""
    longest = min(elements, MAX_WIDTH if _chance(draw, 0.1) else 1 << 16)
    k = _pick(draw, *TUNED_K) if _chance(draw, 0.5) else _size(draw, 1, 5792)
    width = _width(draw, 2 * k, longest, 1)
    most = max(1, min(elements // max(width, k), 700))
    # Rows are predicted where there are more of them than CTAs.
    rows = most if _chance(draw, 0.4) else _size(draw, 1, most)
    offsets, pages = _chance(draw, 0.4), _pages(draw, 0.3)
    if pages and offsets:
        pages["cache_slots"] = True
    has_table = offsets or bool(pages)
    outputs, slices = _outputs(draw), draw(st.integers(1, 6)) if _chance(draw, 0.3) else 0
    if slices:
        outputs["stats"] = False
    return Case(
        op="prefill",
        requests=rows,
        width=width,
        k=k,
        **_layout(draw),
        **outputs,
        **pages,
        extents=_some(draw, WINDOWS, 3) if _chance(draw, 0.6) else (_pick(draw, "full", "causal"),),
        table_requests=draw(st.integers(1, rows + 3)) if has_table and _chance(draw, 0.6) else 0,
        offsets=offsets,
        path=_pick(draw, *PREFILL_PATH_NAMES),
        streams=_chance(draw, 0.3),
        slices=slices,
    )


@st.composite
def blocks_cases(draw: st.DrawFn, elements: int) -> Case:
    """Calls of both ops of blocks of at most about `elements` scores."""
    next_n = _pick(draw, 1, 1, 1, 2, 3)
    block_k = 2048 if _chance(draw, 0.4) else _size(draw, 2, 2047)
    k = min(512, block_k - 1) if _chance(draw, 0.5) else draw(st.integers(0, block_k - 1))
    # Rows of no more than block_k blocks have all of them chosen: most cases are longer.
    limit = ONE_LAUNCH_BLOCKS_WIDTH
    shortest, longest = (limit, MAX_WIDTH) if _chance(draw, 0.2) else (BLOCK_SIZE * block_k, limit)
    width = _width(draw, shortest, min(elements // next_n, longest), 9)
    return Case(
        op="blocks",
        requests=_size(draw, 1, max(1, min(elements // (width * next_n), 160))),
        next_n=next_n,
        width=width,
        k=0 if _chance(draw, 0.1) else k,
        **_layout(draw),
        **_lengths(draw, next_n, LENGTHS),
        block_k=block_k,
        given_k=_pick(draw, 1, 512, _size(draw, 1, 18820)),
        given=_some(draw, GIVEN, 3),
        given_blocks=_pick(draw, 0, 1, 2048, block_k, draw(st.integers(1, MAX_CHOSEN_BLOCKS))),
        blocks_pad=_pick(draw, 0, 0, 1, 3),
        starts=_pick(draw, *STARTS) if _chance(draw, 0.4) else "",
        drop_masked=_chance(draw, 0.4),
    )


@st.composite
def sampling_cases(draw: st.DrawFn, elements: int) -> Case:
    """Calls of the sampler's ops of at most about `elements` logits."""
    width = _width(draw, 32, min(elements, WIDEST_SAMPLED), 9)
    outputs = draw(st.sets(st.sampled_from(SAMPLE_OUTPUTS)))
    if "kept" not in outputs:
        outputs.discard("kept_logprobs")
    by_tensor = draw(st.sets(st.sampled_from((*SLOT_PARAMETERS, "positions"))))
    return Case(
        op="sampling",
        requests=_size(draw, 1, max(1, min(elements // width, 300))),
        width=width,
        k=_size(draw, 1, 2048),
        **_layout(draw),
        extents=("full",),
        slots=_pick(draw, "own", "own", "any"),
        by_tensor=tuple(sorted(by_tensor)),
        pinned=_chance(draw, 0.3),
        masks=_pick(draw, *MASKS),
        order=_pick(draw, *(order.name.lower() for order in Order)),
        noise=_pick(draw, *(noise.name.lower() for noise in Noise)),
        logprob_mode=_pick(draw, *(mode.name.lower() for mode in LogprobMode)),
        sampled=tuple(sorted(outputs)),
        columns=_pick(draw, 0, 1, 300, _size(draw, 1, 5000)),
        narrow=_chance(draw, 0.3),
        n=min(width, _pick(draw, 0, 1, 20, 128, 1024, _size(draw, 1, 1024))),
    )


STRATEGIES = {
    "decode": decode_cases,
    "prefill": prefill_cases,
    "blocks": blocks_cases,
    "sampling": sampling_cases,
}


def cases(elements: int, ops: Sequence[str]) -> st.SearchStrategy[Case]:
    """Calls of some ops, each as often as `OPS` says, of at most about `elements` scores."""
    weighted = [STRATEGIES[op](elements) for op in ops for _ in range(OPS[op])]
    # Not `st.one_of`, which counts a strategy that comes several times as one.
    return st.integers(0, len(weighted) - 1).flatmap(weighted.__getitem__)


def draw_cases(strategy: st.SearchStrategy[Case], seed: int, count: int) -> list[Case]:
    """At most `count` cases, the simplest one first; the same for the same arguments and loaded modules."""
    drawn: dict[Case, None] = {}  # hypothesis repeats itself

    @hypothesis.seed(seed)
    @settings(
        max_examples=count,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        derandomize=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def keep(case: Case) -> None:
        drawn[case] = None

    collect: Callable[[], None] = keep
    collect()
    return list(drawn)
