"""Convolution layers for flax.nnx; see opsnn_jax.nn.nnx."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from opsnn_jax.nn.conv_layers import finish, flax_transposes, transpose_layer
from opsnn_jax.ops.conv import conv
from opsnn_jax.ops.conv_arguments import check_activation
from opsnn_jax.ops.fold import fold_batchnorm
from opsnn_jax.ops.lax_conv import conv_general_dilated


class Conv(nnx.Conv):
    """`flax.nnx.Conv` by `opsnn_jax.conv`.

    To name an implementation, pass `conv_general_dilated=functools.partial(
    opsnn_jax.conv_general_dilated, implementation="winograd")`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        kernel_size: int | Sequence[int],
        strides: int | Sequence[int] | None = 1,
        **options,
    ):
        options.setdefault("conv_general_dilated", conv_general_dilated)
        super().__init__(in_features, out_features, kernel_size, strides, **options)


class ConvTranspose(nnx.ConvTranspose):
    """`flax.nnx.ConvTranspose` by `opsnn_jax.conv_transpose`."""

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Convolves (*batch, *S, C), or one (*S, C), to (*batch, *T, features)."""
        if flax_transposes(self, inputs):
            return super().__call__(inputs)
        kernel = self.kernel[...]
        bias = None if self.bias is None else self.bias[...]
        if self.mask is not None and self.mask.shape != self.kernel_shape:
            raise ValueError(
                "ConvTranspose: mask must have the shape of the kernel, "
                f"{self.kernel_shape}; got {self.mask.shape}."
            )
        if self.mask is not None:
            kernel = kernel * self.mask
        inputs, kernel, bias = self.promote_dtype(
            (inputs, kernel, bias), dtype=self.dtype
        )
        return transpose_layer(self, inputs, kernel, bias)


class DepthwiseConv(Conv):
    """Convolves every channel by `multiplier` filters of its own.

    `options` are those of `Conv`; the result has in_features * multiplier channels.
    """

    def __init__(
        self,
        in_features: int,
        kernel_size: int | Sequence[int],
        strides: int | Sequence[int] | None = 1,
        *,
        multiplier: int = 1,
        **options,
    ):
        super().__init__(
            in_features,
            in_features * multiplier,
            kernel_size,
            strides,
            feature_group_count=in_features,
            **options,
        )


class SeparableConv(nnx.Module):
    """A `DepthwiseConv` without bias, then a `Conv` with one tap.

    Args:
      in_features, out_features: channels.
      kernel_size, strides, multiplier, padding, kernel_dilation: of the first.
      use_bias: of the second.
      rngs: for both; `options` as well, those of `Conv`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        kernel_size: int | Sequence[int],
        strides: int | Sequence[int] | None = 1,
        *,
        multiplier: int = 1,
        padding: Any = "SAME",
        kernel_dilation: int | Sequence[int] = 1,
        use_bias: bool = True,
        rngs: nnx.Rngs,
        **options,
    ):
        self.depthwise = DepthwiseConv(
            in_features,
            kernel_size,
            strides,
            multiplier=multiplier,
            padding=padding,
            kernel_dilation=kernel_dilation,
            use_bias=False,
            rngs=rngs,
            **options,
        )
        rank = 1 if isinstance(kernel_size, int) else len(kernel_size)
        self.pointwise = Conv(
            in_features * multiplier,
            out_features,
            (1,) * rank,
            use_bias=use_bias,
            rngs=rngs,
            **options,
        )

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """(*batch, *S, in_features) to (*batch, *T, out_features)."""
        return self.pointwise(self.depthwise(inputs))


class ConvBNAct(nnx.Module):
    """Convolution, batch normalisation and activation.

    With running statistics the three are one convolution with folded weights and the
    activation applied before rounding; while training the statistics are fp32.

    Args:
      in_features, out_features, kernel_size, strides, padding, groups: of the
        convolution, which has no bias: the normalisation's shift is one.
      activation: as in `opsnn_jax.conv`.
      momentum, epsilon: of `flax.nnx.BatchNorm`.
      dtype: of the computation; param_dtype: of the filter.
      rngs: for the parameters.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        kernel_size: int | Sequence[int],
        strides: int | Sequence[int] = 1,
        *,
        padding: Any = "SAME",
        groups: int = 1,
        activation: str | None = "relu",
        momentum: float = 0.99,
        epsilon: float = 1e-5,
        dtype: Any = jnp.float32,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        check_activation("ConvBNAct", activation)
        size = (kernel_size,) if isinstance(kernel_size, int) else tuple(kernel_size)
        shape = (*size, in_features // groups, out_features)
        init = nnx.initializers.lecun_normal()
        self.kernel = nnx.Param(init(rngs.params(), shape, param_dtype))
        self.norm = nnx.BatchNorm(
            out_features,
            momentum=momentum,
            epsilon=epsilon,
            dtype=dtype,
            # E[z^2] - E[z]^2 loses all digits where the mean is large.
            use_fast_variance=False,
            rngs=rngs,
        )
        self.options = {"strides": strides, "padding": padding, "groups": groups}
        self.activation = activation
        self.dtype = dtype

    def __call__(
        self, x: jax.Array, *, train: bool, residual: jax.Array | None = None
    ) -> jax.Array:
        """(N, *S, in_features) to (N, *T, out_features).

        `residual` is added before the activation. `train` normalises
        with the batch's own statistics and updates the running ones.
        """
        x, kernel, norm = x.astype(self.dtype), self.kernel[...], self.norm
        residual = None if residual is None else residual.astype(self.dtype)
        if not train:
            w, b = fold_batchnorm(
                kernel, None, norm.scale[...], norm.bias[...], norm.mean[...],
                norm.var[...], norm.epsilon,
            )  # fmt: skip
            w, b = w.astype(self.dtype), b.astype(self.dtype)
            return conv(
                x, w, b, residual=residual, activation=self.activation, **self.options
            )
        z = norm(
            conv(x, kernel.astype(self.dtype), **self.options),
            use_running_average=False,
        )
        return finish("ConvBNAct", z, residual, self.activation)
