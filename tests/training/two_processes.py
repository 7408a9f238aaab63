"""One of two processes that train together: `python -m ... PORT FOLDER RANK`."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from opsnn_jax.training import (
    Checkpoints,
    DynamicLossScale,
    Policy,
    TrainState,
    make_train_step,
)

SCALING = {
    "policy": Policy.parse("float32"),
    "loss_scale": DynamicLossScale(initial=2.0**8, growth_interval=2),
}
OPTIMIZER = optax.adam(1e-2)


def loss_fn(params, model_state, batch, rng):
    cast = SCALING["policy"].cast_to_compute
    y = (cast(batch) @ cast(params["w"])).astype(jnp.float32)
    return jnp.square(y - 1.0).mean(), (model_state, {})


def first_state():
    return TrainState.create({"w": jnp.full((3, 2), 0.5)}, OPTIMIZER, **SCALING)


def make_step(**options):
    return make_train_step(loss_fn, OPTIMIZER, donate=False, **SCALING, **options)


def batch_at(i):
    """8 rows, 4 for each process; in the third batch the second process has an inf."""
    rows = np.random.default_rng(i).normal(size=(8, 3)).astype(np.float32)
    if i == 2:
        rows[6, 1] = np.inf
    return rows


def main(port, folder, rank):
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=rank)
    mesh = Mesh(np.array(jax.devices()), ("data",))
    assert mesh.size == jax.process_count() == 2
    whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    step = jax.jit(
        jax.shard_map(
            make_step(axis_names="data"),
            mesh=mesh,
            in_specs=(P(), P("data")),
            out_specs=(P(), P()),
        )
    )
    begin = jax.jit(first_state, out_shardings=whole)
    state = begin()
    skipped = []
    for i in range(4):
        mine = batch_at(i)[4 * rank : 4 * rank + 4]
        batch = jax.make_array_from_process_local_data(split, mine, (8, 3))
        state, metrics = step(state, batch)
        skipped.append(bool(metrics["skipped"]))

    with Checkpoints(f"{folder}/checkpoints") as checkpoints:
        checkpoints.save(4, state)
        restored = checkpoints.restore(begin()).state
    same = [
        np.array_equal(_local(a), _local(b))
        for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True)
    ]
    np.savez(
        f"{folder}/{rank}.npz",
        w=_local(state.params["w"]),
        mu=_local(state.opt_state[0].mu["w"]),
        scale=_local(state.loss_scale.scale),
        skipped=skipped,
        restored=same,
    )


def _local(x):
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x.addressable_data(0))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
