"""Write the figures of README and of two pages of ``docs`` from the JSON files under ``eval/results``.

The words are those of ``eval/report/templates``, the figures those of one GPU's folder, `GPU`, but for counts
(fuzzing, runs under load, rows compared in engines), which are over all GPUs. Each caption names the GPU and
the commit as the file has them. A file that this folder lacks is taken from another GPU's folder; the
benchmark's file must be there. A figure of one run is never compared with one of another (`Index`). The
pictures are drawn too, where they are not those of the files. With ``--check``, look whether all is there and
write nothing. A file of another format is refused, and so is one that says that something went wrong, or that
names a commit which this history does not have.

    python -m eval readme
    python -m eval readme --check
"""

import hashlib
import importlib.util
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any

import typer

from eval.bench.bench_report import (
    BASELINES,
    FLOOR,
    FORMAT,
    OURS,
    SHAPES,
    Cell,
    Index,
    peer_names,
    sampling_table,
    slowdowns,
    topk_table,
    worst_launch,
    worst_ratios,
)
from eval.bench.our_kernels import HINTED, NO_HINT, PAPER, PDL, PREFILL, PREFILL_ROUNDS
from eval.common.paths import ROOT
from eval.report.pages import listed, render, shown, table, word
from eval.report.picture import digest_in, draw, draw_slices
from eval.report.provenance import (
    RefusedError,
    Results,
    device_of,
    is_of_today,
    older_kernels,
    refuse_if,
    source_of,
    unknown_commits,
)
from eval.report.vllm_report import (
    SLICES,
    in_engine,
    mixed_call,
    slices_figures,
    total_compared,
    vllm_figures,
)
from eval.stress.stress_cases import GUESSES

GPU = "h200"
"""Folder of the results that the pages show."""
RESULTS = ROOT / "eval" / "results" / GPU
BENCH = "bench.json"
PICTURES = ROOT / "docs"
"""Folder of the pictures of README and of the site."""
README_SHAPES = ((8192, 1), (131072, 1), (1048576, 1), (8192, 64), (131072, 64))
"""Length and batch of the rows that the README shows."""
README_PEERS = ("vllm", "flashinfer_deterministic", "torch")
"""Other projects' implementations that the README shows: the one it replaces, the one with the same contract,
and PyTorch's."""
SUMMARY_PEERS = ("vllm", "flashinfer", "torch")
"""Other projects' implementations that the README's first sentence of figures names."""
PEERS = tuple(peer_names(()))
"""Implementations of other projects that the tables show."""
MOST_NAMED = 3
"""Cells that a sentence names before it counts the others."""
OWN_PREFILL_COLUMNS = {PREFILL: "this package", PREFILL_ROUNDS: "radix rounds", NO_HINT: "decode op"}
PREFILL_PEERS = {
    impl: impl.removesuffix("_prefill")
    for impl in ("torch", "trtllm_prefill", "vllm_prefill", "flashinfer_ragged", "flashinfer_deterministic")
}
"""Other projects' operators for prefill, and the implementations whose names they have."""
MASK_NAMES = {
    "mask:kth_is_neg_inf": "k-th value -inf",
    "mask:kth_is_pos_inf": "k-th value +inf",
    "mask:kth_is_nan": "k-th value NaN",
    "mask:99_percent": "99 % masked",
}
HARD_SHAPE = (131072, 1)
"""Length and batch of the masked and rescaled rows that are shown."""
TRACE_STEPS = 256
"""Steps of a trace: its first row is shorter than its last by one less."""
FLOOR_SHAPES = (*SHAPES, (262144, 1), (131072, 8), (1048576, 64))
"""Shapes for which the time of reading the rows is shown."""
BLOCKS_SHAPES = ((16384, 1), (131072, 1), (131072, 64))
WIDTHS = (0, 131072, 1048576)
"""Columns of the buffers that are shown; 0 for as many as the row has."""
COUNTS = ("launches", "wrong_launches", "guard_words")  # of runs under load
FAULTY = "stress_ee90c38.json"
"""A stress run of an older commit, whose faults it found."""
OPS = ("decode", "prefill", "blocks", "sampling")
"""Kinds of the fuzzer's cases."""
NOISE = 0.01
"""Differences up to this share are not spoken of."""


