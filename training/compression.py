"""Gradients in fewer bytes, between workers that each have a part of the batch.

A worker sends an approximation of its gradient and keeps what it did not send, its
residual, to be added to the gradient of the next step (error feedback):

    x = gradient + residual
    sent = what `encode` and `decode` leave of x
    residual = x - sent

So nothing is lost, it is only late: what was sent up to any step and the residual sum
to the gradients up to there. Each worker has a residual of its own. It is of unscaled
gradients, for the loss scale may change before it is sent.

What is sent goes to every worker as it is encoded, and is decoded and added up there in
fp32, one worker after the other: all get the same bits. A worker receives as much from
each of the others, so this pays between few of them; an fp32 sum over any number costs
8 bytes an entry.

No encoding hides an inf or NaN: what it is decoded to is not finite either, so that the
step is skipped on all workers, with the residuals back to what they were.

References: Karimireddy et al., Error Feedback Fixes SignSGD, 2019; Lin et al., Deep
Gradient Compression, 2018; Seide et al., 1-Bit Stochastic Gradient Descent, 2014.
"""

import abc
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from .leaves import PyTree, float_leaves

Sent = tuple[jax.Array, ...]


class Compression(abc.ABC):
    """What the kinds of compression have in common. Frozen, hashable objects."""

    @abc.abstractmethod
    def encode(self, x: jax.Array) -> Sent:
        """What is sent of an fp32 array."""

    @abc.abstractmethod
    def decode(self, sent: Sent, shape: tuple[int, ...]) -> jax.Array:
        """The fp32 array of this shape that what was sent stands for."""

    def sends_all(self, size: int) -> bool:
        """Whether an array of so many entries is sent as it is."""
        return size == 0

    def init(self, params: PyTree, workers: int) -> PyTree:
        """The residuals before the first step: (workers, ...) for each floating leaf.

        Inside `jax.shard_map`, split over the axes of the data, a worker has (1, ...).
        """

        def zeros(x):
            return jnp.zeros((workers, *x.shape), jnp.float32)

        return jax.tree.map(zeros, float_leaves(params))

    def compress(self, residual: PyTree, grads: PyTree) -> tuple[list[Sent], PyTree]:
        """What one worker sends, an item for each leaf, and what it still owes.

        Args:
          residual: (1, ...) for each leaf.
          grads: floating leaves, and None for others.
        """

        def leaf(x):
            if self.sends_all(x.size):
                return (x,), jnp.zeros_like(x)
            sent = self.encode(x)
            return sent, x - self.decode(sent, x.shape)

        owed = jax.tree.map(lambda r, g: r[0] + g.astype(jnp.float32), residual, grads)
        leaves, structure = jax.tree.flatten(owed)
        pairs = [leaf(x) for x in leaves]
        left = jax.tree.unflatten(structure, [rest[None] for _, rest in pairs])
        return [sent for sent, _ in pairs], left

    def decompress(self, sent: list[Sent], like: PyTree) -> PyTree:
        """The gradients that a worker sent, in fp32; `like` has their shapes."""
        leaves, structure = jax.tree.flatten(like)
        decoded = [
            s[0] if self.sends_all(x.size) else self.decode(s, x.shape)
            for s, x in zip(sent, leaves, strict=True)
        ]
        return jax.tree.unflatten(structure, decoded)

    def reduce(
        self, residual: PyTree, grads: PyTree, axes: str | tuple[str, ...]
    ) -> tuple[PyTree, PyTree]:
        """The sum over workers of what they send, and this worker's new residual.

        To be called inside `jax.shard_map`, with what a worker has.

        Args:
          residual: (1, ...) for each leaf.
          grads: the worker's own; floating leaves, and None for others.
          axes: of the mesh, over which the workers lie.

        Returns:
          `(total, residual)`, both fp32. `total` is the same on all workers.
        """
        sent, residual = self.compress(residual, grads)
        leaves, structure = jax.tree.flatten(grads)
        total = [
            jax.lax.psum(s[0], axes) if self.sends_all(x.size) else None
            for s, x in zip(sent, leaves, strict=True)
        ]
        encoded = [i for i, x in enumerate(leaves) if total[i] is None]

        # Not a sum over an axis of all workers: their decoded arrays need not be there
        # at once, and the order is the same on each device.
        of_all = jax.lax.all_gather([sent[i] for i in encoded], axes, to="invarying")

        def decode(worker):
            of_worker = jax.tree.map(lambda x: x[worker], of_all)
            pairs = zip(encoded, of_worker, strict=True)
            return [self.decode(s, leaves[i].shape) for i, s in pairs]

        def add(worker, sums):
            return jax.tree.map(jnp.add, sums, decode(worker))

        sums = jax.lax.fori_loop(1, jax.lax.axis_size(axes), add, decode(0))
        for i, x in zip(encoded, sums, strict=True):
            total[i] = x
        return jax.tree.unflatten(structure, total), residual

    def bytes_sent(self, params: PyTree) -> int:
        """How many bytes a worker sends to each of the others in a step."""

        def leaf(x):
            if self.sends_all(x.size):
                return 4 * x.size
            like = jax.ShapeDtypeStruct(x.shape, jnp.float32)
            sent = jax.eval_shape(self.encode, like)
            return sum(s.size * s.dtype.itemsize for s in sent)

        return sum(leaf(x) for x in jax.tree.leaves(float_leaves(params)))


