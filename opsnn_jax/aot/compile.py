"""Compiles a function for a device that is not there, and says what came of it."""

import functools
import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from opsnn_jax.aot import ptxas, words
from opsnn_jax.aot.report import Memory, Report
from opsnn_jax.aot.roofline import choose_rate, find_roofline
from opsnn_jax.aot.schedule import read_schedule
from opsnn_jax.aot.targets import Target, get_target
from opsnn_jax.aot.toolchain import require_toolchain, toolchain_versions

# JAX settings that change what a function traces to; the child takes them over.
_CONFIG = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
    "jax_default_prng_impl",
)

# The passes whose dumps `schedule.py` reads; all of them together are 100 times larger.
_PASSES = "(final.*|packed-bundles-post-ra)"


def compile_for(
    f: Callable,
    *specs: Any,
    target: str,
    name: str | None = None,
    rate: str | None = None,
    vjp: bool = False,
    timeout: float = 600.0,
) -> Report:
    """Compiles `jax.jit(f)(*specs)` by the real compiler of `target`.

    Nothing runs and no accelerator is needed. The function is sent to a child process
    by cloudpickle and is traced there, for a topology of the target. (Exporting it here
    and compiling the export would be simpler, but JAX lowers Pallas kernels of an
    export in forward-compatibility mode, which is not the code a job on the device
    gets.)

    Args:
      f: the function. It may be jitted, a partial, a lambda or a closure.
      *specs: its arguments: arrays, `jax.ShapeDtypeStruct`s, or pytrees of them. Only
        shapes and dtypes are used.
      target: a name in `opsnn_jax.aot.TARGETS`, such as "tpu-v5e" or "h200".
      name: what the report is called; by default the name of `f`.
      rate: the dtype whose peak rate bounds the products, such as "float32", where
        the arguments do not tell; see `roofline.choose_rate`.
      vjp: compile the forward and the backward pass: cotangents of all outputs are
        further arguments, the gradients further results.
      timeout: seconds after which the compiler is stopped.

    Returns:
      The report. An error of the compiler, its crash or its timeout is in the report.

    Raises:
      MissingToolchain: if the compiler for the target is not installed.
      ValueError: if the target or the rate is unknown, or a spec has 64 bits without
        jax_enable_x64.
      TypeError: if the function cannot be pickled, or a spec has no shape and dtype.

    Example:
      >>> import jax
      >>> x = jax.ShapeDtypeStruct((256, 128), "bfloat16")
      >>> compile_for(jax.numpy.tanh, x, target="tpu-v5e").ok
      True
    """
    device = get_target(target)
    if rate is not None and rate not in device.peak:
        raise ValueError(
            f"compile: rate must be one of {', '.join(device.peak)} on {target}; "
            f"got {rate!r}."
        )
    structs = _structs(specs)
    require_toolchain(device)
    name = name or _name_of(f)
    with tempfile.TemporaryDirectory(prefix="opsnn-aot-") as folder:
        root = Path(folder)
        (root / "request").write_bytes(_request(f, structs, device, vjp))
        result = _run_child(root, device, timeout)
        common = dict(
            name=name,
            target=target,
            stage=result["stage"],
            toolchain=toolchain_versions(device),
        )
        if result["stage"] != "done":
            return Report(ok=False, error=result["error"], **common)
        dumps = root / "dumps"
        schedule, gpu_kernels, gpu_unread = None, (), 0
        if device.platform == "tpu":
            schedule = read_schedule(dumps)
        else:
            gpu_kernels, gpu_unread = ptxas.read_kernels(
                dumps, device, result["mosaic"]
            )
    memory = Memory(**result["memory"])
    rate = rate or choose_rate(device, result["dtypes"], result["highest"])
    return Report(
        ok=True,
        error="",
        memory=memory,
        flops=result["flops"],
        bytes=result["bytes"],
        schedule=schedule,
        gpu_kernels=gpu_kernels,
        gpu_unread=gpu_unread,
        roofline=find_roofline(
            device,
            rate,
            result["flops"],
            # XLA does not see what a kernel that states no cost reads.
            None if result["uncosted"] else result["bytes"],
            memory,
            result["kernels"],
            schedule,
        ),
        notes=tuple(_notes(result, device, schedule, gpu_unread)),
        **common,
    )


def _structs(specs):
    import jax

    def struct(path, a):
        if not hasattr(a, "shape") or not hasattr(a, "dtype"):
            raise TypeError(
                f"compile: argument {jax.tree_util.keystr(path)} must be an array or a "
                f"jax.ShapeDtypeStruct; got {a!r}. Bind other arguments with "
                "functools.partial."
            )
        # Of arrays JAX narrows the dtype too, but there everybody knows it.
        asked = isinstance(a, jax.ShapeDtypeStruct)
        if asked and (narrow := jax.eval_shape(lambda x: x, a).dtype) != a.dtype:
            raise ValueError(
                f"compile: argument {jax.tree_util.keystr(path)} must have at most 32 "
                f"bits a number without jax_enable_x64; got {a.dtype}, which JAX would "
                f"make {narrow}. Set JAX_ENABLE_X64=1, or ask for {narrow}."
            )
        return jax.ShapeDtypeStruct(a.shape, a.dtype)

    return jax.tree_util.tree_map_with_path(struct, specs)


