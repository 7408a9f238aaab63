"""The compilers of absent devices: which are needed, and are they here."""

from importlib import metadata
from importlib.util import find_spec

from opsnn_jax.aot.targets import Target


class MissingToolchain(RuntimeError):
    """The compiler for a target is not installed. The message says what to install."""


# platform -> importable module -> distribution that brings it.
_NEEDED = {
    "tpu": {"cloudpickle": "cloudpickle", "libtpu": "libtpu"},
    "cuda": {
        "cloudpickle": "cloudpickle",
        "jax_cuda13_plugin": "jax-cuda13-plugin",
        "jax_plugins.xla_cuda13": "jax-cuda13-pjrt",
        "nvidia.cu13": "nvidia-cuda-nvcc",
    },
}


def require_toolchain(target: Target) -> None:
    """Raises MissingToolchain, in one line, where `target` cannot be compiled for."""
    missing = [d for m, d in _NEEDED[target.platform].items() if not _importable(m)]
    if not missing:
        return
    if target.platform == "tpu":
        install = "pip install 'opsnn-jax[aot]'"
    else:
        version = metadata.version("jax")
        install = (
            f"pip install cloudpickle jax-cuda13-plugin=={version} "
            f"jax-cuda13-pjrt=={version} nvidia-cuda-nvcc nvidia-nvvm (0.7 GB)"
        )
    raise MissingToolchain(
        f"compile: target {target.name} needs {', '.join(missing)}. Run: {install}"
    )


def toolchain_versions(target: Target) -> dict[str, str]:
    """The versions that decide what code comes out."""
    names = ["jax", "jaxlib", *_NEEDED[target.platform].values()]
    names.remove("cloudpickle")
    return {name: metadata.version(name) for name in names}


def _importable(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False
