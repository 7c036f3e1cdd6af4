"""Layers over several devices: the same tokens as on one, with the same code on a CPU, which stages share."""

import itertools
import re
from dataclasses import replace

import pytest
import torch

import deepseek_published as published
from deepseek import continuations, prompts, save_hf
from onegraph.engine import executor
from onegraph.engine.engine import Engine
from onegraph.engine.evaluate import evaluate
from onegraph.engine.params import SamplingParams
from onegraph.formats.checkpoint import Checkpoint
from onegraph.models import deepseek_v4
from onegraph.models.deepseek_v4 import DeepseekV4
from onegraph.models.deepseek_v4_mtp import DeepseekDraft, draft_bytes
from onegraph.models.deepseek_v4_place import place
from onegraph.models.prefetch import Prefetch
from onegraph.runtime.graph import Runner
from onegraph.runtime.group import DeviceError, RankGroup, check_links, running
from test_deepseek_engine import GREEDY, SMALL
from test_graph import RecordedPool

MODES = {"eager": False, "captured": True, "split": "split"}


def load(path, devices):
    if not path.exists():
        save_hf("flash", path)
    with Checkpoint.open(path) as checkpoint:
        return DeepseekV4.load(checkpoint, devices)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("placed") / "m"


@pytest.fixture
def recorded(monkeypatch):
    monkeypatch.setattr(executor, "GraphPool", lambda device: RecordedPool())


@pytest.mark.parametrize(
    ("mode", "devices"), [("captured", 1), ("eager", 2), ("captured", 3), ("split", 3), ("split", 5)]
)
def test_stages_give_the_tokens_of_one_device(folder, recorded, mode, devices):
    model = load(folder, ["cpu"] * devices)
    assert [len(stage) for stage in model.stages] == {1: [5], 2: [3, 2], 3: [2, 2, 1], 5: [1] * 5}[devices]
    engine = Engine(model, **SMALL, capture=MODES[mode])
    assert engine.generate(prompts(), GREEDY) == continuations(GREEDY.max_tokens)
    assert engine.mode == mode
    assert len(engine.executor.step("decode").stages) == devices


def test_sampling_and_stops_too(folder, recorded):
    one, three = load(folder, "cpu"), load(folder, ["cpu"] * 3)
    warm = SamplingParams(max_tokens=8, temperature=0.9, top_k=40, top_p=0.9, seed=3, stop=[5, 6, 7])
    alone = Engine(one, **SMALL, capture=False)
    expected = alone.generate(prompts()[:3], warm)
    placed = Engine(three, **SMALL, capture=True)
    assert placed.generate(prompts()[:3], warm) == expected
    shaped = replace(warm, repetition_penalty=1.3, frequency_penalty=0.5, min_p=0.02)
    expected_shaped = alone.generate(prompts()[:3], shaped)
    assert placed.generate(prompts()[:3], shaped) == expected_shaped != expected


def test_evaluation_too(folder):
    one, three = load(folder, "cpu"), load(folder, ["cpu"] * 3)
    tokens = torch.tensor([token for prompt in prompts() for token in prompt])
    assert evaluate(three, tokens, window=64) == evaluate(one, tokens, window=64)


# ------------------------------------------------------------------------------------------------- pipelines of Runners


def test_a_pipeline_hands_on_what_the_next_stage_takes():
    """x -> 2x -> + 1, which the last stage leaves in the `x` of both, for any number of rows."""

    def double(x, scale):
        return x * scale

    def add(half, x):
        seen = half + x
        x.copy_(half + 1)
        return seen

    first = Runner(double, {"x": torch.zeros(4), "scale": torch.zeros(4)}, [2, 4], pool=RecordedPool())
    second = Runner(add, {"half": torch.zeros(4), "x": torch.zeros(4)}, [2, 4], pool=RecordedPool())
    both = RankGroup([[first, second]], carried="half", shared=["x"])
    for rows in (4, 1, 3):
        x, scale = torch.arange(1.0, 1 + rows), torch.full((rows,), 2.0)
        written = second.inputs["half"]._version
        assert both.load(x=x, scale=scale) == (rows, 4 if rows > 2 else 2)
        bucket = 4 if rows > 2 else 2
        assert second.inputs["half"]._version == written + (rows < bucket), "its own memory is not copied to itself"
        for _ in range(3):
            seen = both.replay(bucket)[:rows]
            assert torch.equal(seen, 2 * x + x)
            x = 2 * x + 1
            assert torch.equal(first.inputs["x"][:rows], x)
            assert torch.equal(second.inputs["x"][:rows], x)
    with pytest.raises(ValueError, match=r"got \['y'\]"):
        both.load(x=torch.zeros(1), scale=torch.zeros(1), y=torch.zeros(1))
    with pytest.raises(ValueError, match=r"stage 1 takes \['half', 'x'\]; \['stream'\] must be among them"):
        RankGroup([[first, second]])
    with pytest.raises(ValueError, match=r"stage 1 takes .*; \['scale'\] must be among them"):
        RankGroup([[first, second]], carried="half", shared=["scale"])
    with pytest.raises(ValueError, match="got none"):
        RankGroup([])