def _name_of(f: Callable) -> str:
    while isinstance(f, functools.partial):
        f = f.func
    return getattr(f, "__name__", type(f).__name__)


def _request(f, structs, device: Target, vjp: bool) -> bytes:
    import cloudpickle
    import jax

    try:
        function = cloudpickle.dumps((f, structs))
    except Exception as error:  # pickling runs the code of whatever f refers to
        raise TypeError(
            f"compile: {f!r} cannot be sent to the compiling process: {error}. Pass a "
            "function that refers to no locks, files, devices or traced values."
        ) from error
    config = {name: getattr(jax.config, name) for name in _CONFIG}
    return pickle.dumps(
        {"config": config, "function": function, "target": device.name, "vjp": vjp}
    )


def _run_child(root: Path, device: Target, timeout: float) -> dict:
    """Runs the child; its result, or one that says how it ended."""
    dumps = root / "dumps"
    dumps.mkdir()
    result = root / "result"
    # -P: the current folder is on the path where it was in the parent, not before all.
    module = ["-P", "-m", "opsnn_jax.aot.child"]
    command = [sys.executable, *module, root / "request", result]
    stderr = root / "stderr"
    try:
        with stderr.open("wb") as sink:
            code = subprocess.run(
                command,
                env=_environment(device, dumps),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=sink,
                timeout=timeout,
            ).returncode
    except subprocess.TimeoutExpired:
        error = f"the compiler was stopped after {timeout:g} seconds"
        return {"stage": "timeout", "error": error}
    said = stderr.read_text(errors="replace")
    if code != 0 or not result.exists():
        return {"stage": "crash", "error": words.meaningful(words.death(code, said))}
    found = json.loads(result.read_text())
    if found["stage"] != "done":
        message = found["error"]
        parts = words.diagnostics(said, message), found["raised_in"]
        found["error"] = "\n".join(filter(None, (words.meaningful(message), *parts)))
    return found


def _environment(device: Target, dumps: Path) -> dict[str, str]:
    env = dict(os.environ)
    env["JAX_PLATFORMS"] = "cpu"
    # What the parent can import, the child can: functions are pickled by reference.
    env["PYTHONPATH"] = os.pathsep.join(p or os.getcwd() for p in sys.path)
    if device.platform == "tpu":
        env |= {
            "LIBTPU_INIT_ARGS": f"--xla_jf_dump_to={dumps} --xla_jf_dump_llo_text=true"
            f" --xla_jf_dump_llo_pass_label_regex={_PASSES}",
            # Else libtpu asks the cloud's metadata server what machine this is.
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_ACCELERATOR_TYPE": "v5litepod-4",
            "TPU_WORKER_HOSTNAMES": "localhost",
            "TPU_WORKER_ID": "0",
            # Two compilations at once are no two users of one TPU.
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        }
    else:
        flags = env.get("XLA_FLAGS", "")
        # The emitters' dumps bring the PTX with them.
        dump = f"--xla_dump_to={dumps} --xla_dump_emitter_re=.*"
        env["XLA_FLAGS"] = f"{flags} {dump}".strip()
        # XLA does not see the PTX of Mosaic GPU's kernels.
        env["MOSAIC_GPU_DUMP_TO"] = str(dumps)
    return env


def _notes(result, device, schedule, gpu_unread):
    if device.platform == "cuda":
        yield (
            "The flops are those of the program before optimization."
            if result["flops"] is not None
            else "The flops are not known, and the roofline is without compute."
        )
    elif result["uncosted"]:
        roofline = (
            "the roofline is without compute"
            if result["flops"] is None
            else "the compute bound is too low"
        )
        yield (
            f"{result['uncosted']} Pallas kernel(s) state no cost_estimate: their flops"
            f" and bytes are not counted, and {roofline}."
        )
    if result["loops"] and result["flops"] is not None:
        yield "XLA counts the flops and bytes of a loop's body once, not once a trip."
    if gpu_unread:
        yield (
            f"ptxas told nothing of {gpu_unread} kernel(s): their registers, spills and"
            " shared memory are not known."
        )
    if device.platform == "tpu" and schedule is None:
        yield "The compiler wrote no schedule that could be read."
    if schedule and schedule.unread:
        names = ", ".join(schedule.unread)
        yield f"No schedule was found for these, and they are not counted: {names}."
    if schedule and schedule.unknown_trips:
        yield (
            "The length of a loop depends on data: it counts as if its counter started"
            " from 0, or as one iteration."
        )
