"""What is static about a convolution, in one hashable value.

Layout: x is (N, *spatial, C), w is (*kernel, C / groups, O), y is (N, *out, O).
The operation is the cross-correlation of deep learning: the filter is not flipped.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ..dtypes import accumulate_dtype


@dataclass(frozen=True)
class ConvSpec:
    """Shapes, dtype and options of one convolution. Padding is resolved to pairs.

    One entry of `strides`, `padding` and `dilation` for each spatial dimension; a
    padding pair is (low, high), negative to crop. `activation` is a key of
    `epilogue.ACTIVATIONS`; with `keep_preactivation` the forward pass returns what it
    is applied to as well.
    """

    x_shape: tuple[int, ...]
    w_shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int
    precision: jax.lax.PrecisionLike = None
    activation: str | None = None
    keep_preactivation: bool = False

    @property
    def rank(self) -> int:
        """The number of spatial dimensions."""
        return len(self.strides)

    @property
    def spatial(self) -> tuple[int, ...]:
        return self.x_shape[1:-1]

    @property
    def kernel(self) -> tuple[int, ...]:
        return self.w_shape[:-2]

    @property
    def extent(self) -> tuple[int, ...]:
        """How many inputs a dilated filter spans."""
        return tuple(
            (k - 1) * d + 1 for k, d in zip(self.kernel, self.dilation, strict=True)
        )

    @property
    def out_spatial(self) -> tuple[int, ...]:
        return tuple(
            max(0, (size + lo + hi - extent) // stride + 1)
            for size, (lo, hi), extent, stride in zip(
                self.spatial, self.padding, self.extent, self.strides, strict=True
            )
        )

    @property
    def y_shape(self) -> tuple[int, ...]:
        return (self.x_shape[0], *self.out_spatial, self.w_shape[-1])

    @property
    def accumulate_dtype(self) -> jnp.dtype:
        """float32, or float64 where the data is."""
        return accumulate_dtype(self.dtype)

    @property
    def is_depthwise(self) -> bool:
        """Whether every output channel sees one input channel, of several."""
        return self.groups > 1 and self.w_shape[-2] == 1

    @property
    def is_empty(self) -> bool:
        """Whether an array has no elements: then every sum is over nothing."""
        return 0 in self.x_shape or 0 in self.y_shape or 0 in self.w_shape

    @property
    def is_symbolic(self) -> bool:
        """Whether a size is not known, as `jax.export` allows."""
        return not all(isinstance(d, int) for d in (*self.x_shape, *self.w_shape))

    @property
    def macs(self) -> int:
        """Multiply-adds of the direct form, padding counted."""
        return math.prod(self.y_shape) * math.prod(self.w_shape[:-1])
