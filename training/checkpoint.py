"""Checkpoints: everything of a run, so that it goes on as if it had not been stopped.

A run of N + M steps, and one that is killed after N, restored and run for M, end in the
same bits. For that a checkpoint holds the whole state (master weights, optimizer, model
state, loss scale with its counters, average, step counts, random key) and where the
data iterator stood. A step accumulates its micro-batches within one call, so between
steps there is no accumulator to keep: killed in the middle of a window, a run repeats
that window from its first micro-batch.

orbax writes to a temporary folder in the background and renames it when all is there,
so a process that dies while it saves leaves the checkpoint before as it was. Whether
there is room is asked before it begins: on a full disk its threads would each report an
error of their own.
"""

import contextlib
import errno
import math
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import PreservationPolicy

from .checkpoint_arrays import from_array, target, to_arrays
from .leaves import PyTree
from .manifest import (
    decode,
    encode,
    leaf_difference,
    leaf_table,
    setting_difference,
)


class CheckpointError(Exception):
    """A checkpoint cannot be written, read, or does not fit; the message says why."""


@dataclass(frozen=True)
class Restored:
    """What a checkpoint held.

    Attributes:
      step: under which it was saved.
      state: of the structure, dtypes, shapes and placement that were asked for.
      data: the state of the data iterator, or None.
    """

    step: int
    state: PyTree
    data: Any


class Checkpoints:
    """The checkpoints of one run, folders `folder/STEP`. A context manager.

    Args:
      folder: made if it is not there. Remains of saves that were cut off are removed.
      config: settings that a run that goes on must share, as JSON has them; they are
        saved and compared. None compares nothing.
      keep_last: how many of the newest are kept, at least 1.
      keep_best: how many of the best by `metric` are kept besides.
      better: whether the "lower" or the "higher" metric is the better.

    Raises:
      CheckpointError: if the folder cannot be made or read.
      ValueError: for an option out of its range.

    Example:
      >>> import tempfile
      >>> import jax.numpy as jnp
      >>> state = {"w": jnp.arange(3.0)}
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     with Checkpoints(folder, keep_best=3) as checkpoints:
      ...         checkpoints.save(100, state, data={"drawn": 100}, metric=0.31)
      ...         restored = checkpoints.restore(jax.tree.map(jnp.zeros_like, state))
      >>> restored.step, restored.data, restored.state["w"].tolist()
      (100, {'drawn': 100}, [0.0, 1.0, 2.0])
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        config: Mapping[str, Any] | None = None,
        keep_last: int = 1,
        keep_best: int = 0,
        better: str = "lower",
    ):
        if keep_last < 1 or keep_best < 0 or better not in ("lower", "higher"):
            raise ValueError(
                "Checkpoints: expected keep_last of at least 1, keep_best of at least "
                "0 and better of 'lower' or 'higher'; got "
                f"{keep_last}, {keep_best} and {better!r}."
            )
        self.folder = Path(folder).absolute()
        self._config = config
        self._kept = _LastAndBest(keep_last, keep_best, better == "lower")
        options = ocp.CheckpointManagerOptions(
            save_root_metadata=False,
            # In the background, a folder that cannot be made is known after minutes.
            async_options=ocp.options.AsyncOptions(
                create_directories_asynchronously=False
            ),
            # Without it orbax would not write the metric.
            best_fn=self._kept.rank,
            preservation_policy=self._kept,
        )
        # Named, so that one checkpoint can be read before another is written.
        registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
        for name, handler, args in (
            ("state", ocp.StandardCheckpointHandler, ocp.args.StandardSave),
            ("state", ocp.StandardCheckpointHandler, ocp.args.StandardRestore),
            ("manifest", ocp.JsonCheckpointHandler, ocp.args.JsonSave),
            ("manifest", ocp.JsonCheckpointHandler, ocp.args.JsonRestore),
        ):
            registry.add(name, args, handler())
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            # orbax can do this too, but trips over folders within those it deletes.
            if jax.process_index() == 0:
                for remains in self.folder.glob("*.orbax-checkpoint-tmp*"):
                    shutil.rmtree(remains, ignore_errors=True)
            self._manager = ocp.CheckpointManager(
                self.folder, options=options, handler_registry=registry
            )
        except Exception as e:
            raise CheckpointError(
                f"checkpoints: cannot use {self.folder}: {_reason(e)}."
            ) from e

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps there are checkpoints of, in rising order."""
        return tuple(sorted(self._manager.all_steps()))

    @property
    def latest(self) -> int | None:
        """The last of them, or None."""
        return self._manager.latest_step()

    @property
    def best(self) -> int | None:
        """The one with the best metric, or None if none was saved with one."""
        metrics = {step: self._manager.metrics(step) for step in self.steps}
        scored = [step for step in metrics if metrics[step]]
        return min(scored, key=lambda s: self._kept.rank(metrics[s]), default=None)

    def save(
        self, step: int, state: PyTree, *, data: Any = None, metric: float | None = None
    ) -> None:
        """Saves, in the background; returns when `state` may be donated.

        A step that is there already is left alone. In several processes all call it.

        Args:
          step: its number; each is larger than those before.
          state: a tree of arrays, such as a `TrainState`.
          data: `get_state()` of the data iterator.
          metric: decides which are the best. One that is not finite is like None.

        Raises:
          CheckpointError: if this or the save before cannot be written. Those that are
            complete stay usable.
          TypeError: for a leaf that is no array, or a state of the iterator that has no
            form in JSON.
        """
        table = leaf_table(state)
        manifest = {
            "leaves": table,
            "config": self._config,
            "data": encode(data),
            "jax": jax.__version__,
        }
        if step in self._manager.all_steps():
            return
        is_number = metric is not None and math.isfinite(metric)
        arrays = to_arrays(table, state)
        # The save before has its files, and those it replaces are gone.
        self.wait()
        try:
            _check_room(self.folder, arrays)
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(arrays),
                    manifest=ocp.args.JsonSave(manifest),
                ),
                # A dict even without a metric, for orbax warns of None.
                metrics={"metric": float(metric)} if is_number else {},
                force=True,
            )
        except Exception as e:
            raise self._not_written(e) from e

    def wait(self) -> None:
        """Returns when what was saved is on the disk.

        Raises:
          CheckpointError: if it cannot be written.
        """
        try:
            self._manager.wait_until_finished()
        except Exception as e:
            raise self._not_written(e) from e

    def restore(self, like: PyTree, step: int | None = None) -> Restored:
        """Reads a checkpoint into the form of `like`.

        Args:
          like: a state as it begins. It gives structure, dtypes, shapes and, where
            arrays have been placed, the devices. Its values are not used.
          step: which; None for the latest.

        Raises:
          CheckpointError: if there is none, it cannot be read, or it differs from
            `like` or from `config`: the first difference is named. Nothing is cast.
        """
        self.wait()
        step = self.latest if step is None else step
        if step is None or step not in self._manager.all_steps():
            which = "no checkpoint" if step is None else f"no checkpoint {step}"
            raise CheckpointError(f"checkpoints: there is {which} in {self.folder}.")
        where = f"checkpoint {step} in {self.folder}"
        manifest = self._read(where, step, manifest=ocp.args.JsonRestore())
        wanted = leaf_table(like)
        different = leaf_difference(manifest["leaves"], wanted)
        if different is None and self._config is not None:
            different = setting_difference(manifest["config"], self._config)
        if different is not None:
            raise CheckpointError(f"{where} does not fit: {different}.")
        targets = {
            name: target(leaf)
            for (name, *_), leaf in zip(wanted, jax.tree.leaves(like), strict=True)
            if leaf.size
        }
        arrays = self._read(where, step, state=ocp.args.StandardRestore(targets))
        leaves = [
            from_array(arrays.get(name), leaf)
            for (name, *_), leaf in zip(wanted, jax.tree.leaves(like), strict=True)
        ]
        state = jax.tree.unflatten(jax.tree.structure(like), leaves)
        return Restored(step, state, decode(manifest["data"]))

    def close(self) -> None:
        """Waits, and frees the threads. The same errors as of `wait`."""
        try:
            self.wait()
        finally:
            try:
                self._manager.close()
            except Exception as e:
                raise self._not_written(e) from e

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind, *_) -> None:
        # An error on its way tells more than that a save it interrupted failed.
        with contextlib.suppress(CheckpointError) if kind else contextlib.nullcontext():
            self.close()

    def _read(self, where: str, step: int, **item) -> Any:
        try:
            (read,) = self._manager.restore(
                step, args=ocp.args.Composite(**item)
            ).values()
        except Exception as e:
            raise CheckpointError(
                f"{where} cannot be read: {_reason(e)}. To go on from an earlier one, "
                f"delete {self.folder / str(step)}."
            ) from e
        return read

    def _not_written(self, error: Exception) -> CheckpointError:
        # orbax has counted what it meant to delete as gone; it may be there still.
        with contextlib.suppress(Exception):
            self._manager.reload()
        return CheckpointError(
            f"checkpoints: cannot write to {self.folder}: {_reason(error)}."
        )


