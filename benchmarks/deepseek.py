"""The decode step of DeepSeek-V4 with random NVFP4 weights of the true shapes, captured and eager, over some GPUs.

    python benchmarks/deepseek.py --model flash --gpus 2 --context 8192 --batch 1 16

Weights and state are made on the devices; `--layers N` takes only the first N layers, for a machine that is too small
for all. Prints one JSON line a batch.
"""

import argparse
import json
import statistics
import sys
import time

import torch
from torch import Tensor, nn

from onegraph.engine import placed
from onegraph.engine.bench import copy_bandwidth, machine
from onegraph.engine.placed import PlacedEngine
from onegraph.formats.nvfp4 import GROUP
from onegraph.models.deepseek_v4 import DeepseekV4
from onegraph.models.deepseek_v4_config import DeepseekV4Config
from onegraph.models.deepseek_v4_weights import _PACKED, DeepseekWeights
from onegraph.nn.nvfp4 import NVFP4Experts, NVFP4GroupedLinear, NVFP4Linear

YARN = {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1}
FLASH = {"compress_ratios": [0, 0, *[4, 128] * 20, 4, 0], "num_hidden_layers": 43}
PRO = {
    "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128, "q_lora_rank": 1536, "o_groups": 16,
    "n_routed_experts": 384, "moe_intermediate_size": 3072, "routed_scaling_factor": 2.5, "index_topk": 1024,
    "compress_ratios": [128, 128, *[4, 128] * 29, 4],
}  # fmt: skip


