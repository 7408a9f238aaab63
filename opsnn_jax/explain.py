"""`explain`: which implementation of an op runs, why, and what the others cost."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from opsnn_jax.costs import count_multiplies
from opsnn_jax.lowering import PLATFORMS
from opsnn_jax.recording import recorded


@dataclass(frozen=True)
class Candidate:
    """One implementation of one pass on one platform.

    Attributes:
      name: what `implementation=` calls it.
      chosen: whether it is the one that runs.
      reason: why it is tried, or is not.
      multiplies: multiplications that it does, of matrix products and others; None
        where it cannot do the call.
      workspace: bytes of temporary memory as compiled for this machine; None where it
        was not compiled.
    """

    name: str
    chosen: bool
    reason: str
    multiplies: int | None
    workspace: int | None


@dataclass(frozen=True)
class PassExplanation:
    """One pass of one call: `candidates`, the chosen one first.

    `traffic` is the bytes of its arguments and results, which are read and written by
    every implementation.
    """

    op: str
    name: str
    platform: str
    traffic: int
    candidates: tuple[Candidate, ...]

    @property
    def chosen(self) -> str | None:
        """The name of what runs, or None if nothing can."""
        return next((c.name for c in self.candidates if c.chosen), None)


@dataclass(frozen=True)
class Explanation:
    """Every pass of every op in a call. `str` makes a table of it."""

    passes: tuple[PassExplanation, ...]

    def __getitem__(self, name: str) -> PassExplanation:
        """The first pass of that name; KeyError if there is none."""
        for each in self.passes:
            if each.name == name:
                return each
        raise KeyError(name)

    def __str__(self) -> str:
        lines = []
        for each in self.passes:
            lines.append(
                f"{each.op}, {each.name}, on {each.platform}: "
                f"{each.chosen or 'nothing can run'} "
                f"({_readable(each.traffic)}B in and out)"
            )
            for c in each.candidates:
                cost = "-" if c.multiplies is None else _readable(c.multiplies)
                space = "-" if c.workspace is None else f"{_readable(c.workspace)}B"
                mark = ">" if c.chosen else " "
                lines.append(f"{mark} {c.name:22}{cost:>9}{space:>9}  {c.reason}")
        return "\n".join(lines)


def explain(
    op: Callable, *args: Any, platform: str | None = None, compile: bool = False,
    **options: Any,
) -> Explanation:  # fmt: skip
    """Tells how `op(*args, **options)` and its gradient would be computed.

    Args:
      op: an op of this library, or any function that calls some.
      args: its arguments: arrays or `jax.ShapeDtypeStruct`. Nothing is computed.
      platform: "cpu", "tpu", "cuda" or "rocm"; by default that of this process.
      compile: also compile each implementation that can do the call on this machine,
        for its workspace. Takes seconds.
      options: the op's keyword arguments, likewise.

    Returns:
      For every op called, and every pass of its gradient with respect to the
      floating-point arguments, all implementations: which is chosen and why, what each
      multiplies, and its workspace. Columns of the printed table: name, multiplies,
      workspace, reason.

    Raises:
      ValueError: for an unknown platform, or if nothing that `op` calls has
        implementations to choose from.
      Exception: whatever the call itself would raise.

    Example:
      >>> import jax
      >>> from opsnn_jax import conv2d
      >>> x = jax.ShapeDtypeStruct((8, 28, 28, 64), "float32")
      >>> w = jax.ShapeDtypeStruct((3, 3, 1, 64), "float32")
      >>> explain(conv2d, x, w, groups=64, platform="cpu")["dw"].chosen
      'depthwise'
    """
    platform = jax.default_backend() if platform is None else platform
    platform = "cuda" if platform == "gpu" else platform
    if platform not in PLATFORMS:
        raise ValueError(
            f"explain: platform must be one of {', '.join(PLATFORMS)}; got "
            f"{platform!r}."
        )
    with recorded() as record:
        _trace_with_gradient(op, args, options)
    passes, seen = [], set()
    for table, requested, spec, choice in record.choices:
        for each in choice.passes:
            key = (table.op, each.name, spec)
            if key in seen:
                continue
            seen.add(key)
            passes.append(
                _explain_pass(table, requested, each, platform, record, compile)
            )
    if not passes:
        raise ValueError(
            f"explain: {getattr(op, '__name__', op)!r} chose no implementation: its "
            "arrays are empty, it was asked for the reference, or it was traced before "
            "under jit. Pass an op of opsnn_jax, or a function that calls one."
        )
    return Explanation(tuple(passes))


def _trace_with_gradient(op, args, options):
    # Of the options, those that stand for arrays; the others are known while tracing.
    shapes = {
        name: option
        for name, option in options.items()
        if any(isinstance(a, jax.ShapeDtypeStruct) for a in jax.tree.leaves(option))
    }
    known = {name: options[name] for name in options.keys() - shapes.keys()}
    leaves, tree = jax.tree.flatten((args, shapes))
    floating = [
        i
        for i, leaf in enumerate(leaves)
        if hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)
    ]
    arrays = [i for i, leaf in enumerate(leaves) if hasattr(leaf, "dtype")]

    def run(*traced):
        now = list(leaves)
        for i, value in zip(arrays, traced, strict=True):
            now[i] = value

        def of_floating(*values):
            each = list(now)
            for i, value in zip(floating, values, strict=True):
                each[i] = value
            args, shapes = jax.tree.unflatten(tree, each)
            return op(*args, **shapes, **known)

        y, vjp = jax.vjp(of_floating, *(now[i] for i in floating))
        return vjp(jax.tree.map(jnp.ones_like, y))

    jax.eval_shape(run, *(leaves[i] for i in arrays))


def _explain_pass(table, requested, each, platform, record, compile):
    chosen = dict(each.by_platform).get(platform)
    reasons = table.standing(requested, each.name, platform, each.spec)
    key = each.op, each.name, each.spec
    spec, arrays = record.arrays.get(key, (each.spec, None))
    candidates = []
    for implementation in table.implementations.values():
        multiplies = workspace = None
        name = implementation.name
        runs = each.name in implementation.passes and (
            implementation.refuses_on(platform, each.spec, named=True) is None
        )
        if arrays is not None and runs:
            specs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays]
            f = functools.partial(implementation.passes[each.name], spec)
            if implementation.pallas:
                # As it runs there: without a GPU there is no kind of one to plan for.
                interpret = platform not in implementation.platforms
                f = functools.partial(f, interpret=interpret)
            if not implementation.whole:  # those of a library cannot be seen
                multiplies = count_multiplies(f, *specs)
            here = platform == jax.default_backend()
            if compile and here and platform in implementation.platforms:
                memory = jax.jit(f).lower(*specs).compile().memory_analysis()
                workspace = memory.temp_size_in_bytes
        is_chosen = chosen is not None and chosen.name == name
        reason = reasons[name]
        candidates.append(Candidate(name, is_chosen, reason, multiplies, workspace))
    candidates.sort(key=lambda c: (not c.chosen, c.multiplies is None))
    return PassExplanation(
        each.op, each.name, platform, _traffic(each, spec, arrays), tuple(candidates)
    )


def _traffic(each, spec, arrays) -> int:
    if arrays is None:
        return 0
    specs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays]
    outs = jax.tree.leaves(jax.eval_shape(functools.partial(each.plain, spec), *specs))
    return sum(a.size * a.dtype.itemsize for a in (*specs, *outs))


def _readable(n: int) -> str:
    for unit in ("", "k", "M", "G"):
        if n < 1000:
            return f"{n:.3g}{unit}"
        n /= 1000
    return f"{n:.3g}T"
