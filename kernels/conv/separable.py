"""Depthwise separable convolution: z = depthwise(x), rounded, then y = pointwise(z).

What is static about the two, and the plain form: XLA's convolution twice.
"""

from dataclasses import dataclass

import jax

from . import direct
from .spec import ConvSpec


@dataclass(frozen=True)
class SeparableSpec:
    """The two convolutions; with `keep_between` z is returned as well.

    A forward pass returns y, then what `pointwise` keeps, then z.
    """

    depthwise: ConvSpec
    pointwise: ConvSpec
    keep_between: bool = False


def forward(spec: SeparableSpec, x, w_depthwise, w_pointwise, b=None, residual=None):
    """Both by XLA."""
    z = direct.forward(spec.depthwise, x, w_depthwise)
    return results(spec, direct.forward(spec.pointwise, z, w_pointwise, b, residual), z)


def results(spec: SeparableSpec, y: jax.Array | tuple[jax.Array, ...], z: jax.Array):
    """What a forward pass returns, of what the second convolution gave."""
    if not spec.keep_between:
        return y
    return (*y, z) if spec.pointwise.keep_preactivation else (y, z)
