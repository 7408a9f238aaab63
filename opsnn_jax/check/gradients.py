"""Checks derivatives against finite differences and against each other.

For a unit direction u of the inputs and a cotangent v, three numbers must agree:

  <J^T v, u>   from the vjp (reverse mode),
  <v, J u>     from the jvp (forward mode),
  d/dt <v, f(x + t u)> at t = 0, from finite differences.

Everything is done in float64 where the op allows it. The tolerance is not chosen: it is
the error estimate of the finite difference plus the rounding of the derivative itself.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import tables
from .arguments import Arguments, is_differentiable, is_float, op_name, random_like
from .differences import derivative
from .float64 import coarsest, refusal, widen
from .reproducer import write_reproducer

_MODES = ("vjp", "jvp")
# How many roundings of its result a derivative may be off. A gradient of a matmul-like
# op has a few: one of each operand, of the sum, and of the result.
_ROUNDINGS = 16
# An error estimate of a finite difference may be off by this factor.
_SAFETY = 8


@dataclass(frozen=True)
class GradientRow:
    """One comparison. A value that was not computed is NaN.

    Attributes:
      order: 1 for the derivative of the op, 2 for that of its vjp.
      argument: the argument that was moved, or `all` for all together.
      check: `cotangent` (dtype and shape) or the number of the direction.
      status: `pass`, `fail`, `refused`; `not differentiable` at a kink, and
        `inconclusive` where rounding hides more than a quarter of the derivative.
    """

    order: int
    argument: str
    check: str
    status: str
    vjp: float = math.nan
    jvp: float = math.nan
    difference: float = math.nan
    tolerance: float = math.nan
    note: str = ""


@dataclass(frozen=True)
class GradientReport:
    """The outcome of `check_grads`.

    Attributes:
      op: the op's name.
      dtype: the arithmetic that the derivatives were compared in.
      rows: one for each argument and direction.
      notes: what was left out, and why.
      reproducer: the folder written on failure, if any.
    """

    op: str
    dtype: str
    rows: tuple[GradientRow, ...]
    notes: tuple[str, ...] = ()
    reproducer: Path | None = None

    @property
    def failures(self) -> tuple[GradientRow, ...]:
        return tuple(row for row in self.rows if row.status in ("fail", "refused"))

    @property
    def ok(self) -> bool:
        """No comparison failed. A point without a derivative is no failure."""
        return not self.failures

    def raise_if_failed(self) -> None:
        """Raises AssertionError with the table where a comparison failed."""
        if not self.ok:
            raise AssertionError(str(self))

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        place = None if self.reproducer is None else str(self.reproducer)
        rows = [asdict(row) for row in self.rows]
        return asdict(self) | {"ok": self.ok, "rows": rows, "reproducer": place}

    def table(self):
        """A `rich` table of all rows."""
        return tables.rich_table(*self._contents())

    def __str__(self) -> str:
        lines = [tables.plain(*self._contents()), *self.notes]
        if self.reproducer is not None:
            lines.append(f"To see it again: python {self.reproducer}/reproduce.py")
        return "\n".join(lines)

    def _contents(self):
        verdict = "agree" if self.ok else "DISAGREE"
        title = f"{self.op}: derivatives {verdict} (compared in {self.dtype})"
        columns = ("order", "argument", "check", "vjp", "jvp", "difference", "tol", "")
        cells = [
            (
                str(row.order),
                row.argument,
                row.check,
                *(
                    "" if math.isnan(value) else f"{value:.{digits}g}"
                    for value, digits in (
                        (row.vjp, 8),
                        (row.jvp, 8),
                        (row.difference, 8),
                        (row.tolerance, 2),
                    )
                ),
                f"{row.status}: {row.note}" if row.note else row.status,
            )
            for row in self.rows
        ]
        return title, columns, cells


def check_grads(
    op: Callable,
    *args: Any,
    modes: Sequence[str] = _MODES,
    order: int = 1,
    options: Mapping[str, Any] | None = None,
    directions: int = 2,
    seed: int = 0,
    repro: str | Path | None = "repro",
) -> GradientReport:
    """Checks the derivatives of `op` at `args`.

    Args:
      op: `op(*args, **options)`, returns a pytree of arrays.
      args: arrays or pytrees. Integers, booleans and keys are not differentiated.
      modes: which of `vjp` and `jvp` to check. A `jax.custom_vjp` op has no jvp; that
        is noted, not failed.
      order: 1, or 2 to check also the derivative of the vjp, as a function of the
        arguments and of the cotangent `dy`.
      options: keyword arguments of `op`.
      directions: how many random directions for each argument; with more than one
        argument, one more in which all move together.
      seed: of the directions and cotangents.
      repro: folder for a reproducer of a failure, or None for none.

    Returns:
      A `GradientReport`. A point where the op has a kink, such as relu at 0, is
      reported as `not differentiable`; vjp and jvp are still held against each
      other there.

    Raises:
      ValueError: for an unknown mode or order, or no floating-point argument.

    Precision: float64 where the op computes in it throughout, else the op's own dtype,
      with the rounding error that is measured there.
    Deterministic: yes, for one seed.

    Example:
      >>> import jax.numpy as jnp
      >>> check_grads(jnp.sin, jnp.arange(3.0)).ok
      True
    """
    if order not in (1, 2):
        raise ValueError(f"check_grads: order must be 1 or 2; got {order}.")
    unknown = set(modes) - set(_MODES)
    if unknown or not modes:
        raise ValueError(
            f"check_grads: modes must be some of {_MODES}; got {tuple(modes)}."
        )
    options = dict(options or {})
    given = Arguments(op, args)
    if not given.leaves:
        raise ValueError(
            f"check_grads: {op_name(op)} has no floating-point argument to "
            "differentiate. Pass arrays of a floating dtype."
        )
    rows = _cotangents(op, args, options, seed)
    dtype, notes = _widest(op, args, options)
    # An op that refuses its own arguments needs no more said.
    orders = range(1, order + 1) if rows[0].status != "refused" else ()
    with jax.enable_x64(True) if dtype == np.float64 else nullcontext():
        for level in orders:
            where = _Point(op, args, options, dtype, level, seed)
            found, more = where.rows(modes, directions)
            rows += found
            notes += [note for note in more if note not in notes]
    name = (dtype or _narrowest(given.leaves)).name
    report = GradientReport(op_name(op), name, tuple(rows), tuple(notes))
    if report.ok or repro is None:
        return report
    first = report.failures[0]
    place = write_reproducer(
        repro,
        op,
        args,
        options,
        check="check_grads",
        settings=dict(
            modes=tuple(modes),
            order=order,
            directions=directions,
            seed=seed,
            repro=None,
        ),
        headline=f"{report.op}: derivative in {first.argument}, {first.check}: "
        f"{first.note or 'disagrees with the finite difference'}.",
    )
    return GradientReport(report.op, name, report.rows, report.notes, place)


def _widest(op, args, options) -> tuple[np.dtype | None, list[str]]:
    """The widest dtype that the op computes in, None for its own; and why no wider."""
    notes = []
    for dtype in (np.float64, np.float32):
        with jax.enable_x64(True) if dtype == np.float64 else nullcontext():
            why = refusal(op, widen(args, dtype), options)
        if why is None:
            return np.dtype(dtype), notes
        notes.append(f"Not compared in {np.dtype(dtype)}: {why}.")
    return None, notes


def _narrowest(leaves) -> np.dtype:
    return max((leaf.dtype for leaf in leaves), key=lambda d: jnp.finfo(d).eps)


def _cotangents(op, args, options, seed) -> list[GradientRow]:
    """Whether every cotangent has the dtype and shape of its primal, as called."""
    given = Arguments(op, jax.tree.map(_as_jax, tuple(args)))
    rng = np.random.default_rng(seed)
    try:
        f = given.function(op, options)
        out = jax.eval_shape(f, *given.leaves)
        dy = jax.tree.map(lambda y: random_like(rng, y), out)
        cotangents = jax.eval_shape(lambda *x: jax.vjp(f, *x)[1](dy), *given.leaves)
    except (TypeError, ValueError, NotImplementedError) as error:
        return [GradientRow(1, "all", "cotangent", "refused", note=_short(error))]
    rows = []
    for name, leaf, dx in zip(given.names, given.leaves, cotangents, strict=True):
        same = dx.dtype == leaf.dtype and dx.shape == leaf.shape
        note = f"is {dx.dtype}{list(dx.shape)}, of {leaf.dtype}{list(leaf.shape)}"
        status, note = ("pass", "") if same else ("fail", note)
        rows.append(GradientRow(1, name, "cotangent", status, note=note))
    return rows


def _as_jax(leaf):
    return jnp.asarray(leaf) if is_differentiable(leaf) else leaf


def _short(error):
    return str(error).strip().split("\n")[0]


class _Point:
    """An op at one point, flattened to a function of its differentiable leaves."""

    def __init__(self, op, args, options, dtype, order, seed):
        """`dtype` is what to compute in, None for the dtypes of the arguments."""
        self.order = order
        self.rng = np.random.default_rng([seed, order])
        given = Arguments(op, jax.tree.map(_as_jax, tuple(args)))
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
        self.eps = float(jnp.finfo(_narrowest(self.leaves)).eps)
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
            return GradientRow(**row, status="refused", note=_short(error))
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
                refused["vjp"] = _short(error)
        if "jvp" in modes:
            tangents = [
                jnp.asarray(du, leaf.dtype)
                for du, leaf in zip(u, self.leaves, strict=True)
            ]
            try:
                moved = self.push(self.leaves, tangents)
                values["jvp"] = _inner(v, moved)
            except (TypeError, ValueError, NotImplementedError) as error:
                refused["jvp"] = _short(error)
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
