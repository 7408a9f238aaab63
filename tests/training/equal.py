"""What a run that was stopped must share with one that was not."""

import json

import chex
import jax
import jax.numpy as jnp
import numpy as np

from opsnn_jax.training import report


def assert_same_bits(state, other):
    """Also of keys and counters, dtypes and NaN."""
    chex.assert_trees_all_equal_shapes_and_dtypes(state, other)
    pairs = zip(jax.tree.leaves(state), jax.tree.leaves(other), strict=True)
    for a, b in pairs:
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def assert_equal_ends(folder, other):
    assert report.read_rows(folder / "metrics.jsonl") == report.read_rows(
        other / "metrics.jsonl"
    )
    results, others = (
        json.loads((f / "results.json").read_text()) for f in (folder, other)
    )
    assert results | {"seconds": 0} == others | {"seconds": 0}
