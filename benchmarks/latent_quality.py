"""How far latent attention through a cache in codes is from exact latent attention, as JSON lines.

    PYTHONPATH=src python3 benchmarks/latent_quality.py random    # a minute of a CPU
    PYTHONPATH=src python3 benchmarks/latent_quality.py trained   # a GPU, some minutes; --small: a CPU, ten minutes

`random`: latents of DeepSeek-V3's sizes, in one layer, by the standard deviation of the scores (the larger, the fewer
tokens a query attends to) and by how unequal the latents' numbers are (the deviation of the logarithms of the norm's
weights). `trained`: a small DeepSeek-V3 is trained as in benchmarks/tiny_moe.py. Text of other files is read in windows
through a cache of each setting, as decoding reads it: perplexity, KL to exact attention in nats a token, and per layer
|output - exact output| / |exact output| of attention on the exact model's own inputs.
"""

import argparse
import dataclasses
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tiny_moe import Size, make
from torch import Tensor

from onegraph.api.tokenizer import Tokenizer
from onegraph.engine.record import emit, machine
from onegraph.formats.checkpoint import Checkpoint
from onegraph.formats.latent_kv import code_bits, curve, fp8_codes, levels, token_bytes
from onegraph.formats.turboquant import parse_kv, rotation
from onegraph.models.llama import Llama
from onegraph.ops.latent_attention import quantize

SETTINGS = ("fp8", *(f"turboquant:{bits},mode=full" for bits in (4, 3, 2)))
RANK, ROPE, HEADS, CONTEXT = 512, 64, 32, 4096
SMALL = Size(
    vocabulary=1024, hidden=192, layers=4, heads=3, sequence=256, batch=8, steps=400, rate=3e-3, characters=2_000_000,
    evaluation=8192,
)  # fmt: skip


def rounded(c: Tensor, setting: str) -> Tensor:
    """What a cache holds of latents [..., rank]."""
    if setting == "bf16":
        return c.bfloat16().float()
    if setting == "fp8":
        codes, factor = fp8_codes(c)
        return levels(codes, 8, None) * factor.unsqueeze(-1)
    config = parse_kv(setting)
    assert config is not None
    turn, bits = rotation(c.shape[-1]) / math.sqrt(c.shape[-1]), config.k_bits
    codes, factor = quantize(c @ turn.T, bits, curve(c.shape[-1], bits), config.scale)
    return levels(codes, bits, curve(c.shape[-1], bits)) * factor.unsqueeze(-1) @ turn


def sums(q: Tensor, keys: Tensor, latents: Tensor, scale: Tensor) -> Tensor:
    """Latents by the softmax of q's scores."""
    return (q @ torch.cat((latents, keys), dim=1).T * scale).softmax(1) @ latents


def random_layer() -> Iterator[dict[str, Any]]:
    g = torch.Generator().manual_seed(0)
    for spread in (0.0, 1.0):  # of the logarithms of the norm's weights
        gain = (spread * torch.randn(RANK, generator=g)).exp()
        c = torch.nn.functional.normalize(torch.randn(CONTEXT, RANK, generator=g), dim=1) * RANK**0.5 * gain
        k = torch.randn(CONTEXT, ROPE, generator=g)
        q = torch.randn(HEADS, RANK + ROPE, generator=g)
        for deviation in (1.0, 3.0, 6.0):
            scale = deviation / (q @ torch.cat((c, k), dim=1).T).std()
            exact = sums(q, k, c, scale)
            for setting in ("bf16", *SETTINGS):
                held, key = rounded(c, setting), k.bfloat16().float()
                error = float((sums(q, key, held, scale) - exact).norm() / exact.norm())
                own = float((held - c).norm() / c.norm())
                row = {"bench": "latent-quality", "name": "random", "kv": setting, "spread": spread}
                row |= {"score_deviation": deviation, "latent_error": round(own, 5), "output_error": round(error, 5)}
                yield row


class Beside:
    """An exact cache that attends; one in codes gets the same inputs, and the sums of its errors are kept."""

    def __init__(self, exact: Any, coded: Any, layers: int) -> None:
        self.exact, self.coded, self.squares = exact, coded, torch.zeros(layers, 2).double()

    def attend(self, attention: Any, *inputs: Tensor) -> Tensor:
        out: Tensor = self.exact.attend(attention, *inputs)
        error = self.coded.attend(attention, *inputs) - out
        sums = torch.stack([error.double().square().sum(), out.double().square().sum()])
        self.squares = self.squares.to(sums.device)
        self.squares[attention.index] += sums
        return out


