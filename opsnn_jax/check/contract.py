"""The contract that every op keeps, as one suite to run an op through.

Forward and gradient against float64 by the double benchmark, gradients against finite
differences, the same bits twice, and every transform of JAX: jit, vmap over each
argument, vmap of grad, grad of grad, remat, and scan with an unchanged carry.
"""

import dataclasses
import functools
import itertools
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .arguments import (
    Arguments,
    first_line,
    is_differentiable,
    op_name,
    random_like,
    refuse_missing_dtype,
)
from .compare import NoTruth, compare
from .contract_report import ContractRow, Report
from .gradients import check_grads
from .levels import Limits, limits_of
from .transforms import TRANSFORMS


@dataclass(frozen=True)
class OpCase:
    """One call of an op.

    Attributes:
      name: for the table.
      make_args: `make_args(key, dtype)`, the positional arguments.
      options: keyword arguments of the op.
      transforms: run the transforms too. They compile a dozen programs, so one or two
        ordinary cases of an op have them, and its odd shapes do not.
    """

    name: str
    make_args: Callable[[jax.Array, Any], tuple]
    options: Mapping[str, Any] = field(default_factory=dict)
    transforms: bool = True


def draw(
    key: jax.Array,
    dtype: Any,
    shapes: Sequence[tuple[int, ...]],
    scales: Sequence[float] | None = None,
) -> tuple[jax.Array, ...]:
    """Normal arrays for `OpCase.make_args`, of deviation 1 or those of `scales`.

    By numpy's generator, which compiles nothing for a new shape.
    """
    rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))
    return tuple(
        jnp.asarray((rng.standard_normal(shape) * scale).astype(dtype))
        for shape, scale in zip(shapes, scales or (1,) * len(shapes), strict=True)
    )


def check_op(
    op: Callable,
    *,
    reference: Callable,
    cases: Sequence[OpCase],
    implementations: Sequence[str | None] = (None,),
    dtypes: Sequence[Any] = ("float32",),
    level: str | Limits = "L1",
    factor: float | Callable[[str | None, Any, OpCase], float] = 1.0,
    nonfinite: Callable[[Callable], str | None] | None = None,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> Report:
    """Runs an op through the contract.

    Args:
      op: `op(*args, **options)`, returns an array or a tuple of arrays.
      reference: the same in plain `jnp`, with the same arguments. In the op's dtype it
        is the baseline, in float64 the truth: it computes in the dtype it is given.
      cases: the calls to make.
      implementations: names to pass as `implementation=`; None passes nothing.
      dtypes: of the arguments.
      level: of the double benchmark.
      factor: multiplies its limits: a number, or `factor(implementation, dtype, case)`
        for an algorithm whose error growth is known, as Winograd's is.
      nonfinite: the op's policy on Inf and NaN. Called with each implementation of the
        op; returns what is wrong, or None.
      seed: of all random numbers.
      progress: called with the name of each row before it is made.

    Returns:
      A `Report`. A NotImplementedError from a named implementation makes a row that is
      refused, not failed; a report in which all is refused is not ok. Any other error
      of the op or of the reference makes a row that failed. A derivative that the
      finite differences cannot see is no failure: the double benchmark covers it.

    Raises:
      ValueError: for no cases, an unknown level, a dtype that JAX does not compute in
        or that a case does not make, and a case without a floating-point argument.
    """
    if not cases:
        raise ValueError("check_op: cases must hold at least one OpCase; got none.")
    limits_of(level, "check_op")
    for dtype in dtypes:
        refuse_missing_dtype("check_op", dtype)
    rows = []
    for name in implementations:
        run = op if name is None else _with_implementation(op, name)
        for dtype, case in itertools.product(map(jnp.dtype, dtypes), cases):
            if progress is not None:
                progress(f"{op_name(op)} {name or '(default)'} {dtype} {case.name}")
            growth = factor(name, dtype, case) if callable(factor) else factor
            row = _check(run, reference, case, dtype, level, growth, seed)
            if row.refused and name is None:
                # Only one that was named may: without a name the op has to choose.
                failure = f"refused, though no implementation was named: {row.refused}"
                row = dataclasses.replace(row, refused="", failures=(failure,))
            rows.append(dataclasses.replace(row, implementation=name or "(default)"))
        policy = _policy(nonfinite, run, name) if nonfinite is not None else None
        if policy is not None:
            failures = (*rows[-1].failures, f"Inf and NaN: {policy}")
            rows[-1] = dataclasses.replace(rows[-1], failures=failures)
    return Report(op_name(op), tuple(rows))


def _with_implementation(op, name):
    run = functools.partial(op, implementation=name)
    return functools.update_wrapper(run, op)


def _jitted(op, args, options):
    """`op` for arguments like `args`, as one compiled program."""
    compiled = jax.jit(Arguments(op, args).function(op, options))

    @functools.wraps(op)
    def run(*again):
        return compiled(*Arguments(op, again).leaves)

    return run


def _policy(nonfinite, run, name) -> str | None:
    try:
        return nonfinite(run)
    except Exception as error:
        refused = isinstance(error, NotImplementedError) and name is not None
        return None if refused else first_line(error)


def _arguments(case, dtype, seed) -> tuple:
    key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(case.name.encode()))
    args = case.make_args(key, dtype)
    made = [leaf.dtype for leaf in jax.tree.leaves(args) if is_differentiable(leaf)]
    if dtype not in made:
        found = ", ".join(sorted({d.name for d in made})) or "no floating-point array"
        raise ValueError(
            f"check_op: case {case.name!r} must make an argument of the dtype it is "
            f"given, {dtype}, a floating one; it makes {found}."
        )
    return args


