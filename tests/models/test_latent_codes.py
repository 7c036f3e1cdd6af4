"""The latent cache in FP8 and in TurboQuant's codes, against transformers' models whose latents are rounded likewise.

What a latent is rounded to is computed here from the formats' definitions, with plain matrices and a search over all
levels; so the difference that is left is float32's, and an exact cache or another rate is far outside it.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engines import STEPS, maker, simulated_step
from models import Decoder, hf_model, save_hf
from onegraph.check.api import check_step
from onegraph.engine.draft import NgramDrafter
from onegraph.engine.engine import Engine
from onegraph.engine.params import SamplingParams
from onegraph.formats import latent_kv
from onegraph.formats.checkpoint import Checkpoint
from onegraph.formats.turboquant import codebook, parse_kv, rotation
from onegraph.models.llama import Llama
from onegraph.models.load import load_decoder
from onegraph.models.ranks import Ranks
from onegraph.nn.latent import LatentCache
from onegraph.ops.latent_attention import quantize

VARIANTS = ["deepseek_v3", "deepseek_v3_plain", "deepseek_v32", "glm_moe_dsa", "mistral4", "kimi_linear"]
RANK = 64  # codebooks have it; the tiny models' own is 40
CODES = ["fp8", "turboquant:4,mode=full", "turboquant:3,mode=full,scale=unbiased", "turboquant:2,mode=full,seed=5"]
FLOAT32 = 2e-4  # of logits: a few hundred sums of float32, and codes at near-ties


def tokens(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 131, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def load(path: Path, kv: str, device: str = "cpu") -> Llama:
    with Checkpoint.open(path) as checkpoint:
        model = Llama.load(checkpoint, device)
    model.fp8_kv = kv == "fp8"
    return model


def decoder(path: Path, kv: str, **sizes: Any) -> Decoder:
    return Decoder(load(path, kv), kv=None if kv == "fp8" else parse_kv(kv), **sizes)


def engine(path: Path, kv: str, **sizes: Any) -> Engine:
    sizes = {"max_batch": 2, "max_context": 96, "page_size": 8, "chunk": 16, "capture": False} | sizes
    return Engine(load(path, kv), kv=None if kv == "fp8" else kv, **sizes)


def rounded(kv: str) -> Callable[[Tensor], Tensor]:
    """Latents [..., rank] -> what a cache in such codes holds of them."""
    if kv == "fp8":

        def e4m3(c: Tensor) -> Tensor:
            factor = c.abs().amax(-1, keepdim=True) / 448
            return (c / factor).to(torch.float8_e4m3fn).float() * factor

        return e4m3
    config = parse_kv(kv)
    assert config is not None

    def codes(c: Tensor) -> Tensor:
        rank, bits = c.shape[-1], config.k_bits
        turn = rotation(rank, seed=config.seed) / math.sqrt(rank)
        y = c @ turn.T
        norm = y.norm(dim=-1, keepdim=True)
        unit, x = y / norm, torch.arange(1 << bits) - ((1 << bits) - 1) / 2
        one, three, five = latent_kv.curve(rank, bits)
        levels = one * x + three * x**3 + five * x**5
        level = levels[(unit.unsqueeze(-1) - levels).abs().argmin(-1)]
        scale = norm / (level.norm(dim=-1, keepdim=True) if config.scale == "matched" else (unit * level).sum(-1, True))
        return level * scale @ turn

    return codes


@torch.inference_mode()
def truth(hf: Any, row: list[int], kv: str = "exact") -> Tensor:
    """transformers' logits, with latents and rotated keys rounded as the cache `kv` does."""
    layers = [m for m in hf.modules() if hasattr(m, "expand_kv")]
    assert layers
    plain = [layer.expand_kv for layer in layers]
    try:
        for layer, expand in zip(layers, plain, strict=True):
            if kv != "exact":
                of = rounded(kv)
                layer.expand_kv = lambda c, k, expand=expand, of=of: expand(of(c), k.bfloat16().float())
        logits: Tensor = hf(torch.tensor([row]), use_cache=False).logits[0].float()
    finally:
        for layer in layers:
            layer.__dict__.pop("expand_kv", None)
    return logits


