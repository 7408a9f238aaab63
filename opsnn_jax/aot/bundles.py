"""The bundles of a dumped schedule, and the loops among them.

A loop starts at a bundle marked `LB:` whose comment opens a region, and ends at the
conditional branch back to that region, or rather after the branch's delay slots. Its
trips follow from the comparison that decides the branch.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

# Bundles after a taken branch that still issue. In v5e and v6e dumps code that belongs
# to the loop, such as the copies of loop-carried values, stands in these four, and code
# from outside the loop starts right after them.
BRANCH_DELAY = 4

_BUNDLE = re.compile(r"^\s*(?:0x)?[0-9a-f]+\s+(?:([A-Z]{2})\s*)?:\s*>*\s*\{")
_REGION_START = re.compile(r"Start (?:/End empty )?region (\d+)")
BRANCH = re.compile(
    r"sbr\.rel \(!?%(p\w+)\) target (?:= \$region|bundleno = \d+ \(0x[0-9a-f]+\), "
    r"region = )(\d+)"
)


@dataclass(frozen=True)
class Span:
    """A stretch of bundles, both ends included; `trips` is None where not constant."""

    first: int
    last: int
    trips: int | None

    def holds(self, other: "Span") -> bool:
        return self != other and self.first <= other.first and other.last <= self.last


def split_bundles(text: str) -> tuple[list[str], list[str]]:
    """The text and the marker ("LB", "PF", "", ...) of each bundle."""
    bundles: list[str] = []
    markers: list[str] = []
    for line in text.splitlines():
        match = _BUNDLE.match(line)
        if match:
            bundles.append(line)
            markers.append(match[1] or "")
        elif bundles:  # a comment that goes on
            bundles[-1] += " " + line
    return bundles, markers


def find_loops(bundles: Sequence[str], markers: Sequence[str]) -> list[Span]:
    """The loops, outer ones before those inside them."""
    headers: dict[str, int] = {}
    loops: dict[int, Span] = {}  # by header: the last branch back ends a loop
    text = "\n".join(bundles)
    for i, (bundle, marker) in enumerate(zip(bundles, markers, strict=True)):
        if marker == "LB":
            headers |= dict.fromkeys(_REGION_START.findall(bundle), i)
        for predicate, region in BRANCH.findall(bundle):
            if region in headers:
                last = min(i + BRANCH_DELAY, len(bundles) - 1)
                first = headers[region]
                loops[first] = Span(first, last, _trips(text, predicate))
    return sorted(loops.values(), key=lambda s: (s.first, -s.last))


def count_cycles(text: str) -> int:
    """Bundles times trips of one dump of a kernel."""
    bundles, markers = split_bundles(text)
    return sum(count_issues(len(bundles), find_loops(bundles, markers)))


def count_issues(count: int, spans: Sequence[Span]) -> list[int]:
    """How often each bundle issues."""
    weights = [1] * count
    for span in spans:
        for i in range(span.first, span.last + 1):
            weights[i] *= span.trips or 1
    return weights


def _trips(text: str, predicate: str) -> int | None:
    """Iterations of the loop that ends once `predicate` holds, if they are constant."""
    test = _definition(
        text, predicate, r"scmp\.(\w+)\.[su]32\.totalorder %(s\w+), (\d+)"
    )
    if test and test[1] == "eq" and test[3] == "0":
        # XLA's while: its condition as a number, compared with 0.
        number = test[2]
        masked = _definition(text, number, r"sand\.u32 1, %(s\w+)")
        chosen = _definition(
            text,
            masked[1] if masked else number,
            r"scalar_select /\*predicate=\*/%(p\w+), /\*on_true=\*/1, "
            r"/\*on_false=\*/0",
        )
        if chosen:
            test = _definition(
                text, chosen[1], r"scmp\.(lt)\.[su]32\.totalorder %(s\w+), (\d+)"
            )
    if not test or test[1] not in ("ge", "eq", "lt"):
        return None
    # The counter is `phi + step`, and the phi starts from a constant, unless either
    # went through a spill slot: then it is taken to count from 0 by 1, as grids do.
    start, step = 0, 1
    add = _definition(text, test[2], r"sadd\.s32 (\d+), %(s\w+)")
    if add:
        step = int(add[1])
        phi = _definition(text, add[2], r"sphi %(s\w+), ")
        init = phi and _definition(text, phi[1], r"smov(?:\.u32)? (\d+)")
        start = int(init[1]) if init else 0
    trips = -((start - int(test[3])) // step)
    return trips if trips > 0 else None


def _definition(text: str, name: str, pattern: str) -> re.Match | None:
    """The instruction that defines `name`, if it has this form. Predicates dropped."""
    at = text.find(f"%{name} = ")
    if at < 0:
        return None
    instruction = text[at : at + 300].split(";;")[0].split("\n")[0]
    instruction = re.sub(r"\(!?%p\w+\),? ?", "", instruction)
    return re.match(rf"%{name} = {pattern}", instruction)
