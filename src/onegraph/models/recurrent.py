"""The recurrent layers of a hybrid model from the tensors of a checkpoint."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from onegraph.models.loader import Loader
from onegraph.models.mixers import GatedDelta, KimiDelta, Mamba, Mixer, ShortConv
from onegraph.nn.block import Normed
from onegraph.nn.linear import ConcatLinear, Linear, join
from onegraph.nn.recurrent import (
    GatedDeltaNet,
    Inputs,
    KimiDeltaAttention,
    Mamba2Mixer,
    Recurrent,
    Reordered,
    ShortConvolution,
)


def build_recurrent(
    loader: Loader, mixer: Mixer, i: int, norm: Tensor, eps: float, device: torch.device, *, joined: bool, fused: bool
) -> tuple[Inputs, Recurrent]:
    """What stands in front of the recurrent layer of block `i`, behind a norm of weight `norm`, and the layer itself.

    joined: linears of one input become one where that is exact, in the order in which the layer reads their rows.
    fused: the norm runs inside a linear that can.
    """
    prefix = f"model.layers.{i}."
    main = [loader.linear(prefix + name, device) for name in mixer.inputs]
    order, steady = (mixer.order, mixer.steady_order) if isinstance(mixer, GatedDelta) else (None, None)
    linear, after = _in_order(main, order, joined)
    rates: Linear | None = None
    if mixer.steady:
        one, _ = _in_order([_dense(loader, prefix + name, device) for name in mixer.steady], steady, True)
        assert isinstance(one, Linear)  # dense linears are joined in any order
        rates = one
    inputs = Inputs(Normed(norm, linear, eps, after=after, fused=fused), rates, norm)
    if isinstance(mixer, GatedDelta | KimiDelta):
        owner = prefix + mixer.decays
        convs = [loader.tensor(prefix + name, device).squeeze(1) for name in mixer.convs]
        about: dict[str, Any] = {
            "index": i,
            "conv": torch.cat(convs) if len(convs) > 1 else convs[0],
            "a_log": loader.float32(f"{owner}A_log", device).flatten(),
            "dt_bias": loader.float32(f"{owner}dt_bias", device),
            "norm": loader.tensor(prefix + mixer.norm, device),
        }
        if isinstance(mixer, KimiDelta):
            decay, gate = (_dense(loader, prefix + name, device).tensors["weight"] for name in mixer.behind)
            about |= {"heads": (mixer.heads,) * 2, "dims": (mixer.dim,) * 2}
            return inputs, KimiDeltaAttention(**about, eps=eps, decay=decay, gate=gate)
        about |= {"heads": (mixer.k_heads, mixer.v_heads), "dims": (mixer.k_dim, mixer.v_dim)}
        return inputs, GatedDeltaNet(**about, eps=mixer.norm_eps or eps, beta_scale=mixer.beta_scale)
    if isinstance(mixer, Mamba):
        owner = f"{prefix}mixer."
        return inputs, Mamba2Mixer(
            index=i,
            heads=(mixer.heads, mixer.size),
            groups=(mixer.groups, mixer.n),
            conv=loader.tensor(f"{owner}conv1d.weight", device).squeeze(1),
            bias=loader.tensor(f"{owner}conv1d.bias", device) if mixer.conv_bias else None,
            a_log=loader.float32(f"{owner}A_log", device),
            dt_bias=loader.float32(f"{owner}dt_bias", device),
            skip=loader.float32(f"{owner}D", device),
            norm=loader.tensor(f"{owner}norm.weight", device),
            eps=eps,
            dt_min=mixer.dt_min,
        )
    assert isinstance(mixer, ShortConv)
    name = f"{prefix}conv.conv."
    bias = loader.tensor(f"{name}bias", device) if mixer.bias else None
    return inputs, ShortConvolution(index=i, conv=loader.tensor(f"{name}weight", device).squeeze(1), bias=bias)


def _dense(loader: Loader, name: str, device: torch.device) -> Linear:
    """A linear that is never in codes, neither packed nor in int8."""
    linear = Linear(*loader.weight(name, device))
    return linear.dense(loader.dtype) if linear.format.coded else linear


def _in_order(
    linears: Sequence[Linear], order: list[int] | None, joined: bool
) -> tuple[Linear | ConcatLinear, Reordered | None]:
    """Linears of one input as one, with rows in the given order; where they stay apart or their format has no such
    parts, as they are, and what brings their results into it."""
    whole = join(linears) if joined else linears[0] if len(linears) == 1 else ConcatLinear(linears)
    if order is None:
        return whole, None
    if joined and isinstance(whole, Linear):
        try:
            pieces = join([whole.part(rows=run) for run in _runs(order)])
        except ValueError:
            pieces = None
        if isinstance(pieces, Linear):
            return pieces, None
    device = next(whole.buffers()).device
    return whole, Reordered(torch.tensor(order, device=device))


def _runs(order: list[int]) -> list[tuple[int, int]]:
    """First and last of rows that lie side by side."""
    starts = [i for i, row in enumerate(order) if i == 0 or row != order[i - 1] + 1]
    ends = [*starts[1:], len(order)]
    return [(order[start], order[start] + end - start) for start, end in zip(starts, ends, strict=True)]
