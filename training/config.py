"""What a run can be told: the sections of its YAML file, and what each key may be.

run: {name: mnist, seed: 0, epochs: 8}
data: {name: mnist, batch_size: 100}
model: {name: resnet, widths: [16, 32, 64]}
optimizer: {name: adamw, learning_rate: 0.003}
optimization: {precision: mixed_fp16, loss_scale: {initial: 4096}}
"""

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from .clip import ClipRule
from .loss_scale import DynamicLossScale, LossScale, NoLossScale, StaticLossScale
from .monitor import Monitor
from .policy import Policy


def _true_is_no_number(given: Any) -> Any:
    if isinstance(given, bool):
        raise ValueError("must be a number")
    return given


# Not strict otherwise: YAML reads 1e-3, which has no point, as a word.
Int = Annotated[int, BeforeValidator(_true_is_no_number)]
Float = Annotated[float, BeforeValidator(_true_is_no_number)]
Count = Annotated[Int, Field(gt=0)]
Share = Annotated[Float, Field(ge=0.0, lt=1.0)]
Positive = Annotated[Float, Field(gt=0.0)]


class Section(BaseModel):
    """A part of the configuration. Unknown keys are refused."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=()
    )


class RunConfig(Section):
    """What is run, for how long, and where its results go.

    Attributes:
      report_every: after so many steps metrics are shown and written.
      save_every: after so many steps a checkpoint is saved; null for one at the end.
      keep_last: how many of the newest checkpoints are kept.
      keep_best: how many of those with the lowest training loss are kept besides.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")]
    seed: Annotated[Int, Field(ge=0, lt=2**31)] = 0
    folder: str = "runs"
    epochs: Count | None = None
    steps: Count | None = None
    report_every: Count = 10
    save_every: Count | None = 500
    keep_last: Count = 1
    keep_best: Annotated[Int, Field(ge=0)] = 0

    @model_validator(mode="after")
    def _one_length(self):
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("give one of epochs and steps")
        return self


class MnistConfig(Section):
    """5,000 digits; `shift` moves training images by up to so many pixels."""

    name: Literal["mnist"]
    batch_size: Count = 100
    test_size: Annotated[Int, Field(ge=10, le=4000, multiple_of=10)] = 1000
    shift: Annotated[Int, Field(ge=0, le=8)] = 2


class ManualConfig(Section):
    """The Python manual, by characters."""

    name: Literal["python_manual"]
    batch_size: Count = 32
    sequence_length: Annotated[Int, Field(ge=2)] = 128
    test_share: Annotated[Float, Field(gt=0.0, le=0.5)] = 0.05


class ResNetConfig(Section):
    name: Literal["resnet"]
    widths: Annotated[tuple[Count, ...], Field(min_length=1, max_length=4)] = (
        16,
        32,
        64,
    )
    blocks: Count = 1


class GptConfig(Section):
    name: Literal["gpt"]
    layers: Count = 4
    width: Count = 128
    heads: Count = 4
    dropout: Share = 0.0
    sample_length: Count = 300
    prompt: Annotated[str, Field(min_length=1)] = "The "

    @model_validator(mode="after")
    def _heads_divide(self):
        if self.width % self.heads:
            raise ValueError(f"heads ({self.heads}) must divide width ({self.width})")
        return self


class OptimizerConfig(Section):
    """The optimizer; its rate rises over `warmup_steps`, then follows `schedule`."""

    name: Literal["adamw", "sgd"] = "adamw"
    learning_rate: Positive = 1e-3
    schedule: Literal["constant", "cosine"] = "cosine"
    warmup_steps: Annotated[Int, Field(ge=0)] = 0
    weight_decay: Annotated[Float, Field(ge=0.0)] = 0.0
    momentum: Share = 0.9
    beta2: Share = 0.999


class DynamicConfig(Section):
    """The fields of DynamicLossScale."""

    initial: Float = DynamicLossScale.initial
    growth: Float = DynamicLossScale.growth
    backoff: Float = DynamicLossScale.backoff
    growth_interval: Int = DynamicLossScale.growth_interval
    min: Float = DynamicLossScale.min
    max: Float = DynamicLossScale.max
    hysteresis: Int = DynamicLossScale.hysteresis
    consecutive_hysteresis: bool = DynamicLossScale.consecutive_hysteresis

    @model_validator(mode="after")
    def _valid(self):
        self.build()
        return self

    def build(self) -> LossScale:
        return DynamicLossScale(**self.model_dump())


class ClipRuleConfig(Section):
    """The fields of ClipRule."""

    pattern: str
    max_norm: Float
    rows: bool = False

    @model_validator(mode="after")
    def _valid(self):
        self.build()
        return self

    def build(self) -> ClipRule:
        return ClipRule(**self.model_dump())


class _Scaled(Section):
    """What has a precision and a loss scale."""

    @field_validator("loss_scale", mode="before", check_fields=False)
    @classmethod
    def _one_kind(cls, given: Any):
        # Decided here, so that an error speaks of the kind that was meant.
        if isinstance(given, dict):
            return DynamicConfig(**given)
        if given is None or given in ("auto", "none"):
            return given
        try:
            value = float(_true_is_no_number(given))
        except (TypeError, ValueError):
            raise ValueError(
                "expected 'auto', 'none', a number, or keys of a scale"
            ) from None
        return StaticLossScale(value).value

    @field_validator("precision", check_fields=False)
    @classmethod
    def _known(cls, given: str | None):
        if given is not None:
            Policy.parse(given)
        return given


