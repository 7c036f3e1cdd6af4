"""The options that say how tokens are chosen: fields of SamplingParams."""

from __future__ import annotations

import argparse
from typing import Any

from onegraph.cli.common import SEED, number, read_text

# Those whose option has the field's value
FIELDS = ["temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"]
FIELDS += ["seed", "n", "logprobs", "regex"]


def add_sampling(parser: argparse.ArgumentParser, *, stream: bool = False) -> None:
    """`stream`: without what asks for more than one answer's text."""
    group = parser.add_argument_group("how tokens are chosen")
    group.add_argument(
        "--temperature", type=number(float, 0, 100), default=0.0, metavar="T", help="0 takes the likeliest (default)"
    )
    group.add_argument(
        "--top-k", type=number(int, 0, 1 << 30), default=0, metavar="K", help="draw among the K likeliest (0: all)"
    )
    group.add_argument(
        "--top-p",
        type=number(float, 0, 1, open_low=True),
        default=1.0,
        metavar="P",
        help="draw among the likeliest that reach mass P (1: all)",
    )
    group.add_argument(
        "--min-p",
        type=number(float, 0, 1),
        default=0.0,
        metavar="P",
        help="draw among those at least P times as likely as the likeliest (0: all)",
    )
    group.add_argument(
        "--repetition-penalty",
        type=number(float, 0.01, 100),
        default=1.0,
        metavar="R",
        help="divide logits of tokens in prompt and answer by R (1: off)",
    )
    for name, what in (("presence", "that it has"), ("frequency", "once for each time that it has them")):
        group.add_argument(
            f"--{name}-penalty",
            type=number(float, -2, 2),
            default=0.0,
            metavar="X",
            help=f"take X off the logits of the answer's own tokens, {what} (0: off)",
        )
    group.add_argument("--seed", type=SEED, metavar="N", help="of the draws (default: a new one, which --json tells)")
    group.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated"
    )
    if stream:
        parser.set_defaults(n=1, logprobs=None)
    else:
        group.add_argument("--n", type=number(int, 1, 1024), default=1, metavar="N", help="answers to each prompt")
        group.add_argument(
            "--logprobs",
            type=number(int, 0, 20),
            metavar="K",
            help="tell log-probabilities, and the K likeliest tokens'",
        )
    form = group.add_mutually_exclusive_group()
    form.add_argument("--json-schema", metavar="FILE", help="answer in JSON that the schema in FILE allows")
    form.add_argument("--regex", metavar="REGEX", help="answer with a match of REGEX")


def sampling_of(args: argparse.Namespace) -> dict[str, Any]:
    """What the options say, as fields of SamplingParams. Raises CheckpointError where the schema cannot be read."""
    found = {name: getattr(args, name) for name in FIELDS}
    schema = None if args.json_schema is None else read_text(args.json_schema)
    return found | {"stop": args.stop, "json_schema": schema}
