"""`opsnn train CONFIG`: trains, and shows what came of it."""

import argparse
import sys

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .config_file import ConfigError, load
from .data import DataError
from .progress import number
from .report import RunFolderError
from .trainer import Outcome, StuckError, train


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `opsnn train` to a parser."""
    parser.add_argument("config", metavar="CONFIG", help="a YAML file")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="overrides a key, as in --set run.seed=1; may be given again",
    )


def run(args: argparse.Namespace) -> int:
    """Runs the command. Returns its exit code: 2 for bad input, 130 after Ctrl-C."""
    console = Console()
    try:
        outcome = train(load(args.config, args.set), console)
    except (ConfigError, DataError, RunFolderError) as e:
        print(f"opsnn train: {e}", file=sys.stderr)
        return 2
    except StuckError as e:
        print(f"opsnn train: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("opsnn train: interrupted.", file=sys.stderr)
        return 130
    _show(outcome, console)
    return 130 if outcome.interrupted else 0


def _show(outcome: Outcome, console: Console) -> None:
    if outcome.results:
        table = Table(title="Results", title_justify="left", show_header=False)
        for name, value in outcome.results.items():
            exact = not name.startswith(("test", "bits"))
            table.add_row(name, number(value) if exact else f"{value:.4f}")
        console.print(table)
    if outcome.interrupted:
        console.print("Interrupted; what was done so far is kept.")
    if outcome.sample is not None:
        console.print("The model writes:", style="bold")
        console.print(Text(outcome.sample))
    if not outcome.plotted:
        console.print("No curves were drawn. Install: pip install 'opsnn-jax[plot]'.")
    # A path is to be copied: in one line, without colours.
    console.print(f"run folder: {outcome.folder}", soft_wrap=True, highlight=False)
