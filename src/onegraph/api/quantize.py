"""A checkpoint made smaller: from a source and a few choices to a directory that appears whole at the end."""

from __future__ import annotations

import gc
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from onegraph.api import Progress
from onegraph.api.auto import settle
from onegraph.api.budget import AVERAGE
from onegraph.api.calibration import Calibration, Source, draw, kind_of, recorded, shortage, sources, told
from onegraph.api.card import Card, license_of
from onegraph.api.choices import TOKENS, Choices, End, choose
from onegraph.api.deprecated import renamed
from onegraph.api.device import pick_dtype
from onegraph.api.hub import locate
from onegraph.api.measured import identity, measured
from onegraph.api.outline import model_of
from onegraph.api.pace import Pace
from onegraph.api.plan import Plan, allotted, build_plan, nvfp4_config, rounded_layers
from onegraph.api.provenance import digest_of, source_of, versions
from onegraph.api.resources import check_resources, existing, refuse_existing
from onegraph.api.size import Size
from onegraph.api.tokenizer import Tokenizer
from onegraph.engine.arguments import require_callable, require_path
from onegraph.engine.engine import Engine
from onegraph.engine.params import SamplingParams
from onegraph.formats.checkpoint import CARD, Checkpoint, unfinished, write_checkpoint
from onegraph.formats.quantization import OWN
from onegraph.formats.rotated import resolve_rates
from onegraph.models.llama import Llama
from onegraph.models.load import checkpoint_config
from onegraph.models.loader import Loader
from onegraph.models.wrapper import RenamedCheckpoint, TextCheckpoint, text_checkpoint
from onegraph.quant import nvfp4
from onegraph.quant.activation_offload import ActivationOffload
from onegraph.quant.calibrate import packed_tokens, pieces, sampled_tokens
from onegraph.quant.quantize import quantize as quantize_blocks
from onegraph.quant.recipe import Recipe
from onegraph.quant.resumable import SPILLED, ResumableWork, key_of

BEHIND = 4  # of a row that the model goes on with, one part in so many is from the text (docs/log.md, Quantization)


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """What `quantize` made. `source` is the path, or org/name@commit of the hub; sizes are of the checkpoints on disk;
    `config` is the quantization_config that was written; `recipe`, `seed` and `calibration_tokens` are None for a
    format that is not calibrated. `bits` is the rate, or the average of rates that were chosen; `curve` then the KL
    (nats per token, what layers cost added up) that other averages would have. `left` are the layers that stay as
    they were, and why; `experts` the calibration tokens that chose each expert, by layer."""

    source: str
    output: str
    format: str
    seconds: float
    before: Size
    after: Size
    config: dict[str, Any]
    bits: float
    curve: list[tuple[float, float]] = field(default_factory=list)
    recipe: str | None = None
    seed: int | None = None
    calibration_tokens: int | None = None
    left: Mapping[str, str] = field(default_factory=dict)
    experts: Mapping[str, list[int]] = field(default_factory=dict)


@renamed(source="model", out="output", tokens="num_calibration_tokens", sequence="calibration_seq_len",
         extend="self_generate", activations="activation_memory", remark="on_message")  # fmt: skip
