"""Measures of each parameter while it trains, made on the device within the step.

They come over to the host with the other metrics, so that watching a run does not make
the device wait.
"""

import re
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from .clip import global_norm
from .leaves import PyTree, float_leaves, path_name, varying_axes


@dataclass(frozen=True)
class Monitor:
    """What is measured of the parameters, each time it is due.

    Attributes:
      every: attempted steps from one measurement to the next; the first step is one.
      condition: regular expressions; the condition number is estimated of the weights
        whose path has a match of one.
      iterations: of the power iterations for it.

    Raises:
      ValueError: for an option out of its range, or a pattern that is no regular
        expression.
    """

    every: int = 10
    condition: tuple[str, ...] = ()
    iterations: int = 20

    def __post_init__(self):
        if self.every < 1 or self.iterations < 1:
            raise ValueError(
                "Monitor: every and iterations must be at least 1; "
                f"got {self.every} and {self.iterations}."
            )
        for pattern in self.condition:
            try:
                re.compile(pattern)
            except re.error as e:
                raise ValueError(
                    "Monitor: condition must hold regular expressions; "
                    f"got {pattern!r}: {e}."
                ) from e

    def layers(self, params: PyTree) -> tuple[str, ...]:
        """Paths of the floating parameters, in the order of the measures."""
        return tuple(self._floats(params))

    def weights(self, params: PyTree) -> tuple[str, ...]:
        """Paths of those whose condition is estimated, in the order of `condition`.

        Raises:
          ValueError: for a pattern that matches none with two axes or more.
        """
        floats = self._floats(params)
        matrices = [name for name, x in floats.items() if x.ndim >= 2 and x.size]
        for pattern in self.condition:
            if not any(re.search(pattern, name) for name in matrices):
                raise ValueError(
                    f"Monitor: condition {pattern!r} matches no weight; those are "
                    f"{', '.join(matrices[:8])}{' ...' if len(matrices) > 8 else ''}."
                )
        return tuple(
            name
            for name in matrices
            if any(re.search(pattern, name) for pattern in self.condition)
        )

    def measure(
        self, attempt: jax.Array, grads: PyTree, before: PyTree, after: PyTree
    ) -> dict[str, jax.Array]:
        """The measures, or zeros where they are not due.

        Args:
          attempt: how many steps were attempted before this one.
          grads: unscaled, not clipped.
          before: the parameters this step began with.
          after: those it left, the same ones if it was skipped.

        Returns:
          `measured`, whether they were due, and arrays of (layers,): of the finite
          entries of the gradient `grad_min` and `grad_max`, its `grad_norm`,
          `zero_share`, the share of its entries that are 0, `nonfinite`, the number of
          those that are inf or NaN, and `update_ratio`, the norm of the update over
          that of the parameter; and `condition`, (weights,).

        Raises:
          ValueError: for parameters that are split inside `jax.shard_map`.
        """
        g, old, new = (list(self._floats(t).values()) for t in (grads, before, after))
        names, weights = self.layers(before), self.weights(before)
        for name, x in zip(names, old, strict=True):
            if axes := varying_axes(x):
                raise ValueError(
                    f"Monitor: {name} is split over {axes} inside shard_map; it can "
                    "measure whole parameters only. Use jit with sharded arrays."
                )

        def measured():
            matrices = [x for n, x in zip(names, old, strict=True) if n in weights]
            by_layer = [
                jnp.stack(values) for values in zip(*map(_layer, g), strict=True)
            ]
            ratios = [_ratio(o, n) for o, n in zip(old, new, strict=True)]
            found = [condition_number(x, self.iterations) for x in matrices]
            return (
                *by_layer,
                jnp.stack(ratios),
                jnp.stack(found) if found else jnp.zeros((0,)),
            )

        due = attempt % self.every == 0
        zeros = jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(measured)
        )
        values = jax.lax.cond(due, measured, lambda: zeros)
        return {"measured": due} | dict(zip(_MEASURES, values, strict=True))

    def _floats(self, tree: PyTree) -> dict[str, jax.Array]:
        leaves = jax.tree.flatten_with_path(float_leaves(tree))[0]
        return {path_name(path): leaf for path, leaf in leaves}


_MEASURES = (
    "grad_min",
    "grad_max",
    "grad_norm",
    "zero_share",
    "nonfinite",
    "update_ratio",
    "condition",
)


def _layer(g: jax.Array) -> tuple[jax.Array, ...]:
    """The measures of one gradient, in the order of `_MEASURES`."""
    g = g.astype(jnp.float32)
    finite = jnp.isfinite(g)
    return (
        jnp.min(g, initial=jnp.inf, where=finite),
        jnp.max(g, initial=-jnp.inf, where=finite),
        global_norm(g),
        (g == 0).sum().astype(jnp.float32) / max(g.size, 1),
        (~finite).sum().astype(jnp.int32),
    )


def _ratio(old: jax.Array, new: jax.Array) -> jax.Array:
    size = global_norm(old)
    # Of a parameter that is all zeros, as biases begin, there is no ratio.
    return jnp.where(size > 0, global_norm(new - old) / size, 0.0)


def condition_number(w: jax.Array, iterations: int = 20) -> jax.Array:
    """The ratio of the largest to the smallest singular value, estimated from below.

    Power iteration for the one, inverse power iteration for the other, both on the
    triangle R of w = Q R: it has the same singular values, and a division by R loses
    less than one by R'R. A scalar, fp32; inf for a singular w.

    Args:
      w: (..., outputs): the axes before the last are taken together, as the inputs.
      iterations: how many; the estimate rises towards the true value.
    """
    w = w.reshape(-1, w.shape[-1]).astype(jnp.float32)
    w = w.T if w.shape[0] < w.shape[1] else w
    # Scaled, so that no square overflows; the ratio stays what it is.
    largest = jnp.abs(w).max()
    r = jnp.linalg.qr(w / jnp.where(largest > 0, largest, 1.0), mode="r")

    def divide(x, transposed):
        return jax.lax.linalg.triangular_solve(
            r, x, left_side=True, lower=False, transpose_a=transposed
        )

    def iterate(apply):
        def body(_, carry):
            x = apply(carry[0])
            size = jnp.linalg.norm(x)
            return x / size, size

        start = jax.random.normal(jax.random.key(0), (r.shape[0], 1))
        start = start / jnp.linalg.norm(start)
        return jax.lax.fori_loop(0, iterations, body, (start, jnp.float32(0.0)))[1]

    # The sizes tend to the squares of the largest and of 1 / the smallest.
    top = iterate(lambda x: r.T @ (r @ x))
    bottom = iterate(lambda x: divide(divide(x, True), False))
    condition = jnp.sqrt(top) * jnp.sqrt(bottom)
    return jnp.where(
        jnp.isfinite(r).all() & ~jnp.isfinite(condition), jnp.inf, condition
    )
