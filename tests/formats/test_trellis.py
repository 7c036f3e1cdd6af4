"""The trellis: its layout against the formula, and what it refuses."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from models import trellis_tensors
from onegraph.api.verify import verify
from onegraph.formats import trellis
from onegraph.formats.checkpoint import Checkpoint
from onegraph.formats.e8p import E8PConfig
from onegraph.formats.files import CheckpointError
from onegraph.formats.fused import expected_stack, stack_names, stacked
from onegraph.formats.quantization import parse_quantization
from onegraph.formats.trellis import BITS, TRELLIS, TrellisConfig
from onegraph.models.llama import Llama
from published import code

each_rate = pytest.mark.parametrize("bits", BITS)


def codes_of(n: int, k: int, bits: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(bits)
    return torch.randint(-(2**15), 2**15, (n // 16, k * bits), generator=g, dtype=torch.int16)


@each_rate
def test_neighbours_share_all_bits_but_those_of_the_rate(bits: int) -> None:
    found = trellis.states(codes_of(32, 48, bits), bits, torch.arange(256))
    following = found.roll(-1, -1)  # a ring
    assert torch.equal(following & (1 << 16 - bits) - 1, found >> bits)
    assert torch.equal(trellis.pack(found, bits).flatten(-2), codes_of(32, 48, bits))


@each_rate
def test_decoding_is_the_formula(bits: int) -> None:
    """`models.trellis_tensors` decodes bit by bit; in_scale, out_scale and rotations are taken off."""
    tensors, _ = trellis_tensors(48, 64, bits, seed=3)
    q = trellis.decode(tensors["codes"], bits)
    assert q.dtype == torch.int16
    assert q.shape == (48, 64)
    first = trellis.states(tensors["codes"], bits, trellis.positions().flatten())[0, 0].view(16, 16).long()
    assert torch.equal(q[:16, :16], trellis.values(first))
    rows = torch.tensor([0, 47, 17, 8, 8])
    assert torch.equal(trellis.decode_rows(tensors["codes"], bits, rows), q[rows])


@pytest.mark.parametrize("code", trellis.CODES)
def test_a_large_layer_is_its_rows_of_tiles(code: int) -> None:
    """Many states look their values up, few compute them."""
    codes = codes_of(512, 512, 3)
    whole = trellis.decode(codes, 3, code)
    assert torch.equal(whole, torch.cat([trellis.decode(row, 3, code) for row in codes.split(1)]))


def test_values_are_near_to_a_gaussian() -> None:
    found = trellis.values(torch.arange(trellis.STATES)).float()
    assert (found.min(), found.max()) == (-510, 495)
    assert abs(found.mean()) < 0.05
    assert abs(found.std() / trellis.UNIT - 1) < 1e-3
    assert torch.equal(trellis.values(torch.tensor([-1, 0x12345])), trellis.values(torch.tensor([0xFFFF, 0x2345])))


def test_the_config_tells_the_rate_of_a_stack() -> None:
    layers = [trellis_tensors(32, 48, 5, seed)[0] for seed in range(3)]

    class File(dict):  # type: ignore[type-arg]
        def info(self, name: str) -> Any:
            return self[name]

    file, config = File(stacked(TRELLIS[5], "a", layers)), TrellisConfig(bits=2, layers={"a": 5})
    assert stack_names(file, "a", config)[0] is TRELLIS[5]
    expected = expected_stack(file, "a", 3, 32, 48, bias=False, quantization=config)
    assert {name: tuple(tensor.shape) for name, tensor in file.items()} == {
        n: shape for n, (shape, _) in expected.items()
    }
    assert expected_stack(file, "b", 3, 32, 48, bias=False, quantization=config)["b.codes"][0] == (3, 2, 96)
    with pytest.raises(CheckpointError, match=r"'a.codes' is in the file, and quantization_config has no rate for it"):
        stack_names(file, "a", TrellisConfig(bits=2, layers={"a": 16}))


@pytest.mark.parametrize(("n", "k"), [(24, 32), (32, 40), (0, 16), (16, 0)])
def test_tiles_are_whole(n: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"a linear of {n} x {k} cannot be stored as trellis at 3 bits; tiles have 16"):
        TRELLIS[3].check_size(n, k)


def test_each_format_reads_its_own_config() -> None:
    for config in (E8PConfig(bits=3), TrellisConfig(bits=3, layers={"a": 8, "b": 16}, lm_head=6)):
        assert parse_quantization(config.to_dict()) == config
    with pytest.raises(ValueError, match="format is 'other'; this version reads 'e8p', 'trellis'"):
        parse_quantization(TrellisConfig(bits=3).to_dict() | {"format": "other"})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose linears have random codes of 3 bits."""
    from fuzz import tiny

    folder = tmp_path_factory.mktemp("trellis")
    config = TrellisConfig(bits=3).to_dict()
    source = tiny.write_model(folder / "plain")
    return code(source, folder / "coded", lambda w: trellis_tensors(*w.shape, 3, 0), config, ("_proj",))


