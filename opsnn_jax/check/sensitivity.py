"""How much an output moves when its inputs move by less than they mean.

A result that depends on the last bit of its inputs, or on the order of a sum, is not a
result. No second implementation is needed to find that out.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import tables
from .arguments import Arguments, as_jax, is_differentiable, op_name, refuse_complex
from .float64 import NotInFloat64, in_float64

NOISES = ("repeat", "precision", "bits", "noise", "order")

# The relative movement, by root mean square, above which an output is unstable. The
# tools that train on half precision use the same: about half a rounding of bfloat16,
# four of float16 and thousands of float32.
_LIMITS = {"bfloat16": 4e-3, "float16": 2e-3, "float32": 2e-4, "float64": 2e-12}


@dataclass(frozen=True)
class SensitivityRow:
    """What one disturbance did.

    Attributes:
      noise: which one.
      moved: root mean square of the movement over that of the output.
      largest: of one element, over the root mean square of the output.
      gain: `moved` over the same measure of the disturbance of the inputs; NaN where
        the inputs were not changed.
      limit: for `moved`.
      note: why it was not run, if it was not.
    """

    noise: str
    moved: float
    largest: float
    gain: float
    limit: float
    note: str = ""

    @property
    def ok(self) -> bool:
        return bool(self.note) or self.moved <= self.limit


@dataclass(frozen=True)
class SensitivityReport:
    """The outcome of `sensitivity`: a row for each disturbance."""

    op: str
    rows: tuple[SensitivityRow, ...]

    @property
    def ok(self) -> bool:
        return all(row.ok for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        return asdict(self) | {"ok": self.ok}

    def table(self):
        """A `rich` table of all disturbances."""
        return tables.rich_table(*self._contents())

    def __str__(self) -> str:
        return tables.plain(*self._contents())

    def _contents(self):
        columns = ("noise", "moved", "largest", "gain", "limit", "")
        cells = []
        for row in self.rows:
            if row.note:
                cells.append((row.noise, "", "", "", "", f"not run: {row.note}"))
                continue
            numbers = (row.moved, row.largest, row.gain, row.limit)
            shown = ("" if math.isnan(v) else tables.number(v) for v in numbers)
            cells.append((row.noise, *shown, "ok" if row.ok else "UNSTABLE"))
        return f"{self.op}: {'stable' if self.ok else 'UNSTABLE'}", columns, cells


def sensitivity(
    f: Callable,
    *args: Any,
    noise: Sequence[str] = NOISES,
    axes: Mapping[int, int] | None = None,
    options: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> SensitivityReport:
    """Disturbs the inputs of `f` and measures how far its output moves.

    Args:
      f: `f(*args, **options)`, returns a pytree of arrays.
      args: arrays or pytrees.
      noise: which disturbances: `repeat` changes nothing, and allows no change;
        `precision` runs `f` in float64; `bits` flips the last bit of every input;
        `noise` adds a relative error of one rounding; `order` reverses an axis that `f`
        sums over, and needs `axes`.
      axes: argument number, from 0 -> axis, for `order`. `f` must not depend on the
        order along these axes taken together, such as the keys and values of attention.
      options: keyword arguments of `f`.
      seed: of the noise.

    Returns:
      A `SensitivityReport`. A large `gain` says that the problem is ill conditioned at
      this point; a large movement under `order` or `precision`, that `f` computes it
      badly. Elements that are not finite have to stay as they are.

    Raises:
      ValueError: for an unknown noise, an argument number in `axes` that there is none
        of, complex numbers, or no floating-point output.
    """
    unknown = [name for name in noise if name not in NOISES]
    if unknown:
        raise ValueError(
            f"sensitivity: noise must be some of {', '.join(NOISES)}; "
            f"got {unknown[0]!r}."
        )
    missing = [i for i in axes or {} if i not in range(len(args))]
    if missing:
        raise ValueError(
            f"sensitivity: axes must have argument numbers below {len(args)} as keys; "
            f"got {missing[0]!r}."
        )
    options = dict(options or {})
    args = jax.tree.map(as_jax, tuple(args))
    refuse_complex("sensitivity", args)
    given = Arguments(f, args)
    out = f(*args, **options)
    refuse_complex("sensitivity", out)
    before, dtype = _flat(out), _dtype(out)
    rng = np.random.default_rng(seed)
    rows = []
    for name in noise:
        limit, moved_inputs, note = _LIMITS.get(dtype, 2e-4), None, ""
        after = before
        if name == "repeat":
            limit, after = 0.0, _flat(f(*args, **options))
        elif name == "precision":
            try:
                after = _flat(in_float64(f, args, options))
            except NotInFloat64 as why:
                note = str(why)
        elif name == "order" and not axes:
            note = "needs axes="
        else:
            moved_inputs = _disturbed(name, given, args, axes, rng)
            after = _flat(f(*moved_inputs, **options))
        moved, largest = _movement(after, before)
        gain = math.nan
        if name in ("bits", "noise"):
            moved_leaves = Arguments(f, moved_inputs).leaves
            step = _movement(_joined(moved_leaves), _joined(given.leaves))[0]
            gain = moved / step if step else math.nan
        rows.append(SensitivityRow(name, moved, largest, gain, limit, note))
    return SensitivityReport(op_name(f), tuple(rows))


def _disturbed(name, given: Arguments, args, axes, rng) -> tuple:
    if name == "order":
        return tuple(
            jax.tree.map(lambda leaf, i=i: jnp.flip(leaf, axes[i]), arg)
            if i in axes
            else arg
            for i, arg in enumerate(args)
        )
    change = _flip_last_bit if name == "bits" else _one_rounding
    return given.rebuild([jnp.asarray(change(leaf, rng)) for leaf in given.leaves])


def _flip_last_bit(leaf, rng):
    array = np.array(leaf)
    bits = array.view(f"uint{8 * array.dtype.itemsize}")
    flipped = (bits ^ bits.dtype.type(1)).view(array.dtype)
    # Zeros stay: their last bit is a number of another order of magnitude altogether.
    # That of an infinity makes it NaN.
    wide = array.astype(np.float64)
    return np.where((wide == 0) | ~np.isfinite(wide), array, flipped)


def _one_rounding(leaf, rng):
    array = np.asarray(leaf)
    noise = 1 + _eps(array.dtype) * rng.choice([-1.0, 1.0], array.shape)
    return (array.astype(np.float64) * noise).astype(array.dtype)


def _floats(tree) -> list:
    """The floating-point leaves, also those that are numbers of Python's."""
    return [
        np.asarray(leaf) if isinstance(leaf, float) else leaf
        for leaf in jax.tree.leaves(tree)
        if isinstance(leaf, float) or is_differentiable(leaf)
    ]


def _flat(tree) -> np.ndarray:
    leaves = _floats(tree)
    if not leaves:
        raise ValueError("sensitivity: f must return a floating-point array; got none.")
    return _joined(leaves)


def _joined(leaves) -> np.ndarray:
    flat = [np.ravel(np.asarray(leaf)).astype(np.float64) for leaf in leaves]
    return np.concatenate(flat) if flat else np.zeros(0)


def _movement(after, before) -> tuple[float, float]:
    if not before.size:
        return 0.0, 0.0
    finite = before[np.isfinite(before)]
    scale = math.sqrt(float(np.mean(finite**2))) if finite.size else 0.0
    # What is not finite and stays so has not moved; what becomes so moved infinitely.
    same = (after == before) | (np.isnan(after) & np.isnan(before))
    with np.errstate(invalid="ignore"):
        gap = np.where(same, 0.0, np.abs(after - before))
    gap = np.where(np.isnan(gap), math.inf, gap) / (scale or 1.0)
    return math.sqrt(float(np.mean(gap**2))), float(gap.max())


def _dtype(tree) -> str:
    return max((leaf.dtype for leaf in _floats(tree)), key=_eps).name


def _eps(dtype) -> float:
    return float(jnp.finfo(dtype).eps)
