"""What an op does about the mesh it runs on: arrays that differ from device to device
inside `jax.shard_map`, and shardings that are part of the types."""

from collections.abc import Callable, Sequence

import jax
from jax.sharding import NamedSharding, PartitionSpec


def align_varying(*arrays: jax.Array | None) -> tuple[jax.Array | None, ...]:
    """Makes all arrays vary over the same mesh axes, inside `jax.shard_map`.

    A replicated weight beside sharded data gets the axes of the data. The transpose of
    that cast is the sum over those axes, so the weight's gradient is summed over the
    shards with no word of it in an op's own rule. Outside shard_map nothing happens.
    """
    varying = [
        frozenset() if a is None else jax.typeof(a).manual_axis_type.varying
        for a in arrays
    ]
    union = frozenset().union(*varying)
    return tuple(
        jax.lax.pcast(a, tuple(sorted(union - has)), to="varying")
        if a is not None and union - has
        else a
        for a, has in zip(arrays, varying, strict=True)
    )


def partitioned(f: Callable, *arrays: jax.Array | None, dims: Sequence):
    """Calls `f(*arrays)` on a mesh with explicit axes.

    There shardings are part of the types, and the passes know none: XLA partitions
    them. The result is sharded as the dimensions are that it shares with the inputs.
    The cotangents get the shardings of their primals. Without such axes it is `f`.

    Args:
      f: the function.
      arrays: its arguments.
      dims: for each dimension of the result, the (array, dimension) whose sharding it
        takes, or None. A tuple of such lists where the result is a tuple of arrays.
    """
    shardings = [None if a is None else jax.typeof(a).sharding for a in arrays]
    meshes = [s.mesh for s in shardings if s is not None and s.mesh.explicit_axes]
    if not meshes:
        return f(*arrays)

    def shared(dims):
        spec, used = [], set()
        for place in dims:
            entry = None if place is None else shardings[place[0]].spec[place[1]]
            axes = set(entry) if isinstance(entry, tuple) else {entry} - {None}
            spec.append(None if axes & used else entry)
            used |= axes
        return NamedSharding(meshes[0], PartitionSpec(*spec))

    out = tuple(map(shared, dims)) if isinstance(dims, tuple) else shared(dims)
    return jax.sharding.auto_axes(f, out_sharding=out)(*arrays)
