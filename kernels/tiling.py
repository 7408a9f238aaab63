"""Arithmetic of blocks: what TPU and GPU kernels of every family share."""

import math

# A TPU vector register holds 8 sublanes of 128 lanes of 32 bits.
SUBLANES = 8
LANES = 128


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def round_up(size: int, multiple: int) -> int:
    """The least multiple of `multiple` that is at least `size`."""
    return ceil_div(size, multiple) * multiple


def largest_divisor(size: int, at_most: int) -> int:
    """The largest divisor of `size` up to `at_most`; at least 1."""
    return max(d for d in range(1, max(1, min(size, at_most)) + 1) if size % d == 0)


def padded_bytes(shape: tuple[int, ...], itemsize: int) -> int:
    """Bytes of an array in TPU vector memory, its last two dimensions tiled."""
    *major, rows, lanes = (1, 1, *shape)
    packing = 4 // itemsize
    rows = round_up(rows, SUBLANES * packing)
    return math.prod(major) * rows * round_up(lanes, LANES) * itemsize
