"""The implementations of flash_attention, and the order in which they are tried."""

from opsnn_jax.dispatch import WHOLE, Implementation, Table, deferred
from opsnn_jax.kernels.attention import xla
from opsnn_jax.kernels.attention.spec import AttentionSpec


def _order(name: str, platform: str, spec: AttentionSpec) -> tuple[str, ...]:
    pallas = {"tpu": ("pallas_tpu",), "cuda": ("pallas_gpu",)}.get(platform, ())
    return *pallas, "xla"


_XLA = Implementation("xla", {"fwd": xla.fwd, "bwd": xla.bwd}, refuses=xla.refuses)
_TPU = "opsnn_jax.kernels.attention.tpu"
_PALLAS_TPU = Implementation(
    "pallas_tpu",
    {"fwd": deferred(_TPU, "fwd"), "bwd": deferred(_TPU, "bwd")},
    platforms=("tpu",),
    refuses=deferred(_TPU, "refuses"),
    pallas=True,
)

_GPU = "opsnn_jax.kernels.attention.gpu"
_PALLAS_GPU = Implementation(
    "pallas_gpu",
    {"fwd": deferred(_GPU, "fwd"), "bwd": deferred(_GPU, "bwd")},
    platforms=("cuda",),
    refuses=deferred(_GPU, "refuses"),
    pallas=True,
    exports=False,
    unprepared=deferred(_GPU, "unprepared"),
)

_CUDNN_MODULE = "opsnn_jax.kernels.attention.cudnn"
_CUDNN = Implementation(
    "cudnn",
    {WHOLE: deferred(_CUDNN_MODULE, "attend")},
    platforms=("cuda",),
    refuses=deferred(_CUDNN_MODULE, "refuses"),
    unprepared=deferred(_CUDNN_MODULE, "unprepared"),
)

TABLE = Table(
    "flash_attention", (_PALLAS_TPU, _PALLAS_GPU, _CUDNN, _XLA), _order, plain=_XLA
)
