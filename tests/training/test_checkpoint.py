"""Checkpoints: the same bits after a restart, nothing cast, nothing half written."""

import dataclasses
import signal
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

from opsnn_jax.training import Policy, TrainState, make_train_step
from opsnn_jax.training.checkpoint import CheckpointError, Checkpoints
from opsnn_jax.training.manifest import decode, encode, setting_difference
from tests.training import killed_run
from tests.training.equal import assert_same_bits
from tests.training.small_models import FP32


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The state after 12 attempted steps that nothing stopped."""
    state = killed_run.run(tmp_path_factory.mktemp("straight"), 12)
    # Otherwise equal states would prove little.
    assert 0 < int(state.loss_scale.total_skips) < 12
    assert int(state.loss_scale.growth_count) or int(state.loss_scale.hysteresis_left)
    return state


@pytest.mark.parametrize("first", [1, 7, 11])
def test_restored_run_ends_in_the_same_bits(tmp_path, straight, first):
    # metaseq#3: scale, counters, schedule, average, data position are all saved.
    killed_run.run(tmp_path, first, save_every=None)
    assert_same_bits(killed_run.run(tmp_path, 12, save_every=None), straight)


@pytest.mark.parametrize("how, kept", [("in-a-window", 7), ("while-saving", 7)])
def test_killed_run_ends_in_the_same_bits(tmp_path, straight, how, kept):
    command = [sys.executable, "-m", "tests.training.killed_run", tmp_path, "7", how]
    killed = subprocess.run(command, capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    with Checkpoints(tmp_path) as checkpoints:
        # A step that was made may not be on the disk yet, for saving takes its time.
        assert checkpoints.latest in (kept - 1, kept)
    assert_same_bits(killed_run.run(tmp_path, 12), straight)
    assert not list(tmp_path.glob("*tmp*"))  # what was cut off has been cleared away
    # One trace and one program for all these runs, begun anew or restored.
    assert killed_run.make_step(None)._cache_size() == 1


def test_restored_state_is_not_traced_or_compiled_again(tmp_path):
    traces = []

    def loss_fn(params, model_state, batch, rng):
        traces.append(1)
        return (params["w"] * batch).sum(), (model_state, {})

    optimizer = optax.adam(1e-3)
    state = TrainState.create({"w": jnp.ones(3)}, optimizer, policy=FP32)
    step = make_train_step(loss_fn, optimizer, policy=FP32)
    batch = jnp.ones(3)
    with Checkpoints(tmp_path) as checkpoints:
        state, _ = step(state, batch)
        checkpoints.save(1, state)
        restored = checkpoints.restore(state).state
        with jax.no_tracing():
            restored, _ = step(restored, batch)
    assert len(traces) == 1
    assert step._cache_size() == 1
    assert int(restored.step) == 2


def test_state_may_be_donated_while_it_is_saved(tmp_path):
    # orbax#626: the buffers that are being written must not be those of the next step.
    state = {"w": jnp.arange(200_000.0)}
    step = jax.jit(lambda s: {"w": s["w"] + 1.0}, donate_argnums=0)
    with Checkpoints(tmp_path, keep_last=5) as checkpoints:
        for i in range(5):
            checkpoints.save(i, state)
            state = step(state)
        for i in range(5):
            saved = checkpoints.restore(state, i).state
            np.testing.assert_array_equal(saved["w"], np.arange(200_000.0) + i)
    step(saved)
    assert saved["w"].is_deleted()  # what is restored can be given away as well


def whole(seed, dtype="float32"):
    """A state with all kinds of leaves."""
    params = {
        "block": {"w": jnp.full((3, 4), seed, dtype), "none": None},
        "count": jnp.int32(2**24 + 1),  # not a number of fp32
        "empty": jnp.zeros((0, 3)),
        "keys": jax.random.split(jax.random.key(seed), 2),
    }
    policy = Policy(params=dtype, compute=dtype, output=dtype)
    stats = {"half": jnp.full(2, seed, jnp.bfloat16)}
    return TrainState.create(
        params, optax.adam(1e-3), policy=policy, rng=seed, model_state=stats, ema=True
    )


def test_every_kind_of_leaf_comes_back(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, whole(5), data={"drawn": 9})
    with Checkpoints(tmp_path) as checkpoints:
        restored = checkpoints.restore(whole(0))
    assert (restored.step, restored.data) == (3, {"drawn": 9})
    assert_same_bits(restored.state, whole(5))


@pytest.mark.parametrize(
    "saved, wanted, says",
    [
        (
            whole(1),
            whole(1, "bfloat16"),
            "params/block/w is float32[3, 4] there and bfloat16[3, 4] here",
        ),
        ({"n": jnp.int32(1)}, {"n": jnp.float32(1)}, "n is int32[] there and float32"),
        ({"w": jnp.ones(3)}, {"w": jnp.ones((3, 1))}, "float32[3] there and float32[3"),
        ({"a": jnp.ones(1), "b": jnp.ones(1)}, {"a": jnp.ones(1)}, "it has b, which"),
        ({"a": jnp.ones(1)}, {"a": jnp.ones(1), "b": jnp.ones(1)}, "it lacks b, which"),
        (
            {"k": jax.random.key(0)},
            {"k": jax.random.key(0, impl="rbg")},
            "k is key<fry>[] there and key<rbg>[] here",
        ),
    ],
)
def test_difference_names_the_first_leaf(tmp_path, saved, wanted, says):
    # orbax alone casts silently: int32 16777217 would come back as 16777216.0.
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, saved)
        with pytest.raises(CheckpointError) as e:
            checkpoints.restore(wanted)
    assert "checkpoint 1 in" in str(e.value) and says in str(e.value)


def test_other_settings_are_refused_by_their_key(tmp_path):
    settings = {"run": {"seed": 1}, "widths": (1, 2), "optimizer": {}}
    state = {"w": jnp.ones(2)}
    with Checkpoints(tmp_path, config=settings) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.restore(state)
    with (
        Checkpoints(tmp_path, config=settings | {"run": {"seed": 2}}) as checkpoints,
        pytest.raises(CheckpointError, match="run.seed was 1 there and is 2 here"),
    ):
        checkpoints.restore(state)


@pytest.mark.parametrize(
    "saved, wanted, says",
    [
        ({"a": 1}, {"a": 1}, None),
        ({"a": [1, 2]}, {"a": (1, 2)}, None),
        ({"a": {}}, {"a": {"b": 1}}, "a.b is 1 here and was not set there"),
        ({"a": 1, "b": 2}, {"a": 1}, "b was 2 there and is not set here"),
        (None, {"a": 1}, "a is 1 here and was not set there"),
        ({"a": True}, {"a": 1.5}, "a was True there and is 1.5 here"),
    ],
)
def test_difference_of_settings(saved, wanted, says):
    assert setting_difference(saved, wanted) == says


@pytest.mark.parametrize(
    "better, metrics, kept",
    [
        ("lower", [5.0, 1.0, 3.0, 0.5, 9.0], (2, 4, 5)),
        ("higher", [5.0, 1.0, 3.0, 0.5, 9.0], (1, 5)),
        # Neither NaN nor a missing one is ever the best.
        ("lower", [np.nan, 2.0, None, -np.inf, 7.0, np.inf], (2, 5, 6)),
    ],
)
def test_the_best_and_the_last_are_kept(tmp_path, better, metrics, kept):
    options = {"keep_best": 2, "better": better}
    with Checkpoints(tmp_path, **options) as checkpoints:
        for step, metric in enumerate(metrics, start=1):
            checkpoints.save(step, {"w": jnp.full(1, float(step))}, metric=metric)
        checkpoints.wait()
        assert checkpoints.steps == kept
        best = checkpoints.best
    # What was the best is known to the next process too.
    with Checkpoints(tmp_path, **options) as checkpoints:
        assert (checkpoints.best, checkpoints.latest) == (best, len(metrics))
        read = checkpoints.restore({"w": jnp.zeros(1)}, best).state
        assert float(read["w"][0]) == best


def test_state_of_an_iterator_goes_through_json(tmp_path):
    # grain: a dict for one kind of iterator, bytes for the other.
    state = {
        "a": [1, b"\x00\xff", None],
        "b": (1.5, np.arange(3, dtype=np.uint8)),
        "": 1,
    }
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": jnp.ones(1)}, data=state)
        back = checkpoints.restore({"w": jnp.ones(1)}).data
    assert back["a"] == state["a"] and back["b"][0] == 1.5 and back[""] == 1
    np.testing.assert_array_equal(back["b"][1], state["b"][1])
    assert back["b"][1].dtype == np.uint8 and isinstance(back["b"], tuple)
    assert decode(encode(np.int64(2**40))) == 2**40
    with pytest.raises(TypeError, match="the state of a data iterator must be"):
        encode({"a": object()})


@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
def test_arrays_come_back_to_their_devices(tmp_path):
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    split, copied = NamedSharding(mesh, P("model")), NamedSharding(mesh, P())
    state = {
        "split": jax.device_put(jnp.arange(8.0), split),
        "copied": jax.device_put(jnp.arange(3.0), copied),
        "key": jax.device_put(jax.random.key(1), copied),
    }
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        like = jax.tree.map(jnp.copy, state)
        restored = checkpoints.restore(like).state
        assert_same_bits(restored, state)
        for name, array in restored.items():
            assert array.sharding.is_equivalent_to(state[name].sharding, array.ndim)
        # To one device, as when a run goes on with fewer.
        single = jax.tree.map(lambda x: jax.device_put(x, jax.devices()[1]), state)
        restored = checkpoints.restore(single).state
        assert_same_bits(restored, state)
        assert restored["split"].devices() == {jax.devices()[1]}


def test_loaded_parameters_become_the_master_weights():
    # Weights loaded into a running state, half ones too, are where it goes on.
    state = whole(1)
    loaded = {**state.params, "block": {"w": jnp.full((3, 4), 3, "bfloat16")}}
    loaded["block"]["none"] = None
    new = state.with_params(loaded)
    chex.assert_trees_all_equal_shapes_and_dtypes(new, state)
    assert float(new.params["block"]["w"][0, 0]) == float(new.ema["block"]["w"][0, 0])
    optimizer = optax.sgd(0.0)
    step = make_train_step(
        lambda p, m, b, r: (p["block"]["w"].sum(), (m, {})),
        optimizer,
        policy=FP32,
        ema_decay=0.5,
    )
    new = dataclasses.replace(new, opt_state=optimizer.init(new.params["block"]))
    after, _ = step(new, {})
    assert float(after.params["block"]["w"][0, 0]) == 3.0
    with pytest.raises(TypeError, match="must stay float32"):
        state.with_params({**state.params, "block": {"w": jnp.ones(2), "none": None}})
    with pytest.raises(TypeError, match="it lost block/w"):
        state.with_params({**state.params, "block": {"none": None}})
