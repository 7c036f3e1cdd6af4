"""Training an EAGLE-3 head: the head in plain torch, its loss with its own outputs fed back, and what it learns from.

At each place t of a text the head is unrolled as it will be when it drafts (training-time test): step 0 goes on from
the model's features of token t, step s from what step s - 1 returned. It sees entries of the model's features up to t
and its own behind, and learns the model's probabilities of the token at t + 2 + s, over the tokens that it may name.
The text is given: what comes back is features, not tokens.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from time import monotonic
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from onegraph.models.chain import ChainedLlama
from onegraph.models.config import LlamaConfig
from onegraph.models.eagle import TAPS, EagleConfig
from onegraph.models.llama import Llama, bounded
from onegraph.models.rope import Rope
from onegraph.ops.attention import rotate_half

FADE = 0.8  # weight of a step's loss beside that of the step before


@dataclass(frozen=True)
class Text:
    """One text [T] as the model sees it: tokens int64 [T], hidden states behind the tapped layers [T, L D], those that
    the output head reads [T, D], and the likeliest next token int64 [T]."""

    tokens: Tensor
    hidden: Tensor
    final: Tensor
    best: Tensor

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.tokens, self.hidden, self.final, self.best))


class Texts:
    """Texts with what the model makes of them; of the first ones that is kept, within `budget` bytes on the host, and
    computed anew each time for the rest.

    Raises ValueError where the model attends through its own state only.
    """

    def __init__(
        self, model: Llama | ChainedLlama, tokens: Sequence[Sequence[int]], layers: tuple[int, ...], budget: int
    ) -> None:
        self.model, self.layers, self._tokens, self._left = model, layers, tokens, budget
        self._kept: dict[int, Text] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    @torch.no_grad()
    def __getitem__(self, i: int) -> Text:
        if i in self._kept:
            return self._kept[i]
        model, device = self.model, self.model.device
        tokens = torch.tensor([self._tokens[i]], device=device)
        taps: dict[int, Tensor | None] = dict.fromkeys(self.layers)
        final = model.leave(model.run(0, model.enter(tokens), tokens, model.dense_attention, taps))
        hidden = torch.cat([tap for layer in self.layers if (tap := taps[layer]) is not None], dim=-1)
        best = torch.cat([model.logits(part).argmax(-1) for part in final[0].split(256)])
        text = Text(tokens[0].cpu(), hidden[0].cpu(), final[0].cpu(), best.cpu())
        if text.nbytes <= self._left:
            self._left -= text.nbytes
            self._kept[i] = text
        return text

    def batch(self, rows: Sequence[int]) -> "Batch":
        """Some of the texts side by side, padded behind."""
        texts = [self[i] for i in rows]

        def pad(parts: list[Tensor]) -> Tensor:
            return nn.utils.rnn.pad_sequence(parts, batch_first=True).to(self.model.device)

        lengths = torch.tensor([len(text.tokens) for text in texts], device=self.model.device)
        return Batch(
            tokens=pad([t.tokens for t in texts]), hidden=pad([t.hidden for t in texts]).float(),
            final=pad([t.final for t in texts]), best=pad([t.best for t in texts]), lengths=lengths,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Texts [B, T] as `Text`, of which lengths int64 [B] are real."""

    tokens: Tensor
    hidden: Tensor
    final: Tensor
    best: Tensor
    lengths: Tensor


