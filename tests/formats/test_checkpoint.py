"""Checkpoints: what is written comes back, appears whole or not at all, and damage is named."""

from __future__ import annotations

import json
import math
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from onegraph.formats.checkpoint import Checkpoint, CheckpointError, write_checkpoint
from onegraph.formats.files import parse_json, write_bytes
from onegraph.formats.table import DTYPES, read_header
from onegraph.models.config import LlamaConfig
from onegraph.models.fields import Fields

WEIGHTS = {
    "a": torch.arange(24, dtype=torch.float32).reshape(4, 6) - 7.5,
    "b": torch.arange(10, dtype=torch.int16),
    "c": torch.linspace(-3, 3, 5).bfloat16(),
    "s": torch.tensor(2.5),
    "empty": torch.zeros(0, 3, dtype=torch.float16),
}


def write(path: Path, weights: dict[str, torch.Tensor] = WEIGHTS, **kwargs: Any) -> Path:
    write_checkpoint(path, {"model_type": "llama"}, weights.items(), **kwargs)
    return path


def refused(path: Path, *words: str) -> None:
    """Opening fails with one line that holds every word."""
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(path)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


@pytest.mark.parametrize("shard_bytes", [1 << 30, 60])
def test_what_is_written_comes_back(tmp_path: Path, shard_bytes: int) -> None:
    write(tmp_path / "m", shard_bytes=shard_bytes)
    with Checkpoint.open(tmp_path / "m") as checkpoint:
        assert checkpoint.config == {"model_type": "llama"}
        assert checkpoint.names == sorted(WEIGHTS)
        assert checkpoint.nbytes == sum(w.nbytes for w in WEIGHTS.values())
        for name, weight in WEIGHTS.items():
            assert (checkpoint.shape(name), checkpoint.dtype(name)) == (tuple(weight.shape), weight.dtype)
            assert torch.equal(checkpoint.tensor(name), weight)
            if weight.is_floating_point():
                assert checkpoint.tensor(name, dtype=torch.float64).dtype == torch.float64
    assert sharded(tmp_path / "m") == (shard_bytes == 60)


def sharded(path: Path) -> bool:
    return (path / "model.safetensors.index.json").exists()


def test_the_safetensors_library_reads_what_we_write_and_the_reverse(tmp_path: Path) -> None:
    write(tmp_path / "m")
    theirs = load_file(tmp_path / "m" / "model.safetensors")
    assert theirs.keys() == WEIGHTS.keys()
    every = {name: torch.ones(3, 2).to(dtype) for name, dtype in DTYPES.items()}
    save_file(every, tmp_path / "all.safetensors", metadata={"format": "pt"})
    header = read_header(tmp_path / "all.safetensors")
    assert {name: info.dtype for name, info in header.items()} == DTYPES


def test_same_tensors_same_bytes(tmp_path: Path) -> None:
    one, two = write(tmp_path / "1"), write(tmp_path / "2", dict(reversed(WEIGHTS.items())))
    assert (one / "model.safetensors").read_bytes() == (two / "model.safetensors").read_bytes()


def test_views_of_one_storage_are_written_apart(tmp_path: Path) -> None:
    base = torch.arange(8.0)
    write(tmp_path / "m", {"x": base[:4], "y": base[2:6], "t": base.reshape(2, 4).t()})
    checkpoint = Checkpoint.open(tmp_path / "m")
    assert torch.equal(checkpoint.tensor("y"), base[2:6])
    assert torch.equal(checkpoint.tensor("t"), base.reshape(2, 4).t())


def test_tokenizer_files_come_through(tmp_path: Path) -> None:
    source = write(tmp_path / "m")
    (source / "tokenizer.json").write_bytes(b'{"a": 1}')
    (source / "private.txt").write_text("stays")
    write(tmp_path / "n", copy_from=Checkpoint.open(source))
    assert (tmp_path / "n" / "tokenizer.json").read_bytes() == b'{"a": 1}'
    files = {"SHA256SUMS", "config.json", "model.safetensors", "tokenizer.json"}
    assert {p.name for p in (tmp_path / "n").iterdir()} == files


