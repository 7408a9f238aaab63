"""The command line: `opsnn COMMAND ...`.

A command is a line in `_COMMANDS`: its help, a function that adds its arguments, and
the module whose `run(args)` does it and returns the exit code. The module is imported
only when its command is given, so that one command needs no other's packages.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence
from importlib import metadata


def _train_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="a YAML file")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="overrides a key, as in --set run.seed=1; may be given again",
    )


# name -> help, arguments, module, the extra that brings what it imports
_COMMANDS = {
    "train": ("train a model", _train_arguments, "opsnn_jax.training.command", "train"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command. Returns its exit code; 2 for a wrong command line."""
    parser = argparse.ArgumentParser(
        prog="opsnn", description="Kernels and training for JAX."
    )
    parser.add_argument(
        "--version",
        action="version",
        version=f"opsnn_jax {metadata.version('opsnn-jax')}",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (summary, add_arguments, _, _) in _COMMANDS.items():
        add_arguments(commands.add_parser(name, help=summary, description=summary))
    args = parser.parse_args(argv)

    _, _, module, extra = _COMMANDS[args.command]
    try:
        command = importlib.import_module(module)
    except ModuleNotFoundError as e:
        if (e.name or "").startswith("opsnn_jax"):
            raise
        print(
            f"opsnn {args.command}: the package {e.name!r} is missing. "
            f"Install it: pip install 'opsnn-jax[{extra}]'.",
            file=sys.stderr,
        )
        return 2
    return command.run(args)
