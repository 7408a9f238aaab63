"""The double benchmark passes equal work and finds small losses of precision."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from planted_ops import attention, attention_reference, conv, qkv

from opsnn_jax.check import Limits, assert_close, compare
from opsnn_jax.check.errors import compare_arrays, sampling_allowance

DTYPES = ("float32", "bfloat16", "float16")


def matmul_in_blocks(x, w):
    """Another order of the same sum, in float32."""
    acc = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
    parts = [jnp.dot(x[:, i::4], w[i::4], preferred_element_type=acc) for i in range(4)]
    return sum(parts).astype(x.dtype)


def matmul(x, w):
    return jnp.dot(x, w)


def _operands(seed, dtype, shape=(24, 64, 16)):
    m, k, n = shape
    kx, kw = jax.random.split(jax.random.key(seed))
    x = jax.random.normal(kx, (m, k)).astype(dtype)
    return x, (jax.random.normal(kw, (k, n)) * k**-0.5).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(5))
def test_another_order_of_summation_is_within_l1(seed, dtype):
    assert_close(matmul_in_blocks, matmul, *_operands(seed, dtype), level="L1")


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 7, 1), (2, 5, 3), (3, 1, 2)])
@pytest.mark.parametrize("seed", range(10))
def test_small_arrays_do_not_fail_by_chance(seed, shape):
    assert_close(matmul_in_blocks, matmul, *_operands(seed, "float32", shape))


@pytest.mark.parametrize("dtype", DTYPES)
def test_error_of_three_roundings_is_found(dtype):
    def off(x, w):
        return matmul(x, w) * jnp.asarray(1 + 3 * jnp.finfo(dtype).eps, dtype)

    result = compare(off, matmul, *_operands(0, dtype))
    assert not result.ok
    assert result.ratio > 2


def test_sum_in_half_precision_is_found():
    def narrow(x, w):
        def add(total, pair):
            return (total + pair[0][:, None] * pair[1][None, :]), None

        zero = jnp.zeros((x.shape[0], w.shape[1]), x.dtype)
        return jax.lax.scan(add, zero, (x.T, w))[0]

    with pytest.raises(AssertionError, match="NOT within L1"):
        assert_close(narrow, matmul, *_operands(0, "bfloat16"))
    compare(narrow, matmul, *_operands(0, "bfloat16"), factor=20).raise_if_failed()


@pytest.mark.parametrize("dtype", DTYPES)
def test_right_op_passes_with_gradients(key, dtype):
    assert_close(attention, attention_reference, *qkv(key, dtype), grads=True)


@pytest.mark.parametrize(
    "bug, rows",
    [
        ("missing rescale", {"out"}),
        ("mask off by one", {"out", "d q", "d k", "d v"}),
        ("forward error", {"out"}),
        ("wrong sign", {"d k"}),
        ("missing factor", {"d q"}),
    ],
)
def test_planted_bug_is_named(key, bug, rows):
    def op(q, k, v):
        return attention(q, k, v, implementation=bug)

    args = qkv(key, "float32", length=17, width=8)
    result = compare(op, attention_reference, *args, grads=True)
    assert rows <= {row.name for row in result.rows if not row.ok}


def test_cotangent_dtype_is_found(key):
    def op(q, k, v):
        return attention(q, k, v, implementation="cotangent dtype")

    result = compare(op, attention_reference, *qkv(key, "bfloat16"), grads=True)
    failed = {row.name: row.failures for row in result.rows if not row.ok}
    assert failed == {"d q": ("is float32[7, 4], expected bfloat16[7, 4]",)}


def test_wrong_baseline_does_not_excuse_the_same_mistake():
    def wrong(x, w):
        return matmul(x, w) + 1

    result = compare(wrong, wrong, *_operands(0, "float32"), truth=matmul)
    assert not result.ok
    assert "the baseline is itself wrong" in result.rows[0].failures[0]


def test_one_wrong_element_is_found():
    def op(x, w):
        return matmul(x, w).at[3, 5].add(1e-4)

    result = compare(op, matmul, *_operands(0, "float32"))
    assert "max error" in result.rows[0].failures[0]


def test_wrong_small_values_are_counted():
    # The mean and the root mean square do not see what is lost in the small values.
    truth = np.where(np.arange(4000) % 2, 1.0, 1e-6)
    rounded = truth.astype(np.float32)
    off = np.where(truth < 1e-3, 0, rounded).astype(np.float32)
    row = compare_arrays("y", off, rounded, truth, Limits(1e9, 1e9, 1e9))
    assert row.failures == ("2000 small values are off, of the baseline's 0",)


def test_nonfinite_must_match():
    def inf(x):
        return jnp.where(x > 1, jnp.inf, x)

    def minus(x):
        return jnp.where(x > 1, -jnp.inf, x)

    def nan(x):
        return jnp.where(x > 1, jnp.nan, x)

    x = jnp.linspace(0, 2, 9)
    assert_close(inf, inf, x)
    assert_close(nan, nan, x)
    for f, g in ((inf, jnp.abs), (jnp.abs, nan), (minus, inf), (nan, inf)):
        result = compare(f, g, x)
        assert not result.ok
        assert "4 elements are Inf or NaN" in result.rows[0].failures[0]


def test_overflow_of_the_dtype_is_no_fault():
    def square(x):
        return x * x

    assert_close(square, square, jnp.asarray([300.0, 1.0], jnp.float16))


def test_exact_baseline_leaves_room_for_one_rounding():
    x = jnp.arange(64, dtype=jnp.float32)
    result = compare(lambda x: x * jnp.float32(1 + 2**-23), lambda x: x, x)
    assert not result.ok and 3 < result.ratio < 6
    assert_close(lambda x: x * jnp.float32(1 + 2**-24), lambda x: x, x)


def test_structure_integers_and_empty_arrays(key):
    def f(x):
        return {"top": x.max(initial=0), "at": jnp.argsort(x), "none": x[:0]}

    assert_close(f, f, jax.random.normal(key, (9,)))
    wrong = compare(lambda x: f(-x), f, jax.random.normal(key, (9,)))
    failed = {row.name: row.failures for row in wrong.rows if not row.ok}
    assert "elements differ" in failed["out['at']"][0]
    with pytest.raises(ValueError, match="one structure"):
        compare(lambda x: x, f, jnp.ones(3))


def test_truth_that_is_not_float64_is_refused(key):
    def narrow(x):
        return jnp.sin(x.astype(jnp.float32))

    x = jax.random.normal(key, (5,))
    with pytest.raises(ValueError, match="rounds to float32 inside"):
        compare(narrow, narrow, x)
    assert_close(narrow, narrow, x, truth=jnp.sin)
    assert_close(narrow, narrow, x, truth=np.sin(np.asarray(x, np.float64)))
    with pytest.raises(ValueError, match="truth must be a function"):
        compare(narrow, narrow, x, truth=np.sin(np.asarray(x)), grads=True)
    with pytest.raises(ValueError, match="level must be"):
        compare(jnp.sin, jnp.sin, x, level="L9")


def test_result_is_readable_by_machine_and_person(key):
    args = (jax.random.normal(key, (1, 5, 5, 2)), jnp.ones((3, 3, 2, 2)))
    result = compare(conv, conv, *args, grads=True, options={"strides": 2})
    assert result.to_dict()["ok"]
    assert [row["name"] for row in result.to_dict()["rows"]] == ["out", "d x", "d w"]
    assert result.table().row_count == 3
    assert "conv against conv: within L1" in str(result)


def test_allowance_for_few_samples_vanishes_for_many():
    assert sampling_allowance(9) == pytest.approx(np.e)
    assert sampling_allowance(10**6) < 1.01


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize(("error", "outside"), [(0.5, False), (4.0, True)])
def test_the_tolerance_grows_with_the_data(size, error, outside):
    # About zero the constants for float32 allow 2^-16 of data of size 1.
    truth = np.random.default_rng(0).uniform(-2, 2, 500) * size
    near = np.abs(truth) < 1e-4 * size
    truth[:50], near[:50] = 0, True
    ours = (truth + near * error * 2**-16 * size).astype(np.float32)
    exact = truth.astype(np.float32)
    row = compare_arrays("y", ours, exact, truth, Limits(1e9, 1e9, 1e9))
    assert (row.ours.outside > 0) == outside
