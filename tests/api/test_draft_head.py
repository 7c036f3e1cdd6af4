"""`onegraph draft-head`: a head that is trained on a model's own text, and what is said where it cannot be."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fuzz import tiny
from fuzz.run import invoke
from models import smollm2_gguf
from onegraph import LLM, SamplingParams
from onegraph.api import draft_head, draft_prompts
from onegraph.api.draft_head import KEEPER, REPEAT, DraftHead, tapped, train_head, unseen
from onegraph.api.draft_prompts import COPIED, PIECE, PROMPT, TASKS, Pieces, Prompts
from onegraph.engine.engine import Engine
from onegraph.engine.params import Stats
from onegraph.formats.checkpoint import write_checkpoint
from onegraph.formats.digests import sha256
from onegraph.models.eagle import TAPS

OPTIONS: dict[str, Any] = {"texts": 32, "length": 24, "ahead": 3, "batch": 8, "device": "cpu", "vocabulary": 200}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("draft_head") / "model")


@pytest.fixture(scope="module")
def made(model: Path) -> DraftHead:
    return train_head(model, model.parent / "head", minutes=5, steps=60, rate=3e-3, **OPTIONS)


def test_training_helps(made: DraftHead) -> None:
    """A random model's next tokens can hardly be known (test_eagle.py has one known by heart); some of it can."""
    assert made.after.loss < 0.95 * made.before.loss
    assert 0.5 < made.coverage <= 1
    assert made.texts == 32
    assert made.steps == 60
    assert made.learnt > made.tokens, "of several epochs"
    for found in made.unseen.values():
        assert len(found.accepted) == 3
        assert found.same_texts == found.texts


def test_the_head_drafts(model: Path, made: DraftHead) -> None:
    """As users ask for it; it may name fewer tokens than the model has, and the text is the one without."""
    asked = [SamplingParams(max_tokens=20), SamplingParams(max_tokens=20, temperature=1.0, seed=4)]
    for params in asked:
        with LLM(model, device="cpu", max_model_len=128) as llm:
            expected = llm.generate("the thing", params).tokens
        for tokens in ("auto", 3):
            with LLM(
                model,
                device="cpu",
                max_model_len=128,
                speculative=f"eagle:{made.output}",
                num_speculative_tokens=tokens,
            ) as llm:
                assert llm.generate("the thing", params).tokens == expected
                assert llm.stats.drafted_tokens > 0 or tokens == "auto", "for so small a model drafts need not pay"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_goes_on_from_a_head(model: Path, made: DraftHead, tmp_path: Path, dtype: str) -> None:
    """It begins where the head is, keeps its vocabulary and config.json, and tells where it began."""
    options = OPTIONS | {"vocabulary": None, "dtype": dtype}
    again = train_head(model, tmp_path / "head", init=made.output, minutes=5, steps=10, rate=1e-3, **options)
    if dtype == "float32":
        assert again.before.loss == pytest.approx(made.after.loss, rel=1e-2), "the file holds bfloat16"
    assert again.after.loss < again.before.loss
    assert again.vocabulary == made.vocabulary
    files = [Path(head.output) for head in (made, again)]
    assert files[0].joinpath("config.json").read_text() == files[1].joinpath("config.json").read_text()
    named = [load_file(path / "model.safetensors")["d2t"].tolist() for path in files]
    assert named[0] == named[1]
    about = json.loads((files[1] / "onegraph.json").read_text())["init"]
    assert about == {"name": "head", "sha256": {"model.safetensors": sha256(files[0] / "model.safetensors")}}


def test_heads_that_training_cannot_go_on_from(model: Path, made: DraftHead, tmp_path: Path) -> None:
    """Each is said in a line, before any text is written."""
    head = Path(made.output)
    config, tensors = json.loads((head / "config.json").read_text()), load_file(head / "model.safetensors")
    layer = config["transformer_layer_config"]
    flat = {key: config[key] for key in ("draft_vocab_size", "target_hidden_size")} | layer
    fewer = {name: tensor for name, tensor in tensors.items() if name != "norm.weight"}
    bias = tensors | {"layers.0.self_attn.o_proj.bias": torch.zeros(layer["hidden_size"])}
    wrong: list[tuple[str, dict[str, Any], dict[str, torch.Tensor], str]] = [
        ("layout", flat, tensors, "is in EAGLE's layout; training goes on from heads in speculators' layout"),
        ("taps", config | {TAPS: [1, 2, 9]}, tensors, r"behind the layers \[0, 1, 8\]; the model has 0 to 1"),
        (
            "vocabulary",
            config | {"transformer_layer_config": layer | {"vocab_size": 9999}},
            tensors,
            "vocab_size is 9999, the model's is",
        ),
        ("wide", config | {"target_hidden_size": 999}, tensors, "target_hidden_size is 999, the model's is"),
        ("fewer", config, fewer, "1 missing: 'norm.weight'"),
        (
            "bias",
            config | {"transformer_layer_config": layer | {"attention_bias": True}},
            bias
            | {
                f"layers.0.self_attn.{n}_proj.bias": torch.zeros(len(tensors[f"layers.0.self_attn.{n}_proj.weight"]))
                for n in "qkv"
            },
            "4 unexpected: 'layers.0.self_attn.k_proj.bias'",
        ),
    ]
    small = ["--device", "cpu", "--length", 24]
    for name, changed, held, said in wrong:
        write_checkpoint(tmp_path / name, changed, held.items())
        words = ["draft-head", model, tmp_path / "out", "--init", tmp_path / name, *small]
        status, out, errors = invoke(words)
        assert (status, out, errors.count("\n")) == (2, "", 1), errors
        assert re.search(rf"--init: .*{said}", errors), errors
    words = ["draft-head", model, tmp_path / "out", "--init", head, *small, "--vocabulary", 100]
    status, out, errors = invoke(words)
    assert (status, out, errors.count("\n")) == (2, "", 1)
    assert "--vocabulary: got 100 with init; a trained head keeps its vocabulary" in errors
    assert not (tmp_path / "out").exists()


