"""The decoder of the Llama family: Llama, Mistral, Qwen2, Qwen3, SmolLM2 and SmolLM3, dense or in E8P codes.

One forward serves prefill, decode and evaluation: what differs is the `cache` that attends. A decode step of it reads
nothing back from the device and takes no Python number that changes from step to step, so it may be captured. A layer
of E8P linears is five ops: qkv behind its norm, attend, out onto the residual, gate-up behind its norm, down behind
SwiGLU onto the residual; for one token of a small model it is two, attend and what lies between two attentions
(`nn/chain.py`). Other layers, and `fused=False`, run norms, SwiGLU and additions as ops of their own.
"""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from onegraph.formats.checkpoint import Checkpoint
from onegraph.formats.turboquant import TurboQuantConfig
from onegraph.models.config import LlamaConfig
from onegraph.models.weights import Layer, Weights
from onegraph.nn.attention import Attend, Attention, CausalAttention, PagedCache
from onegraph.nn.chain import chains
from onegraph.nn.embedding import E8PEmbedding, Embedding
from onegraph.nn.linear import E8PLinear, Siblings
from onegraph.nn.turboquant import TurboQuantCache
from onegraph.ops.activation import swiglu
from onegraph.ops.norm import add_rms_norm, rms_norm

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
OUT = "self_attn.o_proj"
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
DOWN = "mlp.down_proj"
MAX_TABLE = 131072  # positions; the rotary tables of more (64 MB at head_dim 128) are made only when asked for


class Block(nn.Module):
    """One layer of the decoder.

    fused: norms, SwiGLU and the residual's addition run inside the linears; `qkv` and `gate_up` then hold their norm's
    weight (`E8PLinear.after_norm`).
    """

    input_norm: Tensor
    post_norm: Tensor

    def __init__(
        self,
        *,
        input_norm: Tensor,
        attention: Attention,
        post_norm: Tensor,
        gate_up: nn.Module,
        down: nn.Module,
        eps: float,
        fused: bool = False,
    ) -> None:
        super().__init__()
        self.eps, self.fused = eps, fused
        self.register_buffer("input_norm", input_norm)
        self.attention = attention
        self.register_buffer("post_norm", post_norm)
        self.gate_up, self.down = gate_up, down

    def forward(self, residual: Tensor, delta: Tensor | None, cache: Attend) -> tuple[Tensor, Tensor | None]:
        """The residual stream is residual + delta [B, Q, D] (delta None: nothing to add), before and after the layer.

        A layer that is not fused leaves its last addition to whoever norms the sum next.
        """
        if self.fused:
            if delta is not None:
                residual = residual + delta
            a = self.attention
            attended = cache.attend(a, a.qkv(residual, eps=self.eps))
            residual = a.out(attended, add=residual)
            return self.down(self.gate_up(residual, eps=self.eps), silu=True, add=residual), None
        if delta is None:
            x = rms_norm(residual, self.input_norm, self.eps)
        else:
            residual, x = add_rms_norm(residual, delta, self.input_norm, self.eps)
        residual, x = add_rms_norm(residual, self.attention(x, cache), self.post_norm, self.eps)
        return residual, self.down(swiglu(self.gate_up(x)))


