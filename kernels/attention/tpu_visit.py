"""Which keys of a block a TPU kernel looks at, and which of them need no mask."""

import functools
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ..tiling import LANES
from .ranges import all_seen, may_meet
from .tpu_plan import Inputs, Plan

# Strips of a block of keys that are unrolled where their number is not known before
# the kernel runs; a power of two.
_STRETCH = 4


def visit(
    plan: Plan, inputs: Inputs, place, run: Callable, queries_end: bool = False
) -> None:
    """Calls `run(keys, partial)` for all keys that any query of the block may see.

    `keys` is a slice of the block. The strips at its start that every query sees whole
    are run first, unrolled in stretches. What is left goes by pieces, `partial`, in a
    loop.

    `queries_end` says that rows behind the last query count too, as they do where the
    sum is over queries.
    """

    def run_strips(first, count):
        for strip in range(count):
            start = (first + strip) * plan.strip
            if not isinstance(start, int):
                start = pl.multiple_of(start, LANES)
            run(pl.ds(start, plan.strip), partial=False)

    leading = _leading(plan, inputs, place, queries_end)
    if all(x is True for x in leading):
        done = len(leading)
        run_strips(0, done)
        if done == plan.strips:
            return
    else:
        done = sum(1 if x is True else x.astype(jnp.int32) for x in leading)
        _run_leading(done, len(leading), run_strips)
    each = plan.strip // plan.piece

    def run_piece(piece, _):
        keys = pl.ds(pl.multiple_of(piece * plan.piece, LANES), plan.piece)
        sees_any = _sees_any(plan, inputs, place, piece)
        when(sees_any, lambda: run(keys, partial=True))

    lax.fori_loop(done * each, plan.pieces, run_piece, None)


def sees_whole_blocks(plan: Plan) -> bool:
    """Whether it is known that `visit` runs all strips of each block, with no mask."""
    spec = plan.spec
    return not (_data_decides(plan) or spec.q_len % plan.block[0]) and spec.band.full


def _data_decides(plan):
    """Whether what is seen depends on data, or on the end of the keys."""
    spec = plan.spec
    return bool(
        spec.bias_shape is not None
        or spec.mask_shape is not None
        or spec.ids
        or spec.positions
        or spec.kv_len % plan.block[1]
    )


def _leading(plan, inputs, place, queries_end):
    """For each strip, whether it and all before it are seen by every query.

    The strips of which it is known before the kernel runs that they are not, are not in
    the list.
    """
    whole, leading = True, []
    if queries_end and plan.spec.q_len % plan.block[0]:
        whole = place[2] < plan.spec.q_len // plan.block[0]
    each = plan.strip // plan.piece
    for piece in range(plan.pieces):
        whole = whole & _sees_all(plan, inputs, place, piece)
        if whole is False:
            break
        if piece % each == each - 1:
            leading.append(whole)
    return leading


def _stretch(most):
    """How many strips are unrolled where at most so many are run."""
    return min(_STRETCH, 2 ** (most.bit_length() - 1))


def _run_leading(done, most: int, run: Callable) -> None:
    """Calls `run(first strip, count)` for strips 0 to `done`, of which are `most`.

    By stretches, and what is left by its binary digits: a stretch for each possible
    number of strips would be so much code that the kernel waited for its instructions.
    """
    stretch = _stretch(most)
    whole = lax.div(done, stretch)
    lax.fori_loop(0, whole, lambda i, _: run(i * stretch, stretch), None)
    first = whole * stretch
    while stretch := stretch // 2:
        some = (done & stretch) != 0
        when(some, functools.partial(run, first, stretch))
        first = first + jnp.where(some, stretch, 0)


def when(condition, run: Callable) -> None:
    """`pl.when`, also for what is known before the kernel runs."""
    if isinstance(condition, bool):
        if condition:
            run()
    else:
        pl.when(condition)(run)


def _sees_any(plan, inputs, place, piece):
    """Whether any query of the block may see any key of a piece."""
    spec, corner = plan.spec, _corner(plan, place, piece)
    result = corner[2] < spec.kv_len
    if not spec.positions:
        result = result & spec.band.meets(*corner)
    if spec.ids or spec.positions:
        result = result & may_meet(spec, *_ranges(inputs, piece))
    return result


def _sees_all(plan, inputs, place, piece):
    """Whether every query of the block sees every key of a piece."""
    spec, corner = plan.spec, _corner(plan, place, piece)
    if spec.bias_shape is not None or spec.mask_shape is not None:
        return False
    result = True
    if spec.kv_len % plan.block[1]:
        result = corner[2] + plan.piece <= spec.kv_len
    if not spec.positions:
        result = result & spec.band.covers(*corner)
    if spec.ids or spec.positions:
        result = result & all_seen(spec, *_ranges(inputs, piece))
    return result


def _corner(plan, place, piece):
    """First query, number of queries, first key, number of keys."""
    (bq, bk), (_, _, i, j) = plan.block, place
    return i * bq, bq, j * bk + piece * plan.piece, plan.piece


def _ranges(inputs, piece):
    q, kv = inputs.q_ranges, inputs.kv_ranges
    return (
        [q[0, column] for column in range(q.shape[1])],
        [kv[piece, column] for column in range(kv.shape[1])],
    )
