"""The arguments of an op under test: which leaves are differentiable, their names.

Arguments may be pytrees. A leaf that holds real floating-point numbers is
differentiable; integers, booleans, random keys and Python values pass as they are.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def is_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray))


def is_float(array: Any) -> bool:
    """True for anything whose dtype is a real floating-point one."""
    return jnp.issubdtype(array.dtype, jnp.floating)


def is_differentiable(leaf: Any) -> bool:
    """True for an array of real floating-point numbers."""
    return is_array(leaf) and is_float(leaf)


def as_jax(leaf: Any) -> Any:
    """A floating-point array as JAX holds it: float64 only where x64 is enabled."""
    if not is_differentiable(leaf):
        return leaf
    return jnp.asarray(leaf.astype(jax.dtypes.canonicalize_dtype(leaf.dtype)))


def refuse_complex(who: str, tree: Any) -> None:
    """Raises ValueError if a leaf is complex: its errors and derivatives are not ours.

    Args:
      who: the check that was called, for the message.
      tree: arguments or outputs, or their shapes and dtypes.
    """
    for leaf in jax.tree.leaves(tree):
        dtype = getattr(leaf, "dtype", type(leaf))
        if dtype is complex or jnp.issubdtype(dtype, jnp.complexfloating):
            raise ValueError(
                f"{who}: arguments and outputs must be real, or integers; got "
                f"{getattr(dtype, 'name', 'complex')}. Wrap the function in one that "
                "takes and returns the real and imaginary parts as arrays of their own."
            )


def refuse_missing_dtype(who: str, dtype: Any) -> None:
    """Raises ValueError for a dtype of which JAX now makes another one."""
    found = jax.dtypes.canonicalize_dtype(dtype)
    if found != jnp.dtype(dtype):
        raise ValueError(
            f"{who}: {jnp.dtype(dtype)} must be enabled, or JAX computes in {found}; "
            "call it in jax.enable_x64(True)."
        )


class Arguments:
    """Positional arguments of one call, split into differentiable leaves and the rest.

    Attributes:
      leaves: the differentiable arrays, in the order of the flattened arguments.
      names: their names, such as `x` or `params['w']`.
    """

    def __init__(self, op: Callable, args: Sequence[Any]):
        paths, self._tree = jax.tree.flatten_with_path(tuple(args))
        self._all = [leaf for _, leaf in paths]
        self._where = [i for i, leaf in enumerate(self._all) if is_differentiable(leaf)]
        parameters = _parameter_names(op, len(args))
        self.names = [_name(paths[i][0], parameters) for i in self._where]
        self.leaves = [self._all[i] for i in self._where]

    def rebuild(self, leaves: Sequence[Any]) -> tuple:
        """The arguments, with `leaves` in place of the differentiable ones."""
        everything = list(self._all)
        for i, leaf in zip(self._where, leaves, strict=True):
            everything[i] = leaf
        return jax.tree.unflatten(self._tree, everything)

    def function(self, op: Callable, options: Mapping[str, Any]) -> Callable:
        """`op` as a function of the differentiable leaves alone."""
        return lambda *leaves: op(*self.rebuild(leaves), **options)


def op_name(op: Callable) -> str:
    """A short name of a function for tables and file names."""
    while hasattr(op, "func"):
        op = op.func
    return getattr(op, "__name__", type(op).__name__).strip("<>")


def random_like(rng: np.random.Generator, leaf: Any) -> np.ndarray:
    """Standard normal numbers in the shape and dtype of an array, else symbolic zeros.

    An output of integers has the cotangent dtype float0, of which there is one value.
    """
    if isinstance(leaf, (bool, int, float)):  # as JAX would return them
        leaf = jnp.asarray(leaf)
    if is_float(leaf):
        return rng.standard_normal(leaf.shape).astype(leaf.dtype)
    return np.zeros(leaf.shape, jax.dtypes.float0)


def first_line(error: Exception) -> str:
    """What an error says, in one line; with its kind where the text alone says little.

    The text of a KeyError is the key, and that of a failed assert often nothing.
    """
    text = str(error).strip().split("\n")[0]
    if isinstance(error, (TypeError, ValueError, NotImplementedError)) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _parameter_names(op, count):
    try:
        parameters = inspect.signature(op).parameters.values()
    except (TypeError, ValueError):
        parameters = ()
    kinds = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    )
    names = [p.name for p in parameters if p.kind in kinds][:count]
    return names + [f"args[{i}]" for i in range(len(names), count)]


def _name(path, parameters):
    return parameters[path[0].idx] + jax.tree_util.keystr(path[1:])
