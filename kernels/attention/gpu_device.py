"""What kind of GPU a kernel is compiled for."""

import jax
from jax.experimental.pallas import triton as plgpu

# Bytes of shared memory of a block, by compute capability: NVIDIA, "CUDA C++
# Programming Guide", table "Technical specifications per compute capability".
_KIB = 1024
_SHARED_MEMORY = {
    80: 163 * _KIB,
    87: 163 * _KIB,
    90: 227 * _KIB,
    100: 227 * _KIB,
    103: 227 * _KIB,
    110: 227 * _KIB,
}
_LEAST_SHARED_MEMORY = 99 * _KIB


def capability() -> int | None:
    """The compute capability of the GPU to compile for, times ten; None if it need not
    be known.

    Raises:
      ValueError: if this process has no GPU and was told of none.
    """
    if hasattr(plgpu, "get_gpu_info"):
        return plgpu.get_gpu_info().compute_capability
    # JAX 0.10 compiles for whatever GPU there is in the end.
    try:
        (device, *_) = jax.local_devices(backend="gpu")
    except RuntimeError:
        return None
    return round(10 * float(device.compute_capability))


def shared_memory() -> int:
    """Bytes of shared memory that a block may have; those of an A100 if not known.

    Raises:
      ValueError: as in `capability`.
    """
    known = capability()
    if known is None:
        known = 80
    return _SHARED_MEMORY.get(known, _LEAST_SHARED_MEMORY)
