"""Writes gvr_topk/constants.py: the enumerations and numbers that C++ and Python share.

The C++ headers are the only definition. A test compares the written file with the headers.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEADERS = (
    ROOT / "cpp/include/gvr_topk/params.h",
    ROOT / "cpp/include/gvr_topk/policy.h",
    ROOT / "cpp/torch/flags.h",
)
TARGET = ROOT / "gvr_topk/constants.py"

ENUMS = {
    "Dtype": "Score types, in the order of the kernels' instantiations.",
    "Path": "How a call is served; ``AUTO`` lets the gate and the plan decide.",
    "HintReason": "Whether the state of the last step is used for a row, or why not.",
    "Family": "Kernels that a plan can launch.",
    "PlanProblem": "Why a call cannot be planned as requested.",
    "GuessSource": "Where the first threshold of a row, or the interval around it, came from.",
    "SearchEnd": "How the search of the paper's kernel for a threshold ended.",
    "StatsColumn": "Columns of the statistics tensor.",
}
NUMBERS = {
    "kMaxWidth": "Longest row, in elements, that the kernels are built and tested for.",
    "kMaxRows": "Most rows of one call: their blocks fit one launch.",
    "kMaxPageSize": "Largest page of a page table: positions inside a page are 32-bit numbers.",
    "kMaxNextN": "Most rows of one request.",
    "kMaxClusterSize": "Most CTAs that share one row.",
    "kMaxElementsPerCta": "Most columns that one CTA holds on the least restricted GPU.",
    "kPaperMaxWidth": "Widest buffer of the paper's kernel, in elements.",
    "kBlockSize": "Consecutive scores that count as one block.",
    "kMaxChosenBlocks": "Most blocks of a row that are chosen, or selected in.",
    "kOneLaunchBlocksWidth": "Widest buffer of which one launch chooses blocks, in elements.",
    "kPeerRanks": "Most ranks that agree through memory which all of them write into.",
    "kPeerMaxK": "Most items of a row that ranks choose in that way.",
    "kPeerCtas": "Most CTAs of a launch in which ranks agree.",
    "kPeerCells": "Cells of 8 bytes of the records of all ranks that such a CTA receives.",
    "kMaxTimeoutNs": "Longest time that an exchange waits for a rank, in nanoseconds: a day.",
    "kHeaderWords": "Words of 8 bytes in which ranks have to agree.",
    "kMaxRankedTokens": "Most tokens of a row that a GPU ranks by their log-probabilities.",
    "kFlagPdl": "Flag: launch with programmatic stream serialization.",
    "kFlagQuantileGuess": "Flag: the paper's kernel guesses a quantile of the hinted values, not their mean.",
    "kFlagClampPages": "Flag: a row sees no more than its pages hold.",
    "kFlagDropMasked": "Flag: scores of -inf are not selected.",
    "kFlagStreams": "Flag, for tests: prefill rows stream, however short they are.",
    "kMinArch": "Oldest compute capability served, times ten.",
    "kStateFloats": "Numbers of one slot of the state.",
    "kStateUnknown": "First number of a slot in which no step has left anything.",
    "kStateZScoreOrigin": "First number of a slot whose k-th value stood at the mean of the row's sample.",
    "kStateMaxZScore": "Largest distance from that origin, in deviations of the sample.",
    "kStateValueOnly": "First number of a slot that holds a k-th value and no z-score.",
    "kStateInfinite": "First number of a slot whose k-th value was +inf or NaN.",
    "kStateMasked": "First number of a slot whose k-th value was -inf.",
}


def snake(name: str) -> str:
    """Return a C++ name in upper snake case: ``kMaxRows`` as ``MAX_ROWS``, ``kNextN`` as ``NEXT_N``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.removeprefix("k")).upper()


def number(expression: str) -> str:
    """Value of a C++ constant expression of literals, as Python text.

    Raises
    ------
    ValueError
        The expression holds more than literals, shifts, sums and parentheses.
    """
    plain = re.sub(r"int(?:32|64)_t\{(\d+)\}", r"\1", expression)
    plain = re.sub(r"(?<=[\d.])f\b", "", plain)
    if not re.fullmatch(r"[\d\s.<>()+*-]+", plain):
        raise ValueError(f"expression: wanted literals, got {expression!r}")
    value = eval(plain, {"__builtins__": {}})
    return repr(value)


def enum_members(text: str, name: str) -> list[tuple[str, int]]:
    """Members of a C++ enumeration whose values are all written out.

    Raises
    ------
    ValueError
        There is no such enumeration, or one of its members has no written value.
    """
    found = re.search(rf"enum (?:class )?{name} : \w+ \{{(.*?)\}};", text, re.DOTALL)
    if found is None:
        raise ValueError(f"{name}: wanted an enumeration in the headers, got none")
    body = re.sub(r"//[^\n]*", "", found[1])
    members = []
    for entry in filter(None, (part.strip() for part in body.split(","))):
        member = re.fullmatch(r"k(\w+) = (\d+)", entry)
        if member is None:
            raise ValueError(f"{name}: wanted members with values, got {entry!r}")
        members.append((member[1], int(member[2])))
    return members


def generate() -> str:
    """Text of ``gvr_topk/constants.py``."""
    text = "\n".join(header.read_text(encoding="utf-8") for header in HEADERS)
    lines = [
        '"""Enumerations and numbers that C++ and Python share.',
        "",
        "Written by packaging/generate_constants.py from the headers under cpp; do not edit.",
        '"""',
        "",
        "import enum",
        "",
    ]
    prefixes = {"StatsColumn": "Stat", "GuessSource": "Guess"}
    for name, doc in ENUMS.items():
        lines += ["", f"class {name}(enum.IntEnum):", f'    """{doc}"""', ""]
        for member, value in enum_members(text, name):
            if member == "StatColumns":
                continue
            lines.append(f"    {snake('k' + member.removeprefix(prefixes.get(name, '')))} = {value}")
        lines.append("")
    for name, doc in NUMBERS.items():
        found = re.search(rf"constexpr \w+ {name} = (.*?);", text)
        if found is None:
            raise ValueError(f"{name}: wanted a constant in the headers, got none")
        lines += ["", f"{snake(name)} = {number(found[1])}", f'"""{doc}"""']
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the file, or with ``--check`` say whether it is up to date (exit code 1: it is not)."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if out of date")
    text = generate()
    if parser.parse_args().check:
        raise SystemExit(0 if TARGET.read_text(encoding="utf-8") == text else 1)
    TARGET.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
