"""Reports as one HTML file that needs nothing else: inline CSS and SVG, no scripts."""

from collections.abc import Sequence
from html import escape

from opsnn_jax.aot import figures
from opsnn_jax.aot.report import Kernel, Report, Roofline

# What is drawn of a program with very many kernels, most expensive first.
_KERNELS = 6

_SCHEDULES = (
    "Issue cycles are the static schedule: every bundle as often as it issues. Waiting "
    "for memory transfers is not in it, and code that data may skip counts as executed."
)

# Geometry of a drawing, in SVG units.
_LEFT = 92
_WIDTH = 960
_LANE = 30
_GAP = 6
_LOOP = 18

# Lanes, top to bottom, and the colour class of each. Spill traffic is drawn over the
# loads and stores it is part of.
_COLOURS = {
    "MXU": "mxu",
    "MATMUL": "mxu",
    "MATPUSH": "push",
    "VALU": "valu",
    "EUP": "eup",
    "XLU": "xlu",
    "VLOAD": "load",
    "VSTORE": "store",
}
_SPILLS = {"VLOAD": "VLOAD:FILL", "VSTORE": "VSTORE:SPILL"}

_STYLE = """
:root { color-scheme: light dark; --bg: #fbfbfa; --card: #ffffff; --ink: #1d2126;
  --dim: #68707a; --line: #e2e4e7; --track: #f0f1f3; --mxu: #3f6fd8; --push: #7d9ee6;
  --valu: #1f9d78; --eup: #b98a15; --xlu: #8a5cd1; --load: #5b7f95; --store: #8d7a66;
  --bad: #d6362b; --good: #1f9d78; }
@media (prefers-color-scheme: dark) { :root { --bg: #14171b; --card: #1c2026;
  --ink: #e6e8ea; --dim: #98a1ab; --line: #2e343c; --track: #252a31; --mxu: #6d97f2;
  --push: #4f6fb3; --valu: #3fbf95; --eup: #d9ac3c; --xlu: #ad87ea; --load: #7fa6bd;
  --store: #b39d85; --bad: #f0645a; --good: #3fbf95; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 32px 24px 64px; max-width: 1120px;
  background: var(--bg); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
h1 { font-size: 22px; margin: 0 0 4px; } h2 { font-size: 18px; margin: 40px 0 2px; }
h3 { font-size: 15px; margin: 0 0 8px; overflow-wrap: anywhere; }
p { margin: 0 0 12px; } .dim { color: var(--dim); font-size: 13px; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 16px 18px; margin: 14px 0; overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 5px 10px; text-align: right; border-top: 1px solid var(--line);
  white-space: nowrap; }
tr:first-child th { border-top: 0; } th { font-weight: 600; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
td:first-child { color: var(--dim); }
.bad { color: var(--bad); } .good { color: var(--good); }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; font-size: 13px;
  color: var(--bad); }
svg { display: block; width: 100%; min-width: 720px; height: auto; }
svg text { fill: var(--dim); font-size: 12px; } svg .name { fill: var(--ink); }
.track { fill: var(--track); } .loop { fill: none; stroke: var(--dim); }
.spill { fill: var(--bad); } .tick { stroke: var(--line); }
"""
_STYLE += "".join(
    f".{c} {{ fill: var(--{c}); }}\n" for c in sorted({*_COLOURS.values()})
)


def render_page(reports: Sequence[Report]) -> str:
    """The page of these reports, side by side."""
    title = ", ".join(dict.fromkeys(r.name for r in reports))
    sections = "".join(_section(report) for report in reports)
    schedules = _SCHEDULES if any(r.schedule for r in reports) else ""
    return (
        "<!doctype html>\n"
        f'<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head><body>"
        f"<h1>{escape(title)}</h1>"
        f'<p class="dim">Compiled for devices that are not there. {schedules}</p>'
        f"{_summary(reports)}{sections}</body></html>\n"
    )


def _summary(reports: Sequence[Report]) -> str:
    columns = [dict(figures.summary(report)) for report in reports]
    heads = "".join(
        f"<th>{escape(r.name)}<br><span class=dim>{escape(r.target)}</span></th>"
        for r in reports
    )
    rows = []
    for label in figures.labels(reports):
        cells = []
        for column, report in zip(columns, reports, strict=True):
            tone = ""
            if label == "verdict":
                tone = " class=good" if report.ok else " class=bad"
            cells.append(f"<td{tone}>{escape(column.get(label, ''))}</td>")
        rows.append(f"<tr><td>{escape(label)}</td>{''.join(cells)}</tr>")
    return (
        f'<div class="card"><table><tr><th></th>{heads}</tr>{"".join(rows)}</table>'
        "</div>"
    )


def _section(report: Report) -> str:
    parts = [
        f"<h2>{escape(report.name)} for {escape(report.target)}</h2>",
        f'<p class="dim">{escape(figures.versions(report.toolchain))}</p>',
    ]
    parts += [f'<p class="dim">Note: {escape(note)}</p>' for note in report.notes]
    if not report.ok:
        parts.append(f'<div class="card"><pre>{escape(report.error)}</pre></div>')
    else:
        parts.append(_roofline(report.roofline))
    kernels = report.schedule.kernels if report.schedule else ()
    parts += [_kernel(kernel) for kernel in kernels[:_KERNELS]]
    if len(kernels) > _KERNELS:
        parts.append(f'<p class="dim">{len(kernels) - _KERNELS} smaller kernels.</p>')
    return "".join(parts)


