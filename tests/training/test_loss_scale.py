"""Loss scales: published sequences, bounds, and the faults of other scalers."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from opsnn_jax.training import (
    DynamicLossScale,
    NoLossScale,
    StaticLossScale,
    all_finite,
)

# F a clean step, O an overflow; the scale after each. Interval 3, from 16, floor 1.
PATTERN = "FFFFOFFFOOFFFFFFFOFOFFFF"
SEQUENCES = {
    "torch, apex, keras, jmp, mindspore, deepspeed with hysteresis 1": (
        {},
        "16 16 32 32 16 16 16 32 16 8 8 8 16 16 16 32 32 16 16 8 8 8 16 16",
    ),
    "megatron and deepspeed with hysteresis 2": (
        {"hysteresis": 2},
        "16 16 32 32 32 32 32 64 64 32 32 32 64 64 64 128 128 128 128 64 64 64 128 128",
    ),
    "deepspeed with hysteresis 2, consecutive": (
        {"hysteresis": 2, "consecutive_hysteresis": True},
        "16 16 32 32 32 32 32 64 64 32 32 32 64 64 64 128 128 128 128 128 128 128 "
        "256 256",
    ),
}


def run(config, pattern, adjust=None):
    """The scale after each step of the pattern, and the last state."""
    adjust = adjust or config.adjust
    state, scales = config.init(), []
    for verdict in pattern:
        state = adjust(state, jnp.asarray(verdict == "F"))
        scales.append(float(state.scale))
    return scales, state


@pytest.mark.parametrize("name", SEQUENCES)
@pytest.mark.parametrize("jit", [False, True])
def test_reproduces_published_sequence(name, jit):
    options, expected = SEQUENCES[name]
    config = DynamicLossScale(initial=16, growth_interval=3, **options)
    adjust = jax.jit(config.adjust) if jit else None
    scales, _ = run(config, PATTERN, adjust)
    assert scales == [float(s) for s in expected.split()]


class TestUnderEveryTransform(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True, with_device=True)
    def test_adjust_and_unscale_agree(self):
        config = DynamicLossScale(initial=4, min=2, growth_interval=2, hysteresis=2)
        _, state = run(config, "FFOO", self.variant(config.adjust))
        grads = self.variant(config.unscale)(state, {"w": jnp.full((3,), 8.0)})
        expected = run(config, "FFOO")[1]
        chex.assert_trees_all_equal(state, expected)
        chex.assert_trees_all_equal(grads, {"w": jnp.full((3,), 8.0 / expected.scale)})


def test_defaults_and_default_state():
    config = DynamicLossScale()
    assert config.initial == 2.0**15
    assert config.growth_interval == 2000
    scales, state = run(config, "F" * 2001, jax.jit(config.adjust))
    assert scales[1998:] == [2.0**15, 2.0**16, 2.0**16]
    assert int(state.growth_count) == 1


def test_growth_stops_at_the_ceiling_and_comes_back():
    # flax#2547 and pytorch#98828: doubling to inf, from which nothing returns.
    config = DynamicLossScale(growth=2.0**10, growth_interval=1, max=2.0**126)
    scales, _ = run(config, "F" * 200 + "O", jax.jit(config.adjust))
    assert max(scales) == 2.0**126
    assert scales[-1] == 2.0**125


def test_backoff_stops_at_the_floor_which_may_be_below_one():
    # tensorflow#38357: a floor of 1 is too high where even scale 1 overflows.
    config = DynamicLossScale(initial=1, min=2.0**-14)
    scales, state = run(config, "O" * 40)
    assert scales[-1] == 2.0**-14
    assert int(state.consecutive_skips) == int(state.total_skips) == 40


def test_counters_of_skips():
    _, state = run(DynamicLossScale(), "OOFOFFO")
    assert int(state.total_skips) == 4
    assert int(state.consecutive_skips) == 1


@pytest.mark.parametrize(
    "given", [2**15, 2.0**15, np.float16(2**15), np.float64(2**15)]
)
def test_state_is_strong_fp32_whatever_the_type_of_the_initial_scale(given):
    # jmp#47: an fp16 scale overflows and breaks the adjustment.
    config = DynamicLossScale(initial=given)
    state = config.init()
    for after in (state, config.adjust(state, jnp.asarray(True))):
        chex.assert_trees_all_equal_shapes_and_dtypes(after, state)
        assert not any(leaf.weak_type for leaf in jax.tree.leaves(after))
    assert config == DynamicLossScale()  # equal and hashable, so jit caches on it
    assert hash(config) == hash(DynamicLossScale())


def test_every_field_survives_flattening():
    # jmp loses its floor in a flatten and unflatten, hence in every jit.
    config = DynamicLossScale(initial=4, min=2, hysteresis=3)
    state = config.init()
    again = jax.jit(lambda s: jax.tree.map(lambda x: x, s))(state)
    chex.assert_trees_all_equal(again, state)
    assert len(jax.tree.leaves(state)) == 5
    scales, _ = run(config, "O" * 9, jax.jit(config.adjust))
    assert scales[-1] == 2.0


def test_state_maps_to_any_leaf():
    # jmp inspects its leaves when built, so that no tree of shardings can be made.
    shardings = jax.tree.map(lambda _: None, DynamicLossScale().init())
    assert shardings.scale is None


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_scaled_loss_is_fp32(dtype):
    # 3 * 2**15 is inf in fp16.
    config = DynamicLossScale()
    scaled = config.scale(config.init(), jnp.asarray(3.0, dtype))
    assert scaled.dtype == jnp.float32
    assert float(scaled) == 3.0 * 2.0**15


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_unscaled_gradients_are_fp32(dtype):
    config = StaticLossScale(2.0**30)  # the reciprocal is zero in fp16
    grads = config.unscale(config.init(), {"w": jnp.ones((2,), dtype)})
    assert grads["w"].dtype == jnp.float32  # which is not compared below
    chex.assert_trees_all_equal(grads, {"w": jnp.full((2,), 2.0**-30)})


@pytest.mark.parametrize("pattern", ["FFFFFF", "FFOFFO"])
def test_unscaling_uses_the_scale_of_the_same_step(pattern):
    # With the scale of the next step gradients are off by two at each change.
    config = DynamicLossScale(initial=8, growth_interval=1)
    state = config.init()
    for verdict in pattern:
        grad = jax.grad(functools.partial(config.scale, state))(jnp.float32(1.0))
        assert float(config.unscale(state, grad)) == 1.0
        state = config.adjust(state, jnp.asarray(verdict == "F"))


def test_leaves_that_are_not_floating_pass_untouched():
    # Integers, keys, None and float0 break other scalers.
    float0 = np.zeros((2,), jax.dtypes.float0)
    key = jax.random.key(0)
    tree = {"w": jnp.ones(3), "n": jnp.int32(7), "none": None, "key": key, "f0": float0}
    config = StaticLossScale(2.0)
    out = config.unscale(config.init(), tree)
    assert jax.tree.structure(out) == jax.tree.structure(tree)
    assert out["n"] is tree["n"] and out["key"] is key and out["f0"] is float0
    assert bool(all_finite(tree)) and bool(all_finite({}))


@pytest.mark.parametrize("bad", [jnp.inf, -jnp.inf, jnp.nan])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_all_finite_sees_every_bad_value(bad, dtype):
    tree = {"a": jnp.ones((2, 3), dtype), "b": [jnp.ones(4).at[2].set(bad)]}
    assert not bool(all_finite(tree))


@pytest.mark.parametrize("config", [NoLossScale(), StaticLossScale(4.0)])
def test_constant_scales_count_skips(config):
    scales, state = run(config, "FOOF")
    assert set(scales) == {float(config.init().scale)}
    assert int(state.total_skips) == 2


@pytest.mark.parametrize(
    "options, names",
    [
        ({"initial": 65504.0}, "initial"),
        ({"growth": 1.5}, "growth"),
        ({"backoff": 0.3}, "backoff"),
        ({"min": 0.0}, "min"),
        ({"max": float("inf")}, "max"),
        ({"max": float("nan")}, "max"),
        ({"initial": -2.0}, "initial"),
        ({"initial": 2.0**25}, "min <= initial <= max"),
        ({"growth": 0.5}, "growth"),
        ({"backoff": 1.0}, "backoff"),
        ({"growth_interval": 0}, "growth_interval"),
        ({"hysteresis": 0}, "hysteresis"),
        ({"hysteresis": 1.5}, "hysteresis must be an integer"),
        ({"growth_interval": 2**31}, "growth_interval must be an integer from 1 to 2"),
    ],
)
def test_bad_configuration_is_refused(options, names):
    with pytest.raises(ValueError, match=names):
        DynamicLossScale(**options)


def test_bad_static_scale_is_refused():
    with pytest.raises(
        ValueError, match="StaticLossScale: value must be a power of two"
    ):
        StaticLossScale(1000.0)
