"""The configurations that the A/B scripts run by default, put together from the parts under ``configs``."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from eval.common.paths import ROOT
from gvr_topk.config_files import combine

PARTS = ROOT / "configs"
COMBINED = ROOT / "build" / "configs"
BASES = ("serve_tep8", "bench_b200_tep8", "bench_h200_tep8", "eval_dep8")
MTP = (0, 1, 3)
VARIANTS = ("off", "on")


@cache
def combined_configs() -> Path:
    """Write every combination of a base, a number of draft tokens and a variant, and return their folder.

    Their names are ``BASE_mtpN_VARIANT.yaml``. A file that is as it should be is not touched.
    """
    COMBINED.mkdir(parents=True, exist_ok=True)
    for base in BASES:
        for mtp in MTP:
            for variant in VARIANTS:
                parts = [PARTS / "base" / f"{base}.yaml", PARTS / f"heuristic_{variant}.yaml"]
                if mtp:
                    parts.insert(1, PARTS / f"mtp{mtp}.yaml")
                file = COMBINED / f"{base}_mtp{mtp}_{variant}.yaml"
                text = combine(parts)
                if not file.is_file() or file.read_text() != text:
                    partial = file.with_suffix(".partial")
                    partial.write_text(text)
                    partial.replace(file)
    return COMBINED
