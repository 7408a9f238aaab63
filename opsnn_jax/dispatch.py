"""Which implementation of an op runs, and where.

Each op owns one `Table` of implementations. Calling `Table.choose` while an op is
traced yields a `Choice`: for every pass of the op (say forward, dx, dw) and every
platform one implementation. Which platform it is, is known only when the computation
is lowered, so a pass is traced as the primitive of `lowering`. One traced function
therefore compiles for a TPU from a machine without one, and exports to cpu, tpu and
cuda together.

A Pallas kernel cannot be everywhere: XLA cannot partition it over devices, and not
every one can be exported. There the next implementation in the order takes its place
that is no kernel, if the call named none.

An implementation states what it cannot do in `refuses`, for all of its passes at once:
nothing is chosen whose gradient would raise afterwards.

One that brings its own derivatives has no passes to choose among, only one, `WHOLE`. It
runs where it is named and nowhere else.
"""

import functools
import importlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import jax

from . import recording
from .lowering import PLATFORMS, Target, bind

# The implementation argument of every op: a name, an order of preference, or None.
Requested = str | Sequence[str] | None

# The one pass of an implementation that brings its own derivatives.
WHOLE = "whole"


def deferred(module: str, name: str) -> Callable:
    """A function of `module`, which is imported at the first call.

    For kernels in Pallas: importing it takes a third of the time that JAX itself takes.
    """

    def call(*args, **kwargs):
        return getattr(importlib.import_module(module), name)(*args, **kwargs)

    call.__name__ = call.__qualname__ = name
    return call


@dataclass(frozen=True, eq=False)
class Implementation:
    """One way to compute an op, with the passes of its gradient.

    Attributes:
      name: what users write in `implementation=`.
      passes: pass name -> function `f(spec, *arrays)` that returns an array or a tuple
        of at least two. A Pallas implementation's functions also take `interpret`.
        Or the pass `WHOLE` alone: a function that JAX can differentiate.
      platforms: where it runs natively.
      refuses: `refuses(spec)` is None where the implementation can do all passes of
        the call that `spec` describes, else the reason as a clause ("takes no ...").
      pallas: its functions are Pallas kernels; named on a CPU they are interpreted.
      exports: JAX promises that what it exports of these will run in later versions.
      unprepared: `unprepared()` is None where this process can compile it natively,
        else the reason as a clause.
    """

    name: str
    passes: Mapping[str, Callable]
    platforms: tuple[str, ...] = PLATFORMS
    refuses: Callable[[Hashable], str | None] = lambda spec: None
    pallas: bool = False
    exports: bool = True
    unprepared: Callable[[], str | None] = lambda: None

    @property
    def whole(self) -> bool:
        """Whether it brings its own derivatives."""
        return WHOLE in self.passes

    def refuses_on(self, platform: str, spec: Hashable, named: bool) -> str | None:
        """The reason why it cannot run there; `named` allows the interpreter."""
        interpreted = self.pallas and named and platform == "cpu"
        if platform not in self.platforms and not interpreted:
            return f"does not run on {platform}, only on {', '.join(self.platforms)}"
        try:
            reason = self.refuses(spec)
            if reason is None and platform in self.platforms:
                reason = self.unprepared()
            return reason
        except ImportError as error:
            return f"cannot be imported with JAX {jax.__version__}: {error}"


def _in_32_bits(run):
    """`run`, traced without jax_enable_x64: kernels take no indices of 64 bits, which
    Python's integers would be."""

    def call(*arrays):
        with jax.enable_x64(False):
            return run(*arrays)

    return call


@dataclass(frozen=True)
class Pass:
    """One pass of one call: what to run on each platform. Hashable, so cacheable."""

    op: str
    name: str
    spec: Hashable
    by_platform: tuple[tuple[str, Implementation], ...]
    # The same where no kernel can run: what is tried next that is none.
    without_kernels: tuple[tuple[str, Implementation], ...]
    refused: tuple[tuple[str, str], ...]  # platform -> why nothing runs there
    plain: Callable  # the same pass as plain JAX
    # The spec that the choice was made for; what is run may keep more for a gradient.
    chosen_for: Hashable

    def on(self, target: Target) -> Callable:
        """The function of the arrays that runs there.

        Raises:
          NotImplementedError: if there is none.
        """
        chosen = dict(self.by_platform).get(target.platform)
        if chosen is None:
            raise NotImplementedError(dict(self.refused)[target.platform])
        if (reason := self._no_kernel(chosen, target)) is not None:
            chosen = dict(self.without_kernels).get(target.platform)
            if chosen is None:
                raise NotImplementedError(reason)
        run = functools.partial(chosen.passes[self.name], self.spec)
        if chosen.pallas:
            interpret = target.platform not in chosen.platforms
            run = _in_32_bits(functools.partial(run, interpret=interpret))
        return run

    def _no_kernel(self, chosen, target):
        """Why a kernel that is chosen cannot be there, or None."""
        if not chosen.pallas or target.platform not in chosen.platforms:
            return None
        if target.devices > 1:
            return (
                f"{self.op}: {chosen.name!r} is a kernel, which XLA cannot partition "
                f"over {target.devices} devices. Call the op inside jax.shard_map, or "
                "pass implementation=None."
            )
        if target.export and not chosen.exports:
            return (
                f"{self.op}: {chosen.name!r} cannot be exported. Pass "
                "implementation=None to let another one take its place there."
            )
        return None

    def as_plain(self) -> Callable:
        """The same function in plain JAX: for its derivatives, shapes and dtypes."""
        return functools.partial(self.plain, self.spec)

    def __call__(self, *arrays: jax.Array):
        """Runs the pass. Returns the array, or a tuple where there are several."""
        if (record := recording.current()) is not None:
            record.arrays[self.op, self.name, self.chosen_for] = self.spec, arrays
        if self.name == WHOLE:
            # JAX must see it: what it partitions itself cannot hide in a primitive.
            return self.plain(self.spec, *arrays)
        outs = bind(self, *arrays)
        return outs[0] if len(outs) == 1 else tuple(outs)


