"""Masks of flash_attention that are described: causal, window, lengths, segments.

All of them become one `Band` over positions, plus at most two numbers for each query
and key: an id, which must be the same, and a position, which replaces the index in the
band where it is data. Nothing of size T x S is made.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from opsnn_jax.kernels.attention.mask import Band

from .arguments import as_array

_OP = "flash_attention"

# Ids of what lies behind a length: they differ, so nothing there sees or is seen. No
# segment may have one of them.
_HIDDEN_QUERY, _HIDDEN_KEY = np.iinfo(np.int32).min, np.iinfo(np.int32).min + 1

ALIGNMENTS = ("top_left", "bottom_right")


class Described(NamedTuple):
    """The band, and (q_ids, kv_ids, q_positions, kv_positions), each (B, length)."""

    band: Band
    operands: tuple[jax.Array | None, ...]


def describe(
    batch: tuple[int, ...], q_len: int, kv_len: int, options: Mapping[str, Any]
) -> Described:
    """Checks the options of masking and brings them into one form."""
    causal, align = options["is_causal"], options["causal_align"]
    check_causal(causal)
    if align not in ALIGNMENTS:
        raise ValueError(
            "flash_attention: causal_align must be 'top_left' or 'bottom_right'; got "
            f"{align!r}. It says which ends of queries and keys lie on the diagonal."
        )
    q_lengths = _lengths("q_lengths", options, batch, q_len)
    kv_lengths = _lengths("kv_lengths", options, batch, kv_len)
    q_segments, kv_segments, shared = _segments(options, batch, q_len, kv_len)
    q_positions, kv_positions = _positions(options, batch, q_len, kv_len)
    if q_positions is not None and (causal or align != "top_left"):
        given = "is_causal" if causal else f"causal_align={align!r}"
        raise ValueError(
            f"flash_attention: {given} cannot be combined with q_positions and "
            "kv_positions; by positions, a query always sees the keys up to its own. "
            "Drop one of them."
        )
    q_ids, kv_ids = _ids(
        batch, q_len, kv_len, q_lengths, kv_lengths, q_segments, kv_segments
    )
    band = band_of(options["window"], causal or q_positions is not None)
    if q_positions is None and not band.full:
        # Values may be traced: only of one array given twice is it known that its
        # numbers are the same. Where they are not known to be, positions tell.
        same_length = options["q_lengths"] is options["kv_lengths"]
        at_the_end = align == "bottom_right"
        # Where each segment has its queries and keys at the same indices, their
        # distance is that of the indices, counted from either end, so the band stands.
        # From the start, lengths take nothing away that is counted; from the end they
        # do, and must take the same of both.
        in_step = shared and (same_length or not at_the_end)
        if q_segments is not None and not in_step:
            # Each segment is as a call of its own: count inside of it.
            count = _count_later if at_the_end else _count_earlier
            q_positions, kv_positions = count(q_ids), count(kv_ids)
        elif at_the_end and not (same_length and q_len == kv_len):
            if same_length and q_lengths is None:
                band = band.shifted(kv_len - q_len)
            else:
                q_positions = _from_end(q_lengths, batch, q_len)
                kv_positions = _from_end(kv_lengths, batch, kv_len)
    operands = (q_ids, kv_ids, q_positions, kv_positions)
    return Described(
        band, tuple(None if x is None else _folded(x, batch) for x in operands)
    )


def band_of(window: Any, causal: bool) -> Band:
    """The band of a window and of causality, with the diagonal at distance 0."""
    left, right = _window(window)
    if causal:
        right = 0 if right is None else min(right, 0)
    return Band(None if left is None else -left, right)


def check_causal(causal: Any) -> None:
    """Raises TypeError for what is no bool."""
    if not isinstance(causal, bool | np.bool_):
        raise TypeError(
            f"flash_attention: is_causal must be a bool; got "
            f"{type(causal).__name__}. Pass what varies as mask."
        )


def _window(window):
    if window is None:
        return None, None
    if isinstance(window, int | np.integer) and not isinstance(window, bool):
        window = (window, window)
    if not isinstance(window, tuple | list) or len(window) != 2:
        raise TypeError(
            "flash_attention: window must be (left, right), how many keys before and "
            f"after its own a query sees; got {window!r}. None is no bound."
        )
    for side in window:
        if side is None:
            continue
        if not isinstance(side, int | np.integer) or isinstance(side, bool):
            raise TypeError(
                "flash_attention: window must hold Python integers or None; got "
                f"{window!r}. Pass what varies as positions or mask."
            )
        if side < 0:
            raise ValueError(
                f"flash_attention: window must not be negative; got {window!r}. Pass "
                "None for a side without a bound."
            )
    # Positions of 31 bits with their signs are never as far apart as this.
    far = np.iinfo(np.int32).max
    return tuple(None if side is None or side >= far else int(side) for side in window)


def _integers(name, x, batch, length=None):
    """`x` as int32 of shape (*batch,), or (*batch, length); None stays None."""
    if x is None:
        return None
    x = as_array(_OP, name, x)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(
            f"flash_attention: {name} must be integers; got {x.dtype}. Cast it with "
            ".astype(jnp.int32)."
        )
    limits = np.iinfo(np.int32)
    if not isinstance(x, jax.Array):
        if x.size and (x.min() < limits.min or x.max() > limits.max):
            raise ValueError(
                f"flash_attention: {name} must fit into int32; got values from "
                f"{x.min()} to {x.max()}. Number them from 0."
            )
    elif x.dtype.itemsize > 4 or x.dtype == jnp.uint32:
        raise TypeError(
            f"flash_attention: {name} must have at most 32 bits, signed; got "
            f"{x.dtype}. Cast it with .astype(jnp.int32)."
        )
    shape = batch if length is None else (*batch, length)
    aligned = (1,) * (len(shape) - x.ndim) + x.shape
    if len(aligned) > len(shape) or any(
        n not in (1, full) for n, full in zip(aligned, shape, strict=True)
    ):
        axes = "(B,)" if length is None else "(B, length)"
        raise ValueError(
            f"flash_attention: {name} must have shape {axes} = {shape}; got "
            f"{x.shape}. Give one number for each."
        )
    return jnp.broadcast_to(jnp.asarray(x).astype(jnp.int32).reshape(aligned), shape)


def _lengths(name, options, batch, length):
    """(*batch,), from 0 to `length`: where what counts ends, also if more was given."""
    lengths = _integers(name, options[name], batch)
    return lengths if lengths is None else jnp.clip(lengths, 0, length)


def _segments(options, batch, q_len, kv_len):
    """Ids of queries and keys, and whether they are the same array."""
    q, kv = options["q_segment_ids"], options["kv_segment_ids"]
    if q is None and kv is not None:
        raise ValueError(
            "flash_attention: kv_segment_ids needs q_segment_ids; got None. Say for "
            "each query which segment it is of."
        )
    if q is None:
        return None, None, False
    if kv is None and q_len != kv_len:
        raise ValueError(
            "flash_attention: q_segment_ids alone are those of the keys too, so T must "
            f"be S; got T={q_len}, S={kv_len}. Pass kv_segment_ids."
        )
    shared = q_len == kv_len and (kv is None or kv is q)
    kv = q if kv is None else kv
    return (
        _integers("q_segment_ids", q, batch, q_len),
        _integers("kv_segment_ids", kv, batch, kv_len),
        shared,
    )


def _positions(options, batch, q_len, kv_len):
    q = _integers("q_positions", options["q_positions"], batch, q_len)
    kv = _integers("kv_positions", options["kv_positions"], batch, kv_len)
    if q is None and kv is None:
        return None, None
    if q is None:
        q = _indices(batch, q_len)
    if kv is None:
        kv = _indices(batch, kv_len)
    return q, kv


def _ids(batch, q_len, kv_len, q_lengths, kv_lengths, q_segments, kv_segments):
    """Segments and lengths as ids that must be equal, (*batch, length)."""
    if all(x is None for x in (q_lengths, kv_lengths, q_segments)):
        return None, None

    def ids(length, lengths, segments, hidden):
        if segments is None:
            segments = jnp.zeros((*batch, length), jnp.int32)
        if lengths is None:
            return segments
        inside = _indices(batch, length) < lengths[..., None]
        return jnp.where(inside, segments, hidden)

    return (
        ids(q_len, q_lengths, q_segments, _HIDDEN_QUERY),
        ids(kv_len, kv_lengths, kv_segments, _HIDDEN_KEY),
    )


def _indices(batch, length):
    return jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (*batch, length))


def _from_end(lengths, batch, length):
    """Positions with the first one behind the end at 0."""
    indices = _indices(batch, length)
    return indices - (length if lengths is None else lengths[..., None])


def _count_earlier(ids):
    """How many elements before each one have its id, (*batch, length)."""
    order = jnp.argsort(ids, axis=-1, stable=True)
    ordered = jnp.take_along_axis(ids, order, axis=-1)
    index = jnp.broadcast_to(jnp.arange(ids.shape[-1], dtype=jnp.int32), ids.shape)
    first = jnp.concatenate(
        [jnp.ones_like(ids[..., :1], bool), ordered[..., 1:] != ordered[..., :-1]], -1
    )
    start = jax.lax.cummax(jnp.where(first, index, 0), axis=ids.ndim - 1)
    place = jnp.argsort(order, axis=-1)
    return jnp.take_along_axis(index - start, place, axis=-1)


def _count_later(ids):
    """Minus how many elements after each one have its id."""
    return -jnp.flip(_count_earlier(jnp.flip(ids, -1)), -1)


def _folded(x, batch):
    return x.reshape(math.prod(batch), x.shape[-1])
