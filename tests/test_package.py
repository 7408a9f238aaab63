"""The package as a whole: importing it, its examples in docstrings and the README."""

import doctest
import importlib
import os
import pathlib
import pkgutil
import re
import subprocess
import sys

import jax
import pytest

import opsnn_jax

ROOT = pathlib.Path(__file__).parents[1]

_LIGHT = """
import sys
import jax
before = set(sys.modules)
import opsnn_jax
import opsnn_jax.aot, opsnn_jax.check, opsnn_jax.cli
heavy = {"flax", "optax", "orbax", "chex", "pydantic", "rich", "matplotlib", "torch",
         "hypothesis", "jax.experimental.pallas", "jax.experimental.pallas.tpu"}
print(sorted(heavy & (set(sys.modules) - before)))
jax.config.update("jax_num_cpu_devices", 3)  # an error once a backend has started
print(jax.device_count())
"""

# The config is compared as it prints: importing must set neither x64 nor a platform.
_EVERYTHING = """
import importlib, pkgutil, sys, warnings
import jax
import {others}
before = str(jax.config.values)
warnings.simplefilter("error")
import opsnn_jax, opsnn_jax.kernels, opsnn_jax.training
for package in (opsnn_jax, opsnn_jax.kernels, opsnn_jax.training):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
assert str(jax.config.values) == before
jax.config.update("jax_num_cpu_devices", 3)  # an error once a backend has started
print(jax.device_count())
"""


def _python(code):
    environment = os.environ | {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )


def test_importing_every_module_warns_of_nothing_and_sets_nothing():
    # What those packages warn of as they are imported is theirs.
    others = "flax.linen, flax.nnx, optax, chex, pydantic, rich, matplotlib, hypothesis"
    others += ", jax.experimental.pallas"
    done = _python(_EVERYTHING.format(others=others))
    assert done.stdout == "3\n", done.stderr[-2000:]


def test_import_is_light_and_starts_no_backend():
    environment = os.environ | {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", _LIGHT],
        capture_output=True, text=True, env=environment,
    )  # fmt: skip
    assert done.stderr == ""
    assert done.stdout.split("\n")[:2] == ["[]", "3"]


def _modules():
    for info in pkgutil.walk_packages(opsnn_jax.__path__, "opsnn_jax."):
        source = importlib.util.find_spec(info.name).origin
        if source and ">>>" in pathlib.Path(source).read_text():
            yield info.name
    for name in ("opsnn_jax.kernels", "opsnn_jax.training"):
        package = importlib.import_module(name)
        for info in pkgutil.walk_packages(package.__path__, f"{name}."):
            source = importlib.util.find_spec(info.name).origin
            if source and ">>>" in pathlib.Path(source).read_text():
                yield info.name


def _marks(name):
    return [pytest.mark.aot] if name == "opsnn_jax.aot.compile" else []


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=_marks(n)) for n in sorted(set(_modules()))]
)
def test_examples_in_docstrings(name):
    results = doctest.testmod(importlib.import_module(name))
    assert results.attempted > 0
    assert results.failed == 0


def test_readme_runs():
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert len(code.splitlines()) <= 30
    scope = {}
    with jax.numpy_dtype_promotion("standard"):  # as users have it
        exec(compile(code, "README.md", "exec"), scope)
    assert scope["y"].shape == (8, 28, 28, 64)
    assert scope["out"].shape == (2, 1024, 8, 64)
    assert int(scope["metrics"]["step"]) == 1


def test_attention_page_runs():
    scope = {}
    text = (ROOT / "docs" / "attention.md").read_text()
    for code in re.findall(r"```python\n(.*?)```", text, re.S):
        exec(compile(code, "attention.md", "exec"), scope)
    assert scope["out"].shape == scope["block"](scope["q"]).shape == (2, 100, 8, 64)


def test_everything_exported_is_documented():
    documents = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    text = "\n".join(path.read_text() for path in documents)
    names = {n for n, v in vars(opsnn_jax).items() if callable(v) and n[0] != "_"}
    assert names >= {"conv2d", "flash_attention"}
    missing = {n for n in names if n not in text or not getattr(opsnn_jax, n).__doc__}
    assert not missing
