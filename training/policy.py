"""Which dtype parameters are kept, used and returned in.

**Cast at each use.** `cast_to_compute` belongs where a weight is used, not once at the
top of a step. The gradient of a cast is a cast back, so a weight cast once collects the
cotangents of all its uses in half precision, where sums stick or overflow: an fp16
weight closed over by a scan of 70,000 steps that each contribute 1 gets the gradient
2048, because 2048 + 1 = 2048 in fp16. Cast inside the body of the scan, each use's
cotangent becomes fp32 before it is added, and the gradient is 70,000.

    def body(carry, x):
        return carry + x @ policy.cast_to_compute(w), None    # here, not above the scan

Flax modules already do so: they keep `param_dtype` and cast to `dtype` in each call.
Give them `dtype=policy.compute` (and leave `param_dtype` float32).
"""

import contextlib
import re
from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp

from .leaves import PyTree, is_float, path_name
from .loss_scale import DynamicLossScale, LossScale, NoLossScale

_NAMED = {
    "float32": ("float32", "float32", "float32"),
    "mixed_float16": ("float32", "float16", "float32"),
    "mixed_bfloat16": ("float32", "bfloat16", "float32"),
}
_SHORT = {
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "mixed_fp16": "mixed_float16",
    "mixed_bf16": "mixed_bfloat16",
}
_DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True)
class Policy:
    """Dtypes of a model. Immutable and hashable.

    Attributes:
      params: of the parameters that are kept and updated, the master weights.
      compute: of matrix products and convolutions.
      output: of what a model returns, hence of the loss.
      accumulate: of the sum of the gradients over micro-batches. Half precision halves
        its memory and costs digits: 1000 equal terms in bf16 come to 256 of them. What
        is added is no longer scaled: small gradients vanish in fp16, not in bf16.
      reduce: of the sum of the gradients over devices, under `jax.shard_map`. The same
        holds for it.
      rules: pairs (pattern, dtype). A parameter whose path, `block_0/norm/scale` say,
        has a match of the regular expression is computed in that dtype instead. The
        first match counts.

    Raises:
      ValueError: for a dtype other than fp32, bf16, fp16 and fp64, for fp64 where JAX
        has not enabled it, and for a pattern that is no regular expression.
    """

    params: Any = "float32"
    compute: Any = "float32"
    output: Any = "float32"
    accumulate: Any = "float32"
    reduce: Any = "float32"
    rules: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self):
        for field in ("params", "compute", "output", "accumulate", "reduce"):
            object.__setattr__(self, field, _dtype(field, getattr(self, field)))
        rules = tuple((_pattern(p), _dtype(f"rule {p!r}", d)) for p, d in self.rules)
        object.__setattr__(self, "rules", rules)

    @classmethod
    def parse(cls, text: str) -> "Policy":
        """A policy from its name or its parts.

        Args:
          text: "mixed_float16", "mixed_bfloat16" or "float32" (in short "mixed_fp16",
            "mixed_bf16", "fp32"), or parts such as "params=float32,compute=bfloat16,
            output=float32". A part that is left out is float32.

        Raises:
          ValueError: for anything else.

        Example:
          >>> Policy.parse("mixed_float16").compute
          dtype('float16')
        """
        name = _SHORT.get(text, text)
        if name in _NAMED:
            return cls(*_NAMED[name])
        allowed = [f.name for f in fields(cls) if f.name != "rules"]
        parts = {}
        for part in text.split(","):
            key, equals, value = (s.strip() for s in part.partition("="))
            if not equals or key not in allowed or key in parts:
                raise ValueError(
                    f"Policy: expected {', '.join(map(repr, _NAMED))}, or parts of the "
                    "form 'params=float32,compute=bfloat16,output=float32', each once; "
                    f"got {text!r}."
                )
            parts[key] = value
        return cls(**parts)

    def cast_to_params(self, tree: PyTree) -> PyTree:
        """The tree with floating leaves in `params`; other leaves are untouched."""
        return _cast(tree, self.params)

    def cast_to_compute(self, tree: PyTree) -> PyTree:
        """The tree with floating leaves in `compute`, or what a rule says for its path.

        Call it at each use of a parameter, see the head of this module. A path begins
        at the tree that is given, so rules need the tree of all parameters or a part of
        it that still carries the names.
        """
        if not self.rules:
            return _cast(tree, self.compute)

        def cast(path, leaf):
            return _cast(leaf, self.compute_dtype(path_name(path)))

        return jax.tree.map_with_path(cast, tree)

    def cast_to_output(self, tree: PyTree) -> PyTree:
        """The tree with floating leaves in `output`; other leaves are untouched."""
        return _cast(tree, self.output)

    def compute_dtype(self, path: str) -> Any:
        """The dtype that the parameter with this path is computed in."""
        for pattern, dtype in self.rules:
            if re.search(pattern, path):
                return dtype
        return self.compute

    def default_loss_scale(self) -> LossScale:
        """Dynamic where anything is computed in fp16, whose range is small, or none."""
        used = (self.compute, *(dtype for _, dtype in self.rules))
        return DynamicLossScale() if jnp.dtype("float16") in used else NoLossScale()


def _cast(tree: PyTree, dtype: Any) -> PyTree:
    return jax.tree.map(lambda x: x.astype(dtype) if is_float(x) else x, tree)


def _dtype(field: str, given: Any) -> Any:
    dtype = None
    if given is not None:  # which numpy takes for float64
        name = _SHORT.get(given, given) if isinstance(given, str) else given
        with contextlib.suppress(TypeError):
            dtype = jnp.dtype(name)
    if dtype is None or dtype.name not in _DTYPES:
        raise ValueError(
            f"Policy: {field} must be one of {', '.join(map(repr, _DTYPES))}; "
            f"got {given!r}."
        )
    # JAX would compute in fp32 and only warn.
    if dtype.name == "float64" and not jax.config.jax_enable_x64:
        raise ValueError(
            f"Policy: {field} is float64, which JAX turns into float32 unless told "
            "otherwise. Set the environment variable JAX_ENABLE_X64=1."
        )
    return dtype


def _pattern(given: str) -> str:
    try:
        re.compile(given)
    except re.error as e:
        raise ValueError(
            f"Policy: rules must begin with a regular expression; got {given!r}: {e}."
        ) from e
    return given
