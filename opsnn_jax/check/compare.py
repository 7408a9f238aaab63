"""The double benchmark: two implementations against a truth in float64.

An absolute tolerance is either too loose to find a fault or too tight for the dtype.
Here the yardstick is the error that a plain implementation of the same dtype makes on
the same data: ours may be a stated factor worse, see `levels`.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import jax
import numpy as np

from . import tables
from .arguments import Arguments, op_name, random_like
from .errors import Row, compare_arrays
from .float64 import NotInFloat64, in_float64, widen
from .levels import Limits, limits_of


@dataclass(frozen=True)
class Comparison:
    """The outcome of `compare`: one row for each output and gradient."""

    ours: str
    baseline: str
    level: str
    rows: tuple[Row, ...]

    @property
    def ok(self) -> bool:
        return all(row.ok for row in self.rows)

    @property
    def ratio(self) -> float:
        """The largest root-mean-square error ratio of any row."""
        return max((row.ratios.rms for row in self.rows), default=0.0)

    def raise_if_failed(self) -> None:
        """Raises AssertionError with the table where a limit is exceeded."""
        if not self.ok:
            raise AssertionError(str(self))

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        rows = [asdict(row) | {"ok": row.ok} for row in self.rows]
        return asdict(self) | {"ok": self.ok, "rows": rows}

    def table(self):
        """A `rich` table of all rows."""
        return tables.rich_table(*self._contents())

    def __str__(self) -> str:
        return tables.plain(*self._contents())

    def _contents(self):
        verdict = "within" if self.ok else "NOT within"
        title = f"{self.ours} against {self.baseline}: {verdict} {self.level}"
        columns = ("", "dtype", "shape", "max", "mean", "rms")
        columns += ("x max", "x mean", "x rms", "outside", "")
        cells = [
            (
                row.name,
                row.dtype,
                "x".join(map(str, row.shape)) or "scalar",
                *map(tables.number, (row.ours.max, row.ours.mean, row.ours.rms)),
                *map(tables.number, (row.ratios.max, row.ratios.mean, row.ratios.rms)),
                f"{row.ours.outside}/{row.ours.count}",
                "; ".join(row.failures) or "ok",
            )
            for row in self.rows
        ]
        return title, columns, cells


def compare(
    f: Callable,
    g: Callable,
    *args: Any,
    truth: Callable | Any = None,
    grads: bool = False,
    level: str | Limits = "L1",
    factor: float = 1.0,
    options: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> Comparison:
    """Compares `f` with the baseline `g`, both against a truth in float64.

    Args:
      f: the implementation in question, `f(*args, **options)`; returns a pytree.
      g: the baseline: a plain implementation in the same dtype.
      args: arrays or pytrees of arrays. The truth sees the same, rounded values.
      truth: a function to run in float64, or the float64 outputs themselves. None runs
        `g` in float64. With `grads`, it must be a function or None.
      grads: compare also the gradients in every floating-point argument, for the same
        random cotangent.
      level: `L0`, `L1` or `L2`, or `Limits` of one's own.
      factor: multiplies the limits: the error growth predicted for `f`'s algorithm.
      options: keyword arguments of all three.
      seed: of the cotangent.

    Returns:
      A `Comparison`; `str()` of it is a table.

    Raises:
      ValueError: if the truth cannot be run in float64, or for an unknown level.

    Precision: the truth is float64, checked to be so in every equation.
    Deterministic: yes.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> x = jnp.linspace(-3, 3, 50)
      >>> compare(jax.jit(jax.nn.softmax), jax.nn.softmax, x, grads=True).ok
      True
    """
    options = dict(options or {})
    limits, name = limits_of(level)
    if factor != 1:
        name = f"{name} x {factor:.3g}"
    exact = truth if callable(truth) else g
    if truth is not None and not callable(truth):
        if grads:
            raise ValueError(
                "compare: with grads=True truth must be a function, to be "
                f"differentiated in float64; got {type(truth).__name__}."
            )
        true_out = jax.tree.map(np.asarray, truth)
    else:
        true_out = _true(exact, args, options)
    ours, theirs = f(*args, **options), g(*args, **options)
    rows = _rows("out", ours, theirs, true_out, limits, factor)
    if grads:
        names = [f"d {name}" for name in Arguments(f, args).names]
        rng = np.random.default_rng(seed)
        dy = jax.tree.map(lambda y: random_like(rng, y), theirs)
        pulled = [pullback(op, args, options)(dy) for op in (f, g)]
        true_grads = _true(pullback(exact, args, options, True), (dy,), {})
        for i, label in enumerate(names):
            of = [p[i] for p in (*pulled, true_grads)]
            rows += _rows(label, *of, limits, factor)
    return Comparison(op_name(f), op_name(g), name, tuple(rows))


def assert_close(
    f: Callable,
    g: Callable,
    *args: Any,
    level: str | Limits = "L1",
    factor: float = 1.0,
    **how: Any,
) -> None:
    """Raises AssertionError with a table unless `compare` finds `f` within the level.

    Takes the arguments of `compare`.
    """
    compare(f, g, *args, level=level, factor=factor, **how).raise_if_failed()


def pullback(op: Callable, args, options, wide: bool = False) -> Callable:
    """The vjp of `op` at `args` as a function of the cotangent.

    Its arguments and cotangents are the differentiable leaves; `wide` widens the point
    to float64 and makes a cotangent of float0 pass untouched.
    """

    def pull(dy):
        given = Arguments(op, widen(args) if wide else args)
        return jax.vjp(given.function(op, options), *given.leaves)[1](dy)

    return pull


def _true(op, args, options):
    try:
        return in_float64(op, args, options)
    except NotInFloat64 as why:
        raise ValueError(
            f"compare: the truth {op_name(op)} must run in float64, but {why}. "
            "Pass truth=, a function that does."
        ) from why


def _rows(label, ours, theirs, true, limits, factor):
    mine, structure = jax.tree.flatten_with_path(ours)
    for other in (theirs, true):
        if jax.tree.structure(other) != structure:
            raise ValueError(
                f"compare: all must return one structure, {structure}; "
                f"got {jax.tree.structure(other)}."
            )
    return [
        compare_arrays(
            label + jax.tree_util.keystr(path),
            np.asarray(a),
            np.asarray(b),
            np.asarray(t),
            limits,
            factor,
        )
        for (path, a), b, t in zip(
            mine, jax.tree.leaves(theirs), jax.tree.leaves(true), strict=True
        )
    ]