def test_a_pipeline_of_one_stage_hands_nothing_on():
    def count(x):
        return x.add_(1)

    one = RankGroup([[Runner(count, {"x": torch.zeros(2)}, [1, 2], pool=RecordedPool())]], shared=["x"])
    assert one.load(x=torch.tensor([5.0])) == (1, 1)
    for expected in (6.0, 7.0):
        assert one.replay(1).tolist() == [expected]
    assert one.stages[0].inputs["x"].tolist() == [7.0, 0.0]


# -------------------------------------------------------------------------------------------------------------- placing


def test_place_balances_bytes():
    assert place([4] * 8, (0, 0), [100, 100]) == [4, 4]
    assert place([4] * 8, (8, 0), [100, 100]) == [3, 5]
    assert place([4] * 8, (0, 0), [50, 100]) == [3, 5]
    assert place([10, 1, 1, 1, 1], (0, 0), [20, 20]) == [1, 4]
    assert place([1] * 43, (3, 3), [30] * 2) in ([21, 22], [22, 21])
    assert sum(place([3, 5] * 30, (2, 9), [70] * 8)) == 60


def test_draft_layers_have_room_beside_the_last_ones(tmp_path):
    """A block more, and an embedding, on the last of two equal devices."""
    published.write(tmp_path / "m", published.plain(published.TINY), published.make(published.TINY)[1])
    with Checkpoint.open(tmp_path / "m") as checkpoint:
        drafts = draft_bytes(checkpoint, torch.float32)
        counts = [
            [len(stage) for stage in DeepseekV4.load(checkpoint, ["cpu"] * 2, drafts=size).stages]
            for size in (0, drafts)
        ]
        model = DeepseekV4.load(checkpoint)
        draft = DeepseekDraft.load(checkpoint, model)
    assert counts == [[2, 2], [3, 1]]
    shared = "embed.weight", "block.attention.cos", "block.attention.sin"
    assert drafts == pytest.approx(sum(t.nbytes for name, t in draft.named_buffers() if name not in shared), rel=1e-3)


def test_place_is_never_worse_than_any_other_cut():
    g = torch.Generator().manual_seed(0)
    for _ in range(40):
        layers = torch.randint(1, 9, (7,), generator=g).tolist()
        free, ends = torch.randint(20, 40, (3,), generator=g).tolist(), (3, 2)

        def share(counts, layers=layers, free=free, ends=ends):
            cuts = [0, counts[0], counts[0] + counts[1], 7]
            loads = [sum(layers[a:b]) for a, b in itertools.pairwise(cuts)]
            return max((loads[0] + ends[0]) / free[0], loads[1] / free[1], (loads[2] + ends[1]) / free[2])

        every = [(a, b, 7 - a - b) for a in range(1, 6) for b in range(1, 7 - a)]
        best = min(map(share, every))
        if best <= 1:
            assert share(place(layers, ends, free)) == pytest.approx(best)


def test_too_little_memory_says_the_sums(folder, monkeypatch):
    with pytest.raises(ValueError, match=r"needs 160\.9 GB .* have 70\.0 \+ 75\.0 GB free"):
        place([3_500_000_000] * 43, (10_000_000_000, 400_000_000), [70_000_000_000, 75_000_000_000])
    with pytest.raises(ValueError, match="6 devices for 5 layers"):
        load(folder, ["cpu"] * 6)
    monkeypatch.setattr(deepseek_v4, "free_memory", lambda device, reserve=0: 1000)
    with pytest.raises(ValueError, match=r"needs 0\.0 GB"):
        load(folder, "cpu")


