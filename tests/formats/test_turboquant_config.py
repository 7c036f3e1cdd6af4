"""A KV cache's settings: the limits of each, what a string means, and the bytes that it needs."""

import re

import pytest
import torch

from onegraph.formats.turboquant import DRAFTS, TurboQuantConfig, hadamard_matrix, parse_kv


@pytest.mark.parametrize(
    ("name", "most"), [("window", 1 << 20), ("first", 1 << 10), ("last", 1 << 10), ("seed", 1 << 31)]
)
def test_numbers_have_limits(name: str, most: int) -> None:
    for value in (1, most):
        assert getattr(TurboQuantConfig(k_bits=4, v_bits=4, **{name: value}), name) == value
    for value in (-1, most + 1):
        with pytest.raises(ValueError, match=rf"turboquant: {name} is {value}; allowed is 0 to {most}"):
            TurboQuantConfig(k_bits=4, v_bits=4, **{name: value})


@pytest.mark.parametrize("bits", [0, 5, 16])
def test_rates_are_one_to_four(bits: int) -> None:
    with pytest.raises(ValueError, match=f"{bits} bits for keys; allowed are 1, 2, 3 and 4"):
        TurboQuantConfig(k_bits=bits, v_bits=4)
    with pytest.raises(ValueError, match=f"{bits} bits for values"):
        TurboQuantConfig(k_bits=4, v_bits=bits)


@pytest.mark.parametrize(("mode", "window"), [("hybrid", 0), ("full", 1), ("shadow", 64)])
def test_a_window_belongs_to_one_mode(mode: str, window: int) -> None:
    with pytest.raises(ValueError, match=f"mode is {mode} and window {window}"):
        TurboQuantConfig(k_bits=4, v_bits=4, mode=mode, window=window)


def test_edge_layers_take_the_rate_of_the_edge() -> None:
    setting = TurboQuantConfig(k_bits=3, v_bits=2, first=2, last=1, edge="k4v3")
    assert [setting.rate(i, 6) for i in range(6)] == [(4, 3), (4, 3), (3, 2), (3, 2), (3, 2), (4, 3)]
    assert TurboQuantConfig(k_bits=3, v_bits=2, first=1).rate(0, 2) == (16, 16)
    assert TurboQuantConfig(k_bits=3, v_bits=2).rate(0, 1) == (3, 2)
    with pytest.raises(ValueError, match="edge is 'wide'; it is written like 4 or k3v4"):
        TurboQuantConfig(k_bits=3, v_bits=2, edge="wide")


def test_bytes_of_a_token_and_of_a_sequence() -> None:
    sizes = {"layers": 4, "kv_heads": 3, "head_dim": 64}
    token = 64 * (3 + 2) // 8 + 2 * 2  # codes of keys and values, a norm of each
    plain = TurboQuantConfig(k_bits=3, v_bits=2, window=10)
    assert plain.token_bytes(**sizes) == 4 * 3 * token
    assert plain.ring == 10 + 2 * DRAFTS
    assert plain.sequence_bytes(**sizes) == 4 * (10 + 2 * DRAFTS) * 2 * 3 * 64 * 2
    edged = TurboQuantConfig(k_bits=3, v_bits=2, window=10, first=1)
    assert edged.token_bytes(**sizes) == 3 * (3 * token + 2 * 64 * 2)
    assert edged.sequence_bytes(**sizes) == plain.sequence_bytes(**sizes) * 3 // 4
    assert edged.token_bytes(**sizes, exact_bytes=4) == 3 * (3 * token + 2 * 64 * 4)
    assert edged.sequence_bytes(**sizes, exact_bytes=4) == plain.sequence_bytes(**sizes) * 3 // 2
    shadow = TurboQuantConfig(k_bits=3, v_bits=2, mode="shadow", window=0, last=1)
    assert shadow.token_bytes(**sizes) == 3 * (3 * (token + 2 * 64 * 2) + 2 * 64 * 2)
    assert shadow.ring == shadow.sequence_bytes(**sizes) == 0
    signs = TurboQuantConfig(k_bits=3, v_bits=2, keys="prod")
    assert signs.token_bytes(**sizes) == 4 * 3 * (token + 2), "a norm of the residual, too"


