"""Depthwise separable convolution: each channel on its own, then all channels at each
pixel. It has 1 / O + 1 / (kh kw) of the multiplications of a full convolution.

    z = depthwise(x)        y = activation(pointwise(z) + b + residual)

The gradients are those of the two convolutions in turn. Saved for backward: the
operands, z, and what `conv` saves of y.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from opsnn_jax.dispatch import Choice, Requested
from opsnn_jax.kernels.conv.separable import SeparableSpec
from opsnn_jax.meshes import align_varying, partitioned

from . import conv_table
from .arguments import as_float_array
from .conv import Operands, Saved, conv_gradients, conv_of_rank
from .conv_arguments import Padding, validate
from .layout import check_layout, from_channels_last, to_channels_last
from .separable_table import FUSED, OP, fused_pays, table


def separable_conv2d(
    x: Float[Array, "N H W C"],
    w_depthwise: Float[Array, "kh kw 1 M"],
    w_pointwise: Float[Array, "1 1 M O"],
    b: Float[Array, "O"] | None = None,
    *,
    residual: Float[Array, "N Ho Wo O"] | None = None,
    strides: int | Sequence[int] = 1,
    padding: Padding = "SAME",
    dilation: int | Sequence[int] = 1,
    activation: str | None = None,
    layout: str = "channels_last",
    precision: lax.PrecisionLike = None,
    implementation: Requested = None,
) -> jax.Array:
    """`conv2d` of each channel by its own filters, then a 1x1 `conv2d`.

    Args:
      x: `(N, H, W, C)`.
      w_depthwise: `(kh, kw, 1, M)`, M a multiple of C: M / C filters a channel.
      w_pointwise: `(1, 1, M, O)`.
      b, residual, activation: of the second convolution, as in `conv`.
      strides, padding, dilation: of the first, as in `conv`.
      layout: "channels_last" or "channels_first".
      precision: as in `conv`.
      implementation: as in `conv`, of both; one that is named must be able to do both.
        "pallas_tpu_separable" (M = C, strides 1) is one Pallas kernel for both, whose
        gradients are those of convolutions chosen as by None. In an order of preference
        it comes first, and what follows is asked of both convolutions.

    Returns:
      `(N, Ho, Wo, O)`; between the two the values are rounded to x's dtype.

    Raises:
      ValueError, TypeError: as `conv`.

    Example:
      >>> import jax.numpy as jnp
      >>> x = jnp.ones((1, 8, 8, 4))
      >>> w_depthwise, w_pointwise = jnp.ones((3, 3, 1, 4)), jnp.ones((1, 1, 4, 6))
      >>> separable_conv2d(x, w_depthwise, w_pointwise, strides=2).shape
      (1, 4, 4, 6)

    References: Chollet, "Xception", 2017.
    """
    check_layout(OP, layout)
    x = as_float_array(OP, "x", x)
    w_depthwise = as_float_array(OP, "w_depthwise", w_depthwise)
    w_pointwise = as_float_array(OP, "w_pointwise", w_pointwise)
    if x.ndim != 4:
        raise ValueError(
            f"{OP}: x must have 4 dimensions, (N, H, W, C); got shape {x.shape}. Add "
            "a batch dimension with x[None]."
        )
    for name, w, what, ones in (
        ("w_depthwise", w_depthwise, "(kh, kw, 1, M)", slice(2, 3)),
        ("w_pointwise", w_pointwise, "(1, 1, M, O)", slice(0, 2)),
    ):
        if w.ndim != 4 or set(w.shape[ones]) != {1}:
            raise ValueError(f"{OP}: {name} must have shape {what}; got {w.shape}.")
        if w.dtype != x.dtype:
            raise TypeError(
                f"{OP}: {name} must have the dtype of x, {x.dtype}; got {w.dtype}. "
                f"Cast it with {name}.astype(x.dtype)."
            )
    if layout == "blocked":
        raise ValueError(
            f"{OP}: layout must be 'channels_last' or 'channels_first'; got "
            "'blocked', which does not tell how many channels x has. Use from_blocked "
            "first."
        )
    channels = x.shape[1 if layout == "channels_first" else -1]
    if channels < 1 or w_depthwise.shape[3] % channels:
        raise ValueError(
            f"{OP}: w_depthwise must have shape (kh, kw, 1, M) with M a multiple of "
            f"the channels of x, of which there must be some; got {w_depthwise.shape} "
            f"with x {x.shape} in layout={layout!r}."
        )
    if w_pointwise.shape[2] != w_depthwise.shape[3]:
        raise ValueError(
            f"{OP}: w_pointwise must have shape (1, 1, M, O) with M = "
            f"{w_depthwise.shape[3]}, as w_depthwise {w_depthwise.shape} has it; got "
            f"{w_pointwise.shape}."
        )
    requested, each = _split(implementation)
    b = None if b is None else as_float_array(OP, "b", b)
    if residual is not None:
        residual = as_float_array(OP, "residual", residual)
    if layout == "channels_first":
        x = to_channels_last(OP, "x", layout, 2, x, x.shape[1])
        if residual is not None:
            outputs = w_pointwise.shape[-1]
            residual = to_channels_last(OP, "residual", layout, 2, residual, outputs)
    first = dict(
        strides=strides, padding=padding, dilation=dilation, groups=x.shape[-1],
        precision=precision,
    )  # fmt: skip
    second = dict(residual=residual, activation=activation, precision=precision)
    depthwise = validate(OP, 2, x, w_depthwise, None, **first)
    between = jax.ShapeDtypeStruct(depthwise.y_shape, x.dtype)
    pointwise = validate(OP, 2, between, w_pointwise, b, **second)
    spec = SeparableSpec(depthwise, pointwise)
    fused = requested is not None or (implementation is None and fused_pays(spec))
    if fused and not (depthwise.is_empty or pointwise.is_empty):
        arrays = (x, w_depthwise, w_pointwise, b, residual)
        arrays = (None if a is None else jnp.asarray(a) for a in arrays)
        y = _in_one(spec, requested, each, _Arrays(*align_varying(*arrays)))
    else:
        z = conv_of_rank(OP, 2, x, w_depthwise, implementation=each, **first)
        y = conv_of_rank(OP, 2, z, w_pointwise, b, implementation=each, **second)
    return from_channels_last(layout, y, 0)


def _split(implementation: Requested) -> tuple[Requested, Requested]:
    """What is asked of the table of both, None if nothing, and of each convolution."""
    if implementation == FUSED:
        return FUSED, None
    names = implementation if isinstance(implementation, list | tuple) else ()
    if FUSED not in names:
        return None, implementation
    if names.index(FUSED) or names.count(FUSED) > 1:
        raise ValueError(
            f"{OP}: {FUSED!r} must come first in an order of preference; got "
            f"{implementation!r}. What follows it is asked of both convolutions."
        )
    rest = tuple(names[1:])
    if not rest:
        return FUSED, None
    conv_table.TABLE.check(rest)
    return (FUSED, "separate"), rest


# The derivative rule of both in one.


class _Arrays(NamedTuple):
    x: jax.Array
    w_depthwise: jax.Array
    w_pointwise: jax.Array
    b: jax.Array | None
    residual: jax.Array | None


@dataclasses.dataclass(frozen=True)
class _Choices:
    """Of the forward pass of both, and of each one's gradients."""

    both: Choice
    depthwise: Choice
    pointwise: Choice


