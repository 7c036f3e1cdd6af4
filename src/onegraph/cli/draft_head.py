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
  onegraph generate out/smollm2-4bit --prompt "Why is the sky blue?" --draft eagle:out/smollm2-head

The head is an EAGLE-3 head: one layer that goes on from the model's hidden states (docs/speculation.md). The model
answers pieces of the text and questions that it asks itself, half of them greedily; the head learns its probabilities
of each token. So train it for the model that you serve, quantized as you serve it. The report is on prompts that were
never trained on: code, chat, and a text to repeat. The directory is one that speculators and vLLM read.
"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "draft-head",
        help="train a head that drafts for a model (EAGLE-3), for --draft eagle:OUT",
        description="Trains a draft head on a model's own text, and measures it on texts that it never saw.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help=f"the model to draft for: {MODEL}")
    parser.add_argument("out", metavar="OUT", help="the head's directory, which must not exist")
    parser.add_argument(
        "--text", nargs="+", default=[], metavar="FILE", help="UTF-8 text for prompts (default: a bundled one)"
    )
    parser.add_argument(
        "--minutes", type=number(float, 0, 10000, True), default=10.0, metavar="M", help="time in all (default: 10)"
    )
    parser.add_argument(
        "--texts", type=number(int, 24, 1 << 20), default=32768, metavar="N", help="texts to write at most (32768)"
    )
    parser.add_argument(
        "--length", type=number(int, 16, 4096), default=192, metavar="N", help="tokens of each answer (default: 192)"
    )
    parser.add_argument(
        "--vocabulary",
        type=number(int, 16, 1 << 20),
        default=8192,
        metavar="N",
        help="tokens that the head may name, the commonest (default: 8192)",
    )
    parser.add_argument(
        "--ahead",
        type=number(int, 1, 7),
        default=5,
        metavar="K",
        help="drafts in a row that it learns to make (default: 5)",
    )
    parser.add_argument("--steps", type=STEPS, metavar="N", help="training steps (default: what the time allows)")
    parser.add_argument(
        "--batch", type=BATCH, metavar="B", help="texts a step (default: 4 on a CPU, up to 64 on a GPU)"
    )
    parser.add_argument("--rate", type=number(float, 0, 1, True), help="learning rate (default: by the model's width)")
    parser.add_argument("--seed", type=SEED, default=0, metavar="N", help="of texts and training (default: 0)")
    add_device(parser)
    add_dtype(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from onegraph.api.draft_head import train_head

    names = "minutes", "texts", "length", "vocabulary", "ahead", "steps", "batch", "rate", "seed", "dtype"
    with Progress(loading="byte", sampling="text") as shown, options("text:"):
        made = train_head(
            args.model,
            args.out,
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
    print(f"head        {made.output}, {human_bytes(made.nbytes)}, names {made.vocabulary} tokens")
    print(f"trained on  {made.tokens} tokens in {made.texts} texts of the model, {made.seconds:.0f} s in all")
    for name, score in (("untrained", made.before), ("trained", made.after)):
        print(f"{name:10s}  held-out loss {score.loss:.3f}, {score.tokens:.2f} tokens a round")
    print(f"{'unseen':12s}{'tokens a round':>15s}  right at each place, where those before were    texts as without")
    for kind, found in made.unseen.items():
        rates = " ".join(f"{100 * rate:3.0f}%" for rate in found.accepted)
        print(f"{kind:12s}{found.tokens_per_round:15.2f}  {rates:45s}{found.same_texts} of {found.texts}")