def error(got: Tensor, want: Tensor) -> float:
    return float((got.cpu() - want).norm() / want.norm())


def most_rows(got: list[list[Tensor]], wanted: list[Tensor]) -> float:
    """The error that two of three rows keep: in the third a code at a near-tie may fall the other way."""
    return sorted(error(torch.cat(mine), want) for mine, want in zip(got, wanted, strict=True))[1]


@pytest.mark.parametrize(
    ("variant", "kv"),
    [*((variant, kv) for variant in VARIANTS for kv in CODES[:2]), ("deepseek_v3", CODES[2]), ("glm_moe_dsa", CODES[2]),
     ("deepseek_v32", CODES[3]), ("mistral4", CODES[3])],
)  # fmt: skip
def test_prefill_chunks_and_decode_of_unequal_rows(variant: str, kv: str, tmp_path: Path) -> None:
    """Prompts in one call, their continuation by chunks, then token by token; pages hold NaN before."""
    hf = save_hf(variant, tmp_path, kv_lora_rank=RANK)
    made = decoder(tmp_path, kv, rows=3, max_context=48, page_size=4)
    cache = getattr(made.cache, "attention", made.cache)
    assert isinstance(cache, LatentCache)
    for pool in (*cache.pools, *cache.index_pools.values()):
        pool.fill_(255 if pool.dtype == torch.uint8 else float("nan"))
    rows = [tokens(21), tokens(9, 1), tokens(32, 2)]
    got: list[list[Tensor]] = [[] for _ in rows]
    for first, last in [(0, 13), (13, 17), (17, 18), (18, 32)]:
        for mine, logits in zip(got, made.feed([row[first:last] for row in rows]), strict=True):
            mine.append(logits)
    assert most_rows(got, [truth(hf, row, kv) for row in rows]) < FLOAT32
    assert most_rows(got, [truth(hf, row) for row in rows]) > 50 * FLOAT32, "codes change nothing"


def test_other_codes_are_other_logits(tmp_path: Path) -> None:
    """The control of the test above: each setting against each oracle."""
    hf, row = save_hf("deepseek_v3", tmp_path, kv_lora_rank=RANK), tokens(24)
    settings = [*CODES, "turboquant:4,mode=full,seed=5", "turboquant:3,mode=full"]
    got = {kv: decoder(tmp_path, kv, rows=1, max_context=32).feed([row])[0] for kv in settings}
    for mine in settings:
        for other in settings:
            assert (error(got[mine], truth(hf, row, other)) < FLOAT32) == (mine == other)


def test_some_layers_stay_exact(tmp_path: Path) -> None:
    save_hf("deepseek_v3", tmp_path, kv_lora_rank=RANK)
    made = decoder(tmp_path, "turboquant:4,mode=full,first=1,edge=3,exact=2", rows=1, max_context=32)
    assert [rows.bits for rows in made.cache.rows] == [3, 4, 0]
    everything = decoder(tmp_path, "turboquant:4,mode=full,exact=0+1+2", rows=1, max_context=32)
    assert torch.equal(
        everything.feed([tokens(20)])[0],
        Decoder(load(tmp_path, "exact"), rows=1, max_context=32).feed([tokens(20)])[0],
    )


