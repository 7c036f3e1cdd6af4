"""`verify`: what is written is whole, every flipped bit is found, others' checkpoints are checked as far as they go."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from deepseek import save_hf as save_deepseek
from fuzz import tiny
from fuzz.run import invoke
from onegraph import __version__, quantize, verify
from onegraph.cli.verify import phrase, unusual
from onegraph.formats.checkpoint import SIDECARS, write_checkpoint
from onegraph.quant.recipe import Recipe

KINDS = ("e8p", "nvfp4", "sharded")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As others write one: no digests, nothing of ours."""
    path = tiny.write_model(tmp_path_factory.mktemp("verify") / "plain")
    (path / "SHA256SUMS").unlink()
    return path


@pytest.fixture(scope="module")
def made(model: Path) -> dict[str, Path]:
    """Checkpoints with digests."""
    folder = model.parent
    quick: dict[str, Any] = {"recipe": "quick", "device": "cpu"}
    text = {"calibration": "the thing in the inn, and a hat. " * 100, "tokens": 256, "sequence": 64}
    quantize(model, folder / "e8p", bits=3, layers={"*.0.mlp.down_proj": 2, "*.v_proj": 16}, **text, **quick)
    quantize(model, folder / "nvfp4", format="nvfp4", **quick)
    tiny.write_model(folder / "sharded", shard_bytes=20_000)
    return {kind: folder / kind for kind in KINDS}


@pytest.fixture
def copy(made: dict[str, Path], tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    return Path(shutil.copytree(made[getattr(request, "param", "e8p")], tmp_path / "copy"))


def refused(path: Path, *words: str) -> None:
    """One problem, on one line that holds the words; the command ends with status 1."""
    found = verify(path)
    assert len(found.problems) == 1, found.problems
    assert all(word in found.problems[0] for word in words), found.problems
    assert "\n" not in found.problems[0]
    status, out, _ = invoke(["verify", path])
    assert (status, out.splitlines()[-1]) == (1, "damaged")


# ------------------------------------------------------------------------------------------------------------- whole


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_is_whole(made: dict[str, Path], kind: str) -> None:
    found = verify(made[kind])
    assert found.ok
    assert found.problems == ()
    files = {file.name for file in made[kind].iterdir()} - {"SHA256SUMS"}
    named = {line.split("  ")[1] for line in (made[kind] / "SHA256SUMS").read_text().splitlines()}
    assert found.digests == len(named)
    # People edit their cards. The tests' own model gets its tokenizer afterwards.
    assert files - named <= ({*SIDECARS} if kind == "sharded" else {"README.md"})
    assert found.unchecked == (("no onegraph.json: nothing says what it was made from",) if kind == "sharded" else ())


def test_the_digests_are_those_of_sha256sum(made: dict[str, Path]) -> None:
    for path in made.values():
        for line in (path / "SHA256SUMS").read_text().splitlines():
            digest, name = line.split("  ")
            assert hashlib.sha256((path / name).read_bytes()).hexdigest() == digest
        if shutil.which("sha256sum"):
            assert subprocess.run(["sha256sum", "--quiet", "--strict", "-c", "SHA256SUMS"], cwd=path).returncode == 0


def test_it_says_what_is_inside(made: dict[str, Path], model: Path) -> None:
    found = verify(made["e8p"])
    groups = {(group.layers, group.blocks): group for group in found.layers}
    assert groups["model.layers.*.mlp.down_proj", "0"].format == "e8p at 2 bits"
    assert groups["model.layers.*.mlp.down_proj", "1"].format == "e8p at 3 bits"
    kept = groups["model.layers.*.self_attn.v_proj", "0-1"]
    assert (kept.count, kept.format, kept.bits) == (2, "float16", 16)
    up = groups["model.layers.*.mlp.up_proj", "0-1"]
    assert up.bits == round((128 * 64 * 3 + 16 * (128 + 64) + 32) / (128 * 64), 3), (
        "codes, two float16 scales, one number"
    )
    assert found.size is not None
    assert found.quantization is not None
    about = found.about
    assert about is not None
    assert about["source"]["name"] == "plain"
    digest = hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest()
    assert about["source"]["sha256"] == {"model.safetensors": digest}
    assert (about["recipe"]["name"], about["recipe"]["bits"], about["recipe"]["seed"]) == ("quick", 3, 0)
    assert (about["calibration"]["tokens"], about["calibration"]["text"]) == (256, "given")
    assert about["versions"]["onegraph"] == __version__
    assert about["versions"]["torch"] == torch.__version__
    status, out, errors = invoke(["verify", made["e8p"]])
    assert status == 0, errors
    assert out.splitlines()[-1] == "whole"
    for words in ("bits per weight in the linears", "name plain, sha256", "e8p at 2 bits"):
        assert words in out
    recipe = next(line for line in out.splitlines() if line.startswith("recipe"))
    assert recipe.split()[1:5] == ["name", "quick,", "bits", "3,"]
    assert "damping" not in recipe
    shown = json.loads(invoke(["verify", made["e8p"], "--json"])[1])
    assert shown == json.loads(json.dumps(found.as_dict()))
    assert shown["ok"] is True


def test_of_a_recipe_what_its_name_does_not_say_is_shown() -> None:
    good = json.loads(json.dumps({"name": "good"} | Recipe.preset("good", rho={2: 0.9}).to_dict()))
    assert unusual(good) == {"name": "good", "rho": {"2": 0.9}}
    assert unusual({"name": "another's", "lever": 1}) == {"name": "another's"}
    assert unusual({"name": ["no", "name"], "bits": 3}) == {"name": ["no", "name"]}
    assert unusual("words") == "words"
    many = {f"model.layers.{i}.mlp.down_proj": 4 for i in range(30)}
    assert phrase({"name": "good", "layers": many}) == "name good, layers (30 entries)", "never cut within a number"


def test_the_same_job_writes_the_same_bytes(model: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        quantize(model, tmp_path / name, format="nvfp4", device="cpu")
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()


# ----------------------------------------------------------------------------------------------------------- damage


@pytest.mark.parametrize("copy", KINDS, indirect=True)
def test_every_flipped_bit_of_the_weights_is_found(copy: Path) -> None:
    """25 of 25; without digests nearly all of them load."""
    rng = random.Random(17)
    files = sorted(copy.glob("*.safetensors"))
    for _ in range(25):
        file = rng.choice(files)
        good = file.read_bytes()
        start = 8 + int.from_bytes(good[:8], "little")
        at, bit = rng.randrange(start, len(good)), rng.randrange(8)
        file.write_bytes(good[:at] + bytes([good[at] ^ 1 << bit]) + good[at + 1 :])
        found = verify(copy)
        assert any(f"{file.name}: its SHA-256 is" in line for line in found.problems), (at, bit)
        file.write_bytes(good)
    assert verify(copy).ok


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "onegraph.json", "model.safetensors"])
def test_any_other_change_of_a_file_is_found(copy: Path, name: str) -> None:
    good = (copy / name).read_bytes()
    (copy / name).write_bytes(good + b" ")
    assert any(f"{name}: its SHA-256 is" in line for line in verify(copy).problems)
    (copy / name).unlink()
    assert any(name in line for line in verify(copy).problems)
    os.mkfifo(copy / name)  # is not waited for
    assert any(f"{name}: not a regular file" in line for line in verify(copy).problems)


