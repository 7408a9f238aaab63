"""The process that compiles: `python -m opsnn_jax.aot.child REQUEST RESULT`.

The compilers read their flags once per process and may abort it, so each compilation
has a process of its own. REQUEST is what `compile.py` pickled; RESULT becomes JSON.
"""

import json
import pickle
import re
import sys
from pathlib import Path

import jax
from jax.experimental import topologies

from opsnn_jax.aot.targets import Target, get_target
from opsnn_jax.aot.words import raised_in

# Instructions of an entry computation that run nothing on the device.
_NO_KERNEL = re.compile(
    r" (parameter|constant|tuple|get-tuple-element|bitcast)\(|^\s*(//|\}|$)"
)
# With what tells its kernel from others, where the compiler writes that.
_MOSAIC_CALL = re.compile(
    r'custom_call_target="mosaic_gpu.*?(?:kernel_hash = "(.*?)", |$)', re.MULTILINE
)
_PALLAS_CALL = re.compile(r'custom_call_target="(tpu_custom_call|[^"]*triton[^"]*)"')


def main(request_path: str, result_path: str) -> None:
    request = pickle.loads(Path(request_path).read_bytes())
    for name, value in request["config"].items():
        jax.config.update(name, value)
    result = {"stage": "trace", "error": "", "raised_in": ""}
    try:
        f, specs = pickle.loads(request["function"])
        compile_here(f, specs, get_target(request["target"]), request["vjp"], result)
    except Exception as error:  # whatever went wrong is the finding
        result["error"] = f"{type(error).__name__}: {error}"
        result["raised_in"] = raised_in(error.__traceback__, besides=[__file__])
    Path(result_path).write_text(json.dumps(result))


def compile_here(f, specs, target: Target, vjp: bool, result: dict) -> None:
    """Compiles for `target` and fills in `result`, stage by stage."""
    mesh, placed = find_device(target)
    with jax.sharding.use_abstract_mesh(mesh):
        if vjp:
            f, specs = add_backward(f, specs)
        traced = jax.jit(f).trace(*put(specs, placed))
        result["stage"] = "lower"
        lowered = traced.lower()
    result["dtypes"] = [a.dtype.name for a in jax.tree.leaves(lowered.in_avals)]
    result["highest"] = "HIGHEST" in lowered.as_text()
    result["stage"] = "compile"
    compiled = lowered.compile()
    text = compiled.as_text()
    calls = [line for line in text.splitlines() if _PALLAS_CALL.search(line)]
    result["uncosted"] = sum('"cost_estimate"' not in line for line in calls)
    result["mosaic"] = count_mosaic(text)
    memory = compiled.memory_analysis()
    result["memory"] = {
        "arguments": memory.argument_size_in_bytes,
        "outputs": memory.output_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "aliased": memory.alias_size_in_bytes,
    }
    if target.platform == "tpu":
        cost = compiled.cost_analysis()
        # 0 beside kernels that state no cost: XLA counted nothing.
        nothing = None if result["uncosted"] else 0.0
        result["flops"] = cost.get("flops") or nothing
        result["bytes"] = cost.get("bytes accessed") or nothing
    else:
        result["flops"], result["bytes"] = flops_on_cpu(f, specs), None
    entry = text[text.index("ENTRY") :].splitlines()[1:]
    result["kernels"] = sum(not _NO_KERNEL.search(line) for line in entry)
    result["loops"] = " while(" in text
    result["stage"] = "done"


