"""Mixed-precision training: functions for any loop, a train step, and a trainer."""

from .checkpoint import CheckpointError, Checkpoints
from .clip import clip_by_norm, global_norm
from .fit import StuckError, fit, resume
from .leaves import all_finite, select
from .loss_scale import (
    DynamicLossScale,
    LossScale,
    LossScaleState,
    NoLossScale,
    StaticLossScale,
)
from .policy import Policy
from .state import TrainState
from .step import make_train_step, nonfinite_paths

__all__ = [
    "CheckpointError",
    "Checkpoints",
    "DynamicLossScale",
    "LossScale",
    "LossScaleState",
    "NoLossScale",
    "Policy",
    "StaticLossScale",
    "StuckError",
    "TrainState",
    "all_finite",
    "clip_by_norm",
    "fit",
    "global_norm",
    "make_train_step",
    "nonfinite_paths",
    "resume",
    "select",
]