class Llama(nn.Module):
    """The whole model. Build it with `Llama.load`.

    Attributes:
        config: what config.json says, validated.
        fused: whether layers in E8P run in five ops; caches that `new_cache` makes attend in one launch where it is.
        chains: what one token of a small model runs between its attentions; empty where that would not be quicker.
        device, dtype: where the weights lie, and the dtype of activations and KV cache.
        max_context: positions that the rotary tables cover; an engine must not go beyond.
    """

    norm: Tensor

    def __init__(
        self,
        *,
        config: LlamaConfig,
        embed: Embedding | E8PEmbedding,
        blocks: list[Block],
        norm: Tensor,
        lm_head: Layer,
        dtype: torch.dtype,
        max_context: int,
        fused: bool = True,
    ) -> None:
        super().__init__()
        self.config, self.dtype, self.max_context, self.fused = config, dtype, max_context, fused
        self.embed = embed
        self.blocks = nn.ModuleList(blocks)
        self.register_buffer("norm", norm)
        self.lm_head = lm_head
        whole = all(block.fused for block in blocks)
        self.chains = chains([(b.attention, b.gate_up, b.down) for b in blocks], config.eps) if whole else []
        self.eval()

    @property
    def device(self) -> torch.device:
        return self.norm.device

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        *,
        max_context: int | None = None,
        decode: bool | None = None,
        fused: bool = True,
    ) -> "Llama":
        """Reads a checkpoint tensor by tensor onto `device`; presence, shape and dtype of each is checked first.

        On the way to a GPU the host holds the maps of one layer's files and two chunks of pinned memory.

        Args:
            dtype: float32, bfloat16 or float16.
            max_context: positions to make rotary tables for; None: what the config allows, at most 131072.
            decode: turn E8P layers into dense ones of `dtype` at load. None: on a CPU, whose time would go into
                reading codes.
            fused: False runs every op of a layer alone: the other side of an A/B comparison.

        Raises ValueError (CheckpointError among them) that names the field or tensor that is wrong.
        """
        device = torch.device(device)
        config = LlamaConfig.from_dict(checkpoint.config)
        positions = _positions(config, max_context)
        weights = Weights(checkpoint, config, device, dtype, decode=device.type == "cpu" if decode is None else decode)
        weights.check()
        tables = config.rope.tables(config.head_dim, positions, device)
        embed = weights.embedding()
        blocks = []
        for i in range(config.layers):
            blocks.append(build_block(weights, i, tables, joined=True, fused=fused))
            weights.forget()
        return cls(
            config=config,
            embed=embed,
            blocks=blocks,
            norm=weights.tensor("model.norm.weight"),
            lm_head=weights.head(embed),
            dtype=dtype,
            max_context=positions,
            fused=fused,
        )

    def forward(self, tokens: Tensor, cache: Attend) -> Tensor:
        """tokens int [B, Q] -> hidden states after the final norm [B, Q, D], in the model's dtype."""
        residual, delta = self.embed(tokens), None
        if self.chains and tokens.numel() == 1:
            return self._one_token(residual, cache)
        for block in self.blocks:
            residual, delta = block(residual, delta, cache)
        if delta is None:
            return rms_norm(residual, self.norm, self.config.eps)
        return add_rms_norm(residual, delta, self.norm, self.config.eps)[1]

    def _one_token(self, residual: Tensor, cache: Attend) -> Tensor:
        """Embedding [1, 1, D] -> hidden state after the final norm, two ops a layer."""
        qkv = self.chains[0].attention.qkv(residual, eps=self.config.eps)
        for chain in self.chains:
            residual, qkv = chain(cache.attend(chain.attention, qkv), residual)
        return rms_norm(residual, self.norm, self.config.eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """What `forward` returned [..., D], or rows of it -> float32 [..., V]."""
        return self.lm_head.wide(hidden)

    def new_cache(
        self, *, rows: int, pages: int, page_size: int, pages_per_row: int, kv: TurboQuantConfig | None = None
    ) -> PagedCache | TurboQuantCache:
        """A paged KV cache of this model's sizes, on its device: in its dtype, or in codes as `kv` says."""
        sizes: dict[str, Any] = {
            "layers": self.config.layers,
            "pages": pages,
            "page_size": page_size,
            "kv_heads": self.config.kv_heads,
            "head_dim": self.config.head_dim,
            "rows": rows,
            "pages_per_row": pages_per_row,
            "device": self.device,
            "dtype": self.dtype,
        }
        return PagedCache(**sizes, fused=self.fused) if kv is None else TurboQuantCache(kv, **sizes)


def build_block(
    weights: Weights, i: int, tables: tuple[Tensor, Tensor], *, joined: bool = False, fused: bool = False
) -> Block:
    """Block `i` from its checkpoint tensors.

    joined: siblings become one linear where that is exact. fused: see `Block`; where all four linears are E8P.
    """
    config, prefix = weights.config, f"model.layers.{i}."
    input_norm = weights.tensor(prefix + "input_layernorm.weight")
    post_norm = weights.tensor(prefix + "post_attention_layernorm.weight")
    qkv, gate_up = (weights.siblings(prefix, names, joined=joined) for names in (QKV, GATE_UP))
    out, down = weights.linear(prefix + OUT), weights.linear(prefix + DOWN)
    fused = fused and all(isinstance(linear, E8PLinear) for linear in (qkv, out, gate_up, down))
    if fused:
        assert isinstance(qkv, E8PLinear)
        assert isinstance(gate_up, E8PLinear)
        qkv, gate_up = qkv.after_norm(input_norm), gate_up.after_norm(post_norm)
    cos, sin = tables if config.rope_layers[i] else (None, None)
    attention = Attention(
        index=i,
        qkv=qkv,
        out=out,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        q_norm=weights.tensor(prefix + "self_attn.q_norm.weight") if config.qk_norm else None,
        k_norm=weights.tensor(prefix + "self_attn.k_norm.weight") if config.qk_norm else None,
        eps=config.eps,
        cos=cos,
        sin=sin,
        window=config.windows[i],
    )
    return Block(
        input_norm=input_norm,
        attention=attention,
        post_norm=post_norm,
        gate_up=gate_up,
        down=down,
        eps=config.eps,
        fused=fused,
    )


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
    ) -> None:
        self.config = checkpoint.config
        self.device, self.dtype = torch.device(device), dtype
        self.parsed = LlamaConfig.from_dict(checkpoint.config)
        if self.parsed.quantization is not None:
            raise ValueError(f"{checkpoint.path}: is quantized already; give the unquantized model")
        self._weights = Weights(checkpoint, self.parsed, self.device, dtype, decode=False)
        self._weights.check()
        self._tables = self.parsed.rope.tables(self.parsed.head_dim, _positions(self.parsed, max_context), self.device)
        self._causal = CausalAttention()

    @property
    def num_blocks(self) -> int:
        return self.parsed.layers

    def block_prefix(self, i: int) -> str:
        return f"model.layers.{i}."

    @torch.no_grad()
    def embed(self, tokens: Tensor) -> Tensor:
        """tokens int [B, T] -> [B, T, D]."""
        return self._embedding(tokens.to(self.device))

    def load_block(self, i: int) -> Block:
        """Block `i`, read from disk now, its linears apart and dense."""
        return build_block(self._weights, i, self._tables)

    def run_block(self, block: Block, hidden: Tensor) -> Tensor:
        """Residual stream before the block -> after it, [B, T, D], causal over the whole sequence; input untouched."""
        x = rms_norm(hidden, block.input_norm, block.eps)
        hidden = hidden + block.attention(x, self._causal)
        x = rms_norm(hidden, block.post_norm, block.eps)
        return hidden + block.down(swiglu(block.gate_up(x)))

    def linear_groups(self, block: Block) -> list[list[tuple[str, nn.Module]]]:
        """Linears of the block by shared input, in the order they run: (name within the block, module)."""
        qkv, gate_up = block.attention.qkv, block.gate_up
        assert isinstance(qkv, Siblings)
        assert isinstance(gate_up, Siblings)
        return [
            list(zip(QKV, qkv.parts, strict=True)),
            [(OUT, block.attention.out)],
            list(zip(GATE_UP, gate_up.parts, strict=True)),
            [(DOWN, block.down)],
        ]

    def final_norm(self, hidden: Tensor) -> Tensor:
        """Residual stream after the last block [..., D] -> input of the head."""
        return rms_norm(hidden.contiguous(), self._norm, self.parsed.eps)

    def head(self, hidden: Tensor) -> Tensor:
        """Residual stream after the last block [..., D] -> logits float32 [..., V]."""
        return self._head.wide(self.final_norm(hidden))

    @cached_property
    def _norm(self) -> Tensor:
        return self._weights.tensor("model.norm.weight")

    @cached_property
    def _embedding(self) -> Embedding | E8PEmbedding:
        return self._weights.embedding()

    @cached_property
    def _head(self) -> Layer:
        return self._weights.head(self._embedding)


def _positions(config: LlamaConfig, max_context: int | None) -> int:
    if max_context is None:
        return min(config.max_positions, MAX_TABLE)
    if not 1 <= max_context <= config.max_positions:
        raise ValueError(f"max_context is {max_context}; the model allows 1 to {config.max_positions}")
    return max_context