def test_what_is_not_wholly_written_is_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a process leaves it that is killed before any of the small files."""
    source, before = write(tmp_path / "m"), []
    (source / "tokenizer.json").write_bytes(b'{"a": 1}')

    def watched(file: Path, content: bytes) -> str:
        refused(file.parent, "config.json")
        before.append(file.name)
        return write_bytes(file, content)

    monkeypatch.setattr("onegraph.formats.checkpoint.write_bytes", watched)
    write(tmp_path / "n", copy_from=Checkpoint.open(source), about={}, card="card")
    assert before == ["tokenizer.json", "onegraph.json", "SHA256SUMS", "README.md", "config.json"]


def test_an_existing_output_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    with pytest.raises(CheckpointError, match="exists already"):
        write(tmp_path / "m")
    assert list((tmp_path / "m").iterdir()) == []


def test_a_failure_while_writing_leaves_nothing(tmp_path: Path) -> None:
    def broken() -> Any:
        yield "a", torch.ones(3)
        raise RuntimeError("the disk is full")

    with pytest.raises(RuntimeError, match="disk"):
        write_checkpoint(tmp_path / "m", {}, broken(), shard_bytes=1)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(CheckpointError, match="'a' is written twice"):
        write_checkpoint(tmp_path / "m", {}, [("a", torch.ones(1)), ("a", torch.ones(1))])
    assert list(tmp_path.iterdir()) == []


def test_check_names_everything_that_is_wrong(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write(tmp_path / "m"))
    good = {name: (tuple(w.shape), w.dtype) for name, w in WEIGHTS.items()}
    checkpoint.check(good)
    checkpoint.check({**good, "c": ((5,), (torch.float32, torch.bfloat16))})
    checkpoint.check({name: good[name] for name in "abc"}, optional=("s", "empty"))
    wrong = {"a": ((6, 4), torch.float32), "b": ((10,), torch.int32), "gone": ((1,), torch.int8)}
    with pytest.raises(CheckpointError) as caught:
        checkpoint.check(wrong)
    for part in (
        "1 missing: 'gone'",
        "'a' has shape [4, 6], the config needs [6, 4]",
        "'b' is int16, allowed is int32",
        "3 unexpected: 'c', 'empty', 's'",
    ):
        assert part in str(caught.value)


def test_an_unknown_tensor_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tensor 'nope\\n'"):
        Checkpoint.open(write(tmp_path / "m")).tensor("nope\n")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_values_that_are_not_finite_are_refused(tmp_path: Path, value: float, dtype: torch.dtype) -> None:
    weight = torch.ones(1000, dtype=dtype)
    weight[777] = value
    checkpoint = Checkpoint.open(write(tmp_path / "m", {"w": weight}))
    with pytest.raises(CheckpointError, match="'w' holds NaN or infinite"):
        checkpoint.tensor("w")


# -------------------------------------------------------------------------------------------------------- damage


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def put(path: Path, header: Any, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "m") / "model.safetensors"
    raw = file.read_bytes()
    for length in range(len(raw)):
        file.write_bytes(raw[:length])
        refused(tmp_path / "m", "model.safetensors")
    file.write_bytes(raw + b"\0")
    refused(tmp_path / "m", "model.safetensors")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": "F31"}, ("'a'", "'F31'", "BF16")),
        ({"dtype": ["F32"]}, ("'a'", "dtype")),
        ({"dtype": "F16"}, ("'a'", "needs 48 bytes", "give 96")),
        ({"shape": [4, 7]}, ("'a'", "needs 112 bytes")),
        ({"shape": [-4, -6]}, ("'a'", "shape")),
        ({"shape": [2**62, 2**62]}, ("'a'", "needs")),
        ({"shape": [True, 24]}, ("'a'", "shape")),
        ({"shape": 24}, ("'a'", "shape")),
        ({"shape": [24] + [1] * 9}, ("'a'", "shape")),
        ({"data_offsets": [0, 2**63]}, ("'a'", "give")),
        ({"data_offsets": [96, 0]}, ("'a'",)),
        ({"data_offsets": [0]}, ("'a'", "data_offsets")),
        ({"data_offsets": [4, 100]}, ("byte",)),
        ({"extra": 1}, ("'a'", "described")),
    ],
)
def test_a_lying_header_is_refused(tmp_path: Path, change: dict[str, Any], words: tuple[str, ...]) -> None:
    file = write(tmp_path / "m") / "model.safetensors"
    header, data = header_of(file)
    start = header["a"]["data_offsets"][0]
    if "data_offsets" in change and start:
        change = {"data_offsets": [x + start for x in change["data_offsets"]]}
    header["a"].update(change)
    put(file, header, data)
    refused(tmp_path / "m", "model.safetensors", *words)


@pytest.mark.parametrize(
    "header",
    [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b"{" * 5000, b"[" * 200_000, b'{"a": 1}', b'{"a": {}}'],
    ids=lambda value: repr(value[:10]),
)
def test_a_header_that_is_no_header_is_refused(tmp_path: Path, header: bytes) -> None:
    file = write(tmp_path / "m") / "model.safetensors"
    put(file, header, header_of(file)[1])
    refused(tmp_path / "m", "model.safetensors")


def test_a_tensor_named_twice_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "m", {"a": torch.ones(2)}) / "model.safetensors"
    entry = b'"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}'
    put(file, b"{" + entry + b", " + entry + b"}", header_of(file)[1])
    refused(tmp_path / "m", "'a' occurs twice")


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("../m/model-00001-of-00004.safetensors", ("only the name of a file",)),
        ("/etc/passwd", ("only the name of a file",)),
        ("..", ("only the name of a file",)),
        ("", ("not a regular file",)),
        (7, ("only the name of a file",)),
        (None, ("only the name of a file",)),
        ("absent.safetensors", ("shard 'absent.safetensors' is missing",)),
        ("config.json", ("config.json",)),
    ],
)
def test_an_index_that_points_elsewhere_is_refused(tmp_path: Path, file: object, words: tuple[str, ...]) -> None:
    index = write(tmp_path / "m", shard_bytes=1) / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["a"] = file
    index.write_text(json.dumps(content))
    refused(tmp_path / "m", *words)


def test_an_index_that_names_a_tensor_that_is_not_there_is_refused(tmp_path: Path) -> None:
    index = write(tmp_path / "m", shard_bytes=1) / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["ghost"] = content["weight_map"]["a"]
    index.write_text(json.dumps(content))
    refused(tmp_path / "m", "'ghost' is not in shard")
    index.write_text('{"weight_map": []}')
    refused(tmp_path / "m", "weight_map")


def test_tensors_that_an_index_leaves_out_are_found(tmp_path: Path) -> None:
    """An index may not list the scales that its shards hold; another file of the directory is none of its shards."""
    path = write(tmp_path / "m", WEIGHTS | {"a.scale": torch.ones(3)}, shard_bytes=60)
    index = path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    shard = content["weight_map"]["c"]
    held = load_file(path / shard) | {"c.scale": torch.full((2,), 0.5)}
    save_file(held, path / shard)
    save_file({"elsewhere": torch.ones(1)}, path / "consolidated.safetensors")
    with Checkpoint.open(path) as checkpoint:
        assert checkpoint.names == sorted([*WEIGHTS, "a.scale", "c.scale"])
        assert checkpoint.tensor("c.scale").tolist() == [0.5, 0.5]
        assert checkpoint.info("c.scale").file == path / shard


@pytest.mark.parametrize("listed", [True, False])
def test_a_tensor_that_two_shards_hold_is_refused(tmp_path: Path, listed: bool) -> None:
    path = write(tmp_path / "m", shard_bytes=60)
    index = path / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    first, second = places["a"], places["b"]
    assert first != second
    name = "a" if listed else "spare"
    for shard in (first, second):
        save_file(load_file(path / shard) | {name: torch.ones(2)}, path / shard)
    refused(path, f"tensor '{name}' is in ", first, second)


def test_what_config_json_leaves_out_is_read_from_hf_quant_config(tmp_path: Path) -> None:
    path = write(tmp_path / "m")
    told = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    (path / "hf_quant_config.json").write_text(json.dumps(told))
    assert Checkpoint.open(path).config == {"model_type": "llama", "quantization_config": told}
    (path / "config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}')
    (path / "hf_quant_config.json").write_text("[")  # not read
    assert Checkpoint.open(path).config == {"quantization_config": {"quant_method": "fp8"}}
    (path / "config.json").write_text('{"compression_config": {"quant_method": "compressed-tensors"}}')
    assert Checkpoint.open(path).config["quantization_config"] == {"quant_method": "compressed-tensors"}
    (path / "config.json").write_text('{"quantization_config": null}')
    refused(path, "hf_quant_config.json", "not valid JSON")
    (path / "hf_quant_config.json").unlink()
    (path / "hf_quant_config.json").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").write_text("{}")
    refused(path, "hf_quant_config.json", "outside of the model directory")


FILES = ("config.json", "model.safetensors", "tokenizer.json")


def touch(path: Path, name: str) -> None:
    """Reads the file `name` of the model, or finds out that it may not be read."""
    with Checkpoint.open(path) as checkpoint:
        checkpoint.sidecar(name)


@pytest.mark.parametrize("name", [*FILES, "model-00002-of-00005.safetensors", "model.safetensors.index.json"])
def test_a_link_out_of_the_model_directory_is_refused(tmp_path: Path, name: str) -> None:
    """What it points to would be read, and a sidecar copied into whatever is made of the model."""
    model = write(tmp_path / "m", shard_bytes=1 if "0" in name or "index" in name else 1 << 30)
    (model / "tokenizer.json").write_text("{}")
    (tmp_path / "secret").mkdir()
    secret = (model / name).rename(tmp_path / "secret" / "file")
    (model / name).symlink_to(secret)
    with pytest.raises(CheckpointError, match=r"is a symbolic link to '.*secret/file', outside of the model directory"):
        touch(model, name)
    (model / name).unlink()
    (model / name).symlink_to("../secret/../secret/file")
    with pytest.raises(CheckpointError, match="outside of the model directory"):
        touch(model, name)
    with pytest.raises(CheckpointError):
        write(tmp_path / "out", copy_from=Checkpoint.open(model))
    assert not (tmp_path / "out").exists()
    (model / name).unlink()
    secret.rename(model / "another name")
    (model / name).symlink_to("another name")
    touch(model, name)


@pytest.mark.parametrize("name", FILES)
def test_a_link_to_nothing_is_an_error_and_not_an_absent_file(tmp_path: Path, name: str) -> None:
    model = write(tmp_path / "m")
    (model / name).unlink(missing_ok=True)
    (model / name).symlink_to("../../blobs/0123")
    with pytest.raises(CheckpointError, match=rf"{name}: points to '../../blobs/0123', which does not exist; fetch"):
        touch(model, name)
    (model / name).unlink()
    (model / name).symlink_to(name)
    with pytest.raises(CheckpointError, match=f"{name}: points to '{name}'"):
        touch(model, name)


@pytest.mark.parametrize("shard_bytes", [1 << 30, 60])
def test_the_cache_of_the_hub_is_read_and_its_links_lead_nowhere_else(tmp_path: Path, shard_bytes: int) -> None:
    repository = tmp_path / "models--somebody--model"
    (repository / "blobs").mkdir(parents=True)
    snapshot = write(repository / "snapshots" / "0a1b2c", shard_bytes=shard_bytes)
    (snapshot / "tokenizer.json").write_text("{}")
    for file in sorted(snapshot.iterdir()):
        blob = file.rename(repository / "blobs" / f"blob-of-{file.name}")
        file.symlink_to(Path("../../blobs") / blob.name)
    (tmp_path / "latest").symlink_to(snapshot)  # which directory is read is the user's choice
    for path in (snapshot, tmp_path / "latest"):
        with Checkpoint.open(path) as checkpoint:
            assert torch.equal(checkpoint.tensor("a"), WEIGHTS["a"])
            assert checkpoint.sidecar("tokenizer.json") == b"{}"
    other = tmp_path / "models--somebody--private" / "blobs" / "0"
    other.parent.mkdir(parents=True)
    other.write_text("{}")
    (snapshot / "tokenizer.json").unlink()
    (snapshot / "tokenizer.json").symlink_to("../../../models--somebody--private/blobs/0")
    with pytest.raises(CheckpointError, match="outside of the model directory"):
        touch(snapshot, "tokenizer.json")


def test_pickled_weights_are_never_read(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "exploded"),)

    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    (tmp_path / "m" / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    refused(tmp_path / "m", "'pytorch_model.bin'", "never read")
    (tmp_path / "m" / "model.safetensors").write_bytes(pickle.dumps(Bomb()))
    refused(tmp_path / "m", "model.safetensors")
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("config", [b"", b"{", b"[1]", b"3", b"\xff", b'{"a": NaN}', b'{"a": 1e999}', b'{"a":1,"a":2}'])
def test_a_config_that_is_no_object_is_refused(tmp_path: Path, config: bytes) -> None:
    (write(tmp_path / "m") / "config.json").write_bytes(config)
    refused(tmp_path / "m", "config.json")


@pytest.mark.parametrize("form", ["Infinity", '{"__float__": "Infinity"}'])
def test_infinities_of_a_config_are_read_and_written(form: str, tmp_path: Path) -> None:
    """Limits of state-space models: bare as transformers wrote them, and tagged as it does since version 5."""
    told = f'{{"model_type": "x", "limits": [0.0, {form}], "least": -Infinity}}'
    (write(tmp_path / "m") / "config.json").write_text(told)
    source = Checkpoint.open(tmp_path / "m")
    assert source.config == {"model_type": "x", "limits": [0.0, math.inf], "least": -math.inf}
    write_checkpoint(tmp_path / "o", source.config, [])
    plain = json.loads((tmp_path / "o" / "config.json").read_text(), parse_constant=pytest.fail)
    assert plain["limits"] == [0.0, {"__float__": "Infinity"}]
    assert plain["least"] == {"__float__": "-Infinity"}
    more = '{"limits": [{"__float__": "NaN"}], "b": {"__float__": "Infinity", "c": 1}}'
    (tmp_path / "m" / "config.json").write_text(more)
    assert Checkpoint.open(tmp_path / "m").config["b"] == {"__float__": "Infinity", "c": 1}
    with pytest.raises(ValueError, match="num_hidden_layers is inf; it must be an integer"):
        LlamaConfig.from_dict({"model_type": "llama", "num_hidden_layers": math.inf})
    with pytest.raises(ValueError, match="rms_norm_eps is inf; it must be a number"):
        Fields({"rms_norm_eps": math.inf}, {}).number("rms_norm_eps", low=1e-12, high=1.0)


def test_json_is_bounded() -> None:
    assert parse_json(b'{"a": [1, -2, 3.5e3, {"b": null}]}', "x") == {"a": [1, -2, 3500.0, {"b": None}]}
    for text in ("9" * 21, "9" * 5000, "-" + "9" * 19, "Infinity", "-Infinity", "[" * 33 + "]" * 33, "[" * 10**6):
        with pytest.raises(CheckpointError, match=r"^x: "):
            parse_json(text.encode(), "x")
    assert parse_json(("[" * 32 + "]" * 32).encode(), "x") is not None


def test_paths_that_are_no_models_are_refused(tmp_path: Path) -> None:
    refused(tmp_path / "absent", "no such model")
    refused(Path("x" * 5000), "cannot be read")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "empty: has no config.json; give a directory")
    refused(tmp_path / "absent.gguf", "absent.gguf: no such file")
    (tmp_path / "begun.partial").mkdir()
    refused(tmp_path / "begun", "quantizing it has not been finished; the same quantize command goes on")
    (tmp_path / "empty" / "config.json").write_text("{}")
    refused(tmp_path / "empty", "neither model.safetensors")
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir" / "config.json").mkdir()
    refused(tmp_path / "dir", "not a regular file")
    os.mkfifo(tmp_path / "pipe")
    refused(tmp_path / "pipe", "no such model")
    (tmp_path / "loop").symlink_to("loop")
    refused(tmp_path / "loop")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "m") / "model.safetensors"
    file.chmod(0)
    refused(tmp_path / "m", "Permission denied")


def test_what_is_missing_is_named_up_to_five(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m", {}, [("a", torch.ones(1))])
    with Checkpoint.open(tmp_path / "m") as found, pytest.raises(CheckpointError) as refusal:
        found.check({"a": ((1,), torch.float32)} | {f"b{i}": ((1,), torch.float32) for i in range(6)})
    assert str(refusal.value).endswith("6 missing: 'b0', 'b1', 'b2', 'b3', 'b4', ...")


def test_a_header_that_is_a_list_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes((2).to_bytes(8, "little") + b"[]")
    with pytest.raises(CheckpointError, match="header is not a JSON object; the file is damaged"):
        read_header(file)
