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
from .arguments import Arguments, as_jax, op_name, random_like, refuse_complex
from .errors import Row, compare_arrays
from .float64 import NotInFloat64, in_float64, widen
from .levels import Limits, limits_of


class NoTruth(ValueError):
    """What was to be the truth does not run in float64; `why` says why."""

    def __init__(self, op: Callable, why: Exception):
        super().__init__(
            f"compare: the truth {op_name(op)} must run in float64, but {why}. "
            "Pass truth=, a function that does."
        )
        self.why = str(why)


@dataclass(frozen=True)
class Comparison:
    """The outcome of `compare`: one row for each output and gradient."""

    ours: str
    baseline: str
    level: str
    rows: tuple[Row, ...]

    @property
    def ok(self) -> bool:
        """No limit is exceeded, and there was an output to hold against it."""
        return bool(self.rows) and all(row.ok for row in self.rows)

    @property
    def ratio(self) -> float:
        """The largest root-mean-square error ratio of any row."""
        measured = (row.ratios.rms for row in self.rows if row.ratios is not None)
        return max(measured, default=0.0)

    def raise_if_failed(self) -> None:
        """Raises AssertionError with the table unless the comparison is `ok`."""
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
        verdict = f"{'within' if self.ok else 'NOT within'} {self.level}"
        if not self.rows:
            verdict = "NOTHING WAS RETURNED, so nothing compared"
        title = f"{self.ours} against {self.baseline}: {verdict}"
        columns = ("", "dtype", "shape", "max", "mean", "rms")
        columns += ("x max", "x mean", "x rms", "outside", "")
        cells = [
            (
                row.name,
                row.dtype,
                "x".join(map(str, row.shape)) or "scalar",
                *_numbers(row),
                "; ".join(row.failures) or "ok",
            )
            for row in self.rows
        ]
        return title, columns, cells


def _numbers(row):
    """Errors and ratios of a row; blank where none were had: 0 would read as exact."""
    if row.ours is None:
        return ("",) * 7
    of = [(v.max, v.mean, v.rms) for v in (row.ours, row.ratios)]
    outside = f"{row.ours.outside}/{row.ours.count}"
    return (*map(tables.number, of[0] + of[1]), outside)


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
      args: arrays or pytrees of arrays. The truth sees the same, rounded values: a
        numpy array of float64 is float32 to all, unless x64 is enabled.
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
      ValueError: if the truth cannot be run in float64, for an unknown level, for
        complex numbers, or for gradients where no argument is a floating-point array.

    Precision: the truth is float64, checked to be so in every equation. Integers and
      booleans must be those of the truth or of the baseline, whose rounding may decide
      otherwise, as in an argmax.
    Deterministic: yes.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> x = jnp.linspace(-3, 3, 50)
      >>> compare(jax.jit(jax.nn.softmax), jax.nn.softmax, x, grads=True).ok
      True
    """
    options = dict(options or {})
    args = jax.tree.map(as_jax, tuple(args))
    refuse_complex("compare", args)
    limits, name = limits_of(level, "compare")
    if factor != 1:
        name = f"{name} x {factor:.3g}"
    names = [f"d {name}" for name in Arguments(f, args).names]
    if grads and not names:
        raise ValueError(
            f"compare: with grads=True {op_name(f)} must have a floating-point "
            "argument to differentiate; got none. Pass grads=False."
        )
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
    refuse_complex("compare", (ours, theirs))
    _same_structure(f, ours, op_name(g), theirs)
    _same_structure(f, ours, "the truth", true_out)
    rows = _rows("out", ours, theirs, true_out, limits, factor)
    if grads:
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
        raise NoTruth(op, why) from why


def _same_structure(f, ours, name, theirs):
    mine, structure = jax.tree.structure(ours), jax.tree.structure(theirs)
    if mine != structure:
        raise ValueError(
            "compare: all must return one structure of arrays; "
            f"{op_name(f)} returns {mine}, and {name} {structure}."
        )


def _rows(label, ours, theirs, true, limits, factor):
    mine = jax.tree.leaves_with_path(ours)
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
