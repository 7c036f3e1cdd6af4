"""E8P: the codebook is what the papers say, decode is exact, encode is nearest, and the rate buys the known quality."""

import shutil
from typing import Any

import pytest
import torch
from torch import Tensor

from onegraph.formats.e8p import E8P, E8PConfig, codebook, residual_dtype, sign_masks
from onegraph.formats.rotated import KEEP, resolve_rates
from onegraph.nn.linear import Linear
from onegraph.ops.cpu import e8p_encode
from onegraph.ops.e8p import e8p_decode, e8p_linear
from onegraph.ops.e8p_embedding import e8p_embedding
from onegraph.quant.e8p import encode, encode_in_calls, nearest_per_shift
from onegraph.quant.layer import dequantize, quantize_group
from onegraph.quant.recipe import GAUSSIAN_RHO, Recipe


@pytest.fixture(scope="module")
def every_code() -> Tensor:
    """float32 [65536, 8], w of the codes -32768 .. 32767."""
    codes = torch.arange(-(2**15), 2**15).to(torch.int16).unsqueeze(1)
    return e8p_decode(codes, None, codebook(), 2).float() / 4


def gaussian(count: int, seed: int = 0) -> Tensor:
    return torch.randn(8, count, generator=torch.Generator().manual_seed(seed))


# ------------------------------------------------------------------------------------------------------ codebook


def test_every_code_is_a_vector_of_its_own(every_code: Tensor) -> None:
    assert every_code.unique(dim=0).shape[0] == 2**16
    assert (every_code * 4).abs().max() == 11
    assert ((every_code * 4) % 2 == 1).all()


def test_codes_are_half_odd_vectors_of_even_sum_moved_by_a_quarter(every_code: Tensor) -> None:
    plus, minus = every_code - 0.25, every_code + 0.25
    shifted = (plus * 2 % 2 == 1).all(1)
    v = torch.where(shifted.unsqueeze(1), plus, minus)
    assert shifted.sum() == 2**15
    assert (v * 2 % 2 == 1).all()
    assert (v.sum(1) % 2 == 0).all()
    norm = v.square().sum(1)
    absolute = v.abs().unique(dim=0)
    assert absolute.shape[0] == 256
    counts = {n: int((absolute.square().sum(1) == n).sum()) for n in (2, 4, 6, 8, 10, 12)}
    assert counts == {2: 1, 4: 8, 6: 28, 8: 64, 10: 126, 12: 29}
    assert norm.max() == 12


def test_the_low_byte_is_signs_and_its_parity_the_shift() -> None:
    row = 100
    plain = codebook()[row].int()
    for signs, mask in ((0, [0] * 8), (0b11, [0xFC, 0xFC] + [0] * 6), (0b10, [0xFE, 0xFE] + [2] * 6)):
        code = torch.tensor([[row << 8 | signs]]).to(torch.int16)
        expected = (plain ^ torch.tensor(mask)).to(torch.int8)
        assert torch.equal(e8p_decode(code, None, codebook(), 2)[0], expected)
    everything = torch.arange(2**16).to(torch.int16).unsqueeze(1)
    table = codebook()[everything[:, 0].int() >> 8 & 255] ^ sign_masks()[everything[:, 0].int() & 255]
    assert torch.equal(table, e8p_decode(everything, None, codebook(), 2))


def test_third_bit_is_the_roots_of_e8() -> None:
    e = codebook()[256:].float() / 2
    assert e.unique(dim=0).shape[0] == 256
    norm, count = e.square().sum(1).unique(return_counts=True)
    assert dict(zip(norm.tolist(), count.tolist(), strict=True)) == {0.0: 1, 2.0: 240, 4.0: 15}
    roots = e[e.square().sum(1) == 2]
    gram = (roots @ roots.T).unique()
    assert gram.tolist() == [-2, -1, 0, 1, 2]


