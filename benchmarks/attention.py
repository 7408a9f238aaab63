"""flash_attention against `jax.nn.dot_product_attention` on this machine.

python benchmarks/attention.py              all rows: results/attention.json and .png
python benchmarks/attention.py --quick      lengths up to 1024 only
python benchmarks/attention.py --torch      also PyTorch's, where it is installed
python benchmarks/attention.py --rows T=64  only the rows with this in their names, anew
"""

import argparse
import functools
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import jax
import jax.numpy as jnp
import numpy as np
from harness import plot_ratios, renew, save, time_in_turn, workspace

from opsnn_jax import attention_decode, flash_attention


@dataclass(frozen=True)
class Row:
    """One shape: 8 query heads of 64 features, if not said otherwise."""

    t: int
    s: int
    kind: str = "full"  # or causal, window
    kv_heads: int = 8
    dtype: str = "float32"
    batch: int = 1
    heads: int = 8
    size: int = 64

    @property
    def label(self) -> str:
        parts = [f"T={self.t}", self.kind]
        if self.s != self.t:
            parts.insert(1, f"S={self.s}")
        if self.batch != 1:
            parts.append(f"B={self.batch}")
        if self.kv_heads != self.heads:
            parts.append(f"{self.kv_heads} key heads")
        if self.dtype != "float32":
            parts.append(self.dtype)
        return " ".join(parts)

    def options(self) -> dict:
        return {
            "full": {},
            "causal": {"is_causal": True},
            "window": {"is_causal": True, "window": (511, 0)},
        }[self.kind]

    def theirs(self):
        """The same call of JAX's own."""
        options = dict(self.options())
        if "window" in options:
            options["local_window_size"] = options.pop("window")
        attend = functools.partial(jax.nn.dot_product_attention, **options)
        if self.dtype != "float16":
            return attend
        # JAX refuses float16 on a CPU: what one would do instead.
        wide = jnp.float32
        return lambda *qkv: attend(*(x.astype(wide) for x in qkv)).astype(self.dtype)


