"""From the weights of one group of linears to their checkpoint tensors, and back."""

import hashlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from onegraph.formats.rotated import hadamard_block
from onegraph.formats.weight import Tensors
from onegraph.ops.hadamard import hadamard
from onegraph.ops.weight import weight_ops
from onegraph.quant import two_sided_ldlq
from onegraph.quant.code import CODES, Code
from onegraph.quant.ldlq import Coupling, Rounded, damped, descent_coupling, ldlq_coupling, sweep
from onegraph.quant.recipe import Recipe

_ROWS = 16384  # rows rounded at once; more only costs memory


def generator(seed: int, name: str) -> torch.Generator:
    """A CPU generator that depends on the recipe's seed and the layer's name alone, not on what ran before."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def _signs(count: int, source: torch.Generator, device: torch.device) -> Tensor:
    return (torch.randint(0, 2, (count,), generator=source) * 2 - 1).float().to(device)


def _spread(power: Tensor, exponent: float) -> Tensor:
    """power^(exponent / 2) [d] over its geometric mean, outliers bounded to float16's comfort; float16-exact."""
    if exponent == 0:
        return torch.ones_like(power)
    mean = power.mean().clamp_min(1e-30)
    log = (power / mean).clamp(1e-6, 1e6).log() * (exponent / 2)
    return (log - log.mean()).clamp(-6, 6).exp().half().float()


def quantize_group(
    weights: Sequence[Tensor],
    h: Tensor,
    bits: Sequence[int],
    recipe: Recipe,
    source: torch.Generator,
    outputs: Sequence[Callable[[], Tensor]] | None = None,
) -> list[Tensors]:
    """Round linears [n_i, k] that share the input second moment `h` [k, k]. Returns the checkpoint tensors of each.

    All get the same in_scale. Those of one rate are rounded side by side: rows do not interact, and a sweep's cost is
    in its number of steps. With `outputs`, which give the second factors [n_i, n_i] of their Hessians
    (`quant/fisher.py`) one by one, rows do interact, and each is rounded by itself (`quant/two_sided_ldlq.py`). float32
    throughout; deterministic.
    """
    device, k, code = h.device, h.shape[0], CODES[recipe.format]
    for w, rate in zip(weights, bits, strict=True):
        code.formats[rate].check_size(*w.shape)
    weights = [w.to(device, torch.float32) for w in weights]
    power = torch.cat(weights).square().mean(0)
    in_scale = _spread(power, recipe.channel_scale) * _signs(k, source, device)
    block = hadamard_block(k)
    damped_h, factor = damped(_rotated(h, in_scale), recipe.damping)
    ldlq = ldlq_coupling(factor, code.block)
    del factor

    inputs, targets, outs, scales = [], [], [], []
    for w, rate in zip(weights, bits, strict=True):
        inside = hadamard(w / in_scale, block)
        row_power = inside.square().mean(1)
        out = _spread(row_power, recipe.row_scale) * _signs(w.shape[0], source, device)
        target = hadamard((inside / out.unsqueeze(1)).T.contiguous(), hadamard_block(w.shape[0]))  # [k, n]
        rms = target.square().mean().sqrt().clamp_min(1e-12)
        scale = rms / recipe.rho_of(rate)
        inputs.append(inside)
        targets.append(target / scale)
        outs.append(out)
        scales.append(scale)

    # W ~ diag(out) V diag(in) in the rotated input's basis: once V is rounded, what is left to choose are the scales.
    def fit(i: int, value: Tensor, h_o: Tensor | None = None) -> None:
        if not recipe.fit_scales:
            return
        v = hadamard(value.contiguous(), hadamard_block(value.shape[1])).T * scales[i] * outs[i].unsqueeze(1)
        vh = v @ damped_h
        if h_o is None:
            gain = (vh * inputs[i]).sum(1) / (vh * v).sum(1).clamp_min(1e-30)
        else:
            gain = _joint_gain(v, inputs[i], vh, h_o)
        outs[i] = outs[i] * gain.clamp(0.5, 2.0)

    rounded: dict[int, Rounded] = {}
    for i, hessian in enumerate(outputs or ()):
        rounded[i], h_o = _round_both(targets[i], bits[i], code, ldlq, outs[i], hessian(), recipe)
        fit(i, rounded[i].value, h_o)
        del h_o
    descent = descent_coupling(damped_h, code.block) if outputs is None and recipe.descent else None
    for rate in sorted(set(bits)) if outputs is None else ():
        at = [i for i, b in enumerate(bits) if b == rate]
        whole = _round(torch.cat([targets[i] for i in at], dim=1), rate, code, ldlq, descent, recipe)
        start = 0
        for i in at:
            stop = start + targets[i].shape[1]
            rounded[i] = whole.columns(start, stop)
            fit(i, rounded[i].value)
            start = stop
    results = []
    for i, rate in enumerate(bits):
        scale = (scales[i] / code.formats[rate].unit).float()
        tensors = code.stored(rounded[i], rate)
        tensors |= {"in_scale": in_scale.half(), "out_scale": outs[i].half(), "scale": scale}
        results.append(tensors)
    return results


