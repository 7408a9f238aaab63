"""How far one array is from the truth, and how that compares with another array.

The relative error of an element is |a - t| / max(|t|, m), m the median of |t|. Far
below the median a plain relative error is mostly luck: the truth is small there because
terms cancelled, and the ratio of two such errors has no finite mean. The standard
repeats such cases a thousand times; the bound makes one run enough. What is wrong in
small values alone is found by counting them.
"""

import math
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from .arguments import is_float
from .levels import OUTSIDE, SMALL_COUNT_RATIO, DtypeRule, Limits, rule


@dataclass(frozen=True)
class Errors:
    """Errors of one array against the truth.

    Attributes:
      max, mean: of the relative error of the elements.
      rms: root mean square of the error over that of the truth.
      small: how many small values have an error above the standard's.
      outside: how many elements lie outside the standard's mixed tolerance.
      count: of elements that were compared.
    """

    max: float
    mean: float
    rms: float
    small: int
    outside: int
    count: int


@dataclass(frozen=True)
class Row:
    """One output or gradient, ours and the baseline's against the truth.

    Attributes:
      name: which one.
      dtype, shape: of ours.
      ours, baseline: errors; None for integers, and where there is nothing to measure.
      ratios: max, mean and rms error of ours over the baseline's, or over that of one
        rounding to the dtype where the baseline's is smaller.
      failures: what exceeds its limit, in words.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    ours: Errors | None
    baseline: Errors | None
    ratios: Limits | None
    failures: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.failures


# Mean and root mean square of the relative error of one rounding, in units of its
# bound, for numbers spread evenly on a logarithmic scale: 1/(4 ln 2), sqrt(1/(8 ln 2)).
_MEAN_ROUNDING = 0.36
_RMS_ROUNDING = 0.42

# A ratio says nothing where the baseline has no digit right. That has been seen: XLA's
# float32 convolution on a CPU returns garbage for some pads of both signs (jax 0.10).
_NO_YARDSTICK = 0.1


def compare_arrays(
    name: str,
    ours: np.ndarray,
    baseline: np.ndarray,
    truth: np.ndarray,
    limits: Limits,
    factor: float = 1.0,
) -> Row:
    """Holds an array against a baseline of the same dtype and a wider truth.

    Args:
      name: of the row.
      ours, baseline: arrays of one shape and dtype.
      truth: the same in float64; for integers and booleans, the exact values.
        Integers that differ from these must be the baseline's.
      limits: allowed ratios of errors.
      factor: multiplies every limit: the predicted error growth of an algorithm that is
        known to be less accurate than the baseline.
    """
    row = dict(name=name, dtype=ours.dtype.name, shape=ours.shape)
    empty = dict(ours=None, baseline=None, ratios=None)
    if (ours.dtype, ours.shape) != (baseline.dtype, truth.shape):
        text = f"is {ours.dtype}{list(ours.shape)}"
        text += f", expected {baseline.dtype}{list(truth.shape)}"
        return Row(**row, **empty, failures=(text,))
    if baseline.shape != ours.shape:
        text = f"the baseline is {baseline.dtype}{list(baseline.shape)}"
        return Row(**row, **empty, failures=(text,))
    if not is_float(ours):
        # A decision such as an argmax may fall otherwise by the baseline's rounding.
        wrong = int(np.sum((ours != truth) & (ours != baseline)))
        text = (f"{wrong} of {ours.size} elements differ",) if wrong else ()
        return Row(**row, **empty, failures=text)

    with np.errstate(over="ignore", invalid="ignore"):
        rounded = truth.astype(ours.dtype)
    failures = []
    bad = ~(_same_nonfinite(ours, rounded) | _same_nonfinite(ours, baseline))
    if bad.any():
        text = f"{int(bad.sum())} elements are Inf or NaN where the truth is not, "
        failures.append(text + "or the other way round")
    arrays = [a.astype(np.float64) for a in (ours, baseline)]
    finite = np.isfinite(truth) & np.isfinite(arrays[0]) & np.isfinite(arrays[1])
    count = int(finite.sum())
    if not count:
        return Row(**row, **empty, failures=tuple(failures))
    unit = float(jnp.finfo(ours.dtype).eps) / 2
    law = rule(ours.dtype)
    e, base = (_errors(a[finite], truth[finite], law, factor, unit) for a in arrays)
    ratios = Limits(
        e.max / max(base.max, unit),
        e.mean / max(base.mean, _MEAN_ROUNDING * unit),
        e.rms / max(base.rms, _RMS_ROUNDING * unit),
    )
    if base.rms > _NO_YARDSTICK:
        failures.append(f"the baseline is itself wrong, by {base.rms:.2g} of its size")
    failures += _excess(ratios, limits, factor * sampling_allowance(count))
    failures += _counts(e, base)
    return Row(**row, ours=e, baseline=base, ratios=ratios, failures=tuple(failures))


def sampling_allowance(count: int) -> float:
    """By how much a ratio of two errors of equal size may exceed 1 by chance.

    The logarithm of the ratio of two root mean squares, each over `count` independent
    errors, has a standard deviation of about 1/sqrt(count); three of them are allowed.
    """
    return math.exp(3 / math.sqrt(count))


def _errors(a, truth, law: DtypeRule, factor, unit) -> Errors:
    error, size = np.abs(a - truth), np.abs(truth)
    nonzero = size[size > 0]
    median = float(np.median(nonzero)) if nonzero.size else 1.0
    relative = error / np.maximum(size, median)
    scale = math.sqrt(float(np.mean(size**2))) or 1.0
    # A small value left over from terms of median size has their rounding, so the
    # absolute constants, made for data of size 1, grow with larger data.
    small = size < law.small_size
    threshold = max(law.small_error, 8 * unit * median)
    atol = law.atol * max(1.0, median)
    return Errors(
        max=float(relative.max()),
        mean=float(relative.mean()),
        rms=math.sqrt(float(np.mean(error**2))) / scale,
        small=int(np.sum(error[small] > factor * threshold)),
        outside=int(np.sum(error > factor * (atol + law.rtol * size))),
        count=error.size,
    )


def _excess(ratios, limits, allowed):
    found = []
    for kind in ("max", "mean", "rms"):
        ratio, limit = getattr(ratios, kind), getattr(limits, kind) * allowed
        if ratio > limit:
            found.append(
                f"{kind} error is {ratio:.3g} times the baseline's, {limit:.3g} allowed"
            )
    return found


def _counts(ours, baseline):
    found = []
    small = SMALL_COUNT_RATIO * baseline.small
    if ours.small > _by_chance(small):
        text = f"{ours.small} small values are off, of the baseline's {baseline.small}"
        found.append(text)
    outside = max(OUTSIDE * ours.count, baseline.outside)
    if ours.outside > _by_chance(outside):
        text = f"{ours.outside} of {ours.count} elements are outside the tolerance, "
        found.append(text + f"of the baseline's {baseline.outside}")
    return found


def _by_chance(expected):
    """How large a count may be: its standard deviation is about its square root."""
    return expected + 3 * math.sqrt(max(expected, 1))


def _same_nonfinite(a, b):
    """True where both are finite, or both are the same infinity, or both NaN."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    finite = np.isfinite(a) & np.isfinite(b)
    return finite | (a == b) | (np.isnan(a) & np.isnan(b))
