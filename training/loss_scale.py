"""Loss scaling: keep small gradients of half precision above zero.

The loss is multiplied by a scale before it is differentiated, the gradients divided by
it afterwards. A scale is a power of two, so that both are exact. `DynamicLossScale`
raises it while gradients stay finite and lowers it when they overflow (Micikevicius et
al., Mixed Precision Training, 2018, section 3.2).

A configuration is a frozen, hashable object; what changes is a `LossScaleState`, to be
carried beside the parameters. All functions are pure and run under jit:

    state = config.init()
    grads = jax.grad(lambda p: config.scale(state, loss(p)))(params)
    finite = all_finite(grads)
    grads = config.unscale(state, grads)   # with the scale that was used ...
    finite &= all_finite(grads)
    params = select(finite, updated, params)
    state = config.adjust(state, finite)   # ... which changes last
"""

import abc
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from .leaves import PyTree, is_float

# 1/scale must be a normal fp32 number too: XLA flushes subnormal ones to zero.
_SMALLEST, _LARGEST = 2.0**-126, 2.0**126


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LossScaleState:
    """What a loss scale carries from step to step. Scalars, strongly typed.

    Attributes:
      scale: fp32, the factor of the next step's loss.
      growth_count: int32, clean steps since the last growth or overflow.
      hysteresis_left: int32, overflows until one lowers the scale.
      consecutive_skips: int32, skipped steps since the last clean one.
      total_skips: int32.
    """

    scale: jax.Array
    growth_count: jax.Array
    hysteresis_left: jax.Array
    consecutive_skips: jax.Array
    total_skips: jax.Array


class LossScale(abc.ABC):
    """What the three kinds of loss scale have in common."""

    @abc.abstractmethod
    def init(self) -> LossScaleState:
        """The state before the first step."""

    @abc.abstractmethod
    def adjust(self, state: LossScaleState, finite: jax.Array) -> LossScaleState:
        """The state after a step whose gradients were all finite, or were not."""

    def scale(self, state: LossScaleState, loss: jax.Array) -> jax.Array:
        """The scaled loss. Always fp32: in fp16 a loss of 3 times 2**15 is inf."""
        return state.scale * jnp.asarray(loss).astype(jnp.float32)

    def unscale(self, state: LossScaleState, grads: PyTree) -> PyTree:
        """The gradients of the loss itself, in fp32. Other leaves pass untouched."""
        inverse = 1.0 / state.scale

        def divide(g):
            return g.astype(jnp.float32) * inverse if is_float(g) else g

        return jax.tree.map(divide, grads)


@dataclass(frozen=True)
class NoLossScale(LossScale):
    """No scaling, for fp32 and bf16. Steps with non-finite gradients still count."""

    def init(self) -> LossScaleState:
        return _state(1.0)

    def adjust(self, state: LossScaleState, finite: jax.Array) -> LossScaleState:
        return _counted(state, jnp.asarray(finite))


@dataclass(frozen=True)
class StaticLossScale(LossScale):
    """One scale for the whole run. `value` is a power of two."""

    value: float

    def __post_init__(self):
        _to_powers_of_two(self, "value")

    def init(self) -> LossScaleState:
        return _state(self.value)

    def adjust(self, state: LossScaleState, finite: jax.Array) -> LossScaleState:
        return _counted(state, jnp.asarray(finite))


