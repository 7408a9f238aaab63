"""Which leaves of a tree of arrays are numbers to train, cast, check or keep.

Trees of parameters also hold integers (a counter), keys (of dropout) and `None` (a
frozen branch). Everything here looks at real floating-point leaves only; other leaves
pass through untouched, and the structure stays what it was.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

PyTree = Any


def is_float(leaf: Any) -> bool:
    """Whether the leaf is an array of real floating-point numbers.

    False for Python numbers, integers, booleans, random keys and float0 cotangents.
    """
    array = isinstance(leaf, jax.Array | np.ndarray | np.generic)
    return array and jnp.issubdtype(leaf.dtype, jnp.floating)


def float_leaves(tree: PyTree) -> PyTree:
    """The tree with `None`, which JAX and optax take as absent, for other leaves."""
    return jax.tree.map(lambda leaf: leaf if is_float(leaf) else None, tree)


def merge(floats: PyTree, tree: PyTree) -> PyTree:
    """The inverse of `float_leaves`: `tree` with its floating leaves replaced."""

    def pick(new, old):
        return old if new is None else new

    return jax.tree.map(pick, floats, tree, is_leaf=lambda leaf: leaf is None)


def path_name(path: tuple) -> str:
    """One path of `jax.tree.flatten_with_path`, joined by slashes."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def varying_axes(x: jax.Array) -> tuple[str, ...]:
    """The axes of a mesh over which an array differs from device to device.

    There are some inside `jax.shard_map` only, with `check_vma=True`, its default.
    """
    return tuple(sorted(jax.typeof(x).manual_axis_type.varying))


def sum_of_squares(tree: PyTree) -> jax.Array:
    """Over all floating leaves and, inside `jax.shard_map`, devices. A scalar, fp32."""
    # What is split over devices is added up over them; what is copied counts once.
    squares = {}
    for x in jax.tree.leaves(tree):
        if is_float(x):
            term = jnp.square(x.astype(jnp.float32)).sum()
            squares.setdefault(varying_axes(x), []).append(term)
    sums = [
        jax.lax.psum(jnp.stack(terms).sum(), axes) if axes else jnp.stack(terms).sum()
        for axes, terms in squares.items()
    ]
    return jnp.stack(sums).sum() if sums else jnp.zeros((), jnp.float32)


def _surely_finite(tree: PyTree) -> jax.Array:
    """False also of finite numbers whose squares exceed fp32. Costs one reading.

    The norm of gradients is made of the same sum, so that XLA adds up only once.
    """
    return jnp.isfinite(sum_of_squares(tree))


def finite_by_leaf(tree: PyTree) -> jax.Array:
    """For each floating leaf, in order, whether all of it is finite. (leaves,) bool.

    Inside `jax.shard_map` all of it means on all devices.
    """
    floats = jax.tree.leaves(float_leaves(tree))
    if not floats:
        return jnp.ones((0,), bool)

    def leaf_by_leaf():
        return _everywhere(jnp.stack([jnp.isfinite(x).all() for x in floats]))

    all_true = jnp.ones((len(floats),), bool)
    return jax.lax.cond(_surely_finite(floats), lambda: all_true, leaf_by_leaf)


def _everywhere(verdict: jax.Array) -> jax.Array:
    axes = varying_axes(verdict)
    return jax.lax.pmin(verdict.astype(jnp.int32), axes) > 0 if axes else verdict


def all_finite(tree: PyTree) -> jax.Array:
    """Whether no floating leaf holds an inf or a NaN. A scalar bool; True if empty."""
    return finite_by_leaf(tree).all()


def stays_finite(new: PyTree, old: PyTree) -> jax.Array:
    """Whether `new` is finite wherever `old` is.

    States hold infinities on purpose (the best loss so far begins at inf), so an inf is
    a fault only where a finite number stood before.
    """

    pairs = zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True)
    pairs = [(n, o) for n, o in pairs if is_float(n)]
    if not pairs:
        return jnp.asarray(True)

    def leaf_by_leaf():
        verdicts = [(jnp.isfinite(n) | ~jnp.isfinite(o)).all() for n, o in pairs]
        return _everywhere(jnp.stack(verdicts).all())

    return jax.lax.cond(_surely_finite(new), lambda: jnp.asarray(True), leaf_by_leaf)


def cast_like(tree: PyTree, like: PyTree) -> PyTree:
    """The tree with its floating leaves in the dtypes of those of `like`.

    Of another structure it comes back as it is, for `of_same_types` to name the leaf.
    """
    if jax.tree.structure(tree) != jax.tree.structure(like):
        return tree

    def cast(x, other):
        return x.astype(other.dtype) if is_float(x) and is_float(other) else x

    return jax.tree.map(cast, tree, like)


def select(take_new: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """`new` if the scalar `take_new` holds, else `old`, leaf by leaf.

    A choice, not arithmetic: a NaN in the tree that is not taken leaves no trace, where
    multiplying by zero would keep it.

    Raises:
      TypeError: if the trees differ in structure, or a leaf in shape or dtype.
    """

    def pick(n, o):
        return jnp.where(take_new, n, o)

    return jax.tree.map(pick, of_same_types(new, old), old)


def of_same_types(new: PyTree, old: PyTree) -> PyTree:
    """`new` as strongly typed arrays, if its structure, shapes and dtypes are `old`'s.

    Raises:
      TypeError: if they are not, naming the leaf: a state that changes its type would
        be traced anew at every step.
    """
    if jax.tree.structure(new) != jax.tree.structure(old):
        raise TypeError(
            "training: a state must keep its structure from step to step; "
            f"{_difference(new, old)}."
        )

    def check(path, n, o):
        n, o = jnp.asarray(n), jnp.asarray(o)
        if n.shape != o.shape or n.dtype != o.dtype:
            raise TypeError(
                f"training: {path_name(path)} must stay {o.dtype}{list(o.shape)} "
                f"from step to step; it became {n.dtype}{list(n.shape)}. "
                "Cast it where it is made."
            )
        return _strong(n)

    return jax.tree.map_with_path(check, new, old)


def _difference(new: PyTree, old: PyTree) -> str:
    """Where two trees differ in structure: a few leaves, for a tree can be long."""
    new_names, old_names = (
        [path_name(path) for path, _ in jax.tree.flatten_with_path(tree)[0]]
        for tree in (new, old)
    )
    lost = [name for name in old_names if name not in set(new_names)]
    added = [name for name in new_names if name not in set(old_names)]
    parts = [
        f"it {verb} {', '.join(names[:3])}{' and more' if len(names) > 3 else ''}"
        for verb, names in (("lost", lost), ("gained", added))
        if names
    ]
    return " and ".join(parts) or "containers of the same leaves changed their type"


def owned_copy(tree: PyTree) -> PyTree:
    """A copy of every leaf, as strongly typed arrays that share no buffer.

    Buffers of a state are donated to the step; an array that someone else still holds,
    or that stands in the state twice, must not be among them.
    """

    return jax.tree.map(lambda leaf: _strong(jnp.array(leaf, copy=True)), tree)


def _strong(array: jax.Array) -> jax.Array:
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return array
    return jax.lax.convert_element_type(array, array.dtype)
