"""`opsnn check`: the contract of every op, implementation and dtype, as a table."""

import argparse
import contextlib
import json
import sys
import tempfile

import jax
from jax.experimental.compilation_cache import compilation_cache

from .library import DTYPES, OPS, check_library_op


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `opsnn check` to a parser."""
    parser.add_argument("op", nargs="?", help=f"one of {', '.join(OPS)}; default: all")
    parser.add_argument(
        "--implementation",
        action="append",
        help="run only this one; may be given again (default: all)",
    )
    parser.add_argument(
        "--dtype",
        action="append",
        help=f"one of {', '.join(DTYPES)}; may be given again (default: all)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of all random numbers")
    parser.add_argument("--json", action="store_true", help="print JSON, not a table")


def run(args: argparse.Namespace) -> int:
    """Runs `opsnn check`.

    Returns:
      The exit code: 0 if every op keeps its contract, 1 if one breaks it, 2 for an
      argument that is not known.
    """
    dtypes = tuple(args.dtype or DTYPES)
    unknown = [dtype for dtype in dtypes if dtype not in DTYPES]
    if unknown:
        return _refuse(f"--dtype must be one of {', '.join(DTYPES)}; got {unknown[0]}.")
    if args.implementation and args.op is None:
        return _refuse("--implementation names one of an op's; name the op too.")
    reports = []
    with _programs_kept():
        for name in [args.op] if args.op else OPS:
            try:
                with _progress() as progress:
                    report = check_library_op(
                        name, args.implementation, dtypes, args.seed, progress
                    )
            except ValueError as error:
                return _refuse(str(error).removeprefix("check: "))
            reports.append(report)
            if not args.json:
                _show(report)
    if args.json:
        print(json.dumps([report.to_dict() for report in reports], indent=2))
    return 0 if all(report.ok for report in reports) else 1


@contextlib.contextmanager
def _programs_kept():
    """Compiles the same program once: each implementation has the same references."""
    if jax.config.jax_compilation_cache_dir:  # the user's own
        yield
        return
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        # JAX keeps the folder that it found first.
        stack.callback(compilation_cache.reset_cache)
        for name, value in (
            ("jax_compilation_cache_dir", folder),
            ("jax_persistent_cache_min_compile_time_secs", 0.0),
            ("jax_persistent_cache_min_entry_size_bytes", -1),
        ):
            stack.callback(jax.config.update, name, getattr(jax.config, name))
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        yield


@contextlib.contextmanager
def _progress():
    """Says on a terminal what is being checked, which takes minutes."""
    try:
        from rich.console import Console
    except ImportError:
        yield None
        return
    with Console(stderr=True).status("starting") as status:
        yield status.update


def _show(report):
    try:
        from rich.console import Console
    except ImportError:
        print(report)
        return
    Console().print(report.table())
    if report.details:
        print(report.details)


def _refuse(message: str) -> int:
    print(f"opsnn check: {message}", file=sys.stderr)
    return 2
