"""How fast a program could run at most: its flops and bytes at published rates."""

from collections.abc import Sequence

from opsnn_jax.aot.report import Memory, Roofline, Schedule
from opsnn_jax.aot.targets import Target


def choose_rate(target: Target, dtypes: Sequence[str], highest: bool) -> str:
    """The dtype whose peak bounds the matrix products of a program.

    Args:
      target: the device.
      dtypes: names of the dtypes of all arguments.
      highest: some product in the program asks for `precision="highest"`.

    Where the precision is not known to be full, the faster rate is taken, so that the
    bound stays a bound: JAX's default runs float32 products in one bfloat16 pass on a
    TPU and in TensorFloat-32 on a GPU.
    """
    wide = any(d in ("float32", "float64") for d in dtypes)
    half = any(d in ("bfloat16", "float16") for d in dtypes)
    if not wide and not half and any(d in ("int8", "uint8") for d in dtypes):
        return "int8"
    if wide and not half:
        if highest:
            return "float32"
        return "bfloat16" if target.platform == "tpu" else "tensorfloat32"
    return "bfloat16"


def find_roofline(
    target: Target,
    rate: str,
    flops: float | None,
    traffic: float | None,
    memory: Memory,
    kernels: int,
    schedule: Schedule | None,
) -> Roofline:
    """The bounds of one program.

    Arguments are read and outputs written once, unless XLA says that less is enough,
    as where a few rows of a table are gathered. (It mostly says more, because it counts
    again what is kept in VMEM; so its figure, `traffic`, is no lower bound itself.)
    """
    seconds, launch = None, kernels * target.launch
    if schedule:
        cycles = schedule.cycles + (schedule.stalls or 0) + schedule.program
        seconds, launch = cycles / target.clock, schedule.program / target.clock
    moved = memory.arguments + memory.outputs - memory.aliased
    if traffic is not None:
        moved = min(moved, traffic)
    return Roofline(
        rate=rate,
        compute=None if flops is None else flops / target.peak[rate],
        memory=moved / target.bandwidth,
        launch=launch,
        schedule=seconds,
    )
