"""The command line: `opsnn COMMAND ...`.

A command is a line in `_COMMANDS` and a module with `add_arguments(parser)` and
`run(args)`, which returns the exit code. The module is imported only when its command
is given, so that one command needs no other's packages.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence
from importlib import metadata

# name -> what it does, its module, the extra that brings what the module imports
_COMMANDS = {
    "train": ("train a model", "opsnn_jax.training.command", "train"),
    "check": (
        "hold the ops against fp64 and finite differences",
        "opsnn_jax.check.command",
        "test",
    ),
    "compile": (
        "compile for a TPU or GPU that is not there",
        "opsnn_jax.aot.command",
        "aot",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command. Returns its exit code; 2 for a wrong command line."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(
        prog="opsnn", description="Kernels and training for JAX."
    )
    parser.add_argument(
        "--version",
        action="version",
        version=f"opsnn_jax {metadata.version('opsnn-jax')}",
    )
    given = next((a for a in argv if not a.startswith("-")), None)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (summary, module, extra) in _COMMANDS.items():
        subparser = commands.add_parser(name, help=summary, description=summary)
        if name == given:
            try:
                command = importlib.import_module(module)
            except ModuleNotFoundError as e:
                if (e.name or "").startswith("opsnn_jax"):
                    raise
                print(
                    f"opsnn {name}: the package {e.name!r} is missing. "
                    f"Install it: pip install 'opsnn-jax[{extra}]'.",
                    file=sys.stderr,
                )
                return 2
            command.add_arguments(subparser)
    args = parser.parse_args(argv)
    return command.run(args)


if __name__ == "__main__":
    sys.exit(main())
