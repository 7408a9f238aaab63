"""Strategies draw the sizes and values at which faults hide."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import find, given, settings
from hypothesis import strategies as st
from planted_ops import conv

from opsnn_jax.check import strategies

few = settings(max_examples=25, deadline=None, derandomize=True, database=None)


@pytest.mark.parametrize("size", [0, 1, 7, 13, 15, 16, 17, 31, 33])
def test_sizes_reach_the_edges(size):
    assert find(strategies.sizes(), lambda n: n == size) == size


@pytest.mark.parametrize("size", [40, 45, 50])
def test_sizes_of_a_range_without_primes_or_blocks(size):
    sizes = strategies.sizes(smallest=40, largest=50)
    assert find(sizes, lambda n: n == size) == size
    with pytest.raises(ValueError, match="smallest=40, largest=33"):
        strategies.sizes(smallest=40)


@few
@given(strategies.shapes(3, smallest=1, largest=9), strategies.dtypes())
def test_shapes_stay_in_range(shape, dtype):
    assert len(shape) == 3 and all(1 <= n <= 9 for n in shape)
    assert dtype in (jnp.float32, jnp.bfloat16, jnp.float16)


@few
@given(st.data(), st.sampled_from(strategies.KINDS))
def test_arrays_are_finite_and_of_their_kind(data, kind):
    shape = strategies.shapes(2)
    x = data.draw(strategies.arrays(shape, strategies.dtypes(), kinds=(kind,)))
    values = np.asarray(x).astype(np.float64)
    assert np.isfinite(values).all()
    if kind == "tiny":
        # Rounding to half precision may step over the bound by one rounding.
        assert (np.abs(values) <= 1e-3 * (1 + 2**-8)).all()
    if kind == "outliers" and values.size > 50:
        top = np.sort(np.abs(values).ravel())
        assert top[-1] > 5 * np.median(top)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_sum_of_squares_of_large_values_does_not_overflow(dtype):
    x = strategies.make_array((50,), dtype, "large", 0)
    assert jnp.isfinite(jnp.dot(x, x, preferred_element_type=jnp.float32))
    assert float(jnp.dot(x, x)) < float(jnp.finfo(dtype).max)


@settings(few, max_examples=8)
@given(strategies.conv_calls(rank=1))
def test_conv_calls_are_calls_of_a_convolution(call):
    x, w, options = call
    padding = options.pop("padding")
    strides, dilation = options.pop("strides"), options.pop("dilation")
    y = conv(x, w, strides=strides[0], dilation=dilation[0], padding=padding, **options)
    assert y.shape[0] == x.shape[0] and y.shape[-1] == w.shape[-1]


@few
@given(strategies.attention_calls())
def test_attention_calls_agree_in_their_shapes(call):
    q, k, v, options = call
    assert k.shape == v.shape and q.shape[2] % k.shape[2] == 0
    assert not options["is_causal"] or q.shape[1] == k.shape[1]


def test_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="kinds must be some of"):
        strategies.arrays((3,), "float32", kinds=("odd",))
