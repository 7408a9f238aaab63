"""What the train step refuses, each in a sentence."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from opsnn_jax.training import TrainState, make_train_step
from tests.training.small_models import FP32, linear


@pytest.mark.parametrize(
    "option",
    [{"clip_norm": -1.0}, {"clip_norm": 0.0}, {"clip_norm": np.nan}]
    + [{"ema_decay": 1.0}, {"ema_decay": -0.1}, {"micro_batches": 0}],
)
def test_option_out_of_its_range_is_refused(option):
    # A bound of -1 would turn the gradient round.
    with pytest.raises(ValueError, match=f"make_train_step: {[*option][0]} must be"):
        make_train_step(linear, optax.sgd(1.0), policy=FP32, **option)


@pytest.mark.parametrize(
    "params, make, error",
    [
        ({"w": jnp.ones(2, jnp.float16)}, {}, "parameter 'w' must be float32"),
        ({"w": jnp.ones(2)}, {"ema_decay": 0.9}, "ema_decay goes with"),
    ],
)
def test_state_that_does_not_fit_the_step_is_refused(params, make, error):
    optimizer = optax.sgd(1.0)
    state = TrainState.create({"w": jnp.ones(2)}, optimizer, policy=FP32)
    state = dataclasses.replace(state, params=params)
    step = make_train_step(linear, optimizer, policy=FP32, **make)
    with pytest.raises((TypeError, ValueError), match=error):
        step(state, {"g": jnp.ones(2)})


def test_model_state_that_changes_its_dtype_is_refused():
    def loss_fn(params, model_state, batch, rng):
        return params["w"], (model_state.astype(jnp.bfloat16), {})

    optimizer = optax.sgd(1.0)
    state = TrainState.create(
        {"w": jnp.float32(1.0)}, optimizer, policy=FP32, model_state=jnp.ones(2)
    )
    step = make_train_step(loss_fn, optimizer, policy=FP32)
    with pytest.raises(TypeError, match=r"must stay float32\[2\]"):
        step(state, {})


def test_model_state_that_loses_a_leaf_is_refused_by_its_name():
    def loss_fn(params, model_state, batch, rng):
        return params["w"], ({"var": model_state["var"]}, {})

    optimizer = optax.sgd(1.0)
    stats = {"mean": jnp.ones(2), "var": jnp.ones(2)}
    state = TrainState.create(
        {"w": jnp.float32(1.0)}, optimizer, policy=FP32, model_state=stats
    )
    step = make_train_step(loss_fn, optimizer, policy=FP32)
    with pytest.raises(TypeError, match="it lost mean"):
        step(state, {})


def test_metric_with_a_name_of_the_step_is_refused():
    def loss_fn(params, model_state, batch, rng):
        return params["w"], (model_state, {"skipped": jnp.float32(1.0)})

    optimizer = optax.sgd(1.0)
    state = TrainState.create({"w": jnp.float32(1.0)}, optimizer, policy=FP32)
    step = make_train_step(loss_fn, optimizer, policy=FP32)
    with pytest.raises(ValueError, match="metric named 'skipped'"):
        step(state, {})


def test_complex_parameters_are_refused():
    with pytest.raises(TypeError, match="parameters must be real"):
        TrainState.create({"w": jnp.ones(2, "complex64")}, optax.sgd(1.0), policy=FP32)
