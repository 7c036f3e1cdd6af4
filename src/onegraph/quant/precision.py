"""What float32 products are computed in while a model is quantized."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def tensor_cores(device: torch.device) -> Iterator[None]:
    """Inside this context float32 products on a GPU run on its tensor cores, with factors rounded to TF32.

    What it costs is within chance (docs/log.md, Quantization), and large models wait for these products. On a CPU, and
    for what is solved in float64, nothing changes; nor in a process that has set torch's precision of a backend, which
    the setting for all backends may not be mixed with.
    """
    try:
        before = torch.get_float32_matmul_precision() if device.type == "cuda" else None
    except RuntimeError:
        before = None
    if before is None:
        yield
        return
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
