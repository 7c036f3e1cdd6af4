"""The bytes of a TurboQuant page: nothing wasted, nothing shared between tokens, and back again."""

from itertools import product

import pytest
import torch

from onegraph.formats.turboquant_layout import Coded, TurboQuantLayout, pack_pages, pack_tokens, unpack_pages


def coded(layout: TurboQuantLayout, bits: int, variant: str, *shape: int) -> Coded:
    g = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 1 << bits, (*shape, layout.head_dim), generator=g, dtype=torch.uint8)
    norms = torch.rand(shape, generator=g).half()
    if variant == "mse":
        return Coded(codes, norms)
    signs = torch.randint(0, 2, codes.shape, generator=g, dtype=torch.uint8)
    return Coded(codes, norms, signs, torch.rand(shape, generator=g).half())


SETTINGS = [
    pytest.param(TurboQuantLayout(dim, k, v, kv, vv, page), id=f"{dim}-{kv}{k}-{vv}{v}-{page}")
    for dim, page in ((64, 16), (80, 32), (96, 16), (128, 64), (192, 16), (256, 32))
    for k, v, kv, vv in [*product((1, 4), (2, 3), ("mse",), ("mse",)), (1, 4, "prod", "mse"), (4, 2, "prod", "prod")]
]


@pytest.mark.parametrize("layout", SETTINGS)
def test_pages_hold_what_was_packed_and_every_byte_is_some_tokens(layout: TurboQuantLayout) -> None:
    shape = (3, 2, layout.page_size)
    keys = coded(layout, layout.k_code_bits, layout.k_variant, *shape)
    values = coded(layout, layout.v_code_bits, layout.v_variant, *shape)
    pages = pack_pages(layout, keys, values)
    assert pages.shape == (3, 2, layout.page_bytes)
    for want, got in zip((keys, values), unpack_pages(layout, pages), strict=True):
        for name in ("codes", "norms", "signs", "residual_norms"):
            a, b = getattr(want, name), getattr(got, name)
            assert (a is None) == (b is None)
            assert a is None or torch.equal(a, b)
    places = layout.offsets(torch.arange(layout.page_size)).flatten().sort().values
    assert torch.equal(places, torch.arange(layout.page_bytes))  # no byte unused, none shared


def test_bytes_of_a_token_are_its_bits_and_its_norms() -> None:
    for dim, k, v in product((64, 80, 96, 128, 192, 256), (1, 2, 3, 4), (1, 2, 3, 4)):
        layout = TurboQuantLayout(dim, k, v)
        assert layout.bytes_per_token_head == dim * (k + v) // 8 + 4
        assert all(s.offset % 16 == 0 for s in layout.sections)
    assert TurboQuantLayout(128, 4, 4).bytes_per_token_head * 3.75 < 2 * 2 * 128  # against bf16, all counted
    assert TurboQuantLayout(128, 3, 4, "prod", "mse").bytes_per_token_head == 48 + 64 + 6


def test_a_token_can_be_written_alone() -> None:
    layout = TurboQuantLayout(128, 3, 4, page_size=32)
    keys, values = coded(layout, 3, "mse", 32), coded(layout, 4, "mse", 32)
    rows, page = pack_tokens(layout, keys, values), torch.zeros(layout.page_bytes, dtype=torch.uint8)
    for slot in torch.randperm(32):
        page[layout.offsets(slot)] = rows[slot]
    assert torch.equal(page, pack_pages(layout, keys, values))


def test_a_byte_holds_pairs_of_dimensions_in_its_nibbles() -> None:
    layout = TurboQuantLayout(16, 3, 2)
    codes = torch.zeros(1, 16, dtype=torch.uint8)
    codes[0, 2], codes[0, 3], codes[0, 9] = 5, 7, 4
    zeros = Coded(torch.zeros(1, 16, dtype=torch.uint8), torch.zeros(1).half())
    row = pack_tokens(layout, Coded(codes, torch.ones(1).half()), zeros)[0].tolist()
    assert row[:4] == [0b11_00_01_00, 0, 0, 0]  # low bits: dimension 2 at bit 2, 3 at bit 6
    assert row[4:6] == [0b0110_0010, 0]  # high bits: 2 at bit 1, 3 at bit 5; 9 (pair 4) at bit 6 of the first byte


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"k_bits": 5}, "k_bits is 5"),
        ({"v_bits": 0}, "v_bits is 0"),
        ({"head_dim": 72}, "head_dim is 72"),
        ({"page_size": 24}, "page_size is 24"),
        ({"v_variant": "qjl"}, "v_variant is 'qjl'"),
    ],
)
def test_settings_that_do_not_exist_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TurboQuantLayout(**({"head_dim": 64, "k_bits": 4, "v_bits": 4} | settings))
