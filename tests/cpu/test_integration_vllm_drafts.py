"""Drafts of a fake of vLLM 0.33's V2 runner, verified by our op; what vLLM verifies itself."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from sampler_setup import change_op, fail
from torch import Tensor
from vllm_engine import SAMPLING, draft_batch, logits_of, same_as_native, sampler_with
from vllm_lines import LINE, calls, register_with

from gvr_topk import sampling
from gvr_topk.integrations.vllm import drafts
from gvr_topk.integrations.vllm.upstream import VERIFY_DRAFTS

pytestmark = pytest.mark.usefixtures("serving")

SLOTS, LENGTH, STEPS = len(SAMPLING), 24, 3
OURS, DRAWN = ("gvr_topk", "drafts"), ("gvr_topk", "sampler")
ON = LINE + "on: drafts of the V2 model runner: accepted where they equal the tokens drawn"
OFF = " vLLM's own rejection sampler serves from now on"


def rejection_sampler(one: Any, **given: Any) -> Any:
    return importlib.import_module(VERIFY_DRAFTS.module).RejectionSampler(one, STEPS, **given)


def stream_of(one: Any, table: Tensor) -> Tensor:
    """The tokens of all requests without drafts; `table` has the logits of every request and position."""
    places, none = range(SLOTS), [[] for _ in range(SLOTS)]
    steps = (one(table[:, at], draft_batch(places, [at] * SLOTS, none)) for at in range(LENGTH))
    return torch.cat([step.sampled_token_ids for step in steps], 1)


def table_of(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.stack([logits_of(LENGTH + STEPS + 1, seed, dtype) for seed in range(SLOTS)])


def rows_of(table: Tensor, places: Sequence[int], starts: Sequence[int], guesses: Sequence[Any]) -> Tensor:
    """The logits of some requests behind their last token, at a position, and behind each of their drafts."""
    each = zip(places, starts, guesses, strict=True)
    return torch.cat([table[place, at : at + 1 + len(guess)] for place, at, guess in each])


def right_drafts(one: Any, places: Sequence[int], counts: Sequence[int]) -> tuple[Tensor, Any, Tensor]:
    """Logits and a step of requests whose drafts are all right, and the tokens from the first draft on."""
    starts, table = [5] * len(places), table_of()
    stream = stream_of(one, table)[places, 5 : 6 + STEPS]
    guesses = [tokens[:count].tolist() for tokens, count in zip(stream, counts, strict=True)]
    return rows_of(table, places, starts, guesses), draft_batch(places, starts, guesses), stream


@pytest.mark.parametrize("chunk", [5, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_stream_is_that_without_drafts(
    log: list[str], monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, chunk: int
) -> None:
    """Requests of all kinds with none to three drafts, right and wrong ones, and placeholders."""
    one, table = sampler_with(), table_of(dtype)
    two = rejection_sampler(one)
    monkeypatch.setattr(importlib.import_module(VERIFY_DRAFTS.module), "MAX_CHUNK_LOGITS", chunk)
    stream = stream_of(one, table).tolist()
    at, accepted, rejected, steps = [0] * SLOTS, [0] * SLOTS, [0] * SLOTS, 0
    while running := [place for place in range(SLOTS) if at[place] + STEPS < LENGTH]:
        places = random.sample(running, random.randint(1, len(running)))
        guesses = []
        for place in places:
            right = stream[place][at[place] : at[place] + random.randint(0, STEPS)]
            guesses.append([t if random.random() < 0.7 else random.choice((-1, t ^ 1)) for t in right])
        starts = [at[place] for place in places]
        logits = rows_of(table, places, starts, guesses)
        before = logits.clone()
        got = two(logits, draft_batch(places, starts, guesses))
        assert got.sampled_token_ids.dtype == torch.int64 and got.num_sampled.dtype == torch.int32
        assert torch.equal(logits, before)
        for request, (place, guess) in enumerate(zip(places, guesses, strict=True)):
            wanted = stream[place][at[place] : at[place] + 1 + STEPS]
            agreed = [draft == token for draft, token in zip(guess, wanted, strict=False)]
            count = [*agreed, False].index(False) + 1
            assert got.sampled_token_ids[request].tolist() == wanted[:count] + [-1] * (1 + STEPS - count)
            assert (got.num_sampled[request], got.num_rejected[request]) == (count, 1 + len(guess) - count)
            accepted[place] += count - 1
            rejected[place] += 1 + len(guess) - count
            at[place] += count
        steps += 1
    assert min(accepted) > 0 and min(rejected) > 0
    assert calls()[DRAWN] == LENGTH and calls().keys() == {DRAWN, OURS}
    assert calls()[OURS] == steps if chunk > 5 else calls()[OURS] > 2 * steps
    assert log[1:] == [ON]


def test_what_the_op_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits and the parameters are those of vLLM, where they lie."""
    seen: list[Any] = []
    monkeypatch.setattr(drafts, "verify", lambda *a, **b: seen.append((a, b)) or sampling.verify(*a, **b))
    one = sampler_with()
    logits, inputs = logits_of(6, dtype=torch.bfloat16), draft_batch([4, 5], [7, 20], [[1, 2, 3], [4]])
    processed, *_ = rejection_sampler(one)._verify(*arguments(logits, inputs))
    ((read, tokens, steps), given) = seen[0]
    assert read is processed is logits
    assert tokens.tolist() == [0, 1, 2, 3, 0, 4] and steps == STEPS
    assert given["starts"].tolist() == [0, 4, 6] and given["starts"].dtype == torch.int32
    for name in ("temperature", "top_k", "top_p", "min_p", "seeds"):
        assert given[name] is getattr(one.sampling_states, name).gpu
    assert given["positions"].tolist() == [7, 8, 9, 10, 20, 21]
    assert given["slots"] is inputs.expanded_idx_mapping and given["slots"].tolist() == [4, 4, 4, 4, 5, 5]
    assert (given["order"], given["noise"]) == ("vllm", "murmur") and "limits" not in given