def _round_both(
    target: Tensor, bits: int, code: Code, ldlq: Coupling, out: Tensor, hessian: Tensor, recipe: Recipe
) -> tuple[Rounded, Tensor]:
    """Round target [k, n] under both factors, of outputs `hessian` [n, n]; and that one with its damping.

    The damping is so large that float32 suffices.
    """
    rotated = _rotated(hessian, out)
    del hessian  # of a wide linear each takes a gigabyte
    damped_o, lower = damped(rotated, recipe.output_damping, torch.float32)
    del rotated
    k, n = target.shape
    parts = two_sided_ldlq.parts(k, n, code.block)
    run = code.encoder(target.device, parts * two_sided_ldlq.ROWS, bits, recipe, parts)
    weights = two_sided_ldlq.output_weights(lower) if code.together > 1 else None
    rounded = two_sided_ldlq.sweep(target, bits, ldlq, two_sided_ldlq.output_coupling(lower), run, weights)
    del lower
    return rounded, _rotated_back(damped_o, out)


def _rotated(h: Tensor, scale: Tensor) -> Tensor:
    """H diag(scale) h diag(scale) H^T, made symmetric, H a block Hadamard matrix: second moments as rounding has them,
    float32 [n, n]."""
    block = hadamard_block(h.shape[0])
    h = (scale.unsqueeze(1) * h).mul_(scale)
    h = hadamard(hadamard(h, block).T.contiguous(), block)
    return (h + h.T).div_(2)


def _rotated_back(h: Tensor, scale: Tensor) -> Tensor:
    """`h` [n, n] as `_rotated` was given it."""
    block = hadamard_block(h.shape[0])
    h = hadamard(hadamard(h, block).T.contiguous(), block)
    return h.div_(scale.unsqueeze(1)).div_(scale)


def _joint_gain(v: Tensor, w: Tensor, vh: Tensor, h_o: Tensor) -> Tensor:
    """Gains g [n] of the rows that minimize tr(H_O E H E^T), E = diag(g) V - W; vh = V H [n, k]."""
    b = ((h_o @ w) * vh).sum(1).double()
    a = (vh @ v.T).mul_(h_o).double()
    factor, failed = torch.linalg.cholesky_ex(a)
    return torch.ones_like(b).float() if failed else torch.cholesky_solve(b.unsqueeze(1), factor)[:, 0].float()


def _round(target: Tensor, bits: int, code: Code, ldlq: Coupling, descent: Coupling | None, recipe: Recipe) -> Rounded:
    parts = []
    for part in target.split(_ROWS, dim=1):
        run = code.encoder(part.device, part.shape[1], bits, recipe, 0)
        rounded = sweep(part, bits, ldlq, encode=run)
        if descent is not None:
            for _ in range(recipe.descent):
                rounded = sweep(part, bits, descent, rounded, run, code.together)
        parts.append(rounded)
    return parts[0] if len(parts) == 1 else Rounded.joined(parts)


def quantize_embedding(weight: Tensor, bits: int, recipe: Recipe, source: torch.Generator) -> Tensors:
    """Round an embedding [V, D], each row for itself: a look-up must not need its neighbours, so nothing mixes rows.

    The error of a row is added to the residual stream as it is, so there is no Hessian: plain nearest codes, and the
    scale of each row that fits best.
    """
    code, k, w = CODES[recipe.format], weight.shape[1], weight.float()
    code.formats[bits].check_size(*w.shape)
    in_scale = _signs(k, source, w.device)
    inside = hadamard(w * in_scale, hadamard_block(k))
    scale = inside.square().mean(1, keepdim=True).sqrt().clamp_min(1e-12) / recipe.gaussian_rho_of(bits)
    metric, found, out = torch.eye(code.block, device=w.device), [], []
    for part, s in zip(inside.split(_ROWS), scale.split(_ROWS), strict=True):
        blocks, count = k // code.block, len(part)
        x = (part / s).T.reshape(blocks, code.block, count).transpose(0, 1).reshape(code.block, -1)
        *codes, value = code.encoder(x.device, x.shape[1], bits, recipe, 0)(x.contiguous(), bits, metric)
        value = value.view(code.block, blocks, count).transpose(0, 1).reshape(k, count)
        kinds = tuple(each.unflatten(-1, (blocks, count)).movedim(-2, 0).clone() for each in codes)
        found.append(Rounded(kinds, value))
        out.append((value.T * part).sum(1) / value.square().sum(0))
    rows = torch.cat(out)
    unit = rows.mean().clamp_min(1e-20)
    tensors = code.stored(Rounded.joined(found), bits)
    scales = {"in_scale": in_scale.half(), "out_scale": (rows / unit).half()}
    return tensors | scales | {"scale": unit / code.formats[bits].unit}


def dequantize(tensors: Tensors, bits: int, name: str = "e8p", *, embedding: bool = False) -> Tensor:
    """The dense weight float32 [n, k] that checkpoint tensors of the format `name` stand for."""
    format = CODES[name].formats[bits]
    ops = weight_ops(format)
    given = format.fold(tensors) | format.constants(tensors["codes"].device)
    if not embedding:
        return ops.decode(format, given)
    assert ops.embedding is not None
    ids = torch.arange(len(given["out_scale"]), device=given["codes"].device)
    return ops.embedding(format, ids, given)
