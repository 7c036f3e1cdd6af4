"""How far attention to TurboQuant codes is from exact attention, along a random sequence of 100,000 tokens.

    python benchmarks/turboquant_drift.py MODEL TEXT [--tokens 100000] SETTING... [--out FILE]

Queries, keys and values of every token are drawn at random, with the means and covariances that they have in three of
the model's layers (one kv head of each and the queries that share it), and get the model's RoPE, scaled linearly so
that the sequence takes as many turns as the model's own context: beyond those its means attend to anything. All goes
through a `TurboQuantCache`, in codes from the first token on. In the last tenth before several positions 64 decode
steps attend to it: a head's error is |codes' output - exact output| / |exact output| over all of them. In a second pass
each of the last queries meets one key that was planted so that it has about half of the weight, at several distances.
"""

import argparse
import dataclasses
import itertools
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onegraph.api.tokenizer import Tokenizer
from onegraph.cli.common import pick_dtype, read_text
from onegraph.engine.record import emit, machine
from onegraph.formats.checkpoint import Checkpoint
from onegraph.formats.turboquant import TurboQuantConfig, parse_kv
from onegraph.models.llama import Llama
from onegraph.nn.attention import Attention, CausalAttention
from onegraph.nn.turboquant import TurboQuantCache
from onegraph.ops.attention import rotate_half

PAGE = 16
AT = (1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000)
FAR = (16, 100, 1_000, 10_000, 50_000, 99_000)  # distances of planted keys; 16 is within a window
QUERIES = 64  # before each position
PLANTED = 48  # queries at each distance
SAMPLE = 4_096  # tokens of the text whose statistics are taken
BLOCK = 4_096  # tokens written at once


class Recorder:
    """Dense attention that keeps what layers hand it."""

    def __init__(self) -> None:
        self.seen: dict[int, Tensor] = {}

    def attend(self, attention: Attention, qkv: Tensor) -> Tensor:
        self.seen[attention.index] = qkv[0]
        return CausalAttention().attend(attention, qkv)


