"""The numbers of the sampler, bit for bit as the kernels compute them.

``cpp/include/gvr_topk/sampling_arithmetic.h`` has the same formulas and the same coefficients for the device;
`docs/sampling.md` states them. Everything is a function of single values, vectorized here with NumPy, whose
fp32 operations round to nearest as IEEE 754 says. NumPy has no fused multiply-add, so `fma` computes one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

MASS_BITS = 43
MAX_MASS = 1 << MASS_BITS
"""Mass of the row's largest value. A sum over `MAX_VOCABULARY` values stays below 2**63."""

MAX_VOCABULARY = 1 << 20

EVERYTHING = (1 << 64) - 1
"""Prefix mass that no row reaches: nothing is cut."""

GREEDY_TEMPERATURE = np.float32(1e-5)

KEY_NEGATIVE_INFINITY = 0x007FFFFF
KEY_INFINITY = 0xFF800000
KEY_LEAST_FINITE = KEY_NEGATIVE_INFINITY + 1

LOG2_E = np.float32(float.fromhex("0x1.715476p+0"))
LN2_HIGH = np.float32(float.fromhex("0x1.62e400p-1"))
LN2_LOW = np.float32(float.fromhex("0x1.7f7d1cp-20"))


def _coefficients(text: str) -> tuple[np.float32, ...]:
    return tuple(np.float32(float.fromhex(number)) for number in text.split())


EXP2_COEFFICIENTS = _coefficients(
    "0x1.c54180p-13 0x1.46d648p-10 0x1.3d0b92p-7 0x1.c68912p-5 0x1.ebfd58p-3 0x1.62e42cp-1 0x1.000000p+0"
)
"""Of a polynomial near 2**f on [0, 1], the highest power first. All are positive, so Horner's scheme in fp32
rises with f, from 1 to 2: it rounds rising functions, step by step."""

LOG_COEFFICIENTS = _coefficients(
    "-0x1.38b3e6p-4 0x1.055b10p-3 -0x1.0d8568p-3 0x1.22da2ep-3"
    " -0x1.547242p-3 0x1.99a008p-3 -0x1.000228p-2 0x1.555554p-2"
)
"""Of a polynomial near (log(1 + f) - f + f**2 / 2) / f**3 on [sqrt(1/2) - 1, sqrt(2) - 1]."""

LOG1P_COEFFICIENTS = tuple(np.float32(1) / np.float32(n) for n in range(8, 0, -1))
"""Of the series of -log(1 - u) / u, as vLLM cuts it off."""

_SQRT_HALF_BITS = 0x3F3504F3
_SQRT2_MANTISSA = 0xB504F333F9DE6484  # sqrt(2) * 2**63
_LEAST_DIFFERENCE = np.float32(2.0**-24)


def fma(a: Array, b: Array, c: Any) -> Array:
    """Compute ``a * b + c`` of fp32 numbers with one rounding.

    The product is exact in fp64. The sum is rounded to odd there, and a number that was rounded to odd with
    more than 26 bits rounds to fp32 as the exact sum does.
    """
    product = np.asarray(a, np.float64) * np.asarray(b, np.float64)
    addend = np.asarray(c, np.float64)
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    bits = np.atleast_1d(total).view(np.int64)
    inexact = (error != 0) & (bits & 1 == 0)
    away_from_zero = (error > 0) == (total > 0)
    odd = bits + np.where(inexact, np.where(away_from_zero, 1, -1), 0)
    return odd.view(np.float64).astype(np.float32)


def order_keys(values: Array) -> Array:
    """Map fp32 values to unsigned keys: a larger value has a larger key, both zeros share one.

    The keys are those of the top-k ops, but for NaN, which ranks as -inf here.
    """
    bits = values.view(np.uint32)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    bits = np.where(magnitude == 0, np.uint32(0), bits)
    keys = np.where(bits >> np.uint32(31) == 1, ~bits, bits | np.uint32(0x80000000))
    return np.where(magnitude > 0x7F800000, np.uint32(KEY_NEGATIVE_INFINITY), keys)


def distances(values: Array, keys: Array, top: int, maximum: np.float32) -> Array:
    """Subtract the row's `maximum`, whose key is `top`; equal values are at 0, infinite ones too."""
    with np.errstate(invalid="ignore", over="ignore"):
        return np.where(keys == np.uint32(top), np.float32(0), values - maximum)


def is_greedy(temperature: np.float32) -> bool:
    """Whether a temperature selects the largest value; NaN does."""
    return not temperature >= GREEDY_TEMPERATURE


def mass_scale(temperature: np.float32) -> np.float32:
    """Factor that turns a distance into an exponent of 2."""
    with np.errstate(all="ignore"):
        return np.float32(LOG2_E / temperature)


def masses(distance: Array, scale: np.float32) -> Array:
    """Masses of values at these distances below the largest: ``2**43 * 2**(distance * scale)``, uint64."""
    with np.errstate(all="ignore"):
        exponent = distance * scale
        seen = exponent >= -MASS_BITS  # not NaN
        exponent = np.where(seen, exponent, np.float32(0))
        whole = np.floor(exponent)
        fraction = exponent - whole
    power = np.full_like(fraction, EXP2_COEFFICIENTS[0])
    for coefficient in EXP2_COEFFICIENTS[1:]:
        power = fma(power, fraction, coefficient)
    mantissa = (power * np.float32(2**23)).astype(np.uint64)
    mass = (mantissa << np.uint64(MASS_BITS - 23)) >> (-whole).astype(np.uint64)
    return np.where(seen, mass, np.uint64(0))


