"""From a configuration to a trained model and a folder that says how it went."""

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from .checkpoint import CheckpointError, Checkpoints
from .config import Config
from .fit import fit, resume
from .interrupt import StopSignals
from .progress import Display
from .report import RunFolder, RunFolderError, plot_curves
from .state import TrainState
from .step import StepFn, make_train_step
from .tasks import Task, make_optimizer, make_task


class LostRunError(Exception):
    """A run cannot go on, for its results cannot be kept; the message says what is."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
      folder: what it left.
      results: from data kept apart; empty if the run was stopped.
      sample: text that the model wrote, or None.
      state: the last state.
      stopped: the name of the signal that stopped it, or None.
      plotted: whether curves could be drawn, for which matplotlib is needed.
    """

    folder: Path
    results: dict[str, Any]
    sample: str | None
    state: TrainState
    stopped: str | None
    plotted: bool


def train(config: Config, console: Console, again: Path | None = None) -> Outcome:
    """Trains what the configuration says.

    Args:
      config: the configuration.
      console: where progress is shown.
      again: the folder of a run that was stopped. It goes on there, and ends as if it
        had not been. None begins a new run in a new folder.

    Raises:
      RunFolderError: before anything else, if results could not be written, or a run
        that is to go on has no checkpoint.
      CheckpointError: if the checkpoint is of a run with other settings.
      DataError: if the data cannot be had.
      StuckError: after `optimization.stop_after_skips` skipped steps in a row. What was
        written until then is kept.
      LostRunError: if results can be kept no longer.
      KeyboardInterrupt: at the second Ctrl-C.
    """
    if again is not None:
        folder = RunFolder.again(again)
    else:
        settings = config.model_dump(mode="json")
        folder = RunFolder.new(config.run.folder, config.run.name, settings)
    with folder:
        console.print(f"run folder: {folder.path}", soft_wrap=True, highlight=False)
        task = make_task(config)
        state, step = _prepare(config, task)
        with Checkpoints(
            folder.path / "checkpoints",
            config=config.trajectory(),
            keep_last=config.run.keep_last,
            keep_best=config.run.keep_best,
        ) as checkpoints:
            if again is not None and checkpoints.latest is None:
                raise RunFolderError(
                    f"--resume: {str(again)!r} was stopped before its first "
                    "checkpoint. Begin anew, without --resume."
                )
            state, batches = resume(checkpoints, state, task.batches)
            run = _Run(config, console, task, step, checkpoints, folder)
            try:
                return run(state, batches)
            except (OSError, CheckpointError) as e:
                raise LostRunError(_what_is_kept(e, folder, checkpoints)) from e


def _prepare(config: Config, task: Task) -> tuple[TrainState, StepFn]:
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
    return state, step


@dataclass
class _Run:
    """One run from a state on."""

    config: Config
    console: Console
    task: Task
    step: StepFn
    checkpoints: Checkpoints
    folder: RunFolder

    def __call__(self, state: TrainState, batches) -> Outcome:
        task, options = self.task, self.config.run
        rows = self.folder.cut(int(state.attempted_steps))
        started = time.monotonic()
        try:
            with (
                Display(self.console, task.steps, task.counted) as display,
                StopSignals(self.console.print) as stop,
            ):
                clock = _Rate(task.count)

                def report(fetched: list[dict[str, Any]]) -> None:
                    new = [_scalars(metrics) for metrics in fetched]
                    rows.extend(new)
                    self.folder.write_metrics(new)
                    done = new[-1]["attempted_steps"]
                    display.update(done, new[-1], clock(len(new)))

                fitted = fit(
                    self.step,
                    state,
                    batches,
                    steps=task.steps,
                    report_every=options.report_every,
                    on_report=report,
                    stop_after_skips=self.config.optimization.stop_after_skips,
                    checkpoints=self.checkpoints,
                    save_every=options.save_every,
                    stop=stop,
                )
        except BaseException:
            # The error says more than that the curves could not be drawn either.
            with contextlib.suppress(OSError):
                self._plot(rows)
            raise
        plotted = self._plot(rows)
        state = fitted.state
        results, sample = {}, None
        if fitted.stopped is None:
            results = task.evaluate(state.eval_params, state.model_state)
            results |= {
                "steps": int(state.step),
                "skipped steps": int(state.loss_scale.total_skips),
                "loss scale": float(state.loss_scale.scale),
                "seconds": round(time.monotonic() - started, 1),
            }
            if task.sample is not None:
                sample = task.sample(state.eval_params, state.model_state)
            self.folder.write_json("results.json", results | {"sample": sample})
        return Outcome(
            self.folder.path, results, sample, state, fitted.stopped, plotted
        )

    def _plot(self, rows: list[dict[str, Any]]) -> bool:
        """Whether there are curves; there are none without rows or matplotlib."""
        if not rows:
            return True
        config = self.config
        precision = config.optimization.precision
        title = f"{config.run.name}: {config.model.name}, {precision}"
        try:
            plot_curves(rows, self.folder.path / "curves.png", title)
        except ImportError:
            return False
        return True


class _Rate:
    """Things per second between two calls; None at the first, which has compiled."""

    def __init__(self, per_step: int):
        self._per_step, self._last = per_step, None

    def __call__(self, steps: int) -> float | None:
        last, self._last = self._last, time.monotonic()
        return None if last is None else steps * self._per_step / (self._last - last)


def _scalars(metrics: dict[str, Any]) -> dict[str, Any]:
    return {name: value.item() for name, value in metrics.items() if value.ndim == 0}


def _what_is_kept(error: Exception, folder: RunFolder, checkpoints: Checkpoints) -> str:
    if isinstance(error, OSError):
        why = f"cannot write to {folder.path}: {error.strerror}"
    else:
        why = str(error).rstrip(".")
    step = checkpoints.latest
    then = (
        f"make room and go on from step {step} with --resume {folder.path}"
        if step is not None
        else "there is no checkpoint yet to go on from"
    )
    return f"training stopped: {why}; {then}."
