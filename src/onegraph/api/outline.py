"""What of a model may be rounded and how large it is, before any weight is read: of our own decoder's families from
config.json, of any other that transformers has from its modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from onegraph.formats.checkpoint import Checkpoint, TensorInfo, read_config
from onegraph.formats.files import CheckpointError, out_of_memory, quote
from onegraph.formats.fused import BlocksConfig
from onegraph.formats.table import UNWRITTEN
from onegraph.models.carried import CarriedStream
from onegraph.models.config import LlamaConfig
from onegraph.models.llama import config_of
from onegraph.models.load import CONFIGS, parse_config
from onegraph.models.loader import Loader
from onegraph.models.mtp import DraftConfig, has_layer
from onegraph.models.source import LlamaSource, block_shapes, draft_shapes, layer_of, refuse_quantized
from onegraph.models.wrapper import text_config

if TYPE_CHECKING:  # it needs transformers
    from onegraph.integrations.hf.source import ModulesSource


def described(path: Path) -> Checkpoint:
    """The checkpoint at a path; where only its config.json is there, one that has the tensors it asks for."""
    if not (path / "config.json").is_file() or next(path.glob("*.safetensors"), None) is not None:
        return Checkpoint.open(path)
    config = dict(text_config(read_config(path)))
    stored = getattr(torch, str(config.get("dtype") or config.get("torch_dtype")), None)
    dtype = stored if isinstance(stored, torch.dtype) else torch.bfloat16
    if foreign(config) and config.get("model_type") not in CONFIGS:
        shapes = foreign_tensors(config)
        return Checkpoint(path, config, {name: table_entry(path, shape, dtype) for name, shape in shapes.items()})
    parsed = parse_config(config)
    suffix = "_blocks" if isinstance(parsed.quantization, BlocksConfig) else ""  # a name tells how a stack is stored
    stacks = {f"{name}{suffix}": table_entry(path, (), dtype) for name in parsed.parts.stacks}
    expected = Loader(Checkpoint(path, config, stacks), parsed, dtype).expected()
    table = {
        name: table_entry(path, shape, dtype if dtype in kinds else kinds[0])
        for name, (shape, kinds) in expected.items()
    }
    return Checkpoint(path, config, table)


def table_entry(path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> TensorInfo:
    """What a checkpoint's table says of a tensor that no file holds yet."""
    return TensorInfo(tuple(shape), dtype, torch.Size(shape).numel() * dtype.itemsize, path, UNWRITTEN)


@dataclass(frozen=True, kw_only=True)
class Outline:
    """Args:
    own: whether our own decoder runs it; otherwise transformers' modules do, and `why` is what ours says against it.
    blocks: for each block its prefix and what of it may be rounded: linears [n, k] and stacks of experts [E, n, k].
    left: layers that stay as they are, and why; kept: the linears among them.
    layer_of: the linear or stack whose weight a tensor of the checkpoint is, or is a part of.
    published: stacks that the checkpoint has in MXFP4 already.
    check: raises CheckpointError where tensors do not fit config.json.
    draft: prefix of the draft layer and what of it may be rounded, as in `blocks`; empty without one.
    hidden, inner, vocab, positions, cached: sizes; cached: numbers that a token leaves in the KV cache. carried: that
        it has in the calibration stream besides its hidden states.
    weights: parameters of the largest block.
    """

    own: bool
    why: str = ""
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
    carried: int = 0
    draft: Mapping[str, Mapping[str, tuple[int, ...]]] = field(default_factory=dict)
    check: Callable[[Checkpoint], None]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all blocks, by full name."""
        return {prefix + name: shape for prefix, names in self.blocks.items() for name, shape in names.items()}


def outline(checkpoint: Checkpoint) -> Outline:
    """Raises ValueError for a model that is quantized already, or that neither of the two can run."""
    if why := foreign(checkpoint.config):
        from onegraph.integrations.hf.skeleton import outline_of

        with _refused(why):
            return Outline(own=False, why=why, **outline_of(checkpoint))
    config = config_of(checkpoint)
    refuse_quantized(checkpoint, config)
    parts = config.parts
    blocks = {f"model.layers.{i}.": block_shapes(config, parts.linears, i) for i in range(config.layers)}
    stacks = [prefix + name for prefix, names in blocks.items() for name, shape in names.items() if len(shape) == 3]
    return Outline(
        own=True,
        blocks=blocks,
        layer_of=lambda name: layer_of(config, name),
        hidden=config.hidden_size,
        carried=CarriedStream(config).carried,
        inner=config.intermediate_size if config.routed is None else max(config.intermediate_size, config.routed.size),
        vocab=config.vocab_size,
        positions=config.max_positions,
        cached=2 * sum(kv_heads * dim for kv_heads, dim in config.cached)
        if config.latent is None
        else config.attention_layers * config.latent.width,
        weights=max(sum(_count(shape) for shape in names.values()) for names in blocks.values()),
        published=frozenset(name for name in stacks if f"{name}_blocks" in checkpoint),
        left=dict.fromkeys((name for name in config.steady if ".indexer." in name), "chooses tokens: never rounded"),
        draft=_draft(checkpoint, config),
        check=lambda checkpoint: Loader(checkpoint, config, torch.float32).check(),
    )


def _draft(checkpoint: Checkpoint, config: LlamaConfig) -> dict[str, dict[str, tuple[int, ...]]]:
    if not has_layer(checkpoint, config):
        return {}
    own = DraftConfig.read(config, checkpoint)
    return {own.root: draft_shapes(own)}


def foreign(config: Mapping[str, Any]) -> str:
    """Why transformers' modules have to run the model: what our own decoder says against it; "" where it runs it.
    Raises ValueError, ours, where transformers is not installed or does not have it either."""
    try:
        LlamaConfig.from_dict(config)
    except ValueError as error:
        if not _modules_have(config):
            raise ValueError(
                f"{error}; and transformers is not installed, or has no causal language model of this type"
            ) from None
        return str(error)
    return ""


def foreign_tensors(config: Mapping[str, Any]) -> Mapping[str, tuple[int, ...]]:
    """Names and shapes of the tensors of a `foreign` model. Raises ValueError where transformers cannot build it."""
    with _refused(foreign(config)):
        from onegraph.integrations.hf.skeleton import expected_tensors

        return expected_tensors(config)


@contextmanager
def _refused(why: str) -> Iterator[None]:
    """What transformers raises for a config.json that it cannot build a model of, which is anything, as a ValueError of
    one line behind `why`."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        if out_of_memory(error):
            raise
        first = next(iter(str(error).splitlines()), "")
        raise ValueError(
            f"{why}; and transformers, which could run it instead, cannot build it: {type(error).__name__}: "
            f"{quote(first)}"
        ) from None


def model_of(
    checkpoint: Checkpoint, device: torch.device, sequence: int, *, own: bool, draft: bool = False
) -> LlamaSource | ModulesSource:
    """The model as the quantizer calibrates on it. draft: with its draft layer."""
    if own:
        return LlamaSource(checkpoint, device, max_context=sequence, draft=draft)
    from onegraph.integrations.hf.source import ModulesSource

    return ModulesSource(checkpoint, device)


def _modules_have(config: Mapping[str, Any]) -> bool:
    try:
        from onegraph.integrations.hf.skeleton import has
    except ImportError:
        return False
    return has(config)


def _count(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()
