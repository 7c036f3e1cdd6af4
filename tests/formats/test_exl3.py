"""EXL3: its bits against exllamav3's own decoder and against the layout, its files from end to end, what is refused."""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from models import Decoder
from onegraph.formats import trellis
from onegraph.formats.checkpoint import Checkpoint
from onegraph.formats.exl3 import CODEBOOKS, EXL3, MULTIPLIERS
from onegraph.formats.files import CheckpointError
from onegraph.formats.quantization import parse_quantization
from onegraph.formats.trellis import BITS
from onegraph.formats.weight import Part
from onegraph.models.llama import Llama
from onegraph.nn.experts import Experts
from onegraph.ops.weight import weight_ops
from published import EXL3_PLACES, LAYOUTS, MLP, WHOLE, Layout, change, code, exl3, exl3_values, padded, save
from test_weight_format import Held

# SHA-256 of the numbers that exllamav3 1.4.1 decodes `rings` to at 1 to 8 bits: its `dq_dispatch` (exl3_dq.cuh,
# codebook.cuh) compiled for a CPU, float16 in the order of its `tensor_core_perm`.
DECODED = {
    "3inst": "2de28b4dbf3904f4ab9670470fb046dec6cae6e87f423f86677d9627c5f91af1",
    "mcg": "d9744e5203b94f25ec6c7133478c03a3d5532f97ca345f9f5c5882e0c0421b77",
    "mul1": "423d67589425396b1970f9de8af04bf2a416c7b46eb535b2776bcc90429b2024",
}
Q = "model.layers.1.self_attn.q_proj"


def rings(bits: int) -> Tensor:
    """The trellis of a layer of 32 inputs and 48 outputs."""
    given = hashlib.shake_256(b"EXL3").digest(2 * 3 * 32 * bits)
    return torch.from_numpy(np.frombuffer(given, "<i2").reshape(2, 3, 16 * bits).copy())


def layer(bits: int, codebook: str) -> dict[str, Tensor]:
    found = {"a.trellis": rings(bits), "a.suh": torch.ones(32).half(), "a.svh": torch.ones(48).half()}
    if codebook in MULTIPLIERS:
        found[f"a.{codebook}"] = torch.tensor(MULTIPLIERS[codebook] - 2**32, dtype=torch.int32)
    return found


def inner(bits: int, codebook: str) -> Tensor:
    """The numbers of `rings` before any rotation, float16 [inputs, outputs]."""
    format = EXL3[bits, codebook]
    codes = format.read(Held(layer(bits, codebook)), "a")["codes"]
    values = trellis.decode(codes, bits, format.code).view(3, 16, 2, 16)
    return values.flip(1, 3).reshape(48, 32).t().contiguous()  # tiles run backwards


@pytest.mark.parametrize("codebook", CODEBOOKS)
def test_decoding_has_the_bits_of_exllamav3(codebook: str) -> None:
    found = b"".join(inner(bits, codebook).numpy().tobytes() for bits in BITS)
    assert hashlib.sha256(found).hexdigest() == DECODED[codebook]


@pytest.mark.parametrize("codebook", CODEBOOKS)
@pytest.mark.parametrize("bits", BITS)
def test_decoding_is_the_layout(bits: int, codebook: str) -> None:
    """A ring as one integer, highest bit first: weight p is the value of the 16 bits that end with its own."""
    want = np.zeros((2, 3, 256), np.float16)
    for at in np.ndindex(2, 3):
        number = 0
        for word in rings(bits)[at].numpy().view("<u4"):
            number = number << 32 | int(word)
        size = 256 * bits
        twice = number << size | number
        states = [twice >> size - bits * (p + 1) & 0xFFFF for p in range(256)]
        want[at][EXL3_PLACES] = exl3_values(codebook)[states]
    tiles = want.reshape(2, 3, 16, 16).transpose(0, 2, 1, 3).reshape(32, 48)
    assert np.array_equal(inner(bits, codebook).numpy(), tiles)


