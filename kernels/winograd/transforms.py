"""The transforms of Winograd's minimal filtering F(m, r), derived for any m and r.

A 1-D correlation of n = m + r - 1 inputs d with r taps g gives m outputs by n products:

    y = AT [(G g) * (BT d)]

The algorithm is Toom-Cook's: evaluate at n - 1 finite points and at infinity,
multiply, interpolate. With points a_0 .. a_{n-2}, M(x) = prod_j (x - a_j),
M_i = M / (x - a_i) and N_i = M_i(a_i), the matrices have a closed form:

    AT[k, i] = a_i^k                        last column  e_{m-1}
    G[i, k]  = a_i^k / N_i                  last row     e_{r-1}
    BT[i, :] = coefficients of M_i          last row     coefficients of M

Everything is computed in exact rationals. In 2-D the transforms nest:
Y = AT [(G g GT) * (BT d B)] A.

References:
  Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", 2015, section 4.
  Barabasz et al., "Error Analysis and Improving the Accuracy of Winograd Convolution",
  2018: the point at infinity and the choice of the others.
"""

import functools
import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

Points = tuple[Fraction, ...]
Matrix = tuple[tuple[Fraction, ...], ...]

# The finite points for n - 1 = 1, 2, ...: rationals of small height, in pairs +-a where
# possible, that minimise the error factor `kappa` below. {0, +-5/8, +-3/2} is within
# 1 % of the best set of rationals known, and transforms small integers exactly.
_POINTS = {
    1: "0",
    2: "0 1",
    3: "0 1 -1",
    4: "0 1 -1 1/2",
    5: "0 5/8 -5/8 3/2 -3/2",
    6: "0 1 -1 1/2 -1/2 2",
    7: "0 1 -1 1/2 -1/2 2 -2",
    9: "0 2/5 -2/5 4/5 -4/5 5/4 -5/4 5/2 -5/2",
}


def default_points(count: int) -> Points:
    """The finite interpolation points used for n - 1 = `count`.

    Raises:
      ValueError: if no set is known to be accurate; pass points of your own then.
    """
    if count == 0:
        return ()
    if count not in _POINTS:
        raise ValueError(
            f"winograd: m + r - 2 must be one of 0, {', '.join(map(str, _POINTS))} for "
            f"the built-in interpolation points; got {count}. Pass points=."
        )
    return tuple(Fraction(p) for p in _POINTS[count].split())


@dataclass(frozen=True)
class Transform:
    """F(m, r): `at` (m, n), `g` (n, r) and `bt` (n, n), exact."""

    m: int
    r: int
    at: Matrix
    g: Matrix
    bt: Matrix

    @property
    def n(self) -> int:
        """Inputs read, and products done, for m outputs."""
        return self.m + self.r - 1

    @property
    def kappa(self) -> float:
        """How much the rounding of the multiplicands is amplified, in one dimension.

        For white data and independent roundings of relative size eps, the rms relative
        error of the result is eps times the product of kappa over the dimensions. It is
        the same for the output, the input gradient and the weight gradient.
        """
        total = sum(
            _norm2(row[i] for row in self.at) * _norm2(self.g[i]) * _norm2(self.bt[i])
            for i in range(self.n)
        )
        return math.sqrt(total / (self.m * self.r))

    def array(self, name: str, dtype) -> np.ndarray:
        """The matrix `at`, `g` or `bt` rounded once to `dtype`."""
        return np.array(getattr(self, name), dtype=np.float64).astype(dtype)


@functools.lru_cache(maxsize=64)
def transform(m: int, r: int, points: Points | None = None) -> Transform:
    """Derives F(m, r).

    Args:
      m: outputs per tile, at least 1.
      r: filter taps, at least 1.
      points: the m + r - 2 distinct finite interpolation points; by default the most
        accurate set known.

    Raises:
      ValueError: if m or r is below 1, or the points are too few or not distinct.
    """
    if m < 1 or r < 1:
        raise ValueError(f"winograd: m and r must be at least 1; got F({m}, {r}).")
    n = m + r - 1
    if points is None:
        points = default_points(n - 1)
    points = tuple(Fraction(p) for p in points)
    if len(points) != n - 1 or len(set(points)) != n - 1:
        raise ValueError(
            f"winograd: F({m}, {r}) needs {n - 1} distinct finite points; "
            f"got {', '.join(map(str, points)) or 'none'}."
        )

    at = [[a**k for a in points] + [Fraction(int(k == m - 1))] for k in range(m)]
    g, bt = [], []
    for i, a in enumerate(points):
        others = points[:i] + points[i + 1 :]
        scale = math.prod((a - b for b in others), start=Fraction(1))
        g.append([a**k / scale for k in range(r)])
        bt.append(_coefficients(others) + [Fraction(0)])
    g.append([Fraction(int(k == r - 1)) for k in range(r)])
    bt.append(_coefficients(points))
    return Transform(m, r, _freeze(at), _freeze(g), _freeze(bt))


def _coefficients(roots: Points) -> list[Fraction]:
    """Coefficients of prod (x - root), constant term first."""
    poly = [Fraction(1)]
    for root in roots:
        shifted = [Fraction(0), *poly]
        scaled = [-root * c for c in poly] + [Fraction(0)]
        poly = [s + c for s, c in zip(shifted, scaled, strict=True)]
    return poly


def _freeze(rows) -> Matrix:
    return tuple(tuple(row) for row in rows)


def _norm2(values) -> Fraction:
    return sum((v * v for v in values), start=Fraction(0))