def _scaled(share: np.float32, total: int) -> int:
    """Return the least integer that is not below ``share * total``, for a share in (0, 1)."""
    numerator, denominator = float(share).as_integer_ratio()
    return -(-numerator * total // denominator)


def top_p_mass(top_p: np.float32, total: int) -> int:
    """Return the prefix mass at which top-p cuts: a candidate stays while the mass before it is below."""
    if not top_p < 1:
        return EVERYTHING
    return 1 if top_p <= 0 else _scaled(top_p, total)


def min_p_mass(min_p: np.float32) -> int:
    """Return the least mass that min-p keeps."""
    if not min_p > 0:
        return 0
    return MAX_MASS if min_p >= 1 else _scaled(min_p, MAX_MASS)


def _log_of_split(fraction: Array, exponent: Array) -> Array:
    """Logarithm of ``(1 + fraction) * 2**exponent``."""
    series = np.full_like(fraction, LOG_COEFFICIENTS[0])
    for coefficient in LOG_COEFFICIENTS[1:]:
        series = fma(series, fraction, coefficient)
    rest = (series * fraction) * (fraction * fraction)
    rest = fma(exponent, LN2_LOW, rest)
    rest = fma(np.float32(-0.5) * fraction, fraction, rest)
    return fma(exponent, LN2_HIGH, fraction + rest)


def log(values: Array) -> Array:
    """Natural logarithm of positive normal fp32 numbers."""
    bits = values.view(np.int32) - np.int32(_SQRT_HALF_BITS)
    mantissa = (bits & np.int32(0x7FFFFF)) + np.int32(_SQRT_HALF_BITS)
    return _log_of_split(mantissa.view(np.float32) - np.float32(1), (bits >> 23).astype(np.float32))


def log_mass(mass: int) -> np.float32:
    """Natural logarithm of ``mass / 2**43``, for a mass from 1 to 2**64 - 1."""
    exponent = mass.bit_length() - 1
    aligned = mass << (63 - exponent)
    above = aligned > _SQRT2_MANTISSA
    difference = np.int64(aligned - (1 << 64 if above else 1 << 63))
    fraction = np.float32(difference) * np.float32(2.0 ** (-64 if above else -63))
    power = np.float32(exponent + above - MASS_BITS)
    return np.float32(_log_of_split(np.array([fraction]), np.array([power]))[0])


def log_probabilities(distance: Array, temperature: np.float32, log_total: np.float32) -> Array:
    """Log-probabilities of values at these distances, of a total mass with logarithm `log_total`."""
    with np.errstate(all="ignore"):
        # At an infinite temperature the quotient of an infinite distance would be NaN.
        return np.where(distance == -np.inf, distance, distance / temperature - log_total)


def _rotated(values: Array, by: int) -> Array:
    return (values << np.uint32(by)) | (values >> np.uint32(32 - by))


def hash32(seed: Any, position: Any, token: Any) -> Array:
    """Hash a seed, a position and a token with murmur3, as vLLM's second model runner does.

    Seed and position are integers of 64 bits, of which the seed's both halves and the position's lower half
    count. The arguments broadcast.
    """
    seeds = np.asarray(seed, np.int64).view(np.uint64)
    low = np.uint64(0xFFFFFFFF)
    words = (
        (seeds & low).astype(np.uint32),
        (seeds >> np.uint64(32)).astype(np.uint32),
        (np.asarray(position, np.int64).view(np.uint64) & low).astype(np.uint32),
        np.asarray(token).astype(np.uint32),
    )
    h = np.zeros(1, np.uint32)
    with np.errstate(over="ignore"):
        for word in words:
            h = h ^ (_rotated(word * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593))
            h = _rotated(h, 13) * np.uint32(5) + np.uint32(0xE6546B64)
        h = h ^ np.uint32(16)
        h = (h ^ (h >> np.uint32(16))) * np.uint32(0x85EBCA6B)
        h = (h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return h ^ (h >> np.uint32(16))


def gumbel(hashes: Array) -> Array:
    """Gumbel noise ``-log(-log(1 - u))`` of the uniform number u = (hash + 1/2) / 2**32, in fp32."""
    high, low = hashes >> np.uint32(16), hashes & np.uint32(0xFFFF)
    u = high.astype(np.float32) * np.float32(2.0**-16)
    u = u + (low.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    series = np.full_like(u, LOG1P_COEFFICIENTS[0])
    for coefficient in LOG1P_COEFFICIENTS[1:]:
        series = fma(series, u, coefficient)
    direct = -log(np.maximum(np.float32(1) - u, _LEAST_DIFFERENCE))
    return -log(np.where(u < np.float32(0.25), u * series, direct))


def uniform64(seed: Any, position: Any) -> Array:
    """Return 64 uniform bits of a seed and a position; their token fields are those of no token."""
    low, high = hash32(seed, position, 0xFFFFFFFF), hash32(seed, position, 0xFFFFFFFE)
    return (high.astype(np.uint64) << np.uint64(32)) | low


def draw_targets(uniform: Array, total: int) -> Array:
    """Scale 64 uniform bits to a mass: ``uniform * total >> 64``, below `total`."""
    # The product of 128 bits, by halves of 32 bits.
    half, mask = np.uint64(32), np.uint64(0xFFFFFFFF)
    a, b = uniform >> half, uniform & mask
    c, d = np.uint64(total >> 32), np.uint64(total & 0xFFFFFFFF)
    middle = a * d + ((b * d) >> half)
    return a * c + (middle >> half) + ((b * c + (middle & mask)) >> half)
