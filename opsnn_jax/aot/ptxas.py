"""Registers, spills and shared memory of GPU kernels, as ptxas counts them."""

import dataclasses
import re
import subprocess
import tempfile
from pathlib import Path

from opsnn_jax.aot.report import GpuKernel
from opsnn_jax.aot.targets import Target
from opsnn_jax.aot.toolchain import find_module

_ENTRY = re.compile(r"Compiling entry function '([^']+)'")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
# XLA's list of launches: most kernels get their shared memory there, not in the PTX.
_LAUNCH = re.compile(r"(\S+) grid: .*shared_memory: (\d+) bytes")
# What Mosaic GPU writes of a kernel beside its PTX, and the launch in it.
_MOSAIC_LOG = ".mlir-passes.log"
_MOSAIC_LAUNCH = re.compile(r"gpu\.launch .*dynamic_shared_memory_size %c(\d+)_i32")
_USED = re.compile(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?")


def read_kernels(
    dumps: Path, target: Target, mosaic: int
) -> tuple[tuple[GpuKernel, ...], int]:
    """Assembles the dumped PTX once more, and reads what ptxas tells.

    Args:
      dumps: the folder.
      target: the device.
      mosaic: how many kernels of Mosaic GPU the program has.

    Returns:
      The kernels, those of Mosaic GPU called as their files are, NAME_0, because
      several may share a name; and how many more there are.
    """
    files = sorted(dumps.glob("*.ptx"))
    ptxas = _find_ptxas()
    if ptxas is None:
        return (), max(len(files), mosaic)
    major, minor = target.compute_capability
    arch = f"sm_{major}{minor}{'a' if major >= 9 else ''}"
    kernels: dict[str, GpuKernel] = {}  # some compilers dump a kernel twice
    for ptx in files:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
            said = subprocess.run(
                [ptxas, "-v", f"-arch={arch}", ptx, "-o", cubin.name],
                capture_output=True,
                text=True,
            ).stderr
        found = parse_ptxas(said)
        if (log := ptx.with_suffix(_MOSAIC_LOG)).exists():
            found = [_of_mosaic(k, ptx.stem, log.read_text()) for k in found]
            mosaic -= len(found)
        kernels |= {k.name: k for k in found}
    shared = {
        name: int(size)
        for path in dumps.glob("*.thunk_sequence.txt")
        for name, size in _LAUNCH.findall(path.read_text())
    }
    read = tuple(
        dataclasses.replace(k, shared_memory=max(k.shared_memory, shared[k.name]))
        if k.name in shared
        else k
        for k in kernels.values()
    )
    return read, max(mosaic, 0)


def _of_mosaic(kernel: GpuKernel, name: str, log: str) -> GpuKernel:
    launch = _MOSAIC_LAUNCH.search(log)
    shared = int(launch[1]) if launch else None
    return dataclasses.replace(kernel, name=name, shared_memory=shared)


def parse_ptxas(text: str) -> list[GpuKernel]:
    """The kernels in what `ptxas -v` wrote."""
    kernels = []
    parts = _ENTRY.split(text)
    for name, said in zip(parts[1::2], parts[2::2], strict=True):
        used, spills = _USED.search(said), _SPILLS.search(said)
        if used:
            kernels.append(
                GpuKernel(
                    name=name,
                    registers=int(used[1]),
                    spill_stores=int(spills[1]) if spills else 0,
                    spill_loads=int(spills[2]) if spills else 0,
                    shared_memory=int(used[2] or 0),
                )
            )
    return kernels


def _find_ptxas() -> Path | None:
    spec = find_module("nvidia.cu13")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(folder) / "bin" / "ptxas").exists():
            return path
    return None
