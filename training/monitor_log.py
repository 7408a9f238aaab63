"""What becomes of the measures of a monitor: rows, TensorBoard, and a picture."""

import contextlib
import math
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from .leaves import PyTree
from .monitor import Monitor
from .report import Rows, save_figure

# Beyond so many rows a picture names some of its parameters only.
_NAMED = 60


class MonitorLog:
    """Writes measures as they come. `close` it at the end.

    Args:
      monitor: the step's.
      params: of the state.
      rows: the file they go to, a row for each measured step.
      tensorboard: a folder for TensorBoard, or None.
      done: attempted steps at the start. What the files have of later ones goes.
    """

    def __init__(
        self,
        monitor: Monitor,
        params: PyTree,
        rows: Rows,
        tensorboard: pathlib.Path | None,
        done: int,
    ):
        self._layers, self._weights = monitor.layers(params), monitor.weights(params)
        self._file = rows
        self._rows = rows.cut(done)
        self._events = None if tensorboard is None else _Events(tensorboard, done)

    def write(self, fetched: Sequence[dict[str, Any]]) -> None:
        """Keeps what was measured in some steps; the rest of their metrics is not."""
        rows = [self._row(metrics) for metrics in fetched if _measured(metrics)]
        self._rows += rows
        self._file.append(rows)
        if self._events is not None:
            self._events.write(rows)

    def plot(self, path: pathlib.Path, title: str) -> None:
        """Draws all rows. Raises ImportError without matplotlib."""
        if self._rows:
            plot_monitor(self._rows, path, title)

    def close(self) -> None:
        if self._events is not None:
            self._events.close()

    def _row(self, metrics: dict[str, Any]) -> dict[str, Any]:
        measures = dict(metrics["monitor"])
        del measures["measured"]
        condition = measures.pop("condition").tolist()
        by_layer = zip(*(values.tolist() for values in measures.values()), strict=True)
        return {
            "attempted_steps": int(metrics["attempted_steps"]),
            "skipped": bool(metrics["skipped"]),
            "layers": {
                layer: dict(zip(measures, values, strict=True))
                for layer, values in zip(self._layers, by_layer, strict=True)
            },
            "condition": dict(zip(self._weights, condition, strict=True)),
        }


class _Events:
    """Files for TensorBoard.

    Written here, not by the thread of tensorboardX, which ends on a full disk; all that
    give it more then wait for ever.
    """

    def __init__(self, folder: pathlib.Path, done: int):
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        self._folder, self._file = folder, None
        self._version = Event(wall_time=time.time(), file_version="brain.Event:2")
        # TensorBoard forgets what it had from this step on.
        start = SessionLog(status=SessionLog.START)
        self._waiting = [Event(wall_time=time.time(), step=done + 1, session_log=start)]

    def write(self, rows: Sequence[dict[str, Any]]) -> None:
        """Adds rows. What cannot be written waits for the next call."""
        from tensorboardX.record_writer import RecordWriter

        self._waiting += [_event(row) for row in rows]
        try:
            events = self._waiting
            if self._file is None:
                self._folder.mkdir(parents=True, exist_ok=True)
                number = len([*self._folder.iterdir()])
                name = f"events.out.tfevents.{time.time():.0f}.{number}"
                self._file = RecordWriter(str(self._folder / name))
                events = [self._version, *events]
            for event in events:
                self._file.write(event.SerializeToString())
            self._file.flush()
        except OSError:
            # Half an event ends a file for its readers: the next go into another.
            self.close()
            self._file = None
        else:
            self._waiting.clear()

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()


def _event(row: dict[str, Any]) -> Any:
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.proto.summary_pb2 import Summary

    values = [
        Summary.Value(tag=tag, simple_value=value) for tag, value in _scalars(row)
    ]
    return Event(
        wall_time=time.time(),
        step=row["attempted_steps"],
        summary=Summary(value=values),
    )


def _measured(metrics: dict[str, Any]) -> bool:
    return bool(metrics["monitor"]["measured"])


def _scalars(row: dict[str, Any]) -> list[tuple[str, float]]:
    """Tags and values for TensorBoard: a group for each measure."""
    found = [
        (f"{name}/{layer}", value)
        for layer, measures in row["layers"].items()
        for name, value in measures.items()
    ]
    found += [(f"condition/{name}", value) for name, value in row["condition"].items()]
    # TensorBoard has no place for inf and NaN; their number is a measure of its own.
    return [(tag, value) for tag, value in found if math.isfinite(value)]


