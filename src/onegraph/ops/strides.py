"""How tensors lie in memory: what ops check and kernels are told. It imports nothing of ours, as kernels do not."""

from torch import Tensor


def row_stride(x: Tensor) -> int | None:
    """Elements from each row of x [..., D] to the next; None where they are not equally far apart, or have gaps."""
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        return None
    step, rows = x.shape[-1], 1
    for size, stride in zip(reversed(x.shape[:-1]), reversed(x.stride()[:-1]), strict=True):
        if size > 1 and rows > 1 and stride != rows * step:
            return None
        step, rows = stride if rows == 1 < size else step, rows * size
    return step
