"""Every Pallas kernel of the library, forward and backward, and its shapes.

And what plain JAX is chosen for a TPU because of its schedule.

A case is compiled for each of its targets by `tests/aot/test_registry.py`, and its
issue cycles are compared with `benchmarks/aot_baseline.json`.
"""

import functools
import itertools

from opsnn_jax.aot.registry import GPU_TARGETS, TPU_TARGETS, KernelCase, Registry

KERNELS = Registry()


def _conv_cases():
    # A middle layer of ResNet-50, in the mode that Winograd is for; ragged sizes.
    for dtype, (n, h, c, o) in (
        ("float32", (8, 28, 256, 256)),
        ("bfloat16", (10, 15, 200, 130)),
    ):
        for name in ("fwd", "dx", "dw"):
            shape = f"{n}x{h}x{h}x{c}-{o}"
            yield KernelCase(
                f"conv2d/pallas_tpu/{name}/{dtype}/{shape}",
                functools.partial(_make_conv, name, dtype, n, h, c, o),
            )


def _conv_arrays(dtype, n, h, c, o):
    import jax

    shapes = (n, h, h, c), (3, 3, c, o), (n, h, h, o)
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]


def _conv_spec(x, w, **options):
    from opsnn_jax.ops.conv_arguments import validate

    rank = x.ndim - 2
    return validate(f"conv{rank}d", rank, x, w, None, **options)


def _make_conv(name, *sizes):
    from opsnn_jax.kernels.winograd import tpu

    x, w, dy = _conv_arrays(*sizes)
    spec = _conv_spec(x, w)
    # Without the direct form, which runs where a result is not finite: a schedule
    # counts both.
    f, arrays = {
        "fwd": (tpu.fast_forward, (x, w)),
        "dx": (tpu.fast_input_gradient, (w, dy)),
        "dw": (tpu.fast_weight_gradient, (x, dy)),
    }[name]
    return functools.partial(f, spec, interpret=False), arrays


def _depthwise_cases():
    # A layer of MobileNet; the causal convolution of a state-space model.
    for name, x, w, options in (
        ("fwd", (8, 56, 56, 128), (3, 3, 1, 128), {}),
        ("dx", (8, 56, 56, 128), (3, 3, 1, 128), {}),
        ("dw", (8, 56, 56, 128), (3, 3, 1, 128), {}),
        ("fwd", (4, 1024, 512), (4, 1, 512), {"padding": "CAUSAL"}),
    ):
        shape = "x".join(map(str, x))
        yield KernelCase(
            f"conv{len(x) - 2}d/pallas_tpu_depthwise/{name}/bfloat16/{shape}",
            functools.partial(_make_depthwise, name, x, w, options),
        )


def _make_depthwise(name, x, w, options):
    import jax

    from opsnn_jax import conv

    f = functools.partial(
        conv, groups=x[-1], implementation="pallas_tpu_depthwise", **options
    )
    x, w = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in (x, w))
    if name == "fwd":
        return f, (x, w)
    i = ("dx", "dw").index(name)
    return lambda x, w, dy: jax.vjp(f, x, w)[1](dy)[i], (x, w, x)


def _separable_cases():
    # A block of MobileNet: a depthwise and a pointwise convolution in one kernel.
    shapes = (8, 56, 56, 128), (3, 3, 1, 128), (1, 1, 128, 128)
    yield KernelCase(
        "separable_conv2d/pallas_tpu_separable/fwd/bfloat16/8x56x56x128-128",
        functools.partial(_make_separable, shapes),
    )


def _make_separable(shapes):
    import jax

    from opsnn_jax import separable_conv2d

    f = functools.partial(separable_conv2d, implementation="pallas_tpu_separable")
    return f, tuple(jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes)


def _grouped_cases():
    # A layer of ResNeXt-50. dw, which has no second form for results that are not
    # finite: a schedule would count that too.
    shape = (8, 28, 28, 256)
    for dtype in ("bfloat16", "float32"):
        yield KernelCase(
            f"conv2d/block_diagonal/dw/{dtype}/8x28x28x256-g32",
            functools.partial(_make_grouped, dtype, shape, (3, 3, 8, 256), 32),
        )


def _make_grouped(dtype, x, w, groups):
    import jax

    from opsnn_jax import conv2d

    f = functools.partial(conv2d, groups=groups, implementation="block_diagonal")
    x, w = (jax.ShapeDtypeStruct(shape, dtype) for shape in (x, w))
    return lambda x, w, dy: jax.vjp(f, x, w)[1](dy)[1], (x, w, x)


