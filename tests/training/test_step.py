"""The train step: order, whole-state skip, exactness, any kind of tree."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from opsnn_jax.training import (
    DynamicLossScale,
    NoLossScale,
    Policy,
    StaticLossScale,
    TrainState,
    make_train_step,
    nonfinite_paths,
)
from tests.training.small_models import FP16, FP32, cnn, linear, mlp, written


def test_fp16_overflow_leaves_everything_bitwise_unchanged(key):
    # pytorch#88474: others put back the parameters, yet not batch statistics.
    loss_fn, params, stats, batch = cnn(FP16, key)
    optimizer = optax.adamw(1e-3)
    make = {"policy": FP16, "loss_scale": DynamicLossScale(initial=2.0**10)}
    state = TrainState.create(params, optimizer, model_state=stats, ema=True, **make)
    step = make_train_step(loss_fn, optimizer, ema_decay=0.9, donate=False, **make)
    before, metrics = step(state, batch)
    assert not metrics["skipped"]

    after, metrics = step(before, batch | {"image": batch["image"] * 1e6})
    chex.assert_trees_all_equal(written(after), written(before))
    assert metrics["skipped"]
    assert float(after.loss_scale.scale) == 2.0**9
    assert (int(after.step), int(after.attempted_steps)) == (1, 2)
    assert int(after.loss_scale.total_skips) == 1

    after, metrics = step(after, batch)
    assert not metrics["skipped"]
    straight, _ = step(before, batch)  # the run that never saw the bad batch
    chex.assert_trees_all_equal(written(after), written(straight))


@pytest.mark.parametrize(
    "policy, bad",
    [("float32", jnp.nan), ("mixed_bfloat16", jnp.inf), ("mixed_float16", -jnp.inf)],
)
def test_bad_batches_are_as_if_never_seen(key, bad, policy):
    # DeepSpeed#4512: an inf in bf16 or fp32 kills moments and weights as well.
    policy = Policy.parse(policy)
    loss_fn, params, stats, batch = mlp(policy, key)
    optimizer = optax.adam(1e-2)
    scale = StaticLossScale(1.0)
    state = TrainState.create(
        params, optimizer, policy=policy, loss_scale=scale, model_state=stats
    )
    step = make_train_step(
        loss_fn, optimizer, policy=policy, loss_scale=scale, donate=False
    )
    poisoned = batch | {"x": batch["x"].at[1, 2].set(bad)}
    clean, faulty = state, state
    for i in range(6):
        clean, _ = step(clean, batch)
        for _ in range(i % 3):
            faulty, metrics = step(faulty, poisoned)
            assert metrics["skipped"]
        faulty, _ = step(faulty, batch)
    chex.assert_trees_all_equal(written(faulty), written(clean))
    chex.assert_tree_all_finite(written(faulty))
    assert int(faulty.loss_scale.total_skips) == 6


@pytest.mark.parametrize("clip_norm, micro_batches", [(None, 1), (0.3, 2)])
def test_any_power_of_two_schedule_leaves_fp32_bitwise_unchanged(
    key, clip_norm, micro_batches
):
    loss_fn, params, stats, batch = mlp(FP32, key)
    optimizer = optax.adam(1e-2)
    scale = DynamicLossScale(initial=1.0, min=2.0**-20, growth_interval=3)
    first = TrainState.create(
        params, optimizer, policy=FP32, loss_scale=scale, model_state=stats
    )
    step = make_train_step(
        loss_fn,
        optimizer,
        policy=FP32,
        loss_scale=scale,
        clip_norm=clip_norm,
        micro_batches=micro_batches,
        donate=False,
    )
    rng = np.random.default_rng(0)
    schedules = {
        "none": [1.0] * 100,
        "any": [2.0**k for k in rng.integers(-20, 40, 100)],
        "its own": [None] * 100,
    }
    ends = {}
    for name, scales in schedules.items():
        state = first
        for given in scales:
            if given is not None:
                loss_scale = dataclasses.replace(
                    state.loss_scale, scale=jnp.asarray(given, jnp.float32)
                )
                state = dataclasses.replace(state, loss_scale=loss_scale)
            state, metrics = step(state, batch)
        assert int(state.step) == 100
        ends[name] = written(state), metrics["loss"], metrics["grad_norm"]
    assert float(state.loss_scale.scale) == 2.0**24  # it did grow
    chex.assert_trees_all_equal(ends["any"], ends["none"])
    chex.assert_trees_all_equal(ends["its own"], ends["none"])


def test_reports_the_unscaled_loss_whatever_the_scale():
    # Recovered as scaled/scale it would be inf.
    scale = StaticLossScale(2.0**126)
    optimizer = optax.sgd(0.0)
    state = TrainState.create(
        {"w": jnp.float32(2.0)}, optimizer, policy=FP32, loss_scale=scale
    )
    step = make_train_step(linear, optimizer, policy=FP32, loss_scale=scale)
    _, metrics = step(state, {"g": jnp.float32(4.0)})
    assert float(metrics["loss"]) == 8.0
    assert metrics["loss"].dtype == jnp.float32


def test_fp16_loss_is_reported_and_overflow_judged_on_gradients():
    # fp16 weights; the loss times the scale would be inf in fp16.
    policy = Policy.parse("params=float16,compute=float16,output=float16")

    def loss_fn(params, model_state, batch, rng):
        return (params["w"] * params["w"]).sum(), (model_state, {})

    optimizer = optax.sgd(0.0)
    state = TrainState.create({"w": jnp.ones(3)}, optimizer, policy=policy)
    step = make_train_step(loss_fn, optimizer, policy=policy, donate=False)
    state, metrics = step(state, {})
    assert float(metrics["loss"]) == 3.0
    assert metrics["skipped"]  # 2 * 2**15 exceeds fp16: the scale is too high
    state, metrics = step(state, {})
    assert float(metrics["loss"]) == 3.0
    assert not metrics["skipped"]
    assert float(metrics["grad_norm"]) == pytest.approx(2 * 3**0.5, rel=1e-6)


def test_gradient_that_only_overflows_unscaled_is_caught():
    # pytorch#99640: a scale below one makes a finite gradient infinite.
    scale = StaticLossScale(2.0**-100)
    optimizer = optax.sgd(1.0)
    state = TrainState.create(
        {"w": jnp.float32(0.0)}, optimizer, policy=FP32, loss_scale=scale
    )
    step = make_train_step(linear, optimizer, policy=FP32, loss_scale=scale)
    state, metrics = step(state, {"g": jnp.float32(3e38)})
    assert not metrics["skipped"]

    def steep(params, model_state, batch, rng):
        return (params["w"] * 1e30) * 1e30, (model_state, {})

    step = make_train_step(steep, optimizer, policy=FP32, loss_scale=scale)
    _, metrics = step(state, {})
    assert metrics["skipped"]


def test_norm_beyond_fp32_is_a_skip_and_not_a_zero_update():
    # Clipping by an infinite norm silently trains nothing.
    def loss_fn(params, model_state, batch, rng):
        return (batch["g"] * params["w"]).sum(), (model_state, {})

    optimizer = optax.sgd(1.0)
    state = TrainState.create({"w": jnp.zeros(1000)}, optimizer, policy=FP32)
    step = make_train_step(loss_fn, optimizer, policy=FP32, clip_norm=1.0)
    _, metrics = step(state, {"g": jnp.full(1000, 3.0e38)})
    assert metrics["finite_leaves"].all()
    assert metrics["skipped"]


def test_optimizer_that_makes_a_nan_is_skipped():
    # optax#1403: a schedule that returns NaN must not reach the parameters.
    optimizer = optax.sgd(lambda count: jnp.where(count == 1, jnp.nan, 0.5))
    state = TrainState.create({"w": jnp.float32(1.0)}, optimizer, policy=FP32)
    step = make_train_step(linear, optimizer, policy=FP32)
    batch = {"g": jnp.asarray(1.0, jnp.float32)}
    state, _ = step(state, batch)
    state, metrics = step(state, batch)
    assert metrics["skipped"]
    assert float(state.params["w"]) == 0.5


def test_state_that_begins_infinite_is_no_fault():
    optimizer = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau())
    state = TrainState.create({"w": jnp.float32(1.0)}, optimizer, policy=FP32)
    step = make_train_step(linear, optimizer, policy=FP32)
    _, metrics = step(state, {"g": jnp.asarray(1.0, jnp.float32)})
    assert not metrics["skipped"]


def test_clip_after_unscale():
    # At scale 65536, clipped before, the update would be 1e-5 of this.
    scale = StaticLossScale(65536.0)
    optimizer = optax.sgd(1.0)
    state = TrainState.create(
        {"w": jnp.zeros(2)}, optimizer, policy=FP32, loss_scale=scale
    )
    step = make_train_step(
        linear, optimizer, policy=FP32, loss_scale=scale, clip_norm=1.0
    )
    state, metrics = step(state, {"g": jnp.asarray([0.6, 0.8])})
    np.testing.assert_array_equal(state.params["w"], -jnp.asarray([0.3, 0.4]))
    assert float(metrics["grad_norm"]) == 0.5


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_traced_once(policy):
    # Weakly typed scalars in the first state have others trace twice.
    policy = Policy.parse(policy)

    def loss_fn(params, mean, batch, rng):
        traces.append(1)
        w = policy.cast_to_compute(params["w"])
        y = policy.cast_to_output(w * policy.cast_to_compute(batch["x"]))
        return y.mean(), (0.9 * mean + 0.1 * y.mean(), {"largest": y.max()})

    traces = []
    optimizer = optax.adam(optax.linear_schedule(1e-3, 0.0, 10))
    # Both weakly typed, as `jnp.full` and Python numbers are.
    given, mean = {"w": jnp.full(3, 2.0)}, 0.0
    state = TrainState.create(given, optimizer, policy=policy, model_state=mean)
    step = make_train_step(loss_fn, optimizer, policy=policy)
    for _ in range(4):
        state, _ = step(state, {"x": jnp.ones(3)})
    assert len(traces) == 1
    assert not any(x.weak_type for x in jax.tree.leaves(written(state)))


def test_state_shares_no_buffer_and_can_be_donated():
    # Masters made by astype share the buffer of what is already fp32.
    weights = jnp.ones(3)
    params = {"a": weights, "b": weights}
    optimizer = optax.adam(1e-3)
    state = TrainState.create(
        params, optimizer, policy=FP32, model_state=weights, ema=True
    )
    buffers = [
        x.unsafe_buffer_pointer()
        for x in jax.tree.leaves((state, weights))
        if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    ]
    assert len(set(buffers)) == len(buffers)

    def loss_fn(params, model_state, batch, rng):
        return (params["a"] * params["b"]).sum(), (model_state, {})

    old = state
    step = make_train_step(loss_fn, optimizer, policy=FP32, ema_decay=0.9)
    state, _ = step(state, {})
    assert old.params["a"].is_deleted()
    assert float(weights.sum()) == 3.0


def test_nnx_model(key, quick_compilation):
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(3, 8, dtype=FP16.compute, rngs=rngs)
            self.norm = nnx.BatchNorm(8, dtype=FP16.compute, rngs=rngs)
            self.last = nnx.Linear(8, 1, dtype=FP16.compute, rngs=rngs)

        def __call__(self, x):
            return self.last(self.norm(nnx.relu(self.first(x))))

    def make():
        return Net(nnx.Rngs(0))

    graph, *_ = nnx.split(nnx.eval_shape(make), nnx.Param, ...)
    # Under jit: op by op it would compile each of them.
    params, rest = jax.jit(lambda: nnx.split(make(), nnx.Param, ...)[1:])()

    def loss_fn(params, rest, batch, rng):
        model = nnx.merge(graph, params, rest)
        with jax.numpy_dtype_promotion("standard"):  # flax needs it
            y = model(batch["x"])
        loss = jnp.square(FP16.cast_to_output(y) - 1.0).mean()
        return loss, (nnx.split(model, nnx.Param, ...)[2], {})

    optimizer = optax.adam(1e-2)
    state = TrainState.create(params, optimizer, policy=FP16, model_state=rest)
    step = make_train_step(loss_fn, optimizer, policy=FP16, donate=False)
    batch = {"x": jax.random.normal(key, (16, 3))}
    losses = []
    for _ in range(30):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.2 * losses[0]
    after, metrics = step(state, {"x": jnp.full((16, 3), 1e6)})
    assert metrics["skipped"]
    chex.assert_trees_all_equal(written(after), written(state))
    names = nonfinite_paths(state.params, metrics["finite_leaves"])
    assert names and any("first" in name for name in names)


def test_fp16_with_scaling_learns_where_small_gradients_vanish(key):
    """A loss times 1e-5, as a deep net's gradients are: fp16 alone rounds them to 0."""
    x = jax.random.normal(key, (64, 4))
    target = x @ jnp.asarray([1.0, -2.0, 3.0, 0.5])

    def loss_fn(params, model_state, batch, rng):
        y = FP16.cast_to_compute(x) @ FP16.cast_to_compute(params["w"])
        # The cotangent passes through fp16 after the small factor.
        error = FP16.cast_to_output(y) - target
        return 1e-8 * jnp.square(error).mean(), (model_state, {})

    ends = {}
    optimizer = optax.adam(0.1, eps=1e-20)
    for name, scale in {"none": NoLossScale(), "dynamic": DynamicLossScale()}.items():
        make = {"policy": FP16, "loss_scale": scale}
        state = TrainState.create({"w": jnp.zeros(4)}, optimizer, **make)
        step = make_train_step(loss_fn, optimizer, **make)
        for _ in range(200):
            state, metrics = step(state, {})
        ends[name] = 1e8 * float(metrics["loss"])
    assert ends["dynamic"] < 1e-3
    assert ends["none"] > 1.0
