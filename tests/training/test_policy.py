"""Precision policies: names, what is cast, and where the cast belongs."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from opsnn_jax.training import DynamicLossScale, NoLossScale, Policy


@pytest.mark.parametrize(
    "text, expected",
    [
        ("float32", ("float32", "float32", "float32")),
        ("mixed_float16", ("float32", "float16", "float32")),
        ("mixed_fp16", ("float32", "float16", "float32")),
        ("mixed_bfloat16", ("float32", "bfloat16", "float32")),
        ("compute=bf16", ("float32", "bfloat16", "float32")),
        (
            "params=float32, compute=bfloat16, output=float32",
            ("float32", "bfloat16", "float32"),
        ),
        ("params=float16,compute=float16,output=fp16", ("float16",) * 3),
    ],
)
def test_parse(text, expected):
    policy = Policy.parse(text)
    assert (policy.params, policy.compute, policy.output) == expected
    assert hash(policy) == hash(Policy(*expected))


@pytest.mark.parametrize(
    "text", ["", "mixed_float8", "compute", "comput=float16", "compute=f,compute=f"]
)
def test_unknown_policy_is_refused(text):
    with pytest.raises(ValueError, match="Policy: expected 'float32', 'mixed_float16'"):
        Policy.parse(text)


@pytest.mark.parametrize("dtype", ["int32", "complex64", "flaot16", None])
def test_unknown_dtype_is_refused(dtype):
    with pytest.raises(ValueError, match="Policy: compute must be one of 'float32'"):
        Policy(compute=dtype)


def test_fp64_that_jax_would_turn_into_fp32_is_refused():
    with pytest.raises(ValueError, match="JAX_ENABLE_X64=1"):
        Policy.parse("params=float64")
    with jax.enable_x64(True):
        assert Policy.parse("params=float64").params == "float64"


def test_rule_that_is_no_regular_expression_is_refused():
    with pytest.raises(ValueError, match=r"regular expression; got '\('"):
        Policy(rules=(("(", "float32"),))


def test_only_floating_leaves_are_cast():
    float0 = np.zeros((2,), jax.dtypes.float0)
    key = jax.random.key(0)
    tree = {
        "w": jnp.ones(3),
        "half": jnp.ones(3, jnp.bfloat16),
        "numpy": np.ones(3, np.float32),
        "n": jnp.int32(7),
        "mask": jnp.asarray(True),
        "key": key,
        "f0": float0,
        "none": None,
        "python": 1.5,
    }
    out = Policy.parse("mixed_float16").cast_to_compute(tree)
    for name in ("w", "half", "numpy"):
        assert out[name].dtype == jnp.float16
    for name in ("n", "mask", "key", "f0", "none", "python"):
        assert out[name] is tree[name]


def test_rules_by_path():
    policy = Policy(
        compute="float16", rules=(("norm", "float32"), ("^emb", "bfloat16"))
    )
    tree = {
        "embed": jnp.ones(1),
        "block": {"norm": {"scale": jnp.ones(1)}, "dense": {"kernel": jnp.ones(1)}},
    }
    out = policy.cast_to_compute(tree)
    assert out["embed"].dtype == jnp.bfloat16
    assert out["block"]["norm"]["scale"].dtype == jnp.float32
    assert out["block"]["dense"]["kernel"].dtype == jnp.float16


@pytest.mark.parametrize("text", ["mixed_float16", "mixed_bfloat16"])
def test_cast_at_each_use_sums_the_gradient_in_fp32(text):
    """A weight in 70,000 steps of a scan. Cast above the scan, the sum sticks."""
    policy = Policy.parse(text)
    steps = 70_000

    def loss(w, hoisted):
        above = policy.cast_to_compute(w)

        def body(total, _):
            used = above if hoisted else policy.cast_to_compute(w)
            return total + used.astype(jnp.float32), None

        return jax.lax.scan(body, jnp.float32(0.0), None, length=steps)[0]

    grad = jax.jit(jax.grad(loss), static_argnums=1)
    assert float(grad(jnp.float32(1.0), False)) == steps
    # What the test guards against: 2048 + 1 = 2048 in fp16, 256 + 1 = 256 in bf16.
    stuck = {"mixed_float16": 2048, "mixed_bfloat16": 256}[text]
    assert float(grad(jnp.float32(1.0), True)) == stuck


def test_weight_used_four_times_does_not_overflow():
    policy = Policy.parse("mixed_float16")

    def loss(w):
        uses = [policy.cast_to_compute(w) * jnp.float16(3e4) for _ in range(4)]
        return sum(u.astype(jnp.float32) for u in uses)

    grad = jax.grad(loss)(jnp.float32(1.0))
    chex.assert_trees_all_equal(grad, 4 * jnp.float16(3e4).astype(jnp.float32))


def test_default_loss_scale_follows_the_range_of_the_dtype():
    assert Policy.parse("mixed_float16").default_loss_scale() == DynamicLossScale()
    assert Policy.parse("mixed_bfloat16").default_loss_scale() == NoLossScale()
    assert Policy(rules=(("x", "fp16"),)).default_loss_scale() == DynamicLossScale()
