"""What flash_attention must give: its formulas in numpy, and how far off it may be."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from opsnn_jax.ops.attention import flash_attention
from tests import draws

f32, bf16, f16 = jnp.float32, jnp.bfloat16, jnp.float16


def make(key, b, t, s, n, k, h, hv=None, dtype=f32):
    keys = jax.random.split(key, 4)
    shapes = (b, t, n, h), (b, s, k, h), (b, s, k, hv or h), (b, t, n, hv or h)
    return [
        draws.normal(i, shape, dtype) for i, shape in zip(keys, shapes, strict=True)
    ]


@functools.partial(jax.jit, static_argnames=("causal", "implementation"))
def out_and_grads(q, k, v, dout, bias, mask, causal, implementation=None):
    def f(q, k, v, bias):
        return flash_attention(
            q, k, v, bias, mask, is_causal=causal, implementation=implementation
        )

    out, vjp = jax.vjp(f, q, k, v, bias)
    return {
        "out": out,
        **dict(zip(("dq", "dk", "dv", "dbias"), vjp(dout), strict=True)),
    }


@functools.partial(jax.jit, static_argnames="causal")
def plain(q, k, v, dout, bias, mask, causal):
    """The formula as one writes it, in the dtype of the inputs."""

    def f(q, k, v, bias):
        group = q.shape[2] // k.shape[2]
        k, v = jnp.repeat(k, group, axis=2), jnp.repeat(v, group, axis=2)
        s = jnp.einsum("btnh,bsnh->bnts", q, k, preferred_element_type=f32)
        s = s / np.sqrt(q.shape[-1])
        if bias is not None:
            s = s + bias.astype(f32)
        if mask is not None:
            s = jnp.where(mask, s, -1e30)
        if causal:
            s = jnp.where(jnp.tri(*s.shape[2:], dtype=bool)[None, None], s, -1e30)
        p = jax.nn.softmax(s, axis=-1).astype(q.dtype)
        return jnp.einsum("bnts,bsnh->btnh", p, v)

    out, vjp = jax.vjp(f, q, k, v, bias)
    return {
        "out": out,
        **dict(zip(("dq", "dk", "dv", "dbias"), vjp(dout), strict=True)),
    }


def exact(
    q,
    k,
    v,
    dout,
    bias=None,
    mask=None,
    causal=False,
    softcap=None,
    sinks=None,
    weights=None,
    dlse=None,
):
    """The formulas of the op's docstring in numpy and float64.

    `weights` is m of the docstring, (B, N, T, S); `dlse` is (B, T, N).
    """
    q, k, v, dout = (np.asarray(x, np.float64) for x in (q, k, v, dout))
    group, scale = q.shape[2] // k.shape[2], 1 / np.sqrt(q.shape[3])
    k, v = np.repeat(k, group, axis=2), np.repeat(v, group, axis=2)
    s, slope = np.einsum("btnh,bsnh->bnts", q, k) * scale, 1.0
    if softcap is not None:
        slope = 1 - np.tanh(s / softcap) ** 2
        s = softcap * np.tanh(s / softcap)
    if bias is not None:
        s = s + np.asarray(bias, np.float64)
    if mask is not None:
        s = np.where(mask, s, -np.inf)
    if causal:
        s = np.where(np.tri(*s.shape[2:], dtype=bool), s, -np.inf)
    sink = np.full((1, q.shape[2], 1, 1), -np.inf)
    if sinks is not None:
        sink = np.asarray(sinks, np.float64)[None, :, None, None]
    top = np.maximum(s.max(-1, keepdims=True), sink)
    top = np.where(top == -np.inf, 0, top)
    total = np.exp(s - top).sum(-1, keepdims=True) + np.exp(sink - top)
    with np.errstate(divide="ignore"):
        lse = top + np.log(total)
    p = np.exp(s - top) / np.maximum(total, 1e-300)
    m = 1.0 if weights is None else np.asarray(weights, np.float64)
    dp = m * np.einsum("btnh,bsnh->bnts", dout, v)
    delta = (p * dp).sum(-1, keepdims=True)
    if dlse is not None:
        delta = delta - np.asarray(dlse, np.float64).swapaxes(1, 2)[..., None]
    dbias = p * (dp - delta)
    ds = dbias * slope

    def by_group(x):
        b, s, n, h = x.shape
        return x.reshape(b, s, n // group, group, h).sum(3)

    result = {
        "out": np.einsum("bnts,bsnh->btnh", m * p, v),
        "dq": np.einsum("bnts,bsnh->btnh", ds, k) * scale,
        "dk": by_group(np.einsum("bnts,btnh->bsnh", ds, q) * scale),
        "dv": by_group(np.einsum("bnts,btnh->bsnh", m * p, dout)),
        "dbias": None,
    }
    if bias is not None:
        axes = tuple(i for i, n in enumerate(bias.shape) if n == 1)
        result["dbias"] = dbias.sum(axes, keepdims=True)
    if sinks is not None:
        weight = np.exp(sink - top) / np.maximum(total, 1e-300)
        result["dsinks"] = -(weight * delta).sum((0, 2, 3))
    if dlse is not None:
        result["lse"] = lse[..., 0].swapaxes(1, 2)
    terms = [np.nan_to_num(x, neginf=0) for x in result.values() if x is not None]
    return result, max(np.abs(x).max() for x in (dp, *terms))


def check_against_exact(ours, args, plain=None, **options):
    """Our error is at most twice that of the plain formula, or the floor.

    The floor is one rounding of the largest term, because the plain formula can be
    exact by luck. The largest term of a gradient is that of dp: dscores is the
    difference p (dp - delta), and delta comes from out as rounded to q's dtype. In
    float32 the floor is four roundings: p is recomputed from a rounded lse, which alone
    is a relative error of eps |lse|.
    """
    truth, largest = exact(*args, **options)
    plain = truth if plain is None else plain
    for name, want in truth.items():
        if want is None:
            continue
        assert ours[name].shape == want.shape
        eps = max(float(jnp.finfo(x.dtype).eps) for x in (args[0], ours[name]))
        floor = eps * (np.abs(want).max() if name == "out" else largest)
        floor *= 4 if args[0].dtype == f32 else 1
        got, theirs = (np.asarray(x[name], np.float64) for x in (ours, plain))
        if name == "lse":
            np.testing.assert_array_equal(got == -np.inf, want == -np.inf)
            got, theirs, want = (
                np.nan_to_num(x, neginf=0) for x in (got, theirs, want)
            )
            # In scores of half precision the scaled queries may be rounded once.
            eps = float(jnp.finfo(args[0].dtype).eps)
            floor = eps * max(1, np.abs(want).max())
            floor *= 4 if args[0].dtype == f32 else 1
        a, b = np.abs(got - want), np.abs(theirs - want)
        for norm in (np.max, lambda x: np.sqrt(np.mean(x * x))):
            assert norm(a) <= max(2 * norm(b), floor), (name, norm(a), norm(b), floor)


each = pytest.mark.parametrize(
    "implementation", ["reference", "xla", "pallas_tpu", "pallas_gpu"]
)


@functools.partial(jax.jit, static_argnames=("implementation", "options"))
def run(q, k, v, dout, dlse, operands, implementation, options=()):
    """Outputs and gradients, those of bias and sinks too."""

    def f(q, k, v, differentiable):
        call = dict(implementation=implementation, return_lse=True) | dict(options)
        return flash_attention(q, k, v, **{**operands, **differentiable}, **call)

    differentiable = {n: operands[n] for n in ("bias", "sinks") if n in operands}
    (out, lse), vjp = jax.vjp(f, q, k, v, differentiable)
    dq, dk, dv, rest = vjp((dout, dlse))
    named = {f"d{name}": x for name, x in rest.items()}
    return dict(out=out, lse=lse, dq=dq, dk=dk, dv=dv, **named)
