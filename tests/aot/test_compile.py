"""Real compilations for devices that are not there."""

import functools
import json
import re
import threading

import aot_kernels as kernels
import jax
import jax.numpy as jnp
import pytest
from aot_kernels import spec

from opsnn_jax.aot import compile_for

pytestmark = pytest.mark.aot

BF16 = jnp.bfloat16


@pytest.fixture(autouse=True)
def tpu(request, compiles_for):
    if "gpu" not in request.node.name:
        compiles_for("tpu-v5e")


def test_a_pallas_kernel():
    x, y = spec(256, 512, dtype=BF16), spec(512, 128, dtype=BF16)
    report = compile_for(kernels.product, x, y, target="tpu-v5e")
    assert report.ok, report.error
    (kernel,) = [k for k in report.schedule.kernels if k.name.startswith("product")]
    (loop,) = [loop for loop in kernel.loops if loop.depth == 1]
    # 2 x 1 x 4 grid steps; the pipeline runs two more, to fetch ahead and write back.
    assert loop.trips == 8 + 2
    assert report.flops == 2 * 256 * 512 * 128
    assert report.notes == ()
    assert _matrix(kernel).used > 0
    assert report.memory.arguments == 2 * (256 * 512 + 512 * 128)
    assert report.memory.outputs == 4 * 256 * 128
    json.loads(report.to_json())


def test_a_kernel_without_cost_estimate_is_pointed_out():
    f = functools.partial(kernels.product, costed=False)
    report = compile_for(f, spec(128, 128), spec(128, 128), target="tpu-v5e")
    assert "cost_estimate" in report.notes[0]
    assert "roofline is without compute" in report.notes[0]
    # XLA counted nothing; that is no 0.
    assert report.flops is report.bytes is report.roofline.compute is None


def test_what_xla_counts_beside_a_kernel_without_cost_estimate_is_kept():
    def f(x, y):
        return kernels.product(x, y, costed=False) @ y

    report = compile_for(f, spec(128, 128), spec(128, 128), target="tpu-v5e")
    assert report.flops >= 2 * 128**3
    assert "compute bound is too low" in report.notes[0]


@pytest.mark.parametrize(
    "target, flops_per_cycle",
    [
        # matrix units x rows x columns x multiplications and additions of a cell
        ("tpu-v5e", 4 * 128 * 128 * 2),
        ("tpu-v6e", 2 * 256 * 256 * 4),
        ("tpu-v5p", 2 * 4 * 128 * 128 * 2),  # XLA gives each core half of the product
    ],
)
def test_the_schedule_of_a_matmul_fits_the_matrix_units(target, flops_per_cycle):
    x = spec(2048, 2048, dtype=BF16)
    report = compile_for(kernels.matmul, x, x, target=target)
    assert report.ok, report.error
    assert report.flops == 2 * 2048**3
    least = report.flops / flops_per_cycle
    # Nothing is faster than the units, and XLA's own product keeps them busy. Issue
    # cycles alone are fewer on v5e: some of the units' time is in the stalls.
    assert least <= report.schedule.cycles + report.schedule.stalls < 1.7 * least
    assert 1.0 <= report.roofline.gap < 1.7


def test_float32_at_highest_is_held_against_six_passes():
    def f(x, y):
        return jnp.dot(x, y, precision="highest")

    x = spec(1024, 1024)
    exact = compile_for(f, x, x, target="tpu-v5e")
    fast = compile_for(kernels.matmul, x, x, target="tpu-v5e")
    assert (exact.roofline.rate, fast.roofline.rate) == ("float32", "bfloat16")
    assert exact.schedule.cycles > 3 * fast.schedule.cycles


def test_pallas_sees_the_target():
    (v5e, v6e) = (
        compile_for(kernels.device_kind, spec(), target=target)
        for target in ("tpu-v5e", "tpu-v6e")
    )
    assert v5e.ok and v6e.ok, (v5e.error, v6e.error)
    # Output of 128 and of 256 float32.
    assert (v5e.memory.outputs, v6e.memory.outputs) == (512, 1024)


def test_a_closure_over_arrays_a_jitted_function_and_a_pytree():
    table = jnp.arange(8.0)

    @jax.jit
    def f(tree):
        return tree["a"] + table, tree["b"]

    report = compile_for(f, {"a": spec(8), "b": jnp.zeros(3)}, target="tpu-v5e")
    assert report.ok, report.error


