"""What the tests of convolution share: inputs, and comparison with fp64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from opsnn_jax import conv
from opsnn_jax.kernels.winograd.transforms import transform
from tests import draws
from tests.numerics import assert_as_accurate, assert_within

# Relative rms error of one fp32 multiplication and addition chain over a few hundred
# terms, and of rounding a multiplicand to bfloat16.
EPS = {"float32": 2.7e-7, "bfloat16": 1.66e-3}


def winograd_bound(m, dtype, r=3, rank=2):
    """The error that F(m, r) may have by its error model, half as much again.

    The rms error is kappa for each dimension times that of the multiplicands, of which
    there are two; the largest error is that of the worst output of a tile.
    """
    t = transform(m, r)
    points = [
        sum(float(c) ** 2 for c in t.g[i]) * sum(float(c) ** 2 for c in t.bt[i])
        for i in range(t.n)
    ]
    worst = max(
        sum(float(a) ** 2 * p for a, p in zip(row, points, strict=True)) / t.r
        for row in t.at
    )
    one_rounding = float(jnp.finfo(dtype).eps) / 2
    amplified = 1.5 * 2**0.5 * EPS[dtype]
    return {
        "rms": amplified * t.kappa**rank + one_rounding,
        "max": amplified * worst ** (rank / 2) + one_rounding,
    }


def draw(key, x_shape, w_shape, dtype, bias=True):
    kx, kw, kb = jax.random.split(key, 3)
    x = draws.normal(kx, x_shape, dtype)
    w = draws.normal(kw, w_shape, dtype, scale=np.prod(w_shape[:-1]) ** -0.5)
    b = draws.normal(kb, w_shape[-1:], dtype)
    return (x, w, b) if bias else (x, w)


def value_and_vjp(f, arrays, dy):
    y, vjp = jax.vjp(f, *arrays)
    return (y, *vjp(dy))


def compare(
    arrays, key, *, implementation, bound=None, compiler_options=None, **options
):
    """Checks value and gradients of `conv`: within `bound`, or else at most twice the
    error of the plain formula in the same dtype."""

    ours = functools.partial(conv, implementation=implementation, **options)
    plain = functools.partial(conv, implementation="reference", **options)
    shape = jax.eval_shape(plain, *arrays).shape
    dy = draws.normal(key, shape, arrays[0].dtype)

    # Without a bound, the plain formula in the same dtype gives it.
    functions = (ours, plain) if bound is None else (ours,)

    @functools.partial(jax.jit, compiler_options=compiler_options)
    def each(arrays, dy):
        return [value_and_vjp(f, arrays, dy) for f in functions]

    got, *same_dtype = each(arrays, dy)
    with jax.enable_x64(True):
        wide = [np.asarray(a, np.float64) for a in arrays]
        exact = jax.jit(functools.partial(value_and_vjp, plain))(
            wide, np.asarray(dy, np.float64)
        )
    x, w = arrays[:2]
    outputs = dy.size // w.shape[-1]
    # Of y, dx, dw and db, each, the number of terms in a sum.
    terms = (w.size // w.shape[-1], w.size // x.shape[-1], outputs, outputs)
    for i, (g, t) in enumerate(zip(got, exact, strict=True)):
        if bound is None:
            assert_as_accurate(g, same_dtype[0][i], t, terms=terms[i])
        else:
            assert_within(g, t, bound)
