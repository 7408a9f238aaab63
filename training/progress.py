"""How a run shows that it advances: a bar on a terminal, else a line now and then."""

from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

# Without a terminal, this many lines for the whole run.
_LINES = 20


class Display:
    """Shows the last metrics of a run. A context manager."""

    def __init__(self, console: Console, steps: int, counted: str):
        self._console, self._steps, self._counted = console, steps, counted
        self._next_line = 0
        self._progress = Progress(
            TextColumn("[bold]step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            _Metrics(),
            TextColumn("left"),
            TimeRemainingColumn(compact=True),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("", total=steps, text="compiling")

    def __enter__(self) -> "Display":
        self._progress.start()
        return self

    def __exit__(self, *_) -> None:
        self._progress.stop()

    def update(self, done: int, row: dict[str, Any], rate: float | None) -> None:
        """Shows the row of the last step; `rate` is images or tokens per second."""
        text = (
            f"loss {row['loss']:.4f}  accuracy {row['accuracy']:.3f}  "
            f"scale {number(row['loss_scale'])}  skipped {row['total_skips']}"
        )
        if rate is not None:
            text += f"  {rate:,.0f} {self._counted}/s"
        self._progress.update(self._task, completed=done, text=text)
        if not self._console.is_terminal and (
            done >= self._next_line or done == self._steps
        ):
            self._console.print(f"step {done}/{self._steps}  {text}", soft_wrap=True)
            self._next_line = done + self._steps / _LINES


def number(value: float) -> str:
    """A count or a power of two, in full: 2**24 is 16777216 and not 1.67772e+07."""
    return f"{value:.10g}"


class _Metrics(ProgressColumn):
    def render(self, task) -> Text:
        return Text(task.fields["text"])
