"""Decoder layers of vLLM's Llama, Mistral, Qwen2 and Qwen3 whose norms, SwiGLU and sums run inside their linears.

vLLM's layer launches seven kernels around attention and its rotation: qkv, o, (add and) norm, gate/up, SwiGLU, down,
(add and) norm. These launch four, as our own engine does: what stands in front of a linear and behind it is in its op
(`ops/e8p.py`). A chain of linears also overlaps (`ops/triton/launch.py`), which another kernel between two would end.

`config.py` has vLLM build these classes for our checkpoints. vLLM's models name the classes of their layers themselves
(Llama's alone can be told another), and whether a layer suits is known once its parts are built: so a `FusedLayer` is
made of the modules of a built layer and takes its place in the model. A layer that does not suit (a part whose format
fuses less, an adapter, weights on the host) stays vLLM's. What suits is decided by the functions that decide it in our
own engine. The pieces that run it there (`nn/block.py`) own their weights; here these are parameters of vLLM's linears,
which reload them and sum over ranks.
"""

from typing import Any, cast

from torch import Tensor, nn
from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.models import llama, mistral, qwen2, qwen3

from onegraph.formats.dense import DENSE
from onegraph.formats.weight import WeightFormat
from onegraph.integrations.vllm.linear import OnegraphLinearMethod
from onegraph.integrations.vllm.ranks import exchange_of, linear_sum, sum_over_ranks
from onegraph.integrations.vllm.rope import take_over
from onegraph.nn.block import norm_inside, sum_inside
from onegraph.nn.processes import PeerProcess

LAYERS = (llama.LlamaDecoderLayer, mistral.MistralDecoderLayer, qwen2.Qwen2DecoderLayer, qwen3.Qwen3DecoderLayer)


class FusedLayer(nn.Module):
    """Made of the modules of a decoder layer of vLLM, whose place it takes.

    Between two such layers the residual stream is one tensor, `hidden_states`, and `residual` is None. The last one of
    a rank hands on the two that vLLM's final norm, or the next rank, adds up.
    """

    def __init__(self, layer: Any, last: bool) -> None:
        super().__init__()
        self.self_attn, self.mlp, self.last = take_over(layer.self_attn), layer.mlp, last
        self.input_layernorm, self.post_attention_layernorm = layer.input_layernorm, layer.post_attention_layernorm

    def forward(
        self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None, **_: Any
    ) -> tuple[Tensor, Tensor | None]:
        """hidden_states, residual [T, d] -> the same; keywords, which Mistral's model gives, are None."""
        stream = hidden_states if residual is None else hidden_states + residual
        heads = self.self_attn(positions=positions, hidden_states=stream)
        stream = _behind(self.self_attn.o_proj, heads, stream)
        gate_up, _ = self.mlp.gate_up_proj(stream)
        if self.last:
            return _behind(self.mlp.down_proj, gate_up, None, silu=True), stream
        return _behind(self.mlp.down_proj, gate_up, stream, silu=True), None


def _behind(linear: Any, x: Tensor, add: Tensor | None, silu: bool = False) -> Tensor:
    """A row-parallel linear, summed over ranks: the first one gives bias and `add`."""
    if linear.onegraph.sum_name is not None:
        return linear_sum(x, add, silu, linear.onegraph.sum_name)
    first = linear.tp_rank == 0
    y = linear.quant_method.run(linear, x, linear.bias if first else None, add=add if first else None, silu=silu)
    return tensor_model_parallel_all_reduce(y) if linear.tp_size > 1 else y


def fuse(model: Any, vllm_config: Any) -> int:
    """Puts `FusedLayer`s in the place of the decoder layers of `model` (of `...ForCausalLM`) that suit; how many."""
    if vllm_config.lora_config is not None:  # adapters read what the norm gives
        return 0
    layers, end = model.model.layers, model.model.end_layer
    suited = [i for i in range(model.model.start_layer, end) if _suits(layers[i])]
    config = vllm_config.model_config
    exchange = exchange_of(vllm_config, config.get_hidden_size(), config.dtype) if suited else None
    model.onegraph_exchange = exchange
    for i in suited:
        layer = layers[i]
        if exchange is not None:
            for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
                sum_over_ranks(linear, exchange)
        for norm, linear in (
            (layer.input_layernorm, layer.self_attn.qkv_proj),
            (layer.post_attention_layernorm, layer.mlp.gate_up_proj),
        ):
            linear.onegraph.norm, linear.onegraph.eps = norm, norm.variance_epsilon
            linear.onegraph.slots.expect_norm(linear, norm.weight)
        layer.self_attn.o_proj.onegraph.deferred = True
        layer.self_attn.o_proj.reduce_results = False
        layers[i] = FusedLayer(layer, last=i == end - 1)
    return len(suited)


def _formats(linear: Any) -> list[WeightFormat]:
    """The formats of a linear's parts; a linear that is not ours is dense."""
    method = linear.quant_method
    return list(method.parts.values()) if isinstance(method, OnegraphLinearMethod) else [DENSE]


def _suits(layer: Any) -> bool:
    """Whether the layer is one that we know, all of whose linears fuse what stands around them."""
    if type(layer) not in LAYERS or getattr(layer, "ada_rms_norm_t_cond", None) is not None:
        return False
    if "forward" in vars(layer):  # weights on the host: vLLM has wrapped it
        return False
    qkv, out, gate_up, down = linears = (
        layer.self_attn.qkv_proj, layer.self_attn.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj,
    )  # fmt: skip
    norms = layer.input_layernorm, layer.post_attention_layernorm
    return (
        all(norm_inside(format) for format in (*_formats(qkv), *_formats(gate_up)))
        and all(sum_inside(format, silu=False) for format in _formats(out))
        and all(sum_inside(format, silu=True) for format in _formats(down))
        and all(not linear.skip_bias_add and linear.return_bias for linear in linears)
        and all(type(norm) is RMSNorm and norm.has_weight and not norm.variance_size_override for norm in norms)
        and isinstance(layer.mlp.act_fn, SiluAndMul)
    )


class _Fused:
    """Mixed into a model: builds it, then fuses its layers."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        cast(Any, super()).__init__(vllm_config=vllm_config, prefix=prefix)
        fuse(self, vllm_config)

    def compute_logits(self, *args: Any, **named: Any) -> Tensor | None:
        """As vLLM's, which calls it after every step, outside of graphs. Raises PeerError (`ranks.py`)."""
        exchange: PeerProcess | None = getattr(self, "onegraph_exchange", None)
        if exchange is not None:
            exchange.check()
        logits: Tensor | None = cast(Any, super()).compute_logits(*args, **named)
        return logits


class OnegraphLlamaForCausalLM(_Fused, llama.LlamaForCausalLM):
    """vLLM's Llama on our checkpoints."""


class OnegraphMistralForCausalLM(_Fused, mistral.MistralForCausalLM):
    """vLLM's Mistral on our checkpoints."""


class OnegraphQwen2ForCausalLM(_Fused, qwen2.Qwen2ForCausalLM):
    """vLLM's Qwen2 on our checkpoints."""


class OnegraphQwen3ForCausalLM(_Fused, qwen3.Qwen3ForCausalLM):
    """vLLM's Qwen3 on our checkpoints."""
