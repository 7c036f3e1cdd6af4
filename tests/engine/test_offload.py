"""The prefix cache in host memory: what is evicted comes back with the same tokens, whenever it arrives."""

from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from models import save_hf
from onegraph.engine.draft import ModelDrafter, NgramDrafter
from onegraph.engine.engine import Engine
from onegraph.engine.offload import GIB, HostCopies
from onegraph.engine.params import SamplingParams
from onegraph.formats.checkpoint import Checkpoint
from onegraph.models.llama import Llama
from onegraph.models.ranks import Ranks
from onegraph.nn.hybrid_cache import SNAPSHOTS
from onegraph.runtime import offload
from onegraph.runtime.offload import Arrival, HostBuffer
from test_schedule import START, Machine, MachineAhead, alone, engine, few, run, whole
from tiny_decoder import TinyDecoder

PAGE = 2 * 2 * 4 * 2 * 16 * 4  # bytes: layers, keys and values, tokens, heads, their size, float32
TEXTS = [[(7 * n + 31 * k) % 101 for n in range(26)] for k in range(4)]
PARAMS = SamplingParams(max_tokens=5)


def gib(pages: float) -> float:
    return pages * PAGE / GIB


class Late(Arrival):
    """Copies that are made when somebody waits for them, and say that they are under way until then."""

    def __init__(self, copy: Any, done: bool = False) -> None:
        self.copy, self.is_done = copy, done

    @property
    def done(self) -> bool:
        return self.is_done

    def join(self) -> None:
        if not self.is_done:
            self.copy()
            self.is_done = True


def make_late(monkeypatch: pytest.MonkeyPatch) -> list[Late]:
    """As a GPU does it at the latest: until a copy is waited for, its places hold NaN."""
    begun: list[Late] = []
    load, join = HostBuffer.load, HostBuffer.join

    def slow(store: HostBuffer, slots: Any, places: Any) -> Arrival:
        for piece in store._pieces:  # all bits set are a NaN
            piece[list(places)] = -1
        begun.append(Late(lambda: load(store, slots, places)))
        return begun[-1]

    def join_all(store: HostBuffer) -> None:
        for each in begun:
            each.join()
        join(store)

    monkeypatch.setattr(HostBuffer, "load", slow)
    monkeypatch.setattr(HostBuffer, "join", join_all)
    return begun


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> list[Late]:
    return make_late(monkeypatch)


def ask(made: Engine, prompts: Any, params: Any = PARAMS) -> list[list[int]]:
    """One after the other, in a scheduler that stays open."""
    outputs = []
    for prompt in prompts:
        request = made.request(prompt, params)
        made.scheduler.add(request)
        run(made.scheduler)
        outputs.append(request.output)
    return outputs


def test_places_come_back_in_any_order() -> None:
    """Tensors of several dtypes, one of them not contiguous; more places than one launch takes."""
    g = torch.Generator().manual_seed(0)
    count = 2 * offload.BATCH + 7
    tensors = [
        torch.randn(count, 3, 5, generator=g),
        torch.randint(0, 255, (count, 7), generator=g, dtype=torch.uint8),
        torch.randn(4, count, 6, generator=g, dtype=torch.float64).transpose(0, 1),
        torch.randn(count, 2, generator=g).bfloat16(),
        torch.randint(0, 9, (6, count, 1), generator=g, dtype=torch.int32).transpose(0, 1),  # a view with gaps
    ]
    assert offload.entry_bytes(tensors) == 60 + 7 + 192 + 4 + 24
    wanted = [tensor.clone() for tensor in tensors]
    store = HostBuffer(tensors, count)
    there = torch.randperm(count, generator=g).tolist()
    store.save(range(count), there)
    for tensor in tensors:
        tensor.zero_()
    back = torch.randperm(count, generator=g).tolist()
    arrival = store.load([there[place] for place in back], back)
    arrival.join()
    assert arrival.done
    assert all(torch.equal(one, other) for one, other in zip(tensors, wanted, strict=True))
    with pytest.raises(ValueError, match="entries: got 1 for 2 slots"):
        store.save([1], [0, 1])


@pytest.mark.parametrize("ahead", [0, 1])
def test_what_is_evicted_comes_back(ahead: int, late: list[Late]) -> None:
    """Four texts in a cache of one and a half: each is computed once."""
    plain = engine(ahead, pages=1 + 12)
    made = engine(ahead, pages=1 + 12, kv_offloading_size=gib(64))
    assert len(made.executor.host_pages) == 64
    with closing(plain.scheduler.open()), closing(made.scheduler.open()):
        wanted = ask(plain, TEXTS * 3)
        assert ask(made, TEXTS * 3) == wanted == [alone(tuple(text), PARAMS) for text in TEXTS * 3]
        assert not plain.stats.restored_tokens
        assert made.stats.restored_tokens == 8 * 24, "all of a prompt but its last page, whose last token is read"
        assert made.stats.prefill_tokens == 4 * 26 + 8 * 2
        assert plain.stats.prefill_tokens > 2 * made.stats.prefill_tokens
        assert made.executor.host_pages.used == made.stats.offloaded_tokens // 4
        assert made.stats.offloaded_tokens <= 4 * (26 + 5), "a page is copied once"
    assert whole(made)
    assert all(each.done for each in late)


