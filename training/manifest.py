"""What a checkpoint says of itself, in JSON, and how that is held against a run.

orbax casts silently where the dtype that is asked for differs from the one stored: the
int32 16777217 comes back as the float 16777216. So the path, dtype and shape of each
leaf are written beside the arrays and compared before anything is read.
"""

import base64
import collections
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from .leaves import PyTree, path_name

Leaf = tuple[str, str, list[int]]  # path, dtype, shape


def leaf_table(tree: PyTree) -> list[Leaf]:
    """The path, dtype and shape of each leaf of a tree of arrays.

    Raises:
      TypeError: for a leaf that is no array.
      ValueError: if two leaves have one path, as `{"a": {"b": x}, "a/b": y}` has.
    """
    table = []
    for path, leaf in jax.tree.flatten_with_path(tree)[0]:
        name = path_name(path)
        if not (hasattr(leaf, "dtype") and hasattr(leaf, "shape")):
            raise TypeError(
                f"checkpoint: every leaf must be an array; {name!r} is {leaf!r}. "
                "Pass it through jnp.asarray."
            )
        table.append((name, str(leaf.dtype), list(leaf.shape)))
    for name, count in collections.Counter(name for name, *_ in table).items():
        if count > 1:
            raise ValueError(
                f"checkpoint: two leaves have the path {name!r}. Rename one of them."
            )
    return table


def leaf_difference(saved: Sequence[Leaf], wanted: Sequence[Leaf]) -> str | None:
    """The first leaf in which a checkpoint and a state differ, as a phrase, or None."""
    there = {name: (dtype, tuple(shape)) for name, dtype, shape in saved}
    here = {name: (dtype, tuple(shape)) for name, dtype, shape in wanted}
    for name, leaf in here.items():
        if name not in there:
            return f"it lacks {name}, which this run has"
        if there[name] != leaf:
            return f"{name} is {_leaf(*there[name])} there and {_leaf(*leaf)} here"
    for name in there:
        if name not in here:
            return f"it has {name}, which this run lacks"
    return None


def _leaf(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype}{list(shape)}"


def setting_difference(saved: Any, wanted: Any) -> str | None:
    """The first key in which two configurations differ, as a phrase, or None."""
    there, here = dict(_flat(saved)), dict(_flat(_through_json(wanted)))
    for key in [*here, *(key for key in there if key not in here)]:
        if key not in there:
            return f"{key} is {here[key]!r} here and was not set there"
        if key not in here:
            return f"{key} was {there[key]!r} there and is not set here"
        if there[key] != here[key]:
            return f"{key} was {there[key]!r} there and is {here[key]!r} here"
    return None


def _through_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _flat(value: Any, prefix: str = ""):
    """Pairs of dotted key and value. Empty sections count as values."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix or "configuration", value


def encode(state: Any) -> Any:
    """The state of an iterator as JSON.

    Taken are what JSON has, and bytes, tuples and arrays: iterators of grain give
    dicts or bytes. A number of numpy comes back as one of Python.

    Raises:
      TypeError: for anything else.
    """
    if state is None or isinstance(state, bool | int | float | str):
        return state
    if isinstance(state, bytes):
        return {"__bytes__": base64.b64encode(state).decode("ascii")}
    if isinstance(state, np.generic):
        return state.item()
    if isinstance(state, np.ndarray):
        return {"__array__": state.tolist(), "dtype": state.dtype.str}
    if isinstance(state, tuple):
        return {"__tuple__": [encode(item) for item in state]}
    if isinstance(state, list):
        return [encode(item) for item in state]
    if isinstance(state, Mapping) and all(isinstance(key, str) for key in state):
        return {key: encode(value) for key, value in state.items()}
    raise TypeError(
        "checkpoint: the state of a data iterator must be made of dicts with words for "
        f"keys, lists, tuples, numbers, text, bytes and arrays; got {type(state)!r}."
    )


def decode(state: Any) -> Any:
    """The inverse of `encode`."""
    if isinstance(state, list):
        return [decode(item) for item in state]
    if not isinstance(state, dict):
        return state
    if "__bytes__" in state:
        return base64.b64decode(state["__bytes__"])
    if "__array__" in state:
        return np.array(state["__array__"], state["dtype"])
    if "__tuple__" in state:
        return tuple(decode(item) for item in state["__tuple__"])
    return {key: decode(value) for key, value in state.items()}
