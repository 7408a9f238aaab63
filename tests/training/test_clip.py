"""Norms without overflow, and clipping of unscaled gradients."""

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from opsnn_jax.training import StaticLossScale, clip_by_norm, global_norm


@pytest.mark.parametrize(
    "tree, expected",
    [
        # E09 and pytorch#46849: norms that overflow on the way though they are finite.
        ([jnp.full(1000, 300.0, jnp.float16)], 300.0 * 1000**0.5),
        ([jnp.full(4, 1e20)], 2e20),
        ([jnp.full(4, 1e-30)], 2e-30),
        # optax adds the leaves' norms up in the leaf's dtype: 16 instead of 31.6.
        ([jnp.ones(1, jnp.bfloat16)] * 1000, 1000**0.5),
        ([jnp.full(1, 5000.0, jnp.float16), jnp.ones(3)], (5000.0**2 + 3) ** 0.5),
        ([jnp.zeros(3), jnp.zeros((0, 2)), jnp.int32(5), None], 0.0),
        ([], 0.0),
    ],
)
def test_global_norm(tree, expected):
    norm = global_norm(tree)
    assert norm.dtype == jnp.float32
    np.testing.assert_allclose(norm, np.float32(expected), rtol=1e-6)


@pytest.mark.parametrize("bad", [jnp.inf, -jnp.inf, jnp.nan])
def test_norm_shows_what_is_not_finite(bad):
    assert not jnp.isfinite(global_norm([jnp.asarray([1.0, bad]), jnp.ones(2)]))


def test_norm_beyond_fp32_is_inf():
    assert jnp.isinf(global_norm([jnp.full(1000, 3e38)]))


def test_within_the_bound_nothing_changes():
    tree = {"w": jnp.asarray([0.3, 0.4]), "n": jnp.int32(1)}
    chex.assert_trees_all_equal(clip_by_norm(tree, 1.0, global_norm(tree)), tree)


def test_infinite_norm_makes_zeros_of_what_is_finite():
    (clipped,) = clip_by_norm([jnp.asarray([jnp.inf, 1.0])], 1.0, jnp.asarray(jnp.inf))
    np.testing.assert_array_equal(clipped, [np.nan, 0.0])


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e20, 1e38])
def test_clipped_to_the_bound(size):
    tree = [jnp.full(4, size)]
    clipped = clip_by_norm(tree, 2e-4, global_norm(tree))
    np.testing.assert_allclose(clipped[0], np.full(4, 1e-4, np.float32), rtol=1e-6)


@pytest.mark.parametrize("scale", [2.0**k for k in range(0, 21, 5)])
def test_clipping_does_not_depend_on_the_scale(scale):
    # E08: clipped before unscaling, the bound is as many times too small.
    config = StaticLossScale(scale)
    grads = config.unscale(config.init(), [jnp.asarray([0.3, 0.4]) * scale])
    clipped = clip_by_norm(grads, 1.0, global_norm(grads))
    chex.assert_trees_all_equal(clipped, [jnp.asarray([0.3, 0.4])])
