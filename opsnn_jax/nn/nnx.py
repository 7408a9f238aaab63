"""Layers for flax.nnx: flax's own, computed by the ops of this library.

Parameters, names, shapes, initialisation, defaults and results are flax's, so a
checkpoint loads, and a model switches over layer by layer, `ops_nnx.Conv` for
`nnx.Conv`:

    from opsnn_jax.nn import nnx as ops_nnx
"""

from opsnn_jax.nn.nnx_attention import MultiHeadAttention as MultiHeadAttention
from opsnn_jax.nn.nnx_attention import dot_product_attention as dot_product_attention
from opsnn_jax.nn.nnx_conv import Conv as Conv
from opsnn_jax.nn.nnx_conv import ConvBNAct as ConvBNAct
from opsnn_jax.nn.nnx_conv import ConvTranspose as ConvTranspose
from opsnn_jax.nn.nnx_conv import DepthwiseConv as DepthwiseConv
from opsnn_jax.nn.nnx_conv import SeparableConv as SeparableConv
from opsnn_jax.nn.nnx_grouped import GroupedQueryAttention as GroupedQueryAttention
