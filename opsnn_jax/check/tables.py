"""Results as tables: plain text, or a `rich` table where that is installed."""

from collections.abc import Sequence

Cells = Sequence[Sequence[str]]


def plain(title: str, columns: Sequence[str], cells: Cells) -> str:
    """The table in plain text, one line a row."""
    rows = [list(columns), *(list(row) for row in cells)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(columns))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join([title, *(line.rstrip() for line in lines)])


def rich_table(title: str, columns: Sequence[str], cells: Cells):
    """The table as a `rich.table.Table`.

    Raises:
      ImportError: if rich is not installed.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column)
    for row in cells:
        table.add_row(*(Text(cell) for cell in row))
    return table


def number(value: float) -> str:
    """Three significant digits, as short as that goes."""
    return f"{value:.3g}"
