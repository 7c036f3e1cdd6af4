"""Ranks beside one another on a CPU: the model's numbers, and the engine's tokens, are those of one device."""

import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import deepseek
from engines import maker
from models import Decoder, save_e8p, save_hf, save_rotated, smollm2_gguf
from onegraph.engine.draft import OracleDrafter
from onegraph.engine.engine import Engine
from onegraph.engine.params import SamplingParams
from onegraph.formats.checkpoint import Checkpoint
from onegraph.formats.e8p import E8PConfig
from onegraph.formats.rotated import RotatedConfig
from onegraph.formats.trellis import TrellisConfig
from onegraph.models.deepseek_v4 import DeepseekV4
from onegraph.models.llama import Llama
from onegraph.models.load import load_decoder
from onegraph.models.ranks import Ranks
from onegraph.nn.peers import PeerError
from onegraph.ops import e8p_all_reduce
from onegraph.ops.ranks import EXPIRED, LIMIT, MODE
from test_e8p_experts import checkpoint_of

BIG: dict[str, Any] = {  # E8P cuts at whole blocks of 128
    "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128, "intermediate_size": 512,
    "num_hidden_layers": 2, "vocab_size": 384,
}  # fmt: skip


def text(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 131, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def logits_of(model: Any, rows: list[list[int]]) -> list[Tensor]:
    """Prefill of each row but three tokens, then token by token."""
    decoder = Decoder(model, rows=len(rows), max_context=max(map(len, rows)))
    firsts = [len(row) - 3 for row in rows]
    spans = [
        [(0, first), *((at, at + 1) for at in range(first, len(row)))] for first, row in zip(firsts, rows, strict=True)
    ]
    steps = [
        decoder.feed([row[slice(*span)] for row, span in zip(rows, step, strict=True)])
        for step in zip(*spans, strict=True)
    ]
    return [torch.cat([step[i] for step in steps]) for i in range(len(rows))]


def of_ranks(model: Ranks, rows: list[list[int]]) -> list[Tensor]:
    """The same of all ranks at once, which must agree in all bits."""
    found: list[Any] = [None] * len(model.ranks)

    def run(rank: int) -> None:
        found[rank] = logits_of(model.ranks[rank], rows)

    model.peers.arm()
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(found))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    model.peers.check()
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True)), "ranks differ"
    first: list[Tensor] = found[0]
    return first


CASES = [
    ("llama_bias_mha", 2, {}),
    ("llama", 2, {"num_key_value_heads": 1}),  # both ranks have the one head of keys
    ("llama", 6, {"intermediate_size": 96}),  # three ranks share each
    ("smollm2", 2, {}),
    ("qwen3_window_bias", 2, {}),
    ("phi3", 2, {}),
    ("gemma2", 2, {}),
    ("gemma4", 2, {}),
    ("gemma4", 4, {}),  # of two heads of keys two ranks share each, and all have the wide layers' one
    ("gemma4_moe", 2, {}),
    ("gemma4_e", 2, {}),
    ("granite", 2, {}),
    ("mixtral", 2, {}),
    ("qwen2_moe", 2, {}),
    ("gpt_oss", 2, {}),
    ("glm4_moe", 2, {}),
    ("deepseek_v3", 2, {}),
    ("deepseek_v3_plain", 3, {"intermediate_size": 96, "moe_intermediate_size": 48}),
    ("qwen3_5", 2, {}),
    (
        "qwen3_5_three",
        3,
        {
            "linear_num_key_heads": 3, "linear_num_value_heads": 6, "num_attention_heads": 6, "num_key_value_heads": 3,
            "intermediate_size": 96,
        },
    ),
    ("qwen3_next", 2, {}),
    ("lfm2_bias", 3, {"num_key_value_heads": 3, "intermediate_size": 96}),
    ("lfm2_moe", 2, {}),
    ("kimi_linear", 2, {}),
    ("nemotron_h", 2, {}),
    ("granitemoeshared", 2, {}),
    ("granite4", 2, {}),
    ("granite4_moe", 3, {"num_key_value_heads": 3, "intermediate_size": 48, "shared_intermediate_size": 60}),
    ("granite4_h", 2, {}),  # ranks add up the squares of all heads of Mamba-2, and each has B and C
    ("olmo2", 2, {}),  # ranks add up the squares of all heads of q and of k
    ("olmo3", 6, {"intermediate_size": 96}),  # a head of keys that three ranks have counts once
    ("olmoe", 2, {}),
    ("olmo_hybrid", 2, {}),
    ("minimax_m2", 2, {}),
]  # fmt: skip


