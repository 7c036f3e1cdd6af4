"""The draft layer of DeepSeek-V4 against a plain reference, written from DeepSeek's description without our ops."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from deepseek_published import TINY, TINY_DSPARK, TINY_LESS, make, plain, write
from models import Decoder
from onegraph.check import check_step
from onegraph.formats.checkpoint import Checkpoint, CheckpointError
from onegraph.models.deepseek_v4 import DeepseekV4
from onegraph.models.deepseek_v4_mtp import DeepseekDraft, draft_bytes, shared_embedding
from onegraph.ops.registry import reference_ops

SPARE = 8

# ------------------------------------------------------------------------------------------------- the plain reference


def norm(x: Tensor, weight: Tensor | float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def rope(x: Tensor, positions: Tensor, back: bool = False) -> Tensor:
    """Interleaved pairs of the trailing dimensions; x [T, heads, D]."""
    rotary = TINY["qk_rope_head_dim"]
    angle = positions[:, None, None] * 10000.0 ** -(torch.arange(0, rotary, 2) / rotary)
    turn = torch.polar(torch.ones_like(angle), -angle if back else angle)
    pairs = torch.view_as_complex(x[..., -rotary:].reshape(*x.shape[:-1], -1, 2).contiguous())
    return torch.cat((x[..., :-rotary], torch.view_as_real(pairs * turn).flatten(-2)), -1)


class Reference:
    """`mtp.0` over a whole sequence at once: no cache, no batch."""

    def __init__(self, dense: dict[str, Tensor], stage: int = 0) -> None:
        self.dense, self.stage = dense, stage

    def __getitem__(self, name: str) -> Tensor:
        return self.dense[f"mtp.{self.stage}.{name}"]

    def __call__(self, tokens: Tensor, streams: Tensor) -> tuple[Tensor, Tensor]:
        """tokens [T] (each the one behind its streams), streams [T, H, D] -> streams [T, H, D], logits [T, V]."""
        e = norm(self.dense["embed.weight"][tokens], self["enorm.weight"]) @ self["e_proj.weight"].T
        x = self.block(norm(streams, self["hnorm.weight"]) @ self["h_proj.weight"].T + e[:, None])
        return x, norm(self.collapse(x), self["norm.weight"]) @ self.dense["head.weight"].T

    def block(self, x: Tensor) -> Tensor:
        for part, layer in (("attn", self.attention), ("ffn", self.feed_forward)):
            pre, post, comb = self.mixtures(x, part)
            y = layer(norm((pre[:, :, None] * x).sum(1), self[f"{part}_norm.weight"]))
            x = post[:, :, None] * y[:, None] + torch.einsum("tjk,tjd->tkd", comb, x)
        return x

    def collapse(self, x: Tensor) -> Tensor:
        flat = x.flatten(1)
        weight = (flat * (flat.square().mean(-1, keepdim=True) + 1e-6).rsqrt()) @ self["hc_head_fn"].T
        weight = torch.sigmoid(weight * self["hc_head_scale"] + self["hc_head_base"]) + 1e-6
        return (weight[:, :, None] * x).sum(1)

    def mixtures(self, x: Tensor, part: str) -> tuple[Tensor, Tensor, Tensor]:
        flat, h = x.flatten(1), x.shape[1]
        m = (flat * (flat.square().mean(-1, keepdim=True) + 1e-6).rsqrt()) @ self[f"hc_{part}_fn"].T
        scale, base = self[f"hc_{part}_scale"], self[f"hc_{part}_base"]
        pre = torch.sigmoid(m[:, :h] * scale[0] + base[:h]) + 1e-6
        post = 2 * torch.sigmoid(m[:, h : 2 * h] * scale[1] + base[h : 2 * h])
        comb = (m[:, 2 * h :] * scale[2] + base[2 * h :]).view(-1, h, h).softmax(2) + 1e-6
        comb = comb / (comb.sum(1, keepdim=True) + 1e-6)
        for _ in range(TINY["hc_sinkhorn_iters"] - 1):
            comb = comb / (comb.sum(2, keepdim=True) + 1e-6)
            comb = comb / (comb.sum(1, keepdim=True) + 1e-6)
        return pre, post, comb

    def attention(self, x: Tensor) -> Tensor:
        at = torch.arange(len(x)).float()
        behind = at[:, None] - at
        return self.attend(x, at, self.keys(x, at), (behind >= 0) & (behind < TINY["sliding_window"]))

    def keys(self, x: Tensor, at: Tensor) -> Tensor:
        return rope(norm(x @ self["attn.wkv.weight"].T, self["attn.kv_norm.weight"])[:, None], at)[:, 0]

    def attend(self, x: Tensor, at: Tensor, kv: Tensor, seen: Tensor) -> Tensor:
        many, heads, dim = len(x), TINY["num_attention_heads"], TINY["head_dim"]
        q = norm(x @ self["attn.wq_a.weight"].T, self["attn.q_norm.weight"]) @ self["attn.wq_b.weight"].T
        q = rope(norm(q.view(many, heads, dim), 1.0), at)
        scores = torch.einsum("qhd,kd->hqk", q, kv) / math.sqrt(dim)
        scores = scores.masked_fill(~seen, -math.inf)
        sink = self["attn.attn_sink"].view(heads, 1, 1).expand(-1, many, 1)
        weight = torch.cat((scores, sink), 2).softmax(2)[:, :, :-1]
        out = rope(torch.einsum("hqk,kd->qhd", weight, kv), at, back=True)
        groups = out.reshape(many, TINY["o_groups"], -1)
        wo_a = self["attn.wo_a.weight"].view(TINY["o_groups"], TINY["o_lora_rank"], -1)
        return torch.einsum("tgk,gnk->tgn", groups, wo_a).flatten(1) @ self["attn.wo_b.weight"].T

    def feed_forward(self, x: Tensor) -> Tensor:
        scores = functional.softplus(x @ self["ffn.gate.weight"].T).sqrt()
        chosen = (scores + self["ffn.gate.bias"]).topk(TINY["num_experts_per_tok"], 1).indices
        gains = scores.gather(1, chosen)
        gains = gains / gains.sum(1, keepdim=True) * TINY["routed_scaling_factor"]
        out = self.expert("shared_experts", x)
        for token in range(len(x)):
            for e, gain in zip(chosen[token].tolist(), gains[token], strict=True):
                out[token] += gain * self.expert(f"experts.{e}", x[token])
        return out

    def expert(self, name: str, x: Tensor) -> Tensor:
        gate, up = (x @ self[f"ffn.{name}.{w}.weight"].T for w in ("w1", "w3"))
        limit = TINY["swiglu_limit"]
        hidden = functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
        return hidden @ self[f"ffn.{name}.w2.weight"].T


# -------------------------------------------------------------------------------------------------------------- loading


@pytest.fixture(scope="module")
def made():
    return make(TINY)


@pytest.fixture(scope="module")
def loaded(made, tmp_path_factory):
    """(decoder, draft, the reference)."""
    path = tmp_path_factory.mktemp("mtp") / "m"
    write(path, plain(TINY), made[1])
    return *load(path), Reference(made[1])


def load(path, device="cpu"):
    with Checkpoint.open(path) as checkpoint:
        model = DeepseekV4.load(checkpoint, device, max_context=512)
        return model, DeepseekDraft.load(checkpoint, model)


def random(n: int, g: torch.Generator) -> list[int]:
    return torch.randint(0, TINY["vocab_size"], (n,), generator=g).tolist()


class Drafter:
    """Decoder and draft layer over one cache, the plainest way: `feed` as a verification does, `draft` behind it."""

    def __init__(self, model: DeepseekV4, draft: DeepseekDraft, rows: int) -> None:
        decoder = Decoder(model, rows, 384, page_size=128, spare=SPARE, drafts=draft.attentions)
        self.model, self.draft, self.cache = model, draft, decoder.cache

    @torch.inference_mode()
    def feed(self, tokens: Tensor, counts: Tensor, following: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """tokens [B, Q], of which counts [B] are real, and the token behind each [B, Q] -> the decoder's logits, the
        draft's streams and logits; all positions advance."""
        self.cache.counts.copy_(counts)
        streams = self.model.run(0, self.model.enter(tokens), tokens, self.cache)
        logits = self.model.logits(self.model.leave(streams))
        drafted = self.draft(following, streams, self.cache)
        self.cache.positions.add_(counts)
        self.streams = streams
        return logits, drafted, self.draft.logits(self.draft.leave(drafted))

    @torch.inference_mode()
    def ahead(self, tokens: Tensor, streams: Tensor) -> tuple[Tensor, Tensor]:
        """One more drafted token [B, 1] behind the draft's own streams [B, 1, H, D], at the next position."""
        self.cache.counts.fill_(1)
        drafted = self.draft(tokens, streams, self.cache)
        self.cache.positions.add_(1)
        return drafted, self.draft.logits(self.draft.leave(drafted))


