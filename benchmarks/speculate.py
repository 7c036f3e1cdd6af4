"""Tokens per second of rounds that check drafts, beside the step of one token, on one model shape, in one run.

    PYTHONPATH=src python3 benchmarks/speculate.py --shape llama-3-8b --bits 2 --lm-head 4 --context 1024 --batch 1

Weights are random. The oracle knows the text and is right with a set chance for each token, each on its own: figures
of its lines are synthetic. What it knows is the very text that the model writes with it, found by `settle`: `tries`
says how often it was asked before, `same_text` that the timed run gave it again. The n-gram drafter, which finds little
in such a text, shows what looking costs. --eagle adds a random EAGLE-3 head of the shape, and --mtp a random draft
layer, dense or in codes: what these cost a round. Nothing that they draft is right; `synthetic_tokens_per_second` is
what the measured round gives where each draft is right with --chance.
`round_us` is a replay of the round; prints JSON lines, --out appends them.

    PYTHONPATH=src python3 benchmarks/speculate.py --model out/smollm2-4bit --head out/smollm2-head

measures a real model with a head that `onegraph draft-head` trained for it, on texts that the head never saw: code,
chat and a text to repeat; beside it no drafts and n-grams.

--batch-invariant measures everything twice, the second time in that mode, whose lines say so: there `equal_to_plain`
must be all rows, and `same_texts` all texts.
"""

import argparse
import statistics
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from step import SHAPES, RandomCheckpoint, random_model

from onegraph.api.draft_head import tapped, unseen
from onegraph.api.llm import LLM
from onegraph.engine.bench import step_us
from onegraph.engine.draft import ModelDrafter, NgramDrafter, OracleDrafter
from onegraph.engine.draft_heads import HeadDrafter
from onegraph.engine.engine import Engine
from onegraph.engine.params import SamplingParams
from onegraph.engine.record import emit, machine
from onegraph.formats.checkpoint import Checkpoint, write_checkpoint
from onegraph.models.eagle import EagleConfig, EagleHead
from onegraph.models.eagle_net import EagleNet, head_config, head_tensors
from onegraph.models.loader import Loader
from onegraph.models.mtp import DraftConfig, DraftLayer


def timed(engine: Engine, prompts: list[list[int]], params: list[SamplingParams], repeats: int) -> tuple[float, Any]:
    """Median tokens per second of `repeats` runs, and what the last one wrote."""
    rates, out = [], None
    for _ in range(repeats):
        out = engine.generate(prompts, params)
        rates.append(engine.stats.decode_tokens_per_second)
    return statistics.median(rates), out


def settle(engine: Engine, prompts: list[list[int]], params: list[SamplingParams]) -> tuple[list[list[int]], int]:
    """Answers that the engine writes while its oracle knows them, and after how many tries: what a token's place in a
    round does to its rounding changes a random model's text, and so which drafts are right. Each try tells the oracle
    what the last one wrote, and agrees with the next one further."""
    assert engine.executor.speculation is not None
    drafter = engine.executor.speculation.ranks[0].drafter
    assert isinstance(drafter, OracleDrafter)
    answers = engine.generate(prompts, params)
    for tries in range(1, max(each.max_tokens for each in params) + 2):
        drafter.know([[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)])
        known, answers = answers, engine.generate(prompts, params)
        if answers == known:
            return answers, tries
    raise RuntimeError("the engine writes another text each time: a step is not deterministic")


