"""Instructions of an optimized program that are the same but for their names.

XLA compiles a kernel once and uses it for all that are equal, so it dumps one schedule
for them. Which are equal is read from the text of the program.
"""

import hashlib
import re
from collections.abc import Collection

_COMPUTATION = re.compile(r"(?:ENTRY )?%(\S+) \(.*\{$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%(\S+) = (.*)$")
# Computations and instructions have names of their own: `max` may be both. A
# computation stands behind an attribute, one or a list.
_NAME = re.compile(r"(?P<attribute>\w+=\{?|, )?%(?P<name>[\w.<>-]+)")
# Where it stood in Python, and how it was sharded before the program was cut.
_ORIGIN = re.compile(
    r", (?:metadata|frontend_attributes|sharding)=\{"
    r'(?:"(?:\\.|[^"\\])*"|[^"{}]|\{[^{}]*\})*\}'
)


def forms(hlo: str, names: Collection[str]) -> dict[str, str]:
    """Of those instructions that the program has, a text that twins have in common.

    It has the shape and layout of the result and of each operand, and the computations
    that are called, with names replaced by what they stand for.
    """
    found: dict[str, str] = {}
    bodies: dict[str, str] = {}  # a text prints a computation before it is called
    for computation, instructions in _read(hlo).items():
        numbers = {name: f"#{i}" for i, name in enumerate(instructions)}
        text = ";".join(_rename(t, numbers, bodies) for t in instructions.values())
        bodies[computation] = hashlib.sha256(text.encode()).hexdigest()
        wanted = instructions.keys() & names
        shapes = {name: _shape(t) for name, t in instructions.items()} if wanted else {}
        found |= {n: _rename(instructions[n], shapes, bodies) for n in wanted}
    return found


def _rename(text, instructions, computations):
    """`text` with names replaced by what they stand for."""
    is_called = False

    def replace(match):
        nonlocal is_called
        before, name = match["attribute"] or "", match["name"]
        if before != ", ":  # of a list, each is what the first is
            is_called = "=" in before
        where = computations if is_called else instructions
        return before + where.get(name, name)

    return _NAME.sub(replace, text)


def _read(hlo):
    """Computation -> instruction -> its text, without where it is from."""
    computations: dict[str, dict[str, str]] = {}
    for line in hlo.splitlines():
        if match := _COMPUTATION.match(line):
            computations[match[1]] = {}
        elif computations and (match := _INSTRUCTION.match(line)):
            instructions = computations[next(reversed(computations))]
            instructions[match[1]] = _ORIGIN.sub("", match[2])
    return computations


def _shape(text):
    """What stands before the operation: a shape, or several in parentheses."""
    if not text.startswith("("):
        return text.split(" ", 1)[0]
    depth = 0
    for i, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return text[: i + 1]
    return text
