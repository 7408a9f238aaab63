"""Compiles functions for TPUs and GPUs that are not there, and reports.

The names below are imported on first use, so that importing this package costs nothing.
"""

from importlib import import_module

_HOME = {
    "compile_for": "compile",
    "Report": "report",
    "MissingToolchain": "toolchain",
    "KernelCase": "registry",
    "Registry": "registry",
    "TARGETS": "targets",
    "Target": "targets",
}

__all__ = sorted(_HOME)


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
