"""What a run leaves behind: a folder with its settings, metrics and curves."""

import itertools
import json
import math
import pathlib
from collections.abc import Sequence
from typing import Any


class RunFolderError(Exception):
    """The folder of a run cannot be written."""


class RunFolder:
    """A new folder, `parent/name-0`, `parent/name-1`, ..., never one that is there.

    It is made, and written to, when this object is: what cannot be kept must be known
    before hours are spent. A context manager, which closes the metrics file.

    Attributes:
      path: the folder. `config.json`, `metrics.jsonl` (a line for each step),
        `results.json` and `curves.png` come into it.

    Raises:
      RunFolderError: if it cannot be made or written.
    """

    def __init__(self, parent: str, name: str, settings: dict[str, Any]):
        try:
            self.path = _new_folder(pathlib.Path(parent), name)
            self.write_json("config.json", settings)
            self._metrics = open(self.path / "metrics.jsonl", "w", encoding="utf-8")
        except OSError as e:
            raise RunFolderError(
                f"run.folder: cannot write to {parent!r}: {e.strerror}. "
                "Choose another, as in --set run.folder=/tmp/runs."
            ) from e

    def write_metrics(self, rows: Sequence[dict[str, Any]]) -> None:
        """Appends steps. They are in the file when this returns."""
        for row in rows:
            self._metrics.write(json.dumps(_as_json(row)) + "\n")
        self._metrics.flush()

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        text = json.dumps(_as_json(content), indent=2) + "\n"
        (self.path / name).write_text(text, encoding="utf-8")

    def close(self) -> None:
        self._metrics.close()

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def read_metrics(path: pathlib.Path) -> list[dict[str, Any]]:
    """The rows of a metrics file."""
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def plot_curves(rows: Sequence[dict[str, Any]], path: pathlib.Path, title: str) -> None:
    """Draws loss, accuracy, loss scale and gradient norm over the steps.

    Skipped steps are ticks along the foot of each panel. Values jump from step to step,
    so the step's own are pale and their moving average is drawn over them.

    Raises:
      ImportError: without matplotlib.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = (
        ("loss", "Training loss", "log"),
        ("accuracy", "Training accuracy", "linear"),
        ("loss_scale", "Loss scale", "log2"),
        ("grad_norm", "Gradient norm", "log"),
    )
    figure = Figure(figsize=(10, 6.4), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.02, ha="left", fontsize=13, fontweight="bold")
    steps = [row["attempted_steps"] for row in rows]
    skipped = [row["attempted_steps"] for row in rows if row["skipped"]]
    for axes, (name, label, scale) in zip(
        figure.subplots(2, 2).flat, panels, strict=True
    ):
        values = [_number(row[name]) for row in rows]
        if name == "loss_scale":
            axes.step(steps, values, where="post", color="#2b6cb0", linewidth=1.6)
            axes.set_yscale("log", base=2)
        else:
            axes.plot(steps, values, color="#2b6cb0", alpha=0.25, linewidth=0.8)
            axes.plot(steps, _smooth(values), color="#2b6cb0", linewidth=1.8)
            axes.set_yscale(scale)
        for step in skipped:
            axes.axvline(step, ymax=0.05, color="#c53030", linewidth=1.2)
        axes.set_title(label, loc="left", fontsize=10.5)
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(which="both", labelsize=8.5, color="#a0aec0")
        axes.margins(x=0.01)
    note = "attempted step"
    if skipped:
        note += f" (red ticks: {len(skipped)} skipped)"
    figure.supxlabel(note, fontsize=9.5)
    figure.savefig(path)


def _new_folder(parent: pathlib.Path, name: str) -> pathlib.Path:
    parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count():
        path = parent / f"{name}-{number}"
        try:
            path.mkdir()
        except FileExistsError:  # also if another run made it this very moment
            continue
        return path


def _as_json(row: dict[str, Any]) -> dict[str, Any]:
    """JSON has no inf and NaN: they are written as words."""
    return {
        key: str(value)
        if isinstance(value, float) and not math.isfinite(value)
        else value
        for key, value in row.items()
    }


def _number(value: Any) -> float:
    """A value of a row, NaN, which leaves a gap in a curve, where it is not finite."""
    value = float(value)
    return value if math.isfinite(value) else math.nan


def _smooth(values: Sequence[float]) -> list[float]:
    """An exponential average over a sixtieth of the run. Gaps are stepped over."""
    decay = 1.0 - 1.0 / max(len(values) / 60, 1.0)
    total = weight = 0.0
    out = []
    for value in values:
        if not math.isnan(value):
            total, weight = decay * total + value, decay * weight + 1.0
        out.append(total / weight if weight else math.nan)
    return out
