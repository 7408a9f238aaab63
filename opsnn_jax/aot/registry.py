"""The kernels that are held against a baseline, each with shapes and dtypes.

A case is made only when it is compiled, so listing a kernel imports nothing:

>>> registry = Registry()
>>> @registry.case("double/fwd/8x128", targets=("tpu-v5e",))
... def double():
...     import jax
...     return (lambda x: x + x), (jax.ShapeDtypeStruct((8, 128), "float32"),)
>>> [case.name for case in registry]
['double/fwd/8x128']
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

# The TPU targets that every TPU kernel must compile for, and the GPU targets likewise.
TPU_TARGETS = ("tpu-v5e", "tpu-v6e")
GPU_TARGETS = ("a100", "h200")


@dataclass(frozen=True)
class KernelCase:
    """One kernel at one shape.

    Attributes:
      name: "op/implementation/pass/shape"; unique.
      make: returns the function and the specs of its arguments.
      targets: what it must compile for.
      rate: as in `compile_for`.
    """

    name: str
    make: Callable[[], tuple[Callable, tuple[Any, ...]]]
    targets: tuple[str, ...] = TPU_TARGETS
    rate: str | None = None


class Registry:
    """Cases by name, in the order in which they were added."""

    def __init__(self):
        self._cases: dict[str, KernelCase] = {}

    def add(self, case: KernelCase) -> None:
        """Adds a case. Raises ValueError if its name is taken or has a space."""
        if " " in case.name:
            raise ValueError(
                f"aot registry: a case's name must have no space; got {case.name!r}."
            )
        if case.name in self._cases:
            raise ValueError(
                f"aot registry: case names must be unique; {case.name!r} is taken."
            )
        self._cases[case.name] = case

    def case(
        self,
        name: str,
        targets: tuple[str, ...] = TPU_TARGETS,
        rate: str | None = None,
    ) -> Callable:
        """Decorates the `make` of a case."""

        def register(make):
            self.add(KernelCase(name, make, targets, rate))
            return make

        return register

    def __iter__(self) -> Iterator[KernelCase]:
        return iter(self._cases.values())

    def __len__(self) -> int:
        return len(self._cases)

    def __getitem__(self, name: str) -> KernelCase:
        return self._cases[name]
