"""What each compression sends of an array, and what it owes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from opsnn_jax.training import Half, Int8, TopK
from tests.training.compressions import KINDS


def sent_and_left(compression, x):
    sent, left = compression.compress([jnp.zeros_like(x)[None]], [x])
    (decoded,) = compression.decompress(sent, [x])
    return decoded, left[0][0]


@pytest.mark.parametrize(
    "x, k, kept",
    [
        # pfl-research#65: without the absolute value, the largest negative is lost.
        ([-5.0, 1.0, 2.0, 0.0], 1, [-5.0, 0.0, 0.0, 0.0]),
        ([1.0, -2.0, 2.0, 2.0, -2.0], 3, [0.0, -2.0, 2.0, 2.0, 0.0]),
        ([0.0, 0.0, 0.0], 1, [0.0, 0.0, 0.0]),
        ([3.0, jnp.nan, 4.0], 1, [0.0, jnp.nan, 0.0]),
        ([3e38, -jnp.inf, jnp.nan], 1, [0.0, -jnp.inf, 0.0]),
    ],
)
def test_top_k_keeps_the_largest_and_the_first_of_equals(x, k, kept):
    x = jnp.asarray(x)
    compression = TopK(k / x.size)
    values, places = compression.encode(x)
    assert values.shape == places.shape == (k,) and len({*places.tolist()}) == k
    sent, left = sent_and_left(compression, x)
    np.testing.assert_array_equal(sent, kept)
    finite = np.isfinite(x)
    np.testing.assert_array_equal(left[finite], (x - jnp.asarray(kept))[finite])


@pytest.mark.parametrize(
    "share, size, k",
    [(0.01, 10, 1), (0.1, 25, 2), (0.5, 7, 4), (1.0, 9, 9), (0.001, 1, 1)],
)
def test_top_k_counts_what_it_sends(share, size, k):
    assert TopK(share).count(size) == k
    assert TopK(share).sends_all(size) == (k == size)


@pytest.mark.parametrize("compression", KINDS, ids=str)
def test_sent_and_left_are_the_whole(key, compression):
    shapes = [(), (1,), (7,), (3, 5, 2), (300,), (0, 3)]
    arrays = [1e-3 * jax.random.normal(key, shape) for shape in shapes]
    split = jax.jit(lambda arrays: [sent_and_left(compression, x) for x in arrays])
    for x, (sent, left) in zip(arrays, split(arrays), strict=True):
        assert sent.shape == left.shape == x.shape
        assert sent.dtype == left.dtype == jnp.float32
        # One subtraction is rounded, and one addition here.
        size = np.abs([sent, left]).max(initial=0.0)
        np.testing.assert_allclose(sent + left, x, rtol=0, atol=2 * 2**-24 * size)


@pytest.mark.parametrize("scale", [1e-37, 1e-3, 1.0, 1e5, 3e38])
@pytest.mark.parametrize("block", [1, 4, 256])
def test_bytes_are_within_a_step_of_the_block(key, scale, block):
    x = scale * jax.random.uniform(key, (999,), minval=-1.0)
    sent, _ = sent_and_left(Int8(block), x)
    largest = [np.abs(x[i : i + block]).max() for i in range(0, x.size, block)]
    # Half a step, but for the last one, which is clipped: 2**7 steps reach the power of
    # two above the largest, which is at most twice that.
    step = np.repeat(largest, block)[: x.size] / 2**6
    assert (np.abs(sent - x) <= step).all()
    assert (np.abs(sent - x) <= 0.5 * step).mean() > 0.97
    steps, scales = Int8(block).encode(x)
    assert steps.dtype == jnp.int8 and int(jnp.abs(steps).min()) >= 0
    mantissas, _ = np.frexp(scales)
    assert (mantissas == 0.5).all()


@pytest.mark.parametrize("compression", KINDS, ids=str)
def test_what_is_not_finite_is_never_hidden(key, compression):
    split = jax.jit(lambda x: sent_and_left(compression, x))
    for bad in (jnp.inf, -jnp.inf, jnp.nan):
        x = np.array(jax.random.normal(key, (600,)))
        x[311] = bad
        sent, _ = split(x)
        assert not jnp.isfinite(sent).all()


def test_half_sends_the_largest_number_and_owes_the_rest():
    sent, left = sent_and_left(Half("float16"), jnp.asarray([1e6, -1e5, 1e-9, 2.0]))
    np.testing.assert_array_equal(sent, [65504.0, -65504.0, 0.0, 2.0])
    np.testing.assert_array_equal(
        left, np.float32([1e6 - 65504, 65504 - 1e5, 1e-9, 0.0])
    )
    assert jnp.isfinite(sent_and_left(Half(), jnp.full(1, 3.4028235e38))[0]).all()


@pytest.mark.parametrize(
    "make, says",
    [
        (lambda: TopK(0.0), "TopK: share must be above 0 and at most 1; got 0.0"),
        (lambda: TopK(1.5), "TopK: share must be above 0 and at most 1; got 1.5"),
        (lambda: TopK(float("nan")), "TopK: share must be above 0"),
        (lambda: Int8(0), "Int8: block must be an integer of at least 1; got 0"),
        (lambda: Half("float32"), "Half: dtype must be 'bfloat16' or 'float16'"),
    ],
)
def test_option_out_of_its_range_is_refused(make, says):
    with pytest.raises(ValueError, match=says):
        make()
