"""An op at one point: its derivatives along random directions, three ways.

The tolerance is not chosen: it is the error estimate of the finite difference plus the
rounding of the derivative itself. At a kink the comparison moves to a point beside it.
"""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from .arguments import Arguments, as_jax, first_line, is_float, random_like
from .differences import derivative
from .float64 import coarsest
from .gradient_report import GradientRow

# How many roundings of its result a derivative may be off. A gradient of a matmul-like
# op has a few: one of each operand, of the sum, and of the result.
_ROUNDINGS = 16
# An error estimate of a finite difference may be off by this factor.
_SAFETY = 8
# A comparison that leaves more than this share of the derivative open says nothing.
_HIDDEN = 0.25
# A derivative this far below the size of the op counts as zero: float64 sees that far.
_ZERO = 2.0**-20
# How far a point is moved from a kink, in the size of its elements and in roundings of
# it: far enough that the smaller steps of a finite difference do not reach the kink.
_ASIDE = 2.0**-7
_ASIDE_ROUNDINGS = 64


class Point:
    """An op at one point, flattened to a function of its differentiable leaves."""

    def __init__(self, op, args, options, dtype, order, seed):
        """`dtype` is what to compute in, None for the dtypes of the arguments.

        Its own attribute `dtype` is the narrowest that is then met.
        """
        self.given = dtype
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
        self.dtype = narrowest([leaf.dtype for leaf in self.leaves])
        if dtype != np.float64:
            # An op may round to a narrower dtype than that of its arguments.
            jaxpr = jax.make_jaxpr(self.f)(*self.leaves).jaxpr
            self.dtype = narrowest([self.dtype, *coarsest(jaxpr)])
        self.eps = float(jnp.finfo(self.dtype).eps)

    def trouble(self, modes) -> str | None:
        """Why the op, or its vjp if that is asked for, does not run here, or None."""
        rng = np.random.default_rng(0)
        try:
            # A callback fails only when its value is waited for.
            out = jax.block_until_ready(self.run(*self.leaves))
            if "vjp" in modes:
                dy = jax.tree.map(lambda y: random_like(rng, y), out)
                jax.block_until_ready(self.pull(self.leaves, dy))
        except Exception as error:
            return first_line(error)
        return None

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
        groups = [[i] for i in range(len(self.x)) if np.isfinite(self.x[i]).any()]
        if len(groups) > 1:
            groups.append([i for group in groups for i in group])
        rows = []
        for i, x in enumerate(self.x):
            if x.size and not np.isfinite(x).any():
                row = GradientRow(self.order, self.names[i], "", "no difference")
                rows.append(replace(row, note="no element is finite"))
        for group in groups:
            for k in range(directions if len(group) == 1 else 1):
                rows.append(self._row(group, modes, k, notes))
        return rows, notes

    def _row(self, group, modes, number, notes) -> GradientRow:
        name = self.names[group[0]] if len(group) == 1 else "all"
        row = GradientRow(self.order, name, f"direction {number}", "")
        here = self._compare(row, self.x, group, modes, notes)
        if here.status in ("pass", "fail", "refused"):
            return here
        # Of the op's kinks and jumps, as at relu(0), a point beside has none.
        beside = self._compare(row, self._aside(group), group, modes, notes)
        if beside.status not in ("pass", "fail") or math.isnan(beside.difference):
            return here
        why = f"beside the point: there {here.status}, {here.note}"
        return replace(beside, note="; ".join(filter(None, (beside.note, why))))

    def _compare(self, row, x, group, modes, notes) -> GradientRow:
        """One comparison at the point `x`."""
        u = self._direction(group)
        leaves = self._rounded(x)
        try:
            out = jax.block_until_ready(self.run(*leaves))
        except Exception as error:
            return replace(row, status="refused", note=first_line(error))
        v = jax.tree.map(lambda y: random_like(self.rng, y), out)
        if not math.isfinite(_inner(v, out)):
            return replace(row, status="fail", note="the output is not finite")

        values, gradient, refused = {}, None, {}
        if "vjp" in modes:
            try:
                gradient = self._finite(self.pull(leaves, v))
                values["vjp"] = _inner(gradient, u)
            except Exception as error:
                refused["vjp"] = first_line(error)
        if "jvp" in modes:
            tangents = [
                jnp.asarray(du, leaf.dtype) for du, leaf in zip(u, leaves, strict=True)
            ]
            try:
                values["jvp"] = _inner(v, self.push(leaves, tangents))
            except Exception as error:
                refused["jvp"] = first_line(error)
                note = f"No jvp: {refused['jvp']}"
                if note not in notes:
                    notes.append(note)
        row = replace(row, **values)
        if "vjp" in refused or not values:
            reason = refused.get("vjp") or refused["jvp"]
            return replace(row, status="refused", note=reason)

        scale = self._scale(group)
        slope = derivative(lambda t: self._along(t, x, u, v, gradient), scale, self.eps)
        size = math.sqrt(_inner_squares(v, out))
        terms = math.sqrt(_inner_squares(gradient, u)) if "vjp" in values else 0.0
        return self._judge(row, values, slope, terms, size, scale)

    def _judge(self, row, values, slope, terms, size, scale) -> GradientRow:
        """The verdict on one comparison.

        Args:
          values: the derivative by each mode.
          slope: the same by finite differences.
          terms: the norm of the terms whose sum the vjp's value is.
          size: the same of <v, f(x)>: what the rounding of the op is measured by.
          scale: the distance over which <v, f> may be expected to change by `size`.
        """
        if not all(math.isfinite(value) for value in values.values()):
            return replace(row, status="fail", note="the derivative is not finite")
        difference = slope.central.value
        # A difference that could not be had says nothing about the derivative's size.
        seen = difference if math.isfinite(difference) else 0.0
        largest = max(abs(seen), *map(abs, values.values()))
        # Relative rounding, as measured where it is more than that of the dtype; and
        # what it makes of the derivative: each of its terms is rounded.
        eps = max(self.eps, slope.noise / size if size else 0.0)
        rounding = _ROUNDINGS * eps * max(terms, largest)
        tolerance = rounding + _SAFETY * slope.central.error
        row = replace(row, difference=difference, tolerance=tolerance)
        if len(values) == 2:
            # The modes add up in other orders, where all may cancel but rounding.
            apart = 2 * max(rounding, _ROUNDINGS * eps * size / scale)
            if abs(values["vjp"] - values["jvp"]) > apart:
                note = "vjp and jvp disagree"
                return replace(row, status="fail", tolerance=apart, note=note)
        left, right = slope.left.value, slope.right.value
        sides = f"from the left {left:.4g}, from the right {right:.4g}"
        if slope.kink:
            return replace(row, status="not differentiable", note=sides)
        if not math.isfinite(difference):
            note = "the op is not finite around this point"
            return replace(row, status="no difference", note=note)
        wrong = [
            m for m, value in values.items() if abs(value - difference) > tolerance
        ]
        if wrong:
            off = abs(values[wrong[0]] - difference)
            note = f"{' and '.join(wrong)} off by {off:.2g}"
            return replace(row, status="fail", note=note)
        constant = largest == 0 or tolerance <= _ZERO * size / scale
        if tolerance > _HIDDEN * largest and not constant:
            note = f"the difference is uncertain by {tolerance:.1g}"
            if eps > 4 * self.eps:
                note += f", as the values scatter by {eps:.1g}"
            return replace(row, status="inconclusive", note=note)
        return replace(row, status="pass")

    def _direction(self, group):
        """A random direction that moves the leaves of `group`, each on its scale.

        Zero at elements that are not finite: those cannot be moved.
        """
        u = [np.zeros(x.shape) for x in self.x]
        for i in group:
            step = self.rng.standard_normal(self.x[i].shape)
            step = np.where(np.isfinite(self.x[i]), step, 0.0)
            u[i] = step / np.linalg.norm(step) * self._size(i)
        total = math.sqrt(sum(float(np.sum(du**2)) for du in u))
        return [du / total for du in u]

    def _aside(self, group):
        """A point beside x. Elements that are equal in x, as at a tie, part."""
        far = max(_ASIDE, _ASIDE_ROUNDINGS * self.eps)
        x = list(self.x)
        for i in group:
            shape = x[i].shape
            step = self.rng.uniform(1, 2, shape) * self.rng.choice([-1, 1], shape)
            x[i] = x[i] + far * self._size(i) / math.sqrt(x[i].size) * step
        return x

    def _size(self, i):
        """The norm of a leaf; of one at the origin, as if it held ones."""
        finite = np.where(np.isfinite(self.x[i]), self.x[i], 0.0)
        return float(np.linalg.norm(finite)) or math.sqrt(self.x[i].size)

    def _finite(self, gradient):
        """The gradient, zero in the elements of x that are not finite: none moves."""
        return [
            np.where(np.isfinite(x), np.asarray(dx).astype(np.float64), 0.0)
            for x, dx in zip(self.x, gradient, strict=True)
        ]

    def _rounded(self, x):
        """The point as arrays of the dtypes of the arguments."""
        return [
            jnp.asarray(y.astype(leaf.dtype))
            for y, leaf in zip(x, self.leaves, strict=True)
        ]

    def _scale(self, group):
        return math.sqrt(sum(self._size(i) ** 2 for i in group))

    def _along(self, t, x, u, v, gradient):
        """<v, f(x + t u)>, as if x + t u had not been rounded."""
        exact = [y + t * du for y, du in zip(x, u, strict=True)]
        moved = self._rounded(exact)
        value = _inner(v, self.run(*moved))
        if gradient is None:
            return value
        # In a narrow dtype the rounding of the point is a step of its own, which
        # the derivative under test predicts well enough to take out again.
        with np.errstate(invalid="ignore"):
            gaps = [
                np.asarray(y).astype(np.float64) - z
                for y, z in zip(moved, exact, strict=True)
            ]
        # An infinite element is not rounded: inf - inf is no gap.
        gaps = [
            np.where(np.isfinite(z), d, 0.0) for d, z in zip(gaps, exact, strict=True)
        ]
        return value - _inner(gradient, gaps)


def _inner(a, b) -> float:
    return sum(float(np.sum(x * y)) for x, y in _pairs(a, b))


def _inner_squares(a, b) -> float:
    return sum(float(np.sum((x * y) ** 2)) for x, y in _pairs(a, b))


def _pairs(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        if is_float(x) and is_float(y):
            yield np.asarray(x).astype(np.float64), np.asarray(y).astype(np.float64)


def narrowest(dtypes) -> np.dtype:
    return max(dtypes, key=lambda dtype: jnp.finfo(dtype).eps)
