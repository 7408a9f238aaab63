"""A small model trained over four devices with compressed gradients."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from opsnn_jax.training import TrainState, make_train_step
from tests.training.small_models import FP32

WORKERS = 4


def loss_fn(params, model_state, batch, rng):
    y = jnp.tanh(batch["x"] @ params["w"]) @ params["v"] + params["b"]
    loss = jnp.square(y - 1.0).mean()
    return loss, (model_state + batch["x"].mean(), {})


def first_state(compression=None, **options):
    params = {
        "w": jnp.linspace(-1.0, 1.0, 30).reshape(5, 6),
        "v": jnp.linspace(1.0, -0.5, 6),
        "b": jnp.zeros(()),
        "n": jnp.int32(7),
    }
    return TrainState.create(
        params,
        optax.adam(1e-2),
        policy=FP32,
        model_state=jnp.zeros(()),
        compression=compression,
        workers=WORKERS,
        **options,
    )


def make_step(compression=None, state=None, **options):
    """The step over four devices."""
    step = make_train_step(
        loss_fn,
        optax.adam(1e-2),
        policy=FP32,
        axis_names="data",
        compression=compression,
        donate=False,
        **options,
    )
    specs = specs_of(first_state(compression) if state is None else state)
    return jax.jit(
        jax.shard_map(
            step,
            mesh=Mesh(np.array(jax.devices()[:WORKERS]), ("data",)),
            in_specs=(specs, P("data")),
            out_specs=(specs, P()),
        )
    )


def specs_of(state):
    return dataclasses.replace(jax.tree.map(lambda _: P(), state), residual=P("data"))


def batch_at(i, rows=12):
    rng = np.random.default_rng(i)
    x = rng.normal(size=(WORKERS * rows, 5)).astype(np.float32)
    return {"x": x, "counts": rng.integers(1, 6, len(x)).astype(np.float32)}
