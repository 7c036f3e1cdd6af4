"""What several ops ask of a tensor, each in the same words."""

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
Wanted = tuple[Tensor | None, torch.dtype, tuple[int, ...]]


def check_tensors(op: str, device: torch.device, **wanted: Wanted) -> None:
    """Each tensor that is given has this dtype and shape (-1: any size) and lies on `device`, contiguous; the rows of a
    `block_table` may be apart."""
    for name, (tensor, dtype, shape) in wanted.items():
        if tensor is None:
            continue
        fits = len(shape) == tensor.dim() and all(s in (-1, n) for s, n in zip(shape, tensor.shape, strict=True))
        if not fits or tensor.dtype != dtype:
            sizes = ", ".join("any" if s < 0 else str(s) for s in shape)
            raise ValueError(
                f"{op}: {name} is {tuple(tensor.shape)} {tensor.dtype}; it must be "
                f"{str(dtype).removeprefix('torch.')} [{sizes}]"
            )
        if tensor.device != device:
            raise ValueError(f"{op}: {name} is on {tensor.device}, the input on {device}; move them to one device")
        if name == "block_table":
            if tensor.shape[1] > 1 and tensor.stride(1) != 1:
                raise ValueError(f"{op}: rows of block_table must be contiguous (rows may be apart)")
        elif not tensor.is_contiguous():
            raise ValueError(f"{op}: {name} has strides {tensor.stride()}; it must be contiguous")


def check_query(op: str, q: Tensor) -> None:
    if q.dim() != 4 or q.dtype not in FLOATS or not q.is_contiguous():
        raise ValueError(
            f"{op}: q is {tuple(q.shape)} {q.dtype}; it must be contiguous float32, bfloat16 or float16 "
            "[batch, tokens, heads, head_dim]"
        )


def check_grouped(op: str, heads: int, kv_heads: int) -> None:
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"{op}: there are {heads} heads and {kv_heads} kv heads; heads must be a multiple of kv heads")


def check_routes(x: Tensor, experts: Tensor, weights: Tensor) -> None:
    """x [T, D], the experts of each token int32 [T, K] and their weights float32 [T, K], both contiguous."""
    if experts.dim() != 2 or experts.shape[0] != x.shape[0] or experts.dtype != torch.int32:
        raise ValueError(f"experts is {experts.dtype} {tuple(experts.shape)}; it must be int32 [{x.shape[0]}, K]")
    if weights.shape != experts.shape or weights.dtype != torch.float32:
        raise ValueError(
            f"weights is {weights.dtype} {tuple(weights.shape)}; it must be float32 {tuple(experts.shape)}"
        )
    if not (experts.is_contiguous() and weights.is_contiguous()):
        raise ValueError("experts and weights must be contiguous: call .contiguous()")
    if experts.device != x.device or weights.device != x.device:
        raise ValueError(f"experts is on {experts.device}, weights on {weights.device} and x on {x.device}; move them")
