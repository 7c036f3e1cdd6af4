"""From logits to the next token, on the device: greedy, and temperature / top-k / top-p sampling without hidden state.

The random numbers are a function of (seed, position, vocabulary index) and of nothing else: no generator, so nothing
has to be registered with a graph, a replay needs no host work, and a row draws the same token in any batch, on any
device.
"""

import torch
from torch import Tensor

from onegraph.ops.checks import check_tensors
from onegraph.ops.registry import Case, Op, nbytes, register

# SplitMix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014. int64 arithmetic wraps
# on CPU and GPU alike, so the constants are the unsigned ones read as two's complement.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64

UNIT = 2.0**40  # of the likeliest token's weight: what top-p counts in


def _mix(z: Tensor) -> Tensor:
    """SplitMix64's finalizer on int64; `>>` is arithmetic in torch, so the copied sign bits are masked off."""
    z = (z ^ ((z >> 30) & (2**34 - 1))) * _MIX_1
    z = (z ^ ((z >> 27) & (2**37 - 1))) * _MIX_2
    return z ^ ((z >> 31) & (2**33 - 1))


def uniform(seed: Tensor, position: Tensor, index: Tensor) -> Tensor:
    """Uniform float64 in (0, 1), [B, N]: output number `index` [B, N] of the SplitMix64 stream of (seed, position) [B].

    52 bits and a half: neither 0 nor 1 comes out, whose logarithms would be infinite or zero.
    """
    return outputs(stream(seed, position), index)


def stream(seed: Tensor, position: Tensor) -> Tensor:
    """The start int64 [B] of the stream of (seed, position) [B].

    The seed is mixed before the position is added, so that neighbouring seeds and neighbouring positions do not share a
    stream shifted by one.
    """
    return _mix(_mix(seed + _GOLDEN) + position.long() * _GOLDEN)


def outputs(key: Tensor, index: Tensor) -> Tensor:
    """As `uniform`, of streams that start at `key` [B]."""
    bits = _mix(key[:, None] + (index + 1) * _GOLDEN)
    return (((bits >> 12) & (2**52 - 1)).double() + 0.5) * 2.0**-52


def _greedy(logits: Tensor) -> Tensor:
    return logits.argmax(dim=-1)


def sample_sorted(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, seed: Tensor, position: Tensor
) -> Tensor:
    """Filters in the order temperature, top-k, top-p (as transformers does), then draws by an exponential race.

    The race: with weights w_j and independent E_j ~ Exp(1), argmax w_j / E_j is j with probability w_j / sum(w) (the
    Gumbel-max trick without the second logarithm). float64 throughout: the rounding of exp and log differs between
    devices and between vector lanes, and in float64 it is too small to move a draw.
    """
    values, index = logits.float().sort(dim=-1, descending=True, stable=True)
    values = values.double()
    rank = torch.arange(logits.shape[-1], device=logits.device)
    cold = temperature <= 0
    weights = ((values - values[:, :1]) / temperature.masked_fill(cold, 1.0).double()[:, None]).exp()
    limit = top_k.masked_fill(top_k <= 0, logits.shape[-1]).masked_fill(cold, 1)
    weights = weights.masked_fill(rank >= limit[:, None], 0.0)
    # The cumulative sum is taken over integers (in UNITs of the likeliest token's weight): exact in any order,
    # where a float scan may round differently with the batch size. 2^40 * 2^22 tokens still fit an int64.
    units = (weights * UNIT).long()
    mass = units.cumsum(dim=-1)
    kept = mass - units < top_p.double()[:, None] * mass[:, -1:]
    kept = kept | (top_p >= 1)[:, None] | (rank == 0)
    race = weights.masked_fill(~kept, 0.0) / -uniform(seed, position, index).log()
    return index.gather(1, race.argmax(dim=-1, keepdim=True)).squeeze(1)


def _sample_on_gpu(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, seed: Tensor, position: Tensor
) -> Tensor:
    from onegraph.ops.cuda import sampling as kernels

    parameters = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed, "position": position}
    run = kernels.choose(logits.shape[0], logits.shape[1], logits.device.index)
    if run is None:
        return sample_sorted(logits, *parameters.values())
    return run(logits.float().contiguous(), **{name: each.contiguous() for name, each in parameters.items()})


def _tokens_like(logits: Tensor, *_: Tensor) -> Tensor:
    return logits.new_empty((logits.shape[0],), dtype=torch.int64)


