"""Convolution: y[n, i, o] = b[o] + sum_{k, c} x[n, s i + d k - lo, c] w[k, c, o].

Gradients, with dy the cotangent of y:

    dx[n, j, c] = sum_{i, k: s i + d k - lo = j, o}  dy[n, i, o] w[k, c, o]
    dw[k, c, o] = sum_{n, i}  x[n, s i + d k - lo, c] dy[n, i, o]
    db[o]       = sum_{n, i}  dy[n, i, o]

Saved for backward: x and w. Channels are last: x (N, *S, C), w (*K, C / groups, O).
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from opsnn_jax.dispatch import (
    Implementation,
    Requested,
    Table,
    align_varying,
    deferred,
    partitioned,
)
from opsnn_jax.kernels.conv import direct
from opsnn_jax.kernels.conv.spec import ConvSpec
from opsnn_jax.kernels.dtypes import accumulate_dtype
from opsnn_jax.kernels.winograd import xla as winograd

from .arguments import as_float_array
from .conv_arguments import Padding, validate


def conv(
    x: Float[Array, "N *S C"],
    w: Float[Array, "*K Cg O"],
    b: Float[Array, "O"] | None = None,
    *,
    strides: int | Sequence[int] = 1,
    padding: Padding = "SAME",
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    precision: lax.PrecisionLike = None,
    implementation: Requested = None,
) -> Float[Array, "N *T O"]:
    """Convolves in one, two or three spatial dimensions, whichever x has.

    Args:
      x: `(N, *S, C)`, float16, bfloat16, float32, or, under jax_enable_x64, float64.
      w: `(*K, C / groups, O)`, of x's dtype.
      b: `(O,)` of x's dtype, added before the result is rounded.
      strides: one positive int for all dimensions, or one for each.
      padding: "SAME", "SAME_LOWER", "VALID", "CAUSAL" (one dimension only), an int for
        both ends of all dimensions, or for each dimension an int or a (low, high) pair.
        A negative number crops.
      dilation: of the filter; as `strides`.
      groups: divides C and O; each group of O / groups outputs sees C / groups inputs.
      precision: of fp32 products on hardware that has several, as in `jax.lax`. The
        Winograd forms always take the highest.
      implementation: None chooses for each platform; "direct" is XLA's convolution;
        "winograd" is F(4, 3) in plain XLA; "pallas_tpu" is F(4, 3) as a Pallas kernel;
        "reference" is `lax.conv_general_dilated` without a derivative rule of ours.
        A sequence is an order of preference.

    Returns:
      `(N, *T, O)` of x's dtype, T as in `lax.conv_general_dilated`.

    Raises:
      ValueError: for shapes or options that do not fit together, or an unknown name.
      TypeError: for anything but floating-point arrays of one dtype.
      NotImplementedError: if a named implementation cannot do this call.

    Precision: products are summed in fp32 (fp64 for fp64) and rounded once. Winograd's
      rms error is about `Transform.kappa`^2 = 4.8 times that of the direct form.
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
    return _conv_of_rank(
        "conv", None, x, w, b, strides, padding, dilation, groups, precision,
        implementation,
    )  # fmt: skip


def _named(name: str, rank: int, x_shape: str, w_shape: str):
    """`conv` for one rank, under its usual name."""

    @functools.wraps(conv)
    def op(
        x, w, b=None, *, strides=1, padding="SAME", dilation=1, groups=1,
        precision=None, implementation=None,
    ):  # fmt: skip
        return _conv_of_rank(
            name, rank, x, w, b, strides, padding, dilation, groups, precision,
            implementation,
        )  # fmt: skip

    op.__name__ = op.__qualname__ = name
    op.__doc__ = (
        f"`conv` for x `{x_shape}` and w `{w_shape}`; everything else as there."
    )
    return op


conv1d = _named("conv1d", 1, "(N, L, C)", "(k, C / groups, O)")
conv2d = _named("conv2d", 2, "(N, H, W, C)", "(kh, kw, C / groups, O)")
conv3d = _named("conv3d", 3, "(N, D, H, W, C)", "(kd, kh, kw, C / groups, O)")


