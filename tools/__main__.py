"""`python -m tools COMMAND`, at the root of a checkout."""

import argparse
import sys
from collections.abc import Sequence

from onegraph import cli
from onegraph.cli.common import Parser
from tools import compatibility, corpus, demo, soak


def build_parser() -> argparse.ArgumentParser:
    """Parser of all commands; it does not import torch."""
    parser = Parser(prog="python -m tools", description="Commands for developers of onegraph.")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", parser_class=Parser)
    for command in (compatibility, corpus, demo, soak):
        command.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; exit statuses and error lines are those of `onegraph`."""
    return cli.main(argv, build_parser)


if __name__ == "__main__":
    sys.exit(main())
