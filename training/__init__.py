"""Mixed-precision training: functions for any loop, a train step, and a trainer."""

from .checkpoint import CheckpointError, Checkpoints
from .clip import ClipRule, clip_by_norm, clip_by_rules, global_norm
from .compression import Compression, Half, Int8, OneBit, TopK
from .leaves import all_finite, select
from .loop import StuckError, fit, resume
from .loss_scale import (
    DynamicLossScale,
    LossScale,
    LossScaleState,
    NoLossScale,
    StaticLossScale,
)
from .monitor import Monitor, condition_number
from .policy import Policy
from .state import TrainState
from .step import make_train_step, nonfinite_paths

__all__ = [
    "CheckpointError",
    "Checkpoints",
    "ClipRule",
    "Compression",
    "DynamicLossScale",
    "Half",
    "Int8",
    "LossScale",
    "LossScaleState",
    "Monitor",
    "NoLossScale",
    "OneBit",
    "Policy",
    "StaticLossScale",
    "StuckError",
    "TopK",
    "TrainState",
    "all_finite",
    "clip_by_norm",
    "clip_by_rules",
    "condition_number",
    "fit",
    "global_norm",
    "make_train_step",
    "nonfinite_paths",
    "resume",
    "select",
]
