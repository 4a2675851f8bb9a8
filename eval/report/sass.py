"""Warp collectives in machine code that lanes may reach apart.

A branch that only some lanes of a warp take ends at a BSYNC, where lanes should be together again. On an H200
they once were not (``cpp/kernels/ptx/warp.cuh``). Where the compiler expects that, it guards the
collective behind: a WARPSYNC, or a BRA.DIV to one. `unguarded` finds the collectives that a BSYNC, or the
return from a call, reaches without a guard on some path, and the branches inside from which a path without a
guard leads there. It reads the output of ``nvdisasm -c`` (with source lines: ``-gi``).

At the place that failed the region of the branch, from its BSSY to its BSYNC, spanned a block barrier: the
compiler had moved the BSSY ahead of the barrier. `Finding.spans_barrier` marks that.

It does not see lanes that part in a kernel without a BSSY ahead, nor whether lanes share a condition, which
`SAME_IN_ALL_LANES` says. What explains a finding is known by its file and the beginning of its source line.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, field

from eval.common.paths import KERNELS

NEED_NO_GUARD = ("cluster/row_job.cuh: if (ctx.ctas > 1) ptx::cluster_arrive_relaxed();",)
"""Collectives that lanes may reach apart: an arrival without .aligned."""

SAME_IN_ALL_LANES = (
    "cluster/predictor.cuh: if (by_value) {",
    "cluster/predictor.cuh: } else if (moments.are_known()) {",
    "cluster/predictor.cuh: if (kth > kMostFiniteKey) return",
    "cluster/predictor.cuh: if (kth < kLeastFiniteKey) return",
    "cluster/predictor.cuh: if (has_value(last)) {",
    "cluster/predictor.cuh: if (moments.are_known() && fabsf(moments.mean) <=",
    "cluster/predictor.cuh: if (is_z_score(last.z_score)) {",
    "cluster/row_job.cuh: return traits.has(LaunchTraits::kDraftRows) ?",
    "core/lane_ranks.cuh: for (int first = 0; first < count; first += kAtOnce) {",  # as many for each lane
    "core/row_view.cuh: return RowView<T>{data, p.width, aligned || p.width == 0",
    "cluster/select.cuh: if (2 * stride >= count) return;",  # a warp's keys, as many for each of its lanes
    "cluster/select.cuh: for (int i = kInRegisters * stride; i < count; i += stride)",
    "resident/cluster_tile.cuh: for (int j = 0; j < kVecs; ++j) {",  # up to the row's vectors in a lane
    "resident/cluster_tile.cuh: if (ctx.row.lead != 0 && begin < lane * vecs * kPerVec<T>) {",
    "resident/cluster_tile.cuh: if (length >= (32 - lane) * vecs * kPerVec<T>) return;",  # see there
    "resident/resolve_miss.cuh: const uint32_t at_tie_key = tie_key != kAbsentKey ?",
    "small_row/cta_tile.cuh: if (!may_pass_end || begin + kVecs * kGroup <= row.n) return;",  # a warp's
    "small_row/cta_tile.cuh: for (int first = 0; total != 0; first += kPerVec<T>) {",  # a sum over the warp
    "small_row/partition.cuh: for (uint32_t i = 0; i < partition.boundary_count; i += 4) {",
    "topk_items/kernel.cuh: typename SortShared<kSortThreads, kEach>::Sort(",  # CUB's scan: warp_id == 0
)
"""Branches whose conditions are the row's or its interval's: a whole warp's. No lanes part there, so their
regions may span a block barrier."""

WITHOUT_BARRIER = (
    "cluster/exchange.cuh: ptx::store_async_if(index < kHeaderVecs,",  # lanes that have nothing to send
    "cluster/exchange.cuh: ptx::store_async_if(there,",
    "cluster/exchange.cuh: for (uint32_t begin = 0; begin < sent;",  # all lanes make as many rounds with it
    "resident/cluster_tile.cuh: ptx::copy_async_before<kVec * kGroupBytes>(",  # lanes at the row's end
)
"""Branches behind which nothing but a BSYNC brings lanes together."""

AHEAD_OF_BLOCK_BARRIER = (
    "resident/count_and_emit.cuh: if (ctx.lane == 0) {",  # one lane adds the sums of its warp
    "resident/count_and_emit.cuh: if (has_tie_key) ptx::add_shared(",
    "resident/count_and_emit.cuh: if (inside != 0) {",  # lanes have different numbers of keys to list
    "resident/count_and_emit.cuh: uint32_t slot = atomicAdd(",
    "resident/count_and_emit.cuh: while (inside != 0) {",
    "resident/count_and_emit.cuh: if (last != first) ctx.list.put(",
    "resident/kernel.cuh: if (ctx.thread == 0) {",  # one thread keeps what is known of a missed guess
)
"""The same, if a block barrier is on every way to the collective. ptxas guards nothing behind one either."""

_FUNCTION = re.compile(r"^\s*\.text\.(\S+):$")
_LABEL = re.compile(r"^(\.L_x_\d+|\$\S+):")
_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\w+)\s+)?(\S+)(.*?);")
_SOURCE = re.compile(r'^\s*//## File "([^"]+)", line (\d+)')
_TARGET = re.compile(r"`\(([.$].+)\)")
_COLLECTIVE = re.compile(r"^(REDUX|SHFL|VOTE|VOTEU|MATCH|UCGABAR_\w+)(\.|$)")
_FLOW = re.compile(r"^(BRA|BRX|JM[PX]|CALL|RET|EXIT|BSSY|BSYNC|WARPSYNC|BAR)(\.|$)")

Step = tuple[int, tuple[int, ...]]
"""Index of an instruction, and of those to which the calls around it return."""


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
    def kind(self) -> str:
        return self.operation.partition(".")[0]

    @property
    def target(self) -> str:
        found = _TARGET.search(self.operands)
        return found[1] if found else ""

    @property
    def ends(self) -> bool:
        """Whether the next instruction does not follow it."""
        stops = self.kind in ("BRA", "CALL", "EXIT", "RET", "JMP", "JMX", "BRX")
        is_conditional = self.predicate or re.match(r"\s*!?U?P\d", self.operands)
        # The converged way goes on behind BRA.DIV; the other one meets a WARPSYNC.
        return stops and not is_conditional and "DIV" not in self.operation

    @property
    def may_separate(self) -> bool:
        """Whether it is a branch whose condition may differ from lane to lane."""
        varies = self.operation == "BRA" or self.kind == "RET"
        return varies and re.match(r"@!?P\d", self.predicate) is not None

    @property
    def guards(self) -> bool:
        return self.operation.startswith(("WARPSYNC", "BRA.DIV")) and not self.predicate

    @property
    def is_collective(self) -> bool:
        """Whether it wants all lanes: not what ptxas makes of atomic additions, or of predicates for itself.

        Its VOTEU puts a predicate where instructions for a whole warp read it: one that all lanes share, or
        one that says whether the thread is here that does the work. Lanes that are apart each get their own.
        """
        made_of = self.sources[0] if self.sources else "intrinsics"
        votes = self.kind == "VOTEU" and re.match(r"\s*UP\d", self.operands) and "intrinsics" not in made_of
        own = self.operands.endswith(", PT, PT ") or "atomic" in made_of or votes
        return bool(_COLLECTIVE.match(self.operation)) and not own


@dataclass
class Function:
    """A kernel with the functions that it calls."""

    name: str
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)

    def flow(self) -> tuple[list[Step], list[list[int]]]:
        """All steps, a called function's once for each call, and the numbers of those that may follow each.

        Raises KeyError for a jump whose target is not a label.
        """
        steps: list[Step] = [(0, ())]
        numbers = {steps[0]: 0}
        after = []
        for index, returns in steps:
            one = self.instructions[index]
            following = [] if one.ends else [(index + 1, returns)]
            if one.kind == "CALL":
                following.append((self.labels[one.target], (*returns, index + 1)))
            elif one.kind == "RET" and returns:
                following.append((returns[-1], returns[:-1]))
            elif one.kind in ("BRA", "BRX", "JMP", "JMX") and "DIV" not in one.operation:
                following.append((self.labels[one.target], returns))
            following = [step for step in following if step[0] < len(self.instructions)]
            for step in following:
                if step not in numbers:
                    numbers[step] = len(steps)
                    steps.append(step)
            after.append([numbers[step] for step in following])
        return steps, after


@dataclass(frozen=True, order=True)
class Finding:
    """A collective that the end of a region, a BSYNC or a call's return, reaches without a guard."""

    function: str
    branch: str  # its source line; without line information the address
    collective: str
    spans_barrier: bool  # a block barrier is ahead of the branch in the region
    behind_barrier: bool  # all ways from the region's end to the collective lead through a block barrier


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
            one = Instruction(int(address, 16), predicate or "", operation, operands, tuple(sources))
            if _COLLECTIVE.match(operation) or _FLOW.match(operation):
                function.instructions.append(one)
            is_new = True
    if function is not None:
        yield function


