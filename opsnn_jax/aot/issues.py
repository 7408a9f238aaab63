"""How often each bundle of a schedule issues.

A kernel is followed as its scalar unit would run it: which trips a loop has, and over
which code a branch jumps, mostly follows from constants and counters. So the trips in
which a pipeline only fills or drains count as what they are, and of a causal mask only
the blocks count that are seen. A branch that depends on data counts as not taken. A
loop whose length does counts as if its counter started from 0, or once if that tells
nothing.
"""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from opsnn_jax.aot.bundles import (
    Repeat,
    Skip,
    Span,
    find_loops,
    find_skips,
    split_bundles,
)
from opsnn_jax.aot.scalars import Scalars

_PHI = re.compile(r"%(\w+) = sphi %(\w+), %(\w+)")

# Trips that are followed one by one, of one loop and of all. Longer loops are not those
# of grids; they count by their constant number of trips, if they have one.
_MOST_TRIPS = 1 << 14
_MOST_STEPS = 1 << 18


@dataclass
class Issues:
    """How often things happen in one run of a kernel.

    Attributes:
      bundles: issues of each bundle.
      trips: of each loop that is entered, by its first bundle, on average each time;
        None where it is not known.
      undecided: the branches of which it is not known whether they jump.
    """

    bundles: list[int]
    trips: dict[int, float | None] = field(default_factory=dict)
    undecided: set[Skip] = field(default_factory=set)


def count_cycles(text: str) -> int:
    """Issue cycles of one dump of a kernel."""
    bundles, markers = split_bundles(text)
    return sum(count_issues(bundles, find_loops(bundles, markers)).bundles)


def count_issues(bundles: Sequence[str], loops: Sequence[Repeat]) -> Issues:
    """Follows a kernel with these loops."""
    return _Run(bundles, loops).issues()


@dataclass(frozen=True)
class _Stretch(Span):
    """The code of a loop, or all of it, with the loops and jumps that it has itself."""

    events: tuple[Repeat | Skip, ...]


class _Run:
    def __init__(self, bundles, loops):
        self.bundles = bundles
        self.scalars = Scalars("\n".join(bundles))
        self.changes = [0] * (len(bundles) + 1)  # from one bundle's issues to the next
        self.entered: dict[int, int] = {}
        self.turns: dict[int, int] = {}
        self.unsure: set[int] = set()
        self.undecided: set[Skip] = set()
        self.steps = 0
        skips = find_skips(bundles)
        self.stretches = {loop: _stretch(loop, loops, skips) for loop in loops}
        self.follow(_stretch(Span(0, len(bundles) - 1), loops, skips), {}, 1)

    def issues(self) -> Issues:
        bundles, total = [], 0
        for change in self.changes[:-1]:
            total += change
            bundles.append(total)
        trips = {
            first: None if first in self.unsure else self.turns[first] / entered
            for first, entered in self.entered.items()
        }
        return Issues(bundles, trips, self.undecided)

    def count(self, first, last, times):
        if first <= last:
            self.changes[first] += times
            self.changes[last + 1] -= times

    def follow(self, stretch, values, times):
        """One pass through a stretch, that many times."""
        at = stretch.first
        for event in stretch.events:
            if isinstance(event, Repeat):
                if event.first >= at:
                    self.count(at, event.first - 1, times)
                    self.loop(event, values, times)
                    at = event.last + 1
            elif event.branch >= at:
                holds = self.scalars.value(event.predicate, values)
                leaves = event.last > stretch.last  # a loop, which is not followed
                if holds is None or (leaves and bool(holds) == event.jumps):
                    self.undecided.add(event)
                elif bool(holds) == event.jumps:
                    self.count(at, event.first - 1, times)
                    at = event.last + 1
        self.count(at, stretch.last, times)

    def loop(self, loop, values, times):
        trips = loop.trips
        if trips and (trips > _MOST_TRIPS or self.steps > _MOST_STEPS):
            self.follow(self.stretches[loop], dict(values), times * trips)
            if not loop.certain:
                self.unsure.add(loop.first)
        else:
            trips = self.turn(loop, values, times)
        self.entered[loop.first] = self.entered.get(loop.first, 0) + times
        self.turns[loop.first] = self.turns.get(loop.first, 0) + times * trips

    def turn(self, loop, values, times):
        """Follows a loop trip by trip; their number. Adds its last values."""
        phis = _PHI.findall(self.bundles[loop.first])
        counters = {phi: self.scalars.value(start, values) for phi, start, _ in phis}
        for trips in itertools.count(1):
            inside = _known(values) | counters
            self.follow(self.stretches[loop], inside, times)
            self.steps += 1
            ends = self.scalars.value(loop.predicate, inside)
            if ends is None:
                over = trips >= (loop.trips or 1)
            else:
                over = bool(ends) == loop.ends
            if ends is None and not loop.certain:
                self.unsure.add(loop.first)
            if over:
                values |= _known(inside)
                return trips
            if trips >= _MOST_TRIPS or self.steps > _MOST_STEPS:
                if not loop.certain:
                    self.unsure.add(loop.first)
                if loop.trips is None:
                    return trips
                rest = max(loop.trips - trips, 0)
                self.follow(self.stretches[loop], dict(values), times * rest)
                return trips + rest
            counters = {phi: self.scalars.value(then, inside) for phi, _, then in phis}


def _known(values):
    return {name: value for name, value in values.items() if value is not None}


def _stretch(span, loops, skips):
    inner = [loop for loop in loops if span.holds(loop)]
    outermost = [loop for loop in inner if not any(o.holds(loop) for o in inner)]
    own = [skip for skip in skips if span.first <= skip.branch <= span.last]
    events = sorted((*outermost, *own), key=lambda e: getattr(e, "branch", e.first))
    return _Stretch(span.first, span.last, tuple(events))
