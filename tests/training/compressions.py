"""Every kind of compression."""

from opsnn_jax.training import Half, Int8, OneBit, TopK

KINDS = [TopK(0.2), Int8(), Int8(4), Half("bfloat16"), Half("float16"), OneBit()]
