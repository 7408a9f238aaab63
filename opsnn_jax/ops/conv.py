"""Convolution: y = activation(z), with

    z[n, i, o] = sum_{k, c} x[n, s i + d k - lo, c] w[k, c, o] + b[o] + r[n, i, o]

Gradients, with dz the cotangent of z, dz = activation'(z) dy:

    dx[n, j, c] = sum_{i, k: s i + d k - lo = j, o}  dz[n, i, o] w[k, c, o]
    dw[k, c, o] = sum_{n, i}  x[n, s i + d k - lo, c] dz[n, i, o]
    db[o]       = sum_{n, i}  dz[n, i, o]
    dr          = dz

r is the residual.

Saved for backward: x and w; with relu y; with another activation z.
Channels are last: x (N, *S, C), w (*K, C / groups, O).
"""

import dataclasses
import functools
import inspect
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from opsnn_jax.dispatch import Choice, Requested
from opsnn_jax.kernels.conv.epilogue import activation_gradient
from opsnn_jax.kernels.conv.spec import ConvSpec
from opsnn_jax.meshes import align_varying, partitioned

from .arguments import as_float_array
from .conv_arguments import Padding, as_groups, check_filter, validate
from .conv_table import TABLE
from .layout import check_layout, from_channels_last, to_channels_last


def conv(
    x: Float[Array, "N *S C"],
    w: Float[Array, "*K Cg O"],
    b: Float[Array, "O"] | None = None,
    *,
    residual: Float[Array, "N *T O"] | None = None,
    strides: int | Sequence[int] = 1,
    padding: Padding = "SAME",
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    activation: str | None = None,
    layout: str = "channels_last",
    precision: lax.PrecisionLike = None,
    implementation: Requested = None,
) -> Float[Array, "N *T O"]:
    """Convolves in one, two or three spatial dimensions, whichever x has.

    Args:
      x: `(N, *S, C)`, float16, bfloat16, float32, or, under jax_enable_x64, float64.
      w: `(*K, C / groups, O)`, of x's dtype.
      b: `(O,)` of x's dtype, added before the result is rounded.
      residual: of the result's shape and x's dtype, added likewise, before the
        activation.
      strides: one positive int for all dimensions, or one for each.
      padding: "SAME", "SAME_LOWER", "VALID", "CAUSAL" (one dimension only), an int for
        both ends of all dimensions, or for each dimension an int or a (low, high) pair.
        A negative number crops.
      dilation: of the filter; as `strides`.
      groups: divides C and O; each group of O / groups outputs sees C / groups inputs.
      activation: None, "relu", "gelu" (the tanh form) or "silu", applied before the
        result is rounded.
      layout: of x, residual and the result: "channels_last"; "channels_first", so
        `(N, C, *S)`; or "blocked", so `(N, C1, *S, C0)` as `to_blocked` makes it. w is
        `(*K, C / groups, O)` in all of them.
      precision: of fp32 products on hardware that has several, as in `jax.lax`. The
        Winograd forms of float32 always take the highest.
      implementation: None chooses for each platform, forward, dx and dw apart;
        "direct" is XLA's convolution; "gemm" matrix products of gathered inputs;
        "pointwise" (1-tap kernels) one matrix product; "depthwise" (groups = C)
        shifted multiply-adds; "block_diagonal" and "block_diagonal_16" (groups) dense
        convolutions with zeros in their filters, 128 and 16 channels wide; "phases"
        (strides) stride 1 over the phases of x; "planes" (three dimensions) a sum of
        two-dimensional convolutions; "winograd" F(4, 3) in plain XLA (F(2, 5) for 5
        taps, and so on; in three dimensions F(2, 3) along the first); "winograd_f2",
        "winograd_f4", "winograd_f6" tiles of 2, 4, 6 outputs for 3 taps, of 2 and 4 for
        5; "pallas_tpu" a Pallas kernel, F(4, 3) for float32, for bfloat16 F(2, 3) with
        its multiplicands rounded; "pallas_tpu_depthwise" (groups = C, stride 1) one;
        "reference" is `lax.conv_general_dilated` without a derivative rule of ours. A
        sequence is an order of preference.
        `opsnn_jax.explain` tells which.

    Returns:
      `(N, *T, O)` of x's dtype, T as in `lax.conv_general_dilated`.

    Raises:
      ValueError: for shapes or options that do not fit together, or an unknown name.
      TypeError: for anything but floating-point arrays of one dtype.
      NotImplementedError: if a named implementation cannot do this call.

    Precision: products are summed in fp32 (fp64 for fp64) and rounded once. Winograd's
      rms error is the product over the dimensions of `Transform.kappa` times that of
      the direct form: 1.7 for F(2, 3) in 2-D, 4.8 for F(4, 3), 21 for F(6, 3), 5.4 for
      F(2, 5), 19 for F(4, 5); in 3-D 6.2 for "winograd", 10 for "winograd_f4". Only
      F(4, 3), F(2, 5) and "winograd" in 3-D are ever chosen.
    Non-finite values: a result has one only if an element that it is a sum of has, and
      then as the direct form gives it; but an infinite weight may make NaN of the zeros
      of padding, and those that strides put into dy.
    Deterministic: yes.
    References: Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks",
      2015, for "winograd".

    Example:
      >>> import jax.numpy as jnp
      >>> x, w = jnp.ones((1, 5, 5, 2)), jnp.ones((3, 3, 2, 4))
      >>> y = conv(x, w, padding="VALID")
      >>> y.shape, float(y[0, 0, 0, 0])
      ((1, 3, 3, 4), 18.0)
    """
    return conv_of_rank(
        "conv", None, x, w, b, residual=residual, strides=strides, padding=padding,
        dilation=dilation, groups=groups, activation=activation, layout=layout,
        precision=precision, implementation=implementation,
    )  # fmt: skip


