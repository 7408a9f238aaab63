r"""Flash attention: out = softmax(scale q k^T + bias) v, without all scores in memory.

For one query head n and its key head n // (N / K), over the keys s that query t sees:

    scores_ts = cap(scale sum_h q_th k_sh) + bias_ts     cap(x) = c tanh(x / c), or x
    lse_t     = log(exp(sink) + sum_s exp(scores_ts))    without a sink, exp(sink) = 0
    p_ts      = exp(scores_ts - lse_t)
    out_t     = sum_s m_ts p_ts v_s                      m_ts = 1; dropout: 0 or 1/keep

    delta_t   = out_t . dout_t - dlse_t       dv_s  = sum_t m_ts p_ts dout_t
    dscores_ts = p_ts (m_ts dout_t . v_s - delta_t)
    dbias     = dscores, summed to its shape  dsink = -sum_t exp(sink - lse_t) delta_t
    dq_t      = scale sum_s cap' dscores_ts k_s           dk_s = scale sum_t ... q_t

Saved for backward: the inputs, out and lse. The backward pass recomputes p in blocks.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from opsnn_jax.dispatch import WHOLE, Choice, Requested
from opsnn_jax.kernels.attention import reference
from opsnn_jax.kernels.attention.spec import AttentionSpec, Extra
from opsnn_jax.meshes import align_varying, partitioned

from .attention_arguments import Operands, canonicalize
from .attention_table import TABLE


def flash_attention(
    q: Float[Array, "*B T N H"],
    k: Float[Array, "*B S K H"],
    v: Float[Array, "*B S K Hv"],
    bias: Float[Array, "..."] | None = None,
    mask: Bool[Array, "..."] | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    causal_align: str = "top_left",
    window: tuple[int | None, int | None] | None = None,
    q_lengths: Int[Array, "*B"] | None = None,
    kv_lengths: Int[Array, "*B"] | None = None,
    q_segment_ids: Int[Array, "*B T"] | None = None,
    kv_segment_ids: Int[Array, "*B S"] | None = None,
    q_positions: Int[Array, "*B T"] | None = None,
    kv_positions: Int[Array, "*B S"] | None = None,
    softcap: float | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: PRNGKeyArray | None = None,
    sinks: Float[Array, "N"] | None = None,
    return_lse: bool = False,
    precision: lax.Precision | str | None = None,
    implementation: Requested = None,
) -> Float[Array, "*B T N Hv"] | tuple[Array, Array]:
    r"""Computes softmax(scale q k^T + bias) v in blocks.

    Memory is linear in T and S, in both passes, and blocks in which no query sees a key
    are skipped. A query that sees no key gives 0 and zero gradients, its lse is -inf. A
    NaN or infinity in a key or value reaches only the queries that see it; it makes
    their whole row NaN.

    A query sees a key where all of the masks given let it: `mask`, `bias`, causality,
    window, lengths and segments.

    Args:
      q: queries, `(*B, T, N, H)`, of float32, bfloat16, float16, or float64 under x64.
        Any number of batch axes, also none.
      k: keys, `(*B, S, K, H)`, of q's dtype. N is a multiple of K: every key head
        serves N / K query heads, one after another.
      v: values, `(*B, S, K, Hv)`, of q's dtype.
      bias: added to the scores, after the cap, broadcastable to `(*B, N, T, S)`, of any
        of the dtypes above. -inf hides a key. Its gradient has its own shape and dtype.
      mask: boolean, broadcastable to `(*B, N, T, S)`; False hides a key.
      scale: factor of the scores, a Python number; 1 / sqrt(H) if None.
      is_causal: a query sees the keys up to its own place on the diagonal.
      causal_align: where that diagonal lies if T and S differ, for `is_causal` and
        `window`: "top_left", query t at key t; or "bottom_right", the last query at the
        last key, of those within the lengths.
      window: (left, right): a query sees `left` keys before its place on the diagonal,
        that one, and `right` after it. None is no bound.
      q_lengths, kv_lengths: integers, `(*B,)`: what lies behind them does not count.
        More than T or S is T or S.
      q_segment_ids: integers, `(*B, T)`: a query sees the keys of its own segment,
        as if each segment were a call by itself. Alone, they are those of the keys too.
        A window asks for segments in one piece. -2^31 and -2^31 + 1 are not for ids.
      kv_segment_ids: integers, `(*B, S)`.
      q_positions, kv_positions: integers, `(*B, T)` and `(*B, S)`, less than 2^30 in
        size: a query sees the keys whose position is at most its own, and `window`
        counts in them. One alone makes the other the index. Not with `is_causal`.
      softcap: c of c tanh(scores / c), a Python number; before bias and masks.
      dropout_rate: the share of the weights that are set to 0, a Python number; the
        others are divided by 1 - rate. lse does not change.
      dropout_rng: a key of jax.random. Which weights are kept depends on it and on
        their place (b, n, t, s) alone: both passes, and all implementations, agree.
      sinks: a logit for each head, `(N,)`, that takes part in the softmax and has no
        value.
      return_lse: also returns lse, which can be differentiated.
      precision: of the matrix products, as in `jax.lax.dot_general`.
      implementation: None to choose, a name ("reference", "xla", "pallas_tpu",
        "pallas_gpu", "cudnn"), or a sequence of names in order of preference. None
        never chooses "cudnn", NVIDIA's kernels as `jax.nn` has them, which take fewer
        calls and promise less, see below; nor is it part of a sequence.

    Returns:
      `(*B, T, N, Hv)`, of q's dtype. With `return_lse`, that and the logarithm of the
      sum of exponentials of each row of scores, `(*B, T, N)`, float32 (float64 for
      float64).

    Raises:
      TypeError: for what is no array, a dtype not listed, or a number that is traced.
      ValueError: for shapes that do not fit, options that contradict each other, or an
        unknown implementation.
      NotImplementedError: if the named implementation cannot do the call.

    Precision:
      Scores, softmax and all sums are float32 (float64 for float64); outputs and
      gradients are rounded once. The error is that of one rounding of the result,
      plus O(eps_32 sqrt(H)) in the scores. The Pallas kernels and "cudnn" multiply
      weights and their cotangents in q's dtype; that for TPUs also rounds scaled
      queries to it. With "cudnn", what is not finite in a key that causality hides may
      reach other rows.

    Deterministic:
      Yes, both passes: every sum has a fixed order. The backward pass of "cudnn"
      has one only if XLA_FLAGS has --xla_gpu_deterministic_ops=true.

    Transforms:
      jit, vmap, grad to any order, remat, scan and shard_map; jax.export, also of a
      symbolic batch. Forward mode (jvp, hessian) and symbolic lengths need
      `implementation="reference"`. Under `jax.checkpoint`, the names
      "attention_out" and "attention_lse" save what backward needs of the forward pass.
      "cudnn" has no second derivatives, no forward mode, and none of these names.

    Example:
      >>> import jax
      >>> q = jax.random.normal(jax.random.key(0), (2, 5, 8, 64))
      >>> k, v = jax.random.normal(jax.random.key(1), (2, 2, 7, 4, 64))
      >>> flash_attention(q, k, v, is_causal=True, window=(3, 0)).shape
      (2, 5, 8, 64)

    References:
      Dao, Fu, Ermon, Rudra, Re, "FlashAttention", 2022, algorithms 1 and 4.
      Dao, "FlashAttention-2", 2023, section 3.1.
      Xiao, Tian, Chen, Han, Lewis, "Efficient streaming language models with attention
      sinks", 2023.
    """
    TABLE.check(implementation)
    spec, operands, batch = canonicalize(
        q,
        k,
        v,
        bias,
        mask,
        dict(
            scale=scale,
            is_causal=is_causal,
            causal_align=causal_align,
            window=window,
            q_lengths=q_lengths,
            kv_lengths=kv_lengths,
            q_segment_ids=q_segment_ids,
            kv_segment_ids=kv_segment_ids,
            q_positions=q_positions,
            kv_positions=kv_positions,
            softcap=softcap,
            dropout_rate=dropout_rate,
            dropout_rng=dropout_rng,
            sinks=sinks,
            return_lse=return_lse,
            precision=precision,
        ),
    )
    out, lse = _run(spec, operands, implementation)
    out = out.reshape(*batch, *out.shape[1:])
    return (out, lse.reshape(*batch, *lse.shape[1:])) if return_lse else out


def _run(
    spec: AttentionSpec, operands: Operands, implementation: Requested
) -> tuple[jax.Array, jax.Array | None]:
    """out (B, T, N, Hv) and lse (B, T, N), which is None if "cudnn" was named."""
    arrays = align_varying(*operands[:3], *operands.extra)
    rows = spec.batch, spec.q_len, spec.heads
    if 0 in (*rows, spec.kv_len):
        # There is no score; under shard_map it varies like the operands.
        return empty(spec, arrays[0], Extra(*arrays[3:]).sinks)
    if spec.v_dim == 0:
        out, lse = _run(*with_a_value(spec, operands), implementation)
        return out[..., :0], lse
    # Of the result's (B, T, N, Hv) the first three are q's, the last is v's.
    queries = [(0, 0), (0, 1), (0, 2)]
    dims = [*queries, (2, 3)], queries
    if implementation == "reference":

        def run(q, k, v, *extra):
            return reference.attend(spec, q, k, v, *Extra(*extra).present)

    else:
        choice = TABLE.choose(implementation, spec)
        if implementation in TABLE.whole:
            return partitioned(choice[WHOLE], *arrays[:3], dims=dims[0]), None

        def run(q, k, v, *extra):
            return _attend(choice, Operands(q, k, v, Extra(*extra)))

    def by_query(*arrays):
        out, lse = run(*arrays)
        return out, lse.swapaxes(1, 2)

    return partitioned(by_query, *arrays, dims=dims)


def empty(
    spec: AttentionSpec, q: jax.Array, sinks: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """out (B, T, N, Hv) and lse (B, T, N) of a call in which no query sees a key."""
    rows = spec.batch, spec.q_len, spec.heads
    out = jnp.zeros((*rows, spec.v_dim), spec.dtype)
    lse = jnp.full(rows, -jnp.inf, spec.acc_dtype)
    if sinks is not None:
        lse = jnp.broadcast_to(sinks.astype(spec.acc_dtype), rows)
    return align_varying(q, out, lse)[1:]


def with_a_value(
    spec: AttentionSpec, operands: Operands
) -> tuple[AttentionSpec, Operands]:
    """A call without features of values, with one: its lse is made by kernels too."""
    v = jnp.pad(operands.v, [(0, 0)] * 3 + [(0, 1)])
    return dataclasses.replace(spec, v_dim=1), operands._replace(v=v)


class _Residuals(NamedTuple):
    operands: Operands
    out: jax.Array  # (B, T, N, Hv) of q's dtype
    lse: jax.Array  # (B, N, T), float32 or wider


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(choice: Choice, operands: Operands) -> tuple[jax.Array, jax.Array]:
    return choice["fwd"](*operands.arrays())


def _attend_fwd(choice, operands):
    out, lse = choice["fwd"](*operands.arrays())
    out = checkpoint_name(out, "attention_out")
    lse = checkpoint_name(lse, "attention_lse")
    return (out, lse), _Residuals(operands, out, lse)


def _attend_bwd(choice, residuals, cotangents):
    (q, k, v, extra), out, lse = residuals
    dout, dlse = cotangents
    dead, delta = lse == -jnp.inf, delta_of(out, lse, dout, dlse)
    dq, dk, dv, *dbias = choice["bwd"](q, k, v, lse, delta, dout, *extra.present)
    dextra = Extra(bias=dbias[0] if dbias else None)
    if extra.sinks is not None:
        sinks = extra.sinks.astype(lse.dtype)[None, :, None]
        weights = jnp.where(dead, 0, jnp.exp(sinks - jnp.where(dead, 0, lse)))
        # A row that sees its sink alone has an lse and is not dead, but its out is 0
        # whatever its cotangent is.
        nothing = (out == 0).all(-1).swapaxes(1, 2)
        delta = jnp.where(nothing & ~dead, -dlse, delta)
        dsinks = -jnp.sum(weights * delta, axis=(0, 2))
        dextra = dextra._replace(sinks=dsinks.astype(extra.sinks.dtype))
    return (Operands(dq, dk, dv, dextra),)


_attend.defvjp(_attend_fwd, _attend_bwd)


def delta_of(
    out: jax.Array, lse: jax.Array, dout: jax.Array, dlse: jax.Array
) -> jax.Array:
    """delta (B, N, T) of the passes, from out, lse and their cotangents."""
    products = out.astype(lse.dtype) * dout.astype(lse.dtype)

    def by_product(x):
        # XLA adds the elements of a row one by one on a CPU, which took a tenth of the
        # time of both passes for 16 queries.
        ones = jnp.ones(x.shape[-1:], x.dtype)
        return jnp.matmul(x, ones, precision=lax.Precision.HIGHEST)

    add = functools.partial(jnp.sum, axis=-1)
    inner = lax.platform_dependent(products, cpu=by_product, default=add)
    # The cotangent of a dead row may be anything, NaN too.
    return jnp.where(lse == -jnp.inf, 0, inner.swapaxes(1, 2) - dlse)
