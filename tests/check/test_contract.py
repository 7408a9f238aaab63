"""The contract suite: a right op keeps it, each planted bug breaks its own part."""

import functools

import jax
import jax.numpy as jnp
import pytest
from planted_ops import attention, attention_reference, qkv

from opsnn_jax.check import OpCase, check_op
from opsnn_jax.check.transforms import TRANSFORMS
from opsnn_jax.kernels.dtypes import accumulate_dtype

QUICK = OpCase("quick", qkv, transforms=False)
HOW = {"options": {}, "factor": 1.0, "seed": 0}


@jax.custom_vjp
def gate(x, w):
    """x * sigmoid(w)."""
    return x * jax.nn.sigmoid(w)


def _gate_backward(residuals, dy):
    x, w = residuals
    s = jax.nn.sigmoid(w)
    return dy * s, dy * x * s * (1 - s)


gate.defvjp(lambda x, w: (gate(x, w), (x, w)), _gate_backward)


def gate_reference(x, w):
    return x * jax.nn.sigmoid(w)


def gate_args(key, dtype, shape=(3, 5)):
    return tuple(jax.random.normal(key, (2, *shape)).astype(dtype))


def double(x):
    return x * 2


DOUBLE = OpCase(
    "double",
    lambda key, dtype: (jax.random.normal(key, (9,)).astype(dtype),),
    transforms=False,
)


def _check(op, **how):
    how = {"reference": attention_reference, "cases": [QUICK]} | how
    return check_op(op, **how)


def test_right_op_keeps_the_contract():
    case = OpCase("plain", gate_args)
    report = check_op(gate, reference=gate_reference, cases=[case])
    report.raise_if_failed()
    (row,) = report.rows
    assert row.transforms == (len(TRANSFORMS), len(TRANSFORMS))
    assert row.differences == "pass" and row.deterministic


def test_gradient_of_a_bias_where_cotangents_nearly_cancel():
    def add(x, b):
        # In float32, as a convolution sums up the gradient of its bias.
        wide = accumulate_dtype(x.dtype)
        return (x.astype(wide) + b.astype(wide)[None]).astype(x.dtype)

    def args(key, dtype):
        return jax.random.normal(key, (22, 4)).astype(dtype), jnp.ones(4, dtype)

    report = check_op(
        add, reference=add, cases=[OpCase("add", args)], dtypes=("bfloat16",)
    )
    report.raise_if_failed()


def test_odd_sizes_and_dtypes():
    cases = [
        OpCase(str(n), functools.partial(gate_args, shape=(n,)), transforms=False)
        for n in (0, 1, 13)
    ]
    dtypes = ("bfloat16", "float16")
    told = []
    report = check_op(
        gate,
        reference=gate_reference,
        cases=cases,
        dtypes=dtypes,
        progress=told.append,
    )
    report.raise_if_failed()
    assert told == [f"gate (default) {d} {c.name}" for d in dtypes for c in cases]
    assert [(row.dtype, row.case) for row in report.rows] == [
        (dtype, case.name) for dtype in dtypes for case in cases
    ]


@pytest.mark.parametrize(
    "bug, dtype, text",
    [
        ("wrong sign", "float32", "derivative in k"),
        ("missing factor", "float32", "d q: rms error"),
        ("missing rescale", "float32", "out: max error"),
        ("mask off by one", "float32", "out: max error"),
        ("cotangent dtype", "bfloat16", "d q: is float32[7, 4]"),
        ("different bits", "float32", "two runs gave different bits"),
    ],
)
def test_planted_bug_breaks_the_contract(bug, dtype, text):
    report = _check(attention, implementations=[bug], dtypes=[dtype])
    assert not report.ok
    assert report.rows[0].implementation == bug
    assert text in report.details
    with pytest.raises(AssertionError, match="BREAKS the contract"):
        report.raise_if_failed()


