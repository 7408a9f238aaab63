"""The TPU kernel of the gradient of a bias: dscores, summed as the bias was broadcast.

It makes the scores anew: what it sums over differs from what the other gradients do.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..tiling import result_type
from .cost import cost
from .spec import weights
from .tpu_backward import Arrays, array_specs
from .tpu_plan import Inputs, Plan, compiler_params
from .tpu_tile import Tile, column, finite, scaled
from .tpu_visit import visit, when


def bias_gradient(plan: Plan, arrays: Arrays, inputs: Inputs) -> jax.Array:
    """dbias, of the shape and dtype of `inputs.bias`.

    The axes over which it is summed come last in the grid, whichever they are.
    """
    spec, bias = plan.spec, inputs.bias
    sizes = spec.batch, spec.heads, *plan.count
    kept = [axis for axis in range(4) if bias.shape[axis] != 1]
    summed = [axis for axis in range(4) if bias.shape[axis] == 1]
    order = (*kept, *summed)

    def place(*grid):
        return tuple(grid[order.index(axis)] for axis in range(4))

    specs = [*array_specs(plan, place), *plan.input_specs(inputs, place)]
    out_spec = plan.input_specs(Inputs(bias=bias), place)[0]
    return pl.pallas_call(
        functools.partial(_kernel, plan, inputs, place, len(kept)),
        grid=tuple(sizes[axis] for axis in order),
        in_specs=specs,
        out_specs=out_spec,
        out_shape=result_type(bias.shape, bias.dtype),
        scratch_shapes=[pltpu.VMEM(out_spec.block_shape[2:], jnp.float32)],
        compiler_params=compiler_params(len(kept), len(summed)),
        cost_estimate=cost(spec, products=2, arrays=(*arrays, *inputs.present, bias)),
        interpret=plan.interpret,
        name="attention_bwd_dbias",
    )(*arrays, *inputs.present)


def _kernel(
    plan,
    inputs,
    place,
    kept,
    q_ref,
    k_ref,
    v_ref,
    dout_ref,
    lse_ref,
    delta_ref,
    *refs,
):
    inputs, (dbias_ref, acc_scr) = inputs.take(refs)
    grid = tuple(map(pl.program_id, range(4)))
    first = last = True
    for axis in range(kept, 4):
        first = first & (grid[axis] == 0)
        last = last & (grid[axis] == pl.num_programs(axis) - 1)

    def start():
        acc_scr[...] = jnp.zeros_like(acc_scr)

    def run(keys, partial):
        del partial  # everything is, where there is a bias
        tile = Tile(plan, inputs, place(*grid), keys)
        k, v = finite(k_ref[keys]), finite(v_ref[keys])
        s, _ = tile.scores(scaled(plan.spec, q_ref[...]), k)
        s, seen = tile.with_bias(s)
        p = weights(plan.spec, s, column(lse_ref[...]))
        dp = tile.dropped(tile.dot(dout_ref[...], v, (1, 1)), scaled=True)
        ds = jnp.where(seen, p * (dp - column(delta_ref[...])), 0.0)
        for axis, size in enumerate(inputs.bias.shape):
            if size == 1:
                ds = jnp.sum(ds, axis=axis, keepdims=True)
        which = keys if acc_scr.shape[1] != 1 else slice(None)
        acc_scr[:, which] += ds

    def finish():
        dbias_ref[...] = acc_scr[...].astype(dbias_ref.dtype)

    when(first, start)
    visit(plan, inputs, place(*grid), run)
    when(last, finish)
