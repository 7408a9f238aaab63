"""Checks derivatives against finite differences and against each other.

For a unit direction u of the inputs and a cotangent v, three numbers must agree:

  <J^T v, u>   from the vjp (reverse mode),
  <v, J u>     from the jvp (forward mode),
  d/dt <v, f(x + t u)> at t = 0, from finite differences.

Everything is done in float64 where the op allows it. `directional.py` compares them.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from .arguments import (
    Arguments,
    as_jax,
    first_line,
    is_float,
    op_name,
    random_like,
    refuse_complex,
)
from .directional import Point, narrowest
from .float64 import refusal, widen
from .gradient_report import GradientReport, GradientRow
from .reproducer import write_reproducer

_MODES = ("vjp", "jvp")


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
      repro: folder for a reproducer of a failure, or None for none. Where it cannot be
        written, the report has a note that says why.

    Returns:
      A `GradientReport`. Where the op has a kink, as relu has at 0, vjp and jvp are
      held against each other, and against the finite difference at a point beside it.
      Elements that are not finite stay as they are; the others are compared. A report
      in which nothing could be compared is not ok.

    Raises:
      ValueError: for an unknown mode or order, no directions, complex numbers, or where
        no argument or no output is a floating-point array.

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
    if directions < 1:
        raise ValueError(
            f"check_grads: directions must be 1 or more; got {directions}."
        )
    options = dict(options or {})
    refuse_complex("check_grads", args)
    given = Arguments(op, args)
    if not given.leaves:
        raise ValueError(
            f"check_grads: {op_name(op)} has no floating-point argument to "
            "differentiate. Pass arrays of a floating dtype."
        )
    rows = _as_called(op, args, options, modes, seed)
    name, notes = narrowest([leaf.dtype for leaf in given.leaves]).name, []
    # An op that refuses its own arguments needs no more said.
    if not any(row.status == "refused" for row in rows):
        point, notes = _widest(op, args, options, modes, seed)
        name = point.dtype.name
        with _precision(point.given):
            for level in range(1, order + 1):
                if level == 2:
                    try:
                        point = Point(op, args, options, point.given, 2, seed)
                    except Exception as error:
                        why = first_line(error)
                        rows.append(GradientRow(2, "all", "", "refused", note=why))
                        break
                found, more = point.rows(modes, directions)
                rows += found
                notes += [note for note in more if note not in notes]
    report = GradientReport(op_name(op), name, tuple(rows), tuple(notes))
    if not report.failures and not report.compared:
        note = "To hold such a gradient against float64, call compare with grads=True."
        report = replace(report, notes=(*report.notes, note))
    if not report.failures or repro is None:
        return report
    settings = dict(modes=tuple(modes), order=order, directions=directions, seed=seed)
    first = report.failures[0]
    try:
        place = write_reproducer(
            repro,
            op,
            args,
            options,
            check="check_grads",
            settings=settings | {"repro": None},
            headline=f"{report.op}: derivative in {first.argument}, {first.check}: "
            f"{first.note or 'disagrees with the finite difference'}.",
        )
    except Exception as error:
        # What was found is worth more than what could not be kept of it.
        note = f"No reproducer was written: {first_line(error)}"
        return replace(report, notes=(*report.notes, note))
    return replace(report, reproducer=place)


def _precision(dtype) -> AbstractContextManager:
    """float64 exists only where JAX is told so."""
    return jax.enable_x64(True) if dtype == np.float64 else nullcontext()


def _widest(op, args, options, modes, seed) -> tuple[Point, list[str]]:
    """The op in the widest dtype that it computes in; and why in no wider."""
    notes = []
    for dtype in (np.dtype(np.float64), np.dtype(np.float32)):
        with _precision(dtype):
            why = refusal(op, widen(args, dtype), options)
            if why is None:
                point = Point(op, args, options, dtype, 1, seed)
                # What can be traced need not have a lowering.
                fault = point.trouble(modes)
                if fault is None:
                    return point, notes
                why = f"it fails there ({fault})"
        notes.append(f"Not compared in {dtype}: {why}.")
    return Point(op, args, options, None, 1, seed), notes


def _as_called(op, args, options, modes, seed) -> list[GradientRow]:
    """Whether the op runs, and each cotangent has the dtype and shape of its primal."""
    given = Arguments(op, jax.tree.map(as_jax, tuple(args)))
    rng = np.random.default_rng(seed)
    f = given.function(op, options)
    try:
        out = jax.eval_shape(f, *given.leaves)
    except Exception as error:
        return [GradientRow(1, "all", "cotangent", "refused", note=first_line(error))]
    refuse_complex("check_grads", out)
    if not any(is_float(y) for y in jax.tree.leaves(out)):
        raise ValueError(
            f"check_grads: {op_name(op)} must return a floating-point array, or it has "
            f"no derivative; got {jax.tree.map(lambda y: y.dtype.name, out)}."
        )
    if "vjp" not in modes:
        return []
    try:
        dy = jax.tree.map(lambda y: random_like(rng, y), out)
        cotangents = jax.eval_shape(lambda *x: jax.vjp(f, *x)[1](dy), *given.leaves)
    except Exception as error:
        return [GradientRow(1, "all", "cotangent", "refused", note=first_line(error))]
    rows = []
    for name, leaf, dx in zip(given.names, given.leaves, cotangents, strict=True):
        same = dx.dtype == leaf.dtype and dx.shape == leaf.shape
        note = f"is {dx.dtype}{list(dx.shape)}, of {leaf.dtype}{list(leaf.shape)}"
        status, note = ("pass", "") if same else ("fail", note)
        rows.append(GradientRow(1, name, "cotangent", status, note=note))
    return rows
