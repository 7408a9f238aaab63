"""explain: what it says is what runs, and its counts are right."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from opsnn_jax import conv2d, explain, flash_attention, separable_conv2d
from opsnn_jax.costs import count_multiplies

X = jax.ShapeDtypeStruct((8, 56, 56, 64), "float32")
W = jax.ShapeDtypeStruct((3, 3, 64, 64), "float32")


def test_a_convolution_on_each_platform():
    told = explain(conv2d, X, W, platform="cpu")
    assert [(p.name, p.chosen) for p in told.passes] == [
        ("fwd", "winograd"), ("dx", "winograd"), ("dw", "winograd"),
    ]  # fmt: skip
    names = {c.name: c for c in told["fwd"].candidates}
    pixels = 8 * 56 * 56
    assert names["direct"].multiplies == pixels * 9 * 64 * 64
    # A quarter of the products, and some for the transforms.
    quarter = pixels * 9 * 64 * 64 // 4
    assert quarter < names["winograd"].multiplies < 2 * quarter
    assert "quarter of the products" in names["winograd"].reason
    assert names["depthwise"].multiplies is None
    assert "takes groups equal to the channels" in names["depthwise"].reason
    assert "does not run on cpu" in names["pallas_tpu"].reason
    assert explain(conv2d, X, W, platform="tpu")["dw"].chosen == "direct"


def test_an_array_may_be_an_option():
    told = explain(conv2d, X, W, residual=X, strides=np.int64(1), platform="cpu")
    assert told["fwd"].chosen == "winograd"


def test_the_page_names_every_implementation():
    told = explain(conv2d, X, W, platform="cpu", activation="gelu", strides=2)
    text = str(told)
    assert "conv, dw, on cpu: direct" in text
    for candidate in told["fwd"].candidates:
        assert candidate.name in text and candidate.reason in text
    assert "takes no strides" in text


def test_what_was_asked_for():
    told = explain(conv2d, X, W, implementation=("depthwise", "gemm"), platform="cpu")
    assert told["fwd"].chosen == "gemm"
    reasons = {c.name: c.reason for c in told["fwd"].candidates}
    assert reasons["gemm"] == "asked for" and reasons["direct"] == "not asked for"


def test_attention_and_functions_of_several_ops():
    q = jax.ShapeDtypeStruct((1, 16, 2, 8), "float32")

    def both(q, x, w):
        return flash_attention(q, q, q).sum() + conv2d(x, w).sum()

    told = explain(both, q, X, W, platform="cpu")
    assert {(p.op, p.name) for p in told.passes} >= {
        ("flash_attention", "fwd"), ("flash_attention", "bwd"), ("conv", "dw"),
    }  # fmt: skip
    assert told["bwd"].chosen == "xla"
    assert "number 1 in the order" in str(told)


def test_two_calls_of_one_op_are_told_apart():
    x, depthwise, pointwise = (
        jax.ShapeDtypeStruct(shape, "float32")
        for shape in ((1, 8, 8, 128), (3, 3, 1, 128), (1, 1, 128, 2))
    )
    told = explain(separable_conv2d, x, depthwise, pointwise, platform="tpu")
    both = 64 * 128 * 9 + 64 * 128 * 2
    fused, separate = told["fwd"].candidates
    assert (fused.chosen, fused.name) == (True, "pallas_tpu_separable")
    assert fused.multiplies == separate.multiplies == both
    of_dw = [p.candidates[0].multiplies for p in told.passes if p.name == "dw"]
    assert of_dw == [64 * 128 * 9, 64 * 128 * 2]


def test_workspace_is_that_of_the_compiled_pass():
    x = jax.ShapeDtypeStruct((1, 6, 6, 4), "float32")
    w = jax.ShapeDtypeStruct((1, 1, 4, 4), "float32")
    told = explain(conv2d, x, w, platform="cpu", compile=True)
    spaces = {c.name: c.workspace for c in told["fwd"].candidates}
    assert spaces["pointwise"] is not None and spaces["pallas_tpu"] is None


def test_bad_requests():
    with pytest.raises(ValueError, match="platform must be one of cpu, tpu"):
        explain(conv2d, X, W, platform="npu")
    with pytest.raises(ValueError, match="chose no implementation"):
        explain(jnp.sin, X)
    with pytest.raises(ValueError, match="strides must be a positive int"):
        explain(conv2d, X, W, strides=0)


def test_loops_count_as_often_as_they_run():
    def f(a):
        return jax.lax.scan(lambda c, _: (c @ a, None), a, None, length=5)[0]

    assert count_multiplies(f, jax.ShapeDtypeStruct((4, 4), "float32")) == 5 * 64
