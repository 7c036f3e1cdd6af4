"""The cache against a loop over tokens that knows which of them each query sees exactly, and which from codes."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from onegraph.formats import turboquant as formats
from onegraph.formats.turboquant import DRAFTS, TurboQuantConfig, parse_kv
from onegraph.nn.attention import Attention, PagedCache
from onegraph.nn.turboquant import TurboQuantCache
from onegraph.ops.turboquant import dequantize, quantize
from onegraph.ops.turboquant_attention import eight_bit_levels
from onegraph.runtime.graph import Runner

HEADS, KV_HEADS, DIM, PAGE = 6, 2, 64, 16
ANGLE = torch.arange(512)[:, None] * 1000.0 ** -(torch.arange(0, DIM, 2) / DIM)


def config(text: str) -> TurboQuantConfig:
    found = parse_kv(f"turboquant:{text}")
    assert found is not None
    return found


def layer(index: int = 0, window: int = 0, turned: int = DIM, gated: bool = False) -> Attention:
    angle = ANGLE[:, : turned // 2]
    return Attention(
        index=index, heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM,
        cos=angle.cos(), sin=angle.sin(), window=window, gated=gated,
    )  # fmt: skip


def new_cache(text: str, *, rows: int = 3, per_row: int = 16, layers: int = 1, **change: Any) -> TurboQuantCache:
    sizes = {
        "layers": layers, "pages": 1 + rows * per_row, "page_size": PAGE, "kv_heads": KV_HEADS, "head_dim": DIM,
        "rows": rows, "pages_per_row": per_row, "device": "cpu", "dtype": torch.float32,
    }  # fmt: skip
    cache = TurboQuantCache(config(text), **(sizes | change))
    order = torch.randperm(cache.pages - 1, generator=torch.Generator().manual_seed(1))
    cache.block_table.copy_((1 + order[: cache.block_table.numel()]).view_as(cache.block_table))
    for tensor in (cache.layers[0].codes, cache.layers[0].ring) if cache.layers[0] else ():
        if tensor is not None:  # what an earlier sequence left
            tensor.copy_(torch.full_like(tensor, 255 if tensor.dtype == torch.uint8 else math.nan))
    return cache


class Truth:
    """A row's whole sequence, in float64: exact and coded keys and values, and attention to any choice of them."""

    def __init__(self, setting: TurboQuantConfig, qkv: Tensor, window: int = 0, turned: int = DIM) -> None:
        length = len(qkv)
        q, k, v = qkv.view(length, -1, DIM).split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        angle = ANGLE[:length, : turned // 2].unsqueeze(1)

        def rope(x: Tensor) -> Tensor:
            first, second, rest = x.split((turned // 2, turned // 2, DIM - turned), dim=-1)
            return torch.cat(
                (first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin(), rest), dim=-1
            )

        turn = formats.rotation(DIM, setting.rotation, setting.seed).T / math.sqrt(DIM)
        s = formats.projection(DIM, setting.seed)
        self.turn, self.limit = turn, window
        self.q, self.exact = rope(q) @ turn, (rope(k) @ turn, v @ turn)
        self.coded = []
        for y, bits, variant in zip(
            self.exact, (setting.k_bits, setting.v_bits), (setting.keys, setting.values), strict=True
        ):
            prod = variant == "prod"
            table = eight_bit_levels(formats.codebook(DIM, bits - prod))
            p = s if prod else None
            self.coded.append(dequantize(quantize(y, table, p, setting.scale), table, p))

    def attend(self, t: int, exact_from: int) -> Tensor:
        """The query at t, which sees keys from `exact_from` on exactly and those before from codes: [HEADS * DIM]."""
        out = []
        first = max(0, t - self.limit + 1) if self.limit else 0
        exact = torch.arange(first, t + 1) >= exact_from
        for h in range(HEADS):
            g = h // (HEADS // KV_HEADS)
            keys, values = (
                torch.where(exact[:, None], e[first : t + 1, g], c[first : t + 1, g]).double()
                for e, c in zip(self.exact, self.coded, strict=True)
            )
            weights = (keys @ self.q[t, h].double() * DIM**-0.5).softmax(0)
            out.append(weights @ values @ self.turn.T.double())
        return torch.cat(out)


def exact_from(setting: TurboQuantConfig, t: int) -> int:
    if setting.mode != "hybrid":
        return t + 1
    return t - setting.window + 1 if t >= setting.window + DRAFTS else 0


def sequences(count: int, length: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(count, length, (HEADS + 2 * KV_HEADS) * DIM, generator=g)


def step(cache: TurboQuantCache, attention: Attention, qkv: Tensor, positions: list[int], counts: list[int]) -> Tensor:
    cache.positions.copy_(torch.tensor(positions))
    cache.counts.copy_(torch.tensor(counts))
    return cache.attend(attention, qkv.contiguous())


def close(got: Tensor, want: Tensor) -> bool:
    return bool((got.double() - want).norm() <= 2e-5 * want.norm())


SETTINGS = ["4,mode=full", "k3v4,window=16", "2,window=24,scale=norm", "4,mode=full,keys=prod,values=prod,rotation=qr",
            "k1v3,window=16,keys=mse,values=prod"]  # fmt: skip


@pytest.mark.parametrize("window", [0, 9, 40])
@pytest.mark.parametrize("text", SETTINGS)
def test_decoding_a_batch_of_unequal_lengths(text: str, window: int) -> None:
    """Three rows, one of them empty, pages shuffled and rings crossed; the others start apart and end past the ring."""
    cache, attention, setting = new_cache(text), layer(window=window), config(text)
    cache.slots.copy_(torch.tensor([3, 1, 2]))
    rows = sequences(3, 70)
    truths = [Truth(setting, row, window) for row in rows]
    for now in range(70):
        counts = [1, 0, int(now >= 11)]
        at = [now, 5, max(0, now - 11)]
        qkv = torch.stack([rows[b, at[b]] for b in range(3)]).unsqueeze(1)
        out = step(cache, attention, qkv, at, counts)
        assert out[0].isfinite().all()
        for b in (0, 2):
            if counts[b] and (now % 7 == 0 or now > 60 or at[b] in (23, 24, 31, 32, 33)):
                assert close(out[b, 0], truths[b].attend(at[b], exact_from(setting, at[b]))), (b, now)


@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("text", SETTINGS)
def test_chunks_are_exact_within_and_read_codes_before(text: str, window: int) -> None:
    cache, attention, setting = new_cache(text), layer(window=window), config(text)
    rows = sequences(3, 90)
    truths = [Truth(setting, row, window) for row in rows]
    done = [0, 0, 0]
    for counts in ([40, 13, 0], [9, 40, 0], [40, 1, 0]):
        qkv = torch.zeros(3, 40, rows.shape[2])
        for b, count in enumerate(counts):
            qkv[b, :count] = rows[b, done[b] : done[b] + count]
        out = step(cache, attention, qkv, done, counts)
        for b, count in enumerate(counts):
            for i in {0, count // 2, count - 1} if count else ():
                assert close(out[b, i], truths[b].attend(done[b] + i, done[b]))
        done = [d + c for d, c in zip(done, counts, strict=True)]
    qkv = torch.stack([rows[b, min(done[b], 89)] for b in range(3)]).unsqueeze(1)  # and decoding goes on from there
    out = step(cache, attention, qkv, done, [0, 1, 0])
    assert close(out[1, 0], truths[1].attend(done[1], exact_from(setting, done[1])))


@pytest.mark.parametrize("turned", [16, 48])
@pytest.mark.parametrize("text", SETTINGS)
def test_heads_of_which_a_part_rotates_with_gates(text: str, turned: int) -> None:
    """A chunk, then steps: what is turned into codes is the whole head, whichever of its coordinates rotate."""
    cache, attention, setting = new_cache(text, rows=1), layer(turned=turned, gated=True), config(text)
    (row,) = sequences(1, 60)
    truth = Truth(setting, row, turned=turned)
    gates = torch.randn(60, HEADS, DIM, generator=torch.Generator().manual_seed(7))
    q, rest = row.split((HEADS * DIM, 2 * KV_HEADS * DIM), dim=1)
    qkv = torch.cat((torch.stack((q.view(-1, HEADS, DIM), gates), dim=2).flatten(1), rest), dim=1)
    out = step(cache, attention, qkv[None, :40], [0], [40])[0]
    for t in range(60):
        if t >= 40:
            out = step(cache, attention, qkv[None, t : t + 1], [t], [1])[0]
        if t in (0, 17, 39, 40, 41, 59):
            want = truth.attend(t, 0 if t < 40 else exact_from(setting, t))
            assert close(out[t if t < 40 else 0], want * gates[t].flatten().double().sigmoid()), t


@pytest.mark.parametrize("text", ["4,mode=full", "k3v4,window=16"])
def test_drafts_of_any_number_and_their_rollback_change_nothing(text: str) -> None:
    """Eight drafts of which some are accepted, the rest wrong and written over: the same outputs as one at a time."""
    attention, setting = layer(), config(text)
    (row,) = sequences(1, 100)
    wrong = sequences(1, 100, seed=5)[0] * 3
    single, drafted = new_cache(text, rows=1), new_cache(text, rows=1)
    one = torch.stack([step(single, attention, row[t].view(1, 1, -1), [t], [1])[0, 0] for t in range(90)])
    truth = Truth(setting, row)
    assert close(one[77], truth.attend(77, exact_from(setting, 77)))
    t, turn = 0, 0
    while t < 80:
        accepted = (1, 3, 8, 2, 5)[turn % 5]
        drafts = torch.cat((row[t : t + accepted], wrong[t + accepted : t + 8]))
        out = step(drafted, attention, drafts.unsqueeze(0), [t], [8])
        assert (out[0, :accepted] - one[t : t + accepted]).abs().max() < 1e-5, t
        t, turn = t + accepted, turn + 1


@pytest.mark.parametrize("window", [0, 9, 40])
@pytest.mark.parametrize("text", [*SETTINGS, "4,window=16,first=1"])
def test_a_sequence_read_as_decoding_reads_it(text: str, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole rows at once, of which one is shorter and one empty, give what their tokens give one at a time."""
    monkeypatch.setattr("onegraph.nn.turboquant.AT_ONCE", 33)
    attention = layer(window=window)
    single, whole = new_cache(text), new_cache(text)
    rows = sequences(3, 80)
    out = step(whole.as_decoded(), attention, rows, [0, 0, 0], [80, 50, 0])
    for t in range(80):
        one = step(single, attention, rows[:, t : t + 1], [t, t, t], [1, int(t < 50), 0])
        assert (out[0, t] - one[0, 0]).abs().max() < 1e-5, t
        assert t >= 50 or (out[1, t] - one[1, 0]).abs().max() < 1e-5, t


def test_counts_cut_drafts_off() -> None:
    text = "4,window=16"
    attention = layer()
    (row,) = sequences(1, 60)
    a, b = new_cache(text, rows=1), new_cache(text, rows=1)
    for t in range(50):
        step(a, attention, row[t].view(1, 1, -1), [t], [1])
        step(b, attention, row[t : t + 8].unsqueeze(0), [t], [1])
    left, right = (step(c, attention, row[50].view(1, 1, -1), [50], [1]) for c in (a, b))
    assert torch.equal(left, right)


def test_a_sequence_keeps_its_ring_when_it_moves_to_another_row() -> None:
    attention, setting = layer(), config("4,window=16")
    cache = new_cache("4,window=16", rows=2)
    rows = sequences(2, 60)
    for t in range(40):
        step(cache, attention, rows[:, t : t + 1], [t, t], [1, 1])
    moved = cache.view(slice(0, 1))
    moved.block_table, moved.slots = cache.block_table[1:].clone(), cache.slots[1:].clone()
    out = step(moved, attention, rows[1:, 40:41], [40], [1])
    assert close(out[0, 0], Truth(setting, rows[1]).attend(40, exact_from(setting, 40)))


def test_shadow_attends_exactly_and_reports_what_codes_would_have_cost() -> None:
    attention = layer()
    rows = sequences(1, 60)
    errors = []
    for text in ("2,mode=shadow", "4,mode=shadow"):
        cache = new_cache(text, rows=1)
        plain = PagedCache(
            layers=1, pages=cache.pages, page_size=PAGE, kv_heads=KV_HEADS, head_dim=DIM, rows=1, pages_per_row=16,
            device="cpu", dtype=torch.float32,
        )  # fmt: skip
        plain.block_table.copy_(cache.block_table)
        full, wrong, size = new_cache(text.replace("shadow", "full"), rows=1), 0.0, 0.0
        for t in range(60):
            out = step(cache, attention, rows[:, t : t + 1], [t], [1])
            plain.positions[0], plain.counts[0] = t, 1
            assert torch.equal(out, plain.attend(attention, rows[:, t : t + 1]))
            coded = step(full, attention, rows[:, t : t + 1], [t], [1])
            wrong, size = wrong + float((coded - out).square().sum()), size + float(out.square().sum())
        errors.append(cache.errors()[0])
        assert abs(errors[-1] - (wrong / size) ** 0.5) < 1e-4
        step(cache, attention, rows[:, :1] * math.nan, [0], [0])  # padding does not count
        assert abs(cache.errors()[0] - errors[-1]) < 1e-6
    assert 0 < errors[1] < 0.4 * errors[0]


def test_layers_at_the_ends_stay_exact() -> None:
    cache = new_cache("k3v4,first=1,last=2", layers=5)
    assert [found is None for found in cache.layers] == [True, False, False, True, True]
    assert [len(keys) for keys in cache.paged.keys] == [cache.pages, 0, 0, cache.pages, cache.pages]
    attention, rows = layer(index=3), sequences(3, 20)
    for t in range(20):
        out = step(cache, attention, rows[:, t : t + 1], [t] * 3, [1] * 3)
    assert close(out[2, 0], Truth(config("4"), rows[2]).attend(19, 0))


def test_a_cache_forgets() -> None:
    cache = new_cache("4,window=16,first=1", layers=2)
    cache.layers[1].ring.fill_(math.nan)
    cache.layers[1].codes.fill_(255)
    cache.paged.keys[0].fill_(math.nan)
    cache.reset()
    assert not any(t.any() for t in (cache.layers[1].ring, cache.layers[1].codes, cache.paged.keys[0]))


@pytest.mark.parametrize(
    ("text", "dim", "token", "sequence"),
    [
        ("4,mode=full", 128, 132, 0),
        ("4,mode=full", 64, 68, 0),
        ("k3v4,mode=full", 128, 116, 0),
        ("3,mode=full,keys=prod", 128, 102, 0),
        ("k2v1,mode=full", 80, 34, 0),
        ("4,window=64", 128, 132, 80 * 512),
    ],
)
def test_bytes_of_a_token_are_those_that_are_allocated(text: str, dim: int, token: int, sequence: int) -> None:
    setting = config(text)
    sizes = {"layers": 3, "kv_heads": 2, "head_dim": dim}
    assert setting.token_bytes(**sizes) == 3 * 2 * token
    assert setting.sequence_bytes(**sizes) == 3 * 2 * sequence
    cache = new_cache(text, rows=2, layers=3, head_dim=dim, dtype=torch.bfloat16)
    assert cache.nbytes == cache.pages * PAGE * setting.token_bytes(**sizes) + 3 * setting.sequence_bytes(**sizes)


def test_four_bits_hold_3_75_times_as_many_tokens() -> None:
    """Everything counted, rings included, at Llama-3-8B's shape and 32k tokens a sequence; and at SmolLM2's without."""
    sizes, length = {"layers": 32, "kv_heads": 8, "head_dim": 128}, 32768
    setting = config("4")
    total = setting.token_bytes(**sizes) * length + setting.sequence_bytes(**sizes)
    assert 32 * 8 * 512 * length / total > 3.83
    assert 30 * 3 * 256 / config("4,mode=full").token_bytes(layers=30, kv_heads=3, head_dim=64) > 3.75


@pytest.mark.parametrize(
    ("text", "change", "message"),
    [
        ("4", {"head_dim": 72}, "head size of 72"),
        ("4", {"page_size": 8}, "multiple of 16"),
        ("4,window=500", {}, "window is 500 tokens, the pages of the cache hold 256"),
        ("4,mode=full", {"rows": 0}, "rows is 0"),
    ],
)
def test_bad_sizes_are_refused_in_one_line(text: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        new_cache(text, **({"rows": 1} | change))
    assert "\n" not in str(caught.value)


# --------------------------------------------------------------------------------------------------------- a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("text", ["4,mode=full", "k3v4,window=16"])
def test_a_sequence_read_as_decoding_reads_it_on_a_gpu(text: str) -> None:
    rows = sequences(3, 200)
    here, there = new_cache(text), new_cache(text, device="cuda:0")
    want = step(here.as_decoded(), layer(), rows, [0, 0, 0], [200, 50, 0])
    got = step(there.as_decoded(), layer().to("cuda:0"), rows.to("cuda:0"), [0, 0, 0], [200, 50, 0]).cpu()
    for b, count in ((0, 200), (1, 50)):
        assert (got[b, :count] - want[b, :count]).norm() <= 2e-2 * want[b, :count].norm()


@pytest.mark.gpu
@pytest.mark.parametrize("text", ["4,mode=full", "k3v4,window=16"])
def test_captured_drafts_and_their_rollback_on_a_gpu(text: str) -> None:
    """One graph of eight draft tokens; what is accepted equals decoding one token at a time on the CPU."""
    (row,) = sequences(1, 100)
    wrong = sequences(1, 100, seed=5)[0] * 3
    single, drafted = new_cache(text, rows=1), new_cache(text, rows=1, device="cuda:0")
    attention = layer()
    one = torch.stack([step(single, attention, row[t].view(1, 1, -1), [t], [1])[0, 0] for t in range(90)])
    attention = layer().to("cuda:0")

    def draft(qkv: Tensor, positions: Tensor, counts: Tensor) -> Tensor:
        view = drafted.view()
        view.positions, view.counts = positions, counts
        return view.attend(attention, qkv)

    inputs = {
        "qkv": torch.zeros(1, 8, row.shape[1], device="cuda:0"),
        "positions": torch.zeros(1, dtype=torch.int32, device="cuda:0"),
        "counts": torch.zeros(1, dtype=torch.int32, device="cuda:0"),
    }
    runner = Runner(draft, inputs, capture=True)
    t, turn = 0, 0
    with runner.running():
        while t < 80:
            accepted = (1, 3, 8, 2, 5)[turn % 5]
            drafts = torch.cat((row[t : t + accepted], wrong[t + accepted : t + 8])).unsqueeze(0)
            runner.load(qkv=drafts, positions=torch.tensor([t]).int(), counts=torch.tensor([8]).int())
            out = runner.replay().cpu()[0, :accepted]
            want = one[t : t + accepted]
            assert (out - want).norm() <= 2e-2 * want.norm(), t
            t, turn = t + accepted, turn + 1
