"""All bugs that the tests must catch, by what they are planted in."""

from tests.mutants import attention, convolution, rest, runs, training
from tests.mutants.mutant import Mutant

MUTANTS: tuple[Mutant, ...] = (
    *convolution.CONV,
    *convolution.WINOGRAD,
    *attention.ATTENTION,
    *rest.DISPATCH,
    *rest.MODULES,
    *training.LOSS_SCALE,
    *training.STEP,
    *training.COMPRESSION,
    *runs.RUNS,
    *rest.CHECK,
    *rest.AOT,
)
