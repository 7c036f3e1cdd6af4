"""Drafts over several devices: on ranks beside one another and in stages the text is the one of one device."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import deepseek_published as published
from eagle import load_head, net_of, write_head
from engines import maker
from models import save_hf
from onegraph.api.drafting import own_layers
from onegraph.check import check_step
from onegraph.engine.choice import PLAIN
from onegraph.engine.draft import DraftState, ModelDrafter, NgramDrafter, OracleDrafter
from onegraph.engine.draft_heads import HeadDrafter
from onegraph.engine.engine import Engine
from onegraph.engine.params import SamplingParams
from onegraph.formats.checkpoint import Checkpoint, write_checkpoint
from onegraph.models import ranks, shares
from onegraph.models.deepseek_v4 import DeepseekV4
from onegraph.models.llama import Llama
from onegraph.models.ranks import Ranks
from onegraph.nn.peers import PeerError
from onegraph.ops.ranks import EXPIRED, MODE, ROUNDS
from onegraph.ops.registry import reference_ops
from test_eagle import rewritten
from test_ranks import PARAMS, hasty, text
from test_speculate import CODES, TURNS, held, kept_and_not, round_inputs

PROMPTS = [text(19), text(3, 1), [7, 8, 9, 7, 8, 9, 7, 8]]
GREEDY = [SamplingParams(max_tokens=14, seed=3 + i) for i in range(3)]
WARM = [SamplingParams(max_tokens=14, temperature=0.9, top_k=20, top_p=0.95, seed=6 + i) for i in range(3)]
SIZES: dict[str, Any] = {"max_batch": 2, "max_context": 64, "page_size": 16, "chunk": 8}


def sizes_of(kv: str | None) -> dict[str, Any]:
    """Of an engine with this cache, for the texts that are `asked` of it."""
    return SIZES | held(kv) | {"max_context": 96}


def asked(kv: str | None) -> list[list[SamplingParams]]:
    """Greedy rows and sampling ones; with codes beside one another, and longer, so that most is read from codes."""
    if kv is None:
        return [GREEDY, WARM]
    return [[replace(each, max_tokens=60) for each in (GREEDY[0], WARM[1], GREEDY[2])]]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_hf("llama", path, head_dim=64)
    return path


@pytest.fixture(scope="module")
def both(path: Path) -> tuple[Llama, Ranks]:
    with Checkpoint.open(path) as checkpoint:
        return Llama.load(checkpoint), Ranks.load(checkpoint, ["cpu"] * 2)


@pytest.fixture(scope="module")
def texts(both: tuple[Llama, Ranks]) -> dict[str | None, list[list[list[int]]]]:
    """By cache, those `asked` for, of one device, without drafts."""
    engines = {kv: Engine(both[0], **sizes_of(kv)) for kv in (None, CODES, TURNS)}
    found = {kv: [engine.generate(PROMPTS, params) for params in asked(kv)] for kv, engine in engines.items()}
    exact = engines[None].generate(PROMPTS, asked(CODES)[0])
    assert exact not in (found[CODES][0], found[TURNS][0]), "the cases would show no codes"
    return found


def same_everywhere(engine: Engine) -> None:
    """All that rounds keep of texts is the same on every rank, and of every stage what the last one knows.

    Slot 0 is padding's, whose rows read nothing and tell nothing: what a drafter names there is what each rank came to
    alone, where it was warmed up and first launched with the exchange off.
    """
    first, *others = engine.executor.speculation.ranks  # type: ignore[union-attr]
    for other in others:
        for name in ("history", "drafts", "found"):
            assert torch.equal(getattr(first.state, name)[1:].cpu(), getattr(other.state, name)[1:].cpu()), name
    for rank in (first, *others):
        for drafts, found in rank.waiting[:-1]:
            assert torch.equal(drafts.cpu(), rank.state.drafts.cpu())
            assert torch.equal(found.cpu(), rank.state.found.cpu())


def drafts_like(engine: Engine, other: Engine) -> None:
    same_everywhere(engine)
    assert engine.executor.speculation is not None
    assert other.executor.speculation is not None
    assert torch.equal(
        engine.executor.speculation.state.drafts[1:].cpu(), other.executor.speculation.state.drafts[1:].cpu()
    )
    assert engine.stats.drafted_tokens == other.stats.drafted_tokens > 0


def drafter(kind: str, model: Llama, answers: list[list[int]]) -> Any:
    known = [[*prompt, *answer] for prompt, answer in zip(PROMPTS, answers, strict=True)]
    return {
        "ngram": NgramDrafter,
        "same": [partial(ModelDrafter, model), partial(ModelDrafter, model)],
        "oracle": partial(OracleDrafter, known, 0.7, model.config.vocab_size),
    }[kind]


@pytest.mark.parametrize(
    ("kind", "mode", "kv"),
    [("ngram", "eager", None), ("oracle", "captured", None), ("ngram", "eager", CODES), ("same", "eager", CODES),
     ("oracle", "captured", CODES), ("same", "eager", TURNS), ("oracle", "eager", TURNS)],
)  # fmt: skip
def test_the_text_is_that_of_one_device_without_drafts(
    both: tuple[Llama, Ranks], texts: Any, kind: str, mode: str, kv: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, model = both
    make = maker(mode, model, monkeypatch, **sizes_of(kv))
    for answers, params in zip(texts[kv], asked(kv), strict=True):
        engine = make(draft=drafter(kind, one, answers), draft_tokens=3 if kv is None else 7)
        assert engine.generate(PROMPTS, params) == answers
        same_everywhere(engine)
        if kind != "ngram":
            assert engine.stats.accepted_tokens > 12, "the case would show little"
        if kind == "oracle" and kv is not None:
            assert kept_and_not(engine) > 20


def test_rows_that_take_one_token_a_round_do_so_on_all_ranks(both: tuple[Llama, Ranks]) -> None:
    params = PARAMS[:3]
    engines = [Engine(both[0], **SIZES), Engine(both[1], **SIZES, draft=drafter("same", both[0], [[]] * 3))]
    texts = [[s.output for s in engine.complete(PROMPTS, params)] for engine in engines]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("kind", ["ngram", "oracle"])
def test_rounds_tell_log_probabilities_on_ranks(both: tuple[Llama, Ranks], kind: str) -> None:
    params = [
        SamplingParams(max_tokens=14, temperature=1.2, min_p=0.2, top_p=0.9, seed=3, logprobs=3),
        SamplingParams(max_tokens=12, logprobs=0, min_p=0.3),
        SamplingParams(max_tokens=13, temperature=0.9, seed=5, logprobs=20),
    ]
    want = Engine(both[0], **SIZES).complete(PROMPTS, params)
    draft = drafter(kind, both[0], [s.output for s in want])
    engine = Engine(both[1], **SIZES, draft=draft, draft_tokens=3)
    for found, wanted in zip(engine.complete(PROMPTS, params), want, strict=True):
        assert [told.token for told in found.logprobs] == found.output == wanted.output
        told = [[one.logprob for one in sequence.logprobs] for sequence in (found, wanted)]
        assert told[0] == pytest.approx(told[1], abs=2e-3)
    assert engine.stats.drafted_tokens > 0


def test_auto_chooses_for_all_ranks(both: tuple[Llama, Ranks], texts: Any) -> None:
    """Rounds are timed on all of them together."""
    engine = Engine(both[1], **SIZES, draft=drafter("oracle", both[0], texts[None][0]))
    assert engine.generate(PROMPTS, GREEDY) == texts[None][0]
    assert engine.executor.speculation is not None
    assert engine.executor.speculation.measured((2, PLAIN, False))


def test_rounds_of_more_tokens_than_an_inbox_takes_go_in_parts(
    both: tuple[Llama, Ranks], path: Path, texts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rows of eight tokens: two sums a layer, of up to five tokens at once, and one gathering, of up to two."""
    monkeypatch.setattr(ranks, "TOKENS", 5)
    monkeypatch.setattr(ranks, "ROWS", 1)
    with Checkpoint.open(path) as checkpoint:
        model = Ranks.load(checkpoint, ["cpu"] * 2)
    engine = Engine(model, **SIZES, draft=drafter("oracle", both[0], texts[None][0]), draft_tokens=7)
    assert engine.generate(PROMPTS, GREEDY) == texts[None][0]
    same_everywhere(engine)
    before = int(model.peers.states[0][ROUNDS])
    engine.executor.step("decode", drafts=7).replay(2)
    assert int(model.peers.states[0][ROUNDS]) - before == 4 * 2 * both[0].config.layers + 8


