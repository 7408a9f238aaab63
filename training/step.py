"""One training step in mixed precision.

The order, and why:

1. The loss is cast to fp32 and multiplied by the scale, then differentiated with
   respect to the fp32 master weights. The loss function casts them at each use.
2. Gradients are unscaled and added up over micro-batches in fp32, weighted by what each
   counts (tokens). The scale does not change inside this window.
3. They are summed over the devices of the data axes in fp32, or what a compression
   leaves of them is.
4. They are checked. An inf or NaN outlives the steps before, so one check of the result
   speaks for scaled and unscaled values, all micro-batches and all devices alike.
5. The norm is taken and the gradient clipped: of unscaled values, so that the threshold
   does not depend on the scale.
6. The optimizer updates the master weights.
7. If anything that would be written is not finite, the whole previous state is selected
   instead: parameters, optimizer and its schedule, model state, average, step.
8. The scale is adjusted, last, so that 2 used the scale of 1.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .clip import ClipRule, clip_by_norm, clip_by_rules, global_norm
from .compression import Compression
from .leaves import (
    PyTree,
    cast_like,
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
from .monitor import Monitor
from .policy import Policy
from .state import TrainState
from .window import LossFn, accumulate

StepFn = Callable[[TrainState, PyTree], tuple[TrainState, dict[str, jax.Array]]]


def make_train_step(
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    *,
    policy: Policy,
    loss_scale: LossScale | None = None,
    clip_norm: float | None = None,
    clip_rules: Sequence[ClipRule] = (),
    micro_batches: int = 1,
    weight_fn: Callable[[PyTree], jax.Array] | None = None,
    ema_decay: float | None = None,
    axis_names: str | tuple[str, ...] = (),
    compression: Compression | None = None,
    monitor: Monitor | None = None,
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
      clip_rules: bounds for some parameters or for each row of them, which hold first.
      micro_batches: in how many equal parts along its first axis a batch is done, one
        after the other. One update is made for all of them.
      weight_fn: `weight_fn(batch)`, how much a (micro-)batch counts, a scalar of at
        least 0 such as its number of tokens that are not padding. Default: all the
        same. A micro-batch that counts 0 has no influence at all; where all do, the
        optimizer sees a gradient of zero.
      ema_decay: of the moving average, for states created with `ema=True`.
      axis_names: mesh axes over which batches are split, when the step is called inside
        `jax.shard_map` (with `check_vma=True`, its default). Parameters may be split
        over other axes, and the optimizer's state along with them; the verdict and the
        norm are still global. Under plain jit with sharded arrays leave it empty:
        values there are global already.
      compression: what a device sends of its gradients to the others on these axes, for
        states created with it. It takes the place of `policy.reduce`. The specs of
        `jax.shard_map` split `state.residual` over these axes.
      monitor: what else is measured, now and then.
      donate: reuse the buffers of the state passed in, which is gone afterwards.

    Returns:
      The step. Its metrics are scalars on the device: `loss` (fp32, unscaled),
      `grad_norm` (fp32, before clipping), `loss_scale` (that this step used),
      `skipped`, `step`, `attempted_steps`, `consecutive_skips`, `total_skips`, and
      those of `loss_fn`; and `finite_leaves`, (leaves,) bool, for each floating leaf of
      the parameters whether its gradient was finite. With a monitor, `monitor` too.

    Raises:
      ValueError: for an option out of its range; by the call, for a batch that does not
        divide into micro-batches, or an average without its decay or a residual
        without its compression.
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
    if compression is not None and not axis_names:
        raise ValueError(
            "make_train_step: compression is of what is sent over the axes of the data "
            "inside jax.shard_map; got no axis_names. Name them."
        )
    loss_scale = loss_scale or policy.default_loss_scale()
    optimizer = optax.with_extra_args_support(optimizer)
    axes = (axis_names,) if isinstance(axis_names, str) else tuple(axis_names)

    def step(state: TrainState, batch: PyTree):
        _check_params(state, policy, ema_decay)
        _check_residual(state, compression, axes)
        window = accumulate(
            loss_fn,
            policy,
            loss_scale,
            state,
            batch,
            micro_batches,
            weight_fn,
            axes,
            compression,
        )
        grads, loss = window.grads, window.loss
        finite_leaves = finite_by_leaf(grads)
        # The norm can exceed fp32 though every gradient is finite; clipping would then
        # make all of them zero.
        norm = global_norm(grads)
        finite = finite_leaves.all() & jnp.isfinite(norm)
        before = _written(state)

        def clip():
            clipped = clip_by_rules(grads, clip_rules) if clip_rules else grads
            if clip_norm is None:
                return clipped
            left = global_norm(clipped) if clip_rules else norm
            return clip_by_norm(clipped, clip_norm, left)

        def update():
            floats = float_leaves(state.params)
            # What is updated is the master weight, whatever its dtype.
            cast = jax.tree.map(lambda g, p: g.astype(p.dtype), clip(), floats)
            # optax mixes integers and floats, which strict promotion forbids. Of a rate
            # that is an array, updates and traces take the dtype.
            with jax.numpy_dtype_promotion("standard"):
                updates, opt_state = optimizer.update(
                    cast, state.opt_state, floats, value=loss
                )
                floats = optax.apply_updates(floats, updates)
            updated = replace(
                state,
                params=merge(floats, state.params),
                opt_state=cast_like(opt_state, state.opt_state),
                model_state=window.model_state,
                ema=_average(state.ema, floats, ema_decay),
                step=state.step + 1,
                residual=window.residual,
            )
            return of_same_types(_written(updated), before)

        # A branch, for XLA would otherwise compute the update again inside each check
        # that reads it, which takes twice as long to compile.
        after = jax.lax.cond(finite, update, lambda: before)
        # Another, so that the verdict is computed once, and not by each selection anew.
        finite = jax.lax.cond(
            finite, lambda: stays_finite(after, before), lambda: jnp.asarray(False)
        )
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
        taken = sorted((metrics.keys() | {"monitor"}) & window.metrics.keys())
        if taken:
            raise ValueError(
                f"make_train_step: loss_fn returns a metric named {taken[0]!r}, which "
                "the step reports itself. Give it another name."
            )
        if monitor is not None:
            metrics["monitor"] = monitor.measure(
                state.attempted_steps, grads, state.params, new.params
            )
        return new, metrics | window.metrics

    return jax.jit(step, donate_argnums=(0,) if donate else ())


def _written(state: TrainState) -> dict[str, PyTree]:
    """What a step writes and a skip leaves alone, by name: errors speak of it."""
    names = ("params", "opt_state", "model_state", "ema", "step", "residual")
    return {name: getattr(state, name) for name in names}


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


def _check_residual(
    state: TrainState, compression: Compression | None, axes: tuple[str, ...]
) -> None:
    if (state.residual is None) != (compression is None):
        raise ValueError(
            "train step: compression goes with TrainState.create(..., compression=, "
            f"workers=); got compression={compression} and a state "
            f"{'without' if state.residual is None else 'with'} residuals."
        )
    for leaf in jax.tree.leaves(state.residual):
        if leaf.shape[0] != 1:
            raise ValueError(
                "train step: each device must have one residual; got "
                f"{leaf.shape[0]}. Create the state with as many workers as there are "
                f"devices on {axes}, and split state.residual over them in the specs "
                "of jax.shard_map."
            )


def nonfinite_paths(params: Any, finite_leaves: Any) -> tuple[str, ...]:
    """Names of the leaves that `metrics["finite_leaves"]` says were not finite."""
    names = jax.tree.flatten_with_path(float_leaves(params))[0]
    return tuple(
        path_name(path)
        for (path, _), finite in zip(names, finite_leaves, strict=True)
        if not finite
    )
