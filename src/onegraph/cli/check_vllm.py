"""`onegraph check --vllm MODEL`: the option, beside the checker's own."""

from __future__ import annotations

import argparse
import sys
from typing import Any


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
    from onegraph.check.cli import codes, print_report
    from onegraph.check.report import CheckError
    from onegraph.integrations.vllm.check import check_decode_step

    try:
        if args.target:
            raise CheckError(f"--vllm and the target {args.target[0]!r}: give one of the two")
        report = check_decode_step(args.vllm, steps=args.steps).select(codes(args.select), codes(args.ignore))
    except CheckError as error:
        print("onegraph: error: " + " ".join(str(error).split()), file=sys.stderr)
        return 2
    print_report(report, args)
    for line in report.facts["vllm"]:
        print(f"vLLM: {line}", file=sys.stderr)
    return report.exit_code(strict=args.strict)
