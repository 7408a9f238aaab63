"""`opsnn train`, in process: what it leaves, exit codes, one line for a fault."""

import errno
import json
import os
import re
import runpy
import shlex
import shutil
import signal
import types

import numpy as np
import pytest
from PIL import Image

from opsnn_jax import cli
from opsnn_jax.training import checkpoint, report, trainer
from tests.training.tiny import TINY_IMAGES, TINY_TEXT


def test_images(run, quick_compilation):
    code, out, err, runs = run(TINY_IMAGES)
    assert (code, err) == (0, "")
    folder = runs / "images-0"
    assert f"run folder: {folder}\n" in out and "test accuracy" in out
    lines = [line for line in out.split("\n") if line.startswith("step ")]
    assert "step 6/6" in lines[-1] and "scale 4096  skipped 0" in lines[-1]
    # There is no speed before the first steps, which compile, are done.
    assert "images/s" not in lines[0] and "images/s" in lines[-1]
    rows = report.read_rows(folder / "metrics.jsonl")
    assert [row["attempted_steps"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert {"loss", "accuracy", "loss_scale", "grad_norm", "skipped"} <= rows[0].keys()
    results = json.loads((folder / "results.json").read_text())
    assert 0.0 <= results["test accuracy"] <= 1.0
    assert json.loads((folder / "config.json").read_text())["data"]["batch_size"] == 10
    with Image.open(folder / "curves.png") as image:
        assert min(image.size) > 400
        assert np.asarray(image.convert("L")).std() > 5


@pytest.mark.slow
def test_text(run, quick_compilation):
    code, out, err, runs = run(TINY_TEXT)
    assert (code, err) == (0, "")
    assert "bits per character" in out and "The model writes:" in out
    results = json.loads((runs / "text-0" / "results.json").read_text())
    assert results["sample"].startswith("The ")
    assert len(results["sample"]) == len("The ") + 12
    assert 0.0 < results["bits per character"] < 8.0


@pytest.mark.parametrize(
    "option, says",
    [
        ("run.sed=1", "run.sed: unknown key. Did you mean 'seed'?"),
        ("data.batch_size=a", "data.batch_size: must be a valid integer"),
        ("data.batch_size=4990", "batch_size must be at most the 4980 rows"),
    ],
)
def test_bad_configuration_is_one_line_and_exit_code_2(run, option, says):
    code, _, err, _ = run(TINY_IMAGES, "--set", option)
    assert code == 2
    assert says in err and err.count("\n") == 1


def test_unwritable_run_folder_is_one_line_before_training(run, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "make_task", lambda config: pytest.fail("trained"))
    (tmp_path / "file").write_text("")
    code, _, err, _ = run(TINY_IMAGES, "--set", f"run.folder={tmp_path / 'file'}")
    assert code == 2
    assert "run.folder: cannot write to" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "precision, batch, rate, says",
    [
        ("fp32", 1.0, 1e38, "a loss of -inf; the gradients are finite, yet"),
        (
            "fp32",
            np.inf,
            1e-3,
            "a loss of inf; not finite: the gradients of w. No loss",
        ),
        ("mixed_fp16", np.nan, 1e-3, "loss scale 512 with a loss of nan; not finite"),
        # Beyond fp32 once it is scaled: a smaller scale would help.
        ("mixed_fp16", 1e37, 1e-3, "the gradients of w. Lower the loss scale"),
    ],
)
def test_endless_skips_stop_the_run_with_the_reason(
    run, weights_only, precision, batch, rate, says
):
    weights_only.batch_at = lambda k: batch
    config = TINY_IMAGES | {
        "optimizer": {"name": "sgd", "learning_rate": rate, "schedule": "constant"},
        "optimization": {"precision": precision, "stop_after_skips": 4},
    }
    if precision == "mixed_fp16":
        config["optimization"]["loss_scale"] = {"initial": 4096, "min": 512}
    code, _, err, runs = run(config, "--set", "run.steps=50")
    assert code == 1
    assert "steps in a row were skipped" in err and err.count("\n") == 1
    assert says in err
    assert "scale 1 " not in err
    rows = report.read_rows(runs / "images-0" / "metrics.jsonl")
    assert rows[-1]["consecutive_skips"] >= 4


def test_interrupt_after_the_training_is_one_line(run, weights_only):
    def evaluate():
        raise KeyboardInterrupt

    weights_only.evaluate = evaluate
    code, _, err, runs = run(TINY_IMAGES)
    assert (code, err) == (130, "opsnn train: interrupted.\n")
    assert len(report.read_rows(runs / "images-0" / "metrics.jsonl")) == 6


def test_numbers_are_shown_in_full(run, weights_only):
    weights_only.evaluate = lambda: {"test accuracy": 0.98764}
    _, out, _, _ = run(TINY_IMAGES, "--set", "optimization.loss_scale=16777216")
    assert "scale 16777216  skipped" in out
    assert re.search("test accuracy +│ 0.9876 ", out)
    assert re.search("loss scale +│ 16777216 ", out)


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


def assert_equal_ends(folder, other):
    assert report.read_rows(folder / "metrics.jsonl") == report.read_rows(
        other / "metrics.jsonl"
    )
    results, others = (
        json.loads((f / "results.json").read_text()) for f in (folder, other)
    )
    assert results | {"seconds": 0} == others | {"seconds": 0}


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


NO_ROOM = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("last", [2, 4, 6])
def test_disk_that_fills_up_is_one_line_and_loses_nothing(
    run, weights_only, monkeypatch, last
):
    """Of checkpoints, there is room for those up to `last`, 0 for none."""
    weights_only.batch_at = float
    every = ["--set", "run.save_every=2"]
    straight = run(TINY_IMAGES, *every)[3] / "images-0"
    saves = []

    def disk_usage(folder):
        saves.append(1)
        free = 10**9 if 2 * len(saves) < last else 500
        return types.SimpleNamespace(free=free)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.shutil, "disk_usage", disk_usage)
        code, _, err, runs = run(TINY_IMAGES, *every)
        folder = runs / "images-1"
        assert code == 1 and err.count("\n") == 1
        where = re.escape(str(folder / "checkpoints"))
        why = (
            r"No space left on device: a checkpoint takes [\d,]+ bytes, 500 are free; "
        )
        assert re.search(f"cannot write to {where}: {why}", err)
        if last == 2:
            assert "make room and begin anew, for there is no checkpoint yet" in err
            return
        go_on = f"make room and go on from step {last - 2} with --resume {folder}.\n"
        assert err.endswith(go_on)
        # The rows and the curves are there. A run that goes on too early ends alike.
        assert len(report.read_rows(folder / "metrics.jsonl")) == last
        assert (folder / "curves.png").exists()
        code, _, err, _ = run(TINY_IMAGES, *every, "--resume", str(folder))
        assert (code, err.count("\n")) == (1, 1) and err.endswith(go_on)
    assert run(TINY_IMAGES, *every, "--resume", str(folder))[0] == 0
    assert_equal_ends(folder, straight)