@pytest.mark.parametrize("kv", CODES[:2])
def test_codes_do_not_depend_on_chunks_and_tokens_are_taken_back(kv: str, tmp_path: Path) -> None:
    """Why pages are shared by prefix: a page follows from its tokens alone, up to the order of float32 sums."""
    save_hf("deepseek_v3", tmp_path, num_hidden_layers=1, first_k_dense_replace=1, kv_lora_rank=RANK)
    row, pools, sizes = tokens(20), [], (RANK, 8, 8 if kv == "fp8" else 4)
    for cuts in ([20], [7, 20], [1, 2, 16, 20]):
        made = decoder(tmp_path, kv, rows=1, max_context=32, page_size=4)
        for first, last in zip([0, *cuts], cuts, strict=False):
            made.feed([row[first:last]])
            made.feed([tokens(3, 9)])
            made.cache.truncate(torch.tensor([last], dtype=torch.int32))
        rows = made.cache.pools[0][made.cache.block_table[0].long()].flatten(0, 1)[:20]
        pools.append(latent_kv.unpack_rows(rows, *sizes))
    for other in pools[1:]:
        for mine, first_one in zip(other, pools[0], strict=True):
            torch.testing.assert_close(mine, first_one, rtol=1e-2 if mine is other[1] else 1e-5, atol=1e-6)


@pytest.mark.parametrize("kv", CODES[:2])
@pytest.mark.parametrize(("variant", "length", "pages"), [("deepseek_v3", 48, 12), ("glm_moe_dsa", 32, 10)])
def test_the_engine_drafts_shares_prefixes_and_preempts(
    variant: str, length: int, pages: int, kv: str, tmp_path: Path
) -> None:
    """Texts so long that they repeat what can be drafted, and pages for fewer than two rows of them."""
    hf = save_hf(variant, tmp_path, kv_lora_rank=RANK)
    start = tokens(24, 3)
    prompts = [[5, 6, 5, 6, 5, 6], [*start, 7, 8], [*start, 9]]
    params = SamplingParams(max_tokens=length)
    plain = engine(tmp_path, kv)
    written = plain.generate(prompts, params)
    assert plain.executor.cache.prefix_cacheable
    drafting = engine(tmp_path, kv, draft=NgramDrafter, draft_tokens=3)
    assert drafting.generate(prompts, params) == written
    assert drafting.stats.drafted_tokens > 0
    assert drafting.generate(prompts, params) == written, "of pages that are there already"
    narrow = engine(tmp_path, kv, pages=1 + pages)
    assert narrow.generate(prompts, params) == written
    assert narrow.stats.preemptions > 0
    for prompt, text in zip(prompts, written, strict=True):
        logits = truth(hf, prompt + text, kv)[len(prompt) - 1 : -1]
        best = logits.max(1).values - logits.gather(1, torch.tensor(text).unsqueeze(1)).squeeze(1)
        assert best.max() < 1e-2