@dataclass(frozen=True)
class Choice:
    """The implementation of every pass of one call, by platform."""

    passes: tuple[Pass, ...]

    def __getitem__(self, name: str) -> Pass:
        return next(p for p in self.passes if p.name == name)


class Table:
    """The implementations of one op and the order in which they are tried."""

    def __init__(
        self,
        op: str,
        implementations: Sequence[Implementation],
        order: Callable[[str, str, Hashable], Sequence[str]],
        plain: Implementation,
        because: Callable[[str, str, Hashable, str], str] | None = None,
    ):
        """Makes the table of an op.

        Args:
          op: the name of the op, for messages.
          implementations: all of them.
          order: `order(pass_name, platform, spec)`, the names to try there, best first.
          plain: the implementation in plain JAX whose passes are differentiated where a
            derivative of a pass is asked for.
          because: `because(pass_name, platform, spec, implementation)`, why `order` has
            it where it has; for people.
        """
        self.op = op
        self.implementations = {i.name: i for i in implementations}
        self._order = order
        self._plain = plain
        self._because = because

    @property
    def names(self) -> tuple[str, ...]:
        """What `implementation=` may be."""
        return ("reference", *self.implementations)

    @property
    def whole(self) -> tuple[str, ...]:
        """Those of the names that bring their own derivatives."""
        whole = (i.name for i in self.implementations.values() if i.whole)
        return ("reference", *whole)

    def check(self, requested: Requested) -> None:
        """Raises ValueError for anything but names in the table, in a list or tuple."""
        if requested is None:
            return
        if isinstance(requested, list | tuple):
            unknown = [n for n in requested if n not in self.names]
        else:
            unknown = [requested] if requested not in self.names else []
        if unknown or not requested:
            given = repr(unknown[0]) if unknown else "an empty sequence"
            raise ValueError(
                f"{self.op}: implementation must be None, one of "
                f"{', '.join(map(repr, self.names))}, or a sequence of them; "
                f"got {given}."
            )
        whole = [n for n in self.whole if n in requested]
        if whole and not isinstance(requested, str):
            raise ValueError(
                f"{self.op}: {whole[0]!r} brings its own derivatives, so it is no part "
                f"of an order of preference. Pass implementation={whole[0]!r} alone."
            )

    def choose(self, requested: Requested, spec: Hashable) -> Choice:
        """Chooses for every pass and platform.

        Args:
          requested: None for the op's own order, a name for exactly that
            implementation, or a sequence of names as an order of preference.
          spec: everything static about the call. Hashable.

        Raises:
          NotImplementedError: if nothing that may run can do the call on any platform;
            the message lists each implementation with its reason.
        """
        named = isinstance(requested, str)
        plain, home = self._plain, PLATFORMS[0]
        if named:
            implementation = self.implementations[requested]
            plain = implementation if implementation.whole else plain
            home = implementation.platforms[0]
        passes = []
        for name, function in plain.passes.items():
            chosen, without_kernels, refused = [], [], []
            for platform in PLATFORMS:
                if named:
                    candidates = (requested,)
                else:
                    candidates = requested or self._order(name, platform, spec)
                implementation, reasons = self._first(candidates, platform, spec, named)
                if implementation is not None:
                    chosen.append((platform, implementation))
                else:
                    refused.append((platform, self._refusal(reasons)))
                rest = [c for c in candidates if not self.implementations[c].pallas]
                implementation, _ = self._first(rest, platform, spec, named)
                if implementation is not None:
                    without_kernels.append((platform, implementation))
            if not chosen:
                # Where what is named is at home, the reason is the call.
                raise NotImplementedError(dict(refused)[home])
            by_platform = map(tuple, (chosen, without_kernels, refused))
            passes.append(Pass(self.op, name, spec, *by_platform, function, spec))
        choice = Choice(tuple(passes))
        if (record := recording.current()) is not None:
            record.choices.append((self, requested, spec, choice))
        return choice

    def standing(
        self, requested: Requested, name: str, platform: str, spec: Hashable
    ) -> dict[str, str]:
        """For people: why each implementation is or is not tried for a pass there."""
        if requested is None:
            order = self._order(name, platform, spec)
        else:
            order = (requested,) if isinstance(requested, str) else tuple(requested)
        why = {}
        for implementation in self.implementations.values():
            each = implementation.name
            refusal = implementation.refuses_on(
                platform, spec, isinstance(requested, str)
            )
            if refusal is not None:
                why[each] = refusal
            elif implementation.whole and requested is None:
                why[each] = "runs only where it is named"
            elif each not in order:
                why[each] = "not tried" if requested is None else "not asked for"
            elif requested is not None:
                why[each] = "asked for"
            elif self._because is None:
                why[each] = f"number {order.index(each) + 1} in the order"
            else:
                why[each] = self._because(name, platform, spec, each)
        return why

    def _first(self, candidates, platform, spec, named):
        reasons = {}
        for name in candidates:
            implementation = self.implementations[name]
            reason = implementation.refuses_on(platform, spec, named)
            if reason is None:
                return implementation, reasons
            reasons[name] = reason
        return None, reasons

    def _refusal(self, reasons: Mapping[str, str]) -> str:
        tried = "; ".join(f"{name!r} {why}" for name, why in reasons.items())
        return (
            f"{self.op}: no implementation can do this call: {tried}. "
            "Pass implementation=None to let one be chosen, or 'reference'."
        )
