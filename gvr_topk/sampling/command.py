"""``gvr-topk sample``: what a setting keeps of logits in a file."""

from __future__ import annotations

import argparse
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gvr_topk.sampling import LIMIT_WORDS, sample
from gvr_topk.sampling.arguments import Noise, Order

BAR = 40
"""Characters of the longest bar."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--logits", type=Path, required=True, metavar="FILE", help=".npz file")
    parser.add_argument("--array", default="logits", help="its array, [rows, vocabulary]; default: logits")
    parser.add_argument("--temperature", type=float, default=1.0, metavar="T")
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="default: off, 0")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="default: off, 1")
    parser.add_argument("--min-p", type=float, default=0.0, metavar="P", help="default: off, 0")
    parser.add_argument("--order", choices=[order.name.lower() for order in Order], default="vllm")
    parser.add_argument("--noise", choices=[noise.name.lower() for noise in Noise], default="cdf")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--position", type=int, default=0, help="of the first row; the others follow")


def _read(file: Path, name: str) -> torch.Tensor:
    try:
        with np.load(file) as arrays:
            logits = arrays[name]
    except (KeyError, AttributeError, TypeError, ValueError, zipfile.BadZipFile):
        raise ValueError(f"{file}: wanted a .npz file with an array {name!r}") from None
    return torch.from_numpy(np.atleast_2d(logits))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Draw a token of every row, and say how many tokens and what share of the mass the setting keeps."""
    logits = _read(options.logits, options.array)
    rows = logits.shape[0]
    counts, logprobs = torch.empty(rows, dtype=torch.int32), torch.empty(rows)
    limits, whole = torch.empty(2, rows, LIMIT_WORDS, dtype=torch.int32)
    names = ("temperature", "top_k", "top_p", "min_p", "order", "noise")
    setting = {name: getattr(options, name) for name in names}
    where = {"seeds": options.seed, "positions": options.position + torch.arange(rows)}
    tokens = sample(
        logits,
        **setting,
        logprobs=logprobs,
        logprob_mode="processed",
        counts=counts,
        limits=limits,
        **where,
    )
    # A greedy row has its share at temperature 1, as its limits do.
    sample(logits, temperature=limits[:, 3].contiguous().view(torch.float32), limits=whole, **where)
    kept_mass, whole_mass = (
        words[:, 6:].contiguous().view(torch.int64).double() for words in (limits, whole)
    )
    return {
        "rows": rows,
        "vocabulary": logits.shape[1],
        "tokens": tokens.tolist(),
        "probabilities": logprobs.exp().tolist(),
        "kept": counts.tolist(),
        "mass": (kept_mass / whole_mass).flatten().tolist(),
    }


def run(options: argparse.Namespace) -> None:
    """Print what the setting keeps."""
    facts = measure(options)
    if options.as_json:
        print(json.dumps(facts))
        return
    kept, mass = np.array(facts["kept"]), np.array(facts["mass"])
    print(f"{facts['rows']:,} rows of {facts['vocabulary']:,} logits")
    if not kept.size:
        return
    print(f"kept tokens: mean {kept.mean():,.1f}, median {np.median(kept):,.0f}, most {kept.max():,}")
    print(f"kept mass:   mean {mass.mean():.4f}, least {mass.min():.4f}")
    # Bins are 1, 2, 3-4, 5-8 and so on.
    bins = np.bincount(np.ceil(np.log2(kept)).astype(int))
    for power in np.flatnonzero(bins).tolist():
        low, high = (1 << power - 1) + 1 if power else 1, 1 << power
        name = f"{low:,}" if low == high else f"{low:,} to {high:,}"
        print(f"{name:>18} {bins[power]:6,} rows {'#' * round(BAR * bins[power] / bins.max())}".rstrip())
