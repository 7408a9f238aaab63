"""10,000 injected faults: the run ends as if it had never seen those batches."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from opsnn_jax.training import DynamicLossScale, Policy, TrainState, make_train_step

FP32 = Policy.parse("float32")
SHAPES = {"a": (3,), "b": (2, 2), "c": ()}
ENTRIES, MICRO_BATCHES, CLEAN = 8, 3, 400


def loss_fn(params, seen, batch, rng):
    """Its gradient is the mean of `batch`, whose columns are the entries of SHAPES."""
    flat = jnp.concatenate([params[name].reshape(-1) for name in SHAPES])
    loss = (flat[None] * batch).sum(1).mean() + 0.1 * jnp.square(flat).sum()
    return loss, (0.9 * seen + 0.1 * batch.mean(), {})


def batches(rng, faults, rows):
    """Clean and faulty batches in random order, and the places of the clean ones.

    A fault is an inf or NaN in one entry of one row of one micro-batch, which is to say
    in one leaf on one device, or in several of them.
    """
    count = faults + CLEAN
    values = rng.normal(size=(count, MICRO_BATCHES * rows, ENTRIES)).astype("f4")
    is_faulty = rng.permutation(count) < faults
    for k in np.flatnonzero(is_faulty):
        for _ in range(1 + (rng.random() < 0.2)):
            row, entry = rng.integers(values.shape[1]), rng.integers(ENTRIES)
            values[k, row, entry] = rng.choice([np.inf, -np.inf, np.nan])
    places = np.zeros(count, np.int32)
    places[:CLEAN] = np.flatnonzero(~is_faulty)
    return jnp.asarray(values), jnp.asarray(places)


def make(**options):
    optimizer = optax.adam(optax.cosine_decay_schedule(0.1, CLEAN))
    scaling = {
        "policy": FP32,
        "loss_scale": DynamicLossScale(growth_interval=3, min=2.0**-10, hysteresis=2),
    }
    state = TrainState.create(
        {name: jnp.ones(shape) for name, shape in SHAPES.items()},
        optimizer,
        model_state=jnp.zeros(()),
        ema=True,
        **scaling,
    )
    step = make_train_step(
        loss_fn,
        optimizer,
        clip_norm=1.0,
        ema_decay=0.9,
        micro_batches=MICRO_BATCHES,
        donate=False,
        **scaling,
        **options,
    )

    def run(state, values, places, count):
        def body(i, state):
            return step(state, values[places[i]])[0]

        return jax.lax.fori_loop(0, count, body, state)

    return state, run


def check(run, state, values, places, faults):
    everything = jnp.arange(len(places), dtype=jnp.int32)
    # One program for both: the same numbers in another one might round differently.
    clean = run(state, values, places, jnp.int32(CLEAN))
    faulty = run(state, values, everything, jnp.int32(len(places)))
    for name in ("params", "opt_state", "model_state", "ema", "step"):
        chex.assert_trees_all_equal(getattr(faulty, name), getattr(clean, name))
    chex.assert_tree_all_finite((clean.params, clean.opt_state, clean.ema))
    assert int(faulty.step) == int(clean.step) == CLEAN
    assert int(faulty.attempted_steps) == CLEAN + faults
    assert int(faulty.loss_scale.total_skips) == faults
    assert int(clean.loss_scale.total_skips) == 0


def test_faults_in_any_leaf_and_micro_batch_leave_no_trace():
    faults = 9_700
    state, run = make()
    values, places = batches(np.random.default_rng(0), faults, rows=1)
    check(jax.jit(run), state, values, places, faults)


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
def test_faults_on_any_device_leave_no_trace():
    faults = 300
    state, run = make(axis_names="data")
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    specs = (P(), P(None, "data"), P(), P())
    both = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=P()))
    values, places = batches(np.random.default_rng(1), faults, rows=2)
    check(both, state, values, places, faults)
