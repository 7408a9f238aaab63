"""The step under shard_map on two devices equals the step on one.

In a process of its own, because the number of CPU devices is fixed when JAX starts.
"""

import os
import subprocess
import sys

PROGRAM = """
import chex, jax, jax.numpy as jnp, numpy as np, optax
from jax.sharding import Mesh, PartitionSpec as P
from opsnn_jax.training import DynamicLossScale, Policy, TrainState, make_train_step

policy = Policy.parse("float32")
scale = DynamicLossScale(initial=2.0**8, growth_interval=2)
optimizer = optax.adam(1e-2)
mesh = Mesh(np.array(jax.devices()), ("data",))

def loss_fn(params, model_state, batch, rng):
    y = policy.cast_to_compute(batch["x"]) @ policy.cast_to_compute(params["w"])
    loss = jnp.square(policy.cast_to_output(y)).mean()
    return loss, (model_state + batch["x"].mean(), {"size": jnp.abs(batch["x"]).mean()})

make = {"policy": policy, "loss_scale": scale}
state = TrainState.create(
    {"w": jnp.ones((4, 3))}, optimizer, model_state=jnp.zeros(()), **make
)
options = {"donate": False, "micro_batches": 2, "clip_norm": 1.0, **make}
single = make_train_step(loss_fn, optimizer, **options)
local = make_train_step(loss_fn, optimizer, axis_names="data", **options)
both = jax.jit(jax.shard_map(
    local, mesh=mesh, in_specs=(P(), P("data")), out_specs=(P(), P())
))

def written(s):
    return s.params, s.opt_state, s.model_state, s.step

one = two = state
x = jax.random.normal(jax.random.key(1), (8, 4))
for i in range(5):
    # Rows are dealt so that each micro-batch holds the same rows in both.
    order = np.array([0, 1, 4, 5, 2, 3, 6, 7])
    one, m_one = single(one, {"x": x + i})
    two, m_two = both(two, {"x": (x + i)[order]})
chex.assert_trees_all_close(written(one)[:2], written(two)[:2], rtol=1e-5)
chex.assert_trees_all_equal(one.loss_scale, two.loss_scale)
np.testing.assert_allclose(m_one["loss"], m_two["loss"], rtol=1e-5)

# An overflow on one device alone: both skip, and the scale falls everywhere.
bad = x.at[6, 0].set(1e30)
after, metrics = both(two, {"x": bad})
assert bool(metrics["skipped"])
chex.assert_trees_all_equal(written(after), written(two))
assert float(after.loss_scale.scale) == 0.5 * float(two.loss_scale.scale)
for leaf in jax.tree.leaves((after.params, after.loss_scale.scale)):
    parts = [np.asarray(s.data) for s in leaf.addressable_shards]
    np.testing.assert_array_equal(parts[0], parts[1])
print("equal")
"""


def test_two_devices_equal_one_and_skip_together():
    flags = (
        os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
    )
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "equal\n"