def _conv_of_rank(
    op, rank, x, w, b, strides, padding, dilation, groups, precision, implementation
):
    _TABLE.check(implementation)
    x, w = as_float_array(op, "x", x), as_float_array(op, "w", w)
    b = None if b is None else as_float_array(op, "b", b)
    spec = validate(op, rank, x, w, b, strides, padding, dilation, groups, precision)
    x, w, b = (None if a is None else jnp.asarray(a) for a in (x, w, b))
    if implementation == "reference":
        return _reference(spec, x, w, b)
    x, w, b = align_varying(x, w, b)
    choice = _TABLE.choose(implementation, spec)
    batch_and_outputs = [(0, 0), *[None] * spec.rank, (1, spec.rank + 1)]
    return partitioned(
        functools.partial(_conv, choice), x, w, b, dims=batch_and_outputs
    )


# The implementations and which is tried first.

_DIRECT = Implementation(
    "direct",
    {
        "fwd": direct.forward,
        "dx": direct.input_gradient,
        "dw": direct.weight_gradient,
    },
)
_WINOGRAD = Implementation(
    "winograd",
    {
        "fwd": winograd.forward,
        "dx": winograd.input_gradient,
        "dw": winograd.weight_gradient,
    },
    refuses=winograd.refuses,
)
_TPU = "opsnn_jax.kernels.winograd.tpu"
_WINOGRAD_TPU = Implementation(
    "pallas_tpu",
    {
        "fwd": deferred(_TPU, "forward"),
        "dx": deferred(_TPU, "input_gradient"),
        "dw": deferred(_TPU, "weight_gradient"),
    },
    platforms=("tpu",),
    refuses=deferred(_TPU, "refuses"),
    pallas=True,
)


def _order(name: str, platform: str, spec: ConvSpec) -> tuple[str, ...]:
    """What to try, best first, from the measurements of benchmarks/conv.py."""
    if platform == "cpu" and spec.rank == 2 and _winograd_pays(name, spec):
        return ("winograd", "direct")
    return ("direct",)


def _winograd_pays(name: str, spec: ConvSpec) -> bool:
    # Few channels: the transforms cost more than the products they save. Few tiles: the
    # transformed filter, 4 times the filter, is read for too few products.
    tiles = spec.x_shape[0] * math.prod(-(-s // 4) for s in spec.out_spatial)
    fewest = 32 if name == "dw" else 64
    return min(spec.w_shape[-2:]) >= fewest and tiles >= 96


_TABLE = Table("conv", (_DIRECT, _WINOGRAD, _WINOGRAD_TPU), _order, plain=_DIRECT)


# The derivative rule.


class _Residuals(NamedTuple):
    x: jax.Array
    w: jax.Array
    b: jax.Array | None  # for its dtype


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _conv(choice, x, w, b):
    return choice["fwd"](x, w) if b is None else choice["fwd"](x, w, b)


def _conv_fwd(choice, x, w, b):
    return _conv(choice, x, w, b), _Residuals(x, w, b)


def _conv_bwd(choice, residuals, dy):
    x, w, b = residuals
    dx = choice["dx"](w, dy)
    dw = choice["dw"](x, dy)
    db = None
    if b is not None:
        axes = tuple(range(dy.ndim - 1))
        db = jnp.sum(dy, axes, dtype=accumulate_dtype(dy.dtype)).astype(b.dtype)
    return dx, dw, db


_conv.defvjp(_conv_fwd, _conv_bwd)


def _reference(spec: ConvSpec, x, w, b):
    """The definition: JAX's own convolution and its own derivatives."""
    s = "DHW"[-spec.rank :]
    # Padded apart: then no derivative has negative padding, see kernels/conv/direct.py.
    config = [(0, 0, 0), *((lo, hi, 0) for lo, hi in spec.padding), (0, 0, 0)]
    y = lax.conv_general_dilated(
        lax.pad(x, jnp.zeros((), x.dtype), config),
        w,
        spec.strides,
        "VALID",
        rhs_dilation=spec.dilation,
        dimension_numbers=(f"N{s}C", f"{s}IO", f"N{s}C"),
        feature_group_count=spec.groups,
        precision=spec.precision,
    )
    return y if b is None else y + b[(None,) * (y.ndim - 1)]
