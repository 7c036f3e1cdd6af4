"""DSpark's draft stages against a plain reference, written from DeepSeek's description without our ops."""

import pytest
import torch
from torch import Tensor

from deepseek_published import TINY, TINY_DSPARK, make, nvidia, plain, write
from models import Decoder
from onegraph.check import check_step
from onegraph.formats.checkpoint import Checkpoint, CheckpointError
from onegraph.formats.fp8 import FP8
from onegraph.formats.mxfp4 import MXFP4
from onegraph.models.deepseek_v4 import DeepseekV4
from onegraph.models.deepseek_v4_dspark import DSparkDraft
from onegraph.ops.registry import reference_ops
from test_deepseek_mtp import Reference, close, norm, random

WINDOW, BLOCK, LAYERS = TINY["sliding_window"], TINY_DSPARK["dspark_block_size"], [1, 2, 3]


class Stage(Reference):
    """One stage, for a block of tokens behind `main` [T, D]."""

    main: Tensor

    def attention(self, x: Tensor) -> Tensor:
        many = len(self.main)
        at = many + torch.arange(len(x)).float()
        window = self.keys(self.main, torch.arange(many).float())[-WINDOW:]
        kv = torch.cat((window, self.keys(x, at)))
        return self.attend(x, at, kv, torch.ones(len(x), len(kv), dtype=torch.bool))


def drafts(dense: dict[str, Tensor], taps: Tensor, known: int) -> tuple[list[int], Tensor, Tensor]:
    """taps [T, 3 D] of all tokens read, and the one behind them -> tokens, logits [5, V], confidence [5]."""
    stages = [Stage(dense, i) for i in range(3)]
    main = norm(taps @ stages[0]["main_proj.weight"].T, stages[0]["main_norm.weight"])
    ids = torch.tensor([known] + [TINY_DSPARK["dspark_noise_token_id"]] * (BLOCK - 1))
    x = dense["embed.weight"][ids][:, None].repeat(1, 4, 1)
    for stage in stages:
        stage.main = main
        x = stage.block(x)
    last = stages[-1]
    hidden = last.collapse(x)
    logits = norm(hidden, last["norm.weight"]) @ dense["head.weight"].T
    found, seen = [known], []
    for i in range(BLOCK):
        seen.append(last["markov_head.markov_w1.weight"][found[-1]])
        logits[i] += last["markov_head.markov_w2.weight"] @ seen[-1]
        found.append(int(logits[i].argmax()))
    return found[1:], logits, torch.cat((hidden, torch.stack(seen)), 1) @ last["confidence_head.proj.weight"][0]


@pytest.fixture(scope="module")
def made():
    return make(TINY_DSPARK)


@pytest.fixture(scope="module")
def loaded(made, tmp_path_factory):
    path = tmp_path_factory.mktemp("dspark") / "m"
    write(path, plain(TINY_DSPARK), made[1])
    return load(path)


def load(path, device="cpu"):
    with Checkpoint.open(path) as checkpoint:
        model = DeepseekV4.load(checkpoint, device, max_context=512)
        return model, DSparkDraft.load(checkpoint, model)


