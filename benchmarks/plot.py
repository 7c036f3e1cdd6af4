"""The pictures of docs/benchmarks, from raw lines that are named by id.

    python3 -m pip install matplotlib && python3 benchmarks/plot.py

Writes overview.svg (the README's), performance.svg, quality.svg and turboquant.svg. The background is transparent; the
ink follows the reader's colour scheme.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAGES = HERE.parent / "docs" / "benchmarks"
BANDWIDTH = 4.27e12  # bytes per second of a copy kernel on an H200
BODY, HEAD, EMBEDDING = 6.98e9, 0.525e9, 0.525e9  # weights of the Llama-3-8B shape
INK, OURS, PEER, OTHER = "#1f2328", "#d9480f", "#1c7ed6", "#2b8a3e"
DARK = {INK: "#e6edf3", OURS: "#ff922b", PEER: "#74c0fc", OTHER: "#69db7c"}
GRID = "#8b949e"  # legible on white and on black

# Contestant -> bits per weight -> id of a raw line
LINEAR = {
    "onegraph E8P": {
        2: "linear-e8p-4096x14336-2b-1t-0882",
        3: "linear-e8p-4096x14336-3b-1t-52bd",
        4: "linear-e8p-4096x14336-4b-1t-277b",
    },
    "humming-kernels 0.1.19, integers, group 128": {
        2: "linear-humming-g128-4096x14336-2b-1t-4420",
        3: "linear-humming-g128-4096x14336-3b-1t-df7c",
        4: "linear-humming-g128-4096x14336-4b-1t-b652",
    },
    "cuBLAS (torch 2.11), bf16": {16: "linear-torch-dense-4096x14336-16b-1t-7cc2"},
}
STEP = {
    "onegraph, 1k context": {
        2: "step-e8p-2-bit-llama-3-8b-2b-1x1024-captured-ddcb",
        3: "step-e8p-3-bit-llama-3-8b-3b-1x1024-captured-a394",
        4: "step-e8p-4-bit-llama-3-8b-4b-1x1024-captured-ace4",
    },
    "vLLM 0.33.0 with onegraph, 128 context": {
        2: "vllm-decode-e8p-2-head-4-llama-3-8b-1x128-c43f",
        4: "vllm-decode-e8p-4-head-4-llama-3-8b-1x128-ce36",
    },
    "vLLM 0.33.0, bf16, 128 context": {16: "vllm-decode-bf16-llama-3-8b-1x128-b550"},
}
QUALITY = {
    "onegraph E8P, recipe best": {
        2: "quality-best-2-5609",
        2.5: "quality-best-2.5-62ef",
        3: "quality-best-3-fcdd",
        4: "quality-best-4-5ac9",
    },
    "round to nearest, group 64": {2: "quality-rtn-2-c611", 3: "quality-rtn-3-1a44", 4: "quality-rtn-4-ad27"},
}
STORED = {"onegraph E8P, recipe best": 0.05, "round to nearest, group 64": 0.5}  # bits for scales, beside the rate
FORMATS = {  # the default recipe of a GPU
    "E8P": {
        2: "quality-good-2-fisher-2-ffd4",
        3: "quality-good-3-fisher-2-12d9",
        4: "quality-good-4-fisher-2-0008",
    },
    "trellis": {
        2: "quality-good-2-format-trellis-b21c",
        2.5: "quality-good-2.5-format-trellis-0d86",
        3: "quality-good-3-format-trellis-5453",
        3.5: "quality-good-3.5-format-trellis-6c93",
        4: "quality-good-4-format-trellis-b41d",
        5: "quality-good-5-format-trellis-80b2",
        6: "quality-good-6-format-trellis-388a",
        8: "quality-good-8-format-trellis-c4ad",
    },
}
KV_FILE = "turboquant-quality-cpu.jsonl"  # every line of it that has a KL


def rows() -> dict[str, dict[str, Any]]:
    """Every raw line by its id."""
    files = sorted((HERE / "results").glob("*.jsonl"))
    return {row["id"]: row for file in files for row in map(json.loads, file.read_text().splitlines())}


def values(chosen: dict[str, dict[Any, str]], field: str) -> dict[str, dict[Any, float]]:
    """Contestant -> bits -> the field of the chosen lines. Raises KeyError for an id that no line has."""
    found = rows()
    return {name: {bits: found[line][field] for bits, line in each.items()} for name, each in chosen.items()}


def step_bytes(bits: int, *, embedding: bool) -> float:
    """Bytes of the Llama-3-8B shape: the head has 4 bits beside E8P blocks; a step does not read the embedding."""
    head = HEAD * 2 if bits == 16 else HEAD / 2
    return BODY * bits / 8 + head + (EMBEDDING * 2 if embedding else 0)


def style() -> Any:
    import matplotlib as mpl
    import matplotlib.pyplot as plt

    mpl.use("svg")
    for key in ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "axes.titlecolor"):
        plt.rcParams[key] = INK
    plt.rcParams |= {"svg.hashsalt": "onegraph", "svg.fonttype": "none", "font.family": "sans-serif"}
    plt.rcParams |= {"axes.spines.top": False, "axes.spines.right": False, "savefig.transparent": True}
    plt.rcParams |= {"font.size": 10, "axes.titlesize": 11, "legend.fontsize": 9, "legend.frameon": False}
    return plt


def save(figure: Any, out: Path) -> None:
    """Writes the SVG with a style sheet: where the reader's scheme is dark, each colour has its lighter twin."""
    figure.savefig(out, metadata={"Date": None})
    rules = "".join(
        f'[style*="{what}: {light}"] {{ {what}: {dark} !important }} '
        for light, dark in DARK.items()
        for what in ("fill", "stroke")
    )
    sheet = f"<style>@media (prefers-color-scheme: dark) {{ {rules}}}</style>"
    text = out.read_text()
    at = text.index(" <defs>")
    lines = (text[:at] + f" {sheet}\n" + text[at:]).splitlines()
    out.write_text("\n".join(line.rstrip() for line in lines) + "\n")


