"""Layouts of images: channels last, channels first, and channels in blocks.

"blocked" is (N, C1, *S, C0), NC1HWC0 in two dimensions: C1 blocks of C0 channels, the
last one filled up with zeros, as hardware with vectors of C0 elements reads them.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

from .arguments import as_array, as_int

LAYOUTS = ("channels_last", "channels_first", "blocked")

# What a block of channels takes: one vector of the hardware that blocks are for.
_BLOCK_BYTES = 32


def to_blocked(
    x: Shaped[Array, "N *S C"], block: int | None = None
) -> Shaped[Array, "N C1 *S C0"]:
    """Puts the channels of a channels-last array into blocks, filled up with zeros.

    Args:
      x: `(N, *S, C)`, any dtype.
      block: C0; by default the elements in 32 bytes, so 8 for float32, 16 for half.

    Returns:
      `(N, ceil(C / C0), *S, C0)`. `from_blocked` undoes it exactly.

    Raises:
      TypeError: if x is no array, or block no int.
      ValueError: if x has less than two dimensions, or block is not positive.

    Example:
      >>> import jax.numpy as jnp
      >>> to_blocked(jnp.ones((2, 5, 5, 20))).shape
      (2, 3, 5, 5, 8)
    """
    x = jnp.asarray(as_array("to_blocked", "x", x))
    if x.ndim < 2:
        raise ValueError(
            f"to_blocked: x must have shape (N, *S, C); got {x.shape}. Add a batch "
            "dimension with x[None]."
        )
    block = _BLOCK_BYTES // x.dtype.itemsize if block is None else block
    block = as_int("to_blocked", "block", block)
    if block < 1:
        raise ValueError(
            f"to_blocked: block must be a positive int or None; got {block!r}."
        )
    blocks = -(-x.shape[-1] // block)
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, blocks * block - x.shape[-1])])
    return jnp.moveaxis(x.reshape(*x.shape[:-1], blocks, block), -2, 1)


def from_blocked(
    x: Shaped[Array, "N C1 *S C0"], channels: int
) -> Shaped[Array, "N *S C"]:
    """Puts blocks of channels back together, and drops what filled the last one.

    Args:
      x: `(N, C1, *S, C0)`.
      channels: C, at most C1 C0 and more than (C1 - 1) C0.

    Raises:
      TypeError: if x is no array, or channels no int.
      ValueError: if it is not that many blocks.
    """
    x = jnp.asarray(as_array("from_blocked", "x", x))
    channels = as_int("from_blocked", "channels", channels)
    if x.ndim < 3 or -(-channels // max(1, x.shape[-1])) != x.shape[1]:
        raise ValueError(
            "from_blocked: x must have shape (N, C1, *S, C0) with C1 = ceil(C / C0); "
            f"got {x.shape} for C = {channels}."
        )
    x = jnp.moveaxis(x, 1, -2)
    *shape, blocks, block = x.shape
    return x.reshape(*shape, blocks * block)[..., :channels]


def check_layout(op: str, layout: str) -> None:
    """Raises ValueError for anything but a name in `LAYOUTS`."""
    if not isinstance(layout, str) or layout not in LAYOUTS:
        names = ", ".join(map(repr, LAYOUTS))
        raise ValueError(f"{op}: layout must be one of {names}; got {layout!r}.")


def to_channels_last(
    op: str, name: str, layout: str, rank: int | None, x: jax.Array, channels: int
) -> jax.Array:
    """x in `layout`, of `rank` spatial dimensions or any, with its channels last.

    Raises:
      ValueError: if x cannot be that, in the name of `op`.
    """
    blocked = layout == "blocked"
    ranks = (1, 2, 3) if rank is None else (rank,)
    shape = "(N, C1, *S, C0)" if blocked else "(N, C, *S)"
    if x.ndim not in [r + 2 + blocked for r in ranks]:
        raise ValueError(
            f"{op}: {name} must have shape {shape} in layout={layout!r} with "
            f"{' or '.join(map(str, ranks))} spatial dimensions; got {x.shape}. Add a "
            "batch dimension with x[None]."
        )
    wanted = -(-channels // max(1, x.shape[-1])) if blocked else channels
    if x.shape[1] != wanted:
        raise ValueError(
            f"{op}: {name} must have shape {shape} with {shape[4:6].strip(',')} = "
            f"{wanted} for {channels} channels in layout={layout!r}; got {x.shape}."
        )
    return from_blocked(x, channels) if blocked else jnp.moveaxis(x, 1, -1)


def from_channels_last(layout: str, y: jax.Array, block: int) -> jax.Array:
    """What `to_channels_last` undoes; `block` is C0."""
    if layout == "channels_first":
        return jnp.moveaxis(y, -1, 1)
    return to_blocked(y, block) if layout == "blocked" else y