@pytest.mark.parametrize(
    ("text", "setting"),
    [
        ("turboquant:4", {}),
        ("turboquant:k4v4", {}),
        ("turboquant:k3v1", {"k_bits": 3, "v_bits": 1}),
        ("turboquant:4,mode=full", {"mode": "full", "window": 0}),
        ("turboquant:4,mode=hybrid,window=1", {"window": 1}),
        (
            "turboquant:4,seed=2147483648,first=1,last=2,edge=k4v3",
            {"seed": 1 << 31, "first": 1, "last": 2, "edge": "k4v3"},
        ),
        ("turboquant:4,keys=prod,values=prod,scale=norm", {"keys": "prod", "values": "prod", "scale": "norm"}),
        ("turboquant:4,rotation=qr", {"rotation": "qr"}),
    ],
)
def test_a_string_and_back(text: str, setting: dict[str, object]) -> None:
    found = parse_kv(text)
    assert found == TurboQuantConfig(**({"k_bits": 4, "v_bits": 4} | setting))
    assert parse_kv(str(found)) == found


def test_what_is_usual_is_not_written() -> None:
    assert str(TurboQuantConfig(k_bits=4, v_bits=4)) == "turboquant:4"
    assert str(TurboQuantConfig(k_bits=4, v_bits=3, window=8, last=1)) == "turboquant:k4v3,window=8,last=1"
    assert parse_kv("exact") is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("turboquant", "kv is 'turboquant'; allowed are exact, turboquant:4"),
        ("turboquant:", "kv is 'turboquant:'"),
        ("turbo:4", "kv is 'turbo:4'"),
        ("x" * 61, "kv is '" + "x" * 57 + "...'"),
        ("x" * 60, "kv is '" + "x" * 60 + "'"),
        ("turboquant:k4", "the rate is 'k4'; it is written like 4 or k3v4"),
        ("turboquant:4 ", "the rate is '4 '"),
        ("turboquant:1234", "the rate is '1234'"),
        ("turboquant:123", "123 bits for keys"),
        ("turboquant:k4v123", "123 bits for values"),
        ("turboquant:4,", "option '' is not understood"),
        ("turboquant:4,window", "option 'window' is not understood; allowed are name=value with mode, window, first"),
        ("turboquant:4,window=", "option 'window=' is not understood"),
        ("turboquant:4,k_bits=3", "option 'k_bits=3' is not understood"),
        ("turboquant:4,seed=1,seed=1", "option seed is given twice"),
        ("turboquant:4,seed=-1", "seed is '-1'; it must be a number"),
        ("turboquant:4,seed=²", "seed is '²'; it must be a number"),
        ("turboquant:4,seed=123456789012", "seed is '123456789012'; it must be a number"),
        ("turboquant:4,seed=12345678901", "seed is 12345678901; allowed is 0 to"),
        ("turboquant:4,mode=fast", "mode is 'fast'; allowed are hybrid, full and shadow"),
        ("turboquant:4,mode=full,window=3", "mode is full and window 3"),
    ],
)
def test_strings_that_mean_nothing(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=re.escape(why)) as caught:
        parse_kv(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("order", [1, 2, 12, 20, 64, 80, 96, 192])
def test_hadamard_matrices_are_signs_with_orthogonal_rows(order: int) -> None:
    matrix = hadamard_matrix(order)
    assert matrix.dtype == torch.int8
    assert (matrix.abs() == 1).all()
    assert torch.equal(matrix.int() @ matrix.int().T, order * torch.eye(order, dtype=torch.int32))
