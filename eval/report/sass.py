"""Warp collectives in machine code that lanes may reach apart.

A branch that only some lanes of a warp take ends at a BSYNC, where lanes should be together again. On an H200
they once were not (``cpp/kernels/ptx/warp.cuh``). Where the compiler expects that, it guards the
collective behind: a WARPSYNC, or a BRA.DIV to one. `unguarded` finds the collectives that a BSYNC reaches
without a guard on some path, in the output of ``nvdisasm -c`` (with source lines: ``-gi``).

At the place that failed the region of the branch, from its BSSY to its BSYNC, spanned a block barrier: the
compiler had moved the BSSY ahead of the barrier. `Finding.spans_barrier` marks that.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from eval.common.paths import KERNELS

_OF_ONE_THREAD = "no collective of the sources: ptxas asks whether the one thread is here that does the work"

EXPLAINED: dict[str, str] = {
    "cluster/row_job.cuh: arrive_at_start": "an arrival without .aligned: lanes need not be together",
    "cluster/row_job.cuh: init_barriers": _OF_ONE_THREAD,
    "streaming/kernel.cuh: prefetch_row": _OF_ONE_THREAD,
    "prefill_short/prefill_tile.cuh: fetch": _OF_ONE_THREAD,
}
"""Why collectives need no guard, by file and function; none is behind a region that spans a barrier."""

SAME_IN_ALL_LANES = {
    "cluster/exchange.cuh: if (ctx.ctas > 1) {",  # a launch's; what it stores is in `WITHOUT_BARRIER`
    "cluster/predictor.cuh: if (by_value) {",
    "cluster/predictor.cuh: if (kth > kMostFiniteKey) return StepState{kStateInfinite, 0.0f, 0.0f, 0};",
    (
        "cluster/predictor.cuh: "
        "if (moments.are_known() && fabsf(moments.mean) <= kMaxOffsetSigmas * moments.deviation) {"
    ),
    "cluster/sample.cuh: for (int e = 0; e < kSampleVec; ++e) {",  # in each round `at_once`
    "cluster/select.cuh: if (2 * stride >= count) return;",  # the keys of a warp
    "core/chunked_store.cuh: for (int first = 0; first < count; first += 32 * kAtOnce) {",  # a warp's items
    "resident/count_and_emit.cuh: if (tie_key != kAbsentKey) {",
    "resident/cluster_tile.cuh: for (int j = 0; j < kVecs; ++j) {",  # up to the row's vectors in a lane
    "resident/cluster_tile.cuh: if (length >= (32 - lane) * vecs * kPerVec<T>) return;",  # see there
    (
        "resident/resolve_miss.cuh: "
        "const uint32_t at_tie_key = tie_key != kAbsentKey ? inside & equal_to(tie_key) : 0;"
    ),
    "small_row/cta_tile.cuh: if (!may_pass_end || begin + kVecs * kGroup <= n) return;",  # a warp's elements
    "small_row/cta_tile.cuh: for (int first = 0; total != 0; first += kPerVec<T>) {",  # a sum over the warp
    (
        "small_row/partition.cuh: for (uint32_t i = 0; i < partition.boundary_count; i += 4) {"
        "  // Absent elements are greater than none."
    ),
}
"""Branches, by file and source text, whose conditions are the row's or its interval's: a whole warp's."""

WITHOUT_BARRIER = {
    "cluster/exchange.cuh: store_to_peers": "lanes that have nothing to send",
    "cluster/row_job.cuh: agree_on_length": "one thread publishes what it has read",
    "resident/cluster_tile.cuh: fetch": "lanes at the row's end, where vectors are not whole",
    "resident/cluster_tile.cuh: copy_before": "lanes at the row's end",
}
"""Branches, by file and function, of rows that registers hold. A barrier would cost too much there."""

_FUNCTION = re.compile(r"^\s*\.text\.(\S+):$")
_LABEL = re.compile(r"^(\.L_x_\d+|\$\S+):")
_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\w+)\s+)?(\S+)(.*?);")
_SOURCE = re.compile(r'^\s*//## File "([^"]+)", line (\d+)')
_TARGET = re.compile(r"`\((\.L_x_\d+)\)")
_BARRIER = re.compile(r"\bB\d+\b")
_COLLECTIVE = re.compile(r"^(REDUX|SHFL|VOTE|VOTEU|MATCH|UCGABAR_\w+)(\.|$)")


