"""The TPU kernels of Winograd alone, without the form that replaces their NaN."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from opsnn_jax.kernels.conv import direct
from opsnn_jax.kernels.winograd import tpu
from opsnn_jax.kernels.winograd.tpu_blocks import blocks_of
from opsnn_jax.ops.conv_arguments import validate
from tests.numerics import assert_within
from tests.ops.conv_cases import draw, winograd_bound


def _spec(c, o, width=28):
    x, w = (
        jax.ShapeDtypeStruct(shape, "float32")
        for shape in ((8, width, width, c), (3, 3, c, o))
    )
    return validate("conv2d", 2, x, w, None)


@pytest.mark.parametrize(("c", "o", "fits"), [(1000, 1000, True), (2048, 256, False)])
def test_what_does_not_fit_vector_memory_is_refused(c, o, fits):
    # dx takes the channels of the other side.
    for spec in (_spec(c, o), _spec(o, c)):
        reason = tpu.refuses(spec)
        assert reason is None if fits else "fit vector memory" in reason


def test_many_channels_have_narrower_blocks():
    assert [blocks_of(_spec(c, 512)).block_o for c in (512, 1000)] == [256, 128]


SHAPES = {
    # Two steps of three rows of tiles.
    "rows": ((2, 18, 5, 6), (3, 3, 6, 7)),
    # Two registers of images, and two steps of rows and of columns.
    "steps": ((9, 5, 35, 3), (3, 3, 3, 2)),
    # Two chunks of channels and two blocks of outputs.
    "filters": ((1, 3, 4, 20), (3, 3, 20, 300)),
}


@pytest.mark.parametrize(
    ("shapes", "grid"), [("rows", (1, 1, 2, 1)), ("steps", (1, 2, 2, 2))]
)
def test_narrow_images_take_several_rows_in_a_step(shapes, grid):
    arrays = (jax.ShapeDtypeStruct(shape, "float32") for shape in SHAPES[shapes])
    assert blocks_of(validate("conv2d", 2, *arrays, None)).grid == grid


@pytest.mark.parametrize(
    ("shapes", "of"),
    # dx is y's kernel over dy: but for its filter, of "filters" turned in three parts.
    [
        *((shapes, of) for shapes in SHAPES for of in ("y", "dw")),
        ("rows", "dx"),
        ("filters", "dx"),
    ],
)
def test_each_pass_is_right_by_itself(shapes, of, key):
    x, w, b = draw(key, *SHAPES[shapes], "float32")
    y_shape = (*x.shape[:-1], w.shape[-1])
    dy = jnp.sin(jnp.arange(float(np.prod(y_shape)))).reshape(y_shape)
    name, arrays, exact = {
        "y": ("fast_forward", (x, w, b), direct.forward),
        "dx": ("fast_input_gradient", (w, dy), direct.input_gradient),
        "dw": ("fast_weight_gradient", (x, dy), direct.weight_gradient),
    }[of]
    spec = validate("conv2d", 2, x, w, b)
    got = jax.jit(lambda *a: getattr(tpu, name)(spec, *a, interpret=True))(*arrays)
    with jax.enable_x64(True):
        x, w, b = (np.asarray(a, np.float64) for a in (x, w, b))
        spec = validate("conv2d", 2, x, w, b)
        truth = exact(spec, *(np.asarray(a, np.float64) for a in arrays))
    assert_within(got, truth, winograd_bound(4, "float32"))
