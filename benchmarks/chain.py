"""The linears between two attentions: one launch beside one for each linear, with attention between them and without.

    PYTHONPATH=src python3 benchmarks/chain.py --bits 2 3 4 --tokens 1 2 4 7 --out chain.jsonl

Layers of SmolLM2-135M with random codes, tokens of one row, each layer behind the other in one graph. A JSON line a
form; `error` is the last layer's ||qkv - truth|| / ||truth|| against float32.
"""

import argparse
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from kernels import replay_us
from torch import Tensor

from onegraph.engine.record import emit, machine
from onegraph.ops.cuda import e8p_chain as cuda
from onegraph.ops.decode_attention import _SMOL, paged_decode
from onegraph.ops.decode_attention import _case as attention_case
from onegraph.ops.e8p_chain import _case, e8p_chain

DEVICE = torch.device("cuda", 0)
FORMS = {"one launch": e8p_chain.overload, "four launches": cuda.one_by_one}
LAYERS = 30


def rounded(args: list[Any], dtype: torch.dtype) -> list[Any]:
    return [a.to(dtype) if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]


def error(chain: Callable[..., Any], args: list[Any]) -> float:
    truth = e8p_chain.reference(*rounded(args, torch.float32))[1].double()
    return float((chain(*args)[1].double() - truth).norm() / truth.norm())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bits", nargs="+", type=int, default=[2, 3, 4])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1])
    parser.add_argument("--out", type=Path, help="append the lines to this file")
    args = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    for bits, tokens in itertools.product(args.bits, args.tokens):
        about = {"layers": LAYERS, "tokens": tokens, **machine(DEVICE)}
        made = _case((1, tokens), 576, 576, 1536, 960, bits)
        layers = [list(made.make(DEVICE, torch.bfloat16, generator)) for _ in range(LAYERS)]
        between = attention_case("", positions=[137], counts=[tokens], tokens=tokens, **_SMOL)
        attentions = [list(between.make(DEVICE, torch.bfloat16, generator)) for _ in range(LAYERS)]

        def step(chain: Callable[..., Any], attend: bool, layers: Any = layers, attentions: Any = attentions) -> None:
            x, residual = layers[0][:2]
            for layer, (_, *attention) in zip(layers, attentions, strict=True):
                residual, qkv = chain(x, residual, *layer[2:])
                x = paged_decode.overload(qkv, *attention).view(x.shape) if attend else qkv[..., : x.shape[-1]]

        for name, chain in FORMS.items() if tokens <= cuda.MAX_TOKENS else (("four launches", cuda.one_by_one),):
            for attention in attentions:
                attention[-3] = name == "one launch"  # whether attention lets it start early
            for attend in (False, True):
                us = replay_us(lambda c=chain, a=attend: step(c, a), DEVICE, LAYERS)
                row = {"bench": "e8p_chain", "shape": "smollm2-135m", "name": name, "bits": bits, "attention": attend}
                row |= {"us_per_layer": round(us, 2), "error": round(error(chain, layers[-1]), 5), **about}
                emit(row, args.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
