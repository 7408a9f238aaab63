"""The train step: order, whole-state skip, exactness, any kind of tree."""

import dataclasses
import functools
import itertools

import chex
import flax.linen as linen
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

FP16 = Policy.parse("mixed_float16")
FP32 = Policy.parse("float32")


class SmallNet(linen.Module):
    """Convolution, batch norm, dropout and a dense layer."""

    dtype: jnp.dtype

    @linen.compact
    def __call__(self, x, train):
        x = linen.Conv(4, (3, 3), dtype=self.dtype)(x)
        x = linen.BatchNorm(not train, dtype=self.dtype)(x)
        x = linen.Dropout(0.1, deterministic=not train)(linen.relu(x))
        return linen.Dense(3, dtype=self.dtype)(x.reshape(x.shape[0], -1))


def cnn(policy, key):
    """Loss function, parameters, batch statistics and a batch of a small net."""
    model = SmallNet(policy.compute)
    image_key, label_key, init_key = jax.random.split(key, 3)
    batch = {
        "image": jax.random.normal(image_key, (8, 6, 6, 1)),
        "label": jax.random.randint(label_key, (8,), 0, 3),
    }
    with jax.numpy_dtype_promotion("standard"):  # flax needs it
        init = jax.jit(functools.partial(model.init, train=False))
        variables = init(init_key, batch["image"])

    def loss_fn(params, stats, batch, rng):
        with jax.numpy_dtype_promotion("standard"):
            logits, new = model.apply(
                {"params": params, "batch_stats": stats},
                batch["image"],
                train=True,
                mutable=["batch_stats"],
                rngs={"dropout": rng},
            )
        logits = policy.cast_to_output(logits)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        accuracy = (logits.argmax(-1) == batch["label"]).astype(jnp.float32).mean()
        return loss.mean(), (new["batch_stats"], {"accuracy": accuracy})

    return loss_fn, variables["params"], variables["batch_stats"], batch


def mlp(policy, key):
    """Loss function, parameters, running mean and batch of two dense layers."""
    keys = jax.random.split(key, 4)
    params = {
        "first": 0.4 * jax.random.normal(keys[0], (6, 16)),
        "bias": jnp.zeros(16),
        "last": 0.2 * jax.random.normal(keys[1], (16, 3)),
    }
    batch = {
        "x": jax.random.normal(keys[2], (8, 6)),
        "label": jax.random.randint(keys[3], (8,), 0, 3),
    }

    def loss_fn(params, model_state, batch, rng):
        cast = policy.cast_to_compute
        hidden = cast(batch["x"]) @ cast(params["first"]) + cast(params["bias"])[None]
        logits = policy.cast_to_output(jnp.tanh(hidden) @ cast(params["last"]))
        picked = jnp.take_along_axis(
            jax.nn.log_softmax(logits), batch["label"][:, None], axis=1
        )
        mean = 0.9 * model_state + 0.1 * policy.cast_to_output(hidden).mean(0)
        return -picked.mean(), (mean, {})

    return loss_fn, params, jnp.zeros(16), batch


def linear(params, model_state, batch, rng):
    """The mean of g w: its gradient is the mean of g."""
    return (batch["g"] * params["w"]).mean(), (model_state, {})


def written(state):
    return state.params, state.opt_state, state.model_state, state.ema, state.step


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


@pytest.mark.parametrize(
    "option",
    [{"clip_norm": -1.0}, {"clip_norm": 0.0}, {"clip_norm": np.nan}]
    + [{"ema_decay": 1.0}, {"ema_decay": -0.1}, {"micro_batches": 0}],
)
def test_option_out_of_its_range_is_refused(option):
    # A bound of -1 would turn the gradient round.
    with pytest.raises(ValueError, match=f"make_train_step: {[*option][0]} must be"):
        make_train_step(linear, optax.sgd(1.0), policy=FP32, **option)


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