def _attention_cases():
    # (batch, T, S, heads, key heads, H); causal or full.
    shapes = (
        ("bfloat16", (1, 4096, 4096, 8, 8, 128), False),
        ("bfloat16", (1, 4096, 4096, 8, 8, 128), True),
        ("float32", (1, 1000, 1500, 4, 2, 72), True),
    )
    # On a GPU the blocks depend on the head, and ptxas sees the forward kernel in the
    # program of the gradient too.
    small = ("bfloat16", (1, 4096, 4096, 8, 8, 64), True)
    cases = (
        *itertools.product([("pallas_tpu", TPU_TARGETS)], shapes, ("fwd", "bwd")),
        *itertools.product([("pallas_gpu", GPU_TARGETS)], (*shapes, small), ("bwd",)),
    )
    for (implementation, targets), (dtype, shape, causal), name in cases:
        kind = "causal" if causal else "full"
        sizes = "x".join(map(str, shape))
        yield KernelCase(
            f"flash_attention/{implementation}/{name}/{dtype}/{kind}/{sizes}",
            functools.partial(
                _make_attention, implementation, name, dtype, shape, causal
            ),
            targets,
        )


def _make_attention(implementation, name, dtype, shape, causal):
    import jax

    from opsnn_jax import flash_attention

    f = functools.partial(
        flash_attention, is_causal=causal, implementation=implementation
    )
    q, k, v = _attention_arrays(dtype, shape)
    if name == "fwd":
        return f, (q, k, v)
    return lambda q, k, v, dout: jax.vjp(f, q, k, v)[1](dout), (q, k, v, q)


def _attention_arrays(dtype, shape):
    import jax

    batch, t, s, heads, kv_heads, size = shape
    return (
        jax.ShapeDtypeStruct((batch, length, count, size), dtype)
        for length, count in ((t, heads), (s, kv_heads), (s, kv_heads))
    )


# Options of attention that change the kernels: static ones, and shapes of operands.
_OPTIONS = {
    "window": ({"window": (500, 0)}, {}),
    "packed": (
        {"is_causal": True, "causal_align": "bottom_right"},
        {"q_segment_ids": (1, "T"), "kv_segment_ids": (1, "S"), "kv_lengths": (1,)},
    ),
    "softcap-sinks-dropout": (
        {"softcap": 50.0, "dropout_rate": 0.1},
        {"sinks": ("N",)},
    ),
    "bias": ({}, {"bias": (1, "N", "T", "S")}),
    "shared-bias-mask": ({}, {"bias": ("N", 1, "S"), "mask": ("T", "S")}),
}


def _option_cases():
    on_tpu = "pallas_tpu", "bfloat16", (1, 2048, 2048, 4, 2, 128), TPU_TARGETS
    on_gpu = "pallas_gpu", "float16", (1, 2048, 2048, 4, 2, 256), GPU_TARGETS
    for (implementation, dtype, shape, targets), option, name in (
        *itertools.product([on_tpu], _OPTIONS, ("fwd", "bwd")),
        (on_gpu, "bias", "bwd"),
    ):
        sizes = "x".join(map(str, shape))
        yield KernelCase(
            f"flash_attention/{implementation}/{name}/{dtype}/{option}/{sizes}",
            functools.partial(_make_option, implementation, name, dtype, shape, option),
            targets,
        )


def _make_option(implementation, name, dtype, shape, option):
    import jax

    from opsnn_jax import flash_attention

    static, shapes = _OPTIONS[option]
    sizes = dict(zip("BTSNKH", shape, strict=True))
    dtypes = {"bias": dtype, "sinks": "float32", "mask": "bool"}
    operands = {
        operand: jax.ShapeDtypeStruct(
            tuple(sizes.get(n, n) for n in axes), dtypes.get(operand, "int32")
        )
        for operand, axes in shapes.items()
    }
    differentiable = {n: operands.pop(n) for n in ("bias", "sinks") if n in operands}

    def f(q, k, v, operands, differentiable):
        rng = jax.random.key(0) if "dropout_rate" in static else None
        return flash_attention(
            q,
            k,
            v,
            **operands,
            **differentiable,
            **static,
            dropout_rng=rng,
            implementation=implementation,
        )

    q, k, v = _attention_arrays(dtype, shape)
    if name == "fwd":
        return f, (q, k, v, operands, differentiable)

    def gradients(q, k, v, operands, differentiable, dout):
        def attend(q, k, v, differentiable):
            return f(q, k, v, operands, differentiable)

        return jax.vjp(attend, q, k, v, differentiable)[1](dout)

    return gradients, (q, k, v, operands, differentiable, q)


for _case in (
    *_conv_cases(),
    *_depthwise_cases(),
    *_separable_cases(),
    *_grouped_cases(),
    *_attention_cases(),
    *_option_cases(),
):
    KERNELS.add(_case)
