"""From the tensors of a checkpoint to layers: which tensors a config asks for, and how each becomes a module."""

from collections.abc import Sequence

import torch
from torch import Tensor

from onegraph.formats.checkpoint import Checkpoint
from onegraph.formats.e8p import KEEP, E8PConfig, linear_tensors
from onegraph.formats.nvfp4 import NVFP4Config, is_nvfp4, read_linear, tensor_names
from onegraph.models.config import LlamaConfig
from onegraph.models.stream import Stream
from onegraph.nn.embedding import E8PEmbedding, Embedding
from onegraph.nn.linear import E8PLinear, Linear, Siblings, fuse
from onegraph.nn.nvfp4 import NVFP4Linear, fuse_nvfp4

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
Layer = Linear | E8PLinear | NVFP4Linear
EMBED, NORM, HEAD = "model.embed_tokens", "model.norm.weight", "lm_head"


class Weights:
    """The tensors of a Llama-family checkpoint, read when asked for, to a GPU in pinned chunks.

    Args:
        device, dtype: where layers go and what dense weights become.
        decode: make dense layers of E8P ones.
    """

    def __init__(
        self, checkpoint: Checkpoint, config: LlamaConfig, device: torch.device, dtype: torch.dtype, *, decode: bool
    ) -> None:
        if dtype not in FLOATS:
            raise ValueError(f"dtype is {dtype}; allowed are float32, bfloat16 and float16")
        self.checkpoint, self.config = checkpoint, config
        self.device, self.dtype, self.decode = device, dtype, decode
        self.shapes = self._shapes()
        self._stream = Stream(device)

    # ------------------------------------------------------------------------------------------ what must be there

    def _shapes(self) -> dict[str, tuple[int, int, bool]]:
        """Every linear by its full name: (outputs, inputs, has a bias)."""
        c = self.config
        q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
        block = {
            "self_attn.q_proj": (q, c.hidden_size, c.qkv_bias),
            "self_attn.k_proj": (kv, c.hidden_size, c.qkv_bias),
            "self_attn.v_proj": (kv, c.hidden_size, c.qkv_bias),
            "self_attn.o_proj": (c.hidden_size, q, c.out_bias),
            "mlp.gate_proj": (c.intermediate_size, c.hidden_size, c.mlp_bias),
            "mlp.up_proj": (c.intermediate_size, c.hidden_size, c.mlp_bias),
            "mlp.down_proj": (c.hidden_size, c.intermediate_size, c.mlp_bias),
        }
        found = {f"model.layers.{i}.{name}": shape for i in range(c.layers) for name, shape in block.items()}
        return found | {HEAD: (c.vocab_size, c.hidden_size, False)}

    def bits(self, name: str) -> int:
        quantization = self.config.quantization
        return quantization.bits_of(name) if isinstance(quantization, E8PConfig) else KEEP

    def in_nvfp4(self, name: str) -> bool:
        """Whether the file holds this linear in NVFP4; which ones it does is told by its tensors alone."""
        return isinstance(self.config.quantization, NVFP4Config) and is_nvfp4(self.checkpoint, name)

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding's own weight: tied by the config, and neither of the two quantized."""
        return self.config.tied and self.bits(HEAD) == self.bits(EMBED) == KEEP and not self.in_nvfp4(HEAD)

    def expected(self) -> dict[str, tuple[tuple[int, ...], tuple[torch.dtype, ...]]]:
        """Every tensor that the config asks for: name -> (shape, dtypes allowed)."""
        c = self.config
        linears = {name: shape for name, shape in self.shapes.items() if not (self.tied and name == HEAD)}
        found: dict[str, tuple[tuple[int, ...], tuple[torch.dtype, ...]]] = {}
        for name, (n, k, bias) in (linears | {EMBED: (c.vocab_size, c.hidden_size, False)}).items():
            if self.in_nvfp4(name):  # sizes and values are held against the config when the layer is read
                for tensor in tensor_names(self.checkpoint, name):
                    if tensor is not None and tensor in self.checkpoint:
                        found[tensor] = self.checkpoint.shape(tensor), (self.checkpoint.dtype(tensor),)
                if bias:
                    found[f"{name}.bias"] = (n,), FLOATS
                continue
            if self.bits(name) == KEEP:
                found[f"{name}.weight"] = (n, k), FLOATS
                if bias:
                    found[f"{name}.bias"] = (n,), FLOATS
                continue
            for suffix, (shape, dtype) in linear_tensors(n, k, self.bits(name), bias).items():
                found[f"{name}.{suffix}"] = shape, FLOATS if dtype.is_floating_point else (dtype,)
        for i in range(c.layers):
            for norm in ("input_layernorm", "post_attention_layernorm"):
                found[f"model.layers.{i}.{norm}.weight"] = (c.hidden_size,), FLOATS
            for norm in ("q_norm", "k_norm") if c.qk_norm else ():
                found[f"model.layers.{i}.self_attn.{norm}.weight"] = (c.head_dim,), FLOATS
        return found | {NORM: ((c.hidden_size,), FLOATS)}

    def check(self) -> None:
        """Raises CheckpointError that names each tensor missing, of a wrong shape or dtype, or not asked for; and
        ValueError if the rate map names a layer that the model does not have."""
        if isinstance(self.config.quantization, E8PConfig):
            names = self.shapes
            if unknown := [name for name in self.config.quantization.layers if name not in names or name == HEAD]:
                raise ValueError(f"quantization_config.layers names {unknown[0]!r}, which is no linear of a block here")
        optional = [f"{HEAD}.weight"] if self.tied else []
        if isinstance(self.config.quantization, NVFP4Config):  # scales of an FP8 KV cache, which ours has no use for
            optional += [name for name in self.checkpoint.names if name.endswith((".k_scale", ".v_scale"))]
        self.checkpoint.check(self.expected(), optional=optional)

    # --------------------------------------------------------------------------------------------------- making it

    def tensor(self, name: str) -> Tensor:
        return self._stream(self.checkpoint.unrounded(name), self.dtype)

    def forget(self) -> None:
        """Drops the maps of the files read so far, whose pages count as this process's memory."""
        self.checkpoint.forget()

    def linear(self, name: str) -> Layer:
        n, k, bias = self.shapes[name]
        if self.in_nvfp4(name):
            tensors = read_linear(self.checkpoint, name, n, k, self.device)
            coded = NVFP4Linear.of(tensors, self._wide(f"{name}.bias") if bias else None)
            return coded.dense(self.dtype) if self.decode else coded
        if self.bits(name) == KEEP:
            return Linear(self.tensor(f"{name}.weight"), self.tensor(f"{name}.bias") if bias else None)
        codes, residual, in_scale, out_scale = self._coded(name)
        layer = E8PLinear(
            codes=codes,
            residual=residual,
            in_scale=in_scale,
            out_scale=out_scale,
            bias=self._wide(f"{name}.bias") if bias else None,
            bits=self.bits(name),
        )
        return layer.dense(self.dtype) if self.decode else layer

    def siblings(self, prefix: str, names: Sequence[str], *, joined: bool) -> Layer | Siblings:
        parts = [self.linear(prefix + name) for name in names]
        if not joined:
            return Siblings(parts)
        in_nvfp4 = [part for part in parts if isinstance(part, NVFP4Linear)]
        if len(in_nvfp4) == len(parts):
            return fuse_nvfp4(in_nvfp4)
        others = [part for part in parts if not isinstance(part, NVFP4Linear)]
        return fuse(others) if len(others) == len(parts) else Siblings(parts)

    def embedding(self) -> Embedding | E8PEmbedding:
        if self.bits(EMBED) == KEEP:
            return Embedding(self.tensor(f"{EMBED}.weight"))
        codes, residual, in_scale, out_scale = self._coded(EMBED)
        return E8PEmbedding(
            codes=codes,
            residual=residual,
            in_scale=in_scale,
            out_scale=out_scale,
            bits=self.bits(EMBED),
            dtype=self.dtype,
        )

    def head(self, embedding: Embedding | E8PEmbedding) -> Layer:
        """The linear to logits; shares the embedding's weight where the two are tied."""
        if self.tied:
            assert isinstance(embedding, Embedding)
            return Linear(embedding.weight)
        return self.linear(HEAD)

    def _coded(self, name: str) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """codes, residual, in_scale and out_scale of an E8P layer, the global scale multiplied in, in float32."""
        residual = f"{name}.residual"
        return (
            self._stream(self.checkpoint.tensor(f"{name}.codes")),
            self._stream(self.checkpoint.tensor(residual)) if self.bits(name) > 2 else None,
            self._wide(f"{name}.in_scale"),
            self._wide(f"{name}.out_scale") * self._wide(f"{name}.scale"),
        )

    def _wide(self, name: str) -> Tensor:
        return self._stream(self.checkpoint.unrounded(name), torch.float32)
