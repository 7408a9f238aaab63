"""What "cudnn" makes of a call, on a machine without a GPU.

The options that JAX gets are tried with its XLA implementation in cuDNN's place, and
the program for a GPU is looked at, not run.
"""

import functools
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from opsnn_jax import (
    attention_decode,
    dot_product_attention,
    explain,
    flash_attention,
    ring_attention,
)
from opsnn_jax.kernels.attention import cudnn
from opsnn_jax.kernels.attention.mask import Band
from opsnn_jax.kernels.attention.spec import AttentionSpec
from opsnn_jax.ops.attention_table import TABLE
from tests import draws

B, T, S, N, K, H = 2, 24, 40, 4, 2, 16
by_cudnn = functools.partial(flash_attention, implementation="cudnn")


@pytest.fixture
def prepared(monkeypatch):
    """As if this process had a GPU."""
    monkeypatch.setattr(cudnn, "unprepared", lambda: None)


@pytest.fixture
def by_xla(monkeypatch, prepared):
    """XLA in cuDNN's place, in float32. Lists the calls of it."""
    theirs, calls = jax.nn.dot_product_attention, []

    def attend(q, k, v, *, implementation, **options):
        assert implementation == "cudnn"
        calls.append(options)
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
        out = theirs(q, k, v, **options, implementation="xla")
        return out.astype(jnp.bfloat16)

    monkeypatch.setattr(jax.nn, "dot_product_attention", attend)
    return calls


@pytest.fixture
def for_cuda(monkeypatch, prepared):
    """JAX without its questions about the GPU of this process."""
    module = pytest.importorskip("jax._src.cudnn.fused_attention_stablehlo")
    answers = {
        "check_cudnn_version": lambda: 91000,
        "check_compute_capability": lambda capability: True,
        "is_cuda_compute_capability_equal": lambda capability: False,
    }
    for name, answer in answers.items():
        if not hasattr(module, name):
            pytest.skip(f"this JAX has no {name}, which would ask for a GPU")
        monkeypatch.setattr(module, name, answer)


def arrays(key, t=T, s=S, batch=(B,), dtype=jnp.bfloat16):
    keys = jax.random.split(key, 3)
    shapes = (*batch, t, N, H), (*batch, s, K, H), (*batch, s, K, H)
    return [draws.normal(k, x, dtype) for k, x in zip(keys, shapes, strict=True)]


def with_gradients(attend, q, k, v):
    out, vjp = jax.vjp(attend, q, k, v)
    return out, *vjp(jnp.cos(out))


