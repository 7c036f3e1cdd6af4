"""The draft layer of Qwen3.5 and Qwen3-Next against a reference of transformers' own modules, and in the engine."""

import json
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engines import maker
from models import Decoder, hf_model
from onegraph.engine.draft_heads import HeadDrafter
from onegraph.engine.params import SamplingParams
from onegraph.formats.checkpoint import Checkpoint, CheckpointError, write_checkpoint
from onegraph.models.llama import Llama
from onegraph.models.qwen_mtp import QwenDraft
from onegraph.nn.attention import PagedCache

VARIANTS = ["qwen3_5", "qwen3_5_moe", "qwen3_next"]
PROMPTS = [[7, 1, 8, 2, 8, 1, 8, 2, 8, 4, 5, 9], [2], [100, 0, 3], [5] * 20]
PARAMS = [SamplingParams(max_tokens=12 + i, temperature=i % 2 * 1.0, seed=i) for i in range(len(PROMPTS))]


class Reference(torch.nn.Module):
    """vLLM's Qwen3NextMultiTokenPredictor with transformers' decoder layer, over a whole text."""

    def __init__(self, hf: Any) -> None:
        super().__init__()
        kind, last = type(hf.model.layers[-1]), len(hf.model.layers) - 1
        norm, d = partial(type(hf.model.norm), eps=hf.config.rms_norm_eps), hf.config.hidden_size
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = norm(d), norm(d), norm(d)
        self.fc = torch.nn.Linear(2 * d, d, bias=False)
        self.layers = torch.nn.ModuleList([kind(hf.config, last)])
        g = torch.Generator().manual_seed(4)
        with torch.no_grad():
            for parameter in self.parameters():
                scale = 0.3 if parameter.dim() == 1 else 1.5 / parameter.shape[-1] ** 0.5
                parameter.copy_(scale * torch.randn(parameter.shape, generator=g))

    def forward(self, hf: Any, hidden: Tensor, tokens: Tensor) -> Tensor:
        """hidden [B, T, D] behind the final norm, tokens [B, T] the one behind each -> the same of the draft."""
        both = self.pre_fc_norm_embedding(hf.model.embed_tokens(tokens)), self.pre_fc_norm_hidden(hidden)
        x, length = self.fc(torch.cat(both, dim=-1)), tokens.shape[1]
        mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
        axes = (1,) if "Next" in type(hf).__name__ else (3, 1)  # time, height and width of an image: alike in a text
        turns = hf.model.rotary_emb(x, torch.arange(length).expand(*axes, length))
        x = self.layers[0](x, position_embeddings=turns, attention_mask=mask)
        return self.norm(x if isinstance(x, Tensor) else x[0])

    def tensors(self, experts: int) -> dict[str, Tensor]:
        """As published files have them: experts one by one, or all of a layer in one tensor each (`experts` 0)."""
        found = {}
        for name, tensor in self.state_dict().items():
            _, _, stack = name.partition(".mlp.experts.")
            if not stack or not experts:
                found[f"mtp.{name}"] = tensor
                continue
            parts = ["gate_proj", "up_proj"] if stack == "gate_up_proj" else [stack]
            for e in range(experts):
                for part, rows in zip(parts, tensor[e].chunk(len(parts)), strict=True):
                    found[f"mtp.{name.removesuffix(stack)}{e}.{part}.weight"] = rows.contiguous()
        return found


def save(
    variant: str, path: Path, *, stacked: bool = False, without: str = "nothing", **changes: Any
) -> tuple[Any, Reference]:
    hf = hf_model(variant, **changes)
    reference = Reference(hf).eval()
    hf.save_pretrained(path / "plain")
    source = Checkpoint.open(path / "plain")
    more = reference.tensors(0 if stacked else getattr(hf.config, "num_experts", 0))
    tensors = {name: source.tensor(name) for name in source.names} | more
    config = source.config | {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}
    write_checkpoint(path / "model", config, [item for item in tensors.items() if without not in item[0]])
    return hf, reference


def load(path: Path) -> tuple[Llama, QwenDraft]:
    with Checkpoint.open(path) as checkpoint:
        model = Llama.load(checkpoint)
        return model, QwenDraft.load(checkpoint, model)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
