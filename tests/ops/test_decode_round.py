"""Attention of a round of several tokens in one launch: against float64, on a CPU (its own source, each thread a fiber:
test_decode_kernel.py) and on a GPU; how it is cut; that a replay reads what the host wrote since."""

import itertools
import shutil
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import test_decode_kernel
from h200 import H200, PLAIN
from onegraph.ops.calls import MAX_TOKENS, PagedDecode
from onegraph.ops.cases import Draw
from onegraph.ops.cuda import build, decode_attention, decode_round
from onegraph.ops.decode_attention import paged_decode

SHAPES = {  # heads, kv heads, head size, page, window, norm
    "smollm2": (9, 3, 64, 16, 0, False),
    "llama": (8, 2, 128, 32, 0, False),
    "eight": (16, 2, 128, 16, 0, True),
    "window": (5, 1, 64, 16, 21, True),
    "sixteen": (16, 1, 128, 16, 0, True),
    "glm4": (12, 1, 128, 16, 0, True),
    "qwen3_5": (6, 1, 256, 16, 0, True),
    "qwen3_5_moe": (16, 1, 256, 16, 0, True),
    "gemma4_near": (4, 2, 256, 32, 21, True),
    "gemma4": (8, 1, 512, 16, 0, True),
    "gpt_oss": (16, 2, 64, 16, 40, False),
}
GATED = ("qwen3_5", "qwen3_5_moe")
TURNED = {"glm4": 64, "qwen3_5": 64, "qwen3_5_moe": 64}  # coordinates that rotate, where not all do
VALUES = {"gemma4_near": 2, "gemma4": 1}  # normed: vectors of keys and values a kv head, keys are both where it is one
SINKS = ("gpt_oss",)
WIDE = ("qwen3_5", "qwen3_5_moe", "gemma4_near")  # norms in float32
POSITIONS = [0, 5, 16, 300, 61, 46, 128]
TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 2e-3}