@dataclass(frozen=True)
class DynamicLossScale(LossScale):
    """A scale that grows while all is finite and backs off when something overflows.

    With hysteresis 1 it takes the values of torch, apex, jmp and keras; 2 gives those
    of Megatron, and of DeepSpeed with either value of `consecutive_hysteresis`.

    Attributes:
      initial: the first scale. 2**15 is the largest power of two in fp16.
      growth: the factor after `growth_interval` clean steps in a row.
      backoff: the factor after an overflow.
      growth_interval: how many clean steps; the count begins anew after a growth and
        after an overflow.
      min: the scale never falls below. May be less than 1.
      max: the scale never rises above.
      hysteresis: how many overflows it takes until one lowers the scale; once used up
        every overflow does, until a growth refills it.
      consecutive_hysteresis: any clean step refills the hysteresis.

    Raises:
      ValueError: for a scale or factor that is no power of two, bounds that do not
        enclose the initial scale, or an interval or hysteresis that is no integer from
        1 to 2**31 - 1.
    """

    initial: float = 2.0**15
    growth: float = 2.0
    backoff: float = 0.5
    growth_interval: int = 2000
    min: float = 1.0
    max: float = 2.0**24
    hysteresis: int = 1
    consecutive_hysteresis: bool = False

    def __post_init__(self):
        _to_powers_of_two(self, "initial", "growth", "backoff", "min", "max")
        if not self.min <= self.initial <= self.max:
            raise ValueError(
                f"DynamicLossScale: expected min <= initial <= max; got {self.min:g}, "
                f"{self.initial:g}, {self.max:g}."
            )
        if self.growth < 1 or self.backoff >= 1:
            raise ValueError(
                "DynamicLossScale: growth must be at least 1 and backoff below 1; "
                f"got growth={self.growth:g}, backoff={self.backoff:g}."
            )
        for name in ("growth_interval", "hysteresis"):
            given = getattr(self, name)
            # They are compared with int32 counters.
            if not (isinstance(given, int | np.integer) and 1 <= given < 2**31):
                raise ValueError(
                    f"DynamicLossScale: {name} must be an integer from 1 to 2**31 - 1; "
                    f"got {given}."
                )

    def init(self) -> LossScaleState:
        return _state(self.initial, self.hysteresis)

    def adjust(self, state: LossScaleState, finite: jax.Array) -> LossScaleState:
        finite = jnp.asarray(finite)
        count = jnp.where(finite, state.growth_count + 1, 0)
        grow = count >= self.growth_interval
        # The two bounds also keep the scale a finite fp32 number that can come back.
        raised = jnp.minimum(state.scale * self.growth, self.max)
        lowered = jnp.maximum(state.scale * self.backoff, self.min)
        back_off = ~finite & (state.hysteresis_left <= 1)
        refill = grow | finite if self.consecutive_hysteresis else grow
        left = jnp.where(finite, state.hysteresis_left, state.hysteresis_left - 1)
        left = jnp.where(refill, self.hysteresis, jnp.maximum(left, 1))
        counted = _counted(state, finite)
        return LossScaleState(
            scale=jnp.where(grow, raised, jnp.where(back_off, lowered, state.scale)),
            growth_count=jnp.where(grow, 0, count),
            hysteresis_left=left,
            consecutive_skips=counted.consecutive_skips,
            total_skips=counted.total_skips,
        )


def _state(scale: float, hysteresis: int = 1) -> LossScaleState:
    # Strong dtypes: a weakly typed scalar would have the step traced a second time.
    return LossScaleState(
        scale=jnp.asarray(scale, jnp.float32),
        growth_count=jnp.asarray(0, jnp.int32),
        hysteresis_left=jnp.asarray(hysteresis, jnp.int32),
        consecutive_skips=jnp.asarray(0, jnp.int32),
        total_skips=jnp.asarray(0, jnp.int32),
    )


def _counted(state: LossScaleState, finite: jax.Array) -> LossScaleState:
    return LossScaleState(
        scale=state.scale,
        growth_count=state.growth_count,
        hysteresis_left=state.hysteresis_left,
        consecutive_skips=jnp.where(finite, 0, state.consecutive_skips + 1),
        total_skips=jnp.where(finite, state.total_skips, state.total_skips + 1),
    )


def _to_powers_of_two(config: LossScale, *names: str) -> None:
    for name in names:
        value = float(getattr(config, name))
        if not (_SMALLEST <= value <= _LARGEST and math.frexp(value)[0] == 0.5):
            raise ValueError(
                f"{type(config).__name__}: {name} must be a power of two from 2**-126 "
                f"to 2**126, so that scaling is exact; got {value:g}."
            )
        # A half-precision scalar or a Python int given by the user becomes a float.
        object.__setattr__(config, name, value)
