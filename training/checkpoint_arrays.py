"""The leaves of a state as orbax takes them, and back.

It stores neither random keys nor arrays of size 0, and puts what it reads where it is
told to.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .leaves import PyTree
from .manifest import Leaf


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def to_arrays(table: Sequence[Leaf], state: PyTree) -> dict[str, Any]:
    """The leaves by path, as orbax takes them: keys as their data, none of size 0."""
    return {
        name: jax.random.key_data(leaf) if _is_key(leaf) else leaf
        for (name, *_), leaf in zip(table, jax.tree.leaves(state), strict=True)
        if leaf.size
    }


def _stored(leaf: Any) -> Any:
    return jax.eval_shape(jax.random.key_data, leaf) if _is_key(leaf) else leaf


def target(leaf: Any) -> Any:
    """What orbax is asked for: an array on the devices of `leaf`, or one of numpy."""
    stored = _stored(leaf)
    if not getattr(leaf, "committed", False):
        return np.empty(stored.shape, stored.dtype)
    return jax.ShapeDtypeStruct(stored.shape, stored.dtype, sharding=leaf.sharding)


def from_array(array: Any, leaf: Any) -> jax.Array:
    """What orbax read, in the form of `leaf`; None for what it cannot store."""
    # Copied: the state is donated to the step, and must own what it gives away. An
    # array that was not committed to a device is not now, or the step, which was
    # compiled for the one, would be compiled again for the other.
    if array is None:
        array = np.empty(_stored(leaf).shape, _stored(leaf).dtype)
    array = jnp.array(array)
    if _is_key(leaf):
        return jax.random.wrap_key_data(array, impl=jax.random.key_impl(leaf))
    return array