class PhaseConfig(_Scaled):
    """What changes after `after` attempted steps, until the next phase."""

    after: Count
    precision: str | None = None
    loss_scale: DynamicConfig | float | Literal["auto", "none"] | None = None


class OptimizationConfig(_Scaled):
    """How the step computes.

    Attributes:
      precision: a policy, see `Policy.parse`.
      rules: dtypes of layers whose path has a match of a regular expression.
      loss_scale: the keys of a dynamic scale, a number for a static one, "none", or
        "auto", which is dynamic in fp16 and none elsewhere.
      clip_rules: see `ClipRule`.
      phases: later phases of the run, with another precision or loss scale.
      stop_after_skips: so many skipped steps in a row end the run with the reason.
    """

    precision: str = "float32"
    rules: dict[str, str] = {}
    loss_scale: DynamicConfig | float | Literal["auto", "none"] = "auto"
    phases: tuple[PhaseConfig, ...] = ()
    clip_norm: Positive | None = None
    clip_rules: tuple[ClipRuleConfig, ...] = ()
    micro_batches: Count = 1
    ema_decay: Annotated[Float, Field(gt=0.0, lt=1.0)] | None = None
    stop_after_skips: Count = 100

    @field_validator("loss_scale", mode="before")
    @classmethod
    def _some_kind(cls, given: Any):
        if given is None:
            raise ValueError("expected 'auto', 'none', a number, or keys of a scale")
        return given

    @model_validator(mode="after")
    def _valid(self):
        _ = self.policy
        starts = [phase.after for phase in self.phases]
        if starts != sorted(set(starts)):
            raise ValueError(
                f"phases: `after` must rise from one to the next; {starts}"
            )
        for phase in self.phases:
            if phase.precision and Policy.parse(phase.precision).params != (
                self.policy.params
            ):
                raise ValueError("phases: all must keep the parameters in one dtype")
        return self

    @property
    def policy(self) -> Policy:
        return replace(Policy.parse(self.precision), rules=tuple(self.rules.items()))

    def build_loss_scale(self) -> LossScale:
        if isinstance(self.loss_scale, DynamicConfig):
            return self.loss_scale.build()
        if self.loss_scale == "auto":
            return self.policy.default_loss_scale()
        if self.loss_scale == "none":
            return NoLossScale()
        return StaticLossScale(self.loss_scale)


class MonitorConfig(Section):
    """The fields of Monitor, and whether TensorBoard is written for."""

    every: Count = Monitor.every
    condition: tuple[str, ...] = Monitor.condition
    iterations: Count = Monitor.iterations
    tensorboard: bool = True

    @model_validator(mode="after")
    def _valid(self):
        self.build()
        return self

    def build(self) -> Monitor:
        return Monitor(**self.model_dump(exclude={"tensorboard"}))


class Config(Section):
    """A whole run."""

    run: RunConfig
    data: Annotated[MnistConfig | ManualConfig, Field(discriminator="name")]
    model: Annotated[ResNetConfig | GptConfig, Field(discriminator="name")]
    optimizer: OptimizerConfig = OptimizerConfig()
    optimization: OptimizationConfig = OptimizationConfig()
    monitor: MonitorConfig | None = None

    def phases(self) -> list[tuple[int, "Config"]]:
        """The run's phases: after how many attempted steps, and what holds then."""
        whole = self.optimization
        phases = [(0, self)]
        for phase in whole.phases:
            changed = phase.model_dump(include={"precision"}, exclude_none=True)
            if phase.loss_scale is not None:
                changed["loss_scale"] = phase.loss_scale
            options = whole.model_copy(update=changed)
            config = self.model_copy(update={"optimization": options})
            phases.append((phase.after, config))
        return phases

    def trajectory(self) -> dict[str, Any]:
        """The settings that decide the numbers of a run, which it cannot change midway.

        The rest is where results go, what is measured and written besides, and how
        often. How long the run is belongs here where the learning rate depends on it.
        """
        settings = self.model_dump(mode="json")
        run = settings["run"]
        length = () if self.optimizer.schedule == "constant" else ("epochs", "steps")
        settings["run"] = {key: run[key] for key in ("seed", *length)}
        del settings["optimization"]["stop_after_skips"], settings["monitor"]
        for key in ("sample_length", "prompt"):
            settings["model"].pop(key, None)
        return settings

    @model_validator(mode="after")
    def _fits(self):
        fits = {"mnist": "resnet", "python_manual": "gpt"}
        if fits[self.data.name] != self.model.name:
            raise ValueError(
                f"data {self.data.name!r} goes with model {fits[self.data.name]!r}, "
                f"not {self.model.name!r}"
            )
        if self.data.batch_size % self.optimization.micro_batches:
            raise ValueError(
                f"optimization.micro_batches ({self.optimization.micro_batches}) must "
                f"divide data.batch_size ({self.data.batch_size})"
            )
        return self
