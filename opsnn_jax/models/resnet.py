"""A small residual network for small images (He et al., 2016), in flax linen.

Convolutions compute in `dtype`; batch statistics, the mean over the image and the last
layer are fp32, so logits are fp32 too. Parameters are fp32 in any case.
"""

from collections.abc import Callable
from dataclasses import dataclass
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
      dtypes: the dtype of a layer by its path, `stage_0_block_0/norm_1` say, in place
        of `dtype`.
    """

    widths: tuple[int, ...] = (16, 32, 64)
    blocks: int = 1
    classes: int = 10
    dtype: Any = jnp.float32
    dtypes: Callable[[str], Any] | None = None

    @linen.compact
    def __call__(self, images: jax.Array, *, train: bool) -> jax.Array:
        of = self.dtypes or (lambda path: self.dtype)
        x = images.astype(of("stem"))
        stem = Conv(self.widths[0], (3, 3), use_bias=False, dtype=x.dtype, name="stem")
        x = linen.relu(_norm("stem_norm", train, of)(stem(x)))
        for stage, width in enumerate(self.widths):
            for i in range(self.blocks):
                strides = 2 if stage > 0 and i == 0 else 1
                name = f"stage_{stage}_block_{i}"
                x = Block(width, strides, _Below(of, name), name=name)(x, train=train)
        x = x.astype(jnp.float32).mean((1, 2))
        return linen.Dense(self.classes, dtype=jnp.float32, name="head")(x)


class Block(linen.Module):
    """x + f(x), f two 3x3 convolutions; x is projected where its shape changes."""

    width: int
    strides: int
    dtypes: Callable[[str], Any]

    @linen.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        def conv(name, kernel, strides=1):
            make = {"use_bias": False, "dtype": self.dtypes(name), "name": name}
            return Conv(self.width, (kernel, kernel), strides, **make)

        y = conv("conv_0", 3, self.strides)(x)
        y = linen.relu(_norm("norm_0", train, self.dtypes)(y))
        y = _norm("norm_1", train, self.dtypes)(conv("conv_1", 3)(y))
        if x.shape != y.shape:
            x = conv("project", 1, self.strides)(x)
        # The same dtype, unless the rules of a policy tell layers apart.
        wide = max(x.dtype, y.dtype, key=lambda dtype: dtype.itemsize)
        return linen.relu(x.astype(wide) + y.astype(wide))


@dataclass(frozen=True)
class _Below:
    """The dtypes of the layers inside a block. Hashable, as flax wants attributes."""

    of: Callable[[str], Any]
    block: str

    def __call__(self, path: str) -> Any:
        return self.of(f"{self.block}/{path}")


def _norm(name: str, train: bool, dtypes: Callable[[str], Any]) -> linen.BatchNorm:
    # The fast variance, E[x^2] - E[x]^2, loses all digits where the mean is large.
    return linen.BatchNorm(
        use_running_average=not train,
        momentum=0.9,
        dtype=dtypes(name),
        use_fast_variance=False,
        name=name,
    )