def quantize(
    model: str | PathLike[str],
    output: str | PathLike[str],
    *,
    bits: float | None = None,
    size: int | None = None,
    format: str = "e8p",
    prefer: str | None = None,
    recipe: str | None = None,
    calibration: Calibration = "bundled",
    num_calibration_tokens: int | None = None,
    calibration_seq_len: int = 512,
    self_generate: bool | None = None,
    layers: Mapping[str, int] | None = None,
    lm_head: End = None,
    embed_tokens: End = None,
    experts: int | None = None,
    draft_layers: int | None = None,
    expert_prior: float | None = None,
    per_linear: bool = False,
    seed: int = 0,
    activation_memory: int | None = None,
    device: str | torch.device = "auto",
    progress: Progress | None = None,
    on_message: Callable[[str], None] | None = None,
) -> Quantization:
    """Quantize the checkpoint `model` into the new directory `output`.

    Works block by block: memory holds one block, its calibration activations, and a file of the result (at most 4 GB)
    while that is written. Finished blocks are in `output`.partial: the same call resumes after a crash and ends with
    the same bytes; a corrected one reuses what is still valid. `plan` estimates what it takes.

    Args:
        model: a directory, a .gguf file, or a name on the Hugging Face hub: "org/name" or "org/name@revision".
        bits: a rate of the format (default: 4) for every linear inside the blocks; or a number between: the cost of
            rounding each layer is measured, and each gets a rate, with this average, at the least total cost.
        size: bytes of all tensors that are written, instead of `bits`: rates are chosen likewise, for both ends too.
        format: "e8p" (2, 3 or 4 bits); "trellis" (1 to 8 bits: less error at the same size, slower on a GPU with much
            memory bandwidth); "nvfp4": 4.5 bits per weight, no calibration, also for DeepSeek-V4; or "auto": e8p or
            trellis, by estimates of error and speed.
        prefer: with format "auto": "quality" (default), the least error; "speed", the fastest on this device.
        recipe: "quick" (one pass; default on a CPU), "good" (Hessians of the model's KL, by backward passes; default
            on a GPU), or "best" (tunes scales as well; holds the whole model).
        calibration: "bundled" for the corpus that comes with onegraph; a text; a pathlib.Path to a UTF-8 file, to JSON
            lines of {"text": ...} or {"messages": [...]}, or to a directory; "hub:ORG/NAME" for a dataset; a sequence
            of these, or {one: weight}; or "self" for text that the model writes (holds the whole model).
        num_calibration_tokens: maximum number of calibration tokens (default: 24576 for "quick", 196608 for "good"
            and "best": all of the corpus).
        calibration_seq_len: tokens per calibration sequence.
        self_generate: if the text has fewer tokens, the model writes the rest behind pieces of it (holds the whole
            model).
        layers: {pattern: bits} of linears that differ, {"*.down_proj": 4}; 16 keeps a layer; the last match wins.
        lm_head, embed_tokens: bits of the output head and of the embedding; None keeps them (with `size` their rates
            are chosen; 16 keeps them), "auto" chooses the rate and counts it in `bits`. Unsupported for models that
            only transformers runs.
        experts: bits of routed experts, 16 keeps them; None is `bits`, but experts published in MXFP4 (gpt-oss) stay.
        draft_layers: bits of the linears of the layer that only predicts further tokens (MTP, `--speculative mtp`);
            None and 16 keep it as it is.
        expert_prior: see `quant/experts.py`; None for the recipe's.
        per_linear: choose a rate for each linear, with `bits` as the average or within `size`, also where linears share
            an input: less loss at the same size, more launches per step.
        seed: the same seed gives the same bytes.
        activation_memory: bytes of activations in memory, the rest goes to disk; None: an eighth of free memory.
        device: "cpu", "cuda", "cuda:N", or "auto" for the GPU if there is one.
        progress: called as progress(what, done, total); total is 0 while it is unknown.
        on_message: called with a line of text: the estimate, and what of earlier work is reused.

    Raises ValueError (CheckpointError among them) before anything is sampled or written: for options, patterns,
    `output`, memory and disk, and another process that works on the same `output`.
    """
    require_path("output", output, "a directory that does not exist yet")
    require_callable("progress", progress)
    require_callable("on_message", on_message)
    tell = on_message or (lambda line: None)
    run = _Run(Path(output), progress or (lambda what, done, total: None), tell, time.perf_counter())
    choices = choose(
        bits=bits,
        size=size,
        format=format,
        prefer=prefer,
        recipe=recipe,
        calibration=calibration,
        num_calibration_tokens=num_calibration_tokens,
        calibration_seq_len=calibration_seq_len,
        self_generate=self_generate,
        layers=layers,
        lm_head=lm_head,
        embed_tokens=embed_tokens,
        experts=experts,
        draft_layers=draft_layers,
        expert_prior=expert_prior,
        per_linear=per_linear,
        seed=seed,
        activation_memory=activation_memory,
        device=device,
    )
    refuse_existing(run.out)
    text = sources(calibration, min(choices.sequence, choices.tokens)) if choices.format in OWN else []
    located = locate(model, option="model")
    with text_checkpoint(Checkpoint.open(located.path)) as checkpoint:
        choices, found, line = settle(choices, lambda each: build_plan(checkpoint, located.name, each))
        if line:
            tell(line)
        check_resources(found, run.out)
        tell(f"quantizing {found}")
        if found.chosen:
            tell(AVERAGE)
        for line in found.left_lines:
            tell(line)
        with ResumableWork(
            unfinished(run.out),
            identity(checkpoint),
            remark=tell,
            keep_inputs=shutil.disk_usage(existing(run.out)).free > found.disk + 2 * found.hessians,
        ) as partial:
            refuse_existing(run.out)  # by a process that held the directory until now
            shutil.rmtree(partial.path / SPILLED, ignore_errors=True)
            if choices.format == "nvfp4":
                made = _Made(found, run.nvfp4(checkpoint, choices, found))
            else:
                made = run.own(checkpoint, choices, found, text, partial)
            partial.remove()
    found = made.plan
    calibrated = choices.format in OWN
    return Quantization(
        source=found.source,
        output=str(output),
        format=choices.format,
        seconds=round(time.perf_counter() - run.started, 1),
        before=found.before,
        after=found.after,
        config=made.config,
        bits=found.bits,
        curve=made.curve,
        recipe=choices.recipe if calibrated else None,
        seed=seed if calibrated else None,
        calibration_tokens=made.tokens,
        left=dict(found.left),
        experts=made.routed,
    )