def rows(quick: bool) -> list[Row]:
    lengths = [16, 32, 64, 128, 256, 512, 1024]
    if not quick:
        lengths += [2048, 4096, 8192]
    found = [Row(n, n, kind) for n in lengths for kind in ("full", "causal")]
    long = 1024 if quick else 4096
    found += [Row(long, long, "causal", dtype=x) for x in ("bfloat16", "float16")]
    found += [Row(long // 4, long), Row(long, long, "causal", kv_heads=2)]
    found += [Row(64, 64, batch=16), Row(256, 256, "causal", batch=8)]
    if not quick:
        found.append(Row(8192, 8192, "window"))
    return found


def arrays_of(row: Row) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(0), 4)
    q, kv = (
        (row.batch, row.t, row.heads, row.size),
        (row.batch, row.s, row.kv_heads, row.size),
    )
    return tuple(
        jax.random.normal(key, shape, row.dtype)
        for key, shape in zip(keys, (q, kv, kv, q), strict=True)
    )


def passes(attention) -> dict:
    """Forward, and forward with all gradients, of (q, k, v, dout)."""

    def both(q, k, v, dout):
        out, vjp = jax.vjp(attention, q, k, v)
        return out, vjp(dout)

    return {"fwd": lambda q, k, v, dout: attention(q, k, v), "fwd+bwd": both}


def measure(row: Row, with_torch: bool) -> list[dict]:
    arrays = arrays_of(row)
    ours = passes(functools.partial(flash_attention, **row.options()))
    theirs = passes(row.theirs())
    results = []
    for name in ours:
        variants = {"jax.nn": jax.jit(theirs[name]), "opsnn": jax.jit(ours[name])}
        if with_torch and row.kind != "window":  # PyTorch has no window
            variants["torch"] = torch_pass(row, name, arrays)
        scores = row.t * row.s * row.batch
        rounds = 31 if scores <= 2**18 else 9 if scores < 2**24 else 5
        times = time_in_turn(variants, arrays, rounds)
        result = {
            **asdict(row),
            "pass": name,
            "label": f"{name} {row.label}",
            "jax_ms": times["jax.nn"]["ms"],
            "workspace": workspace(variants["opsnn"], arrays),
            "jax_workspace": workspace(variants["jax.nn"], arrays),
            **times["opsnn"],
        }
        if "torch" in variants:
            result["torch_ms"] = times["torch"]["ms"]
            result["ratio_to_torch"] = times["opsnn"]["ms"] / times["torch"]["ms"]
        results.append(result)
        print(f"{result['label']:40} {result['ratio']:.3f}", flush=True)
    return results


def decode(sizes: Sequence[int]) -> list[dict]:
    """One new token over a cache, half of it filled."""
    results = []
    for size in sizes:
        keys = jax.random.split(jax.random.key(0), 3)
        q = jax.random.normal(keys[0], (4, 1, 8, 64))
        cache = [jax.random.normal(key, (4, size, 2, 64)) for key in keys[1:]]
        lengths = jnp.full(4, size // 2, jnp.int32)

        def theirs(q, k, v, lengths):
            attend = jax.nn.dot_product_attention
            return attend(q, k, v, key_value_seq_lengths=lengths)

        variants = {"jax.nn": jax.jit(theirs), "opsnn": jax.jit(attention_decode)}
        times = time_in_turn(variants, (q, *cache, lengths), 31)
        label = f"decode B=4 S={size} 2 key heads"
        print(f"{label:40} {times['opsnn']['ratio']:.3f}", flush=True)
        named = {"label": label, "pass": "fwd", "jax_ms": times["jax.nn"]["ms"]}
        results.append(named | times["opsnn"])
    return results


def longest(length: int = 65536) -> dict:
    """Bytes of temporary memory of forward and backward, causal; it is not run."""
    x = jax.ShapeDtypeStruct((1, length, 8, 64), jnp.float32)
    both = passes(functools.partial(flash_attention, is_causal=True))["fwd+bwd"]
    return {
        "label": f"fwd+bwd T={length} causal",
        "workspace": workspace(both, (x,) * 4),
    }


def torch_pass(row: Row, name: str, arrays):
    """PyTorch's scaled_dot_product_attention of the same values."""
    import torch

    def to_torch(x):
        x = torch.tensor(np.asarray(x, np.float32)).to(getattr(torch, row.dtype))
        return x.transpose(1, 2).contiguous()

    *qkv, dout = map(to_torch, arrays)
    options = {"is_causal": row.kind != "full", "enable_gqa": row.kv_heads != row.heads}
    attend = torch.nn.functional.scaled_dot_product_attention

    def run(*_):
        if name == "fwd":
            with torch.no_grad():
                return attend(*qkv, **options).flatten()[0].item()
        leaves = [x.clone().requires_grad_() for x in qkv]
        attend(*leaves, **options).backward(dout)
        return leaves[0].grad.flatten()[0].item()

    return run


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="short lengths only")
    parser.add_argument("--torch", action="store_true", help="time PyTorch too")
    parser.add_argument("--rows", default="", help="only rows with this in their names")
    args = parser.parse_args()
    chosen = [row for row in rows(args.quick) if args.rows in row.label]
    results = [r for row in chosen for r in measure(row, args.torch)]
    if args.rows in "decode":
        results += decode((1024,) if args.quick else (1024, 4096, 32768))
    results = renew("attention", results) if args.rows else results
    if not (args.quick or args.rows):
        memory = longest()
        print(f"{memory['label']}: {memory['workspace'] / 2**20:.0f} MiB")
        print(save("attention_memory", [memory]))
    print(save("attention", results))
    title = "attention, 8 heads of 64 features"
    print(plot_ratios("attention", results, title, base="jax.nn"))


if __name__ == "__main__":
    main()
