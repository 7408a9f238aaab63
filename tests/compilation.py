"""How the tests are compiled: quickly, but for those of the numbers a CPU computes."""

import os

import jax

# XLA's newer emitters of fusions take most of the time that it compiles for. JAX 0.12
# has no others, and a flag that XLA does not know ends the process.
_OLDER_EMITTERS = jax.__version_info__ < (0, 11)

# For `jax.jit` in tests marked `optimized`, as XLA_FLAGS are those of the process.
AS_USERS_DO = {"xla_cpu_use_fusion_emitters": True} if _OLDER_EMITTERS else {}


def set_flags(*, quick: bool):
    """Sets what XLA reads when the first backend starts, which importing JAX does not.

    Child processes inherit it, and append what is their own.
    """
    flags = [os.environ.get("XLA_FLAGS", ""), flag_of_devices(4)]
    if quick and _OLDER_EMITTERS:
        flags.append("--xla_cpu_use_fusion_emitters=false")
    os.environ["XLA_FLAGS"] = " ".join(flags)


def flag_of_devices(count: int) -> str:
    return f"--xla_force_host_platform_device_count={count}"


def environment_of(devices: int) -> dict[str, str]:
    """The environment of a child process that sees so many CPU devices."""
    flags = f"{os.environ['XLA_FLAGS']} {flag_of_devices(devices)}"  # the last counts
    return os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