def load_bench() -> dict[str, Any]:
    """The kernel benchmark's file, if every result of this package is exact, and every selection the same."""
    data: dict[str, Any] = json.loads((RESULTS / BENCH).read_text())
    if data.get("format") != FORMAT:
        hint = "run python -m eval bench on the GPU and put its file there"
        raise RefusedError(f"{BENCH}: wanted format {FORMAT!r}, got {data.get('format')!r}; {hint}")
    own = [result for result in data["results"] if result["impl"] in OURS]
    wrong = [f"{its['impl']} at {its['cell']}" for its in own if its["exact"] is False]
    refuse_if(wrong, BENCH, "exact results of this package")
    several = [impl for run in data["runs"] for impl in OURS if run["sets_in_20_runs"].get(impl, 1) != 1]
    refuse_if(several, BENCH, "one selection in all runs")
    devices = {run["machine"]["device"] for run in data["runs"]}
    refuse_if(len(devices) > 1 and sorted(devices), BENCH, "runs on one kind of GPU")
    return data


def summary() -> str:
    """The README's first figures: the mean ratio to other projects, and where one of them wins by most."""
    _, index, values = common_values(Results(RESULTS))
    ratios, peers = worst_ratios(index), values["peers"]
    won = [(ratio, key, impl) for impl in SUMMARY_PEERS for key, ratio in index.ratios(impl, HINTED).items()]
    ratio, key, impl = min(won)
    (cell,) = index.cells(lambda cell: cell["key"] == key)
    return render(
        "summary.md.j2",
        **values,
        means=[ratios[peer] | {"name": peers[peer]} for peer in SUMMARY_PEERS],
        won={"times": 1 / ratio, "by": peers[impl], "width": None, **cell} if ratio < 1 - NOISE else None,
    )


def results() -> str:
    """The README's section: one table, what was measured in an engine, and a few sentences."""
    files = Results(RESULTS)
    _, index, values = common_values(files)
    peers = with_figures(index, {impl: values["peers"][impl] for impl in README_PEERS})
    short = times_lines(index, README_SHAPES, (HINTED, *peers))
    values |= {
        "short": table(["scores x rows", "this package", *peers.values()], short),
        "engine": in_engine(files),
        "compared": total_compared(files),
        "sampling": mixed_call(files),
        "worst": worst_launches(index),
    }
    text = render("readme.md.j2", **values, older="")
    named = {name: {commit for commit in commits if commit in text} for name, commits in files.quoted.items()}
    # Launches of kernels that lie apart and have changed are not among those that the text counts as today's.
    named = {name.replace("stress_", "others_"): commits for name, commits in named.items()}
    return render("readme.md.j2", **values, older=older_kernels(named, name_files=False))


def performance() -> str:
    """Figures of the page that says what takes how long."""
    files = Results(RESULTS)
    bench, index, values = common_values(files)
    peers, run = values["peers"], bench["runs"][0]
    columns = {HINTED: "this package", PDL: "with PDL", NO_HINT: "no hint", **with_figures(index, peers)}
    v4 = {impl: name for impl, name in columns.items() if impl != PDL}
    of_v4 = (
        [f"{cell['k']:,}", cell_name(cell), *(shown(index.figure(cell["key"], impl)) for impl in v4)]
        for cell in index.group("v4")
    )
    kept = (f"{keep**0.5:.2f}" for keep in sorted({cell["keep"] for cell in index.group("main")}))
    values |= {
        "folder": RESULTS.name,
        "caption": f" ({values['device']}, {values['commits']})",
        "given": listed([f"`{name}`" for name in run[HINTED]]),
        "bare": listed([f"`{name}`" for name in run[NO_HINT]]),
        "kept": " or ".join(kept),
        "times": times_table(index, columns),
        "hard": hard_table(index, values["each_launches"]),
        "prefill": prefill(bench, index, peers),
        "wide": wide_table(index),
        "floor": table(
            "N x batch | this package | reading alone",
            times_lines(index, by_batch(FLOOR_SHAPES), (HINTED, FLOOR), digits=2),
        ),
        "v4": index.group("v4") and table(["k", "N x batch", *v4.values()], of_v4, align="rl"),
        "hint": hint_figures(index),
        "sampling": sampled(files),
        "any_k": any_k(files),
        "sharded": sharded(files),
        "fuzz": fuzzed(files),
        "blocks": blocks(index),
    }
    return render("performance.md.j2", **values, older=older_kernels(files.quoted))


