"""Wrong arguments: the compiled ops refuse what the CPU refuses, in the same words, naming the argument."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from oracle import call, full_lengths, wrong_rows

import gvr_topk
from gvr_topk.arguments import DECODE, PREFILL
from gvr_topk.constants import MAX_WIDTH, STATE_FLOATS
from gvr_topk.ops import launch
from tests.wrong_calls import CASES, OPS, VALID, Case, arguments, floats, prefill_arguments, valid_call, zeros


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_compiled_op_refuses_in_the_same_words(case: Case) -> None:
    """As a CPU does, where tests/cpu/test_arguments.py runs the same calls; the context stays good."""
    call = case.call("cuda")
    with pytest.raises(ValueError, match=f"^{re.escape(case.message)}$"):
        launch(call)
    torch.cuda.synchronize()


@pytest.mark.parametrize("what", VALID)
def test_the_compiled_op_accepts_what_a_cpu_does(what: str) -> None:
    launch(valid_call(what, "cuda"))
    torch.cuda.synchronize()


@pytest.mark.parametrize(
    "name",
    ["row_starts", "row_ends", "out", "row_request", "offsets", "counts", "page_table", "slots", "stats"],
)
def test_prefill_takes_every_tensor_on_the_device_of_the_scores(name: str) -> None:
    on_cpu = {name: getattr(prefill_arguments("cpu", {}), name)}
    with pytest.raises(ValueError, match=rf"^{re.escape(PREFILL.op)}: {name}: wanted a tensor on cuda:\d+, "):
        launch(prefill_arguments("cuda", on_cpu))
    torch.cuda.synchronize()


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"seq_lens": zeros("cpu", 2)}, "seq_lens"),
        ({"out": zeros("cpu", 2, 8)}, "out"),
        ({"state": floats("cpu", 2, STATE_FLOATS)}, "state"),
    ],
)
def test_decode_takes_every_tensor_on_the_device_of_the_scores(change: dict[str, Any], name: str) -> None:
    with pytest.raises(
        ValueError, match=rf"^{re.escape(DECODE.op)}: {name}: wanted a tensor on cuda:\d+, got cpu$"
    ):
        launch(arguments("cuda", change))
    torch.cuda.synchronize()


def test_given_blocks_are_on_the_device_of_the_scores() -> None:
    call_with_blocks = OPS["in_blocks"].arguments("cuda", {"blocks": zeros("cpu", 2, 4)})
    with pytest.raises(ValueError, match=r"in_blocks: blocks: wanted a tensor on cuda:\d+, got cpu$"):
        launch(call_with_blocks)


def test_scores_on_the_cpu_beside_results_on_the_gpu() -> None:
    with pytest.raises(
        ValueError, match=f"^{re.escape(DECODE.op)}: logits: wanted a CUDA tensor, got one on another"
    ):
        launch(arguments("cpu", {"out": zeros("cuda", 2, 8)}))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"k": 2.5}, "k: wanted an integer, got 2.5"),
        ({"k": 0}, f"k: wanted 1 to {MAX_WIDTH}, got 0"),
        ({"max_ctas": 3}, "max_ctas: wanted 0, 1, 2, 4, 8 or 16, got 3"),
        ({"page_size": "1"}, "page_size: wanted an integer, got '1'"),
    ],
)
def test_the_public_function_refuses_alike_on_both(given: dict[str, Any], message: str) -> None:
    for device in ("cpu", "cuda"):
        logits = floats(device, 2, 64)
        lengths = torch.full((2,), 64, dtype=torch.int32, device=device)
        with pytest.raises(ValueError, match=f"^{re.escape(f'{DECODE.op}: {message}')}$"):
            gvr_topk.indexer_topk_decode(logits, lengths, **{"k": 8, **given})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"k": 2.5}, "k: wanted an integer, got 2.5"),
        ({"k": MAX_WIDTH + 1}, f"k: wanted 1 to {MAX_WIDTH}, got {MAX_WIDTH + 1}"),
        ({"path": "no_hint"}, "path: wanted one of 'auto', 'radix_rounds', got 'no_hint'"),
    ],
)
def test_the_public_function_of_prefill_refuses_alike_on_both(given: dict[str, Any], message: str) -> None:
    for device in ("cpu", "cuda"):
        windows = zeros(device, 2), zeros(device, 2)
        with pytest.raises(ValueError, match=f"^{re.escape(f'{PREFILL.op}: {message}')}$"):
            gvr_topk.indexer_topk_prefill(floats(device, 2, 64), *windows, **{"k": 8, **given})


def test_one_row_has_no_stride() -> None:
    stats, out = zeros("cuda", 1, 16)[:, :8], zeros("cuda", 1, 8).as_strided((1, 8), (0, 1))
    logits = torch.randn(1, 64, device="cuda")
    lengths = full_lengths(logits)
    launch(call(logits, lengths, out, stats=stats))
    assert wrong_rows(out, logits, lengths, 8) == []


def test_no_rows_are_no_error() -> None:
    out = gvr_topk.indexer_topk_decode(floats("cuda", 0, 64), zeros("cuda", 0), 8)
    assert out.shape == (0, 8)
