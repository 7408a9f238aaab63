"""The precision standard: how much worse than a plain implementation an op may be.

Levels L0, L1 and L2 of the double benchmark used for operator libraries on Ascend: the
error of the op against a wider truth, divided by the error that a plain implementation
of the same dtype makes on the same data, is limited for the largest, the mean and the
root-mean-square error.
"""

from dataclasses import dataclass

import jax.numpy as jnp


@dataclass(frozen=True)
class Limits:
    """Largest allowed ratios of errors, ours to the baseline's."""

    max: float
    mean: float
    rms: float


LEVELS = {
    "L0": Limits(max=10, mean=2, rms=2),
    "L1": Limits(max=5, mean=1.5, rms=1.5),
    "L2": Limits(max=2, mean=1.2, rms=1.2),
}

# Where another compiler or algorithm computes the same thing, its sums run in another
# order: twice L0. A mistake in what is computed is off by the size of the result, that
# is by hundreds of roundings even in bfloat16.
SAME_MEANING = Limits(max=20, mean=4, rms=4)

# Below `small_size` a value is small: a relative error says little there, and errors
# above `small_error` are counted instead. The count may be twice the baseline's.
SMALL_COUNT_RATIO = 2.0
# The share of elements that may lie outside the mixed tolerance atol + rtol |truth|.
OUTSIDE = 0.01


@dataclass(frozen=True)
class DtypeRule:
    """The standard's constants for one dtype, made for data of size about 1."""

    small_size: float
    small_error: float
    rtol: float
    atol: float


_RULES = {
    "float16": DtypeRule(2**-11, 2**-16, 2**-9, 2**-9),
    "bfloat16": DtypeRule(2**-8, 2**-16, 2**-6, 2**-6),
    "float32": DtypeRule(2**-14, 2**-30, 2**-10, 2**-16),
    "float8_e4m3fn": DtypeRule(2**-4, 2**-6, 2**-2, 2**-4),
    "float8_e5m2": DtypeRule(2**-3, 2**-5, 2**-1, 2**-3),
    # The standard stops at float32; these are its float32 constants 29 bits further.
    "float64": DtypeRule(2**-43, 2**-59, 2**-39, 2**-45),
}


def rule(dtype: jnp.dtype) -> DtypeRule:
    """The constants for a dtype.

    Raises:
      ValueError: for a dtype that the standard does not cover.
    """
    name = jnp.dtype(dtype).name
    if name not in _RULES:
        raise ValueError(
            f"compare: the precision standard covers {', '.join(_RULES)}; got {name}."
        )
    return _RULES[name]


def limits_of(level: str | Limits, who: str) -> tuple[Limits, str]:
    """The limits of a level, and what to call them.

    Args:
      level: a key of `LEVELS`, or limits of one's own.
      who: the check that was called, for the message.

    Raises:
      ValueError: for an unknown level.
    """
    if isinstance(level, Limits):
        return level, f"{level.max:g}/{level.mean:g}/{level.rms:g}"
    if level not in LEVELS:
        raise ValueError(
            f"{who}: level must be one of {', '.join(LEVELS)} or Limits; got {level!r}."
        )
    return LEVELS[level], level
