"""Every shipped YAML is valid, and every pair differs in the heuristic top-k only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from eval.common.pairs import check_pair
from gvr_topk.config import load_config

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
PAIRED = sorted(path for folder in ("serve", "bench", "eval") for path in (CONFIGS / folder).glob("*.yaml"))
PATTERNS = ("serve/tep8", "bench/b200_tep8", "bench/h200_tep8", "eval/dep8")


def _name(path: Path) -> str:
    return str(path.relative_to(CONFIGS))


def test_the_set_is_complete() -> None:
    wanted = {
        f"{pattern}_mtp{mtp}_{side}.yaml"
        for pattern in PATTERNS
        for mtp in (0, 1, 3)
        for side in ("off", "on")
    }
    assert {_name(path) for path in PAIRED} == wanted


@pytest.mark.parametrize("path", sorted(CONFIGS.rglob("*.yaml")), ids=_name)
def test_file_is_valid_and_every_key_is_known(path: Path) -> None:
    assert load_config(path).unknown_keys == ()


@pytest.mark.parametrize("path", PAIRED, ids=_name)
def test_file_holds_what_its_name_says(path: Path) -> None:
    config = load_config(path)
    assert config.heuristic_enabled is path.stem.endswith("_on")
    assert config.next_n == 1 + int(path.stem.rpartition("_mtp")[2].partition("_")[0])
    assert config.enable_attention_dp is path.stem.startswith("dep8")
    first = path.read_text().splitlines()[0]
    assert f"configs/{_name(path)}" in first  # the command in the header is the one for this file


@pytest.mark.parametrize("off", [path for path in PAIRED if path.stem.endswith("_off")], ids=_name)
def test_pair_is_a_fair_comparison(off: Path) -> None:
    check_pair(off, off.with_name(off.name.replace("_off", "_on")))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_mtp_settings_differ_in_speculation_only(pattern: str) -> None:
    def rest(mtp: int) -> dict[str, Any]:
        data = yaml.safe_load((CONFIGS / f"{pattern}_mtp{mtp}_on.yaml").read_text())
        data.pop("speculative_config", None)
        return data

    assert rest(0) == rest(1) == rest(3)


@pytest.mark.parametrize("path", [path for path in PAIRED if path.parent.name == "bench"], ids=_name)
def test_min_latency_files_are_of_batch_one(path: Path) -> None:
    config = load_config(path)
    assert config.cuda_graph_config is not None and config.cuda_graph_config.max_batch_size == 1
    assert config.kv_cache_config.enable_block_reuse is False  # a fixed prompt would be prefilled once only
