r"""Attention over a sequence that is split over devices.

Each device keeps its queries; keys and values go round. With out_p and lse_p over the
keys of shard p alone,

    lse = log sum_p exp(lse_p)        out = sum_p exp(lse_p - lse) out_p

Backward, the gradients of keys and values go round with them. As lse is that of all
keys, each step adds its exact share: dq = sum_p dq_p, and dk, dv come home complete.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from opsnn_jax.dispatch import Choice, Requested
from opsnn_jax.kernels.attention.spec import Extra
from opsnn_jax.meshes import align_varying

from .attention import delta_of, empty, with_a_value
from .attention_arguments import Operands, canonicalize, checked_arrays
from .attention_masks import band_of, check_causal
from .attention_table import TABLE


def ring_attention(
    q: Float[Array, "*B T N H"],
    k: Float[Array, "*B S K H"],
    v: Float[Array, "*B S K Hv"],
    *,
    axis_name: str,
    scale: float | None = None,
    is_causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    q_segment_ids: Int[Array, "*B T"] | None = None,
    kv_segment_ids: Int[Array, "*B S"] | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    precision: lax.Precision | str | None = None,
    implementation: Requested = None,
) -> Float[Array, "*B T N Hv"] | tuple[Array, Array]:
    """flash_attention inside `jax.shard_map`, over all shards of a mesh axis.

    The result is that of flash_attention over the whole sequence, without any device
    ever having more than two shards of keys and values.

    Args:
      q, k, v: this device's shard, as in flash_attention. Shard i holds the tokens from
        i T (i S for keys) on.
      axis_name: the mesh axis that the sequence is split over.
      is_causal, window: as in flash_attention, in tokens of the whole sequence, aligned
        at its start.
      q_segment_ids, kv_segment_ids: of this shard; ids are those of the whole sequence.
        A query sees the keys of its own segment, and causality counts whole tokens.
      scale, softcap, return_lse, precision: as in flash_attention.
      implementation: as in flash_attention, but not "reference" or "cudnn".

    Returns:
      `(*B, T, N, Hv)`, this device's shard; with `return_lse` also `(*B, T, N)`.

    Raises:
      TypeError, ValueError, NotImplementedError: as flash_attention does.

    Precision:
      As flash_attention; each of the parts is rounded before they are added in float32.

    References:
      Liu, Zaharia, Abbeel, "Ring attention with blockwise transformers for
      near-infinite context", 2023.
    """
    TABLE.check(implementation)
    if implementation in TABLE.whole:
        raise ValueError(
            "ring_attention: implementation must be one with passes of its own; got "
            f"{implementation!r}. Pass None or another name."
        )
    (q, k, v), _ = checked_arrays(q, k, v)
    check_causal(is_causal)
    places = (None, None)
    if is_causal or window is not None:
        shard = lax.axis_index(axis_name)
        places = tuple(
            shard * x.shape[-3] + jnp.arange(x.shape[-3], dtype=jnp.int32)
            for x in (q, k)
        )
    options = dict(
        scale=scale,
        is_causal=False,
        causal_align="top_left",
        window=None,
        q_lengths=None,
        kv_lengths=None,
        q_segment_ids=q_segment_ids,
        kv_segment_ids=kv_segment_ids,
        q_positions=places[0],
        kv_positions=places[1],
        softcap=softcap,
        dropout_rate=0.0,
        dropout_rng=None,
        sinks=None,
        return_lse=True,  # of every part
        precision=precision,
    )
    spec, operands, batch = canonicalize(q, k, v, None, None, options)
    # The positions tell the distance; what it may be is as in flash_attention.
    spec = dataclasses.replace(spec, band=band_of(window, is_causal))
    out, lse = _run(spec, operands, axis_name, implementation)
    out = out.reshape(*batch, *out.shape[1:])
    return (out, lse.reshape(*batch, *lse.shape[1:])) if return_lse else out


def _run(spec, operands, axis_name, implementation):
    """out (B, T, N, Hv) and lse (B, T, N), of this device's shard."""
    arrays = align_varying(*operands[:3], *operands.extra)
    operands = Operands(*arrays[:3], Extra(*arrays[3:]))
    if 0 in (spec.batch, spec.q_len, spec.heads, spec.kv_len):
        return empty(spec, operands.q)
    if spec.v_dim == 0:
        out, lse = _run(*with_a_value(spec, operands), axis_name, implementation)
        return out[..., :0], lse
    choice = TABLE.choose(implementation, spec)
    out, lse = _ring(choice, axis_name, operands)
    return out, lse.swapaxes(1, 2)


