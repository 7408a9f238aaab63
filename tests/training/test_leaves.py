"""Choosing between two trees of arrays, and telling which is finite."""

import chex
import jax.numpy as jnp
import pytest

from opsnn_jax.training.leaves import finite_by_leaf, select, stays_finite


def test_tree_that_is_not_taken_leaves_no_trace():
    # Not under jit, where XLA may turn a product with 0 or 1 into a choice.
    good = {"w": jnp.arange(3.0), "n": jnp.int32(5)}
    bad = {"w": jnp.full(3, jnp.nan), "n": jnp.int32(7)}
    chex.assert_trees_all_equal(select(jnp.asarray(False), bad, good), good)
    chex.assert_trees_all_equal(select(jnp.asarray(True), good, bad), good)


@pytest.mark.parametrize("big", [1e30, 3.4e38])
def test_numbers_whose_squares_overflow_are_finite(big):
    tree = {"a": jnp.full(3, big), "b": jnp.ones(2), "n": jnp.int32(7)}
    assert finite_by_leaf(tree).tolist() == [True, True]
    assert bool(stays_finite(tree, tree))


def test_which_leaf_is_not_finite():
    tree = {"a": jnp.ones(3), "b": jnp.asarray([1.0, jnp.nan]), "c": jnp.full(2, 1e30)}
    assert finite_by_leaf(tree).tolist() == [True, False, True]
    assert not bool(stays_finite(tree, {**tree, "b": jnp.ones(2)}))
    assert bool(stays_finite(tree, {**tree, "b": jnp.asarray([1.0, jnp.inf])}))
