"""The options that say how tokens are chosen: fields of SamplingParams."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from onegraph.cli.common import SEED, UsageError, number, read_text

if TYPE_CHECKING:
    from onegraph.formats.checkpoint import Checkpoint

# Those whose option has the field's value
FIELDS = ["temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"]
FIELDS += ["seed", "n", "logprobs", "regex"]
SUGGESTED = ("temperature", "top_p", "top_k")
DRAWN = {"temperature": 0.7, "top_p": 0.95}  # in a conversation, where the model says nothing


def add_sampling(parser: argparse.ArgumentParser, *, stream: bool = False) -> None:
    """`stream`: without what asks for more than one answer's text."""
    group = parser.add_argument_group("how tokens are chosen")
    group.add_argument(
        "--temperature",
        type=number(float, 0, 100),
        metavar="T",
        help="0 takes the likeliest" + (" (default, where the model suggests none)" if stream else " (default)"),
    )
    group.add_argument("--top-k", type=number(int, 0, 1 << 30), metavar="K", help="draw among the K likeliest (0: all)")
    group.add_argument(
        "--top-p",
        type=number(float, 0, 1, open_low=True),
        metavar="P",
        help="draw among the likeliest that reach mass P (1: all)",
    )
    group.add_argument(
        "--min-p",
        type=number(float, 0, 1),
        metavar="P",
        help="draw among those at least P times as likely as the likeliest (0: all)",
    )
    group.add_argument(
        "--repetition-penalty",
        type=number(float, 0.01, 100),
        metavar="R",
        help="divide logits of tokens in prompt and answer by R (1: off)",
    )
    for name, what in (("presence", "that it has"), ("frequency", "once for each time that it has them")):
        group.add_argument(
            f"--{name}-penalty",
            type=number(float, -2, 2),
            metavar="X",
            help=f"take X off the logits of the answer's own tokens, {what} (0: off)",
        )
    told = "" if stream else ", which --json tells"
    group.add_argument("--seed", type=SEED, metavar="N", help=f"of the draws (default: a new one{told})")
    group.add_argument(
        "--stop", type=_stop, action="append", default=[], metavar="TEXT", help="end before this text; may be repeated"
    )
    if stream:
        parser.set_defaults(n=None, logprobs=None)
    else:
        group.add_argument("--n", type=number(int, 1, 1024), metavar="N", help="answers to each prompt (1)")
        group.add_argument(
            "--logprobs",
            type=number(int, 0, 20),
            metavar="K",
            help="tell log-probabilities, and the K likeliest tokens'",
        )
    form = group.add_mutually_exclusive_group()
    form.add_argument("--json-schema", metavar="FILE", help="answer in JSON that the schema in FILE allows")
    form.add_argument("--regex", metavar="REGEX", help="answer with a match of REGEX")


def _stop(text: str) -> str:
    """An argparse type."""
    if not text:
        raise argparse.ArgumentTypeError("the text is empty; give one that the answer may come to, or leave it out")
    return text


def sampling_of(args: argparse.Namespace) -> dict[str, Any]:
    """What the options that were given say, as fields of SamplingParams. Raises CheckpointError where the schema cannot
    be read."""
    found = {name: value for name in FIELDS if (value := getattr(args, name)) is not None}
    schema = None if args.json_schema is None else read_text(args.json_schema)
    return found | {"stop": args.stop, "json_schema": schema}


def suggested(
    checkpoint: Checkpoint, given: Mapping[str, Any], cure: str = "give --{}"
) -> tuple[dict[str, Any], dict[str, Any]]:
    """How a conversation draws, but for the fields that are `given`: what the model's generation_config.json says, and
    what `DRAWN` adds where it neither says whether to draw nor how. Both are empty where it does not draw. Raises
    UsageError for what cannot be drawn with, CheckpointError."""
    from onegraph.engine.params import SamplingParams
    from onegraph.formats.files import parse_json

    data = checkpoint.sidecar("generation_config.json")
    config = {} if data is None else parse_json(data, "generation_config.json")
    said = {name: config[name] for name in SUGGESTED if config.get(name) is not None}
    drawn: dict[str, Any] = {}
    if config.get("do_sample") is True:
        said = {"temperature": 1.0} | said
    elif config.get("do_sample") is None and "temperature" not in said:
        drawn = {name: value for name, value in DRAWN.items() if name not in said}
    if config.get("do_sample") is False or {**said, **drawn, **given}.get("temperature", 0) == 0:
        return {}, {}
    said, drawn = ({name: value for name, value in each.items() if name not in given} for each in (said, drawn))
    for name, value in said.items():
        try:
            SamplingParams(**{name: value})
        except ValueError as error:
            raise UsageError(f"generation_config.json: {error}; {cure.format(name.replace('_', '-'))}") from None
    return said, drawn