def test_the_command_line(model: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick thing in the hat, and another thing; " * 200)
    words = ["draft-head", model, tmp_path / "head", "--text", text, "--minutes", 1, "--texts", 24, "--length", 16]
    words += ["--steps", 2, "--device", "cpu", "--ahead", 2]
    status, out, errors = invoke([*words, "--json"])
    assert (status, "step 2: loss" in errors) == (0, True)
    assert re.search(r"2 steps of 4 texts in \d+ s, [\d.]+ a second; learnt from \d+ tokens", errors)
    found = json.loads(out)
    assert set(found["unseen"]) == {"code", "chat", "repetition"}
    assert found["seconds"] < 60
    status, out, errors = invoke(words)
    assert (status, out) == (2, "")
    assert "head: exists already" in errors
    command = ["generate", model, "--raw", "--prompt", "the", "--max-tokens", 9, "--device", "cpu", "--json"]
    drafted = json.loads(
        invoke([*command, "--speculative", f"eagle:{tmp_path / 'head'}", "--num-speculative-tokens", 2])[1]
    )
    assert drafted["outputs"] == json.loads(invoke(command)[1])["outputs"]
    assert drafted["drafted_tokens"] > 0


@pytest.mark.parametrize(
    ("draft", "said"),
    [
        ("eagle:", "--speculative: 'eagle:' names no head; give its directory, 'eagle:PATH'"),
        ("eagle:{model}", "--speculative: config.json: has neither speculators_model_type nor draft_vocab_size"),
        ("eagle:{model}/nowhere", "nowhere: no such model"),
        (
            "mtp",
            "--speculative: 'mtp' are the draft layers of DeepSeek, GLM, Nemotron 3, Qwen3-Next and Qwen3.5; a 'llama' "
            "has none",
        ),
    ],
)
def test_what_cannot_draft_is_said_in_a_line(model: Path, draft: str, said: str) -> None:
    words = [
        "generate",
        model,
        "--raw",
        "--prompt",
        "the",
        "--device",
        "cpu",
        "--speculative",
        draft.format(model=model),
    ]
    status, out, errors = invoke(words)
    assert (status, out) == (2, "")
    assert said in errors
    assert errors.count("\n") == 1


def test_too_little_text_is_said(model: Path, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("the thing")
    with pytest.raises(ValueError, match=r"text: got 9 characters; allowed is 2080 and more"):
        train_head(model, tmp_path / "head", text=[tmp_path / "short.txt"], **OPTIONS)
    assert not (tmp_path / "head").exists()


def test_held_out_pieces_are_of_parts_of_their_own(tmp_path: Path) -> None:
    """No word of a held-out piece is in one that is not; either kind comes from all over the text."""
    (tmp_path / "text.txt").write_text(" ".join(f"w{i:06d}" for i in range(6000)))
    pieces = Pieces([tmp_path / "text.txt"], 0)
    words = {held: {w for _ in range(300) for w in pieces.piece(held).split() if len(w) == 7} for held in (True, False)}
    assert not words[True] & words[False]
    assert all(max(found) > "w005000" > "w001000" > min(found) for found in words.values())
    assert all(PIECE // 2 - 9 <= len(pieces.piece(False)) <= PIECE for _ in range(100))


def test_what_a_head_learns_from(model: Path) -> None:
    """The model's own answers to prompts of ours, half of them greedy; the report's prompts are none of them, and where
    an answer begins is known."""
    with LLM(model, device="cpu", max_num_seqs=8, max_model_len=256) as llm:
        ran: list[Stats] = []
        prompts = Prompts(llm, Pieces([], 3), 12, 3, ran.append)
        found = [*prompts.answered(24), *prompts.answered(24)]
        same = Prompts(llm, Pieces([], 3), 12, 3)
        assert found == [*same.answered(24), *same.answered(24)]
        assert [held for held, _ in found] == [i % 12 == 0 for i in range(48)]
        assert len({tuple(text.tokens[: text.prompt]) for _, text in found}) > 40
        assert all(len(text.tokens) - 12 <= text.prompt <= PROMPT for _, text in found)
        likeliest = llm.engine.generate(
            [text.tokens[: text.prompt] for _, text in found], SamplingParams(max_tokens=12)
        )
        assert (
            12 < sum(text.tokens[text.prompt :] == best for best, (_, text) in zip(likeliest, found, strict=True)) < 36
        )
        assert all(stats.prefill_tokens for stats in ran)
        asked = {tuple(prompt) for kind in unseen(llm.tokenizer).values() for prompt in kind}
        assert not asked & {tuple(text.tokens[: text.prompt]) for _, text in found}
    assert not any(REPEAT.strip() in task or KEEPER in task for task in TASKS)


def test_some_answers_are_the_passage_itself(model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Which a random model would never write. Where a prompt has no room for it, none is cut."""
    passage = tmp_path / "passage.txt"
    passage.write_text(" ".join(f"{i} rivers" for i in range(1000)))
    for room in (240, PROMPT // 2):
        monkeypatch.setattr(draft_prompts, "PROMPT", room)
        with LLM(model, device="cpu", max_num_seqs=8, max_model_len=256) as llm:
            found = [text for _, text in Prompts(llm, Pieces([passage], 3), 12, 3).answered(96)]
            said = [(llm.tokenizer.decode(text.tokens[: text.prompt]), text.tokens[text.prompt :]) for text in found]
            copied = [len(answer) == 12 and llm.tokenizer.decode(answer) in prompt for prompt, answer in said]
        assert sum(copied) > 96 * COPIED / 4 if room > PROMPT else not any(copied)


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("ONEGRAPH_SMOLLM2_4BIT"), reason="ONEGRAPH_SMOLLM2_4BIT is not set")
def test_the_head_in_this_repository_drafts_for_the_demo() -> None:
    """More than two tokens per verify pass on code that it never saw; no text changes."""
    head, params = Path(__file__).parents[2] / "heads/smollm2-135m-instruct-4bit", SamplingParams(max_tokens=96)
    options: dict[str, Any] = {"device": "cpu", "dtype": torch.float32, "max_context": 256}
    path, found, rounds = os.environ["ONEGRAPH_SMOLLM2_4BIT"], list[list[int]](), dict[str, float]()
    with LLM(path, max_num_seqs=1, speculative=f"eagle:{head}", num_speculative_tokens=3, **options) as llm:
        asked = {name: prompts[0] for name, prompts in unseen(llm.tokenizer).items()}
        for name, prompt in asked.items():
            found += llm.engine.generate([prompt], params)
            stats = llm.engine.stats
            rounds[name] = stats.decode_tokens / stats.decode_steps
        plain = Engine(llm.engine.model, max_batch=len(asked), max_context=256)
        assert plain.generate(list(asked.values()), params) == found
    assert rounds["code"] > 2
    assert min(rounds.values()) > 1.3


def test_layers_that_are_tapped() -> None:
    assert tapped(30) == (1, 14, 26)
    assert tapped(2) == (0, 0, 1)
    for depth in range(1, 100):
        assert all(0 <= i < depth for i in tapped(depth))


@pytest.mark.gpu
@pytest.mark.skipif(smollm2_gguf() is None, reason="SmolLM2 is not here")
def test_a_head_of_the_real_model_on_a_gpu(tmp_path: Path) -> None:
    """A minute: training does not starve, drafts are right more often, and texts stay but for near-ties."""
    gguf = smollm2_gguf()
    assert gguf is not None
    made = train_head(gguf, tmp_path / "head", minutes=1, device="cuda")
    assert made.steps / made.training_seconds > 5
    assert made.seconds < 90
    assert made.nbytes < 20e6
    assert made.after.tokens > 1.3 > made.before.tokens
    assert sum(f.same_texts for f in made.unseen.values()) >= 3


def test_progress_counts_the_texts_that_the_clock_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    class Writes:
        def __init__(self, *_: Any) -> None: ...

        def answered(self, some: int) -> list[Any]:
            now[0] += some  # a text a second
            return []

    monkeypatch.setattr(draft_head, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(draft_head, "Prompts", Writes)

    def told(count: int) -> list[tuple[int, int]]:
        now[0], found = 0.0, list[tuple[int, int]]()
        clock = draft_head._Clock(1000.0, started=0.0)  # 350 seconds are for texts

        def report(what: str, done: int, total: int) -> None:
            found.append((done, total))

        assert not list(draft_head._written(None, None, count, 100, 8, 0, clock, report))
        return found

    assert told(1 << 15) == [(100, 350), (200, 350), (300, 350), (400, 400)]
    assert told(150) == [(100, 150), (150, 150)]