def common_values(files: Results) -> tuple[dict[str, Any], Index, dict[str, Any]]:
    """The benchmark, and what both pages say of it, of the host and of the runs under load."""
    bench = load_bench()
    index = Index(bench)
    files.quote({BENCH: bench})
    peers = peer_names(run["baselines"] for run in bench["runs"])
    k, dtype = (" or ".join(sorted({str(c[what]) for c in index.group("main")})) for what in ("k", "dtype"))
    first = bench["runs"][0]["machine"]["commit"]
    commits = [bench["runs"][result["run"]]["machine"]["commit"] for result in bench["results"]]
    earlier = [commit for commit in commits if commit != first]
    names = ", ".join(sorted(set(earlier)))
    told = f"{len(earlier):,} of the file's {len(commits):,} figures are of commit {names}"
    launches = {its["each_us"]["launches"] for its in index.results if "each_us" in its}
    ratios = worst_ratios(index)
    named = {impl: peers.get(impl, impl) for impl in BASELINES} | {PAPER: "the paper's kernel"}
    values = {
        "device": device_of(bench),
        "commits": f"commit {first}{f'; {told}' if earlier else ''}",
        "k": k,
        "dtype": dtype,
        "peers": peers,
        "each_launches": " or ".join(f"{each:,}" for each in sorted(launches)),
        "ratios": [{"name": name, **ratios[impl]} for impl, name in peers.items() if impl in ratios],
        "faster": [f"{named[impl]} at {cells}" for impl, cells in cells_where_faster(index).items()],
        "selections": selections(bench, peers),
        "host": host_time(files),
        "stress": stressed(files),
    }
    return bench, index, values


def cell_name(cell: Cell) -> str:
    """Length, batch and, where it is wider than the rows, the buffer's width."""
    return shape_name(cell["n"], cell["batch"]) + buffer_name(cell)


def buffer_name(cell: Cell) -> str:
    return f" in {cell['width']:,} columns" if cell.get("width") else ""


def shape_name(n: int, batch: int) -> str:
    return f"{n:,} x {batch:,}"


