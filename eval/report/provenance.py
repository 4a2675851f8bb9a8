"""Result files of the pages, and which kernels their figures are of, as Git and the machine code say."""

import json
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eval.common.machine import output_of
from eval.common.paths import ROOT

GPU_SOURCES = ("cpp/kernels", "cpp/include", "cpp/torch")
KERNEL_SOURCES = ("cpp/kernels", "cpp/include", "cpp/CMakeLists.txt")
MACHINE_CODE = ROOT / "eval" / "results" / "machine_code.json"
RECORD_FORMAT = "gvr_topk.machine_code/6"
MEASURED_ARCH = "sm_90a"
APART = {
    "sharded": ("sharded", r"sharded\.json"),
    "topk_items": ("topk_items", r"topk\.json"),
    "prefill_slice": ("prefill_slice", r"(bench_slices|fuzz_.*|stress_.*|vllm_trial_slices_.*)\.json"),
    "sampling": (
        "sampling|topk_logprobs",
        r"(sampling|vllm_(sampler|tpot_sampler|trial_.*_sampled).*)\.json",
    ),
}
"""Kernels by the folder that they are called after: how the names of their folders begin, and the only files
that have figures of them. These are of other kernels, too: stress launches kernels that sample and those of
`topk` as well, which each of its results says.
"""
DIRTY = "-dirty"
COMMIT = re.compile(rf"(?<![0-9a-f,.])[0-9a-f]{{7,40}}(?:{DIRTY})?(?![0-9a-f,.]*[0-9a-f])")
"""A commit in a page's text. Figures of so many digits have commas."""

_SERIAL = re.compile(r"((?:stress|fuzz)(?:_[a-z]+)?)_\d+\.")
Files = dict[str, dict[str, Any]]
Keep = Callable[[Mapping[str, Any]], bool]


class RefusedError(ValueError):
    """A result file has another format, or says that something went wrong."""


def refuse_if(wrong: Any, name: str, wanted: str) -> None:
    """Refuse a file, if something is wrong, whose figures would stand beside words that they contradict."""
    if wrong:
        raise RefusedError(f"{name}: wanted {wanted}, got {wrong}")


@dataclass
class Results:
    """Result files that one page shows: of one GPU. What its folder lacks is taken from one beside it."""

    folder: Path
    quoted: dict[str, set[str]] = field(default_factory=dict)  # commits of the figures shown, by file

    def of_one_gpu(self, pattern: str, keep: Keep | None = None) -> Files:
        """Files by name, all of one folder, so that no table of times mixes GPUs."""
        found = (self._files_in(place, pattern, keep) for place in self._places())
        return next(filter(None, found), {})

    def of_all_gpus(self, pattern: str, keep: Keep | None = None) -> Files:
        """Files by folder and name, those of `folder` first: for counts, which do not depend on the GPU."""
        return {
            f"{place.name}/{name}": data
            for place in self._places()
            for name, data in self._files_in(place, pattern, keep).items()
        }

    def one(self, name: str) -> dict[str, Any]:
        """A file whose figures are shown."""
        return self.quote(self.of_one_gpu(name))[name]

    def quote(self, files: Files) -> Files:
        """Note the commits of files whose figures are shown."""
        self.quoted |= {name: commits_of(data) for name, data in files.items()}
        return files

    def _places(self) -> list[Path]:
        beside = [path for path in sorted(self.folder.parent.iterdir()) if path.is_dir()]
        return [self.folder, *(path for path in beside if path != self.folder)]

    @staticmethod
    def _files_in(place: Path, pattern: str, keep: Keep | None) -> Files:
        files = {path.name: json.loads(path.read_text()) for path in sorted(place.glob(pattern))}
        return {name: data for name, data in files.items() if keep is None or keep(data)}


def commits_of(data: Mapping[str, Any]) -> set[str]:
    """Commits of a result file's figures: that of its machine, or those of its runs that have results."""
    if "runs" in data and "results" in data:
        runs = {result.get("run", 0) for result in data["results"]}
        return {data["runs"][run]["machine"]["commit"] for run in runs}
    machine = data.get("machine")
    return {machine["commit"] if isinstance(machine, Mapping) else data["versions"]["commit"]}


