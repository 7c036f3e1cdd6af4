"""What a model and its cache take, known before either is made, and how large a cache fits the machine."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from onegraph.api.device import pick_precision
from onegraph.api.drafting import EAGLE, MTP, NGRAM, check_name, head_checkpoint, second_checkpoint
from onegraph.api.size import human_bytes
from onegraph.engine.offload import GIB, NOT_SHARED
from onegraph.formats.checkpoint import Checkpoint
from onegraph.formats.turboquant import TurboQuantConfig, parse_kv
from onegraph.models.adapters import adapter_bytes
from onegraph.models.assistant import AssistantConfig, is_assistant
from onegraph.models.config import LlamaConfig
from onegraph.models.eagle import EagleConfig, EagleHead
from onegraph.models.expert_memory import ExpertMemory
from onegraph.models.llama import Llama, attention_cache, turned_bytes, unread_layers
from onegraph.models.load import checkpoint_config, packable, parse_config
from onegraph.models.loader import Held, Loader
from onegraph.models.memory import GB, free_cache_memory, gpu_memory
from onegraph.models.mtp import DraftConfig, has_layer
from onegraph.models.shares import TPShard, read_bytes, share_of, shares_draft

# Of what is free besides the weights: a CPU's memory is for other programs too
SHARE = {"cpu": 1 / 8, "cuda": 0.9}
MAX_MODEL_LEN = 4096  # unless the caller gives more
CUDA_BYTES = 750_000_000  # of a GPU, for the CUDA context and all kernels (docs/guides/fit-your-gpu.md)
UNBOUNDED = 1 << 50  # bytes: `free_memory` of a system that does not say
HELD = {"float16": 2, "int8": 1}  # bytes of a weight of the blocks that a CPU holds so; the ends have 2


@dataclass(frozen=True)
class Memory:
    """Bytes of the weights and of a KV cache of so many tokens, on each device, and what is free there (None where the
    system does not say). In host memory are `offloaded`, of the prefix cache, which on a CPU counts as taken already,
    and `experts`, of routed experts. token: bytes of one in the cache."""

    weights: int
    cache: int
    tokens: int
    free: int | None
    offloaded: int = 0
    experts: int = 0
    token: int = 0

    @property
    def fits(self) -> bool:
        return self.free is None or self.weights + self.cache <= self.free

    def __str__(self) -> str:
        free = "" if self.free is None else f"; {human_bytes(self.free)} are free"
        cache = f"KV cache {human_bytes(self.cache)} for {self.tokens} tokens"
        if self.offloaded:
            cache += f", offloaded prefixes {human_bytes(self.offloaded)} of host memory"
        experts = f" and experts {human_bytes(self.experts)} of host memory" if self.experts else ""
        return f"memory: weights {human_bytes(self.weights)}{experts}, {cache}{free}"


@dataclass(frozen=True)
class LoadPlan:
    """How a checkpoint is loaded: the dtype of activations, what a CPU holds linears in where that is another, how keys
    and values are stored (None: in the dtype), and what memory that takes (None for DeepSeek-V4)."""

    dtype: torch.dtype
    held: Held | None
    kv: TurboQuantConfig | None
    max_model_len: int
    memory: Memory | None


def plan_load(
    checkpoint: Checkpoint,
    device: torch.device,
    *,
    dtype: str | torch.dtype,
    kv_cache_dtype: str,
    max_num_seqs: int,
    max_model_len: int | None,
    kv_cache_tokens: int | None,
    gpus: int,
    gpu_memory_utilization: float | None = None,
    kv_offloading_size: float | None = None,
    adapters: Mapping[str, Path] = MappingProxyType({}),
    expert_memory: float | None = None,
    speculative: str | None = None,
    batch_invariant: bool = False,
) -> LoadPlan:
    """Of the arguments of `LLM`. Reads no weights. Raises ValueError for what checkpoint or device rule out."""
    if expert_memory is not None and device.type == "cpu":
        raise ValueError(
            f"expert_memory: got {expert_memory:g} GB on a CPU, whose memory has all experts; leave it out"
        )
    config = parse_config(checkpoint.config)
    if (share := gpu_memory_utilization) is not None:
        if device.type == "cpu":
            raise ValueError(f"gpu_memory_utilization: got {share:g} on a CPU; it is for GPUs: leave it out")
        if kv_cache_tokens is not None:
            raise ValueError(
                f"gpu_memory_utilization and kv_cache_tokens: got {share:g} and {kv_cache_tokens}; both size the KV "
                "cache: give one"
            )
        if not isinstance(config, LlamaConfig):
            raise ValueError(
                f"gpu_memory_utilization: got {share:g}; the cache of DeepSeek-V4 has the size of max_num_seqs x "
                "max_model_len: leave it out"
            )
    kv = None if kv_cache_dtype == "fp8" else parse_kv(kv_cache_dtype)
    found, held = pick_precision(
        dtype, device, holds=isinstance(config, LlamaConfig), packable=partial(packable, checkpoint)
    )
    if max_model_len is None:
        max_model_len = min(config.max_positions, MAX_MODEL_LEN)
    if not 1 <= max_model_len <= config.max_positions:
        raise ValueError(f"max_model_len is {max_model_len}; the model allows 1 to {config.max_positions}")
    if kv_cache_tokens is not None and kv_cache_tokens < max_model_len:
        raise ValueError(
            f"kv_cache_tokens: got {kv_cache_tokens}; a sequence may have {max_model_len} tokens: allowed is "
            "that and more, or a smaller max_model_len"
        )
    if kv_offloading_size is not None:
        own = isinstance(config, LlamaConfig)
        codes = None if isinstance(config, LlamaConfig) and config.latent is not None else kv  # latents are shared
        without = codes or ("batch_invariant" if batch_invariant else None if own else "DeepSeek-V4")
        if without is not None:
            raise ValueError(
                f"kv_offloading_size: got {kv_offloading_size:g}; {NOT_SHARED.format(without)}: leave it out"
            )
    memory = needed_memory(
        checkpoint, device, found, held, kv, rows=max_num_seqs, context=max_model_len, tokens=kv_cache_tokens,
        gpus=gpus, share=gpu_memory_utilization, offloaded=int((kv_offloading_size or 0) * GIB), adapters=adapters,
        experts=size_bytes(expert_memory), speculative=speculative, fp8=kv_cache_dtype == "fp8",
    )  # fmt: skip
    return LoadPlan(found, held, kv, max_model_len, memory)


def size_bytes(gb: float | None) -> int | None:
    """Bytes of so many GB."""
    return None if gb is None else int(gb * GB)


def needed_memory(
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    held: Held | None,
    kv: TurboQuantConfig | None,
    *,
    rows: int,
    context: int,
    tokens: int | None,
    gpus: int,
    share: float | None = None,
    offloaded: int = 0,
    adapters: Mapping[str, Path] = MappingProxyType({}),
    experts: int | None = None,
    speculative: str | None = None,
    fp8: bool = False,
) -> Memory | None:
    """What loading will take, with adapters and what drafts; None for DeepSeek-V4, whose cache has kinds of state of
    its own.

    Left out are recurrent states, which do not grow with the text, and what a cache in codes takes more for layers that
    it keeps exact because of their biases (see `filling_tokens`).

    tokens: that the cache shall hold; None for a full context of each row, or what fits: at least one full context.
    share: of a GPU's memory, which this process shall fill with weights, cache and `CUDA_BYTES`; ValueError where that
        holds no full context. What is free may be less: see `Memory.fits`.
    offloaded: bytes of host memory for what the prefix cache evicts; ValueError where fewer are free.
    experts: bytes on the device that routed experts may take; None for all of them. fp8: latents in the cache are.
    """
    config = checkpoint_config(checkpoint)
    if not isinstance(config, LlamaConfig):
        return None
    devices = [device]
    if device.type == "cuda" and gpus > 1:  # loading refuses more than there are
        devices = [torch.device("cuda", i) for i in range(min(gpus, torch.cuda.device_count()))]
    free = min(map(free_cache_memory, devices))
    told = free < UNBOUNDED
    if device.type == "cpu":
        free -= offloaded
    sizes = {"rows": rows, "context": context, "gpus": gpus}
    drafting = _draft_bytes(speculative, checkpoint, config, device, dtype, held, kv, **sizes)
    each, fixed = _cache_bytes(config, device, dtype, kv, rows=rows, context=context, gpus=gpus, fp8=fp8)
    stacks = None if experts is None else ExpertMemory(Loader(checkpoint, config, dtype), config, experts, device)
    pinned = 0 if stacks is None or stacks.fits else stacks.host_bytes
    if offloaded > (host := free_cache_memory(torch.device("cpu")) - pinned):
        beside = f" beside {pinned / GIB:.2f} GiB of experts" if pinned else ""
        raise ValueError(
            f"kv_offloading_size: got {offloaded / GIB:g} GiB; {max(0, host) / GIB:.2f} GiB of host memory are "
            f"free{beside}: allowed is less than that"
        )
    weights = _weights(checkpoint, config, device, dtype, held, stacks) // gpus + drafting[0]
    if adapters:
        layers, joined = Loader(checkpoint, config, dtype).layers(), (config.qkv, config.gate_up)
        weights += adapter_bytes(adapters, config.family_name, layers, joined, dtype.itemsize)
    each, fixed = each + drafting[1], fixed + drafting[2]
    if share is not None:
        total = min(map(gpu_memory, devices))
        tokens = (int(share * total) - CUDA_BYTES - weights - fixed) // each
        if tokens < context:
            cache = each * context + fixed
            least = math.ceil(100 * (CUDA_BYTES + weights + cache) / total) / 100
            cure = f"give {least:g} or more, or" if least <= 1 else "take fewer bits, more GPUs, or"
            raise ValueError(
                f"gpu_memory_utilization: got {share:g}, which is {human_bytes(int(share * total))}; weights take "
                f"{human_bytes(weights)}, CUDA {human_bytes(CUDA_BYTES)} and a cache of {context} tokens "
                f"{human_bytes(cache)}: {cure} a smaller max_model_len"
            )
    elif tokens is None:
        room = int(SHARE[device.type] * max(0, free - weights)) - fixed
        tokens = max(context, min(rows * context, room // each))
    return Memory(weights, each * tokens + fixed, tokens, free if told else None, offloaded, pinned, each)


def check_share(memory: Memory, share: float) -> None:
    """Raises ValueError where less is free than `gpu_memory_utilization` asks for."""
    if memory.free is None or memory.fits:
        return
    most = share * (memory.free + CUDA_BYTES) / (memory.weights + memory.cache + CUDA_BYTES)
    raise ValueError(
        f"gpu_memory_utilization: got {share:g}; weights and cache take {human_bytes(memory.weights + memory.cache)}, "
        f"and {human_bytes(memory.free)} of the GPU's memory are free: give {math.floor(100 * most) / 100:g} or less, "
        "or end what else runs there"
    )


def filling_tokens(
    memory: Memory, model: Llama, kv: TurboQuantConfig | None, *, rows: int, context: int, share: float
) -> int:
    """Tokens of the cache that fills `share` of a GPU, once the model is loaded: beside what `needed_memory` leaves
    out, recurrent states and layers that biases keep exact. Raises ValueError where these leave no full context."""
    config, size = model.config, Llama.page_size
    sizes: dict[str, Any] = {"rows": rows, "page_size": size, "pages_per_row": -(-context // size)}
    ranks = share_of(model.peer).ranks
    told = _cache_bytes(config, model.device, model.dtype, kv, rows=rows, context=context, gpus=ranks, fp8=model.fp8_kv)
    found = _by_token(lambda pages: model.cache_bytes(kv, pages=pages, **sizes), kv, context)
    each, fixed = (real - estimate for real, estimate in zip(found, told, strict=True))
    tokens = (memory.token * memory.tokens - fixed) // (memory.token + each)
    if tokens < context:
        more = (context - tokens) * (memory.token + each)
        total = (CUDA_BYTES + memory.weights + memory.cache) / share
        raise ValueError(
            f"gpu_memory_utilization: got {share:g}, which leaves {human_bytes(memory.cache)} beside the weights; a "
            f"cache of {context} tokens and the recurrent states of {rows} sequences take "
            f"{human_bytes(memory.cache + more)}: give {math.ceil(100 * (share + more / total)) / 100:g} or more, or a "
            "smaller max_num_seqs or max_model_len"
        )
    return tokens


@dataclass(frozen=True)
class Fit:
    """What of a model a GPU holds: bytes of its weights and of a cached token, how many sequences of `context` tokens,
    and how many tokens one sequence may have, at most as many as the model has positions. 0 where the weights do not
    fit."""

    weights: int
    token_bytes: int
    context: int
    sequences: int
    longest: int


def fit(
    checkpoint: Checkpoint,
    size: int,
    *,
    dtype: torch.dtype,
    kv: TurboQuantConfig | None,
    context: int,
    share: float | None = None,
    fp8: bool = False,
) -> Fit:
    """Of a GPU with `size` bytes, which this machine need not have, for the default cache of `LLM`. Reads no weights.

    share: `gpu_memory_utilization`, None for the default. fp8: latents in the cache are. Raises ValueError for
    DeepSeek-V4, for a context that the model does not have, and for a cache in codes that it cannot have.
    """
    config, device = checkpoint_config(checkpoint), torch.device("cuda")
    if not isinstance(config, LlamaConfig):
        raise ValueError(f"{checkpoint.path}: bench fit has no sums for DeepSeek-V4")
    if not 1 <= context <= config.max_positions:
        raise ValueError(f"context: got {context}; the model allows 1 to {config.max_positions}")
    if kv is not None and config.exact_cache is not None:
        raise ValueError(f"{config.model_type} has {config.exact_cache}, which a cache in codes does not know")
    if fp8 and config.latent is None:
        raise ValueError(
            f"kv_cache_dtype: got fp8, which is for latent attention; {config.model_type} has none: take exact or "
            "turboquant:4"
        )
    weights = _weights(checkpoint, config, device, dtype, None)
    if share is None:
        room = int(SHARE["cuda"] * max(0, size - CUDA_BYTES - weights))
    else:
        room = max(0, int(share * size) - CUDA_BYTES - weights)
    (each, one), (_, two) = (
        _cache_bytes(config, device, dtype, kv, rows=rows, context=context, gpus=1, fp8=fp8) for rows in (1, 2)
    )
    per_row = two - one  # besides its tokens
    sequences = max(0, room - one + per_row) // (each * context + per_row)
    longest = min(config.max_positions, max(0, room - one) // each)
    return Fit(weights, each, context, sequences, longest)


def _weights(
    checkpoint: Checkpoint, config: LlamaConfig, device: torch.device, dtype: torch.dtype, held: Held | None,
    experts: ExpertMemory | None = None,
) -> int:  # fmt: skip
    loader = Loader(checkpoint, config, dtype, decode=device.type == "cpu", held=held)
    if experts is not None:
        loader.expert_memory = experts
        return loader.weight_bytes
    if device.type == "cpu":  # which decodes codes at load
        loader.decoded = frozenset(loader.layers())
    found = loader.device_bytes()
    if held is not None:
        blocks = loader.parts.linears
        found |= {name: n * k * (HELD[held] if name in blocks else 2) for name, (n, k, _) in loader.layers().items()}
    return sum(found.values())


def _draft_bytes(
    speculative: str | None,
    checkpoint: Checkpoint,
    config: LlamaConfig,
    device: torch.device,
    dtype: torch.dtype,
    held: Held | None,
    kv: TurboQuantConfig | None,
    *,
    rows: int,
    context: int,
    gpus: int,
) -> tuple[int, int, int]:
    """Of what drafts, on each device: bytes of its weights, and of its cache as `_cache_bytes`."""
    if speculative is None or speculative == NGRAM:
        return 0, 0, 0
    check_name(speculative)
    if speculative == MTP:
        if not has_layer(checkpoint, config):
            return 0, 0, 0  # which loading it refuses
        own = DraftConfig.read(config, checkpoint)
        cache = _cache_bytes(own, device, dtype, None, rows=rows, context=context, gpus=gpus)
        return (_weights(checkpoint, own, device, dtype, None) // gpus, *cache)
    if speculative.startswith(EAGLE):
        with head_checkpoint(speculative) as found:
            loader = EagleHead.loader(found, config, device, dtype)
            loader.check()
            layer, weights = EagleConfig.from_dict(found.config).layer, sum(loader.device_bytes().values())
            ranks = gpus if shares_draft(loader, layer, gpus) else 1
            cache = _cache_bytes(layer, device, dtype, None, rows=rows, context=context, gpus=ranks)
            return (weights - read_bytes(loader, layer) * (ranks - 1) // ranks, *cache)
    with second_checkpoint(speculative) as found:
        if is_assistant(found.config):
            its = AssistantConfig.of(found.config, config)
            lent = [config.cached[i] for i in set(its.sources)] if kv is not None else []  # which stay exact for it
            exact = sum(2 * kv_heads * dim * dtype.itemsize for kv_heads, dim in lent)
            return sum(Loader(found, its, dtype).device_bytes().values()), exact, 0
        other = checkpoint_config(found)
        if not isinstance(other, LlamaConfig):
            return 0, 0, 0
        ranks = gpus if shares_draft(Loader(found, other, dtype), other, gpus) else 1
        cache = _cache_bytes(other, device, dtype, kv, rows=rows, context=context, gpus=ranks)
        return (_weights(found, other, device, dtype, held) // ranks, *cache)


def _cache_bytes(
    config: LlamaConfig,
    device: torch.device,
    dtype: torch.dtype,
    kv: TurboQuantConfig | None,
    *,
    rows: int,
    context: int,
    gpus: int,
    fp8: bool = False,
) -> tuple[int, int]:
    """Bytes of a token in the cache of a rank, and of what it has besides its pages: of the cache itself, made on the
    meta device."""
    size = Llama.page_size
    if kv is not None and kv.mode != "shadow":
        kv = replace(kv, exact=tuple(sorted({*kv.exact, *unread_layers(config, device.type)})))

    def nbytes(pages: int) -> int:
        return attention_cache(
            config, TPShard(0, gpus), kv, rows=rows, pages=pages, page_size=size, pages_per_row=-(-context // size),
            dtype=dtype, device="meta", fp8=fp8,
        ).nbytes  # fmt: skip

    each, fixed = _by_token(nbytes, kv, context)
    return each, fixed + turned_bytes(config, kv, dtype) // gpus


def _by_token(nbytes: Callable[[int], int], kv: TurboQuantConfig | None, context: int) -> tuple[int, int]:
    """Bytes of a token in a cache, and of what it has besides. nbytes: pages -> bytes of a cache that has so many."""
    pages = 1 + -(-max(context, 0 if kv is None else kv.window) // Llama.page_size)
    page = nbytes(pages + 1) - nbytes(pages)
    return -(-page // Llama.page_size), nbytes(pages) - pages * page
