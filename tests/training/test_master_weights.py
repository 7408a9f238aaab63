"""Weights, optimizer state and average are kept in fp32, and keep their types."""

import dataclasses
import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from opsnn_jax.training import Policy, TrainState, make_train_step
from tests.training.small_models import FP16, linear

OPTIMIZERS = [
    optax.adam(1e-3),
    optax.adamw(np.float64(1e-3)),
    optax.adam(jnp.float32(1e-3)),
    optax.amsgrad(1e-3),
    optax.adabelief(1e-3),
    optax.nadam(1e-3),
    optax.rmsprop(1e-3),
    optax.adafactor(1e-3),
    optax.lion(1e-3),
    optax.lamb(1e-3),
    optax.yogi(1e-3),
    optax.radam(1e-3),
    optax.adagrad(1e-3),
    optax.contrib.muon(1e-3),
    optax.sgd(1e-3, momentum=0.9, nesterov=True),
    # Mixes an int32 count and a float in `init` already.
    optax.inject_hyperparams(optax.adam)(optax.cosine_decay_schedule(1e-3, 9)),
    optax.MultiSteps(optax.sgd(1e-3), 1).gradient_transformation(),
    optax.chain(optax.clip(1.0), optax.scale_by_adam(), optax.scale(-1e-3)),
    optax.noisy_sgd(1e-3, key=jax.random.key(0)),
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_any_optimizer_keeps_its_state_in_fp32_and_its_types(
    key, optimizer, quick_compilation
):
    # optax#1754: NaN on zero gradients, moments in half, changing dtypes.
    loss_fn = functools.partial(_two_layers, FP16)
    params = {
        "used": jax.random.normal(key, (4, 4)),
        "dead": jnp.ones((4, 4)),
        "n": jnp.int32(3),
        "frozen": None,
        "key": jax.random.key(1),
    }
    state = TrainState.create(params, optimizer, policy=FP16)
    step = make_train_step(loss_fn, optimizer, policy=FP16, donate=False)
    new, metrics = step(state, {"x": jnp.ones((2, 4))})
    assert not metrics["skipped"]
    chex.assert_trees_all_equal_shapes_and_dtypes(new, state)
    for leaf in jax.tree.leaves(new.opt_state):
        assert leaf.dtype not in (jnp.float16, jnp.bfloat16)
    assert float(jnp.abs(new.params["used"] - state.params["used"]).max()) > 0
    assert int(new.params["n"]) == 3 and new.params["frozen"] is None


def types(state):
    return [(x.shape, x.dtype, x.weak_type) for x in jax.tree.leaves(state)]


def before_and_after(optimizer, dtype):
    """The types of a state and of the next one, which nothing is computed for."""
    policy = Policy(params=dtype, compute=dtype)

    def begin():
        params = {"used": jnp.ones((4, 4)), "dead": jnp.ones((4, 4)), "none": None}
        return TrainState.create(params, optimizer, policy=policy)

    step = make_train_step(
        functools.partial(_two_layers, policy), optimizer, policy=policy, donate=False
    )
    state = jax.eval_shape(begin)
    new, _ = jax.eval_shape(step, state, {"x": jnp.ones((2, 4))})
    return types(state), types(new)


def test_x64_changes_no_type_of_any_optimizer():
    # optax#1207: a state whose types change has a scan fail and a step traced anew.
    for optimizer in OPTIMIZERS:
        with jax.enable_x64(True):
            before, after = before_and_after(optimizer, "float32")
        assert after == before


RATES = [
    1e-3,
    np.float32(1e-3),
    np.float64(1e-3),
    jnp.float32(1e-3),
    jnp.asarray(1e-3, "bfloat16"),
    np.asarray(1e-3, "bfloat16"),
]


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_state_keeps_its_types_whatever_type_the_rate_has(dtype, x64):
    # optax#1405: with a rate that is no Python number, updates take its dtype; here
    # traces do as well, where momentum comes after the rate.
    makes = [
        optax.adam,
        functools.partial(optax.sgd, momentum=0.9),
        functools.partial(optax.rmsprop, momentum=0.9),
        optax.lars,
    ]
    for make, rate in itertools.product(makes, RATES):
        with jax.enable_x64(x64):
            before, after = before_and_after(make(rate), dtype)
        assert after == before


def _two_layers(policy, params, model_state, batch, rng):
    y = policy.cast_to_compute(batch["x"]) @ policy.cast_to_compute(params["used"])
    y = y * 0 @ policy.cast_to_compute(params["dead"]) * 0 + y
    return policy.cast_to_output(y).mean(), (model_state, {})


def test_master_weights_take_updates_that_half_precision_loses():
    # 256 in bf16 with updates of 0.5 stays 256 for ever; the master reaches 206.
    policy = Policy.parse("mixed_bfloat16")

    def loss_fn(params, model_state, batch, rng):
        loss = 0.5 * policy.cast_to_output(policy.cast_to_compute(params["w"]))
        return loss, (model_state, {})

    optimizer = optax.sgd(1.0)
    state = TrainState.create({"w": jnp.float32(256.0)}, optimizer, policy=policy)
    step = make_train_step(loss_fn, optimizer, policy=policy)
    for _ in range(100):
        state, _ = step(state, {})
    assert float(state.params["w"]) == 206.0


@pytest.mark.parametrize(
    "optimizer, start, grad, steps, end",
    [
        # The second moment of a gradient of 10: bf16 stops at 32.
        (optax.scale_by_adam(), 0.0, 10.0, 2000, 100 * (1 - 0.999**2000)),
        # Decay of 1e-5 a step, which bf16 loses.
        (optax.adamw(1e-3, weight_decay=0.01), 100.0, 0.0, 1000, 99.005),
    ],
)
def test_moments_and_decay_take_what_half_precision_loses(
    optimizer, start, grad, steps, end
):
    # optax#1552: moments follow half parameters, and b2 = 0.999 is 1 in bf16.
    policy = Policy.parse("mixed_bfloat16")
    state = TrainState.create({"w": jnp.float32(start)}, optimizer, policy=policy)

    def loss_fn(params, model_state, batch, rng):
        loss = grad * policy.cast_to_output(policy.cast_to_compute(params["w"]))
        return loss, (model_state, {})

    step = make_train_step(loss_fn, optimizer, policy=policy, donate=False)
    after = jax.jit(
        lambda s: jax.lax.fori_loop(0, steps, lambda _, s: step(s, {})[0], s)
    )(state)
    found = after.params["w"] if start else after.opt_state.nu["w"]
    assert float(found) == pytest.approx(end, rel=1e-4)


def test_ema_is_kept_in_fp32():
    # In bf16 an average with decay 0.999 never moves from 0 to 0.95.
    policy = Policy.parse("mixed_bfloat16")
    optimizer = optax.sgd(0.0)
    state = TrainState.create(
        {"w": jnp.float32(0.0)}, optimizer, policy=policy, ema=True
    )
    state = dataclasses.replace(state, params={"w": jnp.float32(1.0)})
    step = make_train_step(linear, optimizer, policy=policy, ema_decay=0.999)
    batch = {"g": jnp.asarray(1.0, jnp.float32)}
    for _ in range(3000):
        state, _ = step(state, batch)
    assert float(state.ema["w"]) == pytest.approx(1 - 0.999**3000, rel=1e-4)
    assert float(state.eval_params["w"]) == float(state.ema["w"])
