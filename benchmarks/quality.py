"""Quality of quantized SmolLM2 on text that calibration never saw, beside round-to-nearest on the same text.

    python benchmarks/unrelated.py TEXTS --model SmolLM2-135M-Instruct.Q4_1.gguf
    python benchmarks/quality.py --model SmolLM2-135M-Instruct.Q4_1.gguf --texts TEXTS --device cuda \
        --run good@4 good@3 good@2 --out quality.jsonl

Each line of the output is one run on one evaluation text: KL divergence to the unquantized model (nats a token), top-1
agreement, perplexity, the bits that are stored, seconds, GPU memory, the recipe, and where it ran. A last line has the
mean of all texts, the figure of a recipe. `--run NAME` picks some; `--set` changes a lever. `--calibration` and
`--evaluation` name files of TEXTS; benchmarks/texts.py makes others.
"""

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onegraph.api.budget import Budget, Layers
from onegraph.api.calibration import Source, draw, sources
from onegraph.api.choices import TOKENS
from onegraph.api.outline import outline
from onegraph.api.provenance import digest_of
from onegraph.api.quantize import BEHIND, sample_text
from onegraph.api.tokenizer import Tokenizer
from onegraph.engine.record import machine, with_id
from onegraph.formats.checkpoint import Checkpoint
from onegraph.models.source import LlamaSource
from onegraph.quant.calibrate import packed_tokens, pieces
from onegraph.quant.layer import dequantize
from onegraph.quant.quantize import quantize
from onegraph.quant.recipe import Recipe, Tune
from onegraph.quant.result import Quantized
from onegraph.quant.resumable import ResumableWork
from onegraph.quant.sensitivity import Costs, base_rate, measure, quick

# The ladder: each rung has the levers of the one before and one more.
PLAIN: dict[str, Any] = {
    "descent": 0, "wide": False, "channel_scale": 0.0, "row_scale": 0.0, "fit_scales": False, "inputs": "reference",
    "correct": 0.0,
}  # fmt: skip
LADDER: list[tuple[str, dict[str, Any]]] = [
    ("ldlq", PLAIN),
    ("+descent", {"descent": 2}),
    ("+scales", {"channel_scale": 0.5, "row_scale": 0.75}),
    ("+fit", {"fit_scales": True}),
    ("+block", {"inputs": "block"}),
    ("+group", {"inputs": "group"}),
    ("+correct", {"correct": 0.5}),
    ("+wide", {"wide": True}),
    ("+fisher", {"fisher": 2, "fisher_outputs": True}),  # the recipe "good"
    ("+tune", {"tune": Tune()}),  # the recipe "best"
]

KINDS = "prose.txt", "code.txt", "chat.jsonl", "languages.txt"  # of benchmarks/unrelated.py


class Evaluation:
    """The unquantized model's predictions on the evaluation text, and how far another model's are from them."""

    def __init__(self, model: LlamaSource, tokens: Tensor) -> None:
        self.model, self.tokens = model, tokens
        hidden = self.through(lambda i: model.load_block(i))
        self.reference = torch.cat(hidden)
        self.reference_ppl = self.compare(hidden)["perplexity"]

    @torch.no_grad()
    def through(self, load: Any) -> list[Tensor]:
        stream = [self.model.embed(part) for part in self.tokens.split(8)]
        for i in range(self.model.num_blocks):
            block = load(i)
            stream = [self.model.run_block(block, part) for part in stream]
        return stream

    @torch.no_grad()
    def compare(self, stream: list[Tensor]) -> dict[str, float]:
        kl = agree = nll = 0.0
        count = predicted = 0
        hidden = torch.cat(stream)
        for row in range(hidden.shape[0]):
            want = self.model.head(self.reference[row]).float().log_softmax(-1)
            got = self.model.head(hidden[row]).float().log_softmax(-1)
            labels = self.tokens[row, 1:].to(got.device)
            kl += (want.exp() * (want - got)).sum().item()
            agree += (want.argmax(-1) == got.argmax(-1)).sum().item()
            nll -= got[:-1].gather(1, labels.unsqueeze(1)).sum().item()
            count += want.shape[0]
            predicted += labels.numel()
        ppl = float(torch.tensor(nll / predicted, dtype=torch.float64).exp())
        return {"kl": kl / count, "top1": agree / count, "perplexity": ppl}

    def of(self, weight: Any) -> dict[str, float]:
        """With weight(name, dense) in place of each linear's."""

        def load(i: int) -> Any:
            block = self.model.load_block(i)
            for group in self.model.linear_groups(block):
                for name, module in group:
                    module.weight.copy_(weight(self.model.block_prefix(i) + name, module.weight))
            return block

        return self.compare(self.through(load))


