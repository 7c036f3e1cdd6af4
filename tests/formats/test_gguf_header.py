"""The header of a GGUF file, written here byte by byte from the format's description."""

import struct
from pathlib import Path
from typing import Any

import pytest

from onegraph.formats.files import CheckpointError
from onegraph.formats.gguf_header import MAX_ENTRIES, GGUFTensor, read_header

PATH = Path("m.gguf")
CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
VALUES: dict[int, Any] = {0: 200, 1: -100, 2: 60000, 3: -30000, 4: 4 * 10**9, 5: -(2**31)}
VALUES |= {6: 0.5, 7: True, 10: 2**63, 11: -(2**63), 12: 0.1}


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def key(name: bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: bytes, dims: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def header(keys: list[bytes], tensors: tuple[bytes, ...] = (), version: int = 3, **told: int) -> bytes:
    counts = told.get("n_tensors", len(tensors)), told.get("n_keys", len(keys))
    return b"".join([b"GGUF", struct.pack("<IQQ", version, *counts), *keys, *tensors])


def refused(data: bytes) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_header(data, PATH)
    assert str(caught.value).startswith("m.gguf: ")
    return str(caught.value)


def metadata(*keys: bytes) -> dict[str, Any]:
    return read_header(header(list(keys)), PATH).metadata


@pytest.mark.parametrize("kind", CODES)
def test_numbers_of_every_type_alone_and_in_arrays(kind: int) -> None:
    one = struct.pack(f"<{CODES[kind]}", VALUES[kind])
    three = struct.pack(f"<IQ3{CODES[kind]}", kind, 3, VALUES[kind], 0, VALUES[kind])
    found = metadata(key(b"one", kind, one), key(b"three", 9, three), key(b"none", 9, struct.pack("<IQ", kind, 0)))
    assert found == {"one": VALUES[kind], "three": [VALUES[kind], 0, VALUES[kind]], "none": []}
    assert type(found["one"]) is type(found["three"][0]) is type(VALUES[kind])


def test_texts_alone_and_in_arrays() -> None:
    texts = struct.pack("<IQ", 8, 3) + text(b"a") + text(b"") + text("é".encode())
    assert metadata(key(b"k", 8, text(b"v")), key(b"l", 9, texts)) == {"k": "v", "l": ["a", "", "é"]}


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [None, 1, 64, 1 << 20])
def test_offsets_begin_at_the_alignment_behind_the_header(version: int, alignment: int | None) -> None:
    keys = [] if alignment is None else [key(b"general.alignment", 4, struct.pack("<I", alignment))]
    data = header(keys, (tensor(b"a", (3,), 0, 0), tensor(b"b", (1, 2, 3, 4), 30, 96)), version)
    start = -(-len(data) // (alignment or 32)) * (alignment or 32)
    found = read_header(data + bytes(100), PATH).tensors
    assert found == [GGUFTensor("a", (3,), 0, start), GGUFTensor("b", (1, 2, 3, 4), 30, start + 96)]


def test_a_header_that_fills_the_alignment_is_followed_at_once() -> None:
    for size in range(32):
        data = header([key(b"k", 8, text(b"x" * size))], (tensor(b"a", (1,), 0, 0),))
        if len(data) % 32 == 0:
            assert read_header(data, PATH).tensors[0].offset == len(data)
            return
    raise AssertionError("no header of a multiple of 32 bytes")


def test_every_cut_is_noticed() -> None:
    array = struct.pack("<IQ2H", 2, 2, 7, 8)
    texts = struct.pack("<IQ", 8, 1) + text(b"abc")
    whole = header([key(b"k", 9, array), key(b"l", 9, texts), key(b"m", 12, bytes(8))], (tensor(b"a", (1, 2), 0, 0),))
    assert read_header(whole, PATH).metadata["l"] == ["abc"]
    for end in range(len(whole)):
        told = refused(whole[:end])
        assert end < 4 or "truncated?" in told or "are possible" in told, told


def test_where_it_is_damaged_is_told() -> None:
    assert "the header ends early (truncated?) at byte 4; the file is damaged, fetch it again" in refused(b"GGUF\3\0")
    assert "the header ends early (truncated?) at byte 8;" in refused(b"GGUF\3\0\0\0")


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"GGML" + bytes(40), "not a GGUF file (it starts with b'GGML')"),
        (header([], version=1), "GGUF version 1, 2 and 3 (little-endian) are supported"),
        (header([], version=4), "GGUF version 4"),
        (header([], n_tensors=MAX_ENTRIES + 1), f"{MAX_ENTRIES + 1} tensors, at most {MAX_ENTRIES} are possible"),
        (header([], n_keys=MAX_ENTRIES + 1), f"{MAX_ENTRIES + 1} metadata keys, at most {MAX_ENTRIES} are possible"),
        (header([key(b"k", 0, b"1")] * 2), "metadata key 'k' occurs twice"),
        (header([key(b"k", 13, b"1")]), "unknown value type 13"),
        (header([key(b"k", 9, struct.pack("<IQ", 9, 0))]), "unknown array type 9"),
        (header([key(b"k", 9, struct.pack("<IQ", 8, 3) + text(b""))]), "3 texts, at most 2 are possible"),
        (header([key(b"k", 9, struct.pack("<IQH", 2, 6, 0))]), "6 numbers, at most 5 are possible"),
        (header([key(b"k", 9, struct.pack("<IQH", 2, 2, 0))]), "an array runs past the end (truncated?) at byte 49"),
        (header([text(b"\xff") + bytes(12)]), "text that is not UTF-8 ends at byte 33"),
        (header([struct.pack("<Q", 9)]), "9 bytes of text, at most 8 are possible"),
        (header([struct.pack("<Q", 1)]), "a text runs past the end (truncated?) at byte 32"),
        (header([], (tensor(b"a", (), 0, 0),)), "tensor 'a' has 0 dimensions"),
        (header([], (tensor(b"a", (1,) * 5, 0, 0),)), "tensor 'a' has 5 dimensions"),
        *(
            (header([key(b"general.alignment", *value)]), f"general.alignment is {told}, a power of two is expected")
            for value, told in (
                ((4, struct.pack("<I", 0)), "0"),
                ((4, struct.pack("<I", 48)), "48"),
                ((4, struct.pack("<I", 2 << 20)), str(2 << 20)),
                ((5, struct.pack("<i", -32)), "-32"),
                ((7, b"\1"), "True"),
                ((6, struct.pack("<f", 32)), "32.0"),
            )
        ),
    ],
)
def test_damage_is_named(data: bytes, why: str) -> None:
    assert why in refused(data)


def test_as_many_entries_as_are_allowed() -> None:
    assert "truncated" in refused(header([], n_tensors=MAX_ENTRIES)), "the count itself is no reason"
    assert "truncated" in refused(header([], n_keys=MAX_ENTRIES))