@pytest.mark.parametrize(("variant", "ranks", "changes"), CASES, ids=lambda v: v if isinstance(v, str) else None)
def test_ranks_together_are_the_model_of_transformers(
    variant: str, ranks: int, changes: dict[str, Any], tmp_path: Path
) -> None:
    hf = save_hf(variant, tmp_path, **changes)
    rows = [text(13), text(6, 1)]
    with Checkpoint.open(tmp_path) as checkpoint:
        got = of_ranks(Ranks.load(checkpoint, ["cpu"] * ranks), rows)
    with torch.inference_mode():
        for row, mine in zip(rows, got, strict=True):
            want = hf(torch.tensor([row]), use_cache=False).logits[0].float()
            assert (mine - want).abs().max() < 1e-4 * max(1.0, float(want.abs().max()))


@pytest.mark.parametrize("head", [None, 4])
def test_codes_are_cut_and_not_decoded(head: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of few tokens out and down exchange by themselves, of more in ops of their own."""
    hf = save_e8p("llama", tmp_path / "m", rates={"bits": 3, "lm_head": head}, **BIG)
    row, swaps = text(9), list[int]()
    swap = e8p_all_reduce.swap
    monkeypatch.setattr(e8p_all_reduce, "swap", lambda *args: swaps.append(args[-1]) or swap(*args))
    with Checkpoint.open(tmp_path / "m") as checkpoint:
        model = Ranks.load(checkpoint, ["cpu"] * 2, decode=False)
        assert model.ranks[0].blocks[0].out.linear.codes.shape == (256, 256 // 8)  # type: ignore[union-attr, operator]
        assert len(model.ranks[1].lm_head.tensors) == (1 if head is None else 4)
        (got,) = of_ranks(model, [row])
    assert swaps.count(0) == swaps.count(1) >= 2 * model.config.layers
    with torch.inference_mode():
        want = hf(torch.tensor([row])).logits[0]
    assert (got - want).abs().max() < 1e-4 * want.abs().max()


@pytest.mark.parametrize(("ranks", "bits"), [(2, 3), (3, 5)])
def test_tiles_of_a_trellis_are_cut(ranks: int, bits: int, tmp_path: Path) -> None:
    sizes = BIG | {"hidden_size": 384, "intermediate_size": 768, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 6, "num_key_value_heads": ranks}
    hf = save_rotated(TrellisConfig(bits=bits, lm_head=2), "llama", tmp_path / "m", **sizes)
    row = text(9)
    with Checkpoint.open(tmp_path / "m") as checkpoint:
        model = Ranks.load(checkpoint, ["cpu"] * ranks, decode=False)
        assert model.ranks[0].blocks[0].out.linear.codes.shape == (384 // 16, 768 // ranks * bits)  # type: ignore[union-attr]
        (got,) = of_ranks(model, [row])
    with torch.inference_mode():
        want = hf(torch.tensor([row])).logits[0]
    assert (got - want).abs().max() < 1e-4 * want.abs().max()


@pytest.mark.parametrize(
    ("variant", "written", "changes"),
    [
        ("qwen3_moe", E8PConfig, {"moe_intermediate_size": 256}),
        ("qwen3_moe", TrellisConfig, {"moe_intermediate_size": 256}),
        ("minimax_m2", E8PConfig, {}),
    ],
)
def test_stacks_of_experts_in_codes_are_cut(
    variant: str, written: type[RotatedConfig], changes: dict[str, int], tmp_path: Path
) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 128, "num_attention_heads": 2} | changes
    hf = checkpoint_of(variant, tmp_path / "m", 2, written=written, **sizes)
    row = text(9)
    with Checkpoint.open(tmp_path / "m") as checkpoint:
        model = Ranks.load(checkpoint, ["cpu"] * 2, decode=False)
        (got,) = of_ranks(model, [row])
    experts = model.ranks[0].blocks[0].mlp.experts
    assert (experts.gate_up.out_features, experts.down.in_features) == (256, 128)  # type: ignore[union-attr]
    with torch.inference_mode():
        want = hf(torch.tensor([row])).logits[0]
    assert (got - want).abs().max() < 1e-4 * want.abs().max()


@pytest.mark.parametrize(
    ("variant", "ranks", "changes", "words"),
    [
        ("llama", 4, {}, "gpus is 4: 6 attention heads cannot be split evenly; use 1 or 2$"),
        ("llama", 3, {}, "gpus is 3: 2 KV heads cannot be split evenly or replicated evenly; use"),
        ("llama", 6, {}, "104 hidden units cannot be split evenly"),
        ("mixtral", 2, {"intermediate_size": 41}, "41 hidden units of an expert cannot be split evenly"),
        ("qwen3_5", 2, {"linear_num_key_heads": 1}, "gpus is 2: 1 key heads cannot be split evenly; use 1$"),
        ("nemotron_h", 3, {}, "gpus is 3: 4 Mamba-2 heads cannot be split evenly; use 1 or 2$"),
        ("kimi_linear", 3, {"linear_num_heads": 2}, "2 heads of delta attention cannot be split evenly"),
    ],
)
def test_what_ranks_cannot_share_is_refused_with_what_they_can(
    variant: str, ranks: int, changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    save_hf(variant, tmp_path, **changes)
    with Checkpoint.open(tmp_path) as checkpoint, pytest.raises(ValueError, match=words):
        Ranks.load(checkpoint, ["cpu"] * ranks)


def test_codes_of_recurrent_layers_are_cut_at_whole_blocks(tmp_path: Path) -> None:
    """Heads of 128 share out; a rank with half a block of 128 rows is refused, whatever evenness says."""
    heads = {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "num_hidden_layers": 2}
    big = BIG | heads | {"layer_types": ["linear_attention", "full_attention"]}
    hf = save_e8p("qwen3_5", tmp_path / "m", rates={"bits": 3}, **big)
    row = text(9)
    with Checkpoint.open(tmp_path / "m") as checkpoint:
        model = Ranks.load(checkpoint, ["cpu"] * 2, decode=False)
        (got,) = of_ranks(model, [row])
    assert model.ranks[1].blocks[0].out.linear.codes.shape == (256, 256 // 8)  # type: ignore[union-attr, operator]
    with torch.inference_mode():
        want = hf(torch.tensor([row]), use_cache=False).logits[0]
    assert (got - want).abs().max() < 1e-4 * want.abs().max()
    save_e8p("qwen3_5", tmp_path / "w", rates={"bits": 3}, **big | {"linear_key_head_dim": 64})
    words = r"model.layers.0.linear_attn.in_proj_qkv in e8p at 3 bits: rows .* cut a rotation block.*; use 1$"
    with Checkpoint.open(tmp_path / "w") as checkpoint, pytest.raises(ValueError, match=words):
        Ranks.load(checkpoint, ["cpu"] * 2)


def test_codes_that_would_be_cut_within_a_block_are_refused(tmp_path: Path) -> None:
    save_e8p("llama", tmp_path / "m", rates={"bits": 2}, **BIG | {"head_dim": 64})
    words = r"model.layers.0.self_attn.k_proj in e8p at 2 bits: rows 64:128 of 128 cut a rotation block.*; use 1$"
    with Checkpoint.open(tmp_path / "m") as checkpoint, pytest.raises(ValueError, match=words):
        Ranks.load(checkpoint, ["cpu"] * 2)


def test_more_gpus_than_there_are_is_refused(tmp_path: Path) -> None:
    save_hf("llama", tmp_path)
    with Checkpoint.open(tmp_path) as checkpoint, pytest.raises(ValueError, match="gpus is 9; torch sees"):
        load_decoder(checkpoint, "cpu", torch.float32, gpus=9)


# -------------------------------------------------------------------------------------------------------- the engine

PARAMS = [
    SamplingParams(max_tokens=14),
    SamplingParams(max_tokens=9, temperature=1.0, seed=3, top_p=0.9),
    SamplingParams(max_tokens=11, temperature=0.8, seed=5, repetition_penalty=1.3, logprobs=2),
    SamplingParams(max_tokens=6, min_p=0.1, temperature=1.2, seed=1),
]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Llama, Ranks]:
    path = tmp_path_factory.mktemp("model")
    save_hf("minimax_m2", path, head_dim=64, num_hidden_layers=2)
    with Checkpoint.open(path) as checkpoint:
        return Llama.load(checkpoint), Ranks.load(checkpoint, ["cpu"] * 2)


@pytest.mark.parametrize("kv", [None, "turboquant:4", "turboquant:4,short=24"])
@pytest.mark.parametrize("mode", ["eager", "captured"])
def test_the_engine_draws_the_tokens_of_one_device(
    both: tuple[Llama, Ranks], mode: str, kv: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four prompts on three rows, in chunks; greedy, sampled, with penalties and log-probabilities."""
    prompts = [text(19), text(3, 1), text(8, 2), text(1, 3)]
    one, more = (maker(mode, model, monkeypatch, max_batch=3, page_size=None, kv=kv)() for model in both)
    assert one.executor.sizes.exact_window == more.executor.sizes.exact_window
    want, got = one.complete(prompts, PARAMS), more.complete(prompts, PARAMS)
    assert [s.output for s in got] == [s.output for s in want]
    for mine, other in zip(got[2].logprobs, want[2].logprobs, strict=True):
        assert mine.logprob == pytest.approx(other.logprob, abs=1e-4)
    assert (True in {exact for *_, exact in more.executor.groups}) == (kv is not None and "short" in kv)
    assert more.complete(prompts, PARAMS)[3].output == want[3].output, "a second time, on the same ranks"


def test_a_prompt_is_scored_as_on_one_device(both: tuple[Llama, Ranks]) -> None:
    params = SamplingParams(max_tokens=2, prompt_logprobs=2, logit_bias={3: 1.0}, temperature=0.0)
    alone, together = (
        Engine(model, max_batch=2, max_context=64, page_size=4, chunk=8).complete([text(19)], params)[0]
        for model in both
    )
    assert together.output == alone.output
    told = [[(each.token, each.logprob) for each in found.prompt_logprobs] for found in (alone, together)]
    assert [token for token, _ in told[1]] == text(19)[1:]
    assert [value for _, value in told[1]] == pytest.approx([value for _, value in told[0]], abs=1e-4)


def test_states_of_ranks_are_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hybrid on two ranks in captured graphs, with drafts of which some are wrong, gives the tokens of one device."""
    save_hf("qwen3_5", tmp_path, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    prompts, params = [text(9), text(3, 1)], [SamplingParams(max_tokens=7), replace(PARAMS[1], max_tokens=7)]
    with Checkpoint.open(tmp_path) as checkpoint:
        models = Llama.load(checkpoint), Ranks.load(checkpoint, ["cpu"] * 2)
    want = maker("captured", models[0], monkeypatch)().generate(prompts, params)
    texts = [prompt + new for prompt, new in zip(prompts, want, strict=True)]
    draft = partial(OracleDrafter, texts, 0.6, 131)
    engine = maker("captured", models[1], monkeypatch, max_batch=2, draft=draft, draft_tokens=2)()
    assert engine.generate(prompts, params) == want
    assert 0 < engine.stats.accepted_tokens < engine.stats.drafted_tokens


def hasty(path: Path) -> Ranks:
    """Two ranks that wait for each other for half a second."""
    save_hf("llama", path)
    with Checkpoint.open(path) as checkpoint:
        model = Ranks.load(checkpoint, ["cpu"] * 2)
    for state in model.peers.states:
        state[LIMIT] = 500_000_000  # nanoseconds
    return model


def test_a_rank_that_stops_ends_the_run_with_one_error_and_the_next_one_is_right(tmp_path: Path) -> None:
    model = hasty(tmp_path)
    engine = Engine(model, max_batch=2, max_context=64, chunk=8)
    want = engine.generate([text(5)], SamplingParams(max_tokens=6))
    model.peers.states[1][MODE] = EXPIRED  # as if it had given up: it sends no more
    with pytest.raises(PeerError, match=r"rank 0 \(cpu\) waited for rank 1 \(cpu\) at exchange \d+.*: try again"):
        engine.generate([text(5)], SamplingParams(max_tokens=6))
    assert engine.generate([text(5)], SamplingParams(max_tokens=6)) == want


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_after_a_step_that_not_all_ranks_ran_the_next_run_is_right(error: type[BaseException], tmp_path: Path) -> None:
    engine = Engine(hasty(tmp_path), max_batch=2, max_context=64, chunk=8)
    want = engine.generate([text(9)], SamplingParams(max_tokens=8))
    runner: Any = engine.executor.step("decode")
    second = runner.ranks[1][0]
    ran = second.replay

    def fails(bucket: int | None = None) -> Any:
        second.replay = ran
        raise error("between the ranks")

    second.replay = fails
    with pytest.raises(error, match="between the ranks"):
        engine.generate([text(9)], SamplingParams(max_tokens=8))
    assert engine.generate([text(9)], SamplingParams(max_tokens=8)) == want


def test_ranks_run_in_the_mode_of_who_calls(both: tuple[Llama, Ranks]) -> None:
    with torch.inference_mode():
        engine = Engine(both[1], max_batch=1, max_context=64, chunk=8)
        assert len(engine.generate([text(5)], SamplingParams(max_tokens=3))[0]) == 3


@pytest.mark.parametrize(("variant", "ranks"), [("flash", 2), ("pro", 3)])
def test_deepseek_on_ranks_gives_the_tokens_of_one_device(variant: str, ranks: int, tmp_path: Path) -> None:
    """Groups of heads, experts and the head are cut; windows, entries and the indexer are on every rank."""
    deepseek.save_hf(variant, tmp_path)
    with Checkpoint.open(tmp_path) as checkpoint:
        one = DeepseekV4.load(checkpoint)
        model = Ranks.load(checkpoint, ["cpu"] * ranks, kind=DeepseekV4)
    groups = one.config.out_groups // ranks
    assert [each.blocks[0].attention.groups for each in model.ranks] == [groups] * ranks
    assert model.ranks[0].blocks[0].moe.experts.down.in_features == 24 // ranks
    sizes: dict[str, Any] = {"max_batch": 2, "max_context": 160, "chunk": 32}
    engine = Engine(model, **sizes)
    prompts, params = deepseek.prompts()[1:3], PARAMS[:2]
    assert engine.generate(prompts, params) == Engine(one, **sizes).generate(prompts, params)


def test_deepseek_that_ranks_cannot_share_is_refused(tmp_path: Path) -> None:
    deepseek.save_hf("pro", tmp_path)
    words = "gpus is 2: 3 groups of heads cannot be split evenly; use 1 or 3$"
    with Checkpoint.open(tmp_path) as checkpoint, pytest.raises(ValueError, match=words):
        Ranks.load(checkpoint, ["cpu"] * 2, kind=DeepseekV4)


def test_what_ranks_do_not_do_is_refused(both: tuple[Llama, Ranks]) -> None:
    with pytest.raises(ValueError, match="capture: got 'split' for a model on several ranks"):
        Engine(both[1], capture="split")


@pytest.mark.skipif(smollm2_gguf() is None, reason="needs SmolLM2: see CONTRIBUTING.md")
def test_smollm2_on_three_ranks_writes_what_it_writes_alone() -> None:
    path = smollm2_gguf()
    assert path is not None
    with Checkpoint.open(path) as checkpoint:
        models = Llama.load(checkpoint, max_context=64), Ranks.load(checkpoint, ["cpu"] * 3, max_context=64)
    prompts = [[1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47], [504, 3575, 282, 4649, 314]]
    texts = [Engine(m, max_context=64, chunk=16).generate(prompts, SamplingParams(max_tokens=3)) for m in models]
    assert texts[0] == texts[1]
