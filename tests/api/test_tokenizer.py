"""Text to ids and back, chat templates in their cage, and streamed text that is never broken UTF-8."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from fuzz import tiny
from models import smollm2_gguf
from onegraph.api.chat import ChatTemplate
from onegraph.api.tokenizer import Tokenizer
from onegraph.formats.checkpoint import Checkpoint, CheckpointError

CHAT = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny.write_model(tmp_path / "m")


def tokenizer(path: Path) -> Tokenizer:
    return Tokenizer(Checkpoint.open(path))


# Ids that transformers' AutoTokenizer gives for the GGUF of SmolLM2-135M-Instruct, made once by hand (it takes 9 s),
# but for the last: transformers 5.17 drops the split at digits, which only shows at digits beyond ASCII; those ids are
# llama.cpp's rule for "smollm" (\p{N} alone, then GPT-2's expression).
SMOLLM2 = {
    "What is the capital of France?": [1780, 314, 260, 3575, 282, 4649, 47],
    "2024, 15% of 1,000": [34, 32, 34, 36, 28, 216, 33, 37, 21, 282, 216, 33, 28, 32, 32, 32],
    "don't you'll WE'VE  it's": [12420, 982, 346, 3060, 26587, 23, 18525, 216, 357, 506],
    "  indented\n\n\tcode = x[20]\r\n": [216, 641, 6574, 1116, 197, 4635, 446, 1792, 75, 34, 32, 77, 2738],
    "naïve café 東京 😀🏽 ñ": [3546, 46494, 37366, 17097, 247, 126, 16736, 122, 40303, 218, 10813, 233, 138, 5549, 126],
    "<|im_start|>user\nHi<|im_end|>\n<|endoftext|>": [1, 4093, 198, 26843, 2, 198, 0],
    "a\u00a0b\u200bc": [81, 15442, 82, 321, 229, 83],
    "١٢٣ Ⅷ ½": [164, 111, 164, 112, 164, 113, 216, 173, 223, 117, 216, 16738],
}


def test_smollm2_gguf_gives_the_ids_that_transformers_gives(repo: Path) -> None:
    found = [path for path in (smollm2_gguf(), *(repo / ".demo").glob("SmolLM2-135M-Instruct*.gguf")) if path]
    if not found:
        pytest.skip("the model is not here; 'make demo' fetches it")
    ours = tokenizer(Path(found[0]))
    for text, ids in SMOLLM2.items():
        assert ours.encode(text) == ids, text
        assert ours.decode(ids, special=True) == text
    assert ours.stops == {2}
    assert ours.decode(ours.chat(CHAT), special=True).endswith(
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_encode_and_decode(model: Path) -> None:
    t = tokenizer(model)
    assert [tiny.TOKENS[i] for i in t.encode("the 12")] == ["the", "Ġ", "1", "2"]
    for text in ("the quick\n\tfox", "naïve 東京 😀", "<|im_start|>x", ""):
        assert t.decode(t.encode(text), special=True) == text
    assert t.decode(t.encode("a<|im_end|>b")) == "ab"
    assert t.stops == {2}


def test_the_chat_template_equals_that_of_transformers(model: Path) -> None:
    transformers = pytest.importorskip("transformers")
    messages = [*CHAT, {"role": "assistant", "content": "Hello."}, {"role": "user", "content": "What's\n2+2? {{x}}"}]
    theirs = transformers.AutoTokenizer.from_pretrained(model)
    expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    t = tokenizer(model)
    assert t.decode(t.chat(messages), special=True) == expected
    assert ChatTemplate(tiny.TEMPLATE, {}).render(messages) == expected


# ------------------------------------------------------------------------------------------------------ streaming


@pytest.mark.parametrize("text", ["plain", "naïve 東京 😀🏽 the", "\n\n x", "é" * 50])
def test_streamed_text_is_the_decoded_text_in_whole_characters(model: Path, text: str) -> None:
    t = tokenizer(model)
    stream = t.stream()
    pieces = [stream.push(token) for token in t.encode(text)]
    assert "".join(pieces) + stream.finish() == text
    assert "\ufffd" not in "".join(pieces)
    assert len([piece for piece in pieces if piece]) > 1, "it must stream, not wait for the end"


def test_an_unfinished_character_appears_at_the_end_as_a_replacement(model: Path) -> None:
    t = tokenizer(model)
    stream = t.stream()
    tokens = t.encode("a😀")[:-1]
    assert [stream.push(token) for token in tokens] == ["a"] + [""] * (len(tokens) - 1)
    assert stream.finish() == "\ufffd"
    assert stream.finish() == ""


def test_bytes_that_are_never_a_character_do_not_stop_the_stream(model: Path) -> None:
    t = tokenizer(model)
    stream = t.stream()
    bad = tiny.TOKENS.index(tiny.byte_letters()[0xFF])
    text = "".join(stream.push(token) for token in [bad] * 100 + t.encode("end"))
    assert text.endswith("end")
    assert set(text) == {"\ufffd", "e", "n", "d"}


# -------------------------------------------------------------------------------------------------------- damage


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ ''.__class__.__mro__ }}", ("SecurityError",)),
        ("{{ messages.append(1) }}", ("SecurityError",)),
        ("{{ cycler.__init__.__globals__.os.system('true') }}", ("SecurityError",)),
        ("{% include '/etc/passwd' %}", ("failed",)),
        ("{{ raise_exception('roles must alternate') }}", ("roles must alternate",)),
        ("{{ nothing.at.all }}", ("UndefinedError",)),
        ("{% for %}", ("TemplateSyntaxError",)),
        ("{{ 'x' * 10**11 }}", ("chat template ran",)),
        ("{{ '%9999999999d' % 1 }}", ("chat template ran",)),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", ("chat template ran",)),
        ("x" * (2 << 20), ("at most",)),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else None,
)
def test_a_hostile_template_ends_in_one_line(template: str, words: tuple[str, ...]) -> None:
    start = time.perf_counter()
    with pytest.raises(ValueError, match="chat template") as caught:
        ChatTemplate(template, {}).render(CHAT)
    assert time.perf_counter() - start < 12
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_template_sees_what_published_ones_use() -> None:
    text = (
        "{%- if messages[0].role == 'user' %}  {{ messages | tojson }}{% endif %}\n"
        "{%- for m in messages %}{% if loop.first %}{% continue %}{% endif %}{% break %}{% endfor %}\n"
        "{{ strftime_now('%Y') | length }}{{ bos_token }}{{ add_generation_prompt }}"
    )
    assert ChatTemplate(text, {"bos_token": "<s>"}).render(CHAT) == '  [{"role": "user", "content": "Hi"}]4<s>True'


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b"\xff",
        b'{"model": {"type": "BPE"}}',
        b'{"version": "1.0", "model": 7}',
        b"{" * 9999,
    ],
    ids=lambda value: repr(value[:20]),
)
def test_a_damaged_tokenizer_is_named(model: Path, content: bytes) -> None:
    (model / "tokenizer.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a tokenizer"):
        tokenizer(model)


def test_a_split_that_backtracks_without_end_is_one_line(model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    content = json.loads((model / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    (model / "tokenizer.json").write_text(json.dumps(content | {"pre_tokenizer": split}))
    t, start = tokenizer(model), time.perf_counter()
    assert t.encode("b") == [tiny.TOKENS.index("b")]
    with pytest.raises(CheckpointError, match="cannot encode this text"):
        t.encode("a" * 100 + "b")
    assert time.perf_counter() - start < 10
    assert capfd.readouterr() == ("", ""), "a Rust backtrace"


def test_a_missing_tokenizer_is_named(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        tokenizer(model)


def test_a_tokenizer_of_another_model_is_named(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"vocab_size": 50}))
    with pytest.raises(CheckpointError, match="vocab_size 50; they belong to different models"):
        tokenizer(model).encode("the zebra")


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("tokenizer_config.json", {"chat_template": 7}, "chat_template is a int"),
        ("tokenizer_config.json", {"chat_template": [{"name": "default", "template": []}]}, "chat_template is a list"),
        ("generation_config.json", {"eos_token_id": "2"}, "eos_token_id"),
        ("generation_config.json", {"eos_token_id": [2, -1]}, "eos_token_id"),
        ("generation_config.json", {"eos_token_id": True}, "eos_token_id"),
    ],
)
def test_damaged_settings_are_named(model: Path, file: str, change: dict[str, Any], words: str) -> None:
    content = json.loads((model / file).read_text()) | change
    (model / file).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=words):
        tokenizer(model)
    (model / file).write_text("[1]")
    with pytest.raises(CheckpointError, match="an object is expected"):
        tokenizer(model)


def test_where_templates_and_stops_are_found(model: Path) -> None:
    settings = json.loads((model / "tokenizer_config.json").read_text())
    named = [
        {"name": ["x"]},
        {"name": "tool_use", "template": "no"},
        {"name": "default", "template": "{{ bos_token }}"},
    ]
    settings |= {"chat_template": named, "bos_token": {"content": "<|im_start|>"}, "eos_token": "<|endoftext|>"}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    t = tokenizer(model)
    assert t.chat(CHAT) == [1]
    assert t.stops == {0, 2}
    (model / "chat_template.jinja").write_text("the")
    assert tokenizer(model).chat(CHAT) == t.encode("the")
    (model / "chat_template.jinja").unlink()
    settings.pop("chat_template")
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="has no chat template"):
        tokenizer(model).chat(CHAT)


def test_text_that_is_not_unicode_is_refused(model: Path) -> None:
    with pytest.raises(ValueError, match="not UTF-8"):
        tokenizer(model).encode("a\udcff")
