"""A checkpoint of this decoder's families as the quantizer calibrates on it."""

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from onegraph.formats.checkpoint import Checkpoint
from onegraph.formats.dense import DENSE
from onegraph.formats.fused import BlocksConfig
from onegraph.models.blocks import Block, HalfBlock, build_block, build_per_layer, norm_weight, rotary_tables
from onegraph.models.carried import CarriedStream
from onegraph.models.config import EMBED, LlamaConfig
from onegraph.models.llama import bounded, config_of, embed_scale, table_positions
from onegraph.models.loader import Loader
from onegraph.models.mtp import DraftBlock, DraftConfig
from onegraph.nn.attention import CausalAttention
from onegraph.nn.block import Stream
from onegraph.nn.embedding import Embedding
from onegraph.nn.experts import Experts
from onegraph.nn.linear import ConcatLinear, Linear, dense
from onegraph.nn.moe import MoE
from onegraph.nn.per_layer import PerLayer

Groups = list[list[tuple[str, nn.Module]]]


class LlamaSource:
    """An unquantized checkpoint as the quantizer calibrates on it: one dense block in memory at a time, besides the
    embedding and the head once they were used.

    It has the attributes and methods that `onegraph.quant` asks of a model, and holds none of its types.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        *,
        max_context: int | None = None,
        draft: bool = False,
    ) -> None:
        """draft: the draft layer is rounded too, as one more block behind the others."""
        self.config = checkpoint.config
        self.device, self.dtype = torch.device(device), dtype
        self.parsed = config_of(checkpoint)
        refuse_quantized(checkpoint, self.parsed)
        self._loader = Loader(checkpoint, self.parsed, dtype, decode_experts=True)
        self._loader.check()
        self._positions = table_positions(self.parsed, max_context)
        self._tables = rotary_tables(self.parsed, self._positions, self.device)
        self.draft = DraftConfig.read(self.parsed, checkpoint) if draft else None
        self._draft_loader = None if self.draft is None else draft_loader(checkpoint, self.draft, dtype)
        self._causal, self._carried = CausalAttention(), CarriedStream(self.parsed)

    @property
    def num_blocks(self) -> int:
        return self.parsed.layers

    @property
    def num_drafts(self) -> int:
        """Draft layers that are rounded, numbered behind the blocks."""
        return 0 if self.draft is None else 1

    @property
    def kept(self) -> tuple[str, ...]:
        """Linears that stay as they are: those of beta and decay (`models/mixers.py`)."""
        return (*self.parsed.steady, *(() if self.draft is None else self.draft.steady))

    def shapes(self, i: int) -> dict[str, tuple[int, ...]]:
        """Linears of block `i` [n, k] and its stacks of experts [E, n, k], by the name within it."""
        if self.draft is not None and i == self.num_blocks:
            return draft_shapes(self.draft)
        return block_shapes(self.parsed, self._loader.parts.linears, i)

    def end_name(self, name: str) -> str:
        """The checkpoint's tensor for "lm_head.weight" or "model.embed_tokens.weight"; a tied head is the embedding."""
        return name if name in self._loader else f"{EMBED}.weight"

    def layer_of(self, name: str) -> str | None:
        """The linear or stack of experts whose weight the tensor `name` of the checkpoint is, or is a part of."""
        return layer_of(self.parsed, name)

    def expert_layers(self, block: Block | HalfBlock | DraftBlock) -> list["DenseExperts"]:
        """The routed experts of the block."""
        routed, found = self.parsed.routed, list[DenseExperts]()
        for within, each in _parts(block):
            if routed is None or not isinstance(each.mlp, MoE):
                continue
            assert isinstance(each.mlp.experts, Experts)  # none is loaded with a cache
            gate_up, down = routed.whole
            found.append(DenseExperts((within + gate_up, within + down), each.mlp.experts))
        return found

    def block_prefix(self, i: int) -> str:
        return self.parsed.prefix(i) if self.draft is None or i < self.num_blocks else self.draft.root

    @torch.no_grad()
    def draft_inputs(self, block: DraftBlock, tokens: Tensor, hidden: Tensor) -> Tensor:
        """What the draft layer is run on: tokens int [B, T], the residual stream behind the last block [B, T, D] ->
        [B, T - 1, 2 D]."""
        return block.inputs(self.embed(tokens[:, 1:]), self.final_norm(hidden)[:, :-1].contiguous())

    @torch.no_grad()
    def embed(self, tokens: Tensor, table: Tensor | None = None) -> Tensor:
        """tokens int [B, T] -> the stream in front of the first block, [B, T, D] (`CarriedStream`: and more); table
        [V, D]: to look up in instead of the embedding."""
        embedding = self._embedding
        if table is not None:
            given = {"weight": table.to(self.device, self.dtype)}
            embedding = Embedding(DENSE, given, self.dtype, scale=embedding.factor)
        tokens = tokens.to(self.device)
        return self._carried.enter(tokens, embedding(tokens), self._per_layer)

    def load_block(self, i: int) -> Block | HalfBlock | DraftBlock:
        """Block `i`, read from disk now, its linears apart and dense; the pages of blocks before it are given back."""
        self._loader.checkpoint.forget()
        if self.draft is not None and self._draft_loader is not None and i == self.num_blocks:
            return DraftBlock(
                **DraftBlock.parts(self._draft_loader, self.draft, self._positions, self.device, joined=False)
            )
        return build_block(self._loader, self.parsed, i, self._tables, self.device, joined=False)

    def run_block(self, block: Block | HalfBlock | DraftBlock, hidden: Tensor) -> Tensor:
        """Residual stream before the block, or `draft_inputs` -> after it, [B, T, D], causal over the whole sequence;
        input untouched.

        Nothing is written in place, so that autograd can follow it where ops run their references.
        """
        if isinstance(block, DraftBlock):
            return block.run(hidden, self._causal).total()
        if self._carried.needed:
            return self._carried.run(block, hidden)
        result: Tensor = block(Stream(hidden), self._causal).total()
        return result

    def linear_groups(self, block: Block | HalfBlock | DraftBlock) -> Groups:
        """Linears of the block by shared input, in the order they run: (name within the block, module)."""
        if not isinstance(block, DraftBlock):
            return self._groups(self.parsed, block)
        found: Groups = [[(block.config.names.projection, block.projection)]]
        for within, each in _parts(block):
            groups = self._groups(block.config, each)
            found += [[(within + name, module) for name, module in group] for group in groups]
        return found

    @staticmethod
    def _groups(config: LlamaConfig, block: Block | HalfBlock) -> Groups:
        mixer, latent, names = config.mixers[block.layer], config.latent, config.traits.names
        sides, out = (config.qkv_at(block.layer), names.out) if mixer is None else (mixer.inputs, mixer.out)
        attention: Groups = []
        if block.qkv is not None and block.out is not None:
            attention = [_siblings(sides, block.qkv.linear), [(out, block.out.linear)]]
        if latent is not None and mixer is None and isinstance(block, Block):
            modules = {"q_b": block.qkv, "kv_b": block.attention}
            for name in latent.behind:
                leaf = name.rpartition(".")[2].removesuffix("_proj")
                attention.insert(-1, [(name, modules[leaf].get_submodule(leaf))])
        if block.mlp is None:
            return attention
        if not isinstance(block.mlp, MoE):
            return [
                *attention,
                _siblings(config.gate_up, block.mlp.gate_up.linear),
                [(names.down, block.mlp.down.linear)],
            ]
        routed, shared = config.routed, block.mlp.shared
        if routed is None or routed.shared is None or shared is None:
            return attention
        *front, down = routed.shared.linears
        around = zip(routed.around, (block.mlp.into, block.mlp.back), strict=False)
        groups: Groups = [[each] for each in around]
        return [*attention, *groups, _siblings(front, shared.gate_up), [(down, shared.down)]]

    def final_norm(self, hidden: Tensor) -> Tensor:
        """Residual stream after the last block [..., D] -> input of the head."""
        return Stream(self._carried.hidden(hidden)).normed(self._norm, self.parsed.eps)[0]

    def head(self, hidden: Tensor, weight: Tensor | None = None) -> Tensor:
        """Residual stream after the last block [..., D] -> logits float32 [..., V]; weight [V, D]: the head's."""
        head = self._head if weight is None else dense(weight.to(self.device, self.dtype), self._head.bias)
        return bounded(self.parsed, head(self.final_norm(hidden), float32=True))

    @cached_property
    def _norm(self) -> Tensor:
        return norm_weight(self._loader, self.parsed, self.parsed.norm, self.device)

    @cached_property
    def _embedding(self) -> Embedding:
        return self._loader.embedding(self.device, embed_scale(self.parsed, self.dtype))

    @cached_property
    def _per_layer(self) -> PerLayer | None:
        return build_per_layer(self._loader, self.parsed, self.device)

    @cached_property
    def _head(self) -> Linear:
        return self._loader.head(self._embedding, self.device)


