"""Attention on a TPU against JAX's own kernels, by the issue cycles of their schedules.

python benchmarks/attention_tpu.py     results/attention_tpu.json and .png

No TPU is needed, but the extra `aot`. One sequence of 4096, 8 heads of 128 features, in
bfloat16. Every peer is counted at each of `BLOCKS` that the compiler takes, and the
best counts: of flash and splash forward, of splash's fused kernel backward. Ours has
its default block size. All take arrays laid out (B, N, T, H). Backward is the whole
program of the gradient but for the forward kernel. Of a causal call splash decides by
data what it skips, which no schedule tells: causal rows compare with our own full call.
"""

import functools
from concurrent.futures import ThreadPoolExecutor

import jax
from harness import plot_ratios, save
from jax.experimental.pallas.ops.tpu import flash_attention as flash
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as splash,
)
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_mask as masks,
)

from opsnn_jax import flash_attention
from opsnn_jax.aot import compile_for

LENGTH, HEADS, FEATURES = 4096, 8, 128
ARRAY = jax.ShapeDtypeStruct((1, HEADS, LENGTH, FEATURES), "bfloat16")
SCALE = FEATURES**-0.5
TARGETS = ("tpu-v5e", "tpu-v6e")

# Queries of a block, keys of a block, keys computed at once.
BLOCKS = [
    (512, 512, 512), (1024, 1024, 512), (1024, 1024, 1024), (1024, 2048, 512),
    (1024, 2048, 1024), (1024, 4096, 1024), (2048, 1024, 512), (2048, 2048, 512),
    (2048, 2048, 1024), (2048, 4096, 1024),
]  # fmt: skip


def ours(q, k, v, *, is_causal=False):
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    return flash_attention(q, k, v, is_causal=is_causal).swapaxes(1, 2)


def jax_flash(q, k, v, *, block):
    queries, keys, computed = block
    sizes = flash.BlockSizes(
        block_q=queries, block_k_major=keys, block_k=computed, block_b=1,
        block_q_major_dkv=queries, block_k_major_dkv=keys, block_k_dkv=computed,
        block_q_dkv=queries, block_k_major_dq=keys, block_k_dq=computed,
        block_q_dq=queries,
    )  # fmt: skip
    return flash.flash_attention(q, k, v, sm_scale=SCALE, block_sizes=sizes)


def jax_splash(q, k, v, *, block):
    queries, keys, computed = block
    sizes = splash.BlockSizes(
        block_q=queries, block_kv=keys, block_kv_compute=computed,
        block_q_dkv=queries, block_kv_dkv=keys, block_kv_dkv_compute=computed,
        use_fused_bwd_kernel=True,
    )  # fmt: skip
    mask = masks.MultiHeadMask([masks.FullMask((LENGTH, LENGTH))] * HEADS)
    kernel = splash.make_splash_mha_single_device(mask, block_sizes=sizes)
    return jax.vmap(kernel)(q * SCALE, k, v)


def gradient(f, q, k, v, dout):
    return jax.vjp(f, q, k, v)[1](dout)


def count(f, target: str) -> dict:
    """Issue cycles, and fills and spills in innermost loops, of both passes.

    A pass whose block size the compiler refuses is left out.
    """
    forward = compile_for(f, *[ARRAY] * 3, target=target)
    both = compile_for(functools.partial(gradient, f), *[ARRAY] * 4, target=target)
    result = {"libtpu": forward.toolchain["libtpu"]}
    if forward.ok:
        result["fwd"] = _sum(forward.schedule, lambda kernel: True)
    if both.ok:
        result["bwd"] = _sum(both.schedule, lambda kernel: not _is_forward(kernel))
    return result


def _sum(schedule, counts):
    if schedule.unread:
        raise RuntimeError(f"no schedule was found of {schedule.unread}")
    kernels = [k for k in schedule.kernels if counts(k.name)]
    return {
        "cycles": sum(k.cycles * k.calls for k in kernels),
        "spills": sum(k.innermost_spills * k.calls for k in kernels),
    }


def _is_forward(kernel: str) -> bool:
    """In a program of both passes; flash's kernel has the name of the traced call."""
    return kernel.startswith(("attention_fwd", "splash_mha_fwd", "jvp_jit_flash"))


def compare(target: str) -> list[dict]:
    """The rows of one target."""
    peers = {
        f"{name} {'/'.join(map(str, block))}": functools.partial(f, block=block)
        for name, f in (("flash", jax_flash), ("splash", jax_splash))
        for block in BLOCKS
    }
    calls = {
        "ours": ours,
        "causal": functools.partial(ours, is_causal=True),
        **peers,
    }
    with ThreadPoolExecutor(2) as pool:
        counts = pool.map(functools.partial(count, target=target), calls.values())
        cycles = dict(zip(calls, counts, strict=True))
    rows = []
    for of in ("fwd", "bwd"):
        taken = {
            name: cycles[name][of]["cycles"]
            for name in peers
            if of in cycles[name] and (of == "fwd" or name.startswith("splash"))
        }
        print(f"{target} {of}: {taken}", flush=True)
        best = min(taken, key=taken.get)
        for who, than in (("ours", best), ("causal", "ours")):
            label = "full" if who == "ours" else who
            mine, base = cycles[who][of], cycles[than][of]
            rows.append(
                {
                    "label": f"{of} {label} {target.removeprefix('tpu-')} / {than}",
                    "libtpu": cycles[who]["libtpu"],
                    "ours": mine["cycles"],
                    "ours_spills": mine["spills"],
                    "base": base["cycles"],
                    "base_spills": base["spills"],
                    "ratio": mine["cycles"] / base["cycles"],
                    "peers": taken if who == "ours" else {},
                }
            )
    return rows


def main():
    rows = [row for target in TARGETS for row in compare(target)]
    print(save("attention_tpu", rows))
    title = "attention on a TPU, static schedules"
    print(
        plot_ratios("attention_tpu", rows, title, base="the other", unit="issue cycles")
    )


if __name__ == "__main__":
    main()
