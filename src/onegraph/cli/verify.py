"""`onegraph verify`: whether a checkpoint is whole, and what is inside."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from onegraph.cli.common import MODEL, Progress, add_json, human_bytes, one_line, print_json

if TYPE_CHECKING:
    from onegraph.api.verify import Verification

EPILOG = """\
examples:
  onegraph verify out/smollm2-4bit
  onegraph verify models/DeepSeek-V4-Flash-NVFP4 --json

Checks digests (SHA256SUMS, which quantize writes and 'sha256sum -c' reads, or the names in huggingface_hub's cache),
headers, shapes and dtypes against config.json, finite values, and the range of scales. Nothing is executed and no GPU
is needed. Checks that the checkpoint does not allow are listed: without digests, flipped bits are undetectable. Exit
status 1: a problem was found.
"""

LONG = 150  # characters of a map or a list, of which more are counted in place of being shown


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "verify",
        help="check a checkpoint and list its contents",
        description="Checks a checkpoint's files, shapes, dtypes, values and digests, and lists its contents.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help=MODEL)
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from onegraph.api.hub import locate
    from onegraph.api.verify import verify

    with Progress(reading_digests="byte", checking_values="byte") as shown:
        found = verify(locate(args.model).path, progress=shown)
    if args.json:
        print_json(found.as_dict())
    else:
        tell(found)
    return 0 if found.ok else 1


def tell(found: Verification) -> None:
    """The finding as a page of text; nothing from the checkpoint reaches the terminal unescaped."""
    if found.size is not None:
        size = found.size
        print(f"{found.tensors} tensors, {human_bytes(size.total_bytes)}, {size.parameters} parameters: {size}")
    elif found.tensors:
        print(f"{found.tensors} tensors")
    if found.layers:
        wide = max(len(group.layers) for group in found.layers)
        print(f"\n{'layer':{wide}s}  {'blocks':>8s}{'count':>7s}{'bits':>8s}  format")
        for group in found.layers:
            bits = f"{group.bits:.3f}"
            print(f"{group.layers:{wide}s}  {group.blocks:>8s}{group.count:>7d}{bits:>8s}  {group.format}")
        print()
    for key, value in (found.about or {}).items():
        print(f"{one_line(key, 40):<12s} {phrase(unusual(value) if key == 'recipe' else value)}")
    print(f"digests      of {found.digests} files are right" if found.digests else "digests      none")
    for line in found.notes:
        print(f"note         {one_line(line)}")
    for line in found.unchecked:
        print(f"not checked  {one_line(line)}")
    for line in found.problems:
        print(f"PROBLEM      {one_line(line)}")
    print("damaged" if found.problems else "whole, as far as it could be checked" if found.unchecked else "whole")


def unusual(recipe: object) -> object:
    """Of a recipe in onegraph.json its name, and the levers that the recipe of that name has otherwise."""
    from onegraph.quant.recipe import Recipe

    if not isinstance(recipe, dict) or "name" not in recipe:
        return recipe
    try:
        usual = json.loads(json.dumps(Recipe.preset(str(recipe["name"])).to_dict()))  # keys as JSON has them
    except ValueError:  # of another version, or somebody else's
        usual = {}
    return {key: value for key, value in recipe.items() if key == "name" or (key in usual and usual[key] != value)}


def phrase(value: object) -> str:
    """JSON from a file on one line: "name SmolLM2, revision 0a1b"."""
    if isinstance(value, dict):
        return one_line(", ".join(f"{key} {plain(item)}" for key, item in value.items()), 300)
    return one_line(plain(value), 300)


def plain(value: object) -> str:
    if isinstance(value, str):
        return value
    text = json.dumps(value, ensure_ascii=False)
    return f"({len(value)} entries)" if isinstance(value, dict | list) and len(text) > LONG else text