def axis(axes: Any, which: str, ticks: Sequence[float], label: str, limits: tuple[float, float]) -> None:
    """A logarithmic axis with the ticks given, as plain numbers."""
    getattr(axes, f"set_{which}scale")("log")
    getattr(axes, f"set_{which}ticks")(ticks, [f"{tick:g}" for tick in ticks])
    getattr(axes, f"set_{which}label")(label)
    getattr(axes, f"set_{which}lim")(*limits)
    axes.minorticks_off()
    axes.grid(color=GRID, alpha=0.3, linewidth=0.6)


def line(axes: Any, points: dict[float, float], name: str, colour: str, label: str, shift: tuple[float, float]) -> None:
    """Points joined by a line, each with its value beside it; `label` formats a value."""
    axes.plot(list(points), list(points.values()), marker="o", markersize=5, color=colour, label=name, linewidth=1.8)
    for x, y in points.items():
        axes.annotate(label.format(y), (x, y), xytext=shift, textcoords="offset points", color=colour, fontsize=9,
                      ha="left" if shift[0] > 0 else "right" if shift[0] < 0 else "center")  # fmt: skip


def overview(plt: Any) -> Any:
    figure, (left, right) = plt.subplots(1, 2, figsize=(10.6, 4.4))
    found = values(STEP, "tokens_per_second")
    for (name, each), colour, shift in zip(
        found.items(), (OURS, OTHER, PEER), ((8, 4), (-8, -13), (-8, 4)), strict=True
    ):
        sized = {step_bytes(bits, embedding=True) / 1e9: rate for bits, rate in each.items()}
        line(left, sized, name, colour, "{:.0f}", shift)
    axis(left, "x", (3, 4, 6, 8, 12, 16), "size of the model, GB", (2.4, 18))
    axis(left, "y", (200, 300, 500, 700, 1000), "tokens per second, one sequence", (150, 1250))
    left.set_title("Speed: Llama-3-8B shape, one H200")
    left.legend(loc="lower left")
    found = values(QUALITY, "kl")
    for (name, each), colour, shift in zip(found.items(), (OURS, PEER), ((-8, -12), (8, 4)), strict=True):
        line(right, {bits + STORED[name]: kl for bits, kl in each.items()}, name, colour, "{:.3g}", shift)
    axis(right, "x", (2, 2.5, 3, 3.5, 4, 4.5), "bits stored per weight", (1.7, 5.3))
    axis(right, "y", (0.03, 0.1, 0.3, 1, 3, 10), "KL divergence, nats per token", (0.02, 20))
    right.set_title("Quality: SmolLM2-135M (lower is better)")
    right.legend(loc="upper right")
    figure.tight_layout()
    return figure


