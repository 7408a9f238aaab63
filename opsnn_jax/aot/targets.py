"""The devices that can be compiled for, and their published rates.

Rates are those of one JAX device, dense, at boost clock. Where a chip holds two JAX
devices (TPU v7x) they are half the chip's.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """One kind of device.

    Attributes:
      name: what users write.
      platform: "tpu" or "cuda".
      device_kind: what JAX calls it.
      peak: dtype -> operations per second of matrix products. On TPUs float32 is the
        rate of the six-pass product that `precision="highest"` runs; on GPUs it is that
        of the ordinary units, and tensorfloat32 that of the tensor cores.
      bandwidth: bytes per second from and to device memory.
      memory: bytes of device memory.
      scratch: bytes of VMEM of a core, or of shared memory a thread block can have.
      clock: Hz at which bundles issue; on GPUs the boost clock.
      launch: seconds to start one kernel. NVIDIA does not publish it, so this is an
        order of magnitude that tells programs of many tiny kernels from the rest. 0 on
        TPUs, whose kernels lie in one program: there the schedule says it.
      topology: the name under which libtpu knows a slice of it; "" for GPUs.
      sm: streaming multiprocessors; 0 for TPUs.
      compute_capability: of a GPU, (major, minor).
    """

    name: str
    platform: str
    device_kind: str
    peak: dict[str, float]
    bandwidth: float
    memory: int
    scratch: int
    clock: float
    launch: float
    topology: str = ""
    sm: int = 0
    compute_capability: tuple[int, int] = (0, 0)


def _tpu(name, kind, topology, bf16, int8, bandwidth, memory, vmem, clock):
    peak = {"bfloat16": bf16, "int8": int8, "float32": bf16 / 6}
    return Target(
        name=f"tpu-{name}",
        platform="tpu",
        device_kind=kind,
        peak=peak,
        bandwidth=bandwidth,
        memory=memory,
        scratch=vmem,
        clock=clock,
        launch=0.0,
        topology=topology,
    )


def _gpu(name, kind, bf16, tf32, fp32, int8, bandwidth, memory, smem, clock, sm, cc):
    peak = {"bfloat16": bf16, "tensorfloat32": tf32, "float32": fp32, "int8": int8}
    return Target(
        name=name,
        platform="cuda",
        device_kind=kind,
        peak=peak,
        bandwidth=bandwidth,
        memory=memory,
        scratch=smem,
        clock=clock,
        launch=2e-6,
        sm=sm,
        compute_capability=cc,
    )


_GIB = 2**30
_MIB = 2**20

_ALL = (
    # Rates, HBM and bandwidth: https://docs.cloud.google.com/tpu/docs/{v5e,v6e,v5p,
    # tpu7x}. VMEM: jax.experimental.pallas.tpu's table of TPUs. The clock is not
    # published. It is inferred, to 0.05 GHz, as the rate divided by what the matrix
    # units do in a cycle: for v5e, and for each of the two cores of v5p, 4 units of 128
    # x 128 multiply-adds; for v6e and v7x 2 units of 256 x 256 at two multiply-adds per
    # cell. With one the clock would be an implausible 3.5 GHz, and XLA's schedules of
    # large products do more than one per cell and cycle.
    _tpu(
        "v5e",
        "TPU v5 lite",
        "v5e:2x2",
        bf16=197e12,
        int8=393e12,
        bandwidth=819e9,
        memory=16 * _GIB,
        vmem=128 * _MIB,
        clock=1.5e9,
    ),
    _tpu(
        "v6e",
        "TPU v6 lite",
        "v6e:2x2",
        bf16=918e12,
        int8=1836e12,
        bandwidth=1638e9,
        memory=32 * _GIB,
        vmem=128 * _MIB,
        clock=1.75e9,
    ),
    _tpu(
        "v5p",
        "TPU v5",
        "v5p:2x2x1",
        bf16=459e12,
        int8=918e12,
        bandwidth=2765e9,
        memory=95 * _GIB,
        vmem=64 * _MIB,
        clock=1.75e9,
    ),
    # Half a chip: JAX sees each of its two cores as a device. int8 is not published; it
    # is taken to be the bf16 rate.
    _tpu(
        "v7x",
        "TPU7x",
        "tpu7x:2x2x1",
        bf16=2307e12 / 2,
        int8=2307e12 / 2,
        bandwidth=7380e9 / 2,
        memory=96 * _GIB,
        vmem=64 * _MIB,
        clock=2.2e9,
    ),
    # NVIDIA's data sheets of H200, H100 SXM, A100 SXM 80 GB and HGX B200, rates without
    # sparsity. Clocks, multiprocessors and shared memory: the device descriptions in
    # openxla/xla, xla/backends/gpu/target_config/specs.
    _gpu(
        "h200",
        "NVIDIA H200",
        bf16=989e12,
        tf32=494e12,
        fp32=67e12,
        int8=1979e12,
        bandwidth=4.8e12,
        memory=151_397_597_184,
        smem=232_448,
        clock=1.98e9,
        sm=132,
        cc=(9, 0),
    ),
    _gpu(
        "h100",
        "NVIDIA H100 80GB HBM3",
        bf16=989e12,
        tf32=494e12,
        fp32=67e12,
        int8=1979e12,
        bandwidth=3.35e12,
        memory=84_942_979_072,
        smem=232_448,
        clock=1.98e9,
        sm=132,
        cc=(9, 0),
    ),
    _gpu(
        "a100",
        "NVIDIA A100-SXM4-80GB",
        bf16=312e12,
        tf32=156e12,
        fp32=19.5e12,
        int8=624e12,
        bandwidth=2.039e12,
        memory=85_100_068_864,
        smem=166_912,
        clock=1.41e9,
        sm=108,
        cc=(8, 0),
    ),
    _gpu(
        "b200",
        "NVIDIA B200",
        bf16=2250e12,
        tf32=1100e12,
        fp32=80e12,
        int8=4500e12,
        bandwidth=8e12,
        memory=191_514_411_008,
        smem=232_448,
        clock=1.965e9,
        sm=148,
        cc=(10, 0),
    ),
)

TARGETS: dict[str, Target] = {t.name: t for t in _ALL}


def get_target(name: str) -> Target:
    """The target of that name.

    Raises:
      ValueError: if there is none; the message lists all.
    """
    if name not in TARGETS:
        raise ValueError(
            f"compile: target must be one of {', '.join(TARGETS)}; got {name!r}."
        )
    return TARGETS[name]
