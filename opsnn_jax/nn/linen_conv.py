"""Convolution layers for flax.linen; see opsnn_jax.nn.linen."""

from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from opsnn_jax.nn.conv_layers import finish, flax_transposes, transpose_layer
from opsnn_jax.ops.conv import conv
from opsnn_jax.ops.conv_arguments import check_activation
from opsnn_jax.ops.fold import fold_batchnorm
from opsnn_jax.ops.lax_conv import conv_general_dilated


class Conv(nn.Conv):
    """`flax.linen.Conv` by `opsnn_jax.conv`.

    To name an implementation, pass `conv_general_dilated=functools.partial(
    opsnn_jax.conv_general_dilated, implementation="winograd")`.
    """

    conv_general_dilated: Callable | None = conv_general_dilated


class ConvTranspose(nn.ConvTranspose):
    """`flax.linen.ConvTranspose` by `opsnn_jax.conv_transpose`."""

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Convolves (*batch, *S, C), or one (*S, C), to (*batch, *T, features)."""
        if flax_transposes(self, inputs):
            return super().__call__(inputs)
        kernel_size = self.kernel_size
        size = (kernel_size,) if isinstance(kernel_size, int) else tuple(kernel_size)
        channels = (inputs.shape[-1], self.features)
        shape = (*size, *(channels[::-1] if self.transpose_kernel else channels))
        kernel = self.param("kernel", self.kernel_init, shape, self.param_dtype)
        bias = None
        if self.use_bias:
            bias = self.param(
                "bias", self.bias_init, (self.features,), self.param_dtype
            )
        if self.mask is not None and self.mask.shape != shape:
            raise ValueError(
                f"ConvTranspose: mask must have the shape of the kernel, {shape}; got "
                f"{self.mask.shape}."
            )
        if self.mask is not None:
            kernel = kernel * self.mask
        inputs, kernel, bias = self.promote_dtype(
            inputs, kernel, bias, dtype=self.dtype
        )
        return transpose_layer(self, inputs, kernel, bias)


class DepthwiseConv(nn.Module):
    """Convolves every channel by `multiplier` filters of its own.

    Attributes:
      kernel_size: one int, or one for each spatial dimension.
      multiplier: filters, so outputs, for each channel.
      strides, padding, kernel_dilation, use_bias, dtype, param_dtype, precision,
        kernel_init, bias_init: as in `Conv`.
    """

    kernel_size: int | Sequence[int]
    multiplier: int = 1
    strides: int | Sequence[int] = 1
    padding: Any = "SAME"
    kernel_dilation: int | Sequence[int] = 1
    use_bias: bool = True
    dtype: Any = None
    param_dtype: Any = jnp.float32
    precision: Any = None
    kernel_init: Callable = nn.initializers.lecun_normal()
    bias_init: Callable = nn.initializers.zeros_init()

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """(*batch, *S, C) to (*batch, *T, C multiplier)."""
        channels = inputs.shape[-1]
        return Conv(
            channels * self.multiplier,
            self.kernel_size,
            self.strides,
            self.padding,
            kernel_dilation=self.kernel_dilation,
            feature_group_count=channels,
            use_bias=self.use_bias,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            precision=self.precision,
            kernel_init=self.kernel_init,
            bias_init=self.bias_init,
            name="depthwise",
        )(inputs)


class SeparableConv(nn.Module):
    """A `DepthwiseConv` without bias, then a `Conv` with one tap.

    Attributes:
      features: outputs.
      kernel_size, multiplier, strides, padding, kernel_dilation: of the first.
      use_bias: of the second.
      dtype, param_dtype, precision: of both.
    """

    features: int
    kernel_size: int | Sequence[int]
    multiplier: int = 1
    strides: int | Sequence[int] = 1
    padding: Any = "SAME"
    kernel_dilation: int | Sequence[int] = 1
    use_bias: bool = True
    dtype: Any = None
    param_dtype: Any = jnp.float32
    precision: Any = None

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """(*batch, *S, C) to (*batch, *T, features)."""
        common = {
            "dtype": self.dtype,
            "param_dtype": self.param_dtype,
            "precision": self.precision,
        }
        x = DepthwiseConv(
            self.kernel_size,
            self.multiplier,
            self.strides,
            self.padding,
            self.kernel_dilation,
            use_bias=False,
            name="depthwise",
            **common,
        )(inputs)
        size = self.kernel_size
        taps = (1,) if isinstance(size, int) else (1,) * len(size)
        return Conv(
            self.features, taps, use_bias=self.use_bias, name="pointwise", **common
        )(x)


class ConvBNAct(nn.Module):
    """Convolution, batch normalisation and activation.

    With running statistics the three are one convolution with folded weights and the
    activation applied before rounding; while training the statistics are fp32.

    Attributes:
      features, kernel_size, strides, padding, groups: of the convolution, which has no
        bias: the normalisation's shift is one.
      activation: as in `opsnn_jax.conv`.
      momentum, epsilon: of `flax.linen.BatchNorm`.
      dtype: of the computation; param_dtype: of the filter.
    """

    features: int
    kernel_size: int | Sequence[int]
    strides: int | Sequence[int] = 1
    padding: Any = "SAME"
    groups: int = 1
    activation: str | None = "relu"
    momentum: float = 0.99
    epsilon: float = 1e-5
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self, x: jax.Array, *, train: bool, residual: jax.Array | None = None
    ) -> jax.Array:
        """(N, *S, C) to (N, *T, features).

        `residual` is added before the activation. `train` normalises
        with the batch's own statistics and updates the running ones.
        """
        check_activation("ConvBNAct", self.activation)
        size = self.kernel_size
        size = (size,) if isinstance(size, int) else tuple(size)
        shape = (*size, x.shape[-1] // self.groups, self.features)
        kernel = self.param(
            "kernel", nn.initializers.lecun_normal(), shape, self.param_dtype
        )
        options = {
            "strides": self.strides, "padding": self.padding, "groups": self.groups,
        }  # fmt: skip
        norm = _BatchNorm(
            momentum=self.momentum,
            epsilon=self.epsilon,
            dtype=self.dtype,
            # E[z^2] - E[z]^2 loses all digits where the mean is large.
            use_fast_variance=False,
            name="norm",
        )
        x = x.astype(self.dtype)
        residual = None if residual is None else residual.astype(self.dtype)
        if not train and not self.is_initializing():
            w, b = norm.fold(kernel)
            w, b = w.astype(self.dtype), b.astype(self.dtype)
            return conv(
                x, w, b, residual=residual, activation=self.activation, **options
            )
        z = conv(x, kernel.astype(self.dtype), **options)
        z = norm(z, use_running_average=not train)
        return finish("ConvBNAct", z, residual, self.activation)


class _BatchNorm(nn.BatchNorm):
    def fold(self, kernel):
        """The filter and bias that the running statistics make of `kernel`."""
        parameters, statistics = (
            self.variables[name] for name in ("params", "batch_stats")
        )
        return fold_batchnorm(
            kernel, None, parameters["scale"], parameters["bias"],
            statistics["mean"], statistics["var"], self.epsilon,
        )  # fmt: skip
