"""How one pass of attention is cut into blocks on a GPU, and which blocks it visits.

A program of the grid keeps one block of queries (or keys) in registers and walks over
the blocks of keys (or queries). Triton's blocks have sizes that are powers of two, so
heads of other sizes are filled up with zeros as they are loaded.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from ..tiling import result_type
from . import gpu_device
from .cost import cost
from .ranges import block_ranges, may_meet
from .spec import AttentionSpec, Extra

# The least that Triton multiplies.
_LEAST = 16

# Bytes of shared memory through which a kernel loads and reduces numbers of rows.
_SCRATCH = 2048

# Queries and keys of a block, warps, and stages of the pipeline that loads ahead, of
# each kernel by the features of a head: as large as the registers of an A100 allow.
# What ptxas spills of them is in benchmarks/aot_baseline.json.
_HALF = {
    "fwd": {64: (128, 64, 4, 3), 128: (128, 64, 8, 3), 256: (64, 32, 8, 2)},
    "fwd in part": {64: (128, 32, 4, 3), 128: (128, 32, 8, 3), 256: (64, 32, 8, 2)},
    "dq": {64: (64, 32, 4, 2), 128: (64, 64, 8, 2), 256: (64, 32, 8, 2)},
    "dkv": {64: (64, 32, 4, 2), 128: (64, 64, 8, 2), 256: (32, 32, 8, 2)},
    "dbias": {64: (64, 64, 8, 2), 128: (64, 64, 8, 2), 256: (32, 32, 8, 2)},
}
# Operands take twice the registers.
_SINGLE = {
    "fwd": {64: (128, 64, 8, 3), 128: (64, 32, 8, 2), 256: (32, 32, 8, 2)},
    "fwd in part": {64: (128, 32, 8, 3), 128: (64, 16, 8, 2), 256: (32, 32, 8, 2)},
    "dq": {64: (64, 32, 8, 2), 128: (64, 16, 8, 2), 256: (32, 32, 8, 1)},
    "dkv": {64: (32, 32, 8, 2), 128: (32, 16, 8, 2), 256: (16, 16, 8, 1)},
    "dbias": {64: (64, 64, 8, 2), 128: (32, 32, 8, 2), 256: (16, 16, 8, 2)},
}
# So do those that are split into parts, or that the ordinary units multiply.
_SPLIT = lax.Precision.HIGH, lax.Precision.HIGHEST
_EXACT = {
    "fwd": {64: (32, 32, 8, 2), 128: (32, 16, 8, 2), 256: (16, 16, 8, 1)},
    "fwd in part": {64: (32, 32, 8, 2), 128: (32, 16, 8, 2), 256: (16, 16, 8, 1)},
    "dq": {64: (32, 32, 8, 2), 128: (32, 16, 8, 1), 256: (16, 16, 8, 1)},
    "dkv": {64: (32, 32, 8, 2), 128: (16, 32, 8, 1), 256: (16, 16, 8, 1)},
    "dbias": {64: (32, 32, 8, 2), 128: (16, 32, 8, 2), 256: (16, 16, 8, 1)},
}


@dataclass(frozen=True)
class Plan:
    """The blocks of one pass."""

    spec: AttentionSpec
    block: tuple[int, int]  # queries, keys
    warps: int
    stages: int
    interpret: bool

    @classmethod
    def of(
        cls,
        spec: AttentionSpec,
        kernel: str,
        interpret: bool,
        block: tuple[int, int] | None = None,
    ) -> "Plan":
        """The plan of "fwd", "dq", "dkv" or "dbias", with given blocks or its own."""
        hiding = spec.bias_shape, spec.mask_shape
        if kernel == "fwd" and (not spec.band.full or any(hiding)):
            kernel = "fwd in part"  # with masks it takes more registers
        features = padded(max(spec.qk_dim, spec.v_dim))
        *limit, warps, stages = _blocks(spec)[kernel][max(64, features)]
        if block is None:
            block = tuple(
                min(most, padded(length))
                for most, length in zip(limit, (spec.q_len, spec.kv_len), strict=True)
            )
        plan = cls(spec, block, warps, stages, interpret)
        return plan if interpret else plan.shrunk(kernel, gpu_device.shared_memory())

    def shrunk(self, kernel: str, most: int) -> "Plan":
        """Fewer stages, then smaller blocks, until no more shared memory is taken.

        The gradient of a bias, which loads all that it multiplies anew for each block,
        spills with one stage: its blocks shrink first.
        """
        plan = self
        while plan.shared_memory(kernel) > most:
            divisible = max(plan.block) > _LEAST
            if plan.stages > 1 and not (kernel == "dbias" and divisible):
                plan = replace(plan, stages=plan.stages - 1)
            elif divisible:
                largest = plan.block.index(max(plan.block))
                halved = (
                    n // 2 if axis == largest else n
                    for axis, n in enumerate(plan.block)
                )
                plan = replace(plan, block=tuple(halved))
            else:
                break
        return plan

    def shared_memory(self, kernel: str) -> int:
        """About the bytes of shared memory that Triton takes for a kernel.

        They hold the block that stays, and of what is walked over a block a stage.
        Operands that are split take up to half as much again, of blocks so small that
        they fit everywhere.
        """
        spec, (bq, bk) = self.spec, self.block
        q, v = (padded(n) * spec.dtype.itemsize for n in (spec.qk_dim, spec.v_dim))
        stay, walk = {
            "dq": (bq * (q + v), bk * (q + v)),
            "dkv": (bk * (q + v), bq * (q + v)),
            "dbias": (0, (bq + bk) * (q + v)),
        }.get(kernel, (bq * q, bk * (q + v)))
        for shape, itemsize in ((spec.bias_shape, 4), (spec.mask_shape, 1)):
            if shape is not None and shape[2] > 1 and shape[3] > 1:
                walk += bq * bk * itemsize
        return stay + self.stages * walk + _SCRATCH

    @property
    def count(self) -> tuple[int, int]:
        return (
            pl.cdiv(self.spec.q_len, self.block[0]),
            pl.cdiv(self.spec.kv_len, self.block[1]),
        )

    @property
    def data_bound(self) -> bool:
        """Whether ids or positions tell which blocks are visited."""
        return self.spec.ids or self.spec.positions

    def bounds(self, axis: int, extra: Extra) -> tuple[jax.Array, ...]:
        """(B, blocks, 2), int32: the first block along `axis` and the one after the
        last that each block of the other axis may meet. Nothing if no data tells."""
        if not self.data_bound:
            return ()
        q = block_ranges(extra.q_ids, extra.q_positions, self.block[0])[:, :, None]
        kv = block_ranges(extra.kv_ids, extra.kv_positions, self.block[1])[:, None]
        live = may_meet(self.spec, jnp.unstack(q, axis=-1), jnp.unstack(kv, axis=-1))
        live = live if axis == 1 else live.swapaxes(1, 2)
        start, behind = (
            jnp.argmax(x, axis=-1).astype(jnp.int32) for x in (live, live[..., ::-1])
        )
        end = jnp.where(live.any(-1), live.shape[-1] - behind, start)
        return (jnp.stack([start, end], axis=-1),)

    def take(self, refs: tuple, bounded: bool = True) -> tuple[Extra, object, tuple]:
        """References to the operands of `Extra`, to the bounds or None, the others.

        `refs` are those behind the arrays that every call of the kernel has.

        Args:
          bounded: whether the kernel was given `bounds`.
        """
        rest = iter(refs)
        inputs = self.spec.split(rest)
        bounds = next(rest) if self.data_bound and bounded else None
        return inputs, bounds, tuple(rest)

    def walk(self, axis: int, b, at, bounds, visit: Callable, total):
        """Folds `visit(index, partial, total)` over the blocks along an axis that are
        not empty beside block `at` of the other: partial, full, partial.

        Args:
          b: the batch.
          bounds: a reference to what `bounds` gave, or None.
        """
        if bounds is not None:
            bounds = bounds[b, at, 0], bounds[b, at, 1]
        for start, end, partial in self._phases(axis, at, bounds):
            known = isinstance(start, int) and isinstance(end, int)
            if known and start >= end:
                continue
            total = lax.fori_loop(
                *(np.int32(x) if isinstance(x, int) else x for x in (start, end)),
                lambda index, total, partial=partial: visit(index, partial, total),
                total,
            )
        return total

    def _phases(self, axis, at, bounds):
        spec, across, along = self.spec, self.block[1 - axis], self.block[axis]
        start, end = 0, self.count[axis]
        # A block that ends behind the array is a partial one.
        full_start, full_end = 0, (spec.q_len, spec.kv_len)[axis] // along
        band = spec.band if axis == 1 else spec.band.transposed
        first, last = at * across, at * across + (across - 1)
        # Where positions are data, so is what the band shows.
        if not spec.positions:
            if band.upper is not None:
                end = jnp.minimum(end, pl.cdiv(_positive(last + band.upper + 1), along))
                most = lax.div(_positive(first + band.upper + 1), along)
                full_end = jnp.minimum(full_end, most)
            if band.lower is not None:
                start = lax.div(_positive(first + band.lower), along)
                full_start = pl.cdiv(_positive(last + band.lower), along)
        if bounds is not None:
            start, end = jnp.maximum(start, bounds[0]), jnp.minimum(end, bounds[1])
        hidden = spec.bias_shape, spec.mask_shape
        if self.data_bound or any(shape is not None for shape in hidden):
            return [(start, end, True)]
        full_start = _clip(full_start, start, end)
        full_end = _clip(full_end, full_start, end)
        return [
            (start, full_start, True),
            (full_start, full_end, False),
            (full_end, end, True),
        ]

    def call(
        self,
        kernel: Callable,
        name: str,
        grid: Sequence[int],
        arrays: Sequence[jax.Array],
        outs: Sequence[tuple[tuple[int, ...], np.dtype]],
        products: int,
    ):
        """`pallas_call` on whole arrays, of which the kernel takes its blocks.

        Args:
          arrays: the operands. Those of four axes, and only these, have features.
          outs: shape and dtype of each result.
          products: how many matrix products a score takes part in.
        """
        results = [result_type(*out) for out in outs]
        return pl.pallas_call(
            kernel,
            grid=tuple(grid),
            in_specs=[_whole(x.shape) for x in arrays],
            out_specs=[_whole(x.shape) for x in results],
            out_shape=results,
            compiler_params=plgpu.CompilerParams(
                num_warps=self.warps, num_stages=self.stages
            ),
            cost_estimate=cost(self.spec, products, (*arrays, *results)),
            interpret=self.interpret,
            name=name,
        )(*arrays)


def _blocks(spec):
    if spec.dtype != jnp.float32:
        return _HALF
    return _EXACT if spec.precision in _SPLIT else _SINGLE


def padded(size: int) -> int:
    """The least size of a block that holds `size`."""
    return max(_LEAST, pl.next_power_of_2(size))


def _whole(shape):
    """A block that is all of an array, its features padded to what Triton takes.

    Bias and mask come with three axes, (b n, t, s), so that four tell of features.
    """
    if len(shape) == 4:
        shape = (*shape[:3], padded(shape[3]))
    return pl.BlockSpec(shape, lambda *_: (0,) * len(shape))


def _positive(x):
    return jnp.maximum(x, 0)


def _clip(x, low, high):
    if all(isinstance(n, int) for n in (x, low, high)):
        return min(max(x, low), high)
    return jnp.clip(x, low, high)
