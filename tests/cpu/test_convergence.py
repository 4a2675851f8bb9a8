"""Whether warp collectives are found that lanes may reach apart: in machine code, and in a run's counts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from eval.common.paths import ROOT
from eval.report import inspect, sass
from eval.report.inspect import InspectError
from eval.stress import converged

# `resident_topk<float, 16, kCommonSlotted>` without `ptx::reconverge` in `emit_tile`, where an H200 once had
# lane 0 apart: the branch of the thread that writes the state, and the sum behind it. Other instructions are
# left out. The line is that of a branch which a block barrier behind it would explain.
KERNEL = [line.strip() for line in (sass.KERNELS / "resident/kernel.cuh").read_text().splitlines()]
LINE = 1 + KERNEL.index("if (ctx.thread == 0) {")
REGION = f"""
.text.emit_tile:
	//## File "/cpp/kernels/resident/count_and_emit.cuh", line 75
        /*9e60*/                   WARPSYNC.ALL ;
        /*9e70*/                   BSSY B0, `(.L_x_157) ;
        /*9ea0*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
	//## File "/cpp/kernels/resident/kernel.cuh", line {LINE}
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
"""
SUM = """
	//## File "/crt/sm_80_rt.hpp", line 103 inlined at "/cpp/kernels/cluster/select.cuh", line 54
	//## File "/cpp/kernels/cluster/select.cuh", line 54
        /*a480*/                   REDUX.SUM UR5, R0 ;
        /*a490*/                   EXIT ;
"""
EMIT_TILE = REGION + SUM

# Lanes return apart, ahead of the sum of all of them.
RETURNS = """
.text.kernel:
        /*0010*/                   CALL.REL.NOINC `($kernel$part) ;
        /*0020*/                   REDUX.SUM UR5, R0 ;
        /*0030*/                   EXIT ;
$kernel$part:
        /*0040*/              @!P0 RET.REL.NODEC R2 `(kernel) ;
        /*0050*/                   RET.REL.NODEC R2 `(kernel) ;
