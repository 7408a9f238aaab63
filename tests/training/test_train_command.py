"""`opsnn train`, in process: what it leaves, exit codes, one line for a fault."""

import json
import re
import runpy

import numpy as np
import pytest
from PIL import Image

from opsnn_jax import cli
from opsnn_jax.training import report, trainer
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
