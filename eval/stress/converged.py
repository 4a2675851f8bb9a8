r"""Where lanes of a warp were missing at a collective: the table of a build with GVR_TOPK_CHECK_CONVERGED.

Such a build counts, for every warp collective, the lanes that reached it and those of them that came without
the whole of their warp (cpp/stress/converged.h). A place where lanes came apart is right only if the compiler
has put a warp barrier before the collective, so `EXPLAINED` has to say what guards it.

That such a build sees lanes apart is tried without the barrier at which an H200 once had them apart::

    cp -r cpp build/control_cpp
    sed -i "/void emit_tile(/,/^}/ s/ptx::reconverge(ctx.zero);//" \
        build/control_cpp/kernels/resident/count_and_emit.cuh
    cmake -S build/control_cpp -B build/control -DGVR_TOPK_CHECK_CONVERGED=ON -DGVR_TOPK_ARCHS=90a-real
"""

from __future__ import annotations

import copy
import ctypes
import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from eval.common.machine import write_json
from eval.common.paths import KERNELS
from eval.report.sass import enclosing_function
from eval.stress.stress_library import StressError, op_library

EXPLAINED: dict[str, str] = {
    "cluster/output_offset.cuh: counts = __reduce_add_sync(0xffffffffu, counts);": (
        "ptxas expects lanes to be apart and guards it: BRA.DIV before the REDUX, WARPSYNC on its other side"
    ),
    "cluster/output_offset.cuh: "
    "__reduce_add_sync(0xffffffffu, ctx.lane < kWarps + ctx.warp ? selected[ctx.lane] : 0) + in_warp;": (
        "ptxas expects lanes to be apart and guards it: BRA.DIV before the REDUX, WARPSYNC on its other side"
    ),
    "ptx/warp_scan.cuh: suffix_sums": (
        "a delay of the chaos build takes lanes apart, and ptxas guards what follows the call: BRA.DIV before"
        " the SHFL, WARPSYNC on its other side"
    ),
}
"""What guards the collectives that lanes may reach apart, by file and source text (assembly: function)."""

_COLLECTIVE = re.compile(r"__(?:reduce_\w+|shfl\w*|ballot|any|all|match_any)_sync\(|GVR_COLLECTIVE\(\)")


def place_of(path: str, line: int, places: int) -> int:
    """The number that cpp/stress/converged.h gives a line of a file."""
    hashed = 2166136261
    for character in "/".join(path.split("/")[-2:])[::-1].encode():
        hashed = (hashed ^ character) * 16777619 & 0xFFFFFFFF
    hashed = (hashed ^ line) * 16777619 & 0xFFFFFFFF
    return (hashed ^ hashed >> 16) % places


def collectives(kernels: Path = KERNELS) -> dict[tuple[str, int], str]:
    """Every warp collective by ``(folder/file, line)``: source text, or for assembly the function."""
    found = {}
    for file in sorted(kernels.rglob("*.cuh")):
        for number, line in enumerate(file.read_text().splitlines(), 1):
            code = line.partition("//")[0].strip()
            if _COLLECTIVE.search(code) and not code.startswith("#"):
                place = f"{file.parent.name}/{file.name}"
                if code == "GVR_COLLECTIVE();":
                    code = enclosing_function(f"{place}:{number}", kernels).removeprefix(f"{place}: ")
                found[place, number] = code
    return found


def converged_table() -> dict[str, Any] | None:
    """The counts of the loaded library since it was loaded; waits for the device.

    Returns
    -------
    dict or None
        For each collective its place, its source text, by kernel the warps that reached it and the lanes that
        came apart, and what guards it if any did. None where the library does not count.
    """
    library = op_library()
    if library is None or not hasattr(library, "gvr_topk_converged_files"):
        return None
    torch.cuda.synchronize()
    library.gvr_topk_converged_file.restype = ctypes.c_char_p
    places = int(library.gvr_topk_converged_places())
    counts = (ctypes.c_uint64 * (2 * places))()
    read: dict[str, dict[int, tuple[int, int]]] = {}
    for file in range(library.gvr_topk_converged_files()):
        status = library.gvr_topk_converged_counts(file, counts)
        if status != 0:
            raise StressError(f"gvr_topk_converged_counts({file}): CUDA status {status}")
        kernel = Path(library.gvr_topk_converged_file(file).decode()).parent.name
        read[kernel] = {i: (counts[2 * i], counts[2 * i + 1]) for i in range(places) if counts[2 * i]}
    return named(read, places)


