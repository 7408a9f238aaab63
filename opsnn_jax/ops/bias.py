"""A bias on its own, whose gradient is summed in fp32."""

import jax
import jax.numpy as jnp

from opsnn_jax.kernels.dtypes import accumulate_dtype


@jax.custom_vjp
def add_bias(y: jax.Array, b: jax.Array) -> jax.Array:
    """y (..., O) + b (O,), of one dtype.

    JAX would sum the gradient of b in that dtype: in bfloat16 a sum of ones ends at 512
    on a CPU.
    """
    return y + b[(None,) * (y.ndim - 1)]


def _add_bias_fwd(y, b):
    return add_bias(y, b), None


def _add_bias_bwd(_, dy):
    axes = tuple(range(dy.ndim - 1))
    db = jnp.sum(dy, axes, dtype=accumulate_dtype(dy.dtype))
    return dy, db.astype(dy.dtype)


add_bias.defvjp(_add_bias_fwd, _add_bias_bwd)
