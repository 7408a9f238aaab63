"""An op at one point: its derivatives along random directions, three ways.

The tolerance is not chosen: it is the error estimate of the finite difference plus the
rounding of the derivative itself.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from .arguments import Arguments, is_differentiable, is_float, random_like
from .differences import derivative
from .float64 import coarsest
from .gradient_report import GradientRow

# How many roundings of its result a derivative may be off. A gradient of a matmul-like
# op has a few: one of each operand, of the sum, and of the result.
_ROUNDINGS = 16
# An error estimate of a finite difference may be off by this factor.
_SAFETY = 8


class Point:
    """An op at one point, flattened to a function of its differentiable leaves."""

    def __init__(self, op, args, options, dtype, order, seed):
        """`dtype` is what to compute in, None for the dtypes of the arguments."""
        self.order = order
        self.rng = np.random.default_rng([seed, order])
        given = Arguments(op, jax.tree.map(as_jax, tuple(args)))
        self.names = list(given.names)
        self.leaves = [leaf.astype(dtype or leaf.dtype) for leaf in given.leaves]
        self.f = given.function(op, options)
        if order == 2:
            self._differentiate()
        self.run = jax.jit(self.f)
        self.pull = jax.jit(lambda x, dy: jax.vjp(self.f, *x)[1](dy))
        self.push = jax.jit(lambda x, dx: jax.jvp(self.f, tuple(x), tuple(dx))[1])
        # Directions and sums are in float64 whatever the op computes in.
        self.x = [np.asarray(leaf).astype(np.float64) for leaf in self.leaves]
        self.eps = float(jnp.finfo(narrowest(self.leaves)).eps)
        if dtype != np.float64:
            # An op may round to a narrower dtype than that of its arguments.
            jaxpr = jax.make_jaxpr(self.f)(*self.leaves).jaxpr
            self.eps = max(self.eps, coarsest(jaxpr))

    def _differentiate(self):
        """Replaces f by its vjp, a function of the arguments and of the cotangent."""
        f, count = self.f, len(self.leaves)
        out, tree = jax.tree.flatten(jax.eval_shape(f, *self.leaves))
        moving = [i for i, y in enumerate(out) if is_float(y)]
        fixed = [random_like(self.rng, y) for y in out]
        dy = [jnp.asarray(fixed[i]) for i in moving]

        def vjp(*leaves):
            cotangents = list(fixed)
            for i, value in zip(moving, leaves[count:], strict=True):
                cotangents[i] = value
            _, pull = jax.vjp(f, *leaves[:count])
            return pull(jax.tree.unflatten(tree, cotangents))

        self.f = vjp
        self.leaves = self.leaves + dy
        names = ["dy"] if len(dy) == 1 else [f"dy[{i}]" for i in moving]
        self.names = self.names + names

    def rows(self, modes, directions):
        """The comparisons, and notes on modes that the op refuses."""
        notes = []
        groups = [[i] for i in range(len(self.leaves)) if self.leaves[i].size]
        if len(groups) > 1:
            groups.append([i for group in groups for i in group])
        rows = []
        for group in groups:
            for k in range(directions if len(group) == 1 else 1):
                row = self._compare(group, modes, k, notes)
                rows.append(row)
        return rows, notes

    def _compare(self, group, modes, number, notes) -> GradientRow:
        name = self.names[group[0]] if len(group) == 1 else "all"
        row = {"order": self.order, "argument": name, "check": f"direction {number}"}
        u = self._direction(group)
        try:
            out = self.run(*self.leaves)
        except (TypeError, ValueError, NotImplementedError) as error:
            return GradientRow(**row, status="refused", note=first_line(error))
        v = jax.tree.map(lambda y: random_like(self.rng, y), out)
        here = _inner(v, out)
        if not math.isfinite(here):
            return GradientRow(**row, status="fail", note="the output is not finite")

        values, gradient = {}, None
        refused = {}
        if "vjp" in modes:
            try:
                gradient = self.pull(self.leaves, v)
                values["vjp"] = _inner(gradient, u)
            except (TypeError, ValueError, NotImplementedError) as error:
                refused["vjp"] = first_line(error)
        if "jvp" in modes:
            tangents = [
                jnp.asarray(du, leaf.dtype)
                for du, leaf in zip(u, self.leaves, strict=True)
            ]
            try:
                moved = self.push(self.leaves, tangents)
                values["jvp"] = _inner(v, moved)
            except (TypeError, ValueError, NotImplementedError) as error:
                refused["jvp"] = first_line(error)
                note = f"No jvp: {refused['jvp']}"
                if note not in notes:
                    notes.append(note)
        if "vjp" in refused or not values:
            reason = refused.get("vjp") or refused["jvp"]
            return GradientRow(**row, **values, status="refused", note=reason)

        slope = derivative(
            lambda t: self._along(t, u, v, gradient), self._scale(group), self.eps
        )
        return self._judge(row, values, slope, u, v, out, gradient)

    def _judge(self, row, values, slope, u, v, out, gradient) -> GradientRow:
        # Rounding as measured, where it is more than that of the dtype.
        size = math.sqrt(_inner_squares(v, out))
        eps = max(self.eps, slope.noise / size if size else 0.0)
        terms = _inner_squares(gradient, u) if gradient is not None else 0.0
        strength = math.sqrt(max(terms, *(value**2 for value in values.values())))
        rounding = _ROUNDINGS * eps * strength
        difference = slope.central.value
        tolerance = rounding + _SAFETY * slope.central.error
        row = row | values | {"difference": difference, "tolerance": tolerance}
        if not all(math.isfinite(value) for value in values.values()):
            return GradientRow(
                **row, status="fail", note="the derivative is not finite"
            )
        if len(values) == 2 and abs(values["vjp"] - values["jvp"]) > 2 * rounding:
            row["tolerance"] = 2 * rounding
            return GradientRow(**row, status="fail", note="vjp and jvp disagree")
        if slope.kink or not math.isfinite(difference):
            note = f"from the left {slope.left.value:.4g}, "
            note += f"from the right {slope.right.value:.4g}"
            return GradientRow(**row, status="not differentiable", note=note)
        wrong = [
            m for m, value in values.items() if abs(value - difference) > tolerance
        ]
        if not wrong and tolerance > 0.25 * strength > 0:
            note = "rounding hides it; give the op wider inputs"
            return GradientRow(**row, status="inconclusive", note=note)
        if not wrong:
            return GradientRow(**row, status="pass")
        note = f"{' and '.join(wrong)} off by {abs(values[wrong[0]] - difference):.2g}"
        return GradientRow(**row, status="fail", note=note)

    def _direction(self, group):
        """A random direction that moves the leaves of `group`, each on its scale."""
        u = [np.zeros(x.shape) for x in self.x]
        for i in group:
            step = self.rng.standard_normal(self.x[i].shape)
            u[i] = step / np.linalg.norm(step) * self._size(i)
        total = math.sqrt(sum(float(np.sum(du**2)) for du in u))
        return [du / total for du in u]

    def _size(self, i):
        """The norm of a leaf; of one at the origin, as if it held ones."""
        finite = np.where(np.isfinite(self.x[i]), self.x[i], 0.0)
        return float(np.linalg.norm(finite)) or math.sqrt(self.x[i].size)

    def _scale(self, group):
        return math.sqrt(sum(self._size(i) ** 2 for i in group))

    def _along(self, t, u, v, gradient):
        """<v, f(x + t u)>, as if x + t u had not been rounded."""
        moved = [
            jnp.asarray((x + t * du).astype(leaf.dtype))
            for x, du, leaf in zip(self.x, u, self.leaves, strict=True)
        ]
        value = _inner(v, self.run(*moved))
        if gradient is None:
            return value
        # In a narrow dtype the rounding of the point is a step of its own, which
        # the derivative under test predicts well enough to take out again.
        rounded = [
            np.asarray(y).astype(np.float64) - (x + t * du)
            for x, du, y in zip(self.x, u, moved, strict=True)
        ]
        return value - _inner(gradient, rounded)


def _inner(a, b) -> float:
    return sum(float(np.sum(x * y)) for x, y in _pairs(a, b))


def _inner_squares(a, b) -> float:
    return sum(float(np.sum((x * y) ** 2)) for x, y in _pairs(a, b))


def _pairs(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        if is_float(x) and is_float(y):
            yield np.asarray(x).astype(np.float64), np.asarray(y).astype(np.float64)


def narrowest(leaves) -> np.dtype:
    return max((leaf.dtype for leaf in leaves), key=lambda d: jnp.finfo(d).eps)


def as_jax(leaf):
    return jnp.asarray(leaf) if is_differentiable(leaf) else leaf


def first_line(error):
    return str(error).strip().split("\n")[0]
