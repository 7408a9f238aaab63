"""What the benchmarks share: interleaved timing, and results as JSON and PNG.

Machines are shared and noisy, so variants are timed in turn within one process, and
what is reported is the median of the ratios of neighbouring runs, with its quartiles.
"""

import datetime
import json
import platform
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import jaxlib
import numpy as np

FOLDER = Path(__file__).parent / "results"


def time_in_turn(
    variants: Mapping[str, Callable], arrays: tuple, rounds: int = 9
) -> dict[str, dict[str, float]]:
    """Times each variant once per round, after one run each to compile.

    Before it is timed it runs once more: what the one before it left, in the caches and
    of memory to be mapped anew, is not its own.

    Returns:
      For each variant its median in milliseconds, and the median and quartiles of its
      ratio to the first variant in the same round.
    """
    for run in variants.values():
        jax.block_until_ready(run(*arrays))
    seconds = {name: [] for name in variants}
    for _ in range(rounds):
        for name, run in variants.items():
            jax.block_until_ready(run(*arrays))
            start = time.perf_counter()
            jax.block_until_ready(run(*arrays))
            seconds[name].append(time.perf_counter() - start)
    base = np.array(seconds[next(iter(variants))])
    results = {}
    for name, values in seconds.items():
        low, middle, high = np.percentile(np.array(values) / base, [25, 50, 75])
        results[name] = {
            "ms": float(np.median(values) * 1e3),
            "ratio": float(middle),
            "ratio_quartiles": [float(low), float(high)],
        }
    return results


def workspace(run: Callable, arrays: tuple) -> int:
    """Bytes of temporary memory that the compiled function needs."""
    return jax.jit(run).lower(*arrays).compile().memory_analysis().temp_size_in_bytes


def save(name: str, rows: list[dict]) -> Path:
    """Writes the rows with what they were measured on; returns the file."""
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{name}.json"
    record = {"machine": _machine(), "rows": rows}
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


def renew(name: str, rows: list[dict]) -> list[dict]:
    """The saved rows, with those of the same labels replaced by `rows`."""
    path, new = FOLDER / f"{name}.json", {row["label"]: row for row in rows}
    old = json.loads(path.read_text())["rows"] if path.exists() else []
    kept = [new.pop(row["label"], row) for row in old]
    return kept + list(new.values())


def commit() -> str:
    """That of the working tree."""
    return _run("git", "rev-parse", "--short", "HEAD")


def plot_ratios(
    name: str, rows: list[dict], title: str, base: str = "XLA", unit: str = "time"
) -> Path:
    """Bars of each row's ratio, with its quartiles if it has any; below 1 is faster."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    labels = [row["label"] for row in rows]
    ratios = np.array([row["ratio"] for row in rows])
    quartiles = [row.get("ratio_quartiles", [row["ratio"]] * 2) for row in rows]
    low, high = np.array(quartiles).T
    figure, axes = pyplot.subplots(
        figsize=(8, 0.6 + 0.32 * len(rows)), layout="constrained"
    )
    colors = ["#2a7f62" if r <= 1 else "#c1553b" for r in ratios]
    spread = [np.maximum(ratios - low, 0), np.maximum(high - ratios, 0)]
    axes.barh(labels, ratios, xerr=spread, color=colors, ecolor="#555", capsize=2)
    axes.axvline(1, color="#222", linewidth=1)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlabel(f"{unit}, relative to {base} (lower is faster)")
    axes.set_title(title, loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    for y, ratio in enumerate(ratios):
        axes.annotate(
            f" {ratio:.2f}", (max(high[y], ratio), y), va="center", fontsize=8,
            bbox=dict(facecolor="white", edgecolor="none", pad=0.3, alpha=0.8),
        )  # fmt: skip
    path = FOLDER / f"{name}.png"
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path


def _machine() -> dict:
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "device": jax.devices()[0].device_kind,
        "cpu": _cpu(),
    }


def _cpu() -> str:
    lines = _run("lscpu").splitlines()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    model = fields.get("Model name", platform.processor()).strip()
    return f"{model}, {fields.get('CPU(s)', '?').strip()} cores"


def _run(*command: str) -> str:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
