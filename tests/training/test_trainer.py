"""What a configuration can add to a run: monitors, phases, rules of precision."""

import errno
import functools
import json
import os
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.nnx import Rngs
from PIL import Image
from rich.console import Console
from tensorboardX.proto import event_pb2
from tensorboardX.record_writer import RecordWriter

from opsnn_jax.models.gpt import GPT
from opsnn_jax.models.resnet import ResNet
from opsnn_jax.training import Policy, report, trainer
from opsnn_jax.training.config import Config
from opsnn_jax.training.config_file import ConfigError
from tests.training.tiny import TINY_IMAGES


def read_scalars(folder):
    """Tags and steps in the TensorBoard files of a folder."""
    found = []
    for path in sorted(folder.iterdir()):
        content, at = path.read_bytes(), 0
        while at < len(content):  # length, 4 bytes of checksum, event, 4 more
            size = int.from_bytes(content[at : at + 8], "little")
            event = event_pb2.Event.FromString(content[at + 12 : at + 12 + size])
            at += size + 16
            found += [(value.tag, event.step) for value in event.summary.value]
    return found


def test_monitor_goes_to_rows_tensorboard_and_a_picture(run, weights_only):
    weights_only.batch_at = lambda k: np.inf if k == 2 else 1.0
    weights_only.draws_pictures = True
    config = TINY_IMAGES | {"monitor": {"every": 2}}
    code, out, err, runs = run(config, "--set", "run.steps=4")
    assert (code, err) == (0, "")
    folder = runs / "images-0"
    rows = report.read_rows(folder / "monitor.jsonl")
    assert [row["attempted_steps"] for row in rows] == [1, 3]
    assert [row["layers"]["w"]["nonfinite"] for row in rows] == [0, 3]
    assert rows[0]["layers"]["w"]["grad_norm"] == pytest.approx(3**0.5)
    assert [row["skipped"] for row in rows] == [False, True]
    scalars = read_scalars(folder / "tensorboard")
    assert ("grad_norm/w", 1) in scalars and ("nonfinite/w", 3) in scalars
    with Image.open(folder / "monitor.png") as image:
        assert min(image.size) > 400
        assert np.asarray(image.convert("L")).std() > 5

    # It goes on: the rows of the steps that are made again are not there twice.
    with open(folder / "monitor.jsonl", "a") as file:
        file.write(json.dumps(rows[-1] | {"attempted_steps": 5}) + "\n")
    options = ["--resume", "--set", "run.steps=4", "--set", "monitor.every=1"]
    assert run(config, *options)[0] == 0
    assert report.read_rows(folder / "monitor.jsonl") == rows


@pytest.mark.parametrize("fails, files", [([2], 2), ([1, 2, 3], 3)])
def test_tensorboard_that_finds_no_room_holds_nothing_up(
    run, weights_only, monkeypatch, fails, files
):
    # The thread of tensorboardX ends at its first error; the loop would wait for it.
    flush, calls = RecordWriter.flush, []

    def no_room(self):
        calls.append(1)
        if len(calls) in fails:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        flush(self)

    monkeypatch.setattr(RecordWriter, "flush", no_room)
    code, _, err, runs = run(TINY_IMAGES | {"monitor": {"every": 1}})
    assert (code, err) == (0, "")
    folder = runs / "images-0"
    assert len(report.read_rows(folder / "monitor.jsonl")) == 6
    assert len(calls) == 3
    scalars = read_scalars(folder / "tensorboard")
    assert {step for _, step in scalars} == {1, 2, 3, 4, 5, 6}
    assert len([*(folder / "tensorboard").iterdir()]) == files


WATCHED = {"every": 1, "condition": ["a"]}


