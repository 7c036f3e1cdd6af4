"""`onegraph check --vllm MODEL`: the option, beside the checker's own."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onegraph.check.report import Report


def add_option(check: Any) -> None:
    """Adds --vllm to the parser of `check`, whose targets it replaces."""
    check.add_argument(
        "--vllm",
        metavar="MODEL",
        help="check the decode step that vLLM runs for this checkpoint, and say what limits vLLM's graphs",
    )
    run = check.get_default("run")
    check.set_defaults(run=lambda args: run_vllm(args) if args.vllm else run(args))


def run_vllm(args: argparse.Namespace) -> int:
    """Checks, prints, and returns 0, 1 or 2 as `check` does."""
    from onegraph.check.cli import run_with

    return run_with(check_model, args)


def check_model(args: argparse.Namespace) -> Report:
    """The report of the served model; what limits vLLM's graphs goes to stderr. Raises CheckError."""
    from onegraph.check.report import CheckError
    from onegraph.integrations.vllm.check import check_decode_step

    if args.target or args.run_program is not None:
        other = f"the target {args.target[0]!r}" if args.target else "--run"
        raise CheckError(f"--vllm and {other}: give one of the two")
    if args.live or args.all:
        raise CheckError("--vllm captures and replays wherever there is a GPU; leave out --live and --all")
    report = check_decode_step(args.vllm, steps=args.steps)
    for line in report.facts["vllm"]:
        print(f"vLLM: {line}", file=sys.stderr)
    return report
