"""What the contract suite makes of errors, refusals and dtypes that cannot be had."""

import jax
import jax.numpy as jnp
import pytest

from opsnn_jax.check import OpCase, check_op, compare_frameworks


def double(x):
    return x * 2


def _case(name="plain", make=None):
    make = make or (lambda key, dtype: (jax.random.normal(key, (9,)).astype(dtype),))
    return OpCase(name, make, transforms=False)


def _check(op, **how):
    return check_op(op, **({"reference": double, "cases": [_case()]} | how))


def test_only_a_named_implementation_may_refuse():
    def op(x, *, implementation=None):
        raise NotImplementedError("op: takes no such call.")

    report = _check(op, implementations=[None, "fast"])
    default, fast = report.rows
    assert default.failures and not default.refused
    assert "though no implementation was named: op: takes" in default.failures[0]
    assert fast.refused and fast.ok


@pytest.mark.parametrize(
    "error", [KeyError("a"), IndexError("b"), ZeroDivisionError("c"), AssertionError()]
)
@pytest.mark.parametrize("where", ["op", "reference", "policy", "outside jit"])
def test_any_error_is_a_row_that_failed(error, where):
    def fails(x):
        if where != "outside jit" or not isinstance(x, jax.core.Tracer):
            raise error
        return double(x)

    cases = [_case("first"), _case("second")]
    how = {"reference": {"reference": fails}, "policy": {"nonfinite": fails}}
    op = fails if where in ("op", "outside jit") else double
    if where == "outside jit":
        cases = [OpCase(c.name, c.make_args) for c in cases[:1]]
    report = check_op(
        op, **({"reference": double, "cases": cases} | how.get(where, {}))
    )
    assert [row.case for row in report.rows] == [case.name for case in cases]
    assert type(error).__name__ in report.rows[-1].failures[-1]


def test_row_of_what_did_not_run_shows_no_numbers():
    def op(x):
        raise ValueError("op: no.")

    report = _check(op)
    (row,) = report.rows
    assert (row.forward, row.gradient, row.deterministic) == (None, None, None)
    line = next(line for line in str(report).split("\n") if "plain" in line)
    assert line.split() == ["(default)", "float32", "plain", "FAILED", "(1)"]


def test_reference_that_is_not_float64_is_blamed_itself():
    def narrow(x):
        return x.astype(jnp.bfloat16).astype(x.dtype)

    (row,) = _check(double, reference=narrow).rows
    text = "the reference must run in float64, but it rounds to bfloat16 inside"
    assert row.failures == (text,)


def test_dtypes_that_are_not_to_be_had_are_refused():
    with pytest.raises(ValueError, match="check_op: float64 must be enabled, or JAX"):
        _check(double, dtypes=["float32", "float64"])
    with pytest.raises(ValueError, match="compare_frameworks: float64 must be enabled"):
        compare_frameworks("layer_norm", dtype="float64")
    ignores = _case("ignores", lambda key, dtype: (jnp.ones(3),))
    with pytest.raises(ValueError, match="'ignores' must make .* it makes float32"):
        _check(double, cases=[ignores], dtypes=["bfloat16"])
    with pytest.raises(ValueError, match="it makes no floating-point array"):
        _check(double, dtypes=["int8"])
    with jax.enable_x64(True):
        assert _check(double, dtypes=["float64"]).ok


def test_unknown_level_is_the_callers_fault():
    with pytest.raises(ValueError, match="check_op: level must be one of"):
        _check(double, level="L9")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_right_op_with_kinks_and_a_constant_one_keep_the_contract(dtype):
    zeros = _case("zeros", lambda key, dtype: (jnp.zeros(9, dtype),))
    cases = [_case(), zeros]
    how = {"cases": cases, "dtypes": [dtype]}
    _check(jax.nn.relu, reference=jax.nn.relu, **how).raise_if_failed()
    ones = jnp.ones_like
    _check(ones, reference=ones, **how).raise_if_failed()


def test_derivative_that_half_precision_hides_is_no_failure():
    def op(x):
        if x.dtype != jnp.bfloat16:
            raise TypeError("op: x must be bfloat16.")
        return jnp.sin(x)

    report = _check(op, reference=jnp.sin, dtypes=["bfloat16"])
    report.raise_if_failed()
    assert report.rows[0].differences == "inconclusive"
