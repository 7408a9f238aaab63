"""The cases by which the library's convolutions are checked."""

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from .contract import OpCase, draw


@dataclass(frozen=True)
class ConvCase(OpCase):
    """With the spatial shape of the first filter."""

    kernel: tuple[int, ...] = ()


def conv_case(
    name: str,
    x_shape: tuple[int, ...],
    *w_shapes: tuple[int, ...],
    bias: bool = False,
    transforms: bool = False,
    **options: Any,
) -> ConvCase:
    """A case of a convolution: x (N, *spatial, C), filters (*kernel, C/groups, O)."""

    def make_args(key, dtype):
        shapes = [x_shape, *w_shapes]
        if bias:
            shapes.append(w_shapes[-1][-1:])
        # Outputs of about size 1, as the standard's constants expect.
        scales = [1, *(math.prod(shape[:-1]) ** -0.5 for shape in w_shapes)]
        args = draw(key, dtype, shapes, scales + [0.25] * bias)
        return _decide_gates(*args) if options.get("activation") == "relu" else args

    return ConvCase(name, make_args, options, transforms, w_shapes[0][:-2])


def _decide_gates(x, *filters_and_bias):
    """Arguments for which relu passes all of every second image, none of the others.

    Where its argument is near zero the last bit decides whether it passes, so a right
    implementation may have a gradient that is wrong by its whole size.
    """
    image = jnp.arange(len(x)).reshape(-1, *(1,) * (x.ndim - 1))
    x = jnp.where(image % 2 == 0, jnp.abs(x), -jnp.abs(x))
    return x, *(a if a.ndim == 1 else jnp.abs(a) for a in filters_and_bias)


def conv1d_cases() -> tuple[ConvCase, ...]:
    return (
        conv_case("3", (2, 11, 5), (3, 5, 4), bias=True, transforms=True),
        conv_case("causal", (2, 9, 6), (4, 1, 6), groups=6, padding="CAUSAL"),
        conv_case("uneven", (1, 13, 3), (5, 3, 4), strides=3, padding=((4, 1),)),
    )


def conv2d_cases() -> tuple[ConvCase, ...]:
    return (
        conv_case("3x3", (2, 8, 9, 6), (3, 3, 6, 7), transforms=True),
        conv_case("3x3 bias", (2, 5, 5, 4), (3, 3, 4, 8), bias=True),
        conv_case("1x1", (2, 5, 4, 8), (1, 1, 8, 5)),
        conv_case("stride 2", (1, 11, 8, 5), (3, 3, 5, 4), strides=2),
        conv_case("dilation 2", (1, 11, 9, 3), (3, 3, 3, 4), dilation=2),
        conv_case("groups", (2, 6, 6, 6), (3, 3, 2, 9), groups=3),
        conv_case("depthwise", (1, 7, 8, 5), (3, 3, 1, 5), groups=5),
        conv_case("valid", (1, 7, 7, 3), (5, 3, 3, 4), padding="VALID"),
        conv_case("uneven pads", (1, 6, 7, 3), (3, 2, 3, 4), padding=((2, 0), (0, 3))),
        conv_case("cropped", (1, 8, 8, 3), (3, 3, 3, 4), padding=((-1, 1), (0, -2))),
        conv_case("one pixel", (1, 1, 1, 1), (3, 3, 1, 1)),
        conv_case("prime", (1, 13, 17, 3), (3, 3, 3, 5)),
        conv_case("relu", (2, 9, 8, 8), (3, 3, 8, 6), bias=True, activation="relu"),
        conv_case("gelu", (1, 5, 6, 4), (1, 1, 4, 6), bias=True, activation="gelu"),
        conv_case(
            "channels first", (2, 6, 8, 9), (3, 3, 6, 7), layout="channels_first"
        ),
        conv_case("empty", (0, 5, 5, 3), (3, 3, 3, 4)),
    )


def conv3d_cases() -> tuple[ConvCase, ...]:
    return (
        conv_case("3x3x3", (1, 4, 5, 6, 3), (3, 3, 3, 3, 4)),
        conv_case("stride 2", (1, 5, 4, 7, 2), (2, 3, 3, 2, 3), strides=2),
    )


def transpose_cases() -> tuple[ConvCase, ...]:
    return (
        conv_case("3x3", (1, 5, 4, 4), (3, 3, 4, 3), bias=True, transforms=True),
        conv_case("stride 2", (2, 4, 5, 3), (3, 3, 3, 4), strides=2),
        conv_case("groups", (1, 7, 6), (4, 3, 4), groups=2, strides=2, padding="VALID"),
        conv_case("flipped", (1, 4, 4, 3), (2, 3, 5, 3), transpose_kernel=True),
    )


def separable_cases() -> tuple[ConvCase, ...]:
    return (
        conv_case("3x3", (1, 6, 7, 4), (3, 3, 1, 4), (1, 1, 4, 5), transforms=True),
        conv_case(
            "relu", (2, 7, 6, 3), (3, 3, 1, 6), (1, 1, 6, 4), bias=True, strides=2,
            activation="relu",
        ),
    )  # fmt: skip


def conv_factor(name: str | None, dtype: Any, case: ConvCase) -> float:
    """Winograd's error over that of one rounding; other methods are direct.

    The transforms multiply an error by kappa in each dimension. In fp32 it is that of
    the sums. In half precision the XLA form still multiplies in fp32, which leaves the
    rounding of the result; the TPU kernel rounds both multiplicands of F(2, 3) as well.
    """
    if name != "pallas_tpu" and not (name or "").startswith("winograd"):
        return 1.0
    from opsnn_jax.kernels.winograd.transforms import transform

    if dtype == jnp.float32:
        return math.prod(t.kappa for t in _transforms(name, case.kernel))
    if name != "pallas_tpu":
        return 1.0
    return math.hypot(1.0, math.sqrt(2) * transform(2, 3).kappa ** len(case.kernel))


def _transforms(name, kernel):
    """Those of `winograd`, or of tiles of m in `winograd_f<m>`; none if refused."""
    from opsnn_jax.kernels.conv.spec import ConvSpec
    from opsnn_jax.kernels.winograd import xla

    ones = (1,) * len(kernel)
    spec = ConvSpec(
        (1, *ones, 1),
        (*kernel, 1, 1),
        "float32",
        ones,
        ((0, 0),) * len(kernel),
        ones,
        1,
    )
    m = int(name[-1]) if "_f" in name else None
    refuses = xla.refuses if m is None else xla.refuses_tile(m)
    return () if refuses(spec) else xla.transforms(spec, m)