def check_same(got, want):
    eps = float(jnp.finfo(jnp.bfloat16).eps)
    for a, b in zip(got, want, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_allclose(a, b, rtol=eps, atol=eps * np.abs(b).max())


@pytest.mark.parametrize(
    "sizes, options",
    [
        ((), {}),
        ((), dict(scale=0.7)),
        ((), dict(is_causal=True)),
        ((S, T), dict(is_causal=True)),
        ((), dict(is_causal=True, window=(3, None))),
        ((), dict(window=(3, 0), scale=0.7)),
        ((), dict(window=(0, 0))),
        ((T, T), dict(is_causal=True, causal_align="bottom_right")),
        ((T, S, ()), dict(is_causal=True)),
        ((T, S, (2, 3)), dict(is_causal=True, window=(3, 0))),
    ],
    ids=str,
)
def test_jax_gets_the_options_of_the_call(key, by_xla, sizes, options):
    q, k, v = arrays(key, *sizes)
    got, want = (
        with_gradients(
            functools.partial(flash_attention, **options, implementation=name), q, k, v
        )
        for name in ("cudnn", "reference")
    )
    assert len(by_xla) == 1
    check_same(got, want)


def test_jit_vmap_and_remat(key, by_xla):
    q, k, v = arrays(key, batch=(3, B))
    attend = functools.partial(by_cudnn, is_causal=True)
    want = with_gradients(attend, q, k, v)
    mapped = jax.jit(jax.vmap(jax.checkpoint(attend), 1, 1))
    check_same(with_gradients(mapped, q, k, v), want)


def calls_for_cuda(f, *args):
    """The program, and the names of cuDNN's calls in it."""
    text = jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    return text, re.findall(r"@__cudnn\$(\w+)", text)


def test_the_program_for_a_gpu_calls_cudnn_once_each_way(key, for_cuda):
    def f(q, k, v):
        attend = functools.partial(by_cudnn, window=(5, 0), scale=0.25)
        return with_gradients(attend, q, k, v)

    text, calls = calls_for_cuda(f, *arrays(key))
    assert calls == ["fmhaSoftmax", "fmhaSoftmaxBackward"]
    assert f"{T}x{S}" not in text
    # The query and the five keys before it.
    for said in ("CAUSAL", r"sliding_window_length\22: 6", r"fmha_scale\22: 0.25"):
        assert text.count(said) == 2


def test_several_devices_are_left_to_jax_to_partition(key, for_cuda):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    batch = jax.sharding.NamedSharding(mesh, P("x"))
    args = [jax.device_put(x, batch) for x in arrays(key)]
    assert calls_for_cuda(by_cudnn, *args)[0].count("@CustomSPMDPartitioning") == 1


def test_one_shard_of_a_mesh(key, for_cuda):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    f = jax.shard_map(by_cudnn, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    _, calls = calls_for_cuda(functools.partial(with_gradients, f), *arrays(key))
    assert calls == ["fmhaSoftmax", "fmhaSoftmaxBackward"]


@pytest.mark.parametrize(
    "change, reason",
    [
        (dict(bias=jnp.zeros((T, S))), "takes no bias"),
        (dict(mask=jnp.ones((T, S), bool)), "takes no mask"),
        (dict(kv_lengths=jnp.array([3, 4])), "takes no lengths or segments"),
        (dict(q_lengths=jnp.array([3, 4])), "takes no lengths or segments"),
        (
            dict(
                q_segment_ids=jnp.zeros((B, T), int),
                kv_segment_ids=jnp.zeros((B, S), int),
            ),
            "takes no lengths or segments",
        ),
        (dict(q_positions=jnp.zeros((B, T), int)), "takes no positions"),
        (dict(sinks=jnp.zeros(N)), "takes no sinks"),
        (dict(softcap=2.0), "takes no softcap"),
        (dict(dropout_rate=0.5, dropout_rng=jax.random.key(0)), "takes no dropout"),
        (dict(return_lse=True), "returns no lse: JAX rounds it"),
        (dict(precision="highest"), "takes the default precision only, not HIGHEST"),
        (
            dict(v=jnp.zeros((B, S, K, 24), jnp.bfloat16)),
            "features as keys, 16, not 24",
        ),
        (
            dict(is_causal=True, causal_align="bottom_right"),
            "takes only what is causal",
        ),
        (dict(window=(3, 1)), "takes only what is causal"),
        (dict(window=(3, None)), "takes only what is causal"),
        (dict(window=(None, 2)), "takes only what is causal"),
    ],
    ids=lambda x: x if isinstance(x, str) else "-".join(x),
)
def test_what_it_refuses(key, by_xla, change, reason):
    q, k, v = arrays(key)
    with pytest.raises(
        NotImplementedError, match=rf"^flash_attention: .*'cudnn' .*{reason}"
    ):
        by_cudnn(**{**dict(q=q, k=k, v=v), **change})


@pytest.mark.parametrize(
    "t, s, h, dtype, options, reason",
    [
        (8, 8, 16, "float32", {}, "takes bfloat16 and float16, not float32"),
        (8, 8, 12, "float16", {}, "takes heads of 8, 16, 24, ... features, not 12"),
        (8, 8, 264, "float16", {}, "no heads of 264 features, only of up to 256"),
        # Under a window of three the seventh query sees the last key, the eighth none.
        (7, 4, 8, "float16", dict(window=(3, 0)), "more queries than keys, 7 and 4"),
        (8, 4, 8, "float16", dict(window=(3, 0)), "more queries than keys, 8 and 4"),
        (
            8,
            4,
            8,
            "float16",
            dict(is_causal=True, causal_align="bottom_right"),
            "takes only what is causal",
        ),
    ],
)
def test_sizes_it_refuses(by_xla, t, s, h, dtype, options, reason):
    q, k = (jax.ShapeDtypeStruct((B, n, 2, h), dtype) for n in (t, s))
    with pytest.raises(NotImplementedError, match=reason):
        jax.eval_shape(functools.partial(by_cudnn, **options), q, k, k)


def test_a_symbolic_batch_is_refused(by_xla):
    shape = jax.export.symbolic_shape(f"b, {T}, {N}, {H}")
    q = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="takes sizes that are known only"):
        jax.eval_shape(by_cudnn, q, q, q)


def spec_of(features):
    dtype = jnp.dtype(jnp.bfloat16)
    return AttentionSpec(
        1, T, S, N, K, features, features, dtype, 1.0, Band(), None, None, None
    )


@pytest.mark.parametrize(
    "capability, unprepared, features",
    [("7.5", "needs compute capability 8.0, not 7.5", 128), ("8.6", None, 128)]
    + [("9.0", None, 256), ("12.0", None, 256)],
)
def test_what_the_gpu_decides(monkeypatch, capability, unprepared, features):
    gpu = SimpleNamespace(compute_capability=capability)
    monkeypatch.setattr(jax, "local_devices", lambda backend: [gpu])
    assert cudnn.unprepared() == unprepared
    assert cudnn.refuses(spec_of(features)) is None
    more = f"takes no heads of {features + 8} features, only of up to {features}"
    assert cudnn.refuses(spec_of(features + 8)) == more


def without_a_gpu(backend):
    raise RuntimeError(f"Unknown backend {backend}")


def test_it_is_named_in_vain_without_a_gpu(key, monkeypatch):
    monkeypatch.setattr(jax, "local_devices", without_a_gpu)
    text = "^flash_attention: .*'cudnn' needs an NVIDIA GPU with cuDNN.* Pass impl"
    with pytest.raises(NotImplementedError, match=text):
        by_cudnn(*arrays(key))


def test_it_is_never_chosen(prepared):
    for each in TABLE.choose(None, spec_of(H)).passes:
        tried = each.by_platform + each.without_kernels
        assert "cudnn" not in {implementation.name for _, implementation in tried}
    assert dict(TABLE.choose("cudnn", spec_of(H)).passes[0].by_platform).keys() == {
        "cuda"
    }


def test_it_is_no_part_of_an_order(key):
    with pytest.raises(
        ValueError, match="'cudnn' brings its own derivatives, so it is"
    ):
        flash_attention(*arrays(key), implementation=("cudnn", "xla"))


def test_ops_that_need_more_than_it_has_say_so(key, prepared):
    q, k, v = arrays(key)
    with pytest.raises(NotImplementedError, match="'cudnn' takes no positions"):
        attention_decode(q, k, v, jnp.array([S, S]), implementation="cudnn")
    with pytest.raises(ValueError, match="passes of its own; got 'cudnn'"):
        ring_attention(q, k, v, axis_name="x", implementation="cudnn")


def test_the_drop_in_takes_it_where_it_can(key, by_xla):
    q, k, v = arrays(key)
    attend = functools.partial(dot_product_attention, implementation="cudnn")
    want = flash_attention(q, k, v, is_causal=True, implementation="reference")
    check_same([attend(q, k, v, is_causal=True)], [want])
    assert len(by_xla) == 1
    out, lse = attend(q, k, v, is_causal=True, return_residual=True)
    assert lse.shape == (B, T, N)
    masked = attend(q, k, v, mask=jnp.tril(jnp.ones((T, S), bool)))
    check_same([out, masked], [want, want])
    assert len(by_xla) == 1


def test_explain_says_why(key, for_cuda):
    q, k, v = arrays(key)
    told = explain(flash_attention, q, k, v, platform="cuda", is_causal=True)
    reasons = {c.name: c.reason for c in told["bwd"].candidates}
    assert reasons["cudnn"] == "runs only where it is named"
    told = explain(flash_attention, q, k, v, platform="cuda", return_lse=True)
    reasons = {c.name: c.reason for c in told["fwd"].candidates}
    assert reasons["cudnn"].startswith("returns no lse")
    told = explain(by_cudnn, q, k, v, platform="cuda")
    assert [each.name for each in told.passes] == ["whole"]
    assert told["whole"].chosen == "cudnn"
    assert told["whole"].traffic == 2 * (2 * q.size + k.size + v.size)
    assert explain(by_cudnn, q, k, v, platform="cpu")["whole"].chosen is None
