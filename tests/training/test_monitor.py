"""Monitors: what they measure, when, and that the host need not wait for them."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from opsnn_jax.training import Policy, TrainState, make_train_step
from opsnn_jax.training.monitor import Monitor, condition_number
from tests import draws
from tests.compilation import AS_USERS_DO

FP32 = Policy.parse("float32")


def matrix(key, rows, columns, singular):
    """With these singular values."""
    left, right = jax.random.split(key)
    u = jnp.linalg.qr(jax.random.normal(left, (rows, len(singular))))[0]
    v = jnp.linalg.qr(jax.random.normal(right, (columns, len(singular))))[0]
    return (u * jnp.asarray(singular)[None]) @ v.T


@pytest.mark.parametrize("shape", [(12, 5), (5, 12), (6, 6)])
@pytest.mark.parametrize("true", [1.0, 30.0, 1e4])
def test_condition_number_is_that_of_numpy(key, shape, true):
    w = matrix(key, *shape, np.geomspace(true, 1.0, min(shape)))
    estimate = float(jax.jit(condition_number)(w))
    exact = np.linalg.cond(np.asarray(w, np.float64))
    # From below, but for rounding, which grows with the condition.
    assert 0.95 * exact < estimate < exact * (1 + 1e-6 * exact + 1e-5)


@pytest.mark.parametrize("factor", [1e-30, 1e30])
def test_condition_number_does_not_depend_on_the_size(key, factor):
    w = matrix(key, 6, 4, [8.0, 4.0, 2.0, 1.0])
    np.testing.assert_allclose(
        condition_number(w * factor), condition_number(w), rtol=1e-4
    )


def test_condition_number_of_what_is_singular_or_a_convolution(key):
    assert condition_number(jnp.zeros((3, 3))) == jnp.inf
    assert condition_number(jnp.ones((4, 2))) > 1e6
    kernel = matrix(key, 27, 8, np.geomspace(9.0, 1.0, 8)).reshape(3, 3, 3, 8)
    assert float(condition_number(kernel)) == pytest.approx(9.0, rel=0.05)


def loss_fn(params, model_state, batch, rng):
    used = (params["w"] * batch["g"]).sum() + (params["zero"] * batch["g"][0]).sum()
    return used, (model_state, {})


PARAMS = {"w": jnp.full((2, 3), 2.0), "n": jnp.int32(1), "zero": jnp.zeros(3)}


def run(monitor, batches, **options):
    optimizer = optax.sgd(0.5)
    state = TrainState.create(PARAMS, optimizer, policy=FP32)
    step = make_train_step(loss_fn, optimizer, policy=FP32, monitor=monitor, **options)
    measured = []
    for batch in batches:
        state, metrics = step(state, {"g": batch})
        measured.append(jax.device_get(metrics["monitor"]))
    assert step._cache_size() == 1
    return measured


def test_measures_are_those_of_each_parameter():
    monitor = Monitor(every=2, condition=("w",))
    assert monitor.layers(PARAMS) == ("w", "zero")
    assert monitor.weights(PARAMS) == ("w",)
    g = jnp.asarray([[1.0, -3.0, 0.0], [0.0, 0.0, 2.0]])
    first, second, third = run(monitor, [g] * 3, clip_norm=1.0)
    assert [bool(m["measured"]) for m in (first, second, third)] == [True, False, True]
    np.testing.assert_array_equal(first["grad_min"], [-3.0, -3.0])
    np.testing.assert_array_equal(first["grad_max"], [2.0, 1.0])
    np.testing.assert_allclose(first["grad_norm"], [14**0.5, 10**0.5])  # not clipped
    np.testing.assert_allclose(first["zero_share"], [0.5, 1 / 3])
    np.testing.assert_array_equal(first["nonfinite"], [0, 0])
    # The update is clipped to norm 1 over both, times the rate; `zero` had no size.
    share = (14 / 24) ** 0.5
    np.testing.assert_allclose(
        first["update_ratio"], [0.5 * share / 24**0.5, 0.0], rtol=1e-6
    )
    assert first["condition"].shape == (1,) and first["condition"][0] > 1e6
    assert not any(second[name].any() for name in second)
    assert third["update_ratio"][1] > 0


@pytest.mark.optimized
def test_measuring_changes_no_bit(key):
    def loss_fn(params, mean, batch, rng):
        hidden = jnp.tanh(batch @ params["w"])
        y = hidden @ params["v"]
        return jnp.square(y - 1.0).mean(), (0.9 * mean + 0.1 * hidden.mean(0), {})

    keys = jax.random.split(key, 3)
    params = {
        "w": draws.normal(keys[0], (7, 33)),
        "v": draws.normal(keys[1], (33, 3)),
    }
    batch = draws.normal(keys[2], (12, 7))
    optimizer = optax.adamw(1e-2)
    ends = []
    for monitor in (None, Monitor(every=2, condition=("w", "v")), Monitor(every=1)):
        state = TrainState.create(
            params, optimizer, policy=FP32, model_state=jnp.zeros(33), ema=True
        )
        step = make_train_step(
            loss_fn,
            optimizer,
            policy=FP32,
            clip_norm=0.1,
            micro_batches=3,
            ema_decay=0.9,
            monitor=monitor,
        )
        step = step.lower(state, batch).compile(AS_USERS_DO)
        for _ in range(8):
            state, _ = step(state, batch)
        ends.append(dataclasses.replace(state, rng=None))
    chex.assert_trees_all_equal(ends[1], ends[0])
    chex.assert_trees_all_equal(ends[2], ends[0])


def test_skipped_step_shows_what_was_not_finite():
    g = jnp.asarray([[1.0, jnp.inf, 0.0], [jnp.nan, 0.0, 2.0]])
    (only,) = run(Monitor(), [g])
    np.testing.assert_array_equal(only["nonfinite"], [2, 1])
    np.testing.assert_array_equal(only["grad_max"], [2.0, 1.0])
    np.testing.assert_array_equal(only["update_ratio"], [0.0, 0.0])
    assert only["condition"].shape == (0,)


def test_step_calls_nothing_on_the_host():
    optimizer = optax.sgd(0.5)
    state = TrainState.create(PARAMS, optimizer, policy=FP32)
    monitor = Monitor(every=1, condition=("w",))
    step = make_train_step(loss_fn, optimizer, policy=FP32, monitor=monitor)
    program = str(jax.make_jaxpr(step)(state, {"g": jnp.ones((2, 3))}))
    assert "cond" in program and "callback" not in program


@pytest.mark.parametrize(
    "options, says",
    [
        ({"every": 0}, "every and iterations must be at least 1"),
        ({"condition": ("(",)}, "condition must hold regular expressions"),
        ({"condition": ("zero",)}, "'zero' matches no weight; those are w"),
    ],
)
def test_bad_option_is_refused(options, says):
    with pytest.raises(ValueError, match=says):
        Monitor(**options).weights(PARAMS)