@pytest.mark.parametrize("kv", CODES[:2])
def test_captured_is_eager(kv: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps recorded as ops and replayed, with padded rows."""
    save_hf("deepseek_v3", tmp_path, kv_lora_rank=RANK)
    prompts, params = [tokens(11), tokens(3, 1), tokens(17, 2)], SamplingParams(max_tokens=12)
    written = []
    for mode in ("eager", "captured"):
        make = maker(mode, load(tmp_path, kv), monkeypatch, kv=None if kv == "fp8" else kv)
        written.append(make().generate(prompts, params))
    assert written[0] == written[1]


@pytest.mark.parametrize(
    ("variant", "kv", "kind"),
    [("deepseek_v3", CODES[0], "decode"), ("glm_moe_dsa", CODES[0], "prefill"), ("glm_moe_dsa", CODES[1], "decode"),
     ("deepseek_v3", CODES[1], "prefill"), ("deepseek_v3", CODES[2], "decode"), ("glm_moe_dsa", CODES[2], "prefill")],
)  # fmt: skip
def test_the_step_may_be_captured(variant: str, kv: str, kind: str, tmp_path: Path) -> None:
    changes = {"indexer_types": ["full", "shared"], "mlp_layer_types": ["dense", "sparse"]}
    save_hf(variant, tmp_path, num_hidden_layers=2, kv_lora_rank=RANK, **(changes if variant == "glm_moe_dsa" else {}))

    def factory() -> Any:
        sizes = {"max_batch": 4, "max_context": 128, "page_size": 16, "chunk": 16, "capture": False}
        made = Engine(load(tmp_path, kv, "cuda"), kv=None if kv == "fp8" else kv, **sizes)
        return simulated_step(made, kind, limit=120)

    report = check_step(factory, steps=STEPS[kind])
    assert [f"{f.code} {f.path}:{f.line} {f.message}" for f in report.findings] == []


@pytest.mark.parametrize("kv", ["fp8", "turboquant:4,mode=full"])
def test_ranks_hold_the_same_latents(kv: str, tmp_path: Path) -> None:
    hf, row = save_hf("deepseek_v3", tmp_path, kv_lora_rank=RANK), tokens(24)
    with Checkpoint.open(tmp_path) as checkpoint:
        ranks = Ranks.load(checkpoint, ["cpu", "cpu"], torch.float32)
    for rank in ranks.ranks:
        rank.fp8_kv = kv == "fp8"
    made = Engine(ranks, max_batch=2, max_context=64, capture=False, kv=None if kv == "fp8" else kv)
    written = made.generate([row], SamplingParams(max_tokens=12))[0]
    logits = truth(hf, row + written, kv)[len(row) - 1 : -1]
    assert (logits.max(1).values - logits.gather(1, torch.tensor(written).unsqueeze(1)).squeeze(1)).max() < 1e-2


@pytest.mark.parametrize(
    ("kv", "got"),
    [
        ("turboquant:4", "mode=hybrid"),
        ("turboquant:4,mode=shadow", "mode=shadow"),
        ("turboquant:k4v3,mode=full", "k4v3"),
        ("turboquant:4,mode=full,keys=prod", "keys=prod"),
        ("turboquant:4,mode=full,rotation=qr", "rotation=qr"),
        ("turboquant:4,mode=full,first=1,edge=k4v2", "k4v2"),
    ],
)
def test_what_codes_of_latents_do_not_have(kv: str, got: str, tmp_path: Path) -> None:
    save_hf("deepseek_v3", tmp_path, kv_lora_rank=RANK)
    with pytest.raises(ValueError, match=f"^turboquant: got {got} for a latent.*allowed.*turboquant:4,mode=full"):
        decoder(tmp_path, kv, rows=1, max_context=64)


def test_other_ranks_have_no_codes(tmp_path: Path) -> None:
    save_hf("deepseek_v3", tmp_path, kv_lora_rank=40)
    with pytest.raises(ValueError, match="the latent has 40 numbers; a cache in 4-bit codes needs 64, 128, 256 or 512"):
        decoder(tmp_path, "turboquant:4,mode=full", rows=1, max_context=64)
    assert decoder(tmp_path, "fp8", rows=1, max_context=64).cache.pools[0].shape[2] == 64


def test_fp8_is_for_latents(tmp_path: Path) -> None:
    save_hf("llama", tmp_path)
    with (
        Checkpoint.open(tmp_path) as checkpoint,
        pytest.raises(ValueError, match="fp8 is a way to keep keys for DeepSeek"),
    ):
        load_decoder(checkpoint, "cpu", torch.float32, fp8_kv=True)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_rows_come_back(bits: int) -> None:
    """DeepSeek-V3's sizes; the bytes of two rows differ where their codes do."""
    g = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 1 << bits, (3, 5, 512), generator=g, dtype=torch.int32).to(torch.uint8)
    turned, factor = torch.randn(3, 5, 64, generator=g).bfloat16(), torch.rand(3, 5, generator=g)
    rows = latent_kv.pack_rows(codes, turned, factor, bits)
    assert rows.shape == (3, 5, {1: 208, 2: 272, 3: 336, 4: 400, 8: 656}[bits])
    back = latent_kv.unpack_rows(rows, 512, 64, bits)
    assert torch.equal(back[0], codes)
    assert torch.equal(back[1], turned.float())
    assert torch.equal(back[2], factor)


