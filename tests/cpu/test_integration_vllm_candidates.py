"""Candidate blocks of a fake of vLLM 0.33, chosen by our op: for whom, by which rule, and how that fails."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm_engine import Runner, Step
from vllm_lines import LINE, register_with

from gvr_topk.evaluation.oracle import sorted_blocks, sorted_topk
from gvr_topk.integrations import vllm as integration
from gvr_topk.integrations.vllm import candidates, plugin
from gvr_topk.integrations.vllm.upstream import CANDIDATES, INDEXER_MODULE

pytestmark = pytest.mark.usefixtures("serving")

OURS = ("gvr_topk", "candidates")
COUNT, WIDTH = 8, 203
UNUSED = -7


def calls() -> dict[tuple[str, str], int]:
    return {key: n for key, n in integration.counters().calls.items() if key[1].startswith("candidates")}


def choose(*args: Any, **kwargs: Any) -> None:
    """Call the function by the name that the indexer calls."""
    importlib.import_module(INDEXER_MODULE)._select_candidate_blocks(*args, **kwargs)


def rows(count: int = 6, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Scores with ties, masked blocks and NaN, and lengths."""
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randint(-9, 9, (count, WIDTH), generator=draw).float()
    masked = torch.rand(count, -(-WIDTH // 8), generator=draw) < torch.arange(count)[:, None] / count
    logits[masked.repeat_interleave(8, dim=1)[:, :WIDTH]] = -torch.inf
    logits[0, 50] = torch.nan
    return logits, torch.tensor([WIDTH, 100, 57, 200, 0, 199], dtype=torch.int32)[:count]


def two_levels(runner: Runner) -> Tensor:
    """Let the first layer publish candidates, which the others obey; returns their buffer."""
    buffer = torch.full((len(runner.buffer), COUNT), UNUSED, dtype=torch.int32)
    for number, layer in enumerate(runner.layers):
        layer.indexer_op.candidate_blocks, layer.indexer_op.candidate_write = buffer, number == 0
    return buffer


def assert_source(step: Step, runner: Runner, chosen: Tensor) -> None:
    first, second = runner.names
    assert torch.equal(chosen, sorted_blocks(step.logits[first], step.lengths, COUNT, drop=True))
    importlib.import_module(CANDIDATES.module).apply_candidate_mask(
        step.logits[second], None, step.lengths, chosen, 8
    )
    for name, logits in step.logits.items():
        assert torch.equal(step.chosen[name], sorted_topk(logits, step.lengths, runner.topk))


@pytest.mark.parametrize("drafts", [0, 2])
def test_decode_rows_and_prompts(log: list[str], drafts: int) -> None:
    runner = Runner(drafts=drafts, via_op=True)
    buffer = two_levels(runner)
    requests = [runner.add(name, length) for name, length in (("a", 300), ("b", 399), ("c", 20))]
    step = runner.step(requests, [runner.add("d", 200)])
    decode = len(requests) * (1 + drafts)
    assert_source(step, runner, buffer[:decode])
    assert step.prompts is not None
    count = len(step.prompts.lengths)
    assert_source(step.prompts, runner, buffer[decode : decode + count])
    assert buffer[decode + count :].eq(UNUSED).all()
    second = step.logits[runner.names[1]]
    assert second[1].isneginf().sum() > WIDTH - 8 * COUNT, "nothing is left outside of the candidates"
    assert calls() == {OURS: 2}
    assert log.count(LINE + f"on: {COUNT} candidate blocks of each row") == 1


def test_windows_and_rows_that_share_bounds() -> None:
    logits, lengths = rows()
    starts, ends = (
        torch.tensor([0, 5, 16], dtype=torch.int32),
        torch.tensor([203, 190, 16], dtype=torch.int32),
    )
    out = torch.full((8, COUNT + 2), UNUSED, dtype=torch.int32)
    choose(logits, starts, ends, COUNT, 8, out, row_repeat=2)
    visible = (ends - starts).repeat_interleave(2)
    moved = torch.stack([row.roll(-at) for row, at in zip(logits, (0, 0, 5, 5, 16, 16), strict=True)])
    assert torch.equal(out[:6, :COUNT], sorted_blocks(moved, visible, COUNT, drop=True))
    assert out[6:].eq(UNUSED).all() and out[:, COUNT:].eq(UNUSED).all()
    for empty, bounds in ((logits[:0], ends[:0]), (logits[:3, :0], ends)):
        choose(empty, None, bounds, COUNT, 8, out := torch.zeros(len(empty), COUNT, dtype=torch.int32))
        assert out.eq(-1).all()
    choose(logits.bfloat16(), None, lengths, COUNT, 8, out := torch.empty(6, COUNT, dtype=torch.int32))
    assert torch.equal(out, sorted_blocks(logits, lengths, COUNT, drop=True))
    assert calls() == {OURS: 4}


def test_what_is_left_to_vllm() -> None:
    """And switches nothing off."""
    logits, lengths = rows()
    out = torch.empty(6, 2 * COUNT, dtype=torch.int32)
    sizes = ((logits, lengths, COUNT, 16), (logits, lengths, 1, 8))
    layouts = ((logits.double(), lengths), (logits, lengths.long()), (logits[:, ::2], lengths // 2))
    layouts += ((logits, lengths.repeat_interleave(2)[::2]),)
    for scores, bounds, count, size in (*sizes, *((*each, COUNT, 8) for each in layouts)):
        choose(scores, None, bounds, count, size, out.fill_(UNUSED))
        assert out[0, :count].max() >= 0 and out[:, count:].eq(UNUSED).all()
    choose(logits, None, lengths, COUNT, 8, out[:, ::2])
    choose(logits, None, lengths, COUNT, 8, out)
    assert calls() == {
        ("original", "candidates of another size"): 2,
        ("original", "candidates layout"): 5,
        OURS: 1,
    }
    wide = candidates.CandidatesCall(
        torch.empty(1, (1 << 21) + 1, device="meta"), None, lengths[:1], COUNT, 8, out
    )
    hook = plugin._integration.hook
    assert hook is not None and hook.candidates.reason_against(wide) == "layout"
    assert hook.candidates.reason_against(wide._replace(topk_blocks=2049)) == "of another size"
    widest = wide._replace(logits=wide.logits[:, 1:])
    for count in (2, 2048):
        assert hook.candidates.reason_against(widest._replace(topk_blocks=count)) == ""


@pytest.mark.parametrize("force", [False, True])
def test_a_backend_that_was_chosen(log: list[str], monkeypatch: pytest.MonkeyPatch, force: bool) -> None:
    register_with(monkeypatch, GVR_TOPK_VLLM="force" if force else "1")
    runner = Runner(via_op=True, backend="cooperative")
    buffer = two_levels(runner)
    step = runner.step([runner.add("a", 300)])
    wanted = sorted_blocks(step.logits[runner.names[0]], step.lengths, COUNT, drop=True)
    assert torch.equal(buffer[:1], wanted) is force
    assert calls() == {OURS if force else ("original", "candidates backend chosen"): 1}
    said = any("not in use: candidate block, for sparse_indexer_topk_backend is" in line for line in log)
    assert said is not force


def test_a_call_that_fails_and_all_after_it(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    logits, lengths = rows()

    def fail(*args: Any, **kwargs: Any) -> None:
        kwargs["blocks"].fill_(UNUSED)
        raise RuntimeError("no room\nfor this launch")

    monkeypatch.setattr(candidates, "indexer_topk_blocks", fail)
    for _ in range(2):
        choose(logits, None, lengths, COUNT, 8, out := torch.empty(6, COUNT, dtype=torch.int32))
        assert out.max() > 0 and not out.eq(UNUSED).any()
        monkeypatch.undo()
    assert calls() == {("original", "candidates error: RuntimeError"): 2}
    (line,) = log
    assert "fell back: candidate block: RuntimeError: no room for this launch" in line
    assert line.endswith("vLLM's own candidate block top-k serves from now on")


def test_verify_agrees(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With ties, masked blocks, NaN, windows, and a newest block that is not among the best."""
    register_with(monkeypatch, GVR_TOPK_VERIFY="4")
    _, lengths = rows()
    starts = torch.tensor([3, 0, 8, 16, 0, 2], dtype=torch.int32)
    out = torch.empty(6, COUNT, dtype=torch.int32)
    for seed in range(4):
        logits = rows(seed=seed)[0]
        choose(logits, None, lengths, COUNT, 8, out)
        assert torch.equal(out, sorted_blocks(logits, lengths, COUNT, drop=True)), "not vLLM's result"
        choose(logits, starts, (starts + lengths).clamp(max=WIDTH), COUNT, 8, out)
    choose(logits[:, :48], None, lengths.clamp(max=48), COUNT, 8, out)  # all blocks are chosen
    assert [line for line in log if "verified" in line] == [LINE + "verified 4 calls of candidate block"]
    assert calls() == {OURS: 9}


@pytest.mark.parametrize("fault", ["empty places", "another block", "twice"])
def test_verify_sees_what_differs(log: list[str], monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    register_with(monkeypatch, GVR_TOPK_VERIFY="3")
    logits, lengths = rows()
    logits[0, 50] = 3.0

    def wrong(*args: Any, **kwargs: Any) -> None:
        assert args[2:] == (0, COUNT), "positions are of no use"
        kwargs["blocks"].copy_(sorted_blocks(logits, lengths, COUNT, drop=True))
        if fault == "empty places":
            kwargs["blocks"][0, -1] = -1
        elif fault == "twice":
            kwargs["blocks"][0, 1] = kwargs["blocks"][0, 0]
        else:
            least = logits[0, :200].view(-1, 8).amax(1).argmin()
            kwargs["blocks"][0, 0] = least

    monkeypatch.setattr(candidates, "indexer_topk_blocks", wrong)
    choose(logits, None, lengths, COUNT, 8, out := torch.empty(6, COUNT, dtype=torch.int32))
    best = sorted_blocks(logits, lengths, COUNT, drop=True)
    assert torch.equal(out.ge(0).sum(1), best.ge(0).sum(1)), "vLLM's own result"
    assert calls() == {("original", "candidates error: Differs"): 1}
    assert len(log) == 1 and "fell back: candidate block: " in log[0] and "row 0 of 6" in log[0]


def test_scores_that_verify_compares() -> None:
    logits = torch.arange(20.0)[None] - 100
    logits[0, 5] = torch.nan
    got = candidates._block_scores(logits, torch.tensor([17]), None)
    assert got[0, 0].isnan() and got[0, 1:].tolist() == [-85.0, torch.inf]
    got = candidates._block_scores(logits, torch.tensor([9, 30, 0]).view(3)[:1], torch.tensor([6]))
    assert got.tolist() == [[-87.0, torch.inf, -torch.inf]]
    got = candidates._block_scores(logits, torch.tensor([30]), torch.tensor([6]))
    assert got.tolist() == [[-87.0, torch.inf, -torch.inf]]
    assert candidates._block_scores(logits, torch.tensor([0]), None).isneginf().all()
