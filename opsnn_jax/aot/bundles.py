"""The bundles of a dumped schedule, and the loops and jumps among them.

A loop starts at a bundle marked `LB:` whose comment opens a region, and ends at the
conditional branch back to that region, or rather after the branch's delay slots.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from opsnn_jax.aot.scalars import Scalars

# Bundles after a taken branch that still issue. In v5e and v6e dumps code that belongs
# to the loop, such as the copies of loop-carried values, stands in these four, and code
# from outside the loop starts right after them.
BRANCH_DELAY = 4

_BUNDLE = re.compile(r"^\s*(?:0x)?[0-9a-f]+\s+(?:([A-Z]{2})\s*)?:\s*>*\s*\{")
_REGION_START = re.compile(r"Start (?:/End empty )?region (\d+)")
_REGION_EMPTY = re.compile(r"Start/End empty region (\d+)")
_SPILLED = r"sld \[smem:\[#\w+_spill\]\]"
_BRANCH = re.compile(
    r"sbr\.rel \((!?)%(p\w+)\) target (?:= \$region|bundleno = \d+ \(0x[0-9a-f]+\), "
    r"region = )(\d+)"
)


@dataclass(frozen=True)
class Span:
    """A stretch of bundles, both ends included."""

    first: int
    last: int

    def holds(self, other: "Span") -> bool:
        return self != other and self.first <= other.first and other.last <= self.last


@dataclass(frozen=True)
class Repeat(Span):
    """A loop, ended by `predicate` being `ends`.

    `trips` is their number as far as its code alone tells it, or None. It is `certain`,
    or for a counter that starts from data the number if it started from 0.
    """

    trips: int | None
    certain: bool
    predicate: str
    ends: bool


@dataclass(frozen=True)
class Skip(Span):
    """What the branch at bundle `branch` jumps over when `predicate` is `jumps`."""

    branch: int
    predicate: str
    jumps: bool


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


def find_loops(bundles: Sequence[str], markers: Sequence[str]) -> list[Repeat]:
    """The loops, outer ones before those inside them."""
    headers: dict[str, int] = {}
    loops: dict[int, Repeat] = {}  # by header: the last branch back ends a loop
    scalars = Scalars("\n".join(bundles))
    for i, (bundle, marker) in enumerate(zip(bundles, markers, strict=True)):
        if marker == "LB":
            headers |= dict.fromkeys(_REGION_START.findall(bundle), i)
        for negated, predicate, region in _BRANCH.findall(bundle):
            if region in headers:
                last = min(i + BRANCH_DELAY, len(bundles) - 1)
                first = headers[region]
                trips = _trips(scalars, predicate)
                loops[first] = Repeat(first, last, *trips, predicate, bool(negated))
    return sorted(loops.values(), key=lambda s: (s.first, -s.last))


def find_skips(bundles: Sequence[str]) -> list[Skip]:
    """The stretches of code over which a branch may jump, in the order of branches.

    Not those of a branch whose target the dump does not show: a few copies have one.
    """
    ends = {
        region: i
        for i, bundle in enumerate(bundles)
        for region in _REGION_EMPTY.findall(bundle)
    }
    skips = []
    for i, bundle in enumerate(bundles):
        for negated, predicate, region in _BRANCH.findall(bundle):
            first, last = i + BRANCH_DELAY + 1, ends.get(region, 0) - 1
            if first <= last:
                skips.append(Skip(first, last, i, predicate, not negated))
    return skips


def _trips(scalars: Scalars, predicate: str) -> tuple[int | None, bool]:
    """`Repeat.trips` of the loop that ends once `predicate` holds, and if certain."""

    def match(name, pattern):
        # What an instruction does under a predicate, it does in the trip that counts.
        instruction = re.sub(r"\(!?%p\w+\),? ?", "", scalars.definition(name))
        return re.match(pattern, instruction)

    test = match(predicate, r"scmp\.(\w+)\.[su]32\.totalorder %(s\w+), (\d+)")
    if test and test[1] == "eq" and test[3] == "0":
        # XLA's while: its condition as a number, compared with 0.
        masked = match(test[2], r"sand\.u32 1, %(s\w+)")
        chosen = match(masked[1] if masked else test[2], r"scalar_select %(p\w+), 1, 0")
        if chosen:
            test = match(chosen[1], r"scmp\.(lt)\.[su]32\.totalorder %(s\w+), (\d+)")
    if not test or test[1] not in ("ge", "eq", "lt"):
        return None, False
    # The counter is `phi + step`, and the phi starts from a constant, unless one of
    # them went through a spill slot: then it is taken to count from 0, as grids do.
    start, step, origin = 0, 1, test[2]
    if add := match(origin, r"sadd\.s32 (\d+), %(s\w+)"):
        step, origin = int(add[1]), add[2]
        if phi := match(origin, r"sphi %(s\w+), "):
            origin = phi[1]
    elif not match(origin, _SPILLED):
        return None, False
    if init := match(origin, r"smov(?:\.u32)? (\d+)"):
        start = int(init[1])
    trips = -((start - int(test[3])) // step) if step else 0
    certain = bool(init or match(origin, _SPILLED))
    return (trips, certain) if trips > 0 else (None, False)