@pytest.mark.parametrize("kv", [None, CODES, TURNS])
def test_a_head_drafts_on_every_rank_what_it_drafts_on_one(
    both: tuple[Llama, Ranks], texts: Any, kv: str | None, tmp_path: Path
) -> None:
    """It reads what is behind layers of all ranks, and names tokens with the model's own head, which they share."""
    one, model = both
    layers, vocabulary = (0, 1, 2), torch.arange(one.config.vocab_size)
    write_head(tmp_path / "head", net_of(one, layers, vocabulary), layers, vocabulary)
    rewritten(tmp_path / "head", tmp_path / "bare", lambda name: None if name.startswith("lm_head") else name, dict)
    heads = [load_head(tmp_path / "bare", target) for target in (one, *model.ranks)]
    assert heads[1].lm_head is None
    engines = [
        Engine(one, **sizes_of(kv), draft=partial(HeadDrafter, heads[0]), draft_tokens=3),
        Engine(model, **sizes_of(kv), draft=[partial(HeadDrafter, head) for head in heads[1:]], draft_tokens=3),
    ]
    for answers, params in zip(texts[kv], asked(kv), strict=True):
        for engine in engines:
            assert engine.generate(PROMPTS, params) == answers
        drafts_like(engines[1], engines[0])


def exchanges(engine: Engine, drafts: int) -> int:
    """Of an iteration in which two sequences read and get so many drafts."""
    peers = engine.executor.model.peers
    assert peers is not None
    before = int(peers.states[0][ROUNDS])
    engine.executor.step("decode", drafts=drafts).replay(2)
    return int(peers.states[0][ROUNDS]) - before


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[Tensor]]:
    """By `id` of a rank's state, the drafts of each iteration, without those of padding."""
    found: dict[int, list[Tensor]] = defaultdict(list)
    write = DraftState.write

    def record(state: DraftState, slots: Tensor, drafts: Sequence[Tensor], named: Tensor) -> Tensor:
        found[id(state)].append(torch.stack([*drafts, slots])[:, slots > 0])
        return write(state, slots, drafts, named)

    monkeypatch.setattr(DraftState, "write", record)
    return found


