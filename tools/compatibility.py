"""The compatibility table of docs/reference/models.md, from family records, published configs and the tests.

    python -m tools compatibility            # prints it
    python -m tools compatibility --write    # puts it into docs/reference/models.md

A row is a published config of `tests/models/configs`; what it says is computed from the record of its family, from the
tensors that its config asks for, and from which tests name the family. Nothing is written by hand.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onegraph.models.config import LlamaConfig
    from onegraph.models.loader import Loader

ROOT = Path(__file__).parents[1]
PAGE, CONFIGS = ROOT / "docs" / "reference" / "models.md", ROOT / "tests" / "models" / "configs"
BEGIN, END = "<!-- compatibility: python -m tools compatibility --write -->", "<!-- /compatibility -->"
HEAD = "| model | `model_type` | as published | GPUs | 2 bits | 3 bits | 4 bits | TurboQuant | drafts | vLLM | tested |"


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("compatibility", help="the table of models, from records and tests")
    parser.add_argument("--write", action="store_true", help="put it into docs/reference/models.md")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    made = table()
    if args.write:
        PAGE.write_text(replaced(PAGE.read_text(), made))
    else:
        print(made)
    return 0


def replaced(page: str, made: str) -> str:
    """The page with the table between its two marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{made}\n{END}{after}"


def table() -> str:
    """All rows, by family and then size."""
    rows = [row(file) for file in sorted(CONFIGS.glob("*.json"))]
    rows.sort(key=lambda found: (found[0], found[1]))
    return "\n".join([HEAD, "|" + "---|" * HEAD.count(" | ") + "---|", *(text for _, _, text in rows)])


def row(file: Path) -> tuple[str, int, str]:
    """(family, weights, the row) of a published config."""
    import torch

    from onegraph.api.outline import described
    from onegraph.models.config import LlamaConfig
    from onegraph.models.loader import Loader
    from onegraph.models.wrapper import is_wrapper, text_config

    config = json.loads(file.read_text())
    dense = without_quantization(config)
    parsed = LlamaConfig.from_dict(dense)
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(dense))
        with described(Path(directory)) as checkpoint:
            loader = Loader(checkpoint, parsed, torch.bfloat16)
            sizes = {bits: quantized_bytes(loader, bits) for bits in (2, 3, 4)}
            gpus = [1, *(count for count in range(2, 9) if shares(loader, parsed, count))]
    kind = str(text_config(config)["model_type"])
    outer = f"{config['model_type']} ({kind})" if is_wrapper(config) else kind
    memory = (f"{size / 1e9:.3g} GB" for size in sizes.values())
    cells = [
        file.stem, f"`{outer}`", published(config), ", ".join(map(str, gpus)), *memory,
        "no: " + what if (what := parsed.exact_cache) else "yes" if parsed.latent is None else "`mode=full`, FP8",
        "yes" if parsed.traits.draft is not None and parsed.drafts else "",
        "yes" if kind in in_vllm() else "", tested(kind),
    ]  # fmt: skip
    return kind, sizes[4], "| " + " | ".join(cells) + " |"


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    dense = {key: value for key, value in config.items() if key != "quantization_config"}
    if isinstance(inside := dense.get("text_config"), dict):
        dense["text_config"] = {key: value for key, value in inside.items() if key != "quantization_config"}
    return dense


def published(config: Mapping[str, Any]) -> str:
    """The format of the weights that its files hold, which the parser reads."""
    from onegraph.models.config import LlamaConfig
    from onegraph.models.wrapper import text_config

    LlamaConfig.from_dict(config)
    told = text_config(config).get("quantization_config")
    names = {"fp8": "FP8", "mxfp4": "MXFP4"}
    return "bf16" if told is None else names.get(told["quant_method"], told["quant_method"])


def quantized_bytes(loader: Loader, bits: int) -> int:
    """What the weights take on a GPU with linears and experts in E8P; embedding, head and the rest in 16 bits. A tied
    head counts once."""
    parts, total = loader.parts, 0
    for name, (n, k, bias) in loader.layers().items():
        small = name in (parts.head, parts.embedding[0])
        total += 2 * n * k if small else math.ceil(bits_of(bits, n, k) / 8) + 4 * n * bias
    for stack in parts.stacks.values():
        total += stack.experts * math.ceil(bits_of(bits, stack.n, stack.k) / 8)
    return total + sum(2 * math.prod(shape) for shape, _ in parts.tensors.values())


@cache
def bits_of(bits: int, n: int, k: int) -> int:
    from onegraph.formats.e8p import E8P

    return E8P[bits].bits(n, k)


def shares(loader: Loader, config: LlamaConfig, count: int) -> bool:
    from onegraph.models.shares import check_ranks

    try:
        check_ranks(loader, config, count)
    except ValueError:
        return False
    return True


def tested(kind: str) -> str:
    """How: against transformers with a tiny random model, if `tests/models.py` or `test_wrapper.py` has one."""
    return "tiny random model" if kind in variants() else "config only"


@cache
def variants() -> frozenset[str]:
    """The model_types of the tiny models that every test of the decoder runs."""
    tiny, wrapped = of_tests("models", "VARIANTS"), of_tests("test_wrapper", "QWEN")
    return frozenset({kind_of(name) for name, _ in tiny.values()} | {kind_of(f"{name}Text") for name in wrapped})


@cache
def in_vllm() -> frozenset[str]:
    """The model_types that run inside vLLM in the tests that `make vllm` runs, by the variants that these name."""
    files = (ROOT / "tests" / "integrations" / "vllm").glob("test_*.py")
    text = "".join(file.read_text() for file in files if file.name != "test_gpu.py")
    tiny = of_tests("models", "VARIANTS")
    return frozenset(kind_of(name) for variant, (name, _) in tiny.items() if f'"{variant}"' in text)


def of_tests(module: str, name: str) -> Mapping[str, Any]:
    """A table of the tests."""
    for place in (ROOT / "tests", ROOT / "tests" / "models"):
        if str(place) not in sys.path:
            sys.path.append(str(place))
    found: Mapping[str, Any] = getattr(importlib.import_module(module), name)
    return found


def kind_of(name: str) -> str:
    """The model_type of a family of transformers."""
    import transformers

    return str(getattr(transformers, f"{name}Config").model_type)
