"""What `check_op` found: a row for each case and dtype, and the table of them."""

from dataclasses import asdict, dataclass
from typing import Any

from . import tables


@dataclass(frozen=True)
class ContractRow:
    """One implementation on one case in one dtype.

    Attributes:
      forward, gradient: root-mean-square error over the baseline's, the worst output;
        None where none was measured.
      differences: verdict of the finite differences; empty where they were not asked.
      deterministic: whether two runs gave the same bits; None where it was not run.
      transforms: those that passed, of those that were run.
      refused: the reason why the implementation does not take this call.
      failures: everything that went wrong, one sentence each.
    """

    implementation: str
    dtype: str
    case: str
    forward: float | None = None
    gradient: float | None = None
    differences: str = ""
    deterministic: bool | None = None
    transforms: tuple[int, int] = (0, 0)
    refused: str = ""
    failures: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.failures


@dataclass(frozen=True)
class Report:
    """The outcome of `check_op`."""

    op: str
    rows: tuple[ContractRow, ...]

    @property
    def ok(self) -> bool:
        """Nothing failed, and something was run."""
        return all(row.ok for row in self.rows) and any(
            not row.refused for row in self.rows
        )

    def raise_if_failed(self) -> None:
        """Raises AssertionError with the table and every failure."""
        if not self.ok:
            raise AssertionError(str(self))

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        rows = [asdict(row) | {"ok": row.ok} for row in self.rows]
        return {"op": self.op, "ok": self.ok, "rows": rows}

    def table(self):
        """A `rich` table of all rows."""
        return tables.rich_table(*self._contents())

    @property
    def details(self) -> str:
        """Every failure in full, and every reason of a refusal with its cases."""
        lines = [
            f"{self.op} {row.implementation} {row.dtype} {row.case}: {failure}"
            for row in self.rows
            for failure in row.failures
        ]
        refused: dict[tuple[str, str], dict[str, None]] = {}
        for row in self.rows:
            if row.refused:
                cases = refused.setdefault((row.implementation, row.refused), {})
                cases[row.case] = None
        lines += [
            f"{name} refused {', '.join(cases)}: {why}"
            for (name, why), cases in refused.items()
        ]
        return "\n".join(lines)

    def __str__(self) -> str:
        return tables.plain(*self._contents()) + "\n" + self.details

    def _contents(self):
        # Short words: a row is to fit a terminal of 80 characters.
        columns = ("by", "dtype", "case", "fwd", "grad")
        columns += ("slope", "bits", "transf.", "")
        short = {"not differentiable": "kink"}
        short |= dict.fromkeys(("inconclusive", "no difference"), "unclear")
        bits = {True: "same", False: "DIFFER", None: ""}
        cells = []
        for row in self.rows:
            start = (row.implementation, row.dtype, row.case)
            if row.refused:
                cells.append((*start, *("",) * 5, "refused"))
                continue
            passed, run = row.transforms
            cells.append(
                (
                    *start,
                    *(
                        "" if ratio is None else tables.number(ratio)
                        for ratio in (row.forward, row.gradient)
                    ),
                    short.get(row.differences, row.differences),
                    bits[row.deterministic],
                    f"{passed}/{run}" if run else "",
                    "ok" if row.ok else f"FAILED ({len(row.failures)})",
                )
            )
        verdict = "keeps" if self.ok else "BREAKS"
        return f"{self.op} {verdict} the contract", columns, cells
