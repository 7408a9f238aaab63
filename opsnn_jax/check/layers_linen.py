"""Runs a linen model with its layers recorded and some of their fields replaced."""

from collections.abc import Mapping
from typing import Any

import jax
from flax import linen as nn

from .layers import Tape


class Runner:
    """Calls a linen model. `params` are its parameters, to be differentiated."""

    def __init__(self, model: nn.Module, params, kwargs, fields: Mapping[str, Any]):
        variables = params if "params" in params else {"params": params}
        self.params = variables["params"]
        self._rest = {k: v for k, v in variables.items() if k != "params"}
        self._model, self._kwargs, self._fields = model, kwargs, fields

    def __call__(self, params, inputs, tape: Tape) -> Any:
        prefix: tuple[str, ...] = ()

        def intercept(call, args, kwargs, context):
            nonlocal prefix
            module = context.module
            if context.method_name != "__call__":
                return call(*args, **kwargs)
            path = prefix + module.path
            changes = self._changes(module, tape)
            if not changes:
                return tape.visit(_layer(path), call(*args, **kwargs))
            # A bound module is frozen: its copy runs on the same variables instead, and
            # comes back through this interceptor to be recorded.
            copy = module.clone(parent=None, name=None, **changes)
            outer, prefix = prefix, path
            try:
                return _apply(copy, module.variables, args, kwargs)
            finally:
                prefix = outer

        with nn.intercept_methods(intercept):
            variables = {"params": params, **self._rest}
            return _apply(self._model, variables, inputs, self._kwargs)

    def by_layer(self, gradient) -> dict[str, list]:
        """The gradient's leaves, grouped by the module that owns them."""
        found: dict[str, list] = {}
        for path, leaf in jax.tree.leaves_with_path(gradient):
            owner = tuple(str(key.key) for key in path[:-1])
            found.setdefault(_layer(owner), []).append(leaf)
        return found

    def _changes(self, module, tape) -> dict[str, Any]:
        has = {name for name in self._fields if name in module.__dataclass_fields__}
        tape.fields |= has
        return {
            name: self._fields[name]
            for name in has
            if getattr(module, name) != self._fields[name]
        }


def _apply(module, variables, args, kwargs):
    # Statistics that a layer updates are dropped: one step is compared, not two.
    others = [name for name in variables if name != "params"]
    out = module.apply(variables, *args, mutable=others or False, **kwargs)
    return out[0] if others else out


def _layer(path) -> str:
    return "/".join(path) or "(model)"
