"""What the registered kernels cost, held against a committed file.

`python -m opsnn_jax.aot.baseline` compiles every case and fails where one got more
than 5 % worse; with `--update` it writes the file anew, with `--cases` it looks at some
only. On a TPU the costs are the issue cycles, alone and with the stalls, so that
neither is traded for the other; on a GPU the bytes that ptxas spilled. A figure belongs
to one version of the compiler: another gives another schedule, so each has its own.
"""

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from opsnn_jax.aot.cases import KERNELS
from opsnn_jax.aot.compile import compile_for
from opsnn_jax.aot.registry import KernelCase
from opsnn_jax.aot.report import Report
from opsnn_jax.aot.targets import get_target

BASELINE = Path("benchmarks") / "aot_baseline.json"
TOLERANCE = 0.05


@dataclass(frozen=True)
class Figure:
    """What one case costs on one target with one compiler, by kind of cost."""

    case: str
    target: str
    compiler: str
    costs: dict[str, int]

    @property
    def key(self) -> str:
        return f"{self.case} {self.target} {self.compiler}"


def measure(case: KernelCase, target: str) -> tuple[Report, Figure | None]:
    """Compiles a case. The figure is None where it does not compile or is not known."""
    f, specs = case.make()
    report = compile_for(f, *specs, target=target, name=case.name, rate=case.rate)
    tpu = get_target(target).platform == "tpu"
    schedule = report.schedule
    unread = report.gpu_unread or (schedule and schedule.unread)
    if not report.ok or unread or (tpu and not schedule):
        return report, None
    if schedule:
        compiler = f"libtpu-{report.toolchain['libtpu']}"
        costs = {"issue_cycles": schedule.cycles}
        if schedule.stalls is not None:
            costs["with_stalls"] = schedule.cycles + schedule.stalls
    else:
        compiler = f"jaxlib-{report.toolchain['jaxlib']}"
        spilled = sum(k.spill_stores + k.spill_loads for k in report.gpu_kernels)
        costs = {"spilled_bytes": spilled}
    return report, Figure(case.name, target, compiler, costs)


def read(path: Path) -> dict[str, dict[str, int]]:
    """Key -> costs; empty where there is no file."""
    return json.loads(path.read_text()) if path.exists() else {}


def write(path: Path, figures: Iterable[Figure]) -> None:
    """Writes the figures; those of other compilers stay, those of lost cases go."""
    figures = list(figures)
    cases = {case.name for case in KERNELS} | {f.case for f in figures}
    kept = {k: v for k, v in read(path).items() if k.split(" ")[0] in cases}
    kept |= {f.key: f.costs for f in figures}
    path.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")


def compare(figure: Figure, baseline: dict[str, dict[str, int]]) -> str | None:
    """Why the figure is not acceptable, with the old and the new one; or None."""
    if figure.key not in baseline:
        return (
            f"{figure.key}: no baseline, now {figure.costs}. "
            "Run: python -m opsnn_jax.aot.baseline --update"
        )
    worse = []
    for kind, old in baseline[figure.key].items():
        new = figure.costs.get(kind)
        if new is None or new > old * (1 + TOLERANCE):
            worse.append(f"{kind} was {old}, now {'unknown' if new is None else new}")
    return f"{figure.key}: {'; '.join(worse)}" if worse else None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m opsnn_jax.aot.baseline")
    parser.add_argument("--update", action="store_true", help="write the file anew")
    parser.add_argument("--file", type=Path, default=BASELINE)
    parser.add_argument("--cases", default="", help="only those with this in the name")
    args = parser.parse_args(argv)
    cases = [case for case in KERNELS if args.cases in case.name]
    if not cases:
        parser.error(f"--cases: no case has {args.cases!r} in its name.")
    baseline, figures, failures = read(args.file), [], []
    for case in cases:
        for target in case.targets:
            report, figure = measure(case, target)
            if figure is None:
                why = report.error or " ".join(report.notes)
                failures.append(f"{case.name} {target}: {why}")
                continue
            old = baseline.get(figure.key, "none")
            print(f"{figure.key}: was {old}, now {figure.costs}")
            figures.append(figure)
            if not args.update and (why := compare(figure, baseline)):
                failures.append(why)
    if args.update and not failures:
        write(args.file, figures)
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