def _parts(block: Block | HalfBlock | DraftBlock) -> list[tuple[str, Block | HalfBlock]]:
    """The block itself, or those of a draft layer, and what their names begin with within it."""
    if not isinstance(block, DraftBlock):
        return [("", block)]
    config, halves = block.config, list[Any](block.blocks)
    return [(config.prefix(i).removeprefix(config.root), each) for i, each in enumerate(halves)]


def _siblings(names: Sequence[str], linear: nn.Module) -> list[tuple[str, nn.Module]]:
    """Linears of one input by name; of one name the linear itself, which files hold as one."""
    parts = linear.parts if isinstance(linear, ConcatLinear) else [linear]
    return list(zip(names, parts, strict=True))


class DenseExperts:
    """Dense routed experts as the quantizer sees them (`onegraph.quant.calibrate.ExpertLayer`)."""

    def __init__(self, names: tuple[str, str], module: Experts) -> None:
        self.names, self.module, self.count = names, module, module.count
        self.stacks = module.gate_up.tensors["weight"], module.down.tensors["weight"]

    def weight(self, which: int, expert: int) -> Tensor:
        return self.stacks[which][expert].float()

    def put(self, which: int, expert: int, weight: Tensor) -> None:
        self.stacks[which][expert].copy_(weight)

    def inner(self, expert: int, x: Tensor) -> Tensor:
        weight, biases = self.weight(0, expert), self.module.biases
        return self.module.gate(nn.functional.linear(x, weight, None if biases is None else biases[0][expert]))


