"""`onegraph draft-head`: a head that drafts for a model, trained on what the model itself writes."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import TYPE_CHECKING, Any

from onegraph.cli.common import (
    BATCH,
    MODEL,
    SEED,
    STEPS,
    Progress,
    add_device,
    add_dtype,
    add_json,
    human_bytes,
    number,
    options,
    pick_device,
    print_json,
)

if TYPE_CHECKING:
    from onegraph.api.draft_head import DraftHead

EPILOG = """\
examples:
  onegraph draft-head out/smollm2-4bit out/smollm2-head --minutes 5
  onegraph draft-head out/llama-2bit out/llama-head --text chats.txt code.txt --vocabulary 32000 --minutes 60
  onegraph draft-head out/smollm2-3bit out/smollm2-3bit-head --init out/smollm2-head
  onegraph generate out/smollm2-4bit --prompt "Why is the sky blue?" --speculative eagle:out/smollm2-head

Trains an EAGLE-3 head for speculative decoding (docs/guides/speculative-decoding.md). The model writes the training
texts, half of them greedily, and the head learns its token probabilities. Train with the quantized model that you
serve. The report uses unseen prompts: code, chat, and a repetitive text. speculators and vLLM read the directory.
"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "draft-head",
        help="train an EAGLE-3 draft head, for --speculative eagle:OUT",
        description="Trains a draft head on text of the model, and measures it on unseen texts.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help=f"target model: {MODEL}")
    parser.add_argument("out", metavar="OUT", help="directory to write; must not exist")
    parser.add_argument(
        "--init",
        metavar="HEAD",
        help="trained head to start from, e.g. after the model was quantized again; its vocabulary and layers stay",
    )
    parser.add_argument(
        "--text", nargs="+", default=[], metavar="FILE", help="UTF-8 text files for prompts [the calibration corpus]"
    )
    parser.add_argument(
        "--minutes", type=number(float, 0, 10000, True), default=10.0, metavar="M", help="time limit in minutes [10]"
    )
    parser.add_argument(
        "--texts",
        type=number(int, 24, 1 << 20),
        default=32768,
        metavar="N",
        help="maximum number of training texts [32768]",
    )
    parser.add_argument(
        "--length", type=number(int, 16, 4096), default=192, metavar="N", help="tokens per answer [192]"
    )
    parser.add_argument(
        "--vocabulary",
        type=number(int, 16, 1 << 20),
        metavar="N",
        help="vocabulary of the head: the most frequent tokens [8192, or that of --init]",
    )
    parser.add_argument(
        "--ahead",
        type=number(int, 1, 7),
        default=5,
        metavar="K",
        help="consecutive drafts to train [5]",
    )
    parser.add_argument("--steps", type=STEPS, metavar="N", help="training steps [what the time limit allows]")
    parser.add_argument(
        "--batch", type=BATCH, metavar="B", help="texts per training step [4 on a CPU, up to 64 on a GPU]"
    )
    parser.add_argument(
        "--rate", type=number(float, 0, 1, True), help="learning rate [from the model's width; lower with --init]"
    )
    parser.add_argument("--seed", type=SEED, default=0, metavar="N", help="seed of texts and training [0]")
    add_device(parser)
    add_dtype(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from onegraph.api.draft_head import train_head

    names = "minutes", "texts", "length", "vocabulary", "ahead", "steps", "batch", "rate", "seed", "dtype"
    with Progress(loading="byte", sampling="text") as shown, options("init:", "text:", "vocabulary:", "length:"):
        made = train_head(
            args.model,
            args.out,
            init=args.init,
            text=args.text,
            device=pick_device(args.device),
            progress=shown,
            log=lambda line: print(line, file=sys.stderr, flush=True),
            **{name: getattr(args, name) for name in names},
        )
    if args.json:
        print_json(dataclasses.asdict(made))
    else:
        show(made)
    return 0


def show(made: DraftHead) -> None:
    """The report for people."""
    print(f"head        {made.output}, {human_bytes(made.nbytes)}, vocabulary of {made.vocabulary} tokens")
    print(f"trained on  {made.tokens} tokens in {made.texts} texts of the model, {made.seconds:.0f} s in total")
    for name, score in (("untrained", made.before), ("trained", made.after)):
        print(f"{name:10s}  held-out loss {score.loss:.3f}, {score.tokens:.2f} tokens per verify pass")
    print(f"{'unseen':12s}{'tokens per pass':>15s}  acceptance rate at each position                same texts")
    for kind, found in made.unseen.items():
        rates = " ".join(f"{100 * rate:3.0f}%" for rate in found.accepted)
        print(f"{kind:12s}{found.tokens_per_round:15.2f}  {rates:45s}{found.same_texts} of {found.texts}")
