"""What several tests of the training share."""

import os
import signal
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from matplotlib.figure import Figure

from opsnn_jax import cli
from opsnn_jax.training import trainer
from opsnn_jax.training.data import BatchStream, Prefetch
from opsnn_jax.training.tasks import Task


@pytest.fixture
def quick_compilation():
    """Half the compile time, for tests that judge what is made and not how exactly."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture
def flax_promotion():
    with jax.numpy_dtype_promotion("standard"):  # flax and optax need it
        yield


@pytest.fixture
def weights_only(monkeypatch, quick_compilation):
    """In place of a model three weights, whose loss the batch multiplies.

    Pictures are planned and written, but drawn only if asked: it takes longer than all
    the rest of such a run.
    """
    real_savefig = Figure.savefig

    def savefig(figure, file, **options):
        if weights_only.draws_pictures:
            real_savefig(figure, file, **options)

    monkeypatch.setattr(Figure, "savefig", savefig)

    def make_task(config):
        def loss_fn(params, model_state, batch, rng):
            loss = (params["w"] * batch["g"]).sum()
            return loss, (model_state, {"accuracy": loss})

        return Task(
            params=weights_only.params,
            model_state=(),
            loss_fn=loss_fn,
            batches=BatchStream(
                lambda k: {"g": np.full(3, weights_only.batch_at(k), "f4")}
            ),
            steps=config.run.steps,
            counted="images",
            count=1,
            evaluate=lambda params, model_state: weights_only.evaluate(),
        )

    weights_only = types.SimpleNamespace(
        batch_at=lambda k: 1.0,
        evaluate=dict,
        params={"w": jnp.ones(3)},
        draws_pictures=False,
    )
    monkeypatch.setattr(trainer, "make_task", make_task)
    return weights_only


@pytest.fixture
def run(tmp_path, capsys, flax_promotion):
    """Runs the command; returns exit code, both outputs, and the folder of runs."""

    def run(config, *options):
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(config))
        folder = f"run.folder={run.folder}"
        code = cli.main(["train", str(path), "--set", folder, *options])
        out, err = capsys.readouterr()
        return code, out, err, run.folder

    run.folder = tmp_path / "runs"
    return run


@pytest.fixture
def send_at():
    """Sends signals to this process when the loop asks for its `draw`th batch."""

    def send_at(monkeypatch, draw, *signals):
        drawn = []
        real = Prefetch.__next__

        def next_batch(self):
            drawn.append(1)
            if len(drawn) == draw:
                for number in signals or (signal.SIGINT,):
                    os.kill(os.getpid(), number)
            return real(self)

        monkeypatch.setattr(Prefetch, "__next__", next_batch)

    return send_at