def close(got: Tensor, want: Tensor) -> None:
    assert got.isfinite().all()
    assert (got - want).abs().max() <= 1e-4, (got - want).abs().max()


# ---------------------------------------------------------------------------------------------------------------- tests


def check_drafts(model: DeepseekV4, draft: DeepseekDraft, reference: Reference) -> None:
    """Prefill, then rounds of four drafts behind each other, all taken back; the window of 16 wraps."""
    g = torch.Generator().manual_seed(3)
    text = random(120, g)
    state, at, truth = Drafter(model, draft, 1), 0, []
    for count in (21, 1, 2, 5, 3, 4, 1, 5, 30):
        block = torch.tensor([text[at : at + count]])
        behind = torch.tensor([text[at + 1 : at + count + 1]])
        _, streams, logits = state.feed(block, torch.tensor([count], dtype=torch.int32), behind)
        truth.append(state.streams[0])
        at += count
        own, fed = torch.cat(truth), text[1 : at + 1]
        wanted = reference(torch.tensor(fed), own)
        close(streams[0], wanted[0][-count:])
        close(logits[0], wanted[1][-count:])
        last = streams[:, -1:]
        for token in random(4, g):
            fed, own = [*fed, token], torch.cat((own, wanted[0][-1:]))
            wanted = reference(torch.tensor(fed), own)
            last, logits = state.ahead(torch.tensor([[token]]), last)
            close(last[0, 0], wanted[0][-1])
            close(logits[0, 0], wanted[1][-1])
        state.cache.truncate(torch.tensor([at], dtype=torch.int32))
    assert wanted[1].std() > 0.5


