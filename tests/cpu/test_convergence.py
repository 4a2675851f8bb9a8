"""Whether warp collectives are found that lanes may reach apart: in machine code, and in a run's counts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from eval.common.paths import ROOT
from eval.report import inspect_build, sass
from eval.report.inspect_build import InspectError
from eval.stress import converged
from eval.stress.stress_library import launches_within

# `resident_topk<float, 16, kCommonSlotted>` without `ptx::reconverge` in `emit_tile`, where an H200 once had
# lane 0 apart: the branch of the thread that writes the state, and the sum behind it. Other instructions are
# left out.
EMIT_TILE = """
.text.emit_tile:
	//## File "/cpp/kernels/resident/count_and_emit.cuh", line 75
        /*9e60*/                   WARPSYNC.ALL ;
        /*9e70*/                   BSSY B0, `(.L_x_157) ;
        /*9ea0*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
	//## File "/cpp/kernels/resident/kernel.cuh", line 175
        /*9ee0*/               @P0 BRA `(.L_x_158) ;
        /*9f00*/                   BSSY B1, `(.L_x_159) ;
        /*9f40*/               @P0 BRA `(.L_x_160) ;
.L_x_160:
        /*a3e0*/                   BSYNC B1 ;
.L_x_159:
        /*a3f0*/                   ST.E.128 desc[UR10][R48.64], R16 ;
.L_x_158:
        /*a400*/                   BSYNC B0 ;
.L_x_157:
	//## File "/crt/sm_80_rt.hpp", line 103 inlined at "/cpp/kernels/cluster/output_offset.cuh", line 54
	//## File "/cpp/kernels/cluster/output_offset.cuh", line 54
        /*a480*/                   REDUX.SUM UR5, R0 ;
        /*a490*/                   EXIT ;