def same_drafts(engines: list[Engine], written: dict[int, list[Tensor]]) -> None:
    """In all iterations of all ranks."""
    states = [rank.state for engine in engines for rank in engine.executor.speculation.ranks]  # type: ignore[union-attr]
    first, *others = (written[id(state)] for state in states)
    assert len(first) > 10
    for other in others:
        assert len(other) == len(first)
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.fixture(scope="module")
def like(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that is often right about the next token of `path`, and not always."""
    generator, other = torch.Generator().manual_seed(5), tmp_path_factory.mktemp("like") / "m"
    with Checkpoint.open(path) as checkpoint:
        tensors = {name: checkpoint.tensor(name) for name in checkpoint.names}
    noise = {name: 0.1 * x.std() * torch.randn(x.shape, generator=generator) for name, x in tensors.items()}
    write_checkpoint(other, checkpoint.config, ((name, x + noise[name]) for name, x in tensors.items()))
    return other


@pytest.mark.parametrize("kv", [None, CODES])
def test_a_draft_model_that_ranks_share_drafts_what_it_drafts_whole(
    both: tuple[Llama, Ranks], like: Path, texts: Any, kv: str | None, written: dict[int, list[Tensor]]
) -> None:
    """It exchanges within the model's own steps, through the same peer buffers."""
    one, model = both
    with Checkpoint.open(like) as checkpoint:
        whole, shared = Llama.load(checkpoint), Ranks.load(checkpoint, ["cpu"] * 2, peers=model.peers)
    makes = [[partial(ModelDrafter, whole)] * 2, [partial(ModelDrafter, rank) for rank in shared.ranks]]
    engines = [Engine(model, **sizes_of(kv), draft=draft, draft_tokens=3) for draft in makes]
    for answers, params in zip(texts[kv], asked(kv), strict=True):
        written.clear()
        for engine in engines:
            assert engine.generate(PROMPTS, params) == answers
        same_drafts(engines, written)
        accepted = [engine.stats.accepted_tokens for engine in engines]
        assert accepted[0] == accepted[1]
        assert 0 < accepted[0] < engines[0].stats.drafted_tokens, "the case would show little"
    passes = 2 * one.config.layers + 1  # exchanges of one
    assert [exchanges(engine, 3) for engine in engines] == [passes, (1 + 3) * passes]


def test_of_a_draft_model_each_weight_is_on_one_rank(both: tuple[Llama, Ranks], like: Path) -> None:
    with Checkpoint.open(like) as checkpoint:
        whole, shared = Llama.load(checkpoint), Ranks.load(checkpoint, ["cpu"] * 2, peers=both[1].peers)
    names = {name for name, _ in whole.named_buffers() if name.endswith("linear.weight") or name == "lm_head.weight"}
    assert len(names) == 4 * whole.config.layers + 1
    for name in names:
        parts = [rank.get_buffer(name) for rank in shared.ranks]
        assert sum(part.numel() for part in parts) == whole.get_buffer(name).numel(), name
        if name.endswith(("out.linear.weight", "down.linear.weight")):
            assert torch.equal(torch.cat(parts, dim=1), whole.get_buffer(name))


@pytest.mark.parametrize("own", [True, False])
def test_a_head_that_ranks_share_drafts_what_it_drafts_whole(
    own: bool, both: tuple[Llama, Ranks], texts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    written: dict[int, list[Tensor]],
) -> None:  # fmt: skip
    """Its layer is cut, and its own output head, of fewer tokens; the model's is cut already."""
    one, model = both
    layers, vocabulary = (0, 1, 2), torch.arange(one.config.vocab_size - 20 * own)
    write_head(tmp_path / "own", net_of(one, layers, vocabulary), layers, vocabulary)
    rewritten(tmp_path / "own", tmp_path / "bare", lambda name: None if name.startswith("lm_head") else name, dict)
    folder = tmp_path / ("own" if own else "bare")
    heads = [[load_head(folder, rank) for rank in model.ranks]]
    monkeypatch.setattr(shares, "EXCHANGE_S", 0.0)
    heads += [[load_head(folder, rank) for rank in model.ranks]]
    assert [[head.peer is not None for head in each] for each in heads] == [[False] * 2, [True] * 2]
    whole, part = heads[0][0], heads[1][1]
    assert 2 * part.attention.heads == whole.attention.heads
    assert 2 * part.attention.kv_heads == whole.attention.kv_heads
    assert 2 * part.mlp.down.linear.in_features == whole.mlp.down.linear.in_features  # type: ignore[union-attr]
    rows = [0 if head.lm_head is None else head.lm_head.out_features for head in heads[1]]
    assert sum(rows) == own * len(vocabulary)
    makes = [[partial(HeadDrafter, head) for head in each] for each in heads]
    engines = [Engine(model, **SIZES, draft=each, draft_tokens=3) for each in makes]
    for answers, params in zip(texts[None], asked(None), strict=True):
        written.clear()
        for engine in engines:
            assert engine.generate(PROMPTS, params) == answers
        same_drafts(engines, written)
    passes = 2 * one.config.layers + 1
    assert [exchanges(engine, 3) for engine in engines] == [passes + 3 * (not own), passes + 3 * 3]


@pytest.mark.parametrize("kind", ["model", "eagle"])
def test_what_drafts_exchanges_within_captured_steps(
    kind: str, both: tuple[Llama, Ranks], path: Path, texts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, model = both
    if kind == "model":
        with Checkpoint.open(path) as checkpoint:
            shared = Ranks.load(checkpoint, ["cpu"] * 2, peers=model.peers)
        draft = [partial(ModelDrafter, rank) for rank in shared.ranks]
    else:
        layers, vocabulary = (0, 1, 2), torch.arange(one.config.vocab_size - 20)
        write_head(tmp_path / "head", net_of(one, layers, vocabulary), layers, vocabulary)
        monkeypatch.setattr(shares, "EXCHANGE_S", 0.0)
        draft = [partial(HeadDrafter, load_head(tmp_path / "head", rank)) for rank in model.ranks]
    engine = maker("captured", model, monkeypatch, **SIZES)(draft=draft, draft_tokens=2)
    assert engine.generate(PROMPTS, WARM) == texts[None][1]
    same_everywhere(engine)
    if kind == "model":
        assert engine.stats.accepted_tokens > 12


# --------------------------------------------------------------------------------------------------------- DeepSeek-V4

LONG = [[5, 9, 3], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], list(range(30, 56))]
MIXED = [replace(params, max_tokens=9) for params in (GREEDY[0], WARM[1], GREEDY[2])]
WIDE: dict[str, Any] = {"max_batch": 2, "max_context": 256, "page_size": 128, "chunk": 16}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mtp") / "m"
    published.write(path, published.plain(published.TINY), published.make(published.TINY)[1])
    return path


def deepseek(path: Path, load: Callable[[Checkpoint], Any]) -> Any:
    with Checkpoint.open(path) as checkpoint:
        return load(checkpoint)


@pytest.fixture(scope="module")
def alone(folder: Path) -> tuple[list[list[int]], Engine]:
    """Texts without drafts, and an engine with them, of one device."""
    model = deepseek(folder, partial(DeepseekV4.load, max_context=256))
    drafted = Engine(model, **WIDE, draft=own_layers(model, folder), draft_tokens=3)
    found = Engine(model, **WIDE).generate(LONG, MIXED)
    assert drafted.generate(LONG, MIXED) == found
    return found, drafted


def test_draft_layers_are_shared_among_ranks(folder: Path, alone: Any) -> None:
    """Groups of heads and experts of the draft layers are cut like the decoder's; drafts are those of one device."""
    load = partial(Ranks.load, devices=["cpu"] * 2, kind=DeepseekV4, max_context=256)
    model = deepseek(folder, load)
    makes = [own_layers(rank, folder) for rank in model.ranks]
    engine = Engine(model, **WIDE, draft=makes, draft_tokens=3)
    drafter: Any = engine.executor.speculation.ranks[1].drafter  # type: ignore[union-attr]
    block = drafter.head.block
    assert block.attention.groups == model.config.out_groups // 2
    assert block.moe.experts.down.in_features == model.config.expert_size // 2
    assert engine.generate(LONG, MIXED) == alone[0]
    drafts_like(engine, alone[1])


@pytest.mark.parametrize("mode", ["eager", "split"])
def test_stages_read_what_the_last_one_drafted(
    folder: Path, alone: Any, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers one behind the other, the draft layer with the last ones."""
    model = deepseek(folder, partial(DeepseekV4.load, device=["cpu"] * 2, max_context=256))
    engine = maker(mode, model, monkeypatch, **WIDE)(draft=own_layers(model, folder), draft_tokens=3)
    assert engine.generate(LONG, MIXED) == alone[0]
    if mode == "eager":  # else a round was launched ahead
        drafts_like(engine, alone[1])
    same_everywhere(engine)


def test_stages_check_drafts_of_others_too(folder: Path, alone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = deepseek(folder, partial(DeepseekV4.load, device=["cpu"] * 3, max_context=256))
    known = [[*prompt, *answer] for prompt, answer in zip(LONG, alone[0], strict=True)]
    draft = partial(OracleDrafter, known, 0.7, model.config.vocab_size)
    engine = maker("captured", model, monkeypatch, **WIDE)(draft=draft, draft_tokens=5)
    assert engine.generate(LONG, MIXED) == alone[0]
    assert engine.stats.accepted_tokens > 8
    same_everywhere(engine)


@pytest.mark.parametrize("stage", [0, 1])
def test_the_round_of_a_stage_may_be_captured(folder: Path, stage: int) -> None:
    """`onegraph check`, in simulation: nothing of it is on another GPU than its own, cuda:0."""

    def factory() -> tuple[Callable[[], Any], Callable[[int], tuple[()]]]:
        devices = ["cuda:1", "cuda:0"] if stage else ["cuda:0", "cuda:1"]
        model = deepseek(folder, partial(DeepseekV4.load, device=devices, max_context=256))
        engine = Engine(model, **WIDE, draft=own_layers(model, folder), draft_tokens=2, capture=False)
        runner = engine.executor.step("decode", drafts=2)
        rows = round_inputs(torch.Generator().manual_seed(1), 60, torch.arange(1, 5).view(2, 2))
        rows |= {"limits": rows["positions"] + 60, "drawn": rows["drawn"] % model.config.vocab_size}
        runner.load(**rows)

        def step() -> Any:
            with reference_ops():
                return runner.stages[stage].replay(2)

        return step, lambda index: ()

    report = check_step(factory, steps=4, gpus=2)
    assert [f"{f.code} {f.path}:{f.line} {f.message}" for f in report.findings] == []
    assert report.facts["replay equals eager"]


# ----------------------------------------------------------------------------------------------- what goes wrong


def test_after_a_round_that_not_all_ranks_ran_the_next_run_is_right(tmp_path: Path) -> None:
    """A rank that gives up, then an error between two ranks: what one of them drafted and the other did not is gone."""
    model = hasty(tmp_path)
    params = SamplingParams(max_tokens=10)
    want = Engine(model, **SIZES).generate(PROMPTS[:1], params)
    oracle = partial(OracleDrafter, [[*PROMPTS[0], *want[0]]], 0.7, model.config.vocab_size)
    engine = Engine(model, **SIZES, draft=oracle, draft_tokens=3)
    assert engine.generate(PROMPTS[:1], params) == want
    model.peers.states[1][MODE] = EXPIRED
    with pytest.raises(PeerError, match=r"rank 0 \(cpu\) waited for rank 1 \(cpu\) at exchange \d+.*: try again"):
        engine.generate(PROMPTS[:1], params)
    assert engine.generate(PROMPTS[:1], params) == want
    second: Any = engine.executor.step("decode", drafts=3)
    second = second.ranks[1][0]
    ran, times = second.replay, iter(range(9))

    def fails(bucket: int | None = None) -> Any:
        if next(times) < 1:
            return ran(bucket)
        second.replay = ran
        raise RuntimeError("between the ranks")

    second.replay = fails
    with pytest.raises(RuntimeError, match="between the ranks"):
        engine.generate(PROMPTS[:1], params)
    assert engine.generate(PROMPTS[:1], params) == want
    same_everywhere(engine)


def test_each_rank_needs_its_drafter(both: tuple[Llama, Ranks]) -> None:
    with pytest.raises(ValueError, match="draft: got 3 drafters for 2 ranks; give one for each, or one for all of"):
        Engine(both[1], draft=[NgramDrafter] * 3)