def test_wrong_batching_rule_is_found(key):
    @jax.custom_batching.custom_vmap
    def op(x, w):
        return x * w

    @op.def_vmap
    def rule(size, batched, x, w):
        # Takes the first weight for all, a fault that shared weights never show.
        return x * (w[:1] if batched[1] else w[None]), True

    def right(x, w):
        return x * w

    args = tuple(jax.random.normal(key, (2, 5)))
    trouble = TRANSFORMS["vmap"](lambda x, w: op(x, w), right, args, HOW)
    assert any("in_axes=(-1, -1)" in text for text in trouble)
    assert not any("in_axes=(0, None)" in text for text in trouble)
    assert not TRANSFORMS["vmap"](right, right, args, HOW)


def test_changed_carry_is_found_by_scan(key):
    args = qkv(key, jnp.bfloat16)
    op = functools.partial(attention, implementation="cotangent dtype")
    (text,) = TRANSFORMS["scan"](op, attention_reference, args, HOW)
    assert "dtypes" in text
    assert not TRANSFORMS["scan"](attention, attention_reference, args, HOW)


def test_second_order_fault_is_found_by_grad_of_grad(key):
    @jax.custom_vjp
    def op(x, w):
        return gate_reference(x, w)

    def backward(residuals, dy):
        return _gate_backward(jax.lax.stop_gradient(residuals), dy)

    op.defvjp(lambda x, w: (op(x, w), (x, w)), backward)
    args = gate_args(key, jnp.float32)
    assert TRANSFORMS["grad of grad"](op, gate_reference, args, HOW)
    assert not TRANSFORMS["remat"](op, gate_reference, args, HOW)


def test_op_that_cannot_be_traced_is_found():
    def op(x):
        return x if float(x[0]) > 0 else -x

    case = OpCase("x", lambda key, dtype: (jnp.ones(3, dtype),), transforms=False)
    report = check_op(op, reference=jnp.abs, cases=[case])
    assert "Abstract tracer value encountered" in report.details


def test_op_that_differs_outside_jit_is_found(key):
    def op(x):
        return x if isinstance(x, jax.core.Tracer) else -x

    x = jax.random.normal(key, (5,))
    trouble = TRANSFORMS["eager"](op, lambda x: x, (x,), HOW)
    assert trouble and trouble[0].startswith("out: max error")


def test_refusal_is_shown_but_a_report_of_refusals_is_not_ok():
    def op(x, *, implementation=None):
        if implementation == "fast":
            raise NotImplementedError("op: takes no such call.")
        return double(x)

    how = {"reference": double, "cases": [DOUBLE]}
    report = check_op(op, implementations=[None, "fast"], **how)
    assert report.ok
    assert [row.refused for row in report.rows] == ["", "op: takes no such call."]
    assert "fast refused double: op: takes no such call." in str(report)
    assert not check_op(op, implementations=["fast"], **how).ok


def test_predicted_error_growth_is_allowed_where_it_is_predicted():
    def op(x, *, implementation=None):
        worse = 1 + 20 * float(jnp.finfo(x.dtype).eps)
        return double(x) * (worse if implementation == "worse" else 1)

    asked = []

    def factor(implementation, dtype, case):
        asked.append((implementation, dtype, case.name))
        return 100.0 if implementation == "worse" else 1.0

    how = {"reference": double, "cases": [DOUBLE], "implementations": [None, "worse"]}
    check_op(op, factor=factor, **how).raise_if_failed()
    assert asked == [(name, jnp.float32, "double") for name in (None, "worse")]
    assert not check_op(op, **how).ok


def test_policy_on_nonfinite_values_is_asked_once_an_implementation():
    def policy(op):
        nan = jnp.isnan(op(jnp.full((3,), jnp.nan))).all()
        return None if nan else "a NaN must reach the output"

    how = {"reference": double, "cases": [DOUBLE], "nonfinite": policy}
    assert check_op(double, **how).ok
    report = check_op(lambda x: double(jnp.nan_to_num(x)), **how)
    assert "Inf and NaN: a NaN must reach" in report.details


def test_report_is_readable_by_machine_and_person():
    report = check_op(
        double, reference=double, cases=[DOUBLE], dtypes=("float32", "bfloat16")
    )
    assert report.to_dict()["ok"] and len(report.to_dict()["rows"]) == 2
    assert report.table().row_count == 2
    assert "double keeps the contract" in str(report)
    with pytest.raises(ValueError, match="at least one OpCase"):
        _check(attention, cases=[])
