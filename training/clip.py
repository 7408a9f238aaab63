"""Gradient norms and clipping, in fp32 and without overflow on the way.

Norms are taken of unscaled gradients: a threshold means the same at every loss scale.
"""

import jax
import jax.numpy as jnp

from .leaves import PyTree, is_float


def global_norm(tree: PyTree) -> jax.Array:
    """The 2-norm of all floating leaves together. A scalar, fp32.

    Numbers are divided by a power of two near the largest before they are squared, so
    four times 1e20 give 2e20 where a plain sum of squares is inf; half-precision leaves
    are widened first. The result is inf or NaN exactly if a leaf holds one, or if the
    norm exceeds fp32.
    """
    leaves = [x.astype(jnp.float32) for x in jax.tree.leaves(tree) if is_float(x)]
    leaves = [x for x in leaves if x.size]
    if not leaves:
        return jnp.zeros((), jnp.float32)
    inverse = _inverse_size(jnp.stack([jnp.abs(x).max() for x in leaves]).max())
    squares = jnp.stack([jnp.square(x * inverse).sum() for x in leaves]).sum()
    return jnp.sqrt(squares) / inverse


def clip_by_norm(tree: PyTree, max_norm: float, norm: jax.Array) -> PyTree:
    """The tree scaled down so that its norm, given as `norm`, is at most `max_norm`.

    A tree whose norm is within the bound comes back bit for bit. An infinite norm makes
    zeros of what is finite and NaN of what is not, so test it first, as the step does.
    """
    # Two factors: max_norm/norm alone may be too small for fp32.
    inverse = _inverse_size(norm)
    rest = max_norm / (norm * inverse)

    def clip(x):
        if not is_float(x):
            return x
        clipped = x.astype(jnp.float32) * inverse * rest
        return jnp.where(norm > max_norm, clipped.astype(x.dtype), x)

    return jax.tree.map(clip, tree)


def _inverse_size(x: jax.Array) -> jax.Array:
    """A power of two near 1/x, for x >= 0. It and its inverse are normal numbers."""
    _, exponent = jnp.frexp(x)
    return jnp.ldexp(jnp.float32(1.0), -jnp.clip(exponent, -125, 125))