# -------------------------------------------------------------------------------------------------------- decode


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_stages_add_up_to_a_small_integer(bits: int, every_code: Tensor) -> None:
    source = torch.Generator().manual_seed(bits)
    codes = torch.randint(-(2**15), 2**15, (300, 4), generator=source)
    dtype = residual_dtype(bits)
    residual, value = None, every_code[codes + 2**15]
    if bits == 3:
        fine = torch.randint(0, 256, codes.shape, generator=source)
        value = value + codebook()[256:].float()[fine] / 4
        residual = fine.to(dtype)
    elif bits == 4:
        fine = torch.randint(-(2**15), 2**15, codes.shape, generator=source)
        value = value + every_code[fine + 2**15] / 4
        residual = fine.to(dtype)
    q = e8p_decode(codes.to(torch.int16), residual, codebook(), bits)
    assert q.dtype == torch.int8
    assert torch.equal(q.float() / (16 if bits == 4 else 4), value.view(300, 32))


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize(("n", "k"), [(192, 576), (49, 200), (256, 384)])
def test_linear_and_embedding_are_the_dense_layer(n: int, k: int, bits: int) -> None:
    source = torch.Generator().manual_seed(n)
    w = torch.randn(n, k, generator=source)
    tensors = quantize_group([w], torch.eye(k), [bits], Recipe(bits=bits, descent=0), source)[0]
    dense = dequantize(tensors, bits).double()
    x, bias = torch.randn(3, k, generator=source), torch.randn(n, generator=source)
    out_scale, in_scale = tensors["out_scale"].float() * tensors["scale"], tensors["in_scale"].float()
    args = tensors["codes"], tensors.get("residual"), codebook(), in_scale, out_scale
    y = e8p_linear(x, *args, bias, bits)
    truth = x.double() @ dense.T + bias
    assert (y - truth).norm() <= 1e-5 * truth.norm()
    ids = torch.tensor([[0, n - 1], [5, 5]])
    rows = e8p_embedding(ids, *args, bits)
    table = dequantize(tensors, bits, embedding=True)
    assert torch.allclose(rows, table[ids], rtol=1e-5, atol=1e-6)


