"""Where lanes of a warp were missing at a collective: the table of a build with GVR_TOPK_CHECK_CONVERGED.

Such a build (``cpp/stress/converged.h``) counts the lanes that reach each collective, and of them those that
come without the whole of their warp. Where any do, `GUARDED_BY` has to say what brings them together.
"""

import ctypes
import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from eval.common.machine import write_json
from eval.common.paths import KERNELS, ROOT
from eval.stress.stress_library import StressError, op_library

_MACROS = re.findall(r"^#define ([a-z_]+)", (ROOT / "cpp/stress/converged.h").read_text(), re.MULTILINE)
COLLECTIVE = re.compile(rf"\b({'|'.join(_MACROS)})\(")

GUARDED_BY = {
    "sampling/row.cuh: const uint32_t high =": "ptxas, in all copies: BRA.DIV or WARPSYNC directly ahead of "
    "the REDUX",
}
"""What guards collectives that lanes may reach apart, by file and the beginning of the source line."""


def collectives() -> dict[str, str]:
    """Source text of every collective that is counted, by ``folder/file:line``."""
    return {
        f"{file.parent.name}/{file.name}:{number}": line.strip()
        for file in sorted(KERNELS.rglob("*.cuh"))
        if file != KERNELS / "ptx" / "warp.cuh"  # counted where it is called
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if COLLECTIVE.search(line.partition("//")[0])
    }


def guard_of(place: str, code: str) -> str | None:
    """What guards a collective, by its place and source text; None if nothing is known to."""
    if "ptx::reconverge(" in code:
        return "is itself the barrier that brings them together"
    line = f"{place.partition(':')[0]}: {code}"
    return next((guard for start, guard in GUARDED_BY.items() if line.startswith(start)), None)


def record(run: dict[str, Any], out: Path | None) -> bool:
    """Add what the loaded library counted, if it does, to ``convergence.json`` beside a run's own results.

    Returns False if lanes came apart where nothing is known to guard the collective.
    """
    library = op_library()
    if library is None or not hasattr(library, "gvr_topk_converged_read"):
        return True
    file = (out or Path("out/run.json")).with_name("convergence.json")
    known = json.loads(file.read_text()) if file.is_file() else {"runs": [], "collectives": {}}
    table = {}
    numbered = defaultdict(list)  # the number is a hash: two lines that share it both get the sum
    for place, code in collectives().items():
        table[place] = {"source": code, "lanes": {}, "lanes_apart": {}, **known["collectives"].get(place, {})}
        path, _, line = place.partition(":")
        numbered[library.gvr_topk_converged_place(path.encode(), int(line))].append(table[place])

    @ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_uint32, ctypes.c_int, ctypes.c_uint64)
    def add(path: bytes, number: int, apart: int, lanes: int) -> None:
        kernel = Path(path.decode()).parent.name
        for row in numbered[number]:
            for key in ("lanes", "lanes_apart")[: 1 + apart]:
                row[key][kernel] = row[key].get(kernel, 0) + lanes

    torch.cuda.synchronize()
    if status := library.gvr_topk_converged_read(add):
        raise StressError(f"gvr_topk_converged_read: CUDA status {status}")
    apart = {place: row for place, row in table.items() if row["lanes_apart"]}
    for place, row in apart.items():
        row["guarded_by"] = guard_of(place, row["source"])
    unguarded = [place for place, row in apart.items() if row["guarded_by"] is None]
    runs = [*known["runs"], {key: run[key] for key in ("format", "seed", "seconds", "machine")}]
    write_json(file, {"runs": runs, "collectives": table})
    reached = sum(bool(row["lanes"]) for row in table.values())
    print(
        f"{reached} of {len(table)} collectives reached, {len(apart)} by lanes apart, unguarded: {unguarded}"
    )
    return not unguarded
