"""What quantizing takes on a device: time by a second of probes and a count of the work, memory by the sizes of what
is held.

On a CPU both are held to runs on two cores (docs/log.md); a GPU's rates are those of the runs behind
docs/benchmarks/quality.md, on an H200.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from onegraph.formats.checkpoint import SHARD_BYTES
from onegraph.models.memory import free_memory, system_memory
from onegraph.quant import two_sided_ldlq
from onegraph.quant.code import CODES
from onegraph.quant.experts import SHARED_ROWS
from onegraph.quant.fisher import LARGEST, batch_tokens
from onegraph.quant.layer import quantize_group
from onegraph.quant.nvfp4 import quantize_weight
from onegraph.quant.precision import tensor_cores
from onegraph.quant.recipe import Recipe
from onegraph.quant.sensitivity import NODES

# A GPU's rounding waits for launches, at any rate: seconds for each step of eight columns, and where it is under two
# factors for each wave and each vector of eight weights in it (H200). A CPU's encoder is probed as it will run.
STEP, WAVE, VECTOR = 1.2e-4, 1.9e-4, 1.5e-8
# Seconds of a probe where the work takes more than LONG, so that what else runs on the machine counts; else one call
PROBE, LONG = 0.25, 10.0
START = 3.0  # seconds until the first block, and bytes a second at which the result is written with its digests
WRITTEN = 3e8
TILE, ROUND = 6.5e-6, 8.5e-4  # of the trellis (H200): seconds for each tile of 16 x 16, and for each step of LDLQ


@dataclass(frozen=True, kw_only=True)
class Work:
    """What there is to do.

    Args:
        recipe_options: None for NVFP4, which reads no text; search: of its scales.
        groups: linears that are rounded side by side: outputs in all, inputs, rate. linears: each of them likewise.
        block: weights of a block, of `blocks`. tokens: of calibration, in rows of `sequence`; sampled: by the model
            first, which has `parameters` and keeps `cached` numbers a token.
        experts: matrices that are rounded one by one, as `groups`; routed: layers that have some.
        parts: whose cost is measured before, on `probed` tokens.
        carried: numbers of a token in its residual stream besides the `hidden` ones.
        written: bytes of the result. activations: bytes of residual streams that may lie in memory.
    """

    recipe_options: Recipe | None
    groups: Sequence[tuple[int, int, int]]
    linears: Sequence[tuple[int, int, int]] = ()
    search: bool = True
    block: int = 0
    blocks: int = 0
    hidden: int = 0
    carried: int = 0
    inner: int = 0
    vocab: int = 0
    tokens: int = 0
    sequence: int = 0
    sampled: bool = False
    parameters: int = 0
    cached: int = 0
    experts: Sequence[tuple[int, int, int]] = ()
    routed: int = 0
    parts: int = 0
    probed: int = 0
    written: int = 0
    activations: int = 1 << 62

    @property
    def hessians(self) -> int:
        """Bytes of the Hessians of all groups, and of what layers of experts keep in their place."""
        return sum(4 * k * k for _, k, _ in self.groups) + self.routed * self.stream

    @property
    def both(self) -> list[tuple[int, int, int]]:
        """Linears that are rounded one by one, under a Hessian of two factors."""
        asked = self.recipe_options is not None and self.recipe_options.fisher and self.recipe_options.fisher_outputs
        return [one for one in self.linears if one[0] <= LARGEST] if asked else []

    @property
    def apart(self) -> Sequence[tuple[int, int, int]]:
        """What is rounded row by row."""
        return [one for one in self.linears if one[0] > LARGEST] if self.both else self.groups

    @property
    def squares(self) -> list[int]:
        """Numbers of the second factor of each linear that has one."""
        return [n * n for n, _, _ in self.both]

    @property
    def factors(self) -> int:
        """Bytes of the Hessians' second factors on disk: a triangle of each, in float16."""
        return sum(n * (n + 1) for n, _, _ in self.both)

    @property
    def stream(self) -> int:
        """Bytes of the text's residual stream."""
        return 4 * self.tokens * (self.hidden + self.carried)

    @property
    def streams(self) -> int:
        """Bytes of all residual streams that are held at once: before and after a block, the unquantized model's, and
        what experts saw of them."""
        if self.recipe_options is None:
            return 0
        kept = 2 if self.recipe_options.correct or self.recipe_options.tune else 1
        if self.recipe_options.fisher:  # before each block, in bfloat16, behind the last one, and the gradients there
            return self.stream * self.blocks // 2 + self.stream * (1 + self.recipe_options.fisher)
        return self.stream * (kept + 1 + (2 if self.recipe_options.correct else 1) * (self.routed > 0))

    @property
    def spilled(self) -> int:
        """Bytes of them that lie on disk at most."""
        return max(0, self.streams - self.activations)


