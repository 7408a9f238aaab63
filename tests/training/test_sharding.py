"""Steps on several devices and in several processes equal the step on one device."""

import socket
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from opsnn_jax.training import (
    ClipRule,
    DynamicLossScale,
    Policy,
    TrainState,
    make_train_step,
)
from tests.compilation import environment_of

POLICY = Policy.parse("float32")
SCALING = {
    "policy": POLICY,
    "loss_scale": DynamicLossScale(initial=2.0**8, growth_interval=2),
}
OPTIMIZER = optax.adamw(1e-2)
# How the weights lie on a mesh of data x model; what is not named is copied.
SPLIT = {"first": P(None, "model"), "last": P("model", None)}

pytestmark = pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")


def loss_fn(params, model_state, batch, rng, axis=None):
    """Two layers; with an axis, each device has some of the 8 units between them."""
    cast = POLICY.cast_to_compute
    hidden = jnp.tanh(cast(batch["x"]) @ cast(params["first"]))
    y = hidden @ cast(params["last"])
    # Nothing, but for an inf in it, which reaches the weights of one device alone.
    extra = (params["first"] * batch["poison"][None]).sum()
    if axis is not None:
        y, extra = jax.lax.psum((y, extra), axis)
    loss = jnp.square(y + params["bias"][None]).mean() + extra
    return loss, (model_state + batch["x"].mean(), {"size": jnp.abs(batch["x"]).mean()})


def first_state():
    params = {
        "first": jnp.linspace(-1.0, 1.0, 32).reshape(4, 8),
        "last": jnp.linspace(1.0, -0.5, 24).reshape(8, 3),
        "bias": jnp.zeros(3),
    }
    return TrainState.create(
        params, OPTIMIZER, model_state=jnp.zeros(()), ema=True, **SCALING
    )


def make(loss_fn=loss_fn, **options):
    return make_train_step(
        loss_fn,
        OPTIMIZER,
        micro_batches=2,
        clip_norm=1.0,
        clip_rules=[ClipRule("first", 0.3)],
        ema_decay=0.9,
        donate=False,
        **SCALING,
        **options,
    )


def batch_at(i, poison=0.0):
    x = jax.random.normal(jax.random.key(1), (8, 4)) + i
    return {"x": x, "poison": jnp.zeros(8).at[6].set(poison)}


# In one micro-batch lie the same rows, whether rows are dealt to one device or two.
ORDER = np.array([0, 1, 4, 5, 2, 3, 6, 7])


@pytest.fixture(scope="module")
def single():
    state, step = first_state(), make(_each_micro_batch(loss_fn))
    for i in range(4):
        state, metrics = step(state, _repeated(batch_at(i)))
    return state, metrics


def _repeated(batch):
    """With a row of `poison` for each row of `x`, so that both can be split."""
    return {"x": batch["x"], "poison": jnp.tile(batch["poison"], (8, 1))}


def _each_micro_batch(loss_fn):
    def split(params, model_state, batch, rng):
        one = {"x": batch["x"], "poison": batch["poison"][0]}
        return loss_fn(params, model_state, one, rng)

    return split


def check(step, state, deal, single):
    for i in range(4):
        state, metrics = step(state, deal(_repeated(batch_at(i))))
    expected, m_expected = single
    for name in ("params", "opt_state", "model_state", "ema"):
        chex.assert_trees_all_close(
            getattr(state, name), getattr(expected, name), rtol=2e-5, atol=1e-6
        )
    chex.assert_trees_all_equal(state.loss_scale, expected.loss_scale)
    for name in ("loss", "size", "grad_norm"):
        np.testing.assert_allclose(metrics[name], m_expected[name], rtol=2e-5)

    # An overflow in the weights of one device alone: no device takes the step.
    after, metrics = step(state, deal(_repeated(batch_at(0, jnp.inf))))
    assert metrics["skipped"]
    # bias, first, last: whose gradient was not finite is known everywhere too.
    assert metrics["finite_leaves"].tolist() == [True, False, True]
    for name in ("params", "opt_state", "model_state", "ema", "step"):
        chex.assert_trees_all_equal(getattr(after, name), getattr(state, name))
    assert float(after.loss_scale.scale) == 0.5 * float(state.loss_scale.scale)
    for leaf in jax.tree.leaves((after.params["bias"], after.loss_scale.scale)):
        parts = [np.asarray(s.data) for s in leaf.addressable_shards]
        assert len(parts) == 4
        for part in parts:
            np.testing.assert_array_equal(part, parts[0])


