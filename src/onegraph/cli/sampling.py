"""Options for sampling: fields of SamplingParams."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from onegraph.cli.common import SEED, UsageError, number, read_text

if TYPE_CHECKING:
    from onegraph.api.constraint import Constraints
    from onegraph.engine.params import SamplingParams

# Those whose option has the field's value
FIELDS = ["temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"]
FIELDS += ["seed", "n", "logprobs", "regex"]


def add_sampling(parser: argparse.ArgumentParser, *, stream: bool = False) -> None:
    """`stream`: without what asks for more than one answer's text."""
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--temperature",
        type=number(float, 0, 100),
        metavar="T",
        help="divisor of the logits; 0 selects the most likely token [generation_config.json's, or 0.7]",
    )
    group.add_argument(
        "--top-k",
        type=number(int, 0, 1 << 30),
        metavar="K",
        help="sample from the K most likely tokens; 0: all [generation_config.json's, or 0]",
    )
    group.add_argument(
        "--top-p",
        type=number(float, 0, 1, open_low=True),
        metavar="P",
        help="sample from the most likely tokens that reach probability mass P; 1: all [generation_config.json's, or "
        "0.95]",
    )
    group.add_argument(
        "--min-p",
        type=number(float, 0, 1),
        metavar="P",
        help="sample from tokens at least P times as likely as the most likely one; 0: all [generation_config.json's, "
        "or 0]",
    )
    group.add_argument(
        "--repetition-penalty",
        type=number(float, 0.01, 100),
        metavar="R",
        help="divisor of logits of tokens in prompt and answer; 1: off [generation_config.json's, or 1]",
    )
    for name, what in (("presence", "once"), ("frequency", "per occurrence")):
        group.add_argument(
            f"--{name}-penalty",
            type=number(float, -2, 2),
            metavar="X",
            help=f"subtracted from logits of the answer's tokens, {what} [0: off]",
        )
    shown = "" if stream else ", shown with --json"
    group.add_argument("--seed", type=SEED, metavar="N", help=f"seed of the random numbers [random{shown}]")
    group.add_argument(
        "--stop", type=_stop, action="append", default=[], metavar="TEXT", help="text that ends the answer; repeatable"
    )
    if stream:
        parser.set_defaults(n=None, logprobs=None)
    else:
        group.add_argument("--n", type=number(int, 1, 1024), metavar="N", help="number of answers per prompt [1]")
        group.add_argument(
            "--logprobs",
            type=number(int, 0, 20),
            metavar="K",
            help="log-probabilities of each token and of the K most likely ones; needs JSON output",
        )
    form = group.add_mutually_exclusive_group()
    form.add_argument("--json-schema", metavar="FILE", help="constrain the answer to the JSON schema in FILE")
    form.add_argument("--regex", metavar="REGEX", help="constrain the answer to a regular expression")


def _stop(text: str) -> str:
    """An argparse type."""
    if not text:
        raise argparse.ArgumentTypeError("the text is empty; give one that the answer may come to, or leave it out")
    return text


def sampling_of(args: argparse.Namespace) -> dict[str, Any]:
    """What the options that were given say, as fields of SamplingParams. Raises CheckpointError where the schema cannot
    be read, UsageError where it is no JSON."""
    found = {name: value for name in FIELDS if (value := getattr(args, name)) is not None}
    schema = None if args.json_schema is None else read_text(args.json_schema)
    try:
        json.loads(schema or "{}")
    except RecursionError:
        pass  # its compiler says so
    except ValueError as error:
        raise UsageError(f"--json-schema {args.json_schema}: not valid JSON: {error}") from None
    return found | {"stop": args.stop, "json_schema": schema}


def check_constraint(args: argparse.Namespace, params: SamplingParams, constraints: Constraints) -> None:
    """Raises UsageError where the options' schema or regular expression cannot be compiled into `params`' constraint:
    before the model is loaded."""
    if args.json_schema is None and args.regex is None:
        return
    option = "--regex" if args.json_schema is None else f"--json-schema {args.json_schema}"
    try:
        constraints(params)
    except ValueError as error:
        told = str(error).removeprefix("regex: ").removeprefix("json_schema: ")
        raise UsageError(f"{option}: {told}") from None
