"""What float32 products are computed in while a model is quantized."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def tensor_cores(device: torch.device) -> Iterator[None]:
    """Inside this context float32 products on a GPU run on its tensor cores, with factors rounded to TF32.

    What it costs is within chance (docs/log.md, Quantization), and large models wait for these products. On a CPU, and
    for what is solved in float64, nothing changes.
    """
    before = torch.get_float32_matmul_precision()
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
