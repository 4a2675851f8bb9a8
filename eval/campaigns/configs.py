"""The two configurations of a comparison, put together from ``configs``, may differ in one thing only."""

from functools import cache
from pathlib import Path
from pprint import pformat

from eval.common.machine import write_text
from eval.common.paths import ROOT
from eval.common.status import InputError
from gvr_topk.config import ConfigError, ServeConfig, load_config
from gvr_topk.config_files import combine

FLAG = "sparse_attention_config.enable_heuristic_topk"
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
    for base, mtp, variant in ((base, mtp, variant) for base in BASES for mtp in MTP for variant in VARIANTS):
        drafts = [PARTS / f"mtp{mtp}.yaml"] if mtp else []
        text = combine([PARTS / "base" / f"{base}.yaml", *drafts, PARTS / f"heuristic_{variant}.yaml"])
        file = COMBINED / f"{base}_mtp{mtp}_{variant}.yaml"
        if not file.is_file() or file.read_text() != text:
            write_text(file, text)
    return COMBINED


def check_pair(off: Path, on: Path) -> tuple[ServeConfig, ServeConfig]:
    """Load both sides of a comparison and require that only the heuristic top-k differs.

    If another key differed, the comparison would measure that as well. What is written counts, not what it
    defaults to, for defaults differ between versions of TensorRT-LLM.
    """
    try:
        sides = load_config(off), load_config(on)
    except ConfigError as error:
        raise InputError(str(error)) from None
    for path, config, wanted in ((off, sides[0], False), (on, sides[1], True)):
        if config.heuristic_enabled is not wanted:
            raise InputError(f"{path}: {FLAG}: wanted {str(wanted).lower()}, got {str(not wanted).lower()}")
    differing = _sections(sides[0]).items() ^ _sections(sides[1]).items()
    if rest := ", ".join(sorted({key for key, _ in differing})):
        raise InputError(f"{off} and {on}: wanted them to differ in {FLAG} only, got {rest} differing too")
    return sides


def _sections(config: ServeConfig) -> dict[str, str]:
    """What is written under each key, without the flag. An absent key, null and an empty section differ."""
    data = config.model_dump(exclude_unset=True)
    (data.get("sparse_attention_config") or {}).pop("enable_heuristic_topk", None)
    return {key: pformat(value) for key, value in data.items()}
