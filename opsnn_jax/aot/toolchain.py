"""The compilers of absent devices: which are needed, and are they here."""

from importlib import metadata
from importlib.machinery import ModuleSpec
from importlib.util import find_spec

from opsnn_jax.aot.targets import Target


class MissingToolchain(RuntimeError):
    """The compiler for a target is not installed. The message says what to install."""


# What sends functions and prints reports: asked for before the minutes of a compiler.
_TOOLS = ("cloudpickle", "rich")

# platform -> importable module -> distribution that brings it.
_COMPILERS = {
    "tpu": {"libtpu": "libtpu"},
    "cuda": {
        "jax_cuda13_plugin": "jax-cuda13-plugin",
        "jax_plugins.xla_cuda13": "jax-cuda13-pjrt",
        "nvidia.cu13": "nvidia-cuda-nvcc",
    },
}


def require_toolchain(target: Target) -> None:
    """Raises MissingToolchain, in one line, where `target` cannot be compiled for."""
    needed = {name: name for name in _TOOLS} | _COMPILERS[target.platform]
    missing = [d for m, d in needed.items() if find_module(m) is None]
    if not missing:
        return
    if target.platform == "tpu":
        install = "pip install 'opsnn-jax[aot]'"
    else:
        install = "pip install 'opsnn-jax[aot-gpu]' (0.7 GB)"
    raise MissingToolchain(
        f"compile: target {target.name} needs {', '.join(missing)}. Run: {install}"
    )


def toolchain_versions(target: Target) -> dict[str, str]:
    """The versions that decide what code comes out."""
    names = ("jax", "jaxlib", *_COMPILERS[target.platform].values())
    return {name: metadata.version(name) for name in names}


def find_module(name: str) -> ModuleSpec | None:
    """Where a module is, without importing it; None if it is missing."""
    try:
        return find_spec(name)
    except ModuleNotFoundError:  # its parent package is missing
        return None
