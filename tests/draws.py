"""Random arrays for the tests, drawn by numpy.

JAX's own would compile a program for each shape and dtype, which took longer than many
a test.
"""

import jax
import jax.numpy as jnp
import numpy as np


def _generator(key):
    return np.random.default_rng(np.asarray(jax.random.key_data(key)))


def normal(key, shape, dtype=float, scale=1.0) -> jax.Array:
    return jnp.asarray(_generator(key).normal(scale=scale, size=shape), dtype)


def uniform(key, shape, dtype=float) -> jax.Array:
    """In [0, 1)."""
    return jnp.asarray(_generator(key).random(shape), dtype)


def bernoulli(key, p, shape) -> jax.Array:
    return jnp.asarray(_generator(key).random(shape) < p)