def test_packed_signs_are_signs() -> None:
    """A set bit is -1, lowest bit first."""
    tensors, dense = exl3(2, "3inst", old=True)(torch.randn(128, 256, generator=torch.Generator().manual_seed(0)))
    signs = [1 - 2 * (int(tensors["su"][i // 16]) >> i % 16 & 1) for i in range(256)]
    scales = {"suh": torch.tensor(signs).half(), "svh": torch.ones(128).half(), "trellis": tensors["trellis"]}
    for part in (Part(), Part(columns=(128, 256))):
        format = EXL3[2, "3inst"]
        old = format.read(Held({f"a.{key}": value for key, value in tensors.items()}), "a", part)
        new = format.read(Held({f"a.{key}": value for key, value in scales.items()}), "a", part)
        assert torch.equal(old["in_scale"], new["in_scale"])
        columns = slice(*part.columns) if part.columns else slice(None)
        assert torch.allclose(weight_ops(format).decode(format, old), dense[:, columns], atol=1e-5)


def test_quantizing_comes_near() -> None:
    """The writer takes the nearest follower of each state and closes each ring with zeros: more bits, less error."""
    weight = torch.randn(128, 128, generator=torch.Generator().manual_seed(1)) * 0.02
    for codebook in CODEBOOKS:
        few, many = (exl3(bits, codebook)(weight)[1] - weight for bits in (3, 6))
        assert many.norm() < 0.3 * weight.norm()
        assert many.norm() < 0.6 * few.norm()


def test_a_head_of_its_own_unties_the_embedding(tmp_path: Path) -> None:
    """exllamav3 quantizes the head of tied models and leaves config.json as it is."""
    hf = save(LAYOUTS["EXL3 mcg"], tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    row = torch.arange(3, 20)
    with Checkpoint.open(tmp_path / "m") as checkpoint, torch.no_grad():
        got = Decoder(Llama.load(checkpoint), rows=1, max_context=32).feed([row.tolist()])[0]
        want = hf(row[None]).logits[0]
    assert (got - want).abs().max() <= 1e-4 * want.abs().max()


def test_the_commands_take_an_exl3_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fuzz import tiny
    from test_cli import invoke

    for key, value in (("hidden_size", 128), ("num_attention_heads", 2), ("head_dim", 64)):
        monkeypatch.setitem(tiny.CONFIG, key, value)
    model, text = tiny.write_model(tmp_path / "plain"), tmp_path / "text.txt"
    text.write_text("the thing in the inn, and a hat. " * 40)
    config = {"quant_method": "exl3", "bits": 8.0, "head_bits": 8}
    path = code(model, tmp_path / "exl3", exl3(8, "mcg"), config, ("_proj",))
    status, out, errors = invoke(["verify", path])
    assert status == 0, errors
    assert "exl3 mcg at 8 bits" in out
    more = ["--text", text, "--tokens", 300, "--window", 100]
    status, out, errors = invoke(["eval", path, "--reference", model, "--ab", *more, "--json"])
    assert status == 0, errors
    rows = json.loads(out)["ab"]
    assert all(0 < row["kl"] < 0.3 for row in rows)
    assert {row["bits"] for row in rows if row["component"] != "all"} == {8.252}  # with two scales for 128 x 128
    status, out, errors = invoke(["generate", path, "--raw", "--prompt", "a hat in the inn", "--max-tokens", 8])
    assert status == 0, errors
    assert out.strip()


def test_another_codebook_is_refused() -> None:
    with pytest.raises(ValueError, match="codebook is '2mad'; EXL3 is read with 3inst, mcg, mul1"):
        parse_quantization({"quant_method": "exl3", "bits": 4.0, "codebook": "2mad"})


DAMAGE: list[tuple[str, str, Any, str]] = [
    ("half a bit", "trellis", torch.zeros(16, 16, 40), rf"'{Q}.trellis' has shape \[16, 16, 40\]; EXL3 has .* 1 to 8"),
    ("9 bits", "trellis", torch.zeros(16, 16, 144), rf"'{Q}.trellis' has shape \[16, 16, 144\]; EXL3 has"),
    ("no bits", "trellis", torch.zeros(16, 16, 0), rf"'{Q}.trellis' has shape \[16, 16, 0\]; EXL3 has"),
    ("no tiles", "trellis", torch.zeros(16, 768), rf"'{Q}.trellis' has shape \[16, 768\]; EXL3 has"),
    ("other tiles", "trellis", torch.zeros(16, 8, 48), rf"'{Q}.trellis' has shape \[16, 8, 48\], the config needs"),
    ("no suh", "suh", None, rf"1 missing: '{Q}.suh'"),
    ("no svh", "svh", None, rf"1 missing: '{Q}.svh'"),
    ("no trellis", "trellis", None, rf"missing: '{Q}.weight'"),
    ("two codes", "mul1", torch.tensor(0), rf"there are '{Q}.mcg' and '{Q}.mul1'; a layer has one code"),
    ("a multiplier", "mcg", torch.tensor(5), rf"'{Q}.mcg' is 0x5; exllamav3's mcg has 0xcbac1fed"),
    ("a scale", "scale", torch.tensor(1), rf"unexpected: '{Q}.scale'"),
]


@pytest.mark.parametrize(("suffix", "made", "message"), [d[1:] for d in DAMAGE], ids=[d[0] for d in DAMAGE])
def test_what_does_not_fit_is_named(suffix: str, made: Any, message: str, tmp_path: Path) -> None:
    save(LAYOUTS["EXL3 mcg"], tmp_path / "m")
    if made is not None:
        made = made.to(torch.int16 if made.dim() else torch.int32)
    change(tmp_path / "m", f"{Q}.{suffix}", made)
    with Checkpoint.open(tmp_path / "m") as checkpoint, pytest.raises(ValueError, match=message) as caught:
        Llama.load(checkpoint)
    assert "\n" not in str(caught.value)


def routed(path: Path) -> Any:
    """transformers' model of a checkpoint whose experts are in EXL3; gate and up have their own scales of inputs."""
    layout = Layout(dict.fromkeys(MLP, exl3(4, "mul1")), {"quant_method": "exl3"}, variant="qwen3_moe")
    return save(dataclasses.replace(layout, sizes=WHOLE | {"moe_intermediate_size": 128}), path)


def test_routed_experts_are_those_of_transformers(tmp_path: Path) -> None:
    hf, row = routed(tmp_path / "m"), torch.arange(3, 20)
    with Checkpoint.open(tmp_path / "m") as checkpoint, torch.no_grad():
        llama = Llama.load(checkpoint)
        gate_up = next(module for module in llama.modules() if isinstance(module, Experts)).gate_up
        assert gate_up.in_scale.shape[1] == 2
        assert not torch.equal(gate_up.in_scale[:, 0], gate_up.in_scale[:, 1])
        got = Decoder(llama, rows=1, max_context=32).feed([row.tolist()])[0]
        want = hf(row[None]).logits[0]
    assert (got - want).abs().max() <= 1e-4 * want.abs().max()


def test_experts_of_two_rates_are_refused(tmp_path: Path) -> None:
    routed(tmp_path / "m")
    name = "model.layers.0.mlp.experts.1.up_proj"
    with Checkpoint.open(tmp_path / "m") as checkpoint:
        tiles = checkpoint.info(f"{name}.trellis").shape
    change(tmp_path / "m", f"{name}.trellis", torch.zeros(*tiles[:2], 32, dtype=torch.int16))
    message = f"{name} is exl3 mul1 at 2 bits and other experts of its layer are exl3 mul1 at 4 bits"
    with Checkpoint.open(tmp_path / "m") as checkpoint, pytest.raises(CheckpointError, match=message):
        Llama.load(checkpoint)


def test_a_padded_layer_has_the_tensors_of_the_padded_one() -> None:
    padded = exl3(4, "3inst")(torch.randn(256, 128))[0]["trellis"]
    found = EXL3[4, "3inst"].expected(Held({"a.trellis": padded}), "a", 192, 96, bias=True)
    assert {name: shape for name, (shape, _) in found.items()} == {
        "a.trellis": (8, 16, 64), "a.suh": (128,), "a.svh": (256,), "a.bias": (256,),
    }  # fmt: skip


def test_padded_experts_are_refused(tmp_path: Path) -> None:
    layout = Layout(dict.fromkeys(MLP, padded(exl3(1, "mcg"))), {"quant_method": "exl3"}, variant="qwen3_moe")
    save(dataclasses.replace(layout, sizes=WHOLE | {"moe_intermediate_size": 96}), tmp_path / "m")
    message = r"experts.0.gate_proj is padded in the file; padded experts are not read, load another form of it"
    with Checkpoint.open(tmp_path / "m") as checkpoint, pytest.raises(CheckpointError, match=message):
        Llama.load(checkpoint)
