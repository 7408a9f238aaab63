"""The library's own ops, as the contract suite runs them.

Nothing is imported before an entry is loaded, so listing the names costs nothing.
"""

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .contract import OpCase, Report, check_op

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class OpEntry:
    """One op of the library.

    Attributes:
      module, attribute: where its public function is.
      table: the op that its table of implementations in that module names.
      cases: makes its cases.
      factor: `factor(implementation, dtype, case)`, the error growth predicted for an
        implementation over the plain formula.
    """

    module: str
    attribute: str
    table: str
    cases: Callable[[], tuple[OpCase, ...]]
    factor: Callable[[str | None, Any, OpCase], float] = lambda name, dtype, case: 1.0

    def load(self) -> Callable:
        """The op.

        Raises:
          ImportError: if it cannot be imported here.
        """
        module = importlib.import_module(self.module)
        return getattr(module, self.attribute)

    def implementations(self) -> tuple[str, ...]:
        """The names in the op's table, without the reference itself."""
        from ..dispatch import Table

        found = vars(importlib.import_module(self.module)).values()
        tables = [value for value in found if isinstance(value, Table)]
        mine = next(table for table in tables if table.op == self.table)
        return tuple(mine.implementations)


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
    entry = OPS[name]
    op, known = entry.load(), entry.implementations()
    unknown = [i for i in implementations or () if i not in known]
    if unknown:
        raise ValueError(
            f"check: {name} has the implementations {', '.join(known)}; "
            f"got {unknown[0]!r}."
        )

    def reference(*args, **options):
        return op(*args, **options, implementation="reference")

    return check_op(
        op,
        reference=reference,
        cases=entry.cases(),
        implementations=tuple(implementations or (None, *known)),
        dtypes=dtypes,
        factor=entry.factor,
        seed=seed,
        progress=progress,
    )


def _generator(key) -> np.random.Generator:
    """numpy's generator for a JAX key: it compiles nothing for a new shape."""
    return np.random.default_rng(np.asarray(jax.random.key_data(key)))


def conv_case(
    name: str,
    x_shape: tuple[int, ...],
    w_shape: tuple[int, ...],
    *,
    bias: bool = False,
    transforms: bool = False,
    **options: Any,
) -> OpCase:
    """A case of a convolution: x (N, *spatial, C), w (*kernel, C/groups, O)."""

    def make_args(key, dtype):
        rng = _generator(key)
        # Outputs of about size 1, as the standard's constants expect.
        scale = math.prod(w_shape[:-1]) ** -0.5
        arrays = [rng.standard_normal(x_shape), rng.standard_normal(w_shape) * scale]
        if bias:
            arrays.append(rng.standard_normal(w_shape[-1:]))
        return tuple(jnp.asarray(array.astype(dtype)) for array in arrays)

    return OpCase(name, make_args, options, transforms)


def _conv_cases() -> tuple[OpCase, ...]:
    return (
        conv_case("3x3", (2, 8, 9, 6), (3, 3, 6, 7), transforms=True),
        conv_case("3x3 bias", (2, 5, 5, 4), (3, 3, 4, 8), bias=True),
        conv_case("1x1", (2, 5, 4, 8), (1, 1, 8, 5)),
        conv_case("stride 2", (1, 11, 8, 5), (3, 3, 5, 4), strides=2),
        conv_case("dilation 2", (1, 11, 9, 3), (3, 3, 3, 4), dilation=2),
        conv_case("groups", (2, 6, 6, 6), (3, 3, 2, 9), groups=3),
        conv_case("depthwise", (1, 7, 8, 5), (3, 3, 1, 5), groups=5),
        conv_case("valid", (1, 7, 7, 3), (5, 3, 3, 4), padding="VALID"),
        conv_case("uneven pads", (1, 6, 7, 3), (3, 2, 3, 4), padding=((2, 0), (0, 3))),
        conv_case("cropped", (1, 8, 8, 3), (3, 3, 3, 4), padding=((-1, 1), (0, -2))),
        conv_case("one pixel", (1, 1, 1, 1), (3, 3, 1, 1)),
        conv_case("prime", (1, 13, 17, 3), (3, 3, 3, 5)),
        conv_case("relu", (1, 6, 5, 4), (3, 3, 4, 6), bias=True, activation="relu"),
        conv_case("gelu", (1, 5, 6, 4), (1, 1, 4, 6), bias=True, activation="gelu"),
        conv_case(
            "channels first", (2, 6, 8, 9), (3, 3, 6, 7), layout="channels_first"
        ),
        conv_case("empty", (0, 5, 5, 3), (3, 3, 3, 4)),
    )


