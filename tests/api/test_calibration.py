"""What quantizing calibrates on: the corpus, and a user's files, directories, chats and weights."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fuzz import tiny
from fuzz.run import invoke
from onegraph.api import calibration, hub
from onegraph.api.calibration import Document, Source, corpus, draw, recorded, shortage, sources
from onegraph.api.chat import TemplateError
from onegraph.formats.files import CheckpointError


class Bytes:
    """A tokenizer of bytes, that begins a text with 0."""

    def __init__(self, template: Any = None) -> None:
        self.template = template

    def encode(self, text: str, special: bool = True) -> list[int]:
        return [0] * special + list(text.encode())


class Tagged:
    """A template that knows the roles of `roles` alone, as Gemma's knows no system."""

    def __init__(self, roles: Sequence[str]) -> None:
        self.roles = roles

    def render(self, messages: Sequence[Mapping[str, Any]], *, tools: Any, complete: bool) -> str:
        assert complete
        if any(message["role"] not in self.roles for message in messages):
            raise TemplateError("no such role")
        return f"[{json.dumps(tools)}]" * bool(tools) + "".join(f"<{m['role']}>{m['content']}" for m in messages)


def texts(name: str, count: int, size: int, weight: float) -> Source:
    return Source(name, [Document(text=f"{name}{i:02d}".ljust(size)) for i in range(count)], weight)


def test_sources_are_drawn_in_proportion_whole_and_as_a_prefix() -> None:
    many = [texts("a", 60, 99, 3), texts("b", 20, 199, 1)]
    found = draw(Bytes(), many, 8000)
    assert len(found.ids) == 8000
    assert abs(found.counts["a"] - 6000) <= 200
    assert sum(found.counts.values()) == 8000
    starts = [i for i, token in enumerate(found.ids) if token == 0]
    assert {end - start for start, end in pairwise(starts)} == {100, 200}, "documents are whole"
    assert draw(Bytes(), many, 1000).ids == found.ids[:1000]


def test_a_document_larger_than_its_share_waits_until_the_share_has_room() -> None:
    found = [texts("short", 600, 99, 9), texts("long", 2, 4999, 1)]
    assert draw(Bytes(), found, 20_000).counts["long"] == 0
    assert draw(Bytes(), found, 52_000).counts["long"] == 5000


def test_others_fill_what_a_source_does_not_have() -> None:
    found = draw(Bytes(), [texts("few", 1, 99, 1), texts("many", 50, 99, 1)], 2000)
    assert found.counts == {"few": 100, "many": 1900}
    assert found.notes == ["few has 100 tokens; its share is 1,000"]
    assert draw(Bytes(), sources("bundled"), 1 << 20).notes == [], "kinds of the corpus are as long as they are"
    assert len(draw(Bytes(), [texts("few", 1, 99, 1)], 2000).ids) == 100


def test_a_long_text_is_encoded_in_parts_that_end_at_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "PART", 10)
    text = "one two\nthree\n\nfour five six seven"
    (source,) = sources(text)
    assert "".join(document.text for document in source.documents) == text + "\n\n"
    assert [document.first for document in source.documents] == [True, *[False] * (len(source.documents) - 1)]
    assert source.documents[0].text == "one two\n"
    assert bytes(draw(Bytes(), [source], 1000).ids[1:]).decode() == text + "\n\n", "one start, in front"


CHAT = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}, {"role": "assistant", "content": "A"}]


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (Tagged(("system", "user", "assistant")), "<system>S<user>U<assistant>A"),
        (Tagged(("user", "assistant")), "<user>S\n\nU<assistant>A"),
        (Tagged(()), "\0System: S\n\nUser: U\n\nAssistant: A\n\n"),
        (None, "\0System: S\n\nUser: U\n\nAssistant: A\n\n"),
    ],
    ids=["all roles", "no system", "broken", "none"],
)
def test_chats_go_through_the_template_that_the_model_has(template: Any, text: str) -> None:
    (source,) = [Source("chat", [Document(messages=CHAT)], 1)]
    assert bytes(draw(Bytes(template), [source], 1000).ids).decode() == text