def test_a_gradient():
    def loss(x, w):
        return jnp.sum(jnp.tanh(x @ w))

    x, w = spec(256, 256), spec(256, 128)
    report = compile_for(jax.grad(loss, argnums=1), x, w, target="tpu-v5e")
    assert report.ok, report.error
    assert report.memory.outputs == 4 * 256 * 128


def test_the_loop_of_a_scan_multiplies_its_kernels():
    def scan(length):
        def f(x, w):
            step = lambda c, _: (jnp.tanh(c @ w), None)  # noqa: E731
            return jax.lax.scan(step, x, None, length=length)[0]

        return compile_for(f, spec(256, 256), spec(256, 256), target="tpu-v5e")

    few, many = scan(16), scan(32)
    assert many.schedule.cycles > 1.8 * few.schedule.cycles
    assert any("once a trip" in note for note in few.notes)


def test_settings_of_jax_reach_the_compiling_process():
    def f(x):
        # Implicit promotion of int32 to float32: an error under "strict".
        return jnp.arange(4, dtype=jnp.int32) * x

    assert not compile_for(f, spec(4), target="tpu-v5e").ok
    with jax.numpy_dtype_promotion("standard"):
        assert compile_for(f, spec(4), target="tpu-v5e").ok


def test_vmem_overflow_is_the_compilers_word():
    # 64 MiB in and 64 MiB out, each twice, in 128 MiB.
    report = compile_for(kernels.double, spec(8192, 2048), target="tpu-v5e")
    assert (report.ok, report.stage) == (False, "compile")
    assert "vmem" in report.error.lower()
    assert len(report.error.splitlines()) <= 8
    assert report.memory is report.schedule is report.roofline is None


def test_an_error_of_the_function_is_reported():
    report = compile_for(kernels.matmul, spec(2, 3), spec(2, 3), target="tpu-v5e")
    assert (report.ok, report.stage) == (False, "trace")
    assert report.error.startswith("TypeError")
    assert re.search(r"\nin matmul, .*aot_kernels\.py:\d+$", report.error)


def test_what_pallas_cannot_lower_is_a_refusal():
    report = compile_for(kernels.sort, spec(8, 128), target="tpu-v5e")
    assert (report.ok, report.stage) == (False, "lower")
    assert "sort" in report.error


def test_a_backward_pass_is_traced_for_the_target():
    # `device_kind` asks Pallas for the device, and there is none in this process.
    report = compile_for(kernels.device_kind, spec(), target="tpu-v6e", vjp=True)
    assert report.ok, report.error


def test_a_crash_is_reported():
    report = compile_for(kernels.abort, spec(2), target="tpu-v5e")
    assert (report.ok, report.stage) == (False, "crash")
    assert "SIGABRT" in report.error


def test_a_hang_is_reported():
    report = compile_for(kernels.matmul, spec(), spec(), target="tpu-v5e", timeout=0.01)
    assert (report.ok, report.stage) == (False, "timeout")


def test_what_cannot_be_sent_is_refused():
    lock = threading.Lock()

    def f(x):
        with lock:
            return x

    with pytest.raises(TypeError, match="cannot be sent to the compiling process"):
        compile_for(f, spec(2), target="tpu-v5e")


def test_arguments_without_shape_are_refused():
    with pytest.raises(TypeError, match=r"argument \[1\].*functools.partial"):
        compile_for(kernels.matmul, spec(2, 2), 3.0, target="tpu-v5e")


@pytest.mark.parametrize("dtype", ["float64", "int64"])
def test_64_bits_are_not_narrowed_silently(dtype):
    with pytest.raises(ValueError, match=r"argument \[0\].*JAX_ENABLE_X64=1"):
        compile_for(kernels.matmul, spec(2, dtype=dtype), spec(2), target="tpu-v5e")


def test_keys_and_64_bits_compile():
    def f(key, x):
        return jax.random.uniform(key) + x

    key = jax.eval_shape(jax.random.key, 0)
    assert compile_for(f, key, spec(2), target="tpu-v5e").ok
    with jax.enable_x64(True):
        report = compile_for(f, key, spec(2, dtype="float64"), target="tpu-v5e")
    assert report.ok, report.error
    assert report.memory.outputs >= 2 * 8


