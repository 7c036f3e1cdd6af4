"""Routed experts rounded to E8P: the decoder, transformers and the codes agree; counts, shrinkage, resuming."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from models import Decoder, save_hf
from onegraph.api.plan import plan
from onegraph.api.quantize import Quantization, quantize
from onegraph.api.verify import verify
from onegraph.formats.checkpoint import Checkpoint, write_checkpoint
from onegraph.models.llama import Llama
from onegraph.models.source import LlamaSource
from onegraph.ops.weight import weight_ops
from onegraph.quant.experts import shrunk
from onegraph.quant.fisher import kl_factors
from onegraph.quant.hessian import gather
from onegraph.quant.layer import dequantize
from onegraph.quant.quantize import quantize as quantize_blocks
from onegraph.quant.recipe import Recipe

VARIANTS = (
    "qwen3_moe",
    "mixtral",
    "gpt_oss",
    "qwen2_moe",
    "glm4_moe",
    "olmoe",
    "hy_v3",
    "granitemoe",
    "granitemoeshared",
)
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4}
WORDS = 131
TOKENS = torch.randint(0, WORDS, (1, 40), generator=torch.Generator().manual_seed(1))
TEXT = " ".join(f"w{i}" for i in torch.randint(0, WORDS, (2000,), generator=torch.Generator().manual_seed(0)).tolist())


def source(variant: str, path: Path, **sizes: Any) -> Any:
    hf = save_hf(variant, path, **SIZES | sizes)
    write_tokenizer(path)
    return hf


def write_tokenizer(path: Path) -> None:
    """Of the words of TEXT."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(WORDS)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(path / "tokenizer.json"))


def made(path: Path, **options: Any) -> Quantization:
    options = {"bits": 4, "recipe": "quick", "tokens": 256, "sequence": 64} | options
    return quantize(path / "model", path / "out", calibration=TEXT, device="cpu", **options)


def stack(checkpoint: Checkpoint, name: str, bits: int) -> Tensor:
    """What the codes of a stack stand for, expert by expert, float32 [E, n, k]."""
    fields = {
        key.removeprefix(f"{name}."): checkpoint.tensor(key) for key in checkpoint.names if key.startswith(name + ".")
    }
    return torch.stack([dequantize({k: t[e] for k, t in fields.items()}, bits) for e in range(len(fields["codes"]))])


