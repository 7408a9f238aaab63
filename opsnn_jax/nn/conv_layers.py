"""What the linen and nnx layers of convolutions share."""

import math

import jax
import jax.numpy as jnp

from opsnn_jax.ops.bias import add_bias
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
        inputs.reshape(math.prod(batch), *image),
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
        y = add_bias(y, bias)
    return y.reshape(*batch, *y.shape[1:])


def flax_transposes(layer, inputs: jax.Array) -> bool:
    """Whether ConvTranspose `layer` asks for what only flax's own computes."""
    types = (inputs.dtype, inputs.dtype if layer.dtype is None else layer.dtype)
    is_complex = any(jnp.issubdtype(t, jnp.complexfloating) for t in types)
    return is_complex or getattr(layer, "preferred_element_type", None) is not None


def finish(
    layer: str, z: jax.Array, residual: jax.Array | None, activation: str | None
) -> jax.Array:
    """activation(z + residual), as the epilogue of a convolution has it."""
    if residual is not None:
        if residual.shape != z.shape:
            raise ValueError(
                f"{layer}: residual must have the shape of the result, {z.shape}; got "
                f"{residual.shape}."
            )
        z = z + residual
    return z if activation is None else getattr(jax.nn, activation)(z)


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
