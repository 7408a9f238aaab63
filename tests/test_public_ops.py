"""What every op the package exports keeps, whatever it computes.

It runs on any machine as it is, is compiled once for equal calls, keeps the dtypes of
its arguments whatever JAX is configured to, lowers for TPU at sizes that fill no tile,
and refuses what it cannot take in its own words.
"""

import functools
from dataclasses import dataclass, field
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import opsnn_jax
from opsnn_jax.check import assert_close
from tests import draws


@dataclass(frozen=True)
class Call:
    """How an op is called here.

    Attributes:
      shapes: of its arrays; small, and of sizes that fill no tile.
      options: keyword arguments, valid for them.
      respelled: the same options in other types that mean the same.
      strict: it refuses what it does not take itself. What has the signature of another
        library's function leaves that to the other library.
      factor: of its error over the reference's, as `opsnn check` takes it.
    """

    shapes: tuple[tuple[int, ...], ...]
    options: dict[str, Any] = field(default_factory=dict)
    respelled: dict[str, Any] = field(default_factory=dict)
    strict: bool = True
    factor: float = 1.0

    def arrays(self, key, dtype) -> tuple[jax.Array, ...]:
        keys = jax.random.split(key, len(self.shapes))
        return tuple(
            draws.normal(k, shape, dtype)
            for k, shape in zip(keys, self.shapes, strict=True)
        )


CALLS = {
    "conv": Call(
        ((2, 5, 3), (3, 3, 3), (3,)),
        {"strides": 1, "padding": [(1, 1)]},
        {"strides": [np.int64(1)], "padding": np.array([[1, 1]])},
    ),
    "conv1d": Call(
        ((1, 7, 3), (2, 3, 3), (3,)),
        {"padding": "CAUSAL", "dilation": 2},
        {"padding": [(2, 0)], "dilation": (2,)},
    ),
    "conv2d": Call(
        ((1, 5, 7, 3), (3, 3, 3, 3), (3,)),
        {"strides": (1, 1), "padding": "SAME"},
        {"strides": np.array([1, 1]), "padding": 1},
    ),
    "conv3d": Call(
        ((1, 3, 5, 4, 2), (1, 3, 3, 2, 2), (2,)),
        {"padding": [0, 1, 1]},
        {"padding": ((0, 0), (1, 1), (1, 1))},
    ),
    "conv_transpose": Call(
        ((1, 3, 4, 2), (3, 3, 2, 2), (2,)),
        {"strides": 1, "padding": "SAME"},
        {"strides": np.array([1, 1]), "padding": "SAME"},
    ),
    "separable_conv2d": Call(
        ((1, 5, 6, 3), (3, 3, 1, 3), (1, 1, 3, 3), (3,)),
        {"dilation": (2, 2), "padding": "SAME"},
        {"dilation": 2, "padding": [(2, 2), (2, 2)]},
    ),
    "conv_general_dilated": Call(
        ((1, 3, 5, 7), (3, 3, 3, 3)),
        {"window_strides": (1, 1), "padding": [(1, 1), (1, 1)]},
        {"window_strides": [1, 1], "padding": "SAME"},
        strict=False,
    ),
    "flash_attention": Call(
        ((1, 5, 2, 3), (1, 5, 1, 3), (1, 5, 1, 3)),
        {"scale": 0.5, "is_causal": True},
        {"scale": np.float64(0.5), "is_causal": np.True_},
        factor=3.0,
    ),
    "dot_product_attention": Call(
        ((1, 5, 2, 3), (1, 5, 1, 3), (1, 5, 1, 3)),
        {"is_causal": True, "local_window_size": (2, 0)},
        {"is_causal": np.True_, "local_window_size": [2, 0]},
        strict=False,
        factor=3.0,
    ),
}

# Made of those above, or with arguments or results of another form.
COMPOSED = {
    "attention_decode",
    "flash_attention_packed",
    "fold_batchnorm",
    "from_blocked",
    "fused_qkv",
    "ring_attention",
    "rotary_embedding",
    "to_blocked",
}