def _check_logits(logits: Tensor) -> None:
    if logits.dim() != 2 or logits.shape[1] == 0 or not logits.is_floating_point():
        raise ValueError(
            f"logits: got {logits.dtype} {list(logits.shape)}; allowed is a floating point [batch, vocabulary]: "
            "take the logits of the last token of each row"
        )


def _check_sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, seed: Tensor, position: Tensor
) -> None:
    _check_logits(logits)
    rows = logits.shape[:1]
    check_tensors(
        "sample", logits.device, temperature=(temperature, torch.float32, rows), top_k=(top_k, torch.int32, rows),
        top_p=(top_p, torch.float32, rows), seed=(seed, torch.int64, rows), position=(position, torch.int32, rows),
    )  # fmt: skip


def _logits_case(name: str, batch: int, vocabulary: int, *, ties: bool = False) -> Case:
    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[Tensor]:
        logits = torch.randn(batch, vocabulary, generator=generator) * 3
        if ties:
            logits = logits.round()
        return (logits.to(device, dtype),)

    return Case(name=name, make=make)


def _sample_case(name: str, batch: int, vocabulary: int, *, ties: bool = False) -> Case:
    """Every combination of temperature (one in four greedy), top-k (off, tight, loose) and top-p (off or on)."""

    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[Tensor, ...]:
        logits = torch.randn(batch, vocabulary, generator=generator) * 3
        if ties:
            logits = logits.round()
        row = torch.arange(batch)
        k = torch.rand(batch, generator=generator)
        rows = (
            (torch.rand(batch, generator=generator) * 1.5 + 0.1).masked_fill(row % 4 == 3, 0.0),
            torch.where(row % 3 == 0, 0, torch.where(row % 3 == 1, 1 + 60 * k, 1 + (vocabulary - 1) * k)).int(),
            torch.rand(batch, generator=generator).masked_fill(row % 5 == 4, 1.0),
            torch.randint(-(2**62), 2**62, (batch,), generator=generator),
            torch.randint(0, 2**20, (batch,), generator=generator).int(),
        )
        return logits.to(device, dtype), *(row.to(device) for row in rows)

    return Case(name=name, make=make)


_EXACT = {torch.float32: 0.0, torch.float16: 0.0, torch.bfloat16: 0.0}

greedy = register(
    Op(
        name="greedy",
        schema="(Tensor logits) -> Tensor",
        reference=_greedy,
        fake=_tokens_like,
        kernel="onegraph.ops.triton.sampling:greedy",
        check=_check_logits,
        cases=(
            _logits_case("one-row", 1, 49152),
            _logits_case("odd-vocabulary", 5, 1009),
            _logits_case("ties", 16, 4096, ties=True),
            _logits_case("one-token", 3, 1),
        ),
        tolerance=_EXACT,
        bytes_moved=lambda logits: nbytes(logits) + 8 * logits.shape[0],
        flops=lambda logits: logits.numel(),
    )
)
"""Likeliest token of each row: logits [B, V], any float -> int64 [B]. Ties go to the lowest index."""

sample = register(
    Op(
        name="sample",
        schema="(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor seed, Tensor position)"
        " -> Tensor",
        reference=sample_sorted,
        fake=_tokens_like,
        kernel="onegraph.ops.sampling:_sample_on_gpu",
        cpu="onegraph.ops.cpu.sampling:sample",
        check=_check_sample,
        cases=(
            _sample_case("one-row", 1, 49152),
            _sample_case("odd-vocabulary", 7, 1009),
            _sample_case("many-chunks", 24, 5000),
            _sample_case("ties", 24, 300, ties=True),
            _sample_case("llama3-vocabulary", 12, 128256),
        ),
        tolerance=_EXACT,
        bytes_moved=lambda logits, *rows: nbytes(logits, *rows) + 8 * logits.shape[0],
        flops=lambda logits, *rows: 40 * logits.numel(),
    )
)
"""A random token of each row: logits [B, V] -> int64 [B].

temperature float32 [B] (0 is greedy), top_k int32 [B] (0 is off), top_p float32 [B] (1 is off), seed int64 [B] and
position int32 [B]: the position of the token that is drawn. top-k keeps exactly k tokens (ties: lowest indices); top-p
keeps the smallest set of likeliest tokens that reaches the mass p of what top-k kept, and always one.
"""
