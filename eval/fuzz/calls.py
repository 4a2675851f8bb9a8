"""The tensors of a case, the call of its op, and everything that the call writes beside what it has to write.

An op of a case is a function that makes the tensors and returns the call: each time it launches on poisoned
outputs with guard columns, and yields ``(name, got, wanted)``.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eval.common.dtypes import DTYPES
from eval.fuzz.cases import Case
from eval.fuzz.contents import CONTENTS
from eval.fuzz.draw import Draw
from eval.fuzz.outputs import INT32, expected_outputs
from gvr_topk.arguments import (
    BlocksArguments,
    DecodeArguments,
    InBlocksArguments,
    PrefillArguments,
    PrefillSliceArguments,
)
from gvr_topk.constants import (
    BLOCK_SIZE,
    FLAG_CLAMP_PAGES,
    FLAG_DROP_MASKED,
    FLAG_PDL,
    FLAG_QUANTILE_GUESS,
    FLAG_STREAMS,
    STATE_FLOATS,
    STATE_INFINITE,
    STATE_MASKED,
    STATE_UNKNOWN,
    STATE_VALUE_ONLY,
    STATE_ZSCORE_ORIGIN,
    HintReason,
    StatsColumn,
)
from gvr_topk.contract import best_blocks, exact_topk, exact_topk_in_blocks, order_key, row_lengths
from gvr_topk.evaluation.oracle import drop_masked_positions, sorted_blocks, sorted_in_blocks, sorted_topk
from gvr_topk.ops import launch
from gvr_topk.policy import parse_path
from gvr_topk.sampling import reference
from gvr_topk.sampling.arguments import (
    LIMIT_WORDS,
    SLOT_PARAMETERS,
    ApplyLimitsArguments,
    LogprobMode,
    Noise,
    Order,
    RenormArguments,
    SampleArguments,
    TopkLogprobsArguments,
    VerifyArguments,
)
from gvr_topk.state import TopkState

POISON = -7777
GUARD_COLUMNS = 3
SORTED_SCORES = 1 << 20
"""On a GPU the oracle is the sort in NumPy for no more scores than that."""

Written = Iterator[tuple[str, Tensor, Tensor]]
"""What a call has written: its name, what is there, and what has to be there."""


class Mismatch(AssertionError):
    """The op broke its contract."""


def checks_by_sort(case: Case, device: str) -> bool:
    """Whether the sort in NumPy is the oracle: on the CPU, whose op is the contract's, of all cases.

    On a GPU the sampler's ops have another oracle in all cases, their CPU implementation.
    """
    sorts = case.by_sort and case.op != "sampling" and case.rows * case.width <= SORTED_SCORES
    return device == "cpu" or sorts


def oracles(case: Case, device: str) -> tuple[Callable[..., Tensor], ...]:
    """Functions that select positions, blocks, and positions in given blocks, on the logits' device."""
    if not checks_by_sort(case, device):
        return exact_topk, best_blocks, exact_topk_in_blocks

    def on_cpu(oracle: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def moved(logits: Tensor, *rest: Tensor | int, **options: bool) -> Tensor:
            others = [part.cpu() if isinstance(part, Tensor) else part for part in rest]
            return oracle(logits.cpu(), *others, **options).to(logits.device)

        return moved

    return on_cpu(sorted_topk), on_cpu(sorted_blocks), on_cpu(sorted_in_blocks)


def _moved_to_front(logits: Tensor, starts: Tensor) -> Tensor:
    """Rows from these columns on, where the oracles take them."""
    width = logits.shape[1]
    columns = starts[:, None] + torch.arange(width, device=logits.device)
    return logits.gather(1, columns.clamp(max=width - 1))


def make_call(case: Case, device: str) -> Callable[[], Written]:
    """The call of a case, with its tensors on a device."""
    draw = Draw(device, case.seed)
    ops = {"decode": _decode, "prefill": _prefill, "blocks": _blocks, "sampling": _sampling}
    return ops[case.op](case, draw)


def poisoned(*shape: int, device: torch.device) -> Tensor:
    return torch.full(shape, POISON, dtype=torch.int32, device=device)


def _guarded(wanted: Tensor) -> tuple[Tensor, Tensor]:
    """A poisoned result with guard columns, and what it has to be."""
    rows, columns = wanted.shape
    result = poisoned(rows, columns + GUARD_COLUMNS, device=wanted.device)
    expected = result.clone()
    expected[:, :columns] = wanted
    return result, expected


def _behind_guards(counts: Tensor) -> Tensor:
    """Counts as a row of words, for guards before the first one, too."""
    return torch.cat((poisoned(GUARD_COLUMNS, device=counts.device), counts.to(torch.int32)))[None]


def _guarded_words(wanted: Tensor, device: torch.device, *, gaps: bool = True) -> tuple[Tensor, ...]:
    """A poisoned result like `wanted`, its words and guards, and what those have to be.

    A result of two dimensions has guards behind each row, or behind the last one alone.
    """
    rows = len(wanted) if gaps and wanted.dim() == 2 else 1
    words = wanted.contiguous().view(rows, wanted.numel() // rows).view(torch.int32).to(device)
    columns = words.shape[1]
    buffer = poisoned(rows, columns + 2 * GUARD_COLUMNS, device=device)
    expected = buffer.clone()
    expected[:, :columns] = words
    return buffer[:, :columns].view(wanted.dtype).view(wanted.shape), buffer, expected


def _decode(case: Case, draw: Draw) -> Callable[[], Written]:
    device = draw.device
    logits, seq_lens, page_table = _logits(case, draw), _seq_lens(case, draw), _page_table(case, draw)
    covered = case.width
    if case.clamp_pages and page_table is not None:
        covered = min(covered, page_table.shape[1] * case.page_size)
    visible = _visible(case, seq_lens).clamp(max=covered)
    _poison(case, logits, torch.zeros_like(visible), visible)
    largest = oracles(case, device.type)[0](logits, visible, case.k)
    wanted = drop_masked_positions(logits, largest) if case.drop_masked else largest
    kept = row_slot = None
    if case.state:
        slots = case.requests if case.slots == "own" else case.rows + 2
        row_slot = None if case.slots == "own" else _row_slots(case, slots, draw)
        kth = kth_values(logits, largest)[torch.arange(slots, device=device) % case.rows]
        kept = TopkState.of(
            state_words(case.state, kth, draw),
            _indices(case, slots, wanted, draw) if case.hints else None,
            case.k,
        )
    writers = {} if kept is None or case.next_state else _writers(case, kept.slots, row_slot)
    expected_indices = None
    if kept is not None:
        before = kept.words.clone()
        if kept.indices is not None:
            expected_indices = kept.indices.clone()
            for slot, row in writers.items():
                expected_indices[slot] = wanted[row]
    request = torch.arange(case.rows, device=device) // case.next_n
    expected = expected_outputs(
        wanted, request, page_table=page_table, page_size=case.page_size, cache_slots=case.cache_slots
    )
    if case.counts:
        expected["counts"] = _behind_guards((wanted >= 0).sum(dim=1))
    lengths = visible.tolist()

    def call() -> Written:
        results = {name: _guarded(its) for name, its in expected.items()}
        # A guard row before and behind.
        left = torch.full((case.rows + 2, STATE_FLOATS), float(POISON), device=device)
        arguments = DecodeArguments(
            logits=logits,
            seq_lens=seq_lens,
            row_slot=row_slot,
            state=None if kept is None else kept.words,
            indices=None if kept is None else kept.indices,
            next_state=left[1:-1] if case.next_state else None,
            page_table=page_table,
            k=case.k,
            next_n=case.next_n,
            page_size=case.page_size,
            path=parse_path(case.path),
            max_ctas=case.max_ctas,
            flags=FLAG_QUANTILE_GUESS * case.quantile_guess
            + FLAG_PDL * case.pdl
            + FLAG_CLAMP_PAGES * case.clamp_pages
            + FLAG_DROP_MASKED * case.drop_masked,
            hint_offset=case.hint_offset,
            ctas_per_row=case.ctas_per_row,
            compress_ratio=case.compress_ratio,
            **_outputs(case, results, device),
        )
        launch(arguments)
        yield from _written(arguments, results)
        if kept is not None:
            if kept.indices is not None and expected_indices is not None:
                yield "indices", kept.indices, expected_indices
            # As bits: what other slots hold may be any NaN.
            untouched = torch.ones(kept.slots, dtype=torch.bool, device=device)
            untouched[list(writers)] = False
            now, old = (words[untouched].view(torch.int32) for words in (kept.words, before))
            yield "words of other slots", now, old
            # The paper's kernel leaves nothing where the state keeps no indices.
            if kept.indices is not None or case.path != "paper_gvr":
                for slot, row in writers.items():
                    if lengths[row] > case.k:
                        _check_kind(f"words: slot {slot}", float(kept.words[slot, 0]))
        if case.next_state:
            yield "next_state: before and behind the rows", left[[0, -1]], torch.full_like(left[:2], POISON)
            for row, (kind, visible_scores) in enumerate(zip(left[1:-1, 0].tolist(), lengths, strict=True)):
                if visible_scores > case.k:
                    _check_kind(f"next_state: row {row}", kind)
                elif kind != STATE_UNKNOWN:
                    raise Mismatch(f"next_state: row {row}: wanted {STATE_UNKNOWN} first, got {kind}")

    return call


def _prefill(case: Case, draw: Draw) -> Callable[[], Written]:
    device = draw.device
    logits = _logits(case, draw)
    row_starts, row_ends = torch.zeros(2, case.rows, dtype=torch.int32, device=device)
    for kind, rows in _parts(case, case.extents):
        row_starts[rows], row_ends[rows] = windows(kind, len(range(case.rows)[rows]), case, draw)
    starts = row_starts.to(torch.int64).clamp(min=0)
    lengths = (row_ends.to(torch.int64).clamp(max=case.width) - starts).clamp(min=0)
    _poison(case, logits, starts, starts + lengths)
    request, row_request = torch.arange(case.rows, device=device), None
    if case.table_requests:
        near = draw.integers(-1, case.table_requests + 1, case.rows).to(torch.int32)
        row_request = torch.where(draw.uniform(case.rows) < 0.05, draw.any_int32(case.rows), near)
        request = row_request.to(torch.int64)
        lengths = torch.where((request >= 0) & (request < case.table_requests), lengths, 0)
    positions = oracles(case, device.type)[0](_moved_to_front(logits, starts), lengths, case.k)
    page_table = _page_table(case, draw)
    offsets = _offsets(case, draw) if case.offsets else None
    tables: dict[str, Any] = {"offsets": offsets, "page_table": page_table, "page_size": case.page_size}
    expected = expected_outputs(positions, request, cache_slots=case.cache_slots, **tables)
    if case.counts:
        expected["counts"] = _behind_guards(lengths.clamp(max=case.k))
    inner = draw.integers(0, case.width + 1, max(case.slices - 1, 0))
    bounds = [0, *sorted(inner.tolist()), case.width]

    def call() -> Written:
        results = {name: _guarded(its) for name, its in expected.items()}
        given = {"row_request": row_request, **tables, **_outputs(case, results, device)}
        flags = FLAG_PDL * case.pdl + FLAG_STREAMS * case.streams
        arguments: PrefillArguments | PrefillSliceArguments
        if not case.slices:
            path = parse_path(case.path)
            arguments = PrefillArguments(
                logits, row_starts, row_ends, k=case.k, path=path, flags=flags, **given
            )
            launch(arguments)
        else:
            carry = torch.zeros(case.rows, case.k + 1, dtype=torch.int64, device=device)
            for number, (begin, end) in enumerate(itertools.pairwise(bounds), start=1):
                arguments = PrefillSliceArguments(
                    logits[:, begin:end],
                    row_starts,
                    row_ends,
                    carry,
                    case.k,
                    begin,
                    flags=flags & FLAG_PDL,
                    **(given if number == case.slices else {}),
                )
                launch(arguments)
        yield from _written(arguments, results)

    return call


def _blocks(case: Case, draw: Draw) -> Callable[[], Written]:
    logits, seq_lens = _logits(case, draw), _seq_lens(case, draw)
    row_starts = _row_starts(case, draw) if case.starts else None
    starts = draw.integers(0, 1, case.rows) if row_starts is None else row_starts.clamp(0, case.width).long()
    lengths = torch.minimum(_visible(case, seq_lens), case.width - starts)
    _poison(case, logits, starts, starts + lengths)
    rows_of_scores = _moved_to_front(logits, starts)
    select, select_blocks, select_in_blocks = oracles(case, draw.device.type)
    blocks = select_blocks(rows_of_scores, lengths, case.block_k, drop=case.drop_masked)
    shape = (case.rows, case.given_blocks + case.blocks_pad)
    given = torch.zeros(shape, dtype=torch.int32, device=draw.device)[:, : case.given_blocks]
    for kind, rows in _parts(case, case.given) if case.given_blocks else ():
        given[rows] = _given(kind, blocks[rows], case, draw)
    positions = select(rows_of_scores, lengths, case.k)
    in_given = select_in_blocks(rows_of_scores, lengths, given, case.given_k)
    if case.drop_masked:
        positions, in_given = (drop_masked_positions(rows_of_scores, all_) for all_ in (positions, in_given))
    options: dict[str, Any] = {
        "next_n": case.next_n,
        "flags": FLAG_PDL * case.pdl + FLAG_DROP_MASKED * case.drop_masked,
        "compress_ratio": case.compress_ratio,
        "row_starts": row_starts,
    }

    def call() -> Written:
        results = {
            "result": _guarded(positions),
            "blocks": _guarded(blocks),
            "result in given blocks": _guarded(in_given),
        }
        out, out_blocks, out_in_given = (got for got, _ in results.values())
        launch(BlocksArguments(logits, seq_lens, out, out_blocks, case.k, case.block_k, **options))
        launch(InBlocksArguments(logits, seq_lens, given, out_in_given, case.given_k, **options))
        yield from ((name, *pair) for name, pair in results.items())

    return call


def _sampling(case: Case, draw: Draw) -> Callable[[], Written]:
    """Calls of the sampler's ops; what it keeps becomes a mask and probabilities."""
    device, rows = draw.device, case.rows
    logits, masks = _logits(case, draw), _masks(case, draw)
    if masks and case.poison != "none":
        logits.masked_fill_(~_allowed(case, **masks), float(case.poison))
    ids = torch.int32 if case.narrow else torch.int64
    slots = None if case.slots == "own" else _row_slots(case, rows + 2, draw).to(ids)
    parameters = _sample_parameters(case, rows if slots is None else rows + 2, draw)
    choices: dict[str, Any] = {
        "order": Order[case.order.upper()],
        "noise": Noise[case.noise.upper()],
        "logprob_mode": LogprobMode[case.logprob_mode.upper()],
        "options": FLAG_PDL * case.pdl,
    }
    sampled = draw.integers(-1, case.width + 1, rows).to(ids)
    read: dict[str, Any] = {"slots": slots, **masks, **parameters}
    on_cpu: dict[str, Any] = {
        name: value.cpu() if isinstance(value, Tensor) else value for name, value in read.items()
    }
    there = logits.cpu().contiguous()
    wanted = _sample_outputs(case)
    reference.sample(SampleArguments(there, **wanted, **on_cpu, **choices))
    rules = {name: value for name, value in on_cpu.items() if name in masks}
    shares, masked = torch.empty(rows, case.width), there.clone()
    reference.renorm(RenormArguments(there, wanted["limits"], shares, **rules))
    reference.apply_limits_(ApplyLimitsArguments(masked, wanted["limits"], **rules))
    best = [
        torch.empty(rows, 1 + case.n, dtype=torch.int64),
        torch.empty(rows, 1 + case.n),
        torch.empty(rows, dtype=torch.int64),
    ]
    reference.topk_logprobs(TopkLogprobsArguments(there, case.n, sampled.cpu(), *best))
    fed = torch.where(draw.uniform(rows) < 0.8, wanted["out"].to(device).roll(1), sampled)
    requests = 1 + rows // 4
    starts = draw.integers(-2, rows + 3, requests + 1).sort().values.to(torch.int32)
    verified = [torch.empty(requests, 1 + case.n % 40, dtype=ids), torch.empty(requests, dtype=torch.int32)]
    reference.verify(VerifyArguments(wanted["out"], fed.cpu(), starts.cpu(), *verified))
    expected_masked = _like(logits, masked)
    integers = {4: torch.int32, 2: torch.int16}[logits.itemsize]

    def call() -> Written:
        results = {
            name: _guarded_words(value, device, gaps=name != "limits") for name, value in wanted.items()
        }
        outputs: dict[str, Any] = {name: result for name, (result, _, _) in results.items()}
        launch(SampleArguments(logits, **outputs, **read, **choices))
        results["probabilities"] = _guarded_words(shares, device)
        launch(RenormArguments(logits, outputs["limits"], results["probabilities"][0], **masks))
        ranked = [_guarded_words(value, device) for value in best]
        launch(TopkLogprobsArguments(logits, case.n, sampled, *(result for result, _, _ in ranked)))
        results |= zip(("largest", "their log-probabilities", "rank"), ranked, strict=True)
        accepted = [_guarded_words(value, device) for value in verified]
        launch(VerifyArguments(outputs["out"], fed, starts, *(result for result, _, _ in accepted)))
        results |= zip(("accepted tokens", "their number"), accepted, strict=True)
        here = _like(logits, logits)
        launch(ApplyLimitsArguments(here, outputs["limits"], **masks))
        yield from ((name, got, expected) for name, (_, got, expected) in results.items())
        yield "masked logits", _whole(here).view(integers), _whole(expected_masked).view(integers)

    return call


def _sample_outputs(case: Case) -> dict[str, Any]:
    """Outputs of the sampler, on the CPU."""
    kinds = {
        "out": ((), torch.int32 if case.narrow else torch.int64),
        "limits": ((LIMIT_WORDS,), torch.int32),
        "logprobs": ((), torch.float32),
        "ranks": ((), torch.int64),
        "counts": ((), torch.int32),
        "kept": ((case.columns,), torch.int32),
        "kept_logprobs": ((case.columns,), torch.float32),
        "flags": ((), torch.int32),
    }
    names = ("out", "limits", *case.sampled)
    return {name: torch.empty(case.rows, *kinds[name][0], dtype=kinds[name][1]) for name in names}


SAMPLE_VALUES: dict[str, tuple[float, ...]] = {
    "temperature": (0.0, 1e-6, 1e-5, 0.3, 0.7, 1.0, 1.0, 1.5, 5.0, 1e30, math.inf, math.nan, -1.0),
    "top_k": (0, 0, 0, -1, 1, 2, 20, 50, 256, 257, 1024, 2048, 5000, INT32.max),
    "top_p": (1.0, 1.0, 2.0, 0.9, 0.9, 0.5, 0.99, 0.1, 0.0, -1.0, 1e-30, 1 - 2.0**-24, math.nan),
    "min_p": (0.0, 0.0, 0.05, 0.3, 1e-4, 1e-12, 1.0, 2.0, math.nan),
}
"""Parameters by which rows are sampled, and what engines would not write."""


def _sample_parameters(case: Case, count: int, draw: Draw) -> dict[str, Any]:
    """Parameters of the rows or slots: tensors, or numbers for all."""
    parameters: dict[str, Any] = {}
    for name, dtype in {**SLOT_PARAMETERS, "positions": torch.int64}.items():
        size = case.rows if name == "positions" else count
        if name in SAMPLE_VALUES:
            drawn = draw.chosen(torch.tensor(SAMPLE_VALUES[name], dtype=torch.float64), size).to(dtype)
        else:
            drawn = draw.integers(-(2**62), 2**62, size)
        if name not in case.by_tensor:
            parameters[f"{name}_value"] = drawn[0].item()
        elif case.pinned and drawn.is_cuda and name in SLOT_PARAMETERS:
            parameters[name] = drawn.cpu().pin_memory()
        else:
            parameters[name] = drawn
    return parameters


def _masks(case: Case, draw: Draw) -> dict[str, Tensor]:
    """Masks of allowed tokens, some of which allow few or none; rows may name none."""
    if case.masks == "none":
        return {}
    count = case.rows if case.masks == "row" else 3
    words = [draw.any_int32(count, -(-case.width // 32)) for _ in range(2)]
    kind = draw.integers(0, 4, count, 1)
    few = torch.where(kind == 1, words[0] & words[1], torch.where(kind == 2, words[0] | words[1], words[0]))
    masks = {"allow": torch.where(kind == 3, 0, few).to(torch.int32)}
    if case.masks == "table":
        masks["allow_row"] = draw.integers(-1, count + 1, case.rows).to(torch.int32)
    return masks


def _allowed(case: Case, allow: Tensor, allow_row: Tensor | None = None) -> Tensor:
    """Which tokens of each row its mask allows."""
    bits = (allow[:, :, None] >> torch.arange(32, device=allow.device)) & 1
    mask = torch.arange(case.rows, device=allow.device) if allow_row is None else allow_row.long()
    known = (mask >= 0) & (mask < len(allow))
    allowed = bits.view(len(allow), -1)[mask.clamp(0, len(allow) - 1), : case.width] == 1
    return allowed | ~known[:, None]


def _whole(rows: Tensor) -> Tensor:
    """The buffer that rows lie in."""
    assert rows._base is not None
    return rows._base


def _like(logits: Tensor, content: Tensor) -> Tensor:
    """Rows that lie as `logits` do in a buffer of their own."""
    base = _whole(logits).clone()
    return base.as_strided(logits.shape, logits.stride(), logits.storage_offset()).copy_(content)


def _outputs(case: Case, results: dict[str, tuple[Tensor, Tensor]], device: torch.device) -> dict[str, Any]:
    """Output arguments of decode and of prefill."""
    outputs = {name: result for name, (result, _) in results.items()}
    if case.counts:
        outputs["counts"] = outputs["counts"][0, GUARD_COLUMNS:-GUARD_COLUMNS]
    if case.stats:
        outputs["stats"] = poisoned(case.rows, len(StatsColumn), device=device)
    return outputs


def _written(
    arguments: DecodeArguments | PrefillArguments | PrefillSliceArguments,
    results: dict[str, tuple[Tensor, Tensor]],
) -> Written:
    for name, pair in results.items():
        yield {"out": "result"}.get(name, name), *pair
    if not isinstance(arguments, PrefillSliceArguments) and arguments.stats is not None:
        found = set(arguments.stats[:, StatsColumn.REASON].tolist())
        if not found <= set(HintReason):
            raise Mismatch(f"stats: unknown reason in {sorted(found)}")
        yield "stats", arguments.stats, arguments.stats


def _check_kind(what: str, kind: float) -> None:
    """The first number that a row longer than k leaves: what a next step may read."""
    if kind == POISON or not -math.inf < kind <= STATE_MASKED:
        raise Mismatch(f"{what}: wanted a number up to {STATE_MASKED} first, got {kind}")


def strided(rows: int, width: int, pad: int, shift: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Rows with `pad` elements of NaN behind each, in a buffer in which the first begins at `shift`."""
    buffer = torch.full((rows * (width + pad) + shift + 16,), float("nan"), dtype=dtype, device=device)
    return buffer[shift : shift + rows * (width + pad)].view(rows, width + pad)[:, :width]


def _parts(case: Case, kinds: tuple[str, ...]) -> list[tuple[str, slice]]:
    """Rows of each kind: in turn, or one kind behind the other; parts without rows are left out."""
    count, rows = len(kinds), case.rows
    bounds = [rows * turn // count for turn in range(count + 1)]
    parts = [
        slice(turn, rows, count) if case.by_turns else slice(bounds[turn], bounds[turn + 1])
        for turn in range(count)
    ]
    return [(kind, part) for kind, part in zip(kinds, parts, strict=True) if range(rows)[part]]


def _logits(case: Case, draw: Draw) -> Tensor:
    """Scores of the case's contents; rows of one kind are alike where they have few scores to themselves."""
    dtype = DTYPES[case.dtype]
    logits = strided(case.rows, case.width, case.pad, case.shift, dtype, draw.device)
    for kind, rows in _parts(case, case.contents):
        count = len(range(case.rows)[rows])
        scores = CONTENTS[kind](count, case.width, max(case.k, 1), draw, dtype).to(dtype)
        if case.fresh < 1:
            own = draw.uniform(count, case.width) < case.fresh
            scores = torch.where(own, scores, scores[:1])
        logits[rows] = scores
    return logits


def _poison(case: Case, logits: Tensor, starts: Tensor, ends: Tensor) -> None:
    if case.poison != "none":
        position = torch.arange(case.width, device=logits.device)
        outside = (position < starts[:, None]) | (position >= ends[:, None])
        logits.masked_fill_(outside, float(case.poison))


def _seq_lens(case: Case, draw: Draw) -> Tensor:
    """Key counts of requests or rows, kind by kind."""
    count = case.rows if case.by_row else case.requests
    lengths = torch.empty(count, dtype=torch.int64, device=draw.device)
    for turn, kind in enumerate(case.extents):
        some = lengths[turn :: len(case.extents)]
        low, high = {
            "full": (case.width, case.width + 1),
            "random": (0, case.width + 2),
            "near_k": (case.k - 2, case.k + case.next_n + 3),
            "near_blocks": (BLOCK_SIZE * case.block_k - 9, BLOCK_SIZE * case.block_k + 10),
            "tiny": (-3, 10),
            "beyond": (case.width, 2 * case.width + 3000),
            "any_int32": (INT32.min, INT32.max + 1),
        }[kind]
        scores = draw.integers(low, high, *some.shape)
        # A length counts keys, and not all of them make up a whole score.
        more = draw.integers(0, case.compress_ratio, *some.shape)
        some.copy_(scores if kind == "any_int32" else scores * case.compress_ratio + more)
    return lengths.clamp(INT32.min, INT32.max).to(torch.int32)


def _visible(case: Case, seq_lens: Tensor) -> Tensor:
    """Scores that each row sees."""
    keys = row_lengths(seq_lens, case.rows, 1 if case.by_row else case.next_n)
    return (keys.clamp(min=0) // case.compress_ratio).clamp(max=case.width)


def _row_starts(case: Case, draw: Draw) -> Tensor:
    """Columns from which rows count."""
    if case.starts == "any_int32":
        return draw.any_int32(case.rows)
    low, high = (-3, 4) if case.starts == "few" else (0, case.width + 1)
    starts = draw.integers(low, high, case.rows)
    return (starts - starts % 8 if case.starts == "aligned" else starts).to(torch.int32)


def windows(kind: str, rows: int, case: Case, draw: Draw) -> tuple[Tensor, Tensor]:
    """First columns of some rows of prefill, and those past the last."""
    width, k = case.width, case.k

    def integers(low: int, high: int) -> Tensor:
        return draw.integers(low, high, rows)

    if kind == "full":
        return integers(0, 1), integers(width, width + 1)
    if kind == "causal":
        first = draw.integers(0, max(1, min(width // 2, width - k))).expand(rows)
        return first, width - rows + 1 + torch.arange(rows, device=draw.device)
    if kind == "near_k":
        first = integers(0, width - k)
        return first, first + integers(k - 2, k + 4)
    if kind == "tiny":
        first = integers(-3, width + 3)
        return first, first + integers(-3, 5)
    if kind == "beyond":
        return integers(-3000, 20), integers(width, width + 3000)
    if kind == "any_int32":
        return draw.any_int32(rows), draw.any_int32(rows)
    ends = torch.stack([integers(0, width + 1), integers(0, width + 1)])
    lower, upper = ends.amin(dim=0), ends.amax(dim=0)
    return (upper, lower) if kind == "inverted" else (lower, upper)


def _page_table(case: Case, draw: Draw) -> Tensor | None:
    if not case.page_size:
        return None
    largest = max(4096, (1 << 23) // case.table_rows)
    pages = int(draw.integers(0, min(2 * (case.width // case.page_size) + 3, largest)))
    shape = (case.table_rows, pages)
    table = draw.integers(0, min(INT32.max // case.page_size + 2, INT32.max), *shape)
    if case.holes:
        table = torch.where(draw.uniform(*shape) < 0.3, -1 - table, table)
    return table.to(torch.int32)


def _offsets(case: Case, draw: Draw) -> Tensor:
    """Usual offsets, and now and then any number of 32 bits, or one that overflows within the window."""
    shape = (case.table_rows,)
    usual = draw.integers(0, 1 << 22, *shape)
    wild = draw.any_int32(*shape)
    near = INT32.max - draw.integers(0, case.width + 2, *shape)
    chance = draw.uniform(*shape)
    return torch.where(chance < 0.7, usual, torch.where(chance < 0.85, wild, near)).to(torch.int32)


def _given(kind: str, chosen: Tensor, case: Case, draw: Draw) -> Tensor:
    """Blocks that are given for some rows, whose best blocks are these."""
    shape = (len(chosen), case.given_blocks)
    last = -(-case.width // BLOCK_SIZE)
    if kind == "chosen":
        width = min(case.given_blocks, case.block_k)
        blocks = torch.full(shape, -1, dtype=torch.int64, device=draw.device)
        blocks[:, :width] = chosen[:, :width]
        return blocks
    if kind == "none":
        return torch.full(shape, -1, device=draw.device)
    if kind == "any_int32":
        return draw.any_int32(*shape)
    if kind == "repeated":
        return draw.integers(0, min(last, 5), *shape).sort(dim=1).values
    if kind == "unordered":
        return draw.integers(-3, last + 3, *shape)
    # Distinct and ascending, -1 behind them.
    blocks = draw.integers(0, last, *shape).sort(dim=1).values
    again = torch.zeros(shape, dtype=torch.bool, device=draw.device)
    again[:, 1:] = blocks[:, 1:] == blocks[:, :-1]
    blocks = blocks.masked_fill(again, last).sort(dim=1).values
    return torch.where(blocks < last, blocks, -1)


def _writers(case: Case, slots: int, row_slot: Tensor | None) -> dict[int, int]:
    """Row by the slot it writes: the last row of each request that has one."""
    last = range(case.next_n - 1, case.rows, case.next_n)
    named = range(len(last)) if row_slot is None else row_slot[case.next_n - 1 :: case.next_n].tolist()
    return {slot: row for slot, row in zip(named, last, strict=True) if 0 <= slot < slots}


def _indices(case: Case, slots: int, wanted: Tensor, draw: Draw) -> Tensor:
    pitch = case.k + case.indices_pad
    indices = torch.empty(slots, pitch, dtype=torch.int32, device=draw.device)[:, : case.k]
    for slot in range(slots):
        # Which row a slot serves does not matter: its own choice is only one more kind of content.
        row = wanted[min(slot * case.next_n, case.rows - 1)]
        indices[slot] = _hint(case.hints[slot % len(case.hints)], row, case, draw)
    return indices


def _row_slots(case: Case, slots: int, draw: Draw) -> Tensor:
    """Slots of the rows: the last rows of two requests never share one, because both would write it."""
    order = draw.order(slots)[: case.rows].to(torch.int32)
    if case.slots == "shuffled":
        order = order[: case.requests].repeat_interleave(case.next_n)
    choice = draw.uniform(case.rows)
    order = torch.where(choice < 0.1, -1, order)
    return torch.where(choice > 0.95, slots + 7, order).to(torch.int32)


def _hint(kind: str, result: Tensor, case: Case, draw: Draw) -> Tensor:
    k = case.k
    if kind == "true":
        # Positions as the offset will move them, in any order, padding kept.
        order = draw.order(k)
        shuffled = result.to(torch.int64)[order]
        return torch.where(shuffled >= 0, (shuffled - case.hint_offset).clamp(INT32.min, INT32.max), -1)
    if kind == "half":
        keep = draw.uniform(k) < 0.5
        return torch.where(keep, result.to(torch.int64), draw.integers(0, case.width, k))
    if kind == "random":
        return draw.integers(0, case.width, k)
    if kind == "any_int32":
        return draw.any_int32(k)
    if kind == "one_position":
        return draw.integers(0, case.width).expand(k)
    constant = {"minus_one": -1, "zero": 0, "past_the_end": case.width}[kind]
    return torch.full((k,), constant, dtype=torch.int64, device=draw.device)


def kth_values(logits: Tensor, wanted: Tensor) -> Tensor:
    """The k-th value of every row, fp32; of an empty one, its first."""
    values = logits.gather(1, wanted.clamp(min=0).to(torch.int64)).float()
    keys = torch.where(wanted >= 0, order_key(values), 1 << 40)
    return values.gather(1, keys.argmin(dim=1, keepdim=True))[:, 0]


def state_words(kind: str, kth: Tensor, draw: Draw) -> Tensor:
    """Whole slots; `kth` holds values that those may expect, one a slot."""
    slots = len(kth)

    def any_size() -> Tensor:
        return (260 * draw.uniform(slots) - 130).exp2()

    def any_bits() -> Tensor:
        return draw.any_int32(slots).view(torch.float32)

    if kind == "bits":
        return torch.stack([any_bits() for _ in range(STATE_FLOATS)], dim=1)
    words = torch.zeros(slots, STATE_FLOATS, device=draw.device)
    if kind == "share":
        words[:, 0] = draw.uniform(slots)
    elif kind == "window":  # what short rows leave: negative numbers of all sizes
        near = (8 * draw.uniform(slots) - 4).exp2()
        is_near = draw.uniform(slots) < 0.5
        words[:, 0] = -torch.where(is_near, near, any_size())
    elif kind in ("zscore", "value", "either"):  # near those that kernels leave, or far off
        words[:, 0] = STATE_VALUE_ONLY if kind == "value" else STATE_ZSCORE_ORIGIN + 4.0 * draw.normal(slots)
        words[:, 1] = kth + 0.05 * draw.normal(slots)
        words[:, 2] = draw.normal(slots).abs()
        # Two spreads of moderate size, and the last bit that says which of them to go by.
        halves = (0.05 * draw.normal(slots, 2).abs()).to(torch.bfloat16).view(torch.int16)
        bit = draw.integers(0, 2, slots)
        chosen = bit if kind == "either" else torch.full_like(bit, kind == "value")
        halves[:, 0] = (halves[:, 0] & ~1) | chosen.to(torch.int16)
        words[:, 3] = halves.contiguous().view(torch.float32)[:, 0]
    elif kind == "absurd":  # a z-score or a value, and nonsense beside it
        is_zscore = draw.uniform(slots) < 0.5
        words[:, 0] = torch.where(is_zscore, STATE_ZSCORE_ORIGIN + 8.0 * draw.normal(slots), STATE_VALUE_ONLY)
        words[:, 1] = any_size() * draw.normal(slots).sign()
        words[:, 2] = any_size() * draw.normal(slots).sign()
        words[:, 3] = any_bits()
    else:
        words[:, 0] = {
            "unknown": STATE_UNKNOWN,
            "zero": 0.0,
            "one": 1.0,
            "infinite": STATE_INFINITE,
            "masked": STATE_MASKED,
            "nan": np.nan,
            "inf": np.inf,
            "huge": 3e38,
        }[kind]
        if kind in ("nan", "inf", "huge"):
            words[:] = words[:, :1].clone()
    return words
