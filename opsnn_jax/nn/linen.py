"""Layers for flax.linen: flax's own, computed by the ops of this library.

Parameters, names, shapes, initialisation, defaults and results are flax's, so a
checkpoint loads, and a model switches over layer by layer, `ops_nn.Conv` for `nn.Conv`:

    from opsnn_jax.nn import linen as ops_nn
"""

from collections.abc import Callable

import flax.linen as nn

from opsnn_jax.nn.linen_attention import MultiHeadAttention as MultiHeadAttention
from opsnn_jax.nn.linen_attention import (
    MultiHeadDotProductAttention as MultiHeadDotProductAttention,
)
from opsnn_jax.nn.linen_attention import dot_product_attention as dot_product_attention
from opsnn_jax.nn.linen_grouped import GroupedQueryAttention as GroupedQueryAttention
from opsnn_jax.ops.lax_conv import conv_general_dilated


class Conv(nn.Conv):
    """`flax.linen.Conv` by `opsnn_jax.conv`.

    To name an implementation, pass `conv_general_dilated=functools.partial(
    opsnn_jax.conv_general_dilated, implementation="winograd")`.
    """

    conv_general_dilated: Callable | None = conv_general_dilated
