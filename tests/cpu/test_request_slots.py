"""No row ever reads the hint of another request, whatever the engine does between steps."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gvr_topk.contract import row_lengths
from gvr_topk.evaluation.oracle import sorted_topk
from gvr_topk.ops import indexer_topk_decode
from gvr_topk.prior import IDLE_STEPS, PriorFullError, PriorState, prior_bytes

K, WIDTH = 3, 11


def test_shapes_and_initial_values() -> None:
    prior = PriorState(2, 3, K, max_rows=5)
    assert prior.indices.shape == (2, 3, K) and prior.indices.dtype == torch.int32
    assert prior.guess.shape == (2, 3, 4) and prior.guess.dtype == torch.float32
    assert prior.row_slot.shape == (5,) and prior.row_slot.dtype == torch.int32
    assert (prior.indices == -1).all() and (prior.guess == -1).all() and (prior.row_slot == -1).all()


def test_without_k_only_the_state_is_kept() -> None:
    prior = PriorState(2, 2, None, max_rows=4)
    assert prior.indices is None and prior.layer(1).indices is None
    slot = prior.admit("a")
    prior.guess.fill_(70.0)
    assert not prior.seed(0, "a", torch.arange(K)) and (prior.guess == 70).all()
    prior.release("a")
    assert prior.admit("b") == slot
    assert (prior.guess[:, slot] == -1).all() and (prior.guess[:, 1 - slot] == 70).all()


def test_the_state_of_a_full_server_is_small() -> None:
    """TensorRT-LLM's default of 2,048 requests, the 61 layers of DeepSeek-V3.2: under two MiB."""
    assert PriorState(61, 2048, None).nbytes == prior_bytes(61, 2048, None) < 2**21


def test_layer_views_share_memory() -> None:
    prior = PriorState(2, 3, K)
    layer = prior.layer(1)
    layer.indices[2, 0] = 7
    layer.guess[2] = 0.5
    assert prior.indices[1, 2, 0] == 7 and (prior.guess[1, 2] == 0.5).all()


def test_admit_keeps_the_slot_and_its_hint() -> None:
    prior = PriorState(1, 2, K)
    slot = prior.admit("a")
    prior.indices[0, slot] = 5
    assert prior.admit("a") == slot == prior.slot_of("a")
    assert (prior.indices[0, slot] == 5).all()
    assert "a" in prior and "b" not in prior and prior.slot_of("b") == -1


def test_the_lowest_free_slot_is_given() -> None:
    prior = PriorState(1, 4, K)
    assert [prior.admit(name) for name in "abcd"] == [0, 1, 2, 3]
    for name in "cab":
        prior.release(name)
    assert [prior.admit(name) for name in "efg"] == [0, 1, 2]


def test_idle_requests_lose_their_slot_in_the_end_and_no_sooner() -> None:
    prior = PriorState(1, 8, K)
    prior.set_rows(["gone", "stays"])
    for _ in range(IDLE_STEPS):
        prior.set_rows(["stays"])
    assert "gone" in prior
    prior.set_rows(["stays"])
    assert "gone" not in prior and "stays" in prior and prior.evicted == 0
    assert prior.admit("new") == 0


def test_full_names_request_and_slots() -> None:
    prior = PriorState(1, 2, K)
    prior.admit("a")
    prior.admit("b")
    with pytest.raises(
        PriorFullError, match=r"request_id: wanted a free slot for 'c', got none: all 2 slots"
    ):
        prior.admit("c")
    assert prior.try_admit("c") == -1 and "c" not in prior
    assert prior.refused == 2 and prior.admitted == 2


def test_reuse_clears_every_layer_and_nothing_else() -> None:
    prior = PriorState(3, 2, K)
    old, kept = prior.admit("old"), prior.admit("kept")
    prior.indices.fill_(9)
    prior.guess.fill_(0.7)
    prior.release("old")
    assert prior.admit("new") == old
    assert (prior.indices[:, old] == -1).all() and (prior.guess[:, old] == -1).all()
    assert (prior.indices[:, kept] == 9).all() and (prior.guess[:, kept] == 0.7).all()


def test_a_write_after_release_does_not_survive_admission() -> None:
    prior = PriorState(1, 1, K)
    slot = prior.admit("old")
    prior.release("old")
    prior.indices[0, slot] = 4  # a queued step of the previous owner
    prior.admit("new")
    assert (prior.indices[0, slot] == -1).all()