def rounds(name: str, tokens: int, dtype: torch.dtype, device: str, positions: list[int]) -> PagedDecode:
    """A round of each row, the fifth of which holds no sequence and the last a single token. NaN is what nobody may
    read: all of the cache but the tokens before each round, and the tokens of a round that are not real."""
    heads, kv_heads, dim, page, window, norm = SHAPES[name]
    draw = Draw(torch.device("cpu"), dtype, torch.Generator().manual_seed(tokens))
    counts = [tokens, tokens, tokens - 1, tokens, 0, tokens, 1]
    *brought, table = draw.tokens(heads, kv_heads, dim, tokens, positions, counts, page, norm, rope=True)
    if name in GATED:
        gates = draw.randn(len(positions), tokens, heads * dim)
        q, rest = brought[0].split((heads * dim, 2 * kv_heads * dim), dim=2)
        both = torch.stack((q.unflatten(2, (heads, dim)), gates.unflatten(2, (heads, dim))), dim=3)
        brought[0] = torch.cat((both.flatten(2), rest), dim=2)
    if name in VALUES:
        brought[0] = brought[0][..., : (heads + VALUES[name] * kv_heads) * dim].contiguous()
    if name in WIDE:
        brought[1:3] = (weight.float() + 1e-3 for weight in brought[1:3])
    turns = TURNED.get(name, dim) // 2
    brought[4:6] = (angles[:, :turns].contiguous() for angles in brought[4:6])
    padding = torch.arange(tokens) >= brought[-1].unsqueeze(1)
    brought[0][padding] = torch.nan
    caches = [torch.full((1 + table.numel(), page, kv_heads, dim), torch.nan, dtype=dtype) for _ in range(2)]
    for cache in caches:
        for row, position in enumerate(positions):
            place = torch.arange(position)
            cache[table[row].long()[place // page], place % page] = draw.randn(position, kv_heads, dim)
    tensors = *brought, table, *caches, torch.zeros(len(positions), kv_heads, dtype=torch.int32)
    moved = (t.to(device) if isinstance(t, Tensor) else t for t in tensors)
    sinks = draw.sinks(heads).to(device) if name in SINKS else None
    return PagedDecode(*moved, heads, dim**-0.5, window, sinks=sinks, gated=name in GATED, value_norm=name in VALUES)


def clone(call: PagedDecode) -> PagedDecode:
    return PagedDecode(*(t.clone() if isinstance(t, Tensor) else t for t in call))


def exact(call: PagedDecode) -> tuple[Tensor, list[tuple[int, int, Tensor, Tensor]]]:
    """Outputs in float64, NaN where a token is not real; page, place, key and value of each token that is."""
    batch, tokens, _ = call.qkv.shape
    page, kv_heads, dim = call.k_cache.shape[1:]
    out = torch.full((batch, tokens, call.heads, dim), torch.nan, dtype=torch.float64)
    vectors, new = call.qkv.double().cpu().view(batch, tokens, -1, dim), []
    parts = 3 if vectors.shape[2] > call.heads + kv_heads else 2
    for row in range(batch):
        place = torch.arange(int(call.positions[row]))
        pages = call.block_table[row].long().cpu()
        keys, values = (c.cpu()[pages[place // page], place % page].double() for c in (call.k_cache, call.v_cache))
        for token in range(int(call.counts[row])):
            at = int(call.positions[row]) + token
            q, k, *v = vectors[row, token].split((call.heads * (1 + call.gated), kv_heads, kv_heads)[:parts])
            v = v[0] if v else k
            if call.value_norm:
                v = v * (v.square().mean(-1, keepdim=True) + call.eps).rsqrt()
            q, gates = q.unflatten(0, (call.heads, 2)).unbind(1) if call.gated else (q, None)
            q, k = (turned(call, x, weight, at) for x, weight in ((q, call.q_norm), (k, call.k_norm)))
            new.append((int(pages[at // page]), at % page, k, v))
            keys, values = torch.cat((keys, k[None])), torch.cat((values, v[None]))
            first = max(0, at + 1 - call.window) if call.window else 0
            scores = torch.einsum("hgd,khd->hgk", q.view(kv_heads, -1, dim), keys[first:]) * call.scale
            if call.sinks is not None:
                scores = torch.cat((scores, call.sinks.double().cpu().view(kv_heads, -1, 1)), dim=-1)
            parts_of = scores.softmax(-1)[..., : at + 1 - first]
            out[row, token] = torch.einsum("hgk,khd->hgd", parts_of, values[first:]).flatten(0, 1)
            out[row, token] *= 1 if gates is None else gates.sigmoid()
    return out, new


def turned(call: PagedDecode, x: Tensor, weight: Tensor | None, at: int) -> Tensor:
    if weight is not None:
        x = x * (x.square().mean(-1, keepdim=True) + call.eps).rsqrt() * weight.double().cpu()
    assert call.cos is not None
    assert call.sin is not None
    cos, sin = (table[at].double().cpu() for table in (call.cos, call.sin))
    half = len(cos)
    first, second, rest = x.split((half, half, x.shape[-1] - 2 * half), dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def held(call: PagedDecode, attend: Callable[[PagedDecode], Tensor]) -> Tensor:
    """Runs it, and compares what it returns and every place of the caches."""
    dtype, before = call.qkv.dtype, clone(call)
    wanted, new = exact(call)
    got = attend(call)
    real = ~wanted[..., 0, 0].isnan()
    for row in range(len(got)):
        found, truth = (t[row][real[row]].double().cpu() for t in (got, wanted))
        assert float((found - truth).norm()) <= TOLERANCE[dtype] * float(truth.norm()), row
    for which, cache in enumerate(("k_cache", "v_cache")):
        now, expected = getattr(call, cache).cpu(), getattr(before, cache).cpu()
        for page, place, *vectors in new:
            error = (now[page, place].double() - vectors[which]).abs().max()
            assert float(error) <= (0.0 if cache == "v_cache" and not call.value_norm else 0.04)
            expected[page, place] = now[page, place]
        assert torch.equal(now.view(torch.int16), expected.view(torch.int16)), cache  # NaN is NaN
    return got


# ------------------------------------------------------------------------------------------------------- on a CPU


@pytest.fixture(scope="module", params=["portable", "clusters"])
def kernel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    portable, folder = request.param == "portable", tmp_path_factory.mktemp("round")
    return portable, test_decode_kernel.compiled(folder, decode_round.KERNEL.path, portable)


# By one block and by two, four and sixteen that meet, in clusters by four and eight; two slices of the tokens, and two
# sets of columns, the last of each not full.
CUTS = [
    ("smollm2", 4, 1, torch.bfloat16),
    ("llama", 2, 60, torch.bfloat16),
    ("eight", 7, 60, torch.bfloat16),
    ("window", 3, 340, torch.float16),
    ("sixteen", 1, 60, torch.bfloat16),
    ("glm4", 3, 60, torch.float16),
    ("qwen3_5", 1, 60, torch.bfloat16),
    ("qwen3_5", 4, 60, torch.float16),
    ("qwen3_5_moe", 1, 120, torch.bfloat16),
    ("gemma4_near", 5, 60, torch.bfloat16),
    ("gemma4", 1, 60, torch.bfloat16),
    ("gemma4", 2, 60, torch.float16),
    ("gpt_oss", 1, 60, torch.bfloat16),
    ("gpt_oss", 4, 340, torch.float16),
]


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize(("name", "tokens", "sms", "dtype"), CUTS)
def test_rounds_in_any_order_of_blocks(
    kernel, name: str, tokens: int, sms: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    portable, made_of = kernel
    if portable and SHAPES[name][2] > 256:
        pytest.skip("heads of 512 are for blocks of clusters")
    monkeypatch.setattr(decode_round.KERNEL, "is_portable", lambda device: portable)
    test_decode_kernel.instead(monkeypatch, made_of)
    monkeypatch.setattr(build, "device", lambda index: replace(PLAIN, sms=sms) if portable else H200)
    made, results = rounds(name, tokens, dtype, "cpu", POSITIONS), []
    assert decode_round.supports_input(made)
    for step in (1, 7919):
        monkeypatch.setattr(test_decode_kernel.Kernel, "step", step)
        results.append(held(clone(made), decode_round.attend))
        assert not test_decode_kernel.counters.any()
    assert torch.equal(*results)


# ------------------------------------------------------------------------------------------------------- how it is cut


@pytest.mark.parametrize("steady", [False, True])
@pytest.mark.parametrize("dim", decode_round.SETS)
@pytest.mark.parametrize("group", [*range(1, decode_attention.MAX_GROUP + 1), 12, 16, 32])
def test_blocks_fit_and_hold_every_token(dim: int, group: int, steady: bool) -> None:
    for tokens, (device, clusters) in itertools.product(range(1, MAX_TOKENS + 1), ((H200, True), (PLAIN, False))):
        most = decode_round.most_sets(dim, clusters, steady)
        if group > 8 * most or (dim > 256 and not clusters):
            continue
        slices = decode_round.slices(tokens, group, most)
        for groups in (1, 3, 32, 128, 5000):
            plan = replace(decode_round.EXAMPLE, dim=dim, group=group, tokens=tokens, slices=slices, steady=steady)
            sets = -(-plan.columns // 8)
            assert slices * plan.columns >= tokens * group
            assert sets <= most
            warps, size = decode_round.share(groups, most if steady else sets, device, clusters, dim, steady)
            assert sets + 2 <= warps
            plan = replace(plan, warps=warps, size=size)
            assert plan.shared(clusters) <= device.shared
            assert plan.columns * dim % (2 * size) == 0  # whole pairs of outputs are a block's share


@pytest.mark.parametrize(
    ("groups", "clusters", "size"),
    [(3, True, 8), (15, True, 8), (16, True, 4), (64, True, 2), (128, True, 1), (136, True, 4), (3, False, 16),
     (64, False, 2), (100, False, 1), (5000, False, 1)],
)  # fmt: skip
def test_as_many_blocks_share_keys_as_run_at_once(groups: int, clusters: bool, size: int) -> None:
    """Of more groups than SMs, 136, four share: five rounds of a quarter of the keys, not two of all."""
    assert decode_round.share(groups, 4, H200 if clusters else PLAIN, clusters) == (decode_round.WARPS, size)
    assert decode_round.share(groups, 1, H200, True)[0] == decode_round.MOST_WARPS


# ------------------------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.usefixtures("kernel_family")
@pytest.mark.parametrize(
    ("name", "tokens", "dtype"),
    [
        *(("smollm2", tokens, torch.bfloat16) for tokens in (2, 3, 4, 8)),
        *(("llama", tokens, torch.bfloat16) for tokens in (2, 4, 8)),
        ("eight", 3, torch.float16),
        ("eight", 8, torch.bfloat16),
        ("window", 4, torch.float16),
        *(("glm4", tokens, torch.bfloat16) for tokens in (1, 4)),
        *(("qwen3_5", tokens, torch.bfloat16) for tokens in (1, 2, 4, 8)),
        *(("qwen3_5_moe", tokens, torch.float16) for tokens in (1, 5)),
        ("gemma4_near", 1, torch.bfloat16),
        *(("gemma4", tokens, torch.bfloat16) for tokens in (1, 3)),
        *(("gpt_oss", tokens, torch.bfloat16) for tokens in (1, 2, 5)),
    ],
)  # fmt: skip
def test_rounds_on_a_gpu(name: str, tokens: int, dtype: torch.dtype) -> None:
    """Eagerly, and replayed behind a capture of rounds at other places; keys are written as single steps write them."""
    kinds = [rounds(name, tokens, dtype, "cuda", at) for at in ([7 * i for i in range(7)], POSITIONS)]
    attend = lambda call: paged_decode(*call)  # noqa: E731
    wanted = held(clone(kinds[1]), attend)

    static = clone(kinds[1])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        attend(static)
        graph = torch.cuda.CUDAGraph()
        static.positions.copy_(kinds[0].positions)
        with torch.cuda.graph(graph, stream=stream):
            out = attend(static)
    torch.cuda.current_stream().wait_stream(stream)

    def replay(call: PagedDecode) -> Tensor:
        for ours, theirs in zip(static, call, strict=True):
            if isinstance(ours, Tensor):
                ours.copy_(theirs)
        out.fill_(torch.nan)
        graph.replay()
        for cache in ("k_cache", "v_cache"):
            getattr(call, cache).copy_(getattr(static, cache))
        return out.clone()

    real = torch.arange(tokens, device="cuda") < kinds[1].counts.unsqueeze(1)
    assert torch.equal(held(clone(kinds[1]), replay)[real], wanted[real])

    several, single = clone(kinds[1]), clone(kinds[1])
    attend(several)
    for token in range(tokens):
        one = clone(single)
        one.k_cache, one.v_cache = single.k_cache, single.v_cache
        one.qkv = single.qkv[:, token : token + 1].contiguous()
        one.positions, one.counts = single.positions + token, (single.counts > token).int()
        attend(one)
    for cache in ("k_cache", "v_cache"):
        assert torch.equal(*(getattr(call, cache).view(torch.int16) for call in (several, single)))
