"""Wrong arguments: the compiled ops refuse what the CPU refuses, in the same words, naming the argument."""

from __future__ import annotations

import re

import pytest
import torch
from oracle import call, full_lengths, wrong_rows

import gvr_topk
from gvr_topk.arguments import DECODE
from gvr_topk.constants import STATE_FLOATS
from gvr_topk.ops import launch
from tests.wrong_calls import CASES, OPS, VALID, Case, arguments, floats, valid_call, zeros


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


OF_PREFILL = ["row_starts", "row_ends", "row_request", "offsets", "page_table"]


@pytest.mark.parametrize(
    ("op", "name"),
    [
        *(("prefill", name) for name in (*OF_PREFILL, "out", "counts", "slots", "stats")),
        *(("decode", name) for name in ("seq_lens", "out", "state")),
        ("in_blocks", "blocks"),
        *(("verify", name) for name in ("draft_tokens", "tokens", "lengths")),
    ],
)
def test_every_tensor_is_on_the_device_of_the_scores(op: str, name: str) -> None:
    given = {"state": floats("cpu", 2, STATE_FLOATS)} if name == "state" else {}
    on_cpu = {name: getattr(OPS[op].arguments("cpu", given), name)}
    refused = f"{OPS[op].checks.op}: {name}: wanted a tensor on cuda:"
    with pytest.raises(ValueError, match=rf"^{re.escape(refused)}\d+, got cpu$"):
        launch(OPS[op].arguments("cuda", on_cpu))
    torch.cuda.synchronize()


def test_scores_on_the_cpu_beside_results_on_the_gpu() -> None:
    refused = "logits: wanted a CUDA tensor, got one on another device"
    with pytest.raises(ValueError, match=f"^{re.escape(DECODE.op)}: {refused}$"):
        launch(arguments("cpu", {"out": zeros("cuda", 2, 8)}))


def test_one_row_has_no_stride() -> None:
    stats, out = zeros("cuda", 1, 16)[:, :8], zeros("cuda", 1, 8).as_strided((1, 8), (0, 1))
    logits = torch.randn(1, 64, device="cuda")
    lengths = full_lengths(logits)
    launch(call(logits, lengths, out, stats=stats))
    assert wrong_rows(out, logits, lengths, 8) == []


def test_no_rows_are_no_error() -> None:
    out = gvr_topk.indexer_topk_decode(floats("cuda", 0, 64), zeros("cuda", 0), 8)
    assert out.shape == (0, 8)
