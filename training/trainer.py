"""The loop: from a configuration to a trained model and a folder that says how it went.

Metrics stay on the device until `run.report_every` steps are done and come over
together, so that the device need not wait for the host after each step.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from .config import Config
from .data import Prefetch
from .progress import Display, number
from .report import RunFolder, plot_curves
from .state import TrainState
from .step import make_train_step, nonfinite_paths
from .tasks import make_optimizer, make_task


class StuckError(Exception):
    """Too many steps in a row were skipped."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
      folder: what it left.
      results: from data kept apart; empty if the run was interrupted.
      sample: text that the model wrote, or None.
      state: the last state.
      interrupted: by Ctrl-C.
      plotted: whether curves could be drawn, for which matplotlib is needed.
    """

    folder: Path
    results: dict[str, Any]
    sample: str | None
    state: TrainState
    interrupted: bool
    plotted: bool


def train(config: Config, console: Console) -> Outcome:
    """Trains what the configuration says.

    Raises:
      RunFolderError: before anything else, if results could not be written.
      DataError: if the data cannot be had.
      StuckError: after `optimization.stop_after_skips` skipped steps in a row. What was
        written until then is kept.
    """
    with RunFolder(config.run.folder, config.run.name, config.model_dump()) as folder:
        console.print(f"run folder: {folder.path}", soft_wrap=True, highlight=False)
        return _train(config, console, folder)


def _train(config: Config, console: Console, folder: RunFolder) -> Outcome:
    task = make_task(config)
    options = config.optimization
    scaling = {"policy": options.policy, "loss_scale": options.build_loss_scale()}
    optimizer = make_optimizer(config.optimizer, task.steps)
    state = TrainState.create(
        task.params,
        optimizer,
        model_state=task.model_state,
        rng=config.run.seed,
        ema=options.ema_decay is not None,
        **scaling,
    )
    step = make_train_step(
        task.loss_fn,
        optimizer,
        clip_norm=options.clip_norm,
        micro_batches=options.micro_batches,
        ema_decay=options.ema_decay,
        **scaling,
    )

    batches = Prefetch(task.batches)
    rows, pending = [], []
    interrupted = False
    started = time.monotonic()
    try:
        with Display(console, task.steps, task.counted) as display:
            clock = _Rate(task.count)
            for done in range(1, task.steps + 1):
                state, metrics = step(state, next(batches))
                pending.append(metrics)
                if done % config.run.report_every == 0 or done == task.steps:
                    fetched, pending = jax.device_get(pending), []
                    rows += _keep(fetched, folder)
                    _check_progress(fetched[-1], state, options.stop_after_skips)
                    display.update(done, rows[-1], clock(len(fetched)))
    except KeyboardInterrupt:
        interrupted = True
        rows += _keep(jax.device_get(pending), folder)
    finally:
        plotted = _plot(rows, folder.path, config)

    results, sample = {}, None
    if not interrupted:
        results = task.evaluate(state.eval_params, state.model_state)
        results |= {
            "steps": int(state.step),
            "skipped steps": int(state.loss_scale.total_skips),
            "loss scale": float(state.loss_scale.scale),
            "seconds": round(time.monotonic() - started, 1),
        }
        if task.sample is not None:
            sample = task.sample(state.eval_params, state.model_state)
        folder.write_json("results.json", results | {"sample": sample})
    return Outcome(folder.path, results, sample, state, interrupted, plotted)


class _Rate:
    """Things per second between two calls; None at the first, which has compiled."""

    def __init__(self, per_step: int):
        self._per_step, self._last = per_step, None

    def __call__(self, steps: int) -> float | None:
        last, self._last = self._last, time.monotonic()
        return None if last is None else steps * self._per_step / (self._last - last)


def _keep(fetched: list[dict[str, Any]], folder: RunFolder) -> list[dict[str, Any]]:
    """Writes the scalars of some steps to the folder and returns them."""
    rows = [
        {name: value.item() for name, value in metrics.items() if value.ndim == 0}
        for metrics in fetched
    ]
    folder.write_metrics(rows)
    return rows


def _check_progress(metrics: dict[str, Any], state: TrainState, limit: int) -> None:
    skips, scale = int(metrics["consecutive_skips"]), metrics["loss_scale"]
    if skips < limit:
        return
    names = nonfinite_paths(state.params, metrics["finite_leaves"])
    if names:
        what = f"not finite: the gradients of {', '.join(names[:5])}"
        what += f" and {len(names) - 5} more" if len(names) > 5 else ""
    else:
        what = "the gradients are finite, yet the update or the model state is not"
    # Without scaling the scale is 1, and of no interest; with it, it may be too high.
    at = f" at loss scale {number(scale)}" if scale != 1 else ""
    scaling_helps = names and scale != 1 and np.isfinite(metrics["loss"])
    raise StuckError(
        f"training stopped: {skips} steps in a row were skipped, the last{at} with a "
        f"loss of {metrics['loss']:g}; {what}. "
        + (
            "Lower optimization.loss_scale or its min."
            if scaling_helps
            else "No loss scale mends this: look at the data and the learning rate."
        )
    )


def _plot(rows: list[dict[str, Any]], folder: Path, config: Config) -> bool:
    if not rows:
        return True
    title = f"{config.run.name}: {config.model.name}, {config.optimization.precision}"
    try:
        plot_curves(rows, folder / "curves.png", title)
    except ImportError:
        return False
    return True
