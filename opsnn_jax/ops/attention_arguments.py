"""What flash_attention demands of its arguments, and the canonical form of a call."""

import math
import numbers
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from opsnn_jax.kernels.attention.mask import Band
from opsnn_jax.kernels.attention.spec import AttentionSpec, Extra

from .arguments import as_array, as_float_array, as_precision
from .attention_masks import Described, describe

_OP = "flash_attention"


class Operands(NamedTuple):
    """The arrays of a call as the passes take them: one batch axis, scores in 4-D."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    extra: Extra

    def arrays(self) -> tuple[jax.Array, ...]:
        """Those that are there."""
        return self.q, self.k, self.v, *self.extra.present


def canonicalize(
    q: Any,
    k: Any,
    v: Any,
    bias: Any,
    mask: Any,
    options: Mapping[str, Any],
) -> tuple[AttentionSpec, Operands, tuple[int, ...]]:
    """Checks every argument of flash_attention.

    Args:
      q, k, v, bias, mask: as given.
      options: the keyword arguments by name.

    Returns:
      The spec, the operands, and the batch axes that are one in them.

    Raises:
      TypeError, ValueError: as in flash_attention.
    """
    (q, k, v), batch = checked_arrays(q, k, v)
    q, k, v = (
        jnp.asarray(x).reshape(math.prod(batch), *x.shape[-3:]) for x in (q, k, v)
    )
    rows, q_len, heads, qk_dim = q.shape
    _, kv_len, kv_heads, v_dim = *k.shape[:3], v.shape[3]
    if bias is not None:
        bias = as_float_array(_OP, "bias", bias)
        bias = _as_scores("bias", bias, batch, (heads, q_len, kv_len))
    if mask is not None:
        mask = as_array(_OP, "mask", mask)
        if mask.dtype != bool:
            raise TypeError(
                f"flash_attention: mask must be boolean; got {mask.dtype}. Pass "
                "mask != 0, or an additive mask as bias."
            )
        mask = _as_scores("mask", mask, batch, (heads, q_len, kv_len))
    described = describe(batch, q_len, kv_len, options)
    rate, seed = _dropout(options["dropout_rate"], options["dropout_rng"])
    sinks = as_sinks(_OP, options["sinks"], heads)
    extra = Extra(bias, mask, *described.operands, sinks, seed)
    spec = AttentionSpec(
        rows,
        q_len,
        kv_len,
        heads,
        kv_heads,
        qk_dim,
        v_dim,
        dtype=jnp.dtype(q.dtype),
        scale=_static_scale(options["scale"], qk_dim),
        band=_relevant(described, q_len, kv_len),
        precision=as_precision(_OP, options["precision"]),
        bias_shape=None if bias is None else bias.shape,
        mask_shape=None if mask is None else mask.shape,
        ids=extra.q_ids is not None,
        positions=extra.q_positions is not None,
        sinks=sinks is not None,
        softcap=_softcap(options["softcap"]),
        dropout_rate=rate,
        returns_lse=bool(options["return_lse"]),
    )
    return spec, Operands(q, k, v, extra), batch


def checked_arrays(q: Any, k: Any, v: Any) -> tuple[tuple, tuple[int, ...]]:
    """The arrays (*batch, length, heads, features) of a call, and their batch axes.

    Raises:
      TypeError, ValueError: for what is no such array, or does not fit the others.
    """
    q, k, v = (as_float_array(_OP, n, x) for n, x in (("q", q), ("k", k), ("v", v)))
    return (q, k, v), _check_shapes(q, k, v)


def _check_shapes(q, k, v):
    """The batch axes; or an error that says which array does not fit."""
    if q.ndim < 3 or not q.ndim == k.ndim == v.ndim:
        raise ValueError(
            "flash_attention: q, k and v must have the same axes (*batch, length, "
            f"heads, features), at least three; got {q.shape}, {k.shape} and "
            f"{v.shape}. Give the batch axes to all of them, or map with jax.vmap."
        )
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise TypeError(
                f"flash_attention: q, k and v must have one dtype; got {q.dtype}, "
                f"{name} with {x.dtype}. Cast them to one."
            )
    batch = q.shape[:-3]
    q_shape, k_shape, v_shape = (x.shape[-3:] for x in (q, k, v))
    kv_len, kv_heads, _ = k_shape
    if k.shape[:-3] != batch or k_shape[2] != q_shape[2]:
        raise ValueError(
            f"flash_attention: k must have shape (B, S, K, H) = "
            f"({', '.join(map(str, (*batch, 'S', 'K', q_shape[2])))}); got {k.shape} "
            f"with q {q.shape}. Match k's batch and features to q."
        )
    if v.shape[:-1] != k.shape[:-1]:
        raise ValueError(
            f"flash_attention: v must have shape (B, S, K, Hv) = "
            f"({', '.join(map(str, (*k.shape[:-1], 'Hv')))}); got {v.shape} with k "
            f"{k.shape}. Match v to k."
        )
    if not all(isinstance(n, int) for n in (*q_shape[1:], *k_shape[1:], v_shape[2])):
        raise ValueError(
            "flash_attention: heads and features must be known while tracing; got q "
            f"{q.shape}, k {k.shape} and v {v.shape}. Only "
            "batch and lengths may be unknown."
        )
    heads = q_shape[1]
    if heads % kv_heads if kv_heads else heads:
        raise ValueError(
            f"flash_attention: the heads of q must be a multiple of those of k and v; "
            f"got {heads} and {kv_heads}. Repeat or drop heads."
        )
    return batch


def _as_scores(name, x, batch, scores):
    """`x` with axes (B, N, T, S), each of size 1 or full."""
    full = (*batch, *scores)
    shape = (1,) * (len(full) - x.ndim) + x.shape
    if len(shape) > len(full) or any(
        n not in (1, size) for n, size in zip(shape, full, strict=True)
    ):
        raise ValueError(
            f"flash_attention: {name} must broadcast to (B, N, T, S) = {full}; got "
            f"{x.shape}. Insert axes of size 1 where it does not vary."
        )
    x = jnp.asarray(x).reshape(shape)
    if any(n != 1 for n in shape[:-3]):
        x = jnp.broadcast_to(x, batch + shape[-3:])
    return x.reshape(math.prod(x.shape[:-3]), *shape[-3:])


def _relevant(described: Described, q_len, kv_len) -> Band:
    """The band without bounds that hide nothing here, so that blocks are full ones."""
    band = described.band
    if described.operands[2] is not None:  # bounds on positions that are data
        return band
    if not (isinstance(q_len, int) and isinstance(kv_len, int)):
        return band
    lower, upper = band.lower, band.upper
    if lower is not None and lower <= -(q_len - 1):
        lower = None
    if upper is not None and upper >= kv_len - 1:
        upper = None
    return Band(lower, upper)


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


def _softcap(softcap):
    if softcap is None:
        return None
    if not isinstance(softcap, numbers.Real):
        raise TypeError(
            "flash_attention: softcap must be None or a Python number, fixed when the "
            f"call is traced; got {type(softcap).__name__}. Pass a float."
        )
    if not 0 < softcap < math.inf:
        raise ValueError(
            f"flash_attention: softcap must be positive and finite; got {softcap}. "
            "Pass None for no cap."
        )
    return float(softcap)


def as_sinks(op: str, sinks: Any, heads: int) -> jax.Array | None:
    """`sinks` as an array (N,) of floats, or None; else TypeError or ValueError."""
    if sinks is None:
        return None
    sinks = as_float_array(op, "sinks", sinks)
    if sinks.shape != (heads,):
        raise ValueError(
            f"{op}: sinks must have shape (N,) = ({heads},), one logit for "
            f"each query head; got {sinks.shape}. Broadcast it to that."
        )
    return jnp.asarray(sinks)


def _dropout(rate, rng):
    """The rate, and two int32 of random bits or None."""
    if not isinstance(rate, numbers.Real):
        raise TypeError(
            "flash_attention: dropout_rate must be a Python number, fixed when the "
            f"call is traced; got {type(rate).__name__}. Pass a float."
        )
    if not 0 <= rate <= 1:
        raise ValueError(
            f"flash_attention: dropout_rate must be in [0, 1]; got {rate}. It is the "
            "share of the weights that are dropped."
        )
    if rate == 0:
        return 0.0, None
    if rng is None:
        raise ValueError(
            f"flash_attention: dropout_rate {rate} needs dropout_rng; got None. Pass a "
            "key, a new one for each call, or dropout_rate=0."
        )
    rng = as_array(_OP, "dropout_rng", rng)
    typed = jnp.issubdtype(rng.dtype, jax.dtypes.prng_key)
    if (rng.shape != ()) if typed else (rng.ndim != 1 or rng.dtype != jnp.uint32):
        raise ValueError(
            f"flash_attention: dropout_rng must be one key of jax.random; got shape "
            f"{rng.shape} of {rng.dtype}. Pass jax.random.key(seed), or one key of a "
            "split."
        )
    bits = jax.random.bits(rng, (2,), jnp.uint32)
    return float(rate), jax.lax.bitcast_convert_type(bits, jnp.int32)
