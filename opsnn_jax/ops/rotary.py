"""Rotary position embedding."""

import numbers
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from opsnn_jax.kernels.dtypes import accumulate_dtype

from .arguments import as_array, as_float_array, as_int

_OP = "rotary_embedding"


def rotary_embedding(
    x: Float[Array, "*B T N H"],
    positions: Int[Array, "*B T"] | None = None,
    *,
    base: float = 10000.0,
    rotary_dim: int | None = None,
) -> Float[Array, "*B T N H"]:
    r"""Turns pairs of features by angles that grow with the position.

    With R = rotary_dim, for i < R / 2 and angle a = position base^(-2 i / R):

        y_i         = x_i cos a - x_{i + R/2} sin a
        y_{i + R/2} = x_{i + R/2} cos a + x_i sin a

    The inner product of a query and a key turned so depends on the difference of their
    positions alone. The gradient is the same with -a.

    Args:
      x: queries or keys, `(*B, T, N, H)`, of a float dtype.
      positions: integers, broadcastable to `(*B, T)`; 0, 1, ... if None.
      base: of the wavelengths, a positive number.
      rotary_dim: how many features are turned, the first ones, an even number; all of
        them if None.

    Returns:
      `(*B, T, N, H)`, of x's dtype.

    Raises:
      TypeError, ValueError: for what does not fit.

    Precision:
      Angles, sines and products are float32 (float64 for float64), rounded once.

    Example:
      >>> rotary_embedding(jnp.ones((2, 5, 4, 8))).shape
      (2, 5, 4, 8)

    References:
      Su, Lu, Pan, Murtadha, Wen, Liu, "RoFormer", 2021, section 3.4.
    """
    x = as_float_array(_OP, "x", x)
    if x.ndim < 3:
        raise ValueError(
            f"rotary_embedding: x must have axes (*batch, length, heads, features); "
            f"got {x.shape}. Insert the axis of heads."
        )
    rotary_dim = _checked_dim(rotary_dim, x.shape[-1])
    if not isinstance(base, numbers.Real) or not base > 0:
        raise ValueError(
            f"rotary_embedding: base must be a positive number; got {base!r}. The "
            "usual one is 10000."
        )
    x = jnp.asarray(x)
    wide = accumulate_dtype(x.dtype)
    positions = _checked_positions(positions, x.shape[:-2])
    half = rotary_dim // 2
    rates = jnp.asarray(base, wide) ** (-jnp.arange(half, dtype=wide) / max(half, 1))
    angles = positions.astype(wide)[..., None, None] * rates.reshape(
        (1,) * (x.ndim - 1) + (half,)
    )
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = (x[..., i * half : (i + 1) * half].astype(wide) for i in (0, 1))
    turned = [first * cos - second * sin, second * cos + first * sin]
    turned = [part.astype(x.dtype) for part in turned]
    return jnp.concatenate([*turned, x[..., rotary_dim:]], axis=-1)


def _checked_dim(rotary_dim: Any, features: int) -> int:
    size = features if rotary_dim is None else as_int(_OP, "rotary_dim", rotary_dim)
    if not 0 <= size <= features or size % 2:
        raise ValueError(
            f"rotary_embedding: rotary_dim must be an even number up to {features}, "
            f"the features of x; got {size}. Turned features come in pairs."
        )
    return size


def _checked_positions(positions: Any, shape: tuple[int, ...]) -> jax.Array:
    """Integers of shape `(*B, T)`."""
    if positions is None:
        positions = jnp.arange(shape[-1], dtype=jnp.int32)
    positions = as_array(_OP, "positions", positions)
    if not jnp.issubdtype(positions.dtype, jnp.integer):
        raise TypeError(
            f"rotary_embedding: positions must be integers; got {positions.dtype}. "
            "Cast them with .astype(jnp.int32)."
        )
    aligned = (1,) * (len(shape) - positions.ndim) + positions.shape
    if len(aligned) > len(shape) or any(
        n not in (1, full) for n, full in zip(aligned, shape, strict=True)
    ):
        raise ValueError(
            f"rotary_embedding: positions must broadcast to (*B, T) = {shape}; got "
            f"{positions.shape}. Give one position for each query or key."
        )
    return jnp.broadcast_to(jnp.asarray(positions).reshape(aligned), shape)