@torch.no_grad()
def groups(model: Llama, ids: Tensor) -> list[Tensor]:
    """What the first, the middle and the last layer make of tokens [T]: [T, (heads / kv_heads + 2) * head_dim], the
    queries that share the layer's first kv head, its key, its value, before RoPE."""
    recorder, c = Recorder(), model.config
    model(ids[None], recorder)
    found = []
    for layer in (0, c.layers // 2, c.layers - 1):
        heads = recorder.seen[layer].view(len(ids), -1, c.head_dim)
        share = c.heads // c.kv_heads
        found.append(torch.cat((heads[:, :share], heads[:, c.heads :: c.kv_heads][:, :2]), dim=1).flatten(1))
    return found


def drawn(samples: Sequence[Tensor], tokens: int, dim: int, seed: int = 0) -> Tensor:
    """qkv float32 [tokens, (heads + 2 kv_heads) * dim], normal with each group's mean and covariance."""
    generator, parts = torch.Generator().manual_seed(seed), []
    for sample in samples:
        mean, sample = sample.double().mean(0), sample.double()
        covariance = (sample - mean).T @ (sample - mean) / len(sample)
        tiny = 1e-9 * covariance.diagonal().mean() * torch.eye(len(mean), dtype=torch.float64)
        root = torch.linalg.cholesky(covariance + tiny)
        normal = torch.randn(tokens, len(mean), generator=generator)
        parts.append((normal @ root.T.float() + mean.float()).view(tokens, -1, dim))
    queries, keys, values = (
        torch.cat(which, 1) for which in zip(*(p.tensor_split((-2, -1), 1) for p in parts), strict=True)
    )
    return torch.cat((queries, keys, values), dim=1).flatten(1)


class Exact:
    """Attention of single queries to all of a sequence, from float32 keys and values."""

    def __init__(self, attention: Attention, qkv: Tensor) -> None:
        self.attention, self.share = attention, attention.heads // attention.kv_heads
        heads = qkv.view(len(qkv), -1, attention.head_dim)
        sizes = attention.heads, attention.kv_heads, attention.kv_heads
        self.before, keys, values = heads.split(sizes, dim=1)
        self.keys, self.values = self.turned(keys).transpose(0, 1).contiguous(), values.transpose(0, 1).contiguous()

    def turned(self, heads: Tensor, start: int = 0, back: bool = False) -> Tensor:
        """RoPE of [T, H, D] whose first token stands at `start`."""
        assert self.attention.cos is not None
        assert self.attention.sin is not None
        cos, sin = (t[start : start + len(heads)].unsqueeze(1) for t in (self.attention.cos, self.attention.sin))
        return rotate_half(heads, cos, -sin if back else sin)

    def query(self, t: int) -> Tensor:
        """[kv_heads, share, D]"""
        return self.turned(self.before[t : t + 1], t)[0].view(self.attention.kv_heads, self.share, -1)

    def scores(self, t: int) -> Tensor:
        """[kv_heads, share, t + 1]"""
        return (self.query(t) * self.attention.scale) @ self.keys[:, : t + 1].transpose(1, 2)

    def attend(self, t: int) -> Tensor:
        """[heads, D]"""
        return (self.scores(t).softmax(-1) @ self.values[:, : t + 1]).flatten(0, 1)


def plant(attention: Attention, qkv: Tensor, at: dict[int, int]) -> None:
    """For each query t and distance d of `at` the keys of token t - d become such that the first query of each group
    gives them about half of its weight, by what it has not in common with other queries."""
    exact, dim, share = Exact(attention, qkv), attention.head_dim, attention.heads // attention.kv_heads
    keys = qkv.view(len(qkv), -1, dim)[:, attention.heads : attention.heads + attention.kv_heads]
    common = torch.nn.functional.normalize(exact.before[:, ::share].mean(0), dim=-1)
    for t, distance in [*at.items()] * 3:  # planted keys see each other, so what half is settles
        own = exact.before[t, ::share]
        own = exact.turned((own - (own * common).sum(-1, keepdim=True) * common)[None], t)[0]
        scores = exact.scores(t)[:, 0]
        scores[:, t - distance] = -math.inf
        key = own * scores.logsumexp(-1, keepdim=True) / (attention.scale * own.square().sum(-1, keepdim=True))
        exact.keys[:, t - distance] = key
        keys[t - distance] = exact.turned(key[None], t - distance, back=True)[0]


def new_cache(kv: TurboQuantConfig, attention: Attention, tokens: int) -> TurboQuantCache:
    """One layer's, for one sequence."""
    pages = math.ceil(tokens / PAGE)
    cache = TurboQuantCache(
        kv, layers=1, pages=1 + pages, page_size=PAGE, kv_heads=attention.kv_heads, head_dim=attention.head_dim, rows=1,
        pages_per_row=pages, device="cpu", dtype=torch.float32,
    )  # fmt: skip
    cache.block_table.copy_(torch.arange(1, 1 + pages)[None])
    return cache


@torch.no_grad()
def drift(
    attention: Attention, qkv: Tensor, cache: TurboQuantCache, steps: Sequence[range], first: bool = False
) -> list[float]:
    """Relative errors of the decode steps of each range of positions, ascending, the mean over heads; all other tokens
    are written alone. first: only of the first query of each group."""
    exact, (layer,), found, now = Exact(attention, qkv), cache.layers, [], 0
    assert layer is not None
    every = attention.heads // attention.kv_heads if first else 1
    for span in steps:
        error = size = torch.zeros(attention.heads // every)
        for t in span:
            for start in range(now, t, BLOCK):
                some = qkv[start : min(start + BLOCK, t)][None]
                place, count = (torch.tensor([n], dtype=torch.int32) for n in (start, some.shape[1]))
                tokens = some, None, None, 0.0, attention.cos, attention.sin, place, count, cache.block_table
                layer.write(tokens, None if layer.ring is None else cache.slots, attention.heads, False)
            now = t + 1
            seen = cache.view(pages=t // PAGE + 1)
            seen.positions.fill_(t)
            seen.counts.fill_(1)
            got = seen.attend(attention, qkv[t][None, None]).view(attention.heads, -1)[::every]
            wanted = exact.attend(t)[::every]
            error, size = error + (got - wanted).square().sum(1), size + wanted.square().sum(1)
        found.append(float((error / size).sqrt().mean()))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("settings", nargs="+")
    parser.add_argument("--tokens", type=int, default=AT[-1])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    device = torch.device("cpu")
    with Checkpoint.open(args.model) as checkpoint:
        ids = torch.tensor(Tokenizer(checkpoint).encode(read_text(args.text))[:SAMPLE])
        model = Llama.load(checkpoint, device, pick_dtype("auto", device), max_context=SAMPLE)
    c = model.config
    rope = c.ropes[0]
    if rope is None or rope.kind != "default" or model.blocks[0].attention.q_norm is not None:
        parser.error("the model must have plain RoPE in its first layer and no norms of queries and keys")
    longer = max(1.0, args.tokens / c.max_positions)
    rope = dataclasses.replace(rope, kind="linear", factor=longer)
    cos, sin = rope.tables(c.head_dim, args.tokens)
    samples = groups(model, ids)
    sizes = {"heads": len(samples) * c.heads // c.kv_heads, "kv_heads": len(samples), "head_dim": c.head_dim}
    attention = Attention(index=0, **sizes, cos=cos, sin=sin)
    qkv = drawn(samples, args.tokens, c.head_dim, args.seed)
    places, far = [at for at in AT if at <= args.tokens], [d for d in FAR if d <= args.tokens - len(FAR) * PLANTED]
    steps = [range(at - at // 10, at, max(1, at // 10 // QUERIES)) for at in places]
    ends = [args.tokens - PLANTED * i for i in range(len(far), -1, -1)]
    asking = [range(begin, end) for begin, end in itertools.pairwise(ends)]
    planted = qkv.clone()
    plant(attention, planted, {t: distance for span, distance in zip(asking, far, strict=True) for t in span})
    for setting in args.settings:
        started = time.monotonic()
        kv = parse_kv(setting)
        if kv is None:
            parser.error("exact attention is what others are compared with; give settings of turboquant")
        along = drift(attention, qkv, new_cache(kv, attention, args.tokens), steps)
        behind = drift(attention, planted, new_cache(kv, attention, args.tokens), asking, first=True)
        row: dict[str, Any] = {"bench": "turboquant drift", "kv": setting, "tokens": args.tokens, "seed": args.seed}
        row |= {"positions": places, "errors": [round(e, 4) for e in along]}
        row |= {"distances": far, "planted_errors": [round(e, 4) for e in behind]}
        emit(row | {"seconds": round(time.monotonic() - started, 1)} | machine(device), args.out)


if __name__ == "__main__":
    main()