def estimate(work: Work, device: torch.device) -> tuple[float, int]:
    """Seconds, and bytes of the device's memory at the least; the model that writes text is `sampling_memory`."""
    if work.recipe_options is None:
        weights = sum(n * k for n, k, _ in work.groups)
        x = _normal(512, 1024, device)
        per_weight = _timed(lambda: quantize_weight(x, search=work.search), device, 0) / x.numel()
        return weights * per_weight, max((n * k for n, k, _ in work.groups), default=0) * 4
    seconds = _seconds(work, work.recipe_options, device, 0)
    if seconds > LONG:
        seconds = _seconds(work, work.recipe_options, device, PROBE)
    return seconds, _memory(work, work.recipe_options, device)


def _seconds(work: Work, recipe_options: Recipe, device: torch.device, probe: float) -> float:
    """Multiplications by the rate of a probe; and encoding, which on a GPU waits for launches."""
    size = 512 if device.type == "cpu" else 4096
    x = _normal(size, size, device)
    with tensor_cores(device):
        rate = 2 * size**3 / _timed(lambda: x @ x, device, probe)
    passes = 1 + recipe_options.descent
    # Runs of a block over the text: one gathers for all groups or one for each, and one goes on; each twice where the
    # unquantized model runs beside it.
    runs = {"reference": 1, "block": 2, "group": 5}[recipe_options.inputs] * (2 if recipe_options.correct else 1)
    work_done = 2.0 * work.block * work.blocks * work.tokens * runs
    rounded = [*work.apart, *work.experts]
    work_done += sum(2 * k * k * work.tokens * (2 if recipe_options.correct else 1) for _, k, _ in work.groups)
    shared = min(work.tokens, SHARED_ROWS) * (
        2 if recipe_options.correct else 1
    )  # each expert on all of the layer's tokens
    work_done += sum(2 * k * (n + k) * shared for n, k, _ in work.experts)
    work_done += sum(n * k * k * (1 + 2 * recipe_options.descent) + 6 * k**3 for n, k, _ in rounded)
    work_done += sum(n * k * (n + k) + 6 * k**3 + 8 * n**3 for n, k, _ in work.both)
    if recipe_options.fisher:  # forward twice, and backwards for each direction with the factors' products
        work_done += (
            2.0 * work.tokens * (2 + recipe_options.fisher) * (work.block * work.blocks + work.vocab * work.hidden)
        )
        work_done += 2.0 * work.tokens * recipe_options.fisher * sum(work.squares)
    if (
        recipe_options.tune is not None
    ):  # forward, again for its gradients, and twice as much backwards; the head likewise
        work_done += (
            8.0 * recipe_options.tune.epochs * work.tokens * (work.block * work.blocks + work.vocab * work.hidden)
        )
    seconds = work_done / rate
    if device.type == "cpu":
        seconds += START + work.written / WRITTEN
        passed = runs + (2 + 3 * recipe_options.fisher if recipe_options.fisher else 0)
        sequences = passed * work.blocks * work.tokens / max(work.sequence, 1)
        seconds += sequences * _apart_from_products(work, device, probe)
        used = {bits for _, _, bits in rounded}
        rounding = {bits: _rounding(bits, rate, recipe_options, device, probe) for bits in used}
        seconds += sum(n * k * rounding[bits] for n, k, bits in rounded)
        rates = {bits for _, _, bits in work.both}
        code = CODES[recipe_options.format]
        vectors, metric = _normal(code.block, 1024 if code.together == 1 else 64, device), torch.eye(code.block)
        encoders = {bits: code.encoder(device, vectors.shape[1], bits, recipe_options, 0) for bits in rates}
        each = {
            bits: _timed(partial(run, vectors, bits, metric), device, probe) / vectors.numel()
            for bits, run in encoders.items()
        }
        seconds += sum(n * k * each[bits] for n, k, bits in work.both)
    elif recipe_options.format == "trellis":
        seconds += sum((n * k / 256 * TILE + k / 16 * ROUND) * passes for n, k, _ in rounded)
        seconds += sum(n * k / 256 * TILE + (k + n) / 16 * ROUND for n, k, _ in work.both)
    else:
        seconds += sum(k / 8 * passes * STEP for _, k, _ in rounded)
        for n, k, _ in work.both:
            seconds += (k / 8 + n / two_sided_ldlq.ROWS) * (
                WAVE + two_sided_ldlq.ROWS * two_sided_ldlq.parts(k, n) * VECTOR
            )
    if work.parts:
        seconds += _measuring(work, rate, device, probe)
    if work.sampled:  # a step reads every weight once, whatever the rows beside it
        steps = work.sequence * -(-work.tokens // (64 * work.sequence))
        seconds += steps * work.parameters * 4 / 1e10 if device.type == "cpu" else steps * (2e-3 * work.blocks)
        seconds += 2 * work.parameters * work.tokens / rate
    return seconds


def _apart_from_products(work: Work, device: torch.device, probe: float) -> float:
    """Seconds that a block takes for a sequence besides the products of its linears: attention, norms, activations."""
    length, heads = work.sequence, max(1, work.hidden // 64)
    x, wide = _normal(length, work.hidden, device), _normal(length, work.inner, device)
    query = _normal(heads * length, 64, device).view(1, heads, length, 64)

    def run() -> None:
        for _ in range(2):
            x.mul(x.square().mean(-1, keepdim=True).add(1e-6).rsqrt()).add(x)
        torch.nn.functional.silu(wide).mul(wide)
        for _ in range(2):  # rotary embedding
            torch.cat((-query[..., 32:], query[..., :32]), -1).mul(query).add(query)
        torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)

    return _timed(run, device, probe)


def _rounding(bits: int, rate: float, recipe_options: Recipe, device: torch.device, probe: float) -> float:
    """Seconds that rounding takes for a weight, besides the products that grow with the inputs: two sizes of the real
    thing, whose difference has no part that all rows share."""
    k, few, many = (256, 128, 512) if CODES[recipe_options.format].together == 1 else (128, 32, 128)
    h = torch.eye(k, device=device)
    took = []
    for rows in (few, many):
        weight = _normal(rows, k, device)
        run = partial(quantize_group, [weight], h, [bits], recipe_options, torch.Generator().manual_seed(0))
        took.append(_timed(run, device, probe))
    products = k * (1 + 2 * recipe_options.descent) / rate
    return max(0.0, (took[1] - took[0]) / ((many - few) * k) - products)


def _measuring(work: Work, rate: float, device: torch.device, probe: float) -> float:
    """Hessians of the unquantized model, one quick pass of rounding, and what `sensitivity.measure` takes the probed
    tokens through: the model as it is, and for each size of errors forward, and forward and backward again."""
    passes = 1 + 4 * len(NODES)
    gradients = 2.0 * work.probed * passes * (work.block * work.blocks + work.vocab * work.hidden)
    rounded = [(n, k, 2) for n, k, _ in (*work.groups, *work.experts)]
    once = replace(work, groups=rounded, experts=(), parts=0, sampled=False)
    return gradients / rate + _seconds(once, Recipe.preset("quick"), device, probe)


def _normal(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """Random numbers that leave the caller's generators as they are."""
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).to(device)


def _timed(run: Callable[[], object], device: torch.device, probe: float) -> float:
    """Seconds of one call: the mean over `probe` seconds, behind one that is not counted."""
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begun, count = time.perf_counter(), 0
    while (spent := time.perf_counter() - begun) < probe or not count:
        run()
        count += 1
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return spent / count


def _memory(work: Work, recipe_options: Recipe, device: torch.device) -> int:
    """Embedding, one block (two beside an unquantized one, four where costs are measured), the text's residual streams
    as far as they may lie in memory, and the larger one of what gathering and rounding hold besides; on a CPU also a
    file of the result."""
    batch = min(recipe_options.batch_tokens, work.tokens)
    both = 2 if recipe_options.correct else 1
    squares = [k * k for _, k, _ in work.groups[:4]] or [0]
    held = sum(squares) if recipe_options.inputs != "group" else max(squares)
    kinds = both + (recipe_options.fisher > 0)  # of moments
    inputs = sum(k for _, k, _ in work.groups) // max(work.blocks, 1)  # of each linear, until the block is through
    gathering = 4 * kinds * held + 4 * batch * (3 * work.inner + 4 * work.hidden + inputs)
    most = max(work.squares, default=0)
    wide = 30 if most else 20
    rounding = max((wide * n * k + max(28 * k * k, 8 * k * k + 20 * most) for n, k, _ in work.groups), default=0)
    rounding = max(rounding, max((28 * k * k + 20 * n * k for n, k, _ in work.experts), default=0))
    if work.experts:  # inputs of an expert that all tokens chose, and of the shared ones, before and after gate-up
        widest = max(k for _, k, _ in work.experts) + max(n for n, _, _ in work.experts)
        rounding += 4 * both * widest * (work.tokens + min(work.tokens, SHARED_ROWS)) + work.block // 2
    if recipe_options.fisher or work.parts:  # a block's activations with what backward passes read, sums of its factors
        scores = 3 * work.hidden // 64 * work.sequence
        at_once = min(work.tokens, max(batch_tokens(device, work.hidden), work.sequence))
        graph = 4 * at_once * (8 * work.inner + 16 * work.hidden + scores)
        gathering = max(gathering, graph + 4 * sum(work.squares) // max(work.blocks, 1) + 4 * most)
    kept = 2 if recipe_options.correct or recipe_options.tune else 1
    kept = max(kept, 4 if work.parts else 1)  # with its twin, the difference and its gradient
    base = 4 * work.vocab * work.hidden + 4 * work.block * kept + work.streams - work.spilled
    if work.spilled:  # batches on their way from and to the disk
        base += 4 * 4 * batch * work.hidden
    peak = base + max(gathering, rounding)
    if device.type == "cpu":
        peak = max(peak, min(work.written, SHARD_BYTES))
    if recipe_options.tune is not None:
        peak = max(peak, 4 * (work.block * work.blocks + 2 * work.vocab * work.hidden) + work.stream)
    return peak


def sampling_memory(work: Work, device: torch.device) -> int:
    """Bytes of the whole model and its cache, where it writes text."""
    rows = min(64, -(-work.tokens // work.sequence))
    return (4 if device.type == "cpu" else 2) * (work.parameters + rows * work.sequence * work.cached)


def spill_bound(device: torch.device) -> int:
    """Bytes of residual streams that `quantize` holds in memory: an eighth of what is free, and 256 MB at least."""
    free = available_memory(device)
    return 1 << 62 if free is None else max(256 << 20, free // 8)


def available_memory(device: torch.device) -> int | None:
    """Bytes that this process may still take on the device; None where the system does not say."""
    return free_memory(device) if device.type == "cuda" else system_memory()