def rows(args: argparse.Namespace, model: Any, drafting: Any, alike: bool) -> Iterator[dict[str, Any]]:
    """alike: batch-invariant."""
    batch, vocabulary = args.batch, model.config.vocab_size
    g = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, vocabulary, (batch, args.context), generator=g).tolist()
    warm = {"temperature": 0.8, "top_k": 50, "top_p": 0.95} if args.sampling else {}
    params = [SamplingParams(max_tokens=args.tokens + 1, seed=i, **warm) for i in range(batch)]
    short = [SamplingParams(max_tokens=8, seed=i, **warm) for i in range(batch)]
    sizes = {"max_batch": batch, "max_context": args.context + args.tokens + 16, "kv": args.kv}
    sizes |= {"batch_invariant": alike}

    def row(engine: Engine, name: str, drafts: int, **more: Any) -> dict[str, Any]:
        rate, out = timed(engine, prompts, params, args.repeats)
        stats = engine.stats
        steps = stats.decode_steps
        found = {
            "bench": "speculate", "name": name, "batch": batch, "context": args.context, "tokens": args.tokens,
            "drafts": drafts, "temperature": params[0].temperature or 0.0, "tokens_per_second": round(rate, 1),
            "tokens_per_round": round(stats.decode_tokens / steps / batch, 3), "rounds": steps,
            "us_per_round": round(1e6 * stats.decode_seconds / steps, 1),
            "round_us": round(step_us(engine, batch, sampling=args.sampling, drafts=drafts), 1),
        } | more  # fmt: skip
        return {"row": found, "out": out}

    engine = Engine(model, **sizes)
    engine.generate(prompts, short)
    plain = row(engine, "no drafts", 0)
    yield plain["row"]
    engine = Engine(model, **sizes, draft=NgramDrafter, draft_tokens=3)
    engine.generate(prompts, short)
    looked = row(engine, "n-gram", 0)
    yield looked["row"] | {"same_text": looked["out"] == plain["out"]}
    for count in args.drafts:
        for chance in args.chance:
            oracle = partial(OracleDrafter, [[0]] * batch, chance, vocabulary)
            engine = Engine(model, **sizes, draft=oracle, draft_tokens=count)
            answers, tries = settle(engine, prompts, params)
            found = row(engine, f"oracle {chance:g}, synthetic", count, tries=tries)
            same = sum(a == b for a, b in zip(found["out"], plain["out"], strict=True))
            yield found["row"] | {"same_text": found["out"] == answers, "equal_to_plain": same}
    if drafting is not None:
        for count in args.drafts:
            engine = Engine(model, **sizes, draft=partial(ModelDrafter, drafting), draft_tokens=count)
            engine.generate(prompts, short)
            found = row(engine, "itself", count)
            yield found["row"]
    if args.eagle is not None:
        with TemporaryDirectory() as folder:
            head = random_head(model, args.eagle, Path(folder))
        for count in args.drafts:
            engine = Engine(model, **sizes, draft=partial(HeadDrafter, head), draft_tokens=count)
            engine.generate(prompts, short)
            yield row(engine, f"eagle, random, names {args.eagle}", count)["row"]
    for bits in args.mtp or ():
        draft = random_mtp(model, SHAPES[args.shape], bits)
        name = "mtp, random" if bits == 16 else f"mtp, random, {bits} bits"
        for count in args.drafts:
            engine = Engine(model, **sizes, draft=partial(HeadDrafter, draft), draft_tokens=count)
            engine.generate(prompts, short)
            found = row(engine, name, count)["row"]
            for chance in args.chance:
                tokens = sum(chance**i for i in range(count + 1))
                rate = round(1e6 * batch * tokens / found["us_per_round"], 1)
                yield found | {"chance": chance, "synthetic_tokens_per_second": rate}


def random_head(model: Any, size: int, folder: Path) -> EagleHead:
    """Of the model's own width, with `size` tokens to name: through a file, as heads come."""
    layers = tapped(model.config.layers)
    config = head_config(model.config, layers, size, "random")
    with torch.device(model.device):
        net = EagleNet(EagleConfig.from_dict(config), len(layers), 16)
    write_checkpoint(folder / "head", config, head_tensors(net, torch.arange(size), torch.bfloat16).items())
    with Checkpoint.open(folder / "head") as checkpoint:
        return EagleHead.load(checkpoint, model)


def random_mtp(model: Any, shape: dict[str, Any], bits: int) -> DraftLayer:
    """A draft layer of the model's, dense (16) as `onegraph quantize` leaves it, or as with its --draft-layers."""
    checkpoint = RandomCheckpoint(shape, bits, device=model.device)
    plain = DraftConfig.of(model.config, {})
    layers = [*plain.parts.linears, *(plain.prefix(0) + name for name in (plain.routed.whole if plain.routed else ()))]
    coded = DraftConfig.of(model.config, {f"{layer}.codes": () for layer in layers}, checkpoint.rates)
    loader = Loader(checkpoint, coded, model.dtype)
    checkpoint.add({name: (size, kinds[0]) for name, (size, kinds) in loader.expected().items()})
    return DraftLayer.load(checkpoint, model)


