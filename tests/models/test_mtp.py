"""Draft layers of Qwen, GLM, DeepSeek and Nemotron against transformers' own modules, and in the engine."""

import json
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engines import maker
from models import Decoder, hf_model
from onegraph.check import check_step
from onegraph.engine.draft_heads import HeadDrafter
from onegraph.engine.engine import Engine
from onegraph.engine.params import SamplingParams
from onegraph.formats.checkpoint import Checkpoint, CheckpointError, write_checkpoint
from onegraph.models.config import LlamaConfig
from onegraph.models.llama import Llama
from onegraph.models.mtp import DraftLayer
from onegraph.models.ranks import Ranks
from onegraph.nn.attention import PagedCache
from onegraph.nn.latent import LatentCache
from onegraph.ops.registry import reference_ops
from test_speculate import round_inputs

QWEN = ["qwen3_5", "qwen3_5_moe", "qwen3_next"]
BEHIND = ["glm4_moe", "glm4_moe_lite", "deepseek_v3", "deepseek_v32", "glm_moe_dsa"]  # a layer behind the last
VARIANTS = [*QWEN, *BEHIND, "nemotron_h"]
# Of families with more layers than kinds of them.
LESS: dict[str, dict[str, Any]] = {
    "qwen3_5": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    "glm_moe_dsa": {
        "num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
}  # fmt: skip
PROMPTS = [[7, 1, 8, 2, 8, 1, 8, 2, 8, 4, 5, 9], [2], [100, 0, 3], [5] * 20]
PARAMS = [SamplingParams(max_tokens=8 + i, temperature=i % 2 * 1.0, seed=i) for i in range(len(PROMPTS))]


class Reference(torch.nn.Module):
    """One more decoder layer of transformers' over a whole text, between the norms and the projection that vLLM's
    Qwen3NextMultiTokenPredictor or transformers' MtpLayer has."""

    def __init__(self, hf: Any) -> None:
        super().__init__()
        kind, last = type(hf.model.layers[-1]), len(hf.model.layers) - 1
        norm, d = partial(type(hf.model.norm), eps=hf.config.rms_norm_eps), hf.config.hidden_size
        self.behind = None if "Qwen" in type(hf).__name__ else last + 1
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = norm(d), norm(d), norm(d)
        self.fc = torch.nn.Linear(2 * d, d, bias=False)
        self.layers = torch.nn.ModuleList([kind(hf.config, last)])
        self.fill(1.0 if self.behind else 0.0)

    def fill(self, norms: float) -> None:
        """norms: about what weights of norms are."""
        g = torch.Generator().manual_seed(4)
        with torch.no_grad():
            for name, tensor in self.state_dict().items():
                scale = 0.3 if tensor.dim() == 1 else 1.5 / tensor.shape[-1] ** 0.5
                near = norms if tensor.dim() == 1 and "norm" in name and "bias" not in name else 0.0
                tensor.copy_(near + scale * torch.randn(tensor.shape, generator=g))

    def forward(self, hf: Any, hidden: Tensor, tokens: Tensor) -> Tensor:
        """hidden [B, T, D] behind the final norm, tokens [B, T] the one behind each -> the same of the draft."""
        both = self.pre_fc_norm_embedding(hf.model.embed_tokens(tokens)), self.pre_fc_norm_hidden(hidden)
        x, length = self.fc(torch.cat(both, dim=-1)), tokens.shape[1]
        mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
        axes = (3, 1) if "Qwen3_5" in type(hf).__name__ else (1,)  # time, height, width of an image: alike in a text
        places = torch.arange(length)
        turns = hf.model.rotary_emb(x, places.expand(*axes, length))
        x = self.layers[0](x, position_embeddings=turns, attention_mask=mask, position_ids=places[None])
        return self.norm(x if isinstance(x, Tensor) else x[0])

    def published(self, name: str) -> str:
        """The name that files have for a tensor."""
        if self.behind is None:
            return f"mtp.{name}"
        own = {"fc": "eh_proj", "norm": "shared_head.norm", "pre_fc_norm_embedding": "enorm"}
        first, _, rest = name.partition(".")
        local = rest.removeprefix("0.") if first == "layers" else f"{own.get(first, 'hnorm')}.{rest}"
        return f"model.layers.{self.behind}.{local}"

    def tensors(self, experts: int) -> dict[str, Tensor]:
        """As published files have them: experts one by one, or all of a layer in one tensor each (`experts` 0)."""
        found = {}
        for own, tensor in self.state_dict().items():
            name = self.published(own)
            _, _, stack = name.partition(".experts.")
            if not stack or not experts:
                found[name] = tensor
                continue
            parts = ["gate_proj", "up_proj"] if stack == "gate_up_proj" else [stack]
            for e in range(experts):
                for part, rows in zip(parts, tensor[e].chunk(len(parts)), strict=True):
                    found[f"{name.removesuffix(stack)}{e}.{part}.weight"] = rows.contiguous()
        return found

    def told(self, config: dict[str, Any]) -> dict[str, Any]:
        """What config.json says of it, by the key that transformers wrote if it did."""
        if self.behind is not None:
            return {"num_mtp_layers" if "num_mtp_layers" in config else "num_nextn_predict_layers": 1}
        return {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}


class Halves(Reference):
    """Nemotron 3's: a block that attends and one of experts, transformers' both, put together as vLLM 0.32's
    NemotronHMultiTokenPredictor does, by whose names files hold them."""

    behind = None

    def __init__(self, hf: Any) -> None:
        torch.nn.Module.__init__(self)
        kind, d = type(hf.model.layers[0]), hf.config.hidden_size
        norm = partial(type(hf.model.norm_f), d, eps=hf.config.layer_norm_epsilon)
        first, last = (kind(hf.config, hf.config.layers_block_type.index(what)) for what in ("full_attention", "moe"))
        first.enorm, first.hnorm, last.final_layernorm = norm(), norm(), norm()
        first.eh_proj = torch.nn.Linear(2 * d, d, bias=False)
        self.layers = torch.nn.ModuleList([first, last])
        self.fill(1.0)

    @property
    def norm(self) -> Any:
        return self.layers[-1].final_layernorm

    def forward(self, hf: Any, hidden: Tensor, tokens: Tensor) -> Tensor:
        first, last = self.layers
        x = first.eh_proj(torch.cat((first.enorm(hf.model.embeddings(tokens)), first.hnorm(hidden)), dim=-1))
        x = first(x, attention_mask=torch.full((x.shape[1],) * 2, -torch.inf).triu(1)[None, None])
        result: Tensor = last.final_layernorm(last(x))
        return result

    def told(self, config: dict[str, Any]) -> dict[str, Any]:
        return {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E"}


def copies(hf: Any, behind: int) -> dict[str, Tensor]:
    """Of the decoder's ends, which published files have beside a layer behind the last too."""
    ends = {"embed_tokens": hf.model.embed_tokens.weight, "shared_head.head": hf.lm_head.weight}
    return {f"model.layers.{behind}.{name}.weight": tensor.detach().clone() for name, tensor in ends.items()}


def save(
    variant: str, path: Path, *, stacked: bool = False, without: str = "nothing", **changes: Any
) -> tuple[Any, Reference]:
    hf = hf_model(variant, **changes)
    reference = (Halves if variant == "nemotron_h" else Reference)(hf).eval()
    hf.save_pretrained(path / "plain")
    source = Checkpoint.open(path / "plain")
    routed = getattr(hf.config, "n_routed_experts", getattr(hf.config, "num_experts", 0))
    more = reference.tensors(0 if stacked else routed)
    more |= {} if reference.behind is None else copies(hf, reference.behind)
    tensors = {name: source.tensor(name) for name in source.names} | more
    config = source.config | reference.told(source.config)
    write_checkpoint(path / "model", config, [item for item in tensors.items() if without not in item[0]])
    return hf, reference


def load(path: Path) -> tuple[Llama, DraftLayer]:
    with Checkpoint.open(path) as checkpoint:
        model = Llama.load(checkpoint)
        return model, DraftLayer.load(checkpoint, model)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
@torch.inference_mode()
def test_it_computes_what_the_reference_does(variant: str, stacked: bool, tmp_path: Path) -> None:
    """A prompt in two chunks, then token by token with what itself returned in place of hidden states."""
    if stacked and variant not in ("qwen3_5_moe", "qwen3_next"):
        pytest.skip("its files hold no experts in one tensor")
    hf, reference = save(variant, tmp_path, stacked=stacked)
    model, draft = load(tmp_path / "model")
    text = torch.randint(0, 131, (1, 25), generator=torch.Generator().manual_seed(2))
    hidden = hf.model(text, use_cache=False).last_hidden_state
    own = model(text, model.dense_attention)
    torch.testing.assert_close(own, hidden, atol=1e-4, rtol=1e-4)
    want = reference(hf, hidden[:, :20], text[:, 1:21])
    cache = Decoder(draft, rows=1, max_context=64, spare=7).cache
    assert isinstance(cache, PagedCache | LatentCache)
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


@pytest.mark.parametrize("variant", ["qwen3_5", "glm4_moe"])
@pytest.mark.parametrize("kv", ["turboquant:4,window=16", "turboquant:3,mode=full"])
def test_drafts_change_no_token_over_keys_in_codes(
    variant: str, kv: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy and sampled, past the exact window, in captured graphs; some drafts are accepted and some are not."""
    sizes = {"head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2}
    save(variant, tmp_path, **LESS.get(variant, {}) | sizes)
    model, draft = load(tmp_path / "model")
    own = model.blocks[-1].state_dict()
    draft.blocks[0].load_state_dict(own)  # a draft that resembles the model is right now and then
    make = maker("captured", model, monkeypatch, page_size=16, max_context=128, kv=kv)
    params = [SamplingParams(max_tokens=20, temperature=i % 2 * 0.5, seed=i) for i in range(len(PROMPTS))]
    plain = make().generate(PROMPTS, params)
    engine = make(draft=partial(HeadDrafter, draft), draft_tokens=3, max_batch=3)
    assert engine.generate(PROMPTS, params) == plain
    assert 0 < engine.stats.accepted_tokens < engine.stats.drafted_tokens


@pytest.mark.parametrize(
    ("variant", "capture", "count"),
    [("qwen3_5", "eager", 1), ("qwen3_5", "captured", 3), ("qwen3_5", "captured", "auto"), ("glm4_moe", "captured", 3),
     ("glm4_moe", "eager", 3), ("deepseek_v3", "captured", 3), ("glm_moe_dsa", "captured", 2),
     ("nemotron_h", "captured", 3)],
)  # fmt: skip
def test_drafts_change_no_token(
    variant: str, count: Any, capture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(variant, tmp_path, **LESS.get(variant, {}))
    model, draft = load(tmp_path / "model")
    make = maker(capture, model, monkeypatch)
    plain = make().generate(PROMPTS, PARAMS)
    engine = make(draft=partial(HeadDrafter, draft), draft_tokens=count, max_batch=3)
    again = [prompt + new[:6] for prompt, new in zip(PROMPTS, plain, strict=True)]  # in part known, by their pages
    with engine.executor.running(), closing(engine.scheduler.open()) as scheduler:
        for texts, wanted in ((PROMPTS, plain), (again, make().generate(again, PARAMS))):
            requests = [engine.request(text, params) for text, params in zip(texts, PARAMS, strict=True)]
            for request in requests:
                scheduler.add(request)
            while not scheduler.idle:
                scheduler.step()
            assert [request.output for request in requests] == wanted
    assert engine.stats.shared_tokens
    assert count == "auto" or engine.stats.drafted_tokens


@pytest.mark.parametrize("variant", ["qwen3_5", "glm4_moe", "deepseek_v32", "nemotron_h"])
def test_its_drafts_are_the_references(variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits behind a text is what the reference names behind it: no input is shifted, no norm left out."""
    hf, reference = save(variant, tmp_path)
    model, draft = load(tmp_path / "model")
    engine = maker("eager", model, monkeypatch)(draft=partial(HeadDrafter, draft), draft_tokens=1, max_batch=1)
    for prompt in PROMPTS:
        (new,) = engine.generate([prompt], SamplingParams(max_tokens=5))
        text = torch.tensor([prompt + new])
        with torch.inference_mode():
            hidden = hf.model(text, use_cache=False).last_hidden_state
            wanted = hf.lm_head(reference(hf, hidden[:, :-1], text[:, 1:]))[0].argmax(-1).tolist()
        assert int(engine.executor.speculation.state.drafts[1, 0]) == wanted[-1]


@pytest.mark.parametrize("variant", ["glm4_moe", "deepseek_v3"])
@torch.inference_mode()
def test_transformers_reads_the_same_layer_from_the_same_file(variant: str, tmp_path: Path) -> None:
    """Its own MtpModel, by its own names: the logits of the token behind a prompt, and of the one after that."""
    import transformers
    from transformers.cache_utils import MtpCache
    from transformers.modeling_layers import MtpModel

    save(variant, tmp_path)
    hf = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="eager")
    hf._keys_to_ignore_on_load_unexpected = {r"model\.layers\.3\..*"}  # of this depth, as of the published ones
    theirs = MtpModel.from_pretrained(hf)
    model, draft = load(tmp_path / "model")
    text = torch.randint(0, 131, (1, 21), generator=torch.Generator().manual_seed(2))
    hidden = hf.model(text[:, :-1], use_cache=False).last_hidden_state
    cache, features = Decoder(draft, rows=1, max_context=64, spare=7).cache, model(text[:, :-1], model.dense_attention)
    seen = MtpCache(config=hf.config.get_mtp_config())
    at = torch.arange(1, 21)[None]
    told, logits, _ = theirs(text[:, 1:], hidden, torch.ones(1, 20), at, seen)
    cache.counts.fill_(20)
    features = draft(text[:, 1:], features, cache)
    got = draft.logits(features[:, -1])
    torch.testing.assert_close(got, logits[:, 0], atol=1e-3, rtol=1e-4)
    assert got.argmax(-1).tolist() == told[0].tolist()


@torch.inference_mode()
def test_it_is_read_as_published_in_fp8(tmp_path: Path) -> None:
    """DeepSeek's form: linears of the block in blocks of 128 x 128 with a scale, the projection not."""
    hf, reference = save(
        "deepseek_v3", tmp_path, moe_intermediate_size=128, n_routed_experts=4, n_group=1, topk_group=1
    )
    with Checkpoint.open(tmp_path / "model") as source:
        tensors = {name: source.tensor(name) for name in source.names}
        told = source.config
    kept = "eh_proj", "embed_tokens", "shared_head", "mlp.gate."
    for name in [name for name in tensors if name.startswith("model.layers.3.")]:
        if tensors[name].dim() == 2 and not any(part in name for part in kept):
            scale = tensors[name].abs().amax() / 448
            tensors[name] = (tensors[name] / scale).to(torch.float8_e4m3fn)
            n, k = tensors[name].shape
            tensors[f"{name}_scale_inv"] = scale.repeat(-(-n // 128), -(-k // 128))
    form = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    write_checkpoint(tmp_path / "fp8", told | {"quantization_config": form}, tensors.items())
    model, draft = load(tmp_path / "fp8")
    assert draft.config.quantization is not None
    text = torch.randint(0, 131, (1, 20), generator=torch.Generator().manual_seed(2))
    hidden = hf.model(text[:, :-1], use_cache=False).last_hidden_state
    x = draft.inputs(model.embed(text[:, 1:]), hidden)
    got = draft.run(x, model.dense_attention).normed(draft.norm, draft.config.eps)[0]
    want = reference(hf, hidden, text[:, 1:])
    assert 1e-4 < (got - want).norm() / want.norm() < 0.15


@pytest.mark.parametrize("variant", ["glm_moe_dsa", "nemotron_h"])
def test_an_iteration_may_be_captured(variant: str, tmp_path: Path) -> None:
    """`onegraph check`, in simulation: replays equal eager runs, nothing is stale."""
    save(variant, tmp_path, **LESS.get(variant, {}))

    def factory() -> tuple[Callable[[], Any], Callable[[int], tuple[()]]]:
        with Checkpoint.open(tmp_path / "model") as checkpoint:
            model = Llama.load(checkpoint, "cuda:0", max_context=256)
            draft = partial(HeadDrafter, DraftLayer.load(checkpoint, model))
        engine = Engine(model, max_batch=2, max_context=128, page_size=64, draft=draft, draft_tokens=2, capture=False)
        runner = engine.executor.step("decode", drafts=2)
        rows = round_inputs(torch.Generator().manual_seed(1), 60, torch.arange(1, 5).view(2, 2))
        runner.load(**rows | {"limits": rows["positions"] + 60, "drawn": rows["drawn"] % 131})

        def step() -> Any:
            with reference_ops():
                return runner.replay(2)

        return step, lambda index: ()

    report = check_step(factory, steps=5)
    assert [f"{f.code} {f.path}:{f.line} {f.message}" for f in report.findings] == []
    assert report.facts["replay equals eager"]


@pytest.mark.parametrize("variant", ["qwen3_5", "glm4_moe", "deepseek_v3", "nemotron_h"])
def test_ranks_share_the_layer(variant: str, tmp_path: Path) -> None:
    """Text and drafts of two ranks are those of one device."""
    save(variant, tmp_path, **LESS.get(variant, {}))
    with Checkpoint.open(tmp_path / "model") as checkpoint:
        one, two = Llama.load(checkpoint), Ranks.load(checkpoint, ["cpu"] * 2)
        drafts = [DraftLayer.load(checkpoint, rank) for rank in (one, *two.ranks)]
    halves = [layer.blocks[-1].mlp for layer in drafts]
    down = [mlp.experts.down if variant != "qwen3_5" else mlp.down.linear for mlp in halves]
    assert down[1].in_features == down[2].in_features == down[0].in_features // 2
    sizes: dict[str, Any] = {"max_batch": 2, "max_context": 64, "page_size": 16, "draft_tokens": 3}
    makes = [partial(HeadDrafter, draft) for draft in drafts]
    engines = Engine(one, **sizes, draft=makes[0]), Engine(two, **sizes, draft=makes[1:])
    given = PROMPTS[::3], PARAMS[::3]  # greedy and sampled
    texts = [engine.generate(*given) for engine in engines]
    assert texts[0] == texts[1] == Engine(one, max_batch=2, max_context=64, page_size=16).generate(*given)
    waiting = [engine.executor.speculation.state.drafts[1:] for engine in engines]  # type: ignore[union-attr]
    assert torch.equal(*waiting)
    assert engines[0].stats.drafted_tokens == engines[1].stats.drafted_tokens > 0


@pytest.mark.parametrize(
    ("variant", "without", "message"),
    [
        ("qwen3_5", "mtp.", "has no tensor 'mtp.fc.weight', so it comes without its draft layer"),
        ("qwen3_5", "mtp.pre_fc_norm_hidden", "mtp.pre_fc_norm_hidden.weight"),
        ("qwen3_5", "mtp.layers.0.self_attn.k_proj", "mtp.layers.0.self_attn.k_proj.weight"),
        ("glm4_moe", "layers.3.", "has no tensor 'model.layers.3.eh_proj.weight', so it comes without its draft layer"),
        ("deepseek_v3", "layers.3.shared_head.norm", "model.layers.3.shared_head.norm.weight"),
        ("nemotron_h", "mtp.", "has no tensor 'mtp.layers.0.eh_proj.weight', so it comes without its draft layer"),
        ("nemotron_h", "mtp.layers.1.final_layernorm", "mtp.layers.1.final_layernorm.weight"),
        ("nemotron_h", "mtp.layers.1.mixer.experts.3.up", "mtp.layers.1.mixer.experts.3.up_proj.weight"),
        ("deepseek_v3", "layers.3.self_attn.kv_b_proj", "model.layers.3.self_attn.kv_b_proj.weight"),
    ],
)
def test_what_is_missing_is_named(variant: str, without: str, message: str, tmp_path: Path) -> None:
    save(variant, tmp_path, without=without)
    with Checkpoint.open(tmp_path / "model") as checkpoint:
        model = Llama.load(checkpoint)
        with pytest.raises(CheckpointError, match=message):
            DraftLayer.load(checkpoint, model)


def test_embeddings_of_its_own_are_refused(tmp_path: Path) -> None:
    save("qwen3_5", tmp_path)
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"mtp_use_dedicated_embeddings": True}))
    with (
        Checkpoint.open(tmp_path / "model") as checkpoint,
        pytest.raises(ValueError, match="mtp_use_dedicated_embeddings is True; supported: False"),
    ):
        Llama.load(checkpoint)


@pytest.mark.parametrize("pattern", ["ME", "E", "*M"])
def test_halves_of_other_kinds_are_named(pattern: str, tmp_path: Path) -> None:
    save("nemotron_h", tmp_path)
    with Checkpoint.open(tmp_path / "model") as checkpoint:
        told = {key: value for key, value in checkpoint.config.items() if key != "mtp_layers_block_type"}
    told["mtp_hybrid_override_pattern"] = pattern
    with pytest.raises(ValueError, match=r"mtp_layers_block_type is .* set num_nextn_predict_layers to 0 to run the"):
        LlamaConfig.from_dict(told)
    assert LlamaConfig.from_dict(told | {"num_nextn_predict_layers": 0}).draft_kinds == ()