@pytest.mark.parametrize(
    "before, after",
    [
        (WATCHED, {"every": 2, "condition": ["b"], "iterations": 3}),
        pytest.param(WATCHED, {"tensorboard": False}, marks=pytest.mark.slow),
        pytest.param(WATCHED, None, marks=pytest.mark.slow),
        (None, WATCHED),
    ],
)
def test_what_is_measured_may_change_when_a_run_goes_on(
    run, weights_only, monkeypatch, send_at, before, after
):
    weights_only.batch_at = lambda k: 1.0 + k
    weights_only.params = {"w": jnp.ones(3), "a": jnp.eye(2), "b": 2.0 * jnp.eye(3)}
    runs = run(TINY_IMAGES)[3]
    with monkeypatch.context() as patch:
        send_at(patch, 3)
        assert run(TINY_IMAGES | {"monitor": before})[0] == 130
    weights_only.draws_pictures = True  # of rows with different columns
    code, _, err, _ = run(TINY_IMAGES | {"monitor": after}, "--resume")
    assert (code, err) == (0, "")
    straight, resumed = (
        report.read_rows(runs / f"images-{i}" / "metrics.jsonl") for i in range(2)
    )
    assert resumed == straight
    watched = report.read_rows(runs / "images-1" / "monitor.jsonl")
    steps = [row["attempted_steps"] for row in watched]
    every = [after["every"]] if after and "every" in after else [10]
    done = [1, 2, 3] if before else []
    assert steps == done + [k for k in (4, 5, 6) if after and (k - 1) % every[0] == 0]
    assert (runs / "images-1" / "monitor.png").exists() == bool(watched)
    settings = json.loads((runs / "images-1" / "config.json").read_text())
    assert (settings["monitor"] or {}).items() >= (after or {}).items()


def test_monitor_of_what_is_not_there_is_one_line(run, weights_only):
    monitor = {"condition": ["kernel"]}
    code, _, err, _ = run(TINY_IMAGES | {"monitor": monitor})
    assert code == 2
    assert "condition 'kernel' matches no weight" in err and err.count("\n") == 1


PHASES = [
    {"after": 2, "loss_scale": 256},
    {"after": 4, "precision": "mixed_fp16", "loss_scale": "auto"},
]


def test_phases_change_precision_and_scale(run, weights_only, monkeypatch):
    asked = []
    make = trainer.make_task
    monkeypatch.setattr(
        trainer,
        "make_task",
        lambda config: asked.append(config.optimization.precision) or make(config),
    )
    config = TINY_IMAGES | {"optimization": {"phases": PHASES}}
    code, _, err, runs = run(config)
    assert (code, err) == (0, "")
    assert asked == ["float32", "float32", "mixed_fp16"]
    rows = report.read_rows(runs / "images-0" / "metrics.jsonl")
    assert [row["loss_scale"] for row in rows] == [1, 1, 256, 256, 2**15, 2**15]
    assert [row["attempted_steps"] for row in rows] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("draw", [3, 4])
def test_run_goes_on_within_and_between_phases(
    run, weights_only, monkeypatch, draw, send_at
):
    weights_only.batch_at = lambda k: [1.0, np.inf, 2.0, np.inf, np.inf, 3.0][k % 6]
    scale = {"initial": 64, "growth_interval": 1}
    phases = [{"after": 3, "loss_scale": {"initial": 1024}}]
    config = TINY_IMAGES | {"optimization": {"loss_scale": scale, "phases": phases}}
    runs = run(config)[3]
    with monkeypatch.context() as patch:
        send_at(patch, draw)
        assert run(config)[0] == 130
    assert run(config, "--resume")[0] == 0
    straight, resumed = (
        report.read_rows(runs / f"images-{i}" / "metrics.jsonl") for i in range(2)
    )
    assert resumed == straight
    scales = [row["loss_scale"] for row in straight]
    assert scales == [64, 128, 64, 1024, 512, 256]
    assert straight[-1]["total_skips"] == 3


