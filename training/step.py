"""One training step in mixed precision.

The order, and why:

1. The loss is cast to fp32 and multiplied by the scale, then differentiated with
   respect to the fp32 master weights. The loss function casts them at each use.
2. Gradients are unscaled and added up over micro-batches in fp32, weighted by what each
   counts (tokens). The scale does not change inside this window.
3. They are summed over the devices of the data axes in fp32.
4. They are checked. An inf or NaN outlives the steps before, so one check of the result
   speaks for scaled and unscaled values, all micro-batches and all devices alike.
5. The norm is taken and the gradient clipped: of unscaled values, so that the threshold
   does not depend on the scale.
6. The optimizer updates the master weights.
7. If anything that would be written is not finite, the whole previous state is selected
   instead: parameters, optimizer and its schedule, model state, average, step.
8. The scale is adjusted, last, so that 2 used the scale of 1.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .clip import clip_by_norm, global_norm
from .leaves import (
    PyTree,
    finite_by_leaf,
    float_leaves,
    is_float,
    merge,
    of_same_types,
    path_name,
    select,
    stays_finite,
)
from .loss_scale import LossScale
from .policy import Policy
from .state import TrainState

# loss_fn(params, model_state, batch, rng) -> (loss, (model_state, metrics))
LossFn = Callable[
    [PyTree, PyTree, PyTree, jax.Array], tuple[jax.Array, tuple[PyTree, dict]]
]
StepFn = Callable[[TrainState, PyTree], tuple[TrainState, dict[str, jax.Array]]]


def make_train_step(
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    *,
    policy: Policy,
    loss_scale: LossScale | None = None,
    clip_norm: float | None = None,
    micro_batches: int = 1,
    weight_fn: Callable[[PyTree], jax.Array] | None = None,
    ema_decay: float | None = None,
    axis_names: str | tuple[str, ...] = (),
    donate: bool = True,
) -> StepFn:
    """Makes `step(state, batch) -> (state, metrics)`, jitted.

    Args:
      loss_fn: `loss_fn(params, model_state, batch, rng) -> (loss, (model_state,
        metrics))`. `params` are the master weights, to be cast at each use (flax
        modules with `dtype=policy.compute` do). `loss` is a scalar, the mean over what
        counts in the batch, best computed in fp32. `metrics` is a dict of scalars that
        are means as well. A model without state gets and returns `()`.
      optimizer: any optax transformation. It sees unscaled, clipped gradients in the
        dtype of the master weights, and the loss as `value=`.
      policy: what the state was created with; its compute dtype is for the caller to
        give to the model.
      loss_scale: None for `policy.default_loss_scale()`.
      clip_norm: the bound of the gradient's global norm, or None.
      micro_batches: in how many equal parts along its first axis a batch is done, one
        after the other. One update is made for all of them.
      weight_fn: `weight_fn(batch)`, how much a (micro-)batch counts, a scalar of at
        least 0 such as its number of tokens that are not padding. Default: all the
        same. A micro-batch that counts 0 has no influence at all; where all do, the
        optimizer sees a gradient of zero.
      ema_decay: of the moving average, for states created with `ema=True`.
      axis_names: mesh axes over which batches are split, when the step is called inside
        `jax.shard_map` with a replicated state. Under plain jit with sharded arrays
        leave it empty: values there are global already.
      donate: reuse the buffers of the state passed in, which is gone afterwards.

    Returns:
      The step. Its metrics are scalars on the device: `loss` (fp32, unscaled),
      `grad_norm` (fp32, before clipping), `loss_scale` (that this step used),
      `skipped`, `step`, `attempted_steps`, `consecutive_skips`, `total_skips`, and
      those of `loss_fn`; and `finite_leaves`, (leaves,) bool, for each floating leaf of
      the parameters whether its gradient was finite.

    Raises:
      ValueError: for an option out of its range; by the call, for a batch that does not
        divide into micro-batches, or an average without its decay.
      TypeError: by the call, for parameters of another dtype than `policy.params`, a
        loss function that returns something else, or a state that changes its type.

    References: Micikevicius et al., Mixed Precision Training, 2018, section 3.
    """
    if micro_batches < 1:
        raise ValueError(
            f"make_train_step: micro_batches must be at least 1; got {micro_batches}."
        )
    if clip_norm is not None and not clip_norm > 0:
        raise ValueError(
            f"make_train_step: clip_norm must be above 0; got {clip_norm}. "
            "Pass None not to clip."
        )
    if ema_decay is not None and not 0 <= ema_decay < 1:
        raise ValueError(
            "make_train_step: ema_decay must be at least 0 and below 1; "
            f"got {ema_decay}."
        )
    loss_scale = loss_scale or policy.default_loss_scale()
    optimizer = optax.with_extra_args_support(optimizer)
    axes = (axis_names,) if isinstance(axis_names, str) else tuple(axis_names)

    def step(state: TrainState, batch: PyTree):
        _check_params(state, policy, ema_decay)
        window = _window(
            loss_fn, loss_scale, state, batch, micro_batches, weight_fn, axes
        )
        grads, loss = window.grads, window.loss
        finite_leaves = finite_by_leaf(grads)
        norm = global_norm(grads)
        if clip_norm is not None:
            grads = clip_by_norm(grads, clip_norm, norm)

        # The norm can exceed fp32 though every gradient is finite; clipping would then
        # make all of them zero.
        finite = finite_leaves.all() & jnp.isfinite(norm)

        before = _written(state)

        def update():
            floats = float_leaves(state.params)
            # What is updated is the master weight, whatever its dtype.
            cast = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, floats)
            # optax mixes integers and floats, which strict promotion forbids.
            with jax.numpy_dtype_promotion("standard"):
                updates, opt_state = optimizer.update(
                    cast, state.opt_state, floats, value=loss
                )
            floats = optax.apply_updates(floats, updates)
            updated = replace(
                state,
                params=merge(floats, state.params),
                opt_state=opt_state,
                model_state=window.model_state,
                ema=_average(state.ema, floats, ema_decay),
                step=state.step + 1,
            )
            return of_same_types(_written(updated), before)

        # A branch, for XLA would otherwise compute the update again inside each check
        # that reads it, which takes twice as long to compile.
        after = jax.lax.cond(finite, update, lambda: before)
        finite &= stays_finite(after, before)
        new = replace(
            state,
            loss_scale=loss_scale.adjust(state.loss_scale, finite),
            attempted_steps=state.attempted_steps + 1,
            **select(finite, after, before),
        )
        metrics = {
            "loss": loss,
            "grad_norm": norm,
            "loss_scale": state.loss_scale.scale,
            "skipped": ~finite,
            "step": new.step,
            "attempted_steps": new.attempted_steps,
            "consecutive_skips": new.loss_scale.consecutive_skips,
            "total_skips": new.loss_scale.total_skips,
            "finite_leaves": finite_leaves,
        }
        taken = sorted(metrics.keys() & window.metrics.keys())
        if taken:
            raise ValueError(
                f"make_train_step: loss_fn returns a metric named {taken[0]!r}, which "
                "the step reports itself. Give it another name."
            )
        return new, metrics | window.metrics

    return jax.jit(step, donate_argnums=(0,) if donate else ())


def _written(state: TrainState) -> dict[str, PyTree]:
    """What a step writes and a skip leaves alone, by name: errors speak of it."""
    names = ("params", "opt_state", "model_state", "ema", "step")
    return {name: getattr(state, name) for name in names}


class _Window(NamedTuple):
    """What the micro-batches of one step come to."""

    grads: PyTree  # fp32, unscaled, weighted mean
    loss: jax.Array  # fp32, unscaled, weighted mean
    model_state: PyTree
    metrics: dict[str, jax.Array]  # fp32, weighted means


def _window(loss_fn, loss_scale, state, batch, micro_batches, weight_fn, axes):
    # Inside shard_map JAX would sum a replicated parameter's gradient over the mesh
    # where the parameter is used, which is in half precision. Made varying first, it
    # gets the device's own gradient, in fp32, to be summed below.
    vary = functools.partial(_pcast, axes=axes)
    params, model_state = vary((state.params, state.model_state))
    floats = float_leaves(params)
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

        grad_sum = jax.tree.map(lambda s, g: s + weigh(g), grad_sum, grads)
        model_state = select(counts, vary(new_model_state), model_state)
        terms = vary(jax.tree.map(weigh, (loss, metrics)))
        return (grad_sum, model_state), (*terms, weight)

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), floats)
    carry = vary(zeros), model_state
    if micro_batches == 1:
        (grad_sum, model_state), terms = one(carry, (batch, 0))
    else:
        parts = _split(batch, micro_batches), jnp.arange(micro_batches)
        (grad_sum, model_state), terms = jax.lax.scan(one, carry, parts)
        terms = jax.tree.map(lambda x: x.sum(0), terms)

    *sums, weight = (grad_sum, *terms)
    if axes:
        sums, weight = jax.lax.psum((sums, weight), axes)
        model_state = jax.tree.map(lambda x: _replicated(x, axes), model_state)
    # A window that counts nothing has gradient zero, not 0/0.
    weight = jnp.where(weight > 0, weight, 1.0)
    grads, loss, metrics = jax.tree.map(lambda x: x / weight, tuple(sums))
    return _Window(grads, loss, model_state, metrics)


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
        varying = jax.typeof(x).manual_axis_type.varying
        missing = tuple(a for a in axes if a not in varying)
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree) if axes else tree


def _replicated(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Model state after a window: the mean over devices; counters agree already."""
    return jax.lax.pmean(x, axes) if is_float(x) else jax.lax.pmax(x, axes)


