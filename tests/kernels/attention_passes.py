"""Runs the passes of one implementation beside the formula."""

import jax
import jax.numpy as jnp
import numpy as np

from opsnn_jax.kernels.attention import reference
from opsnn_jax.kernels.attention.mask import Band
from opsnn_jax.kernels.attention.spec import AttentionSpec
from tests import draws


def check_passes(
    key, kernels, shape, band=None, dtype=jnp.float32, bias=None, **options
):
    """Compares out, lse and the gradients of `kernels.fwd` and `kernels.bwd`.

    In float32 the error may be eight roundings of the largest term: sums of this size
    round several times. In bfloat16 it may be four: dscores, p, and out inside of delta
    are rounded besides the result.
    """
    b, t, s, n, k, h, hv = shape
    precision = jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None
    bias_shape = None if bias is None else bias.shape
    spec = AttentionSpec(
        *shape, jnp.dtype(dtype), h**-0.5, band or Band(), precision, bias_shape, None
    )
    extra = () if bias is None else (bias,)
    shapes = (b, t, n, h), (b, s, k, h), (b, s, k, hv), (b, t, n, hv)
    keys = jax.random.split(key, 4)
    q, k, v, dout = (
        draws.normal(i, x, dtype) for i, x in zip(keys, shapes, strict=True)
    )

    @jax.jit
    def truth(q, k, v, dout):
        (out, lse), vjp = jax.vjp(
            lambda *args: reference.attend(spec, *args), q, k, v, *extra
        )
        return out, lse, *vjp((dout, jnp.zeros_like(lse)))

    @jax.jit
    def ours(q, k, v, dout):
        out, lse = kernels.fwd(spec, q, k, v, *extra, **options)
        delta = jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), axis=-1)
        delta = delta.swapaxes(1, 2)
        grads = kernels.bwd(spec, q, k, v, lse, delta, dout, *extra, **options)
        return out, lse, *grads

    want, got = truth(q, k, v, dout), ours(q, k, v, dout)
    dp = np.einsum(
        "btnh,bsnh->bnts",
        *(
            np.repeat(np.asarray(x, np.float32), n // x.shape[2], axis=2)
            for x in (dout, v)
        ),
    )
    finite = (np.nan_to_num(np.asarray(x, np.float32), neginf=0) for x in (dp, *want))
    largest = max(np.abs(x).max() for x in finite)
    atol = float(jnp.finfo(dtype).eps) * largest * (8 if dtype == jnp.float32 else 4)
    names = ("out", "lse", "dq", "dk", "dv", "dbias")[: len(want)]
    for name, a, b in zip(names, got, want, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), name
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_allclose(a, b, rtol=0, atol=atol, err_msg=name)
    return got
