"""compare on inputs and outputs that are not plain float32 arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from opsnn_jax.check import (
    assert_close,
    check_grads,
    compare,
    precision_sweep,
    sensitivity,
)


def _complex(x):
    return x.astype(jnp.complex64)


def test_numpy_arrays_of_float64_are_rounded_for_the_truth_too():
    def off(x):
        return jnp.sin(x) * jnp.asarray(1 + 4 * 2**-23, x.dtype)

    x = np.random.default_rng(0).uniform(100, 200, 500)
    assert_close(jnp.sin, jnp.sin, x, grads=True)
    # The rounding of x is thousands of times the error that is to be found.
    assert not compare(off, jnp.sin, x).ok
    with jax.enable_x64(True):
        assert compare(jnp.sin, jnp.sin, x).rows[0].dtype == "float64"


@pytest.mark.parametrize(
    "f",
    [
        lambda x, w: jnp.argmax(x @ w, axis=-1),
        lambda x, w: jax.lax.top_k(x @ w, 5)[1],
        lambda x, w: jnp.round((x @ w) * 8).astype(jnp.int8),
    ],
    ids=["argmax", "top_k", "quantiser"],
)
def test_integers_may_be_decided_by_rounding_as_the_baseline_has_it(f):
    x = jax.random.normal(jax.random.key(0), (64, 32), jnp.bfloat16)
    w = jax.random.normal(jax.random.key(1), (32, 128), jnp.bfloat16)
    (row,) = compare(f, f, x, w).rows
    assert row.ok and row.ours is None
    (row,) = compare(lambda x, w: f(x, w) + jnp.ones((), f(x, w).dtype), f, x, w).rows
    assert "elements differ" in row.failures[0]


def test_integer_arguments_need_no_floating_point_one():
    def mean(n):
        return jnp.mean(n.astype(float) / 3)

    n = jnp.arange(3)
    assert_close(mean, mean, n)
    assert not compare(lambda n: mean(n) * 1.001, mean, n).ok
    assert_close(lambda n: n * 2, lambda n: n + n, n)
    with pytest.raises(ValueError, match="must have a floating-point argument"):
        compare(mean, mean, n, grads=True)


def test_gradients_of_an_integer_output_are_zero(key):
    x = jax.random.normal(key, (7,))
    number = compare(lambda x: (2, 0.5), lambda x: (2, 0.5), x, grads=True)
    assert number.ok and number.rows[-1].name == "d x"
    assert compare(jnp.argmax, jnp.argmax, x, grads=True).ok


@pytest.mark.parametrize("call", [lambda f, *x: compare(f, f, *x), check_grads])
def test_complex_numbers_are_refused_in_one_sentence(key, call):
    x = jax.random.normal(key, (7,))
    for f, args in [
        (jnp.fft.fft, (x,)),
        (jnp.abs, (_complex(x),)),
        (lambda z, x: jnp.abs(z) * x, (_complex(x), x)),
    ]:
        with pytest.raises(ValueError, match="got complex64. Wrap the function"):
            call(f, *args)
        for other in (sensitivity, precision_sweep):
            with pytest.raises(ValueError, match=f"{other.__name__}: .* got complex64"):
                other(f, *args)


def test_op_without_a_floating_output_has_no_derivative(key):
    x = jax.random.normal(key, (7,))
    for f in (lambda x: None, jnp.argmax):
        with pytest.raises(ValueError, match="must return a floating-point array"):
            check_grads(f, x)
    nothing = compare(lambda x: None, lambda x: None, x)
    assert not nothing.ok and "NOTHING WAS RETURNED" in str(nothing)


def test_what_was_not_measured_is_blank(key):
    def both(x):
        return x, jnp.argsort(x)

    x = jax.random.normal(key, (7,))
    result = compare(both, both, x)
    line = str(result).split("\n")[-1]
    assert line.split() == ["out[1]", "int32", "7", "ok"]
    wrong = compare(lambda x: x.astype(jnp.bfloat16), lambda x: x, x)
    assert wrong.rows[0].ours is None and wrong.ratio == 0
    short = compare(lambda x: x, lambda x: x[:1], x, truth=lambda x: x)
    assert short.rows[0].failures == ("the baseline is float32[1]",)


def test_structures_that_differ_are_told_apart(key):
    def pair(x):
        return x, x

    def single(x):
        return x

    x = jax.random.normal(key, (7,))
    with pytest.raises(ValueError, match=r"pair returns .*, and single PyTreeDef"):
        compare(pair, single, x)
    with pytest.raises(ValueError, match=r"pair returns .*, and the truth PyTreeDef"):
        compare(pair, pair, x, truth=single)


def test_truth_that_fails_in_float64_is_refused_with_its_reason(key):
    def table(x):
        return x * {"float32": 2.0}[x.dtype.name]

    with pytest.raises(ValueError, match="does not take float64 .KeyError: 'float64'"):
        compare(table, table, jax.random.normal(key, (7,)))