def test_equal_kernels_count_each(monkeypatch):
    def f(xs, w):
        return [x @ w for x in jax.lax.optimization_barrier(xs)]

    arrays = [spec(1024, 512, dtype=BF16)] * 6, spec(512, 128, dtype=BF16)
    schedule = compile_for(f, *arrays, target="tpu-v5e").schedule
    assert schedule.unread == ()
    assert sum(_matrix(k).used > 0 for k in schedule.kernels) == 6
    # The compiler made fewer schedules than that.
    monkeypatch.setattr("opsnn_jax.aot.schedule.forms", lambda *_: {})
    assert compile_for(f, *arrays, target="tpu-v5e").schedule.unread


@pytest.mark.parametrize("target", ["tpu-v5e", "tpu-v6e"])
def test_code_that_counters_skip_and_repeat_counts_as_often_as_it_runs(target):
    x = spec(5 * 64, 128)
    (kernel,) = _named("sometimes", compile_for(kernels.sometimes, x, target=target))
    # Of 8 registers: in the first two of 5 steps, and as often as steps came before.
    assert _unit(kernel, "EUP").used == 8 * (2 + sum(range(5)))
    assert kernel.undecided < kernel.cycles / 20
    # Entered in four of the steps.
    assert sum(range(5)) / 4 in [loop.trips for loop in kernel.loops]
    assert not kernel.unknown_trips


def test_code_that_data_skips_counts_as_run():
    report = compile_for(
        kernels.asked, spec(8, dtype="int32"), spec(512, 128), target="tpu-v5e"
    )
    (kernel,) = _named("asked", report)
    assert _unit(kernel, "EUP").used == 64
    assert kernel.undecided > 64


def test_the_callers_environment_is_left_alone(monkeypatch):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--no_such_flag")
    assert compile_for(kernels.matmul, spec(8, 8), spec(8, 8), target="tpu-v5e").ok


def test_gpu_xla(compiles_for):
    compiles_for("a100")
    report = compile_for(kernels.matmul, spec(256, 256), spec(256, 256), target="a100")
    assert report.ok, report.error
    assert report.flops == 2 * 256**3
    assert report.roofline.rate == "tensorfloat32"
    assert all(k.registers > 0 for k in report.gpu_kernels)
    assert report.gpu_kernels


@pytest.mark.parametrize("target", ["a100", "h200"])
def test_gpu_triton(compiles_for, target):
    compiles_for(target)
    x = spec(64, 64, dtype=jnp.float16)
    report = compile_for(kernels.triton_product, x, x, target=target)
    assert report.ok, report.error
    (kernel,) = report.gpu_kernels
    assert kernel.name == "triton_product"
    assert 16 < kernel.registers <= 255


def test_gpu_mosaic_is_read_too(compiles_for):
    compiles_for("h200")
    report = compile_for(kernels.double, spec(64, 128), target="h200")
    assert report.ok, report.error
    (kernel,) = report.gpu_kernels
    assert kernel.name == "double_0"
    assert 16 < kernel.registers <= 255
    # The block, read and written.
    assert kernel.shared_memory >= 4 * 64 * 128
    assert report.gpu_unread == 0


def test_gpu_refusal_is_told_with_the_compilers_reason(compiles_for):
    compiles_for("a100")
    # The bulk copies of Mosaic GPU begin with Hopper.
    report = compile_for(kernels.double, spec(64, 128), target="a100")
    assert not report.ok
    assert "not supported on sm_80" in report.error
    assert "aot_kernels.py" in report.error


def test_gpu_refuses_too_much_shared_memory(compiles_for):
    compiles_for("a100")
    x = spec(256, 256)
    report = compile_for(kernels.triton_product, x, x, target="a100")
    assert (report.ok, report.stage) == (False, "compile")
    assert "Shared memory" in report.error


def _matrix(kernel):
    """The unit that takes a kernel's products; older libtpu calls it otherwise."""
    return _unit(kernel, "MXU", "MATMUL")


def _unit(kernel, *names):
    return next(u for u in kernel.units if u.name in names)


def _named(name, report):
    assert report.ok, report.error
    return [k for k in report.schedule.kernels if k.name.partition(".")[0] == name]
