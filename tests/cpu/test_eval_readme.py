"""The figures of README and docs/performance.md are those of the result files."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_data import file_of, result

from eval.bench.bench_cases import EngineRows, Sources, all_cells
from eval.bench.bench_report import ALL, FLOOR, MEASURED
from eval.common.machine import write_json
from eval.common.paths import ROOT
from eval.report import picture, provenance, readme
from gvr_topk.evaluation.synthetic import LayerGenerator


def commits_compared(trial: Path) -> set[str]:
    """Commit of a trial that compared rows inside an engine; nothing of another."""
    data = json.loads(trial.read_text())
    return {data["machine"]["commit"]} if any(engine.get("compared") for engine in data["engines"]) else set()


def of_another_gpu(run: dict[str, Any]) -> dict[str, Any]:
    return run | {"machine": run["machine"] | {"device": "another"}}


class TestReadmeTable:
    @pytest.fixture
    def folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """Result files of a whole benchmark with made-up figures, beside the real other ones."""
        folder = tmp_path / "results" / "h1"
        folder.mkdir(parents=True)
        others = set(readme.RESULTS.parent.glob("*/*.json")) - set(readme.RESULTS.glob("*"))
        for path in (*sorted(others), *readme.RESULTS.glob("*.json")):  # of the pages' GPU, if it has one
            if not path.stem[-2:].startswith("_"):  # of several runs the first
                shutil.copy(path, folder)
        sources = Sources([LayerGenerator(20, 32513, 256)], [EngineRows("e", (torch.zeros(8, 65559),))])
        results = []
        for cell in all_cells(sources):
            for impl in (*(impl for impl in ALL if cell.group in MEASURED[impl]), FLOOR):
                exact = None if impl == FLOOR else True
                us = 4.0 if impl == "hinted" else 8.0
                results.append((cell, result(cell, impl, us, exact, worst_us=9.0, run=0)))
        data = file_of(*results)
        data["runs"][0]["sets_in_20_runs"] = dict.fromkeys(ALL, 1)
        write_json(folder / "bench.json", data)
        shutil.copy(ROOT / "eval" / "results" / readme.GPU / "fuzz_1.json", folder)
        monkeypatch.setattr(readme, "RESULTS", folder)
        monkeypatch.setattr(readme, "PICTURES", tmp_path)
        return folder

    @staticmethod
    def changed(path: Path, change: Any) -> None:
        """Change a result file in place."""
        data = json.loads(path.read_text())
        change(data)
        path.write_text(json.dumps(data))

    def test_parts_without_results_are_left_out(self, folder: Path) -> None:
        def change(data: dict[str, Any]) -> None:
            gone = ("prefill", "v4", "v41", "trace", "engine", "scale", "wide_buffers")
            data["cells"] = {key: cell for key, cell in data["cells"].items() if cell["group"] not in gone}
            data["results"] = [its for its in data["results"] if its["cell"] in data["cells"]]
            for its in data["results"]:
                its.pop("worst_us", None)

        self.changed(folder / "bench.json", change)
        for path in folder.glob("*.json"):
            if path.name != "bench.json":
                path.unlink()
        page, block = readme.performance(), readme.results()
        words = ("**Prefill**", "DeepSeek-V4", "**Host time", "Fuzzing", "Under load")
        assert [word for word in words if word in page] == []
        assert "Inside vLLM" not in block and "Worst launch" not in block and "\n\n\n" not in page + block

    def test_a_figure_of_another_run_is_not_compared(self, folder: Path) -> None:
        def change(data: dict[str, Any]) -> None:
            data["runs"].append(data["runs"][0])
            for its in data["results"]:
                if its["impl"] == "flashinfer_deterministic":
                    its["run"] = 1

        ratio = "FlashInfer, deterministic 2.00 (2.00,"
        assert ratio in " ".join(readme.performance().split())
        self.changed(folder / "bench.json", change)
        assert "| 131,072 x 64 | 4.0 | 8.0 | 8.0 |" in readme.results()  # and no column of FlashInfer's
        assert ratio not in " ".join(readme.performance().split())

    def test_a_missing_file_is_taken_from_another_gpu_whose_name_stands_beside_it(self, folder: Path) -> None:
        other = folder.parent / "h2"
        other.mkdir()
        assert "launches of 33 configurations beside" in " ".join(readme.performance().split())
        for name in ("host_time.json", "stress.json"):
            (folder / name).rename(other / name)
        self.changed(
            other / "host_time.json", lambda data: data["machine"].update(device="NVIDIA H2", commit="abc")
        )
        page = " ".join(readme.performance().split())
        assert "**Host time of an eager call** (NVIDIA H2, commit abc)" in page
        assert "configurations beside" in page  # launches are counted over all GPUs

    def test_figures_of_older_kernels_are_said_to_be_so(self, monkeypatch: pytest.MonkeyPatch) -> None:
        quoted = {"a.json": ["new"], "b.json": ["old", "same"], "c.json": ["old"]}
        monkeypatch.setattr(provenance, "changed_since", lambda commit: commit != "new")
        codes = {None: "today", "same": "today", "old": "before"}
        monkeypatch.setattr(provenance, "machine_code_of", codes.get)
        assert provenance.older_kernels(quoted) == (
            "The kernels have been rewritten since, with the same machine code (host code may "
            "differ): same (`b.json`). "
            "The kernels have changed since they were measured: old (`b.json`, `c.json`)."
        )
        codes[None] = codes["same"] = codes["old"] = None  # type: ignore[assignment]
        assert "changed since they were measured: old (`b.json`, `c.json`); same" in provenance.older_kernels(
            quoted
        )
        monkeypatch.setattr(provenance, "changed_since", lambda commit: False)
        assert provenance.older_kernels(quoted) == ""

    @pytest.mark.parametrize(
        ("page", "files"),
        [
            ("results", ()),
            ("performance", ("bench", "fuzz_1", "host_time", "stress_rewrite")),
            ("vllm", ()),
        ],
    )
    def test_every_quoted_file_says_whose_kernels_it_measured(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, page: str, files: tuple[str, ...]
    ) -> None:
        monkeypatch.setattr(provenance, "changed_since", lambda commit: True)
        monkeypatch.setattr(provenance, "machine_code_of", lambda commit: None)
        made = readme.vllm_figures(folder) if page == "vllm" else getattr(readme, page)()
        told = " ".join(made.split()).partition("The kernels have changed since they were measured:")[2]
        trials = sorted(folder.glob("vllm_trial_*.json"))
        files += tuple(path.stem for path in trials) if page == "vllm" else ()
        assert {name for name in files if f"{name}.json`" not in told} == set()
        assert "stress_ee90c38" not in told
        if page == "results":
            compared = {commit for path in trials for commit in commits_compared(path)}
            assert (
                ".json" not in told
                and compared
                and {it for it in {*compared, "abc"} if it not in told} == set()
            )

    @pytest.mark.parametrize(
        ("name", "change", "wanted"),
        [
            ("bench", lambda data: data.update(format="gvr_topk.bench_kernels/1"), "format"),
            (
                "bench",
                lambda data: data["runs"].append(of_another_gpu(data["runs"][0])),
                "runs on one kind of",
            ),
            ("bench", lambda data: data["results"][0].update(exact=False), "exact results"),
            ("bench", lambda data: data["runs"][0]["sets_in_20_runs"].update(hinted=2), "one selection"),
            ("stress", lambda data: data["totals"].update(clean=False), "a clean run"),
            ("stress_chaos", lambda data: data["totals"].update(launches_with_delays=3), "delays in every"),
            ("stress_rewrite", lambda data: data.update(failure={"hang": True}), "no failure"),
            ("stress_rewrite", lambda data: data["results"][7].update(exact_after=False), "exact launches"),
            ("stress_ee90c38", lambda data: data["totals"].update(clean=True), "the faults of the older"),
            ("fuzz_1", lambda data: data.update(failure={"error": "Mismatch"}), "no mismatch"),
            (
                "vllm_trial_full_8k",
                lambda data: data["engines"][0].update(failures=["8 x 8192: RuntimeError"]),
                "no failures",
            ),
        ],
    )
    def test_a_file_that_contradicts_the_words_is_refused(
        self, folder: Path, capsys: pytest.CaptureFixture[str], name: str, change: Any, wanted: str
    ) -> None:
        self.changed(folder / f"{name}.json", change)
        assert readme.main(check=True) == 1
        assert f"{name}.json: wanted {wanted}" in capsys.readouterr().err

    def test_eager_calls_are_said_to_lose_where_they_do(self, folder: Path) -> None:
        def change(times: dict[str, float]) -> str:
            results = [{"call": call, "us": us} for call, us in times.items()]
            self.changed(folder / "host_time.json", lambda data: data.update(results=results))
            return " ".join(readme.results().split())

        times = {"hinted": 9.0, "dispatcher": 8.0, "zero_": 1.0, "vllm": 8.0, "torch": 7.0}
        assert "(vLLM 8.0, torch.topk 7.0): slower than vLLM and torch.topk (" in change(times)
        assert "(vLLM 8.0, torch.topk 7.0): no slower (" in change(times | {"hinted": 7.0})

    def test_ratios_say_over_how_many_cells_and_how_many_are_wrong(self, folder: Path) -> None:
        def change(data: dict[str, Any]) -> None:
            some = [its for its in data["results"] if its["impl"] == "trtllm"]
            for its in some[:3]:
                its["exact"] = False
            some[3]["cold_us"] = 2.0

        before = re.search(r"TensorRT-LLM 2.00 \(2.00, (\d+) cells\)", " ".join(readme.performance().split()))
        self.changed(folder / "bench.json", change)
        block = " ".join(readme.performance().split())
        assert before is not None and f"(0.50, {int(before[1]) - 3} cells; wrong in 3)" in block
        assert "**Faster than this package** by more than 1 %: TensorRT-LLM at" in block

    def test_the_first_figures_name_the_greatest_loss(self, folder: Path) -> None:
        def change(data: dict[str, Any]) -> None:
            for its in data["results"]:
                cell = data["cells"][its["cell"]]
                if its["impl"] == "vllm" and cell["group"] == "main":
                    its["cold_us"] = {(8192, 64): 3.0, (131072, 64): 2.0}.get((cell["n"], cell["batch"]), 8.0)

        means = "as fast as FlashInfer `top_k` and 2.0 times as fast as torch.topk"
        assert " ".join(readme.summary().split()).endswith(f"{means}.")
        self.changed(folder / "bench.json", change)
        said = " ".join(readme.summary().split())
        assert f"{means}; vLLM" in said
        assert said.endswith(" is up to 2.00 times as fast as this package, at 64 rows of 131,072 scores.")

    def test_commits_that_the_history_lacks_are_refused(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        if not provenance.has_history():
            pytest.skip("this clone has no whole history")
        self.changed(folder / "host_time.json", lambda data: data["machine"].update(commit="0ddba11"))
        assert readme.main(check=True) == 1
        assert "commits: wanted ancestors of this one, got 0ddba11" in capsys.readouterr().err
        monkeypatch.setattr(provenance, "has_history", lambda: False)
        assert provenance.unknown_commits("0ddba11 0ddba12-dirty") == ["0ddba12-dirty"]

    def test_pictures_are_drawn_with_the_figures(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        bench, slices = (readme.PICTURES / f"{name}.png" for name in ("bench", "slices"))
        assert "it was not drawn from bench.json" in readme.pictures(check=True) and not bench.exists()
        find_spec = readme.importlib.util.find_spec
        monkeypatch.setattr(readme.importlib.util, "find_spec", lambda name: None)
        assert "wanted the package matplotlib" in readme.pictures(check=False)
        monkeypatch.setattr(readme.importlib.util, "find_spec", find_spec)
        assert readme.pictures(check=False) == "" and readme.pictures(check=True) == ""
        assert picture.digest_in(bench) == provenance.digest_of((folder / "bench.json").read_bytes())
        self.changed(folder / "vllm_slices_v32_128.json", lambda data: data["engines"].clear())
        before = slices.read_bytes()
        assert "slices.png: it was not drawn from vllm_slices_*.json" in readme.pictures(check=True)
        assert readme.pictures(check=False) == "" and slices.read_bytes() != before
        for path in folder.glob("vllm_slices_*.json"):
            path.unlink()
        slices.unlink()
        assert readme.pictures(check=False) == "" and not slices.exists()

    def test_machine_code_is_that_of_a_commit_with_the_same_sources(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        git = ["git", "-C", str(tmp_path)]
        subprocess.run([*git, "init", "-q"], check=True)
        kernel = tmp_path / "cpp" / "kernels" / "a.cuh"
        kernel.parent.mkdir(parents=True)
        commits = []
        for text in ("one", "one", "two"):
            kernel.write_text(text)
            named = ["-c", "user.name=a", "-c", "user.email=a@b"]
            subprocess.run([*git, "add", "-A"], check=True)
            subprocess.run([*git, *named, "commit", "-qm", text, "--allow-empty"], check=True)
            done = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
            commits.append(done.stdout.strip())
        recorded = tmp_path / "machine_code.json"
        builds = {commits[0]: "a", commits[2]: "b"}
        listed = [{"commit": it, "machine_code": {"sm_90a": code}} for it, code in builds.items()]
        recorded.write_text(json.dumps({"format": provenance.RECORD_FORMAT, "builds": listed}))
        monkeypatch.setattr(provenance, "ROOT", tmp_path)
        monkeypatch.setattr(provenance, "MACHINE_CODE", recorded)
        assert [provenance.machine_code_of(commit) for commit in [*commits, None]] == ["a", "a", "b", "b"]
        kernel.write_text("three")
        assert provenance.machine_code_of(None) is None
        assert provenance.machine_code_of("f" * 40) is None
        recorded.write_text(json.dumps({"builds": json.loads(recorded.read_text())["builds"]}))
        assert provenance.machine_code_of(commits[0]) is None  # a digest of another format
