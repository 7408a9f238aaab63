"""Which keys of a block a TPU kernel looks at, and which of them need no mask."""

import functools
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ..tiling import LANES
from .ranges import all_seen, may_meet
from .tpu_plan import Inputs, Plan


def visit(
    plan: Plan, inputs: Inputs, place, run: Callable, queries_end: bool = False
) -> None:
    """Calls `run(keys, partial)` for all keys that any query of the block may see.

    `keys` is a slice of the block. The strips at its start that every query sees whole
    are run first, in one unrolled stretch. What is left goes by pieces, `partial`, in a
    loop.

    `queries_end` says that rows behind the last query count too, as they do where the
    sum is over queries.
    """
    whole, leading = True, []
    if queries_end and plan.spec.q_len % plan.block[0]:
        whole = place[2] < plan.spec.q_len // plan.block[0]
    each = plan.strip // plan.piece
    for strip in range(plan.strips):
        for piece in range(strip * each, (strip + 1) * each):
            whole = whole & _sees_all(plan, inputs, place, piece)
        if whole is False:
            break
        leading.append(whole)

    def run_strips(count):
        for strip in range(count):
            run(pl.ds(strip * plan.strip, plan.strip), partial=False)

    if len(leading) == plan.strips and leading[-1] is True:
        run_strips(plan.strips)
        return
    done = sum(1 if x is True else x.astype(jnp.int32) for x in leading)
    for count in range(1, len(leading) + 1):
        when(done == count, functools.partial(run_strips, count))

    def run_piece(piece, _):
        keys = pl.ds(pl.multiple_of(piece * plan.piece, LANES), plan.piece)
        sees_any = _sees_any(plan, inputs, place, piece)
        when(sees_any, lambda: run(keys, partial=True))

    lax.fori_loop(done * each, plan.pieces, run_piece, None)


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
