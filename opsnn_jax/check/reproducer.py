"""Writes a failing call to a folder: the arrays, and a script that fails again."""

import functools
import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .arguments import op_name
from .stored_call import StoredCall, not_importable

_START = """{headline!r}

import pathlib
import sys

sys.path[:0] = {roots!r}
"""

_CALL = """
from opsnn_jax.check import {check}, load_arguments, load_options

folder = pathlib.Path(__file__).parent
args, options = load_arguments(folder), load_options(folder)
{op}{check}(op, *args, options=options, {settings}).raise_if_failed()
"""

_IMPORTED = "from {module} import {attribute} as op\n"

_NOT_IMPORTED = """
# {name} cannot be imported by name, as it {why}.
raise SystemExit("define `op` in this file, then delete this line")
"""


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
      args: its arguments: arrays, numbers, keys, dtypes, what can be imported by name,
        and dicts, lists and tuples of them.
      options: its keyword arguments, of the same.
      check: the name in `opsnn_jax.check` of the check that failed.
      settings: the keyword arguments of that check.
      headline: one sentence that says what failed.

    Returns:
      The folder that was written.

    Raises:
      TypeError: for an argument or option that cannot be stored.
      OSError: for a folder that cannot be written.
    """
    name = op_name(op)
    while isinstance(op, functools.partial) and not op.args:
        options, op = {**op.keywords, **options}, op.func
    call = StoredCall(args, options)
    digest = hashlib.sha256((name + call.structure).encode())
    for array in call.arrays.values():
        digest.update(array.tobytes())
    module, attribute = getattr(op, "__module__", None), getattr(op, "__qualname__", "")
    if not module or not attribute.isidentifier():
        why = "is not a top-level function"
    else:
        why = not_importable(op)
    if why is None:
        call.modules.add(module)
        where = _IMPORTED.format(module=module, attribute=attribute)
    else:
        where = _NOT_IMPORTED.format(name=name, why=why)
    text = _START.format(
        headline=headline, roots=sorted(set().union(*map(_import_root, call.modules)))
    ) + _CALL.format(
        check=check,
        op=where,
        settings=", ".join(f"{k}={v!r}" for k, v in settings.items()),
    )
    target = Path(folder) / f"{name}-{digest.hexdigest()[:8]}"
    target.mkdir(parents=True, exist_ok=True)
    call.write(target)
    (target / "reproduce.py").write_text(text, encoding="utf-8")
    return target


def _import_root(module) -> set[str]:
    """The folder that must be on sys.path for `import module` to find it, if any."""
    file = getattr(sys.modules[module], "__file__", None)
    if file is None:
        return set()
    path = Path(file).absolute()
    levels = len(module.split(".")) - (path.name != "__init__.py")
    return {str(path.parents[levels])}
