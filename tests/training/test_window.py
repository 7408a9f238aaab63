"""Windows: micro-batches, what they count, their sums, and what is refused."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from opsnn_jax.training import Policy, TrainState, make_train_step
from tests.training.small_models import FP32, linear, written


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_micro_batches_are_summed_in_fp32(dtype):
    # 4096 ones in bf16 sum to 256; a mean of 1000 of 1.0 and 1.5 must be 1.25.
    optimizer = optax.sgd(1.0)
    state = TrainState.create({"w": jnp.float32(0.0)}, optimizer, policy=FP32)

    def loss_fn(params, model_state, batch, rng):
        loss = params["w"].astype(dtype) * batch["g"].mean().astype(dtype)
        return loss, (model_state, {})

    step = make_train_step(loss_fn, optimizer, policy=FP32, micro_batches=1000)
    state, metrics = step(state, {"g": jnp.tile(jnp.asarray([1.0, 1.5]), 500)})
    assert float(state.params["w"]) == -1.25


def masked(params, model_state, batch, rng):
    """Mean over the rows that count; guarded, for a micro-batch may have none."""
    count = batch["mask"].sum()
    rows = batch["mask"] * jnp.square(batch["x"] @ params["w"] - 1.0)
    return rows.sum() / jnp.maximum(count, 1.0), (model_state, {"count": count})


@pytest.mark.parametrize("micro_batches, rows", [(4, 13), (2, 13), (8, 13), (4, 1)])
def test_ragged_micro_batches_equal_one_batch(key, micro_batches, rows):
    # transformers#34191: the mean of means is not the mean over the tokens.
    x = jax.random.normal(key, (16, 3))
    mask = (jnp.arange(16) < rows).astype(jnp.float32)
    batch = {"x": x.at[rows:].set(jnp.nan), "mask": mask}
    batch["x"] = jnp.where(mask[:, None] > 0, batch["x"], 1e3)
    optimizer = optax.sgd(0.1)
    state = TrainState.create({"w": jnp.ones(3)}, optimizer, policy=FP32)
    make = functools.partial(
        make_train_step, masked, optimizer, policy=FP32, donate=False
    )
    step = make(micro_batches=micro_batches, weight_fn=lambda b: b["mask"].sum())
    several, m_several = step(state, batch)
    one, m_one = make()(state, {"x": x[:rows], "mask": mask[:rows]})
    chex.assert_trees_all_close(several.params, one.params, rtol=1e-6)
    chex.assert_trees_all_close(m_several["loss"], m_one["loss"], rtol=1e-6)


def test_micro_batch_that_counts_nothing_leaves_no_trace():
    optimizer = optax.sgd(1.0)
    state = TrainState.create(
        {"w": jnp.float32(1.0)}, optimizer, policy=FP32, model_state=jnp.float32(5.0)
    )

    def loss_fn(params, model_state, batch, rng):
        loss = (params["w"] * batch["g"]).mean()
        return loss, (model_state * batch["g"].mean(), {"g": batch["g"].mean()})

    step = make_train_step(
        loss_fn,
        optimizer,
        policy=FP32,
        micro_batches=2,
        weight_fn=lambda b: b["count"].sum(),
        donate=False,
    )
    batch = {"g": jnp.asarray([2.0, jnp.nan]), "count": jnp.asarray([1, 0])}
    new, metrics = step(state, batch)
    assert not metrics["skipped"]
    assert float(new.params["w"]) == -1.0
    assert float(new.model_state) == 10.0
    assert float(metrics["g"]) == 2.0
    new, metrics = step(state, batch | {"count": jnp.asarray([0, 0])})
    assert float(new.params["w"]) == 1.0 and float(metrics["loss"]) == 0.0


def test_weight_that_is_nan_is_a_skip_and_a_negative_one_counts_nothing():
    optimizer = optax.sgd(1.0)
    state = TrainState.create({"w": jnp.float32(1.0)}, optimizer, policy=FP32)
    step = make_train_step(
        linear,
        optimizer,
        policy=FP32,
        micro_batches=2,
        weight_fn=lambda b: b["count"].sum(),
        donate=False,
    )
    batch = {"g": jnp.asarray([2.0, 3.0]), "count": jnp.asarray([1.0, jnp.nan])}
    _, metrics = step(state, batch)
    assert metrics["skipped"]
    new, _ = step(state, batch | {"count": jnp.asarray([1.0, -1.0])})
    assert float(new.params["w"]) == -1.0


@pytest.mark.parametrize("where", [0, 1, 2])
def test_overflow_in_one_micro_batch_skips_the_window_and_leaves_nothing(where):
    # Paddle#67895: an accumulator keeps the inf, and no window is clean again.
    optimizer = optax.adam(0.1)
    state = TrainState.create({"w": jnp.float32(1.0)}, optimizer, policy=FP32)
    step = make_train_step(
        linear, optimizer, policy=FP32, micro_batches=3, donate=False
    )
    good = {"g": jnp.ones(3)}
    bad = {"g": jnp.ones(3).at[where].set(jnp.inf)}
    once, _ = step(state, good)
    skipped, metrics = step(state, bad)
    assert metrics["skipped"]
    again, _ = step(skipped, good)
    chex.assert_trees_all_equal(written(again), written(once))


@pytest.mark.parametrize("g", [jnp.ones(6), jnp.float32(1.0)])
def test_batch_that_does_not_divide_is_refused(g):
    optimizer = optax.sgd(1.0)
    state = TrainState.create({"w": jnp.float32(1.0)}, optimizer, policy=FP32)
    step = make_train_step(linear, optimizer, policy=FP32, micro_batches=4)
    with pytest.raises(ValueError, match=r"'g' must divide by micro_batches=4"):
        step(state, {"g": g})


@pytest.mark.parametrize(
    "returned",
    [
        lambda w: w,
        lambda w: (w, ()),
        lambda w: (w, ((), None)),
        lambda w: (w[None], ((), {})),
    ],
)
def test_loss_function_of_another_form_is_refused(returned):
    optimizer = optax.sgd(1.0)
    state = TrainState.create({"w": jnp.float32(1.0)}, optimizer, policy=FP32)
    step = make_train_step(lambda p, *_: returned(p["w"]), optimizer, policy=FP32)
    with pytest.raises(TypeError, match=r"must return \(loss, \(model_state, metrics"):
        step(state, {})


def test_weight_that_is_no_scalar_is_refused():
    optimizer = optax.sgd(1.0)
    state = TrainState.create({"w": jnp.float32(1.0)}, optimizer, policy=FP32)
    step = make_train_step(
        linear, optimizer, policy=FP32, weight_fn=lambda batch: batch["g"]
    )
    with pytest.raises(ValueError, match="weight_fn must return a scalar"):
        step(state, {"g": jnp.ones(2)})


def test_dropout_differs_from_step_to_step_and_repeats_with_the_seed(key):
    def loss_fn(params, model_state, batch, rng):
        draw = jax.random.uniform(rng)
        return params["w"] * 0.0, (model_state, {"draw": draw})

    optimizer = optax.sgd(1.0)
    step = make_train_step(loss_fn, optimizer, policy=FP32, donate=False)
    state = TrainState.create({"w": jnp.float32(1.0)}, optimizer, policy=FP32, rng=3)
    draws = []
    for _ in range(3):
        state, metrics = step(state, {})
        draws.append(float(metrics["draw"]))
    assert len(set(draws)) == 3
    again = TrainState.create(
        {"w": jnp.float32(1.0)}, optimizer, policy=FP32, rng=np.int64(3)
    )
    assert float(step(again, {})[1]["draw"]) == draws[0]


@pytest.mark.parametrize(
    "dtype, total", [("float32", 4096.0), ("bfloat16", 256.0), ("float16", 2048.0)]
)
def test_accumulator_has_the_dtype_of_the_policy(dtype, total):
    # What each sum comes to is the proof of the dtype it was kept in.
    policy = Policy(accumulate=dtype)
    optimizer = optax.sgd(1.0)
    state = TrainState.create({"w": jnp.float32(0.0)}, optimizer, policy=policy)

    def loss_fn(params, model_state, batch, rng):
        return 4096.0 * params["w"] * batch["g"].mean(), (model_state, {})

    step = make_train_step(loss_fn, optimizer, policy=policy, micro_batches=4096)
    # 4096 * 4096 ones, of which each window's mean is one 4096th.
    batch = {"g": jnp.full(4096, 1 / 4096)}
    state, metrics = step(state, batch)
    assert float(state.params["w"]) == -total / 4096
    assert state.params["w"].dtype == jnp.float32
    # What is reported is not summed with the gradients.
    assert metrics["loss"].dtype == jnp.float32
