"""The step under shard_map on two devices equals the step on one."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from opsnn_jax.training import DynamicLossScale, Policy, TrainState, make_train_step

POLICY = Policy.parse("float32")


def loss_fn(params, model_state, batch, rng):
    y = POLICY.cast_to_compute(batch["x"]) @ POLICY.cast_to_compute(params["w"])
    loss = jnp.square(POLICY.cast_to_output(y)).mean()
    return loss, (model_state + batch["x"].mean(), {"size": jnp.abs(batch["x"]).mean()})


def written(s):
    return s.params, s.opt_state, s.model_state, s.step


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
def test_two_devices_equal_one_and_skip_together():
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    optimizer = optax.adam(1e-2)
    make = {
        "policy": POLICY,
        "loss_scale": DynamicLossScale(initial=2.0**8, growth_interval=2),
    }
    state = TrainState.create(
        {"w": jnp.ones((4, 3))}, optimizer, model_state=jnp.zeros(()), **make
    )
    options = {"donate": False, "micro_batches": 2, "clip_norm": 1.0, **make}
    single = make_train_step(loss_fn, optimizer, **options)
    local = make_train_step(loss_fn, optimizer, axis_names="data", **options)
    both = jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=(P(), P()))
    )

    one, two = state, jax.device_put(state, NamedSharding(mesh, P()))
    x = jax.random.normal(jax.random.key(1), (8, 4))
    for i in range(5):
        # Rows are dealt so that each micro-batch holds the same rows in both.
        order = np.array([0, 1, 4, 5, 2, 3, 6, 7])
        one, m_one = single(one, {"x": x + i})
        two, m_two = both(two, {"x": (x + i)[order]})
    close = functools.partial(chex.assert_trees_all_close, rtol=1e-5)
    close(written(one)[:2], written(two)[:2])
    chex.assert_trees_all_equal(one.loss_scale, two.loss_scale)
    close((m_one["loss"], m_one["size"]), (m_two["loss"], m_two["size"]))

    # An overflow on one device alone: both skip, and the scale falls everywhere.
    after, metrics = both(two, {"x": x.at[6, 0].set(1e30)})
    assert metrics["skipped"]
    chex.assert_trees_all_equal(written(after), written(two))
    assert float(after.loss_scale.scale) == 0.5 * float(two.loss_scale.scale)
    for leaf in jax.tree.leaves((after.params, after.loss_scale.scale)):
        parts = [np.asarray(s.data) for s in leaf.addressable_shards]
        assert len(parts) == 2
        np.testing.assert_array_equal(parts[0], parts[1])
