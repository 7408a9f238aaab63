"""Runs an nnx model with its layers recorded and some of their attributes replaced."""

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from .layers import Tape


class Runner:
    """Calls an nnx model. `params` is the state of its parameters."""

    def __init__(self, model: nnx.Module, params, kwargs, fields: Mapping[str, Any]):
        if params is not None:
            raise ValueError(
                "layerwise: an nnx model holds its own parameters, so params must be "
                f"None; got {type(params).__name__}."
            )
        self._graph, self.params, self._rest = nnx.split(model, nnx.Param, ...)
        self._kwargs, self._fields = kwargs, fields

    def __call__(self, params, inputs, tape: Tape) -> Any:
        # Merging makes modules of our own, which may be changed.
        model = nnx.merge(self._graph, params, self._rest, copy=True)
        for path, module in list(nnx.iter_modules(model)):
            for name, value in self._fields.items():
                if hasattr(module, name):
                    setattr(module, name, value)
                    tape.fields.add(name)
            if callable(module):
                _record(module, _layer(path), tape)
        return model(*inputs, **self._kwargs)

    def by_layer(self, gradient) -> dict[str, list]:
        """The gradient's leaves, grouped by the module that owns them."""
        found: dict[str, list] = {}
        for path, leaf in nnx.to_flat_state(gradient):
            found.setdefault(_layer(path[:-1]), []).extend(jax.tree.leaves(leaf))
        return found


def _record(module, layer: str, tape: Tape) -> None:
    """Makes calls of this one object go by the tape: Python looks `__call__` up in the
    class, so the object gets a subclass of its own."""
    kind = type(module)

    def call(self, *args, **kwargs):
        return tape.visit(layer, kind.__call__(self, *args, **kwargs))

    recorded = type(kind)(kind.__name__, (kind,), {"__call__": call})
    object.__setattr__(module, "__class__", recorded)


def _layer(path) -> str:
    return "/".join(map(str, path)) or "(model)"
