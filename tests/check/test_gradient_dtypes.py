"""check_grads of ops that cannot run in float64, or not in every mode."""

import functools

import jax
import jax.numpy as jnp
import pytest

from opsnn_jax.check import check_grads

check = functools.partial(check_grads, repro=None)


def _fails_to_lower_in_float64(x):
    if x.dtype == jnp.float64:
        # Traces, but has no lowering: of what runs in float32 only.
        x = jax.lax.platform_dependent(x, tpu=jnp.sin)
    return jnp.sin(x)


def _has_a_table(x):
    return jnp.sin(x) * {"float32": 2.0}[x.dtype.name]


def _asserts(x):
    assert x.dtype == jnp.float32
    return jnp.sin(x)


def _divides(x):
    return jnp.sin(x) * (1 / (8 // x.dtype.itemsize - 1))


@pytest.mark.parametrize(
    "op, why",
    [
        (_fails_to_lower_in_float64, "it fails there"),
        (_has_a_table, "KeyError: 'float64'"),
        (_asserts, "AssertionError"),
        (_divides, "ZeroDivisionError"),
    ],
)
def test_op_that_fails_in_float64_is_compared_in_float32(key, op, why):
    report = check(op, jax.random.normal(key, (5,)))
    report.raise_if_failed()
    assert report.dtype == "float32"
    assert why in report.notes[0]


@pytest.mark.parametrize("error", [KeyError("a"), IndexError("b"), AssertionError()])
def test_any_error_of_an_op_is_a_refusal(key, error):
    def op(x):
        raise error

    report = check(op, jax.random.normal(key, (5,)))
    (row,) = report.failures
    assert row.status == "refused" and type(error).__name__ in row.note


def test_forward_mode_needs_no_reverse_mode(key):
    def op(x):
        return jax.lax.while_loop(lambda y: jnp.max(y) < 10, lambda y: 2 * y, x)

    x = jnp.abs(jax.random.normal(key, (5,)))
    check(op, x, modes=("jvp",)).raise_if_failed()
    assert not check(op, x).ok
    second = check(op, x, modes=("jvp",), order=2)
    assert {row.order for row in second.failures} == {2}


def test_title_names_the_dtype_that_the_op_rounds_to(key):
    def op(x):
        return x.astype(jnp.bfloat16).astype(x.dtype) ** 2

    report = check(op, jax.random.normal(key, (5,)))
    assert report.dtype == "bfloat16"
    assert "(compared in bfloat16)" in str(report)
