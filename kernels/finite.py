"""Algorithms that need finite numbers, made safe for others."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from .dtypes import accumulate_dtype


def or_exact(fast: Callable, exact: Callable) -> Callable:
    """A function that is `fast` where its result is finite, and `exact` where not.

    For an algorithm that subtracts what another adds only once: an infinity among its
    inputs makes NaN of results that do not even depend on it, and so does a sum that
    overflows on the way. `exact` runs only then.

    Both take the same arrays and give one array, or a tuple of them. Mapped by vmap,
    `exact` runs for the whole batch if any result in it is not finite: a choice for
    each element apart would compute both everywhere.
    """

    @custom_vmap
    def run(*arrays):
        y = fast(*arrays)
        finite = functools.reduce(jnp.logical_and, map(_all_finite, jax.tree.leaves(y)))
        return lax.platform_dependent(
            finite,
            y,
            *arrays,
            cpu=functools.partial(exact_in_place, exact),
            default=functools.partial(exact_by_condition, exact),
        )

    @run.def_vmap
    def _(size, is_mapped, *arrays):
        axes = [0 if mapped else None for mapped in is_mapped]
        each = (jax.vmap(f, axes, axis_size=size) for f in (fast, exact))
        y = or_exact(*each)(*arrays)
        return y, jax.tree.map(lambda _: True, y)

    return run


def exact_by_condition(exact: Callable, finite: jax.Array, y, *arrays):
    """y if `finite`, else `exact(*arrays)`."""
    return lax.cond(finite, lambda: y, lambda: exact(*arrays))


def exact_in_place(exact: Callable, finite: jax.Array, y, *arrays):
    """The same by a loop of one pass or none: a CPU copies a condition's result."""

    def step(_):
        return jnp.array(True), exact(*arrays)

    return lax.while_loop(lambda carry: ~carry[0], step, (finite, y))[1]


def _all_finite(y):
    """Whether every number is finite, at the speed of memory."""
    return lax.platform_dependent(y, cpu=_by_product, default=_by_reduction)


def _by_product(y):
    # XLA's reductions on a CPU are slower than a matrix product. A sum that overflows
    # where no term does costs time only.
    rows = y.reshape(-1, y.shape[-1])
    ones = jnp.ones((1, rows.shape[0]), rows.dtype)
    dtype = accumulate_dtype(rows.dtype)
    return jnp.isfinite(jnp.dot(ones, rows, preferred_element_type=dtype)).all()


def _by_reduction(y):
    # In whatever order y lies in memory; rows for a product would be a copy on a TPU.
    return jnp.isfinite(y).all()