@torch.inference_mode()
def test_it_computes_what_the_reference_does(variant: str, stacked: bool, tmp_path: Path) -> None:
    """A prompt in two chunks, then token by token with what itself returned in place of hidden states."""
    if stacked and variant == "qwen3_5":
        pytest.skip("it has no experts")
    hf, reference = save(variant, tmp_path, stacked=stacked)
    model, draft = load(tmp_path / "model")
    text = torch.randint(0, 131, (1, 25), generator=torch.Generator().manual_seed(2))
    hidden = hf.model(text, use_cache=False).last_hidden_state
    own = model(text, model.dense_attention)
    torch.testing.assert_close(own, hidden, atol=1e-4, rtol=1e-4)
    want = reference(hf, hidden[:, :20], text[:, 1:21])
    cache = Decoder(draft, rows=1, max_context=64, spare=7).cache
    assert isinstance(cache, PagedCache)
    got = []
    for start, end in ((0, 9), (9, 20)):
        cache.counts.fill_(end - start)
        got.append(draft(text[:, start + 1 : end + 1], own[:, start:end], cache))
        cache.positions.add_(cache.counts)
    torch.testing.assert_close(torch.cat(got, dim=1), want, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(draft.logits(draft.leave(want)), hf.lm_head(want), atol=1e-3, rtol=1e-4)
    features, made = got[-1][:, -1:], hidden[:, :20]
    for at in (20, 21):
        cache.counts.fill_(1)
        features = draft(text[:, at + 1 : at + 2], features, cache)
        cache.positions.add_(1)
        made = torch.cat((made, want[:, -1:]), dim=1)
        want = reference(hf, made, text[:, 1 : at + 2])
        torch.testing.assert_close(features, want[:, -1:], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kv", ["turboquant:4,window=16", "turboquant:3,mode=full"])
def test_drafts_change_no_token_over_keys_in_codes(kv: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy and sampled, past the exact window, in captured graphs; some drafts are accepted and some are not."""
    sizes = {"head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2}
    save("qwen3_5", tmp_path, **sizes, layer_types=["linear_attention", "full_attention"])
    model, draft = load(tmp_path / "model")
    draft.block.load_state_dict(model.blocks[-1].state_dict())  # a draft that resembles the model is right now and then
    make = maker("captured", model, monkeypatch, page_size=16, max_context=128, kv=kv)
    params = [SamplingParams(max_tokens=24, temperature=i % 2 * 0.5, seed=i) for i in range(len(PROMPTS))]
    plain = make().generate(PROMPTS, params)
    engine = make(draft=partial(HeadDrafter, draft), draft_tokens=3, max_batch=3)
    assert engine.generate(PROMPTS, params) == plain
    assert 0 < engine.stats.accepted_tokens < engine.stats.drafted_tokens


@pytest.mark.parametrize(("capture", "count"), [("eager", 1), ("captured", 3), ("captured", "auto")])
def test_drafts_change_no_token(count: Any, capture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save("qwen3_5", tmp_path)
    model, draft = load(tmp_path / "model")
    make = maker(capture, model, monkeypatch)
    plain = make().generate(PROMPTS, PARAMS)
    engine = make(draft=partial(HeadDrafter, draft), draft_tokens=count, max_batch=3)
    assert engine.generate(PROMPTS, PARAMS) == plain
    again = [prompt + new[:9] for prompt, new in zip(PROMPTS, plain, strict=True)]  # in part known, by their pages
    wanted = make().generate(again, PARAMS)
    with engine.executor.running(), closing(engine.scheduler.open()) as scheduler:
        for texts in (PROMPTS, again):
            requests = [engine.request(text, params) for text, params in zip(texts, PARAMS, strict=True)]
            for request in requests:
                scheduler.add(request)
            while not scheduler.idle:
                scheduler.step()
    assert [request.output for request in requests] == wanted
    assert engine.stats.shared_tokens
    assert count == "auto" or engine.stats.drafted_tokens


def test_its_drafts_are_the_references(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits behind a text is what the reference names behind it: no input is shifted, no norm left out."""
    hf, reference = save("qwen3_5", tmp_path)
    model, draft = load(tmp_path / "model")
    engine = maker("eager", model, monkeypatch)(draft=partial(HeadDrafter, draft), draft_tokens=1, max_batch=1)
    for prompt in PROMPTS:
        (new,) = engine.generate([prompt], SamplingParams(max_tokens=5))
        text = torch.tensor([prompt + new])
        with torch.inference_mode():
            hidden = hf.model(text, use_cache=False).last_hidden_state
            wanted = hf.lm_head(reference(hf, hidden[:, :-1], text[:, 1:]))[0].argmax(-1).tolist()
        assert int(engine.executor.speculation.state.drafts[1, 0]) == wanted[-1]


@pytest.mark.parametrize(
    ("without", "message"),
    [
        ("mtp.", "has no tensor 'mtp.fc.weight', so it comes without its draft layer"),
        ("mtp.pre_fc_norm_hidden", "mtp.pre_fc_norm_hidden.weight"),
        ("mtp.layers.0.self_attn.k_proj", "mtp.layers.0.self_attn.k_proj.weight"),
    ],
)
def test_what_is_missing_is_named(without: str, message: str, tmp_path: Path) -> None:
    save("qwen3_5", tmp_path, without=without)
    with Checkpoint.open(tmp_path / "model") as checkpoint:
        model = Llama.load(checkpoint)
        with pytest.raises(CheckpointError, match=message):
            QwenDraft.load(checkpoint, model)


def test_embeddings_of_its_own_are_refused(tmp_path: Path) -> None:
    save("qwen3_5", tmp_path)
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"mtp_use_dedicated_embeddings": True}))
    with (
        Checkpoint.open(tmp_path / "model") as checkpoint,
        pytest.raises(ValueError, match="mtp_use_dedicated_embeddings is True; supported: False"),
    ):
        Llama.load(checkpoint)
