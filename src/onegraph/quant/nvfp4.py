"""Weights to NVFP4: round to nearest, or with a search for each group's scale."""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from onegraph.formats.nvfp4 import E4M3, E4M3_MAX, GROUP, NVFP4
from onegraph.formats.weight import Tensors
from onegraph.ops.nvfp4 import SMALLEST, decode_e2m1, encode_e2m1, global_scale_of, quantize

# What the largest magnitude of a group may become. 6 is E2M1's largest number; larger targets clip, smaller ones trade
# the coarse steps near 6 for finer ones. (What the grid gives: docs/log.md.)
TARGETS = (4.0, 4.5, 5.0, 5.5, 6.0, 6.5, 7.0, 7.5)
ROWS_AT_ONCE = 512


@torch.no_grad()
def quantize_weight(weight: Tensor, *, search: bool = True) -> Tensors:
    """weight [n, k] -> what a file holds: codes, scale (the bits of E4M3) and global_scale []. `search` tries `TARGETS`
    for each group and keeps the scale of least squared error. Raises ValueError where k is no multiple of 16 or the
    weight is not finite."""
    if weight.dim() != 2 or weight.shape[1] % GROUP:
        raise ValueError(f"a weight of {tuple(weight.shape)} cannot become NVFP4: columns come in groups of {GROUP}")
    if not torch.isfinite(weight).all():
        raise ValueError("the weight is not finite; the checkpoint is damaged")
    gain = global_scale_of(weight)
    parts = [(_searched if search else quantize)(part.float(), gain) for part in weight.split(ROWS_AT_ONCE)]
    codes, scale = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return {"codes": codes, "scale": scale, "global_scale": gain}


def _searched(x: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
    grouped = x.unflatten(-1, (-1, GROUP))
    largest = grouped.abs().amax(-1) / gain
    best = torch.full(largest.shape, torch.inf, device=x.device)
    codes = torch.zeros(*largest.shape, GROUP // 2, dtype=torch.uint8, device=x.device)
    scale = torch.zeros(largest.shape, dtype=torch.uint8, device=x.device)
    for target in TARGETS:
        tried = (largest / target).clamp(max=E4M3_MAX).to(E4M3)
        unit = (tried.float() * gain).clamp(min=SMALLEST).unsqueeze(-1)
        coded = encode_e2m1(grouped / unit)
        error = (decode_e2m1(coded) * unit - grouped).square().sum(-1)
        better = error < best
        best = torch.where(better, error, best)
        codes = torch.where(better.unsqueeze(-1), coded, codes)
        scale = torch.where(better, tried.view(torch.uint8), scale)
    return codes.flatten(-2), scale


def quantized_tensors(
    names: Iterable[str],
    read: Callable[[str], Tensor],
    linears: Iterable[str],
    *,
    search: bool = True,
    device: torch.device | str = "cpu",
    on_linear: Callable[[str], None] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """All tensors of a checkpoint in ModelOpt's form from those of the source: weights of `linears` in NVFP4, others as
    they are. Raises ValueError that names the linear."""
    chosen = set(linears)
    for name in names:
        owner, _, kind = name.rpartition(".")
        if owner not in chosen or kind != "weight":
            yield name, read(name)
            continue
        try:
            made = quantize_weight(read(name).to(device), search=search)
        except ValueError as error:
            raise ValueError(f"{owner}: {error}") from None
        made["scale"] = made["scale"].view(E4M3)
        yield from ((tensor, made[key].cpu()) for key, tensor in NVFP4.names((), owner).items())
        if on_linear is not None:
            on_linear(owner)