def unguarded(function: Function) -> list[Finding]:
    """Collectives that the end of a region reaches without a guard, with the branches in it; sorted."""
    steps, after = function.flow()
    ins = [function.instructions[index] for index, _ in steps]
    before: list[list[int]] = [[] for _ in steps]
    for number, following in enumerate(after):
        for each in following:
            before[each].append(number)
    guards = {number for number, one in enumerate(ins) if one.guards}
    barriers = {number for number, one in enumerate(ins) if one.kind == "BAR"}
    regions = _regions(function, steps)
    parted: dict[int, list[tuple[int, bool]]] = {}
    findings = set()
    for number, one in enumerate(ins):
        if not one.is_collective:
            continue
        near = _reached([number], before, guards | barriers)
        for closing in _reached([number], before, guards) & regions.keys():
            if closing not in parted:
                parted[closing] = []
                ahead = {i for i in _reached([closing], before, guards) if ins[i].may_separate}
                for opening in regions[closing]:
                    inside = _reached(after[opening], after, {closing})
                    behind = _reached(inside & barriers, after, {closing})
                    parted[closing] += [(i, i in behind) for i in inside & ahead]
            for branch, spans in parted[closing]:
                names = _named(ins[branch]), _named(one)
                findings.add(Finding(function.name, *names, spans, closing not in near))
    return sorted(findings)