def decoded_into(hf: Any, path: Path, variant: str, bits: int) -> Any:
    """The transformers model with every weight in codes replaced by what they stand for. It has no draft layer."""
    with Checkpoint.open(path) as checkpoint, torch.no_grad():
        for layer in {name.removesuffix(".codes") for name in checkpoint.names if name.endswith(".codes")}:
            if layer.startswith("mtp."):
                continue
            inner = "block_sparse_moe" if variant.startswith("granite") else "mlp"
            target = layer.replace("block_sparse_moe", inner).replace("backbone.", "model.")
            if variant == "hy_v3":
                target = target.replace("shared_mlp", "shared_experts")
            if ".experts." not in layer:
                fields = {
                    n: checkpoint.tensor(f"{layer}.{n}")
                    for n in ("codes", "residual", "in_scale", "out_scale", "scale")
                }
                hf.get_parameter(f"{target}.weight").copy_(dequantize(fields, bits))
                continue
            weight = stack(checkpoint, layer, bits)
            if variant == "gpt_oss":  # gate rows first in codes, gate, up, gate, up in the module; inputs first there
                if layer.endswith("gate_up_proj"):
                    weight = torch.stack(weight.chunk(2, dim=1), dim=2).flatten(1, 2)
                weight = weight.transpose(1, 2)
            hf.get_parameter(target).copy_(weight)
    return hf


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_decoder_and_transformers_run_what_the_codes_stand_for(variant: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    import onegraph.integrations.hf  # noqa: F401  # registers the method

    hf = source(variant, tmp_path / "model")
    told = made(tmp_path)
    truth = decoded_into(hf, tmp_path / "out", variant, 4)(TOKENS).logits[0].detach()
    with Checkpoint.open(tmp_path / "out") as checkpoint:
        ours = Decoder(Llama.load(checkpoint, "cpu", torch.float32), 1, 64).feed(TOKENS.tolist())[0]
    torch.testing.assert_close(ours, truth, atol=1e-4, rtol=0)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(theirs(TOKENS).logits[0], truth, atol=1e-4, rtol=0)
    theirs.save_pretrained(tmp_path / "again")
    with Checkpoint.open(tmp_path / "out") as one, Checkpoint.open(tmp_path / "again") as two:
        assert one.names == two.names
        assert all(torch.equal(one.tensor(name), two.tensor(name)) for name in one.names)
    assert verify(tmp_path / "out").ok
    assert all(sum(counts) == hf.config.num_experts_per_tok * 256 for counts in told.experts.values())


def test_weights_are_near_the_ones_that_were_rounded(tmp_path: Path) -> None:
    hf = source("qwen3_moe", tmp_path / "model")
    before = {name: parameter.clone() for name, parameter in hf.named_parameters()}
    made(tmp_path)
    for name, parameter in decoded_into(hf, tmp_path / "out", "qwen3_moe", 4).named_parameters():
        off = (parameter - before[name]).norm() / before[name].norm()
        assert (0 < off < 0.15) if "proj" in name else off == 0, name


def test_sizes_are_said_before(tmp_path: Path) -> None:
    source("mixtral", tmp_path / "model")
    found = plan(tmp_path / "model", bits=3, recipe="quick", device="cpu", tokens=256, calibration=TEXT)
    told = made(tmp_path, bits=3)
    assert found.after == told.after
    with Checkpoint.open(tmp_path / "out") as checkpoint:
        assert found.after.total_bytes == checkpoint.nbytes
    assert found.linears == 2 * (4 + 2 * 5)


def test_counts_are_told_and_experts_with_few_tokens_named(tmp_path: Path) -> None:
    source("qwen3_moe", tmp_path / "model")
    lines: list[str] = []
    told = made(tmp_path, expert_prior=2.0, remark=lines.append)
    counts = told.experts["model.layers.0.mlp.experts.gate_up_proj"]
    few = [expert for expert, count in enumerate(counts) if count < 2.0 * 64]
    assert 0 < len(few) < 9
    warning = next(line for line in lines if line.startswith("warning: model.layers.0."))
    assert "fewer than 128 tokens chose expert " + ", ".join(f"{e} ({counts[e]})" for e in few) in warning
    assert json.loads((tmp_path / "out/onegraph.json").read_text())["experts"]["calibration_tokens"] == told.experts


def test_rates_of_experts(tmp_path: Path) -> None:
    source("qwen3_moe", tmp_path / "model")
    made(tmp_path, experts=2, layers={"model.layers.0.mlp.experts.*": 16})
    with Checkpoint.open(tmp_path / "out") as checkpoint:
        assert "model.layers.0.mlp.experts.3.up_proj.weight" in checkpoint.names  # as the source has them
        assert Llama.load(checkpoint, "cpu").blocks[0].mlp.experts.gate_up.format.name == "dense"
    with pytest.raises(ValueError, match="have two rates; experts of a layer must have one"):
        plan(tmp_path / "model", layers={"*.experts.down_proj": 3}, device="cpu")
    save_hf("llama", tmp_path / "dense")
    with pytest.raises(ValueError, match="this model has no routed experts"):
        plan(tmp_path / "dense", experts=3, device="cpu")


def test_a_pattern_of_the_users_own_goes_before_the_rate_of_experts(tmp_path: Path) -> None:
    """The last match wins, among those that name experts too."""
    source("qwen3_moe", tmp_path / "model")
    own = {"*": 2, "*.mlp.experts.gate_up_proj": 4, "*.mlp.experts.down_proj": 4}
    found = plan(tmp_path / "model", experts=3, layers=own, device="cpu")
    assert list(found.rates.items()) == list(own.items())
    found = plan(tmp_path / "model", experts=3, layers={"*.o_proj": 2}, device="cpu")
    assert found.rates == {"*.mlp.experts.gate_up_proj": 3, "*.mlp.experts.down_proj": 3, "*.o_proj": 2}


def test_experts_published_in_blocks_are_kept_unless_asked_for(tmp_path: Path) -> None:
    source("gpt_oss", tmp_path / "dense")
    with Checkpoint.open(tmp_path / "dense") as checkpoint:
        tensors: dict[str, Tensor] = {}
        for name in checkpoint.names:
            tensor = checkpoint.tensor(name)
            if name.endswith(("gate_up_proj", "down_proj")):
                count, k, n = tensor.shape
                codes = torch.randint(0, 256, (count, n, k // 32, 16), generator=torch.Generator().manual_seed(n)).to(
                    torch.uint8
                )
                tensors |= {
                    f"{name}_blocks": codes,
                    f"{name}_scales": torch.full((count, n, k // 32), 120, dtype=torch.uint8),
                }
            else:
                tensors[name] = tensor
        config = checkpoint.config | {"quantization_config": {"quant_method": "mxfp4"}}
        write_checkpoint(tmp_path / "model", config, tensors.items(), copy_from=checkpoint)
    made(tmp_path)
    with Checkpoint.open(tmp_path / "out") as checkpoint:
        assert "model.layers.0.mlp.experts.down_proj_blocks" in checkpoint.names
        assert "model.layers.0.self_attn.q_proj.codes" in checkpoint.names
        kept = Llama.load(checkpoint, "cpu")
    assert kept.blocks[0].mlp.experts.gate_up.format.name == "mxfp4"
    (tmp_path / "out").rename(tmp_path / "kept")
    made(tmp_path, experts=4)
    with Checkpoint.open(tmp_path / "out") as checkpoint:
        assert not [name for name in checkpoint.names if "_blocks" in name or "_scales" in name]
        again = Llama.load(checkpoint, "cpu")
        got = stack(checkpoint, "model.layers.0.mlp.experts.gate_up_proj", 4)
    blocks = kept.blocks[0].mlp.experts.gate_up
    want = torch.stack([weight_ops(blocks.format).decode(blocks.format, blocks.at(e)) for e in range(blocks.count)])
    assert (got - want).norm() < 0.15 * want.norm()
    one, two = (Decoder(model, 1, 64).feed(TOKENS.tolist())[0].log_softmax(-1) for model in (kept, again))
    assert (one.exp() * (one - two)).sum(-1).mean() < 0.5


def test_what_experts_see_is_what_the_router_sends(tmp_path: Path) -> None:
    source("mixtral", tmp_path / "model")
    model = LlamaSource(Checkpoint.open(tmp_path / "model"))
    block = model.load_block(0)
    hidden = model.embed(TOKENS)
    seen = gather(model, block, [hidden[:, :24], hidden[:, :16]], [], experts=[0]).experts[0]
    [layer] = model.expert_layers(block)
    counts = seen.counts(5)
    assert counts.sum() == 2 * 40
    routed = [seen.routed(e)[0] for e in range(5)]
    assert [len(x) for x in routed] == counts.tolist()
    every = torch.cat(list(seen.x))
    assert every.shape == (40, 64)
    assert all((every.unsqueeze(0) == x.unsqueeze(1)).all(-1).any(1).all() for x in routed)
    gate, up = (every @ layer.weight(0, 3).T).chunk(2, dim=-1)
    torch.testing.assert_close(layer.inner(3, every), torch.nn.functional.silu(gate) * up)


def test_shrinkage_is_the_mean_by_tokens() -> None:
    source = torch.Generator().manual_seed(0)
    own, shared = torch.randn(3, 8, generator=source), torch.randn(50, 8, generator=source)
    both = own.T @ own / 3, shared.T @ shared / 50
    for prior, tokens in ((0.25, 2.0), (2.0, 16.0)):
        want = (3 * both[0] + tokens * both[1]) / (3 + tokens)
        torch.testing.assert_close(shrunk((own, None), (shared, None), prior).h, want)
    torch.testing.assert_close(shrunk((own, None), (shared, None), 0.0).h, both[0])
    for prior in (0.0, 0.5):  # no token at all
        torch.testing.assert_close(shrunk((own[:0], None), (shared, None), prior).h, both[1])
    cross = shrunk((own, 2 * own), (shared, 2 * shared), 1.0)
    assert cross.cross is not None
    torch.testing.assert_close(cross.cross, 2 * cross.h)


@pytest.mark.parametrize("recipe", ["quick", "good"])
def test_a_killed_job_leaves_nothing_half_and_resumes_to_the_same_bytes(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source("mixtral", tmp_path / "model")
    options: dict[str, Any] = {"recipe": recipe, "bits": 2, "tokens": 128}
    whole = made(tmp_path, **options)
    (tmp_path / "out").rename(tmp_path / "whole")
    load, first = LlamaSource.load_block, tmp_path / "out.partial/block-00000.safetensors"

    def killed(self: LlamaSource, i: int) -> Any:
        if first.exists():
            raise KeyboardInterrupt
        return load(self, i)

    with monkeypatch.context() as patch:
        patch.setattr(LlamaSource, "load_block", killed)
        with pytest.raises(KeyboardInterrupt):
            made(tmp_path, **options)
    assert not (tmp_path / "out").exists()
    assert first.exists()
    again = made(tmp_path, **options)
    assert again.experts == whole.experts
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "out"))
    assert one == two


def test_activations_on_disk_give_the_same_bytes(tmp_path: Path) -> None:
    source("qwen3_moe", tmp_path / "model")
    options: dict[str, Any] = {"recipe": "quick", "bits": 2, "layers": {"*": 2}}
    made(tmp_path, **options)
    (tmp_path / "out").rename(tmp_path / "whole")
    made(tmp_path, **options, activations=0)
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "out"))
    assert one == two
    assert not (tmp_path / "out.partial").exists()


def test_scales_are_tuned_beside_experts(tmp_path: Path) -> None:
    source("mixtral", tmp_path / "model")
    made(tmp_path, recipe="best", tokens=64, sequence=32, layers={"*.experts.*": 2})
    with Checkpoint.open(tmp_path / "out") as checkpoint:
        assert Llama.load(checkpoint, "cpu")


def test_the_prior_is_bounded() -> None:
    with pytest.raises(ValueError, match="expert_prior is -1"):
        Recipe(expert_prior=-1)


LIMITED = """
import sys
import torch
from onegraph.api import quantize as api
from onegraph.formats.e8p import E8P
from onegraph.quant import experts, quantize as driver

def rounded(weights, h, bits, recipe, source):  # as large as the real thing, without its minutes on a CPU
    shapes = [E8P[rate].layout(*w.shape) for w, rate in zip(weights, bits)]
    return [{key: torch.ones(shape).to(dtype) for key, (shape, dtype) in layer.items()} for layer in shapes]

def decoded(tensors, bits, name):
    return torch.ones(len(tensors["codes"]), 8 * tensors["codes"].shape[1])

for module in (driver, experts):
    module.quantize_group, module.dequantize = rounded, decoded
model, out, held = sys.argv[1:]
options = dict(num_calibration_tokens=16384, calibration_seq_len=512, recipe="quick", device="cpu")
options["activation_memory"] = int(held)
words = " ".join(f"w{i % 131}" for i in range(16384))
found = api.build_plan(api.Checkpoint.open(model), model, api.choose(**options, calibration=words))
def said(what):
    return 1024 * next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(what))

api.check_resources = lambda found, out: None
open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
used = said("VmRSS")
api.quantize(model, out, calibration=words, **options)
print(found.memory, said("VmHWM") - used)
"""


@pytest.mark.slow
def test_the_memory_that_was_said_is_kept(tmp_path: Path) -> None:
    """With activations in memory and on disk, what is taken at the most is what was said, and 32 MB for what Python,
    files' pages and kernels take; with streams on disk both are less."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 128, "num_hidden_layers": 4}
    source("qwen3_moe", tmp_path / "model", **sizes, max_position_embeddings=512)

    def run(out: str, held: int) -> tuple[int, int]:
        words = [sys.executable, "-c", LIMITED, str(tmp_path / "model"), str(tmp_path / out), str(held)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1", "MALLOC_TRIM_THRESHOLD_": "65536"}
        done = subprocess.run(words, capture_output=True, text=True, timeout=300, env=environment)
        assert done.returncode == 0, done.stderr[-2000:]
        planned, taken = map(int, done.stdout.split())
        return planned, taken

    (planned, taken), (less_planned, less_taken) = run("memory", 1 << 40), run("disk", 0)
    assert taken <= planned + (32 << 20)
    assert less_taken <= less_planned + (32 << 20)
    assert planned - less_planned == 4 * 256 * (3 * 16384 - 4 * 8192)  # three streams, less four batches of 8192
    assert taken - less_taken > 10 << 20


def test_rates_that_are_chosen_are_one_for_both_matrices_of_a_layers_experts(tmp_path: Path) -> None:
    source("qwen3_moe", tmp_path / "model")
    told = made(tmp_path, bits=2.5)
    costs = json.loads((tmp_path / "out" / "onegraph.json").read_text())["allocation"]["costs"]
    pairs = [names.split(" ") for names in costs if "experts" in names]
    assert sorted(first for first, _ in pairs) == sorted(told.experts)
    for first, second in pairs:
        assert second == first.replace("gate_up_proj", "down_proj")
        assert told.config["layers"].get(first) == told.config["layers"].get(second)
    assert len(set(told.config["layers"].values()) | {told.config["bits"]}) > 1
    assert verify(tmp_path / "out").ok


def test_tokens_weigh_in_linears_beside_routed_experts(tmp_path: Path) -> None:
    source("qwen2_moe", tmp_path / "model")
    text = torch.randint(0, WORDS, (4, 32), generator=torch.Generator().manual_seed(0))
    with Checkpoint.open(tmp_path / "model") as checkpoint:
        model = LlamaSource(checkpoint, "cpu", torch.float32)
        found = dict(kl_factors(model, text, seed=0, outputs=True))
        rounded = quantize_blocks(model, text, Recipe(bits=3, descent=0, correct=0.5, fisher=1, fisher_outputs=True))
    linears = {name for i in range(2) for name, shape in model.shapes(i).items() if len(shape) == 2}
    known = {name.split(".", 3)[3] for factors in found.values() for name in factors.tokens}
    assert linears == known
    assert any("shared_expert" in name for name in known)
    assert all(weights.shape == text.shape for factors in found.values() for weights in factors.tokens.values())
    assert any("experts.gate_up_proj" in name for name in rounded.layers)