def real_rows(args: argparse.Namespace, alike: bool) -> Iterator[dict[str, Any]]:
    """Of --model and --head: greedy texts of each kind, one row at a time as `--batch 1` would be."""
    runs: list[tuple[str, dict[str, Any]]] = [
        ("no drafts", {}),
        ("n-gram", {"speculative": "ngram", "num_speculative_tokens": 7}),
    ]
    runs += [(f"eagle, {k}", {"speculative": f"eagle:{args.head}", "num_speculative_tokens": k}) for k in args.drafts]
    runs += [("eagle, auto", {"speculative": f"eagle:{args.head}"})]
    known: dict[str, list[list[int]]] = {}
    for name, drafted in runs:
        sizes = {
            "max_num_seqs": 1,
            "max_model_len": 1024,
            "kv_cache_dtype": args.kv or "exact",
            "batch_invariant": alike,
        }
        with LLM(args.model, device=args.device, **sizes, **drafted) as llm:
            asked = unseen(llm.tokenizer)
            params = SamplingParams(max_tokens=args.tokens, stop=tuple(llm.tokenizer.stops))
            llm.engine.generate(asked["chat"][:1], SamplingParams(max_tokens=8))
            for kind, prompts in asked.items():
                texts, tokens, steps, seconds = [], 0, 0, 0.0
                for prompt in prompts:
                    texts += llm.engine.generate([prompt], params)
                    stats = llm.engine.stats
                    tokens, steps = tokens + stats.decode_tokens, steps + stats.decode_steps
                    seconds += stats.decode_seconds
                same = sum(a == b for a, b in zip(texts, known.setdefault(kind, texts), strict=True))
                yield {
                    "bench": "speculate-head", "name": name, "text": kind, "model": Path(args.model).name, "batch": 1,
                    "tokens": tokens, "tokens_per_second": round(tokens / seconds, 1),
                    "tokens_per_round": round(tokens / steps, 3), "us_per_round": round(1e6 * seconds / steps, 1),
                    "same_texts": same, "texts": len(texts),
                }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-3-8b")
    parser.add_argument("--bits", type=int, default=2)
    parser.add_argument("--lm-head", type=int, default=None)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--drafts", type=int, nargs="+", default=[1, 3, 5, 7])
    parser.add_argument("--chance", type=float, nargs="+", default=[0.8])
    parser.add_argument("--sampling", action="store_true")
    parser.add_argument("--itself", action="store_true", help="also let the model draft for itself")
    parser.add_argument("--eagle", type=int, default=None, metavar="V", help="a random head that names V tokens")
    parser.add_argument(
        "--mtp", type=int, nargs="*", default=None, metavar="BITS",
        help="a random draft layer of a Qwen3.5 or GLM shape, at each of these bits [16: dense]",
    )  # fmt: skip
    parser.add_argument("--model", default=None, help="a real checkpoint; needs --head, and is measured instead")
    parser.add_argument("--head", default=None, help="its EAGLE-3 head")
    parser.add_argument("--kv", default=None, help="as of `onegraph generate`")
    parser.add_argument("--batch-invariant", action="store_true", help="all of it again, batch-invariant")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    args.mtp = [16] if args.mtp == [] else args.mtp
    if (args.model is None) != (args.head is None):
        parser.error("--model and --head go together")
    modes = [(False, {}), *([(True, {"batch_invariant": True})] if args.batch_invariant else [])]
    if args.model is not None:
        for alike, told in modes:
            for row in real_rows(args, alike):
                emit(row | told | {"kv": args.kv} | machine(torch.device(args.device)), args.out)
        return 0
    reach = args.context + args.tokens + 16
    model = random_model(SHAPES[args.shape], args.bits, args.lm_head, reach, device=args.device)
    about = {"shape": args.shape, "bits": args.bits, "lm_head": args.lm_head, "kv": args.kv}
    for alike, told in modes:
        for row in rows(args, model, model if args.itself else None, alike):
            emit(row | told | about | machine(torch.device(args.device)), args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