def refuse_quantized(checkpoint: Checkpoint, parsed: object) -> None:
    """Raises ValueError for a checkpoint whose linears are in codes; gpt-oss's experts, published in MXFP4, may be."""
    quantization = getattr(parsed, "quantization", None)
    if quantization is not None and not isinstance(quantization, BlocksConfig):
        raise ValueError(f"{checkpoint.path}: is quantized already; give the unquantized model")


def block_shapes(
    config: LlamaConfig, linears: Mapping[str, tuple[int, int, bool]], i: int
) -> dict[str, tuple[int, ...]]:
    """What `quantize` may round of block `i`, by the name within it: linears [n, k], stacks of experts [E, n, k].
    linears: those of `config.parts`."""
    prefix, routed, mixer, own = config.prefix(i), config.routed_at(i), config.mixers[i], config.traits.names
    half = (
        (*config.gate_up, own.down)[: None if config.feeds(i) else 0]
        if routed is None
        else (name for name, _ in routed.shared_linears(config.hidden_size))
    )
    behind = () if config.latent is None or mixer is not None else config.latent.behind
    front = (*config.qkv_at(i), *behind, own.out) if mixer is None else (*mixer.inputs, *filter(None, (mixer.out,)))
    names = (*front, *half)
    shapes: dict[str, tuple[int, ...]] = {name: linears[prefix + name][:2] for name in names}
    stacks = {} if routed is None else routed.stacks(config.hidden_size)
    return shapes | {name: (stack.experts, stack.n, stack.k) for name, stack in stacks.items()}


def draft_shapes(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    """Likewise of the draft layer, by the name behind `root`."""
    linears = config.parts.linears
    found: dict[str, tuple[int, ...]] = {config.names.projection: linears[config.projection][:2]}
    for i in range(config.layers):
        within = config.prefix(i).removeprefix(config.root)
        found |= {within + name: shape for name, shape in block_shapes(config, linears, i).items()}
    return found


def draft_loader(checkpoint: Checkpoint, config: DraftConfig, dtype: torch.dtype) -> Loader:
    """Of an unquantized draft layer. Raises CheckpointError where something of it is missing or wrong."""
    loader = Loader(checkpoint, config, dtype, decode_experts=True)
    loader.check()
    return loader


def layer_of(config: LlamaConfig, name: str) -> str | None:
    """The linear or stack of experts whose weight the tensor `name` of an unquantized checkpoint is (a part of)."""
    found = re.fullmatch(r"((?:model|mtp)\.layers\.\d+\.)(.*)", name)
    local = None if found is None or config.routed is None else config.routed.owner(found[2])
    if found is not None and local is not None:
        return found[1] + local
    return name.removesuffix(".weight") if name.endswith(".weight") else None
