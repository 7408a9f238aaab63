"""What `layerwise` found: a row for each call of a layer, and the table of them."""

from dataclasses import asdict, dataclass
from typing import Any

from . import tables


@dataclass(frozen=True)
class LayerRow:
    """One layer, run both ways. Errors are root mean squares relative to way b.

    Attributes:
      layer: path of the module; `#2` is its second call.
      output: error of its output.
      gradient: error of the gradient of the loss in its output.
      parameters: error of the gradient in its own parameters, None if it has none.
      range_a, range_b: smallest and largest output.
      allowed: what its output may differ by.
      allowed_gradient: what its gradients may.
    """

    layer: str
    dtypes: tuple[str, str]
    output: float
    gradient: float
    parameters: float | None
    range_a: tuple[float, float]
    range_b: tuple[float, float]
    allowed: float
    allowed_gradient: float

    @property
    def departs(self) -> bool:
        # Written so that NaN departs.
        return not self.output <= self.allowed

    @property
    def gradient_departs(self) -> bool:
        errors = (self.gradient, self.parameters or 0.0)
        return not all(error <= self.allowed_gradient for error in errors)


@dataclass(frozen=True)
class LayerReport:
    """The outcome of `layerwise`: a row for each call, in the order they ended.

    Attributes:
      hidden: layers inside a transform, which were run but not recorded.
    """

    rows: tuple[LayerRow, ...]
    hidden: tuple[str, ...] = ()

    @property
    def first(self) -> str | None:
        """The first layer whose output departs, None where all agree."""
        return next((row.layer for row in self.rows if row.departs), None)

    @property
    def first_gradient(self) -> str | None:
        """The first layer, counted backwards from the loss, whose gradient departs."""
        backwards = reversed(self.rows)
        return next((row.layer for row in backwards if row.gradient_departs), None)

    @property
    def ok(self) -> bool:
        return self.first is None and self.first_gradient is None

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        verdict = {"first": self.first, "first_gradient": self.first_gradient}
        return {"ok": self.ok} | verdict | asdict(self)

    def table(self):
        """A `rich` table of all layers."""
        return tables.rich_table(*self._contents())

    def __str__(self) -> str:
        text = tables.plain(*self._contents())
        if self.hidden:
            text += f"\nNot recorded, inside a transform: {', '.join(self.hidden)}."
        return text

    def _contents(self):
        title = "All layers agree"
        if not self.ok:
            title = f"First to depart: output {self.first or 'none'}, "
            title += f"gradient {self.first_gradient or 'none'}"
        columns = ("layer", "dtypes", "output", "gradient", "parameters")
        columns += ("range a", "range b", "")
        cells = [
            (
                row.layer,
                "/".join(row.dtypes),
                tables.number(row.output),
                tables.number(row.gradient),
                "" if row.parameters is None else tables.number(row.parameters),
                "{:.3g} {:.3g}".format(*row.range_a),
                "{:.3g} {:.3g}".format(*row.range_b),
                " ".join(
                    text
                    for text, wrong in (
                        ("OUTPUT", row.departs),
                        ("GRADIENT", row.gradient_departs),
                    )
                    if wrong
                ),
            )
            for row in self.rows
        ]
        return title, columns, cells
