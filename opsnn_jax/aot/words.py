"""What went wrong, in the few words of it that a reader can use."""

import re
import signal
import sys
import traceback
from collections.abc import Sequence
from types import TracebackType

# Lines of error messages that say nothing about the error.
_BOILERPLATE = re.compile(
    r"^\s*$|^-+$|^=+$|JAX has removed its internal frames|The above exception was"
    r"|^\s*at |^\s*@ |^\s*#\d+ |^\*\*\*|^PC: "
)
_ERROR_LINES = 8
_ERROR_WIDTH = 400

# How MLIR words a refusal: on stderr, where the exception says only that a pass failed.
_DIAGNOSTIC = re.compile(r"^\S.*\berror: ")
_DIAGNOSTICS = 4

# Whose code runs between a user's function and what it raises.
_BETWEEN = sys.stdlib_module_names | {"jax", "jaxlib", "cloudpickle"}


def meaningful(message: str) -> str:
    """The first lines of a message that say something, shortened."""
    lines = [
        line.rstrip()[:_ERROR_WIDTH]
        for line in message.splitlines()
        if not _BOILERPLATE.search(line)
    ]
    return "\n".join(lines[:_ERROR_LINES])


def raised_in(traceback_: TracebackType | None, besides: Sequence[str] = ()) -> str:
    """The last line outside JAX and the standard library, or "".

    Args:
      traceback_: of the exception.
      besides: files that are not the user's either.
    """
    said = ""
    for frame, line in traceback.walk_tb(traceback_):
        code = frame.f_code
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in _BETWEEN and code.co_filename not in besides:
            said = f"in {code.co_name}, {code.co_filename}:{line}"
    return said


def diagnostics(stderr: str, message: str) -> str:
    """The lines of a compiler's errors that its exception, `message`, leaves out."""
    lines = dict.fromkeys(
        line.rstrip()[:_ERROR_WIDTH]
        for line in stderr.splitlines()
        if _DIAGNOSTIC.search(line) and line.partition("error: ")[2] not in message
    )
    return "\n".join([*lines][:_DIAGNOSTICS])


def death(code: int, stderr: str) -> str:
    """How a process ended that left no result, and its last words."""
    how = f"died of {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
    said = stderr.splitlines()
    fatal = [
        i for i, line in enumerate(said) if re.match(r"F\d{4} |.*Check fail", line)
    ]
    words = "\n".join(said[fatal[0] :] if fatal else said[-_ERROR_LINES:])
    return f"the compiler {how}\n{words}"
