"""Run folders and metrics files."""

import errno
import os
import pathlib

import pytest

from opsnn_jax.training.report import (
    Rows,
    RunFolder,
    RunFolderError,
    plot_curves,
    read_rows,
    replace_file,
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


class Disk:
    """A file on a disk that has room for so many bytes."""

    def __init__(self, room):
        self.room, self.content = room, b""

    def write(self, data):
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = data[: self.room]
        self.content += taken
        self.room -= len(taken)
        return len(taken)


def test_rows_that_find_no_room_wait(tmp_path):
    rows = Rows(tmp_path / "rows.jsonl")
    rows._file.close()
    rows._file = disk = Disk(room=10)
    rows.append([{"step": 1}])  # 12 bytes, of which 10 are taken
    rows.append([{"step": 2}])
    assert disk.content == b'{"step": 1'
    with pytest.raises(OSError, match="No space left"):
        rows.flush()
    disk.room = 10**6
    rows.append([{"step": 3}])
    assert disk.content == b'{"step": 1}\n{"step": 2}\n{"step": 3}\n'


def test_file_that_finds_no_room_leaves_the_one_before(tmp_path, monkeypatch):
    path = tmp_path / "results.json"
    replace_file(path, b"before")
    write = pathlib.Path.write_bytes

    def half(self, content):
        write(self, content[: len(content) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(pathlib.Path, "write_bytes", half)
    with pytest.raises(OSError, match="No space left"):
        replace_file(path, b"after")
    assert path.read_bytes() == b"before" and [*tmp_path.iterdir()] == [path]


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
