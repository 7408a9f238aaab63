"""A small run with everything that has state, and ways to be killed in it.

`python -m tests.training.killed_run FOLDER STEPS HOW` is what the tests start and kill.
"""

import functools
import os
import signal
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

from opsnn_jax.training import DynamicLossScale, Policy, TrainState, make_train_step
from opsnn_jax.training.checkpoint import Checkpoints
from opsnn_jax.training.data import shuffled
from opsnn_jax.training.loop import fit, resume

POLICY = Policy.parse("mixed_float16")
# Moves often, so that what it carries matters: grows after 2, backs off after 2.
SCALE = DynamicLossScale(initial=2.0**12, growth_interval=2, hysteresis=2)
SCALING = {"policy": POLICY, "loss_scale": SCALE}
OPTIMIZER = optax.adamw(optax.cosine_decay_schedule(0.05, 40))
MICRO_BATCHES = 3


def rows():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 5)).astype(np.float32)
    x[::7] *= 1e6  # overflows fp16: some windows are skipped
    return {"x": x, "y": rng.normal(size=(60, 1)).astype(np.float32)}


def fresh_state():
    keys = jax.random.split(jax.random.key(1))
    params = {
        "first": jax.random.normal(keys[0], (5, 8)),
        "last": jax.random.normal(keys[1], (8, 1)),
    }
    return TrainState.create(
        params, OPTIMIZER, model_state=jnp.zeros(8), rng=4, ema=True, **SCALING
    )


@functools.cache
def make_step(killed_at=None):
    """The step. With a number, the process dies in the middle of that attempt."""
    left = None if killed_at is None else killed_at * MICRO_BATCHES - 1

    def count_down(_):
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def loss_fn(params, mean, batch, rng):
        cast = POLICY.cast_to_compute
        keep = jax.random.bernoulli(rng, 0.8, batch["x"].shape)
        x = cast(jnp.where(keep, batch["x"], 0.0))
        hidden = jnp.tanh(x @ cast(params["first"]))
        error = POLICY.cast_to_output(hidden @ cast(params["last"])) - batch["y"]
        if killed_at is not None:
            jax.debug.callback(count_down, error.sum())
        mean = 0.9 * mean + 0.1 * POLICY.cast_to_output(hidden).mean(0)
        return jnp.square(error).mean(), (mean, {})

    return make_train_step(
        loss_fn,
        OPTIMIZER,
        micro_batches=MICRO_BATCHES,
        clip_norm=1.0,
        ema_decay=0.9,
        **SCALING,
    )


def run(folder, steps, killed_at=None, save_every=1):
    """Runs up to so many attempted steps, from the latest checkpoint if any."""
    batches = shuffled(rows(), 6, seed=2)
    with Checkpoints(folder) as checkpoints:
        state, batches = resume(checkpoints, fresh_state(), batches)
        fitted = fit(
            make_step(killed_at),
            state,
            batches,
            steps=steps,
            checkpoints=checkpoints,
            save_every=save_every,
        )
    return fitted.state


def die_at_the_rename(step):
    """Kills the process when all of a checkpoint is written and not yet in place."""
    real = os.rename

    def rename(source, target, **kwargs):
        if os.path.basename(target) == str(step):
            os.kill(os.getpid(), signal.SIGKILL)
        real(source, target, **kwargs)

    os.rename = rename


def main(folder, steps, how):
    if how == "in-a-window":
        run(folder, steps + 5, killed_at=steps + 1)
    else:
        die_at_the_rename(steps + 1)
        run(folder, steps + 5)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