def device_of(data: Mapping[str, Any]) -> str:
    """GPU of a result file's figures."""
    machine = data["runs"][0]["machine"] if "runs" in data and "results" in data else data["machine"]
    return str(machine["device"] if isinstance(machine, Mapping) else machine)


def source_of(*files: Mapping[str, Any]) -> str:
    """GPUs and commits of the figures of result files, as a caption names them."""
    commits: dict[str, set[str]] = {}
    for data in files:
        commits.setdefault(device_of(data), set()).update(commits_of(data))
    return "; ".join(f"{device}, commit {', '.join(sorted(of))}" for device, of in commits.items())


def _git(*arguments: str) -> int:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, check=False).returncode


def changed_since(commit: str) -> bool:
    """Whether the code that runs on the GPU, or launches it, differs from that of a commit.

    Where Git cannot say, as in a shallow clone, it counts as the same.
    """
    return _git("diff", "--quiet", commit, "--", *GPU_SOURCES) == 1


def has_history() -> bool:
    """Whether Git knows every commit before this one."""
    shallow = output_of("git", "-C", str(ROOT), "rev-parse", "--is-shallow-repository")
    return shallow == "false" and _git("rev-parse", "HEAD") == 0


def unknown_commits(text: str) -> list[str]:
    """Commits named in a text that are none of the history of this checkout, or whose sources were changed.

    Without a history only the latter are found.
    """
    named, whole = sorted(set(COMMIT.findall(text))), has_history()
    return [
        commit
        for commit in named
        if commit.endswith(DIRTY) or (whole and _git("merge-base", "--is-ancestor", commit, "HEAD") != 0)
    ]


def machine_code_of(commit: str | None, folder: str = "") -> str | None:
    """Digest of the recorded machine code of a commit's kernels on the GPU that was measured.

    With None those of the working tree; None where nothing was recorded. Kernels that lie `APART` are left
    out but for those of `folder`.
    """
    recorded = json.loads(MACHINE_CODE.read_text())
    for build in recorded["builds"] if recorded.get("format") == RECORD_FORMAT else []:
        commits = [build["commit"], *([commit] if commit else [])]
        if _git("diff", "--quiet", *commits, "--", *KERNEL_SOURCES) == 0:
            code = build["machine_code"]
            return f"{code[MEASURED_ARCH]} {code.get(f'{MEASURED_ARCH} {folder}')}"
    return None


def with_code_of_today(commits: Collection[str], folder: str = "") -> set[str]:
    """Those of some commits whose kernels have the recorded machine code of today's (`machine_code_of`)."""
    today = machine_code_of(None, folder) if commits else None
    return {commit for commit in commits if today is not None and machine_code_of(commit, folder) == today}


def apart_in(name: str) -> str:
    """Folder of kernels that lie `APART` of which a file has figures, or ``""``."""
    file = name.rpartition("/")[2]
    return next((folder for folder, (_, files) in APART.items() if re.fullmatch(files, file)), "")


def is_of_today(data: Mapping[str, Any], folder: str = "") -> bool:
    """Whether a result file's figures are of today's kernels, which may have been rewritten since.

    Of those that lie `APART` only the ones of `folder` count.
    """
    changed = set(filter(changed_since, commits_of(data)))
    return changed == with_code_of_today(changed, folder)


def older_kernels(quoted: Mapping[str, Iterable[str]], name_files: bool = True) -> str:
    """Sentences on figures, by file (serial ones counted) and commit, whose kernels are not today's."""
    same: dict[str, Counter[str]] = {}
    changed: dict[str, Counter[str]] = {}
    for file, commits in quoted.items():
        older = set(filter(changed_since, commits))
        today = with_code_of_today(older, apart_in(file))
        for commit in older:
            found = (same if commit in today else changed).setdefault(commit, Counter())
            found[_SERIAL.sub(r"\1_*.", file)] += 1
    said = []
    for commits, what in (
        (same, "have been rewritten since, with the same machine code (host code may differ):"),
        (changed, "have changed since these:"),
    ):
        of = [
            f"{commit} ({', '.join(sorted(_counted(name, count) for name, count in names.items()))})"
            for commit, names in sorted(commits.items())
        ]
        if of:
            said.append(f"The kernels {what} {'; '.join(of) if name_files else ', '.join(sorted(commits))}.")
    return " ".join(said)


def _counted(name: str, count: int) -> str:
    return f"{count} of `{name}`" if "*" in name else f"`{name}`"
