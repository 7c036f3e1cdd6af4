"""Small files that nobody vouches for: what is read, what is refused, and at which size the one becomes the other."""

import json
import os
from pathlib import Path

import pytest

from onegraph.formats.files import MAX_DEPTH, CheckpointError, parse_json, quote, read_bytes, read_json, reason


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (f"[{2**64 - 1}, {-(2**63)}]", [2**64 - 1, -(2**63)]),
        ("0.5", 0.5),
        ("1e308", 1e308),
        ('{"a": {"b": [1, "b"]}, "b": null}', {"a": {"b": [1, "b"]}, "b": None}),
        ("[" * MAX_DEPTH + "]" * MAX_DEPTH, None),
        ('{"a":' * (MAX_DEPTH - 1) + "[]" + "}" * (MAX_DEPTH - 1), None),
    ],
)
def test_json_is_what_json_says(text: str, value: object) -> None:
    assert parse_json(text.encode(), "x.json") == (json.loads(text) if value is None else value)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b'{"a": 1, "b": 2, "c": 3, "b": 4, "a": 5}', "key 'b' occurs twice in one object"),
        (b'[{"a": {"x": 1, "x": 1}}]', "key 'x' occurs twice"),
        (str(2**64).encode(), "integer '18446744073709551616' does not fit 64 bits"),
        (str(-(2**63) - 1).encode(), "does not fit 64 bits"),
        (b"1" * 50, "integer '11111111111111111111111111111111111...' does not fit"),
        (b"NaN", "number 'NaN' is not finite"),
        (b"[-Infinity]", "number '-Infinity' is not finite"),
        (b"1e999", "number '1e999' is not finite"),
        (b'{"a": \xff}', "not UTF-8 at byte 6; the file is damaged"),
        (b'{\n "a" 1}', "not valid JSON: Expecting ':' delimiter at line 2 column 6"),
        (b"", "not valid JSON: Expecting value at line 1 column 1"),
        (b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1), "JSON nested deeper than 32"),
        (b'{"a":' * MAX_DEPTH + b"[]" + b"}" * MAX_DEPTH, "JSON nested deeper than 32"),
        (b"[" * 10**6, "JSON nested too deeply"),
    ],
)
def test_json_that_would_be_repaired_in_silence_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        parse_json(data, "x.json")
    assert str(caught.value).startswith("x.json: ")
    assert why in str(caught.value)


def test_a_limit_that_transformers_does_not_set_is_infinite() -> None:
    """`model_max_length` of published tokenizers, Gemma's for one; other integers of its size stay errors."""
    assert parse_json(str(int(1e30)).encode(), "x.json", infinite=True) == float("inf")
    with pytest.raises(CheckpointError, match="does not fit 64 bits"):
        parse_json(str(int(1e30) + 1).encode(), "x.json", infinite=True)


def test_files_are_read_up_to_a_limit(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_bytes(b"12345")
    assert read_bytes(file, 5) == b"12345"
    with pytest.raises(CheckpointError, match="5 bytes, at most 4 are allowed"):
        read_bytes(file, 4)
    (tmp_path / "link").symlink_to(file)
    assert read_bytes(tmp_path / "link", 5) == b"12345"
    os.mkfifo(tmp_path / "pipe")
    for name, why in ((".", "not a regular file"), ("pipe", "not a regular file"), ("none", "no such file")):
        with pytest.raises(CheckpointError) as caught:
            read_bytes(tmp_path / name, 5)
        assert str(caught.value) == f"{tmp_path / name}: {why}"
    with pytest.raises(CheckpointError, match=r"cannot be read: .*null (byte|character)"):
        read_bytes(Path("a\0b"), 5)
    with pytest.raises(CheckpointError, match="cannot be read: Not a directory"):
        read_bytes(file / "below", 5)


def test_an_object_is_read_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"a": 1}')
    assert read_json(file) == {"a": 1}
    with pytest.raises(CheckpointError, match="8 bytes, at most 7"):
        read_json(file, 7)
    for text, kind in (("[]", "list"), ("3", "int"), ("null", "NoneType")):
        file.write_text(text)
        with pytest.raises(CheckpointError, match=rf"config\.json: holds a JSON {kind}, an object is expected"):
            read_json(file)


def test_text_of_a_file_fits_one_line() -> None:
    assert quote("a\nb") == r"'a\nb'"
    assert quote("x" * 98) == "'" + "x" * 98 + "'"
    assert quote("x" * 99) == "'" + "x" * 95 + "...'"
    assert quote("x" * 99, 20) == "'" + "x" * 15 + "...'"
    assert reason(OSError(2, "No such\nfile")) == "No such"
    assert reason(ValueError("one\ntwo")) == "one"
    assert reason(ValueError()) == "ValueError"
