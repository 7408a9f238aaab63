"""Writes a failing call to a folder: the arrays, and a script that fails again."""

import functools
import hashlib
import json
import pprint
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .arguments import is_array, op_name

_SCRIPT = '''"""{headline}"""

import pathlib
import sys

sys.path.insert(0, {root!r})
from {module} import {attribute} as op

from opsnn_jax.check import {check}, load_arguments

args = load_arguments(pathlib.Path(__file__).parent)
options = {options}
{check}(op, *args, options=options, {settings}).raise_if_failed()
'''

_NO_IMPORT = '''"""{headline}

{name} cannot be imported by name ({why}), so define `op` below, then run this file.
"""

import pathlib

from opsnn_jax.check import {check}, load_arguments

args = load_arguments(pathlib.Path(__file__).parent)
options = {options}
raise SystemExit("define `op` in this file, then delete this line")
{check}(op, *args, options=options, {settings}).raise_if_failed()  # noqa: F821
'''


def write_reproducer(
    folder: str | Path,
    op: Callable,
    args: Sequence[Any],
    options: Mapping[str, Any],
    *,
    check: str,
    settings: Mapping[str, Any],
    headline: str,
) -> Path:
    """Writes `folder/<op>-<hash>/` with `arrays.npz` and `reproduce.py`.

    Args:
      folder: where to put it; made if it is missing.
      op: the function that failed. One that can be imported by name makes a script
        that runs as it is; another leaves a place for its definition.
      args: its arguments: arrays, numbers, keys, and dicts, lists and tuples of them.
      options: its keyword arguments.
      check: the name in `opsnn_jax.check` of the check that failed.
      settings: the keyword arguments of that check.
      headline: one sentence that says what failed.

    Returns:
      The folder that was written.
    """
    arrays: dict[str, np.ndarray] = {}
    structure = _encode(tuple(args), arrays)
    digest = hashlib.sha256(repr((op_name(op), structure, dict(options))).encode())
    for array in arrays.values():
        digest.update(array.tobytes())
    target = Path(folder) / f"{op_name(op)}-{digest.hexdigest()[:8]}"
    target.mkdir(parents=True, exist_ok=True)
    np.savez(target / "arrays.npz", structure=json.dumps(structure), **arrays)

    while isinstance(op, functools.partial) and not op.args:
        options, op = {**op.keywords, **options}, op.func
    fields = dict(
        headline=headline.replace('"""', "'''"),
        check=check,
        options=pprint.pformat(dict(options)),
        settings=", ".join(f"{k}={v!r}" for k, v in settings.items()),
    )
    module, attribute = getattr(op, "__module__", None), getattr(op, "__qualname__", "")
    why = _not_importable(op, module, attribute)
    if why is None:
        root = _import_root(module)
        text = _SCRIPT.format(root=root, module=module, attribute=attribute, **fields)
    else:
        text = _NO_IMPORT.format(name=op_name(op), why=why, **fields)
    (target / "reproduce.py").write_text(text)
    return target


def load_arguments(folder: str | Path) -> tuple:
    """The arguments that `write_reproducer` stored, bit for bit."""
    with np.load(Path(folder) / "arrays.npz") as stored:
        return _decode(json.loads(str(stored["structure"])), stored)


def _encode(node, arrays):
    if isinstance(node, dict):
        return {"dict": [[k, _encode(v, arrays)] for k, v in node.items()]}
    if isinstance(node, (list, tuple)):
        kind = "list" if isinstance(node, list) else "tuple"
        return {kind: [_encode(v, arrays) for v in node]}
    if not is_array(node):
        json.dumps(node)  # raises TypeError for what a script could not hold
        return {"value": node}
    name = f"a{len(arrays)}"
    if jnp.issubdtype(node.dtype, jax.dtypes.prng_key):
        arrays[name] = np.asarray(jax.random.key_data(node))
        return {"key": name, "impl": str(jax.random.key_impl(node))}
    array = np.asarray(node)
    # npz knows no bfloat16: the bytes go in, and the dtype's name beside them.
    arrays[name] = np.frombuffer(array.tobytes(), np.uint8)
    return {"array": name, "dtype": array.dtype.name, "shape": list(array.shape)}


def _decode(node, stored):
    if "dict" in node:
        return {k: _decode(v, stored) for k, v in node["dict"]}
    if "list" in node:
        return [_decode(v, stored) for v in node["list"]]
    if "tuple" in node:
        return tuple(_decode(v, stored) for v in node["tuple"])
    if "value" in node:
        return node["value"]
    if "key" in node:
        return jax.random.wrap_key_data(stored[node["key"]], impl=node["impl"])
    dtype = jnp.dtype(node["dtype"])
    return jnp.asarray(
        np.frombuffer(stored[node["array"]].tobytes(), dtype).reshape(node["shape"])
    )


def _not_importable(op, module, attribute):
    if not module or module == "__main__":
        return "it lives in the script that was run"
    if not attribute.isidentifier():
        return "it is not a top-level function"
    if getattr(sys.modules.get(module), attribute, None) is not op:
        return f"{module}.{attribute} is another object"
    return None


def _import_root(module):
    """The folder that must be on sys.path for `import module` to find it."""
    path = Path(sys.modules[module].__file__).absolute()
    levels = len(module.split(".")) - (path.name != "__init__.py")
    return str(path.parents[levels])
