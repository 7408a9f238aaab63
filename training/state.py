"""Everything a training run carries from step to step."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .compression import Compression
from .leaves import (
    PyTree,
    cast_like,
    float_leaves,
    merge,
    of_same_types,
    owned_copy,
)
from .loss_scale import LossScale, LossScaleState
from .policy import Policy


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """The state of a run, a pytree.

    Attributes:
      params: the master weights, in `policy.params` (fp32). Half-precision weights are
        only ever derived from them. Leaves that are not floating are never updated.
      opt_state: of the optimizer, made for the floating leaves of `params`.
      model_state: what the model carries besides, such as batch statistics, or `()`.
      loss_scale: see `opsnn_jax.training.loss_scale`.
      rng: the key of the run. It never changes: each step folds in its number.
      step: int32, updates made; schedules follow it.
      attempted_steps: int32, updates made and skipped.
      ema: fp32 moving average of the floating leaves of `params`, or None.
      residual: what each worker has not sent yet, see `opsnn_jax.training.compression`,
        (workers, ...) fp32 for each floating leaf of `params`, or None.
    """

    params: PyTree
    opt_state: optax.OptState
    model_state: PyTree
    loss_scale: LossScaleState
    rng: jax.Array
    step: jax.Array
    attempted_steps: jax.Array
    ema: PyTree = None
    residual: PyTree = None

    @classmethod
    def create(
        cls,
        params: PyTree,
        optimizer: optax.GradientTransformation,
        *,
        policy: Policy,
        loss_scale: LossScale | None = None,
        model_state: PyTree = (),
        rng: jax.Array | int = 0,
        ema: bool = False,
        compression: Compression | None = None,
        workers: int = 1,
    ) -> "TrainState":
        """The state before the first step.

        Nothing that is given is shared: the state holds copies, so that its buffers can
        be donated and the caller's arrays live on.

        Args:
          params: any pytree: of flax linen, `nnx.split`, or plain dicts. Leaves may
            also be integers, keys or None.
          optimizer: an optax transformation, the same as the step's.
          policy: floating leaves of `params` are cast to `policy.params`.
          loss_scale: the same as the step's; None for `policy.default_loss_scale()`.
          model_state: batch statistics and the like, kept in their own dtypes.
          rng: a key, or an integer, the seed of one.
          ema: whether a moving average of the parameters is kept.
          compression: the same as the step's.
          workers: with compression, the size of the axes that batches are split over.

        Raises:
          TypeError: for a complex parameter: which dtype it computes in is undefined.
        """
        for leaf in jax.tree.leaves(params):
            if jnp.issubdtype(getattr(leaf, "dtype", None), jnp.complexfloating):
                raise TypeError(
                    "TrainState.create: parameters must be real; got a leaf of dtype "
                    f"{leaf.dtype}. Hold its real and imaginary parts instead."
                )
        params = policy.cast_to_params(owned_copy(params))
        loss_scale = loss_scale or policy.default_loss_scale()
        floats = float_leaves(params)
        # optax mixes integers and floats, which strict promotion forbids.
        with jax.numpy_dtype_promotion("standard"):
            opt_state = owned_copy(optimizer.init(floats))
        is_seed = isinstance(rng, int | np.integer)
        return cls(
            params=params,
            opt_state=opt_state,
            model_state=owned_copy(model_state),
            loss_scale=loss_scale.init(),
            rng=jax.random.key(rng) if is_seed else owned_copy(rng),
            step=jnp.asarray(0, jnp.int32),
            attempted_steps=jnp.asarray(0, jnp.int32),
            ema=owned_copy(_to_float32(floats)) if ema else None,
            residual=compression.init(params, workers) if compression else None,
        )

    def with_params(self, params: PyTree) -> "TrainState":
        """The state with other parameters, loaded ones say, from which it goes on.

        They become the master weights, in their dtypes, and the average begins with
        them. The optimizer's state stays.

        Raises:
          TypeError: if they differ from those before in structure or a shape.
        """
        params = of_same_types(cast_like(owned_copy(params), self.params), self.params)
        ema = self.ema
        if ema is not None:
            ema = owned_copy(_to_float32(float_leaves(params)))
        return replace(self, params=params, ema=ema)

    def with_loss_scale(self, loss_scale: LossScale) -> "TrainState":
        """The state with a loss scale that begins anew; counts of skips go on.

        For a run that changes its precision or scale midway, along with its step.
        """
        counts = {
            name: getattr(self.loss_scale, name)
            for name in ("consecutive_skips", "total_skips")
        }
        return replace(self, loss_scale=replace(loss_scale.init(), **counts))

    @property
    def eval_params(self) -> PyTree:
        """The parameters to evaluate with: the moving average where one is kept."""
        if self.ema is None:
            return self.params
        averaged = jax.tree.map(
            lambda e, p: e.astype(p.dtype), self.ema, float_leaves(self.params)
        )
        return merge(averaged, self.params)


def _to_float32(tree: PyTree) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)
