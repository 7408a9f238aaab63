"""The command: arguments, exit codes, and what it leaves behind."""

import argparse
import json

import jax.numpy as jnp
import pytest

from opsnn_jax.aot import command, toolchain
from opsnn_jax.aot.command import add_arguments, find_function, parse_option
from opsnn_jax.aot.targets import get_target

SPECS = ["--shape", "128x128:f32", "--shape", "128x128:f32"]

IMAGE = ["--shape", "1x8x8x3:f32", "--shape", "3x3x3x4:f32"]

# Modules that cannot be imported.
MODULES = {
    "broken_import": "def f(x): return x\n\n1 / 0\n",
    "broken_syntax": "def f(x) return x\n",
    "exits": "import sys\nsys.exit(3)\n",
}


def run(*argv):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return command.run(parser.parse_args(argv))


@pytest.mark.parametrize(
    "text, shape, dtype",
    [
        ("8x28x28x256:bf16", (8, 28, 28, 256), jnp.bfloat16),
        ("7:i8", (7,), jnp.int8),
        (":f32", (), jnp.float32),
        ("2x0:float16", (2, 0), jnp.float16),
        ("8:int4", (8,), jnp.int4),
        ("8:bool", (8,), jnp.bool),
    ],
)
def test_shape(text, shape, dtype):
    spec = command.parse_shape(text)
    assert (spec.shape, spec.dtype) == (shape, dtype)


@pytest.mark.parametrize("text", ["8x8", "8xf32", "8x8:half8", "", "-1x2:f32"])
def test_bad_shape(text):
    with pytest.raises(ValueError, match="--shape must be like"):
        command.parse_shape(text)


@pytest.mark.parametrize("dtype", ["str", "object", "datetime64", "longdouble"])
def test_dtypes_that_only_numpy_has(dtype):
    text = f"8:{dtype}"
    with pytest.raises(ValueError, match="--shape must be like"):
        command.parse_shape(text)


def test_option():
    assert parse_option("strides=(2, 2)") == ("strides", (2, 2))
    assert parse_option("padding=SAME") == ("padding", "SAME")
    with pytest.raises(ValueError, match="NAME=VALUE"):
        parse_option("strides")


def test_functions_are_found_and_bound():
    f = find_function("aot_kernels:product@fast", None, {"block": 64})
    assert f.keywords == {"block": 64, "implementation": "fast"}
    assert find_function("jax.numpy:linalg.norm", None, {}) is jnp.linalg.norm


@pytest.mark.parametrize(
    "argv, message",
    [
        (["no_such_op", *SPECS], "expected an op of opsnn_jax or module:function"),
        (["no.module:f", *SPECS], "no.module:f"),
        ([":f", *SPECS], "compile: expected an op"),
        ([".relative:f", *SPECS], "compile: expected an op"),
        (["broken_import:f", *SPECS], "ZeroDivisionError"),
        (["broken_import:f", *SPECS], "broken_import.py:3)"),
        (["broken_syntax:f", *SPECS], "broken_syntax.py, line 1)"),
        (["exits:f", *SPECS], "SystemExit"),
        (["jax.numpy:dot", "--shape", "8:f64"], "Set JAX_ENABLE_X64=1"),
        (["jax.numpy:dot", *SPECS, "--html", "."], "got the folder '.'"),
        (["jax.numpy:dot", *SPECS, "--html", ""], "got the folder '.'"),
        (["jax:__version__", *SPECS], "is not a function"),
        (["jax.numpy:dot", *SPECS, "--target", "tpu-v9"], "target must be one of"),
        (["jax.numpy:dot", "--shape", "8"], "--shape"),
        (["jax.numpy:dot", *SPECS, "--html", "no/such/folder/page"], "--html"),
    ],
)
def test_requests_that_cannot_be_carried_out_exit_with_2(
    argv, message, capsys, tmp_path, monkeypatch
):
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    assert run(*argv) == 2
    said = capsys.readouterr().err
    assert message in said
    assert len(said.strip().splitlines()) == 1


@pytest.mark.parametrize(
    "target, words",
    [
        ("tpu-v5e", ["libtpu", "pip install 'opsnn-jax[aot]'"]),
        ("h200", ["rich", "jax-cuda13-plugin", "pip install 'opsnn-jax[aot-gpu]'"]),
    ],
)
def test_a_missing_toolchain_is_one_line_and_exits_with_2(
    target, words, monkeypatch, capsys
):
    monkeypatch.setattr(toolchain, "find_spec", lambda name: None)
    assert run("jax.numpy:dot", *SPECS, "--target", target) == 2
    said = capsys.readouterr().err
    assert len(said.strip().splitlines()) == 1
    assert all(word in said for word in words)


def test_a_toolchain_half_installed_names_the_other_half(monkeypatch):
    real = toolchain.find_spec
    monkeypatch.setattr(
        toolchain,
        "find_spec",
        lambda name: None if name == "libtpu" else real(name),
    )
    with pytest.raises(toolchain.MissingToolchain, match="needs libtpu. Run"):
        toolchain.require_toolchain(get_target("tpu-v6e"))


@pytest.mark.aot
class TestCompiling:
    @pytest.fixture(autouse=True)
    def tpu(self, compiles_for):
        compiles_for("tpu-v5e")

    def test_two_functions_as_a_table_and_a_page(self, tmp_path, capsys):
        page = tmp_path / "page.html"
        compare = ["--compare", "jax.numpy:dot", "--html", str(page)]
        assert run("aot_kernels:product", *SPECS, *compare) == 0
        assert "jax.numpy:dot" in capsys.readouterr().out
        assert "product.1" in page.read_text()

    def test_json(self, capsys):
        argv = [*SPECS, "--target", "tpu-v5e", "--target", "tpu-v6e", "--json"]
        assert run("jax.numpy:dot", *argv) == 0
        reports = json.loads(capsys.readouterr().out)
        assert [r["target"] for r in reports] == ["tpu-v5e", "tpu-v6e"]

    def test_a_refusal_exits_with_1(self, capsys):
        argv = ["--shape", "8192x2048:f32"]
        assert run("aot_kernels:double", *argv) == 1
        assert "refused (compile)" in capsys.readouterr().out

    @pytest.mark.parametrize(
        "argv, message",
        [
            (["conv2d"], "missing 2 required positional arguments"),
            (["conv2d", *IMAGE, "--option", "mdoe=3"], "unexpected keyword"),
            (["conv2d@nope", *IMAGE], "implementation must be"),
            (["aot_kernels:fails", *SPECS, "--vjp"], "AssertionError: odd"),
        ],
    )
    def test_what_no_compiler_saw_exits_with_2(self, argv, message, capsys):
        assert run(*argv) == 2
        said = " ".join(capsys.readouterr().out.split())
        assert "cannot be traced" in said
        assert message in said

    def test_backward(self, capsys):
        assert run("jax.numpy:dot", *SPECS, "--vjp", "--json") == 0
        (report,) = json.loads(capsys.readouterr().out)
        assert report["flops"] >= 3 * 2 * 128**3
        # The product and two gradients; a TPU adds a small table of several outputs.
        assert 0 <= report["memory"]["outputs"] - 3 * 4 * 128**2 < 1024