def test_files_directories_and_json_lines(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    (docs / "sub" / ".git").mkdir(parents=True)
    (docs / "b.md").write_text("bee")
    (docs / "sub" / "a.py").write_text("pass")
    (docs / "sub" / ".git" / "config").write_text("hidden")
    (docs / "image").write_bytes(b"\x89PNG\0")
    tools = [{"type": "function", "function": {"name": "f"}}]
    rows = [{"messages": CHAT, "tools": tools}, {"text": "plain"}]
    rows += [{"messages": [{"role": "user", "content": [{"type": "text", "text": "part"}, {"type": "image"}]}]}]
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    folder, chat = sources([docs, tmp_path / "chat.jsonl"])
    assert [document.text for document in folder.documents] == ["bee\n\n", "pass\n\n"]
    assert [len(document.messages) for document in chat.documents] == [3, 0, 1]
    assert chat.documents[2].messages[0]["content"] == "part"
    ids = draw(Bytes(Tagged(("system", "user", "assistant"))), [chat], 1000).ids
    assert bytes(ids).decode().startswith(f"[{json.dumps(tools)}]<system>S")
    assert folder.weight / chat.weight == folder.size / chat.size, "without weights, by size"
    weighed = sources({docs: 0.2, tmp_path / "chat.jsonl": 0.8})
    assert [source.weight for source in weighed] == [0.2, 0.8]


@pytest.mark.parametrize("line", ["{", "[]", '{"prompt": "x"}', '{"messages": []}', '{"messages": [{"content": "x"}]}'])
def test_a_line_that_is_no_document_is_named(line: str, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "fine"}\n' + line)
    with pytest.raises(CheckpointError, match=r"x\.jsonl:2: allowed is \{\"text\": \.\.\.\} or \{\"messages\": "):
        sources(tmp_path / "x.jsonl")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (r'{"text": "a\ud800b"}', r"has '\\ud800', half of a surrogate pair; remove it"),
        (r'{"messages": [{"role": "user", "content": "\udfff"}]}', r"has '\\udfff', half of a surrogate pair"),
        ('{"messages": [{"role": "user", "content": [{"text": 0}]}]}', "a part of a message has the text 0; a string"),
    ],
)
def test_a_line_whose_text_is_none_is_named(line: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"messages": [{"role": "user", "content": [{"text": null}]}]}\n' + line)
    with pytest.raises(CheckpointError, match=rf"x\.jsonl:2: {says}"):
        sources(tmp_path / "x.jsonl")


def test_the_corpus_in_the_mix_keeps_its_own_shares() -> None:
    shares, documents = corpus()
    assert set(shares) == set(documents)
    assert sum(shares.values()) == pytest.approx(1)
    mixed = sources({"bundled": 0.25, "a text of the user's own": 0.75})
    weights = {source.name: source.weight for source in mixed}
    assert weights.pop("text") == 0.75
    assert weights == pytest.approx({kind: 0.25 * share for kind, share in shares.items()})


def test_too_little_text_is_warned_of_with_what_it_costs() -> None:
    assert shortage("a text", 20_000, 24_576, 24_576) is None
    assert shortage("bundled", 90_000, 131_072, 131_072) is None, "there is no more of it"
    assert shortage("bundled", 256, 256, 24_576) is not None
    said = shortage("a text", 1536, 24_576, 24_576)
    assert said is not None
    assert "1,536 calibration tokens; the recipe takes 24,576, and with so few expect about 56 % more KL" in said