Q = "model.layers.1.self_attn.q_proj"
# What is put in the place of a tensor of `Q`, by suffix: of its own shape and dtype it is, or None.
TENSORS: list[tuple[str, str, Callable[[Tensor], Tensor | None], str]] = [
    (
        "another rate",
        "codes",
        lambda t: t[:, : t.shape[1] * 2 // 3].clone(),
        rf"'{Q}.codes' has shape .*, the config needs",
    ),
    ("a row of tiles too few", "codes", lambda t: t[1:].clone(), rf"'{Q}.codes' has shape .*, the config needs"),
    (
        "columns of tiles too many",
        "codes",
        lambda t: torch.cat((t, t), 1),
        rf"'{Q}.codes' has shape .*, the config needs",
    ),
    ("tiles as a dimension", "codes", lambda t: t.view(len(t), -1, 48), rf"'{Q}.codes' has shape .*, the config needs"),
    ("words of 32 bits", "codes", lambda t: t.int(), rf"'{Q}.codes' is int32, allowed is int16"),
    ("no codes", "codes", lambda t: None, rf"1 missing: '{Q}.codes'"),
    ("no scale", "scale", lambda t: None, rf"1 missing: '{Q}.scale'"),
    ("a scale for each row", "scale", lambda t: t.expand(8).clone(), rf"'{Q}.scale' has shape \[8\], the config needs"),
    ("NaN", "in_scale", lambda t: t * float("nan"), rf"'{Q}.in_scale' holds NaN or infinite values"),
    ("a start state", "start", lambda t: torch.zeros(4, 4, dtype=torch.int16), rf"unexpected: '{Q}.start'"),
    ("a code of exllamav3", "mcg", lambda t: torch.tensor(5, dtype=torch.int32), rf"unexpected: '{Q}.mcg'"),
]


@pytest.mark.parametrize(("suffix", "made", "message"), [t[1:] for t in TENSORS], ids=[t[0] for t in TENSORS])
def test_a_tensor_that_does_not_fit_is_named(
    suffix: str, made: Callable[[Tensor], Tensor | None], message: str, checkpoint: Path, tmp_path: Path
) -> None:
    path, name = Path(shutil.copytree(checkpoint, tmp_path / "m")), f"{Q}.{suffix}"
    tensors = load_file(path / "model.safetensors")
    found = made(tensors.pop(name, torch.empty(0)))
    save_file(tensors | ({} if found is None else {name: found}), path / "model.safetensors")
    with Checkpoint.open(path) as damaged, pytest.raises(ValueError, match=message) as caught:
        Llama.load(damaged)
    assert "\n" not in str(caught.value)
    assert not verify(path).ok


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 9}, "bits is 9; allowed: 1, 2, 3, 4, 5, 6, 7, 8"),
        ({"bits": 2.5}, "bits is 2.5; allowed: 1, 2"),
        ({"layers": {Q: 0}}, f"{Q}.* is 0; allowed: 1, 2"),
        ({"layers": {"model.layers.7.q": 2}}, "layers names 'model.layers.7.q', which is no linear of a block here"),
        ({"lm_head": 17}, "lm_head is 17; allowed: 1, 2"),
        ({"state_bits": 12}, "unknown key state_bits; known: "),
        ({"start_state": True}, "unknown key start_state; known: "),
        ({"codebook": "3inst"}, "unknown key codebook; known: "),
        ({"format_version": 2}, "format_version is 2; this version reads 1: a newer onegraph wrote it"),
    ],
    ids=str,
)
def test_a_config_that_does_not_fit_is_refused(
    change: dict[str, Any], message: str, checkpoint: Path, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(checkpoint, tmp_path / "m"))
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] |= change
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message), Checkpoint.open(path) as damaged:
        Llama.load(damaged)
