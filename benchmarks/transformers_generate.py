"""Tokens per second of an onegraph checkpoint in transformers: `generate` eagerly and compiled, and captured by hand.

    PYTHONPATH=src python3 benchmarks/transformers_generate.py --out benchmarks/results/transformers.jsonl

The checkpoint has the shape's sizes and random codes; it is written to a temporary directory and loaded as a user loads
it. Each cache holds --context tokens of prompt; time is the slope between two lengths, so that prefill drops out.
`compiled` is what `generate` does by itself on a GPU (inductor, reduce-overhead). `captured` captures the model's own
step into one graph, without a compiler. `same_tokens`: how many tokens come first as in the run `against`, eager where
it is among --mode, and of how many.
Prints JSON lines; --out appends them.
"""

import argparse
import fcntl
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from step import SHAPES
from torch import Tensor
from transformers import AutoModelForCausalLM, CompileConfig, LlamaConfig, LlamaForCausalLM, StaticCache

from onegraph.engine.record import emit, machine
from onegraph.formats.checkpoint import write_checkpoint
from onegraph.formats.e8p import E8P, E8PConfig
from onegraph.integrations.hf import TurboQuantCache

MODES = ("eager", "captured", "compiled")
UNIT = {2: 4, 3: 4, 4: 16}  # codes stand for integers with an RMS of about 3.6 / 4 times this


def write_random(path: Path, shape: dict[str, Any], bits: int) -> None:
    """A checkpoint with random codes. The head is its own, for a tied one makes random models repeat their input."""
    config = shape | {"tie_word_embeddings": False}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**{k: v for k, v in config.items() if k != "model_type"}))

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, parameter in model.named_parameters():
            if "_proj." not in name:
                rows = torch.ones if parameter.dim() < 2 else torch.randn
                scale = parameter.shape[-1] ** -0.5 if name.startswith("lm_head") else 1.0
                yield name, (rows(parameter.shape) * scale).bfloat16()
                continue
            n, k = parameter.shape
            made = {key: torch.empty(size, dtype=dtype) for key, (size, dtype) in E8P[bits].layout(n, k).items()}
            E8P[bits].fill(made, k, generator)
            yield from ((name.removesuffix("weight") + key, tensor) for key, tensor in made.items())

    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    write_checkpoint(path, config | {"quantization_config": E8PConfig(bits=bits).to_dict()}, tensors())


def generated(model: Any, cache: Any, prompt: Tensor, steps: int, **options: Any) -> tuple[list[int], float]:
    """The tokens of `steps` steps and the seconds of one, over the second of two calls that differ in length."""
    seconds, tokens = [], prompt
    for length in (8, 8 + steps):
        cache.reset()
        started = time.perf_counter()
        tokens = model.generate(prompt, past_key_values=cache, max_new_tokens=length, do_sample=False, **options)
        tokens[0, -1].item()
        seconds.append(time.perf_counter() - started)
    return tokens[0, prompt.shape[1] :].tolist(), (seconds[1] - seconds[0]) / steps


@torch.no_grad()
def captured(model: Any, cache: Any, prompt: Tensor, steps: int) -> tuple[list[int], float]:
    """The same from replays of one captured step."""
    token = prompt[:, :1].clone()

    def step() -> None:
        token.copy_(model(input_ids=token, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1))

    def prefill() -> None:
        cache.reset()
        token.copy_(model(input_ids=prompt, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1))

    prefill()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
        with torch.cuda.graph(graph, stream=stream):
            step()
    torch.cuda.synchronize()
    times = []
    for _ in range(3):
        prefill()
        found = [token.clone()]
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(steps + 7):
            graph.replay()
            found.append(token.clone())
        torch.cuda.synchronize()
        times.append((time.perf_counter() - started) / (steps + 7))
    return torch.cat(found)[:, 0].tolist(), statistics.median(times)


def rows(model: Any, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    context, steps, device = args.context, args.steps, model.device
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(0, model.config.vocab_size, (1, context), generator=generator).to(device)
    for kv in args.cache:
        model.set_attn_implementation("sdpa" if kv == "static" else "turboquant")
        room = context + steps + 16
        cache: Any = (
            StaticCache(config=model.config, max_cache_len=room)
            if kv == "static"
            else TurboQuantCache(model.config, room, kv)
        )
        runs: dict[str, Callable[[], tuple[list[int], float]]] = {
            "eager": lambda cache=cache: generated(model, cache, prompt, steps, disable_compile=True),
            "captured": lambda cache=cache: captured(model, cache, prompt, steps),
            "compiled": lambda cache=cache: generated(model, cache, prompt, steps, **compiling(device)),
        }
        model.generate(prompt, past_key_values=cache, max_new_tokens=4, do_sample=False, disable_compile=True)
        expected: list[int] = []
        for mode in sorted(args.mode, key=MODES.index):
            started = time.perf_counter()
            if mode == "compiled":
                cache.reset()
                model.generate(prompt, past_key_values=cache, max_new_tokens=8, do_sample=False, **compiling(device))
            ready = time.perf_counter() - started
            with alone(args.lock):
                tokens, seconds = runs[mode]()
            row = {"bench": "transformers", "mode": mode, "cache": kv, "layers": model.config.num_hidden_layers}
            row |= {"batch": 1, "context": context, "steps": steps}
            row |= {"tokens_per_second": round(1 / seconds, 1), "ms_per_step": round(1e3 * seconds, 4)}
            if expected:
                same = next((i for i, (a, b) in enumerate(zip(tokens, expected, strict=False)) if a != b), len(tokens))
                row |= {"same_tokens": [same, len(tokens)], "against": min(args.mode, key=MODES.index)}
            expected = expected or tokens
            if mode == "compiled":
                counters = torch._dynamo.utils.counters
                row["first_call_seconds"] = round(ready, 1)
                row["cudagraph_skips"] = counters["inductor"]["cudagraph_skips"]
                row["graph_breaks"] = sum(counters["graph_break"].values())
            yield row


@contextmanager
def alone(lock: Path | None) -> Iterator[None]:
    """Among runs that compile side by side on one GPU and name the same file, only one is timed at a time."""
    if lock is None:
        yield
        return
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def compiling(device: torch.device) -> dict[str, Any]:
    """Nothing on a GPU, where `generate` compiles by itself; on a CPU, for a trial of this script, Dynamo alone."""
    if device.type == "cuda":
        return {}
    config = CompileConfig(backend="eager", mode="default")
    config._compile_all_devices = True
    return {"compile_config": config}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="smollm2-135m")
    parser.add_argument("--layers", type=int, help="so many of the shape's layers (all)")
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--cache", nargs="*", default=["static", "turboquant:4"])
    parser.add_argument("--mode", nargs="*", choices=MODES, default=list(MODES))
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--lock", type=Path, help="a file that runs on the same GPU share: one is timed at a time")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    if args.layers:
        shape = shape | {"num_hidden_layers": args.layers}
    with tempfile.TemporaryDirectory() as folder:
        write_random(Path(folder) / "model", shape, args.bits)
        model = AutoModelForCausalLM.from_pretrained(
            Path(folder) / "model", dtype=torch.bfloat16, device_map=args.device
        )
    about = {**machine(args.device), "transformers": transformers.__version__, "shape": args.shape, "bits": args.bits}
    for row in rows(model, args):
        emit(row | about, args.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
