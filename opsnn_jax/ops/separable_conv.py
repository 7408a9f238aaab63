"""Depthwise separable convolution: each channel on its own, then all channels at each
pixel. It has 1 / O + 1 / (kh kw) of the multiplications of a full convolution."""

from collections.abc import Sequence

import jax
from jax import lax
from jaxtyping import Array, Float

from opsnn_jax.dispatch import Requested

from .arguments import as_float_array
from .conv import conv_of_rank
from .conv_arguments import Padding
from .layout import check_layout

_OP = "separable_conv2d"


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
    check_layout(_OP, layout)
    x = as_float_array(_OP, "x", x)
    w_depthwise = as_float_array(_OP, "w_depthwise", w_depthwise)
    w_pointwise = as_float_array(_OP, "w_pointwise", w_pointwise)
    if x.ndim != 4:
        raise ValueError(
            f"{_OP}: x must have 4 dimensions, (N, H, W, C); got shape {x.shape}. Add "
            "a batch dimension with x[None]."
        )
    for name, w, what, ones in (
        ("w_depthwise", w_depthwise, "(kh, kw, 1, M)", slice(2, 3)),
        ("w_pointwise", w_pointwise, "(1, 1, M, O)", slice(0, 2)),
    ):
        if w.ndim != 4 or set(w.shape[ones]) != {1}:
            raise ValueError(f"{_OP}: {name} must have shape {what}; got {w.shape}.")
        if w.dtype != x.dtype:
            raise TypeError(
                f"{_OP}: {name} must have the dtype of x, {x.dtype}; got {w.dtype}. "
                f"Cast it with {name}.astype(x.dtype)."
            )
    if w_pointwise.shape[2] != w_depthwise.shape[3]:
        raise ValueError(
            f"{_OP}: w_pointwise must have shape (1, 1, M, O) with M = "
            f"{w_depthwise.shape[3]}, as w_depthwise {w_depthwise.shape} has it; got "
            f"{w_pointwise.shape}."
        )
    if layout == "blocked":
        raise ValueError(
            f"{_OP}: layout must be 'channels_last' or 'channels_first'; got "
            "'blocked', which does not tell how many channels x has. Use from_blocked "
            "first."
        )
    common = dict(layout=layout, precision=precision, implementation=implementation)
    y = conv_of_rank(
        _OP, 2, x, w_depthwise, strides=strides, padding=padding, dilation=dilation,
        groups=x.shape[1 if layout == "channels_first" else -1], **common,
    )  # fmt: skip
    return conv_of_rank(
        _OP, 2, y, w_pointwise, b, residual=residual, activation=activation, **common
    )