@pytest.mark.parametrize("back", [True, False])
def test_rows_wait_for_room_and_the_run_goes_on(run, weights_only, monkeypatch, back):
    flush, tried = report.Rows.flush, []

    def no_room(self):
        tried.append(1)
        if len(tried) > 1 and (len(tried) < 3 or not back):
            raise NO_ROOM
        flush(self)

    monkeypatch.setattr(report.Rows, "flush", no_room)
    code, _, err, runs = run(TINY_IMAGES)
    rows = report.read_rows(runs / "images-0" / "metrics.jsonl")
    if back:
        assert (code, err) == (0, "")
        assert [row["attempted_steps"] for row in rows] == [1, 2, 3, 4, 5, 6]
    else:
        assert code == 1 and err.count("\n") == 1
        assert "No space left on device; make room and go on from step 6 with" in err
        assert len(rows) == 2


def test_picture_that_finds_no_room_costs_nothing_else(run, weights_only, monkeypatch):
    replace = report.replace_file

    def no_room(path, content):
        if path.suffix == ".png":
            raise NO_ROOM
        replace(path, content)

    monkeypatch.setattr(report, "replace_file", no_room)
    code, out, err, runs = run(TINY_IMAGES)
    assert (code, err) == (0, "")
    folder = runs / "images-0"
    assert f"No curves were drawn: cannot write to {folder}: No space left" in out
    assert (folder / "results.json").exists()


def test_missing_package_is_one_line(monkeypatch, capsys):
    monkeypatch.setitem(cli._COMMANDS, "train", ("", "absent_pkg", "train"))
    assert cli.main(["train"]) == 2
    assert capsys.readouterr().err == (
        "opsnn train: the package 'absent_pkg' is missing. "
        "Install it: pip install 'opsnn-jax[train]'.\n"
    )


def test_version(capsys):
    with pytest.raises(SystemExit) as e:
        cli.main(["--version"])
    assert e.value.code == 0
    assert capsys.readouterr().out.startswith("opsnn_jax 0.")


@pytest.mark.parametrize("argv", [[], ["trian"], ["train"], ["train", "a", "--foo"]])
def test_wrong_command_line_is_exit_code_2(argv, capsys):
    with pytest.raises(SystemExit) as e:
        cli.main(argv)
    assert e.value.code == 2
    capsys.readouterr()


@pytest.mark.parametrize(
    "option, says",
    [
        ("model.prompt=\u4e2d", "model.prompt: must use characters of the text; got"),
        ("data.test_share=1e-6", "sequence_length must be below the 0 characters"),
    ],
)
def test_text_that_does_not_fit_is_refused_before_training(run, option, says):
    code, _, err, _ = run(TINY_TEXT, "--set", option)
    assert code == 2
    assert says in err and err.count("\n") == 1


def test_plain_script_learns_and_recovers_from_overflow(
    request, capsys, flax_promotion, quick_compilation
):
    path = request.config.rootpath / "examples" / "plain_script.py"
    assert len(path.read_text().splitlines()) < 80
    accuracy, skipped = runpy.run_path(str(path))["main"](steps=60)
    assert accuracy > 0.8
    assert skipped > 0
    capsys.readouterr()