def _check(op, reference, case, dtype, level, factor, seed) -> ContractRow:
    args = _arguments(case, dtype, seed)
    row = ContractRow("", dtype.name, case.name)
    how = dict(factor=factor, options=case.options, seed=seed)
    try:
        outcome = compare(
            _jitted(op, args, case.options),
            _jitted(reference, args, case.options),
            *args,
            grads=True,
            level=level,
            factor=factor,
            seed=seed,
        )
    except NotImplementedError as why:
        return dataclasses.replace(row, refused=str(why))
    except NoTruth as error:
        text = f"the reference must run in float64, but {error.why}"
        return dataclasses.replace(row, failures=(text,))
    except Exception as error:
        text = f"forward and gradient: {first_line(error)}"
        return dataclasses.replace(row, failures=(text,))
    try:
        return _further(row, op, reference, args, outcome, how, case.transforms)
    except Exception as error:
        text = f"derivatives and transforms: {first_line(error)}"
        return dataclasses.replace(row, failures=(text,))


def _further(row, op, reference, args, outcome, how, transforms) -> ContractRow:
    """What is asked of an op that runs and has been compared."""
    options, seed = how["options"], how["seed"]
    failures = [
        f"{part.name}: {text}" for part in outcome.rows for text in part.failures
    ]
    measured = [part for part in outcome.rows if part.ratios is not None]
    forward = [part.ratios.rms for part in measured if part.name[:2] != "d "]
    gradient = [part.ratios.rms for part in measured if part.name[:2] == "d "]
    differences = check_grads(
        op, *args, modes=("vjp",), options=options, seed=seed, repro=None
    )
    failures += [
        f"derivative in {part.argument}, {part.check}: {part.status} {part.note}"
        for part in differences.failures
    ]
    same = _same_bits(op, args, options)
    if not same:
        failures.append("two runs gave different bits")
    ran = TRANSFORMS if transforms else {}
    passed = 0
    for name, transform in ran.items():
        trouble = transform(op, reference, args, how)
        passed += not trouble
        failures += [f"{name}: {text}" for text in trouble]
    return dataclasses.replace(
        row,
        forward=max(forward, default=None),
        gradient=max(gradient, default=None),
        differences=_verdict({part.status for part in differences.rows}),
        deterministic=same,
        transforms=(passed, len(ran)),
        failures=tuple(failures),
    )


def _verdict(statuses: set[str]) -> str:
    order = ("fail", "refused", "not differentiable", "inconclusive")
    order += ("no difference", "pass")
    return next((status for status in order if status in statuses), "")


def _same_bits(op, args, options) -> bool:
    """Runs forward and gradient twice and compares every byte."""
    given = Arguments(op, args)
    f = given.function(op, options)

    rng = np.random.default_rng(0)
    out = jax.eval_shape(f, *given.leaves)
    dy = jax.tree.map(lambda y: random_like(rng, y), out)

    @jax.jit
    def both(*leaves):
        out, pull = jax.vjp(f, *leaves)
        return out, pull(dy)

    first, second = (
        [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(both(*given.leaves))]
        for _ in range(2)
    )
    return first == second
