"""Gemma 4's assistants against transformers', and in the engine over the target's own cache."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from engines import maker
from models import SIZES, VARIANTS, save_hf
from onegraph import LLM
from onegraph.api.memory import Memory
from onegraph.check import check_step
from onegraph.engine.draft_assistant import AssistantDrafter
from onegraph.engine.engine import Engine
from onegraph.engine.params import SamplingParams
from onegraph.formats.checkpoint import Checkpoint, write_checkpoint
from onegraph.models.assistant import Assistant
from onegraph.models.llama import Llama
from onegraph.models.ranks import Ranks
from onegraph.nn.attention import PagedCache
from onegraph.nn.turboquant import TurboQuantCache
from onegraph.ops.registry import reference_ops
from test_speculate import round_inputs
from test_wrapper import save_tokenizer

PROMPTS = [[7, 1, 8, 2, 8, 1, 8, 2, 8, 4, 5, 9], [2], [100, 0, 3], [5] * 20]
PARAMS = [SamplingParams(max_tokens=8 + i, temperature=i % 2 * 1.0, seed=i) for i in range(len(PROMPTS))]
# Of the target: heads of keys, sizes, and the window.
SAME = "head_dim", "global_head_dim", "num_key_value_heads", "num_global_key_value_heads", "attention_k_eq_v"


def hf_assistant(target: Any, variant: str, ordered: bool, **changes: Any) -> Any:
    import transformers

    same = {key: value for key, value in (SIZES | VARIANTS[variant][1] | changes).items() if key in SAME}
    told = {"use_ordered_embeddings": ordered, "num_centroids": 131 if ordered else 2048}
    told |= {"centroid_intermediate_top_k": 9} if ordered else {}
    text = transformers.Gemma4TextConfig(
        vocab_size=131, hidden_size=40, intermediate_size=56, num_hidden_layers=4,
        layer_types=["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
        num_attention_heads=4, num_kv_shared_layers=4, hidden_size_per_layer_input=0, vocab_size_per_layer_input=0,
        sliding_window=11, rope_parameters=target.config.rope_parameters, max_position_embeddings=256,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
        **same,
    )  # fmt: skip
    config = transformers.Gemma4AssistantConfig(
        text_config=text, backbone_hidden_size=target.config.hidden_size, **told
    )
    config._attn_implementation = text._attn_implementation = "eager"
    torch.manual_seed(7)
    model = transformers.Gemma4AssistantForCausalLM(config).float().eval()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith("token_ordering"):
                tensor.copy_(torch.randperm(131))
            elif tensor.dim() == 1:
                tensor.copy_(0.7 + 0.6 * torch.rand(tensor.shape))
            else:
                tensor.copy_(torch.randn(tensor.shape) * 1.5 / tensor.shape[1] ** 0.5)
    model.tie_weights()
    return model


def save(variant: str, path: Path, *, ordered: bool = False, **changes: Any) -> tuple[Any, Any]:
    target = save_hf(variant, path / "target", **changes)
    assistant = hf_assistant(target, variant, ordered, **changes)
    assistant.save_pretrained(path / "assistant")
    return target, assistant


def load(path: Path) -> tuple[Llama, Assistant]:
    with Checkpoint.open(path / "target") as checkpoint:
        model = Llama.load(checkpoint)
    with Checkpoint.open(path / "assistant") as checkpoint:
        return model, Assistant.load(checkpoint, model)


@pytest.mark.parametrize(("variant", "ordered"), [("gemma4", False), ("gemma4_e", True), ("gemma4_moe", False)])
@torch.inference_mode()
def test_it_computes_what_transformers_does(variant: str, ordered: bool, tmp_path: Path) -> None:
    """Three drafts behind a text longer than the window, from the target's keys and its last hidden state."""
    target, theirs = save(variant, tmp_path, ordered=ordered)
    model, ours = load(tmp_path)
    text = torch.randint(0, 131, (1, 30), generator=torch.Generator().manual_seed(3))
    told = target.model(text[:, :-1], use_cache=False, return_shared_kv_states=True)
    hidden = told.last_hidden_state[:, -1:]
    cache = model.new_cache(rows=1, pages=4, page_size=16, pages_per_row=3)
    assert isinstance(cache, PagedCache)
    cache.block_table.copy_(torch.tensor([[1, 2, 3]], dtype=torch.int32))
    cache.counts.fill_(29)
    own = model(text[:, :-1], cache)[:, -1:]
    torch.testing.assert_close(own, hidden, atol=1e-4, rtol=1e-4)
    cache.positions.fill_(28)
    cache.counts.fill_(1)
    token, place = text[:, -1], torch.tensor([[29]])
    for _ in range(3):
        x = torch.cat((target.get_input_embeddings()(token[:, None]), hidden), dim=-1)
        want = theirs(inputs_embeds=x, position_ids=place, shared_kv_states=dict(told.shared_kv_states))
        own, logits = ours(token, own, cache)
        torch.testing.assert_close(own, want.last_hidden_state, atol=1e-4, rtol=1e-4)
        named = logits.isfinite()
        assert named.sum() == (9 if ordered else 131)
        torch.testing.assert_close(logits[named], want.logits[:, 0][named], atol=1e-3, rtol=1e-4)
        assert logits.argmax(-1).tolist() == want.logits[:, 0].argmax(-1).tolist()
        token, hidden = logits.argmax(-1), want.last_hidden_state


