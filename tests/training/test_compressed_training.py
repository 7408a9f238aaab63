"""Training whose devices send each other compressed gradients."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from opsnn_jax.training import (
    Checkpoints,
    DynamicLossScale,
    Half,
    Int8,
    OneBit,
    TopK,
    TrainState,
    make_train_step,
)
from opsnn_jax.training.checkpoint import CheckpointError
from tests.training.compressed_runs import (
    WORKERS,
    batch_at,
    first_state,
    loss_fn,
    make_step,
    specs_of,
)
from tests.training.compressions import KINDS
from tests.training.small_models import FP32

pytestmark = pytest.mark.skipif(
    jax.device_count() < WORKERS, reason="needs four devices"
)


def over_devices(f, out_specs):
    mesh = Mesh(np.array(jax.devices()[:WORKERS]), ("data",))
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("data"), out_specs=out_specs))


def test_late_gradients_come_and_each_worker_owes_its_own():
    # powersgd#3: the residual is what this worker did not send, not what all did not.
    def reduce(residual, g):
        total, residual = TopK(1 / 3).reduce([residual], [g[0]], "data")
        return total[0], residual[0]

    step = over_devices(reduce, (P(), P("data")))
    g = jnp.asarray([[1.0, 0.9, 0.1]] * 3 + [[0.2, -0.4, 0.3]])
    residual, totals = jnp.zeros((WORKERS, 3)), 0.0
    for _ in range(20):
        total, residual = step(residual, g)
        assert int((total != 0).sum()) <= 2
        totals += total
    # The first three workers agree; per worker it is [20, 18, 2].
    np.testing.assert_allclose(residual[1], residual[0])
    sent_by_first = (totals - (20 * g[3] - residual[3])) / 3
    np.testing.assert_allclose(sent_by_first + residual[0], [20, 18, 2], rtol=1e-6)
    assert (sent_by_first > 0).all()  # without residuals only the first entry is sent
    assert not np.allclose(residual[3], residual[0])


@pytest.mark.parametrize("compression", KINDS, ids=str)
def test_what_was_sent_and_is_owed_is_the_sum_of_the_gradients(key, compression):
    def reduce(residual, grads):
        mine = jax.tree.map(lambda x: x[0], grads)
        total, residual = compression.reduce(residual, mine, "data")
        everywhere = jax.tree.map(lambda x: x[None], total)
        everywhere = jax.lax.pcast(everywhere, "data", to="varying")
        return total, residual, everywhere

    step = over_devices(reduce, (P(), P("data"), P("data")))
    shapes = {"w": (6, 7), "b": (5,), "one": (), "none": None}
    params = {k: None if s is None else jnp.zeros(s) for k, s in shapes.items()}
    residual = compression.init(params, WORKERS)
    sent = given = params
    for k in jax.random.split(key, 12):
        grads = {
            name: None if x is None else jax.random.normal(k, (WORKERS, *x.shape))
            for name, x in params.items()
        }
        total, residual, everywhere = step(residual, grads)
        for x in jax.tree.leaves(everywhere):
            np.testing.assert_array_equal(x, jnp.broadcast_to(x[:1], x.shape))
        sent = jax.tree.map(jnp.add, sent, total)
        given = jax.tree.map(lambda s, g: s + g.sum(0), given, grads)
    assert total["none"] is None
    whole = jax.tree.map(lambda s, r: s + r.sum(0), sent, residual)
    # 12 steps of 4 workers, whose numbers stay below 2**5: each rounds a few times.
    chex.assert_trees_all_close(whole, given, rtol=0, atol=12 * 4 * 4 * 2**5 * 2**-24)


def test_all_entries_are_no_compression_bit_for_bit():
    options = {
        "micro_batches": 3,  # so that the weight is no power of two
        "weight_fn": lambda batch: batch["counts"].sum(),
        "clip_norm": 0.5,
    }
    plain, all_of_it = make_step(**options), make_step(TopK(1.0), **options)
    expected, state = first_state(), first_state(TopK(1.0))
    for i in range(5):
        expected, _ = plain(expected, batch_at(i))
        state, metrics = all_of_it(state, batch_at(i))
    assert int(state.step) == 5
    assert not any(x.any() for x in jax.tree.leaves(state.residual))
    chex.assert_trees_all_equal(
        dataclasses.replace(state, residual=None, rng=expected.rng), expected
    )


@pytest.mark.parametrize("compression", [TopK(0.1), Int8(8), OneBit()], ids=str)
def test_overflow_on_one_worker_leaves_no_trace(compression):
    scaling = {"loss_scale": DynamicLossScale(growth_interval=2)}
    step = make_step(compression, **scaling)
    state = straight = first_state(compression, **scaling)
    for i in range(4):
        bad = batch_at(i)
        bad["x"][12 * i + 1, i] = np.inf
        state, metrics = step(state, bad)
        assert metrics["skipped"]
        for leaf in jax.tree.leaves((state.params["w"], state.loss_scale.scale)):
            parts = [np.asarray(s.data) for s in leaf.addressable_shards]
            assert len(parts) == WORKERS
            for part in parts:
                np.testing.assert_array_equal(part, parts[0])
        state, _ = step(state, batch_at(i))
        straight, _ = step(straight, batch_at(i))
    for name in ("params", "opt_state", "model_state", "residual", "step"):
        chex.assert_trees_all_equal(getattr(state, name), getattr(straight, name))
    assert any(x.any() for x in jax.tree.leaves(state.residual))
    assert int(state.loss_scale.total_skips) == 4


def test_residuals_do_not_depend_on_the_loss_scale():
    # In units of the scaled gradient, a change of the scale changes what is owed.
    compression = TopK(0.1)
    ends = []
    for scale in (None, DynamicLossScale(initial=2.0**10, growth_interval=1)):
        state = first_state(compression, loss_scale=scale)
        step = make_step(compression, loss_scale=scale)
        for i in range(4):
            state, _ = step(state, batch_at(i))
        ends.append((state.params, state.residual))
    assert float(state.loss_scale.scale) == 2.0**14
    chex.assert_trees_all_equal(*ends)


def test_a_window_is_compressed_once():
    # The gradient of a sum of numbers that fp32 adds up exactly, in one part or three.
    def linear(params, model_state, batch, rng):
        return (batch @ params["w"]).mean(), (model_state, {})

    compression, optimizer = TopK(0.25), optax.sgd(1.0)
    batch = jnp.asarray(np.random.default_rng(0).integers(-8, 8, (48, 4)), jnp.float32)
    ends = []
    for micro_batches in (1, 4):
        state = TrainState.create(
            {"w": jnp.zeros(4)},
            optimizer,
            policy=FP32,
            compression=compression,
            workers=2,
        )
        step = make_train_step(
            linear,
            optimizer,
            policy=FP32,
            axis_names="data",
            compression=compression,
            micro_batches=micro_batches,
        )
        specs = specs_of(state)
        mapped = jax.shard_map(
            step,
            mesh=Mesh(np.array(jax.devices()[:2]), ("data",)),
            in_specs=(specs, P("data")),
            out_specs=(specs, P()),
        )
        state, _ = jax.jit(mapped)(state, batch / 3.0 * 3.0)
        ends.append((state.params, state.residual))
    chex.assert_trees_all_close(*ends, rtol=1e-6)
    assert int((ends[0][1]["w"] == 0).sum(1).max()) == 1  # one entry of four was sent


@pytest.mark.parametrize(
    "compression, on_the_wire",
    [
        (TopK(0.1), {"3xf32", "3xi32", "1xf32", "1xi32"}),
        (Int8(8), {"4x8xi8", "4x1xf32", "1x6xi8", "1x1xi8", "1x1xf32"}),
        (Half(), {"5x6xbf16", "6xbf16", "bf16"}),
        (OneBit(), {"4xui8", "1xui8", "f32"}),
    ],
    ids=["top-k", "int8", "half", "one bit"],
)
def test_only_what_is_encoded_goes_over_the_wire(compression, on_the_wire):
    state = first_state(compression)
    program = make_step(compression).lower(state, batch_at(0)).as_text()
    lines = program.splitlines()
    gathered = {
        line.split(": (tensor<")[1].split(">)")[0]
        for line in lines
        if '"stablehlo.all_gather"' in line
    }
    # The gathering adds an axis of size 1.
    assert {kind.removeprefix("1x") for kind in gathered} == on_the_wire
    # No sum over devices is of a gradient, but of one that is sent as it is.
    assert not [
        line for line in lines if "}) : (tensor<5x6x" in line and "all_reduce" in line
    ]


def test_bytes_that_are_sent():
    params = {"w": jnp.zeros((10, 100)), "b": jnp.zeros(4), "n": jnp.int32(0)}
    assert TopK(0.01).bytes_sent(params) == 8 * 10 + 8 * 1
    assert TopK(1.0).bytes_sent(params) == 4 * 1004
    assert Int8().bytes_sent(params) == 4 * 256 + 4 * 4 + 4 + 4
    assert Half().bytes_sent(params) == 2 * 1004
    assert OneBit().bytes_sent(params) == 125 + 4 + 1 + 4


def test_residuals_are_saved_and_a_run_goes_on_to_the_same_bits(tmp_path):
    compression = TopK(0.1)
    step = make_step(compression)
    mesh = Mesh(np.array(jax.devices()[:WORKERS]), ("data",))

    def begin():
        state = first_state(compression)
        specs = dataclasses.replace(
            specs_of(state), residual=jax.tree.map(lambda _: P("data"), state.residual)
        )
        return jax.tree.map(
            lambda x, s: jax.device_put(x, NamedSharding(mesh, s)), state, specs
        )

    straight = begin()
    for i in range(6):
        straight, _ = step(straight, batch_at(i))
        if i == 2:
            with Checkpoints(tmp_path) as checkpoints:
                checkpoints.save(3, straight)
    with Checkpoints(tmp_path) as checkpoints:
        state = checkpoints.restore(begin()).state
        with pytest.raises(CheckpointError, match="residual/b is float32"):
            few = compression.init(state.params, 2)
            checkpoints.restore(dataclasses.replace(state, residual=few))
    assert len(state.residual["w"].addressable_shards) == WORKERS
    for i in range(3, 6):
        state, _ = step(state, batch_at(i))
    chex.assert_trees_all_equal(
        (state.params, state.opt_state, state.residual),
        (straight.params, straight.opt_state, straight.residual),
    )


def test_parameters_that_are_split_are_compressed_where_they_lie():
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    compression, optimizer = TopK(0.25), optax.sgd(1.0)
    state = TrainState.create(
        {"w": jnp.zeros(8)}, optimizer, policy=FP32, compression=compression, workers=2
    )
    specs = dataclasses.replace(
        jax.tree.map(lambda _: P(), state),
        params={"w": P("model")},
        residual={"w": P("data", "model")},
    )

    def linear(params, model_state, batch, rng):
        mine = (batch @ params["w"]).mean()
        return jax.lax.psum(mine, "model"), (model_state, {})

    step = make_train_step(
        linear,
        optimizer,
        policy=FP32,
        axis_names="data",
        compression=compression,
        donate=False,
    )
    mapped = jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(specs, P("data", "model")),
            out_specs=(specs, P()),
        )
    )
    batch = jnp.asarray([[1.0, -4, 2, 0, 8, 0, 0, 16], [2, 3, 0, 0, 0, 0, 64, 32]])
    new, metrics = mapped(state, batch)
    # One of each four entries, of each worker's half of the mean.
    np.testing.assert_array_equal(new.params["w"], [0, 0.5, 0, 0, 0, 0, -32, -8])
    np.testing.assert_array_equal(
        new.residual["w"],
        [[0.5, 0, 1, 0, 4, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0, 16]],
    )
    assert float(metrics["grad_norm"]) == pytest.approx((0.25 + 32**2 + 8**2) ** 0.5)


def test_compression_without_workers_or_residuals_is_refused():
    with pytest.raises(ValueError, match="got no axis_names"):
        make_train_step(loss_fn, optax.sgd(1.0), policy=FP32, compression=Int8())
    with pytest.raises(ValueError, match="and a state without residuals"):
        make_step(Int8(), state=first_state())(first_state(), batch_at(0))
    state = first_state(Int8())
    with pytest.raises(ValueError, match="compression=None and a state with residuals"):
        make_step(None, state=state)(state, batch_at(0))
    step = make_train_step(
        loss_fn, optax.adam(1e-2), policy=FP32, axis_names="data", compression=Int8()
    )
    mesh = Mesh(np.array(jax.devices()[:WORKERS]), ("data",))
    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(P(), P("data")), out_specs=(P(), P())
    )
    with pytest.raises(ValueError, match="must have one residual; got 4"):
        jax.jit(mapped)(state, batch_at(0))