def _conv_factor(name, dtype, case) -> float:
    """Winograd's error over that of one rounding; other methods are direct.

    The transforms multiply an error by kappa in each of two dimensions. In fp32 it is
    that of the sums. In half precision the XLA form still multiplies in
    fp32, which leaves the rounding of the result; the TPU kernel rounds both
    multiplicands of F(2, 3) as well.
    """
    if name != "pallas_tpu" and not (name or "").startswith("winograd"):
        return 1.0
    from opsnn_jax.kernels.winograd.transforms import transform

    if dtype == jnp.float32:
        # "winograd_f6" is F(6, 3); without a number it is F(4, 3).
        m = int(name.removeprefix("winograd_f")) if "_f" in name else 4
        return transform(m, 3).kappa ** 2
    if name != "pallas_tpu":
        return 1.0
    return math.hypot(1.0, math.sqrt(2) * transform(2, 3).kappa ** 2)


def attention_case(
    name: str,
    sizes: tuple[int, int, int, int, int, int],
    *,
    bias: bool = False,
    transforms: bool = False,
    **options: Any,
) -> OpCase:
    """A case of attention, for sizes (B, T, S, N, K, H)."""
    b, t, s, n, k, h = sizes

    def make_args(key, dtype):
        rng = _generator(key)
        shapes = [(b, t, n, h), (b, s, k, h), (b, s, k, h)]
        if bias:
            shapes.append((b, n, t, s))
        return tuple(
            jnp.asarray(rng.standard_normal(shape).astype(dtype)) for shape in shapes
        )

    return OpCase(name, make_args, options, transforms)


def _attention_cases() -> tuple[OpCase, ...]:
    return (
        attention_case("plain", (2, 9, 9, 2, 2, 8), transforms=True),
        attention_case("causal", (1, 17, 17, 2, 2, 8), is_causal=True),
        attention_case("cross", (1, 5, 13, 2, 2, 4)),
        attention_case("grouped", (1, 8, 8, 4, 2, 8)),
        attention_case("one head for all", (1, 8, 11, 3, 1, 8), is_causal=True),
        attention_case("bias", (1, 7, 6, 2, 2, 8), bias=True),
        attention_case("scale", (1, 6, 6, 1, 1, 16), scale=0.5),
        attention_case("window", (1, 9, 9, 1, 1, 8), window=(2, 1)),
        attention_case(
            "bottom right",
            (1, 5, 9, 2, 1, 8),
            is_causal=True,
            causal_align="bottom_right",
        ),
        attention_case(
            "lengths", (3, 5, 9, 1, 1, 8), kv_lengths=np.array([9, 4, 0], np.int32)
        ),
        attention_case(
            "segments",
            (1, 8, 8, 1, 1, 8),
            is_causal=True,
            q_segment_ids=np.array([0, 0, 0, 1, 1, 1, 1, 2], np.int32),
        ),
        attention_case("softcap", (1, 6, 6, 2, 2, 8), softcap=1.5),
        attention_case(
            "sinks", (1, 6, 6, 2, 2, 8), sinks=np.array([0.5, -1.0], np.float32)
        ),
        attention_case("block + 1", (1, 129, 129, 1, 1, 8), is_causal=True),
        attention_case("one token", (1, 1, 1, 1, 1, 1)),
        attention_case("no keys", (1, 3, 0, 1, 1, 4)),
        attention_case("empty", (0, 4, 4, 2, 2, 4)),
    )


def _attention_factor(name, dtype, case) -> float:
    """The reference keeps the softmax and the output in float32 for its backward pass.

    Flash attention makes the softmax again as exp(score - lse): roundings of the score,
    of lse and of exp where the reference has one. In half precision it takes delta from
    an output that was rounded, which all keys of a row share, and a TPU's matrix unit
    takes the softmax and the scaled queries rounded as well.
    """
    return 3.0


OPS = {
    "conv2d": OpEntry(
        "opsnn_jax.ops.conv", "conv2d", "conv", _conv_cases, _conv_factor
    ),
    "flash_attention": OpEntry(
        "opsnn_jax.ops.attention",
        "flash_attention",
        "flash_attention",
        _attention_cases,
        _attention_factor,
    ),
}
