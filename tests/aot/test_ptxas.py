"""What is read of GPU kernels, and what of those that cannot be read."""

import pytest

from opsnn_jax.aot import figures
from opsnn_jax.aot.child import count_mosaic
from opsnn_jax.aot.compile import _notes
from opsnn_jax.aot.ptxas import parse_ptxas, read_kernels
from opsnn_jax.aot.report import GpuKernel
from opsnn_jax.aot.targets import get_target


def test_ptxas_output():
    said = """
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'a' for 'sm_90a'
ptxas info    : Function properties for a
    8 bytes stack frame, 16 bytes spill stores, 24 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 8 bytes stack, 4096 bytes smem
ptxas info    : Compiling entry function 'b' for 'sm_90a'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 12 registers, used 0 barriers
"""
    assert parse_ptxas(said) == [
        GpuKernel("a", 255, 16, 24, 4096),
        GpuKernel("b", 12, 0, 0, 0),
    ]


@pytest.mark.parametrize("config", ['{kernel_hash = "a, b", x = 1}', "{x = 1}"])
def test_kernels_of_mosaic_are_counted(config):
    call = f'custom-call(%x), custom_call_target="mosaic_gpu_v2", config={config}'
    text = f"%a = {call}\n%b = {call}\n%c = custom-call(%x), target=other\n"
    assert count_mosaic(text) == 1
    other = call.replace("a, b", "c").replace("x = 1", "x = 2")
    assert count_mosaic(f"{text}%d = {other}\n") == (2 if "hash" in config else 1)


def test_kernels_without_ptx_are_not_0(tmp_path):
    assert read_kernels(tmp_path, get_target("h200"), mosaic=2) == ((), 2)
    notes = _notes({"flops": 1.0, "loops": False}, get_target("h200"), None, 2)
    assert "ptxas told nothing of 2 kernel(s)" in " ".join(notes)
    unknown = GpuKernel("a", 12, 0, 0, None)
    assert "? of shared memory" in figures.gpu_kernel(unknown)
