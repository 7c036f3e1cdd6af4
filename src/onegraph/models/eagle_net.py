"""An EAGLE-3 head while it is trained: in plain torch, unrolled over its own outputs, and written as a file.

At each place t of a text the head is unrolled as it will be when it drafts (training-time test): step 0 goes on from
the model's features of token t, step s from what step s - 1 returned. It sees entries of the model's features up to t
and its own behind. The text is given: what comes back is features, not tokens.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from onegraph.formats.checkpoint import Checkpoint, CheckpointError
from onegraph.formats.weight import FLOATS
from onegraph.models.chain import ChainedLlama
from onegraph.models.config import LlamaConfig
from onegraph.models.eagle import TAPS, EagleConfig, EagleHead
from onegraph.models.llama import Llama
from onegraph.models.rope import Rope
from onegraph.ops.attention import rotate_half

SOFT = 0.1  # of the model's final norm, with which a head begins


def _linear(outputs: int, inputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class _Norm(nn.RMSNorm):
    """Its weight is rounded to the input's dtype first: torch's one launch takes both in one dtype only."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class _Attention(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        d, q, kv = config.hidden_size, config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q_proj, self.k_proj, self.v_proj = _linear(q, 2 * d), _linear(kv, 2 * d), _linear(kv, 2 * d)
        self.o_proj = _linear(d, q)