class RandomWeights(DeepseekWeights):
    """Weights that no checkpoint holds: NVFP4 where a checkpoint may have it, bfloat16 elsewhere."""

    def __init__(self, config: DeepseekV4Config, dtype: torch.dtype) -> None:
        self.config, self.dtype, self.stored, self.checkpoint = config, dtype, {}, {}  # type: ignore[assignment]

    def sizes(self) -> tuple[list[int], tuple[int, int]]:
        layers, ends = [0] * self.config.layers, [0, 0]
        for name, (shape, _) in self.shapes.items():
            count = torch.Size(shape).numel()
            nbytes = count * 9 // 16 if _PACKED.search(name) else 2 * count
            where = name.split(".")
            if where[0] == "layers":
                layers[int(where[1])] += nbytes
            else:
                ends[0 if where[0] == "embed" else 1] += nbytes
        return layers, (ends[0], ends[1])

    @property
    def shapes(self):
        if not hasattr(self, "_shapes"):
            self._shapes = self.expected()
        return self._shapes

    def tensor(self, name: str, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
        shape, kinds = self.shapes[name]
        if not kinds[0].is_floating_point:
            order = torch.rand(shape[0], self.config.experts, device=device).argsort(1)
            return order[:, : shape[1]].to(torch.int32)
        value = torch.randn(shape, device=device, dtype=torch.float32)
        if name.endswith("norm.weight"):
            value = 1 + 0.1 * value
        elif len(shape) == 2:
            value = value * shape[1] ** -0.5
        return value.to(dtype or self.dtype)

    def codes(self, *shape: int, device: torch.device) -> dict[str, Tensor]:
        """Random codes and scales of [..., n, k] with rows of about unit norm."""
        *lead, k = shape
        scale = torch.randint(0x30, 0x40, (*lead, k // GROUP), device=device, dtype=torch.uint8)
        codes = torch.randint(0, 256, (*lead, k // 2), device=device, dtype=torch.uint8)
        return {"codes": codes, "scale": scale, "global_scale": torch.tensor(0.3 * k**-0.5, device=device)}

    def linear(self, shapes: dict[str, tuple[int, int]], device: torch.device) -> nn.Module:
        k = next(iter(shapes.values()))[1]
        return NVFP4Linear(**self.codes(sum(n for n, _ in shapes.values()), k, device=device))

    def grouped(self, name: str, groups: int, n: int, k: int, device: torch.device) -> nn.Module:
        return NVFP4GroupedLinear(**self.codes(groups, n, k, device=device))

    def experts(self, prefix: str, device: torch.device) -> nn.Module:
        c = self.config
        up = self.codes(c.experts, 2 * c.expert_size, c.hidden_size, device=device)
        down = self.codes(c.experts, c.hidden_size, c.expert_size, device=device)
        return NVFP4Experts(
            gate_up=up["codes"], gate_up_scale=up["scale"], gate_up_global=up["global_scale"],
            down=down["codes"], down_scale=down["scale"], down_global=down["global_scale"], limit=c.limit,
        )  # fmt: skip


def active_bytes(model: DeepseekV4, batch: int) -> int:
    """Weights that a step reads: all but the experts that no token uses (at most `batch` times top-k of them)."""
    total = 0
    for name, buffer in model.named_buffers():
        share = 1.0
        if ".experts." in name:
            share = min(1.0, batch * model.config.top_k / model.config.experts)
        if not name.startswith("embed.") and not name.endswith(("cos", "sin", "table")):
            total += int(buffer.numel() * buffer.element_size() * share)
    return total


def step_ms(engine: PlacedEngine, batch: int, context: int, steps: int) -> float:
    """Median milliseconds of a decode step at `context`, replays queued one behind the other."""
    pipeline = engine.runner("decode")
    per_row = engine._cache.block_table.shape[1]
    rows = {
        "positions": torch.full((batch,), context, dtype=torch.int32),
        "limits": torch.full((batch,), context + 4096, dtype=torch.int32),
        "table": torch.arange(1, 1 + batch * per_row, dtype=torch.int32).view(batch, per_row),
        "slots": torch.arange(1, 1 + batch, dtype=torch.int32),
        "temperature": torch.zeros(batch), "top_k": torch.zeros(batch, dtype=torch.int32), "top_p": torch.ones(batch),
        "seed": torch.zeros(batch, dtype=torch.int64),
    }  # fmt: skip
    times = []
    with engine._pool.running() if engine._pool else torch.no_grad():
        _, bucket = pipeline.load(drawn=torch.arange(batch), **rows)
        for _ in range(4):
            for device in engine._devices:
                torch.cuda.synchronize(device)
            begin = time.perf_counter()
            for _ in range(steps):
                pipeline.replay(bucket)
            for device in engine._devices:
                torch.cuda.synchronize(device)
            times.append((time.perf_counter() - begin) / steps * 1e3)
    return statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("flash", "pro"), default="flash")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--eager-steps", type=int, default=2, help="0: captured only")
    args = parser.parse_args()
    wanted = {"model_type": "deepseek_v4", "rope_scaling": YARN, **(FLASH if args.model == "flash" else PRO)}
    config = DeepseekV4Config.from_dict({**wanted, "num_hidden_layers": args.layers or wanted["num_hidden_layers"]})
    devices = [torch.device("cuda", i) for i in range(args.gpus)]
    reach = args.context + 4352
    began = time.perf_counter()
    model = DeepseekV4.assemble(RandomWeights(config, torch.bfloat16), devices, reach)
    print(f"made in {time.perf_counter() - began:.1f} s, layers {[len(s) for s in model.stages]}", file=sys.stderr)
    placed._buckets = lambda largest: [largest]  # type: ignore[assignment]  # no other is timed
    for batch in args.batch:
        row = {
            "bench": "deepseek", "model": args.model, "layers": config.layers, "gpus": args.gpus, "batch": batch,
            "context": args.context, "command": " ".join(["python", "benchmarks/deepseek.py", *sys.argv[1:]]),
        }  # fmt: skip
        for capture in (True, False) if args.eager_steps else (True,):
            engine = PlacedEngine(model, max_batch=batch, max_context=reach, chunk=16, capture=capture)
            began = time.perf_counter()
            steps = args.steps if capture else args.eager_steps
            ms = step_ms(engine, batch, args.context, steps)
            row["captured_ms" if capture else "eager_ms"] = round(ms, 3)
            print(f"{batch} {capture}: {ms:.3f} ms, {time.perf_counter() - began:.1f} s in all", file=sys.stderr)
            del engine
        roof = active_bytes(model, batch) / copy_bandwidth(devices[0]) * 1e3
        row |= {"active_gb": round(active_bytes(model, batch) / 1e9, 3), "floor_ms": round(roof, 3)}
        print(json.dumps(row | machine(devices[0])), flush=True)


if __name__ == "__main__":
    main()
