"""What a compilation for an absent device found out. Frozen, and plain data in JSON."""

import dataclasses
import json
from dataclasses import dataclass


@dataclass(frozen=True)
class Unit:
    """The use of one kind of issue slot over a whole run of a kernel.

    Attributes:
      name: the compiler's name: MXU, VALU, EUP, XLU, VLOAD, VSTORE, ...
      slots: how many of it one bundle can issue.
      used: slots filled, every bundle counted as often as it is issued.
    """

    name: str
    slots: int
    used: int

    @property
    def cycles(self) -> int:
        """The fewest cycles in which this unit alone could issue its work."""
        return -(-self.used // self.slots)


@dataclass(frozen=True)
class Loop:
    """One loop of a kernel's schedule.

    Attributes:
      first: index of its first bundle.
      last: index of its last bundle, branch delay slots included.
      depth: 1 for an outermost loop.
      trips: iterations each time it is entered, on average; None where data decides:
        then it counts as if its counter started from 0, or once if that tells nothing.
      cycles: bundles issued inside it in one run of the kernel.
      innermost: no loop lies inside it.
      fills: vector registers read back from their spill slots, in one run.
      spills: vector registers written to spill slots, in one run.
    """

    first: int
    last: int
    depth: int
    trips: float | None
    cycles: int
    innermost: bool
    fills: int
    spills: int


@dataclass(frozen=True)
class Lane:
    """The use of one unit along the schedule, for drawing.

    `use[i]` is the mean share of its slots filled in the i-th of equal stretches of the
    schedule, each bundle counted once.
    """

    name: str
    use: tuple[float, ...]


@dataclass(frozen=True)
class Kernel:
    """The static schedule of one kernel, in one run.

    Attributes:
      name: the name of the XLA instruction.
      calls: how often the program runs it.
      bundles: length of the schedule.
      cycles: issue cycles. Code that a branch skips because of a loop's counter counts
        as often as it runs, what one skips because of data as run.
      stalls: cycles in which nothing issues, which the compiler has folded into delays
        and which are no bundles of their own; None where it did not say.
      units: what the bundles do.
      loops: in the order of their first bundle.
      fills: vector registers read back from spill slots.
      spills: vector registers written to spill slots.
      lanes: `units` along the schedule.
      undecided: those of code that a branch may skip because of data.
    """

    name: str
    calls: int
    bundles: int
    cycles: int
    stalls: int | None
    units: tuple[Unit, ...]
    loops: tuple[Loop, ...]
    fills: int
    spills: int
    lanes: tuple[Lane, ...]
    undecided: int

    @property
    def innermost_spills(self) -> int:
        """Fills and spills inside innermost loops: where they cost most."""
        return sum(loop.fills + loop.spills for loop in self.loops if loop.innermost)

    @property
    def unknown_trips(self) -> bool:
        return any(loop.trips is None for loop in self.loops)


@dataclass(frozen=True)
class Schedule:
    """The static schedules of all kernels of a TPU program.

    Attributes:
      kernels: most expensive first. Of equal ones, which the compiler compiles once,
        each is there.
      cycles: issue cycles of all kernels, their calls counted.
      stalls: the stalls of all kernels, or None.
      program: issue cycles of the scalar code that calls the kernels.
      unread: kernels that the program calls and whose schedule was not found.
      unknown_trips: the length of some loop, in a kernel or the program, depends on
        data.
    """

    kernels: tuple[Kernel, ...]
    cycles: int
    stalls: int | None
    program: int
    unread: tuple[str, ...] = ()
    unknown_trips: bool = False

    @property
    def undecided(self) -> int:
        return sum(k.undecided * k.calls for k in self.kernels)

    @property
    def fills(self) -> int:
        return sum(k.fills * k.calls for k in self.kernels)

    @property
    def spills(self) -> int:
        return sum(k.spills * k.calls for k in self.kernels)

    @property
    def innermost_spills(self) -> int:
        return sum(k.innermost_spills * k.calls for k in self.kernels)


@dataclass(frozen=True)
class GpuKernel:
    """What ptxas said of one GPU kernel.

    Attributes:
      name: of the entry, or of the dump of Mosaic GPU.
      registers: of a thread.
      spill_stores: bytes a thread writes of registers that did not fit.
      spill_loads: bytes it reads back.
      shared_memory: bytes of a block; None where the launch does not say.
    """

    name: str
    registers: int
    spill_stores: int
    spill_loads: int
    shared_memory: int | None


@dataclass(frozen=True)
class Memory:
    """Bytes of device memory the program needs. `aliased` is counted in two of them."""

    arguments: int
    outputs: int
    temporaries: int
    aliased: int

    @property
    def peak(self) -> int:
        return self.arguments + self.outputs + self.temporaries - self.aliased


@dataclass(frozen=True)
class Roofline:
    """Lower bounds on the run time, in seconds, from published rates.

    Attributes:
      rate: the dtype whose peak rate the compute bound uses.
      compute: flops over that peak; None where they are not known.
      memory: the bytes that must move over the memory bandwidth.
      launch: the cost of starting the kernels: on a TPU the scalar code around them,
        at the target's clock; on a GPU a cost for each.
      schedule: the static schedule at the target's clock, stalls and the scalar code
        included; None without a schedule.
    """

    rate: str
    compute: float | None
    memory: float
    launch: float
    schedule: float | None

    @property
    def bounds(self) -> dict[str, float]:
        """Those of compute, memory and launch that are known."""
        known = {"memory": self.memory, "launch": self.launch}
        return known if self.compute is None else {"compute": self.compute, **known}

    @property
    def bound(self) -> str:
        """Which of the bounds binds."""
        return max(self.bounds, key=self.bounds.__getitem__)

    @property
    def seconds(self) -> float:
        return max(self.bounds.values())

    @property
    def gap(self) -> float | None:
        """How many times longer the schedule is than the roofline allows."""
        return self.schedule / self.seconds if self.schedule is not None else None


@dataclass(frozen=True)
class Report:
    """The verdict of a device's compiler on one function.

    Attributes:
      name: what was compiled.
      target: for what.
      ok: the compiler took it.
      stage: where it ended: "trace" (the function itself failed), "lower", "compile",
        "crash" or "timeout"; "done" if `ok`.
      error: the first meaningful lines of the message, what the compiler wrote beside
        it, and the line of the function that raised; empty if `ok`.
      toolchain: package -> version of what compiled it.
      memory, flops, bytes: of the compiled program; None unless `ok`. flops and bytes
        are XLA's estimates, and None also where it makes none or sees only kernels
        that state no cost.
      schedule: TPU only.
      gpu_kernels: GPU only.
      gpu_unread: how many GPU kernels are missing there.
      roofline: None unless `ok`.
      notes: what a reader of the figures must know.
    """

    name: str
    target: str
    ok: bool
    stage: str
    error: str
    toolchain: dict[str, str]
    memory: Memory | None = None
    flops: float | None = None
    bytes: float | None = None
    schedule: Schedule | None = None
    gpu_kernels: tuple[GpuKernel, ...] = ()
    gpu_unread: int = 0
    roofline: Roofline | None = None
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        """What `opsnn compile` prints."""
        from opsnn_jax.aot.table import as_text

        return as_text([self])

    def to_json(self) -> str:
        """The report as JSON, with the derived figures beside what they derive from."""
        data = dataclasses.asdict(self)
        if self.memory:
            data["memory"]["peak"] = self.memory.peak
        if self.roofline:
            for name in ("bound", "seconds", "gap"):
                data["roofline"][name] = getattr(self.roofline, name)
        if self.schedule:
            for name in ("fills", "spills", "innermost_spills"):
                data["schedule"][name] = getattr(self.schedule, name)
        return json.dumps(data, indent=1)
