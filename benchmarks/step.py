"""Tokens per second of a decode step: onegraph and transformers (StaticCache) on one model shape, in one run.

    PYTHONPATH=src python3 benchmarks/step.py --shape smollm2-135m --bits 4 --out benchmarks/results/step-smollm2.jsonl

Weights are random, since the time of a step does not depend on them; --model takes a real checkpoint of that shape.
transformers runs in bfloat16, eagerly, captured by hand, and compiled (torch.compile, no graphs of its own) then
captured by hand. Before onegraph is timed, replays of its step are held to the eager step, bit by bit. Prints
JSON lines; --out appends them. --warm compiles every kernel beforehand, in parallel processes.
"""

import argparse
import itertools
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onegraph.engine.bench import bench_step
from onegraph.engine.engine import Engine
from onegraph.engine.params import SamplingParams
from onegraph.engine.record import emit, machine
from onegraph.formats.checkpoint import Checkpoint, TensorInfo
from onegraph.formats.quantization import OWN, parse_quantization
from onegraph.formats.rotated import KEEP
from onegraph.models.chain import chained
from onegraph.models.config import LlamaConfig
from onegraph.models.llama import Llama
from onegraph.runtime.prove import prove

_QWEN3_5: dict[str, Any] = {
    "head_dim": 256, "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4, "full_attention_interval": 4, "vocab_size": 248320, "max_position_embeddings": 262144,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip
_GEMMA4: dict[str, Any] = {
    "model_type": "gemma4_text", "architectures": ["Gemma4ForCausalLM"], "head_dim": 256, "global_head_dim": 512,
    "sliding_window": 1024, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0, "vocab_size": 262144,
    "max_position_embeddings": 262144, "final_logit_softcapping": 30.0, "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
}  # fmt: skip
_GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "hidden_size": 2880, "intermediate_size": 2880,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_experts_per_tok": 4,
    "vocab_size": 201088, "max_position_embeddings": 131072, "attention_bias": True, "sliding_window": 128,
    "swiglu_limit": 7.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "hidden_act": "silu",
    "rope_theta": 150000, "rope_scaling": {
        "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0,
        "beta_slow": 1.0, "truncate": False,
    },
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
    ]},
}  # fmt: skip
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
    "llama-3.2-1b": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 2048, "intermediate_size": 8192,
        "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
        "vocab_size": 128256, "max_position_embeddings": 131072, "rope_theta": 500000.0, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True, "hidden_act": "silu",
    },
    "llama-3-70b": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 8192, "intermediate_size": 28672,
        "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256,
        "max_position_embeddings": 8192, "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
        "hidden_act": "silu",
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048,
        "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960, "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "hidden_act": "silu", "num_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True, "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "qwen3.5-27b": _QWEN3_5 | {
        "model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"], "hidden_size": 5120,
        "intermediate_size": 17408, "num_hidden_layers": 64, "num_attention_heads": 24, "num_key_value_heads": 4,
        "linear_num_value_heads": 48,
    },
    "qwen3.5-35b-a3b": _QWEN3_5 | {
        "model_type": "qwen3_5_moe_text", "architectures": ["Qwen3_5MoeForCausalLM"], "hidden_size": 2048,
        "num_hidden_layers": 40, "num_attention_heads": 16, "num_key_value_heads": 2, "linear_num_value_heads": 32,
        "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
    "qwen3.5-397b-a17b": _QWEN3_5 | {
        "model_type": "qwen3_5_moe_text", "architectures": ["Qwen3_5MoeForCausalLM"], "hidden_size": 4096,
        "num_hidden_layers": 60, "num_attention_heads": 32, "num_key_value_heads": 2, "linear_num_value_heads": 64,
        "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 1024,
        "shared_expert_intermediate_size": 1024,
    },
    "gemma-4-31b": _GEMMA4 | {
        "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 60, "num_attention_heads": 32,
        "num_key_value_heads": 16, "num_global_key_value_heads": 4,
    },
    "gemma-4-26b-a4b": _GEMMA4 | {
        "hidden_size": 2816, "intermediate_size": 2112, "num_hidden_layers": 30, "num_attention_heads": 16,
        "num_key_value_heads": 8, "num_global_key_value_heads": 2, "enable_moe_block": True, "num_experts": 128,
        "top_k_experts": 8, "moe_intermediate_size": 704,
    },
    "ministral-3-8b": {
        "model_type": "ministral3", "architectures": ["Ministral3ForCausalLM"], "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 34, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "vocab_size": 131072, "max_position_embeddings": 262144, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False, "hidden_act": "silu", "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
            "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
        },
    },
    "gpt-oss-20b": _GPT_OSS | {"num_hidden_layers": 24, "num_local_experts": 32},
    "gpt-oss-120b": _GPT_OSS | {"num_hidden_layers": 36, "num_local_experts": 128},
}  # fmt: skip


