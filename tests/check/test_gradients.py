"""check_grads finds planted faults in derivatives, and nothing else."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from planted_ops import attention, attention_reference, conv, qkv

from opsnn_jax.check import check_grads

check = functools.partial(check_grads, repro=None)


def _of(report, argument):
    return [row for row in report.rows if row.argument == argument]


@pytest.mark.parametrize("seed", range(2))
def test_right_op_passes_in_first_and_second_order(seed):
    args = qkv(jax.random.key(seed), jnp.float32)
    report = check(attention, *args, order=2, seed=seed)
    report.raise_if_failed()
    assert report.dtype == "float64"
    assert {row.argument for row in report.rows} == {"q", "k", "v", "all", "dy"}
    assert {row.status for row in report.rows} == {"pass"}


@pytest.mark.parametrize(
    "bug, argument", [("wrong sign", "k"), ("missing factor", "q")]
)
def test_wrong_gradient_is_named(key, bug, argument):
    options = {"implementation": bug}
    report = check(attention, *qkv(key, jnp.float32), options=options)
    assert not report.ok
    assert {row.argument for row in report.failures} == {argument, "all"}
    with pytest.raises(AssertionError, match="DISAGREE"):
        report.raise_if_failed()


def test_error_of_one_element_in_a_million_is_found(key):
    @jax.custom_vjp
    def square(x):
        return x * x

    def backward(x, dy):
        return ((2 * x * dy).at[7].multiply(1 + 1e-6),)

    square.defvjp(lambda x: (x * x, x), backward)
    assert not check(square, jax.random.normal(key, (1000,))).ok


def test_cotangent_of_another_dtype_is_found(key):
    options = {"implementation": "cotangent dtype"}
    report = check(attention, *qkv(key, jnp.bfloat16), options=options)
    assert [(r.argument, r.check) for r in report.failures] == [("q", "cotangent")]
    assert report.failures[0].note == "is float32[7, 4], of bfloat16[7, 4]"


def test_second_order_fault_needs_order_2(key):
    args, options = qkv(key, jnp.float32), {"implementation": "second order"}
    assert check(attention, *args, options=options).ok
    report = check(attention, *args, options=options, order=2)
    assert not report.ok
    assert {row.order for row in report.failures} == {2}


def test_forward_fault_with_its_own_gradient_passes(key):
    # The gradient of a wrong function may be right: that is for `compare` to find.
    options = {"implementation": "mask off by one"}
    assert check(attention, *qkv(key, jnp.float32), options=options).ok


def test_vjp_and_jvp_that_disagree_are_found(key):
    @jax.custom_jvp
    def f(x):
        return jnp.sin(x)

    @f.defjvp
    def _(primals, tangents):
        (x,), (dx,) = primals, tangents
        # A rule that is not linear in dx: forward mode sees it, reverse mode does not.
        return jnp.sin(x), jnp.cos(x) * dx + 0 * x

    assert check(f, jax.random.normal(key, (5,))).ok

    @jax.custom_jvp
    def g(x):
        return jnp.sin(x)

    @g.defjvp
    def _(primals, tangents):
        (x,), (dx,) = primals, tangents
        return jnp.sin(x), jnp.cos(x) * dx * 1.001

    report = check(g, jax.random.normal(key, (5,)))
    assert all(row.note.startswith("vjp and jvp off") for row in report.failures)
    assert len(report.failures) == 2


def test_custom_vjp_has_no_jvp_which_is_noted_not_failed(key):
    report = check(attention, *qkv(key, jnp.float32))
    assert any(note.startswith("No jvp") for note in report.notes)
    assert report.ok
    only = check(attention, *qkv(key, jnp.float32), modes=("jvp",))
    assert not only.ok


@pytest.mark.parametrize("seed", range(5))
def test_many_kinks_nearby_do_not_matter(seed):
    x = jax.random.normal(jax.random.key(seed), (3000,))
    report = check(jax.nn.relu, x, seed=seed)
    assert {row.status for row in report.rows} == {"pass"}


def test_wrong_gradient_beside_a_kink_is_found(key):
    @jax.custom_vjp
    def f(x):
        return jax.nn.relu(x)

    f.defvjp(lambda x: (jax.nn.relu(x), x), lambda x, dy: (jnp.where(x > 0, -dy, 0.0),))
    assert not check(f, jax.random.normal(key, (50,))).ok


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("seed", range(3))
def test_op_that_rounds_inside_is_compared_in_its_dtype(dtype, seed):
    def f(x, w):
        y = jnp.dot(x.astype(dtype), w.astype(dtype))
        return jnp.tanh(y.astype(jnp.float32).astype(dtype))

    kx, kw = jax.random.split(jax.random.key(seed))
    x = jax.random.normal(kx, (9, 17)).astype(dtype)
    w = jax.random.normal(kw, (17, 5)).astype(dtype)
    report = check(f, x, w, seed=seed)
    # Half precision may hide all there is.
    assert not report.failures and (report.ok or dtype != "float32")
    assert report.dtype == dtype
    assert "rounds to" in report.notes[0]


def test_wrong_sign_is_found_in_float32_alone(key):
    @jax.custom_vjp
    def f(x):
        return jnp.sin(x.astype(jnp.float32))

    f.defvjp(
        lambda x: (f(x), x),
        lambda x, dy: (-(jnp.cos(x.astype(jnp.float32)) * dy).astype(x.dtype),),
    )
    report = check(f, jax.random.normal(key, (20,)))
    assert report.dtype == "float32"
    assert not report.ok


def test_float32_gradient_that_is_a_percent_off_is_found(key):
    @jax.custom_vjp
    def f(x):
        return jnp.sin(x.astype(jnp.float32))

    f.defvjp(
        lambda x: (f(x), x),
        lambda x, dy: ((1.01 * jnp.cos(x.astype(jnp.float32)) * dy).astype(x.dtype),),
    )
    assert not check(f, jax.random.normal(key, (20,))).ok


def test_pytrees_integers_keys_and_options_pass_through(key):
    def f(params, index, key, *, power):
        noise = jax.random.normal(key, (3,), params["w"].dtype)
        return {"y": params["w"][index] ** power * noise, "index": index}

    params = {"w": jnp.arange(1.0, 6.0), "n": jnp.arange(3)}
    report = check(f, params, jnp.array([0, 2, 4]), key, options={"power": 3})
    report.raise_if_failed()
    assert {row.argument for row in report.rows} == {"params['w']"}


def test_empty_array_is_skipped():
    report = check(conv, jnp.zeros((0, 5, 5, 3)), jnp.ones((3, 3, 3, 4)))
    report.raise_if_failed()
    assert [row.check for row in _of(report, "x")] == ["cotangent"]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("seed", range(8))
def test_constant_and_exact_ops_pass(seed, dtype):
    # Their values round nowhere, so no rounding can be measured.
    x, w = jax.random.normal(jax.random.key(seed), (2, 1, 1)).astype(dtype)
    check(lambda x, w: jax.nn.softmax(x @ w) * w, x, w, seed=seed).raise_if_failed()


def test_not_finite_fails():
    assert "not finite" in check(jnp.log, jnp.array([-1.0, 2.0])).failures[0].note
    report = check(lambda x: jnp.sqrt(x * x), jnp.zeros(3))
    assert "derivative is not finite" in report.failures[0].note


def test_refusal_is_a_failure_with_its_reason(key):
    def f(x):
        raise NotImplementedError("f: takes no float32.")

    report = check(f, jax.random.normal(key, (3,)))
    assert not report.ok
    assert "takes no float32" in str(report)
    assert "NOT ALL WAS COMPUTED" in str(report) and "DISAGREE" not in str(report)


def test_results_are_readable_by_machine_and_person(key):
    report = check(attention_reference, *qkv(key, jnp.float32))
    plain = report.to_dict()
    assert plain["ok"] and plain["op"] == "attention_reference"
    assert len(plain["rows"]) == len(report.rows)
    assert report.table().row_count == len(report.rows)
    assert np.isfinite(plain["rows"][-1]["jvp"])


@pytest.mark.parametrize(
    "how, text",
    [
        ({"order": 3}, "order must be 1 or 2"),
        ({"directions": 0}, "directions must be 1 or more"),
        ({"modes": ("adjoint",)}, "modes must be"),
    ],
)
def test_bad_arguments_are_refused(how, text):
    with pytest.raises(ValueError, match=text):
        check(jnp.sin, jnp.ones(3), **how)
    with pytest.raises(ValueError, match="no floating-point argument"):
        check(jnp.sin, jnp.arange(3))
