"""From a configuration to a trained model and a folder that says how it went."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from .checkpoint import CheckpointError, Checkpoints
from .config import Config
from .config_file import ConfigError
from .data import Prefetch
from .interrupt import StopSignals
from .loop import fit, resume
from .monitor_log import MonitorLog
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
      not_plotted: why no curves were drawn, or None.
    """

    folder: Path
    results: dict[str, Any]
    sample: str | None
    state: TrainState
    stopped: str | None
    not_plotted: str | None


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
    settings = config.model_dump(mode="json")
    if again is not None:
        folder = RunFolder.again(again)
    else:
        folder = RunFolder.new(config.run.folder, config.run.name, settings)
    with folder:
        console.print(f"run folder: {folder.path}", soft_wrap=True, highlight=False)
        task = make_task(config)
        state = first_state(config, task)
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
            run = _Run(config, console, task, checkpoints, folder)
            try:
                if again is not None:  # what is watched may have changed
                    folder.write_json("config.json", settings)
                return run(state, Prefetch(batches))
            except (OSError, CheckpointError) as e:
                raise LostRunError(_what_is_kept(e, folder, checkpoints)) from e


def first_state(config: Config, task: Task) -> TrainState:
    """The state that a run with this configuration begins with."""
    options = config.optimization
    return TrainState.create(
        task.params,
        make_optimizer(config.optimizer, task.steps),
        policy=options.policy,
        loss_scale=options.build_loss_scale(),
        model_state=task.model_state,
        rng=config.run.seed,
        ema=options.ema_decay is not None,
    )


def make_step(config: Config, task: Task) -> StepFn:
    """The step that a configuration describes."""
    options = config.optimization
    return make_train_step(
        task.loss_fn,
        make_optimizer(config.optimizer, task.steps),
        policy=options.policy,
        loss_scale=options.build_loss_scale(),
        clip_norm=options.clip_norm,
        clip_rules=[rule.build() for rule in options.clip_rules],
        micro_batches=options.micro_batches,
        ema_decay=options.ema_decay,
        monitor=config.monitor.build() if config.monitor else None,
    )


class _Run:
    """One run from a state on."""

    def __init__(
        self,
        config: Config,
        console: Console,
        task: Task,
        checkpoints: Checkpoints,
        folder: RunFolder,
    ):
        self._config, self._console, self._task = config, console, task
        self._checkpoints, self._folder = checkpoints, folder
        precision = config.optimization.precision
        self._title = f"{config.run.name}: {config.model.name}, {precision}"

    def __call__(self, state: TrainState, batches: Prefetch) -> Outcome:
        done = int(state.attempted_steps)
        rows = self._folder.metrics.cut(done)
        log = self._open_monitor_log(state, done)
        started = time.monotonic()
        try:
            state, task, stopped = self._fit(state, batches, rows, log)
        except BaseException:
            self._plot(rows, log)
            raise
        finally:
            if log is not None:
                log.close()
        self._folder.flush()
        not_plotted = self._plot(rows, log)
        results, sample = {}, None
        if stopped is None:
            results = task.evaluate(state.eval_params, state.model_state)
            results |= {
                "steps": int(state.step),
                "skipped steps": int(state.loss_scale.total_skips),
                "loss scale": float(state.loss_scale.scale),
                "seconds": round(time.monotonic() - started, 1),
            }
            if task.sample is not None:
                sample = task.sample(state.eval_params, state.model_state)
            self._folder.write_json("results.json", results | {"sample": sample})
        return Outcome(self._folder.path, results, sample, state, stopped, not_plotted)

    def _fit(
        self,
        state: TrainState,
        batches: Prefetch,
        rows: list[dict[str, Any]],
        log: MonitorLog | None,
    ) -> tuple[TrainState, Task, str | None]:
        """The last state, the task of its phase, and what stopped the run, if any."""
        options, task = self._config.run, self._task
        with (
            Display(self._console, task.steps, task.counted) as display,
            StopSignals(self._console.print) as stop,
        ):
            clock = _Rate(task.count)

            def report(fetched: list[dict[str, Any]]) -> None:
                new = [_scalars(metrics) for metrics in fetched]
                rows.extend(new)
                self._folder.metrics.append(new)
                if log is not None:
                    log.write(fetched)
                done = new[-1]["attempted_steps"]
                display.update(done, new[-1], clock(len(new)))

            scale = None
            for start, end, config in self._phases():
                before, scale = scale, config.optimization.build_loss_scale()
                if (done := int(state.attempted_steps)) >= end:
                    continue
                if start > 0:
                    task = make_task(config)
                    # A run that goes on within a phase has its scale already.
                    if done == start and scale != before:
                        state = state.with_loss_scale(scale)
                fitted = fit(
                    make_step(config, task),
                    state,
                    batches,
                    steps=end,
                    report_every=options.report_every,
                    on_report=report,
                    stop_after_skips=config.optimization.stop_after_skips,
                    checkpoints=self._checkpoints,
                    save_every=options.save_every,
                    stop=stop,
                )
                state = fitted.state
                if fitted.stopped:
                    return state, task, fitted.stopped
        return state, task, None

    def _phases(self) -> list[tuple[int, int, Config]]:
        """First and last attempted step of each phase, and what holds in it."""
        phases = [p for p in self._config.phases() if p[0] < self._task.steps]
        ends = [start for start, _ in phases[1:]] + [self._task.steps]
        return [(s, end, c) for (s, c), end in zip(phases, ends, strict=True)]

    def _open_monitor_log(self, state: TrainState, done: int) -> MonitorLog | None:
        options = self._config.monitor
        if options is None:
            return None
        try:
            return MonitorLog(
                options.build(),
                state.params,
                self._folder.rows("monitor"),
                self._folder.path / "tensorboard" if options.tensorboard else None,
                done,
            )
        except ValueError as e:  # a pattern that matches nothing
            raise ConfigError(f"monitor: {e}") from e

    def _plot(self, rows: list[dict[str, Any]], log: MonitorLog | None) -> str | None:
        """Draws pictures. Why there are none, if so: no reason to lose the run."""
        path = self._folder.path
        try:
            if rows:
                plot_curves(rows, path / "curves.png", self._title)
            if log is not None:
                log.plot(path / "monitor.png", self._title)
        except ImportError:
            return "matplotlib is missing; install it: pip install 'opsnn-jax[plot]'"
        except OSError as e:
            return f"cannot write to {path}: {e.strerror}"
        return None


class _Rate:
    """Things per second between two calls; None at the first, which has compiled."""

    def __init__(self, per_step: int):
        self._per_step, self._last = per_step, None

    def __call__(self, steps: int) -> float | None:
        last, self._last = self._last, time.monotonic()
        return None if last is None else steps * self._per_step / (self._last - last)


def _scalars(metrics: dict[str, Any]) -> dict[str, Any]:
    is_scalar = {name: getattr(v, "ndim", None) == 0 for name, v in metrics.items()}
    return {name: v.item() for name, v in metrics.items() if is_scalar[name]}


def _what_is_kept(error: Exception, folder: RunFolder, checkpoints: Checkpoints) -> str:
    if isinstance(error, OSError):
        why = f"cannot write to {folder.path}: {error.strerror}"
    else:
        why = str(error).rstrip(".")
    step = checkpoints.latest
    then = (
        f"make room and go on from step {step} with --resume {folder.path}"
        if step is not None
        else "make room and begin anew, for there is no checkpoint yet to go on from"
    )
    return f"training stopped: {why}; {then}."
