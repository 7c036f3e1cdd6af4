"""Trains a small Qwen3.5 on the sources of Python's standard library, quantizes it, and measures what that cost.

    PYTHONPATH=src python3 benchmarks/tiny_hybrid.py --out benchmarks/results/tiny-hybrid.jsonl   # a GPU, some minutes
    PYTHONPATH=src python3 benchmarks/tiny_hybrid.py --tiny                                       # a CPU, two minutes

As benchmarks/tiny_moe.py, of 8 layers, 6 of which are gated delta nets. A line is one run: KL to the unquantized
model in nats a token, top-1 agreement, perplexity and bits stored at each rate (`bits`); KL where one kind of
projection alone is at 2 bits (`projection`); and KL by position in one text of 8,192 tokens, all of which the states
have seen (`drift`). `--texts` is that of tiny_moe.py.
"""

import argparse
import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import torch
from tiny_moe import TINY, Size, make, on_unrelated
from torch import Tensor

from onegraph.api.evaluate import evaluate_checkpoint
from onegraph.api.quantize import quantize
from onegraph.api.tokenizer import Tokenizer
from onegraph.engine.record import emit, machine
from onegraph.formats.checkpoint import Checkpoint
from onegraph.models.llama import Llama

PROJECTIONS = (
    "*linear_attn.in_proj_qkv", "*linear_attn.in_proj_z", "*linear_attn.out_proj", "*self_attn.q_proj",
    "*self_attn.k_proj", "*self_attn.v_proj", "*self_attn.o_proj", "*mlp.gate_proj", "*mlp.up_proj", "*mlp.down_proj",
)  # fmt: skip
TEXT = 8192  # tokens of the text that drift is measured on; with --tiny an eighth
PARTS = 8  # of it, a figure of drift each


def hybrid(size: Size) -> Any:
    """A Qwen3.5 of transformers."""
    import transformers

    config = transformers.Qwen3_5TextConfig(
        vocab_size=size.vocabulary, hidden_size=size.hidden, intermediate_size=3 * size.hidden,
        num_hidden_layers=size.layers, num_attention_heads=size.heads, num_key_value_heads=size.heads // 2, head_dim=64,
        linear_num_key_heads=size.heads // 2, linear_num_value_heads=size.heads, linear_key_head_dim=64,
        linear_value_head_dim=64, max_position_embeddings=16384, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return transformers.Qwen3_5ForCausalLM(config)


@torch.inference_mode()
def drift(path: Path, reference: Path, tokens: Tensor, device: torch.device) -> list[float]:
    """KL in nats a token of each of PARTS parts of one text [T], read from its first token on."""
    logs = []
    for each in (reference, path):
        with Checkpoint.open(each) as checkpoint:
            model = Llama.load(checkpoint, device, torch.float32, max_context=len(tokens))
        hidden = model(tokens.unsqueeze(0).to(device), model.dense_attention)[0]
        logs.append([model.logits(part).log_softmax(-1) for part in hidden.chunk(PARTS)])
    return [round(float((a.exp() * (a - b)).sum(-1).mean()), 6) for a, b in zip(*logs, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU; the figures mean nothing")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="of training")
    parser.add_argument("--bits", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--recipe", help="quick, good or best; the default is that of `onegraph quantize`")
    parser.add_argument("--texts", type=Path, help="directory made by benchmarks/unrelated.py to measure on instead")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    size = dataclasses.replace(TINY, layers=4) if args.tiny else Size()
    size = dataclasses.replace(size, steps=args.steps or size.steps)
    device = torch.device(args.device)
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        told, text, other = make(size, model, args.seed, device, hybrid)
        if args.texts:
            on_unrelated("tiny-hybrid", model, args.texts, told, args, size)
            return

        def measured(name: str, bits: int, layers: dict[str, int]) -> tuple[Path, dict[str, Any]]:
            out = Path(scratch) / name
            made = quantize(
                model, out, bits=bits, recipe=args.recipe, calibration=text, sequence=size.sequence, layers=layers,
                tokens=size.calibration, seed=args.seed, device=device,
            )  # fmt: skip
            found = evaluate_checkpoint(
                str(out), other, reference=str(model), tokens=size.evaluation, window=size.sequence, device=device,
                dtype=torch.float32, progress=lambda *step: None,
            )  # fmt: skip
            row = {"bench": "tiny-hybrid", "bits": bits, "recipe": made.recipe, "seed": args.seed, **told}
            figures = {key: value for key, value in found.items() if key not in ("bits", "kv", "needle")}
            return out, row | figures | {"stored_bits": found["bits"]} | machine(device)

        with Checkpoint.open(model) as checkpoint:
            ids = torch.tensor(Tokenizer(checkpoint).encode(other[:100_000])[: TEXT // 8 if args.tiny else TEXT])
        for bits in args.bits:
            out, row = measured(f"{bits}bit", bits, {})
            emit(row | {"drift": drift(out, model, ids, device)}, args.out)
        for i, pattern in enumerate(PROJECTIONS):
            emit(measured(f"only-{i}", 2, {"*": 16, pattern: 2})[1] | {"projection": pattern}, args.out)


if __name__ == "__main__":
    main()
