"""Differentiable neural-network kernels for JAX.

The ops are here; `opsnn_jax.nn` has flax layers over them, `opsnn_jax.training` the
mixed-precision training loop.
"""

from importlib.metadata import version as _version

from opsnn_jax.explain import explain as explain
from opsnn_jax.ops.attention import flash_attention as flash_attention
from opsnn_jax.ops.attention_decode import attention_decode as attention_decode
from opsnn_jax.ops.conv import conv as conv
from opsnn_jax.ops.conv import conv1d as conv1d
from opsnn_jax.ops.conv import conv2d as conv2d
from opsnn_jax.ops.conv import conv3d as conv3d
from opsnn_jax.ops.conv_transpose import conv_transpose as conv_transpose
from opsnn_jax.ops.fold import fold_batchnorm as fold_batchnorm
from opsnn_jax.ops.fused_qkv import flash_attention_packed as flash_attention_packed
from opsnn_jax.ops.fused_qkv import fused_qkv as fused_qkv
from opsnn_jax.ops.jax_attention import dot_product_attention as dot_product_attention
from opsnn_jax.ops.lax_conv import conv_general_dilated as conv_general_dilated
from opsnn_jax.ops.layout import from_blocked as from_blocked
from opsnn_jax.ops.layout import to_blocked as to_blocked
from opsnn_jax.ops.ring_attention import ring_attention as ring_attention
from opsnn_jax.ops.rotary import rotary_embedding as rotary_embedding
from opsnn_jax.ops.separable_conv import separable_conv2d as separable_conv2d

__version__ = _version("opsnn-jax")