def by_batch(shapes: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    return sorted(shapes, key=lambda shape: shape[::-1])


def trace_name(cell: Cell) -> str:
    """Name of the trace that a cell's rows are of, without what all have in common; empty for other rows."""
    name = str(cell["rows"].partition(":")[2])
    return name.removeprefix("smollm2_dsaidx_").removesuffix("_32k")


def with_figures(index: Index, peers: Mapping[str, str]) -> dict[str, str]:
    """Implementations of other projects that have a figure at some shape of the main sweep."""
    keys = [cell["key"] for cell in index.group("main")]
    return {
        impl: name for impl, name in peers.items() if any(index.figure(key, impl) is not None for key in keys)
    }


def _extreme(choose: Any, figures: Iterable[float | None]) -> float | None:
    """The least or greatest of the figures that there are."""
    known = [figure for figure in figures if figure is not None]
    return float(choose(known)) if known else None


def slowest(index: Index, n: int, batch: int, *groups: str) -> float | None:
    """Slowest cell of some groups at a shape; traces, whose rows grow, count at the length they grow to."""
    shorter = {"trace": TRACE_STEPS}
    return _extreme(
        max,
        (
            index.figure(cell["key"], HINTED)
            for cell in index.group(*groups)
            if cell["batch"] == batch and n - shorter.get(cell["group"], 1) < cell["n"] <= n
        ),
    )


def times_lines(
    index: Index, shapes: Iterable[tuple[int, int]], impls: Sequence[str], digits: int = 1
) -> list[list[str]]:
    """Microseconds per launch of some implementations, a line for each shape."""
    return [
        [shape_name(*shape), *(shown(index.figure(index.main(*shape), impl), digits) for impl in impls)]
        for shape in shapes
    ]


def times_table(index: Index, columns: Mapping[str, str]) -> str:
    """Microseconds per launch of every implementation; behind this package's, those on harder rows."""
    shapes = by_batch(SHAPES)
    rows = times_lines(index, shapes, tuple(columns))
    for row, shape in zip(rows, shapes, strict=True):
        hard = slowest(index, *shape, "mask", "adversarial", "scale")
        row[2:2] = map(shown, (slowest(index, *shape, "trace"), hard))
    first, *others = columns.values()
    return table(["N x batch", first, "real traces", "worst case", *others], rows)


def real_and_hard(index: Index) -> dict[str, list[Cell]]:
    """Cells of real traces, layers and rows that are hard, by the name that a table gives them."""
    layers = index.group("layer")
    named = {f"trace {trace_name(cell)}": [cell] for cell in index.group("trace")}
    named[f"{word(len(layers))} layers, mean"] = layers
    named["random model"] = index.group("engine")[-1:]
    at = [cell for cell in index.group("scale", "mask") if (cell["n"], cell["batch"]) == HARD_SHAPE]
    named["new scale each step"] = [cell for cell in at if cell["group"] == "scale"]
    named |= {name: [cell for cell in at if cell["rows"] == rows] for rows, name in MASK_NAMES.items()}
    return {name: cells for name, cells in named.items() if cells}


def hard_table(index: Index, launches: str) -> str:
    """Microseconds on real traces and hard rows, and the worst single launch."""
    kinds = real_and_hard(index)

    def mean(cells: Sequence[Cell], impl: str, name: str = "cold_us") -> float | None:
        figures = [index.figure(cell["key"], impl, name) for cell in cells]
        known = [figure for figure in figures if figure is not None]
        return sum(known) / len(known) if len(known) == len(figures) else None

    shapes = (" and ".join(dict.fromkeys(map(cell_name, cells))) for cells in kinds.values())
    figures = {
        "this package": (mean(cells, HINTED) for cells in kinds.values()),
        "no hint": (mean(cells, NO_HINT) for cells in kinds.values()),
        f"worst launch of {launches}": (mean(cells, HINTED, "worst_us") for cells in kinds.values()),
        "fastest other": (_extreme(min, (mean(cells, peer) for peer in PEERS)) for cells in kinds.values()),
    }
    rows = [["N x batch", *shapes], *([name, *map(shown, line)] for name, line in figures.items())]
    return table(["rows", *kinds], rows)


def prefill(bench: Mapping[str, Any], index: Index, peers: Mapping[str, str]) -> dict[str, Any] | None:
    """Chunks of a prefill: their commits, the memory's rate, who was not measured, and a table."""
    cells = index.group("prefill")
    if not cells:
        return None
    keys = {cell["key"] for cell in cells}
    measured = [result for result in index.results if result["cell"] in keys]
    runs = [bench["runs"][run] for run in {result["run"] for result in measured}]
    rates = sorted({run["copy_bytes_per_second"] for run in runs if run.get("copy_bytes_per_second")})
    ran = {result["impl"] for result in measured}
    named = OWN_PREFILL_COLUMNS | {impl: peers[other] for impl, other in PREFILL_PEERS.items()}
    columns = {impl: name for impl, name in named.items() if impl in ran}
    rows = []
    for cell in cells:
        figures = [index.figure(cell["key"], impl) for impl in columns]
        figures += [cell.get("memory_us")] if rates else []
        kind = f", trace {of}" if (of := trace_name(cell)) else ", new scales" * (cell["rows"] != "causal")
        whole = (shown(figure, 1 if figure is None or figure < 100 else 0) for figure in figures)
        rows.append([shape_name(cell["batch"], cell["n"]) + buffer_name(cell) + kind, *whole])
    return {
        "commits": ", ".join(sorted({run["machine"]["commit"] for run in runs})),
        "rate": " and ".join(f"{rate / 1e12:.2f}" for rate in rates),
        "absent": [name for impl, name in named.items() if impl not in ran],
        "table": table(["rows x columns", *columns.values(), *(["memory"] if rates else [])], rows),
    }


def wide_table(index: Index) -> str:
    """Microseconds of rows in buffers wider than they are, of shapes with all widths; empty for none."""
    keys: dict[tuple[int, int], dict[int, str]] = {}
    for cell in index.group("main", "wide_buffers"):
        keys.setdefault((cell["n"], cell["batch"]), {})[cell.get("width") or 0] = cell["key"]
    rows = [
        [shape_name(*shape)]
        + [
            f"{shown(index.figure(found[width], HINTED))} ({shown(index.figure(found[width], 'vllm'))})"
            for width in WIDTHS
        ]
        for shape, found in sorted(keys.items())
        if set(WIDTHS) <= set(found)
    ]
    return table("N x batch | as the row | 131,072 | 1,048,576", rows) if rows else ""


def blocks(index: Index) -> list[str]:
    """Microseconds of the two-level indexer and, in brackets, of PyTorch's operators."""
    cells = {(cell["n"], cell["batch"]): cell["key"] for cell in index.group("v41")}

    def both(key: str, prefix: str = "") -> str:
        names = (f"{prefix}{name}" for name in ("blocks", "in_blocks"))
        return " and ".join(shown(index.figure(key, name)) for name in names)

    keys = {shape: cells.get(shape, "") for shape in BLOCKS_SHAPES} if cells else {}
    return [f"{shape_name(*shape)} {both(key)} ({both(key, 'torch_')})" for shape, key in keys.items()]


def cells_where_faster(index: Index) -> dict[str, str]:
    """For each implementation that is faster than this package: at which cells, and how many times."""
    names = {cell["key"]: cell_name(cell) for cell in index.cells()}
    found = {}
    for other in (PAPER, *BASELINES):
        times = {
            names[key]: 1 / ratio for key, ratio in index.ratios(other, HINTED).items() if ratio < 1 - NOISE
        }
        most = sorted(times, key=times.__getitem__, reverse=True)
        told = ", ".join(f"{cell} ({times[cell]:.2f} times)" for cell in most[:MOST_NAMED])
        if most:
            found[other] = told + f" and {len(most) - MOST_NAMED} more" * (len(most) > MOST_NAMED)
    return found


def worst_launches(index: Index) -> dict[str, Any] | None:
    """The slowest single launch of all groups whose launches were timed one by one."""
    ratios = {key: ratio for cell in index.cells() if (ratio := worst_launch(index, key := cell["key"]))}
    if not ratios:
        return None
    worst = max(ratios, key=lambda key: ratios[key])
    (cell,) = index.cells(lambda cell: cell["key"] == worst)
    return {
        "ratio": ratios[worst],
        "us": index.figure(worst, HINTED, "worst_us"),
        "rows": f"layer {trace_name(cell)}" if cell["group"] == "trace" else f"{cell['group']} rows",
        "cell": cell_name(cell),
        "mean": index.figure(worst, HINTED),
    }


def hint_figures(index: Index) -> dict[str, Any]:
    """What the hint, masks and PDL do to the time."""
    costs = index.ratios(HINTED, NO_HINT).values()
    pdl = index.ratios(PDL, HINTED, lambda cell: cell["group"] == "main")
    names = {cell["key"]: cell_name(cell) for cell in index.cells()}
    return {
        "mean": statistics.geometric_mean(costs) if costs else None,
        "most": _extreme(max, costs),
        "masked": _extreme(max, slowdowns(index, "mask").values()),
        "slower_with_pdl": [
            f"{names[key]} ({ratio:.2f} times)" for key, ratio in pdl.items() if ratio > 1 + NOISE
        ],
    }


def selections(bench: Mapping[str, Any], peers: Mapping[str, str]) -> list[str]:
    """How many selections each implementation makes of the same row, in the run where these are most."""
    sets: dict[str, int] = {}
    for run in bench["runs"]:
        counted = {impl: seen for impl, seen in run["sets_in_20_runs"].items() if isinstance(seen, int)}
        sets |= {impl: max(seen, sets.get(impl, 0)) for impl, seen in counted.items()}
    named: defaultdict[int, list[str]] = defaultdict(list)
    for impl, name in {HINTED: "this package", **peers}.items():
        if impl in sets:
            named[sets[impl]].append(name.replace(",", ""))  # which parts the names of the list
    return [f"{seen} by {listed(names)}" for seen, names in sorted(named.items())]


def _eager_us(data: dict[str, Any]) -> dict[str, float]:
    return {result["call"]: result["us"] for result in data["results"]}


def host_time(files: Results) -> dict[str, Any]:
    """What an eager call costs the host, beside other projects' calls."""
    data = files.one("host_time.json")
    us = _eager_us(data)
    rows = {
        "this package: `state`, `row_slot` and `out` given": us["hinted"],
        "the op's own overload, which `bind` returns": us["dispatcher"],
        **{name: us[impl] for impl, name in peer_names([data["baselines"]]).items() if impl in us},
        "`zero_` of one element": us["zero_"],
    }
    named = {"vllm": "vLLM", "trtllm": "TensorRT-LLM", "torch": "torch.topk"}
    others = {name: us[call] for call, name in named.items() if call in us}
    slower = listed([name for name, time in others.items() if us["hinted"] > (1 + NOISE) * time])
    alone = files.quote(files.of_all_gpus("host_time_alone.json")).values()
    return {
        "source": source_of(data),
        "alone": [(*map(_eager_us(of).get, ("hinted", "dispatcher")), source_of(of)) for of in alone],
        "us": us["hinted"],
        "bound": us["dispatcher"],
        "others": [f"{name} {shown(time)}" for name, time in others.items()],
        "verdict": f"slower than {slower}" if slower else "no slower",
        "table": table("call | us", ([name, shown(time)] for name, time in rows.items())),
    }


def sampled(files: Results) -> dict[str, Any]:
    """What a call of the sampler takes."""
    data = files.one("sampling.json")
    refuse_if(sum(each["wrong"] for each in data["results"]), "sampling.json", "no wrong token")
    peers = [peer for each in data["results"] for peer in each["peers"].values()]
    return data | {
        "source": source_of(data),
        "table": table(*sampling_table(data["results"])),
        "peer_rows": sum(
            len(each["peers"]) * min(each["rows"], data["checked_rows"]) for each in data["results"]
        ),
        "outside": sum(peer["outside"] for peer in peers),
    }


def any_k(files: Results) -> dict[str, Any]:
    """What `topk` takes at any k, beside ``torch.topk``."""
    data = files.one("topk.json")
    results = data["results"]
    refuse_if(sum(each["wrong"] for each in results), "topk.json", "no wrong item")
    shares = [each["topk_us"] / each["torch_us"] for each in results]
    ends = {"least": min(shares), "most": max(shares)}
    return {"source": source_of(data), "table": table(*topk_table(results)), **ends}


def sharded(files: Results) -> dict[str, Any]:
    """What `sharded_topk` takes on several GPUs, beside other exact ways to the same."""
    data = files.one("sharded.json")
    wrong = [name for each in data["results"] for name, count in each["wrong"].items() if count]
    refuse_if(wrong, "sharded.json", "no wrong row")
    lines = [
        [f"{each['width']:,} x {each['rows']}", f"{each['k']:,}", *map(shown, each["us"].values())]
        for each in data["results"]
    ]
    ways = ["scores a rank x rows", "k", *data["results"][0]["us"]]
    return data | {"source": source_of(data), "table": table(ways, lines)}


def stressed(files: Results) -> dict[str, Any]:
    """Runs of today's kernels ``beside`` other work, under ``delays``, and on arguments that are rewritten.

    None of them may have found a fault, but the ``faulty`` one of an older commit.
    """
    runs = files.of_all_gpus("stress*.json")
    faulty = [runs.pop(name) for name in list(runs) if name.endswith(FAULTY)]
    kinds: dict[str, list[dict[str, Any]]] = {"beside": [], "delays": [], "rewrite": [], "now": []}
    for name, run in runs.items():
        refuse_if(run.get("failure"), name, "no failure")
        refuse_if(not run["totals"]["clean"] and run["totals"], name, "a clean run")
        if run["mode"] == "rewrite":
            inexact = sum(not result["exact_after"] for result in run["results"])
            refuse_if(inexact, name, "exact launches after the last rewriting")
        elif run["chaos_build"]:
            undelayed = run["totals"]["launches"] - run["totals"]["launches_with_delays"]
            refuse_if(undelayed, name, "delays in every launch")
        kind = "rewrite" if run["mode"] == "rewrite" else "delays" if run["chaos_build"] else "beside"
        kinds[kind].append(run)
        if kind == "beside" and is_of_today(run) and (of_today := _of_today(run))["results"]:
            kinds["now"].append(of_today)
    files.quote(runs)
    if faulty:
        refuse_if(faulty[0]["totals"]["clean"], FAULTY, "the faults of the older commit")
    counted = {kind: _counted(its) for kind, its in {**kinds, "faulty": faulty}.items()}
    return counted | {"source": source_of(*runs.values())}


def _apart(configuration: Mapping[str, Any]) -> str:
    """The folder of the kernels that a configuration launches, if they lie apart."""
    if configuration.get("slices"):
        return "prefill_slice"
    return {"sample": "sampling", "topk": "topk_items"}.get(configuration.get("op", ""), "")


def _of_today(run: Mapping[str, Any]) -> dict[str, Any]:
    """A run's results of today's kernels, where only such as lie apart have changed."""
    same = {folder: is_of_today(run, folder) for folder in ("prefill_slice", "sampling", "topk_items")}
    results = [result for result in run["results"] if same.get(_apart(result["configuration"]), True)]
    return {
        **run,
        "results": results,
        "totals": {name: sum(result[name] for result in results) for name in COUNTS},
    }


def _counted(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """What was launched and found in runs under load; None for no runs."""
    results = [result for run in runs for result in run["results"]]
    ways = {result["rewritten"] for result in results if "rewritten" in result}
    if not runs:
        return None
    return {
        **{name: sum(run["totals"].get(name, 0) for run in runs) for name in COUNTS},
        "source": source_of(*runs),
        "configurations": len({result["configuration"]["name"] for result in results}),
        "neighbours": len({result.get("neighbour", "none") for result in results} - {"none"}),
        "ways": len(ways),
        "arguments": len({way.partition(":")[0] for way in ways}),
        "disturbed": sum(result.get("disturbed_launches", 0) for result in results),
        "guessed": sum(its["launches"] for its in results if its.get("rewritten", "").startswith(GUESSES)),
    }


def fuzzed(files: Results) -> dict[str, Any] | None:
    """What the fuzzer called and found."""
    found = files.quote(files.of_all_gpus("fuzz_*.json"))
    for name, run in found.items():
        refuse_if(run.get("failure"), name, "no mismatch")
    if not found:
        return None
    runs = list(found.values())
    parts = [(op, part) for run in runs for op, part in run["drawn"].items()]
    paths = {op: sorted({path for name, part in parts if name == op for path in part["paths"]}) for op in OPS}
    return {
        "source": source_of(*runs),
        "cases": sum(run["cases"] for run in runs),
        "of": {op: sum(part["cases"] for name, part in parts if name == op) for op in OPS},
        "paths": {op: ", ".join(f"`{path}`" for path in its) for op, its in paths.items()},
        "rows": sum(run["rows"] for run in runs),
        "neighbours": len({name for run in runs for name in run["beside"]}),
        "seconds": sum(run["seconds"] for run in runs),
    }


def pictures(check: bool) -> str:
    """Draw each picture anew where it is not that of its files; what is wrong with one, or nothing."""
    slices = slices_figures(Results(RESULTS))
    bench = (RESULTS / BENCH).read_bytes()
    drawings: dict[str, tuple[str, bytes, Callable[..., None], Any]]
    drawings = {"bench.png": (BENCH, bench, draw, load_bench())}
    if slices is not None:
        drawings["slices.png"] = (SLICES, repr(slices).encode(), draw_slices, slices)
    for name, (source, data, drawing, figures) in drawings.items():
        digest = hashlib.sha256(data).hexdigest()
        if digest_in(PICTURES / name) == digest:
            continue
        if check:
            return f"{name}: it was not drawn from {source} as it is; run python -m eval readme"
        if importlib.util.find_spec("matplotlib") is None:
            return f"{name}: wanted the package matplotlib to draw it, got none: pip install -e '.[eval]'"
        drawing(figures, PICTURES / name, digest)
        print(f"drawn: {PICTURES / name}")
    return ""


def main(
    check: Annotated[bool, typer.Option("--check", help="Write nothing, and say what would change.")] = False,
) -> int:
    """Write, or check, the figures of each page."""
    failed = False
    try:
        pages = {
            (ROOT / "README.md", "summary"): summary(),
            (ROOT / "README.md", "results"): results(),
            (ROOT / "docs" / "performance.md", "results"): performance(),
            (ROOT / "docs" / "engine_evidence.md", "results"): vllm_figures(RESULTS),
        }
    except RefusedError as error:
        print(error, file=sys.stderr)
        return 1
    if unknown := unknown_commits("\n".join(pages.values())):
        print(f"commits: wanted ancestors of this one, got {', '.join(unknown)}", file=sys.stderr)
        return 1
    for (page, block), figures in pages.items():
        text = page.read_text()
        begin, end = f"<!-- {block}:begin -->", f"<!-- {block}:end -->"
        head, rest = text.split(begin)
        expected = f"{head}{begin}\n{figures}\n{end}{rest.split(end)[1]}"
        if not check:
            page.write_text(expected)
        elif text != expected:
            failed = True
            print(f"{page.name}: its figures are not those of eval/results; run python -m eval readme")
    if problem := pictures(check):
        failed = True
        print(problem, file=sys.stderr)
    return int(failed)
