"""A primitive that becomes another function on every platform.

Which platform a computation is for is known only when it is lowered. So what is traced
is one primitive with a parameter `run`, and its lowering asks that for the function.
Shapes, dtypes and derivatives are those of a form in plain JAX.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import jax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

# The platforms that a computation can be lowered for.
PLATFORMS = ("cpu", "tpu", "cuda", "rocm")


class Target(NamedTuple):
    """What a computation is lowered for.

    Attributes:
      platform: one of `PLATFORMS`.
      devices: over how many of them XLA partitions it; 1 inside `jax.shard_map`.
      export: it is exported, to be compiled elsewhere and later.
    """

    platform: str
    devices: int = 1
    export: bool = False


class Run(Protocol):
    """What the primitive runs. Hashable, so that it can be cached."""

    def on(self, target: Target) -> Callable:
        """The function of the arrays there; raises NotImplementedError without one."""

    def as_plain(self) -> Callable:
        """The same function in plain JAX."""


_platform_p = Primitive("opsnn_pass")
_platform_p.multiple_results = True


def bind(run: Run, *arrays: jax.Array) -> list[jax.Array]:
    """The results of `run.on(platform)` of the arrays."""
    return _platform_p.bind(*arrays, run=run)


@dataclass(frozen=True)
class _Batched:
    """A pass under vmap: each platform's function, mapped."""

    inner: Run
    in_axes: tuple[int | None, ...]

    def on(self, target):
        return jax.vmap(self.inner.on(target), self.in_axes)

    def as_plain(self):
        return jax.vmap(self.inner.as_plain(), self.in_axes)


@functools.lru_cache(maxsize=4096)
def _jitted(run):
    return jax.jit(functools.partial(bind, run))


@_platform_p.def_impl
def _run_eagerly(*arrays, run):
    # Under jax.disable_jit too: only what is compiled has a platform.
    with jax.disable_jit(False):
        return _jitted(run)(*arrays)


@functools.lru_cache(maxsize=4096)
def _out_shapes(run, *specs):
    # Of the plain form: Pallas refuses to be traced in shard_map without its types.
    return jax.tree.leaves(jax.eval_shape(run.as_plain(), *specs))


@_platform_p.def_abstract_eval
def _abstract(*avals, run):
    specs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
    # All inputs vary over the same mesh axes, see align_varying; so do the outputs.
    manual, mesh = avals[0].manual_axis_type, avals[0].sharding.mesh
    return [
        ShapedArray(
            o.shape,
            o.dtype,
            sharding=NamedSharding(mesh, PartitionSpec(*(None,) * len(o.shape))),
            manual_axis_type=manual,
        )
        for o in _out_shapes(run, *specs)
    ]


def _lower(platform, ctx, *operands, run):
    module = ctx.module_context
    # Inside shard_map the context is a mesh, and has no such number.
    devices = getattr(module.axis_context, "num_devices", None) or 1
    target = Target(platform, devices, module.lowering_parameters.for_export)

    def leaves(*arrays):
        return jax.tree.leaves(run.on(target)(*arrays))

    # By now the code is that of one shard: what varies over the mesh no longer matters,
    # and Pallas's interpreter cannot follow it.
    local = [ShapedArray(a.shape, a.dtype) for a in ctx.avals_in]
    lower = mlir.lower_fun(leaves, multiple_results=True)
    return lower(ctx.replace(avals_in=local), *operands)


for _platform in PLATFORMS:
    mlir.register_lowering(
        _platform_p, functools.partial(_lower, _platform), platform=_platform
    )


def _batch(arrays, axes, *, run):
    # An axis that is not mapped is None, here as in the public form of vmap.
    mapped = _Batched(run, tuple(axes))
    if any(
        d is not None and a.shape[d] == 0 for a, d in zip(arrays, axes, strict=True)
    ):
        # No kernel has an empty grid.
        outs = jax.tree.leaves(mapped.as_plain()(*arrays))
    else:
        outs = bind(mapped, *arrays)
    return outs, [0] * len(outs)


batching.primitive_batchers[_platform_p] = _batch


def _jvp(primals, tangents, *, run):
    # Reached by derivatives of a backward pass: the op itself has its own rule.
    def leaves(*arrays):
        return jax.tree.leaves(run.as_plain()(*arrays))

    tangents = [ad.instantiate_zeros(t) for t in tangents]
    return jax.jvp(leaves, primals, tuple(tangents))


ad.primitive_jvps[_platform_p] = _jvp
