"""The sampler's contract in Python integers and fractions, one token after the other.

It shares no code with the package: it reads the coefficients from the C++ header, rounds fractions to fp32
itself, and applies the filters one after the other as `docs/sampling.md` lists them.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

HEADER = Path(__file__).resolve().parents[1] / "cpp" / "include" / "gvr_topk" / "sampling_arithmetic.h"
LITERALS = [
    Fraction(float.fromhex(text))
    for text in re.findall(r"-?0x1\.[0-9a-f]{6}p[+-]\d+", HEADER.read_text(encoding="utf-8"))
]
LOG2_E, LN2_HIGH, LN2_LOW = LITERALS[:3]
EXP2, LOG = LITERALS[3:10], LITERALS[10:]
TOP = 1 << 43
MASK = 0xFFFFFFFF
FILTERS = {
    "vllm": ("min_p", "top_k", "top_p"),
    "hf": ("top_k", "top_p", "min_p"),
    "joint": ("joint", "min_p"),
    "temperature_last": ("top_k", "top_p", "min_p"),
}


def rounded(x: Fraction) -> Fraction:
    """The fp32 number nearest to x, of two the even one."""
    if x == 0:
        return x
    exponent = abs(x.numerator).bit_length() - x.denominator.bit_length()
    if abs(x) < Fraction(2) ** exponent:
        exponent -= 1
    step = Fraction(2) ** (max(exponent, -126) - 23)
    return round(x / step) * step


def horner(coefficients: list[Fraction], x: Fraction) -> Fraction:
    result = coefficients[0]
    for coefficient in coefficients[1:]:
        result = rounded(result * x + coefficient)
    return result


def quotient(x: Fraction, temperature: float) -> Fraction:
    return Fraction(0) if math.isinf(temperature) else rounded(x / Fraction(temperature))


def mass(distance: Fraction | None, temperature: float) -> int:
    """Mass at a distance below the largest logit; None is infinitely far."""
    if distance is None:
        return 0
    y = rounded(distance * quotient(LOG2_E, temperature))
    if y < -43:
        return 0
    power = horner(EXP2, rounded(y - math.floor(y)))
    return (int(power * 2**23) << 20) >> -math.floor(y)


def log_of_split(f: Fraction, exponent: int) -> Fraction:
    rest = rounded(rounded(horner(LOG, f) * f) * rounded(f * f))
    rest = rounded(exponent * LN2_LOW + rest)
    rest = rounded(-f * f / 2 + rest)
    return rounded(exponent * LN2_HIGH + rounded(f + rest))


def log(x: Fraction) -> Fraction:
    exponent = 0
    while x * x * 2 < 1:
        x, exponent = x * 2, exponent - 1
    while x * x >= 2:
        x, exponent = x / 2, exponent + 1
    return log_of_split(x - 1, exponent)


def log_mass(total: int) -> Fraction:
    x, exponent = Fraction(total, TOP), 0
    while x * x > 2:
        x, exponent = x / 2, exponent + 1
    return log_of_split(rounded(x - 1), exponent)


def murmur3(words: list[int]) -> int:
    """Murmur3 of 32-bit words as its author writes it, seed 0."""
    h = 0
    for word in words:
        k = word * 0xCC9E2D51 & MASK
        k = (k << 15 | k >> 17) & MASK
        h ^= k * 0x1B873593 & MASK
        h = ((h << 13 | h >> 19) & MASK) * 5 + 0xE6546B64 & MASK
    h ^= 4 * len(words)
    h = (h ^ h >> 16) * 0x85EBCA6B & MASK
    h = (h ^ h >> 13) * 0xC2B2AE35 & MASK
    return h ^ h >> 16


def hashed(seed: int, position: int, token: int) -> int:
    return murmur3([seed & MASK, seed >> 32 & MASK, position & MASK, token])


def gumbel(hashed: int) -> Fraction:
    u = rounded(Fraction(2 * hashed + 1, 2**33))
    if u < Fraction(1, 4):
        return -log(rounded(u * horner([rounded(Fraction(1, n)) for n in range(8, 0, -1)], u)))
    return -log(-log(max(rounded(1 - u), Fraction(1, 2**24))))


def passed(name: str, ranked: list[int], masses: dict[int, int], s: dict[str, Any]) -> list[int]:
    """Those of the ranked tokens that a filter keeps."""
    if name == "joint":
        both = [set(passed(each, ranked, masses, s)) for each in ("top_k", "top_p")]
        return [token for token in ranked if token in both[0] & both[1]]
    if name == "top_k":
        return ranked[: s["top_k"]] if s["top_k"] > 0 else ranked
    if name == "min_p":
        if not s["min_p"] > 0:
            return ranked
        least = min(Fraction(1), Fraction(min(s["min_p"], 1.0))) * masses[ranked[0]]
        return [token for token in ranked if masses[token] >= least]
    if not s["top_p"] < 1:
        return ranked
    total, before, left = sum(masses[token] for token in ranked), 0, []
    for token in ranked:
        if left and before >= Fraction(max(s["top_p"], 0.0)) * total:
            break
        left.append(token)
        before += masses[token]
    return left


def sample(values: list[float], allowed: list[bool], s: dict[str, Any]) -> dict[str, Any]:
    """All outputs of one row; `s` has temperature, top_k, top_p, min_p, order, noise, seed and position."""
    width = len(values)
    flags = int(any(ok and math.isnan(x) for x, ok in zip(values, allowed, strict=True)))
    unread = [math.isnan(x) or not ok for x, ok in zip(values, allowed, strict=True)]
    values = [-math.inf if gone else x for x, gone in zip(values, unread, strict=True)]
    top = max(values)
    distance = [
        Fraction(0)
        if x == top
        else None
        if math.isinf(x) or math.isinf(top)
        else rounded(Fraction(x) - Fraction(top))
        for x in values
    ]
    ranked = sorted(
        (i for i in range(width) if distance[i] is not None and top > -math.inf),
        key=lambda i: (-values[i], i),
    )
    greedy = not s["temperature"] >= rounded(Fraction(1e-5)) or s["top_k"] == 1
    temperature, active = s["temperature"], s["top_k"] in range(1, width) or s["top_p"] < 1 or s["min_p"] > 0
    limits: tuple[float, int]
    if not ranked:
        flags |= 2
        kept = [unread.index(False) if False in unread else 0]
    elif greedy:
        kept = ranked[:1]
    else:
        kept = ranked
        at = 1.0 if s["order"] == "temperature_last" else temperature
        masses = {token: mass(distance[token], at) for token in ranked}
        for name in FILTERS[s["order"]]:
            kept = passed(name, kept, masses, s)
    if not ranked or greedy:
        temperature, limits = 1.0, (top, kept[0])
        distance[kept[0]] = Fraction(0)
    elif active:
        limits = (values[kept[-1]], kept[-1])
    else:
        limits = (top if top == math.inf else -3.4028234663852886e38, width - 1)
    kept = sorted(kept)
    masses = {token: mass(distance[token], temperature) for token in kept}
    total = sum(masses.values())
    logprobs = [rounded(quotient(distance[i] or Fraction(0), temperature) - log_mass(total)) for i in kept]
    token = kept[0]
    if s["noise"] == "cdf":
        high, low = (hashed(s["seed"], s["position"], field) for field in (0xFFFFFFFE, 0xFFFFFFFF))
        target, so_far = (high << 32 | low) * total >> 64, 0
        for token in kept:
            so_far += masses[token]
            if so_far > target:
                break
    elif len(kept) > 1:
        x = {i: Fraction(0) if top == math.inf else Fraction(values[i]) for i in kept}
        scores = {
            i: rounded(quotient(x[i], temperature) + gumbel(hashed(s["seed"], s["position"], i)))
            for i in kept
        }
        token = max(kept, key=lambda i: (scores[i], -i))
    whole = sum(mass(each, 1.0) for each in distance) if ranked else TOP
    return {
        "token": token,
        "raw": float(rounded((distance[token] or Fraction(0)) - log_mass(whole))),
        "processed": float(logprobs[kept.index(token)]),
        "rank": sum(x >= values[token] for x in values),
        "kept": kept,
        "kept_logprobs": [float(x) for x in logprobs],
        "probabilities": {i: Fraction(masses[i], total) for i in kept},
        "flags": flags,
        "limits": limits,
        "top": top,
        "temperature": temperature,
        "total": total,
    }