def arguments(logits: Tensor, inputs: Any) -> tuple[Any, ...]:
    """Arguments of ``_verify`` for a whole step."""
    tokens = inputs.input_ids[inputs.logits_indices]
    return (
        *(logits, None, tokens, inputs.positions[inputs.logits_indices], inputs.cu_num_logits),
        *(inputs.idx_mapping, inputs.idx_mapping_np, inputs.expanded_idx_mapping),
        *(inputs.expanded_local_pos, inputs.seq_lens_cpu_upper_bound.numpy(), tokens),
    )


def test_which_drafts_count() -> None:
    """A draft that the grammar has not checked ends a request's tokens; one of a prompt is a placeholder."""
    one, places = sampler_with(), [1, 4, 8, 11]
    two = rejection_sampler(one)
    logits, inputs, stream = right_drafts(one, places, [STEPS] * 4)
    assert two(logits, inputs).num_sampled.tolist() == [4, 4, 4, 4]
    got = two(logits, inputs, invalid_drafts=inputs.expanded_local_pos == 2)
    assert got.num_sampled.tolist() == [2, 2, 2, 2]
    assert torch.equal(got.sampled_token_ids[:, :2], stream[:, :2])
    one.prefill_len.gpu[4], one.prefill_len.gpu[8] = 9, 30  # ends with this step, goes on
    got = two(logits, inputs)
    assert got.num_sampled.tolist() == [4, 1, 0, 4] and got.num_rejected.tolist() == [0, 3, 0, 0]
    # Behind adaptive verification only the device knows which rows are whose.
    logits, inputs, stream = right_drafts(one, [1, 6, 0], [1, 3, 0])
    inputs.cu_num_logits_np = draft_batch([1, 6, 0], [5] * 3, [[0] * STEPS] * 3).cu_num_logits_np
    got = rejection_sampler(one, enable_adaptive_verification=True)(logits, inputs)
    assert got.num_sampled.tolist() == [2, 4, 1] and got.num_rejected.tolist() == [0, 0, 0]
    assert torch.equal(got.sampled_token_ids[1], stream[1])
    assert calls()[OURS] == 4