def _linear(outputs: int, inputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


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
        self.hidden_norm, self.input_layernorm = nn.RMSNorm(d, eps), nn.RMSNorm(d, eps)
        self.post_attention_layernorm = nn.RMSNorm(d, eps)


class EagleNet(nn.Module):
    """The head of `models.eagle.EagleHead` in torch's own modules, in float32; `state_dict` has a file's names.

    Args:
        config: of the head. taps: hidden states that it takes. positions: that texts have at most.
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
        self.norm = nn.RMSNorm(d, layer.eps)
        self.lm_head = nn.Linear(d, config.draft_vocab, bias=False)
        cos, sin = rope.tables(layer.head_dim, positions, torch.device("cpu"))
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                small = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(weight, std=0.02 * (0.5 if small else 1.0))

    def start_from(self, norm: Tensor, rows: Tensor) -> None:
        """Begin where the model itself ends: the last hidden state passes through, to its own final norm [D] and rows
        [V', D] of its output head. For a head as wide as the model."""
        with torch.no_grad():
            d = self.fc.out_features
            self.fc.weight[:, -d:] += torch.eye(d, device=self.fc.weight.device)
            self.norm.weight.copy_(norm)
            self.lm_head.weight.copy_(rows)

    def unroll(self, embedded: Tensor, hidden: Tensor, steps: int) -> Iterator[Tensor]:
        """Logits [B, T - steps, V'] of each step: at place t of step s those of the token at t + 2 + s.

        embedded: [B, T, d] of the text's tokens. hidden: [B, T, L D] behind the tapped layers.
        """
        layer, places = self.layers[0], embedded.shape[1] - steps
        assert isinstance(layer, _Layer)
        features = self.fc(hidden[:, :places])
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for step in range(steps):
            token = layer.input_layernorm(embedded[:, 1 + step : 1 + step + places])
            normed = layer.hidden_norm(features)
            attended = self._attend(layer.self_attn, torch.cat((token, normed), dim=-1), step, keys, values)
            total = (normed if self.config.norm_first else features) + attended
            x, mlp = layer.post_attention_layernorm(total), layer.mlp
            features = total + mlp.down_proj(functional.silu(mlp.gate_proj(x)) * mlp.up_proj(x))
            yield self.lm_head(self.norm(features))

    def _attend(self, own: _Attention, x: Tensor, step: int, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """Queries of this step at place t, which stand at t + step, see entries of step 0 up to t and those of later
        steps at t alone."""
        c, (batch, count, _) = self.config.layer, x.shape
        sides = own.q_proj(x), own.k_proj(x), own.v_proj(x)
        heads = [side.view(batch, count, -1, c.head_dim).float() for side in sides]
        cos, sin = (table[step : step + count].unsqueeze(1) for table in (self.cos, self.sin))
        q, k = (rotate_half(t, cos, sin) for t in heads[:2])
        k, v = (t.repeat_interleave(c.heads // c.kv_heads, dim=2).transpose(1, 2) for t in (k, heads[2]))
        q = q.transpose(1, 2) * c.scale
        keys.append(k)
        values.append(v)
        causal = torch.ones(count, count, dtype=torch.bool, device=x.device).tril()
        scores = (q @ keys[0].transpose(2, 3)).masked_fill(~causal, -torch.inf)
        own_scores = [(q * key).sum(-1, keepdim=True) for key in keys[1:]]
        weights = torch.cat((scores, *own_scores), dim=-1).softmax(-1)
        out = weights[..., :count] @ values[0]
        for i, value in enumerate(values[1:]):
            out = out + weights[..., count + i : count + i + 1] * value
        return own.o_proj(out.transpose(1, 2).flatten(2).to(x.dtype))


@dataclass(frozen=True, kw_only=True)
class Score:
    """How a head fares on texts: its loss, and at each step how often the model agrees with it where it agreed with all
    steps before."""

    loss: float
    accepted: tuple[float, ...]

    @property
    def tokens(self) -> float:
        """Of a round with as many drafts as there are steps, on average."""
        return 1 + sum(math.prod(self.accepted[: i + 1]) for i in range(len(self.accepted)))


class Teacher:
    """The loss of a head of `model` that names the tokens `vocabulary` int64 [V'], over `steps` of its own outputs."""

    def __init__(self, model: Llama | ChainedLlama, net: EagleNet, vocabulary: Tensor, steps: int) -> None:
        self.model, self.net, self.vocabulary, self.steps = model, net, vocabulary, steps
        self.rows = head_rows(model, vocabulary).to(model.dtype)

    def __call__(self, batch: Batch) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """The loss, and of each step where [B, T'] it is told anything, and where it was right."""
        with torch.no_grad():
            embedded = self.model.embed(batch.tokens).float()
            names = bounded(self.model.config, (batch.final @ self.rows.t()).float())
            truth = names.log_softmax(-1)
        loss, told = embedded.new_zeros(()), []
        places = embedded.shape[1] - self.steps
        at = torch.arange(places, device=embedded.device)
        for step, logits in enumerate(self.net.unroll(embedded, batch.hidden, self.steps)):
            here = slice(1 + step, 1 + step + places)
            real = at + 1 + step < batch.lengths.unsqueeze(1)
            wrong = functional.kl_div(
                logits.float().log_softmax(-1), truth[:, here], log_target=True, reduction="none"
            ).sum(-1)
            loss = loss + FADE**step * (wrong * real).sum() / real.sum().clamp(min=1)
            right = self.vocabulary[logits.detach().argmax(-1)] == batch.best[:, here]
            told.append((real, right))
        return loss / sum(FADE**step for step in range(self.steps)), told

    @torch.no_grad()
    def score(self, batches: Sequence[Batch]) -> Score:
        losses, read, kept = [], [0] * self.steps, [0] * self.steps
        for batch in batches:
            loss, told = self(batch)
            losses.append(loss.item())
            still = torch.ones_like(told[0][0])
            for step, (real, right) in enumerate(told):
                still = still & real
                read[step] += int(still.sum())
                still = still & right
                kept[step] += int(still.sum())
        rates = tuple(k / max(1, n) for k, n in zip(kept, read, strict=True))
        return Score(loss=sum(losses) / max(1, len(losses)), accepted=rates)


def head_rows(model: Llama | ChainedLlama, vocabulary: Tensor) -> Tensor:
    """Rows [V', D] of the model's output head, decoded where they are codes."""
    return model.lm_head.dense(torch.float32).tensors["weight"][vocabulary]


def train(
    teacher: Teacher,
    texts: Texts,
    held: Texts,
    *,
    batch: int,
    rate: float,
    steps: int | None,
    seconds: float,
    seed: int,
    every: int = 50,
    patience: int = 6,
    told: Callable[[int, float, Score], object] | None = None,
) -> Score:
    """Trains `teacher.net` until `steps` are done, `seconds` are over, or its loss on `held` texts has not fallen for
    `patience` looks, one `every` so many steps; the best of these stays. AdamW, whose rate falls to nothing by the last
    step, or where `steps` is None by the clock; matrix products in bfloat16 on a GPU. With `steps`, the same seed gives
    the same head unless the clock ended it.

    told: called as told(step, loss, score on held texts) at each look. Returns the score of what stays.
    """
    net, started = teacher.net, monotonic()
    optimizer = torch.optim.AdamW(net.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.01)
    order = torch.Generator().manual_seed(seed)
    on_gpu = texts.model.device.type == "cuda"
    seen = [held.batch(range(i, min(i + batch, len(held)))) for i in range(0, len(held), batch)]

    def score() -> Score:
        with torch.autocast(texts.model.device.type, torch.bfloat16, enabled=on_gpu):
            return teacher.score(seen)

    best, kept, stale, losses = score(), _copy(net), 0, []
    if told is not None:
        told(0, best.loss, best)
    queue: list[int] = []
    for step in count(1):
        if len(queue) < batch:
            queue += torch.randperm(len(texts), generator=order).tolist()
        rows, queue = queue[:batch], queue[batch:]
        done = (monotonic() - started) / seconds if steps is None else (step - 1) / steps
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, step / 20) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
        with torch.autocast(texts.model.device.type, torch.bfloat16, enabled=on_gpu):
            loss, _ = teacher(texts.batch(rows))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
        over = monotonic() - started >= seconds
        if step % every == 0 or step == steps or over:
            now = score()
            if told is not None:
                told(step, float(torch.stack(losses).mean()), now)
            losses, stale = [], stale + 1
            if now.loss < best.loss:
                best, kept, stale = now, _copy(net), 0
            if over or stale >= patience or step == steps:
                break
    net.load_state_dict(kept)
    return best


def _copy(net: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in net.state_dict().items()}


def head_config(model: LlamaConfig, layers: Sequence[int], draft_vocab: int, verifier: str) -> dict[str, Any]:
    """config.json of a head as wide as its model, in speculators' layout: hidden states are taken behind `layers`.

    verifier: the name of the model, for who reads the file.
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


def head_tensors(net: EagleNet, vocabulary: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """What a head's file holds, by name: the weights in `dtype`, and its tokens int64 [V'] both ways round."""
    found = {name: tensor.detach().to("cpu", dtype) for name, tensor in net.state_dict().items()}
    tokens, size = vocabulary.cpu(), net.config.layer.vocab_size
    known = torch.zeros(size, dtype=torch.bool)
    known[tokens] = True
    return found | {"d2t": tokens - torch.arange(len(tokens)), "t2d": known}