def test_a_slice_at_multiples_of_128_is_the_slice_of_the_layer() -> None:
    source = torch.Generator().manual_seed(0)
    w = torch.randn(384, 512, generator=source)
    tensors = quantize_group([w], torch.eye(512), [4], Recipe(descent=0), source)[0]
    whole = dequantize(tensors, 4)
    layer = Linear(E8P[4], E8P[4].fold(tensors))
    for rows in (slice(0, 128), slice(128, 384), slice(0, 384)):
        for columns in (slice(0, 256), slice(128, 512), slice(256, 384)):
            cut = {
                "codes": tensors["codes"][rows, columns.start // 8 : columns.stop // 8].contiguous(),
                "residual": tensors["residual"][rows, columns.start // 8 : columns.stop // 8].contiguous(),
                "in_scale": tensors["in_scale"][columns],
                "out_scale": tensors["out_scale"][rows],
                "scale": tensors["scale"],
            }
            assert torch.allclose(dequantize(cut, 4), whole[rows, columns], atol=1e-6)
            x = torch.randn(2, columns.stop - columns.start, generator=source)
            assert torch.allclose(
                layer.part(rows=(rows.start, rows.stop), columns=(columns.start, columns.stop))(x),
                x @ whole[rows, columns].T,
                atol=1e-3,
            )


# -------------------------------------------------------------------------------------------------------- encode


BOTH = pytest.mark.parametrize("encode", [encode, encode_in_calls], ids=["in C", "in calls"])  # C where there is a GCC


@pytest.mark.parametrize("spread", [0.3, 1.0, 1.5, 4.0])
def test_encode_is_nearest_among_all_65536(spread: float, every_code: Tensor) -> None:
    x = gaussian(1500) * spread
    per_shift, both = nearest_per_shift(x)
    truths = []
    for i, shift in enumerate((0.25, -0.25)):  # half of the codes each
        some = every_code[((every_code - shift) * 2 % 2 == 1).all(1)]
        assert len(some) == 2**15
        truths.append(torch.cdist(x.T.double(), some.double()).amin(1).square())
        assert (((x - both[:, i]).double().square().sum(0) - truths[i]) <= 2e-6 * (1 + truths[i])).all()
        assert torch.equal(every_code[per_shift[i].to(torch.int16).long() + 2**15].T, both[:, i])
    truth = torch.minimum(*truths)
    for each in (encode, encode_in_calls):
        codes, _, value = each(x, 2)
        assert torch.equal(every_code[codes.to(torch.int16).long() + 2**15].T, value)
        found = (x - value).double().square().sum(0)
        assert ((found - truth) <= 2e-6 * (1 + truth)).all()


@pytest.mark.parametrize("spread", [0.2, 0.7, 1.5])
def test_third_bit_is_nearest(spread: float) -> None:
    from onegraph.quant.e8p import _nearest_e81b

    r = gaussian(20000) * spread
    row, e = _nearest_e81b(r)
    table = codebook()[256:].double() / 2
    assert torch.equal(table[row].T, e.double())
    truth = torch.cdist(r.T.double(), table).amin(1).square()
    assert ((r - e).double().square().sum(0) - truth <= 2e-6 * (1 + truth)).all()
    assert row.unique().numel() > 200


@BOTH
def test_ties_and_extremes_are_encoded(encode: Any) -> None:
    """Points on cell walls, zeros, infinities of float16 size: some nearest vector, and its own code."""
    x = torch.cat(
        [torch.zeros(8, 1), torch.full((8, 1), 0.25), torch.eye(8) * 0.5, torch.full((8, 1), 6e4), -torch.eye(8) * 1e4],
        dim=1,
    )
    for bits in (2, 3, 4):
        codes, residual, value = encode(x, bits)
        dtype = residual_dtype(bits)
        q = e8p_decode(
            codes.to(torch.int16).unsqueeze(1).contiguous(),
            None if dtype is None else residual.to(dtype).unsqueeze(1).contiguous(),
            codebook(),
            bits,
        )
        assert torch.equal(q.T.float() / (16 if bits == 4 else 4), value)


@BOTH
@pytest.mark.parametrize(
    ("bits", "wide", "known"),
    [(2, False, 0.0916), (3, False, 0.0297), (4, False, 0.0081), (4, True, 0.0079), (2, True, 0.0916)],
)
def test_gaussian_mse_at_each_rate(encode: Any, bits: int, wide: bool, known: float) -> None:
    """The table in docs/benchmarks/quality.md, to 1 per cent; rate-distortion allows .0625, .0156 and .0039."""
    x = gaussian(60000, seed=3) * GAUSSIAN_RHO[bits]
    mse = ((encode(x, bits, wide=wide)[2] - x).square().mean() / x.square().mean()).item()
    assert mse == pytest.approx(known, rel=0.01)


@BOTH
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_more_candidates_are_never_worse_and_have_their_own_codes(encode: Any, bits: int) -> None:
    x = gaussian(5000, seed=1) * 0.9
    codes, residual, value = encode(x, bits, wide=True)
    assert ((value - x).norm(dim=0) <= (encode(x, bits)[2] - x).norm(dim=0) + 1e-6).all()
    dtype = residual_dtype(bits)
    fine = None if dtype is None else residual.to(dtype).unsqueeze(1)
    q = e8p_decode(codes.to(torch.int16).unsqueeze(1), fine, codebook(), bits)
    assert torch.equal(q.T.float() / (16 if bits == 4 else 4), value)


@BOTH
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_a_metric_decides_between_candidates(encode: Any, bits: int) -> None:
    x = gaussian(4000) * GAUSSIAN_RHO[bits]
    metric = torch.linalg.cholesky(torch.diag(torch.logspace(-1, 1, 8)) + 0.1).T.contiguous()

    def cost(value: Tensor) -> float:
        return (metric @ (value - x)).square().sum().item()

    assert cost(encode(x, bits, metric)[2]) < 0.97 * cost(encode(x, bits)[2])


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_c_encodes_what_calls_do(bits: int, wide: bool, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("gcc") is None:
        pytest.skip("no GCC here")
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    factor = torch.linalg.cholesky(torch.eye(8) + 0.3).T.contiguous()
    for spread in (0.6, 1.0, 2.5):
        x = gaussian(1000, seed=bits) * spread
        for metric in (None, factor, torch.stack((factor, torch.eye(8), 2 * factor.T, factor, factor))):
            found, wanted = encode(x, bits, metric, wide=wide), encode_in_calls(x, bits, metric, wide=wide)
            same = (found[0] == wanted[0]) & (found[1] == wanted[1])
            assert same.float().mean() > 0.99, "near ties may fall either way"
            assert torch.equal(found[2][:, same], wanted[2][:, same])
    strided = gaussian(2000)[:, ::2]
    assert torch.equal(encode(strided, bits)[0], encode(strided.contiguous(), bits)[0])


def test_without_a_compiler_calls_encode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(e8p_encode, "library", lambda *_: None)
    assert e8p_encode.native(4, []) is None


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("parts", [0, 5])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_the_encoder_of_a_gpu_is_the_encoder(
    bits: int, wide: bool, parts: int, kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from onegraph.quant import graphs

    if not kernel:
        monkeypatch.setattr(graphs.e8p_encode.KERNEL, "is_built", lambda device: False)
    device = torch.device("cuda", torch.cuda.current_device())
    run = graphs.encoder(device, 4000, bits, wide, parts)
    for seed, count in ((1, 2400), (2, 4000)):  # fewer than it is made for, too
        x = gaussian(count, seed) * GAUSSIAN_RHO[bits]
        metric = torch.eye(8) + 0.1 * gaussian(8, seed)
        if parts:
            metric = torch.stack([metric * (1 + i) + 0.1 * gaussian(8, 9 + i) for i in range(parts * count // 4000)])
        wanted = encode(x, bits, metric, wide=wide)
        found = run(x.to(device), bits, metric.to(device))
        same = (found[2].cpu() == wanted[2]).all(0)
        each = metric.reshape(-1, 8, 8)

        def cost(value: Tensor, x: Tensor = x, each: Tensor = each) -> Tensor:
            error = (x - value).view(8, len(each), -1).transpose(0, 1)
            return (each @ error).square().sum(1).flatten()

        assert same.float().mean() > 0.999  # near ties may fall either way, and one sum have two codes
        assert torch.allclose(cost(found[2].cpu()), cost(wanted[2]), rtol=1e-3, atol=1e-4)
        dtype = residual_dtype(bits)
        residual = None if dtype is None else found[1].cpu().to(dtype).unsqueeze(1)
        q = e8p_decode(found[0].cpu().to(torch.int16).unsqueeze(1), residual, codebook(), bits)
        assert torch.equal(q.T.float() / (16 if bits == 4 else 4), found[2].cpu())


# --------------------------------------------------------------------------------------------------------- checks


def good(bits: int = 4) -> dict[str, Any]:
    return {
        "x": torch.zeros(2, 16),
        "codes": torch.zeros(4, 2, dtype=torch.int16),
        "residual": torch.zeros(4, 2, dtype=torch.int16),
        "codebook": codebook(),
        "in_scale": torch.ones(16),
        "out_scale": torch.ones(4),
        "bias": None,
        "bits": bits,
        "add": None,
        "eps": None,
        "silu": False,
        "wide": False,
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 5}, "allowed: 2, 3, 4"),
        ({"bits": 2}, "pass None"),
        ({"bits": 3}, "uint8"),
        ({"residual": None}, "residual is None"),
        ({"residual": torch.zeros(4, 3, dtype=torch.int16)}, "as codes"),
        ({"codes": torch.zeros(4, 2, dtype=torch.int32)}, "int16"),
        ({"codes": torch.zeros(2, 4, dtype=torch.int16).T}, "contiguous"),
        ({"codebook": torch.zeros(256, 8, dtype=torch.int8)}, "formats.e8p.codebook"),
        ({"x": torch.zeros(2, 24)}, "last dimension of 16"),
        ({"x": torch.zeros(2, 16, dtype=torch.float64)}, "allowed: float32"),
        ({"x": torch.zeros(16, 2).T}, "contiguous"),
        ({"in_scale": torch.ones(8)}, "in_scale"),
        ({"in_scale": torch.ones(16).half()}, "float32"),
        ({"out_scale": torch.ones(5)}, "out_scale"),
        ({"bias": torch.ones(3)}, "bias"),
        ({"silu": True}, "last dimension of 32"),
        ({"eps": -1.0}, "eps must be 0 or more"),
        ({"x": torch.zeros(2, 32), "silu": True, "eps": 0.0}, "one of the two"),
        ({"add": torch.zeros(2, 5)}, r"float32 \(2, 4\)"),
        ({"add": torch.zeros(2, 4).half()}, "as the result"),
        ({"codes": torch.zeros(4, 2, dtype=torch.int16, device="meta")}, "on one device|one device"),
    ],
)
def test_arguments_that_are_refused(change: dict[str, Any], message: str) -> None:
    e8p_linear(*good().values())
    with pytest.raises(ValueError, match=message):
        e8p_linear(*(good() | change).values())


def test_embedding_ids_are_checked() -> None:
    parts = good()
    with pytest.raises(ValueError, match="int32, int64"):
        e8p_embedding(torch.zeros(2), *[parts[key] for key in list(parts)[1:6]], 4)


def test_what_a_linear_stores() -> None:
    assert E8P[3].layout(10, 16)["residual"] == ((10, 2), torch.uint8)
    assert "residual" not in E8P[2].layout(10, 16)
    assert E8P[4].bits(1000, 800, bias=True) == 1000 * 800 * 4 + 16 * 1800 + 32 + 32 * 1000
    with pytest.raises(ValueError, match="groups of 8"):
        E8P[4].layout(10, 12)


def test_config_round_trip() -> None:
    config = E8PConfig(bits=3, layers={"a.b": 4, "a.c": KEEP}, lm_head=4)
    assert E8PConfig.from_dict(config.to_dict()) == config
    assert [config.bits_of(name) for name in ("a.b", "a.c", "x", "lm_head", "model.embed_tokens")] == [4, 16, 3, 4, 16]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 5}, "allowed: 2, 3, 4"),
        ({"bits": True}, "allowed: 2, 3, 4"),
        ({"bits": "4"}, "allowed: 2, 3, 4"),
        ({"format": "e8q"}, "format is 'e8q'"),
        ({"format_version": 2}, "format_version is 2"),
        ({"quant_method": "gptq"}, "quant_method"),
        ({"group_size": 64}, "unknown key group_size"),
        ({"layers": ["a"]}, "must map"),
        ({"layers": {"a": 1}}, "allowed: 2, 3, 4, 16"),
        ({"layers": {3: 4}}, "module names"),
        ({"lm_head": 16}, "lm_head is 16"),
    ],
)
def test_configs_that_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        E8PConfig.from_dict(E8PConfig(bits=4).to_dict() | change)


def test_config_must_be_an_object_with_bits() -> None:
    for wrong in (None, [], "e8p", {}):
        with pytest.raises(ValueError, match="quantization_config"):
            E8PConfig.from_dict(wrong)
    without = E8PConfig(bits=4).to_dict()
    del without["bits"]
    with pytest.raises(ValueError, match="no bits"):
        E8PConfig.from_dict(without)


def test_rate_patterns() -> None:
    names = ["l.0.up", "l.0.down", "l.1.down"]
    assert resolve_rates({"*.down": 3, "l.0.*": 4, "l.0.down": 2}, names, 4) == {"l.0.down": 2, "l.1.down": 3}
    with pytest.raises(ValueError, match="matches no linear"):
        resolve_rates({"*.gate": 2}, names, 4)
    with pytest.raises(ValueError, match="allowed"):
        resolve_rates({"*.up": 5}, names, 4)