def test_weights_and_several_sources_of_the_command(tmp_path: Path) -> None:
    model = tiny.write_model(tmp_path / "model")
    for name in ("a=1.txt", "b.txt"):
        (tmp_path / name).write_text("the hat\n" * 8000)
    command = ["quantize", model, tmp_path / "out", "--dry-run", "--json", "--device", "cpu"]
    command += ["--num-calibration-tokens", 40_000, "--calibration"]
    status, out, errors = invoke([*command, f"{tmp_path / 'a=1.txt'}=0.9", f"{tmp_path / 'b.txt'}=0.1"])
    assert status == 0, errors
    counts = json.loads(out)["text"]
    ratio = counts[str(tmp_path / "a=1.txt")] / counts[str(tmp_path / "b.txt")]
    assert 7 < ratio < 14, "in parts of 2,048 characters"
    status, out, _ = invoke([*command, tmp_path / "a=1.txt"])
    assert list(json.loads(out)["text"]) == [str(tmp_path / "a=1.txt")], "a name with = in it"
    for words, says in (
        ((f"{tmp_path / 'b.txt'}=0.5", "bundled"), "1 of 2 sources have a weight; give one to each"),
        ((tmp_path / "b.txt", f"{tmp_path / 'b.txt'}=1"), "is given twice"),
        ((f"{tmp_path / 'b.txt'}=-1",), "got the weight -1.0; allowed is a number above 0"),
        (("self", "bundled"), "'self' allows no other source"),
    ):
        status, _, errors = invoke([*command, *words])
        assert (status, errors.count("\n")) == (2, 1), errors
        assert says in errors


class TestHub:
    def test_a_dataset_is_fetched_and_read(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        huggingface_hub = pytest.importorskip("huggingface_hub")
        contents = {"a.txt": "first", "b.jsonl": '{"text": "second"}', "c.parquet": "PAR1", "README.md": "card"}
        for name, text in contents.items():
            (tmp_path / name).write_text(text)
        files = [SimpleNamespace(rfilename=name, size=len(text)) for name, text in contents.items()]
        asked: list[tuple[str, str | None]] = []

        class Api:
            def dataset_info(self, repo: str, revision: str | None, files_metadata: bool) -> Any:
                asked.append((repo, revision))
                return SimpleNamespace(siblings=files, sha="c0ffee")

        def download(repo: str, name: str, *, repo_type: str, revision: str) -> str:
            assert (repo_type, revision) == ("dataset", "c0ffee")
            return str(tmp_path / name)

        monkeypatch.setattr(huggingface_hub, "HfApi", Api)
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
        (source,) = sources("hub:org/set@v1")
        assert asked == [("org/set", "v1")]
        assert [document.text for document in source.documents] == ["first\n\n", "second\n\n"]
        monkeypatch.setattr(hub, "DATASET_BYTES", 22)  # those of b.jsonl, and later of a.txt as well
        files[0].size = 23
        assert [document.text for document in sources("hub:org/set")[0].documents] == ["second\n\n"]
        files[0].size, files[1].size = 5, 18
        assert [document.text for document in sources("hub:org/set")[0].documents] == ["first\n\n"]
        files[0].size, files[1].size = 23, None
        with pytest.raises(CheckpointError, match="hub:org/set: each of its 2 files of text has more than 22 bytes"):
            sources("hub:org/set")
        files[:2] = []
        with pytest.raises(CheckpointError, match=r"hub:org/set: the dataset has no \.jsonl, \.txt or \.md file"):
            sources("hub:org/set")

    def test_its_name_is_recorded_whole(self) -> None:
        counts = {"hub:org/set@v1": 1, "hub:other/set@v1": 2, "a/x.jsonl": 3, "b/x.jsonl": 4, "prose": 5}
        assert recorded(counts) == {"hub:org/set@v1": 1, "hub:other/set@v1": 2, "x.jsonl": 7, "prose": 5}

    def test_offline_and_without_the_extra_it_is_one_line(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = tiny.write_model(tmp_path / "model")
        command = ["quantize", model, tmp_path / "out", "--device", "cpu", "--calibration", "hub:org/set"]
        constants = pytest.importorskip("huggingface_hub").constants
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        status, _, errors = invoke(command)
        assert (status, errors.count("\n")) == (2, 1), errors
        assert "hub:org/set: cannot be fetched from the Hugging Face hub: HF_HUB_OFFLINE is set" in errors
        monkeypatch.setitem(sys.modules, "huggingface_hub", None)
        status, _, errors = invoke(command)
        assert (status, errors.count("\n")) == (2, 1), errors
        assert "need huggingface_hub, which is not installed" in errors
        with pytest.raises(CheckpointError, match="hub:set: is no name of a dataset"):
            sources("hub:set")
