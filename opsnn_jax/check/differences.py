"""Derivatives by finite differences, each with an estimate of its own error.

Central differences over step sizes a factor 4 apart are extrapolated to step 0
(Richardson). Large steps suffer from curvature, small ones from the rounding of the
function; the entry of the extrapolation table whose neighbours agree best, rounding
counted, is taken, and that disagreement is its error estimate (Ridders 1982, "Accurate
computation of F'(x) and F'(x)F''(x)"). An entry that smaller steps contradict beyond
their rounding saw another scale of the function, and is charged the contradiction. The
rounding is measured rather than assumed, from high-order differences at tiny spacing,
where a smooth function has none (More and Wild 2011, "Estimating computational noise").
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

# Each step is a quarter of the one before: one column of the table gains two bits of
# curvature and loses two of rounding, and 11 steps span the six decades that matter.
_FACTOR = 4.0
_COLUMNS = 4
# Rounding errors are bounded at three standard deviations.
_DEVIATIONS = 3.0


@dataclass(frozen=True)
class Estimate:
    """A derivative and how far it may be off. NaN, inf where none could be had."""

    value: float
    error: float


@dataclass(frozen=True)
class Derivative:
    """The derivative of a scalar function at 0.

    Attributes:
      central: from both sides.
      left, right: from one side each; they differ where the function has a kink.
      noise: standard deviation of the function's rounding.
    """

    central: Estimate
    left: Estimate
    right: Estimate
    noise: float

    @property
    def kink(self) -> bool:
        """True where the two one-sided derivatives certainly differ."""
        gap = abs(self.right.value - self.left.value)
        return gap > 8 * (self.left.error + self.right.error)


def derivative(phi: Callable[[float], float], scale: float, eps: float) -> Derivative:
    """Differentiates `phi` at 0.

    Args:
      phi: the function. Steps where it is not finite are left out.
      scale: the distance over which `phi` may be expected to change by its own size.
      eps: the machine epsilon of the arithmetic that `phi` is computed in.
    """
    noise = _noise(phi, scale, eps)
    # At smaller steps the rounding exceeds what is left of the curvature.
    smallest = max(eps**0.7, 2.0**-24)
    count = max(4, 1 + int(math.log(0.25 / smallest, _FACTOR)))
    steps = scale * 0.25 * _FACTOR ** -np.arange(count)
    ahead = np.array([phi(h) for h in steps])
    behind = np.array([phi(-h) for h in steps])
    here = phi(0.0)
    central = (ahead - behind) / (2 * steps)
    right, left = (ahead - here) / steps, (here - behind) / steps
    rounding = _DEVIATIONS * noise / steps
    return Derivative(
        _extrapolate(central, _FACTOR**2, _FACTOR**2, rounding),
        _extrapolate(left, _FACTOR, _FACTOR, 2 * rounding),
        _extrapolate(right, _FACTOR, _FACTOR, 2 * rounding),
        noise,
    )


def _extrapolate(values, first, ratio, rounding):
    """Removes the powers of the step one column at a time; picks the best entry.

    `first` is the factor by which the leading error falls from one step to the next,
    and each column's is `ratio` times that of the column before.
    """
    finite = np.isfinite(values)
    values, rounding = values[finite], rounding[finite]
    best = Estimate(math.nan, math.inf)
    if len(values) < 2:
        return best
    witnesses = (first * values[1:] - values[:-1]) / (first - 1)
    column, factor = values, first
    for j in range(1, min(_COLUMNS, len(values))):
        refined = (factor * column[1:] - column[:-1]) / (factor - 1)
        spread = np.maximum(abs(refined - column[1:]), abs(refined - column[:-1]))
        # The entry above in the same column: agreement of three, not of two by chance.
        above = np.abs(np.diff(refined, prepend=np.nan))
        gaps = np.abs(refined[:, None] - witnesses[None, :]) - 2 * rounding[None, 1:]
        # Row i of this column rests on steps i to i + j; those from i + j on are finer.
        contradicted = np.max(np.triu(gaps, j - 1), axis=1)
        errors = np.fmax(np.fmax(spread, above), contradicted) + rounding[j:]
        i = int(np.argmin(errors))
        if errors[i] < best.error:
            best = Estimate(float(refined[i]), float(errors[i]))
        column, factor = refined, factor * ratio
    return best


def _noise(phi, scale, eps):
    spacing = scale * max(2 * eps, 2.0**-23)
    values = np.array([phi(i * spacing) for i in range(-3, 4)])
    if not np.all(np.isfinite(values)):
        return 0.0
    # At the least that of the last rounding: a function that is constant, or exact at
    # the points that were tried, shows none.
    found = abs(float(values[3])) * eps / math.sqrt(12)
    for order in (4, 5, 6):
        differences = np.diff(values, order)
        # Differences of independent errors have this many times their variance.
        gain = math.comb(2 * order, order)
        found = max(found, math.sqrt(float(np.mean(differences**2)) / gain))
    return found