@dataclass(frozen=True)
class TopK(Compression):
    """The entries that are largest by absolute value, each with its place.

    Of n entries max(1, round(share * n)) are sent, 8 bytes each: of equal ones those
    that come first, and what is not finite before all others.

    Raises:
      ValueError: for a share that is not above 0 and at most 1.

    Example:
      >>> values, places = TopK(0.25).encode(jnp.asarray([-5.0, 1.0, 2.0, 0.0]))
      >>> values.tolist(), places.tolist()
      ([-5.0], [0])
    """

    share: float

    def __post_init__(self):
        if not 0 < self.share <= 1:
            raise ValueError(
                f"TopK: share must be above 0 and at most 1; got {self.share}."
            )

    def count(self, size: int) -> int:
        """How many of so many entries are sent."""
        return min(max(1, round(self.share * size)), size)

    def sends_all(self, size: int) -> bool:
        return self.count(size) == size

    def encode(self, x: jax.Array) -> Sent:
        x = x.reshape(-1)
        # Platforms differ in where they put a NaN among numbers.
        rank = jnp.where(jnp.isfinite(x), jnp.abs(x), jnp.inf)
        _, places = jax.lax.top_k(rank, self.count(x.size))
        return x[places], places

    def decode(self, sent: Sent, shape: tuple[int, ...]) -> jax.Array:
        values, places = sent
        flat = jnp.zeros(math.prod(shape), jnp.float32)
        return flat.at[places].set(values, unique_indices=True).reshape(shape)


@dataclass(frozen=True)
class Int8(Compression):
    """A signed byte for each entry, and an fp32 scale for each `block` of them.

    Scales are powers of two: a byte times its scale is exact, hence the same number to
    the worker that keeps the rest and to those that receive it.

    Raises:
      ValueError: for a block that is no positive integer.
    """

    block: int = 256

    def __post_init__(self):
        if not (isinstance(self.block, int) and self.block >= 1):
            raise ValueError(
                f"Int8: block must be an integer of at least 1; got {self.block}."
            )

    def encode(self, x: jax.Array) -> Sent:
        block = min(self.block, x.size)
        blocks = jnp.pad(x.reshape(-1), (0, -x.size % block)).reshape(-1, block)
        largest = jnp.abs(blocks).max(axis=1, keepdims=True)
        # |x| < 2**exponent, and 2**7 steps on either side of zero.
        _, exponent = jnp.frexp(largest)
        exponent = jnp.maximum(exponent, -119) - 7  # the scale is a normal number
        steps = jnp.round(blocks * jnp.ldexp(jnp.float32(1.0), -exponent))
        scale = jnp.ldexp(jnp.float32(1.0), exponent)
        # No byte is a NaN, so the scale speaks for the block.
        scale = jnp.where(jnp.isfinite(largest), scale, jnp.nan)
        return jnp.clip(steps, -127, 127).astype(jnp.int8), scale

    def decode(self, sent: Sent, shape: tuple[int, ...]) -> jax.Array:
        steps, scale = sent
        flat = (steps.astype(jnp.float32) * scale).reshape(-1)
        return flat[: math.prod(shape)].reshape(shape)


@dataclass(frozen=True)
class Half(Compression):
    """Each entry in half precision, "bfloat16" or "float16"; sums are fp32.

    A finite number beyond the range is sent as the largest there is.

    Raises:
      ValueError: for another dtype.
    """

    dtype: str = "bfloat16"

    def __post_init__(self):
        if self.dtype not in ("bfloat16", "float16"):
            raise ValueError(
                f"Half: dtype must be 'bfloat16' or 'float16'; got {self.dtype!r}."
            )

    def encode(self, x: jax.Array) -> Sent:
        largest = float(jnp.finfo(self.dtype).max)
        clipped = jnp.where(jnp.isfinite(x), jnp.clip(x, -largest, largest), x)
        return (clipped.astype(self.dtype),)

    def decode(self, sent: Sent, shape: tuple[int, ...]) -> jax.Array:
        return sent[0].astype(jnp.float32).reshape(shape)


@dataclass(frozen=True)
class OneBit(Compression):
    """The sign of each entry, and the mean absolute value of all.

    The coarsest: the error of one step is as large as the gradient. It asks for a lower
    learning rate, and for no momentum that the late gradients could pile up in.
    """

    def encode(self, x: jax.Array) -> Sent:
        x = x.reshape(-1)
        return jnp.packbits(x >= 0), jnp.abs(x).mean()

    def decode(self, sent: Sent, shape: tuple[int, ...]) -> jax.Array:
        bits, size = sent
        signs = jnp.unpackbits(bits, count=math.prod(shape)).astype(jnp.float32)
        return ((2.0 * signs - 1.0) * size).reshape(shape)