def performance(plt: Any) -> Any:
    figure, (left, right) = plt.subplots(1, 2, figsize=(10.6, 4.6))
    bits = (2, 3, 4, 16)
    for (name, each), colour, shift in zip(
        values(LINEAR, "us").items(), (OURS, OTHER, PEER), ((0, -15), (0, 7), (-8, 4)), strict=True
    ):
        line(left, each, name, colour, "{:.3g}", shift)
    roofline = [4096 * 14336 * b / 8 / BANDWIDTH * 1e6 for b in bits]
    left.plot(bits, roofline, "--", color=INK, linewidth=1, label="memory-bandwidth roofline")
    axis(left, "y", (3, 5, 10, 20, 40), "microseconds (lower is better)", (2.5, 75))
    left.set_title("Linear 4096 -> 14336, one token, H200")
    left.legend(loc="upper left")
    for (name, each), colour, shift in zip(
        values(STEP, "tokens_per_second").items(), (OURS, OTHER, PEER), ((0, 8), (0, -16), (-8, -4)), strict=True
    ):
        line(right, each, name, colour, "{:.0f}", shift)
    roofline = [BANDWIDTH / step_bytes(b, embedding=False) for b in bits]
    right.plot(bits, roofline, "--", color=INK, linewidth=1, label="memory-bandwidth roofline")
    axis(right, "y", (200, 500, 1000, 2000), "tokens per second (higher is better)", (80, 2900))
    right.set_title("Decode step, Llama-3-8B shape, batch 1, H200")
    right.legend(loc="lower left")
    for axes in (left, right):
        axis(axes, "x", bits, "bits per weight", (1.6, 19))
    figure.tight_layout()
    return figure


PLACES = {  # offset in points and alignment of labels that would lie on others
    "turboquant:4,mode=full": ((-7, 6), "right"),
    "turboquant:k3v4": ((-8, 6), "right"),
    "turboquant:k3v4,first=2,last=2": ((0, -16), "center"),
    "turboquant:k3v4,window=128": ((8, -8), "left"),
    "turboquant:4,keys=prod": ((-7, 6), "right"),
    "turboquant:k3v4,keys=prod": ((8, -11), "left"),
    "turboquant:4": ((-8, -3), "right"),
    "turboquant:4,window=128": ((-8, -5), "right"),
}


def quality(plt: Any) -> Any:
    figure, axes = plt.subplots(figsize=(9.2, 4.6))
    stored, found = values(FORMATS, "bpw"), values(FORMATS, "kl")
    for name, colour, shift in (("E8P", PEER, (8, 4)), ("trellis", OURS, (-8, -12))):
        points = {stored[name][bits]: kl for bits, kl in found[name].items()}
        line(axes, points, name, colour, "{:.3g}", shift)
    axis(axes, "x", (2, 2.5, 3, 3.5, 4, 5, 6, 8), "bits stored per weight", (1.8, 8.6))
    axis(axes, "y", (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1), "KL divergence, nats per token", (0.00013, 1.3))
    axes.set_title("SmolLM2-135M, recipe good, mean of four unrelated texts")
    axes.legend(loc="upper right")
    figure.tight_layout()
    return figure


def kv_rows() -> list[dict[str, Any]]:
    lines = (HERE / "results" / KV_FILE).read_text().splitlines()
    return [row for row in map(json.loads, lines) if "kl" in row]


def turboquant(plt: Any) -> Any:
    figure, axes = plt.subplots(figsize=(9.2, 5))
    kinds = {"hybrid": (OURS, "o", "window of exact tokens, mse"), "full": (PEER, "D", "no window (mode=full)")}
    kinds["prod"] = OTHER, "s", "unbiased inner products (prod)"
    named: set[str] = set()
    for row in kv_rows():
        kind = "prod" if "prod" in row["kv"] else "full" if "full" in row["kv"] else "hybrid"
        colour, marker, label = kinds[kind]
        times = row["exact_token_bytes"] / row["token_bytes"]
        how = {} if kind in named else {"label": label}
        named.add(kind)
        axes.errorbar(times, row["kl"], yerr=2 * row["kl_error"], fmt=marker, color=colour, **how)
        text = f"{row['kv'].removeprefix('turboquant:')}  ({100 * row['perplexity_increase']:+.2f} %)"
        shift, side = PLACES.get(row["kv"], ((8, 4), "left"))
        axes.annotate(text, (times, row["kl"]), xytext=shift, textcoords="offset points", color=colour, fontsize=9,
                      ha=side)  # fmt: skip
    axis(
        axes,
        "y",
        (0.005, 0.01, 0.02, 0.05, 0.1, 0.2),
        "KL divergence from exact attention, nats per token",
        (0.004, 0.25),
    )
    axes.set_xlim(2, 8.4)
    axes.set_xlabel("tokens per byte of KV cache, relative to bfloat16")
    axes.set_title("TurboQuant on SmolLM2-135M, 8,188 tokens; in brackets the change of perplexity")
    axes.legend(loc="upper left")
    figure.tight_layout()
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=PAGES, help="folder for the pictures (default: docs/benchmarks)")
    args = parser.parse_args()
    plt = style()
    for draw in (overview, performance, quality, turboquant):
        save(draw(plt), args.out / f"{draw.__name__}.svg")


if __name__ == "__main__":
    main()
