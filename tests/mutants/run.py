"""Plants the bugs of `mutants`, one at a time, and wants each caught by the tests.

    python -m tests.mutants.run [--only NAME ...] [--jobs N] [--list]

Each bug is planted in a copy of the sources, and the tests named with it run on that
copy. It is caught if one of them fails by an assertion: a crash, an import error or a
timeout is a fault of the mutant. Before, the same tests must pass without any bug.
Exit code 1 if a mutant survives, crashes, or no longer fits the source.
"""

import argparse
import concurrent.futures
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table

from tests.mutants.mutant import Mutant
from tests.mutants.mutants import MUTANTS

ROOT = Path(__file__).resolve().parents[2]

# Seconds for the tests of one mutant, and for those of all.
ONE, ALL = 300, 1500


@dataclass(frozen=True)
class Run:
    """What one run of pytest came to. `caught` and `crashed` are ids of tests."""

    code: int
    caught: tuple[str, ...]
    crashed: tuple[str, ...]
    output: str


@dataclass(frozen=True)
class Result:
    mutant: Mutant
    outcome: str  # caught, survived, stale, crashed
    by: str
    seconds: float


def places() -> dict[str, str]:
    """Where a folder of the repository lies in the copy, which is laid out as the
    package is installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    mapped = project["tool"]["setuptools"]["package-dir"]
    moved = {folder: package.replace(".", "/") for package, folder in mapped.items()}
    return {name: name for name in ("opsnn_jax", "tests", "examples")} | moved


def copy_sources(target: Path) -> None:
    for folder, place in places().items():
        shutil.copytree(
            ROOT / folder,
            target / place,
            ignore=shutil.ignore_patterns("__pycache__"),
            dirs_exist_ok=True,
        )
    shutil.copy(ROOT / "pyproject.toml", target)


def plant(mutant: Mutant, target: Path) -> bool:
    """Edits the copy. False if the old text does not stand in it exactly once."""
    folder, rest = mutant.file.split("/", 1)
    file = target / places()[folder] / rest
    text = file.read_text()
    if text.count(mutant.old) != 1:
        return False
    file.write_text(text.replace(mutant.old, mutant.new))
    return True


def run_tests(target: Path, tests: tuple[str, ...], timeout: int) -> Run:
    """Runs the tests up to the first that fails, for at most `timeout` seconds.

    Raises:
      RuntimeError: if the package that they imported is not the copy.
    """
    verdict = target / "verdict.json"
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "tests.mutants.verdict"]
    command = [sys.executable, "-m", "pytest", *options, f"--verdict={verdict}", *tests]
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(target),
        "PYTHONSAFEPATH": "1",
    }
    try:
        done = subprocess.run(
            command,
            cwd=target,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
        )
        code, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired:
        # A verdict counts all the same: it was given before the process hung at exit.
        code, output = -1, f"no end after {timeout} s"
    if not verdict.exists():
        return Run(code, (), (), output)
    found = json.loads(verdict.read_text())
    if found["strangers"]:
        raise RuntimeError(
            f"mutants: expected to import the copy in {target} only; got "
            f"{', '.join(found['strangers'])} from elsewhere."
        )
    caught, crashed = tuple(found["caught"]), tuple(found["crashed"])
    return Run(code, caught, crashed, output)


def check(mutant: Mutant) -> Result:
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        target = Path(folder)
        copy_sources(target)
        if not plant(mutant, target):
            return Result(mutant, "stale", "", 0.0)
        run = run_tests(target, mutant.tests, ONE)
    seconds = time.monotonic() - start
    if run.caught:
        return Result(mutant, "caught", run.caught[0], seconds)
    if run.code == 0:
        return Result(mutant, "survived", ", ".join(mutant.tests), seconds)
    last = (run.output.strip().splitlines() or [""])[-1]
    return Result(mutant, "crashed", ", ".join(run.crashed) or last, seconds)


def passes_without_bugs(mutants: list[Mutant], console: Console) -> bool:
    tests = tuple(dict.fromkeys(test for mutant in mutants for test in mutant.tests))
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy_sources(Path(folder))
        run = run_tests(Path(folder), tests, ALL)
    if run.code != 0:
        console.print(run.output, markup=False, highlight=False)
    return run.code == 0


def table(results: list[Result]) -> Table:
    caught = sum(result.outcome == "caught" for result in results)
    made = Table("mutant", "", "by", "seconds", title=f"{caught}/{len(results)} caught")
    for result in results:
        style = "" if result.outcome == "caught" else "bold red"
        by = escape(result.by.removeprefix("tests/"))
        row = (result.mutant.name, result.outcome, by, f"{result.seconds:.0f}")
        made.add_row(*row, style=style)
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", metavar="NAME", action="append", help="a mutant")
    parser.add_argument("--jobs", metavar="N", type=int, default=2, help="at a time")
    parser.add_argument("--list", action="store_true", help="show names and end")
    given = parser.parse_args()
    names = [mutant.name for mutant in MUTANTS]
    unknown = set(given.only or ()) - set(names)
    if unknown:
        parser.error(f"no mutant is named {', '.join(sorted(unknown))}; see --list")
    mutants = [m for m in MUTANTS if not given.only or m.name in given.only]
    if given.list:
        print("\n".join(mutant.name for mutant in mutants))
        return 0
    console = Console()
    if not passes_without_bugs(mutants, console):
        console.print("The tests fail without any mutant.", style="bold red")
        return 1
    with concurrent.futures.ThreadPoolExecutor(given.jobs) as pool:
        running = pool.map(check, mutants)
        results = list(track(running, "mutants", len(mutants), console=console))
    console.print(table(results))
    return 0 if all(result.outcome == "caught" for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