def test_too_little_memory_for_state_names_the_device(folder, monkeypatch):
    model = load(folder, ["cpu", "cpu"])
    monkeypatch.setattr(deepseek_v4, "free_cache_memory", lambda device, reserve=0: 10**6)
    with pytest.raises(ValueError, match=r"cpu has 0\.0 GB free for state; 500 sequences"):
        model.new_cache(rows=500, pages=900, page_size=128, pages_per_row=2)


def test_the_size_of_state_is_what_it_takes(folder):
    model = load(folder, "cpu")
    cache = model.new_cache(rows=3, pages=9, page_size=256, pages_per_row=2)
    sizes = {"rows": 3, "pages": 9, "page_size": 256, "itemsize": 4}
    assert cache.nbytes == sum(type(cache).bytes_of(block.attention, **sizes) for block in model.blocks)


def test_each_weight_goes_to_its_own_device(folder, monkeypatch):
    """Layer by layer and from the file straight there: what belongs to the second device never becomes the first's."""
    monkeypatch.setattr(deepseek_v4, "free_memory", lambda device, reserve=0: 1 << 40)
    read = []
    mapped, taken = Checkpoint.tensor, Prefetch.take
    monkeypatch.setattr(Checkpoint, "tensor", lambda self, name: read.append(name) or mapped(self, name))
    monkeypatch.setattr(Prefetch, "take", lambda self, name, to: read.append(name) or taken(self, name, to))
    model = load(folder, ["cpu", "meta"])
    split = len(model.stages[0])
    for name, buffer in model.named_buffers():
        first, *rest = name.split(".")
        on_first = first == "embed" or (first == "blocks" and int(rest[0]) < split)
        assert buffer.device.type == ("cpu" if on_first else "meta"), name
    with Checkpoint.open(folder) as checkpoint:
        assert sorted(read) == sorted(checkpoint.names), "each tensor is read once"
    layers = [int(found.group(1)) for name in read if (found := re.search(r"layers\.(\d+)\.", name))]
    assert layers == sorted(layers), "a layer is done before the next one is read"


def test_a_placed_cache_forgets_in_every_part(folder):
    cache = load(folder, ["cpu"] * 2).new_cache(rows=2, pages=5, page_size=128, pages_per_row=2)
    for tensor in cache.tensors():
        tensor.fill_(torch.nan)
    assert len(cache.parts) == 2
    cache.reset()
    assert all(not tensor.any() for part in cache.parts for tensor in part.tensors())


def test_a_missing_peer_link_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: {a, b} != {1, 2})
    check_links([torch.device("cuda", 0), torch.device("cuda", 1)])
    three = [torch.device("cuda", i) for i in range(3)]
    with pytest.raises(ValueError, match="cuda:1 has no peer link to cuda:2"):
        check_links(three)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: {a, b} != {0, 2})
    with pytest.raises(ValueError, match="cuda:2 has no peer link to cuda:0"):  # where the drawn token goes
        check_links(three)


def test_a_device_that_fails_is_named():
    class Broken(RecordedPool):
        def synchronize(self):
            raise RuntimeError("CUDA error: unspecified launch failure")

    pools = [RecordedPool(), Broken()]
    pools[1].device = torch.device("cuda", 1)
    failed = r"cuda:1 failed \(CUDA error: unspecified launch failure\)"
    with pytest.raises(DeviceError, match=failed), running(pools):
        raise RuntimeError("CUDA error: unspecified launch failure\nsome advice")
    with pytest.raises(RuntimeError, match=r"^mine$"), running(pools[:1]):
        raise RuntimeError("mine")


# ----------------------------------------------------------------------------------------------------------------- GPUs


@pytest.mark.gpu
@pytest.mark.parametrize("mode", sorted(MODES))
def test_two_gpus_give_the_tokens_of_transformers(folder, mode):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    engine = Engine(load(folder, ["cuda:0", "cuda:1"]), **SMALL, capture=MODES[mode])
    for _ in range(2):
        assert engine.generate(prompts(), GREEDY) == continuations(GREEDY.max_tokens)
    assert {t.device.index for t in engine.executor.cache.tensors()} == {0, 1}
