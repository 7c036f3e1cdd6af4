"""Trains a small Qwen3-MoE on the sources of Python's standard library, quantizes it, and measures what that cost.

    PYTHONPATH=src python3 benchmarks/tiny_moe.py --out benchmarks/results/tiny-moe.jsonl     # a GPU, some minutes
    PYTHONPATH=src python3 benchmarks/tiny_moe.py --tiny                                       # a CPU, under a minute

There is no mixture of experts small enough to be had without a network, and on random weights a Hessian says nothing.
So one is made: 8 layers of 16 experts, of which a token takes 4, on a byte-level BPE made on the spot; every tenth file
is kept for measuring. The seed is all that is random; weights are not kept (unless --keep). Each line is one run: KL to
the unquantized model in nats a token, top-1 agreement, perplexity, bits stored, and the calibration tokens of the least
and most used expert of each layer. `--prior` varies `Recipe.expert_prior`. `--texts DIR` (of benchmarks/unrelated.py)
quantizes as `onegraph quantize` does, on its corpus, and measures on each text there: a line each.
"""

import argparse
import dataclasses
import json
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onegraph.api.evaluate import evaluate_checkpoint
from onegraph.api.quantize import quantize
from onegraph.engine.record import emit, machine
from onegraph.quant.recipe import Recipe


@dataclasses.dataclass(frozen=True)
class Size:
    vocabulary: int = 8192
    hidden: int = 384
    layers: int = 8
    heads: int = 6
    experts: int = 16
    top_k: int = 4
    expert: int = 256
    sequence: int = 512
    batch: int = 32
    steps: int = 1500
    rate: float = 1.5e-3
    characters: int = 40_000_000
    calibration: int = 16384
    evaluation: int = 16384


Build = Callable[[Size], Any]  # a model of transformers to train
TINY = Size(512, 64, 2, 4, 4, 2, 64, 64, 8, 40, 3e-3, 300_000, 1024, 256)


def sources(size: Size) -> tuple[str, str]:
    """Text to train on and text to measure on, of other files; no more than is read, since each run tokenizes it."""
    files = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    files = [file for file in files if "site-packages" not in file.parts]
    parts: tuple[list[str], list[str]] = ([], [])
    for i, file in enumerate(files):
        parts[i % 10 == 9].append(file.read_text(errors="replace"))
    return "\n".join(parts[0])[: size.characters], "\n".join(parts[1])[: max(100_000, 32 * size.evaluation)]


def tokenizer_of(text: str, vocabulary: int) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator((text[i : i + 10_000] for i in range(0, min(len(text), 5_000_000), 10_000)), trainer)
    return made


