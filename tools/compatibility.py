"""The compatibility table of docs/reference/models.md, from family records, published configs and the tests.

    python -m tools compatibility            # prints it
    python -m tools compatibility --write    # puts it into docs/reference/models.md

A row is a published config of `tests/models/configs`; what it says is computed from the record of its family, from the
tensors that its config asks for, from which tests name the family, and from the lines of `benchmarks/results`. Nothing
is written by hand.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import sys
from collections.abc import Mapping
from dataclasses import replace
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

    from onegraph.api.outline import table_entry
    from onegraph.formats.checkpoint import Checkpoint
    from onegraph.models.config import LlamaConfig
    from onegraph.models.loader import Loader
    from onegraph.models.wrapper import is_wrapper, text_config

    config = json.loads(file.read_text())
    dense = without_quantization(config)
    parsed = in_stacks(LlamaConfig.from_dict(dense))
    stacks = {name: table_entry(file, (), torch.bfloat16) for name in parsed.parts.stacks}
    loader = Loader(Checkpoint(file, dense, stacks), parsed, torch.bfloat16)
    sizes = {bits: quantized_bytes(loader, bits) for bits in (2, 3, 4)}
    gpus = [1, *(count for count in range(2, 9) if shares(loader, parsed, count))]
    kind = str(text_config(config)["model_type"])
    outer = f"{config['model_type']} ({kind})" if is_wrapper(config) else kind
    memory = (f"{size / 1e9:.3g} GB" for size in sizes.values())
    cells = [
        file.stem, f"`{outer}`", published(config), ", ".join(map(str, gpus)), *memory,
        "no: " + what if (what := parsed.exact_cache) else "yes" if parsed.latent is None else "`mode=full`, FP8",
        "yes" if parsed.traits.draft is not None and parsed.drafts else "",
        "yes" if kind in in_vllm() or f'"{config["model_type"]}"' in vllm_tests() else "",
        tested(kind, file.stem, parsed),
    ]  # fmt: skip
    return kind, sizes[4], "| " + " | ".join(cells) + " |"


def in_stacks(config: LlamaConfig) -> LlamaConfig:
    """With all experts of a layer in one tensor, as `quantize` writes them."""
    return config if config.routed is None else replace(config, routed=replace(config.routed, in_stacks=True))


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
    text = text_config(config)
    told = text.get("quantization_config")
    if told is None:  # without a dtype the config is not a file's
        return "bf16" if {"dtype", "torch_dtype"} & {*config, *text} else ""
    names = {"fp8": "FP8", "mxfp4": "MXFP4", "pack-quantized": "INT4"}
    form = told.get("format", told["quant_method"])
    return str(names.get(form, form))


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


def tested(kind: str, name: str, config: LlamaConfig) -> str:
    """How: a tiny model of its family, or of one with the same record, in `tests/models.py` or `test_wrapper.py`; all
    its weights, random, on a GPU; its own weights."""
    from onegraph.models.families import FAMILIES

    records = [FAMILIES[other] for other in variants() if other in FAMILIES]
    how = {
        "tiny": FAMILIES[kind] in records,
        "full size": any(same_weights(config, other) for other in at_full_size()),
        "real weights": any(f"{name}." in line.get("command", "") for line in results()),  # with a file's suffix
    }
    return ", ".join(what for what, is_so in how.items() if is_so) or "config only"


def same_weights(config: LlamaConfig, other: LlamaConfig) -> bool:
    if (config.layers, config.hidden_size) != (other.layers, other.hidden_size):
        return False  # the rest takes time
    ours, theirs = config.parts, other.parts
    return (ours.linears, ours.stacks) == (theirs.linears, theirs.stacks)


@cache
def at_full_size() -> tuple[LlamaConfig, ...]:
    """The shapes of `benchmarks/step.py` whose whole decode steps ran on a GPU."""
    from onegraph.models.config import LlamaConfig

    ran = {line["shape"] for line in results() if line["bench"] == "step" and line["device"].startswith("NVIDIA")}
    shapes = of_tests("step", "SHAPES")
    return tuple(in_stacks(LlamaConfig.from_dict(without_quantization(shapes[name]))) for name in sorted(ran))


@cache
def results() -> tuple[dict[str, Any], ...]:
    """All lines of `benchmarks/results`."""
    files = sorted((ROOT / "benchmarks" / "results").glob("*.jsonl"))
    return tuple(json.loads(line) for file in files for line in file.read_text().splitlines())


@cache
def variants() -> frozenset[str]:
    """The model_types of the tiny models that every test of the decoder runs."""
    tiny, wrapped = of_tests("models", "VARIANTS"), of_tests("test_wrapper", "QWEN")
    return frozenset({kind_of(name) for name, _ in tiny.values()} | {kind_of(f"{name}Text") for name in wrapped})


@cache
def vllm_tests() -> str:
    """The text of the tests that `make vllm` runs."""
    files = (ROOT / "tests" / "integrations" / "vllm").glob("test_*.py")
    return "".join(file.read_text() for file in files if file.name != "test_gpu.py")


@cache
def in_vllm() -> frozenset[str]:
    """The model_types that run inside vLLM in these tests, by the variants that they name. A family with the record of
    another (Kimi-K2) has no variant and is named itself."""
    text = vllm_tests()
    tiny = {variant: name for variant, (name, _) in of_tests("models", "VARIANTS").items()}
    tiny |= {name: f"{name}Text" for name in of_tests("test_wrapper", "QWEN")}
    return frozenset(kind_of(name) for variant, name in tiny.items() if f'"{variant}"' in text)


def of_tests(module: str, name: str) -> Mapping[str, Any]:
    """A table of the tests or benchmarks."""
    for place in (ROOT / "tests", ROOT / "tests" / "models", ROOT / "benchmarks"):
        if str(place) not in sys.path:
            sys.path.append(str(place))
    found: Mapping[str, Any] = getattr(importlib.import_module(module), name)
    return found


def kind_of(name: str) -> str:
    """The model_type of a family of transformers."""
    import transformers

    return str(getattr(transformers, f"{name}Config").model_type)
