"""Layers for flax.linen: flax's own, computed by the ops of this library.

Parameters, names, shapes, initialisation, defaults and results are flax's, so a
checkpoint loads, and a model switches over layer by layer, `ops_nn.Conv` for `nn.Conv`:

    from opsnn_jax.nn import linen as ops_nn
"""

from opsnn_jax.nn.linen_attention import MultiHeadAttention as MultiHeadAttention
from opsnn_jax.nn.linen_attention import (
    MultiHeadDotProductAttention as MultiHeadDotProductAttention,
)
from opsnn_jax.nn.linen_attention import dot_product_attention as dot_product_attention
from opsnn_jax.nn.linen_conv import Conv as Conv
from opsnn_jax.nn.linen_conv import ConvBNAct as ConvBNAct
from opsnn_jax.nn.linen_conv import ConvTranspose as ConvTranspose
from opsnn_jax.nn.linen_conv import DepthwiseConv as DepthwiseConv
from opsnn_jax.nn.linen_conv import SeparableConv as SeparableConv
from opsnn_jax.nn.linen_grouped import GroupedQueryAttention as GroupedQueryAttention
