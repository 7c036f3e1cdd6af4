"""Manifold-constrained hyper-connections (mHC, Xie et al. 2026) as DeepSeek-V4 uses them: H streams of width D.

Each sublayer reads one mixture of the streams (`hyper_mix`, with the sublayer's RMSNorm) and writes its result back
while the streams are mixed among each other (`hyper_update`); between two sublayers both are one
(`hyper_update_mix`). The mixing matrix is brought near the doubly stochastic
ones by a fixed number of Sinkhorn iterations, so both are fixed-shape work without a host decision.
"""

from typing import Any

import torch
from torch import Tensor

from onegraph.ops.checks import FLOATS, check_tensors
from onegraph.ops.registry import Case, Op, nbytes, register


def _weights(streams: Tensor, fn: Tensor, eps: float) -> Tensor:
    """fn · (flattened streams / their RMS), float32 [..., M]."""
    flat = streams.flatten(-2).float()
    return torch.nn.functional.linear(flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + eps), fn)


def _collapse(streams: Tensor, pre: Tensor, norm: Tensor, eps: float) -> Tensor:
    """The streams' sum with weights pre [..., H], rounded to their dtype, then RMSNorm, rounded again."""
    x = (pre.unsqueeze(-1) * streams.float()).sum(-2).to(streams.dtype).float()
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * norm.float()).to(streams.dtype)


def _hyper_mix(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm: Tensor, eps: float, floor: float, iterations: int
) -> tuple[Tensor, Tensor, Tensor]:
    h = streams.shape[-2]
    pre, post, comb = _weights(streams, fn, eps).split((h, h, h * h), dim=-1)
    pre_base, post_base, comb_base = base.split((h, h, h * h))
    pre = torch.sigmoid(pre * scale[0] + pre_base) + floor
    post = 2 * torch.sigmoid(post * scale[1] + post_base)
    comb = _sinkhorn((comb * scale[2] + comb_base).unflatten(-1, (h, h)), floor, iterations)
    return _collapse(streams, pre, norm, eps), post.contiguous(), comb.contiguous()


def _sinkhorn(logits: Tensor, floor: float, iterations: int) -> Tensor:
    """The mixing matrices of logits [..., H, H]; without iterations the logits as they are."""
    if not iterations:
        return logits
    comb = torch.softmax(logits, dim=-1) + floor
    comb = comb / (comb.sum(-2, keepdim=True) + floor)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + floor)
        comb = comb / (comb.sum(-2, keepdim=True) + floor)
    return comb


def _hyper_update(streams: Tensor, x: Tensor, post: Tensor, comb: Tensor, floor: float, iterations: int) -> None:
    comb = _sinkhorn(comb, floor, iterations)
    mixed = comb.transpose(-1, -2) @ streams.float()
    streams.copy_(mixed + post.unsqueeze(-1) * x.float().unsqueeze(-2))


