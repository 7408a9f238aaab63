"""What an op does under JAX's transforms, against the same without them.

Each check takes `(op, reference, args, how)`, with `options`, `factor` and `seed` of
`compare` in `how`, and returns what went wrong, one sentence each.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from .arguments import Arguments, first_line, is_float
from .compare import compare
from .levels import SAME_MEANING

Trouble = list[str]


def _compared(f, g, leaves, how, grads=False, jit=True) -> Trouble:
    """Failures of comparing two functions of arrays, compiled as one program each."""
    if jit:
        f, g = jax.jit(f), jax.jit(g)
    try:
        outcome = compare(
            f,
            g,
            *leaves,
            grads=grads,
            level=SAME_MEANING,
            factor=how["factor"],
            seed=how["seed"],
        )
    except Exception as error:
        return [first_line(error)]
    return [f"{row.name}: {text}" for row in outcome.rows for text in row.failures]


def _functions(op, reference, args, how):
    given = Arguments(reference, args)
    options = how["options"]
    return (
        given.leaves,
        given.function(op, options),
        given.function(reference, options),
    )


def _cotangent(f, leaves):
    """A cotangent in numpy, which follows whatever precision runs.

    Not of ones: many an op, such as a softmax, has no gradient along those. Of eighths,
    which are the same numbers in every dtype: where they cancel in a sum, as in the
    gradient of a bias, what rounding them changes would be all that is left.
    """

    def make(y):
        if is_float(y):
            size = int(np.prod(y.shape))
            eighths = np.round(8 * np.cos(np.arange(size)))
            return (eighths / 8).reshape(y.shape).astype(y.dtype)
        return np.zeros(y.shape, jax.dtypes.float0)

    return jax.tree.map(make, jax.eval_shape(f, *leaves))


def _grad(f: Callable) -> Callable:
    """The vjp of `f` for one cotangent, in whatever dtype it is run."""
    return lambda *leaves: jax.vjp(f, *leaves)[1](_cotangent(f, leaves))


def _eager(op, reference, args, how) -> Trouble:
    """All other checks run under jit; this one does not."""
    leaves, f, g = _functions(op, reference, args, how)
    return _compared(f, g, leaves, how, grads=True, jit=False)


def _remat(op, reference, args, how) -> Trouble:
    leaves, f, g = _functions(op, reference, args, how)
    return _compared(jax.checkpoint(f), g, leaves, how, grads=True)


def _grad_of_grad(op, reference, args, how) -> Trouble:
    leaves, f, g = _functions(op, reference, args, how)
    return _compared(_grad(f), _grad(g), leaves, how, grads=True)


def _batches(leaves):
    """(mapped leaves, in_axes): each argument alone in front, then all at the end."""
    count = len(leaves)

    def stack(x, axis):
        # Reversed and negated copies: new values of the same distribution and dtype.
        return jnp.stack([x, -jnp.flip(x)], axis)

    for i in range(count if count > 1 else 0):
        mapped = [stack(x, 0) if j == i else x for j, x in enumerate(leaves)]
        yield mapped, tuple(0 if j == i else None for j in range(count))
    yield [stack(x, -1) for x in leaves], (-1,) * count


def _loop(f, in_axes):
    """What vmap means: a call for each, stacked."""

    def looped(*leaves):
        def pick(x, axis, i):
            return x if axis is None else jax.lax.index_in_dim(x, i, axis, False)

        outs = [
            f(*(pick(x, a, i) for x, a in zip(leaves, in_axes, strict=True)))
            for i in range(2)
        ]
        return jax.tree.map(lambda *ys: jnp.stack(ys), *outs)

    return looped


def _vmap(op, reference, args, how) -> Trouble:
    leaves, f, g = _functions(op, reference, args, how)
    trouble = []
    for mapped, in_axes in _batches(leaves):
        found = _compared(jax.vmap(f, in_axes), _loop(g, in_axes), mapped, how)
        trouble += [f"in_axes={in_axes}: {text}" for text in found]
    return trouble


def _vmap_of_grad(op, reference, args, how) -> Trouble:
    leaves, f, g = _functions(op, reference, args, how)
    trouble = []
    for mapped, in_axes in _batches(leaves):
        ours = jax.vmap(_grad(f), in_axes)
        found = _compared(ours, _loop(_grad(g), in_axes), mapped, how)
        trouble += [f"in_axes={in_axes}: {text}" for text in found]
    return trouble


def _scan(op, reference, args, how) -> Trouble:
    """Two steps of x <- x - grad(x)/8 inside scan, which refuses a changed carry."""
    leaves, f, g = _functions(op, reference, args, how)

    def step(function, carry):
        steps = _grad(function)(*carry)
        # 1/8 is exact, and keeps the dtype of the gradient: that is what is tested.
        return tuple(x - dx / 8 for x, dx in zip(carry, steps, strict=True))

    def scanned(*carry):
        return jax.lax.scan(lambda c, _: (step(f, c), None), carry, length=2)[0]

    def unrolled(*carry):
        return step(g, step(g, carry))

    return _compared(scanned, unrolled, leaves, how)


TRANSFORMS = {
    "eager": _eager,
    "vmap": _vmap,
    "vmap of grad": _vmap_of_grad,
    "grad of grad": _grad_of_grad,
    "remat": _remat,
    "scan": _scan,
}