@pytest.mark.parametrize(
    "phases, says",
    [
        ([{"after": 4}, {"after": 2}], "must rise from one to the next"),
        ([{"after": 1, "precision": "float16"}], "precision"),
        (
            [{"after": 1, "precision": "params=bfloat16"}],
            "must keep the parameters in one dtype",
        ),
        ([{"after": 1, "loss_scale": 3}], "must be a power of two"),
        ([{"after": 1, "loss_scal": 2}], "unknown key. Did you mean 'loss_scale'?"),
    ],
)
def test_bad_phases_are_one_line(run, weights_only, phases, says):
    code, _, err, _ = run(TINY_IMAGES | {"optimization": {"phases": phases}})
    assert code == 2
    assert "optimization.phases" in err or "optimization: phases" in err
    assert says in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "optimization, says",
    [
        ({"rules": {"norm": "fp8"}}, "rule 'norm' must be one of 'float32'"),
        ({"rules": {"(": "fp16"}}, "must begin with a regular expression"),
        ({"rules": {"nrom": "fp32"}}, "'nrom' matches no layer; those are stem"),
        ({"clip_rules": [{"pattern": "w"}]}, "optimization.clip_rules.0.max_norm: is"),
        ({"clip_rules": [{"pattern": "w", "max_norm": -1}]}, "must be above 0"),
        ({"precision": "accumulate=int8"}, "accumulate must be one of"),
    ],
)
def test_bad_rules_are_one_line(run, optimization, says):
    code, _, err, _ = run(TINY_IMAGES | {"optimization": optimization})
    assert code == 2
    assert says in err and err.count("\n") == 1


def half_and_wide(program):
    return str(program).count(":bf16["), str(program).count(":f32[")


def resnet(policy):
    model = ResNet((2, 4), dtypes=policy.compute_dtype)
    images = jnp.ones((1, 8, 8, 1))
    init = functools.partial(model.init, train=False)
    variables = jax.eval_shape(init, jax.random.key(0), images)
    apply = functools.partial(model.apply, train=True, mutable=["batch_stats"])
    return jax.make_jaxpr(apply)(variables, images)


def gpt(policy):
    def make():
        return GPT(
            9, 8, layers=1, width=8, heads=2, dtypes=policy.compute_dtype, rngs=Rngs(0)
        )

    graph, params = nnx.split(nnx.eval_shape(make))
    tokens = jnp.zeros((1, 8), jnp.int32)
    return jax.make_jaxpr(lambda p: nnx.merge(graph, p)(tokens))(params)


@pytest.mark.parametrize("model", [resnet, gpt])
def test_rules_reach_the_layers(model, flax_promotion):
    """Seen in the program, in which half-precision numbers become fewer."""
    policy = Policy.parse("mixed_bfloat16")
    half, _ = half_and_wide(model(policy))
    norms, _ = half_and_wide(model(replace(policy, rules=(("norm", "float32"),))))
    assert 0 < norms < half
    assert half_and_wide(model(replace(policy, rules=((".", "float32"),))))[0] == 0


def test_clip_rules_reach_the_step(run, weights_only):
    config = TINY_IMAGES | {
        "optimizer": {"name": "sgd", "learning_rate": 1.0, "schedule": "constant"}
        | {"momentum": 0.0},
        "optimization": {
            "clip_rules": [{"pattern": "^w$", "max_norm": 0.25, "rows": True}]
        },
    }
    outcome = trainer.train(Config(**(config | {"run": tiny_run(run)})), quiet())
    # Each of the three entries is a row: its gradient of 1 becomes 0.25, six times.
    np.testing.assert_allclose(outcome.state.params["w"], [-0.5] * 3)


def tiny_run(run):
    return TINY_IMAGES["run"] | {"folder": str(run.folder)}


def quiet():
    return Console(quiet=True)


def test_bad_monitor_pattern_is_a_configuration_error(weights_only, run):
    config = Config(**(TINY_IMAGES | {"run": tiny_run(run), "monitor": {}}))
    monitor = config.monitor.model_copy(update={"condition": ("nothing",)})
    with pytest.raises(ConfigError, match="matches no weight"):
        trainer.train(config.model_copy(update={"monitor": monitor}), quiet())