@dataclass(frozen=True)
class _LastAndBest(PreservationPolicy):
    """Keeps the newest, and the best of those that were saved with a metric."""

    last: int
    best: int
    lower: bool

    def should_preserve(self, checkpoints, *, context) -> list[bool]:
        del context
        scored = [i for i, c in enumerate(checkpoints) if c.metrics]
        scored.sort(key=lambda i: self.rank(checkpoints[i].metrics))
        kept = {*range(len(checkpoints))[-self.last :], *scored[: self.best]}
        return [i in kept for i in range(len(checkpoints))]

    def rank(self, metrics: Mapping[str, float]) -> float:
        """Smaller is better."""
        return metrics["metric"] if self.lower else -metrics["metric"]


def _check_room(folder: Path, arrays: Mapping[str, Any]) -> None:
    """Raises OSError if the disk has no room for the arrays and what goes with them."""
    if jax.process_count() > 1:
        return  # all have to save, or none
    # Besides the numbers, orbax writes a dozen files and a record for each array.
    needed = sum(x.nbytes for x in arrays.values()) + 1_000 * len(arrays) + 100_000
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(
            errno.ENOSPC,
            f"{os.strerror(errno.ENOSPC)}: a checkpoint takes {needed:,} bytes, "
            f"{free:,} are free",
        )


def _reason(error: Exception) -> str:
    """The message of an error in one line, without a full stop."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else error
    if code := re.search(r"os_error_code='(\d+)'", str(text)):  # of tensorstore
        text = os.strerror(int(code[1]))
    return " ".join(str(text).split()).rstrip(".") or type(error).__name__