every_op = pytest.mark.parametrize("name", CALLS)
every_strict_op = pytest.mark.parametrize("name", [n for n in CALLS if CALLS[n].strict])


def op(name, **options):
    return functools.partial(getattr(opsnn_jax, name), **(options or _options(name)))


def _options(name):
    return CALLS[name].options


def gradients(f, *arrays):
    """The gradients of a fixed weighting of the output, in every array."""

    def total(*arrays):
        y = f(*arrays).astype(jnp.float32)
        return jnp.sum(y * jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape))

    return jax.grad(total, tuple(range(len(arrays))))(*arrays)


def test_every_exported_op_is_here():
    exported = {
        name
        for name, value in vars(opsnn_jax).items()
        if callable(value) and not isinstance(value, type) and name[0] != "_"
    }
    assert exported == CALLS.keys() | COMPOSED | {"explain"}


@every_op
def test_runs_on_a_cpu_with_the_numbers_of_its_reference(name, key):
    arrays = CALLS[name].arrays(key, jnp.float32)
    f = op(name)
    reference = functools.partial(f, implementation="reference")
    # Op by op, the gradients would compile each of theirs.
    for run, grads in ((f, False), (jax.jit(f), True)):
        assert_close(run, reference, *arrays, grads=grads, factor=CALLS[name].factor)
    device = jax.devices("cpu")[1]
    elsewhere = jax.jit(f)(*jax.device_put(arrays, device))
    assert elsewhere.devices() == {device}
    chex.assert_trees_all_equal(elsewhere, jax.jit(f)(*arrays))


@every_op
def test_equal_calls_are_compiled_once(name, key):
    arrays = CALLS[name].arrays(key, jnp.float32)
    traced = []

    @functools.partial(jax.jit, static_argnames="options")
    def run(*arrays, options):
        traced.append(options)
        return op(name, **dict(options))(*arrays)

    # Options made anew each time, and arrays that came out of the op or of numpy.
    again = [arrays, jax.tree.map(jnp.array, arrays), jax.tree.map(np.asarray, arrays)]
    for given in again:
        run(*given, options=tuple(_frozen(dict(_options(name)))))
    assert len(traced) == 1


def _frozen(options):
    for key, value in options.items():
        if isinstance(value, list):
            value = tuple(value)
        yield key, value


@every_op
def test_options_of_equal_meaning_lower_to_one_program(name):
    call = CALLS[name]
    specs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in call.shapes]

    def lowered(options):
        return jax.jit(lambda *arrays: op(name, **options)(*arrays)).lower(*specs)

    one = lowered(call.options).as_text()
    assert one == lowered(call.options | call.respelled).as_text()


@every_op
def test_x64_changes_neither_dtypes_nor_numbers(name, key):
    f = op(name)
    for dtype in (jnp.float32, jnp.bfloat16):
        arrays = CALLS[name].arrays(key, dtype)
        # In one program: op by op it would compile each of them, twice.
        run = jax.jit(lambda *arrays, f=f: (f(*arrays), gradients(f, *arrays)))
        want = run(*arrays)
        with jax.enable_x64(True):
            got = run(*arrays)
        chex.assert_trees_all_equal(got, want)
        chex.assert_trees_all_equal_dtypes(got, want)


@every_op
def test_float64_is_computed_in_float64(name, key):
    with jax.enable_x64(True):
        arrays = CALLS[name].arrays(key, jnp.float64)
        f = op(name)
        reference = functools.partial(f, implementation="reference")
        got, want = (
            jax.jit(lambda *arrays, g=g: (g(*arrays), gradients(g, *arrays)))(*arrays)
            for g in (f, reference)
        )
        chex.assert_trees_all_equal_dtypes(got, want)
        # The loss of `gradients` is summed in float32; the cotangents are cosines.
        chex.assert_trees_all_close(got, want, rtol=1e-12, atol=1e-12)