def test_damaged_sums_are_a_problem(copy: Path) -> None:
    sums = copy / "SHA256SUMS"
    good = sums.read_text()
    sums.write_text(good.replace("  model", " model"))
    refused(copy, "SHA256SUMS: line 3 is", "two spaces")
    sums.write_text(good + "0" * 64 + "  ../../etc/passwd\n")
    refused(copy, "a file of the same directory")
    sums.write_text("".join(line for line in good.splitlines(True) if "model.safetensors" not in line))
    refused(copy, "SHA256SUMS: has no digest of model.safetensors")
    sums.write_text(good + "0" * 64 + "  gone.safetensors\n")
    refused(copy, "gone.safetensors: is missing")


def rewritten(path: Path, **changes: torch.Tensor) -> Path:
    """The model with other tensors, and without digests."""
    (path / "SHA256SUMS").unlink()
    save_file(load_file(path / "model.safetensors") | changes, path / "model.safetensors", metadata={"format": "pt"})
    return path


NAME = "model.layers.1.mlp.up_proj"


@pytest.mark.parametrize(
    ("copy", "suffix", "value", "words"),
    [
        ("e8p", "scale", torch.tensor(-1.0), "is -1.0; a scale is above zero"),
        ("e8p", "scale", torch.tensor(float("nan")), "holds NaN or infinite values"),
        ("e8p", "out_scale", torch.full((128,), float("inf")).half(), "holds NaN or infinite values"),
        ("e8p", "in_scale", torch.ones(63).half(), "has shape [63], the config needs [64]"),
        ("e8p", "codes", torch.zeros(128, 8), "is float32, allowed is int16"),
        ("nvfp4", "weight_scale", torch.full((128, 4), 255, dtype=torch.uint8), "holds NaN or negative scales"),
        ("nvfp4", "weight_scale_2", torch.tensor(0.0), "a global scale is above zero"),
    ],
    indirect=["copy"],
)
def test_values_and_shapes_are_checked_without_digests(
    copy: Path, suffix: str, value: torch.Tensor, words: str
) -> None:
    refused(rewritten(copy, **{f"{NAME}.{suffix}": value}), f"{NAME}.{suffix}", words)


def test_every_problem_is_told(copy: Path) -> None:
    bad = {f"{NAME}.scale": torch.tensor(0.0), "model.norm.weight": torch.full((64,), float("nan"))}
    found = verify(rewritten(copy, **bad))
    assert [next(name for name in bad if name in line) for line in found.problems] == list(bad)