@dataclass(frozen=True)
class Instruction:
    """One instruction: address, predicate (empty if it has none), operation, operands, and source lines.

    The lines are ``folder/file:line`` below ``kernels/``, from the innermost inlined function outwards. There
    are none without line information.
    """

    address: int
    predicate: str
    operation: str
    operands: str
    sources: tuple[str, ...] = ()

    @property
    def target(self) -> str | None:
        found = _TARGET.search(self.operands)
        return found[1] if found else None

    @property
    def ends(self) -> bool:
        """Whether nothing follows it."""
        stops = self.operation.partition(".")[0] in ("BRA", "EXIT", "RET", "JMP", "BRX")
        # The converged way goes on behind BRA.DIV; the other one meets a WARPSYNC.
        return stops and not self.predicate and not self._is_conditional and "DIV" not in self.operation

    @property
    def _is_conditional(self) -> bool:
        return re.match(r"\s*!?U?P\d", self.operands) is not None

    @property
    def may_separate(self) -> bool:
        """Whether it is a branch whose condition may differ from lane to lane."""
        return self.operation == "BRA" and re.match(r"@!?P\d", self.predicate) is not None

    @property
    def guards(self) -> bool:
        return self.operation.startswith(("WARPSYNC", "BRA.DIV"))

    @property
    def is_collective(self) -> bool:
        """Whether it wants all lanes: not what ptxas makes of atomic additions."""
        own = self.operands.endswith(", PT, PT ") or (self.sources and "atomic" in self.sources[0])
        return bool(_COLLECTIVE.match(self.operation)) and not own


@dataclass
class Function:
    """A kernel, or a function that one calls."""

    name: str
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)

    def successors(self) -> list[list[int]]:
        """Indices of the instructions that may follow each one."""
        count = len(self.instructions)
        found: list[list[int]] = []
        for index, one in enumerate(self.instructions):
            after = [] if one.ends else [index + 1]
            if one.operation.startswith("BRA") and "DIV" not in one.operation and one.target in self.labels:
                after.append(self.labels[one.target])
            found.append([i for i in after if i < count])
        return found


@dataclass(frozen=True)
class Finding:
    """A collective that a BSYNC reaches without a guard."""

    function: str
    branch: str  # its source line; without line information the address
    collective: str
    spans_barrier: bool  # a block barrier is ahead of the branch, in the region that the BSYNC closes


def parse(lines: Iterable[str]) -> Iterator[Function]:
    """Functions in the output of ``nvdisasm``."""
    function: Function | None = None
    sources: list[str] = []
    is_new = True  # the next source line begins the lines of another instruction
    for line in lines:
        if match := _FUNCTION.match(line):
            if function is not None:
                yield function
            function, sources, is_new = Function(match[1]), [], True
        elif function is None:
            continue
        elif match := _SOURCE.match(line):
            sources = [] if is_new else sources
            sources.append(match[1].rpartition("/kernels/")[2] + f":{match[2]}")
            is_new = False
        elif match := _LABEL.match(line):
            function.labels[match[1]] = len(function.instructions)
        elif match := _INSTRUCTION.match(line):
            address, predicate, operation, operands = match.groups()
            function.instructions.append(
                Instruction(int(address, 16), predicate or "", operation, operands, tuple(sources))
            )
            is_new = True
    if function is not None:
        yield function


def unguarded(function: Function) -> list[Finding]:
    """Collectives that a BSYNC reaches without a guard, with the branches that it closes; sorted."""
    ins, after = function.instructions, function.successors()
    reaching = _open_branches(function, after)
    regions: dict[int, list[tuple[int, bool]]] = {}
    findings = set()
    for index, one in enumerate(ins):
        if not one.is_collective:
            continue
        for closing in reaching.get(index, frozenset()):
            if closing not in regions:
                regions[closing] = _branches_closed_by(function, closing, after)
            for branch, spans in regions[closing]:
                findings.add(Finding(function.name, _named(ins[branch]), _named(one), spans))
    return sorted(findings, key=lambda f: (f.collective, f.branch, f.spans_barrier))


