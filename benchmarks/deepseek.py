"""The decode step of DeepSeek-V4 with random NVFP4 weights of the true shapes, captured and eager, over some GPUs.

    python benchmarks/deepseek.py --model flash --gpus 2 --context 8192 --batch 1 16 --profile --soak 1000

Weights and state are made on the devices; `--layers N` takes only the first N layers, for a machine that is too small
for all. Random routers send different tokens to much the same experts; with `--hash-layers N` the first N layers route
by a random table instead, evenly. Prints a JSON line as soon as it is measured: each batch captured, where its time
goes (`--profile`), each batch eagerly with the experts that its layers met, a soak's verdict (`--soak STEPS`).
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from onegraph.engine import placed
from onegraph.engine.bench import copy_bandwidth, machine
from onegraph.engine.placed import PlacedEngine
from onegraph.engine.soak import Round, soak
from onegraph.formats.checkpoint import Checkpoint
from onegraph.formats.nvfp4 import GROUP
from onegraph.models.deepseek_v4 import DeepseekV4
from onegraph.models.deepseek_v4_config import DeepseekV4Config
from onegraph.models.deepseek_v4_weights import DeepseekWeights, may_be_packed
from onegraph.nn import nvfp4
from onegraph.nn.nvfp4 import NVFP4Experts, NVFP4GroupedLinear, NVFP4Linear
from onegraph.ops.nvfp4_linear import nvfp4_experts

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
        super().__init__(Checkpoint(Path("random"), {}, {}), config, dtype)
        self.shapes = self.expected()

    def sizes(self) -> tuple[list[int], tuple[int, int]]:
        layers, ends = [0] * self.config.layers, [0, 0]
        for name, (shape, _) in self.shapes.items():
            count = torch.Size(shape).numel()
            nbytes = count * 9 // 16 if may_be_packed(name) else 2 * count
            where = name.split(".")
            if where[0] == "layers":
                layers[int(where[1])] += nbytes
            else:
                ends[0 if where[0] == "embed" else 1] += nbytes
        return layers, (ends[0], ends[1])

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

    def linear(self, shapes: Mapping[str, tuple[int, int]], device: torch.device) -> nn.Module:
        k = next(iter(shapes.values()))[1]
        made = self.codes(sum(n for n, _ in shapes.values()), k, device=device)
        return NVFP4Linear(codes=made["codes"], scale=made["scale"], global_scale=made["global_scale"])

    def grouped(self, name: str, groups: int, n: int, k: int, device: torch.device) -> nn.Module:
        return NVFP4GroupedLinear(**self.codes(groups, n, k, device=device))

    def experts(self, prefix: str, device: torch.device) -> nn.Module:
        c = self.config
        up = self.codes(c.experts + 1, 2 * c.expert_size, c.hidden_size, device=device)  # and the shared one
        down = self.codes(c.experts + 1, c.hidden_size, c.expert_size, device=device)
        return NVFP4Experts(
            gate_up=up["codes"], gate_up_scale=up["scale"], gate_up_global=up["global_scale"],
            down=down["codes"], down_scale=down["scale"], down_global=down["global_scale"], limit=c.limit,
        )  # fmt: skip


def active_bytes(model: DeepseekV4, batch: int, met: float | None = None) -> int:
    """Weights that a step reads, with `met` experts a layer or as many as `batch` tokens choose independently."""
    total, held = 0, model.config.experts
    for name, buffer in model.named_buffers():
        share = 1.0
        if ".experts." in name:
            share = 1 - (1 - model.config.top_k / held) ** batch if met is None else met / held
        if not name.startswith("embed.") and not name.endswith(("cos", "sin", "table")):
            total += int(buffer.numel() * buffer.element_size() * share)
    return total


class Decode:
    """The decode step of `batch` rows that stand at `context`, over state of random content."""

    def __init__(self, engine: PlacedEngine, batch: int, context: int) -> None:
        with mock.patch.object(placed, "_buckets", lambda largest: [largest]):  # no other is timed
            self.engine, self.pipeline = engine, engine.runner("decode")
        for tensor in engine._cache.tensors():
            tensor.normal_()
        per_row = engine._cache.block_table.shape[1]
        zeros = torch.zeros(batch, dtype=torch.int32)
        rows = {
            "positions": zeros + context,
            "limits": zeros + context + 4096,
            "table": torch.arange(1, 1 + batch * per_row, dtype=torch.int32).view(batch, per_row),
            "slots": torch.arange(1, 1 + batch, dtype=torch.int32),
            "temperature": torch.zeros(batch), "top_k": zeros, "top_p": torch.ones(batch), "seed": zeros.long(),
        }  # fmt: skip
        with self.running():
            _, self.bucket = self.pipeline.load(drawn=torch.arange(batch), **rows)

    def running(self) -> Any:
        return self.engine._pool.running() if self.engine._pool else torch.no_grad()

    def times(self, steps: int) -> None:
        """So many steps, queued one behind the other, to their end."""
        for _ in range(steps):
            self.pipeline.replay(self.bucket)
        for device in self.engine._devices:
            torch.cuda.synchronize(device)

    def milliseconds(self, steps: int) -> float:
        """Median of a step."""
        found = []
        with self.running():
            for _ in range(4):
                self.times(1)  # the devices are awake and the host is not ahead
                begin = time.perf_counter()
                self.times(steps)
                found.append((time.perf_counter() - begin) / steps * 1e3)
        return statistics.median(found[1:])


def experts_met(step: Decode) -> float:
    """Routed experts that a layer's tokens choose in an eager step, the mean of the layers."""
    met: list[int] = []
    routed = step.engine.model.config.experts

    def watched(x: Tensor, chosen: Tensor, *rest: Any) -> Tensor:
        met.append(int((chosen.unique() < routed).sum()))
        return nvfp4_experts(x, chosen, *rest)

    with mock.patch.object(nvfp4, "nvfp4_experts", watched):
        step.times(1)
    return statistics.mean(met)


