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
from dataclasses import asdict, dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import tables
from .arguments import Arguments, op_name, random_like
from .compare import compare
from .gradients import check_grads
from .levels import Limits
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


@dataclass(frozen=True)
class ContractRow:
    """One implementation on one case in one dtype.

    Attributes:
      forward, gradient: root-mean-square error over the baseline's, the worst output.
      differences: verdict of the finite differences; empty where they were not asked.
      deterministic: whether two runs gave the same bits.
      transforms: those that passed, of those that were run.
      refused: the reason why the implementation does not take this call.
      failures: everything that went wrong, one sentence each.
    """

    implementation: str
    dtype: str
    case: str
    forward: float = 0.0
    gradient: float = 0.0
    differences: str = ""
    deterministic: bool = True
    transforms: tuple[int, int] = (0, 0)
    refused: str = ""
    failures: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.failures


@dataclass(frozen=True)
class Report:
    """The outcome of `check_op`."""

    op: str
    rows: tuple[ContractRow, ...]

    @property
    def ok(self) -> bool:
        """Nothing failed, and something was run."""
        return all(row.ok for row in self.rows) and any(
            not row.refused for row in self.rows
        )

    def raise_if_failed(self) -> None:
        """Raises AssertionError with the table and every failure."""
        if not self.ok:
            raise AssertionError(str(self))

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        rows = [asdict(row) | {"ok": row.ok} for row in self.rows]
        return {"op": self.op, "ok": self.ok, "rows": rows}

    def table(self):
        """A `rich` table of all rows."""
        return tables.rich_table(*self._contents())

    @property
    def details(self) -> str:
        """Every failure in full, and every reason of a refusal with its cases."""
        lines = [
            f"{self.op} {row.implementation} {row.dtype} {row.case}: {failure}"
            for row in self.rows
            for failure in row.failures
        ]
        refused: dict[tuple[str, str], dict[str, None]] = {}
        for row in self.rows:
            if row.refused:
                cases = refused.setdefault((row.implementation, row.refused), {})
                cases[row.case] = None
        lines += [
            f"{name} refused {', '.join(cases)}: {why}"
            for (name, why), cases in refused.items()
        ]
        return "\n".join(lines)

    def __str__(self) -> str:
        return tables.plain(*self._contents()) + "\n" + self.details

    def _contents(self):
        # Short words: a row is to fit a terminal of 80 characters.
        columns = ("by", "dtype", "case", "fwd", "grad")
        columns += ("slope", "bits", "transf.", "")
        short = {"not differentiable": "kink", "inconclusive": "unclear"}
        cells = []
        for row in self.rows:
            start = (row.implementation, row.dtype, row.case)
            if row.refused:
                cells.append((*start, *("",) * 5, "refused"))
                continue
            passed, run = row.transforms
            cells.append(
                (
                    *start,
                    tables.number(row.forward),
                    tables.number(row.gradient),
                    short.get(row.differences, row.differences),
                    "same" if row.deterministic else "DIFFER",
                    f"{passed}/{run}" if run else "",
                    "ok" if row.ok else f"FAILED ({len(row.failures)})",
                )
            )
        verdict = "keeps" if self.ok else "BREAKS"
        return f"{self.op} {verdict} the contract", columns, cells


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
        is the baseline, in float64 the truth.
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
      refused, not failed; a report in which all is refused is not ok.

    Raises:
      ValueError: for no cases, or a reference that does not run in float64.
    """
    if not cases:
        raise ValueError("check_op: cases must hold at least one OpCase; got none.")
    rows = []
    for name in implementations:
        run = op if name is None else _with_implementation(op, name)
        policy = nonfinite(run) if nonfinite is not None else None
        for dtype, case in itertools.product(map(jnp.dtype, dtypes), cases):
            if progress is not None:
                progress(f"{op_name(op)} {name or '(default)'} {dtype} {case.name}")
            growth = factor(name, dtype, case) if callable(factor) else factor
            row = _check(run, reference, case, dtype, level, growth, seed)
            rows.append(dataclasses.replace(row, implementation=name or "(default)"))
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


def _check(op, reference, case, dtype, level, factor, seed) -> ContractRow:
    key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(case.name.encode()))
    args = case.make_args(key, dtype)
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
    except (TypeError, ValueError) as error:
        return dataclasses.replace(row, failures=(f"forward and gradient: {error}",))
    failures = [
        f"{part.name}: {text}" for part in outcome.rows for text in part.failures
    ]
    ratios = {part.name: part.ratios.rms for part in outcome.rows}
    gradients = check_grads(
        op, *args, modes=("vjp",), options=case.options, seed=seed, repro=None
    )
    verdicts = {part.status for part in gradients.rows}
    failures += [
        f"derivative in {part.argument}, {part.check}: {part.status} {part.note}"
        for part in gradients.failures
    ]
    same = _same_bits(op, args, case.options)
    if not same:
        failures.append("two runs gave different bits")
    ran = TRANSFORMS if case.transforms else {}
    passed = 0
    for name, transform in ran.items():
        trouble = transform(op, reference, args, how)
        passed += not trouble
        failures += [f"{name}: {text}" for text in trouble]
    return dataclasses.replace(
        row,
        forward=max((v for k, v in ratios.items() if k[:2] != "d "), default=0.0),
        gradient=max((v for k, v in ratios.items() if k[:2] == "d "), default=0.0),
        differences=_verdict(verdicts),
        deterministic=same,
        transforms=(passed, len(ran)),
        failures=tuple(failures),
    )


def _verdict(statuses: set[str]) -> str:
    order = ("fail", "refused", "not differentiable", "inconclusive", "pass")
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
