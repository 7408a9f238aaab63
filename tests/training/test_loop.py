"""The loop: what it takes for batches, when it reports, saves and stops."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from opsnn_jax.training.checkpoint import Checkpoints
from opsnn_jax.training.data import BatchStream, DataError, Prefetch, resumable
from opsnn_jax.training.loop import fit, resume


@pytest.fixture(scope="module")
def step():
    """Adds the batch to a number; sees the steps as `make_train_step`'s would."""

    @jax.jit
    def step(state, batch):
        attempted = state.attempted_steps + 1
        new = types.SimpleNamespace(
            total=state.total + batch, attempted_steps=attempted
        )
        metrics = {"loss": batch, "consecutive_skips": 0, "attempted_steps": attempted}
        return new, metrics

    def keys(state):
        return tuple(vars(state).items())

    jax.tree_util.register_pytree_with_keys(
        types.SimpleNamespace,
        lambda s: (
            [(jax.tree_util.GetAttrKey(k), v) for k, v in keys(s)],
            tuple(k for k, _ in keys(s)),
        ),
        lambda names, values: types.SimpleNamespace(
            **dict(zip(names, values, strict=True))
        ),
    )
    return step


def start():
    return types.SimpleNamespace(total=jnp.float32(0.0), attempted_steps=jnp.int32(0))


def numbers(count):
    return [np.float32(i) for i in range(count)]


class Grain:
    """As grain's iterators are: the state is theirs, and may be bytes."""

    def __init__(self, count):
        self.rest = numbers(count)

    def __iter__(self):
        return self

    def __next__(self):
        if not self.rest:
            raise StopIteration
        return self.rest.pop(0)

    def get_state(self):
        return bytes([len(self.rest)])

    def set_state(self, state):
        self.rest = numbers(20)[20 - state[0] :]


SOURCES = {
    "list": lambda: numbers(20),
    "generator": lambda: (x for x in numbers(20)),
    "stream": lambda: BatchStream(np.float32),
    "grain": lambda: Grain(20),
}


@pytest.mark.parametrize("source", SOURCES)
def test_any_batches_go_on_where_they_were(tmp_path, step, source):
    make = SOURCES[source]
    for steps in (3, 7, 12):
        with Checkpoints(tmp_path) as checkpoints:
            state, batches = resume(checkpoints, start(), make())
            fitted = fit(step, state, batches, steps=steps, checkpoints=checkpoints)
        assert float(fitted.state.total) == sum(range(steps))


def test_loop_ends_where_the_batches_end(step):
    seen = []
    fitted = fit(step, start(), numbers(5), steps=9, on_report=seen.append)
    assert float(fitted.state.total) == 10.0 and fitted.stopped is None
    assert [float(m["loss"]) for m in seen[0]] == [0, 1, 2, 3, 4]


def test_fewer_batches_than_before_are_an_error(tmp_path, step):
    with Checkpoints(tmp_path) as checkpoints:
        fit(step, start(), numbers(5), steps=5, checkpoints=checkpoints)
        with pytest.raises(DataError, match="5 batches were drawn .* only 3"):
            resume(checkpoints, start(), numbers(3))


def test_reports_come_before_saves_and_every_step_once(tmp_path, step):
    events = []
    with Checkpoints(tmp_path, keep_last=9) as checkpoints:
        save = checkpoints.save

        def noted(step, state, **options):
            events.append(("save", step, options["metric"], options["data"]))
            save(step, state, **options)

        checkpoints.save = noted
        fit(
            step,
            start(),
            numbers(20),
            steps=7,
            report_every=2,
            on_report=lambda rows: events.extend(float(r["loss"]) for r in rows),
            checkpoints=checkpoints,
            save_every=3,
        )
        assert checkpoints.steps == (3, 6, 7)
    assert [e for e in events if not isinstance(e, tuple)] == [0, 1, 2, 3, 4, 5, 6]
    saves = [e for e in events if isinstance(e, tuple)]
    # The metric is the mean loss since the last save; the data is past 2 batches more
    # that wait on the device, yet says how many were used.
    assert saves[0] == ("save", 3, 1.0, {"drawn": 3})
    assert saves[1] == ("save", 6, 4.0, {"drawn": 6})
    assert saves[2] == ("save", 7, 6.0, {"drawn": 7})
    assert events.index(saves[0]) == 3


def test_stop_ends_the_loop_and_saves(tmp_path, step):
    asked = iter([None, None, "SIGTERM"])
    with Checkpoints(tmp_path) as checkpoints:
        fitted = fit(
            step,
            start(),
            numbers(20),
            steps=9,
            checkpoints=checkpoints,
            stop=lambda: next(asked),
        )
        assert fitted.stopped == "SIGTERM" and checkpoints.latest == 3
    with pytest.raises(ValueError, match="save_every needs checkpoints"):
        fit(step, start(), numbers(1), steps=1, save_every=1)


def test_place_puts_batches_on_devices(step):
    placed = []

    def place(batch):
        placed.append(batch)
        return jax.device_put(batch)

    fit(step, start(), numbers(4), steps=4, place=place)
    assert len(placed) == 4


def test_prefetch_hands_out_the_last_batches_too():
    source = resumable(numbers(5))
    batches = Prefetch(source, ahead=3)
    assert [float(x) for x in batches] == [0, 1, 2, 3, 4]
    batches.set_state({"drawn": 3})
    assert float(next(batches)) == 3.0
    assert batches.get_state() == {"drawn": 4}