def shape_of(name: str) -> dict[str, Any]:
    """The config of a name in `SHAPES`, or of the text model of a config.json."""
    if name in SHAPES:
        return SHAPES[name]
    config: dict[str, Any] = json.loads(Path(name).read_text())
    return config.get("text_config", config)


Told = dict[str, tuple[tuple[int, ...], torch.dtype]]  # shapes and dtypes of a file's tensors


def _told(config: dict[str, Any]) -> Told:
    """What a loader looks up before it asks for tensors: norms and routers, and how experts are stored."""
    parsed = LlamaConfig.from_dict(config)
    found: Told = {name: (shape, kinds[1]) for name, (shape, kinds) in parsed.parts.tensors.items()}
    rates = parse_quantization(config.get("quantization_config"))
    for name, stack in parsed.parts.stacks.items():
        if rates is not None and rates.stacked(name):
            for key, field in rates.format_of(name, {}).stored.items():
                shape = (stack.experts, *field.shape(stack.n, stack.k))
                found[f"{name}.{key}"] = shape, field.dtype or torch.float16
        elif config["model_type"] == "gpt_oss" and rates is not None:
            found[f"{name}_blocks"] = (stack.experts, stack.n, stack.k // 32, 16), torch.uint8
            found[f"{name}_scales"] = (stack.experts, stack.n, stack.k // 32), torch.uint8
    return found


class RandomCheckpoint(Checkpoint):
    """What `Llama.load` asks of a checkpoint, with random tensors made on the device: 8 billion weights in a second.

    Args:
        device: where tensors are made, whatever a reader asks for.
        bits: rate of the blocks' linears; 16 makes them bfloat16, and 0 takes them as the config says.
        lm_head, embed_tokens: rates of the head and the embedding, None for bfloat16.
        format: what the linears are stored in, "e8p" or "trellis".
    """

    def __init__(
        self,
        shape: dict[str, Any],
        bits: int,
        lm_head: int | None = None,
        device: str = "cuda",
        embed_tokens: int | None = None,
        format: str = "e8p",
    ) -> None:
        config = dict(shape)
        if bits:
            config.pop("quantization_config", None)
        if bits not in (0, 16):
            kept = dict.fromkeys(LlamaConfig.from_dict(config).steady, KEEP)
            rates = OWN[format](bits=bits, layers=kept, lm_head=lm_head, embed_tokens=embed_tokens)
            config["quantization_config"] = rates.to_dict()
        super().__init__(Path("random"), config, {})
        self.add(_told(config))
        self.device, self.rates = device, parse_quantization(config.get("quantization_config"))
        self._expected: dict[str, tuple[tuple[int, ...], Any]] = {}

    def add(self, told: Told) -> None:
        """The file has these tensors too."""
        self._tensors |= {name: TensorInfo(shape, dtype, 0, Path()) for name, (shape, dtype) in told.items()}
        self.names = sorted(self._tensors)

    def check(self, expected: dict[str, tuple[tuple[int, ...], Any]], optional: Collection[str] = ()) -> None:
        """A tied head is among the optional names, but is never asked for."""
        self._expected = dict(expected)

    def tensor(self, name: str, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> Tensor:
        shape, kinds = self._expected[name]
        device = self.device
        if not kinds[0].is_floating_point:
            if name.endswith("_scales"):  # of E8M0: 2^-7
                return torch.full(shape, 120, device=device, dtype=kinds[0])
            info = torch.iinfo(kinds[0])
            return torch.randint(info.min, info.max + 1, shape, device=device, dtype=kinds[0])
        layer, _, key = name.rpartition(".")
        if key == "scale" and f"{layer}.in_scale" in self._expected:
            width = self._expected[f"{layer}.in_scale"][0][-1]
            return torch.full(shape, width**-0.5 / self.rates.format_of(layer, {}).unit, device=device, dtype=dtype)
        if len(shape) < 2 or name.endswith("_scale"):
            return torch.ones(shape, device=device, dtype=dtype)
        return torch.randn(shape, device=device, dtype=dtype) * (1.0 if "embed" in name else shape[1] ** -0.5)


def random_model(
    shape: dict[str, Any], bits: int, lm_head: int | None, max_context: int, *, fused: bool = True,
    device: str = "cuda", format: str = "e8p",
) -> Any:  # fmt: skip
    """As `load_decoder` gives it."""
    torch.manual_seed(0)
    checkpoint = RandomCheckpoint(shape, bits, lm_head, device, format=format)
    return chained(Llama.load(checkpoint, device, torch.bfloat16, max_context=max_context, fused=fused))


def compiled(shape: str, bits: int, lm_head: int | None, batch: int, kind: str, sampling: bool, format: str) -> None:
    """Builds one step of a model of one layer, so that its kernels are in the caches on disk."""
    model = random_model(shape_of(shape) | {"num_hidden_layers": 1}, bits, lm_head, 2048, format=format)
    Engine(model, max_batch=batch).executor.step(kind, sampling=sampling)


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
    (runner,) = engine.executor.step("decode").stages
    width = runner.inputs["table"].shape[1]

    def case(seed: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        values = {name: torch.zeros_like(tensor[:batch], device="cpu") for name, tensor in runner.inputs.items()}
        values["drawn"] = torch.randint(0, model.config.vocab_size, (batch,), generator=generator)
        values["positions"] = torch.randint(0, 300, (batch,), generator=generator).int()
        values["limits"].fill_(400)
        values["table"] = (1 + torch.arange(batch * width)).view(batch, width).int()
        values["slots"] = (1 + torch.arange(batch)).int()
        return values

    state = {str(i): tensor[1:] for i, tensor in enumerate(engine.executor.cache.tensors())}
    return prove(runner, [case(seed) for seed in range(3)], state=state) == []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="smollm2-135m", help=f"{', '.join(SHAPES)}, or a config.json")
    parser.add_argument(
        "--bits", type=int, nargs="*", default=[4], help="rates of the blocks' linears; 16 is bfloat16, 0 as published"
    )
    parser.add_argument("--format", choices=OWN, default="e8p")
    parser.add_argument("--model", type=Path, help="a checkpoint of that shape, in place of random weights")
    parser.add_argument("--lm-head", type=int, default=None, help="rate of the head; unquantized by default")
    parser.add_argument("--batch", type=int, nargs="*", default=[1])
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--steps", type=int, default=256)
    parser.add_argument("--sampling", action="store_true", help="also temperature 0.8, top-k 50, top-p 0.95")
    parser.add_argument(
        "--unfused", action="store_true", help="every op of a layer alone, the other side of the comparison"
    )
    parser.add_argument("--captured-only", action="store_true")
    parser.add_argument("--warm", action="store_true", help="compile in parallel beforehand")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    def say(row: dict[str, Any]) -> None:
        emit(row | {"shape": args.shape if args.shape in SHAPES else Path(args.shape).stem.lower()}, args.out)

    if args.warm:
        draws = (False, True) if args.sampling else (False,)
        jobs = [
            (args.shape, bits, args.lm_head, batch, kind, draw, args.format)
            for bits, draw in itertools.product(args.bits, draws)
            for kind, batch in (("prefill", 1), *(("decode", batch) for batch in {2, *args.batch}))
        ]
        with multiprocessing.get_context("spawn").Pool(len(jobs)) as pool:
            pool.starmap(compiled, jobs, chunksize=1)
    shape = shape_of(args.shape)
    reach = max(args.context + args.steps + 1, 2048)
    for bits in args.bits if args.model is None else [None]:
        if bits is None:
            with Checkpoint.open(args.model) as checkpoint:
                model = chained(Llama.load(checkpoint, "cuda", torch.bfloat16, max_context=reach))
            name = "onegraph " + args.model.name
        else:
            model = random_model(shape, bits, args.lm_head, reach, fused=not args.unfused, format=args.format)
            coded = f"{args.format} {bits} bit" if bits else "as published"
            name = "onegraph bf16" if bits == 16 else f"onegraph {coded}"
            name += ", unfused" if args.unfused else ""
        same = proven(model, batch=2)
        options = {"batches": args.batch, "context": args.context, "steps": args.steps, "name": name}
        if args.captured_only:
            options["modes"] = (True,)
        rows = bench_step(model, **options)
        if args.sampling:
            params = SamplingParams(temperature=0.8, top_k=50, top_p=0.95, seed=0)
            rows = itertools.chain(rows, bench_step(model, **options | {"modes": (True,)}, params=params))
        for row in rows:
            say(row | {"replay_equals_eager": same} | ({} if bits is None else {"bits": bits, "lm_head": args.lm_head}))
        del model
    if not args.no_peers:
        for batch in args.batch:
            for row in transformers_rows(shape, args.context, args.steps, batch, not args.no_compile):
                say(row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