class _Kept(NamedTuple):
    arrays: _Arrays
    z: jax.Array
    kept: jax.Array | None  # of the second convolution, as `conv` saves it


def _in_one(spec, requested, each, arrays):
    choices = _Choices(
        table(each).choose(requested, spec),
        *(conv_table.TABLE.choose(each, s) for s in (spec.depthwise, spec.pointwise)),
    )
    return partitioned(
        lambda *arrays: _separable(choices, _Arrays(*arrays)),
        *arrays,
        dims=[(0, 0), None, None, (2, 3)],
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _separable(choices: _Choices, arrays: _Arrays) -> jax.Array:
    x, w_depthwise, *second = arrays
    return choices.both["fwd"](
        x, w_depthwise, *Operands(None, *second).of_forward()[1:]
    )


def _separable_fwd(choices, arrays):
    forward = choices.both["fwd"]
    activation = forward.spec.pointwise.activation
    keeps = activation not in (None, "relu")
    spec = dataclasses.replace(
        forward.spec,
        pointwise=dataclasses.replace(forward.spec.pointwise, keep_preactivation=keeps),
        keep_between=True,
    )
    forward = dataclasses.replace(forward, spec=spec)
    x, w_depthwise, *second = arrays
    outs = forward(x, w_depthwise, *Operands(None, *second).of_forward()[1:])
    y, z = outs[0], outs[-1]
    kept = outs[1] if keeps else None if activation is None else y
    return y, _Kept(arrays, z, kept)


def _separable_bwd(choices, saved, dy):
    x, w_depthwise, *second = saved.arrays
    second = Saved(Operands(saved.z, *second), saved.kept)
    (second,) = conv_gradients(choices.pointwise, second, dy)
    first = Saved(Operands(x, w_depthwise, None, None), None)
    (first,) = conv_gradients(choices.depthwise, first, second.x)
    return (_Arrays(first.x, first.w, *second[1:]),)


_separable.defvjp(_separable_fwd, _separable_bwd)
