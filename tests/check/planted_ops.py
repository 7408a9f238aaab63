"""Causal attention of one head, right or with one planted bug, and other small ops.

Each bug is of a kind that has been found in a published kernel.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

BUGS = (
    "wrong sign",
    "missing factor",
    "cotangent dtype",
    "missing rescale",
    "mask off by one",
    "forward error",
    "second order",
    "different bits",
)


def _wide(dtype):
    return jnp.float64 if dtype == jnp.float64 else jnp.float32


def attention_reference(q, k, v):
    """q, k, v (T, H): softmax(q k^T / sqrt(H)) v over the keys up to each query."""
    acc = _wide(q.dtype)
    s = jnp.dot(q, k.T, preferred_element_type=acc) * q.shape[1] ** -0.5
    s = jnp.where(_visible(s.shape), s, -jnp.inf)
    p = jax.nn.softmax(s, axis=-1)
    return jnp.dot(p, v.astype(acc)).astype(q.dtype)


def _visible(shape, offset=0):
    return np.arange(shape[0])[:, None] + offset >= np.arange(shape[1])[None, :]


_calls = iter(range(10**9))


def _disturb(x):
    """Adds the number of the call, in units of the last bit."""
    one = np.spacing(np.abs(np.asarray(x)).max())
    return np.asarray(x + next(_calls) * one).astype(x.dtype)


def _forward(bug, q, k, v):
    acc, scale = _wide(q.dtype), q.shape[1] ** -0.5
    visible = _visible((len(q), len(k)), bug == "mask off by one")
    top = jnp.full((len(q), 1), -jnp.inf, acc)
    total = jnp.zeros((len(q), 1), acc)
    out = jnp.zeros((len(q), v.shape[1]), acc)
    for block in (slice(0, 3), slice(3, None)):
        s = jnp.dot(q, k[block].T, preferred_element_type=acc) * scale
        s = jnp.where(visible[:, block], s, -jnp.inf)
        new = jnp.maximum(top, s.max(-1, keepdims=True, initial=-jnp.inf))
        p = jnp.exp(s - new)
        keep = jnp.exp(top - new)
        total = total * keep + p.sum(-1, keepdims=True)
        old = out if bug == "missing rescale" else out * keep
        out = old + jnp.dot(p, v[block].astype(acc))
        top = new
    exact = out / total
    out = exact.astype(q.dtype)
    if bug == "forward error":
        out = out * jnp.asarray(1 + 3 * jnp.finfo(q.dtype).eps, q.dtype)
    if bug == "different bits":
        shape = jax.ShapeDtypeStruct(out.shape, out.dtype)
        out = jax.pure_callback(_disturb, shape, out, vmap_method="sequential")
    return out, (q, k, v, exact, top + jnp.log(total))


def _backward(bug, residuals, dy):
    q, k, v, out, lse = residuals
    acc, scale = _wide(q.dtype), q.shape[1] ** -0.5
    q32, k32, v32, dy32, o32 = (x.astype(acc) for x in (q, k, v, dy, out))
    s = jnp.where(
        _visible((len(q), len(k)), bug == "mask off by one"),
        jnp.dot(q32, k32.T) * scale,
        -jnp.inf,
    )
    p = jnp.exp(s - lse)
    if bug == "second order":
        p = jax.lax.stop_gradient(p)
    delta = (dy32 * o32).sum(-1, keepdims=True)
    ds = p * (jnp.dot(dy32, v32.T) - delta)
    dq = jnp.dot(ds, k32) * (1 if bug == "missing factor" else scale)
    dk = jnp.dot(ds.T, q32) * scale * (-1 if bug == "wrong sign" else 1)
    dv = jnp.dot(p.T, dy32)
    if bug == "cotangent dtype":
        return dq, dk.astype(k.dtype), dv.astype(v.dtype)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(bug, q, k, v):
    return _forward(bug, q, k, v)[0]


_attention.defvjp(_forward, _backward)


def attention(q, k, v, *, implementation=None):
    """The op; `implementation` names the planted bug, None is right."""
    return _attention(implementation, q, k, v)


def qkv(key, dtype, length=7, width=4):
    keys = jax.random.split(key, 3)
    return tuple(jax.random.normal(k, (length, width)).astype(dtype) for k in keys)


def conv(x, w, b=None, *, strides=1, padding="SAME", dilation=1, groups=1):
    """The signature of the library's convolutions, of any rank, by XLA."""
    rank = x.ndim - 2
    space = "DHW"[-rank:]
    y = jax.lax.conv_general_dilated(
        x,
        w,
        (strides,) * rank,
        padding,
        rhs_dilation=(dilation,) * rank,
        feature_group_count=groups,
        dimension_numbers=(f"N{space}C", f"{space}IO", f"N{space}C"),
    )
    return y if b is None else y + jnp.broadcast_to(b, y.shape)
