"""What `check_grads` found: a row for each comparison, and the table of them."""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from . import tables


@dataclass(frozen=True)
class GradientRow:
    """One comparison. A value that was not computed is NaN.

    Attributes:
      order: 1 for the derivative of the op, 2 for that of its vjp.
      argument: the argument that was moved, or `all` for all together.
      check: `cotangent` (dtype and shape) or the number of the direction.
      status: `pass`, `fail`, `refused`; `not differentiable` at a kink with no smooth
        point beside it, `inconclusive` where rounding hides more than a quarter of the
        derivative, `no difference` where the op is not finite at the points around.
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
    def compared(self) -> bool:
        """Some direction was compared, or the arguments are empty and there is none."""
        directions = [row for row in self.rows if row.check != "cotangent"]
        return not directions or any(r.status in ("pass", "fail") for r in directions)

    @property
    def not_compared(self) -> tuple[str, ...]:
        """The arguments of which no direction could be compared."""
        found: dict[str, bool] = {}
        for row in self.rows:
            if row.check != "cotangent" and row.argument != "all":
                settled = row.status in ("pass", "fail", "refused")
                found[row.argument] = found.get(row.argument, False) or settled
        return tuple(name for name, settled in found.items() if not settled)

    @property
    def ok(self) -> bool:
        """No comparison failed, and the derivative was compared in some direction."""
        return not self.failures and self.compared

    def raise_if_failed(self) -> None:
        """Raises AssertionError with the table unless the report is `ok`."""
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

    def _verdict(self) -> str:
        if any(row.status == "fail" for row in self.failures):
            return "derivatives DISAGREE"
        if self.failures:
            return "NOT ALL WAS COMPUTED"
        if not self.compared:
            return "NOTHING COULD BE COMPARED"
        left_out = ", ".join(self.not_compared)
        return "derivatives agree" + (f", but not seen: {left_out}" if left_out else "")

    def _contents(self):
        title = f"{self.op}: {self._verdict()} (compared in {self.dtype})"
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
