"""The recurrent layers of a hybrid model from the tensors of a checkpoint."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from onegraph.formats.weight import Part
from onegraph.models.loader import Loader
from onegraph.models.mixers import GatedDelta, KimiDelta, Mamba, RecurrentMixer
from onegraph.models.shares import mixer_parts, piece_spans, share_of
from onegraph.nn.block import Normed
from onegraph.nn.linear import ConcatLinear, Linear, join
from onegraph.nn.peers import Peer
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
    loader: Loader,
    mixer: RecurrentMixer,
    i: int,
    norm: Tensor,
    eps: float,
    device: torch.device,
    *,
    joined: bool,
    fused: bool,
    peer: Peer | None = None,
) -> tuple[Inputs, Recurrent]:
    """What stands in front of the recurrent layer of block `i`, behind a norm of weight `norm`, and the layer itself;
    of its heads the share of the rank of `peer`.

    joined: linears of one input become one where that is exact, in the order in which the layer reads their rows.
    fused: the norm runs inside a linear that can.
    """
    prefix, whole, share = f"model.layers.{i}.", mixer, share_of(peer)
    mixer = whole.of_rank(share.ranks)

    def linears(name: str) -> list[Linear]:
        return [loader.linear(prefix + name, device, part) for part in mixer_parts(whole, name, share)]

    def steady_linears(name: str) -> list[Linear]:
        return [_dense(loader, prefix + name, device, part) for part in mixer_parts(whole, name, share)]

    def tensor(name: str, dtype: torch.dtype | None = None) -> Tensor:
        found = loader.tensor(prefix + name, device, dtype)
        found = found.flatten() if name.endswith("A_log") else found
        if name not in whole.cuts or share.whole:
            return found
        spans = piece_spans(whole.cuts[name], share)
        return torch.cat([found[slice(*span)] for span in spans])

    main = [linear for name in mixer.inputs for linear in linears(name)]
    order, steady = (mixer.order, mixer.steady_order) if isinstance(mixer, GatedDelta) else (None, None)
    linear, after = _in_order(main, order, joined)
    rates: Linear | None = None
    if mixer.steady:
        one, _ = _in_order([linear for name in mixer.steady for linear in steady_linears(name)], steady, True)
        assert isinstance(one, Linear)  # dense linears are joined in any order
        rates = one
    front = Normed(norm, linear, eps, after=after, fused=fused)
    inputs = Inputs(front, rates, norm, inside=isinstance(mixer, GatedDelta))
    if isinstance(mixer, GatedDelta | KimiDelta):
        convs = [tensor(name).squeeze(1) for name in mixer.convs]
        about: dict[str, Any] = {
            "index": i,
            "conv": torch.cat(convs) if len(convs) > 1 else convs[0],
            "a_log": tensor(f"{mixer.decays}A_log", torch.float32),
            "dt_bias": tensor(f"{mixer.decays}dt_bias", torch.float32),
            "norm": tensor(mixer.norm),
        }
        if isinstance(mixer, KimiDelta):
            decay, gate = (steady_linears(name)[0].tensors["weight"] for name in mixer.behind)
            about |= {"heads": (mixer.number,) * 2, "dims": (mixer.dim,) * 2}
            return inputs, KimiDeltaAttention(**about, eps=eps, decay=decay, gate=gate)
        about |= {"heads": (mixer.k_heads, mixer.v_heads), "dims": (mixer.k_dim, mixer.v_dim)}
        about |= {"beta_scale": mixer.beta_scale, "input_eps": eps}
        return inputs, GatedDeltaNet(**about, eps=mixer.norm_eps or eps)
    if isinstance(mixer, Mamba):
        assert isinstance(whole, Mamba)
        return inputs, Mamba2Mixer(
            index=i,
            heads=(mixer.number, mixer.size),
            groups=(mixer.groups, mixer.n),
            conv=tensor(f"{mixer.module}.conv1d.weight").squeeze(1),
            bias=tensor(f"{mixer.module}.conv1d.bias") if mixer.conv_bias else None,
            a_log=tensor(f"{mixer.module}.A_log", torch.float32),
            dt_bias=tensor(f"{mixer.module}.dt_bias", torch.float32),
            skip=tensor(f"{mixer.module}.D", torch.float32),
            norm=tensor(f"{mixer.module}.norm.weight"),
            eps=eps,
            dt_min=mixer.dt_min,
            peer=peer if whole.groups == 1 else None,
        )
    bias = tensor("conv.conv.bias") if mixer.bias else None
    return inputs, ShortConvolution(index=i, conv=tensor("conv.conv.weight").squeeze(1), bias=bias)


def _dense(loader: Loader, name: str, device: torch.device, part: Part) -> Linear:
    """A linear, or a part of its rows, that is never in codes, neither packed nor in int8."""
    linear = Linear(*loader.weight(name, device))
    linear = linear.dense(loader.dtype) if linear.format.coded else linear
    return linear if part == Part() else linear.part(rows=part.rows)


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
