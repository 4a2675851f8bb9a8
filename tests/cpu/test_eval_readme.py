"""The figures of README and docs/performance.md are those of the result files."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eval.common.paths import ROOT
from eval.report import provenance, readme


class TestReadmeTable:
    @pytest.fixture
    def folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A copy of all result files in one folder, those of the pages' GPU before others', to be changed."""
        folder = tmp_path / "results" / "h1"
        folder.mkdir(parents=True)
        others = set(readme.RESULTS.parent.glob("*/*.json")) - set(readme.RESULTS.glob("*"))
        for path in (*sorted(others), *readme.RESULTS.glob("*.json")):
            if not path.stem[-2:].startswith("_") or path.stem == "fuzz_1":  # of several runs the first
                shutil.copy(path, folder)
        monkeypatch.setattr(readme, "RESULTS", folder)
        monkeypatch.setattr(readme, "PICTURES", tmp_path)
        return folder

    @staticmethod
    def changed(path: Path, change: Any) -> None:
        """Change a result file in place."""
        data = json.loads(path.read_text())
        change(data)
        path.write_text(json.dumps(data))

    def test_a_figure_of_another_run_is_not_compared(self, folder: Path) -> None:
        def change(data: dict[str, Any]) -> None:
            data["runs"].append(data["runs"][0])
            for its in data["results"]:
                its["run"] = int(its["impl"] == "flashinfer_deterministic")

        assert ", deterministic |" in readme.results()
        self.changed(folder / "bench.json", change)
        assert ", deterministic |" not in readme.results()

    def test_figures_of_older_kernels_are_said_to_be_so(self, monkeypatch: pytest.MonkeyPatch) -> None:
        quoted = {
            "a.json": ["new"],
            "b.json": ["old", "same"],
            "fuzz_1.json": ["old"],
            "fuzz_22.json": ["old"],
        }
        monkeypatch.setattr(provenance, "changed_since", lambda commit: commit != "new")
        codes = {None: "today", "same": "today", "old": "before"}
        monkeypatch.setattr(
            provenance, "machine_code_of", lambda commit, folder="": codes[commit] and codes[commit] + folder
        )
        assert provenance.older_kernels(quoted) == (
            "The kernels have been rewritten since, with the same machine code (host code may "
            "differ): same (`b.json`). "
            "The kernels have changed since these: old (2 of `fuzz_*.json`, `b.json`)."
        )
        files = [{"machine": {"commit": commit}} for commit in ("new", "same", "old")]
        assert [provenance.is_of_today(data) for data in files] == [True, True, False]
        folders = {"h200/stress_1.json": "prefill_slice", "sharded.json": "sharded", "bench.json": ""}
        folders |= {
            "h100/vllm_sampler_masks.json": "sampling",
            "vllm_trial_slices_mixed.json": "prefill_slice",
        }
        folders |= dict.fromkeys(("vllm_trial_invariance_sampled.json", "sampling.json"), "sampling")
        assert {name: provenance.apart_in(name) for name in folders} == folders
        codes[None] = codes["same"] = codes["old"] = None  # type: ignore[assignment]
        assert "changed since these: old (2 of `fuzz_*.json`, `b.json`); same" in provenance.older_kernels(
            quoted
        )
        monkeypatch.setattr(provenance, "changed_since", lambda commit: False)
        assert provenance.older_kernels(quoted) == ""

    @pytest.mark.parametrize(
        ("changed", "named"),
        [("prefill_slice", lambda c: c.get("slices")), ("sampling", lambda c: c.get("op") == "sample")],
    )
    def test_launches_of_kernels_that_lie_apart_are_of_older_ones_where_theirs_are(
        self, changed: str, named: Callable[[dict[str, Any]], bool], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        files = provenance.Results(ROOT / "eval" / "results" / readme.GPU)
        runs = files.of_all_gpus(
            "stress*.json", lambda run: run["mode"] != "rewrite" and not run["chaos_build"]
        )
        results = [its for name, run in runs.items() if readme.FAULTY not in name for its in run["results"]]
        now = []
        for folder in ("", changed):
            monkeypatch.setattr(
                readme, "is_of_today", lambda run, of="", folder=folder: not of or of != folder
            )
            now.append(readme.stressed(files)["now"]["launches"])
        assert now[0] - now[1] == sum(its["launches"] for its in results if named(its["configuration"])) > 0

    @pytest.mark.parametrize(
        ("name", "change", "wanted"),
        [
            ("bench", lambda data: data.update(format="gvr_topk.bench_kernels/1"), "format"),
            (
                "bench",
                lambda data: data["runs"].append(data["runs"][0] | {"machine": {"device": "another"}}),
                "runs on one kind of",
            ),
            ("bench", lambda data: data["results"][0].update(exact=False), "exact results"),
            (
                "bench",
                lambda data: data["runs"].insert(0, data["runs"][0] | {"sets_in_20_runs": {"hinted": 2}}),
                "one selection",
            ),
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
        listed = [
            {"commit": it, "machine_code": {"sm_90a": "x", "sm_90a sharded": code}}
            for it, code in builds.items()
        ]
        recorded.write_text(json.dumps({"format": provenance.RECORD_FORMAT, "builds": listed}))
        monkeypatch.setattr(provenance, "ROOT", tmp_path)
        monkeypatch.setattr(provenance, "MACHINE_CODE", recorded)
        for folder, codes in {"": 4 * ["None"], "sharded": ["a", "a", "b", "b"]}.items():
            found = [provenance.machine_code_of(commit, folder) for commit in [*commits, None]]
            assert found == [f"x {code}" for code in codes]
        assert provenance.with_code_of_today({commits[0], commits[2]}) == {commits[0], commits[2]}
        assert provenance.with_code_of_today({commits[0], commits[2]}, "sharded") == {commits[2]}
        sharded = provenance.older_kernels({"a.json": commits, "h200/sharded.json": commits[:1]})
        assert sharded == (
            f"The kernels have been rewritten since, with the same machine code (host code may differ): "
            f"{'; '.join(f'{commit} (`a.json`)' for commit in sorted(commits[:2]))}. "
            f"The kernels have changed since these: {commits[0]} (`h200/sharded.json`)."
        )
        kernel.write_text("three")
        assert provenance.machine_code_of(None) is None
        assert provenance.machine_code_of("f" * 40) is None
        recorded.write_text(json.dumps({"builds": json.loads(recorded.read_text())["builds"]}))
        assert provenance.machine_code_of(commits[0]) is None  # a digest of another format