def test_drafts_are_those_of_the_reference(loaded):
    check_drafts(*loaded)


@pytest.mark.parametrize(
    "part",
    ["enorm", "hnorm", "e_proj", "h_proj", "hc_head_base", "hc_attn_fn", "attn_sink", "gate.bias", "0.norm", "kv_norm"],
)
def test_every_small_tensor_matters(loaded, made, part, tmp_path):
    """One that was read but not used would pass a comparison in which it does not matter."""
    model, draft, _ = loaded
    g = torch.Generator().manual_seed(7)
    names = [name for name in made[1] if name.startswith("mtp.0.") and part in name]
    changed = {name: made[1][name] + 0.5 * torch.randn(made[1][name].shape, generator=g) for name in names}
    assert names
    write(tmp_path / "m", plain(TINY), made[1] | changed)
    with Checkpoint.open(tmp_path / "m") as checkpoint:
        other = DeepseekDraft.load(checkpoint, model)
    tokens, streams = torch.tensor([random(20, g)]), torch.randn(1, 20, 4, 256, generator=g)
    found = []
    for each in (draft, other):
        cache = Drafter(model, each, 1).cache
        cache.counts.fill_(20)
        with torch.inference_mode():
            found.append(each.logits(each.leave(each(tokens, streams, cache))))
    assert (found[0] - found[1]).abs().max() > 1e-3