@every_op
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_output_and_gradients_have_the_dtype_of_the_arrays(name, dtype):
    specs = [jax.ShapeDtypeStruct(shape, dtype) for shape in CALLS[name].shapes]
    out = jax.eval_shape(op(name), *specs)
    assert out.dtype == dtype and not out.weak_type
    grads = jax.eval_shape(functools.partial(gradients, op(name)), *specs)
    assert [(g.shape, g.dtype) for g in grads] == [(s.shape, dtype) for s in specs]


@every_op
@pytest.mark.parametrize("remat", [False, True])
def test_half_precision_is_carried_through_a_loop(name, remat, key):
    x, *rest = CALLS[name].arrays(key, jnp.bfloat16)
    f = jax.checkpoint(op(name)) if remat else op(name)

    def scanned(x):
        return jax.lax.scan(lambda x, _: (f(x, *rest), None), x, length=2)[0]

    looped = jax.lax.fori_loop(0, 2, lambda i, x: f(x, *rest), x)
    chex.assert_trees_all_equal(scanned(x), looped)
    assert gradients(scanned, x)[0].dtype == jnp.bfloat16


def _batched(name):
    """The arrays and shapes of a call, with a weak-typed first array."""
    shapes = CALLS[name].shapes
    return jnp.broadcast_to(jnp.asarray(0.5), shapes[0]), shapes


@every_op
def test_weak_types_end_in_the_op(name):
    x, shapes = _batched(name)
    assert x.weak_type
    rest = [jnp.ones(shape) for shape in shapes[1:]]
    assert not jax.eval_shape(op(name), x, *rest).weak_type


@every_op
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_lowers_for_every_platform_at_sizes_that_fill_no_tile(name, dtype):
    specs = [jax.ShapeDtypeStruct(shape, dtype) for shape in CALLS[name].shapes]
    run = jax.jit(functools.partial(gradients, op(name)))
    for platform in ("cpu", "tpu", "cuda"):
        text = run.trace(*specs).lower(lowering_platforms=(platform,)).as_text()
        assert "opsnn_pass" not in text


BAD = {
    "an integer array": lambda x: jnp.ones(x.shape, jnp.int32),
    "a boolean array": lambda x: jnp.ones(x.shape, bool),
    "a complex array": lambda x: jnp.ones(x.shape, jnp.complex64),
    "an array in 8 bits": lambda x: x.astype(jnp.float8_e4m3fn),
    "an array of strings": lambda x: np.full(x.shape, "a"),
    "float64 without x64": lambda x: np.asarray(x, np.float64),
    "another float dtype": lambda x: x.astype(jnp.bfloat16),
    "a scalar": lambda x: jnp.float32(1),
    "one dimension too many": lambda x: x[(None,) * 3],
    "None": lambda x: None,
    "a string": lambda x: "x",
    "a list": lambda x: np.asarray(x).tolist(),
}


@every_strict_op
@pytest.mark.parametrize("bad", BAD)
def test_a_bad_array_is_named_before_anything_runs(name, bad, key):
    call = CALLS[name]
    arrays = call.arrays(key, jnp.float32)
    for i in range(len(arrays)):
        given = [*arrays]
        given[i] = BAD[bad](arrays[i])
        if given[i] is None and i == len(arrays) - 1 and "conv" in name:
            continue  # no bias
        with pytest.raises((TypeError, ValueError), match=rf"^{name}: "):
            op(name)(*given)


@every_strict_op
def test_a_traced_option_is_refused_in_words(name, key):
    arrays = CALLS[name].arrays(key, jnp.float32)
    for option, value in _options(name).items():
        if isinstance(value, str):
            continue
        rest = {k: v for k, v in _options(name).items() if k != option}
        traced = jax.jit(lambda v, o=option, r=rest: op(name, **r, **{o: v})(*arrays))
        with pytest.raises((TypeError, ValueError), match=rf"{name}: {option} must"):
            traced(jnp.asarray(value))
