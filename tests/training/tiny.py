"""Configurations that train in a moment."""

TINY_IMAGES = {
    "run": {"name": "images", "steps": 6, "report_every": 2},
    "data": {"name": "mnist", "batch_size": 10, "test_size": 20},
    "model": {"name": "resnet", "widths": [2]},
    "optimization": {"precision": "mixed_fp16", "loss_scale": {"initial": 4096}},
}
TINY_TEXT = {
    "run": {"name": "text", "steps": 4, "report_every": 3},
    "data": {"name": "python_manual", "batch_size": 4, "sequence_length": 8},
    "model": {"name": "gpt", "layers": 1, "width": 8, "heads": 2, "sample_length": 12},
    "optimization": {"precision": "mixed_bf16", "micro_batches": 2, "ema_decay": 0.9},
}
