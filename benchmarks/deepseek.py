"""The decode step of DeepSeek-V4 with random weights of the true shapes, captured and eager, over some GPUs.

    python benchmarks/deepseek.py --model flash --gpus 2 --context 8192 --batch 1 16 --profile --soak 1000
    python benchmarks/deepseek.py --model flash --gpus 2 --split-mode tensor --batch 1 16 --eager-steps 0

`--form` says how the weights are stored: as DeepSeek publishes them (FP8 in blocks of 128, experts in MXFP4), as NVIDIA
does (routed experts in NVFP4, the rest DeepSeek's), or all of them in NVFP4.

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
import zlib
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from kernels import copy_bandwidth
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from onegraph.engine import steps as engine_steps
from onegraph.engine.engine import Engine
from onegraph.engine.record import emit, machine
from onegraph.formats.checkpoint import Checkpoint
from onegraph.formats.dense import DENSE
from onegraph.formats.fp8 import FP8
from onegraph.formats.mxfp4 import MXFP4
from onegraph.formats.nvfp4 import NVFP4
from onegraph.formats.weight import WHOLE, Part, Tensors, WeightFormat
from onegraph.models.deepseek_v4 import DeepseekV4
from onegraph.models.deepseek_v4_config import DeepseekV4Config
from onegraph.models.loader import Loader
from onegraph.models.ranks import Ranks, peers_for
from onegraph.nn.experts import Experts

YARN = {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1}
FLASH = {"compress_ratios": [0, 0, *[4, 128] * 20, 4, 0], "num_hidden_layers": 43}
PRO = {
    "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128, "q_lora_rank": 1536, "o_groups": 16,
    "n_routed_experts": 384, "moe_intermediate_size": 3072, "routed_scaling_factor": 2.5, "index_topk": 1024,
    "compress_ratios": [128, 128, *[4, 128] * 29, 4],
}  # fmt: skip


FORMS: dict[str, tuple[WeightFormat, WeightFormat]] = {  # of routed experts, of every other linear
    "nvfp4": (NVFP4, NVFP4), "deepseek": (MXFP4, FP8[128, 128]), "nvidia": (NVFP4, FP8[128, 128]),
}  # fmt: skip


class RandomLoader(Loader):
    """Weights that no checkpoint holds: in codes where a checkpoint has them, bfloat16 elsewhere."""

    def __init__(self, config: DeepseekV4Config, dtype: torch.dtype, form: str) -> None:
        super().__init__(Checkpoint(Path("random"), {}, {}), config, dtype)
        self.experts_held, self.form = config.experts, FORMS[form]

    def format_of(self, layer: str) -> WeightFormat:
        if layer in (self.parts.head, self.parts.embedding[0]):
            return DENSE
        return self.form[".ffn.experts." not in layer]

    def device_bytes(self) -> dict[str, int]:
        found = {name: 2 * torch.Size(shape).numel() for name, (shape, _) in self.parts.tensors.items()}
        return found | {layer: self.format_of(layer).bits(n, k) // 8 for layer, (n, k, _) in self.layers().items()}

    def tensor(self, name: str, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
        shape, kinds = self.parts.tensors[name]
        generator = _of_name(name, device)
        if not kinds[0].is_floating_point:
            order = torch.rand(shape[0], self.experts_held, device=device, generator=generator).argsort(1)
            return order[:, : shape[1]].to(torch.int32)
        value = torch.randn(shape, device=device, dtype=torch.float32, generator=generator)
        if name.endswith("norm.weight"):
            value = 1 + 0.1 * value
        elif len(shape) == 2:
            value = value * shape[1] ** -0.5
        return value.to(dtype or self.dtype)

    def weight(self, layer: str, device: torch.device, part: Part = WHOLE) -> tuple[WeightFormat, Tensors]:
        """Made up by the format itself."""
        name, size = self.parts.embedding
        (n, k), format = size if layer == name else self.parts.linears[layer][:2], self.format_of(layer)
        n, k = (whole if span is None else span[1] - span[0] for whole, span in ((n, part.rows), (k, part.columns)))
        made = {
            key: torch.empty(field.shape(n, k), dtype=field.dtype or self.dtype, device=device)
            for key, field in format.fields.items()
        }
        format.fill(made, k, _of_name(f"{layer} {part}", device))
        return format, made


def _of_name(name: str, device: torch.device) -> torch.Generator:
    """The same numbers on every rank that has all of a tensor."""
    return torch.Generator(device).manual_seed(zlib.crc32(name.encode()))


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

    def __init__(self, engine: Engine, batch: int, context: int) -> None:
        with mock.patch.object(engine_steps, "batch_sizes", lambda largest: [largest]):  # no other is timed
            self.engine, self.pipeline = engine, engine.executor.step("decode")
        for rank in engine.executor.ranks:
            for tensor in rank.cache.tensors():
                tensor.normal_()
        per_row = engine.executor.cache.parts[0].block_table.shape[1]
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
        return self.engine.executor.running()

    def times(self, steps: int) -> None:
        """So many steps, queued one behind the other, to their end."""
        for _ in range(steps):
            self.pipeline.replay(self.bucket)
        for device in self.engine.executor.devices:
            torch.cuda.synchronize(device)
        self.engine.executor.check()

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

    run = Experts.forward

    def watched(experts: Experts, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        met.append(int((chosen.unique() < routed).sum()))
        return run(experts, x, chosen, weights)

    with mock.patch.object(Experts, "forward", watched):
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
    """`tools soak` of this model in rounds of 256 steps."""
    sys.path.append(str(Path(__file__).parent.parent))
    from tools.rounds import Round, soak

    def make(tested: bool) -> Engine:
        return Engine(model, max_batch=1, max_context=272, chunk=16, capture=tested)

    began = time.perf_counter()

    def tell(this: Round, done: int) -> None:
        say(soak_round=asdict(this), done=done, seconds=round(time.perf_counter() - began, 1))

    with tempfile.TemporaryDirectory() as folder:
        verdict = soak(make, steps=steps, path=Path(folder) / "rounds.jsonl", batch=1, on_round=tell)
    say(soak=asdict(verdict), passed=verdict.passed, seconds=round(time.perf_counter() - began, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("flash", "pro"), default="flash")
    parser.add_argument("--form", choices=FORMS, default="nvfp4")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--split-mode", choices=("layer", "tensor"), default="layer", help="as `onegraph generate`")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--hash-layers", type=int, default=3)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--batch", type=int, nargs="*", default=[1])
    parser.add_argument("--steps", type=int, default=50, help="0: eager only")
    parser.add_argument("--eager-steps", type=int, default=2, help="0: captured only")
    parser.add_argument("--profile", action="store_true", help="by kernel")
    parser.add_argument("--soak", type=int, default=0, metavar="STEPS")
    args = parser.parse_args()
    if args.soak and args.split_mode == "tensor":
        parser.error("--soak looks into one device's state; it takes --split-mode layer")
    wanted = {"model_type": "deepseek_v4", "rope_scaling": YARN, **(FLASH if args.model == "flash" else PRO)}
    layers = {"num_hidden_layers": args.layers or wanted["num_hidden_layers"], "num_hash_layers": args.hash_layers}
    config = DeepseekV4Config.from_dict({**wanted, **layers})
    devices = [torch.device("cuda", i) for i in range(args.gpus)]
    reach = args.context + 4352
    began = time.perf_counter()
    model: Any = None
    if args.split_mode == "layer":
        model = DeepseekV4.assemble(RandomLoader(config, torch.bfloat16, args.form), config, devices, reach)
    else:
        peers = peers_for(config, devices, torch.bfloat16)
        beside = [
            DeepseekV4.assemble(RandomLoader(config, torch.bfloat16, args.form), config, [device], reach, peers.rank(i))
            for i, device in enumerate(devices)
        ]
        model = Ranks(beside, peers)
    first = model.ranks[0]  # of ranks, which read at the same time, each reads as much
    bandwidth = copy_bandwidth(devices[0])
    about = {
        "bench": "deepseek", "model": args.model, "form": args.form, "layers": config.layers, "gpus": args.gpus,
        "split": args.split_mode, "context": args.context, **machine(devices[0]),
    }  # fmt: skip

    def note(text: str) -> None:
        print(f"{time.perf_counter() - began:6.1f} s: {text}", file=sys.stderr, flush=True)

    def say(**row: Any) -> None:
        emit(row | about)

    note(f"made, layers {[len(s) for s in first.stages]}, {bandwidth / 1e12:.2f} TB/s")
    for batch in args.batch:
        floor = {"active_gb": round(active_bytes(first, batch) / 1e9, 3)}
        floor["floor_ms"] = round(active_bytes(first, batch) / bandwidth * 1e3, 3)
        for mode, steps in (("captured", args.steps), ("eager", args.eager_steps)):
            if not steps:
                continue
            engine = Engine(model, max_batch=batch, max_context=reach, chunk=16, capture=mode == "captured")
            step = Decode(engine, batch, args.context)
            note(f"batch {batch} {mode}: ready")
            say(batch=batch, mode=mode, ms=round(step.milliseconds(steps), 3), **floor)
            if mode == "eager":
                with step.running():
                    met = experts_met(step)
                read = active_bytes(first, batch, met)
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
