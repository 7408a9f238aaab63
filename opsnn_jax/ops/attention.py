r"""Flash attention: out = softmax(scale q k^T + bias) v, without all scores in memory.

For one query head n and its key head n // (N / K), over the keys s that query t sees:

    scores_ts = scale * sum_h q_th k_sh + bias_ts
    lse_t     = log sum_s exp(scores_ts)          p_ts = exp(scores_ts - lse_t)
    out_t     = sum_s p_ts v_s

    delta_t   = sum_c out_tc dout_tc              dv_s = sum_t p_ts dout_t
    dscores_ts = p_ts (dout_t . v_s - delta_t)    dbias = dscores, summed to its shape
    dq_t      = scale sum_s dscores_ts k_s        dk_s = scale sum_t dscores_ts q_t

Saved for backward: the inputs, out and lse. The backward pass recomputes p in blocks.
"""

import functools
import math
import numbers
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float

from opsnn_jax.dispatch import (
    Choice,
    Implementation,
    Requested,
    Table,
    align_varying,
    deferred,
    partitioned,
)
from opsnn_jax.kernels.attention import reference, xla
from opsnn_jax.kernels.attention.mask import Band
from opsnn_jax.kernels.attention.spec import AttentionSpec

from .arguments import as_array, as_float_array, as_precision

_OP = "flash_attention"


def flash_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    bias: Float[Array, "..."] | None = None,
    mask: Bool[Array, "..."] | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    precision: lax.Precision | str | None = None,
    implementation: Requested = None,
) -> Float[Array, "B T N Hv"]:
    r"""Computes softmax(scale q k^T + bias) v in blocks.

    Memory is linear in T and S, in both passes. A query that sees no key (mask, or
    bias -inf) gives 0 and zero gradients. A NaN or infinity in a key or value reaches
    only the queries that see it; it makes their whole row NaN.

    Args:
      q: queries, `(B, T, N, H)`, of float32, bfloat16, float16, or float64 under x64.
      k: keys, `(B, S, K, H)`, of q's dtype. N is a multiple of K: every key head
        serves N / K query heads, one after another.
      v: values, `(B, S, K, Hv)`, of q's dtype.
      bias: added to the scaled scores, broadcastable to `(B, N, T, S)`, of any of the
        dtypes above. -inf hides a key. Its gradient has its own shape and dtype.
      mask: boolean, broadcastable to `(B, N, T, S)`; False hides a key.
      scale: factor of the scores, a Python number; 1 / sqrt(H) if None.
      is_causal: query t sees the keys s <= t, also where T and S differ.
      precision: of the matrix products, as in `jax.lax.dot_general`.
      implementation: None to choose, a name ("reference", "xla", "pallas_tpu"), or a
        sequence of names in order of preference.

    Returns:
      `(B, T, N, Hv)`, of q's dtype.

    Raises:
      TypeError: for what is no array, a dtype not listed, or a scale that is traced.
      ValueError: for shapes that do not fit, or an unknown implementation.
      NotImplementedError: if the named implementation cannot do the call.

    Precision:
      Scores, softmax and all sums are float32 (float64 for float64); outputs and
      gradients are rounded once. The error is that of one rounding of the result,
      plus O(eps_32 sqrt(H)) in the scores.

    Deterministic:
      Yes, both passes: every sum has a fixed order.

    Transforms:
      jit, vmap, grad to any order, remat, scan and shard_map. Forward mode (jvp,
      hessian) needs `implementation="reference"`. Under `jax.checkpoint`, the names
      "attention_out" and "attention_lse" save what backward needs of the forward pass.

    Example:
      >>> import jax
      >>> q = jax.random.normal(jax.random.key(0), (2, 5, 8, 64))
      >>> k, v = jax.random.normal(jax.random.key(1), (2, 2, 7, 4, 64))
      >>> flash_attention(q, k, v, is_causal=True).shape
      (2, 5, 8, 64)

    References:
      Dao, Fu, Ermon, Rudra, Re, "FlashAttention", 2022, algorithms 1 and 4.
      Dao, "FlashAttention-2", 2023, section 3.1.
    """
    TABLE.check(implementation)
    spec, operands = _canonicalize(
        q, k, v, bias, mask, scale=scale, is_causal=is_causal, precision=precision
    )
    operands = _Operands(*align_varying(*operands))
    if 0 in (spec.batch, spec.q_len, spec.kv_len, spec.heads, spec.v_dim):
        # There is no score, or no output; under shard_map it varies like the operands.
        shape = (spec.batch, spec.q_len, spec.heads, spec.v_dim)
        return align_varying(operands.q, jnp.zeros(shape, spec.dtype))[1]
    if implementation == "reference":

        def run(*operands):
            return reference.attend(spec, *_Operands(*operands).arrays())[0]

    else:
        choice = TABLE.choose(implementation, spec)

        def run(*operands):
            return _attend(choice, _Operands(*operands))

    # Of the result's (B, T, N, Hv) the first three are q's, the last is v's.
    return partitioned(run, *operands, dims=[(0, 0), (0, 1), (0, 2), (2, 3)])


class _Operands(NamedTuple):
    q: jax.Array
    k: jax.Array
    v: jax.Array
    bias: jax.Array | None
    mask: jax.Array | None

    def arrays(self) -> tuple[jax.Array, ...]:
        return tuple(x for x in self if x is not None)