def test_rounds_that_reject_leave_nothing_behind(loaded):
    """Two rows draft, the decoder reads the drafts and keeps some: logits of decoder and draft are bit for bit those of
    a run that read the kept tokens only, with NaN wherever the other left something."""
    model, draft, _ = loaded
    g = torch.Generator().manual_seed(5)
    drafting, sober = Drafter(model, draft, 2), Drafter(model, draft, 2)
    first, behind = (torch.tensor([random(19, g) for _ in range(2)]) for _ in range(2))
    counts = torch.tensor([19, 6], dtype=torch.int32)
    for state in (drafting, sober):
        streams = state.feed(first, counts, behind)[1]
    left = 0
    for _ in range(15):  # some 45 tokens: windows of 16 wrap
        last = streams[:, :1]
        for _ in range(4):
            last, _ = drafting.ahead(torch.tensor([random(1, g) for _ in range(2)]), last)
        drafting.cache.truncate(sober.cache.positions)
        block, behind, other = (torch.tensor([random(5, g) for _ in range(2)]) for _ in range(3))
        kept = torch.randint(1, 6, (2,), generator=g).int()
        real = torch.arange(5) < kept.unsqueeze(1)
        whole = torch.full_like(kept, 5)
        got = drafting.feed(block, whole, behind)
        want = sober.feed(torch.where(real, block, other), kept, torch.where(real, behind, other))
        for ours, theirs in zip(got, want, strict=True):
            assert torch.equal(ours[real], theirs[real])
        drafting.cache.truncate(sober.cache.positions)
        assert torch.equal(drafting.cache.positions, sober.cache.positions)
        for ours, theirs in zip(drafting.cache.tensors(), sober.cache.tensors(), strict=True):
            differs = ours != theirs
            ours.masked_fill_(differs, torch.nan)
            left += int(differs.sum())
        streams = want[1]
    assert left > 1000


def speculation(model: DeepseekV4, draft: DeepseekDraft, drafts: int = 4):
    """A round as a step: the decoder reads a token a row and the drafts behind it; what it does not agree with is taken
    back, and as many more are drafted behind the token that it gives. Everything between rounds is on the device."""
    cache = Drafter(model, draft, 2).cache
    device = cache.positions.device
    tokens = torch.arange(1, 2 * drafts + 3, device=device).view(2, -1)
    block, one = (torch.full((2,), n, dtype=torch.int32, device=device) for n in (drafts + 1, 1))
    cache.positions.copy_(torch.tensor([13, 126], dtype=torch.int32))

    def step() -> Tensor:
        start = cache.positions.clone()
        cache.counts.copy_(block)
        streams = model.run(0, model.enter(tokens), tokens, cache)
        best = model.logits(model.leave(streams)).argmax(2)
        agreed = (best[:, :-1] == tokens[:, 1:]).int().cumprod(1).sum(1)
        drafted = draft(best, streams, cache)  # rows behind the last agreed one are taken back with the rest
        cache.positions.add_(block)
        cache.truncate((start + agreed + 1).int())
        kept = cache.positions.clone()
        last = agreed.view(-1, 1, 1, 1).expand(-1, 1, *drafted.shape[2:])
        drafted, found = drafted.gather(1, last), [best.gather(1, agreed.unsqueeze(1))]
        cache.counts.copy_(one)
        for i in range(drafts):
            if i:
                drafted = draft(found[-1], drafted, cache)
                cache.positions.add_(one)
            found.append(draft.logits(draft.leave(drafted)).argmax(2))
        cache.truncate(kept)
        tokens.copy_(torch.cat(found, 1))
        return tokens.clone()

    return step


def test_a_round_of_speculation_may_be_captured(tmp_path):
    write(tmp_path / "m", TINY_LESS, make(TINY_LESS)[0])

    def factory():
        step = speculation(*load(tmp_path / "m", "cuda"), drafts=2)

        def run():
            with reference_ops(), torch.inference_mode():
                return step()

        return run, lambda index: ()

    report = check_step(factory, steps=5)
    assert [f"{f.code} {f.path}:{f.line} {f.message}" for f in report.findings] == []
    assert report.facts["replay equals eager"]