def test_rows_follow_reordering_and_padding() -> None:
    prior = PriorState(1, 4, K, max_rows=12)
    address = prior.row_slot.data_ptr()
    rows = prior.set_rows(["a", "b", "c"], next_n=2, pad_rows=3)
    a, b, c = (prior.slot_of(name) for name in "abc")
    assert rows.tolist() == [a, a, b, b, c, c, -1, -1, -1]
    assert prior.set_rows(["c", "a"], next_n=1).tolist() == [c, a]
    assert prior.row_slot.tolist() == [c, a] + [-1] * 10
    assert prior.row_slot.data_ptr() == address == rows.data_ptr()


def test_dummy_and_repeated_requests_get_no_slot() -> None:
    prior = PriorState(1, 4, K)
    assert prior.set_rows([None, "a", "a", None]).tolist() == [-1, prior.slot_of("a"), -1, -1]
    assert len(prior) == 1


def test_empty_batch() -> None:
    prior = PriorState(1, 2, K)
    prior.set_rows(["a"])
    assert prior.set_rows([], pad_rows=1).tolist() == [-1]


def test_vanished_requests_lose_their_slot_oldest_use_first() -> None:
    prior = PriorState(1, 3, K)
    prior.set_rows(["a", "b", "c"])
    prior.set_rows(["a"])
    prior.set_rows(["d"])
    assert "b" not in prior and "a" in prior and "c" in prior
    prior.set_rows(["e", "d"])
    assert "c" not in prior and "a" in prior and prior.evicted == 2


def test_nobody_is_evicted_while_slots_are_free() -> None:
    prior = PriorState(1, 3, K)
    prior.set_rows(["a"])
    prior.set_rows(["b", "c"])
    assert {"a", "b", "c"} == set(prior._slots) and prior.evicted == 0
    prior.set_rows(["d", None, "d"])
    assert "a" not in prior and prior.evicted == 1


def test_batch_larger_than_the_slots_never_fails() -> None:
    prior = PriorState(1, 2, K, max_rows=4)
    assert sorted(prior.set_rows(["a", "b", "c", "d"]).tolist()) == [-1, -1, 0, 1]
    assert prior.set_rows(["c", "d"]).tolist() != [-1, -1]


def test_retain_releases_the_others() -> None:
    prior = PriorState(1, 3, K)
    prior.set_rows(["a", "b", "c"])
    prior.retain(["b", "unknown"])
    assert len(prior) == 1 and "b" in prior
    prior.release("never seen")


@pytest.mark.parametrize(
    ("columns", "expected"), [(5, [8, 7, 6]), (3, [8, 7, 6]), (2, [8, 7, -1]), (0, [-1] * 3)]
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_seed_copies_and_pads(columns: int, expected: list[int], dtype: torch.dtype) -> None:
    prior = PriorState(2, 2, K)
    slot = prior.admit("a")
    prior.indices[1, slot] = 99
    prior.guess[1, slot] = 0.9
    assert prior.seed(1, "a", torch.tensor([8, 7, 6, 5, 4], dtype=dtype)[:columns])
    assert prior.indices[1, slot].tolist() == expected
    assert (prior.guess[1, slot] == -1).all()
    assert (prior.indices[0] == -1).all() and (prior.indices[1, 1 - slot] == -1).all()


def test_seed_without_a_slot_writes_nothing() -> None:
    prior = PriorState(1, 1, K)
    assert not prior.seed(0, "ghost", torch.arange(K))
    assert (prior.indices == -1).all()


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda p: p.set_rows(["a"] * 3), "request_ids: wanted at most max_rows = 2 rows, got 3"),
        (lambda p: p.set_rows(["a"], next_n=3), "request_ids: wanted at most max_rows = 2 rows, got 3"),
        (lambda p: p.set_rows(["a"], next_n=0), "next_n: wanted at least 1, got 0"),
        (lambda p: p.set_rows(["a"], pad_rows=-1), "pad_rows: wanted at least 0, got -1"),
        (
            lambda p: p.seed(0, "a", torch.zeros(1, 3)),
            r"row_indices: wanted one dimension, got shape \(1, 3\)",
        ),
        (lambda p: PriorState(0, 1, 1), "num_layers: wanted at least 1, got 0"),
        (lambda p: PriorState(1, 1, 1, max_rows=0), "max_rows: wanted at least 1, got 0"),
    ],
)
def test_bad_arguments_are_named(call, text: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=text):
        call(PriorState(1, 2, K))


