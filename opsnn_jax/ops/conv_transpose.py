"""Transposed convolution: the input gradient of a convolution, as an op of its own.

    y[n, j, o] = b[o] + sum_{i, k: s i + k' = j + lo, c} x[n, i, c] w[k, c, o]

x with s - 1 zeros between its elements, padded by (lo, hi), correlated with w; k' is
e - 1 - d k for an extent e = (kernel - 1) d + 1. With w' the filter flipped in space
and its channels swapped, y is dx of the convolution by w' that takes y to x; so the
gradients are that convolution's other two passes:

    dx = conv(dy, w')        dw' = its dw, from dy and x        db = sum of dy
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from opsnn_jax.dispatch import Choice, Requested
from opsnn_jax.kernels.conv.spec import ConvSpec
from opsnn_jax.kernels.conv.windows import transpose_filter
from opsnn_jax.meshes import align_varying, partitioned

from .arguments import as_float_array
from .bias import add_bias
from .conv_arguments import Padding, as_groups, resolve_padding, validate
from .conv_table import TABLE

_OP = "conv_transpose"


def conv_transpose(
    x: Float[Array, "N *S C"],
    w: Float[Array, "*K Cg O"],
    b: Float[Array, "O"] | None = None,
    *,
    strides: int | Sequence[int] = 1,
    padding: Padding = "SAME",
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    transpose_kernel: bool = False,
    precision: lax.PrecisionLike = None,
    implementation: Requested = None,
) -> Float[Array, "N *T O"]:
    """Convolves x with zeros put between its elements: `lax.conv_transpose`.

    Args:
      x: `(N, *S, C)`, one to three spatial dimensions; dtypes as in `conv`.
      w: `(*K, C / groups, O)` of x's dtype.
      b: `(O,)` of x's dtype.
      strides: how far apart the elements of x are put; int or one for each dimension.
      padding: "SAME" gives T = S strides, "VALID" T = S strides + max(K - strides, 0);
        an int or pairs are those of the spread x, as in `lax.conv_transpose`.
      dilation: of the filter; as `strides`.
      groups: divides C and O.
      transpose_kernel: w is `(*K, O / groups, C)`, the filter of the convolution that
        this is the transpose of.
      precision: as in `conv`.
      implementation: as in `conv`; the pass that runs is its dx.

    Returns:
      `(N, *T, O)` of x's dtype.

    Raises:
      ValueError, TypeError, NotImplementedError: as `conv`.

    Precision: sums in fp32 (fp64 for fp64), rounded; b is added to that, and its
      gradient summed in fp32 too.
    Deterministic: yes.

    Example:
      >>> import jax.numpy as jnp
      >>> x, w = jnp.ones((1, 4, 4, 2)), jnp.ones((3, 3, 2, 8))
      >>> conv_transpose(x, w, strides=2).shape
      (1, 8, 8, 8)
    """
    TABLE.check(implementation)
    x, w = as_float_array(_OP, "x", x), as_float_array(_OP, "w", w)
    b = None if b is None else as_float_array(_OP, "b", b)
    if not isinstance(transpose_kernel, bool):
        raise TypeError(
            f"{_OP}: transpose_kernel must be a bool; got "
            f"{type(transpose_kernel).__name__}."
        )
    groups = as_groups(_OP, groups)
    if transpose_kernel and w.ndim == x.ndim and w.shape[-1] != x.shape[-1]:
        raise ValueError(
            f"{_OP}: w must have shape (*kernel, O / groups, C) with C = {x.shape[-1]} "
            f"under transpose_kernel=True; got {w.shape}."
        )
    if isinstance(padding, str) and padding.upper() not in ("SAME", "VALID"):
        raise ValueError(
            f'{_OP}: padding must be "SAME", "VALID", an int, or an int or (low, high) '
            f"pair for each dimension; got {padding!r}. Pass one of these."
        )
    # Checked as the convolution of x that has this filter.
    plain = validate(
        _OP, None, x, _plain_filter(w, groups, transpose_kernel), b, strides=strides,
        padding=0, dilation=dilation, groups=groups, precision=precision,
    )  # fmt: skip
    pads = _pads(padding, plain)
    out_spatial = tuple(
        max(0, max(0, (size - 1) * stride + 1) + lo + hi - extent + 1)
        for size, stride, extent, (lo, hi) in zip(
            plain.spatial, plain.strides, plain.extent, pads, strict=True
        )
    )
    x, w, b = (None if a is None else jnp.asarray(a) for a in (x, w, b))
    if 0 in (*out_spatial, *x.shape, *w.shape):
        y = jnp.zeros((x.shape[0], *out_spatial, plain.w_shape[-1]), x.dtype)
    elif implementation == "reference":
        y = _reference(
            plain, pads, x, _untransposed(plain, w) if transpose_kernel else w
        )
    else:
        filter_ = w if transpose_kernel else transpose_filter(plain, w)
        spec = _of_the_transpose(plain, pads, out_spatial)
        x, filter_, b = align_varying(x, filter_, b)
        choice = TABLE.choose(implementation, spec)
        dims = [(0, 0), *[None] * spec.rank, (1, spec.rank)]
        y = partitioned(functools.partial(_transpose, choice), x, filter_, dims=dims)
    return y if b is None else add_bias(y, b)


def _plain_filter(w, groups, transpose_kernel):
    """What stands for w where shapes are checked: (*K, C / groups, O)."""
    if not transpose_kernel or w.ndim < 2:
        return w
    *kernel, outputs, channels = w.shape
    if channels % groups == 0:
        outputs, channels = outputs * groups, channels // groups
    return jax.ShapeDtypeStruct((*kernel, channels, outputs), w.dtype)


def _pads(padding, spec: ConvSpec):
    """The padding of the spread input."""
    if not isinstance(padding, str):
        return resolve_padding(_OP, padding, spec)
    pads = []
    for extent, stride in zip(spec.extent, spec.strides, strict=True):
        both = extent + stride - 2
        if padding.upper() == "VALID":
            lo, both = extent - 1, both + max(extent - stride, 0)
        else:
            lo = extent - 1 if stride > extent - 1 else -(-both // 2)
        pads.append((lo, both - lo))
    return tuple(pads)


def _of_the_transpose(plain, pads, out_spatial) -> ConvSpec:
    """The convolution from y to x, by the transposed filter."""
    *kernel, channels, outputs = plain.w_shape
    groups = plain.groups
    return ConvSpec(
        (plain.x_shape[0], *out_spatial, outputs),
        (*kernel, outputs // groups, channels * groups),
        plain.dtype,
        plain.strides,
        tuple(
            (extent - 1 - lo, extent - 1 - hi)
            for extent, (lo, hi) in zip(plain.extent, pads, strict=True)
        ),
        plain.dilation,
        groups,
        plain.precision,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _transpose(choice: Choice, x: jax.Array, w: jax.Array) -> jax.Array:
    return choice["dx"](w, x)


def _transpose_fwd(choice, x, w):
    return _transpose(choice, x, w), (x, w)


def _transpose_bwd(choice, saved, dy):
    x, w = saved
    return choice["fwd"](dy, w), choice["dw"](dy, x)


_transpose.defvjp(_transpose_fwd, _transpose_bwd)


def _untransposed(plain, w):
    """(*K, O / g, C), flipped, as (*K, C / g, O)."""
    *kernel, channels, outputs = plain.w_shape
    shape = (*kernel, outputs // plain.groups, channels * plain.groups)
    swapped = ConvSpec(
        plain.x_shape, shape, plain.dtype, plain.strides, plain.padding,
        plain.dilation, plain.groups,
    )  # fmt: skip
    return transpose_filter(swapped, w)


def _reference(plain, pads, x, w):
    s = "DHW"[-plain.rank :]
    # Padded apart: then no derivative has negative padding, see kernels/conv/direct.py.
    config = [
        (lo, hi, step - 1) for (lo, hi), step in zip(pads, plain.strides, strict=True)
    ]
    x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *config, (0, 0, 0)])
    return lax.conv_general_dilated(
        x,
        w,
        (1,) * plain.rank,
        "VALID",
        rhs_dilation=plain.dilation,
        dimension_numbers=(f"N{s}C", f"{s}IO", f"N{s}C"),
        feature_group_count=plain.groups,
        precision=plain.precision,
    )
