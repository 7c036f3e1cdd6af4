"""The trellis: its layout against the formula, and what it refuses."""

from typing import Any

import pytest
import torch

from models import trellis_tensors
from onegraph.formats import trellis
from onegraph.formats.e8p import E8PConfig
from onegraph.formats.files import CheckpointError
from onegraph.formats.fused import expected_stack, stack_names, stacked
from onegraph.formats.quantization import parse_quantization
from onegraph.formats.trellis import BITS, TRELLIS, TrellisConfig

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
