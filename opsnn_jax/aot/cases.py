"""Every Pallas kernel of the library, forward and backward, and its shapes.

A case is compiled for each of its targets by `tests/aot/test_registry.py`, and its
issue cycles are compared with `benchmarks/aot_baseline.json`.
"""

from opsnn_jax.aot.registry import Registry

KERNELS = Registry()
