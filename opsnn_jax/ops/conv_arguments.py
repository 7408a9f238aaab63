"""The arguments of a convolution: what a caller can get wrong is found here, once."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from opsnn_jax.kernels.conv.epilogue import ACTIVATIONS
from opsnn_jax.kernels.conv.spec import ConvSpec

from .arguments import as_int, as_precision

Padding = str | int | Sequence[int] | Sequence[tuple[int, int]]

_RANKS = (1, 2, 3)


def validate(
    op: str,
    rank: int | None,
    x: jax.Array | np.ndarray,
    w: jax.Array | np.ndarray,
    b: jax.Array | np.ndarray | None,
    residual: jax.Array | np.ndarray | None = None,
    *,
    strides: int | Sequence[int] = 1,
    padding: Padding = "SAME",
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    activation: str | None = None,
    precision: lax.PrecisionLike = None,
) -> ConvSpec:
    """Checks that everything fits together; `rank` None is that of x.

    Raises:
      ValueError, TypeError: as `conv` does, in the name of `op`.
    """
    if rank is None:
        rank = x.ndim - 2
        if rank not in _RANKS:
            raise ValueError(
                f"{op}: x must have shape (N, *S, C) with one to three spatial "
                f"dimensions; got {x.shape}. Add a batch dimension with x[None]."
            )
    if x.ndim != rank + 2:
        raise ValueError(
            f"{op}: x must have {rank + 2} dimensions, (N, {_spatial(rank)}, C); got "
            f"shape {x.shape}. Add a batch dimension with x[None]."
        )
    check_filter(op, rank, w)
    for name, a in (("w", w), ("b", b), ("residual", residual)):
        if a is not None and a.dtype != x.dtype:
            raise TypeError(
                f"{op}: {name} must have the dtype of x, {x.dtype}; got {a.dtype}. "
                f"Cast it with {name}.astype(x.dtype)."
            )
    groups = as_groups(op, groups)
    channels, outputs = x.shape[-1], w.shape[-1]
    if channels % groups or outputs % groups:
        raise ValueError(
            f"{op}: groups must divide C = {channels} and O = {outputs}; got {groups}."
        )
    if w.shape[-2] * groups != channels:
        wanted = (*w.shape[:-2], channels // groups, "O")
        raise ValueError(
            f"{op}: w must have shape (*kernel, C / groups, O) = "
            f"({', '.join(map(str, wanted))}); got {w.shape} with x {x.shape}, "
            f"groups={groups}."
        )
    if 0 in w.shape[:-2]:
        raise ValueError(f"{op}: the kernel must not be empty; got w {w.shape}.")
    if b is not None and b.shape != (outputs,):
        raise ValueError(f"{op}: b must have shape (O,) = ({outputs},); got {b.shape}.")

    check_activation(op, activation)
    strides = _per_dimension(op, "strides", strides, rank)
    dilation = _per_dimension(op, "dilation", dilation, rank)
    spec = ConvSpec(
        x.shape, w.shape, jnp.dtype(x.dtype).name, strides, ((0, 0),) * rank, dilation,
        groups, _precision(op, precision), activation,
    )  # fmt: skip
    spec = dataclasses.replace(spec, padding=resolve_padding(op, padding, spec))
    for size, pads in zip(spec.spatial, spec.padding, strict=True):
        if size + sum(pads) < 0:
            raise ValueError(
                f"{op}: padding must not crop more than there is; got {pads} for a "
                f"dimension of size {size}."
            )
    if residual is not None and residual.shape != spec.y_shape:
        raise ValueError(
            f"{op}: residual must have the shape of the result, {spec.y_shape}; got "
            f"{residual.shape}."
        )
    return spec


def as_groups(op: str, groups: int) -> int:
    """`groups` as an int of at least 1; else TypeError or ValueError."""
    groups = as_int(op, "groups", groups)
    if groups < 1:
        raise ValueError(f"{op}: groups must be at least 1; got {groups}.")
    return groups


def check_filter(op: str, rank: int | None, w: jax.Array | np.ndarray) -> None:
    """Raises ValueError if w has the wrong number of dimensions; `rank` None is any."""
    if w.ndim - 2 not in (_RANKS if rank is None else (rank,)):
        wanted = "three to five" if rank is None else rank + 2
        kernel = "*kernel" if rank is None else f"kernel of {rank}"
        raise ValueError(
            f"{op}: w must have {wanted} dimensions, ({kernel}, C / groups, O); got "
            f"shape {w.shape}."
        )


def check_activation(op: str, activation: str | None) -> None:
    """Raises ValueError for anything but None and a name in `ACTIVATIONS`."""
    if activation is not None and (
        not isinstance(activation, str) or activation not in ACTIVATIONS
    ):
        names = ", ".join(map(repr, ACTIVATIONS))
        raise ValueError(
            f"{op}: activation must be None or one of {names}; got {activation!r}. "
            "Apply another to the result."
        )


def _precision(op, precision):
    # A pair is for the operands of each product, as in lax.
    if isinstance(precision, tuple) and len(precision) == 2:
        return tuple(as_precision(op, p) for p in precision)
    if isinstance(precision, lax.DotAlgorithmPreset):
        return precision
    return as_precision(op, precision)


def _per_dimension(op, name, value, rank) -> tuple[int, ...]:
    value = value.tolist() if isinstance(value, np.ndarray) else value
    if isinstance(value, Sequence) and not isinstance(value, str):
        values = tuple(as_int(op, name, v) for v in value)
    else:
        values = (as_int(op, name, value),) * rank
    if len(values) != rank or min(values) < 1:
        raise ValueError(
            f"{op}: {name} must be a positive int, or {rank} of them; got {value!r}."
        )
    return values


def resolve_padding(op, padding, spec) -> tuple[tuple[int, int], ...]:
    """The (low, high) padding of each spatial dimension."""
    if isinstance(padding, str):
        kind = padding.upper()
        if kind == "CAUSAL" and spec.rank == 1:
            return ((spec.extent[0] - 1, 0),)
        if kind not in ("SAME", "SAME_LOWER", "VALID"):
            causal = ', "CAUSAL"' if spec.rank == 1 else ""
            raise ValueError(
                f'{op}: padding must be "SAME", "SAME_LOWER", "VALID"{causal}, an int, '
                "or an int or (low, high) pair for each dimension; got "
                f"{padding!r}. Pass one of these."
            )
        return tuple(lax.padtype_to_pads(spec.spatial, spec.extent, spec.strides, kind))
    if isinstance(padding, np.ndarray):
        padding = padding.tolist()
    if not isinstance(padding, Sequence):
        return ((as_int(op, "padding", padding),) * 2,) * spec.rank
    if len(padding) != spec.rank:
        raise ValueError(
            f"{op}: padding must have one entry for each of the {spec.rank} spatial "
            f"dimensions; got {len(padding)} in {padding!r}."
        )
    pairs = []
    for entry in padding:
        entry = entry.tolist() if isinstance(entry, np.ndarray) else entry
        pair = tuple(entry) if isinstance(entry, Sequence) else (entry, entry)
        if len(pair) != 2:
            raise ValueError(
                f"{op}: each padding entry must be an int or a (low, high) pair; "
                f"got {entry!r} in {padding!r}."
            )
        pairs.append(tuple(as_int(op, "padding", p) for p in pair))
    return tuple(pairs)


def _spatial(rank: int) -> str:
    return ", ".join("DHW"[-rank:]) if rank > 1 else "L"
