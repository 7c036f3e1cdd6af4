"""Latent attention from the tensors of a block, and what a rank has of each."""

from __future__ import annotations

import torch
from torch import Tensor

from onegraph.formats.weight import Part
from onegraph.models.latent_config import (
    EPS,
    INDEX_GAINS,
    INDEX_K,
    INDEX_NORM,
    INDEX_Q,
    KV_A,
    KV_B,
    KV_NORM,
    OUT,
    Q_A,
    Q_B,
    Q_NORM,
    Latent,
    Q,
)
from onegraph.models.loader import Loader
from onegraph.models.shares import TPShard, columns, rows
from onegraph.nn.block import Normed
from onegraph.nn.latent import LatentAttention, LatentInputs
from onegraph.nn.latent_index import Indexer


def latent_parts(latent: Latent, share: TPShard) -> list[tuple[str, Part]]:
    """Within a block, each linear of the attention and what a rank has of it: the heads of queries, keys and values."""
    queries = rows(share, latent.heads, latent.nope + latent.rope)
    return [
        *([(Q_A, Part()), (Q_B, queries)] if latent.q_rank else [(Q, queries)]),
        (KV_A, Part()),
        (KV_B, rows(share, latent.heads, latent.nope + latent.value)),
        (OUT, columns(share, latent.heads, latent.value)),
    ]


def build_latent(
    loader: Loader,
    latent: Latent,
    i: int,
    prefix: str,
    norm: tuple[Tensor, float],
    tables: tuple[Tensor | None, Tensor | None, Tensor | None],
    scale: float,
    device: torch.device,
    share: TPShard,
    *,
    index: int,
    joined: bool,
    fused: bool,
) -> tuple[LatentInputs, LatentAttention]:
    """What block `i`, whose names begin with `prefix`, has of a rank's heads. norm: the block's in front, and its
    epsilon. joined: the up-projection is absorbed, and linears of x are one where that is exact. index: by which a
    cache finds the layer."""
    parts = dict(latent_parts(latent, share))
    names = [prefix + name for name in latent.front]
    linear = loader.siblings(names, device, joined=joined, parts=[parts[name] for name in latent.front])
    q_norm = loader.tensor(prefix + Q_NORM, device) if latent.q_rank else None
    q_b = loader.linear(prefix + Q_B, device, parts[Q_B]) if latent.q_rank else None
    low = Normed(norm[0], linear, norm[1], fused=fused)
    indexer = build_indexer(loader, latent, i, prefix, device)
    if indexer is not None:
        low = Normed(norm[0], linear, norm[1], fused=False)  # the indexer reads what is behind the norm, too
    first, last = share.span(latent.heads)
    cos, sin, query_scale = tables
    assert cos is not None
    assert sin is not None
    attention = LatentAttention(
        index=index,
        heads=last - first,
        nope=latent.nope,
        rope=latent.rope,
        value=latent.value,
        kv_b=loader.linear(prefix + KV_B, device, parts[KV_B]),
        absorbed=joined,
        kv_norm=loader.tensor(prefix + KV_NORM, device),
        eps=EPS,
        cos=cos,
        sin=sin,
        interleaved=latent.interleaved,
        query_scale=query_scale,
        scale=scale,
        dtype=loader.dtype,
        top_k=0 if latent.index is None else latent.index.top_k,
        indexer=indexer,
    )
    return LatentInputs(low, latent.width, q_norm, q_b, EPS, indexer), attention


def build_indexer(loader: Loader, latent: Latent, i: int, prefix: str, device: torch.device) -> Indexer | None:
    """That of block `i`, whole on each rank; None where it has none."""
    index = latent.indexed(i)
    if index is None:
        return None
    gains = f"{prefix}{INDEX_GAINS}"
    return Indexer(
        q_b=loader.linear(prefix + INDEX_Q, device),
        k=loader.linear(prefix + INDEX_K, device),
        k_norm=loader.float32(f"{prefix}{INDEX_NORM}.weight", device),
        k_bias=loader.float32(f"{prefix}{INDEX_NORM}.bias", device),
        gains=loader.tensor(gains, device, torch.promote_types(loader.info(gains).dtype, loader.dtype)),
        rope=latent.rope,
        interleaved=index.interleaved,
        top_k=index.top_k,
    )
