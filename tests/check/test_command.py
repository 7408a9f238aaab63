"""`opsnn check`: its exit codes, its table and its JSON."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import opsnn_jax
from opsnn_jax.check import OpCase, check_op, command, library
from opsnn_jax.check.library_conv import conv_case, conv_factor


def double(x, *, implementation=None):
    return x * (3 if implementation == "wrong" else 2)


OPS = library.OPS
CASE = OpCase("plain", lambda key, dtype: (jnp.ones(4, dtype),), transforms=False)


@pytest.fixture(autouse=True)
def one_small_op(monkeypatch):
    """The library with an op in it that has a wrong implementation."""
    entry = library.OpEntry(
        lambda: (CASE,), lambda: ("right", "wrong"), reference=lambda x: x * 2
    )
    monkeypatch.setattr(opsnn_jax, "double", double, raising=False)
    monkeypatch.setattr(library, "OPS", {"double": entry})
    monkeypatch.setattr(command, "OPS", {"double": entry})


def _run(*words):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args(words))


def test_exit_code_tells_whether_the_contract_is_kept(capsys):
    assert _run("double", "--implementation", "right", "--dtype", "float32") == 0
    assert "keeps the contract" in capsys.readouterr().out
    assert _run("double", "--implementation", "wrong", "--dtype", "float32") == 1
    assert "max error" in capsys.readouterr().out


def test_programs_are_kept_in_every_run_apart():
    for _ in range(2):
        with command._programs_kept():
            folder = Path(jax.config.jax_compilation_cache_dir)
            jax.jit(lambda x: x + 1)(jnp.ones(3)).block_until_ready()
            assert list(folder.iterdir())
    assert not jax.config.jax_compilation_cache_dir
    jax.jit(lambda x: x + 2)(jnp.ones(3)).block_until_ready()
    assert not folder.exists()


def test_json_holds_every_row(capsys):
    assert _run("--json", "--dtype", "bfloat16", "--dtype", "float32") == 1
    (report,) = json.loads(capsys.readouterr().out)
    assert report["op"] == "double" and not report["ok"]
    found = [(row["implementation"], row["dtype"]) for row in report["rows"]]
    assert found == [
        (name, dtype)
        for name in ("(default)", "right", "wrong")
        for dtype in ("bfloat16", "float32")
    ]


@pytest.mark.parametrize(
    "words, text",
    [
        (("triple",), "op must be one of double; got 'triple'"),
        (("double", "--dtype", "int8"), "--dtype must be one of float32"),
        (("double", "--implementation", "gpu"), "has the implementations right, wrong"),
        (("--implementation", "right"), "name the op too"),
    ],
)
def test_bad_arguments_give_exit_code_2(capsys, words, text):
    assert _run(*words) == 2
    assert text in capsys.readouterr().err


def test_import_is_light():
    code = "import sys, opsnn_jax.check.command; print(sorted(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    for heavy in ("hypothesis", "torch", "flax", "rich"):
        assert f"'{heavy}'" not in done.stdout


def test_winograd_bound_is_that_of_its_transform():
    def factor(name, dtype, kernel=(3, 3)):
        case = conv_case("plain", (1, 8, 8, 1), (*kernel, 1, 1))
        return conv_factor(name, jnp.dtype(dtype), case)

    assert factor("winograd", "float32") == pytest.approx(4.8, abs=0.1)
    assert factor("winograd", "float32", (3,) * 3) == pytest.approx(6.2, abs=0.1)
    assert factor("winograd_f4", "float32", (3,) * 3) == pytest.approx(10.5, abs=0.1)
    assert factor("winograd_f2", "float32", (5, 3)) == pytest.approx(3.0, abs=0.1)
    assert factor("winograd_f6", "float32", (4,)) == 1  # refused
    assert factor("pallas_tpu", "float32") == factor("winograd", "float32")
    # The rounding of both multiplicands, times 5 / 3, beside that of the result.
    assert factor("pallas_tpu", "bfloat16") == pytest.approx(2.56, abs=0.01)
    assert factor("winograd", "bfloat16") == factor("direct", "float32") == 1


@pytest.mark.parametrize("name", OPS)
def test_cases_of_the_library_make_arrays(key, name):
    for case in OPS[name].cases():
        for dtype in map(jnp.dtype, library.DTYPES):
            assert all(x.dtype == dtype for x in case.make_args(key, dtype))


def test_a_way_that_an_op_does_not_have(monkeypatch, capsys):
    monkeypatch.setattr(library, "OPS", OPS)
    monkeypatch.setattr(command, "OPS", OPS)
    assert _run("fused_qkv", "--implementation", "xla") == 2
    assert "fused_qkv has only one; got 'xla'" in capsys.readouterr().err


def test_report_of_the_suite_is_what_is_printed(capsys):
    report = check_op(double, reference=double, cases=[CASE])
    command._show(report)
    assert "double keeps the contract" in capsys.readouterr().out