def specs_of(state):
    """By the last name on a leaf's path, so that moments lie as their weights do."""

    def spec(path, leaf):
        names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        return SPLIT.get(names[-1], P())

    return jax.tree.map_with_path(spec, state)


def mesh_of_four():
    return Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))


def placed(mesh, state):
    return jax.tree.map(
        lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)),
        state,
        specs_of(state),
    )


def test_data_and_model_split_under_jit(single):
    mesh = mesh_of_four()
    rows = NamedSharding(mesh, P("data"))

    def deal(batch):
        return {"x": jax.device_put(batch["x"], rows), "poison": batch["poison"]}

    step = make(_each_micro_batch(loss_fn))
    state = placed(mesh, first_state())
    check(step, state, deal, single)
    after, _ = step(state, deal(_repeated(batch_at(0))))
    # The new state lies as the old one does: nothing was gathered.
    for new, old in zip(jax.tree.leaves(after), jax.tree.leaves(state), strict=True):
        assert new.sharding.is_equivalent_to(old.sharding, new.ndim)


def test_data_and_model_split_under_shard_map(single):
    mesh = mesh_of_four()

    def local_loss(params, model_state, batch, rng):
        one = {"x": batch["x"], "poison": batch["poison"][0]}
        return loss_fn(params, model_state, one, rng, axis="model")

    state = first_state()
    specs = specs_of(state)
    step = jax.jit(
        jax.shard_map(
            make(local_loss, axis_names="data"),
            mesh=mesh,
            in_specs=(specs, {"x": P("data"), "poison": P("data", "model")}),
            out_specs=(specs, P()),
        )
    )

    def deal(batch):
        return {"x": batch["x"][ORDER], "poison": batch["poison"]}

    check(step, placed(mesh, state), deal, single)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_are_reduced_in_the_dtype_of_the_policy(dtype):
    # jax#27496: a sum of gradients in half precision, which nobody asked for.
    policy = Policy(compute="bfloat16", reduce=dtype)
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    optimizer = optax.sgd(0.1)
    state = TrainState.create({"w": jnp.ones((4, 3))}, optimizer, policy=policy)

    def half(params, model_state, batch, rng):
        y = policy.cast_to_compute(batch) @ policy.cast_to_compute(params["w"])
        return policy.cast_to_output(y).mean(), (model_state, {})

    step = make_train_step(
        half, optimizer, policy=policy, axis_names="data", donate=False
    )
    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(P(), P("data")), out_specs=(P(), P())
    )
    program = jax.jit(mapped).lower(state, jnp.ones((8, 4))).as_text()
    name = {"float32": "f32", "bfloat16": "bf16"}[dtype]
    reduced = [
        line
        for line in program.splitlines()
        if ": (tensor<4x3x" in line and "->" in line and "}) : " in line
    ]
    assert reduced and all(f"tensor<4x3x{name}>" in line for line in reduced)


def test_two_processes_skip_together_and_equal_one(tmp_path):
    """Real processes over loopback; one of them gets an inf and both skip."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "tests.training.two_processes",
        str(port),
        tmp_path,
    ]
    both = [
        subprocess.Popen(
            [*command, str(rank)],
            env=environment_of(devices=1),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=200) for process in both]
    finally:
        for process in both:
            process.kill()
    for process, (_, err) in zip(both, outputs, strict=True):
        assert process.returncode == 0, err.decode()[-2000:]
    first, second = (np.load(tmp_path / f"{rank}.npz") for rank in range(2))
    for name in first.files:
        np.testing.assert_array_equal(first[name], second[name])
    assert first["skipped"].tolist() == [False, False, True, False]
    assert first["restored"].all()

    from tests.training.two_processes import batch_at, first_state, make_step

    state, step = first_state(), make_step()
    for i in range(4):
        state, _ = step(state, batch_at(i))
    np.testing.assert_allclose(first["w"], state.params["w"], rtol=2e-6)
    assert float(first["scale"]) == float(state.loss_scale.scale)