def _roofline(roof: Roofline) -> str:
    colours = {"compute": "mxu", "memory": "load", "launch": "xlu"}
    bars = [(name, value, colours[name]) for name, value in roof.bounds.items()]
    if roof.schedule is not None:
        bars.append(("schedule", roof.schedule, "valu"))
    longest = max(value for _, value, _ in bars) or 1.0
    svg = []
    room = _WIDTH - _LEFT - 220
    for i, (name, value, colour) in enumerate(bars):
        y = i * 26
        width = max(room * value / longest, 1)
        said = figures.seconds(value)
        if name == roof.bound:
            said += ", the bound"
        if name == "schedule" and roof.gap is not None:
            said += f", {roof.gap:.2f}x the bound"
        svg.append(
            f'<text class="name" x="0" y="{y + 15}">{name}</text>'
            f'<rect class="{colour}" x="{_LEFT}" y="{y + 2}" width="{width:.1f}" '
            'height="18" rx="3"/>'
            f'<text x="{_LEFT + width + 8:.1f}" y="{y + 15}">{said}</text>'
        )
    title = "Roofline" if roof.compute is not None else "Roofline without compute"
    return _card(title, _svg(26 * len(bars), svg))


def _kernel(kernel: Kernel) -> str:
    lanes = {lane.name: lane.use for lane in kernel.lanes}
    depth = max((loop.depth for loop in kernel.loops), default=0)
    top = depth * _LOOP + 8
    svg = [_loop(kernel, loop) for loop in kernel.loops]
    units = [u for u in figures.shown_units(kernel) if u.name in lanes]
    for i, unit in enumerate(units):
        y = top + i * (_LANE + _GAP)
        middle = y + _LANE / 2
        busy = figures.busy(unit, kernel)
        svg.append(
            f'<rect class="track" x="{_LEFT}" y="{y}" width="{_WIDTH - _LEFT}" '
            f'height="{_LANE}"/>'
            f'<text class="name" x="0" y="{middle}">{unit.name}</text>'
            f'<text x="0" y="{middle + 13}">{busy:.0%} busy</text>'
            f"{_area(lanes[unit.name], y, _COLOURS[unit.name])}"
        )
        if unit.name in _SPILLS and _SPILLS[unit.name] in lanes:
            svg.append(_area(lanes[_SPILLS[unit.name]], y, "spill"))
    bottom = top + len(units) * (_LANE + _GAP)
    for i in range(5):
        x = _LEFT + (_WIDTH - _LEFT) * i / 4
        anchor = "start" if i == 0 else "end" if i == 4 else "middle"
        svg.append(
            f'<text x="{x:.0f}" y="{bottom + 12}" text-anchor="{anchor}">'
            f"{kernel.bundles * i // 4}</text>"
        )
    facts = [
        f"{kernel.calls} call{'s' if kernel.calls != 1 else ''}",
        f"{figures.count(kernel.bundles)} bundles",
        f"{figures.count(kernel.cycles)} issue cycles",
    ]
    if kernel.stalls is not None:
        facts.append(f"{figures.count(kernel.stalls)} stall cycles")
    spilled = kernel.fills + kernel.spills
    tone = "bad" if spilled else "dim"
    spills = (
        f"{figures.count(kernel.fills)} fills and {figures.count(kernel.spills)} spills"
        f" (red), {figures.count(kernel.innermost_spills)} in innermost loops"
        if spilled
        else "no vector register spilled"
    )
    head = (
        f'<p class="dim">{", ".join(facts)}; <span class="{tone}">{spills}</span>. '
        "Left to right: the bundles of the schedule, each once. Height: share of the "
        "unit's slots in use.</p>"
    )
    return _card(kernel.name, head + _svg(bottom + 18, svg))


def _loop(kernel: Kernel, loop) -> str:
    a, b = _x(kernel, loop.first), _x(kernel, loop.last + 1)
    y = (loop.depth - 1) * _LOOP + 14
    said = f"{figures.trips(loop)} trips, {figures.count(loop.cycles)} cycles"
    label = ""
    short = f"x{figures.trips(loop)}"
    fits = [text for text in (said, short) if b - a > 7 * len(text)]
    if fits:
        middle = (a + b) / 2
        label = (
            f'<text x="{middle:.1f}" y="{y - 3}" text-anchor="middle">{fits[0]}</text>'
        )
    return (
        f'<path class="loop" d="M{a:.1f} {y + 5}V{y}H{b:.1f}V{y + 5}">'
        f"<title>{said}</title></path>{label}"
    )


def _x(kernel: Kernel, bundle: int) -> float:
    return _LEFT + (_WIDTH - _LEFT) * bundle / kernel.bundles


def _area(use: Sequence[float], y: float, colour: str) -> str:
    """A stepped area over the lane whose top is `y`."""
    if not any(use):
        return ""
    step = (_WIDTH - _LEFT) / len(use)
    base = y + _LANE
    path = [f"M{_LEFT} {base}"]
    last = None
    for i, share in enumerate(use):
        height = round(base - _LANE * min(share, 1), 1)
        if height != last:
            path.append(f"H{_LEFT + i * step:.1f}V{height:g}")
            last = height
    return f'<path class="{colour}" d="{"".join(path)}H{_WIDTH}V{base}Z"/>'


def _svg(height: float, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {height}" role="img">{"".join(parts)}</svg>'


def _card(title: str, body: str) -> str:
    return f'<div class="card"><h3>{escape(title)}</h3>{body}</div>'