def _regions(function: Function, steps: list[Step]) -> dict[int, list[int]]:
    """Where lanes should be together again, a BSYNC or the end of a call, with what opens the regions."""
    ins, numbers = function.instructions, {step: number for number, step in enumerate(steps)}
    syncs = {(i, one.operands.strip()) for i, one in enumerate(ins) if one.kind == "BSYNC"}
    found: dict[int, list[int]] = defaultdict(list)
    for opening, (index, returns) in enumerate(steps):
        closings = [index + 1] if ins[index].kind == "CALL" else []
        if ins[index].kind == "BSSY":
            end, barrier = function.labels[ins[index].target], ins[index].operands.split(",")[0].strip()
            closings = [i for i in (end - 1, end) if (i, barrier) in syncs]
        for closing in closings:
            if (closing, returns) in numbers:
                found[numbers[closing, returns]].append(opening)
    return found


def _reached(starts: Iterable[int], graph: list[list[int]], stops: Set[int]) -> set[int]:
    """Steps that ways from some lead to, these included, without the stops and what only they lead to."""
    seen, work = set(), list(starts)
    while work:
        number = work.pop()
        if number not in seen and number not in stops:
            seen.add(number)
            work += graph[number]
    return seen


def _named(one: Instruction) -> str:
    """Source line of an instruction: the innermost one of the kernels that is not a helper in ``ptx/``.

    In functions out of line ptxas mixes calls up, so that a helper may have the line of another call.
    """
    ours = [source for source in one.sources if "/" in source and not source.startswith(("/", "ptx/"))]
    return (ours or list(one.sources) or [f"{one.address:#x}"])[0]


def _source(line: str) -> str:
    """``folder/file: text`` of a ``folder/file:line``."""
    path, _, number = line.rpartition(":")
    lines = (KERNELS / path).read_text().splitlines() if (KERNELS / path).is_file() else []
    return f"{path}: {lines[int(number, 0) - 1].strip()}" if int(number, 0) <= len(lines) else line


def unexplained(findings: Iterable[Finding]) -> list[Finding]:
    """Findings that must not be: where lanes part, any whose region spans a barrier, too."""

    def is_explained(one: Finding) -> bool:
        branch = _source(one.branch)
        known = branch.startswith(WITHOUT_BARRIER) or _source(one.collective).startswith(NEED_NO_GUARD)
        known = known or (one.behind_barrier and branch.startswith(AHEAD_OF_BLOCK_BARRIER))
        return branch.startswith(SAME_IN_ALL_LANES) or (known and not one.spans_barrier)

    return [one for one in findings if not is_explained(one)]
