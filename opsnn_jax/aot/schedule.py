"""Reads the static schedules that libtpu dumps.

The TPU is a VLIW machine: the compiler packs instructions into bundles, and one bundle
issues per cycle. `*-final_bundles.txt` lists the bundles of a kernel,
`*-final_hlo-static-per-bundle-utilization.txt` says how many slots of each unit a
bundle fills, and `*-packed-bundles-post-ra.txt` is the same schedule before empty
bundles were folded into delays. The dump named TLP is the program that calls the
kernels; its loops are those of `lax.scan` and `lax.while_loop`, and `*-TLP-hlo.txt` has
the kernels as XLA sees them.

Predicated code counts as executed; waiting for DMAs is not in a static schedule.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from opsnn_jax.aot.bundles import (
    BRANCH,
    BRANCH_DELAY,
    Span,
    count_cycles,
    count_issues,
    find_loops,
    split_bundles,
)
from opsnn_jax.aot.report import Kernel, Lane, Loop, Schedule, Unit
from opsnn_jax.aot.twins import forms

# Code shorter than this that is skipped or repeated is bookkeeping: it starts a DMA, or
# copies to where XLA has put a result in vector memory.
_BOOKKEEPING = 128

# Stretches into which a schedule is divided for drawing.
LANE_POINTS = 480

_REGION_EMPTY = re.compile(r"Start/End empty region (\d+)")
_CALL = re.compile(r"inlined_call [^/]*/\* %(\S+) = ")
_FILE = re.compile(
    r"(?P<stamp>\d+)-(?P<kernel>.+?)(?:-\d+)?-(?P<what>final_bundles"
    r"|packed-bundles-post-ra|final_hlo-static-per-bundle-utilization|hlo)\.txt"
)

# The program itself, and what runs once when it is loaded and unloaded.
_PROGRAM = "TLP"


# Steps of a kernel's grid, and how often its stretches run: see `visited_cycles`.
Visits = tuple[int, Sequence[float]]


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
    if "hlo" in dumps[_PROGRAM] and len(kernels) < len(calls):
        kernels += _twins(kernels, calls, dumps[_PROGRAM]["hlo"].read_text())
    kernels.sort(key=lambda k: (-k.cycles * k.calls, k.name))
    known = all(k.stalls is not None for k in kernels)
    return Schedule(
        kernels=tuple(kernels),
        cycles=sum(k.cycles * k.calls for k in kernels),
        stalls=sum(k.stalls * k.calls for k in kernels) if known else None,
        program=count_cycles(program),
        unread=tuple(name for name in calls if name not in {k.name for k in kernels}),
    )


def _twins(kernels, calls, hlo):
    """Kernels that the compiler did not dump, for it had compiled an equal one."""
    form = forms(hlo, calls)
    by_name = {kernel.name: kernel for kernel in kernels}
    by_form = {form.get(name): kernel for name, kernel in by_name.items()}
    for name in form.keys() & calls.keys() - by_name.keys():
        if twin := by_form.get(form[name]):
            yield dataclasses.replace(twin, name=name, calls=calls[name])


def count_calls(program: str) -> dict[str, int]:
    """Kernel -> how often the program calls it, loops counted."""
    bundles, markers = split_bundles(program)
    weights = count_issues(len(bundles), find_loops(bundles, markers))
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
    weights = count_issues(len(bundles), spans)
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


def visited_cycles(text: str, steps: int, often: Sequence[float]) -> int:
    """Issue cycles of a kernel, where predicated code counts as often as it runs.

    Only that of the kernel itself: the code beside it, which brings it its blocks,
    counts in every trip.

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
    skips = _find_skips(bundles)
    body = max(skips, key=lambda s: s.last - s.first, default=None)
    if not body or not any(loop.holds(body) for loop in loops):
        raise ValueError(
            "visited_cycles: text must be a kernel of more than one step and of at "
            f"least {_BOOKKEEPING} bundles; it has no loop over steps that skips it. "
            "Leave its name out of visits."
        )
    long = [loop for loop in loops if body.holds(loop) and _is_stretch(loop)]
    skips = [
        skip
        for skip in skips
        # What guards a loop that may have no trips is no stretch of its own.
        if body.holds(skip) and not any(_is_guard(skip, loop) for loop in long)
    ]
    stretches = sorted((*long, *skips), key=lambda s: (s.first, -s.last))
    if len(stretches) != len(often):
        raise ValueError(
            f"visited_cycles: often must have a number for each of {len(stretches)} "
            f"stretches of code that may be skipped or repeated; got {often}."
        )
    weights = list(map(float, count_issues(len(bundles), loops)))
    inner = [s for s in loops if body.holds(s) and s not in long]
    within = slice(body.first, body.last + 1)
    weights[within] = count_issues(len(bundles), inner)[within]
    for stretch, factor in zip((body, *stretches), (steps, *often), strict=True):
        for i in range(stretch.first, stretch.last + 1):
            weights[i] *= factor
    return round(sum(weights))


def _find_skips(bundles) -> list[Span]:
    """Stretches of code over which a branch may jump, but for bookkeeping."""
    ends = {
        region: i
        for i, bundle in enumerate(bundles)
        for region in _REGION_EMPTY.findall(bundle)
    }
    skips = []
    for i, bundle in enumerate(bundles):
        for _, region in BRANCH.findall(bundle):
            first, last = i + BRANCH_DELAY + 1, ends.get(region, 0) - 1
            if _is_stretch(span := Span(first, last, None)):
                skips.append(span)
    return skips


def _is_stretch(span: Span) -> bool:
    return span.last - span.first + 1 >= _BOOKKEEPING


def _is_guard(skip: Span, loop: Span) -> bool:
    before, behind = loop.first - skip.first, skip.last - loop.last
    return 0 <= before and 0 <= behind and before + behind < _BOOKKEEPING


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


def _lane(use: Sequence[float]) -> tuple[float, ...]:
    points = min(LANE_POINTS, len(use))
    edges = [len(use) * i // points for i in range(points + 1)]
    return tuple(
        round(sum(use[a:b]) / (b - a), 3)
        for a, b in zip(edges[:-1], edges[1:], strict=True)
    )