def test_others_decode_while_a_prefix_arrives(late: list[Late]) -> None:
    """Two rows: one writes on, until the other's pages are there."""
    made = engine(pages=1 + 18, kv_offloading_size=gib(64))
    with closing(made.scheduler.open()) as scheduler:
        ask(made, TEXTS)
        decoding = made.request(TEXTS[3], SamplingParams(max_tokens=14))
        scheduler.add(decoding)
        while not decoding.output:
            scheduler.step()
        waiting = made.request(TEXTS[0], PARAMS)
        scheduler.add(waiting)
        before = len(decoding.output)
        for _ in range(5):
            scheduler.step()
        assert waiting.arrivals
        assert not waiting.output
        assert len(decoding.output) >= before + 4
        run(scheduler)
    assert waiting.output == alone(tuple(TEXTS[0]), PARAMS)
    assert decoding.output == alone(tuple(TEXTS[3]), decoding.params)


@pytest.mark.parametrize("how", ["cancel", "close", "preempt"])
def test_a_request_that_ends_while_its_prefix_arrives(how: str, late: list[Late]) -> None:
    made = engine(pages=1 + 18, kv_offloading_size=gib(64))
    with closing(made.scheduler.open()) as scheduler:
        ask(made, TEXTS)
        decoding, waiting = made.request(TEXTS[3], SamplingParams(max_tokens=14)), made.request(TEXTS[0], PARAMS)
        scheduler.add(decoding)
        scheduler.step()
        scheduler.add(waiting)
        scheduler.step()
        assert waiting.arrivals
        if how == "cancel":
            scheduler.cancel(waiting)
            run(scheduler)
        elif how == "preempt":
            scheduler._preempt(waiting)
            run(scheduler)
            assert waiting.output == alone(tuple(TEXTS[0]), PARAMS)
    with closing(made.scheduler.open()) as scheduler:
        assert ask(made, TEXTS * 2) == [alone(tuple(text), PARAMS) for text in TEXTS * 2]
    assert whole(made)
    assert all(each.done for each in late)


@pytest.mark.parametrize("pages", [1, 3, 7])
def test_a_small_memory_keeps_what_it_can(pages: int, late: list[Late]) -> None:
    """Less than one text has, too: copies that are about to be read are not written over."""
    made = engine(pages=1 + 9, kv_offloading_size=gib(pages))
    with closing(made.scheduler.open()):
        assert ask(made, (TEXTS[:2] + TEXTS[:1]) * 4) == [alone(tuple(t), PARAMS) for t in (TEXTS[:2] + TEXTS[:1]) * 4]
        assert made.executor.host_pages.used <= pages
        if pages == 7:
            assert made.stats.restored_tokens
    assert whole(made)


def test_a_call_of_generate_keeps_nothing_of_the_last_one() -> None:
    made = engine(pages=1 + 9, kv_offloading_size=gib(64), max_batch=1)
    wanted = [alone(tuple(text), PARAMS) for text in TEXTS]
    assert made.generate(TEXTS + TEXTS, PARAMS) == wanted + wanted
    assert made.stats.restored_tokens
    made.generate(TEXTS[:1], PARAMS)
    assert not made.stats.shared_tokens


def test_a_nan_clears_it() -> None:
    made = engine(pages=1 + 12, kv_offloading_size=gib(64))
    with closing(made.scheduler.open()) as scheduler:
        ask(made, TEXTS)
        assert made.executor.host_pages.used
        scheduler._poisoned = True
        scheduler.step()
        assert not made.executor.host_pages.used
        assert ask(made, TEXTS) == [alone(tuple(text), PARAMS) for text in TEXTS]


def test_the_last_used_copies_stay() -> None:
    tensor = torch.arange(6.0).view(6, 1)
    host = HostCopies([HostBuffer([tensor], 3)], 3)
    assert host.save([(place, b"%d" % place) for place in range(3)]) == 3
    assert host.find([b"0", b"1", b"9"]) == [b"0", b"1"]
    assert host.save([(3, b"3"), (4, b"4"), (0, b"0")], keep=2) == 1
    assert [digest in host for digest in (b"0", b"1", b"2", b"3", b"4")] == [True, True, False, True, False]
    tensor.zero_()
    for arrival in host.load([b"0", b"1", b"3"], [5, 4, 2]):
        arrival.join()
    assert tensor.view(-1).tolist() == [0, 0, 3, 0, 1, 0]


