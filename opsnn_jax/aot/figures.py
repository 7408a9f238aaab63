"""A report's figures in words, the same for the terminal and the page."""

from collections.abc import Sequence

from opsnn_jax.aot.report import Kernel, Loop, Report, Unit

# In the order in which a reader looks for them. VPOP (results leaving the matrix unit)
# and SALU (addresses and loop counters) seldom bind and are left to the JSON.
SHOWN_UNITS = (
    "MXU",
    "MATMUL",
    "MATPUSH",
    "VALU",
    "EUP",
    "XLU",
    "VLOAD",
    "VSTORE",
)

# By the stage at which it ended. What cannot be traced has seen no compiler.
_VERDICTS = {
    "trace": "cannot be traced",
    "lower": "refused (lower)",
    "compile": "refused (compile)",
    "crash": "compiler crashed",
    "timeout": "compiler stopped",
}


def summary(report: Report) -> list[tuple[str, str]]:
    """(label, value) lines about one report."""
    if not report.ok:
        return [("verdict", _VERDICTS[report.stage])]
    lines = [("verdict", "compiles")]
    roof, schedule = report.roofline, report.schedule
    if schedule:
        lines.append(("issue cycles", count(schedule.cycles)))
        lines.append(("of which data may skip", count(schedule.undecided)))
        if schedule.stalls is not None:
            lines.append(("stall cycles", count(schedule.stalls)))
    if roof.schedule is not None:
        lines.append(("schedule", seconds(roof.schedule)))
    bound = f"{seconds(roof.seconds)}, bound by {roof.bound}"
    if roof.compute is None:
        bound += "; compute is not known"
    lines.append(("roofline", bound))
    if roof.gap is not None:
        lines.append(("schedule / roofline", f"{roof.gap:.2f}x"))
    if roof.compute is not None:
        rate = f"{seconds(roof.compute)} at {roof.rate}"
        lines.append(("compute bound", rate))
    lines += [
        ("memory bound", seconds(roof.memory)),
        ("launch", seconds(roof.launch)),
        ("flops", "?" if report.flops is None else count(report.flops)),
        ("bytes accessed", "?" if report.bytes is None else size(report.bytes)),
        ("arguments", size(report.memory.arguments)),
        ("outputs", size(report.memory.outputs)),
        ("temporaries", size(report.memory.temporaries)),
        ("aliased", size(report.memory.aliased)),
    ]
    if schedule:
        lines += [
            ("fills / spills", f"{count(schedule.fills)} / {count(schedule.spills)}"),
            ("both in innermost loops", count(schedule.innermost_spills)),
        ]
    for kernel in report.gpu_kernels:
        lines.append((f"ptxas {kernel.name}", gpu_kernel(kernel)))
    return lines


def gpu_kernel(kernel) -> str:
    spilled = kernel.spill_stores + kernel.spill_loads
    spills = f"{size(spilled)} of spills" if spilled else "no spills"
    known = kernel.shared_memory is not None
    shared = size(kernel.shared_memory) if known else "?"
    return f"{kernel.registers} registers, {spills}, {shared} of shared memory"


def shown_units(kernel: Kernel) -> list[Unit]:
    by_name = {u.name: u for u in kernel.units}
    return [by_name[name] for name in SHOWN_UNITS if name in by_name]


def busy(unit: Unit, kernel: Kernel) -> float:
    """The share of issue cycles that the unit's work fills."""
    return unit.used / (unit.slots * kernel.cycles)


def trips(loop: Loop) -> str:
    """The number, on average; "?" where data decides."""
    if loop.trips is None:
        return "?"
    return count(loop.trips) if loop.trips % 1 == 0 else f"{loop.trips:.1f}"


def versions(toolchain: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in toolchain.items())


def seconds(value: float) -> str:
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns"


def size(value: float) -> str:
    for scale, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= scale:
            return f"{value / scale:.4g} {unit}"
    return f"{value:.0f} B"


def count(value: float) -> str:
    for scale, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= scale:
            return f"{value / scale:.4g}{unit}"
    return f"{value:,.0f}"


def labels(reports: Sequence[Report]) -> list[str]:
    """Every label of the summaries, each once, in order."""
    return list(dict.fromkeys(label for r in reports for label, _ in summary(r)))
