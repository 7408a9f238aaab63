"""Run folders and metrics files."""

import pytest

from opsnn_jax.training.report import (
    RunFolder,
    RunFolderError,
    plot_curves,
    read_rows,
)


def test_folders_count_up_and_keep_rows(tmp_path):
    first = RunFolder.new(str(tmp_path / "a" / "b"), "run", {"x": 1})
    second = RunFolder.new(str(tmp_path / "a" / "b"), "run", {"x": 1})
    assert (first.path.name, second.path.name) == ("run-0", "run-1")
    first.metrics.append([{"loss": 1.5}])
    # Read before it is closed: what is written is kept whatever happens later.
    assert read_rows(first.path / "metrics.jsonl") == [{"loss": 1.5}]
    first.close()
    second.close()


def test_what_is_not_finite_is_still_json(tmp_path):
    folder = RunFolder.new(str(tmp_path), "run", {})
    folder.metrics.append([{"loss": float("nan"), "grad_norm": float("inf")}])
    folder.close()
    rows = read_rows(folder.path / "metrics.jsonl")
    assert rows == [{"loss": "nan", "grad_norm": "inf"}]


def test_file_in_the_way_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match=r"run\.folder: cannot write to .*file"):
        RunFolder.new(str(tmp_path / "file"), "run", {})


@pytest.mark.parametrize("loss", [[1.0], [1.0, "nan", 0.5], ["inf"] * 3])
def test_plot_bears_gaps_and_short_runs(tmp_path, loss):
    rows = [
        {
            "attempted_steps": i + 1,
            "skipped": isinstance(value, str),
            "loss": value,
            "accuracy": 0.5,
            "loss_scale": 2.0**10,
            "grad_norm": value,
        }
        for i, value in enumerate(loss)
    ]
    plot_curves(rows, tmp_path / "curves.png", "run")
    assert (tmp_path / "curves.png").stat().st_size > 10_000
