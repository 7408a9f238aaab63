"""Choosing between two trees of arrays."""

import chex
import jax.numpy as jnp

from opsnn_jax.training.leaves import select


def test_tree_that_is_not_taken_leaves_no_trace():
    # Not under jit, where XLA may turn a product with 0 or 1 into a choice.
    good = {"w": jnp.arange(3.0), "n": jnp.int32(5)}
    bad = {"w": jnp.full(3, jnp.nan), "n": jnp.int32(7)}
    chex.assert_trees_all_equal(select(jnp.asarray(False), bad, good), good)
    chex.assert_trees_all_equal(select(jnp.asarray(True), good, bad), good)