def _open_branches(function: Function, after: list[list[int]]) -> dict[int, frozenset[int]]:
    """For each instruction that is reached the BSYNCs from which a way without a guard leads to it."""
    ins = function.instructions
    starts = [0, *(at for name, at in function.labels.items() if name.startswith("$"))]
    state: dict[int, frozenset[int]] = {start: frozenset() for start in starts if start < len(ins)}
    work = list(state)
    while work:
        index = work.pop()
        one = ins[index]
        if one.guards:
            out: frozenset[int] = frozenset()
        elif one.operation.startswith("BSYNC"):
            out = frozenset({index})
        else:
            out = state[index]
        for following in after[index]:
            known = state.get(following)
            merged = out if known is None else known | out
            if merged != known:
                state[following] = merged
                work.append(following)
    return state


def _branches_closed_by(function: Function, closing: int, after: list[list[int]]) -> list[tuple[int, bool]]:
    """Branches that may separate lanes in the regions that a BSYNC closes, and whether a barrier is ahead.

    Of each region the first branch, and the first one behind a block barrier.
    """
    ins = function.instructions
    found = []
    for opening, one in enumerate(ins):
        if not one.operation.startswith("BSSY") or one.target not in function.labels:
            continue
        end = function.labels[one.target]
        same = _BARRIER.findall(one.operands)[:1] == _BARRIER.findall(ins[closing].operands)[:1]
        if not same or closing not in (end, end - 1):
            continue
        inside = _reached(opening + 1, after, stop=closing)
        branches = sorted(i for i in inside if ins[i].may_separate)
        barriers = [i for i in inside if ins[i].operation.startswith("BAR.")]
        behind: set[int] = set()
        for barrier in barriers:
            behind |= _reached(barrier, after, stop=closing)
        found += [(i, False) for i in branches[:1]]
        found += [(i, True) for i in branches if i in behind][:1]
    return found


def _reached(start: int, after: list[list[int]], stop: int) -> set[int]:
    """Instructions on the ways from one to another, without the other."""
    seen, work = set(), [start]
    while work:
        index = work.pop()
        if index == stop or index in seen:
            continue
        seen.add(index)
        work += after[index]
    return seen


def _named(one: Instruction) -> str:
    """Source line of an instruction: the innermost one of the kernels that is not a helper in ``ptx/``."""
    ours = [source for source in one.sources if "/" in source and not source.startswith(("/", "ptx/"))]
    return (ours or list(one.sources) or [f"{one.address:#x}"])[0]


def enclosing_function(line: str, kernels: Path = KERNELS) -> str:
    """``folder/file: function`` of a ``folder/file:line``, which stays the same when lines move.

    ptxas often gives an instruction the line of another one beside it, so the line itself would not.
    """
    path, _, number = line.rpartition(":")
    file = kernels / path
    lines = file.read_text().splitlines()[: int(number, 0)] if file.is_file() else []
    for at in range(len(lines) - 1, -1, -1):
        if re.match(r"\s*(inline )?(static )?(__(device|global)__|GVR_DEVICE)", lines[at]):
            names = re.findall(r"\b(?!__)(\w+)\(", " ".join(lines[at : at + 2]))
            return f"{path}: {names[0]}" if names else line
    return line


def _source(line: str) -> str:
    """``folder/file: text`` of a ``folder/file:line``."""
    path, _, number = line.rpartition(":")
    file = KERNELS / path
    return f"{path}: {file.read_text().splitlines()[int(number, 0) - 1].strip()}" if file.is_file() else line


def unexplained(findings: Iterable[Finding]) -> list[Finding]:
    """Findings that must not be: those that nothing here explains, and any whose region spans a barrier."""
    return [
        one
        for one in findings
        if one.spans_barrier
        or not (
            enclosing_function(one.collective) in EXPLAINED
            or enclosing_function(one.branch) in WITHOUT_BARRIER
            or _source(one.branch) in SAME_IN_ALL_LANES
        )
    ]