@pytest.mark.parametrize(
    ("variant", "capture", "count", "kv"),
    [("gemma4", "eager", 1, None), ("gemma4", "captured", 3, None), ("gemma4_e", "captured", 2, None),
     ("gemma4", "captured", "auto", None), ("gemma4", "captured", 3, "turboquant:4,window=16"),
     ("gemma4", "eager", 3, "turboquant:3,mode=full")],
)  # fmt: skip
def test_drafts_change_no_token(
    variant: str, capture: str, count: Any, kv: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy and sampled; in a cache of codes the layers that the assistant reads stay exact."""
    save(variant, tmp_path, **({"head_dim": 64, "global_head_dim": 128} if kv else {}))
    model, assistant = load(tmp_path)
    make = maker(capture, model, monkeypatch, page_size=16, max_context=64, kv=kv)
    plain = make().generate(PROMPTS, PARAMS)
    engine = make(draft=partial(AssistantDrafter, assistant), draft_tokens=count, max_batch=3)
    if kv is not None:
        cache = engine.executor.cache
        assert isinstance(cache, TurboQuantCache)
        assert [i for i, layer in enumerate(cache.layers) if layer is None] == sorted(assistant.sources) == [4, 5]
    assert engine.generate(PROMPTS, PARAMS) == plain
    assert count == "auto" or engine.stats.drafted_tokens > 0


@pytest.mark.parametrize("variant", ["gemma4", "gemma4_e"])
def test_its_drafts_are_those_of_transformers(variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits behind a text is what transformers' assistant names behind it."""
    target, theirs = save(variant, tmp_path)
    model, assistant = load(tmp_path)
    engine = maker("eager", model, monkeypatch)(draft=partial(AssistantDrafter, assistant), draft_tokens=3, max_batch=1)
    for prompt in PROMPTS:
        (new,) = engine.generate([prompt], SamplingParams(max_tokens=6))
        text = torch.tensor([prompt + new])
        with torch.inference_mode():
            told = target.model(text[:, :-1], use_cache=False, return_shared_kv_states=True)
            token, hidden, wanted = text[:, -1:], told.last_hidden_state[:, -1:], []
            for _ in range(3):
                x = torch.cat((target.get_input_embeddings()(token), hidden), dim=-1)
                place = torch.tensor([[text.shape[1] - 1]])
                out = theirs(inputs_embeds=x, position_ids=place, shared_kv_states=dict(told.shared_kv_states))
                token, hidden = out.logits.argmax(-1), out.last_hidden_state
                wanted.append(int(token))
        assert engine.executor.speculation is not None
        assert engine.executor.speculation.state.drafts[1].tolist() == wanted


def test_an_iteration_may_be_captured(tmp_path: Path) -> None:
    """`onegraph check`, in simulation: replays equal eager runs, nothing is stale."""
    save("gemma4", tmp_path)

    def factory() -> tuple[Callable[[], Any], Callable[[int], tuple[()]]]:
        with Checkpoint.open(tmp_path / "target") as checkpoint:
            model = Llama.load(checkpoint, "cuda:0", max_context=256)
        with Checkpoint.open(tmp_path / "assistant") as checkpoint:
            draft = partial(AssistantDrafter, Assistant.load(checkpoint, model))
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


def test_ranks_share_it(tmp_path: Path) -> None:
    """Text and drafts of two ranks are those of one device."""
    save("gemma4", tmp_path)
    one, alone = load(tmp_path)
    with Checkpoint.open(tmp_path / "target") as checkpoint:
        two = Ranks.load(checkpoint, ["cpu"] * 2)
    with Checkpoint.open(tmp_path / "assistant") as checkpoint:
        makes = [partial(AssistantDrafter, Assistant.load(checkpoint, rank)) for rank in two.ranks]
    sizes: dict[str, Any] = {"max_batch": 2, "max_context": 64, "page_size": 16, "draft_tokens": 3}
    engines = Engine(one, **sizes, draft=partial(AssistantDrafter, alone)), Engine(two, **sizes, draft=makes)
    given = PROMPTS[::3], PARAMS[::3]  # greedy and sampled
    texts = [engine.generate(*given) for engine in engines]
    assert texts[0] == texts[1] == Engine(one, max_batch=2, max_context=64, page_size=16).generate(*given)
    waiting = [engine.executor.speculation.state.drafts[1:] for engine in engines]  # type: ignore[union-attr]
    assert torch.equal(*waiting)


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    save("gemma4", tmp_path)
    with Checkpoint.open(tmp_path / "assistant") as checkpoint:
        told = checkpoint.config
        text = told["text_config"]
        model = Llama.load(Checkpoint.open(tmp_path / "target"))
        for changes, message in (
            ({"backbone_hidden_size": 64}, "backbone_hidden_size is 64 and vocab_size 131; the model has 72 and 131"),
            ({"text_config": text | {"num_key_value_heads": 4}}, "the model keeps"),
            ({"text_config": None}, "text_config is None"),
        ):
            checkpoint.config = told | changes
            with pytest.raises(ValueError, match=message):
                Assistant.load(checkpoint, model)
        checkpoint.config = told
        tensors = [(name, checkpoint.tensor(name)) for name in checkpoint.names if name != "pre_projection.weight"]
        write_checkpoint(tmp_path / "less", told, tensors)
        with pytest.raises(ValueError, match=r"missing: 'pre_projection\.weight'"):
            Assistant.load(Checkpoint.open(tmp_path / "less"), model)
        save_hf("llama", tmp_path / "llama")
        with pytest.raises(ValueError, match="a gemma4_assistant drafts for Gemma 4; the model is 'llama'"):
            Assistant.load(checkpoint, Llama.load(Checkpoint.open(tmp_path / "llama")))


def test_it_is_named_by_its_path(tmp_path: Path) -> None:
    """Through the API, with memory counted."""
    save("gemma4", tmp_path)
    save_tokenizer(tmp_path / "target")
    params, told = SamplingParams(max_tokens=10, temperature=0), list[Memory]()
    sizes: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 64, "on_memory": told.append}
    with LLM(tmp_path / "target", **sizes) as llm:
        plain = llm.generate("1 2 3 5 8 13", params).text
    with LLM(tmp_path / "target", speculative=tmp_path / "assistant", num_speculative_tokens=2, **sizes) as llm:
        assert llm.generate("1 2 3 5 8 13", params).text == plain
        assert llm.stats.drafted_tokens
    with Checkpoint.open(tmp_path / "assistant") as checkpoint:
        assert told[1].weights - told[0].weights == checkpoint.nbytes
    assert told[1].cache == told[0].cache
