"""Layers for flax.nnx: flax's own, computed by the ops of this library.

Parameters, names, shapes, initialisation, defaults and results are flax's, so a
checkpoint loads, and a model switches over layer by layer, `ops_nnx.Conv` for
`nnx.Conv`:

    from opsnn_jax.nn import nnx as ops_nnx
"""

from collections.abc import Sequence

from flax import nnx

from opsnn_jax.nn.nnx_attention import MultiHeadAttention as MultiHeadAttention
from opsnn_jax.nn.nnx_attention import dot_product_attention as dot_product_attention
from opsnn_jax.nn.nnx_grouped import GroupedQueryAttention as GroupedQueryAttention
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
