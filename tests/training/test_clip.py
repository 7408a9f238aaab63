"""Norms without overflow, and clipping of unscaled gradients."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from opsnn_jax.training import StaticLossScale, clip_by_norm, global_norm
from opsnn_jax.training.clip import ClipRule, clip_by_rules


@pytest.mark.parametrize(
    "tree, expected",
    [
        # pytorch#46849: norms that overflow on the way though they are finite.
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


def test_leaves_that_are_not_floating_pass_untouched():
    # tensorflow#27655: gradients hold None for what is frozen, float0 for integers.
    float0 = np.zeros((2,), jax.dtypes.float0)
    tree = {"w": jnp.full(4, 2.0), "n": jnp.int32(7), "none": None, "f0": float0}
    tree["key"] = jax.random.key(0)
    norm = global_norm(tree)
    assert float(norm) == 4.0
    for clipped in (
        clip_by_norm(tree, 1.0, norm),
        clip_by_rules(tree, [ClipRule("w", 1.0)]),
    ):
        assert jax.tree.structure(clipped) == jax.tree.structure(tree)
        np.testing.assert_array_equal(clipped["w"], jnp.full(4, 0.5))
        assert all(clipped[name] is tree[name] for name in ("n", "f0", "key"))


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
    # Clipped before unscaling, the bound is as many times too small.
    config = StaticLossScale(scale)
    grads = config.unscale(config.init(), [jnp.asarray([0.3, 0.4]) * scale])
    clipped = clip_by_norm(grads, 1.0, global_norm(grads))
    chex.assert_trees_all_equal(clipped, [jnp.asarray([0.3, 0.4])])


def test_rules_clip_parameters_and_rows_on_their_own():
    grads = {
        "embedding": jnp.asarray([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0], [1e30, 0.0]]),
        "head": {"kernel": jnp.full((2, 2), 2.0), "bias": jnp.full(4, 2.0)},
        "count": jnp.int32(3),
    }
    rules = [ClipRule("^embed", 1.0, rows=True), ClipRule("kernel|bias", 1.0)]
    clipped = clip_by_rules(grads, rules)
    # A frequent word's gradient does not shrink a rare one's; a small row is as it was.
    np.testing.assert_allclose(
        clipped["embedding"],
        [[0.6, 0.8], [0.3, 0.4], [0.0, 0.0], [1.0, 0.0]],
        rtol=1e-6,
    )
    np.testing.assert_array_equal(clipped["embedding"][1], grads["embedding"][1])
    np.testing.assert_allclose(clipped["head"]["kernel"], jnp.full((2, 2), 0.5))
    np.testing.assert_allclose(clipped["head"]["bias"], jnp.full(4, 0.5))
    assert int(clipped["count"]) == 3


def test_first_rule_that_matches_counts_and_one_for_nothing_is_refused():
    grads = {"a": jnp.full(4, 2.0), "b": jnp.full((1, 4), 2.0)}
    clipped = clip_by_rules(
        grads, [ClipRule("a", 2.0), ClipRule("a|b", 1.0, rows=True)]
    )
    np.testing.assert_allclose(clipped["a"], jnp.full(4, 1.0))
    np.testing.assert_allclose(clipped["b"], jnp.full((1, 4), 0.5))
    with pytest.raises(
        ValueError, match="clip rule 'c' is for none of the parameters a"
    ):
        clip_by_rules(grads, [ClipRule("c", 1.0)])
    with pytest.raises(ValueError, match="max_norm must be above 0"):
        ClipRule("a", 0.0)
    with pytest.raises(ValueError, match="must be a regular expression"):
        ClipRule("(", 1.0)
