"""What every convolution does to its sums before they are stored.

    z = sums + b + residual        y = activation(z)

in the dtype of the sums; y, and z where the gradient needs it, are rounded once.
"""

import jax
import jax.numpy as jnp
from jax import lax

from .spec import ConvSpec


def _gelu(z):
    # The tanh form, as `jax.nn.gelu` by default.
    inner = 0.7978845608028654 * (z + 0.044715 * z * z * z)
    return 0.5 * z * (1 + jnp.tanh(inner))


# Beyond it exp(-|z|) and 1 - tanh(z) are zero, also in float64.
_FAR = 1e4

# Plain arithmetic without JAX's own derivative rules: Pallas kernels use them too.
ACTIVATIONS = {
    "relu": lambda z: jnp.maximum(z, 0),
    "gelu": _gelu,
    "silu": lambda z: z * lax.logistic(z),
}


def finish(
    spec: ConvSpec,
    sums: jax.Array,
    b: jax.Array | None = None,
    residual: jax.Array | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """y from the sums of products, or (y, z) where the spec keeps z."""
    z = sums
    if b is not None:
        z = z + b.astype(z.dtype)[(None,) * (z.ndim - 1)]
    if residual is not None:
        z = z + residual.astype(z.dtype)
    y = z if spec.activation is None else ACTIVATIONS[spec.activation](z)
    y = y.astype(spec.dtype)
    return (y, z.astype(spec.dtype)) if spec.keep_preactivation else y


def empty_sum(spec: ConvSpec, b=None, residual=None):
    """`finish` where there is nothing to sum over."""
    return finish(spec, jnp.zeros(spec.y_shape, spec.accumulate_dtype), b, residual)


def activation_gradient(spec: ConvSpec, kept: jax.Array, dy: jax.Array) -> jax.Array:
    """dz in fp32 or wider, from dy and what the forward pass kept.

    That is y for relu, whose sign is all that is needed, and z for the others.
    """
    dtype = spec.accumulate_dtype
    kept, dy = kept.astype(dtype), dy.astype(dtype)
    if spec.activation == "relu":
        return jnp.where(kept > 0, dy, 0)
    # Far out the derivative is 0 or 1 to the last bit. Of z that overflowed when it was
    # rounded, or of a power of it that does, it would be NaN.
    kept = jnp.clip(kept, -_FAR, _FAR)
    _, vjp = jax.vjp(ACTIVATIONS[spec.activation], kept)
    return vjp(dy)[0]