def _hyper_update_mix(
    streams: Tensor, x: Tensor, post: Tensor, comb: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm: Tensor,
    eps: float, floor: float, iterations: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    _hyper_update(streams, x, post, comb, 0.0, 0)
    return _hyper_mix(streams, fn, base, scale, norm, eps, floor, iterations)


def hyper_sum(streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, eps: float, floor: float) -> Tensor:
    """What `hyper_head` gives, in front of its norm: for draft layers, of which few tokens pass."""
    pre = torch.sigmoid(_weights(streams, fn, eps) * scale + base) + floor
    return (pre.unsqueeze(-1) * streams.float()).sum(-2).to(streams.dtype)


def _hyper_head(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm: Tensor, eps: float, floor: float
) -> Tensor:
    return _collapse(streams, torch.sigmoid(_weights(streams, fn, eps) * scale + base) + floor, norm, eps)


def _check_streams(op: str, streams: Tensor) -> None:
    if streams.dim() < 2 or streams.dtype not in FLOATS or not streams.is_contiguous():
        raise ValueError(
            f"{op}: streams is {tuple(streams.shape)} {streams.dtype}; it must be contiguous [..., H, D], one of "
            "float32, bfloat16 and float16"
        )


def _check_weights(op: str, streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm: Tensor, few: bool) -> None:
    """`few`: those of a head, which mixes the streams once."""
    _check_streams(op, streams)
    h, d = streams.shape[-2:]
    mix = h if few else h * (h + 2)
    check_tensors(
        op, streams.device, fn=(fn, torch.float32, (mix, h * d)), base=(base, torch.float32, (mix,)),
        scale=(scale, torch.float32, (1 if few else 3,)), norm=(norm, norm.dtype, (d,)),
    )  # fmt: skip


def _check_mix(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm: Tensor, eps: float, floor: float, iterations: int
) -> None:
    _check_weights("hyper_mix", streams, fn, base, scale, norm, False)
    if iterations < 0:
        raise ValueError(f"hyper_mix: iterations is {iterations}; at least 0, which leaves logits, are allowed")


def _check_update(streams: Tensor, x: Tensor, post: Tensor, comb: Tensor, floor: float, iterations: int) -> None:
    _check_streams("hyper_update", streams)
    if iterations < 0:
        raise ValueError(f"hyper_update: iterations is {iterations}; at least 0, of a finished matrix, are allowed")
    *lead, h, d = streams.shape
    check_tensors(
        "hyper_update", streams.device, x=(x, streams.dtype, (*lead, d)),
        post=(post, torch.float32, (*lead, h)), comb=(comb, torch.float32, (*lead, h, h)),
    )  # fmt: skip


def check_update_mix(streams: Tensor, x: Tensor, post: Tensor, comb: Tensor, *mix: Any) -> None:
    _check_update(streams, x, post, comb, 0.0, 0)
    _check_mix(streams, *mix)
    if mix[-1] < 1:
        raise ValueError(f"hyper_update_mix: iterations is {mix[-1]}; at least one column normalisation is needed")


def _check_head(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm: Tensor, eps: float, floor: float
) -> None:
    _check_weights("hyper_head", streams, fn, base, scale, norm, True)


def mix_arguments(
    lead: tuple[int, ...], h: int, d: int, wide: bool, device: torch.device, dtype: torch.dtype, g: torch.Generator
) -> tuple[Any, ...]:
    """Of `hyper_update_mix`, for example cases."""
    return _case("update_mix", lead, h, d, wide).make(device, dtype, g)


def _case(kind: str, lead: tuple[int, ...], h: int, d: int, wide: bool = False, *, logits: bool = False) -> Case:
    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[object, ...]:
        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        streams = randn(*lead, h, d).to(device, dtype)
        if kind == "update":
            post, comb = randn(*lead, h).sigmoid() * 2, randn(*lead, h, h).softmax(-1)
            if logits:
                comb = randn(*lead, h, h)
            args = streams, randn(*lead, d).to(device, dtype), post.to(device), comb.to(device)
            return *args, 1e-6, 20 if logits else 0
        before: tuple[Tensor, ...] = ()
        if kind == "update_mix":
            before = randn(*lead, d).to(dtype), randn(*lead, h).sigmoid() * 2, randn(*lead, h, h).softmax(-1)
        m = h if kind == "head" else h * (h + 2)
        fn, base = randn(m, h * d) * (h * d) ** -0.5, randn(m)
        scale, norm = 1 + 0.2 * randn(1 if kind == "head" else 3), 1 + 0.2 * randn(d)
        before = tuple(t.to(device) for t in before)
        args = (streams, *before, fn.to(device), base.to(device), scale.to(device),
                norm.to(device, torch.float32 if wide else dtype), 1e-6, 1e-6)  # fmt: skip
        return args if kind == "head" else (*args, 0 if logits else 20)

    return Case(name="x".join(map(str, (*lead, h, d))) + (" logits" if logits else ""), make=make)


_SHAPES = (((1, 1), 4, 4096), ((3, 2), 4, 80), ((5,), 2, 96))
_TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 8e-4}

