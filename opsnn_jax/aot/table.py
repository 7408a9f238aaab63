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


def print_reports(reports: Sequence[Report], console: Console) -> None:
    """Prints the reports side by side, then the kernels of each."""
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("")
    for report in reports:
        table.add_column(f"{report.name}\n{report.target}", justify="right")
    columns = [dict(figures.summary(report)) for report in reports]
    for label in figures.labels(reports):
        table.add_row(label, *(column.get(label, "") for column in columns))
    console.print(table)
    for report in reports:
        _print_details(report, console)


def as_text(reports: Sequence[Report]) -> str:
    """The same without colours, for a terminal of 100 characters."""
    console = Console(file=io.StringIO(), width=100, color_system=None)
    print_reports(reports, console)
    return console.file.getvalue()


def _print_details(report: Report, console: Console) -> None:
    console.print()
    heading = f"{report.name} for {report.target}"
    console.print(Text(heading, style="bold"), highlight=False)
    console.print(Text(figures.versions(report.toolchain), style="dim"))
    if not report.ok:
        console.print(Text(report.error, style="red"))
    if report.schedule:
        console.print(_kernels(report.schedule.kernels))
    for note in report.notes:
        console.print(Text(f"note: {note}", style="yellow"))


def _kernels(kernels: Sequence[Kernel]) -> Table:
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("kernel, loops")
    units = [u.name for u in figures.shown_units(kernels[0])] if kernels else []
    for name in ("calls", "bundles", "cycles", "stalls", *units, "fills", "spills"):
        table.add_column(name, justify="right")
    for kernel in kernels[:_KERNELS]:
        stalls = "?" if kernel.stalls is None else figures.count(kernel.stalls)
        use = {
            u.name: f"{figures.busy(u, kernel):.0%}"
            for u in figures.shown_units(kernel)
        }
        table.add_row(
            kernel.name,
            str(kernel.calls),
            figures.count(kernel.bundles),
            figures.count(kernel.cycles),
            stalls,
            *(use.get(name, "") for name in units),
            figures.count(kernel.fills),
            _red(kernel.spills),
        )
        for loop in kernel.loops[:_LOOPS]:
            table.add_row(
                Text(f"{'  ' * loop.depth}{figures.trips(loop)}", style="dim"),
                "",
                figures.count(loop.last - loop.first + 1),
                figures.count(loop.cycles),
                "",
                *("" for _ in units),
                figures.count(loop.fills),
                _red(loop.spills),
            )
        if len(kernel.loops) > _LOOPS:
            table.add_row(Text(f"  {len(kernel.loops) - _LOOPS} more loops", "dim"))
    if len(kernels) > _KERNELS:
        table.add_row(Text(f"{len(kernels) - _KERNELS} more kernels", "dim"))
    return table


def _red(spills: int) -> Text:
    return Text(figures.count(spills), style="red" if spills else "")
