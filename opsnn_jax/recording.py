"""Notes of what dispatch chose, for `explain`."""

import contextlib
import contextvars
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass
class Record:
    """What was chosen while `recorded` was entered.

    Attributes:
      choices: (table, requested, spec, choice) of every call.
      arrays: by op, pass and the spec that it was chosen for, the spec and the arrays
        that the pass was last called with.
    """

    choices: list = field(default_factory=list)
    arrays: dict = field(default_factory=dict)


_record: contextvars.ContextVar[Record | None] = contextvars.ContextVar(
    "opsnn_record", default=None
)


def current() -> Record | None:
    """Where to note down what is chosen now, or None."""
    return _record.get()


@contextlib.contextmanager
def recorded() -> Iterator[Record]:
    """Notes down every choice that is made, and every pass that is called, inside."""
    record = Record()
    token = _record.set(record)
    try:
        yield record
    finally:
        _record.reset(token)