hyper_mix = register(
    Op(
        name="hyper_mix",
        schema=(
            "(Tensor streams, Tensor fn, Tensor base, Tensor scale, Tensor norm, float eps, float floor, "
            "int iterations) -> (Tensor, Tensor, Tensor)"
        ),
        reference=_hyper_mix,
        fake=lambda streams, fn, base, scale, norm, eps, floor, iterations: (
            streams.new_empty((*streams.shape[:-2], streams.shape[-1])),
            fn.new_empty(streams.shape[:-1]),
            fn.new_empty((*streams.shape[:-1], streams.shape[-2])),
        ),
        kernel="onegraph.ops.triton.deepseek_hyper:hyper_mix",
        check=_check_mix,
        cases=(*(_case("mix", *shape) for shape in _SHAPES), _case("mix", (3,), 4, 256, logits=True)),
        tolerance=_TOLERANCE,
        bytes_moved=lambda streams, fn, base, scale, norm, *rest: (
            nbytes(streams, fn, base, norm) + 2 * nbytes(streams) + 4 * streams.shape[-2] * streams.numel()
        ),
        flops=lambda streams, fn, *rest: 2 * fn.shape[0] * streams.numel(),
    )
)
"""streams [..., H, D] -> (input of the sublayer [..., D], post float32 [..., H], comb float32 [..., H, H]).

m = fn · flat(streams) / RMS with fn float32 [H(H + 2), H D], rows: pre | post | comb. pre = sigmoid + floor, post =
2 sigmoid, comb = row softmax + floor, then one column and iterations - 1 times a row and a column normalisation, each
over sum + floor; with no iterations comb is given as logits. The
input is Σ pre_i streams_i, rounded, then RMSNorm with weight `norm` [D]."""

hyper_update = register(
    Op(
        name="hyper_update",
        schema="(Tensor(a!) streams, Tensor x, Tensor post, Tensor comb, float floor, int iterations) -> ()",
        reference=_hyper_update,
        fake=lambda *args: None,
        kernel="onegraph.ops.triton.deepseek_hyper:hyper_update",
        check=_check_update,
        cases=(*(_case("update", *shape) for shape in _SHAPES), _case("update", (3,), 4, 256, logits=True)),
        tolerance=_TOLERANCE,
        bytes_moved=lambda streams, x, post, comb, *rest: 2 * nbytes(streams) + nbytes(x, post, comb),
        flops=lambda streams, *rest: 2 * (streams.shape[-2] + 1) * streams.numel(),
    )
)
"""streams[..., k, :] = post[..., k] x + Σ_j comb[..., j, k] streams[..., j, :], in place; float32 inside.
With iterations, comb is logits, as `hyper_mix` gives them without, which so many bring to a matrix."""

hyper_update_mix = register(
    Op(
        name="hyper_update_mix",
        schema=(
            "(Tensor(a!) streams, Tensor x, Tensor post, Tensor comb, Tensor fn, Tensor base, Tensor scale, "
            "Tensor norm, float eps, float floor, int iterations) -> (Tensor, Tensor, Tensor)"
        ),
        reference=_hyper_update_mix,
        fake=lambda streams, x, post, comb, *rest: (
            torch.empty_like(x),
            torch.empty_like(post),
            torch.empty_like(comb),
        ),
        kernel="onegraph.ops.cuda.deepseek_hyper:hyper_update_mix",
        check=check_update_mix,
        cases=(
            *(_case("update_mix", *shape) for shape in _SHAPES),
            _case("update_mix", (3,), 4, 1024),
            _case("update_mix", (13,), 4, 1024),
            _case("update_mix", (2, 1), 4, 7168, wide=True),
        ),
        tolerance=_TOLERANCE,
        bytes_moved=lambda streams, x, post, comb, fn, *rest: (
            3 * nbytes(streams) + 2 * nbytes(x, post, comb) + nbytes(fn)
        ),
        flops=lambda streams, x, post, comb, fn, *rest: (2 * fn.shape[0] + 2 * streams.shape[-2] + 2) * streams.numel(),
    )
)
"""`hyper_update(streams, x, post, comb)`, then what `hyper_mix` gives for the next sublayer: two launches in all."""

hyper_head = register(
    Op(
        name="hyper_head",
        schema=(
            "(Tensor streams, Tensor fn, Tensor base, Tensor scale, Tensor norm, float eps, float floor) -> Tensor"
        ),
        reference=_hyper_head,
        fake=lambda streams, *rest: streams.new_empty((*streams.shape[:-2], streams.shape[-1])),
        kernel="onegraph.ops.triton.deepseek_hyper:hyper_head",
        check=_check_head,
        cases=tuple(_case("head", *shape) for shape in _SHAPES),
        tolerance=_TOLERANCE,
        bytes_moved=lambda streams, fn, *rest: 2 * nbytes(streams) + nbytes(fn),
        flops=lambda streams, fn, *rest: 2 * fn.shape[0] * streams.numel(),
    )
)
"""streams [..., H, D] -> [..., D]: Σ (sigmoid(scale fn · flat / RMS + base) + floor)_i streams_i, then RMSNorm."""