class Drafter:
    def __init__(self, model: DeepseekV4, draft: DSparkDraft, rows: int) -> None:
        self.cache = Decoder(model, rows, 384, page_size=128, spare=8, drafts=draft.attentions).cache
        self.model, self.draft = model, draft

    @torch.inference_mode()
    def feed(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """The decoder reads tokens [B, Q], the draft what it made of them; taps [B, Q, 3 D]."""
        self.cache.counts.copy_(counts)
        taps = self.draft.taps()
        self.model.run(0, self.model.enter(tokens), tokens, self.cache, taps)
        self.draft.read(taps, self.cache)
        self.cache.positions.add_(counts)
        return torch.cat([taps[layer] for layer in LAYERS], 2)


def check_drafts(model: DeepseekV4, draft: DSparkDraft, dense: dict[str, Tensor]) -> None:
    """Drafts behind texts of many lengths; between them the decoder reads blocks of which some tokens are taken back.
    The window of 16 wraps many times."""
    g = torch.Generator().manual_seed(6)
    state, truth = Drafter(model, draft, 1), torch.empty(0, 3 * 256)
    for count, kept in ((3, 3), (20, 20), (1, 1), (5, 2), (6, 1), (9, 1), (2, 2), (40, 40), (5, 5), (7, 1)):
        taps = state.feed(torch.tensor([random(count, g)]), torch.tensor([count], dtype=torch.int32))
        truth = torch.cat((truth, taps[0, :kept]))
        state.cache.truncate(torch.tensor([len(truth)], dtype=torch.int32))
        known = random(1, g)
        with torch.inference_mode():
            tokens, logits, confidence = draft(torch.tensor(known), state.cache)
        wanted = drafts(dense, truth, known[0])
        close(logits[0], wanted[1])
        close(confidence[0], wanted[2])
        assert tokens[0].tolist() == wanted[0]
    assert wanted[1].std() > 0.5


def test_drafts_are_those_of_the_reference(loaded, made):
    check_drafts(*loaded, made[1])


def test_the_published_form_keeps_its_precision(tmp_path):
    """FP8 linears and MXFP4 experts, in NVIDIA's form too."""
    config = nvidia(TINY_DSPARK)
    tensors, dense = make(config)
    write(tmp_path / "m", config, tensors)
    model, draft = load(tmp_path / "m")
    assert draft.main_projection.format is FP8[128, 128]
    assert {block.moe.experts.gate_up.format for block in draft.blocks} == {MXFP4}
    check_drafts(model, draft, dense)


def test_taps_are_the_streams_mean_behind_a_layer(loaded):
    model, draft = loaded
    tokens = torch.tensor([random(23, torch.Generator().manual_seed(1))])
    taps = Drafter(model, draft, 1).feed(tokens, torch.tensor([23], dtype=torch.int32))
    stages = model.stages
    for i, tap in zip(LAYERS, taps[0].split(256, 1), strict=True):
        cache = Drafter(model, draft, 1).cache
        cache.counts.fill_(23)
        model.stages = [range(i + 1)]
        with torch.inference_mode():
            streams = model.run(0, model.enter(tokens), tokens, cache)
        model.stages = stages
        assert torch.equal(streams[0].mean(1), tap)


def test_two_rows_draft_what_each_drafts_alone(loaded):
    model, draft = loaded
    g = torch.Generator().manual_seed(9)
    texts, known = [random(30, g), random(7, g)], random(2, g)
    padded = torch.tensor([texts[0], texts[1] + [0] * 23])
    both = Drafter(model, draft, 2)
    both.feed(padded, torch.tensor([30, 7], dtype=torch.int32))
    with torch.inference_mode():
        _, logits, _ = draft(torch.tensor(known), both.cache)
        for i, text in enumerate(texts):
            alone = Drafter(model, draft, 1)
            alone.feed(torch.tensor([text]), torch.tensor([len(text)], dtype=torch.int32))
            close(draft(torch.tensor(known[i : i + 1]), alone.cache)[1][0], logits[i])


PARTS = ["main_norm", "main_proj", "markov_w1", "markov_w2", "hc_head_base", "2.norm", "attn_sink"]


@pytest.mark.parametrize("part", PARTS)
def test_every_small_tensor_matters(loaded, made, part, tmp_path):
    model, draft = loaded
    g = torch.Generator().manual_seed(7)
    names = [name for name in made[1] if name.startswith("mtp.") and part in name]
    assert names
    changed = {name: made[1][name] + 0.5 * torch.randn(made[1][name].shape, generator=g) for name in names}
    write(tmp_path / "m", plain(TINY_DSPARK), made[1] | changed)
    with Checkpoint.open(tmp_path / "m") as checkpoint:
        other = DSparkDraft.load(checkpoint, model)
    text, found = torch.tensor([random(20, g)]), []
    for each in (draft, other):
        state = Drafter(model, each, 1)
        state.feed(text, torch.tensor([20], dtype=torch.int32))
        with torch.inference_mode():
            found.append(each(torch.tensor([5]), state.cache)[1])
    assert (found[0] - found[1]).abs().max() > 1e-3


def test_what_does_not_fit_is_named(loaded, made, tmp_path):
    model, draft = loaded
    dense = {name: t for name, t in made[1].items() if name != "mtp.2.markov_head.markov_w2.weight"}
    write(tmp_path / "m", plain(TINY_DSPARK), dense)
    with (
        Checkpoint.open(tmp_path / "m") as checkpoint,
        pytest.raises(CheckpointError, match=r"missing: 'mtp\.2\.markov"),
    ):
        DSparkDraft.load(checkpoint, model)
    write(tmp_path / "flash", plain(TINY), make(TINY)[1])
    with Checkpoint.open(tmp_path / "flash") as checkpoint, pytest.raises(ValueError, match="has no dspark_block_size"):
        DSparkDraft.load(checkpoint, model)
    with pytest.raises(ValueError, match=r"taps are of 0 layers; give those of \(1, 2, 3\)"):
        draft.read(draft.taps(), Drafter(model, draft, 1).cache)


def speculation(model: DeepseekV4, draft: DSparkDraft):
    """A round as a step: the decoder reads a known token and five drafts, keeps what it agrees with, and five more are
    drafted behind the token that it gives."""
    cache = Drafter(model, draft, 2).cache
    device = cache.positions.device
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6], [6, 7, 8, 9, 10, 11]], device=device)
    cache.positions.copy_(torch.tensor([13, 126], dtype=torch.int32))
    six = torch.full((2,), 6, dtype=torch.int32, device=device)

    def step() -> Tensor:
        start, taps = cache.positions.clone(), draft.taps()
        cache.counts.copy_(six)
        streams = model.run(0, model.enter(tokens), tokens, cache, taps)
        draft.read(taps, cache)
        best = model.logits(model.leave(streams)).argmax(2)
        agreed = (best[:, :-1] == tokens[:, 1:]).int().cumprod(1).sum(1)
        cache.positions.add_(six)
        cache.truncate((start + agreed + 1).int())
        known = best.gather(1, agreed.unsqueeze(1))
        tokens.copy_(torch.cat((known, draft(known.squeeze(1), cache)[0]), 1))
        return tokens.clone()

    return step


def target(path, device, ops):
    def factory():
        step = speculation(*load(path, device))

        def run():
            with ops(), torch.inference_mode():
                return step()

        return run, lambda index: ()

    return factory


def test_a_round_of_speculation_may_be_captured(made, tmp_path):
    write(tmp_path / "m", TINY_DSPARK, made[0])
    report = check_step(target(tmp_path / "m", "cuda", reference_ops), steps=4)
    assert [f"{f.code} {f.path}:{f.line} {f.message}" for f in report.findings] == []
    assert report.facts["replay equals eager"]


@pytest.mark.gpu
def test_a_round_of_speculation_is_replayed_on_a_gpu(made, tmp_path):
    write(tmp_path / "m", TINY_DSPARK, made[0])
    report = check_step(target(tmp_path / "m", "cuda:0", torch.no_grad), simulate=False, live=True, steps=10)
    assert [f"{f.code} {f.path}:{f.line} {f.message}" for f in report.findings] == []
    assert report.facts["replay equals eager"]