def named(read: dict[str, dict[int, tuple[int, int]]], places: int) -> dict[str, Any]:
    """A table of counts by kernel and number of the place, with the places' names."""
    sources: defaultdict[int, list[tuple[str, str]]] = defaultdict(list)
    for (file, line), code in collectives().items():
        sources[place_of(file, line, places)].append((f"{file}:{line}", f"{file}: {code}"))
    rows = []
    numbers = set(sources).union(*read.values())
    for number in numbers:
        names, texts = zip(*sources.get(number, [(f"place {number}", "not in these sources")]), strict=True)
        kernels = {
            kernel: {"warps": lanes // 32, "lanes_apart": apart}
            for kernel, (lanes, apart) in sorted((k, c[number]) for k, c in read.items() if number in c)
        }
        row: dict[str, Any] = {"place": " or ".join(names), "source": " or ".join(texts), "kernels": kernels}
        if any(count["lanes_apart"] for count in kernels.values()):
            row["guarded_by"] = next((EXPLAINED[text] for text in texts if text in EXPLAINED), None)
        rows.append(row)
    rows.sort(key=lambda row: row["place"])
    return {"places": rows, **totals(rows)}


def totals(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Sums of a table, and the places where lanes came apart that nothing explains."""
    counts = [count for row in rows for count in row["kernels"].values()]
    return {
        "collectives": len(rows),
        "collectives_reached": sum(bool(row["kernels"]) for row in rows),
        "warps": sum(count["warps"] for count in counts),
        "lanes_apart": sum(count["lanes_apart"] for count in counts),
        "unexplained": [row["place"] for row in rows if row.get("guarded_by", "") is None],
    }


def record(data: dict[str, Any], file: Path | None = None) -> bool:
    """Add the loaded library's table to a run's results, if it counts; False if a place is unexplained.

    Parameters
    ----------
    data : dict
        Gets ``converged``.
    file : Path, optional
        A file of all runs' tables, to which this one is added; made if it is not there.
    """
    table = converged_table()
    if table is None:
        return True
    data["converged"] = table
    print(describe(table), flush=True)
    if file is not None:
        known: dict[str, Any] = {"runs": [], "converged": {"places": []}}
        if file.is_file():
            known = json.loads(file.read_text())
        run = {key: data[key] for key in ("format", "mode", "seed", "seconds", "machine") if key in data}
        write_json(file, {"runs": [*known["runs"], run], "converged": added(known["converged"], table)})
    return not table["unexplained"]


def added(known: dict[str, Any], table: dict[str, Any]) -> dict[str, Any]:
    """The sum of two tables."""
    rows = {row["place"]: copy.deepcopy(row) for row in known["places"]}
    for row in table["places"]:
        kernels = rows.setdefault(row["place"], {**row, "kernels": {}})["kernels"]
        for kernel, count in row["kernels"].items():
            before = kernels.get(kernel, {"warps": 0, "lanes_apart": 0})
            kernels[kernel] = {key: before[key] + count[key] for key in count}
        rows[row["place"]] |= {"guarded_by": row["guarded_by"]} if "guarded_by" in row else {}
    ordered = [rows[place] for place in sorted(rows)]
    return {"places": ordered, **totals(ordered)}


def describe(table: dict[str, Any]) -> str:
    """The table in a line, and each place where lanes came apart in another."""
    lines = [
        "{collectives_reached} of {collectives} collectives were reached, by {warps} warps; "
        "{lanes_apart} lanes came apart".format(**table)
    ]
    lines += [
        f"  {row['place']}: {row['kernels']}: {row['guarded_by'] or 'UNEXPLAINED'}"
        for row in table["places"]
        if "guarded_by" in row
    ]
    return "\n".join(lines)