# ------------------------------------------------------------------------------------------------- others' checkpoints


def test_a_checkpoint_without_digests_says_so(model: Path) -> None:
    found = verify(model)
    assert found.ok
    assert "no digests (SHA256SUMS): flipped bits in weights cannot be found" in found.unchecked
    status, out, _ = invoke(["verify", model])
    assert (status, out.splitlines()[-1]) == (0, "whole, as far as it could be checked")


def test_a_gguf_file(tmp_path: Path) -> None:
    found = verify(tiny.write_gguf(tmp_path / "m.gguf"))
    assert found.ok
    assert any(group.format == "GGUF blocks, as float16" for group in found.layers)


def test_deepseek(tmp_path: Path) -> None:
    save_deepseek("flash", tmp_path / "dense", hidden_size=64, moe_intermediate_size=32)
    quantize(tmp_path / "dense", tmp_path / "packed", format="nvfp4", device="cpu")
    for name, format in (("dense", "float32"), ("packed", "nvfp4")):
        found = verify(tmp_path / name)
        assert found.ok, found.problems
        experts = [group for group in found.layers if ".experts.*." in group.layers]
        assert {(group.layers[-2:], group.format) for group in experts} == {(w, format) for w in ("w1", "w2", "w3")}
        assert len(experts) == 3
        assert all(group.count % 2 == 0 for group in experts), "all experts of all blocks are in one line"


def test_mxfp4(model: Path, tmp_path: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    tensors = load_file(model / "model.safetensors")
    name = "model.layers.0.mlp.up_proj"
    n, k = tensors.pop(f"{name}.weight").shape
    tensors |= {f"{name}.weight_packed": torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)}
    tensors |= {f"{name}.weight_scale": torch.full((n, k // 32), 127, dtype=torch.uint8)}
    config["quantization_config"] = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}
    write_checkpoint(tmp_path / "good", config, tensors.items())
    found = verify(tmp_path / "good")
    assert found.ok, found.problems
    assert [group.count for group in found.layers if group.format == "mxfp4"] == [1]
    tensors[f"{name}.weight_scale"][3, 1] = 255
    write_checkpoint(tmp_path / "bad", config, tensors.items())
    refused(tmp_path / "bad", name, "scales that are NaN")


def test_the_cache_of_the_hub_names_digests(model: Path, tmp_path: Path) -> None:
    """Large files are called by their SHA-256 there; what is made of one says which model and revision it was."""
    repository = tmp_path / "models--somebody--small-model"
    snapshot = repository / "snapshots" / "0a1b2c"
    shutil.copytree(model, snapshot)
    (repository / "blobs").mkdir()
    weights = snapshot / "model.safetensors"
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    blob = weights.rename(repository / "blobs" / digest)
    weights.symlink_to(Path("../../blobs") / digest)
    found = verify(snapshot)
    assert found.ok
    assert found.digests == 1
    made = tmp_path / "made"
    quantize(snapshot, made, format="nvfp4", device="cpu")
    about = verify(made).about
    assert about is not None
    source = {"name": "somebody/small-model", "revision": "0a1b2c", "sha256": {"model.safetensors": digest}}
    assert about["source"] == source
    good = blob.read_bytes()
    blob.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    refused(snapshot, "model.safetensors: its SHA-256 is")


def test_a_damaged_tokenizer_file_is_found_without_digests(copy: Path) -> None:
    (copy / "SHA256SUMS").unlink()
    text = (copy / "tokenizer_config.json").read_text()
    (copy / "tokenizer_config.json").write_text(text[:-3])
    refused(copy, "tokenizer_config.json: not valid JSON")


def test_what_no_model_is(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such model"):
        verify(tmp_path / "none")
    status, _, errors = invoke(["verify", tmp_path / "none"])
    assert status == 2
    assert "no such model" in errors
    refused(tmp_path, "has no config.json; give a directory")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    found = verify(tmp_path)
    assert found.ok, "a model of another family is not a damaged one"
    assert any("since onegraph cannot run this model" in line and "gpt2" in line for line in found.unchecked)
    save_file({"w": torch.full((2,), float("inf"))}, tmp_path / "model.safetensors")
    refused(tmp_path, "tensor 'w' holds NaN or infinite values")


def test_what_a_checkpoint_says_of_itself_reaches_no_terminal_raw(copy: Path) -> None:
    about = {"source": {"name": "\x1b]0;owned\x07" + "x" * 9999}, "\x1b[2J": ["\u202e"]}
    (copy / "onegraph.json").write_text(json.dumps(about))
    _, out, _ = invoke(["verify", copy])
    assert "owned" in out
    assert all(c.isprintable() or c == "\n" for c in out)
    assert max(map(len, out.splitlines())) < 600