class _Turning(NamedTuple):
    """What goes round."""

    k: jax.Array
    v: jax.Array
    kv_ids: jax.Array | None
    kv_positions: jax.Array | None

    @classmethod
    def of(cls, operands: Operands) -> "_Turning":
        extra = operands.extra
        return cls(operands.k, operands.v, extra.kv_ids, extra.kv_positions)

    def call(self, operands: Operands) -> Operands:
        """The operands of the step: this device's queries, and these keys."""
        extra = operands.extra._replace(
            kv_ids=self.kv_ids, kv_positions=self.kv_positions
        )
        return Operands(operands.q, self.k, self.v, extra)


class _Residuals(NamedTuple):
    operands: Operands
    out: jax.Array  # (B, T, N, Hv) of q's dtype
    lse: jax.Array  # (B, N, T), float32 or wider


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _ring(
    choice: Choice, axis_name: str, operands: Operands
) -> tuple[jax.Array, jax.Array]:
    return _ring_fwd(choice, axis_name, operands)[0]


def _ring_fwd(choice, axis_name, operands):
    first = choice["fwd"](*operands.arrays())
    out, lse = first[0].astype(first[1].dtype), first[1]

    def step(carry, _):
        (out, lse), turning = carry
        turning = _to_next(turning, axis_name)
        part = choice["fwd"](*turning.call(operands).arrays())
        return (_merged(out, lse, *part), turning), None

    carry = (out, lse), _Turning.of(operands)
    ((out, lse), _), _ = lax.scan(step, carry, None, lax.axis_size(axis_name) - 1)
    out = out.astype(operands.q.dtype)
    return (out, lse), _Residuals(operands, out, lse)


def _ring_bwd(choice, axis_name, residuals, cotangents):
    operands, out, lse = residuals
    dout, dlse = cotangents
    delta = delta_of(out, lse, dout, dlse)

    def step(carry, _):
        (dq, dk, dv), turning = carry
        q, k, v, extra = turning.call(operands)
        grads = choice["bwd"](q, k, v, lse, delta, dout, *extra.present)
        dq, dk, dv = (
            total + part.astype(lse.dtype)
            for total, part in zip((dq, dk, dv), grads, strict=True)
        )
        # After the last step every gradient is back on the device of its keys.
        turned = _to_next((dk, dv, turning), axis_name)
        return ((dq, *turned[:2]), turned[2]), None

    zeros = tuple(jnp.zeros_like(x, lse.dtype) for x in operands[:3])
    carry = (align_varying(*zeros, lse)[:3], _Turning.of(operands))
    (grads, _), _ = lax.scan(step, carry, None, lax.axis_size(axis_name))
    return (Operands(*(g.astype(operands.q.dtype) for g in grads), Extra()),)


_ring.defvjp(_ring_fwd, _ring_bwd)


def _to_next(tree, axis_name):
    size = lax.axis_size(axis_name)
    return lax.ppermute(tree, axis_name, [(i, (i + 1) % size) for i in range(size)])


def _merged(out, lse, part, part_lse):
    """Attention over two sets of keys, out in the dtype of lse."""
    total = jnp.logaddexp(lse, part_lse)
    finite = jnp.where(total == -jnp.inf, 0, total)

    def weight(x):
        return jnp.exp(x - finite).swapaxes(1, 2)[..., None]

    return out * weight(lse) + part.astype(out.dtype) * weight(part_lse), total
