"""The generator of Winograd transforms: exact identities, and its error model."""

import itertools
from fractions import Fraction

import jax.numpy as jnp
import numpy as np
import pytest

from opsnn_jax.kernels.winograd.transforms import default_points, transform

SIZES = [(1, 1), (1, 3), (2, 2), (2, 3), (3, 2), (4, 2), (2, 4), (3, 3), (4, 3), (6, 3),
         (2, 5), (4, 5), (2, 7), (8, 3)]  # fmt: skip


@pytest.mark.parametrize(("m", "r"), SIZES)
def test_trilinear_identity(m, r):
    # sum_i AT[k, i] G[i, j] BT[i, l] is 1 where l = k + j, else 0: the definition of
    # correlation, for every data and filter at once.
    t = transform(m, r)
    for k, j, l in itertools.product(range(m), range(r), range(t.n)):  # noqa: E741
        total = sum(t.at[k][i] * t.g[i][j] * t.bt[i][l] for i in range(t.n))
        assert total == (l == k + j)


def test_points_of_ones_own():
    points = tuple(Fraction(p) for p in ("0", "1", "-1", "2", "-2"))
    t = transform(4, 3, points)
    assert t.bt[0] == (4, 0, -5, 0, 1, 0)  # Lavin and Gray's F(4, 3), first row
    data, taps = [3, 1, 4, 1, 5, 9], [2, 7, 1]
    u = [sum(a * b for a, b in zip(row, taps, strict=True)) for row in t.g]
    v = [sum(a * b for a, b in zip(row, data, strict=True)) for row in t.bt]
    y = [sum(a * b * c for a, b, c in zip(row, u, v, strict=True)) for row in t.at]
    assert y == [sum(data[k + j] * taps[j] for j in range(3)) for k in range(4)]


@pytest.mark.parametrize(
    ("m", "r", "kappa"), [(2, 3, 1.29), (4, 3, 2.19), (6, 3, 4.54), (2, 5, 2.32)]
)
def test_kappa_predicts_the_error_of_rounded_multiplicands(m, r, kappa):
    t = transform(m, r)
    assert t.kappa == pytest.approx(kappa, abs=0.01)
    rng = np.random.default_rng(m * 10 + r)
    d, g = rng.standard_normal((20_000, t.n)), rng.standard_normal((20_000, r))
    v, u = d @ t.array("bt", np.float64).T, g @ t.array("g", np.float64).T

    def rounded(a):
        return np.asarray(jnp.asarray(a, jnp.float32).astype(jnp.bfloat16), np.float64)

    at = t.array("at", np.float64).T
    error = (rounded(v) * rounded(u) - v * u) @ at
    y = (v * u) @ at
    measured = np.sqrt(np.mean(error**2) / np.mean(y**2))
    # The rounding of one multiplicand to 8 bits has rms 1.66e-3; there are two.
    assert measured == pytest.approx(1.66e-3 * np.sqrt(2) * t.kappa, rel=0.1)


def test_default_points_beat_lavins():
    lavin = transform(4, 3, tuple(map(Fraction, (0, 1, -1, 2, -2))))
    assert transform(4, 3).kappa < 0.7 * lavin.kappa


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 3), "m and r must be at least 1"),
        ((4, 3, (0, 1, 1, 2, 3)), "5 distinct finite points"),
        ((4, 3, (0, 1)), "5 distinct finite points"),
        ((9, 9), "built-in interpolation points"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        transform(*arguments)


def test_no_points_are_needed_for_one_product():
    assert default_points(0) == ()