def test_rows_of_no_request_are_skipped(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """And they are not compared with vLLM's."""
    register_with(monkeypatch, GVR_TOPK_VERIFY="1")
    one = sampler_with([{"temperature": 0.0}, *SAMPLING[1:]])
    logits, inputs, _ = right_drafts(one, [0, 1], [STEPS] * 2)
    inputs.idx_mapping = torch.tensor([-1, 1])
    inputs.expanded_idx_mapping[:4] = -1
    got = rejection_sampler(one)(logits, inputs)
    assert got.num_sampled.tolist() == [0, 4] and got.sampled_token_ids[0].tolist() == [-1] * 4
    assert log[-2:] == [LINE + "verified 1 calls of drafts", ON] and calls()[OURS] == 1


@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_what_is_made_of_the_logits(mode: str, masks: bool) -> None:
    """Log-probabilities and masks are those of the same rows without drafts; logits are copied if need be."""
    kinds = [{**kind, "logprobs": 3} for kind in SAMPLING]
    one = sampler_with(kinds, logprobs_mode=mode, return_sampling_mask=masks)
    two = rejection_sampler(one)
    logits, inputs, _ = right_drafts(one, [0, 1, 5, 8, 10], [STEPS] * 5)
    inputs.input_ids[6] = -1
    got = two(logits, inputs)
    assert got.num_sampled.tolist() == [4, 2, 4, 4, 4]
    assert got.logprobs_tensors.cu_num_generated_tokens == [0, 4, 8, 12, 16, 20]
    alone = draft_batch(inputs.expanded_idx_mapping.tolist(), inputs.positions.tolist(), [[]] * 20)
    wanted = one(logits, alone)
    emitted = [row for row in range(20) if row not in (6, 7)]
    for mine, theirs in zip(got.logprobs_tensors[:3], wanted.logprobs_tensors[:3], strict=True):
        assert torch.equal(mine[emitted], theirs[emitted])
    if masks:
        kept = wanted.sampling_mask_tensors.tolists()
        kept[6:8] = [], []
        assert got.sampling_mask_tensors.tolists() == kept
    processed, *_ = two._verify(*arguments(logits, inputs))
    theirs, *_ = type(two)._verify.__wrapped__(two, *arguments(logits, inputs))
    if masks or mode == "processed_logprobs":
        torch.testing.assert_close(processed, theirs, rtol=1e-6, atol=1e-6)
    assert (processed is logits) == (not masks and mode == "raw_logprobs")
    inputs.idx_mapping_np[:] = 1  # a batch that vLLM does not copy either
    assert two._verify(*arguments(logits, inputs))[0] is logits


METHOD = "with another rejection_sample_method"
THEIRS: list[tuple[str, dict[str, Any]]] = [
    ("with probabilities of drafts", {"others": [torch.zeros(8, STEPS, 300)]}),
    *((METHOD, {"method": method}) for method in ("block", "fly", "synthetic")),
    ("of another rejection sampler", {"subclass": True}),
    # Of the reasons that draws have, too, one that is the sampler's, the requests', and the logits'.
    ("with fp64 noise", {"sampler": {"use_fp64_gumbel": True}}),
    ("with penalties or other processors of logits", {"params": {"logit_bias": {5: 3.0}}}),
    ("of another layout", {"logits": logits_of(6).t().contiguous().t()}),
]


@pytest.mark.parametrize(("reason", "given"), THEIRS, ids=range(len(THEIRS)))
def test_what_vllm_verifies_itself(
    log: list[str], monkeypatch: pytest.MonkeyPatch, reason: str, given: dict[str, Any]
) -> None:
    """Its tokens, one line, and nothing is switched off; a batch without such a request is ours."""
    requests = [{"temperature": 0.8, "seed": 3}, {"seed": 4, **given.get("params", {})}, {"seed": 5}]
    one = sampler_with(requests, **given.get("sampler", {}))
    two = rejection_sampler(one, method=given.get("method", "standard"))
    if "subclass" in given:
        two.__class__ = type("Theirs", (type(two),), {})
    logits = given.get("logits", logits_of(6))
    likely = logits.argmax(1).tolist()
    call = logits, draft_batch([0, 1], [5, 9], [likely[:3], likely[4:5]]), *given.get("others", [])
    same_as_native(two, *call)
    same_as_native(two, *call)
    assert calls() == {("original", f"drafts {reason}"): 2}
    assert log == [f"{LINE}drafts: RejectionSampler._verify of vLLM serves calls {reason}"]
    if "params" in given:
        two(logits_of(2), draft_batch([2], [5], [[7]]))
        assert calls()[OURS] == 1


# ------------------------------------------------------------- verification


def test_the_first_calls_are_verified(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy requests are compared; calls without one, and those of NaN, do not count."""
    register_with(monkeypatch, GVR_TOPK_VERIFY="2")
    two, counts, compared = rejection_sampler(sampler_with()), [], []
    module = importlib.import_module(VERIFY_DRAFTS.module)
    own = module.rejection_sample
    monkeypatch.setattr(module, "rejection_sample", lambda *a, **b: compared.append(a) or own(*a, **b))
    nan = logits_of(6)
    nan[1, 5] = torch.nan
    greedy = logits_of(6).argmax(1).tolist()
    for step, places in enumerate(([1, 4], [5, 4], [1, 4], [2, 1], [2, 1])):
        two(logits_of(6) if step else nan, draft_batch(places, [5, 9], [[*greedy[:2], 0], greedy[4:5]]))
        counts.append((len(compared), len(log)))
    assert calls() == {OURS: 5} and counts == [(1, 1), (1, 1), (2, 1), (3, 2), (3, 2)]
    assert log == [ON, LINE + "verified 2 calls of drafts"]


WRONG: list[tuple[str, Callable[[Any], object]]] = [
    ("3 of [", lambda found: found.tokens[1, 2].add_(1)),
    ("3 of [", lambda found: found.tokens[1, 0].fill_(-1)),
    ("3 of [", lambda found: found.tokens[1, 3].fill_(5)),
    ("2 of [", lambda found: found.lengths[1].fill_(2)),
]


@pytest.mark.parametrize(("what", "change"), WRONG, ids=range(len(WRONG)))
def test_wrong_tokens_are_noticed(
    log: list[str], monkeypatch: pytest.MonkeyPatch, what: str, change: Callable[[Any], object]
) -> None:
    """Of a greedy request; the request beside it has tokens that vLLM does not draw, and is not judged."""
    register_with(monkeypatch, GVR_TOPK_VERIFY="8")
    two, logits = rejection_sampler(sampler_with()), logits_of(8)
    greedy = logits.argmax(1).tolist()
    inputs = draft_batch([4, 1], [5, 9], [greedy[:3], [*greedy[4:6], 0]])
    change_op(monkeypatch, drafts, "verify", lambda found: found.tokens[0].fill_(3))
    assert two(logits, inputs).sampled_token_ids[0].tolist() == [3] * 4 and log == [ON]
    change_op(monkeypatch, drafts, "verify", change)
    same_as_native(two, logits, inputs)
    same_as_native(two, logits, inputs)
    line = log[1]
    assert line.startswith(f"{LINE}fell back: drafts: Differs: request 1 of 2: {what}")
    assert f", and 3 of {[*greedy[4:7], -1]} by vLLM." in line and line.endswith(OFF)
    assert calls() == {OURS: 1, ("original", "drafts error: Differs"): 2}


def test_a_wrong_token_at_the_first_place(monkeypatch: pytest.MonkeyPatch) -> None:
    register_with(monkeypatch, GVR_TOPK_VERIFY="8")
    change_op(monkeypatch, drafts, "verify", lambda found: found.tokens[0, 0].add_(1))
    rejection_sampler(sampler_with([{"temperature": 0.0}]))(logits_of(2), draft_batch([0], [5], [[7]]))
    assert calls() == {("original", "drafts error: Differs"): 1}


# ------------------------------------------------------------- the switch


def test_an_error_falls_back_and_switches_off(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws without drafts go on."""
    change_op(monkeypatch, drafts, "verify", fail)
    one, logits = sampler_with(), logits_of(6)
    two, inputs = rejection_sampler(one), draft_batch([2, 5], [5, 9], [[1, 2, 3], [4]])
    for _ in range(2):
        same_as_native(two, logits, inputs)
        monkeypatch.setattr(drafts, "verify", sampling.verify)
    one(logits[:1], draft_batch([2], [5], [[]]))
    assert calls() == {("original", "drafts error: RuntimeError"): 2, DRAWN: 1}
    assert log[0] == f"{LINE}fell back: drafts: RuntimeError: no room for this launch.{OFF}"
