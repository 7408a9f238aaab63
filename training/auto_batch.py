"""The largest batch whose step fits a budget of memory.

The compiler says how much memory a compiled step needs, so nothing has to be run, and
nothing runs out of memory, while sizes are tried. The size that is found is then
confirmed by a step on real data.
"""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass

import jax

from .config import Config
from .config_file import ConfigError
from .data import DataError
from .tasks import make_task
from .trainer import first_state, make_step

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class FittedBatch:
    """A configuration with the batch size that was found, and what its step needs.

    Attributes:
      config: the configuration.
      bytes: of memory for the state, a batch, and what the step computes in between.
    """

    config: Config
    bytes: int


def fit_batch(config: Config, budget: int) -> FittedBatch:
    """The configuration with the largest `data.batch_size` that fits.

    Args:
      config: its own batch size is not looked at.
      budget: bytes.

    Raises:
      ConfigError: if not even the smallest batch, a row for each micro-batch, fits.
      DataError: if the data cannot be had.
    """
    multiple = config.optimization.micro_batches
    bytes_of = _Measured(config)
    if bytes_of(multiple) > budget:
        raise ConfigError(
            f"--auto-batch: a batch of {multiple} needs "
            f"{show_size(bytes_of(multiple))}; got {show_size(budget)}."
        )
    size = largest(bytes_of, budget, multiple=multiple)
    while not _runs(bytes_of.configured(size)):
        size = max(size * 9 // 10 // multiple, 1) * multiple
    return FittedBatch(bytes_of.configured(size), bytes_of(size))


class _Measured:
    """Bytes of a step by batch size. One that the data has too few rows for is inf."""

    def __init__(self, config: Config):
        self._config, self._known = config, {}

    def configured(self, size: int) -> Config:
        data = self._config.data.model_copy(update={"batch_size": size})
        return self._config.model_copy(update={"data": data})

    def __call__(self, size: int) -> float:
        if size not in self._known:
            try:
                self._known[size] = _step_bytes(self.configured(size))
            except DataError:
                if not self._known:  # there is no data at all
                    raise
                self._known[size] = float("inf")
        return self._known[size]


def _step_bytes(config: Config) -> int:
    task = make_task(config)
    state, batch = first_state(config, task), next(task.batches)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    compiled = make_step(config, task).lower(state, shapes).compile()
    return memory_of(compiled)


def memory_of(compiled: jax.stages.Compiled) -> int:
    """Bytes a compiled function needs at once; what it reuses counts once.

    Raises:
      NotImplementedError: if the compiler of this device does not say.
    """
    need = compiled.memory_analysis()
    if need is None:
        raise NotImplementedError(
            "the compiler does not say how much memory a step needs on this device."
        )
    return (
        need.argument_size_in_bytes
        + need.output_size_in_bytes
        + need.temp_size_in_bytes
        - need.alias_size_in_bytes
    )


def _runs(config: Config) -> bool:
    task = make_task(config)
    try:
        state, _ = make_step(config, task)(
            first_state(config, task), next(task.batches)
        )
        jax.block_until_ready(state)
    except jax.errors.JaxRuntimeError as e:
        if "RESOURCE_EXHAUSTED" in str(e):
            return False
        raise
    return True


def largest(bytes_of: Callable[[int], float], budget: float, *, multiple: int) -> int:
    """The largest multiple whose bytes, which rise with it, are within the budget.

    Memory is nearly a straight line in the batch size, so the line through two sizes
    leads to the answer in a few tries; each try compiles a step.

    Args:
      bytes_of: of a size, where `multiple` is within the budget.
      budget: bytes.
      multiple: of which sizes are.
    """
    fits, too_large = 1, 2
    while bytes_of(too_large * multiple) <= budget:
        fits, too_large = too_large, 2 * too_large
    halve = False
    while (width := too_large - fits) > 1:
        low, high = bytes_of(fits * multiple), bytes_of(too_large * multiple)
        share = 0.5 if halve else (budget - low) / (high - low)
        guess = min(max(fits + int(share * width), fits + 1), too_large - 1)
        if bytes_of(guess * multiple) <= budget:
            fits = guess
        else:
            too_large = guess
        # Where the line leads astray, every other try halves.
        halve = too_large - fits > width / 2
    return fits * multiple


def default_budget() -> int:
    """Bytes: what the device says it can give, or 80% of the host's free memory.

    Raises:
      ConfigError: where neither is known.
    """
    stats = jax.local_devices()[0].memory_stats() or {}
    if limit := stats.get("bytes_limit"):
        return limit - stats.get("bytes_in_use", 0)
    if "SC_AVPHYS_PAGES" not in os.sysconf_names:
        raise ConfigError("--memory: this system does not say what is free; give it.")
    return int(0.8 * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def parse_size(text: str) -> int:
    """Bytes from `512MiB`, `6GB` or `6G` (powers of 1024 all), or a plain number.

    Raises:
      ConfigError: for anything else.
    """
    match = re.fullmatch(
        r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.I
    )
    size = int(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
    if size < 1:
        raise ConfigError(f"--memory: expected a size such as 6GiB; got {text!r}.")
    return size


def show_size(size: float) -> str:
    """`1.5 GiB`, three digits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} TiB"