def find_device(target: Target):
    """The abstract mesh of one device, and the sharding that puts arrays on it.

    The mesh is how Pallas learns the kind of device in a process that has none: kernels
    may size their blocks by it.
    """
    if target.platform == "tpu":
        topology = topologies.get_topology_desc(
            platform="tpu", topology_name=target.topology
        )
        cores = topology.devices[0].num_cores
    else:
        topology = topologies.get_topology_desc(
            platform="cuda",
            topology_name="1x1x1",
            topology="1x1x1",
            target_config=gpu_config(target),
        )
        cores = target.sm
    mesh = jax.sharding.AbstractMesh(
        (1,),
        ("opsnn_aot",),
        axis_types=(jax.sharding.AxisType.Auto,),
        abstract_device=jax.sharding.AbstractDevice(
            device_kind=target.device_kind, num_cores=cores, platform=target.platform
        ),
    )
    return mesh, jax.sharding.SingleDeviceSharding(topology.devices[0])


def add_backward(f, specs):
    """`f` with its backward pass: takes the cotangents last, returns the gradients."""

    def forward_and_backward(*args):
        *primals, cotangents = args
        outputs, pull = jax.vjp(f, *primals)
        return outputs, pull(cotangents)

    # Through a lambda: eval_shape looks into a jitted function for what pickling drops.
    outputs = jax.eval_shape(lambda *args: f(*args), *specs)
    return forward_and_backward, (*specs, put(outputs, None))


def put(specs, sharding):
    """The specs, placed by `sharding`; None leaves it to the compiler."""
    return jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), specs
    )


def count_mosaic(program: str) -> int:
    """How many kernels of Mosaic GPU a program has; at least 1 if it has any."""
    return len(set(_MOSAIC_CALL.findall(program)))


def flops_on_cpu(f, specs) -> float | None:
    """XLA's count for `f` as it lowers for the CPU, or None where that says nothing.

    For a GPU that is not there XLA analyses no cost. Flops are the same on all devices,
    but a kernel that does not lower for the CPU has none there, and one that is
    interpreted there is a loop, whose body would be counted once.
    """
    try:
        lowered = jax.jit(f).lower(*specs)
        if "stablehlo.while" in lowered.as_text():
            return None
        return lowered.cost_analysis().get("flops", 0.0)
    except Exception:  # any reason is the same: not known
        return None


def gpu_config(target: Target) -> str:
    """The `GpuTargetConfigProto` of an NVIDIA GPU, in text form."""
    major, minor = target.compute_capability
    # From Hopper on, wgmma and its like exist only in the "a" variant of a capability.
    feature = "ACCELERATED_FEATURES" if major >= 9 else "NONE"
    # A block may have all the shared memory of a multiprocessor but 1 KiB.
    fields = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 49152,
        "shared_memory_per_core": target.scratch + 1024,
        "threads_per_core_limit": 2048,
        "core_count": target.sm,
        "fpus_per_core": 64 if major == 8 else 128,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 65535,
        "block_dim_limit_z": 65535,
        "memory_bandwidth": int(target.bandwidth),
        "l2_cache_size": {8: 41943040, 9: 52428800, 10: 132644864}[major],
        "clock_rate_ghz": target.clock / 1e9,
        "device_memory_size": target.memory,
        "shared_memory_per_block_optin": target.scratch,
        "registers_per_core_limit": 65536,
        "registers_per_block_limit": 65536,
        "thread_dim_limit_x": 1024,
        "thread_dim_limit_y": 1024,
        "thread_dim_limit_z": 64,
        "device_address_bits": 64,
    }
    numbers = " ".join(f"{name}: {value}" for name, value in fields.items())
    suffix = "a" if major >= 9 else ""
    return f"""
      gpu_device_info {{
        {numbers}
        cuda_compute_capability {{
          major: {major} minor: {minor} feature_extension: {feature}
        }}
        device_vendor: "NVIDIA Corporation"
        platform_version: "Compute Capability {major}.{minor}{suffix}"
        name: "{target.device_kind}"
        driver_version: "13.0.0" runtime_version: "13.0.0"
        compile_time_toolkit_version: "13.0.0" dnn_version: "9.10.0"
      }}
      platform_name: "CUDA"
      dnn_version_info {{ major: 9 minor: 10 }}
      device_description_str: "{target.device_kind}"
    """


if __name__ == "__main__":
    main(*sys.argv[1:])
