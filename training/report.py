"""What a run leaves behind: a folder with its settings, metrics and curves."""

import contextlib
import glob
import io
import itertools
import json
import math
import pathlib
from collections.abc import Sequence
from typing import Any


class RunFolderError(Exception):
    """The folder of a run cannot be written."""


class Rows:
    """A file of rows, `NAME.jsonl`, each of one attempted step, in their order.

    Where they cannot be written, the disk being full, they wait in memory.
    """

    def __init__(self, path: pathlib.Path):
        self.path = path
        self._waiting = b""
        self._open()

    def append(self, rows: Sequence[dict[str, Any]]) -> None:
        """Adds rows. They are in the file when this returns, if they can be."""
        self._waiting += "".join(map(_line, rows)).encode()
        with contextlib.suppress(OSError):
            self.flush()

    def flush(self) -> None:
        """Writes what waits. Raises OSError if it cannot be."""
        while self._waiting:
            self._waiting = self._waiting[self._file.write(self._waiting) :]

    def cut(self, steps: int) -> list[dict[str, Any]]:
        """The rows up to an attempted step. The later ones, to be made again, go."""
        rows = [r for r in read_rows(self.path) if r["attempted_steps"] <= steps]
        replace_file(self.path, "".join(map(_line, rows)).encode())
        self._file.close()
        self._open()
        return rows

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.flush()
        self._file.close()

    def _open(self) -> None:
        # Not buffered: what a full disk does not take is still ours.
        self._file = open(self.path, "ab", buffering=0)


def replace_file(path: pathlib.Path, content: bytes) -> None:
    """Writes a file whole, or raises OSError and leaves the one before."""
    beside = path.with_name(f"{path.name}.new")
    try:
        beside.write_bytes(content)
        beside.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise


def save_figure(figure: Any, path: pathlib.Path) -> None:
    """Writes a figure of matplotlib as a whole file."""
    image = io.BytesIO()
    figure.savefig(image, format="png")
    replace_file(path, image.getvalue())


class RunFolder:
    """The folder of one run. A context manager, which closes its files.

    Attributes:
      path: the folder. `config.json`, `metrics.jsonl` (a line for each step),
        `results.json`, `curves.png` and `checkpoints` come into it; with a monitor
        `monitor.jsonl`, `monitor.png` and `tensorboard`, too.
      metrics: the rows of `metrics.jsonl`.
    """

    def __init__(self, path: pathlib.Path):
        self.path = path
        self._opened = []
        self.metrics = self.rows("metrics")

    @classmethod
    def new(cls, parent: str, name: str, settings: dict[str, Any]) -> "RunFolder":
        """Makes `parent/name-0`, `parent/name-1`, ..., never one that is there.

        It is made and written to at once: what cannot be kept must be known before
        hours are spent.

        Raises:
          RunFolderError: if it cannot be made or written.
        """
        try:
            folder = cls(_new_folder(pathlib.Path(parent), name))
            folder.write_json("config.json", settings)
        except OSError as e:
            raise RunFolderError(
                f"run.folder: cannot write to {parent!r}: {e.strerror}. "
                "Choose another, as in --set run.folder=/tmp/runs."
            ) from e
        return folder

    @classmethod
    def again(cls, path: pathlib.Path) -> "RunFolder":
        """The folder of a run that goes on.

        Raises:
          RunFolderError: if there is none, or it cannot be written.
        """
        if not (path / "config.json").is_file():
            raise RunFolderError(f"--resume: {str(path)!r} is not the folder of a run.")
        try:
            return cls(path)
        except OSError as e:
            raise RunFolderError(
                f"--resume: cannot write to {str(path)!r}: {e.strerror}."
            ) from e

    def rows(self, name: str) -> Rows:
        """The rows of `NAME.jsonl`, a file that is there or made."""
        self._opened.append(Rows(self.path / f"{name}.jsonl"))
        return self._opened[-1]

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        text = json.dumps(_as_json(content), indent=2) + "\n"
        replace_file(self.path / name, text.encode())

    def flush(self) -> None:
        """Writes the rows that wait. Raises OSError if they cannot be."""
        for rows in self._opened:
            rows.flush()

    def close(self) -> None:
        for rows in self._opened:
            rows.close()

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def last_run(parent: str, name: str) -> pathlib.Path:
    """The newest folder of the runs with a name.

    Raises:
      RunFolderError: if there is none.
    """
    numbered = [
        (int(number), path)
        for path in pathlib.Path(parent).glob(f"{glob.escape(name)}-*")
        if (number := path.name.removeprefix(f"{name}-")).isdecimal()
    ]
    if not numbered:
        raise RunFolderError(f"--resume: there is no run {name!r} in {parent!r} yet.")
    return max(numbered)[1]


def read_rows(path: pathlib.Path) -> list[dict[str, Any]]:
    """The rows of such a file. A last line that was cut off is left out."""
    rows = []
    with open(path, encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                rows.append(json.loads(line))
    return rows


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
    save_figure(figure, path)


def _new_folder(parent: pathlib.Path, name: str) -> pathlib.Path:
    parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count():
        path = parent / f"{name}-{number}"
        try:
            path.mkdir()
        except FileExistsError:  # also if another run made it this very moment
            continue
        return path


def _line(row: dict[str, Any]) -> str:
    return json.dumps(_as_json(row)) + "\n"


def _as_json(value: Any) -> Any:
    """JSON has no inf and NaN: they are written as words."""
    if isinstance(value, dict):
        return {key: _as_json(inner) for key, inner in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


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
