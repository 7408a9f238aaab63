"""What the linen and nnx layers of a transposed convolution share."""

import jax
import jax.numpy as jnp

from opsnn_jax.ops.conv_transpose import conv_transpose


def transpose_layer(
    layer, inputs: jax.Array, kernel: jax.Array, bias: jax.Array | None
) -> jax.Array:
    """What flax's ConvTranspose `layer` computes of promoted arrays.

    inputs is (*batch, *S, C) with any number of batch dimensions.
    """
    rank = kernel.ndim - 2
    batch, image = inputs.shape[: -rank - 1], inputs.shape[-rank - 1 :]
    strides = (1,) * rank if layer.strides is None else layer.strides
    strides = (strides,) * rank if isinstance(strides, int) else tuple(strides)
    circular = layer.padding in ("CIRCULAR", "circular")
    y = conv_transpose(
        inputs.reshape(-1, *image),
        kernel,
        strides=strides,
        padding="VALID" if circular else layer.padding,
        dilation=1 if layer.kernel_dilation is None else layer.kernel_dilation,
        transpose_kernel=layer.transpose_kernel,
        precision=layer.precision,
    )
    if circular:
        periods = [s * stride for s, stride in zip(image[:-1], strides, strict=True)]
        y = _wrap(y, periods, layer.transpose_kernel)
    if bias is not None:
        y = y + bias[(None,) * (y.ndim - 1)]
    return y.reshape(*batch, *y.shape[1:])


def _wrap(y, periods, transpose_kernel):
    """Adds up what lies a period apart along each dimension.

    The kernel's centre stays at the start of a period; of an odd excess the additional
    element goes to the end for a transposed kernel, to the start for another: flax's
    convention.
    """
    pads = [(0, 0)]
    for size, period in zip(y.shape[1:-1], periods, strict=True):
        excess = -(size - period) % (2 * period)
        low, high = excess // 2, excess - excess // 2
        pads.append((low, high) if transpose_kernel else (high, low))
    y = jnp.pad(y, [*pads, (0, 0)])
    for axis, period in enumerate(periods, 1):
        y = y.reshape(*y.shape[:axis], -1, period, *y.shape[axis + 1 :]).sum(axis)
    return y
