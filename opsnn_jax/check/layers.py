"""Runs a flax model two ways and finds the first layer at which they part.

The real calls are recorded, in the order in which they end, so branches, several inputs
and repeated layers are compared as they are. A zero is added to the output of every
layer; its gradient is the gradient at that layer.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import get_opaque_trace_state

from .arguments import is_differentiable, random_like, refuse_complex
from .layer_report import LayerReport, LayerRow

# How many roundings of its output one layer may add, by root mean square. A layer makes
# one of its operands, of its result and of its sum, each of somewhat less than this.
_ROUNDINGS = 16


class Tape:
    """Collects the outputs of layers, and adds the probes that their gradients need.

    Attributes:
      outputs: the floating-point arrays that each call returned.
      hidden: the layers that ran inside a transform, such as scan or remat, whose
        values no one outside it can see.
      fields: the names of the fields that some module has.
    """

    def __init__(self, probes: Mapping[str, Any] | None = None):
        self.outputs: dict[str, Any] = {}
        self.hidden: dict[str, None] = {}
        self.fields: set[str] = set()
        self._probes = probes
        self._trace = _trace()

    def visit(self, layer: str, out: Any) -> Any:
        """Records the output of one call; returns it with its probe added."""
        if _trace() != self._trace:
            self.hidden[layer] = None
            return out
        leaves, tree = jax.tree.flatten(out)
        where = [i for i, leaf in enumerate(leaves) if is_differentiable(leaf)]
        if not where:
            return out
        name, calls = layer, 1
        while name in self.outputs:
            calls += 1
            name = f"{layer}#{calls}"
        if self._probes is not None:
            for i, probe in zip(where, self._probes[name], strict=True):
                leaves[i] = leaves[i] + probe
        self.outputs[name] = [leaves[i] for i in where]
        return jax.tree.unflatten(tree, leaves)


def _trace():
    return get_opaque_trace_state(convention="flax")


def layerwise(
    model: Any,
    params: Any,
    x: Any,
    *,
    a: Any = None,
    b: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    tolerance: float | None = None,
    seed: int = 0,
) -> LayerReport:
    """Compares two ways of running one model, layer by layer.

    Args:
      model: a `flax.linen` or `flax.nnx` module. Layers inside a transform, such as
        `nn.scan`, `nn.remat` or `nn.RNN`, cannot be recorded: they are named in
        `hidden`. Of what a layer returns, its floating-point arrays are compared.
      params: the variables of a linen module, or its `params` alone; None for nnx.
      x: the input, or a tuple of inputs.
      a, b: the two ways. None leaves the model as it is; a dtype sets `dtype` in every
        module that has it and casts the input, as does a policy with `compute_dtype`;
        another string sets `implementation`; a mapping sets the fields that it names.
      kwargs: keyword arguments of the call.
      tolerance: allowed error of every output and gradient. None derives it from the
        rounding of the coarser of the two outputs, growing as the root of the depth.
      seed: of the cotangent at the output.

    Returns:
      A `LayerReport`. Its `first` is the first layer that departs.

    Raises:
      ImportError: without flax.
      TypeError: if the model is no flax module.
      ValueError: if the two ways call different layers, or one sets a field that no
        module of the model has; for complex inputs or outputs.
    """
    if _is_linen(model):
        from .layers_linen import Runner
    elif _is_nnx(model):
        from .layers_nnx import Runner
    else:
        raise TypeError(
            "layerwise: model must be a flax.linen or flax.nnx module; "
            f"got {type(model).__name__}."
        )
    inputs = x if isinstance(x, tuple) else (x,)
    left, right = (
        _run(Runner(model, params, kwargs or {}, _fields(way)), inputs, name, way, seed)
        for name, way in (("a", a), ("b", b))
    )
    if list(left.outputs) != list(right.outputs):
        only = sorted(set(left.outputs) ^ set(right.outputs))
        raise ValueError(
            "layerwise: both ways must call the same layers; these differ: "
            f"{', '.join(only) or 'their order'}."
        )
    depth = len(left.outputs)
    units = [_unit(layer, left, right) for layer in left.outputs]
    rows = []
    for k, layer in enumerate(left.outputs, 1):
        # A layer inherits the rounding of those before it, and in its gradient of all.
        # Independent roundings add up as the root of their number.
        allowed = _ROUNDINGS * max(units[:k]) * math.sqrt(k)
        # A relu whose input is within rounding of 0 may flip, and of many, a share as
        # large as the rounding does: that is an error of its square root.
        flips = 2 * math.sqrt(max(units))
        backwards = max(_ROUNDINGS * max(units) * math.sqrt(2 * depth), flips)
        limits = (tolerance or allowed, tolerance or backwards)
        rows.append(_row(layer, left, right, *limits))
    return LayerReport(tuple(rows), left.hidden)


@dataclass(frozen=True)
class _Run:
    outputs: Mapping[str, Any]
    cotangents: Mapping[str, Any]
    parameters: Mapping[str, Any]  # layer -> gradient of its own parameters
    hidden: tuple[str, ...]


def _run(runner, inputs, name, way, seed) -> _Run:
    fields, found = _fields(way), set()
    if fields.get("dtype") is not None:
        leaves, tree = jax.tree.flatten(inputs)
        moving = [i for i, leaf in enumerate(leaves) if is_differentiable(leaf)]
        for i in moving:
            leaves[i] = jnp.asarray(leaves[i], fields["dtype"])
        inputs = jax.tree.unflatten(tree, leaves)
        # What follows the dtype of its input needs no field.
        found |= {"dtype"} if moving else set()

    order, hidden = [], []

    def forward(params, probes):
        tape = Tape(probes)
        out = runner(params, inputs, tape)
        # JAX returns a dict in the order of its keys, not that of the calls.
        order[:], hidden[:] = tape.outputs, tape.hidden
        found.update(tape.fields)
        return out, tape.outputs

    refuse_complex("layerwise", inputs)
    result, shapes = jax.eval_shape(lambda p: forward(p, None), runner.params)
    refuse_complex("layerwise", result)
    missing = [field for field in fields if field not in found]
    if missing:
        raise ValueError(
            f"layerwise: {name}={way!r} sets {missing[0]!r}, but no module that the "
            "model calls has a field of that name, so nothing would change."
        )
    probes = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    out, pull, outputs = jax.vjp(forward, runner.params, probes, has_aux=True)
    rng = np.random.default_rng(seed)
    gradient, cotangents = pull(jax.tree.map(lambda y: random_like(rng, y), out))
    calls = {layer: outputs[layer] for layer in order}
    return _Run(calls, cotangents, runner.by_layer(gradient), tuple(hidden))


def _dtypes(layer, a: _Run, b: _Run) -> tuple[str, str]:
    return tuple(str(jax.tree.leaves(r.outputs[layer])[0].dtype) for r in (a, b))


def _unit(layer, a: _Run, b: _Run) -> float:
    """The largest relative error of rounding to the coarser of the two dtypes."""
    return max(float(jnp.finfo(dtype).eps) / 2 for dtype in _dtypes(layer, a, b))


def _row(layer, a: _Run, b: _Run, allowed, allowed_gradient) -> LayerRow:
    outs = _flat(a.outputs[layer]), _flat(b.outputs[layer])
    own = layer.split("#")[0]
    parameters = None
    if own in a.parameters:
        parameters = _error(_flat(a.parameters[own]), _flat(b.parameters[own]))
    return LayerRow(
        layer,
        _dtypes(layer, a, b),
        _error(*outs),
        _error(_flat(a.cotangents[layer]), _flat(b.cotangents[layer])),
        parameters,
        _range(outs[0]),
        _range(outs[1]),
        allowed,
        allowed_gradient,
    )


def _flat(tree) -> np.ndarray:
    leaves = [np.ravel(leaf).astype(np.float64) for leaf in jax.tree.leaves(tree)]
    return np.concatenate(leaves) if leaves else np.zeros(0)


def _error(a, b) -> float:
    scale = float(np.linalg.norm(b))
    gap = float(np.linalg.norm(a - b))
    if gap == 0:
        return 0.0
    return gap / scale if scale else math.inf


def _range(values) -> tuple[float, float]:
    return (float(values.min()), float(values.max())) if values.size else (0.0, 0.0)


def _fields(way) -> dict[str, Any]:
    """The module fields that a way of running sets."""
    if way is None:
        return {}
    if isinstance(way, Mapping):
        return dict(way)
    if hasattr(way, "compute_dtype"):
        return {"dtype": jnp.dtype(way.compute_dtype)}
    try:
        return {"dtype": jnp.dtype(way)}
    except TypeError:
        if isinstance(way, str):
            return {"implementation": way}
    raise TypeError(
        "layerwise: a and b must be None, a dtype, a policy, the name of an "
        f"implementation, or a mapping of module fields; got {type(way).__name__}."
    )


def _is_linen(model) -> bool:
    return isinstance(model, _flax().linen.Module)


def _is_nnx(model) -> bool:
    return isinstance(model, _flax().nnx.Module)


def _flax():
    try:
        import flax.linen
        import flax.nnx
    except ImportError as error:
        raise ImportError("layerwise needs flax: pip install flax.") from error
    return flax
