"""Results as tables: plain text, or a `rich` table where that is installed."""

from collections.abc import Sequence

_WHOLE = ("by", "dtype", "transf.", "")  # columns of short words, never wrapped
_STYLES = {
    "ok": "green",
    "pass": "green",
    "refused": "dim",
    "FAILED": "bold red",
    "DIFFER": "bold red",
    "fail": "bold red",
}

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
    from rich import box
    from rich.table import Table
    from rich.text import Text

    # Narrow, for eight columns are to fit a terminal of 80 characters.
    table = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD,
        show_edge=False, pad_edge=False, padding=(0, 1, 0, 0),
    )  # fmt: skip
    for column in columns:
        table.add_column(column)
    for row in cells:
        table.add_row(
            *(Text(cell, _STYLES.get(cell.split(" ")[0], "")) for cell in row)
        )
    return table


def number(value: float) -> str:
    """Three significant digits, as short as that goes."""
    return f"{value:.3g}"
