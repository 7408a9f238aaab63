"""One block of scores inside of a GPU kernel.

The scores are in units of log 2: the factor of the softmax's exponent is folded into
that of the scores, and exp2 is the GPU's own instruction.

A full tile lies inside of the arrays and every query of it sees every key. What is
loaded for a partial one has zeros behind the ends of the arrays.
"""

import functools
import operator

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from .dropout import keep
from .gpu_plan import Plan
from .spec import LOG2_E, Extra, in_log2


class Tile:
    """The scores of one block of queries and one of keys, or those transposed."""

    def __init__(
        self,
        plan: Plan,
        inputs: Extra,
        place,
        partial: bool = True,
        transposed: bool = False,
    ):
        """Makes the tile at `place`: batch, query head, block of queries and of keys.

        Args:
          inputs: references to the operands of `Extra`; bias and mask as (b n, t, s).
        """
        self.plan, self.spec, self.inputs = plan, plan.spec, inputs
        self.place, self.partial, self.transposed = place, partial, transposed

    def queries(self, ref, features: int):
        """Its queries in an array (B, T, N, features)."""
        b, n, _, _ = self.place
        return self._rows(ref, b, n, features, axis=0)

    def keys(self, ref, features: int):
        """Its keys in an array (B, S, K, features)."""
        b, n, _, _ = self.place
        return self._rows(ref, b, lax.div(n, self.spec.group), features, axis=1)

    def stats(self, ref):
        """Numbers of its queries in an array (B, N, T), to go with `scores`."""
        b, n, _, _ = self.place
        return self._along(self._load(ref.at[b, n, self._slice(0)], 0), 0)

    def products(self, q, k):
        """Products of queries and keys, of which the scores are made."""
        return self.dot(k, q, (1, 1)) if self.transposed else self.dot(q, k, (1, 1))

    def scores(self, product):
        """Scores with their bias, and their slope by the products (None if it is 1)."""
        cap = self.spec.softcap
        if cap is None:
            s, slope = product * (self.spec.scale * LOG2_E), None
        else:
            t = jnp.tanh(product * (self.spec.scale / cap))
            s, slope = t * (cap * LOG2_E), 1.0 - t * t
        if self._bias is not None:
            # Triton's maximum and minimum are the number where there is a NaN.
            bias = in_log2(self._bias)
            s = s + jnp.where(jnp.isnan(self._bias), self._bias, bias)
        return s, slope

    def seen(self):
        """Which scores count."""
        spec, inputs = self.spec, self.inputs
        row, col = (self._along(self._indices(axis), axis) for axis in (0, 1))
        if spec.positions:
            row, col = self._of_both(inputs.q_positions, inputs.kv_positions)
        seen = spec.band.visible(row, col)
        # Behind the last query, too, nothing is seen: a key that is NaN would be.
        for axis in (0, 1):
            if (inside := self._inside(axis)) is not None:
                seen = seen & self._along(inside, axis)
        if spec.ids:
            q_ids, kv_ids = self._of_both(inputs.q_ids, inputs.kv_ids)
            seen = seen & (q_ids == kv_ids)
        if inputs.mask is not None:
            seen = seen & self._operand(inputs.mask, spec.mask_shape)
        if self._bias is not None:
            seen = seen & (self._bias != -jnp.inf)
        return seen

    def dropped(self, p):
        """Dropout of the tile: of its weights, or of their cotangents."""
        if self.inputs.seed is None:
            return p
        b, n, _, _ = self.place
        row, col = (self._along(self._indices(axis), axis) for axis in (0, 1))
        seed = self.inputs.seed[0], self.inputs.seed[1]
        head = b * self.spec.heads + n
        kept = keep(seed, head, row, col, self.spec.dropout_rate)
        return jnp.where(kept, p * self.spec.keep_scale, 0.0)

    def dot(self, a, b, contract):
        dims = (((contract[0],), (contract[1],)), ((), ()))
        precision = self.spec.precision
        if self.spec.dtype != jnp.float32:
            precision = None  # these products are exact
        elif precision == lax.Precision.HIGH and not self.plan.interpret:
            precision = lax.DotAlgorithmPreset.TF32_TF32_F32_X3
        return lax.dot_general(
            a, b, dims, precision=precision, preferred_element_type=jnp.float32
        )

    def store_queries(self, ref, x, features: int):
        """Writes what belongs to its queries, into an array (B, T, N, features)."""
        b, n, _, _ = self.place
        self._store_rows(ref, x, b, n, features, axis=0)

    def store_keys(self, ref, x, features: int):
        """Writes what belongs to its keys, into an array (B, S, K, features)."""
        b, n, _, _ = self.place
        self._store_rows(ref, x, b, lax.div(n, self.spec.group), features, axis=1)

    def store_stats(self, ref, x, axis: int = 0):
        """Writes numbers of its queries, into an array (B, N, T), or of its keys."""
        b, n, _, _ = self.place
        plgpu.store(ref.at[b, n, self._slice(axis)], x, mask=self._inside(axis))

    def store_scores(self, ref, x, head):
        """Writes numbers of its scores, at `head` of an array (b n, T, S)."""
        at = ref.at[head, self._slice(0), self._slice(1)]
        plgpu.store(at, x.astype(ref.dtype), mask=self._pairs_inside((True, True)))

    @functools.cached_property
    def _bias(self):
        """Its part of the bias, float32, or None."""
        if self.inputs.bias is None:
            return None
        bias = self._operand(self.inputs.bias, self.spec.bias_shape)
        return bias.astype(jnp.float32)

    def _slice(self, axis):
        block = self.plan.block[axis]
        return pl.ds(self.place[2 + axis] * block, block)

    def _indices(self, axis):
        block = self.plan.block[axis]
        start = self.place[2 + axis] * block
        return start + lax.broadcasted_iota(jnp.int32, (block,), 0)

    def _inside(self, axis):
        """Which of the indices lie in the arrays, or None if all do."""
        length = (self.spec.q_len, self.spec.kv_len)[axis]
        if not self.partial or length % self.plan.block[axis] == 0:
            return None
        return self._indices(axis) < length

    def _along(self, x, axis):
        """A vector over queries (axis 0) or keys (axis 1) as it lies in `scores`."""
        return x[None, :] if axis != self.transposed else x[:, None]

    def _load(self, ref, axis):
        inside = self._inside(axis)
        if inside is None:
            return plgpu.load(ref)
        return plgpu.load(ref, mask=inside, other=jnp.zeros((), ref.dtype))

    def _rows(self, ref, b, n, features, axis):
        mask = self._features_mask(ref, features, axis)
        at = ref.at[b, self._slice(axis), n, :]
        if mask is None:
            return plgpu.load(at)
        return plgpu.load(at, mask=mask, other=jnp.zeros((), ref.dtype))

    def _store_rows(self, ref, x, b, n, features, axis):
        mask = self._features_mask(ref, features, axis)
        plgpu.store(ref.at[b, self._slice(axis), n, :], x.astype(ref.dtype), mask=mask)

    def _features_mask(self, ref, features, axis):
        """Which elements of a block (positions, features) there are, or None."""
        size = ref.shape[3]
        inside = self._inside(axis)
        mask = None if inside is None else inside[:, None]
        if size != features:
            columns = lax.broadcasted_iota(jnp.int32, (1, size), 1) < features
            mask = columns if mask is None else mask & columns
        shape = self.plan.block[axis], size
        return mask if mask is None else jnp.broadcast_to(mask, shape)

    def _of_both(self, *refs):
        """Numbers of its queries, of an array (B, T), and of its keys."""
        b = self.place[0]
        return (
            self._along(self._load(ref.at[b, self._slice(axis)], axis), axis)
            for axis, ref in enumerate(refs)
        )

    def _operand(self, ref, shape):
        """Its part of a bias or mask of that shape, an array (b n, t, s)."""
        b, n, _, _ = self.place
        # Of an axis that it does not have, it is the one element.
        head = b * (shape[1] if shape[0] > 1 else 0) + n * int(shape[1] > 1)
        varies = shape[2] > 1, shape[3] > 1
        places = (self._slice(x) if varies[x] else pl.ds(0, 1) for x in (0, 1))
        at, inside = ref.at[head, *places], self._pairs_inside(varies)
        if inside is None:
            part = plgpu.load(at)
        else:
            other = jnp.zeros((), ref.dtype)
            part = plgpu.load(at, mask=inside, other=other)
        return part.T if self.transposed else part

    def _pairs_inside(self, varies):
        """Which of its pairs lie in an array of queries and keys, or None if all do.

        Args:
          varies: whether the array has more than one query, and more than one key.
        """
        inside = [
            x[:, None] if axis == 0 else x[None, :]
            for axis in (0, 1)
            if varies[axis] and (x := self._inside(axis)) is not None
        ]
        if not inside:
            return None
        block = zip(self.plan.block, varies, strict=True)
        shape = tuple(size if full else 1 for size, full in block)
        return jnp.broadcast_to(functools.reduce(operator.and_, inside), shape)
