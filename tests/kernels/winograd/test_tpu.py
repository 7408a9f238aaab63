"""The TPU kernels of Winograd alone, without the form that replaces their NaN."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from opsnn_jax.kernels.conv import direct
from opsnn_jax.kernels.winograd import tpu
from opsnn_jax.ops.conv_arguments import validate
from tests.numerics import assert_within
from tests.ops.conv_cases import draw, winograd_bound


@pytest.mark.parametrize("of", ["y", "dx", "dw"])
def test_each_pass_is_right_by_itself(of, key):
    x, w, b = draw(key, (2, 9, 5, 6), (3, 3, 6, 7), "float32")
    dy = jnp.sin(jnp.arange(2.0 * 9 * 5 * 7)).reshape(2, 9, 5, 7)
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
