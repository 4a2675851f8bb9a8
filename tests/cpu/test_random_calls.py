"""Random calls of the ops on the CPU, as the fuzzer draws them, give the exact answer."""

from __future__ import annotations

from hypothesis import given, settings

from eval.fuzz.cases import Case, blocks_cases, decode_cases, prefill_cases
from eval.fuzz.fuzz import check_case

ELEMENTS = 1 << 11


@settings(max_examples=200)
@given(decode_cases(ELEMENTS))
def test_decode(case: Case) -> None:
    check_case(case, "cpu")


@settings(max_examples=200)
@given(prefill_cases(ELEMENTS))
def test_prefill(case: Case) -> None:
    check_case(case, "cpu")


@settings(max_examples=200)
@given(blocks_cases(ELEMENTS))
def test_blocks(case: Case) -> None:
    check_case(case, "cpu")