def test_bytes_match_the_allocation() -> None:
    assert prior_bytes(61, 64, 2048, 256) == PriorState(61, 64, 2048, max_rows=256).nbytes
    assert prior_bytes(2, 3, 4) == PriorState(2, 3, 4).nbytes


REQUESTS = st.integers(0, 7)
STEP = st.fixed_dictionaries(
    {
        "leave": st.lists(REQUESTS, max_size=3),
        "prefill": st.lists(REQUESTS, max_size=2),
        "batch": st.lists(st.one_of(st.none(), REQUESTS), max_size=6),
        "next_n": st.integers(1, 3),
        "pad": st.integers(0, 2),
        "retain": st.booleans(),
        "seed": st.integers(0, 2**16),
    }
)


@settings(max_examples=150, deadline=None)
@given(schedule=st.lists(STEP, max_size=8), slots=st.integers(1, 5))
def test_schedules_against_a_dictionary(schedule: list[dict], slots: int) -> None:
    layers = 2
    prior = PriorState(layers, slots, K, max_rows=6 * 3 + 2)
    model: dict[tuple[int, int], list[int]] = {}  # (layer, request) -> its last top-k
    for step in schedule:
        generator = torch.Generator().manual_seed(step["seed"])
        for request in step["leave"]:
            prior.release(request)
        if step["retain"]:
            prior.retain([request for request in step["batch"] if request is not None])
        for request in step["prefill"]:
            if prior.try_admit(request) >= 0:
                for layer in range(layers):
                    row = torch.randint(0, WIDTH, (K,), generator=generator)
                    assert prior.seed(layer, request, row)
                    model[layer, request] = row.tolist()
        _forget(model, prior)

        batch, next_n, pad = step["batch"], step["next_n"], step["pad"]
        row_slot = prior.set_rows(batch, next_n, pad)
        # A request can lose its slot and be admitted again within one call only if it was evicted,
        # and the batch itself is never evicted; so what the model still holds must be intact.
        _forget(model, prior)
        rows = len(batch) * next_n
        owners = [batch[row // next_n] for row in range(rows)]
        used = [slot for slot in row_slot[:rows:next_n].tolist() if slot >= 0]
        assert len(set(used)) == len(used), "two requests write one slot"
        assert row_slot[rows:].tolist() == [-1] * pad
        for layer in range(layers):
            view = prior.layer(layer)
            for owner, slot in zip(owners, row_slot.tolist(), strict=False):
                if slot >= 0:
                    assert slot == prior.slot_of(owner)
                    assert view.indices[slot].tolist() == model.get((layer, owner), [-1] * K)
                    assert (layer, owner) in model or (view.guess[slot] == -1).all()
            if not batch:
                continue
            untouched = view.indices.clone()
            logits = torch.randn(rows + pad, WIDTH, generator=generator)
            lengths = torch.randint(1, WIDTH + 1, (len(batch),), generator=generator, dtype=torch.int32)
            if pad % next_n == 0:  # the op takes whole requests only; engines pad the same way
                padded = torch.cat([lengths, lengths.new_zeros(pad // next_n)])
                call = logits, padded, row_slot
            else:
                call = logits[:rows], lengths, row_slot[:rows]
            got = indexer_topk_decode(
                call[0],
                call[1],
                K,
                next_n=next_n,
                prior=view.indices,
                row_slot=call[2],
                guess_state=view.guess,
            )
            expected = sorted_topk(call[0], row_lengths(call[1], call[0].shape[0], next_n), K)
            assert torch.equal(got, expected)
            for place in range(len(batch)):
                last = place * next_n + next_n - 1
                slot = int(call[2][last])
                if slot >= 0:
                    model[layer, owners[last]] = expected[last].tolist()
                    untouched[slot] = expected[last]
            assert torch.equal(view.indices, untouched), "a slot outside the batch changed"


def _forget(model: dict[tuple[int, int], list[int]], prior: PriorState) -> None:
    """A request without a slot has no hint; when it returns it starts cold."""
    for key in [key for key in model if key[1] not in prior]:
        del model[key]