@pytest.mark.parametrize(("bits", "most"), [(1, 1e-6), (2, 1e-6), (3, 1e-3), (4, 4e-3)])
@pytest.mark.parametrize("rank", latent_kv.RANKS)
def test_a_polynomial_costs_less_than_half_a_percent_of_error(rank: int, bits: int, most: float) -> None:
    """Against the nearest of Lloyd-Max's centroids, on random directions."""
    unit = torch.nn.functional.normalize(torch.randn(2048, rank, generator=torch.Generator().manual_seed(0)), dim=1)
    levels = codebook(rank, bits)
    best = sum((part.unsqueeze(-1) - levels).square().amin(-1).sum() for part in unit.split(256))
    codes, norm = quantize(unit, bits, latent_kv.curve(rank, bits), "norm")
    mine = latent_kv.levels(codes, bits, latent_kv.curve(rank, bits)) * norm.unsqueeze(-1)
    assert (mine - unit).square().sum() < (1 + most) * best


GPU_SETTINGS = ["exact", *CODES[:3]]


@pytest.mark.gpu
@pytest.mark.parametrize("kv", GPU_SETTINGS)
@pytest.mark.parametrize("variant", ["deepseek_v3", "glm_moe_dsa", "mistral4"])
def test_on_a_gpu_captured_text_is_eager_text(variant: str, kv: str, tmp_path: Path) -> None:
    save_hf(variant, tmp_path, kv_lora_rank=RANK)
    prompts, params = [tokens(11), tokens(33, 1), [*tokens(33, 1)[:30], 4]], SamplingParams(max_tokens=24)
    written = []
    for capture in (False, True):
        made = Engine(
            load(tmp_path, kv, "cuda:0"), max_batch=4, max_context=96, chunk=16, capture=capture,
            kv=None if kv in ("fp8", "exact") else kv,
        )  # fmt: skip
        written.append([made.generate(prompts, params) for _ in range(2)])  # again, of shared pages
    assert written[0] == written[1]


@pytest.mark.gpu
@pytest.mark.parametrize("kv", GPU_SETTINGS)
@pytest.mark.parametrize("heads", [6, 32, 64])
def test_on_a_gpu_the_kernels_give_the_logits(heads: int, kv: str, tmp_path: Path) -> None:
    """In float32 those of rounded latents. In bfloat16, whose latents round to other codes, they are as far from exact
    ones as bfloat16 and codes are by themselves."""
    hf = save_hf("deepseek_v3", tmp_path, kv_lora_rank=RANK, num_attention_heads=heads, num_key_value_heads=heads)
    rows = [tokens(21), tokens(9, 1), tokens(32, 2)]
    wanted, exact = [truth(hf, row, kv) for row in rows], [truth(hf, row) for row in rows]
    codes = max(error(*pair) for pair in zip(wanted, exact, strict=True))
    with torch.inference_mode():
        half = hf_model(
            "deepseek_v3", kv_lora_rank=RANK, num_attention_heads=heads, num_key_value_heads=heads
        ).bfloat16()
        own = max(error(half(torch.tensor([r])).logits[0].float(), t) for r, t in zip(rows, exact, strict=True))
    for dtype, right, most in ((torch.float32, wanted, 2e-3), (torch.bfloat16, exact, 3 * own + 1.5 * codes)):
        with Checkpoint.open(tmp_path) as checkpoint:
            model = Llama.load(checkpoint, "cuda:0", dtype)
        model.fp8_kv = kv == "fp8"
        made = Decoder(model, rows=3, max_context=48, page_size=16, kv=None if kv in ("fp8", "exact") else parse_kv(kv))
        got: list[list[Tensor]] = [[] for _ in rows]
        for first, last in [(0, 13), (13, 17), (17, 18), (18, 32)]:
            for mine, logits in zip(got, made.feed([row[first:last] for row in rows]), strict=True):
                mine.append(logits)
        assert most_rows(got, right) < most
