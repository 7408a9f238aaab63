"""Runs that are stopped and go on."""

import json
import shlex
import shutil
import signal

import pytest

from opsnn_jax import cli
from opsnn_jax.training import report
from tests.training.equal import assert_equal_ends
from tests.training.tiny import TINY_IMAGES


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_stopped_run_is_saved_and_goes_on_to_the_same_end(
    run, monkeypatch, weights_only, send_at, number, code
):
    weights_only.batch_at = float
    assert run(TINY_IMAGES)[0] == 0

    with monkeypatch.context() as patch:
        send_at(patch, 4, number)
        stopped, out, err, runs = run(TINY_IMAGES)
    assert (stopped, err) == (code, "")
    folder = runs / "images-1"
    assert "Stopping after this step" in out
    line = out.strip().split("\n")[-1]
    assert line.startswith("Stopped; everything is saved. Go on with: opsnn train ")
    assert line.endswith(f"--set run.folder={runs} --resume {folder}")
    rows = report.read_rows(folder / "metrics.jsonl")
    assert [row["attempted_steps"] for row in rows] == [1, 2, 3, 4]
    assert (folder / "curves.png").exists()
    assert not (folder / "results.json").exists()

    # Rows of steps that will be made again, and half a row, as kill -9 leaves them.
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps(rows[-1] | {"attempted_steps": 5}) + '\n{"loss": 1.')
    argv = shlex.split(line.split("opsnn ")[1])
    assert cli.main(argv) == 0
    assert_equal_ends(folder, runs / "images-0")


def test_resume_without_a_folder_takes_the_newest(run, monkeypatch, weights_only):
    runs = run(TINY_IMAGES)[3]
    newest = (runs / "images-0").rename(runs / "images-10")
    for name in ("images-9", "images-x"):  # as words, 9 would come after 10
        (runs / name).mkdir()
    (newest / "results.json").unlink()
    code, out, err, _ = run(TINY_IMAGES, "--resume")
    assert (code, err) == (0, "")
    assert (newest / "results.json").exists() and str(newest) in out
    assert len(report.read_rows(newest / "metrics.jsonl")) == 6


def test_second_interrupt_aborts(run, monkeypatch, weights_only, send_at):
    send_at(monkeypatch, 4, signal.SIGINT, signal.SIGINT)
    before = signal.getsignal(signal.SIGINT)
    code, _, err, runs = run(TINY_IMAGES)
    assert (code, err) == (130, "opsnn train: interrupted.\n")
    assert signal.getsignal(signal.SIGINT) is before
    assert len(report.read_rows(runs / "images-0" / "metrics.jsonl")) == 2


@pytest.mark.parametrize(
    "options, says",
    [
        (["--resume"], "there is no run 'images' in"),
        (["--resume", "/nowhere"], "'/nowhere' is not the folder of a run."),
    ],
)
def test_nothing_to_resume_is_one_line(run, weights_only, options, says):
    code, _, err, _ = run(TINY_IMAGES, *options)
    assert code == 2
    assert says in err and err.count("\n") == 1


def test_run_that_cannot_be_resumed_is_one_line(run, weights_only):
    _, _, _, runs = run(TINY_IMAGES)
    code, _, err, _ = run(TINY_IMAGES, "--resume", "--set", "optimizer.beta2=0.9")
    assert code == 2
    assert "optimizer.beta2 was 0.999 there and is 0.9 here." in err
    assert err.count("\n") == 1
    # What does not change the numbers may change.
    options = ["--set", "run.save_every=2", "--set", "run.keep_best=1"]
    assert run(TINY_IMAGES, "--resume", *options)[0] == 0
    shutil.rmtree(runs / "images-0" / "checkpoints")
    code, _, err, _ = run(TINY_IMAGES, "--resume")
    assert code == 2
    assert "stopped before its first checkpoint" in err and err.count("\n") == 1


def test_run_with_a_constant_rate_can_be_made_longer(run, weights_only):
    weights_only.batch_at = float
    constant = {"schedule": "constant", "warmup_steps": 8}
    config = TINY_IMAGES | {"optimizer": constant}
    assert run(config, "--set", "run.steps=10")[0] == 0
    folder = run(config)[3] / "images-1"
    code, _, err, runs = run(config, "--resume", "--set", "run.steps=10")
    assert (code, err) == (0, "")
    assert_equal_ends(folder, runs / "images-0")
    # Of one that falls, the rates until now would have been others.
    code, _, err, _ = run(TINY_IMAGES)
    code, _, err, _ = run(TINY_IMAGES, "--resume", "--set", "run.steps=10")
    assert code == 2
    assert "run.steps was 6 there and is 10 here." in err and err.count("\n") == 1