def plot_monitor(
    rows: Sequence[dict[str, Any]], path: pathlib.Path, title: str
) -> None:
    """Draws the rows of a monitor: parameters from top to bottom, steps to the right.

    Cells with inf or NaN are marked in red. Raises ImportError without matplotlib.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    layers = list(rows[0]["layers"])
    steps = np.array([row["attempted_steps"] for row in rows])

    def table(name: str) -> np.ndarray:
        values = [[float(r["layers"][x][name]) for r in rows] for x in layers]
        return np.array(values)

    largest = np.maximum(np.abs(table("grad_min")), np.abs(table("grad_max")))
    panels = (
        ("Gradient norm", table("grad_norm"), True),
        ("Largest entry of the gradient", largest, True),
        ("Update / weight", table("update_ratio"), True),
        ("Share of zeros in the gradient", table("zero_share"), False),
    )
    # A run may have gone on with other weights than it began with.
    condition = dict.fromkeys(name for row in rows for name in row["condition"])
    height = 2 * (1.2 + 0.16 * min(max(len(layers), 6), _NAMED)) + 3 * bool(condition)
    figure = Figure(figsize=(13, height), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.02, ha="left", fontsize=13, fontweight="bold")
    tall = (height - 3 * bool(condition)) / 2
    grid = figure.add_gridspec(
        2 + bool(condition), 2, height_ratios=[tall, tall, 3][: 2 + bool(condition)]
    )
    bad = table("nonfinite") > 0
    for place, (label, values, is_log) in enumerate(panels):
        axes = figure.add_subplot(grid[place // 2, place % 2])
        image = _heat(axes, steps, values, is_log)
        figure.colorbar(image, ax=axes, pad=0.01).ax.tick_params(labelsize=7)
        y, x = np.nonzero(bad)
        axes.plot(steps[x], y, "x", color="#e53e3e", markersize=4)
        axes.set_title(label, loc="left", fontsize=10)
        shown = range(0, len(layers), math.ceil(len(layers) / _NAMED))
        names = [layers[i] for i in shown] if place % 2 == 0 else []
        axes.set_yticks([*shown][: len(names)], names, fontsize=6)
        axes.tick_params(axis="x", labelsize=8)
    if condition:
        axes = figure.add_subplot(grid[2, :])
        for weight in condition:
            values = [_finite(row["condition"].get(weight, math.nan)) for row in rows]
            axes.plot(steps, values, linewidth=1.4, label=weight)
        axes.set_yscale("log")
        axes.set_title("Condition number", loc="left", fontsize=10)
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(which="both", labelsize=7)
        axes.margins(x=0.01)
        axes.legend(fontsize=7, frameon=False, ncols=2)
    note = "attempted step"
    if bad.any():
        note += f" (red: {int(bad.any(0).sum())} measured steps with inf or NaN)"
    figure.supxlabel(note, fontsize=9.5)
    save_figure(figure, path)


def _heat(axes: Any, steps: np.ndarray, values: np.ndarray, is_log: bool) -> Any:
    from matplotlib.colors import LogNorm, Normalize

    shown = np.where(np.isfinite(values), values, np.nan)
    if is_log:
        shown = np.where(shown > 0, shown, np.nan)
    low, high = 0.0, 1.0
    if is_log:
        low, high = 1e-1, 1.0
        if np.isfinite(shown).any():
            low, high = np.nanmin(shown), np.nanmax(shown)
            # Six decades at most: one tiny number must not hide the others.
            low = max(low, high * 1e-6)
        low = low if low < high else high / 10
    axes.set_facecolor("#e2e8f0")  # where there is nothing to show
    norm = LogNorm(low, high) if is_log else Normalize(low, high)
    # Each column begins at its step, the last one as wide as the one before.
    width = steps[-1] - steps[-2] if len(steps) > 1 else 1
    edges = np.append(steps, steps[-1] + width) - 0.5
    rows = np.arange(len(values) + 1) - 0.5
    image = axes.pcolormesh(edges, rows, shown, norm=norm, cmap="viridis")
    axes.invert_yaxis()
    return image


def _finite(value: Any) -> float:
    value = float(value)
    return value if math.isfinite(value) else math.nan