def _average(ema: PyTree, floats: PyTree, decay: float | None) -> PyTree:
    if decay is None:
        return ema

    def towards(e, p):
        return e + (1.0 - decay) * (p.astype(jnp.float32) - e)

    return jax.tree.map(towards, ema, floats)


def _check_params(state: TrainState, policy: Policy, ema_decay: float | None) -> None:
    for path, leaf in jax.tree.flatten_with_path(state.params)[0]:
        if is_float(leaf) and leaf.dtype != policy.params:
            raise TypeError(
                f"train step: parameter {path_name(path)!r} must be {policy.params}, "
                f"the policy's dtype of parameters; got {leaf.dtype}. "
                "Make the state with TrainState.create."
            )
    if (state.ema is None) != (ema_decay is None):
        raise ValueError(
            "train step: ema_decay goes with TrainState.create(..., ema=True); "
            f"got ema_decay={ema_decay} and a state "
            f"{'without' if state.ema is None else 'with'} an average."
        )


def nonfinite_paths(params: Any, finite_leaves: Any) -> tuple[str, ...]:
    """Names of the leaves that `metrics["finite_leaves"]` says were not finite."""
    names = jax.tree.flatten_with_path(float_leaves(params))[0]
    return tuple(
        path_name(path)
        for (path, _), finite in zip(names, finite_leaves, strict=True)
        if not finite
    )
