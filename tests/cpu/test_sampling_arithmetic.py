"""The numbers of the sampler: how good they are, and the same bits in NumPy and in C++."""

from __future__ import annotations

import ctypes
import math
import re
import shutil
import subprocess
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gvr_topk.sampling import arithmetic as numbers
from tests import sampling_oracle as oracle

ROOT = Path(__file__).resolve().parents[2]
HEADER = ROOT / "cpp" / "include" / "gvr_topk" / "sampling_arithmetic.h"
MANY = 1_000_000
LOG2_E = float(numbers.LOG2_E)
"""The temperature at which an exponent is a distance."""
Array = np.ndarray[Any, Any]
Compiled = Callable[..., Array]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """Call a function of the header on arrays, and on single fp32 numbers."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    library = tmp_path_factory.mktemp("arithmetic") / "libarithmetic.so"
    command = [compiler, "-std=c++17", "-O2", "-ffp-contract=off", "-shared", "-fPIC"]
    command += ["-Wall", "-Wextra", "-Werror"]
    command += [f"-I{ROOT}/cpp/include", f"{ROOT}/tests/cpp/sampling_arithmetic_c.cpp", "-o", str(library)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    loaded = ctypes.CDLL(str(library))

    def call(name: str, dtype: Any, *arguments: Any) -> Array:
        arrays = [np.ascontiguousarray(value) for value in arguments if np.ndim(value)]
        out = np.full(arrays[0].size, 0x5A, np.uint8).astype(dtype)
        rest = iter(arrays)
        given = [
            ctypes.c_void_p(next(rest).ctypes.data) if np.ndim(value) else ctypes.c_float(value)
            for value in arguments
        ]
        getattr(loaded, name)(ctypes.c_int64(out.size), *given, ctypes.c_void_p(out.ctypes.data))
        return out

    return call


def same_bits(a: Array, b: Array) -> None:
    kind = np.dtype(f"u{a.dtype.itemsize}")
    differ = np.flatnonzero(a.astype(b.dtype, copy=False).view(kind) != b.view(kind))
    assert differ.size == 0, (differ.size, differ[:5], a[differ[:5]], b[differ[:5]])


def any_floats(rng: np.random.Generator, count: int = MANY) -> Array:
    """Floats of every exponent, infinities and NaN among them."""
    return rng.integers(0, 1 << 32, count, dtype=np.uint32).view(np.float32)


def any_masses(rng: np.random.Generator, count: int) -> Array:
    """Masses from 1 to 2**63, as many of each length, and those around powers of 2."""
    lengths = rng.integers(0, 63, count).astype(np.uint64)
    rest = rng.integers(0, 1 << 63, count, dtype=np.uint64) & ((np.uint64(1) << lengths) - np.uint64(1))
    near = np.array([(1 << n) + d for n in range(1, 64) for d in (-1, 0, 1)], np.uint64)
    return np.concatenate([(np.uint64(1) << lengths) | rest, near])


def any_distances(rng: np.random.Generator) -> Array:
    distance = -np.abs(rng.standard_normal(MANY) * 20).astype(np.float32)
    distance[: MANY // 4] = -np.abs(any_floats(rng, MANY // 4))
    return distance


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(39)


def test_fma_rounds_once(rng: np.random.Generator) -> None:
    for scale in (2.0**-30, 1.0, 2.0**30):
        a, b = rng.standard_normal((2, 2000)).astype(np.float32)
        c = (rng.standard_normal(2000) * scale).astype(np.float32)
        c[:500] = (-a[:500].astype(np.float64) * b[:500]).astype(np.float32)  # cancels
        got = numbers.fma(a, b, c).tolist()
        each = zip(a.tolist(), b.tolist(), c.tolist(), strict=True)
        exact = [Fraction(x) * Fraction(y) + Fraction(z) for x, y, z in each]
        assert got == [float(oracle.rounded(x)) for x in exact]


def test_fma_does_not_round_twice() -> None:
    """The product is 2**-24 - 2**-70, which fp64 would round away and leave a tie."""
    a, b = np.array([1 - 2.0**-23], np.float32), np.array([(1 + 2.0**-23) * 2.0**-24], np.float32)
    assert numbers.fma(a, b, np.float32(1 + 2.0**-23)) == 1 + 2.0**-23
    assert numbers.fma(-a, b, np.float32(1 + 2.0**-23)) == 1 + 2.0**-23


def test_masses_rise_with_the_exponent(compiled: Compiled) -> None:
    """Every fraction of an octave, and the borders between octaves: one's top is the next one's bottom."""
    # An exponent's fraction is a multiple of 2**-24.
    fraction = (np.arange((1 << 24) + 1) * 2.0**-24).astype(np.float32)
    octave = compiled("mass_of", np.uint64, fraction - np.float32(1), LOG2_E)
    assert (np.diff(octave.astype(np.int64)) >= 0).all()
    assert octave[0] == numbers.MAX_MASS // 2 and octave[-1] == numbers.MAX_MASS
    exact = np.exp2(fraction.astype(np.float64) - 1) * numbers.MAX_MASS
    assert np.abs(octave / exact - 1).max() < 1.1e-7
    exponents = np.random.default_rng(1).uniform(-44, 0, 500_000).astype(np.float32)
    whole = -np.arange(44, dtype=np.float32)
    borders = np.concatenate(
        [whole, np.nextafter(whole, np.float32(1)), np.nextafter(whole, np.float32(-99))]
    )
    exponents = np.sort(np.concatenate([exponents, borders[borders <= 0]]))
    mass = numbers.masses(exponents, np.float32(1))
    assert (np.diff(mass.astype(np.int64)) >= 0).all()
    exact = np.exp2(exponents.astype(np.float64)) * numbers.MAX_MASS
    assert (np.abs(mass.astype(np.float64) - exact) <= 1 + 1.3e-7 * exact)[exponents >= -43].all()
    assert mass[exponents < -43].max() == 0 and mass[exponents >= -43].min() == 1


def test_shares_of_a_mass_are_exact(compiled: Compiled, rng: np.random.Generator) -> None:
    shares = any_floats(rng, 6000)
    shares[:3000] = rng.uniform(0, 1, 3000)
    shares[3000:3100] = 1 - 2.0**-24 * rng.integers(0, 3, 100)
    special = [0.0, -0.0, 1.0, 1.5, -1.0, np.inf, -np.inf, np.nan, 1e-45, 2.0**-126, 2.0**-64, 2.0**-63]
    shares = np.concatenate([shares, np.array(special, np.float32)])
    total = rng.choice(any_masses(rng, 1000), shares.size)
    cuts = compiled("top_p_mass_of", np.uint64, shares, total)
    floors = compiled("min_p_mass_of", np.uint64, shares)
    for share, mass, cut, floor in zip(shares, total.tolist(), cuts, floors, strict=True):
        assert (numbers.top_p_mass(share, mass), numbers.min_p_mass(share)) == (cut, floor)
        if 0 < share < 1:
            exact = Fraction(float(share))
            assert cut == math.ceil(exact * mass) and floor == math.ceil(exact * numbers.MAX_MASS)
        else:
            assert cut == (1 if share <= 0 else numbers.EVERYTHING)
            assert floor == (numbers.MAX_MASS if share >= 1 else 0)


def test_logarithms(compiled: Compiled, rng: np.random.Generator) -> None:
    one = np.arange(0x3F000000, 0x40000000, dtype=np.uint32).view(np.float32)  # every number of [1/2, 2)
    others = rng.integers(0x00800000, 0x7F800000, MANY, dtype=np.uint32).view(np.float32)
    for values in (one, np.sort(others)):
        exact = np.log(values.astype(np.float64))
        got = compiled("log_of", np.float32, values)
        assert (np.abs(got - exact) <= 1.5 * np.spacing(np.abs(exact).astype(np.float32))).all()
        assert (np.diff(got) >= 0).all()
    for mass in map(int, any_masses(rng, 2000)):
        exact = math.log1p((mass - numbers.MAX_MASS) / numbers.MAX_MASS)
        assert abs(float(numbers.log_mass(mass)) - exact) <= 1.6 * np.spacing(np.float32(abs(exact)))


def test_hash_is_murmur3(rng: np.random.Generator) -> None:
    assert oracle.murmur3([int.from_bytes(b"test", "little")]) == 0xBA6BD213
    for seed, position, token in rng.integers(-(1 << 63), 1 << 63, (500, 3)).tolist():
        expected = oracle.hashed(seed, position, token & oracle.MASK)
        assert numbers.hash32(seed, position, token & oracle.MASK).item() == expected


def test_noise_is_gumbel(rng: np.random.Generator) -> None:
    special = [0, 1, 2, (1 << 32) - 1, *range((1 << 30) - 3, (1 << 30) + 3)]
    hashes = np.sort(np.concatenate([rng.integers(0, 1 << 32, MANY), special])).astype(np.uint32)
    noise = numbers.gumbel(hashes)
    u = ((hashes + 0.5) / 2**32).astype(np.float32).astype(np.float64)
    exact = -np.log(-np.log1p(-u[u < 1]))
    assert np.abs(noise[u < 1] - exact).max() < 3e-6
    assert noise[-1] == np.float32(-math.log(24 * math.log(2)))  # of a number that rounds to 1
    assert abs(noise[0] - 33 * math.log(2)) < 2e-6
    assert (np.diff(noise) <= 0).all()


def test_greedy_temperatures(compiled: Compiled) -> None:
    least = np.float32(1e-5)
    temperatures = np.array([0.0, -1.0, np.nextafter(least, 0), least, 1.0, np.inf, np.nan], np.float32)
    greedy = [True, True, True, False, False, False, True]
    assert compiled("is_greedy_of", np.uint8, temperatures).tolist() == greedy
    assert [numbers.is_greedy(temperature) for temperature in temperatures] == greedy


def test_compiled_masses(compiled: Compiled, rng: np.random.Generator) -> None:
    distance = any_distances(rng)
    for temperature in (1e-5, 0.6, 1.0, 1e30, np.inf):
        scale = numbers.mass_scale(np.float32(temperature))
        same_bits(compiled("mass_of", np.uint64, distance, temperature), numbers.masses(distance, scale))
    for top in (3.0, -0.0, np.inf, -np.inf):
        x = np.fmin(any_floats(rng), np.float32(top))
        x[:2] = 0.0 if top == 0 else top, -0.0 if top == 0 else top
        keys = numbers.order_keys(x)
        expected = numbers.distances(x, keys, int(keys.max()), np.float32(top))
        same_bits(compiled("distance_of", np.float32, x, np.full_like(x, top)), expected)
    distance[:3] = -np.inf
    for temperature in (0.7, np.inf):
        expected = numbers.log_probabilities(distance, np.float32(temperature), np.float32(3.3))
        same_bits(compiled("log_probability_of", np.float32, distance, temperature, 3.3), expected)
        assert (expected[:3] == -np.inf).all()


def test_compiled_logarithms(compiled: Compiled, rng: np.random.Generator) -> None:
    values = rng.integers(0x00800000, 0x7F800000, MANY, dtype=np.uint32).view(np.float32)
    # Where the split goes from one exponent to the next: sqrt(1/2) times powers of 2.
    values[:200] = (np.arange(200, dtype=np.uint32) + 27 << 23 | 0x3504F3).view(np.float32)
    same_bits(compiled("log_of", np.float32, values), numbers.log(values))
    masses = any_masses(rng, 5000)
    expected = np.array([numbers.log_mass(int(mass)) for mass in masses])
    same_bits(compiled("log_mass_of", np.float32, masses), expected)


def test_compiled_noise(compiled: Compiled, rng: np.random.Generator) -> None:
    seed, position = rng.integers(-(1 << 63), 1 << 63, (2, MANY))
    token = rng.integers(0, 1 << 32, MANY, dtype=np.uint32)
    hashes = numbers.hash32(seed, position, token)
    same_bits(compiled("hash_of", np.uint32, seed, position, token), hashes)
    hashes[: MANY // 2] >>= rng.integers(0, 32, MANY // 2).astype(np.uint32)
    same_bits(compiled("gumbel_of", np.float32, hashes), numbers.gumbel(hashes))
    x = (rng.standard_normal(MANY) * 10).astype(np.float32)
    expected = x / np.float32(0.6) + numbers.gumbel(hashes)
    same_bits(compiled("gumbel_score_of", np.float32, x, 0.6, hashes), expected)
    uniform = numbers.uniform64(seed, position)
    same_bits(compiled("uniform64_of", np.uint64, seed, position), uniform)
    for total in (1, (1 << 43) + 12345, (1 << 63) - 1, 1 << 63):
        got = numbers.draw_targets(uniform[:9999], total)
        same_bits(compiled("draw_target_of", np.uint64, uniform[:9999], np.full(9999, total, np.uint64)), got)
        assert got.tolist() == [bits * total >> 64 for bits in uniform[:9999].tolist()]


def test_both_have_the_same_constants() -> None:
    texts = [file.read_text(encoding="utf-8") for file in (HEADER, Path(numbers.__file__))]
    header, source = (re.findall(r"-?0x1\.[0-9a-f]{6}p[+-]\d+", text) for text in texts)
    assert header == source and len(header) == 18
    for name, value in (("kMassBits", numbers.MASS_BITS), ("kGreedyTemperature", "1e-5f")):
        assert f"{name} = {value};" in texts[0]