def mixture(size: Size) -> Any:
    """A Qwen3-MoE of transformers."""
    import transformers

    config = transformers.Qwen3MoeConfig(
        vocab_size=size.vocabulary, hidden_size=size.hidden, intermediate_size=4 * size.expert,
        num_hidden_layers=size.layers, num_attention_heads=size.heads, num_key_value_heads=size.heads // 2, head_dim=64,
        num_experts=size.experts, num_experts_per_tok=size.top_k, moe_intermediate_size=size.expert,
        norm_topk_prob=True, router_aux_loss_coef=0.01, output_router_logits=True, max_position_embeddings=2048,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return transformers.Qwen3MoeForCausalLM(config)


def train(size: Size, tokens: Tensor, seed: int, device: torch.device, build: Build) -> tuple[Any, float]:
    """The model, and its loss over the last steps in nats a token."""
    torch.manual_seed(seed)
    model = build(size).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=size.rate, betas=(0.9, 0.95), weight_decay=0.1)
    warm = max(1, size.steps // 20)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, size.rate, total_steps=size.steps, pct_start=warm / size.steps, anneal_strategy="cos"
    )
    draw = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(size.steps):
        at = torch.randint(0, len(tokens) - size.sequence, (size.batch,), generator=draw)
        rows = torch.stack([tokens[i : i + size.sequence] for i in at.tolist()]).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            found = model(input_ids=rows, labels=rows)
        found.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(found.loss.detach())
    return model.eval(), torch.stack(losses[-max(1, size.steps // 20) :]).mean().item()


def make(
    size: Size, directory: Path, seed: int, device: torch.device, build: Build = mixture
) -> tuple[dict[str, Any], str, str]:
    """The checkpoint at `directory`, what to say of it, and the texts."""
    text, other = sources(size)
    tokenizer = tokenizer_of(text, size.vocabulary)
    encoded = tokenizer.encode_batch([text[i : i + 100_000] for i in range(0, len(text), 100_000)])
    tokens = torch.tensor([token for part in encoded for token in part.ids])
    begun = time.perf_counter()
    model, loss = train(size, tokens, seed, device, build)
    seconds = time.perf_counter() - begun
    model.save_pretrained(directory)
    tokenizer.save(str(directory / "tokenizer.json"))
    parameters = sum(p.numel() for p in model.parameters())
    trained = size.steps * size.batch * size.sequence
    told = {"parameters": parameters, "trained_tokens": trained, "loss": round(loss, 4)}
    return told | {"train_seconds": round(seconds, 1)}, text, other


def unrelated(directory: Path) -> dict[str, str]:
    """The texts that benchmarks/unrelated.py made; of chats what was said."""
    found = {}
    for file in sorted(directory.iterdir()):
        text = file.read_text("utf-8")
        if file.suffix == ".jsonl":
            rows = [json.loads(line) for line in text.split("\n") if line.strip()]
            text = "\n\n".join(message["content"] for row in rows for message in row["messages"])
        found[file.name] = text
    return found


def on_unrelated(
    bench: str, model: Path, texts: Path, told: dict[str, Any], args: argparse.Namespace, size: Size
) -> None:
    """A line for each rate and text of a model that is quantized as `onegraph quantize` does it."""
    for bits in args.bits:
        with tempfile.TemporaryDirectory() as scratch:
            out = Path(scratch) / "out"
            made = quantize(model, out, bits=bits, recipe=args.recipe, seed=args.seed, device=args.device)
            for name, text in unrelated(texts).items():
                found = evaluate_checkpoint(
                    str(out), text, reference=str(model), tokens=size.evaluation, window=size.sequence,
                    device=torch.device(args.device), dtype=torch.float32, progress=lambda *step: None,
                )  # fmt: skip
                row = {"bench": bench, "run": "unrelated", "bits": bits, "recipe": made.recipe, "text": name, **told}
                row |= {"calibration_tokens": made.calibration_tokens, "seconds": made.seconds, "seed": args.seed}
                figures = {key: value for key, value in found.items() if key not in ("bits", "kv", "needle")}
                emit(row | figures | {"stored_bits": found["bits"]} | machine(args.device), args.out)


def counts_of(routed: Any) -> dict[str, Any]:
    """Calibration tokens of the least and the most used expert of each layer."""
    return {"least_tokens": [min(c) for c in routed.values()], "most_tokens": [max(c) for c in routed.values()]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU and a minute; the figures mean nothing")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="of training")
    parser.add_argument("--bits", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--recipe", help="quick, good or best; the default is that of `onegraph quantize`")
    parser.add_argument("--tokens", type=int, help="of calibration")
    parser.add_argument("--prior", type=float, nargs="+", help="values of Recipe.expert_prior to try")
    parser.add_argument("--keep", type=Path, help="leave the checkpoints in this directory, and begin from its `model`")
    parser.add_argument("--texts", type=Path, help="directory made by benchmarks/unrelated.py to measure on instead")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    size = TINY if args.tiny else Size()
    size = dataclasses.replace(size, steps=args.steps or size.steps, calibration=args.tokens or size.calibration)
    device = torch.device(args.device)
    with tempfile.TemporaryDirectory() as scratch:
        directory = args.keep or Path(scratch)
        directory.mkdir(parents=True, exist_ok=True)
        if (directory / "model").exists():
            told, (text, other) = {}, sources(size)
        else:
            told, text, other = make(size, directory / "model", args.seed, device)
        if args.texts:
            on_unrelated("tiny-moe", directory / "model", args.texts, told, args, size)
            return
        for bits in args.bits:
            for prior in args.prior or [Recipe().expert_prior]:
                out = directory / f"{bits}bit-{prior}-{size.calibration}"
                made = quantize(
                    directory / "model", out, bits=bits, recipe=args.recipe, calibration=text, sequence=size.sequence,
                    tokens=size.calibration, seed=args.seed, device=device, expert_prior=prior,
                )  # fmt: skip
                found = evaluate_checkpoint(
                    str(out), other, reference=str(directory / "model"), tokens=size.evaluation, window=size.sequence,
                    device=device, dtype=torch.float32, progress=lambda *step: None,
                )  # fmt: skip
                row = {"bench": "tiny-moe", "bits": bits, "expert_prior": prior, "recipe": made.recipe, **told}
                row |= {"experts": size.experts, "top_k": size.top_k}
                row |= {"calibration_tokens": made.calibration_tokens, "seconds": made.seconds, "seed": args.seed}
                figures = {key: value for key, value in found.items() if key not in ("bits", "kv", "needle")}
                row |= figures | {"stored_bits": found["bits"]} | counts_of(made.experts) | machine(device)
                emit(row, args.out)


if __name__ == "__main__":
    main()
