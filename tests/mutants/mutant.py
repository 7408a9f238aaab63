"""The bugs that the tests must catch: each a small edit, and the tests that see it.

`old` stands exactly once in `file`. `new` keeps shapes and imports as they are, so that
nothing but a wrong result can give the bug away. `tests` are node ids of pytest, as few
and as quick as will do.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
