"""Tokens per second of a decode step: onegraph and transformers (StaticCache) on one model shape, in one run.

    PYTHONPATH=src python3 benchmarks/step.py --shape smollm2-135m --bits 4 --out benchmarks/results/step-smollm2.jsonl

Weights are random, since the time of a step does not depend on them; --model takes a real checkpoint of that shape.
transformers runs in bfloat16, eagerly, captured by hand, and compiled (torch.compile, no graphs of its own) then
captured by hand. Before onegraph is timed, replays of its step are held to the eager step, bit by bit. Prints
JSON lines; --out appends them.
"""

import argparse
import json
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onegraph.engine.bench import bench_step, machine
from onegraph.engine.generate import Engine
from onegraph.formats.checkpoint import Checkpoint, write_checkpoint
from onegraph.formats.e8p import E8PConfig, linear_tensors
from onegraph.models.llama import Llama
from onegraph.runtime.prove import prove

SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 576, "intermediate_size": 1536,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
        "max_position_embeddings": 8192, "rope_theta": 100000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
        "hidden_act": "silu",
    },
    "llama-3-8b": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
        "max_position_embeddings": 8192, "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
        "hidden_act": "silu",
    },
}  # fmt: skip


def random_checkpoint(path: Path, shape: dict[str, Any], bits: int, lm_head: int | None) -> Checkpoint:
    """A checkpoint of random E8P codes (bits = 16: of random bfloat16 weights)."""
    generator = torch.Generator().manual_seed(0)
    hidden, inner, vocabulary = (shape[f"{key}_size"] for key in ("hidden", "intermediate", "vocab"))
    kv = hidden // shape["num_attention_heads"] * shape["num_key_value_heads"]
    linears = {
        "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }  # fmt: skip

    def linear(name: str, n: int, k: int, rate: int) -> Iterator[tuple[str, Tensor]]:
        if rate == 16:
            yield f"{name}.weight", (torch.randn(n, k, generator=generator) * k**-0.5).bfloat16()
            return
        for suffix, (size, kind) in linear_tensors(n, k, rate).items():
            if kind.is_floating_point:  # scales: the integers have an RMS of about 3.6 * 4^(stages - 1)
                value = torch.full(size, k**-0.5 / (16 if rate == 4 else 4) if suffix == "scale" else 1.0).to(kind)
            else:
                info = torch.iinfo(kind)
                value = torch.randint(info.min, info.max + 1, size, generator=generator).to(kind)
            yield f"{name}.{suffix}", value

    def tensors() -> Iterator[tuple[str, Tensor]]:
        yield "model.embed_tokens.weight", torch.randn(vocabulary, hidden, generator=generator).bfloat16()
        for i in range(shape["num_hidden_layers"]):
            for name, (n, k) in linears.items():
                yield from linear(f"model.layers.{i}.{name}", n, k, bits)
            for norm in ("input_layernorm", "post_attention_layernorm"):
                yield f"model.layers.{i}.{norm}.weight", torch.ones(hidden).bfloat16()
        yield "model.norm.weight", torch.ones(hidden).bfloat16()
        if not shape["tie_word_embeddings"] or lm_head:
            yield from linear("lm_head", vocabulary, hidden, lm_head or 16)

    config = dict(shape)
    if bits != 16:
        config["quantization_config"] = E8PConfig(bits=bits, lm_head=lm_head).to_dict()
    write_checkpoint(path, config, tensors())
    return Checkpoint.open(path)


def transformers_rows(shape: dict[str, Any], context: int, steps: int, batch: int, compiled: bool) -> Iterator[dict]:
    """The decode step of transformers with a StaticCache: one token, greedy, all on the device."""
    import transformers
    from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

    device = torch.device("cuda")
    config = LlamaConfig(**{k: v for k, v in shape.items() if k not in ("model_type", "architectures")})
    config._attn_implementation = "sdpa"
    with torch.device(device):
        model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    about = {"batch": batch, "context": context, **machine(device), "transformers": transformers.__version__}

    def prefilled() -> tuple[Any, Tensor]:
        cache = StaticCache(config=config, max_cache_len=context + steps + 8)
        tokens = torch.randint(0, config.vocab_size, (batch, context), device=device)
        with torch.no_grad():
            model(tokens, past_key_values=cache, use_cache=True)
        return cache, tokens[:, :1].clone()

    def one(forward: Callable, cache: Any, token: Tensor) -> None:
        token.copy_(forward(input_ids=token, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1))

    def rewind(cache: Any) -> None:
        for layer in cache.layers:
            layer.cumulative_length.fill_(context)  # the cache counts its tokens on the device

    def timed(run: Callable[[], Any], cache: Any, count: int) -> float:
        rates = []
        for _ in range(3):
            rewind(cache)
            torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(count):
                run()
            torch.cuda.synchronize()
            rates.append(batch * count / (time.perf_counter() - started))
        return statistics.median(rates)

    def captured(forward: Callable) -> tuple[Callable[[], Any], Any]:
        cache, token = prefilled()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.no_grad(), torch.cuda.stream(stream):
            for _ in range(3):
                one(forward, cache, token)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                one(forward, cache, token)
        torch.cuda.synchronize()
        return graph.replay, cache

    def row(mode: str, rate: float) -> dict:
        numbers = {"tokens_per_second": round(rate, 1), "ms_per_step": round(1e3 * batch / rate, 4)}
        return {"bench": "step", "name": "transformers StaticCache bf16", "mode": mode, **numbers, **about}

    cache, token = prefilled()
    with torch.no_grad():
        for _ in range(2):
            one(model, cache, token)
        yield row("eager", timed(lambda: one(model, cache, token), cache, min(steps, 32)))
    yield row("captured by hand", timed(*captured(model), steps))
    if compiled:
        yield row("torch.compile, captured by hand", timed(*captured(torch.compile(model)), steps))


def proven(model: Llama, batch: int) -> bool:
    """Whether a replay of the decode step leaves the bits that the eager step leaves: tokens, inputs and KV cache."""
    engine = Engine(model, max_batch=batch, max_context=512)
    runner = engine.runner("decode")
    width = runner.inputs["table"].shape[1]

    def case(seed: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        values = {name: torch.zeros_like(tensor[:batch], device="cpu") for name, tensor in runner.inputs.items()}
        values["drawn"] = torch.randint(0, model.config.vocab_size, (batch,), generator=generator)
        values["positions"] = torch.randint(0, 300, (batch,), generator=generator).int()
        values["limits"].fill_(400)
        values["table"] = (1 + torch.arange(batch * width)).view(batch, width).int()
        return values

    cache = engine._cache
    state = {f"keys {i}": t[1:] for i, t in enumerate(cache.keys)}
    state |= {f"values {i}": t[1:] for i, t in enumerate(cache.values)}
    return prove(runner, [case(seed) for seed in range(3)], state=state) == []


def command_line() -> str:
    """This run's command, as a result file names it: without where the result went."""
    kept = [a for i, a in enumerate(sys.argv) if a != "--out" and sys.argv[i - 1] != "--out"]
    return "PYTHONPATH=src python3 " + shlex.join(kept)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="smollm2-135m")
    parser.add_argument("--bits", type=int, nargs="*", default=[4], help="rates of the blocks' linears; 16 is bfloat16")
    parser.add_argument("--model", type=Path, help="a checkpoint of that shape, in place of random weights")
    parser.add_argument("--lm-head", type=int, default=None, help="rate of the head; unquantized by default")
    parser.add_argument("--batch", type=int, nargs="*", default=[1])
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--steps", type=int, default=256)
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    command = command_line()

    def emit(row: dict[str, Any]) -> None:
        line = json.dumps(row | {"shape": args.shape, "command": command})
        print(line, flush=True)
        if args.out:
            with args.out.open("a") as file:
                file.write(line + "\n")

    shape = SHAPES[args.shape]
    reach = max(args.context + args.steps + 1, 2048)
    for bits in args.bits if args.model is None else [None]:
        with tempfile.TemporaryDirectory() as folder:
            if bits is None:
                checkpoint = Checkpoint.open(args.model)
                name = "onegraph " + args.model.name
            else:
                checkpoint = random_checkpoint(Path(folder) / "model", shape, bits, args.lm_head)
                name = f"onegraph e8p {bits} bit" if bits != 16 else "onegraph bf16"
            model = Llama.load(checkpoint, "cuda", torch.bfloat16, max_context=reach)
        same = proven(model, batch=2)
        for row in bench_step(model, batches=args.batch, context=args.context, steps=args.steps, name=name):
            emit(row | {"replay_equals_eager": same})
        del model
    if not args.no_peers:
        for batch in args.batch:
            for row in transformers_rows(shape, args.context, args.steps, batch, not args.no_compile):
                emit(row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