def charges(step: Decode, replays: int = 6) -> dict[str, Any]:
    """Where a replay's time goes, by kernel and grid.

    Launches of a device overlap where they are programmatic, so each is charged from the end of the one before it to
    its own end; the first one of a replay, which waits for the other device, for what it took itself.
    """
    with step.running(), profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(replays):
            step.times(1)
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        trace.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    devices: dict[int, list[Any]] = defaultdict(list)
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            devices[event["args"].get("device", 0)].append(event)
    spent: dict[tuple[str, str], list[float]] = defaultdict(list)
    launches = {}
    for device, each in devices.items():
        each.sort(key=lambda event: event["ts"] + event.get("dur", 0))
        count = launches[device] = len(each) // replays
        ends = [event["ts"] + event.get("dur", 0) for event in each]
        for i, event in enumerate(each):
            grid = "x".join(map(str, event["args"].get("grid", ())))
            first = i % count == 0 and len(each) == count * replays
            took = event.get("dur", 0)
            own = took if i == 0 or first else min(ends[i] - ends[i - 1], took + 5.0)
            spent[event["name"][:56], grid].append(own)
    rows: list[dict[str, Any]] = [
        {
            "kernel": name,
            "grid": grid,
            "launches": round(len(us) / replays, 2),
            "us": round(statistics.median(us), 2),
            "total_us": round(sum(us) / replays, 1),
        }
        for (name, grid), us in spent.items()
    ]
    rows.sort(key=lambda row: -row["total_us"])
    return {"launches": launches, "step_us": round(sum(r["total_us"] for r in rows), 1), "kernels": rows}


def watch(model: DeepseekV4, steps: int, say: Callable[..., None]) -> None:
    """`onegraph soak` of this model in rounds of 256 steps."""

    def make(tested: bool) -> PlacedEngine:
        return PlacedEngine(model, max_batch=1, max_context=272, chunk=16, capture=tested)

    began = time.perf_counter()

    def tell(this: Round, done: int) -> None:
        say(soak_round=asdict(this), done=done, seconds=round(time.perf_counter() - began, 1))

    with tempfile.TemporaryDirectory() as folder:
        verdict = soak(make, steps=steps, path=Path(folder) / "rounds.jsonl", batch=1, on_round=tell)
    say(soak=asdict(verdict), passed=verdict.passed, seconds=round(time.perf_counter() - began, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("flash", "pro"), default="flash")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--hash-layers", type=int, default=3)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--batch", type=int, nargs="*", default=[1])
    parser.add_argument("--steps", type=int, default=50, help="0: eager only")
    parser.add_argument("--eager-steps", type=int, default=2, help="0: captured only")
    parser.add_argument("--profile", action="store_true", help="by kernel")
    parser.add_argument("--soak", type=int, default=0, metavar="STEPS")
    args = parser.parse_args()
    wanted = {"model_type": "deepseek_v4", "rope_scaling": YARN, **(FLASH if args.model == "flash" else PRO)}
    layers = {"num_hidden_layers": args.layers or wanted["num_hidden_layers"], "num_hash_layers": args.hash_layers}
    config = DeepseekV4Config.from_dict({**wanted, **layers})
    devices = [torch.device("cuda", i) for i in range(args.gpus)]
    reach = args.context + 4352
    began = time.perf_counter()
    model = DeepseekV4.assemble(RandomWeights(config, torch.bfloat16), devices, reach)
    bandwidth = copy_bandwidth(devices[0])
    about = {
        "bench": "deepseek", "model": args.model, "layers": config.layers, "gpus": args.gpus, "context": args.context,
        "command": " ".join(["python", "benchmarks/deepseek.py", *sys.argv[1:]]), **machine(devices[0]),
    }  # fmt: skip

    def note(text: str) -> None:
        print(f"{time.perf_counter() - began:6.1f} s: {text}", file=sys.stderr, flush=True)

    def say(**row: Any) -> None:
        print(json.dumps(row | about), flush=True)

    note(f"made, layers {[len(s) for s in model.stages]}, {bandwidth / 1e12:.2f} TB/s")
    for batch in args.batch:
        floor = {"active_gb": round(active_bytes(model, batch) / 1e9, 3)}
        floor["floor_ms"] = round(active_bytes(model, batch) / bandwidth * 1e3, 3)
        for mode, steps in (("captured", args.steps), ("eager", args.eager_steps)):
            if not steps:
                continue
            engine = PlacedEngine(model, max_batch=batch, max_context=reach, chunk=16, capture=mode == "captured")
            step = Decode(engine, batch, args.context)
            note(f"batch {batch} {mode}: ready")
            say(batch=batch, mode=mode, ms=round(step.milliseconds(steps), 3), **floor)
            if mode == "eager":
                with step.running():
                    met = experts_met(step)
                read = active_bytes(model, batch, met)
                say(batch=batch, experts_met=round(met, 1), read_ms=round(read / bandwidth * 1e3, 3), **floor)
            if mode == "captured" and args.profile:
                say(batch=batch, profile=charges(step))
            del engine, step
            note(f"batch {batch} {mode}: done")
    if args.soak:
        watch(model, args.soak, say)
        note("soaked")


if __name__ == "__main__":
    main()