def shared(kinds: list[Source], shares: dict[str, float]) -> list[Source]:
    """The corpus with these shares of its tokens; the other kinds divide the rest as before."""
    if unknown := set(shares) - {kind.name for kind in kinds}:
        raise SystemExit(f"--shares: the corpus has no {', '.join(sorted(unknown))}")
    rest = sum(kind.weight for kind in kinds if kind.name not in shares)
    left = 1 - sum(shares.values())
    return [replace(kind, weight=shares.get(kind.name, kind.weight / rest * left)) for kind in kinds]


def spread(rows: Tensor, tokens: int) -> Tensor:
    """About so many tokens in rows from all over a text."""
    count = min(len(rows), max(1, tokens // rows.shape[1]))
    return rows[[i * len(rows) // count for i in range(count)]]


def round_to_nearest(w: Tensor, bits: int, group: int = 64) -> Tensor:
    """Asymmetric integers, one float16 scale and one zero point a group of inputs: bits + 32 / group a weight."""
    x = w.float().reshape(-1, group)
    low, high = x.amin(1, keepdim=True), x.amax(1, keepdim=True)
    scale = ((high - low) / (2**bits - 1)).clamp_min(1e-8).half().float()
    zero = (-low / scale).round()
    return (((x / scale).round() + zero).clamp(0, 2**bits - 1) - zero).mul(scale).view_as(w)


def weight_of(made: Quantized) -> Any:
    def weight(name: str, dense: Tensor) -> Tensor:
        if name not in made.layers:
            return dense
        tensors = {k: v.to(dense.device) for k, v in made.layers[name].items()}
        return dequantize(tensors, made.config.bits_of(name), made.config.format)

    return weight


def bits_per_weight(model: LlamaSource, made: Quantized) -> float:
    stored = weights = 0
    for name, tensors in made.layers.items():
        n, k = len(tensors["out_scale"]), len(tensors["in_scale"])
        stored += made.config.format_of(name).bits(n, k)
        weights += n * k
    return stored / weights


def levers(text: str) -> dict[str, Any]:
    """Fields of a recipe from JSON."""
    found = json.loads(text)
    if found.get("tune"):
        found["tune"] = Tune(**found["tune"])
    if "rho" in found:
        found["rho"] = {int(bits): rho for bits, rho in found["rho"].items()}
    return found


def runs(wanted: list[str], changes: dict[str, Any]) -> list[tuple[str, Recipe]]:
    """NAME is a preset or a rung of the ladder, with @BITS: "+descent@3", "good@4", "ladder@2", "ladder"; of a preset
    "best@2.5" too, for rates that are chosen by what layers cost. Levers may follow: 'best@2:{"fisher": 4}'."""
    found = []
    for name in wanted:
        plain, _, more = name.partition(":")
        own = changes | levers(more or "{}")
        found += [(f"{run}{more and ':'}{more}", recipe) for run, recipe in rungs(plain, own)]
    return found


def rungs(name: str, changes: dict[str, Any]) -> list[tuple[str, Recipe]]:
    """Of one name of `runs`, without levers of its own."""
    found = []
    rung, _, rate = name.partition("@")
    for bits in [float(rate)] if rate else [4, 3, 2]:
        if bits != int(bits):
            found.append((f"{rung}@{rate}", Recipe.preset(rung, bits=int(bits), **changes)))
            continue
        bits, own = int(bits), dict[str, Any]()
        names = [rung_name for rung_name, _ in LADDER]
        for key, change in LADDER:
            own = own | change
            if rung in ("ladder", key):
                found.append((f"{key}@{bits}", Recipe(bits=bits, **(own | changes))))
        if rung not in ("ladder", *names):
            found.append((f"{rung}@{bits}", Recipe.preset(rung, bits=bits, **changes)))
    return found


class Chooser:
    """Rates for an average, by what each layer costs on the calibration text."""

    def __init__(
        self, checkpoint: Checkpoint, model: LlamaSource, calibration: Tensor, probed: int, per_linear: bool
    ) -> None:
        self.checkpoint, self.model, self.calibration, self.probed = checkpoint, model, calibration, probed
        self.per_linear = per_linear
        self.costs: dict[int, Costs] = {}  # by the rate that they are measured at

    def recipe(self, recipe: Recipe, bits: float) -> Recipe:
        layers = Layers.of(outline(self.checkpoint), self.checkpoint, Budget(format=recipe.format, bits=bits), {}, {})
        base = base_rate(bits, recipe.format)
        if base not in self.costs:
            begun = time.time()
            rows = self.probed // self.calibration.shape[1]
            more = {"probed": rows, "per_linear": self.per_linear}
            self.costs[base] = measure(self.model, self.calibration, quick(recipe, base), layers.free, **more)
            print(
                f"costs of {len(self.costs[base])} parts on {self.probed} tokens: {time.time() - begun:.1f} s",
                flush=True,
            )
        found = layers.choose(self.costs[base], 0)
        print(*found.lines, sep="\n")
        return replace(recipe, bits=layers.common(found.rates), layers=found.rates)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument(
        "--texts", type=Path, required=True, help="directory made by benchmarks/unrelated.py or texts.py"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, help="for calibration; the default is that of the first run's recipe")
    parser.add_argument("--calibration", default="bundled", help="its name in TEXTS, or bundled")
    parser.add_argument("--shares", default="{}", help="JSON of shares of the corpus's kinds to change")
    parser.add_argument("--extend", action="store_true", help="the model goes on with it up to --tokens")
    parser.add_argument("--evaluation", nargs="+", default=list(KINDS), help="names in TEXTS")
    parser.add_argument("--eval-tokens", type=int, default=8192, help="of each text")
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence")
    parser.add_argument(
        "--run", nargs="*", default=["ladder"], help="presets or rungs, e.g. good@4 +descent@3 ladder@2"
    )
    parser.add_argument("--set", default="{}", help="JSON of recipe fields to change in every run")
    parser.add_argument("--probed", type=int, default=4096, help="tokens that costs of layers are measured on")
    parser.add_argument("--per-linear", action="store_true", help="with chosen rates: each linear has its own")
    parser.add_argument("--reuse", action="store_true", help="later runs read Hessians that the first one gathered")
    parser.add_argument("--no-rtn", action="store_true", help="leave round-to-nearest out, the yardstick of ratios")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which no further run is begun")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    begun = time.time()
    wanted = runs(args.run, levers(args.set))
    shares = json.loads(args.shares)
    args.tokens = args.tokens or TOKENS.get(wanted[0][0].partition("@")[0], 32768)

    checkpoint = Checkpoint.open(args.model)
    tokenizer = Tokenizer(checkpoint)
    model = LlamaSource(checkpoint, args.device, torch.float32)

    def rows(name: str, limit: int, extend: bool = False) -> Tensor:
        given = sources(name if name == "bundled" else args.texts / name)
        ids = draw(tokenizer, shared(given, shares) if name == "bundled" else given, limit).ids
        packed = packed_tokens(ids, length=args.length, limit=limit)
        count = (limit - packed.numel()) // args.length if extend else 0
        if not count:
            return packed
        starts = pieces(ids, length=args.length // BEHIND, count=count)
        device, quiet = torch.device(args.device), lambda what, done, total: None
        return torch.cat((packed, sample_text(checkpoint, tokenizer, device, starts, args.length, 0, quiet)))

    asked = time.time()
    calibration = rows(args.calibration, args.tokens, args.extend)
    print(f"{calibration.numel()} calibration tokens in {time.time() - asked:.1f} s", flush=True)
    evaluations = {name: Evaluation(model, spread(rows(name, 1 << 20), args.eval_tokens)) for name in args.evaluation}
    cuda = torch.device(args.device).type == "cuda"
    named = args.calibration + ", extended" * args.extend
    where = {**machine(args.device), "calibration": named, "calibration_tokens": calibration.numel()}
    where |= {"shares": shares} if shares else {}
    baseline: dict[str, float] = {}

    def report(name: str, weight: Any, about: dict[str, Any]) -> None:
        """A line for each evaluation text, and for their mean; the first run of all is the yardstick."""
        each: list[dict[str, float]] = []
        for text, evaluation in evaluations.items():
            found = evaluation.of(weight)
            each.append(found)
            more = {"reference_perplexity": evaluation.reference_ppl, "evaluation_tokens": evaluation.tokens.numel()}
            line(name, text, found, about, more | {"evaluation_sha256": digest_of(evaluation.tokens)[:16]})
        if len(each) > 1:
            mean = {key: sum(found[key] for found in each) / len(each) for key in ("kl", "top1")}
            kls = {text: found["kl"] for text, found in zip(evaluations, each, strict=True)}
            line(name, "mean", mean, about, {"kl_by_text": kls})

    def line(name: str, text: str, found: dict[str, float], about: dict[str, Any], more: dict[str, Any]) -> None:
        ratio = found["kl"] / baseline.setdefault(text, found["kl"])
        told = {"bench": "quality", "run": name, "text": text, **found, "kl_over_rtn4": ratio, **about, **where, **more}
        if args.out:
            with args.out.open("a") as stream:
                stream.write(json.dumps(with_id(told)) + "\n")
        print(
            f"{name:14} {about['bpw']:.3f} bits  {text}: KL {found['kl']:.4f} ({ratio:.3f})  "
            f"top-1 {found['top1']:.4f}  {about['seconds']:.1f} s, {about.get('cpu_seconds', 0):.1f} s of CPU",
            flush=True,
        )

    for bits in () if args.no_rtn else (4, 3, 2):
        about = {"bpw": bits + 0.5, "seconds": 0.0}
        report(f"rtn@{bits}", lambda name, w, b=bits: round_to_nearest(w, b), about)
    scratch = tempfile.mkdtemp(prefix="onegraph-quality-")
    # Without --reuse each run gathers its own inputs, so that its time counts that
    partial = ResumableWork(scratch, args.model, keep_inputs=args.reuse)
    chooser = Chooser(checkpoint, model, calibration, args.probed, args.per_linear)
    for name, recipe in wanted:
        if time.time() - begun > args.limit:
            print(f"{name}: not begun, {args.limit:.0f} s are over")
            continue
        bits = float(name.partition(":")[0].rpartition("@")[2])
        if args.per_linear or bits != int(bits):
            recipe = chooser.recipe(recipe, bits)
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        start, cpu = time.time(), time.process_time()
        # Tuning starts from the blocks that the rung before it left, so its time is what it adds.
        made = quantize(model, calibration, recipe, partial)
        if cuda:
            torch.cuda.synchronize()
        about = {"bpw": bits_per_weight(model, made), "seconds": time.time() - start, "recipe": recipe.to_dict()}
        about["cpu_seconds"] = round(time.process_time() - cpu, 1)
        if cuda:
            about["gpu_memory_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        report(name, weight_of(made), about)
    partial.remove()


if __name__ == "__main__":
    main()
