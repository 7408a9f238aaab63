"""Batch normalisation folded into the convolution before it, for inference.

With running statistics, gamma (z - mean) / sqrt(var + eps) + beta of z = conv(x, w) + b
is a convolution again:

    s = gamma / sqrt(var + eps)        w' = w s        b' = (b - mean) s + beta
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from opsnn_jax.kernels.dtypes import accumulate_dtype

from .arguments import as_float_array

_OP = "fold_batchnorm"


def fold_batchnorm(
    w: Float[Array, "*K Cg O"],
    b: Float[Array, "O"] | None,
    gamma: Float[Array, "O"] | None,
    beta: Float[Array, "O"] | None,
    mean: Float[Array, "O"],
    var: Float[Array, "O"],
    eps: float = 1e-5,
) -> tuple[jax.Array, jax.Array]:
    """The filter and bias of a convolution followed by a batch normalisation.

    Args:
      w: `(*K, C / groups, O)`, any floating-point dtype.
      b: the convolution's own bias `(O,)`, or None.
      gamma, beta: scale and shift of the normalisation `(O,)`, or None for 1 and 0.
      mean, var: its running statistics `(O,)`.
      eps: what it adds to the variance.

    Returns:
      w' and b' of w's shape and dtype, and `(O,)` of w's dtype, for
      `conv(x, w', b')`. Computed in fp32 or wider, rounded once.

    Raises:
      TypeError: for anything but floating-point arrays.
      ValueError: if a vector is not `(O,)`.

    Example:
      >>> import jax.numpy as jnp
      >>> w, ones = jnp.ones((3, 3, 4, 8)), jnp.ones(8)
      >>> folded, bias = fold_batchnorm(w, None, 2 * ones, ones, ones, ones, eps=0.0)
      >>> float(folded[0, 0, 0, 0]), float(bias[0])
      (2.0, -1.0)
    """
    w = jnp.asarray(as_float_array(_OP, "w", w))
    vectors = {"b": b, "gamma": gamma, "beta": beta, "mean": mean, "var": var}
    wide = accumulate_dtype(w.dtype)
    for name, vector in vectors.items():
        if vector is None and name in ("b", "gamma", "beta"):
            continue
        vector = as_float_array(_OP, name, vector)
        if vector.shape != w.shape[-1:]:
            raise ValueError(
                f"{_OP}: {name} must have shape (O,) = ({w.shape[-1]},), as w "
                f"{w.shape} has it; got {vector.shape}."
            )
        vectors[name] = jnp.asarray(vector).astype(wide)
    scale = jax.lax.rsqrt(vectors["var"] + eps)
    if gamma is not None:
        scale = scale * vectors["gamma"]
    shift = -vectors["mean"] if b is None else vectors["b"] - vectors["mean"]
    shift = shift * scale
    if beta is not None:
        shift = shift + vectors["beta"]
    folded = w.astype(wide) * scale[(None,) * (w.ndim - 1)]
    return folded.astype(w.dtype), shift.astype(w.dtype)
