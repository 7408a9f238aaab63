"""The loop over batches: steps, reports now and then, checkpoints, a clean stop.

Metrics stay on the device until `report_every` steps are done and come over together,
so that the device need not wait for the host after each step.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from .checkpoint import Checkpoints
from .data import Prefetch, resumable
from .leaves import PyTree
from .state import TrainState
from .step import StepFn, nonfinite_paths


class StuckError(Exception):
    """Too many steps in a row were skipped."""


@dataclass(frozen=True)
class Fitted:
    """How a loop ended.

    Attributes:
      state: the last state.
      stopped: what `stop()` returned when it ended the loop, else None.
    """

    state: TrainState
    stopped: Any = None


def resume(
    checkpoints: Checkpoints, state: TrainState, batches: Iterable[PyTree]
) -> tuple[TrainState, Iterator[PyTree]]:
    """State and batches as the latest checkpoint has them; the same if there is none.

    Raises:
      CheckpointError: if it cannot be read, or does not fit the state or the settings.
      DataError: if there are fewer batches than were used before the checkpoint.
    """
    source = resumable(batches)
    if checkpoints.latest is None:
        return state, source
    restored = checkpoints.restore(state)
    source.set_state(restored.data)
    return restored.state, source


def fit(
    step: StepFn,
    state: TrainState,
    batches: Iterable[PyTree],
    *,
    steps: int,
    report_every: int = 10,
    on_report: Callable[[list[dict[str, Any]]], None] | None = None,
    stop_after_skips: int = 100,
    checkpoints: Checkpoints | None = None,
    save_every: int | None = None,
    stop: Callable[[], Any] | None = None,
    place: Callable[[PyTree], PyTree] = jax.device_put,
) -> Fitted:
    """Runs `step` over the batches.

    Args:
      step: of `make_train_step`, or any function of its form.
      state: where it starts. Its buffers are gone afterwards if the step donates them.
      batches: any iterable. One whose iterator has `get_state` and `set_state`, as
        those of grain have, is saved where it stands; of another it is saved how many
        were drawn. The loop ends where they end.
      steps: the value of `state.attempted_steps` to end at.
      report_every: after so many steps, and at the end, `on_report` is called.
      on_report: is given the metrics of the steps since the last call, as numpy arrays.
      stop_after_skips: so many skipped steps in a row raise.
      checkpoints: where the state is saved every `save_every` steps (None for not
        before the end), at the end, and when the loop is stopped. Steps are reported
        before they are saved.
      save_every: see `checkpoints`. The metric by which the best are kept is the mean
        of the finite losses since the last save.
      stop: asked after each step; a true value ends the loop.
      place: puts a batch onto the device or devices.

    Raises:
      StuckError: see `stop_after_skips`. The message names the leaves of the gradient
        that were not finite.
      CheckpointError: if a checkpoint cannot be written.
      ValueError: for `save_every` without `checkpoints`.
    """
    if checkpoints is None and save_every is not None:
        raise ValueError("fit: save_every needs checkpoints=Checkpoints(...).")
    # One that is given goes on: it may be ahead of what was used.
    is_ahead = isinstance(batches, Prefetch)
    source = batches if is_ahead else Prefetch(resumable(batches), place=place)

    pending, losses = [], []

    def report() -> None:
        if pending:
            fetched = jax.device_get(pending)
            pending.clear()
            values = [float(metrics["loss"]) for metrics in fetched]
            losses.extend(value for value in values if np.isfinite(value))
            if on_report is not None:
                on_report(fetched)
            _check_progress(fetched[-1], state, stop_after_skips)

    def save() -> None:
        report()
        metric = float(np.mean(losses)) if losses else None
        losses.clear()
        checkpoints.save(done, state, data=source.get_state(), metric=metric)

    done, stopped = int(state.attempted_steps), None
    while done < steps and not stopped:
        try:
            batch = next(source)
        except StopIteration:
            break
        state, metrics = step(state, batch)
        pending.append(metrics)
        done += 1
        if done % report_every == 0:
            report()
        if save_every is not None and done % save_every == 0:
            save()
        stopped = stop() if stop is not None else None
    report()
    if checkpoints is not None:
        save()
        checkpoints.wait()
    return Fitted(state, stopped or None)


def _check_progress(metrics: dict[str, Any], state: TrainState, limit: int) -> None:
    skips = int(metrics["consecutive_skips"])
    if skips < limit:
        return
    scale = metrics["loss_scale"]
    names = nonfinite_paths(state.params, metrics["finite_leaves"])
    if names:
        what = f"not finite: the gradients of {', '.join(names[:5])}"
        what += f" and {len(names) - 5} more" if len(names) > 5 else ""
    else:
        what = "the gradients are finite, yet the update or the model state is not"
    # Without scaling the scale is 1, and of no interest; with it, it may be too high.
    at = f" at loss scale {scale:.10g}" if scale != 1 else ""
    scaling_helps = names and scale != 1 and np.isfinite(metrics["loss"])
    raise StuckError(
        f"training stopped: {skips} steps in a row were skipped, the last{at} with a "
        f"loss of {metrics['loss']:g}; {what}. "
        + (
            "Lower the loss scale (optimization.loss_scale) or its min."
            if scaling_helps
            else "No loss scale mends this: look at the data and the learning rate."
        )
    )