class _MLP(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        d, wide = config.hidden_size, config.intermediate_size
        self.gate_proj, self.up_proj, self.down_proj = _linear(wide, d), _linear(wide, d), _linear(d, wide)


class _Layer(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.self_attn, self.mlp = _Attention(config), _MLP(config)
        d, eps = config.hidden_size, config.eps
        self.hidden_norm, self.input_layernorm = _Norm(d, eps), _Norm(d, eps)
        self.post_attention_layernorm = _Norm(d, eps)


class EagleNet(nn.Module):
    """The head of `models.eagle.EagleHead` in torch's own modules, in float32; `state_dict` has a file's names.

    Args:
        config: of the head. taps: hidden states that it takes. positions: of a text at most, and
            one more for each step.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: EagleConfig, taps: int, positions: int) -> None:
        super().__init__()
        self.config, layer = config, config.layer
        d, rope = layer.hidden_size, layer.ropes[0]
        assert rope is not None
        self.fc = nn.Linear(taps * config.target_hidden, d, bias=False)
        self.layers = nn.ModuleList([_Layer(layer)])
        self.norm = _Norm(d, layer.eps)
        self.lm_head = nn.Linear(d, config.draft_vocab, bias=False)
        cos, sin = rope.tables(layer.head_dim, positions, torch.device("cpu"))
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                small = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(weight, std=0.02 * (0.5 if small else 1.0))

    @property
    def layer(self) -> _Layer:
        layer = self.layers[0]
        assert isinstance(layer, _Layer)
        return layer

    def start_from(self, norm: Tensor, rows: Tensor) -> None:
        """Begin where the model itself ends: the last hidden state passes through, to its own final norm [D] and rows
        [V', D] of its output head. For a head as wide as the model.

        The norm is a tenth: what passes through names the token that is known already, and to be sure of it would have
        to be unlearnt first.
        """
        with torch.no_grad():
            d = self.fc.out_features
            self.fc.weight[:, -d:] += torch.eye(d, device=self.fc.weight.device)
            self.norm.weight.copy_(SOFT * norm)
            self.lm_head.weight.copy_(rows)

    def unroll(self, embedded: Tensor, hidden: Tensor, steps: int) -> Iterator[Tensor]:
        """What the output head reads [B, T, d] at each step: at place t of step s it names the token at t + 2 + s.

        embedded: [B, T + steps, d] of the text's tokens; those past its end may be any. hidden: [B, T, L D] behind the
        tapped layers. Places stand for themselves: what lies behind a text's end changes nothing in it.
        """
        layer, places = self.layer, hidden.shape[1]
        features = self.fc(hidden)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        seen = _seen(places, steps, hidden.device)
        for step in range(steps):
            token = layer.input_layernorm(embedded[:, 1 + step : 1 + step + places])
            normed = layer.hidden_norm(features)
            attended = self._attend(layer.self_attn, torch.cat((token, normed), dim=-1), step, keys, values, seen)
            total = (normed if self.config.norm_first else features) + attended
            x, mlp = layer.post_attention_layernorm(total), layer.mlp
            features = total + mlp.down_proj(functional.silu(mlp.gate_proj(x)) * mlp.up_proj(x))
            yield self.norm(features)

    def _attend(
        self, own: _Attention, x: Tensor, step: int, keys: list[Tensor], values: list[Tensor], seen: Tensor
    ) -> Tensor:  # fmt: skip
        """Queries of this step at place t, which stand at t + step."""
        c, count = self.config.layer, x.shape[1]
        q, k, v = (side(x).unflatten(-1, (-1, c.head_dim)) for side in (own.q_proj, own.k_proj, own.v_proj))
        cos, sin = (table[step : step + count].unsqueeze(1) for table in (self.cos, self.sin))
        q, k = (rotate_half(t.float(), cos, sin).to(v.dtype) for t in (q, k))
        k, v = (t.repeat_interleave(c.heads // c.kv_heads, dim=2).transpose(1, 2) for t in (k, v))
        keys.append(k)
        values.append(v)
        out = functional.scaled_dot_product_attention(
            q.transpose(1, 2), torch.cat(keys, dim=2), torch.cat(values, dim=2), scale=c.scale,
            attn_mask=seen[:, : (step + 1) * count] if step else None, is_causal=not step,
        )  # fmt: skip
        result: Tensor = own.o_proj(out.transpose(1, 2).flatten(2))
        return result


def _seen(places: int, steps: int, device: torch.device) -> Tensor:
    """Which entries a query at each place sees, bool [T, steps T]: of step 0 those up to its place, of later steps the
    one at its place alone."""
    same = torch.eye(places, dtype=torch.bool, device=device)
    return torch.cat((torch.ones_like(same).tril(), same.repeat(1, steps - 1)), dim=1)


def head_config(model: LlamaConfig, layers: Sequence[int], draft_vocab: int, verifier: str) -> dict[str, Any]:
    """config.json of a head as wide as its model, in speculators' layout: hidden states are taken behind `layers`.

    verifier: the name of the model, for readers of the file.
    """
    rope = next((rope for rope in model.ropes if rope is not None), Rope())
    layer = {
        "model_type": "llama",
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": model.eps,
        "max_position_embeddings": model.max_positions,
        "rope_theta": rope.theta,
        "attention_bias": False,
        "mlp_bias": False,
    }
    proposal = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": verifier, "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": draft_vocab,
        "target_hidden_size": None,
        "norm_before_residual": False,
        TAPS: [i + 1 for i in layers],
    }


def read_net(
    checkpoint: Checkpoint, model: Llama | ChainedLlama, positions: int
) -> tuple[EagleNet, tuple[int, ...], Tensor]:
    """A head for `model` that was written as `head_config` and `head_tensors` say, to train it further.

    Returns the net on the model's device, the layers that it taps and the tokens int64 [V'] that it names. Raises
    ValueError (CheckpointError among them) that says in what the two do not go together, or what no net holds.
    """
    where, config = checkpoint.path, EagleConfig.from_dict(checkpoint.config)
    if "speculators_model_type" not in checkpoint.config:
        raise CheckpointError(f"{where}: is in EAGLE's layout; training goes on from heads in speculators' layout")
    head = EagleHead.load(checkpoint, model)
    if (found := config.layer.hidden_size) != model.config.hidden_size:
        raise CheckpointError(
            f"{where}: hidden_size is {found}, the model's is {model.config.hidden_size}; training goes on from heads "
            "as wide as their model"
        )
    net = EagleNet(config, len(head.layers), positions)
    whole = torch.arange(config.draft_vocab)
    names = whole if head.vocabulary is None else head.vocabulary.cpu()
    weights = net.state_dict()
    expected = {name: (tuple(weight.shape), FLOATS) for name, weight in weights.items()}
    checkpoint.check(expected, optional=("d2t", "t2d"))
    net.load_state_dict({name: checkpoint.tensor(name, dtype=torch.float32) for name in weights})
    return net.to(model.device), head.layers, names


def head_tensors(net: EagleNet, vocabulary: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """What a head's file holds, by name: the weights in `dtype`, and its tokens int64 [V'] both ways round."""
    found = {name: tensor.detach().to("cpu", dtype) for name, tensor in net.state_dict().items()}
    tokens, size = vocabulary.cpu(), net.config.layer.vocab_size
    known = torch.zeros(size, dtype=torch.bool)
    known[tokens] = True
    return found | {"d2t": tokens - torch.arange(len(tokens)), "t2d": known}


def head_rows(model: Llama | ChainedLlama, vocabulary: Tensor) -> Tensor:
    """Rows [V', D] of the model's output head, decoded where they are codes."""
    return model.lm_head.dense(torch.float32).tensors["weight"][vocabulary]