class _Residuals(NamedTuple):
    operands: _Operands
    out: jax.Array  # (B, T, N, Hv) of q's dtype
    lse: jax.Array  # (B, N, T), float32 or wider


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(choice: Choice, operands: _Operands) -> jax.Array:
    return choice["fwd"](*operands.arrays())[0]


def _attend_fwd(choice, operands):
    out, lse = choice["fwd"](*operands.arrays())
    out = checkpoint_name(out, "attention_out")
    lse = checkpoint_name(lse, "attention_lse")
    return out, _Residuals(operands, out, lse)


def _attend_bwd(choice, residuals, dout):
    (q, k, v, *_), out, lse = residuals
    extra = residuals.operands.arrays()[3:]
    products = out.astype(lse.dtype) * dout.astype(lse.dtype)
    delta = jnp.sum(products, axis=-1).swapaxes(1, 2)
    grads = choice["bwd"](q, k, v, lse, delta, dout, *extra)
    dbias = grads[3] if residuals.operands.bias is not None else None
    return (_Operands(*grads[:3], dbias, None),)


_attend.defvjp(_attend_fwd, _attend_bwd)


def _order(name: str, platform: str, spec: AttentionSpec) -> tuple[str, ...]:
    return ("pallas_tpu", "xla") if platform == "tpu" else ("xla",)


_XLA = Implementation("xla", {"fwd": xla.fwd, "bwd": xla.bwd})
_TPU = "opsnn_jax.kernels.attention.tpu"
_PALLAS_TPU = Implementation(
    "pallas_tpu",
    {"fwd": deferred(_TPU, "fwd"), "bwd": deferred(_TPU, "bwd")},
    platforms=("tpu",),
    refuses=deferred(_TPU, "refuses"),
    pallas=True,
)

TABLE = Table(_OP, (_PALLAS_TPU, _XLA), _order, plain=_XLA)


def _canonicalize(q, k, v, bias, mask, *, scale, is_causal, precision):
    """Checks every argument; gives the spec, and operands with bias and mask 4-D."""
    q, k, v = (as_float_array(_OP, n, x) for n, x in (("q", q), ("k", k), ("v", v)))
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(
                f"flash_attention: {name} must have 4 axes (batch, length, heads, "
                f"features); got {x.shape}. Reshape it, or map over it with jax.vmap."
            )
        if x.dtype != q.dtype:
            raise TypeError(
                f"flash_attention: q, k and v must have one dtype; got {q.dtype}, "
                f"{name} with {x.dtype}. Cast them to one."
            )
    batch, q_len, heads, qk_dim = q.shape
    _, kv_len, kv_heads, v_dim = *k.shape[:3], v.shape[3]
    if k.shape != (batch, kv_len, kv_heads, qk_dim):
        raise ValueError(
            f"flash_attention: k must have shape (B, S, K, H) = ({batch}, S, K, "
            f"{qk_dim}); got {k.shape} with q {q.shape}. Match k's batch and features "
            "to q."
        )
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"flash_attention: v must have shape (B, S, K, Hv) = ({batch}, {kv_len}, "
            f"{kv_heads}, Hv); got {v.shape} with k {k.shape}. Match v to k."
        )
    if heads % kv_heads if kv_heads else heads:
        raise ValueError(
            f"flash_attention: the heads of q must be a multiple of those of k and v; "
            f"got {heads} and {kv_heads}. Repeat or drop heads."
        )
    scores = (batch, heads, q_len, kv_len)
    if bias is not None:
        bias = as_float_array(_OP, "bias", bias)
        bias = _as_scores("bias", bias, scores)
    if mask is not None:
        mask = as_array(_OP, "mask", mask)
        if mask.dtype != bool:
            raise TypeError(
                f"flash_attention: mask must be boolean; got {mask.dtype}. Pass "
                "mask != 0, or an additive mask as bias."
            )
        mask = _as_scores("mask", mask, scores)
    spec = AttentionSpec(
        batch,
        q_len,
        kv_len,
        heads,
        kv_heads,
        qk_dim,
        v_dim,
        dtype=jnp.dtype(q.dtype),
        scale=_static_scale(scale, qk_dim),
        band=_band(is_causal),
        precision=as_precision(_OP, precision),
        bias_shape=None if bias is None else bias.shape,
        mask_shape=None if mask is None else mask.shape,
    )
    return spec, _Operands(jnp.asarray(q), jnp.asarray(k), jnp.asarray(v), bias, mask)


def _as_scores(name, x, scores):
    """`x` with axes (B, N, T, S), each of size 1 or full."""
    shape = (1,) * (4 - x.ndim) + x.shape
    if len(shape) > 4 or any(
        n not in (1, full) for n, full in zip(shape, scores, strict=True)
    ):
        raise ValueError(
            f"flash_attention: {name} must broadcast to (B, N, T, S) = {scores}; got "
            f"{x.shape}. Insert axes of size 1 where it does not vary."
        )
    return jnp.asarray(x).reshape(shape)


def _static_scale(scale, qk_dim):
    if scale is None:
        return 1 / math.sqrt(max(qk_dim, 1))
    if not isinstance(scale, numbers.Real):
        raise TypeError(
            "flash_attention: scale must be a Python number, fixed when the call is "
            f"traced; got {type(scale).__name__}. Multiply q by an array scale and "
            "pass scale=1."
        )
    return float(scale)


def _band(is_causal):
    if not isinstance(is_causal, bool | np.bool_):
        raise TypeError(
            f"flash_attention: is_causal must be a bool; got "
            f"{type(is_causal).__name__}. Pass what varies as mask."
        )
    return Band(upper=0) if is_causal else Band()