@dataclass(frozen=True)
class _Made:
    """The plan as it was carried out, the quantization_config, calibration tokens, those of each expert, and the curve
    where rates were chosen."""

    plan: Plan
    config: dict[str, Any]
    tokens: int | None = None
    routed: dict[str, list[int]] = field(default_factory=dict)
    curve: list[tuple[float, float]] = field(default_factory=list)


def few_lines(routed: Mapping[str, list[int]], found: Plan, recipe: Recipe) -> list[str]:
    """How many tokens chose the experts of each layer, and by name those in whose Hessian the layer's shared inputs
    outweigh their own."""
    lines = []
    for stack, counts in routed.items():
        wanted = recipe.expert_prior * found.expert_inputs[stack]
        few = [f"{expert} ({count})" for expert, count in enumerate(counts) if count < wanted]
        middle = sorted(counts)[len(counts) // 2]
        reached = f"{sum(map(bool, counts))} of {len(counts)} experts reached"
        lines.append(f"{stack}: {reached}, {min(counts)} to {max(counts)} tokens an expert, {middle} in the middle")
        if few:
            lines.append(
                f"warning: {stack}: fewer than {wanted:.0f} tokens chose expert {', '.join(few)}; they are rounded "
                "mostly under the layer's shared inputs; give more calibration tokens, or text that reaches them"
            )
    return lines


@dataclass(frozen=True)
class _Run:
    out: Path
    say: Progress
    tell: Callable[[str], None]
    started: float

    def own(
        self,
        checkpoint: Checkpoint,
        choices: Choices,
        found: Plan,
        text: Sequence[Source],
        partial: ResumableWork,
    ) -> _Made:
        """Writes `out`."""
        sequence = min(choices.sequence, found.positions, choices.tokens)
        model = model_of(checkpoint, choices.device, sequence, own=found.own, draft=choices.draft_layers is not None)
        tokenizer = Tokenizer(checkpoint)
        rows, counts, sampled = self.rows(checkpoint, choices, tokenizer, text, sequence, partial)

        def outer(name: str) -> torch.Tensor:  # a tied head is the embedding
            return checkpoint.tensor(model.end_name(name))

        told: dict[str, Any] = {}
        curve: list[tuple[float, float]] = []
        if choices.budget is not None:
            costs = measured(checkpoint, choices, model, rows, outer, partial, self.say, found.rates)
            asked = {"bits": choices.budget.bits, "size": choices.budget.size}
            found, choices, chosen = allotted(checkpoint, found.source, choices, costs)
            for line in chosen.lines:
                self.tell(line)
            self.tell(f"quantizing {found}")
            shares = {" ".join(parts): round(cost.loss(cost.error), 6) for parts, cost in costs.items()}
            told, curve = {"allocation": asked | {"costs": shares}}, chosen.curve
        for line in found.notes:
            self.tell(line)
        recipe = replace(choices.recipe_options, layers=found.rates)
        pace = None if recipe.tune is not None else Pace(found.seconds, self.tell)  # tuning adds steps of its own

        def stepped(done: int, total: int, _: str) -> None:
            self.say("quantizing", done, total)
            if pace is not None:
                pace.step(done, total)

        self.say("quantizing", 0, 0)
        quantized = quantize_blocks(
            model,
            rows,
            recipe,
            partial,
            outer=outer,
            progress=stepped,
            spill=ActivationOffload(partial.path / SPILLED, choices.held),
        )
        routed = {first: counts for (first, _), counts in quantized.counts.items()}
        for line in few_lines(routed, found, recipe):
            self.tell(line)
        config = quantized.config.to_dict()
        about = {
            "recipe": {"name": choices.recipe} | recipe.to_dict(),
            "calibration": {
                "text": {"self": "sampled by the model", "bundled": "bundled with onegraph", "text": "given"}[
                    kind_of(choices.calibration)
                ],
                "tokens": rows.numel(),
                **({"sources": recorded(counts)} if counts else {}),
                **({"sampled_behind_it": sampled} if counts and sampled else {}),
                "sequence": sequence,
                "sha256": digest_of(rows),
            },
        } | told
        if routed:
            about["experts"] = {"calibration_tokens": routed}
        tensors = quantized.tensors(checkpoint.names, checkpoint.tensor, model.layer_of)
        config = self.write(checkpoint, config, tensors, found, about)
        return _Made(found, config, rows.numel(), routed, curve)

    def rows(
        self,
        checkpoint: Checkpoint,
        choices: Choices,
        tokenizer: Tokenizer,
        text: Sequence[Source],
        sequence: int,
        partial: ResumableWork,
    ) -> tuple[torch.Tensor, dict[str, int], int]:
        """The calibration tokens int64 [N, sequence], those of `text` first; how many are of each source; and how many
        the model wrote."""
        tokens, seed = choices.tokens, choices.recipe_options.seed
        counts: dict[str, int] = {}
        if not text:
            starts = [[first_token(checkpoint, tokenizer)]] * -(-tokens // sequence)
            given = torch.empty(0, sequence, dtype=torch.int64)
        else:
            drawn = draw(tokenizer, text, tokens)
            given, counts = packed_tokens(drawn.ids, length=sequence, limit=tokens), dict(drawn.counts)
            more = (tokens - given.numel()) // sequence if choices.extend else 0
            count, wanted = given.numel(), TOKENS[choices.recipe]
            warning = None if more else shortage(choices.calibration, count, tokens, wanted)
            for line in (told(counts), *drawn.notes, *([warning] if warning else [])):
                self.tell(line)
            if more == 0:
                return given, counts, 0
            starts = pieces(drawn.ids, length=max(1, sequence // BEHIND), count=more)
        key = key_of(identity(checkpoint), torch.tensor(starts), sequence, seed, choices.device.type)
        kept = partial.load("text", key)
        if kept is None:
            kept = {"tokens": sample_text(checkpoint, tokenizer, choices.device, starts, sequence, seed, self.say)}
            partial.save("text", key, kept)
        return torch.cat((given, kept["tokens"])), counts, kept["tokens"].numel()

    def nvfp4(self, checkpoint: Checkpoint, choices: Choices, found: Plan) -> dict[str, Any]:
        """Writes `out`; returns its quantization_config."""
        names = rounded_layers(Loader(checkpoint, checkpoint_config(checkpoint), torch.float32))
        kept = resolve_rates(choices.layers, names, bits=4)
        chosen = [name for name in names if name not in kept]
        config = nvfp4_config(checkpoint, chosen)
        done = 0

        def count(_: str) -> None:
            nonlocal done
            done += 1
            self.say("quantizing", done, len(chosen))

        self.say("quantizing", 0, len(chosen))
        tensors = nvfp4.quantized_tensors(
            checkpoint.names,
            checkpoint.tensor,
            chosen,
            search=choices.recipe != "quick",
            device=choices.device,
            on_linear=count,
        )
        about = {"recipe": {"name": choices.recipe, "layers": dict(choices.layers)}}
        return self.write(checkpoint, config, tensors, found, about)

    def write(
        self,
        checkpoint: Checkpoint,
        config: dict[str, Any],
        tensors: Iterable[tuple[str, torch.Tensor]],
        found: Plan,
        about: dict[str, Any],
    ) -> dict[str, Any]:
        """`about`: what onegraph.json says beside the source and the versions. Returns the quantization_config as it
        is written: of a multimodal model, by the names that the text model's layers have there."""
        if isinstance(checkpoint, TextCheckpoint):
            told, tensors = checkpoint.whole_config(config), checkpoint.all_tensors(tensors)
            config = told["quantization_config"]
        else:
            told = {key: value for key, value in checkpoint.config.items() if key != "quantization_config"}
            told["quantization_config"] = config
            tensors = checkpoint.all_tensors(tensors) if isinstance(checkpoint, RenamedCheckpoint) else tensors
        checkpoint = checkpoint.whole if isinstance(checkpoint, RenamedCheckpoint) else checkpoint
        about = {"format": found.format, "source": source_of(checkpoint), **about, "versions": versions()}
        card = Card(
            plan=found,
            config=config,
            about=about,
            license=license_of(checkpoint),
            model_type=str(checkpoint.config.get("model_type", "")),
        )
        write_checkpoint(
            self.out,
            told,
            tensors,
            copy_from=checkpoint,
            on_tensor=lambda _: checkpoint.forget(),
            about=about,
            card=str(card),
        )
        self.tell(f"{self.out / CARD} describes the model, for those you may pass it on to ({card.licensed})")
        return config


def sample_text(
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    device: torch.device,
    starts: list[list[int]],
    length: int,
    seed: int,
    progress: Progress,
) -> torch.Tensor:
    """Calibration tokens that the model writes behind each of `starts`, which are of one length, int64 [N, length]: the
    same seed, the same text. Of the model nothing is left in memory."""
    try:
        return _sampled(checkpoint, tokenizer, device, starts, length, seed, progress)
    finally:
        gc.collect()  # a graph and the engine that runs it refer to each other
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _sampled(
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    device: torch.device,
    starts: list[list[int]],
    length: int,
    seed: int,
    progress: Progress,
) -> torch.Tensor:
    model = Llama.load(checkpoint, device, pick_dtype("auto", device), max_context=length)
    engine = Engine(model, max_batch=min(len(starts), 64), max_context=length)
    calls, written, total = 0, 0, len(starts) * (length - len(starts[0]))

    def tell(index: int, token: int) -> None:
        nonlocal written
        written += 1
        progress("sampling text", min(written, total), total)

    def generate(prompts: list[list[int]], count: int) -> list[list[int]]:
        nonlocal calls
        count = min(count, length - len(prompts[0]))
        params = [
            SamplingParams(
                max_tokens=count, temperature=1.0, seed=seed * (1 << 31) + calls + i, stop=sorted(tokenizer.stops)
            )
            for i in range(len(prompts))
        ]
        calls += len(prompts)
        return engine.generate(prompts, params, on_token=tell)

    progress("sampling text", 0, total)
    return sampled_tokens(generate, starts=starts, length=length)


def first_token(checkpoint: Checkpoint, tokenizer: Tokenizer) -> int:
    """What a text begins with."""
    start = checkpoint.config.get("bos_token_id")
    return start if type(start) is int else min(tokenizer.stops, default=0)
