"""Which equation of a function explains its deviation from float64."""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import jax
import numpy as np
from jax.extend import source_info_util

from . import tables
from .arguments import as_jax, op_name, refuse_complex
from .interpreter import Program


@dataclass(frozen=True)
class PrecisionRow:
    """One equation of the traced function.

    Attributes:
      equation: its number and primitive.
      source: the line of Python that made it.
      alone: error of the output where this equation alone has its own precision and all
        else is float64.
      raised: error where this equation alone is float64.
    """

    equation: str
    source: str
    alone: float
    raised: float


@dataclass(frozen=True)
class PrecisionReport:
    """The outcome of `precision_sweep`, the equation with the largest effect first.

    Attributes:
      error: of the function as it is, by root mean square relative to float64.
    """

    op: str
    error: float
    rows: tuple[PrecisionRow, ...]

    @property
    def worst(self) -> PrecisionRow | None:
        """The equation that explains most; None where nothing deviates."""
        return self.rows[0] if self.rows and self.rows[0].alone else None

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        return asdict(self)

    def table(self):
        """A `rich` table of all equations."""
        return tables.rich_table(*self._contents())

    def __str__(self) -> str:
        return tables.plain(*self._contents())

    def _contents(self):
        title = f"{self.op}: error {tables.number(self.error)} against float64"
        columns = ("equation", "its error alone", "error if raised", "from")
        cells = [
            (r.equation, tables.number(r.alone), tables.number(r.raised), r.source)
            for r in self.rows
        ]
        return title, columns, cells


def precision_sweep(
    f: Callable, *args: Any, options: Mapping[str, Any] | None = None
) -> PrecisionReport:
    """Runs `f` once for each of its equations in turn, at another precision.

    Raising one equation shows what would be won by computing it more exactly; lowering
    one, with all else exact, shows what it costs. The second explains a deviation even
    where two causes hide each other.

    Args:
      f: `f(*args, **options)`, returns a pytree of arrays. It is traced and evaluated
        twice for each equation: meant for one layer or op, not for a model.
      args: arrays or pytrees.
      options: keyword arguments of `f`.

    Returns:
      A `PrecisionReport`.

    Raises:
      ValueError: for complex arguments or outputs.

    Precision: the truth is the same function with every equation in float64. Scan,
      while and cond keep their own precision, as does an equation that refuses float64.
    """
    options = dict(options or {})
    args = jax.tree.map(as_jax, tuple(args))
    refuse_complex("precision_sweep", args)
    program = Program(lambda *a: f(*a, **options), args)
    with jax.enable_x64(True):
        every = range(len(program.equations))
        stuck = {i for i in every if not _widens(program, args, i)}

        def run(wide) -> np.ndarray:
            outs = program.run(args, lambda i: i not in stuck and wide(i))
            refuse_complex("precision_sweep", outs)
            flat = [np.ravel(np.asarray(y)).astype(np.float64) for y in outs]
            return np.concatenate(flat) if flat else np.zeros(0)

        truth = run(lambda i: True)
        error = _error(run(lambda i: False), truth)
        rows = []
        for i in every:
            eqn = program.equations[i]
            alone = run(lambda j, i=i: j != i)
            raised = run(lambda j, i=i: j == i)
            rows.append(
                PrecisionRow(
                    f"{i} {eqn.primitive.name}" + (" (as is)" if i in stuck else ""),
                    source_info_util.summarize(eqn.source_info),
                    _error(alone, truth),
                    _error(raised, truth),
                )
            )
    rows.sort(key=lambda row: -row.alone)
    return PrecisionReport(op_name(f), error, tuple(rows))


def _widens(program, args, i) -> bool:
    try:
        program.run(args, lambda j: j == i)
    except Exception:
        return False
    return True


def _error(a, truth) -> float:
    if not truth.size:
        return 0.0
    scale = math.sqrt(float(np.mean(truth**2))) or 1.0
    return math.sqrt(float(np.mean((a - truth) ** 2))) / scale
