"""What every op demands of its arguments, in the same words."""

import operator
from typing import Any

import jax
import numpy as np
from jax import lax

# What ops compute in. float64 only where JAX has it, under jax_enable_x64.
DTYPES = ("float16", "bfloat16", "float32", "float64")


def as_array(op: str, name: str, x: Any) -> jax.Array | np.ndarray:
    """`x` if it is an array, or the array that a flax variable holds.

    Raises:
      TypeError: for anything else.
    """
    if not isinstance(x, jax.Array) and hasattr(x, "__jax_array__"):
        x = x.__jax_array__()
    if not isinstance(x, jax.Array | np.ndarray | np.generic):
        raise TypeError(
            f"{op}: {name} must be an array; got {type(x).__name__}. Pass a jax or "
            "numpy array."
        )
    return x


def as_float_array(op: str, name: str, x: Any) -> jax.Array | np.ndarray:
    """`as_array`, of one of `DTYPES`; else TypeError."""
    x = as_array(op, name, x)
    if x.dtype not in DTYPES:
        raise TypeError(
            f"{op}: {name} must have dtype {', '.join(DTYPES[:-1])} or {DTYPES[-1]}; "
            f"got {x.dtype}. Cast it with {name}.astype(jnp.float32)."
        )
    if x.dtype == np.float64 and not jax.config.jax_enable_x64:
        raise TypeError(
            f"{op}: {name} is float64 but jax_enable_x64 is off, so JAX would round it "
            "to float32. Cast it to float32, or enable x64."
        )
    return x


def as_int(op: str, name: str, value: Any) -> int:
    """`value` as an int; else TypeError."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise TypeError(
            f"{op}: {name} must be an int that is known while tracing; "
            f"got {type(value).__name__}."
        ) from None


def as_precision(op: str, precision: Any) -> lax.Precision | None:
    """None or one `jax.lax.Precision`, also from its name; else ValueError.

    None is what `jax.default_matmul_precision` says, as it is for lax. It is asked
    here: when a kernel is traced, that context may be over.
    """
    if precision is None and (chosen := jax.config.jax_default_matmul_precision):
        try:
            return lax.Precision(chosen)
        except ValueError:
            return None  # an algorithm of XLA's, which it finds there itself
    if precision is None or isinstance(precision, lax.Precision):
        return precision
    if isinstance(precision, str):
        try:
            return lax.Precision(precision)
        except ValueError:
            pass
    raise ValueError(
        f"{op}: precision must be None, 'default', 'high', 'highest' or a "
        f"jax.lax.Precision; got {precision!r}. Pass one of them."
    )
