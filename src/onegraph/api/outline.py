"""What of a model may be rounded and how large it is, before any weight is read: of our own decoder's families from
config.json, of any other that transformers has from its modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from onegraph.formats.checkpoint import Checkpoint
from onegraph.models.config import LlamaConfig
from onegraph.models.loader import Loader
from onegraph.models.source import LlamaSource, block_shapes, layer_of, refuse_quantized


@dataclass(frozen=True, kw_only=True)
class Outline:
    """Args:
    own: whether our own decoder runs it; otherwise transformers' modules do.
    blocks: for each block its prefix and what of it may be rounded: linears [n, k] and stacks of experts [E, n, k].
    left: layers that stay as they are, and why; kept: the linears among them.
    layer_of: the linear or stack whose weight a tensor of the checkpoint is, or is a part of.
    published: stacks that the checkpoint has in MXFP4 already.
    check: raises CheckpointError where tensors do not fit config.json.
    hidden, inner, vocab, positions, cached: sizes; cached: numbers that a token leaves in the KV cache.
    weights: parameters of the largest block.
    """

    own: bool
    blocks: Mapping[str, Mapping[str, tuple[int, ...]]]
    layer_of: Callable[[str], str | None]
    hidden: int
    inner: int
    vocab: int
    positions: int
    cached: int
    weights: int
    left: Mapping[str, str] = field(default_factory=dict)
    kept: frozenset[str] = frozenset()
    published: frozenset[str] = frozenset()
    check: Callable[[Checkpoint], None]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all blocks, by full name."""
        return {prefix + name: shape for prefix, names in self.blocks.items() for name, shape in names.items()}


def outline(checkpoint: Checkpoint) -> Outline:
    """Raises ValueError for a model that is quantized already, or that neither of the two can run."""
    if foreign(checkpoint.config):
        return Outline(own=False, **modules().outline_of(checkpoint))
    config = LlamaConfig.from_dict(checkpoint.config)
    refuse_quantized(checkpoint, config)
    parts = config.parts
    blocks = {f"model.layers.{i}.": block_shapes(config, parts.linears, i) for i in range(config.layers)}
    stacks = [prefix + name for prefix, names in blocks.items() for name, shape in names.items() if len(shape) == 3]
    return Outline(
        own=True,
        blocks=blocks,
        layer_of=lambda name: layer_of(config, name),
        hidden=config.hidden_size,
        inner=config.intermediate_size if config.routed is None else max(config.intermediate_size, config.routed.size),
        vocab=config.vocab_size,
        positions=config.max_positions,
        cached=2 * config.layers * config.kv_heads * config.head_dim,
        weights=max(sum(_count(shape) for shape in names.values()) for names in blocks.values()),
        published=frozenset(name for name in stacks if f"{name}_blocks" in checkpoint),
        check=lambda checkpoint: Loader(checkpoint, config, torch.float32).check(),
    )


def foreign(config: Mapping[str, Any]) -> bool:
    """Whether transformers' modules have to run the model: our own decoder does not. Raises ValueError, ours, where
    transformers is not installed or does not have it either."""
    try:
        LlamaConfig.from_dict(config)
    except ValueError as error:
        if not _modules_have(config):
            raise ValueError(
                f"{error}; and transformers, which could run it instead, is not installed or has no such model"
            ) from None
        return True
    return False


def model_of(checkpoint: Checkpoint, device: torch.device, sequence: int, *, own: bool) -> Any:
    """The model as the quantizer calibrates on it."""
    if own:
        return LlamaSource(checkpoint, device, max_context=sequence)
    return modules().ModulesSource(checkpoint, device)


def modules() -> Any:
    from onegraph.integrations.hf import source

    return source


def _modules_have(config: Mapping[str, Any]) -> bool:
    try:
        found: bool = modules().has(config)
    except ImportError:
        return False
    return found


def _count(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()
