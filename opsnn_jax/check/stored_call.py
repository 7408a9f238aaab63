"""Stores the arguments and options of a call in one file, and loads them again.

Arrays go in bit for bit, containers and plain values as JSON, and what can be imported
by name, such as a function, a class or a member of an enum, as that name.
"""

import enum
import functools
import importlib
import json
import operator
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .arguments import is_array

_FILE = "arrays.npz"


class StoredCall:
    """A call in the form in which it is stored.

    Attributes:
      structure: JSON of everything but the contents of the arrays.
      arrays: those, by name.
      modules: the names of the modules that loading it imports from.

    Raises:
      TypeError: for an argument or option that cannot be stored.
    """

    def __init__(self, args: Sequence[Any], options: Mapping[str, Any]):
        self.arrays: dict[str, np.ndarray] = {}
        self.modules: set[str] = set()
        call = {"args": self._encode(tuple(args))}
        call["options"] = self._encode(dict(options))
        self.structure = json.dumps(call)

    def write(self, folder: Path) -> None:
        np.savez(folder / _FILE, structure=self.structure, **self.arrays)

    def _encode(self, node):
        if type(node) is dict:
            items = node.items()
            return {"dict": [[self._encode(k), self._encode(v)] for k, v in items]}
        if isinstance(node, tuple) and hasattr(node, "_fields"):
            items = [self._encode(value) for value in node]
            return {"named": self._import(type(node)), "items": items}
        if type(node) in (list, tuple):
            return {type(node).__name__: [self._encode(value) for value in node]}
        if isinstance(node, functools.partial):
            call = (node.func, node.args, node.keywords)
            return {"partial": [self._encode(part) for part in call]}
        if isinstance(node, np.dtype):
            return {"numpy dtype": node.name}
        if isinstance(node, np.generic):
            return {"number": self._encode(np.asarray(node))}
        if is_array(node):
            return self._encode_array(node)
        if isinstance(node, enum.Enum):
            return {"member": self._import(type(node)), "name": node.name}
        if node is None or type(node) in (bool, int, float, str):
            return {"value": node}
        return {"object": self._import(node)}

    def _encode_array(self, array):
        name = f"a{len(self.arrays)}"
        if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            self.arrays[name] = np.asarray(jax.random.key_data(array))
            return {"key": name, "impl": str(jax.random.key_impl(array))}
        array = np.asarray(array)
        # npz knows no bfloat16: the bytes go in, and the dtype's name beside them.
        self.arrays[name] = np.frombuffer(array.tobytes(), np.uint8)
        return {"array": name, "dtype": array.dtype.name, "shape": list(array.shape)}

    def _import(self, node) -> list[str]:
        module = getattr(node, "__module__", None)
        path = getattr(node, "__qualname__", None)
        why = "has no name" if not module or not path else not_importable(node)
        if why is not None:
            kind = "the function " if callable(node) else "a value of type "
            name = path if callable(node) and path else type(node).__name__
            raise TypeError(f"{kind}{name} cannot be stored, as it {why}.")
        self.modules.add(module)
        return [module, path]


def not_importable(node: Any) -> str | None:
    """Why `from module import name` does not give this function or class, or None."""
    module, path = node.__module__, node.__qualname__
    if module == "__main__":
        return "lives in the script that was run"
    try:
        found = operator.attrgetter(path)(sys.modules.get(module))
    except AttributeError:
        return "is not a top-level function"
    return None if found is node else f"is not what {module}.{path} now is"


def load_arguments(folder: str | Path) -> tuple:
    """The arguments that were stored, bit for bit."""
    return _load(folder, "args")


def load_options(folder: str | Path) -> dict[str, Any]:
    """The options that were stored."""
    return _load(folder, "options")


def _load(folder, part):
    with np.load(Path(folder) / _FILE) as stored:
        return _decode(json.loads(str(stored["structure"]))[part], stored)


def _decode(node, stored):
    def each(nodes):
        return [_decode(value, stored) for value in nodes]

    match node:
        case {"dict": items}:
            return dict(each(item) for item in items)
        case {"list": items}:
            return each(items)
        case {"tuple": items}:
            return tuple(each(items))
        case {"named": path, "items": items}:
            return _imported(path)(*each(items))
        case {"partial": parts}:
            function, args, keywords = each(parts)
            return functools.partial(function, *args, **keywords)
        case {"numpy dtype": name}:
            return jnp.dtype(name)
        case {"number": array}:
            return _array(array, stored)[()]
        case {"member": path, "name": name}:
            return _imported(path)[name]
        case {"object": path}:
            return _imported(path)
        case {"key": name, "impl": impl}:
            return jax.random.wrap_key_data(stored[name], impl=impl)
        case {"array": _}:
            return jnp.asarray(_array(node, stored))
        case {"value": value}:
            return value
    raise ValueError(f"check: {_FILE} must be of this version; got {node}.")


def _array(node, stored) -> np.ndarray:
    data = stored[node["array"]].tobytes()
    return np.frombuffer(data, jnp.dtype(node["dtype"])).reshape(node["shape"])


def _imported(path):
    module, name = path
    return operator.attrgetter(name)(importlib.import_module(module))