"""


def findings(text: str) -> list[sass.Finding]:
    return [one for function in sass.parse(text.splitlines()) for one in sass.unguarded(function)]


class TestMachineCode:
    def test_the_place_that_failed_is_found(self) -> None:
        place = ("emit_tile", f"resident/kernel.cuh:{LINE}", "cluster/select.cuh:54")
        found = [sass.Finding(*place, spans, behind_barrier=False) for spans in (False, True)]
        assert findings(EMIT_TILE) == found == sass.unexplained(found)

    @pytest.mark.parametrize("guard", ["WARPSYNC R5", "BRA.DIV UR4, `(.L_x_999)"])
    def test_a_guard_before_the_collective_is_enough(self, guard: str) -> None:
        assert findings(f"{REGION}        /*a470*/ {guard} ;\n{SUM}") == []

    def test_a_guard_on_one_of_two_ways_is_not(self) -> None:
        around = "        /*a410*/ @P3 BRA `(.L_x_900) ;\n        /*a420*/ WARPSYNC.ALL ;\n.L_x_900:\n"
        assert findings(REGION + around + SUM)
        assert findings(f"{REGION}        /*a410*/ @P3 WARPSYNC.ALL ;\n{SUM}")

    def test_without_a_barrier_the_region_spans_none(self) -> None:
        text = re.sub(r".*BAR\.SYNC.*\n", "", EMIT_TILE)
        assert [one.spans_barrier for one in findings(text)] == [False]

    @pytest.mark.parametrize(
        ("lanes", "part"), [("@UP0 BRA", "uniform branch"), ("BRA", "no condition")], ids=lambda x: x
    )
    def test_branches_that_all_lanes_take_are_none(self, lanes: str, part: str) -> None:
        assert findings(EMIT_TILE.replace("@P0 BRA", lanes)) == []

    def test_the_end_of_another_region_is_no_guard(self) -> None:
        another = "        /*a410*/ BSSY B0, `(.L_x_901) ;\n        /*a420*/ BSYNC B0 ;\n.L_x_901:\n"
        assert findings(REGION + another + SUM) == findings(EMIT_TILE)

    def test_a_called_function_is_followed(self) -> None:
        call = "        /*a410*/ CALL.REL.NOINC `($part) ;\n        /*a420*/ EXIT ;\n$part:\n"
        assert findings(REGION + call + SUM) == findings(EMIT_TILE)
        assert findings(f"{REGION}{call}        /*a430*/ WARPSYNC.ALL ;\n{SUM}") == []

    def test_lanes_that_return_apart_are_found(self) -> None:
        assert findings(RETURNS) == [sass.Finding("kernel", "0x40", "0x20", False, False)]
        assert findings(RETURNS.replace("REDUX", "WARPSYNC.ALL ;\n        /*0024*/ REDUX")) == []

    def test_what_ptxas_votes_for_itself_is_no_collective(self) -> None:
        assert findings(EMIT_TILE.replace("REDUX.SUM UR5, R0", "VOTE.ANY P0, P0"))
        copy = EMIT_TILE.replace("REDUX.SUM UR5, R0", "VOTEU.ANY UP0, P0")
        assert findings(copy) == []
        assert findings(copy.replace("sm_80_rt", "sm_30_intrinsics"))  # a vote of the sources

    def test_what_needs_a_block_barrier_behind_is_explained_by_one(self) -> None:
        """Another branch of the same function, here on the next line, is not."""
        without = re.sub(r".*BAR\.SYNC.*\n", "", REGION)
        behind = "        /*a410*/ BAR.SYNC.DEFER_BLOCKING 0x0 ;\n"
        for line, barrier, count in ((LINE, "", 1), (LINE, behind, 0), (LINE + 1, behind, 1)):
            source = f'//## File "/cpp/kernels/resident/kernel.cuh", line {line}\n/*9f40*/'
            found = findings(without.replace("/*9f40*/", source) + barrier + SUM)
            assert len(sass.unexplained(found)) == count

    def test_what_is_explained_is_in_the_sources(self) -> None:
        """By text, since lines move; that of one line, where lanes part. What is gone must go here, too."""
        parting = (*sass.NEED_NO_GUARD, *sass.WITHOUT_BARRIER, *sass.AHEAD_OF_BLOCK_BARRIER)
        for text in (*parting, *sass.SAME_IN_ALL_LANES):
            file, _, code = text.partition(": ")
            source = (sass.KERNELS / file).read_text().splitlines()
            lines = sum(line.strip().startswith(code) for line in source)
            assert lines == 1 or (lines and text not in parting), text

    def test_every_collective_of_the_built_library_is_guarded_or_explained(self, cuda_library: Path) -> None:
        """Of some kernels: `python -m eval inspect --convergence topk` takes minutes for all."""
        try:
            found = inspect.unguarded_collectives(cuda_library)
        except InspectError as error:
            pytest.skip(str(error))
        if any(one.collective.startswith("0x") for one in found):
            pytest.skip("the library was built without source lines (-DGVR_TOPK_LINE_INFO=ON)")
        assert sass.unexplained(found) == []


class TestCounts:
    """The table of a build with GVR_TOPK_CHECK_CONVERGED."""

    def test_every_collective_is_counted_on_its_own_line(self) -> None:
        for file in sass.KERNELS.rglob("*.cuh"):
            code = re.sub("//.*", "", file.read_text())
            assert file.name == "warp.cuh" or not re.search(r"(shfl|vote|match|redux|elect)\.sync", code)
            names = re.findall(r"\b__(?:\w+_sync|syncwarp)\(", code)
            assert all(map(converged.COLLECTIVE.fullmatch, names)), file
        for text in converged.collectives().values():
            for name in converged.COLLECTIVE.finditer(text):
                ends = [text[name.end() : end] for end in range(len(text) + 1)]
                assert any(part.count("(") < part.count(")") for part in ends), text

    def test_counts_of_runs_add_up(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        places = list(converged.collectives().items())
        at = {converged.guard_of(*place) is None: number for number, place in enumerate(places)}
        monkeypatch.setattr(converged.torch.cuda, "synchronize", lambda: None)
        library = SimpleNamespace(gvr_topk_converged_place=lambda *place: numbers.index(place))
        numbers = [(path.encode(), int(line)) for path, line in (place.split(":") for place, _ in places)]
        monkeypatch.setattr(converged, "op_library", lambda: library)
        run = {"format": "f", "seed": 0, "seconds": 1.0, "machine": {}}
        for unguarded, apart in ((False, 1), (True, 0), (True, 1), (True, 0)):
            counted = (b"kernels/resident/launch.cu", at[unguarded], apart, 3)
            library.gvr_topk_converged_read = lambda add, counted=counted: add(*counted)
            all_guarded = converged.record(run, tmp_path / "run.json")
        written = json.loads((tmp_path / "convergence.json").read_text())
        row = written["collectives"][places[at[True]][0]]
        assert (row["lanes"], row["lanes_apart"]) == ({"resident": 9}, {"resident": 3})
        assert row["guarded_by"] is None and not all_guarded and len(written["runs"]) == 4
        assert sum(bool(row["lanes"]) for row in written["collectives"].values()) == 2

    def test_the_committed_table_says_what_guards_each(self) -> None:
        table = json.loads((ROOT / "eval/results/h200/convergence.json").read_text())["collectives"]
        assert [place for place, row in table.items() if row["lanes_apart"] and not row["guarded_by"]] == []
        known = [f"{place.partition(':')[0]}: {code}" for place, code in converged.collectives().items()]
        assert all(sum(line.startswith(text) for line in known) == 1 for text in converged.GUARDED_BY)