"""


def findings(text: str) -> list[tuple[str, str, bool]]:
    return [
        (one.branch, one.collective, one.spans_barrier)
        for function in sass.parse(text.splitlines())
        for one in sass.unguarded(function)
    ]


class TestMachineCode:
    def test_the_place_that_failed_is_found(self) -> None:
        place = ("resident/kernel.cuh:175", "cluster/output_offset.cuh:54")
        assert findings(EMIT_TILE) == [(*place, False), (*place, True)]
        (function,) = sass.parse(EMIT_TILE.splitlines())
        assert any(one.spans_barrier for one in sass.unexplained(sass.unguarded(function)))

    @pytest.mark.parametrize("guard", ["WARPSYNC R5", "BRA.DIV UR4, `(.L_x_999)"])
    def test_a_guard_before_the_collective_is_enough(self, guard: str) -> None:
        sum_of_lanes = "        /*a480*/"
        assert findings(EMIT_TILE.replace(sum_of_lanes, f"        /*a470*/ {guard} ;\n{sum_of_lanes}")) == []

    def test_a_guard_on_one_of_two_ways_is_not(self) -> None:
        around = "        /*a410*/ @P3 BRA `(.L_x_900) ;\n        /*a420*/ WARPSYNC.ALL ;\n.L_x_900:\n"
        assert findings(EMIT_TILE.replace(".L_x_157:\n", f".L_x_157:\n{around}"))

    def test_without_a_barrier_the_region_spans_none(self) -> None:
        text = re.sub(r".*BAR\.SYNC.*\n", "", EMIT_TILE)
        assert [spans for *_, spans in findings(text)] == [False]

    @pytest.mark.parametrize(
        ("lanes", "part"), [("@UP0 BRA", "uniform branch"), ("BRA", "no condition")], ids=lambda x: x
    )
    def test_branches_that_all_lanes_take_are_none(self, lanes: str, part: str) -> None:
        assert findings(EMIT_TILE.replace("@P0 BRA", lanes)) == []

    def test_without_source_lines_addresses_are_named(self) -> None:
        text = re.sub(r".*//## File.*\n", "", EMIT_TILE)
        assert findings(text)[1] == ("0x9ee0", "0xa480", True)

    def test_what_is_explained_is_in_the_sources(self) -> None:
        """By its text, which may move; an explanation of what is gone must go as well."""
        for text in (*sass.EXPLAINED, *sass.WITHOUT_BARRIER):
            file, _, _ = text.partition(": ")
            lines = range(1, len((sass.KERNELS / file).read_text().splitlines()) + 1)
            assert text in {sass.enclosing_function(f"{file}:{line}") for line in lines}
        for text in sass.SAME_IN_ALL_LANES:
            file, _, code = text.partition(": ")
            assert code in [line.strip() for line in (sass.KERNELS / file).read_text().splitlines()], text
        reached = {f"{file}: {code}" for (file, _), code in converged.collectives().items()}
        assert set(converged.EXPLAINED) <= reached

    @pytest.fixture(scope="class")
    def found(self, cuda_library: Path) -> list[sass.Finding]:
        """Of each family the fp32 kernel with the most code; all kernels would take minutes."""
        try:
            return inspect_build.unguarded_collectives(cuda_library)
        except InspectError as error:
            pytest.skip(str(error))

    def test_every_collective_of_the_built_library_is_guarded_or_explained(
        self, found: list[sass.Finding]
    ) -> None:
        if any(one.collective.startswith("0x") for one in found):
            pytest.skip("the library was built without source lines (-DGVR_TOPK_LINE_INFO=ON)")
        assert sass.unexplained(found) == []


class TestCounts:
    """The table of a build with GVR_TOPK_CHECK_CONVERGED, from counts that no GPU has made."""

    guarded, other = ("cluster/output_offset.cuh", "cluster/exchange.cuh")

    def number(self, file: str, which: int = 0) -> int:
        line = sorted(line for name, line in converged.collectives() if name == file)[which]
        return converged.place_of(file, line, 1 << 16)

    def test_places_have_the_numbers_that_cpp_gives_them(self) -> None:
        header = (ROOT / "cpp" / "stress" / "converged.h").read_text()
        (path, line, number), *_ = re.findall(r'static_assert\(place\("(.+?)", (\d+)\) == (\d+)', header)
        assert converged.place_of(path, int(line), 1 << 16) == int(number)

    def test_every_collective_that_is_counted_has_a_macro(self) -> None:
        macros = set(
            re.findall(r"^#define (__\w+_sync)\(", (ROOT / "cpp/stress/converged.h").read_text(), re.M)
        )
        used = set(re.findall(r"__\w+_sync(?=\()", " ".join(converged.collectives().values())))
        assert used == macros

    def test_places_are_named_and_lanes_that_came_apart_explained(self) -> None:
        read = {"resident": {self.number(self.guarded): (6400, 32), self.number(self.other): (320, 0)}}
        table = converged.named(read, 1 << 16)
        assert table["unexplained"] == [] and table["lanes_apart"] == 32 and table["warps"] == 210
        assert table["collectives_reached"] == 2 and table["collectives"] > 100
        (row,) = [row for row in table["places"] if row.get("guarded_by")]
        assert row["kernels"] == {"resident": {"warps": 200, "lanes_apart": 32}}
        assert row["place"].startswith(self.guarded) and "BRA.DIV" in row["guarded_by"]

    def test_lanes_that_came_apart_elsewhere_are_unexplained(self) -> None:
        table = converged.named({"fallback": {self.number(self.other): (320, 1)}}, 1 << 16)
        assert len(table["unexplained"]) == 1 and table["unexplained"][0].startswith(self.other)
        assert "UNEXPLAINED" in converged.describe(table)

    def test_a_build_that_does_not_count_has_no_table(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(converged, "op_library", lambda: object())
        data: dict[str, Any] = {}
        assert converged.record(data) and data == {}

    def test_runs_add_up_in_a_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        out = tmp_path / "convergence.json"
        for kernel, apart in (("resident", 0), ("fallback", 3), ("resident", 0)):
            read = {kernel: {self.number(self.other): (64, apart)}}
            table = converged.named(read, 1 << 16)
            monkeypatch.setattr(converged, "converged_table", lambda table=table: table)
            data: dict[str, Any] = {"mode": "launches", "seed": 0, "results": []}
            assert converged.record(data, out) == (apart == 0) and data["converged"] is table
        written = json.loads(out.read_text())
        assert [run["seed"] for run in written["runs"]] == [0, 0, 0]
        table = written["converged"]
        (row,) = [row for row in table["places"] if row["kernels"]]
        assert row["kernels"] == {
            "resident": {"warps": 4, "lanes_apart": 0},
            "fallback": {"warps": 2, "lanes_apart": 3},
        }
        assert table["unexplained"] == [row["place"]] and table["collectives_reached"] == 1


def test_launches_within_an_interval_are_counted() -> None:
    # Two sequences of launches; what lies between the end of one and the begin of the other is none.
    stamps = [(0, 1), (10, 0), (20, 0), (100, 1), (110, 0), (120, 0)]
    count = lambda *intervals: launches_within(  # noqa: E731
        torch.tensor(stamps), torch.tensor(intervals, dtype=torch.int64).view(-1, 2)
    )
    assert count() == (4, 0)
    assert count((0, 20)) == (4, 2)
    assert count((1, 19)) == (4, 0)
    assert count((-5, 10), (15, 200)) == (4, 3)
