"""Which attention weights dropout keeps: a hash of the place, not a stream of numbers.

Whether weight (b, n, t, s) is kept depends on the seed and on these four numbers alone.
So both passes, every block size and every implementation agree, in plain JAX as inside
of a Pallas kernel, and no mask is stored.

The mixing is Wellons' lowbias32 (https://nullprogram.com/blog/2018/07/31/), a bijection
of 32 bits in which every input bit flips each output bit with a probability close to
1/2. Each row has two keys, of which the second enters between two rounds: with one key,
two rows whose keys differ by a multiple of the stride would share a shifted mask.

Everything is int32, wrapping round, because that is what all compilers take.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# The rate is rounded to a multiple of 2^-24.
_RESOLUTION = 1 << 24


def _int32(bits: int) -> np.int32:
    return np.uint32(bits).astype(np.int32)


_MULTIPLIERS = _int32(0x7FEB352D), _int32(0x846CA68B)
# 2^32 over the golden ratio: neighbouring columns start far from each other.
_STRIDE = _int32(0x9E3779B9)


def keep(seed, head, row, col, rate: float) -> jax.Array:
    """Whether each weight is kept; true with probability 1 - `rate`.

    Args:
      seed: two int32 scalars of random bits.
      head: b * N + n, int32.
      row: t, int32; `head` and `row` broadcast with `col`.
      col: s, int32.
      rate: in [0, 1].
    """
    first = _mix(_mix(head ^ seed[0]) + row)
    second = _mix(first ^ seed[1])
    x = first + col * _STRIDE
    x = (x ^ _shifted(x, 16)) * _MULTIPLIERS[0] + second
    x = (x ^ _shifted(x, 15)) * _MULTIPLIERS[1]
    x = x ^ _shifted(x, 16)
    return _shifted(x, 8) >= jnp.int32(round(rate * _RESOLUTION))


def _mix(x):
    x = (x ^ _shifted(x, 16)) * _MULTIPLIERS[0]
    x = (x ^ _shifted(x, 15)) * _MULTIPLIERS[1]
    return x ^ _shifted(x, 16)


def _shifted(x, bits):
    return lax.shift_right_logical(x, jnp.full(jnp.shape(x), bits, jnp.int32))
