"""Reports in the terminal."""

import io
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from opsnn_jax.aot import figures
from opsnn_jax.aot.report import Kernel, Report

# What is shown of a program with very many kernels, most expensive first.
_KERNELS = 8
_LOOPS = 6

# Two tables, because the units beside the counts need more than 80 characters.
_COUNTS = ("calls", "bundles", "cycles", "stalls", "fills", "spills")

# Room in the summary for its labels, and the least for a report.
_LABEL = 28
_COLUMN = 24


def print_reports(reports: Sequence[Report], console: Console) -> None:
    """Prints the reports side by side, then the kernels of each."""
    beside = max((console.width - _LABEL) // _COLUMN, 1)
    for first in range(0, len(reports), beside):
        if first:
            console.print()
        console.print(_summary(reports[first : first + beside]))
    for report in reports:
        _print_details(report, console)


def as_text(reports: Sequence[Report]) -> str:
    """The same without colours, for a terminal of 80 characters."""
    console = Console(file=io.StringIO(), width=80, color_system=None)
    print_reports(reports, console)
    return console.file.getvalue()


def _summary(reports: Sequence[Report]) -> Table:
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("", overflow="fold", max_width=_LABEL)
    for report in reports:
        head = Text(f"{report.name}\n{report.target}")
        table.add_column(head, justify="right", overflow="fold")
    columns = [dict(figures.summary(report)) for report in reports]
    for label in figures.labels(reports):
        row = (label, *(column.get(label, "") for column in columns))
        table.add_row(*map(Text, row))
    return table


def _print_details(report: Report, console: Console) -> None:
    console.print()
    heading = f"{report.name} for {report.target}"
    console.print(Text(heading, style="bold"), highlight=False)
    console.print(Text(figures.versions(report.toolchain), style="dim"))
    if not report.ok:
        console.print(Text(report.error, style="red"))
    if report.schedule:
        kernels = report.schedule.kernels
        console.print(_kernels(kernels))
        if kernels and figures.shown_units(kernels[0]):
            console.print()
            console.print(_units(kernels))
    for note in report.notes:
        console.print(Text(f"note: {note}", style="yellow"))


def _kernels(kernels: Sequence[Kernel]) -> Table:
    table = _table("kernel, loops", _COUNTS)
    for kernel in kernels[:_KERNELS]:
        stalls = "?" if kernel.stalls is None else figures.count(kernel.stalls)
        table.add_row(
            Text(kernel.name),
            figures.count(kernel.calls),
            figures.count(kernel.bundles),
            figures.count(kernel.cycles),
            stalls,
            figures.count(kernel.fills),
            _red(kernel.spills),
        )
        for loop in kernel.loops[:_LOOPS]:
            table.add_row(
                Text(f"{'  ' * loop.depth}{figures.trips(loop)} trips", style="dim"),
                "",
                figures.count(loop.last - loop.first + 1),
                figures.count(loop.cycles),
                "",
                figures.count(loop.fills),
                _red(loop.spills),
            )
        if len(kernel.loops) > _LOOPS:
            table.add_row(Text(f"  {len(kernel.loops) - _LOOPS} more loops", "dim"))
    if len(kernels) > _KERNELS:
        table.add_row(Text(f"{len(kernels) - _KERNELS} more kernels", "dim"))
    return table


def _units(kernels: Sequence[Kernel]) -> Table:
    units = [u.name for u in figures.shown_units(kernels[0])]
    table = _table("slots filled", units)
    for kernel in kernels[:_KERNELS]:
        use = {
            u.name: f"{figures.busy(u, kernel):.0%}"
            for u in figures.shown_units(kernel)
        }
        table.add_row(Text(kernel.name), *(use.get(name, "") for name in units))
    return table


def _table(first: str, numbers: Sequence[str]) -> Table:
    """A table that never cuts a number: long names take several lines instead."""
    table = Table(show_edge=False, pad_edge=False)
    table.add_column(first, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _red(spills: int) -> Text:
    return Text(figures.count(spills), style="red" if spills else "")
