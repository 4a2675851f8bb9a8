"""A graph of launches over different rows whose every written word is compared on the device.

Each chain of decode steps has a stream of its own within the graph, so that launches of one configuration run
beside each other.

All that the launches of a workload write lies in one buffer of 32-bit words: results, cache slots, numbers of
items, what each step leaves, statistics, and guard words behind every block and between the rows of a block.
A second buffer holds what should be there once all launches have run, so that one small kernel compares
everything and puts poison back where the next launches write.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import gvr_topk
from eval.common.dtypes import DTYPES
from eval.fuzz.draw import Draw
from eval.fuzz.outputs import expected_outputs
from eval.stress.stress_cases import (
    CHAINS,
    SAMPLE_SETTINGS,
    Configuration,
    chain_steps,
    sample_parameters,
    visible_lengths,
)
from eval.stress.stress_library import TimeLog, neighbours_library, succeed
from gvr_topk import PrefillCarry, TopkState, indexer_topk_decode, ops, sampling
from gvr_topk.arguments import TopkItemsArguments
from gvr_topk.constants import STATE_FLOATS, STATE_UNKNOWN, StatsColumn
from gvr_topk.contract import exact_topk, row_lengths
from gvr_topk.sampling.arguments import LIMIT_WORDS

ROW_SETS = {"cuda": 64, "cpu": 8}
"""Different rows, with lengths of their own; a graph of more launches begins again with the first ones."""

_REWRITABLE_SETS = 2
"""The same where one kernel rewrites all rows."""

MOST_LAUNCHES = 1024
SCORES = 1 << 29
WORDS = 1 << 26
"""Limits of a graph: launches, the scores that they read, and the words of results that they write. Within
them a graph keeps the device busy for about a millisecond, so that the host keeps up."""

GUARD = -1515870811  # 0xA5A5A5A5; neither this nor the poison is ever a result
POISON = -7777
GUARD_WORDS = 4096
"""Guard words behind each block."""

_GAP = 32
"""Guard words between the rows of a block, so that a row which is too long does not hide in the next."""

_RESULT, _KEPT, _GUARDS = 0, 1, 2
"""Kinds of segment: what one launch writes; what launches leave to the next; guard words alone."""

_COUNTERS = ("launches", "wrong_launches", "wrong_words", "guard_words", "wrong_hints", "first", "got")


@dataclass(frozen=True)
class Counts:
    """What the comparisons have found since the last reset."""

    launches: int = 0  # that were compared
    wrong_launches: int = 0  # launches with a wrong result
    wrong_words: int = 0  # words that were wrong, in hints too
    guard_words: int = 0  # guard words that were overwritten
    wrong_hints: int = 0  # comparisons of a chain's hints that found another one than the last step's result
    first_wrong: str = ""  # where the first wrong word was, and what it held

    @property
    def clean(self) -> bool:
        return not (self.wrong_launches or self.wrong_words or self.guard_words or self.wrong_hints)


@dataclass(frozen=True)
class _Block:
    """Rows of words in the buffer; ``kind`` is that of its segment."""

    name: str
    first: int
    rows: int
    columns: int
    pitch: int
    kind: int

    @property
    def end(self) -> int:
        return self.first + self.rows * self.pitch

    def view(self, words: Tensor) -> Tensor:
        """Its words, ``[rows, columns]``."""
        rows = words[self.first : self.end].view(self.rows, self.pitch)
        return rows[:, : self.columns]


class _Layout:
    """Blocks one behind the other, with guard words before, between and behind."""

    def __init__(self) -> None:
        self.blocks: list[_Block] = []
        self.segments: list[tuple[int, int, int]] = [(0, GUARD_WORDS, _GUARDS)]

    @property
    def words(self) -> int:
        return self.segments[-1][1]

    def add(self, name: str, rows: int, columns: int, kind: int, gap: int, joined: bool = False) -> _Block:
        """Append a block, with a segment of its own or to the last one: a launch has one for its results."""
        block = _Block(name, self.words, rows, columns, columns + (gap if rows > 1 else 0), kind)
        self.blocks.append(block)
        # The guard words begin where the last row ends, and end at a multiple of 128 bytes.
        end = -(-(block.end + GUARD_WORDS) // 32) * 32
        first = self.segments.pop()[0] if joined else block.end if kind == _GUARDS else block.first
        self.segments.append((first, end, kind))
        return block

    def describe(self, word: int) -> str:
        """Name of the block that a word is in, with its row and column there."""
        block = max((b for b in self.blocks if b.first <= word), key=lambda b: b.first, default=None)
        if block is None:
            return f"guard word {word} before the first block"
        row, column = divmod(word - block.first, block.pitch)
        return f"{block.name} row {row} column {column}"


def graph_launches(configuration: Configuration, device: str) -> int:
    """Launches of a graph: a multiple of `ROW_SETS`."""
    sets, c = ROW_SETS[device], configuration
    if device == "cpu":
        return sets
    most = min(MOST_LAUNCHES, SCORES // (c.rows * c.width), WORDS // (c.rows * c.k * (1 + c.cache_slots)))
    return max(1, most // sets) * sets


class Workload:
    """Launches of one configuration over rows of their own, what they should write, and their graph.

    On the CPU launches run one by one, without a graph. A multiple of `ROW_SETS` launches has so many rows,
    any other number a row each; `graph_launches` is the default. Where they are rewritable, they share their
    lengths and two row buffers, so that one kernel can rewrite them all. They are one chain then, and a log
    gets the time between any two of them.
    """

    def __init__(
        self,
        configuration: Configuration,
        device: str,
        *,
        launches: int = 0,
        seed: int = 0,
        rewritable: bool = False,
    ) -> None:
        self.configuration = configuration
        self.device = device
        self.launches = launches or graph_launches(configuration, device)
        sets = _REWRITABLE_SETS if rewritable else ROW_SETS[device]
        self._row_sets = self.launches if self.launches % sets else sets
        self._rewritable = rewritable
        self._draw = Draw(device, 1_000_003 * seed + 17)
        self._make_inputs()
        self._make_words()
        inputs = {"seq_lens": self.seq_lens, "row_slot": self.row_slot, "parameters": self.parameters}
        inputs |= {"logits": self.logits} if rewritable else {}
        self._inputs_before = {name: its.clone() for name, its in inputs.items() if its is not None}
        self.counters = torch.zeros(len(_COUNTERS), dtype=torch.int64, device=device)
        self.log = TimeLog() if rewritable and device == "cuda" else None
        # Where neighbours hold many SMs, a cluster of a common stream could wait for one after the other.
        self.stream = torch.cuda.Stream(priority=-1) if device == "cuda" else None
        self._chain_streams = [
            torch.cuda.Stream(priority=-1) for _ in range(configuration.chains if device == "cuda" else 0)
        ]
        self._graph = self._capture() if device == "cuda" else None

    def _make_inputs(self) -> None:
        c = self.configuration
        count = min(_REWRITABLE_SETS, self.launches) if self._rewritable else self._row_sets
        dtype = DTYPES[c.dtype]
        self.logits = torch.full((count, c.rows, c.pitch), torch.nan, dtype=dtype, device=self.device)
        chains: dict[int, Iterator[Tensor]] = {}
        for launch in range(count):
            chain = launch % c.chains
            if chain not in chains:
                kind = CHAINS[chain % len(CHAINS)]
                chains[chain] = chain_steps(kind, (c.rows, c.width), self._draw)
            self.logits[launch, :, : c.width] = next(chains[chain])
        lengths = [c.width] if self._rewritable else [visible_lengths(c, i) for i in range(count)]
        self.seq_lens = torch.tensor(lengths, dtype=torch.int32, device=self.device)[:, None]
        self.seq_lens = self.seq_lens.repeat(1, c.requests)
        self.row_slot = None
        slots = torch.arange(c.requests)
        if c.row_slot:
            slots = Draw("cpu", c.slots).order(c.slots)[: c.requests]
            if c.requests >= 4:  # rows without a slot, as padding has none
                slots[1], slots[2] = -1, c.slots + 7
            self.row_slot = slots.repeat_interleave(c.next_n).to(self.device, torch.int32)
        self._slots = slots.tolist()
        self.page_table: Tensor | None = None
        self.offsets: Tensor | None = None
        self.parameters: Tensor | None = None
        table_rows = c.slots if c.is_prefill else c.requests
        if c.page_size:
            pages = max(1, c.width // c.page_size - 2)  # the last positions have no page
            order = self._draw.order(4 * table_rows * pages)
            self.page_table = order[: table_rows * pages].view(table_rows, pages).to(torch.int32)
        if c.is_prefill:
            self._make_windows(table_rows)
        if c.is_sample:
            turns = -(-c.slots // len(SAMPLE_SETTINGS))
            self.parameters = sample_parameters((SAMPLE_SETTINGS * turns)[: c.slots]).to(self.device)
            self._numbers = torch.arange(max(c.rows, c.slots), device=self.device)

    def _make_windows(self, requests: int) -> None:
        """A causal chunk of each request, whose windows begin at columns of their own and off alignment.

        Where the windows end takes the place of the lengths, also where these are rewritten.
        """
        c = self.configuration
        request = torch.arange(c.rows, device=self.device) // c.next_n
        self.row_starts = (7 * request % 61).to(torch.int32)
        lengths = torch.stack([row_lengths(seq_lens, c.rows, c.next_n) for seq_lens in self.seq_lens])
        if c.short_rows:
            chance = self._draw.uniform(*lengths.shape)
            lengths = torch.where(chance < 1 / 3, (3 * chance * (c.k + 1)).to(lengths.dtype), lengths)
        self.seq_lens = (lengths + self.row_starts).clamp(max=c.width).to(torch.int32)
        if c.offsets:
            self.offsets = 1000 * torch.arange(requests, dtype=torch.int32, device=self.device)

    def _make_words(self) -> None:
        c, layout = self.configuration, _Layout()
        gap = _GAP if c.aligned else _GAP + 1
        shapes = c.written
        self._written: dict[str, list[_Block]] = {name: [] for name in shapes}
        for i in range(self.launches):
            for at, (name, shape) in enumerate(shapes.items()):
                shown = f"{name if at else 'result'} of launch {i}"
                block = layout.add(shown, *shape, _RESULT, gap, joined=at > 0)
                self._written[name].append(block)

        def add(name: str, count: int, rows: int, columns: int, kind: int) -> list[_Block]:
            return [layout.add(f"{name} {i}", rows, columns, kind, gap) for i in range(count)]

        self._indices = add("indices of chain", c.chains * c.indices, c.slots, c.k, _KEPT)
        self._states = add(
            "state of chain", c.chains * (c.op == "decode"), 1, STATE_FLOATS * c.slots, _GUARDS
        )
        carries = add("carry of chain", c.chains * (c.slices > 0), 1, 2 * c.rows * (c.k + 1), _GUARDS)
        columns = c.rows * len(StatsColumn)
        self._stats = add("statistics of launch", self.launches * c.stats, 1, columns, _GUARDS)
        self._layout = layout
        self.segments = torch.tensor(layout.segments, dtype=torch.int64, device=self.device)
        self.expected = torch.full((layout.words,), GUARD, dtype=torch.int32, device=self.device)
        self._initial = self.expected.clone()
        for block in layout.blocks:
            block.view(self._initial).fill_(POISON)
        unknown = int(torch.tensor(STATE_UNKNOWN).view(torch.int32))
        for indices in self._indices:
            indices.view(self._initial).fill_(-1)
            indices.view(self.expected).fill_(-1)
        for state in self._states:
            state.view(self._initial).fill_(unknown)
        for launch in range(self.launches):
            self._expect(launch)
        for block in carries:
            block.view(self._initial).zero_()  # empty rows
        self.words = self._initial.clone()
        self._carries = [PrefillCarry(1, c.k, self.device) for _ in carries]
        for carry, block in zip(self._carries, carries, strict=True):
            carry.words = block.view(self.words).view(torch.int64).view(c.rows, c.k + 1)
        self._make_masks()

    def _expect(self, launch: int) -> None:
        """Write down what a launch writes and, after all earlier ones, what its chain's state keeps."""
        c = self.configuration
        same = launch - self._row_sets  # the launch before of the same rows, and of the same chain
        if same >= 0 and self._row_sets % c.chains == 0:
            for blocks in self._written.values():
                blocks[launch].view(self.expected).copy_(blocks[same].view(self.expected))
            return
        logits, seq_lens = self._inputs(launch)
        outputs = self._outputs(launch, self.expected)
        if c.runs_on_cpu:
            on_cpu = {name: output.cpu() for name, output in outputs.items()}
            self._run(launch, "cpu", on_cpu)
            for name, output in outputs.items():
                output.copy_(on_cpu[name])
            return
        if c.is_prefill:
            starts = self.row_starts.to(torch.int64)
            lengths = (seq_lens - starts).clamp(min=0)
            if self.row_slot is not None:
                has_request = (self.row_slot >= 0) & (self.row_slot < c.slots)
                lengths = torch.where(has_request, lengths, 0)
            positions = exact_topk(logits, lengths, c.k, starts)
        else:
            lengths = row_lengths(seq_lens, c.rows, c.next_n).clamp(max=c.width)
            positions = exact_topk(logits, lengths, c.k)
        expected = expected_outputs(
            positions,
            self._table_row(),
            page_table=self.page_table,
            page_size=c.page_size,
            cache_slots=c.cache_slots,
            offsets=self.offsets,
        )
        expected["counts"] = lengths.clamp(0, c.k)
        for name, output in outputs.items():
            output.copy_(expected[name])
        if not c.indices:
            return
        indices = self._indices[launch % c.chains].view(self.expected)
        for request, slot in enumerate(self._slots):
            if 0 <= slot < c.slots:
                indices[slot] = positions[request * c.next_n + c.next_n - 1]

    def _outputs(self, launch: int, words: Tensor) -> dict[str, Tensor]:
        """What a launch writes, in a buffer of words, by the name of the argument."""
        c = self.configuration
        found = {name: blocks[launch].view(words) for name, blocks in self._written.items()}
        if c.op == "topk":
            values, indices = found["values"].view(torch.float32), found["indices"].view(torch.int64)
            return {"values": values.view(c.rows, c.k), "indices": indices.view(c.rows, c.k)}
        if c.counts:
            found["counts"] = found["counts"][0]
        if c.is_sample:
            found["out"] = found["out"][0]
        if c.is_sample and not c.noise:
            found["logprobs"] = found["logprobs"][0].view(torch.float32)
            found["limits"] = found["limits"].view(-1, LIMIT_WORDS)
        return found

    def _run(self, launch: int, device: str, outputs: dict[str, Any]) -> None:
        """Run a launch of the sampler or of `topk` on a device."""
        if self.configuration.is_sample:
            self._sample(launch, device, outputs)
            return
        logits = self._inputs(launch)[0].to(device)
        ops.launch(TopkItemsArguments(logits, **outputs, sorted=1))

    def _sample(self, launch: int, device: str, outputs: dict[str, Any]) -> None:
        """Sample the rows of a launch on a device, whose seeds and positions are their numbers."""
        c = self.configuration
        assert self.parameters is not None
        temperature, top_k, top_p, min_p = (words.to(device) for words in self.parameters)
        sampling.sample(
            self._inputs(launch)[0].to(device),
            temperature=temperature.view(torch.float32),
            top_k=top_k,
            top_p=top_p.view(torch.float32),
            min_p=min_p.view(torch.float32),
            seeds=self._numbers[: c.slots].to(device),
            positions=self._numbers[: c.rows].to(device),
            slots=None if self.row_slot is None else self.row_slot.to(device),
            noise="murmur" if c.noise else "cdf",
            pdl=c.pdl,
            **outputs,
        )

    def _table_row(self) -> Tensor:
        """Row of the tables for each row of scores; any number for rows of no request."""
        c = self.configuration
        if self.row_slot is not None and c.is_prefill:
            return self.row_slot.to(torch.int64).clamp(0, c.slots - 1)
        return torch.arange(c.rows, device=self.device) // c.next_n

    def _make_masks(self) -> None:
        """For `_check_by_torch`: the segment of each word, or one past the last, and which to poison."""
        if self.device == "cuda" and neighbours_library() is not None:
            return
        count = len(self._layout.segments)
        self._segment_of = torch.full((len(self.words),), count, dtype=torch.int64, device=self.device)
        for index, (first, end, _) in enumerate(self._layout.segments):
            self._segment_of[first:end] = index
        kinds = torch.tensor([kind for *_, kind in self._layout.segments] + [_GUARDS], device=self.device)
        self._is_result = kinds == _RESULT
        self._checked = self._segment_of < count
        self._is_guard = self._checked & (self.expected == GUARD)
        self._poisoned = self._is_result[self._segment_of] & ~self._is_guard

    def _inputs(self, launch: int) -> tuple[Tensor, Tensor]:
        logits = self.logits[launch % len(self.logits), :, : self.configuration.width]
        return logits, self.seq_lens[launch % len(self.seq_lens)]

    def _launch(self, launch: int) -> None:
        c, chain = self.configuration, launch % self.configuration.chains
        outputs: dict[str, Any] = self._outputs(launch, self.words)
        if c.runs_on_cpu:
            self._run(launch, self.device, outputs)
            return
        logits, seq_lens = self._inputs(launch)
        if self._stats:
            outputs["stats"] = self._stats[launch].view(self.words).view(c.rows, len(StatsColumn))
        tables: dict[str, Any] = {"page_table": self.page_table, "page_size": c.page_size}
        if c.is_prefill:
            tables |= {"row_request": self.row_slot, "offsets": self.offsets}
            carry = self._carries[chain] if c.slices else None
            slices = c.slices or 1
            bounds = [c.width * number // slices for number in range(slices + 1)]
            for begin, end in itertools.pairwise(bounds):
                gvr_topk.indexer_topk_prefill(
                    logits[:, begin:end],
                    self.row_starts,
                    seq_lens,
                    c.k,
                    carry=carry,
                    column=begin,
                    path=c.path,
                    pdl=c.pdl,
                    **(tables | outputs if end == c.width else {}),
                )
            return
        words = self._states[chain].view(self.words).view(torch.float32).view(-1, STATE_FLOATS)
        indices = self._indices[chain].view(self.words) if c.indices else None
        indexer_topk_decode(
            logits,
            seq_lens,
            c.k,
            next_n=c.next_n,
            state=TopkState.of(words, indices, c.k),
            row_slot=self.row_slot,
            path=c.path,
            pdl=c.pdl,
            **tables,
            **outputs,
        )

    def run_once(self) -> None:
        """Launch everything, each chain on a stream of its own, and then compare on the current stream."""
        if not self._chain_streams:
            for launch in range(self.launches):
                self._launch(launch)
        else:
            current = torch.cuda.current_stream()
            for stream in self._chain_streams:
                stream.wait_stream(current)
            for launch in range(self.launches):
                with torch.cuda.stream(self._chain_streams[launch % self.configuration.chains]):
                    self._stamp(begins=True, when=launch == 0)
                    self._launch(launch)
                    self._stamp(begins=False)
            for stream in self._chain_streams:
                current.wait_stream(stream)
        self.check()

    def _stamp(self, *, begins: bool, when: bool = True) -> None:
        """Add the time to the log, if there is one."""
        library = neighbours_library()
        if self.log is not None and library is not None and when:
            stream = torch.cuda.current_stream().cuda_stream
            succeed(library.gvr_topk_stamp(stream, *self.log.arguments, int(begins)))

    def _capture(self) -> torch.cuda.CUDAGraph:
        assert self.stream is not None
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            self.run_once()  # loads every kernel, which a capture must not
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            self.run_once()
        torch.cuda.synchronize()
        self.reset()
        return graph

    def replay(self) -> None:
        """Launch everything once more, on the workload's stream; returns before it has run."""
        if self._graph is None or self.stream is None:
            self.run_once()
            return
        with torch.cuda.stream(self.stream):
            self._graph.replay()

    def reset(self) -> None:
        """Take everything back to the state before the first launch; waits for the device."""
        self.words.copy_(self._initial)
        self.counters.zero_()
        if self.log is not None:
            self.log.clear()
        self._synchronize()

    def _synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def check(self) -> None:
        """Compare every word with the expected one, count, and poison the results, on the current stream."""
        library = neighbours_library()
        if self.device == "cpu" or library is None:
            self._check_by_torch()
            return
        succeed(
            library.gvr_topk_check_words(
                torch.cuda.current_stream().cuda_stream,
                self.words.data_ptr(),
                self.expected.data_ptr(),
                self.segments.data_ptr(),
                len(self.segments),
                self.counters.data_ptr(),
            )
        )

    def _check_by_torch(self) -> None:
        """The same in operations of torch, none of which depends on what is found."""
        differ = (self.words != self.expected) & self._checked
        wrong = differ & ~self._is_guard
        per_segment = torch.zeros(len(self._is_result), dtype=torch.int64, device=self.device)
        per_segment.index_add_(0, self._segment_of, wrong.to(torch.int64))
        any_wrong = per_segment > 0
        index = wrong.to(torch.int8).argmax()
        new = (wrong.any() & (self.counters[5] == 0)).to(torch.int64)
        got = self.words.index_select(0, index.view(1))[0].to(torch.int64)
        self.counters += torch.stack(
            [
                self._is_result.sum(),
                (any_wrong & self._is_result).sum(),
                wrong.sum(),
                (differ & self._is_guard).sum(),
                (any_wrong & ~self._is_result).sum(),
                new * (index + 1),
                new * got,
            ]
        )
        self.words.masked_fill_(self._is_guard, GUARD).masked_fill_(self._poisoned, POISON)

    def counts(self) -> Counts:
        """What has been found; waits for the device."""
        self._synchronize()
        found = self.counters.tolist()
        where = ""
        if found[5] > 0:
            word = found[5] - 1
            where = f"{self._layout.describe(word)}: wanted {int(self.expected[word])}, got {found[6]}"
        launches, wrong_launches, wrong_words, guard_words, wrong_hints = found[:5]
        return Counts(launches, wrong_launches, wrong_words, guard_words, wrong_hints, where)

    def tensor(self, name: str) -> Tensor:
        """A tensor that may be rewritten while launches run, two-dimensional, with inner stride 1."""
        assert self._rewritable
        if name == "indices":
            return self._indices[0].view(self.words)
        if name == "state":
            return self._states[0].view(self.words).view(torch.float32)
        if name == "carry":
            return self._carries[0].words.view(torch.int32)
        tensor: Tensor = getattr(self, name)
        return tensor.view(-1, tensor.shape[-1])

    def restore(self) -> None:
        """Make the inputs again what they were, but for the state, which may hold anything; no counts stay.

        Slots that no row writes are made again what they were, because they are compared.
        """
        for name, before in self._inputs_before.items():
            getattr(self, name).copy_(before)
        for carry in self._carries:
            carry.reset()
        for indices in self._indices:
            now, before = indices.view(self.words), indices.view(self._initial)
            for slot in set(range(self.configuration.slots)) - set(self._slots):
                now[slot] = before[slot]
        self.counters.zero_()
        self._synchronize()
