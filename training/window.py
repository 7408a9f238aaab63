"""Gradients over one window: its micro-batches, one after the other, and all devices.

Each micro-batch is differentiated at the scale of the whole window, unscaled, weighted
by what it counts (tokens) and added up in `policy.accumulate`. The sums are then added
over the devices of the data axes in `policy.reduce`. Both are fp32 unless told
otherwise. With a compression, each device's sum is compressed once, after its last
micro-batch, and what is sent is added up in fp32.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .compression import Compression
from .leaves import (
    PyTree,
    float_leaves,
    is_float,
    merge,
    path_name,
    select,
    varying_axes,
)
from .loss_scale import LossScale
from .policy import Policy
from .state import TrainState

# loss_fn(params, model_state, batch, rng) -> (loss, (model_state, metrics))
LossFn = Callable[
    [PyTree, PyTree, PyTree, jax.Array], tuple[jax.Array, tuple[PyTree, dict]]
]


class Window(NamedTuple):
    """What the micro-batches of one step come to."""

    grads: PyTree  # fp32, unscaled, weighted mean
    loss: jax.Array  # fp32, unscaled, weighted mean
    model_state: PyTree
    metrics: dict[str, jax.Array]  # fp32, weighted means
    residual: PyTree  # what a compression did not send, of the mean


def accumulate(
    loss_fn: LossFn,
    policy: Policy,
    loss_scale: LossScale,
    state: TrainState,
    batch: PyTree,
    micro_batches: int,
    weight_fn: Callable[[PyTree], jax.Array] | None,
    axes: tuple[str, ...],
    compression: Compression | None = None,
) -> Window:
    """The window of one step; its arguments are those of `make_train_step`."""
    # Inside shard_map JAX would sum a replicated parameter's gradient over the mesh
    # where the parameter is used, which is in half precision. Made varying first, it
    # gets the device's own gradient, in fp32, to be summed below.
    vary = functools.partial(_pcast, axes=axes)
    params, model_state = vary((state.params, state.model_state))
    floats = float_leaves(params)
    # Each addition is at least fp32, whatever the sum is kept in.
    wide = max(policy.accumulate, jnp.dtype("float32"), key=lambda d: d.itemsize)
    rng = jax.random.fold_in(state.rng, state.step)
    for axis in axes:
        rng = jax.random.fold_in(rng, jax.lax.axis_index(axis))

    def one(carry, part_and_number):
        """Adds one micro-batch."""
        grad_sum, model_state = carry
        part, number = part_and_number

        def scaled_loss(floats):
            returned = loss_fn(
                merge(floats, params),
                # Rebuilt here: flax nnx may only write variables made in this trace.
                jax.tree.map(lambda x: x, model_state),
                part,
                jax.random.fold_in(rng, number),
            )
            loss, new_model_state, metrics = _returned(returned)
            # The loss itself is reported, not scaled/scale: that may be inf/inf.
            scaled = loss_scale.scale(state.loss_scale, loss)
            return scaled, (loss, new_model_state, metrics)

        grads, (loss, new_model_state, metrics) = jax.grad(scaled_loss, has_aux=True)(
            floats
        )
        grads = loss_scale.unscale(state.loss_scale, grads)
        weight = vary(_weight(weight_fn, part))
        # Not `weight > 0`: a NaN counts, so that the step is skipped and seen to be.
        counts = ~(weight <= 0)

        def weigh(x):
            # Nothing, not even a NaN, comes from a micro-batch that counts nothing.
            x = jnp.asarray(x).astype(jnp.float32)
            return jnp.where(counts, weight * x, jnp.zeros_like(x))

        def add(s, g):
            return (s.astype(wide) + weigh(g).astype(wide)).astype(policy.accumulate)

        grad_sum = jax.tree.map(add, grad_sum, grads)
        model_state = select(counts, vary(new_model_state), model_state)
        terms = vary(jax.tree.map(weigh, (loss, metrics)))
        return (grad_sum, model_state), (*terms, weight)

    def zeros(x):
        # Varying as the parameter does, which may be split over other axes as well.
        return _pcast(jnp.zeros(x.shape, policy.accumulate), varying_axes(x))

    carry = jax.tree.map(zeros, floats), model_state
    if micro_batches == 1:
        (grad_sum, model_state), terms = one(carry, (batch, 0))
    else:
        parts = _split(batch, micro_batches), jnp.arange(micro_batches)
        (grad_sum, model_state), terms = jax.lax.scan(one, carry, parts)
        terms = jax.tree.map(lambda x: x.sum(0), terms)

    if axes:
        if compression is None:
            to_reduce = jax.tree.map(lambda x: x.astype(policy.reduce), grad_sum)
            grad_sum = jax.lax.psum(to_reduce, axes)
        terms = jax.lax.psum(terms, axes)
        model_state = jax.tree.map(lambda x: _replicated(x, axes), model_state)
    *means, weight = terms
    # A window that counts nothing has gradient zero, not 0/0.
    weight = jnp.where(weight > 0, weight, 1.0)
    residual = state.residual
    if compression is not None:
        # The sum is not divided yet, the residual is.
        owed = jax.tree.map(lambda x: x * weight, residual)
        grad_sum, owed = compression.reduce(owed, grad_sum, axes)
        residual = jax.tree.map(lambda x: x / weight, owed)
    grads, loss, metrics = jax.tree.map(
        lambda x: x.astype(jnp.float32) / weight, (grad_sum, *means)
    )
    return Window(grads, loss, model_state, metrics, residual)


def _returned(returned: Any) -> tuple[jax.Array, PyTree, dict]:
    """The loss in fp32, the model state and the metrics that `loss_fn` returned."""
    try:
        loss, (model_state, metrics) = returned
        loss = jnp.asarray(loss).astype(jnp.float32)
    except (TypeError, ValueError):
        loss = metrics = None
    if loss is None or loss.ndim or not isinstance(metrics, dict):
        raise TypeError(
            "train step: loss_fn must return (loss, (model_state, metrics)), the loss "
            f"a scalar and metrics a dict; got {jax.tree.map(jnp.shape, returned)} "
            "with shapes for arrays. A model without state returns () for it."
        )
    return loss, model_state, metrics


def _weight(weight_fn: Callable | None, part: PyTree) -> jax.Array:
    weight = jnp.asarray(1.0 if weight_fn is None else weight_fn(part))
    if weight.ndim:
        raise ValueError(
            "train step: weight_fn must return a scalar for the whole (micro-)batch; "
            f"got shape {weight.shape}. Return its sum."
        )
    return jnp.maximum(weight.astype(jnp.float32), 0.0)


def _split(batch: PyTree, micro_batches: int) -> PyTree:
    def split(path, x):
        if not x.ndim or x.shape[0] % micro_batches:
            raise ValueError(
                f"train step: the first axis of batch leaf {path_name(path)!r} must "
                f"divide by micro_batches={micro_batches}; got shape {x.shape}. Fill "
                "it up with rows that count nothing in weight_fn."
            )
        return x.reshape(micro_batches, x.shape[0] // micro_batches, *x.shape[1:])

    return jax.tree.map_with_path(split, batch)


def _pcast(tree: PyTree, axes: tuple[str, ...]) -> PyTree:
    """The tree, varying over the axes."""

    def cast(x):
        missing = tuple(a for a in axes if a not in varying_axes(x))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree) if axes else tree


def _replicated(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Model state after a window: the mean over devices; counters agree already."""
    return jax.lax.pmean(x, axes) if is_float(x) else jax.lax.pmax(x, axes)
