"""A small residual network for small images (He et al., 2016), in flax linen.

Convolutions compute in `dtype`; batch statistics, the mean over the image and the last
layer are fp32, so logits are fp32 too. Parameters are fp32 in any case.
"""

from typing import Any

import flax.linen as linen
import jax
import jax.numpy as jnp

from opsnn_jax.nn.linen import Conv


class ResNet(linen.Module):
    """Images `(N, H, W, C)` to logits `(N, classes)`, fp32.

    Attributes:
      widths: channels of each stage; from the second on a stage halves the image.
      blocks: residual blocks in each stage.
      classes: how many.
      dtype: of the convolutions.
    """

    widths: tuple[int, ...] = (16, 32, 64)
    blocks: int = 1
    classes: int = 10
    dtype: Any = jnp.float32

    @linen.compact
    def __call__(self, images: jax.Array, *, train: bool) -> jax.Array:
        x = images.astype(self.dtype)
        x = Conv(self.widths[0], (3, 3), use_bias=False, dtype=self.dtype, name="stem")(
            x
        )
        x = linen.relu(_norm("stem_norm", train, self.dtype)(x))
        for stage, width in enumerate(self.widths):
            for i in range(self.blocks):
                strides = 2 if stage > 0 and i == 0 else 1
                name = f"stage_{stage}_block_{i}"
                x = Block(width, strides, self.dtype, name=name)(x, train=train)
        x = x.astype(jnp.float32).mean((1, 2))
        return linen.Dense(self.classes, dtype=jnp.float32, name="head")(x)


class Block(linen.Module):
    """x + f(x), f two 3x3 convolutions; x is projected where its shape changes."""

    width: int
    strides: int
    dtype: Any

    @linen.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        conv = {"use_bias": False, "dtype": self.dtype}
        y = Conv(self.width, (3, 3), self.strides, name="conv_0", **conv)(x)
        y = linen.relu(_norm("norm_0", train, self.dtype)(y))
        y = Conv(self.width, (3, 3), name="conv_1", **conv)(y)
        y = _norm("norm_1", train, self.dtype)(y)
        if x.shape != y.shape:
            x = Conv(self.width, (1, 1), self.strides, name="project", **conv)(x)
        return linen.relu(x + y)


def _norm(name: str, train: bool, dtype: Any) -> linen.BatchNorm:
    # The fast variance, E[x^2] - E[x]^2, loses all digits where the mean is large.
    return linen.BatchNorm(
        use_running_average=not train,
        momentum=0.9,
        dtype=dtype,
        use_fast_variance=False,
        name=name,
    )