def test_a_copy_that_fails_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    host = HostCopies([HostBuffer([torch.arange(6.0).view(6, 1)], 3)], 3)
    host.save([(0, b"0")])
    monkeypatch.setattr(HostBuffer, "save", lambda *_: (_ for _ in ()).throw(RuntimeError("out of memory")))
    with pytest.raises(RuntimeError, match="out of memory"):
        host.save([(1, b"1")])
    assert not host.used
    assert host.find([b"1"]) == []


class MachineOffloading(Machine):
    options = {"pages": 1 + 11, "kv_offloading_size": gib(9)}  # noqa: RUF012


class MachineOffloadingAhead(MachineAhead):
    options = {"pages": 1 + 11, "kv_offloading_size": gib(30)}  # noqa: RUF012

    def __init__(self) -> None:
        self.patch = pytest.MonkeyPatch()
        make_late(self.patch)
        super().__init__()

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            self.patch.undo()


TestMachineOffloading, TestMachineOffloadingAhead = MachineOffloading.TestCase, MachineOffloadingAhead.TestCase
TestMachineOffloading.settings = TestMachineOffloadingAhead.settings = settings(few, max_examples=12)
del Machine, MachineAhead


def test_a_draft_models_pages_come_back_too(late: list[Late]) -> None:
    """Its cache has the target's pages; of a draft model that is the target, every draft is right."""
    model, params = TinyDecoder(), SamplingParams(max_tokens=9)
    options = {"max_batch": 2, "max_context": 48, "page_size": 4, "chunk": 8, "draft_tokens": 3}
    options["draft"] = partial(ModelDrafter, model)
    plain, made = Engine(model, **options), Engine(model, **options, pages=1 + 12, kv_offloading_size=gib(2 * 64))
    assert len(made.executor.host_pages) == 64, "of both caches' pages"
    with closing(plain.scheduler.open(share=False)), closing(made.scheduler.open()):
        ask(plain, TEXTS * 3, params)
        assert ask(made, TEXTS * 3, params) == [alone(tuple(text), params) for text in TEXTS * 3]
        assert made.stats.restored_tokens
        assert made.stats.accepted_at == plain.stats.accepted_at
        assert made.stats.accepted_tokens


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Llama:
    path = tmp_path_factory.mktemp("hybrid")
    save_hf("qwen3_5", path, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    with Checkpoint.open(path) as checkpoint:
        return Llama.load(checkpoint)


@pytest.mark.parametrize("drafts", [None, NgramDrafter])
def test_states_of_recurrent_layers_come_back_with_their_pages(drafts: Any, hybrid: Llama, late: list[Late]) -> None:
    """More texts than there are snapshots on the device, and pages for two of them."""
    model, count = hybrid, SNAPSHOTS + 2
    texts = [[(7 * n + 31 * k) % 101 for n in range(40)] for k in range(count)]
    options = {"max_batch": 2, "max_context": 64, "page_size": 4, "chunk": 16, "draft": drafts}
    plain, made = Engine(model, **options), Engine(model, **options, pages=1 + 26, kv_offloading_size=0.02)
    with closing(plain.scheduler.open(share=False)), closing(made.scheduler.open()):
        assert ask(made, texts * 2) == ask(plain, texts * 2)
        assert made.executor.host_states.used > count
        assert made.stats.restored_tokens >= count * 32
        assert made.stats.prefill_tokens <= count * 40 + count * 8


def test_each_rank_keeps_its_share(tmp_path: Path, late: list[Late]) -> None:
    save_hf("llama", tmp_path)
    with Checkpoint.open(tmp_path) as checkpoint:
        one = Llama.load(checkpoint, "cpu", torch.float32)
        two = Ranks.load(checkpoint, [torch.device("cpu")] * 2, torch.float32)
    options = {"max_batch": 2, "max_context": 64, "page_size": 4, "chunk": 16, "pages": 1 + 12}
    single, both = (Engine(model, **options, kv_offloading_size=0.001) for model in (one, two))
    assert len(single.executor.host_pages) == len(both.executor.host_pages), "the size is that of all ranks together"
    with closing(single.scheduler.open()), closing(both.scheduler.open()):
        assert ask(both, TEXTS * 2) == ask(single, TEXTS * 2)
        assert both.stats.restored_tokens == single.stats.restored_tokens > 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"kv": "turboquant:4,window=16", "page_size": 16}, "prefix caching is unsupported with turboquant:4"),
        ({"kv_offloading_size": gib(0.5)}, r"does not hold a page of 0\.00 MB; allowed is 1\.93e-06 GiB and more"),
    ],
)
def test_what_cannot_be_kept_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=f"kv_offloading_size: got .*{says}"):
        engine(**{"kv_offloading_size": 1} | options)


def test_a_scored_prompt_is_read_whole() -> None:
    made = engine(pages=1 + 12, kv_offloading_size=gib(64))
    with closing(made.scheduler.open()):
        ask(made, TEXTS)
        ask(made, [TEXTS[0]], SamplingParams(max_tokens=2, prompt_logprobs=0))
        assert not made.stats.restored_tokens
        assert ask(made, [[*START, 1]]) == [alone((*START, 1), PARAMS)]
