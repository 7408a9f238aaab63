"""Which keys a query may see, as arithmetic on positions.

A `Band` is the part of the visibility that is known without data: causality and
windows are both bounds on `key position - query position`. It answers for a whole
block of scores at once, so that a kernel never visits an empty block, and never builds
a mask for a full one. Visibility that is data (ids, positions, a mask operand) is
intersected with it inside the partial blocks; see also `ranges`.

Every method takes ints or traced integers.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Band:
    """Query i sees key j where `lower <= j - i <= upper`; None is no bound."""

    lower: int | None = None
    upper: int | None = None

    @property
    def full(self) -> bool:
        """Whether every query sees every key."""
        return self.lower is None and self.upper is None

    def __and__(self, other: "Band") -> "Band":
        """What both bands show."""
        lowers = [b for b in (self.lower, other.lower) if b is not None]
        uppers = [b for b in (self.upper, other.upper) if b is not None]
        return Band(max(lowers, default=None), min(uppers, default=None))

    def shifted(self, offset: int) -> "Band":
        """The band in which query i sees what query i + offset sees in this one."""
        return Band(*(b if b is None else b + offset for b in (self.lower, self.upper)))

    @property
    def transposed(self) -> "Band":
        """The band in which key j sees query i if query i sees key j in this one."""
        lower, upper = self.upper, self.lower
        return Band(
            None if lower is None else -lower, None if upper is None else -upper
        )

    def meets(self, row, rows, col, cols):
        """Whether any query of [row, row + rows) sees any key of [col, col + cols)."""
        # The least and the greatest j - i of the block.
        least, greatest = col - (row + rows - 1), col + cols - 1 - row
        result = True
        if self.lower is not None:
            result = greatest >= self.lower
        if self.upper is not None:
            result = result & (least <= self.upper)
        return result

    def covers(self, row, rows, col, cols):
        """Whether every query of [row, row + rows) sees every key of the columns."""
        least, greatest = col - (row + rows - 1), col + cols - 1 - row
        result = True
        if self.lower is not None:
            result = least >= self.lower
        if self.upper is not None:
            result = result & (greatest <= self.upper)
        return result

    def visible(self, row: jax.Array, col: jax.Array) -> jax.Array:
        """Element by element; `row` and `col` are positions that broadcast."""
        distance = col - row
        result = jnp.ones(distance.shape, bool)
        if self.lower is not None:
            result = result & (distance >= self.lower)
        if self.upper is not None:
            result = result & (distance <= self.upper)
        return result
