"""Instructions of an optimized program that are the same but for their names.

XLA compiles a kernel once and uses it for all that are equal, so it dumps one schedule
for them. Which are equal is read from the text of the program.
"""

import hashlib
import re

_COMPUTATION = re.compile(r"(?:ENTRY )?%(\S+) \(.*\{$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%(\S+) = (.*)$")
_NAME = re.compile(r"%([\w.<>-]+)")
# Where it stood in Python, and how it was sharded before the program was cut.
_ORIGIN = re.compile(
    r", (?:metadata|frontend_attributes|sharding)=\{"
    r'(?:"(?:\\.|[^"\\])*"|[^"{}]|\{[^{}]*\})*\}'
)


def forms(hlo: str) -> dict[str, str]:
    """Of each instruction, by its name, a text that twins have in common.

    It has the shape and layout of the result and of each operand, and the computations
    that are called, with names replaced by what they stand for.
    """
    computations = _read(hlo)
    called: dict[str, str] = {}

    def body(name):
        """What stands for a computation, whose instructions are numbered."""
        if name not in called:
            numbers = {each: f"#{i}" for i, each in enumerate(computations[name])}
            texts = computations[name].values()
            text = ";".join(rename(t, numbers) for t in texts)
            # Not the text itself, which grows with each level of calls.
            called[name] = hashlib.sha256(text.encode()).hexdigest()
        return called[name]

    def rename(text, names):
        def replace(match):
            name = match[1]
            if name in names:
                return names[name]
            return body(name) if name in computations else name

        return _NAME.sub(replace, text)

    found = {}
    for instructions in computations.values():
        shapes = {name: _shape(text) for name, text in instructions.items()}
        found |= {n: rename(text, shapes) for n, text in instructions.items()}
    return found


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