_OPTIONS = inspect.signature(conv).parameters.keys()


def _named(name: str, rank: int, x_shape: str, w_shape: str):
    """`conv` for one rank, under its usual name."""

    @functools.wraps(conv)
    def op(x, w, b=None, **options):
        for option in options.keys() - _OPTIONS:
            raise TypeError(f"{name}() got an unexpected keyword argument {option!r}")
        return conv_of_rank(name, rank, x, w, b, **options)

    op.__name__ = op.__qualname__ = name
    op.__doc__ = (
        f"`conv` for x `{x_shape}` and w `{w_shape}`; everything else as there."
    )
    return op


conv1d = _named("conv1d", 1, "(N, L, C)", "(k, C / groups, O)")
conv2d = _named("conv2d", 2, "(N, H, W, C)", "(kh, kw, C / groups, O)")
conv3d = _named("conv3d", 3, "(N, D, H, W, C)", "(kd, kh, kw, C / groups, O)")


def conv_of_rank(
    op, rank, x, w, b=None, *, residual=None, layout="channels_last", groups=1,
    implementation=None, **options,
):  # fmt: skip
    """`conv` in the name of `op`, for x of `rank` spatial dimensions (None: any)."""
    TABLE.check(implementation)
    check_layout(op, layout)
    x, w = as_float_array(op, "x", x), as_float_array(op, "w", w)
    b = None if b is None else as_float_array(op, "b", b)
    residual = None if residual is None else as_float_array(op, "residual", residual)
    block = x.shape[-1] if x.ndim else 0
    if layout != "channels_last":
        groups = as_groups(op, groups)
        check_filter(op, rank, w)
        x = to_channels_last(op, "x", layout, rank, x, w.shape[-2] * groups)
        if residual is not None:
            residual = to_channels_last(
                op, "residual", layout, rank, residual, w.shape[-1]
            )
    spec = validate(op, rank, x, w, b, residual, groups=groups, **options)
    operands = Operands(
        *(None if a is None else jnp.asarray(a) for a in (x, w, b, residual))
    )
    if implementation == "reference":
        y = _reference(spec, operands)
    else:
        operands = Operands(*align_varying(*operands))
        choice = TABLE.choose(implementation, spec)
        batch_and_outputs = [(0, 0), *[None] * spec.rank, (1, spec.rank + 1)]
        y = partitioned(
            lambda *operands: _conv(choice, Operands(*operands)),
            *operands,
            dims=batch_and_outputs,
        )
    return from_channels_last(layout, y, block)


# The derivative rule.


class Operands(NamedTuple):
    x: jax.Array
    w: jax.Array
    b: jax.Array | None
    residual: jax.Array | None

    def of_forward(self) -> tuple[jax.Array, ...]:
        """What the forward pass takes: x, w, and b and residual if there are any."""
        x, w, b, residual = self
        if residual is None:
            return (x, w) if b is None else (x, w, b)
        return (x, w, jnp.zeros(w.shape[-1], w.dtype) if b is None else b, residual)


class Saved(NamedTuple):
    operands: Operands  # b and residual for their being there
    kept: jax.Array | None  # y with relu, z with another activation, in x's dtype


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _conv(choice: Choice, operands: Operands) -> jax.Array:
    return choice["fwd"](*operands.of_forward())


def _conv_fwd(choice, operands):
    forward = choice["fwd"]
    if forward.spec.activation in (None, "relu"):
        y = forward(*operands.of_forward())
        kept = None if forward.spec.activation is None else y
    else:
        keeps = dataclasses.replace(forward.spec, keep_preactivation=True)
        forward = dataclasses.replace(forward, spec=keeps)
        y, kept = forward(*operands.of_forward())
    return y, Saved(operands, kept)


def conv_gradients(choice: Choice, saved: Saved, dy: jax.Array) -> tuple[Operands]:
    """The cotangents of what the forward pass took."""
    (x, w, b, residual), kept = saved
    spec = choice["fwd"].spec
    dz = dy if kept is None else activation_gradient(spec, kept, dy)
    db = None
    if b is not None:
        axes = tuple(range(dz.ndim - 1))
        db = jnp.sum(dz, axes, dtype=spec.accumulate_dtype).astype(b.dtype)
    dz = dz.astype(dy.dtype)
    dx = choice["dx"](w, dz)
    dw = choice["dw"](x, dz)
    return (Operands(dx, dw, db, None if residual is None else dz),)


_conv.defvjp(_conv_fwd, conv_gradients)


def _reference(spec: ConvSpec, operands: Operands) -> jax.Array:
    """The definition: JAX's own convolution and its own derivatives."""
    x, w, b, residual = operands
    s = "DHW"[-spec.rank :]
    # Padded apart: then no derivative has negative padding, see kernels/conv/direct.py.
    config = [(0, 0, 0), *((lo, hi, 0) for lo, hi in spec.padding), (0, 0, 0)]
    z = lax.conv_general_dilated(
        lax.pad(x, jnp.zeros((), x.dtype), config),
        w,
        spec.strides,
        "VALID",
        rhs_dilation=spec.dilation,
        dimension_numbers=(f"N{s}C", f"{s}IO", f"N{s}C"),
        feature_group_count=spec.groups,
        precision=spec.precision,
    )
    if b is not None:
        z = z + b[(None,) * (z.ndim - 1)]
    if residual is not None:
        z = z + residual
    return z if spec.activation is None else getattr(jax.nn, spec.activation)(z)
