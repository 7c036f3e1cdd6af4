"""What a TurboQuant KV cache costs a model: perplexity, KL and top-1 against exact attention, needles found.

    python benchmarks/turboquant_quality.py MODEL TEXT [--tokens 8192 --window 1024 --needle 0] SETTING... > lines.jsonl

Every query sees of earlier tokens what a decode step would. One JSON line a setting, with what it takes in bytes.
"""

import argparse
import time
from typing import Any

import torch
from torch import Tensor

from onegraph.api.needle import CODES, DEPTHS, retrieve
from onegraph.api.tokenizer import Tokenizer
from onegraph.cli.common import pick_device, pick_dtype, read_text
from onegraph.engine.evaluate import evaluate
from onegraph.engine.record import emit, machine
from onegraph.formats.checkpoint import Checkpoint
from onegraph.formats.turboquant import parse_kv
from onegraph.models.llama import Llama


class Remembered:
    """The exact model, each window of the text computed once for all settings."""

    def __init__(self, model: Llama) -> None:
        self.model, self.known = model, {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, tokens: Tensor, cache: Any) -> Tensor:
        key = tuple(tokens.flatten().tolist())
        if key not in self.known:
            self.known[key] = self.model(tokens, cache)
        return self.known[key]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("settings", nargs="+")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument(
        "--needle", type=int, default=0, help="look for needles in so many tokens in place of perplexity"
    )
    parser.add_argument("--needles", type=int, default=len(CODES), help="needles at each depth")
    args = parser.parse_args()

    device = pick_device("auto")
    text = read_text(args.text)
    reach = max(args.window, args.needle + 16)
    with Checkpoint.open(args.model) as checkpoint:
        tokenizer = Tokenizer(checkpoint)
        model = Llama.load(checkpoint, device, pick_dtype("auto", device), max_context=reach)
    ids = torch.tensor(tokenizer.encode(text)[: args.tokens])
    c, exact = model.config, Remembered(model)
    sizes = {"layers": c.layers, "kv_heads": c.kv_heads, "head_dim": c.head_dim}
    about = machine(device) | {"model": args.model.rsplit("/", 1)[-1]}
    for text_of_setting in args.settings:
        started = time.monotonic()
        kv = model.settled(parse_kv(text_of_setting))
        row = {"bench": "turboquant quality", "kv": text_of_setting, "full_kv": str(kv)}
        if kv is not None:
            row |= {"token_bytes": kv.token_bytes(**sizes), "sequence_bytes": kv.sequence_bytes(**sizes)}
        row["exact_token_bytes"] = 4 * c.layers * c.kv_heads * c.head_dim
        if args.needle:
            found = retrieve(model, tokenizer, text, args.needle, kv, args.needles)
            row |= {"context": args.needle, "depths": DEPTHS, "found": [sum(r) for r in found], "of": args.needles}
        else:
            row |= evaluate(model, ids, reference=exact, window=args.window, batch=args.batch, kv=kv).as_dict()
            row |= {"window": args.window, "perplexity_increase": row["perplexity"] / row["reference_perplexity"] - 1}
        emit(row | {"seconds": round(time.monotonic() - started, 1)} | about)


if __name__ == "__main__":
    main()
