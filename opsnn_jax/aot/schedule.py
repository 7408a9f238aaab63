"""Reads the static schedules that libtpu dumps.

The TPU is a VLIW machine: the compiler packs instructions into bundles, and one bundle
issues per cycle. `*-final_bundles.txt` lists the bundles of a kernel,
`*-final_hlo-static-per-bundle-utilization.txt` says how many slots of each unit a
bundle fills, and `*-packed-bundles-post-ra.txt` is the same schedule before empty
bundles were folded into delays. The dump named TLP is the program that calls the
kernels; its loops are those of `lax.scan` and `lax.while_loop`.

A loop starts at a bundle marked `LB:` whose comment opens a region, and ends at the
conditional branch back to that region, or rather after the branch's delay slots. Its
trips follow from the comparison that decides the branch. Predicated code counts as
executed; waiting for DMAs is not in a static schedule.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from opsnn_jax.aot.report import Kernel, Lane, Loop, Schedule, Unit

# Bundles after a taken branch that still issue. In v5e and v6e dumps code that belongs
# to the loop, such as the copies of loop-carried values, stands in these four, and code
# from outside the loop starts right after them.
BRANCH_DELAY = 4

# Predicated code shorter than this is bookkeeping, such as the start of a DMA.
_BOOKKEEPING = 64

# Stretches into which a schedule is divided for drawing.
LANE_POINTS = 480

_BUNDLE = re.compile(r"^\s*(?:0x)?[0-9a-f]+\s+(?:([A-Z]{2})\s*)?:\s*>*\s*\{")
_REGION_START = re.compile(r"Start (?:/End empty )?region (\d+)")
_BRANCH = re.compile(
    r"sbr\.rel \(!?%(p\w+)\) target (?:= \$region|bundleno = \d+ \(0x[0-9a-f]+\), "
    r"region = )(\d+)"
)
_REGION_EMPTY = re.compile(r"Start/End empty region (\d+)")
_CALL = re.compile(r"inlined_call [^/]*/\* %(\S+) = ")
_FILE = re.compile(
    r"(?P<stamp>\d+)-(?P<kernel>.+)-\d+-(?P<what>final_bundles"
    r"|packed-bundles-post-ra|final_hlo-static-per-bundle-utilization)\.txt"
)

# The program itself, and what runs once when it is loaded and unloaded.
_PROGRAM = "TLP"


# Steps of a kernel's grid, and how often its stretches run: see `visited_cycles`.
Visits = tuple[int, Sequence[float]]


@dataclass(frozen=True)
class _Span:
    first: int
    last: int
    trips: int | None

    def holds(self, other: "_Span") -> bool:
        return self != other and self.first <= other.first and other.last <= self.last


def read_schedule(
    folder: Path, visits: Mapping[str, Visits] | None = None
) -> Schedule | None:
    """Reads all kernels of the program whose dumps lie in `folder`.

    The compiler may compile a kernel several times, looking for a version that fits;
    the last dump is the one that is used.

    Args:
      visits: of kernels by name, see `visited_cycles`.
    """
    visits = visits or {}
    dumps: dict[str, dict[str, Path]] = {}
    found = [(m, p) for p in folder.iterdir() if (m := _FILE.fullmatch(p.name))]
    for match, path in sorted(found, key=lambda pair: int(pair[0]["stamp"])):
        dumps.setdefault(match["kernel"], {})[match["what"]] = path
    if "final_bundles" not in dumps.get(_PROGRAM, {}):
        return None
    program = dumps[_PROGRAM]["final_bundles"].read_text()
    calls = count_calls(program)
    kernels = [
        read_kernel(
            name,
            times,
            {w: p.read_text() for w, p in dumps[name].items()},
            visits.get(name.split(".")[0]),
        )
        for name, times in calls.items()
        if "final_bundles" in dumps.get(name, {})
    ]
    kernels.sort(key=lambda k: -k.cycles * k.calls)
    known = all(k.stalls is not None for k in kernels)
    return Schedule(
        kernels=tuple(kernels),
        cycles=sum(k.cycles * k.calls for k in kernels),
        stalls=sum(k.stalls * k.calls for k in kernels) if known else None,
        program=count_cycles(program),
        unread=tuple(name for name in calls if name not in {k.name for k in kernels}),
    )


def count_calls(program: str) -> dict[str, int]:
    """Kernel -> how often the program calls it, loops counted."""
    bundles, markers = split_bundles(program)
    weights = _weights(len(bundles), find_loops(bundles, markers))
    calls: dict[str, int] = {}
    for text, weight in zip(bundles, weights, strict=True):
        for name in _CALL.findall(text):
            calls[name] = calls.get(name, 0) + weight
    return calls


def read_kernel(
    name: str, calls: int, texts: Mapping[str, str], visits: Visits | None = None
) -> Kernel:
    """Reads one kernel from the texts of its dumps, by the last part of their names."""
    bundles, markers = split_bundles(texts["final_bundles"])
    spans = find_loops(bundles, markers)
    weights = _weights(len(bundles), spans)
    names, slots, rows = parse_utilization(
        texts.get("final_hlo-static-per-bundle-utilization", "")
    )
    if len(rows) != len(bundles):  # the use of units is unknown, the cycles are not
        names, slots, rows = (), (), [()] * len(bundles)
    column = {n: i for i, n in enumerate(names)}

    def total(unit: str, first: int = 0, last: int = len(bundles) - 1) -> int:
        if unit not in column:
            return 0
        i = column[unit]
        stretch = range(first, last + 1)
        return sum(rows[b][i] * weights[b] for b in stretch)

    loops = tuple(
        Loop(
            first=s.first,
            last=s.last,
            depth=1 + sum(o.holds(s) for o in spans),
            trips=s.trips,
            cycles=sum(weights[s.first : s.last + 1]),
            innermost=not any(s.holds(o) for o in spans),
            fills=total("VLOAD:FILL", s.first, s.last),
            spills=total("VSTORE:SPILL", s.first, s.last),
        )
        for s in spans
    )
    cycles = sum(weights)
    unfolded = texts.get("packed-bundles-post-ra")
    return Kernel(
        name=name,
        calls=calls,
        bundles=len(bundles),
        cycles=cycles,
        visited=visits and visited_cycles(texts["final_bundles"], *visits),
        stalls=max(count_cycles(unfolded) - cycles, 0) if unfolded else None,
        units=tuple(
            Unit(n, slots[i], total(n)) for n, i in column.items() if ":" not in n
        ),
        loops=loops,
        fills=total("VLOAD:FILL"),
        spills=total("VSTORE:SPILL"),
        lanes=tuple(
            Lane(n, _lane([row[i] / slots[i] for row in rows]))
            for n, i in column.items()
        ),
    )


def count_cycles(text: str) -> int:
    """Bundles times trips of one dump of a kernel."""
    bundles, markers = split_bundles(text)
    return sum(_weights(len(bundles), find_loops(bundles, markers)))


def visited_cycles(text: str, steps: int, often: Sequence[float]) -> int:
    """Issue cycles of a kernel, where predicated code counts as often as it runs.

    Args:
      text: the final bundles. They must be those of a grid of more than one step.
      steps: of the grid. The pipeline's loop has more trips, which skip the kernel.
      often: for each stretch of code that the kernel may skip or repeat, in the order
        of the code, how often it runs on average, each time that it is reached.

    Raises:
      ValueError: if `often` has more or fewer numbers than the code has stretches.
    """
    bundles, markers = split_bundles(text)
    loops = find_loops(bundles, markers)
    skips = [
        skip
        for skip in _find_skips(bundles)
        # What guards a loop that may have no trips is no stretch of its own.
        if not any(_is_guard(skip, loop) for loop in loops)
    ]
    stretches = sorted([*loops, *skips], key=lambda s: (s.first, -s.last))
    (grid, body), stretches = stretches[:2], stretches[2:]
    if len(stretches) != len(often):
        raise ValueError(
            f"visited_cycles: often must have a number for each of {len(stretches)} "
            f"stretches of code that may be skipped or repeated; got {often}."
        )
    weights = [1.0] * len(bundles)
    trips = grid.trips or 1
    times = (trips, steps / trips, *often)
    for stretch, factor in zip((grid, body, *stretches), times, strict=True):
        for i in range(stretch.first, stretch.last + 1):
            weights[i] *= factor
    return round(sum(weights))


def _find_skips(bundles) -> list[_Span]:
    """Stretches of code over which a branch may jump, but for bookkeeping."""
    ends = {
        region: i
        for i, bundle in enumerate(bundles)
        for region in _REGION_EMPTY.findall(bundle)
    }
    skips = []
    for i, bundle in enumerate(bundles):
        for _, region in _BRANCH.findall(bundle):
            first, last = i + BRANCH_DELAY + 1, ends.get(region, 0) - 1
            if last - first + 1 >= _BOOKKEEPING:
                skips.append(_Span(first, last, None))
    return skips


def _is_guard(skip: _Span, loop: _Span) -> bool:
    before, behind = loop.first - skip.first, skip.last - loop.last
    return 0 <= before and 0 <= behind and before + behind < _BOOKKEEPING


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


def find_loops(bundles: Sequence[str], markers: Sequence[str]) -> list[_Span]:
    """The loops, outer ones before those inside them."""
    headers: dict[str, int] = {}
    loops: dict[int, _Span] = {}  # by header: the last branch back ends a loop
    text = "\n".join(bundles)
    for i, (bundle, marker) in enumerate(zip(bundles, markers, strict=True)):
        if marker == "LB":
            headers |= dict.fromkeys(_REGION_START.findall(bundle), i)
        for predicate, region in _BRANCH.findall(bundle):
            if region in headers:
                last = min(i + BRANCH_DELAY, len(bundles) - 1)
                first = headers[region]
                loops[first] = _Span(first, last, _trips(text, predicate))
    return sorted(loops.values(), key=lambda s: (s.first, -s.last))


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


def parse_utilization(
    text: str,
) -> tuple[tuple[str, ...], tuple[int, ...], list[tuple[int, ...]]]:
    """Unit names, their slots per bundle, and for each bundle the slots filled."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if len(lines) < 4:
        return (), (), []
    names = tuple(name.strip() for name in lines[1].split(","))
    slots = tuple(int(n) for n in lines[2].split())
    return names, slots, [tuple(int(n) for n in line.split()) for line in lines[4:]]


def _weights(count: int, spans: Sequence[_Span]) -> list[int]:
    """How often each bundle issues."""
    weights = [1] * count
    for span in spans:
        for i in range(span.first, span.last + 1):
            weights[i] *= span.trips or 1
    return weights


def _lane(use: Sequence[float]) -> tuple[float, ...]:
    points = min(LANE_POINTS, len(use))
    edges = [len(use) * i // points for i in range(points + 1)]
    return tuple(
        round(sum(use[a:b]) / (b - a), 3)
        for a, b in zip(edges[:-1], edges[1:], strict=True)
    )
