"""The dtypes that kernels compute in."""

import jax.numpy as jnp
from jax.typing import DTypeLike


def accumulate_dtype(dtype: DTypeLike) -> jnp.dtype:
    """What sums over `dtype` are taken in: float32, or float64 for float64."""
    return jnp.dtype("float64" if dtype == "float64" else "float32")
