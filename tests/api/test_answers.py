"""Stop texts, several answers, log-probabilities and constraints, as `LLM` gives them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fuzz import tiny
from onegraph import LLM, SamplingParams
from onegraph.api import constraint
from onegraph.api.completion import AnswerText
from onegraph.api.tokenizer import Tokenizer
from onegraph.formats.checkpoint import Checkpoint

WARM = SamplingParams(max_tokens=24, temperature=1.0, seed=4)
PROMPT = "the thing"


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(
        tiny.write_model(tmp_path_factory.mktemp("answers") / "m"), max_num_seqs=3, max_model_len=128, device="cpu"
    )


class Pieces:
    """A text stream of which every token is a piece, the last of them held back."""

    def __init__(self, pieces: list[str]) -> None:
        self.pieces = pieces

    def push(self, token: int) -> str:
        return self.pieces[token]

    def finish(self) -> str:
        return self.pieces[-1]


@pytest.mark.parametrize(
    ("pieces", "stop", "shown", "ended"),
    [
        (["ab", "c", "d", ""], ["bc"], ["a", "", "", ""], True),
        (["a", "b", "x", ""], ["bc"], ["a", "", "bx", ""], False),
        (["ab", "ab", "c", ""], ["abc"], ["", "ab", "", ""], True),
        (["xEN", "D", "", ""], ["END", "N"], ["x" + "E", "", "", ""], True),
        (["one\n", "\n", "two", ""], ["\n\n"], ["one", "", "", ""], True),
        (["one\n", "two", "\n", ""], ["\n\n"], ["one", "\ntwo", "", "\n"], False),
        (["aa", "b", "", "c"], ["bc"], ["aa", "", "", ""], True),
        (["aab", "aac", "", ""], ["aabaac"], ["", "", "", ""], True),
        (["aabaab", "aac", "", ""], ["aabaac"], ["aab", "", "", ""], True),
    ],
)
def test_a_stop_text_is_never_shown_in_part(pieces: list[str], stop: list[str], shown: list[str], ended: bool) -> None:
    text = AnswerText(Pieces(pieces), stop)  # type: ignore[arg-type]  # of a text stream it needs these two
    assert [*map(text.push, range(len(pieces) - 1)), text.finish()] == shown
    assert text.ended == ended


def test_a_stop_text_ends_the_answer_before_it(llm: LLM) -> None:
    free = llm.generate(PROMPT, WARM)
    stop = free.text[7:9]
    at = free.text.index(stop)
    ended = llm.generate([PROMPT, "in"], WARM, stop=["never in it", stop])
    assert ended[0].text == free.text[:at]
    assert ended[0].finish_reason == "stop"
    assert len(ended[0].token_ids) < len(free.token_ids)
    assert ended[0].token_ids == free.token_ids[: len(ended[0].token_ids)]
    assert ended[1] == llm.generate("in", WARM, stop=stop), "each its own"
    assert "".join(llm.stream(PROMPT, WARM, stop=stop)) == free.text[:at]
    assert llm.generate(PROMPT, WARM, stop=[free.token_ids[2], stop]).token_ids == free.token_ids[:3], (
        "ids and texts together"
    )


def test_n_answers_draw_from_seeds_in_a_row(llm: LLM) -> None:
    both = llm.generate([PROMPT, "in"], WARM, n=3)
    for prompt, found in zip([PROMPT, "in"], both, strict=True):
        alone = [llm.generate(prompt, WARM, seed=4 + i) for i in range(3)]
        assert [each.text for each in found.outputs] == [each.text for each in alone]
        assert [each.seed for each in found.outputs] == [4, 5, 6]
    assert len({each.text for each in both[0].outputs}) == 3
    free = llm.generate(PROMPT, max_tokens=24, temperature=1.0)
    assert llm.generate(PROMPT, WARM, seed=free.seed) == free, "the drawn seed gives it again"
    assert llm.generate(PROMPT, max_tokens=2).seed is None, "nothing is drawn"
    assert llm.generate(PROMPT, WARM, seed=2**63 - 1, n=2).outputs[1].seed == -(2**63)


def test_log_probabilities(llm: LLM) -> None:
    plain = llm.generate(PROMPT, WARM)
    told = llm.generate(PROMPT, WARM, logprobs=2)
    assert (told.token_ids, plain.logprobs) == (plain.token_ids, None)
    assert told.logprobs is not None
    assert [each.token for each in told.logprobs] == told.token_ids
    assert all(len(each.top) == 2 and each.logprob <= each.top[0][1] <= 0 for each in told.logprobs)
    none = llm.generate([PROMPT, "in"], [SamplingParams(max_tokens=3, logprobs=0), SamplingParams(max_tokens=3)])
    assert [each.top for each in none[0].logprobs or ()] == [()] * 3
    assert none[1].logprobs is None


@pytest.mark.parametrize("options", [{"n": 2}, {"logprobs": 0}])
def test_a_stream_is_one_text(llm: LLM, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(options))}: got .; a stream is one answer's text"):
        llm.stream(PROMPT, WARM, **options)


# Constraints.

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["the inn", "Zürich"]}, "open": {"type": "boolean"}},
    "required": ["name", "open"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


def test_a_schema_and_a_regex_hold_rows_beside_free_ones(llm: LLM) -> None:
    pytest.importorskip("llguidance")
    params = [
        SamplingParams(max_tokens=80, temperature=1.5, seed=1, json_schema=SCHEMA),
        SamplingParams(max_tokens=80, temperature=1.5, seed=2, regex="(a|b)[0-9]{3} end"),
        WARM,
        SamplingParams(max_tokens=80, json_schema=json.dumps(SCHEMA), repetition_penalty=1.1, stop=['"open']),
        SamplingParams(max_tokens=3, json_schema=SCHEMA),
    ]
    first, second, free, cut, short = llm.generate([PROMPT] * 5, params)
    assert json.loads(first.text).keys() == {"name", "open"}
    assert re.fullmatch("(a|b)[0-9]{3} end", second.text)
    assert (first.finish_reason, second.finish_reason, short.finish_reason) == ("stop", "stop", "length")
    assert free == llm.generate(PROMPT, WARM)
    assert cut.text.startswith('{"name":"')
    assert cut.text.endswith('",')
    assert "".join(llm.stream(PROMPT, params[0])) == first.text


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"regex": "a(b"}, "^regex: .*regex parse error"),
        ({"json_schema": {"type": "strin"}}, "^json_schema: .*strin"),
        ({"json_schema": '{"if": {}}'}, "^json_schema: .*Unimplemented keys"),
        ({"regex": "[^\\s\\S]"}, "^regex: no text matches it; give one that some text matches$"),
        ({"json_schema": {"$ref": "#"}}, "^json_schema: no text matches it;"),
    ],
)
def test_what_llguidance_refuses_is_one_line(llm: LLM, options: dict[str, Any], says: str) -> None:
    pytest.importorskip("llguidance")
    with pytest.raises(ValueError, match=says) as raised:
        llm.generate(PROMPT, **options)
    assert "\n" not in str(raised.value)
    with pytest.raises(ValueError, match=says):
        list(llm.stream(PROMPT, **options))
    assert llm.generate(PROMPT, max_tokens=1).token_ids


def test_without_llguidance_it_says_what_to_install(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    says = r'need llguidance, which is not installed; in a checkout of onegraph: pip install -e "\.\[constraints\]"$'
    with pytest.raises(ValueError, match=says):
        constraint.Constraints(llm.tokenizer, 10)(SamplingParams(regex="a"))


PIECES = {  # of SentencePiece: Llama 2's way to write it, and Metaspace
    "Llama": {"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
    ]},
    "Metaspace": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
}  # fmt: skip


def read(path: Path, content: dict[str, Any]) -> Tokenizer:
    (path / "tokenizer.json").write_text(json.dumps(content))
    with Checkpoint.open(path) as checkpoint:
        return Tokenizer(checkpoint)


@pytest.mark.parametrize("kind", ["ByteLevel", *PIECES])
def test_the_bytes_of_tokens_are_those_that_llguidance_reads(kind: str, tmp_path: Path) -> None:
    llguidance = pytest.importorskip("llguidance")
    content = tiny.tokenizer_json()
    content["added_tokens"].append({**content["added_tokens"][0], "id": 400, "content": "<think> é", "special": False})
    if kind != "ByteLevel":
        vocabulary = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "▁", "é", "▁a", "<0x0A>", "<0xFF>", "a▁b"]
        content["model"] = {"type": "BPE", "vocab": {t: i for i, t in enumerate(vocabulary)}, "merges": []}
        content |= {"decoder": PIECES[kind], "pre_tokenizer": None}
    tokenizer = read(tiny.write_model(tmp_path / "m"), content)
    tokens, special = tokenizer.token_bytes()
    if kind == "Metaspace":  # it reads none, and no bytes are spelt in these
        assert [tokens[i] for i in range(3, 9)] == [b" ", "é".encode(), b" a", b"<0x0A>", b"<0xFF>", b"a b"]
    else:
        theirs = llguidance.LLTokenizer(json.dumps(content))
        for i in tokens.keys() - {*special, 7 if kind == "Llama" else 258}:  # no text has 0xFF, which means more to it
            assert theirs.decode_bytes([i]) == tokens[i], i
    assert special == [0, 1, 2]
    assert "<think> é".encode() in tokens.values()
    if kind == "ByteLevel":
        before = tokenizer.token_bytes()
        tokenizer.chat([{"role": "user", "content": "<|im_end|>"}])
        assert tokenizer.token_bytes() == before, "the guards of a chat are no tokens of the model"


def test_a_decoder_that_nobody_knows_is_named(tmp_path: Path) -> None:
    content = tiny.tokenizer_json() | {"decoder": {"type": "BPEDecoder", "suffix": "</w>"}}
    tokenizer = read(tiny.write_model(tmp_path / "m"), content)
    with pytest.raises(ValueError, match=r"has no bytes for its tokens: .*decoders \['BPEDecoder'\]"):
        tokenizer.token_bytes()
