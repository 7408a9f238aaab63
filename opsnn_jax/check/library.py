"""The library's own ops, as the contract suite runs them.

No op is imported before it is checked, so listing the names costs nothing. What is
another form of an op here, such as `dot_product_attention`, is not here again.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import library_attention, library_conv
from .contract import OpCase, check_op
from .contract_report import Report

DTYPES = ("float32", "bfloat16", "float16")


def _no_growth(name: str | None, dtype: Any, case: OpCase) -> float:
    return 1.0


def _conv_table() -> tuple[str, ...]:
    from opsnn_jax.ops.conv_table import TABLE

    return tuple(TABLE.implementations)


def _separable_table() -> tuple[str, ...]:
    from opsnn_jax.ops.separable_table import FUSED

    return (FUSED, *_conv_table())


def _attention_table() -> tuple[str, ...]:
    from opsnn_jax.ops.attention_table import TABLE

    return tuple(TABLE.implementations)


@dataclass(frozen=True)
class OpEntry:
    """One op of the library.

    Attributes:
      cases: makes its cases.
      implementations: their names, without the reference itself.
      factor: `factor(implementation, dtype, case)`, the error growth predicted for an
        implementation over the plain formula.
      reference: the plain formula; None where `implementation="reference"` is that.
    """

    cases: Callable[[], tuple[OpCase, ...]]
    implementations: Callable[[], tuple[str, ...]] = tuple
    factor: Callable[[str | None, Any, OpCase], float] = _no_growth
    reference: Callable | None = None


def check_library_op(
    name: str, implementations=None, dtypes=DTYPES, seed: int = 0, progress=None
) -> Report:
    """Runs one of the library's ops through the contract.

    Args:
      name: a key of `OPS`.
      implementations: names, or None for the op's own choice and all in its table.
      dtypes: of the arguments.
      seed: of all random numbers.
      progress: as in `check_op`.

    Raises:
      ValueError: for an unknown op or implementation.
    """
    if name not in OPS:
        raise ValueError(f"check: op must be one of {', '.join(OPS)}; got {name!r}.")
    entry, op = OPS[name], getattr(importlib.import_module("opsnn_jax"), name)
    known = entry.implementations()
    unknown = [i for i in implementations or () if i not in known]
    if unknown:
        has = f"the implementations {', '.join(known)}" if known else "only one"
        raise ValueError(f"check: {name} has {has}; got {unknown[0]!r}.")

    def by_name(*args, **options):
        return op(*args, **options, implementation="reference")

    return check_op(
        op,
        reference=entry.reference or by_name,
        cases=entry.cases(),
        implementations=tuple(implementations or (None, *known)),
        dtypes=dtypes,
        factor=entry.factor,
        seed=seed,
        progress=progress,
    )


def _conv(cases, implementations=_conv_table) -> OpEntry:
    return OpEntry(cases, implementations, library_conv.conv_factor)


def _attention(cases, reference=None) -> OpEntry:
    factor = library_attention.attention_factor
    return OpEntry(cases, _attention_table, factor, reference)


OPS = {
    "conv1d": _conv(library_conv.conv1d_cases),
    "conv2d": _conv(library_conv.conv2d_cases),
    "conv3d": _conv(library_conv.conv3d_cases),
    "conv_transpose": _conv(library_conv.transpose_cases),
    "separable_conv2d": _conv(library_conv.separable_cases, _separable_table),
    "flash_attention": _attention(library_attention.attention_cases),
    "attention_decode": _attention(
        library_attention.decode_cases, library_attention.plain_decode
    ),
    "fused_qkv": OpEntry(
        library_attention.qkv_cases, reference=library_attention.plain_qkv
    ),
    "rotary_embedding": OpEntry(
        library_attention.rotary_cases, reference=library_attention.plain_rotary
    ),
}
