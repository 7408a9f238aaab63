"""`opsnn train CONFIG`: trains, and shows what came of it."""

import argparse
import logging
import pathlib
import shlex
import sys

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .auto_batch import default_budget, fit_batch, parse_size, show_size
from .checkpoint import CheckpointError
from .config import Config
from .config_file import ConfigError, load
from .data import DataError
from .loop import StuckError
from .progress import number
from .report import RunFolderError, last_run
from .trainer import LostRunError, Outcome, train

# As shells count them: 128 and the number of the signal.
_EXIT_CODES = {"SIGINT": 130, "SIGTERM": 143}


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
    parser.add_argument(
        "--resume",
        nargs="?",
        const="",
        metavar="RUN_FOLDER",
        help="goes on with a stopped run: this one, or the newest of its name",
    )
    parser.add_argument(
        "--auto-batch",
        action="store_true",
        help="trains with the largest batch that fits the memory",
    )
    parser.add_argument(
        "--memory",
        metavar="SIZE",
        help="what --auto-batch may use, as in 6GiB; default: what the device has",
    )


def run(args: argparse.Namespace) -> int:
    """Runs the command. Returns its exit code.

    It is 2 for bad input, 1 for a run that cannot go on, 130 after Ctrl-C, 143 after
    SIGTERM.
    """
    console = Console()
    # orbax logs every error with its traceback before it raises it.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    try:
        config = load(args.config, args.set)
        again = None
        if args.resume is not None:
            named = pathlib.Path(args.resume) if args.resume else None
            again = named or last_run(config.run.folder, config.run.name)
        if args.auto_batch:
            config = _with_largest_batch(args, config, console)
        elif args.memory is not None:
            raise ConfigError("--memory goes with --auto-batch.")
        outcome = train(config, console, again)
    except (ConfigError, DataError, RunFolderError, CheckpointError) as e:
        print(f"opsnn train: {e}", file=sys.stderr)
        return 2
    except (StuckError, LostRunError) as e:
        print(f"opsnn train: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("opsnn train: interrupted.", file=sys.stderr)
        return 130
    _show(outcome, console)
    if outcome.stopped is None:
        return 0
    # To be copied: in one line, without colours.
    console.print(
        "Stopped; everything is saved. Go on with: "
        + _again(args, outcome.folder, config.data.batch_size),
        soft_wrap=True,
        highlight=False,
        markup=False,
    )
    return _EXIT_CODES[outcome.stopped]


def _with_largest_batch(args, config: Config, console: Console) -> Config:
    if args.resume is not None:
        raise ConfigError(
            "--auto-batch does not go with --resume: a run keeps its batch."
        )
    budget = default_budget() if args.memory is None else parse_size(args.memory)
    fitted = fit_batch(config, budget)
    console.print(
        f"batch size: {fitted.config.data.batch_size}, "
        f"{show_size(fitted.bytes)} of {show_size(budget)}",
        highlight=False,
    )
    return fitted.config


def _again(args: argparse.Namespace, folder: pathlib.Path, batch_size: int) -> str:
    words = ["opsnn", "train", args.config]
    overrides = list(args.set)
    if args.auto_batch:
        overrides.append(f"data.batch_size={batch_size}")
    for override in overrides:
        words += ["--set", override]
    return shlex.join([*words, "--resume", str(folder)])


def _show(outcome: Outcome, console: Console) -> None:
    if outcome.results:
        table = Table(title="Results", title_justify="left", show_header=False)
        for name, value in outcome.results.items():
            exact = not name.startswith(("test", "bits"))
            table.add_row(name, number(value) if exact else f"{value:.4f}")
        console.print(table)
    if outcome.sample is not None:
        console.print("The model writes:", style="bold")
        console.print(Text(outcome.sample))
    if outcome.not_plotted is not None:
        console.print(
            f"No curves were drawn: {outcome.not_plotted}.",
            soft_wrap=True,
            highlight=False,
            markup=False,
        )
    # A path is to be copied: in one line, without colours.
    console.print(f"run folder: {outcome.folder}", soft_wrap=True, highlight=False)
