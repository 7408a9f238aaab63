"""Points at which derivatives are hard to see: kinks, infinities, coarse rounding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from opsnn_jax.check import check_grads

check = functools.partial(check_grads, repro=None)


def scaled(f, factor):
    """`f` with a gradient that is `factor` times the right one."""

    @jax.custom_vjp
    def op(x):
        return f(x)

    def backward(x, dy):
        return (jax.vjp(f, x)[1](dy)[0] * jnp.asarray(factor, x.dtype),)

    op.defvjp(lambda x: (f(x), x), backward)
    return op


def only(dtype, f):
    """`f` for one dtype, as a kernel may be."""

    def op(x):
        if x.dtype != dtype:
            raise TypeError(f"op: x must be {dtype}; got {x.dtype}.")
        return f(x)

    return op


def _statuses(report):
    return {row.status for row in report.rows if row.check != "cotangent"}


@pytest.fixture
def x():
    return jax.random.normal(jax.random.key(0), (4, 7))


# A mask, an empty slot and a missing value: finite elements are checked beside them.
@pytest.mark.parametrize("value", [-np.inf, np.inf, np.nan])
def test_elements_that_are_not_finite_leave_the_others_checked(x, value):
    @jax.custom_vjp
    def op(x, b):
        return x * jnp.where(jnp.isfinite(b), b, 0.0)

    def backward(factor, residuals, dy):
        x, b = residuals
        seen = jnp.isfinite(b)
        return dy * jnp.where(seen, b, 0.0), factor * jnp.where(seen, dy * x, 0.0)

    b = jnp.where(jnp.arange(28).reshape(4, 7) % 5 > 0, x, value)
    op.defvjp(lambda x, b: (op(x, b), (x, b)), functools.partial(backward, 1.0))
    report = check(op, x, b)
    assert report.ok and _statuses(report) == {"pass"}
    op.defvjp(lambda x, b: (op(x, b), (x, b)), functools.partial(backward, 3.0))
    assert {row.argument for row in check(op, x, b).failures} == {"b", "all"}


def test_argument_without_a_finite_element_is_named(x):
    report = check(lambda x, b: x + jnp.exp(b), x, jnp.full_like(x, -jnp.inf))
    assert report.ok and report.not_compared == ("b",)
    assert "but not seen: b" in str(report)


@pytest.mark.parametrize(
    "f", [jax.nn.relu, jnp.abs, jnp.round], ids="relu abs round".split()
)
@pytest.mark.parametrize("zeros", [1, 28])
@pytest.mark.parametrize("order", [1, 2])
def test_beside_a_kink_a_right_gradient_passes(x, f, zeros, order):
    x = x.at[jnp.unravel_index(jnp.arange(zeros), x.shape)].set(0.5 * (f == jnp.round))
    report = check(f, x, order=order)
    assert report.ok and _statuses(report) == {"pass"}
    first = next(row for row in report.rows if row.check != "cotangent")
    assert first.note.startswith("beside the point")


@pytest.mark.parametrize("zeros", [1, 28])
def test_beside_a_kink_a_wrong_gradient_fails(x, zeros):
    x = x.at[jnp.unravel_index(jnp.arange(zeros), x.shape)].set(0.0)
    assert len(check(scaled(jax.nn.relu, 2.0), x).failures) == 2


def test_elements_that_tie_part():
    report = check(lambda x: jnp.max(x, axis=0), jnp.ones((3, 4)))
    assert report.ok and _statuses(report) == {"pass"}


def test_op_with_no_smooth_point_beside_could_not_be_compared():
    # Of these values only those at 0 itself are numbers.
    report = check(lambda x: jnp.where(x == 0, x, jnp.nan), jnp.zeros(3))
    assert not report.ok and not report.failures
    assert _statuses(report) == {"no difference"}
    with pytest.raises(AssertionError, match="NOTHING COULD BE COMPARED"):
        report.raise_if_failed()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("factor", [0.0, 1.3])
def test_wrong_gradient_under_coarse_rounding_does_not_pass(x, dtype, factor):
    op = scaled(only(dtype, jnp.sin), factor)
    report = check(op, x.astype(dtype))
    assert not report.ok
    assert _statuses(report) <= {"inconclusive", "fail"}


def test_forgotten_gradient_of_one_argument_does_not_pass(x):
    @jax.custom_vjp
    def op(x, w):
        return jnp.dot(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)).astype(x.dtype)

    def backward(residuals, dy):
        x, w = residuals
        return jnp.dot(dy, w.T), jnp.zeros_like(w)

    op.defvjp(lambda x, w: (op(x, w), (x, w)), backward)
    w = jax.random.normal(jax.random.key(1), (7, 5))
    rows = [row for row in check(op, x, w).rows if row.argument == "w"]
    assert {row.status for row in rows[1:]} <= {"inconclusive", "fail"}


def test_what_rounding_hides_is_called_inconclusive():
    def f(x):
        return jnp.sin(x.astype(jnp.float16) * jnp.asarray(100, jnp.float16))

    report = check(f, jnp.linspace(0.5, 1.0, 11))
    assert _statuses(report) == {"inconclusive"} and report.dtype == "float16"
    assert not report.ok and not report.failures
    assert "compare with grads=True" in report.notes[-1]


def test_values_that_scatter_are_told_of(x):
    calls = iter(range(10**9))

    def disturb(y):
        rng = np.random.default_rng(next(calls))
        return y * (1 + 1e-3 * rng.standard_normal(y.shape)).astype(y.dtype)

    @jax.custom_vjp
    def op(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(disturb, shape, jnp.sin(x))

    op.defvjp(lambda x: (op(x), x), lambda x, dy: (jnp.cos(x) * dy,))
    (row,) = check(op, x, directions=1).rows[1:]
    assert row.status == "inconclusive" and "the values scatter by" in row.note


def test_derivative_that_cancels_is_no_disagreement(x):
    report = check(lambda x: jnp.sum(jax.nn.softmax(x)), x)
    assert report.ok and _statuses(report) == {"pass"}