@pytest.mark.gpu
def test_a_round_of_speculation_is_replayed_on_a_gpu(made, tmp_path):
    """Captured, ten rounds give the tokens and the state of ten eager ones, bit for bit."""
    write(tmp_path / "m", TINY, made[0])

    def factory():
        step = speculation(*load(tmp_path / "m", "cuda:0"))

        def run():
            with torch.inference_mode():
                return step()

        return run, lambda index: ()

    report = check_step(factory, simulate=False, live=True, steps=10)
    assert [f"{f.code} {f.path}:{f.line} {f.message}" for f in report.findings] == []
    assert report.facts["replay equals eager"]


def test_what_it_shares_is_the_decoders(loaded):
    model, draft, _ = loaded
    assert draft.embed is model.embed
    assert draft.logits == model.logits
    assert draft.attentions[0].index == model.config.layers


def test_a_placed_models_draft_lies_with_its_last_layers(made, tmp_path):
    write(tmp_path / "m", plain(TINY), made[1])
    with Checkpoint.open(tmp_path / "m") as checkpoint:
        model = DeepseekV4.load(checkpoint, ["cpu", "cpu"], max_context=64)
        draft = DeepseekDraft.load(checkpoint, model)
        meta = DeepseekV4.load(checkpoint, ["cpu", "meta"], max_context=64)
        assert shared_embedding(meta).weight.device.type == "meta"
        assert meta.embed.weight.device.type == "cpu", "the decoder keeps its own"
    sizes = {"rows": 1, "pages": 3, "page_size": 128, "pages_per_row": 2}
    first, last = model.new_cache(**sizes, drafts=draft.attentions).parts
    assert model.config.layers in last.windows
    assert model.config.layers not in first.windows


def test_a_draft_layer_that_is_damaged_or_absent_is_named(made, tmp_path):
    dense = dict(made[1])
    dense["mtp.0.e_proj.weight"] = dense["mtp.0.e_proj.weight"][:5]
    del dense["mtp.0.attn.attn_sink"]
    dense["mtp.0.extra"] = torch.zeros(1)
    write(tmp_path / "m", plain(TINY), dense)
    with Checkpoint.open(tmp_path / "m") as checkpoint:
        model = DeepseekV4.load(checkpoint, max_context=64)
        with pytest.raises(CheckpointError) as error:
            DeepseekDraft.load(checkpoint, model)
        for says in (
            "1 missing: 'mtp.0.attn.attn_sink'",
            "'mtp.0.e_proj.weight' has shape",
            "unexpected: 'mtp.0.extra'",
        ):
            assert says in str(error.value)
        checkpoint.config["compress_ratios"] = TINY["compress_ratios"][:4]
        checkpoint.config["num_nextn_predict_layers"] = 0
        with pytest.raises(ValueError, match="tells of 0 draft layers; supported is 1"):
            DeepseekDraft.load(checkpoint, model)


def test_stages_of_dspark_are_no_such_layer(tmp_path):
    write(tmp_path / "m", plain(TINY_DSPARK), make(TINY_DSPARK)[1])
    with Checkpoint.open(tmp_path / "m") as checkpoint:
        model = DeepseekV4.load(checkpoint, max_context=64)
        assert model.config.drafts == 3
        for load in (lambda: DeepseekDraft.load(checkpoint, model), lambda: draft_bytes(checkpoint, torch.float32)):
            with pytest.raises(ValueError, match=r"mtp\.\* are 3 stages of DSpark, which do not run here"):
                load()


def test_taps_are_the_streams_mean_behind_a_layer(loaded, monkeypatch):
    model, draft, _ = loaded
    tokens = torch.tensor([random(23, torch.Generator().manual_seed(1))])

    def run(taps):
        cache = Drafter(model, draft, 1).cache
        cache.counts.fill_(23)
        with torch.inference_mode():
            return model.run(0, model.enter(tokens), tokens, cache, taps)[0]

    taps = dict.fromkeys([1, 2, 3])
    run(taps)
    for layer, tap in taps.items():
        monkeypatch.setattr(model, "stages", [range(layer + 1)])
        assert torch.equal(run(None).mean(1), tap[0])
