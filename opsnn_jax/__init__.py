"""Differentiable neural-network kernels for JAX.

The ops are here; `opsnn_jax.nn` has flax layers over them, `opsnn_jax.training` the
mixed-precision training loop.
"""

from importlib.metadata import version

from opsnn_jax.explain import explain as explain
from opsnn_jax.ops.attention import flash_attention as flash_attention
from opsnn_jax.ops.conv import conv as conv
from opsnn_jax.ops.conv import conv1d as conv1d
from opsnn_jax.ops.conv import conv2d as conv2d
from opsnn_jax.ops.conv import conv3d as conv3d
from opsnn_jax.ops.conv_transpose import conv_transpose as conv_transpose
from opsnn_jax.ops.fold import fold_batchnorm as fold_batchnorm
from opsnn_jax.ops.lax_conv import conv_general_dilated as conv_general_dilated
from opsnn_jax.ops.layout import from_blocked as from_blocked
from opsnn_jax.ops.layout import to_blocked as to_blocked
from opsnn_jax.ops.separable_conv import separable_conv2d as separable_conv2d

__version__ = version("opsnn-jax")