def new_cache(model: Llama, length: int, setting: str) -> Any:
    per_row = -(-length // model.page_size)
    model.fp8_kv = setting == "fp8"
    kv = None if setting in ("exact", "fp8") else parse_kv(setting)
    cache = model.new_cache(rows=1, pages=1 + per_row, page_size=model.page_size, pages_per_row=per_row, kv=kv)
    cache.block_table.copy_(torch.arange(1, 1 + per_row).view(1, -1))
    cache.counts.fill_(length)
    return cache


def latent(size: Size) -> Any:
    """A DeepSeek-V3 of transformers, of dense layers."""
    import transformers

    config = transformers.DeepseekV3Config(
        vocab_size=size.vocabulary, hidden_size=size.hidden, intermediate_size=3 * size.hidden,
        num_hidden_layers=size.layers, first_k_dense_replace=size.layers, num_attention_heads=size.heads,
        num_key_value_heads=size.heads, q_lora_rank=None, kv_lora_rank=128, qk_nope_head_dim=64, qk_rope_head_dim=32,
        v_head_dim=64, n_routed_experts=8, n_group=1, topk_group=1, num_experts_per_tok=2,
        max_position_embeddings=16384, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None,
        pad_token_id=None,
    )  # fmt: skip
    return transformers.DeepseekV3ForCausalLM(config)


@torch.inference_mode()
def of_model(path: Path, ids: Tensor, window: int, device: torch.device) -> Iterator[dict[str, Any]]:
    with Checkpoint.open(path) as checkpoint:
        model = Llama.load(checkpoint, device, torch.float32)
    sizes, layers = model.config.latent, model.config.attention_layers
    assert sizes is not None
    windows = ids[: len(ids) // window * window].view(-1, window).to(device)

    def logs(setting: str, part: Tensor) -> Tensor:
        return model.logits(model(part[None, :-1], new_cache(model, window - 1, setting)))[0].log_softmax(1).double()

    exact = [logs("exact", part) for part in windows]
    count = windows.numel() - len(windows)
    for setting in ("exact", *SETTINGS):
        loss, kl, same, squares = 0.0, 0.0, 0, torch.zeros(layers, 2, dtype=torch.float64, device=device)
        for part, right in zip(windows, exact, strict=True):
            mine = logs(setting, part)
            loss -= float(mine.gather(1, part[1:, None]).sum())
            kl += float((right.exp() * (right - mine)).sum())
            same += int((right.argmax(1) == mine.argmax(1)).sum())
            caches = (new_cache(model, window - 1, each) for each in ("exact", setting))
            beside = Beside(*caches, layers)
            model(part[None, :-1], beside)
            squares += beside.squares
        bits = code_bits(None if setting in ("exact", "fp8") else parse_kv(setting), setting == "fp8", layers)
        errors = (squares[:, 0] / squares[:, 1]).sqrt()
        row = {"bench": "latent-quality", "name": "trained", "kv": setting, "tokens": count, "window": window}
        row |= {
            "kv_bytes": token_bytes(bits, sizes.rank, sizes.rope, 2),
            "perplexity": round(math.exp(loss / count), 4),
        }
        row |= {"kl": round(kl / count, 6), "top1": round(same / count, 4)}
        yield row | {"output_errors": [round(float(e), 5) for e in errors]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("random", "trained"))
    parser.add_argument("--small", action="store_true", help="a model that a CPU trains")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, help="of training")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = torch.device("cpu" if args.what == "random" else args.device)
    about = machine(device)
    if args.what == "random":
        for row in random_layer():
            emit(row | about, args.out)
        return
    size = SMALL if args.small else Size()
    size = dataclasses.replace(size, steps=args.steps or size.steps)
    with tempfile.TemporaryDirectory() as scratch:
        told, _, other = make(size, Path(scratch), 0, device, latent)
        with Checkpoint.open(scratch) as checkpoint:
            ids = torch.tensor(Tokenizer(checkpoint).encode(other[:200_000])[: size.evaluation])
        for row in of_model(Path(scratch), ids, size.sequence, device):
            emit(row | told | about, args.out)


if __name__ == "__main__":
    main()
