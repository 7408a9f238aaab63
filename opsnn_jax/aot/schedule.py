"""Reads the static schedules that libtpu dumps.

The TPU is a VLIW machine: the compiler packs instructions into bundles, and one bundle
issues per cycle. `*-final_bundles.txt` lists the bundles of a kernel,
`*-final_hlo-static-per-bundle-utilization.txt` says how many slots of each unit a
bundle fills, and `*-packed-bundles-post-ra.txt` is the same schedule before empty
bundles were folded into delays. The dump named TLP is the program that calls the
kernels; its loops are those of `lax.scan` and `lax.while_loop`, and `*-TLP-hlo.txt` has
the kernels as XLA sees them.

What branches skip is in `issues.py`; waiting for DMAs is not in a static schedule.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from opsnn_jax.aot.bundles import find_loops, split_bundles
from opsnn_jax.aot.issues import count_cycles, count_issues
from opsnn_jax.aot.report import Kernel, Lane, Loop, Schedule, Unit
from opsnn_jax.aot.twins import forms

# Stretches into which a schedule is divided for drawing.
LANE_POINTS = 480

_CALL = re.compile(r"inlined_call [^/]*/\* %(\S+) = ")
_FILE = re.compile(
    r"(?P<stamp>\d+)-(?P<kernel>.+?)(?:-\d+)?-(?P<what>final_bundles"
    r"|packed-bundles-post-ra|final_hlo-static-per-bundle-utilization|hlo)\.txt"
)

# The program that calls the kernels.
_PROGRAM = "TLP"


def read_schedule(folder: Path) -> Schedule | None:
    """Reads all kernels of the program whose dumps lie in `folder`.

    The compiler may compile a kernel several times, looking for a version that fits;
    the last dump is the one that is used.
    """
    dumps: dict[str, dict[str, Path]] = {}
    found = [(m, p) for p in folder.iterdir() if (m := _FILE.fullmatch(p.name))]
    for match, path in sorted(found, key=lambda pair: int(pair[0]["stamp"])):
        dumps.setdefault(match["kernel"], {})[match["what"]] = path
    if "final_bundles" not in dumps.get(_PROGRAM, {}):
        return None
    bundles, markers = split_bundles(dumps[_PROGRAM]["final_bundles"].read_text())
    program = count_issues(bundles, find_loops(bundles, markers))
    calls = count_calls(bundles, program.bundles)
    kernels = [
        read_kernel(name, times, {w: p.read_text() for w, p in dumps[name].items()})
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
        program=sum(program.bundles),
        unread=tuple(name for name in calls if name not in {k.name for k in kernels}),
        unknown_trips=None in program.trips.values()
        or any(k.unknown_trips for k in kernels),
    )


def _twins(kernels, calls, hlo):
    """Kernels that the compiler did not dump, for it had compiled an equal one."""
    form = forms(hlo, calls)
    by_name = {kernel.name: kernel for kernel in kernels}
    by_form = {form.get(name): kernel for name, kernel in by_name.items()}
    for name in form.keys() & calls.keys() - by_name.keys():
        if twin := by_form.get(form[name]):
            yield dataclasses.replace(twin, name=name, calls=calls[name])


def count_calls(bundles: Sequence[str], weights: Sequence[int]) -> dict[str, int]:
    """Kernel -> the issues of the bundles that call it."""
    calls: dict[str, int] = {}
    for text, weight in zip(bundles, weights, strict=True):
        for name in _CALL.findall(text):
            calls[name] = calls.get(name, 0) + weight
    return calls


def read_kernel(name: str, calls: int, texts: Mapping[str, str]) -> Kernel:
    """Reads one kernel from the texts of its dumps, by the last part of their names."""
    bundles, markers = split_bundles(texts["final_bundles"])
    spans = find_loops(bundles, markers)
    issues = count_issues(bundles, spans)
    weights = issues.bundles
    names, slots, rows = parse_utilization(
        texts.get("final_hlo-static-per-bundle-utilization", "")
    )
    if len(rows) != len(bundles) or any(len(row) != len(names) for row in rows):
        # The use of units is unknown, the cycles are not.
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
            trips=issues.trips.get(s.first, 0),
            cycles=sum(weights[s.first : s.last + 1]),
            innermost=not any(s.holds(o) for o in spans),
            fills=total("VLOAD:FILL", s.first, s.last),
            spills=total("VSTORE:SPILL", s.first, s.last),
        )
        for s in spans
    )
    cycles = sum(weights)
    doubtful = {i for s in issues.undecided for i in range(s.first, s.last + 1)}
    unfolded = texts.get("packed-bundles-post-ra")
    return Kernel(
        name=name,
        calls=calls,
        bundles=len(bundles),
        cycles=cycles,
        undecided=sum(weights[i] for i in doubtful),
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
    if not use:
        return ()
    points = min(LANE_POINTS, len(use))
    edges = [len(use) * i // points for i in range(points + 1)]
    return tuple(
        round(sum(use[a:b]) / (b - a), 3)
        for a, b in zip(edges[:-1], edges[1:], strict=True)
    )
