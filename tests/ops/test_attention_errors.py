"""What flash_attention refuses, each in a sentence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_truth import bf16

from opsnn_jax.ops.attention import flash_attention

GOOD = dict(
    q=jnp.zeros((2, 3, 4, 8)), k=jnp.zeros((2, 5, 2, 8)), v=jnp.zeros((2, 5, 2, 6))
)


@pytest.mark.parametrize(
    "change, error, match",
    [
        (dict(q=jnp.zeros((3, 4, 8))), ValueError, r"the same axes.* got \(3, 4, 8\)"),
        (dict(k=jnp.zeros((1, 5, 2, 8))), ValueError, r"k must have shape .*\(1, 5, 2"),
        (dict(k=jnp.zeros((2, 5, 2, 7))), ValueError, r"k must have shape"),
        (dict(v=jnp.zeros((2, 6, 2, 6))), ValueError, r"v must have shape .* k \(2, 5"),
        (dict(v=jnp.zeros((2, 5, 1, 6))), ValueError, r"v must have shape"),
        (dict(q=jnp.zeros((2, 3, 3, 8))), ValueError, r"a multiple .* got 3 and 2"),
        (dict(k=jnp.zeros((2, 5, 2, 8), bf16)), TypeError, r"one dtype; got float32"),
        (
            dict(q=jnp.zeros((2, 3, 4, 8), int)),
            TypeError,
            r"q must have dtype .*got int32",
        ),
        (dict(q=jnp.zeros((2, 3, 4, 8), "complex64")), TypeError, r"got complex64"),
        (
            dict(q=jnp.zeros((2, 3, 4, 8), "float8_e4m3fn")),
            TypeError,
            r"got float8_e4m3fn",
        ),
        (dict(q=np.zeros((2, 3, 4, 8))), TypeError, r"float64 but jax_enable_x64"),
        (dict(q=None), TypeError, r"q must be an array; got NoneType"),
        (dict(v="v"), TypeError, r"v must be an array; got str"),
        (dict(mask=jnp.ones((3, 5))), TypeError, r"mask must be boolean; got float32"),
        (dict(mask=jnp.ones((3, 4), bool)), ValueError, r"mask must broadcast .*3, 4"),
        (dict(bias=jnp.ones((2, 3, 5))), ValueError, r"bias must broadcast .*2, 3, 5"),
        (dict(bias=jnp.ones((1, 1, 1, 3, 5))), ValueError, r"bias must broadcast"),
        (dict(bias=jnp.ones((3, 5), int)), TypeError, r"bias must have dtype"),
        (dict(q=np.zeros((2, 3, 4, 8), ">f4")), TypeError, r"got >f4"),
        (dict(bias=[[0.0]]), TypeError, r"bias must be an array; got list"),
        (dict(scale=jnp.float32(1)), TypeError, r"scale must be a Python number"),
        (dict(scale="1"), TypeError, r"scale must be a Python number"),
        (dict(is_causal=jnp.array(True)), TypeError, r"is_causal must be a bool"),
        (dict(precision="best"), ValueError, r"precision must be .*'best'"),
        (dict(implementation="cuda"), ValueError, r"implementation must be .*'cuda'"),
        (dict(implementation=()), ValueError, r"implementation must be"),
        (dict(implementation=1), ValueError, r"implementation must be .* got 1"),
    ],
)
def test_errors_say_what_was_given(change, error, match):
    with pytest.raises(error, match=r"^flash_attention: .*" + match):
        flash_attention(**{**GOOD, **change})


def test_a_traced_scale_is_refused_with_advice():
    with pytest.raises(TypeError, match="Multiply q by an array scale"):
        jax.jit(lambda scale: flash_attention(**GOOD, scale=scale))(0.5)


def test_numpy_scalars_are_numbers():
    scaled = flash_attention(**GOOD, scale=np.float32(0.5), is_causal=np.True_)
    assert scaled.shape == (2, 3, 4, 6)
