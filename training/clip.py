"""Gradient norms and clipping, in fp32 and without overflow on the way.

Norms are taken of unscaled gradients: a threshold means the same at every loss scale.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from .leaves import PyTree, is_float, path_name, sum_of_squares, varying_axes

# Of a sum of squares above it, those that fp32 takes for zero are nothing.
_SAFE_SUM = 2.0**-60


def global_norm(tree: PyTree) -> jax.Array:
    """The 2-norm of all floating leaves together. A scalar, fp32.

    Where a plain sum of squares leaves fp32, numbers are divided by a power of two near
    the largest before they are squared, so four times 1e20 give 2e20; half-precision
    leaves are widened first. The result is inf or NaN exactly if a leaf holds one, or
    if the norm exceeds fp32. Inside `jax.shard_map` it is the norm over all devices.
    """
    squares = sum_of_squares(tree)
    return jax.lax.cond(
        jnp.isfinite(squares) & (squares > _SAFE_SUM),
        lambda: jnp.sqrt(squares),
        lambda: _scaled_norm(tree),
    )


def _scaled_norm(tree: PyTree) -> jax.Array:
    leaves = [x.astype(jnp.float32) for x in jax.tree.leaves(tree) if is_float(x)]
    if not leaves:
        return jnp.zeros((), jnp.float32)
    largest = jnp.stack([jnp.abs(x).max(initial=0) for x in leaves]).max()
    if axes := varying_axes(largest):
        largest = jax.lax.pmax(largest, axes)
    inverse = _inverse_size(largest)
    return jnp.sqrt(sum_of_squares([x * inverse for x in leaves])) / inverse


def clip_by_norm(tree: PyTree, max_norm: float, norm: jax.Array) -> PyTree:
    """The tree scaled down so that its norm, given as `norm`, is at most `max_norm`.

    A tree whose norm is within the bound comes back bit for bit. `norm` may also be
    an array that goes with the leaves, of a norm for each row. An infinite norm makes
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


@dataclass(frozen=True)
class ClipRule:
    """A bound of its own for some parameters.

    Attributes:
      pattern: a regular expression; the rule is for parameters whose path,
        `block_0/mlp/kernel` say, has a match. The first rule that matches counts.
      max_norm: the bound of the norm.
      rows: of each row along the first axis, which is what an embedding wants: the
        gradient of a rare word is not scaled down along with that of a frequent one.
        Else of the whole parameter.

    Raises:
      ValueError: for a bound that is not above 0, or a pattern that is no regular
        expression.
    """

    pattern: str
    max_norm: float
    rows: bool = False

    def __post_init__(self):
        if not 0 < self.max_norm < math.inf:
            raise ValueError(
                "ClipRule: max_norm must be above 0 and finite; "
                f"got {self.max_norm} for {self.pattern!r}."
            )
        try:
            re.compile(self.pattern)
        except re.error as e:
            raise ValueError(
                f"ClipRule: pattern must be a regular expression; got {self.pattern!r}:"
                f" {e}."
            ) from e


def clip_by_rules(tree: PyTree, rules: Sequence[ClipRule]) -> PyTree:
    """The tree with each rule applied to the leaves it is for.

    Raises:
      ValueError: for a rule that is for no leaf, most likely a slip.
    """
    used = set()

    def clip(path, x):
        name = path_name(path)
        for rule in rules:
            if is_float(x) and re.search(rule.pattern, name):
                used.add(rule)
                axes = tuple(range(1, x.ndim)) if rule.rows else None
                return clip_by_norm(x, rule.max_norm, _norm(x, axes))
        return x

    clipped = jax.tree.map_with_path(clip, tree)
    for rule in rules:
        if rule not in used:
            names = [path_name(path) for path, _ in jax.tree.flatten_with_path(tree)[0]]
            raise ValueError(
                f"clip rule {rule.pattern!r} is for none of the parameters "
                f"{', '.join(names[:8])}{' ...' if len(names) > 8 else ''}."
            )
    return clipped


def _norm(x: jax.Array, axes: tuple[int, ...] | None) -> jax.Array:
    """The 2-norm over the axes (None: all), which are kept. Overflows no sooner."""
    if not x.size:
        return jnp.zeros((), jnp.float32)
    if axes is None:
        return global_norm(x)
    if split := varying_axes(x):
        raise ValueError(
            f"clip rule: the rows of a parameter that is split over {split} inside "
            "shard_map may not be whole there. Use jit with sharded arrays."
        )
    x = x.astype(jnp.float32)
    inverse = _inverse_size(jnp.abs(x).max(axes, keepdims=True))
    squares = jnp.square(x * inverse).sum(axes, keepdims=True)
    return jnp.sqrt(squares) / inverse


def _inverse_size(x: jax.Array) -> jax.Array:
    """A power of two near 1/x, for x >= 0. It and its inverse are normal numbers."""
    _, exponent = jnp.frexp(x)
    return jnp.ldexp(jnp.float32(1.0), -jnp.clip(exponent, -125, 125))
